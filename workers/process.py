"""The parent's handle of one worker.

It starts the worker, sends requests, receives replies, kills and closes.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections import deque
from typing import Any, NamedTuple

from rlstructs.workers import interrupts, loop, messages, pickling, start
from rlstructs.workers.arena import FORBIDDEN, Descriptor, open_pidfd
from rlstructs.workers.errors import (
    StartError,
    WorkerCrashed,
    WorkerError,
    WorkerTimeout,
    describe_exit,
    strip_traceback,
    suggest_next_step,
)
from rlstructs.workers.failures import Failure
from rlstructs.workers.logs import LogPipe
from rlstructs.workers.messages import Channel, Future, State, milliseconds_until

# Seconds to wait for an exit code: a fork server sends it a little after the pipe has ended.
EXIT_CODE_DELAY = 1.0
# Seconds from SIGTERM to SIGKILL, and from SIGKILL to the end of the process.
TERM_DELAY, KILL_DELAY = 0.5, 1.0


class StartOptions(NamedTuple):
    """How the workers of a pool are started.

    Attributes:
        shared: objects that each of them gets besides its requests.
        start_method: of multiprocessing.
        preload: modules that the fork server imports.
        name: of the processes, before the index.
        log: the end of the pipe to which workers write log records.
    """

    shared: tuple[Any, ...]
    start_method: str
    preload: tuple[str, ...]
    name: str
    log: Descriptor


class WorkerProcess:
    """One worker process and the pipe to it."""

    def __init__(self, index: int, options: StartOptions, timeout: float | None = None) -> None:
        self.index = index
        self.state = State.GONE
        self.last_request = "start"
        self.futures: deque[Future] = deque()  # requests without a reply, the oldest first
        # When the wait for its next reply began, in the time of `time.monotonic`.
        self.since = time.monotonic()
        self.channel, workers_end = Channel.pair()
        shared, start_method, preload, name, log = options
        dies_with_parent = start.dies_with_parent(start_method)
        try:
            with interrupts.block_sigint(), start.allow_children_of_daemons():
                self._process = start.new_process(
                    start_method,
                    preload,
                    timeout,
                    target=loop.run,
                    args=(index, workers_end, shared, log, open_pidfd(os.getpid()), dies_with_parent, os.getpid()),
                    name=f"{name}-{index}",
                    daemon=False,  # an environment may start processes of its own
                )
                self._process.start()
        except BaseException as error:
            self.channel.close()
            _raise_start_error(error, index, timeout)
            raise
        finally:
            workers_end.close()
        self.state = State.IDLE
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self._pidfd = open_pidfd(self.pid)
        self._is_released = False
        self._exit_code: int | None = None

    def sentinel(self) -> int:
        """Returns a descriptor that becomes readable when the process ends."""
        return self._process.sentinel if self._pidfd is None else self._pidfd.fileno()

    def send(self, request: Any, message: list[bytes] | None = None, deadline: float | None = None) -> list[Future]:
        """Sends a request; a busy worker answers in the order of its requests.

        Args:
            request: the request.
            message: the same request, pickled and framed by `messages.frame`; None to do that here.
            deadline: when to give up on a worker that does not read, in the time of `time.monotonic`.

        Returns:
            `request.n_replies` futures.

        Raises:
            WorkerCrashed: the worker is gone.
            TimeoutError: it does not read. If it has got a part of the request, it gets the rest with the next one, and
                its reply is ignored.
        """
        if self.state is State.GONE:
            raise self.make_crash_error()
        message = messages.frame(pickling.dumps(request)) if message is None else message
        previous, self.last_request = self.last_request, request.label
        futures = [Future(self.index, request.label) for _ in range(request.n_replies)]
        if not (self.futures and self.is_awaited):
            self.since = time.monotonic()
        n_before = len(self.futures)
        try:
            if self.channel.is_in_message:
                self.channel.send_rest(deadline, self.sentinel)
            # Before it is sent: otherwise its reply would be assigned to another request.
            self.futures.extend(futures)
            self.channel.send_framed(message, deadline, self.sentinel)
        except BaseException as failure:
            if len(self.futures) > n_before and self.channel.is_in_message and not isinstance(failure, EOFError):
                for each in futures:
                    each.end()  # its reply will come and be ignored
                self.state = State.BUSY
                raise
            while len(self.futures) > n_before:
                self.futures.pop()
            if not isinstance(failure, EOFError):
                raise
            self.last_request = f"{previous}, before {request.label}"
            error = self.make_crash_error()
            if self.futures:  # replies that it wrote before its end can still be read
                self.state = State.BUSY
            raise error from None
        self.state = State.BUSY
        return futures

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for a reply."""
        return any(not each.is_over for each in self.futures)

    def can_close(self) -> bool:
        """Whether a request to close would be read.

        It would if the pipe is not full and holds no incomplete request.
        """
        return self.state is not State.GONE and not self.channel.is_in_message and self.channel.can_send()

    def read_replies(self) -> list[tuple[Future, Any]] | None:
        """Reads what the worker has written, without waiting for the rest.

        None if there was nothing to read.

        Returns:
            What `take_replies` returns.

        Raises:
            EOFError: the worker is gone.
        """
        if self.state is not State.BUSY:
            return [] if self.channel.read_available() else None
        taken = self.channel.read_messages()
        return None if taken is None else self._assign(taken)

    def take_replies(self) -> list[tuple[Future, Any]]:
        """Returns the requests whose replies were read, each with its reply.

        An error stands for a reply that cannot be unpickled.
        """
        return self._assign(self.channel.take_messages()) if self.state is State.BUSY else []

    def _assign(self, taken: list[Any]) -> list[tuple[Future, Any]]:
        """Assigns messages to the oldest requests."""
        self.since = time.monotonic()  # even if there is none yet: a long reply comes in pieces
        replies = [(self.futures.popleft(), reply) for reply in taken]
        if not self.futures:
            self.state = State.IDLE
        return replies

    def await_close(
        self, deadline: float, with_earlier: bool = True, log: LogPipe | None = None
    ) -> list[BaseException]:
        """Reads replies until the worker ends or the deadline passes.

        Returns the exceptions among them.

        Args:
            deadline: in the time of `time.monotonic`.
            with_earlier: whether exceptions of requests before the one to close are returned, too.
            log: the pipe of log records, if it is to be read meanwhile: a closing worker waits a while for that.
        """
        errors: list[BaseException] = []
        poll = select.poll()
        if self.state is State.GONE:
            return errors
        # The sentinel, too: a program that an environment started may hold the pipe open.
        for fd in (self.channel.fileno(), self.sentinel()):
            poll.register(fd, select.POLLIN)
        if log is not None:
            poll.register(log.fileno(), select.POLLIN)
        try:
            while self.futures and (events := poll.poll(milliseconds_until(deadline))):
                if log is not None and log.fileno() in dict(events):
                    log.read()
                    if len(events) == 1:
                        continue
                replies = self.read_replies()
                if replies is None:
                    break
                for future, reply in replies:
                    if future.label != messages.Close.label and not with_earlier:
                        continue
                    if isinstance(reply, Failure):
                        errors.append(reply.to_exception(self.index, future.label))
                    elif isinstance(reply, Exception):
                        errors.append(reply)
        except EOFError:
            pass
        return errors

    def make_crash_error(self) -> WorkerCrashed:
        """Makes the error that describes the worker's end; marks it as gone."""
        self.state = State.GONE
        if not self._is_released:
            self._process.join(EXIT_CODE_DELAY)
            self._exit_code = self._process.exitcode
        code = self._exit_code
        return WorkerCrashed(
            f"worker {self.index} (pid {self.pid}) is gone: {describe_exit(code)}; last request: {self.last_request}",
            self.index,
            code,
        )

    def fail_futures(self, error: WorkerError) -> None:
        """Ends every request without a reply by the error."""
        while self.futures:
            self.futures.popleft().end(error=strip_traceback(error))

    def join(self, timeout: float) -> bool:
        """Waits up to `timeout` seconds for the process to end; True, too, after `release`."""
        if self._is_released:
            return True
        if self._pidfd is None:
            self._process.join(timeout)
            return self._process.exitcode is not None
        # Not by the exit code: it is set, too, when the fork server has ended and the worker has not.
        poll = select.poll()
        poll.register(self._pidfd.fileno(), select.POLLIN)
        return bool(poll.poll(timeout * 1000))

    def reap(self, timeout: float) -> None:
        """Waits up to `timeout` seconds for an ended process's exit code."""
        if not self._is_released:
            self._process.join(timeout)

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Sends a signal; does nothing if the process has ended."""
        if self._is_released:
            return
        try:
            if self._pidfd is None:
                os.kill(self.pid, signum)
                return
            try:  # a later process may have got this pid
                signal.pidfd_send_signal(self._pidfd.fileno(), signum)
            except OSError as error:
                if error.errno not in FORBIDDEN:
                    raise
                os.kill(self.pid, signum)
        except ProcessLookupError:
            return

    def release(self) -> None:
        """Closes the pipe and the process object. Idempotent."""
        with interrupts.defer_interrupt():  # a second call would not finish what an interrupt left undone
            if self._is_released:
                return
            self.state, self._is_released = State.GONE, True
            self.channel.close()
            if self._pidfd is not None:
                self._pidfd.close()
            self._exit_code = self._process.exitcode
            if self._exit_code is not None:
                self._process.close()
            else:  # the fork server, which sends exit codes, is gone or stopped
                start.forget_child(self._process)


def end_all(workers: list[WorkerProcess], patience: float = 0.0) -> None:
    """Waits for workers to end, kills the others, and releases all.

    Waits `patience` seconds, then sends SIGTERM, then SIGKILL.
    """
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


def _raise_start_error(error: BaseException, index: int, timeout: float | None) -> None:
    """Raises the WorkerError for an error of a start, if there is one."""
    if isinstance(error, TimeoutError):
        raise WorkerTimeout(f"worker {index} was not started within {timeout} s: {error}", index) from error
    if isinstance(error, (EOFError, OSError)):
        text = f"worker {index} could not be started: {error!r}{suggest_next_step(error)}"
        raise WorkerCrashed(text, index) from error
    if isinstance(error, StartError):
        text = f"worker {index} could not be started: {error}{suggest_next_step(error)}"
        raise WorkerCrashed(text, index) from error.__cause__
