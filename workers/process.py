"""The parent's handle of one worker: start, request, receive, kill, close."""

from __future__ import annotations

import errno
import os
import select
import signal
import time
from collections import deque
from typing import Any

from workers import interrupts, loop, messages, pickling, start
from workers.channel import Channel, milliseconds
from workers.descriptors import Descriptor
from workers.errors import WorkerCrashed, WorkerTimeout, describe_exit
from workers.failures import Failure
from workers.messages import Asked, State
from workers.settings.log_records import LogPipe
from workers.start_errors import StartError, suggest_next_step

# Seconds. Under forkserver the exit code comes a little later than the end of the pipe.
EXIT_CODE_DELAY = 1.0
# Seconds from SIGTERM to SIGKILL, then to be reaped.
TERM_DELAY, KILL_DELAY = 0.5, 1.0
# Set by `benchmarks/rollouts.py --contract`, to measure what watching and counting cost by leaving them out.
BARE = "RLSTRUCTS_BARE"


class WorkerProcess:
    """One worker process and the pipe to it."""

    def __init__(
        self,
        index: int,
        shared: tuple[Any, ...],
        start_method: str,
        preload: tuple[str, ...],
        name: str,
        log: Descriptor,
        timeout: float | None = None,
    ) -> None:
        self.index = index
        self.state = State.GONE
        self.last_request = "start"
        self.asked: deque[Asked] = deque()  # what it has not replied to, the oldest first
        # Since when its next reply is waited for, in the time of `time.monotonic`.
        self.since = time.monotonic()
        self._is_whole = True
        self.channel, theirs = Channel.pair()
        try:
            with interrupts.sigint_blocked(), start.allow_children_of_daemons():
                self._process = start.new_process(
                    start_method,
                    preload,
                    timeout,
                    target=loop.run,
                    args=(index, theirs, shared, log, _main_process(), start.dies_with_parent(start_method)),
                    name=f"{name}-{index}",
                    daemon=False,  # an environment may start processes of its own
                )
                self._process.start()
        except BaseException as error:
            self.channel.close()
            if isinstance(error, TimeoutError):
                raise WorkerTimeout(f"worker {index} was not started within {timeout} s: {error}", index) from error
            if isinstance(error, (EOFError, OSError)):
                words = f"worker {index} could not be started: {error!r}{suggest_next_step(error)}"
                raise WorkerCrashed(words, index) from error
            if isinstance(error, StartError):
                words = f"worker {index} could not be started: {error}{suggest_next_step(error)}"
                raise WorkerCrashed(words, index) from error.__cause__
            raise
        finally:
            theirs.close()
        self.state = State.IDLE
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self._pidfd = _pidfd(self.pid)
        self._is_released = False
        self._exit_code: int | None = None

    def sentinel(self) -> int:
        """A descriptor that becomes readable when the process ends."""
        return self._process.sentinel if self._pidfd is None else self._pidfd.fileno()

    def send(
        self, request: Any, message: list[bytes] | None = None, deadline: float | None = None, is_kept: bool = False
    ) -> Asked:
        """Sends a request; a busy worker answers in the order of its requests.

        Args:
            request: what to do.
            message: as `messages.framed` gives it, if it is made already.
            deadline: when to give up on a worker that does not read, in the time of `time.monotonic`.
            is_kept: whether the reply is to be kept in what is returned.

        Raises:
            WorkerCrashed: the worker is gone.
            TimeoutError: it does not read.
        """
        if self.state is State.GONE:
            raise self.crashed()
        message = messages.framed(pickling.dumps(request)) if message is None else message
        previous, self.last_request = self.last_request, request.label
        asked = Asked(self.index, request.label, is_kept)
        if not self.asked:
            self.since = time.monotonic()
        # Before it is sent: a reply without its request would be taken for another's.
        self.asked.extend([asked] * request.n_replies)
        self._is_whole = False
        try:
            self.channel.send_framed(message, deadline, self.sentinel)
        except (EOFError, TimeoutError) as failure:
            for _ in range(request.n_replies):
                self.asked.pop()
            if isinstance(failure, TimeoutError):
                raise
            self.last_request = f"{previous}, before {request.label}"
            error = self.crashed()
            if self.asked:  # what it has written before its end is still to be read
                self.state = State.BUSY
            raise error from None
        self.state, self._is_whole = State.BUSY, True
        return asked

    def can_close(self) -> bool:
        """Whether a request to close would be read: the pipe is not full, and no half message lies in it."""
        return self.state is not State.GONE and self._is_whole and self.channel.can_send()

    def receive(self) -> tuple[Asked, Any]:
        """A reply that has been read: to what, and the reply or why it cannot be unpickled."""
        reply: Any
        try:
            reply = self.channel.receive()
        except Exception as error:  # a reply all the same
            reply = error
        asked = self.asked.popleft()
        self.since = time.monotonic()
        if not self.asked:
            self.state = State.IDLE
        return asked, reply

    def await_close(
        self, deadline: float, with_earlier: bool = True, log: LogPipe | None = None
    ) -> list[BaseException]:
        """What it raises as it closes, or `with_earlier` has raised before; reads replies until it ends or is late.

        Reads what comes through `log`, too: a worker that ends waits for that, for a while.
        """
        errors: list[BaseException] = []
        poll = select.poll()
        if self.state is State.GONE:
            return errors
        for fd in (self.channel.fileno(), self.sentinel()):  # the pipe may live on in a program of an environment
            poll.register(fd, select.POLLIN)
        if log is not None:
            poll.register(log.fileno(), select.POLLIN)
        try:
            while self.asked and (events := poll.poll(milliseconds(deadline))):
                if log is not None and log.fileno() in dict(events):
                    log.read()
                    if len(events) == 1:
                        continue
                if not self.channel.arrive():
                    break
                while self.channel.has_read():
                    asked, reply = self.receive()
                    if asked.label != messages.Close.label and not with_earlier:
                        continue
                    if isinstance(reply, Failure):
                        errors.append(reply.to_exception(self.index, asked.label))
                    elif isinstance(reply, Exception):
                        errors.append(reply)
        except EOFError:
            pass
        return errors

    def crashed(self) -> WorkerCrashed:
        """The error that says how this worker ended."""
        self.state = State.GONE
        if not self._is_released:
            self._process.join(EXIT_CODE_DELAY)
            self._exit_code = self._process.exitcode
        code = self._exit_code
        return WorkerCrashed(
            f"worker {self.index} (pid {self.pid}) is gone: {describe_exit(code)}; "
            f"last request: {self.last_request}",
            self.index,
            code,
        )

    def join(self, timeout: float) -> bool:
        """Waits `timeout` seconds for the process to end; whether it has, or is no longer ours to end."""
        if self._is_released:
            return True
        if self._pidfd is None:
            self._process.join(timeout)
            return self._process.exitcode is not None
        # Not by the exit code: it says that a worker has ended when only the fork server has.
        poll = select.poll()
        poll.register(self._pidfd.fileno(), select.POLLIN)
        return bool(poll.poll(timeout * 1000))

    def reap(self, timeout: float) -> None:
        """Waits `timeout` seconds for the exit code of a process that has ended."""
        if not self._is_released:
            self._process.join(timeout)

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Sends a signal; nothing happens when the process has ended."""
        if self._is_released:
            return
        try:
            if self._pidfd is None:
                os.kill(self.pid, signum)
            else:  # a pid may have been given to another process since
                signal.pidfd_send_signal(self._pidfd.fileno(), signum)
        except ProcessLookupError:
            return

    def release(self) -> None:
        """Lets go of the pipe and of the process object. Idempotent."""
        with interrupts.uninterrupted():  # what is left half done nobody does again
            if self._is_released:
                return
            self.state, self._is_released = State.GONE, True
            self.channel.close()
            if self._pidfd is not None:
                self._pidfd.close()
            self._exit_code = self._process.exitcode
            if self._exit_code is not None:
                self._process.close()
            else:  # the fork server, which would tell it, is gone or stopped
                start.forget_child(self._process)


def end_all(workers: list[WorkerProcess], patience: float = 0.0) -> None:
    """Ends those that have not ended within `patience` seconds, SIGTERM first, and lets go of all."""
    deadline = time.monotonic() + patience
    left = [worker for worker in workers if not worker.join(max(0.0, deadline - time.monotonic()))]
    for signum, delay in ((signal.SIGTERM, TERM_DELAY), (signal.SIGKILL, KILL_DELAY)):
        for worker in left:
            worker.kill(signum)
        deadline = time.monotonic() + delay
        left = [worker for worker in left if not worker.join(max(0.0, deadline - time.monotonic()))]
    deadline = time.monotonic() + EXIT_CODE_DELAY
    for worker in workers:
        if worker not in left:
            worker.reap(max(0.0, deadline - time.monotonic()))
        worker.release()


def _main_process() -> Descriptor | None:
    return None if BARE in os.environ else _pidfd(os.getpid())


def _pidfd(pid: int) -> Descriptor | None:
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return Descriptor(os.pidfd_open(pid))
    except OSError as error:
        # It has ended already, as its own sentinel says; or a sandbox does not allow it, as if the kernel had it not.
        if error.errno not in (errno.ESRCH, errno.EPERM, errno.EACCES, errno.ENOSYS):
            raise
        return None
