"""Sends requests to workers, and takes their replies.

One wait serves all of them, under one deadline.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import util
from typing import Any

from rlstructs.workers import messages, pickling
from rlstructs.workers.errors import WorkerError, WorkerTimeout, check_owner, strip_traceback
from rlstructs.workers.failures import Failure
from rlstructs.workers.interrupts import defer_interrupt
from rlstructs.workers.logs import LogPipe
from rlstructs.workers.messages import Build, Call, Future, Post, Result, State, deadline_in, milliseconds_until
from rlstructs.workers.process import WorkerProcess


class Exchange:
    """The requests to the workers of a pool, and their replies.

    Args:
        workers: the workers by index; the pool replaces those that it restarts.
        log: the pipe of the workers' log records.
        timeout: seconds within which replies must come, None for no limit.

    Attributes:
        watch: polls the workers.
        late: the indexes of workers that missed a deadline and may still reply.
    """

    def __init__(self, workers: list[WorkerProcess], log: LogPipe, timeout: float | None) -> None:
        self.timeout, self.late = timeout, set[int]()
        self._workers, self._log, self.watch = workers, log, Watch(log)

    def send(
        self, workers: list[WorkerProcess], request: Build | Call | Post, message: list[bytes] | None = None
    ) -> list[Future]:
        """Sends a request to workers under one deadline.

        It fails for a worker that is gone, or that does not read.

        Args:
            workers: the receivers.
            request: the request.
            message: the same request, pickled and framed by `messages.frame`; None to do that here.

        Returns:
            `request.n_replies` futures for each worker, in the order of the workers.
        """
        message = messages.frame(pickling.dumps(request)) if message is None else message  # once for all
        deadline = deadline_in(self.timeout)
        futures: list[Future] = []
        for worker in workers:
            try:
                futures += worker.send(request, message, deadline)
            except (WorkerError, TimeoutError) as error:
                if worker.channel.is_in_message:
                    self.late.add(worker.index)
                failure = strip_traceback(self._explain_unread(worker, request, error))
                futures += [Future(worker.index, request.label, True, None, failure) for _ in range(request.n_replies)]
        return futures

    def settle(
        self, futures: Sequence[Future], n: int | None = None, timeout: float | None = None, fails_fast: bool = False
    ) -> None:
        """Waits for replies; see `WorkerPool.settle`."""
        self._take_read_replies()
        for each in futures:
            if not each.is_over:
                each.error = None  # of an earlier wait that was too short
        deadline = None if timeout is None else deadline_in(timeout)
        late: list[WorkerProcess] = []
        while busy := self._find_awaited(futures, n, fails_fast):
            if deadline is None and self.timeout is None:
                self._wait(None, busy)
                continue
            now = time.monotonic()
            is_past = deadline is not None and now >= deadline
            late = busy if is_past else self._find_overdue(busy, now)
            in_time = [worker for worker in busy if worker not in late]
            # Even if all are late, polls once more after `now`: a reply that came in time counts, however late it
            # is read.
            if not self._wait(deadline if in_time else now, in_time) and late and (fails_fast or not in_time):
                self._fail_late(futures, late, timeout if is_past else self.timeout)
                return
        if late:
            self._fail_late(futures, late, self.timeout)

    def is_settled(self, futures: Sequence[Future], n: int | None = None, fails_fast: bool = False) -> bool:
        """Whether `settle` would return at once."""
        now = time.monotonic()
        self.drain()
        busy = self._find_awaited(futures, n, fails_fast)
        return len(busy) == len(self._find_overdue(busy, now))

    def drain(self) -> None:
        """Reads everything that has arrived."""
        self._take_read_replies()
        while self.watch.wait(time.monotonic(), self._read) and self.find_busy():
            pass
        self._log.deliver()

    def find_busy(self) -> list[WorkerProcess]:
        """Returns the workers whose reply is awaited."""
        return [worker for worker in self._workers if worker.state is State.BUSY]

    def _find_awaited(self, futures: Sequence[Future], n: int | None, fails_fast: bool) -> list[WorkerProcess]:
        """Returns the workers whose replies are still missing; none if enough have come."""
        indexes: list[int] = []
        for each in futures:
            if fails_fast and each.error is not None:
                return []
            if not each.is_over and each.index not in indexes:
                indexes.append(each.index)
        if n is not None and sum([each.is_over for each in futures]) >= n:
            return []
        return [self._workers[index] for index in indexes]

    def _find_overdue(self, workers: list[WorkerProcess], now: float) -> list[WorkerProcess]:
        """Returns the workers that took longer than the timeout."""
        if self.timeout is None:
            return []
        return [worker for worker in workers if now >= worker.since + self.timeout]

    def _fail_late(self, futures: Sequence[Future], late: list[WorkerProcess], timeout: float | None) -> None:
        """Ends the wait for late workers by an error that names them."""
        late = [worker for worker in late if worker.state is State.BUSY]
        missing = [each for each in futures if not each.is_over and self._workers[each.index] in late]
        if missing:
            names = ", ".join(f"{worker.index} (pid {worker.pid})" for worker in late)
            text = f"no reply within {timeout} s to {late[0].last_request!r} from worker(s) {names}"
            error = WorkerTimeout(text, late[0].index)
            for each in missing:
                each.error = error
                self.late.add(each.index)

    def _wait(self, deadline: float | None, workers: list[WorkerProcess]) -> bool:
        """Waits for the first replies and reads them.

        False if none came by the deadline, or by a worker's own deadline.
        """
        if self.timeout is not None and workers:
            due = min(worker.since for worker in workers) + self.timeout
            deadline = due if deadline is None else min(due, deadline)
        has_come = self.watch.wait(deadline, self._read)
        if self._log.records:
            self._log.deliver()
        return has_come

    def _take_read_replies(self) -> None:
        """Takes the replies that were read while a request was sent."""
        for worker in self._workers:
            if worker.state is State.BUSY and worker.channel.unread and worker.channel.has_message():
                with defer_interrupt():
                    self._end_futures(worker.take_replies())
                    self._log.read()

    def _read(self, index: int, is_pipe: bool) -> None:
        """Reads what a worker has written, without waiting for the rest."""
        worker = self._workers[index]
        try:
            while (replies := worker.read_replies()) is not None:
                self._end_futures(replies)
                if is_pipe:
                    return
            if is_pipe:  # another thread has read the reply
                return
        except EOFError:
            pass
        error = worker.make_crash_error()  # it has ended, and all its replies are read
        self._log.read_all()
        worker.fail_futures(error)
        self.watch.forget(worker)

    def _end_futures(self, replies: list[tuple[Future, Any]]) -> None:
        """Ends each future by its reply."""
        for future, reply in replies:
            self.late.discard(future.index)
            if isinstance(reply, bytes):
                future.end(reply)
            elif isinstance(reply, Failure):
                future.end(error=reply.to_exception(future.index, future.label))
            elif isinstance(reply, Exception):  # the reply cannot be unpickled
                future.end(error=reply)
            else:
                assert isinstance(reply, Result)
                future.end(reply.value)

    def _explain_unread(self, worker: WorkerProcess, request: Build | Call | Post, error: Exception) -> WorkerError:
        """Makes the error for a request that was not read."""
        if isinstance(error, WorkerError):
            return error
        text = f"worker {worker.index} (pid {worker.pid}) has not read {request.label!r} within {self.timeout} s"
        return WorkerTimeout(text, worker.index)


class Watch:
    """A poll over the workers' pipes and sentinels, and their log pipe.

    Replies are read under its lock: a thread that ends the watch waits for a reply that is being read.
    """

    def __init__(self, log: LogPipe) -> None:
        self._poll, self._log = select.poll(), log
        self._index_of: dict[int, tuple[int, bool]] = {}
        self._log_fd: int | None = None
        self._owner_pid = os.getpid()
        # An RLock: a signal handler may end the watch while its own thread reads.
        self._lock, self._is_over, self._n_waiting = threading.RLock(), False, 0
        with defer_interrupt():  # nothing would close the pipe before it has a finalizer
            wake_reader, self._wake_writer = os.pipe()
            self._close_pipe = util.Finalize(self, _close_all, args=((wake_reader, self._wake_writer),))
        self._poll.register(wake_reader, select.POLLIN)

    def add(self, worker: WorkerProcess) -> None:
        """Starts to watch a worker.

        Raises:
            WorkerError: the watch is over.
        """
        with self._lock:
            self._check_not_over()
            # The order of registration is the order of events: a worker's last replies are read before its end.
            for fd, is_pipe in ((worker.channel.fileno(), True), (worker.sentinel(), False)):
                self._poll.register(fd, select.POLLIN)
                self._index_of[fd] = worker.index, is_pipe
            # The log must stay the last: it is read after a reply, so that it holds what was logged before the reply.
            if self._log_fd is not None:
                self._poll.unregister(self._log_fd)
            self._log_fd = self._log.fileno()
            self._poll.register(self._log_fd, select.POLLIN)

    def forget(self, worker: WorkerProcess) -> None:
        """Stops watching a worker."""
        with defer_interrupt():  # if interrupted halfway, a second call would raise
            for fd in [fd for fd, (index, _) in self._index_of.items() if index == worker.index]:
                self._poll.unregister(fd)
                del self._index_of[fd]

    def wait(self, deadline: float | None, read: Callable[[int, bool], None]) -> bool:
        """Waits for the first events and reads them.

        False if only log records, or nothing, came in time.

        Args:
            deadline: in the time of `time.monotonic`; None for no deadline.
            read: called for each worker that has replied or ended: its index, and True if its pipe is readable.

        Raises:
            WorkerError: see `check`.
        """
        if os.getpid() != self._owner_pid:  # before the lock: in a forked copy it may be locked for ever
            check_owner(self._owner_pid)
        with self._lock:
            self._check_not_over()
            self._n_waiting += 1
        is_waiting = True
        try:
            events = self._poll.poll(None if deadline is None else milliseconds_until(deadline))
            with defer_interrupt(), self._lock:  # a reply that was read but not kept would be awaited for ever
                is_waiting = False
                self._stop_waiting()
                self._check_not_over()
                for fd, _ in events:
                    if fd in self._index_of:  # `read` forgets a worker that has ended, with both its descriptors
                        read(*self._index_of[fd])
                    elif fd == self._log_fd:
                        self._log.read()
        finally:
            if is_waiting:
                with defer_interrupt(), self._lock:
                    self._stop_waiting()
        has_come = len(events) > 1 or (len(events) == 1 and events[0][0] != self._log_fd)
        return has_come or deadline is None or time.monotonic() < deadline

    def _stop_waiting(self) -> None:
        self._n_waiting -= 1
        if self._is_over and not self._n_waiting:
            self._close_pipe()

    def end(self) -> None:
        """Ends the waits of other threads and all later ones. Idempotent."""
        with self._lock, defer_interrupt():
            if self._is_over:
                return
            self._is_over = True
            if self._n_waiting:
                os.write(self._wake_writer, b"\0")
            else:
                self._close_pipe()

    def check(self) -> None:
        """Raises WorkerError if the watch is over, or in a forked process."""
        check_owner(self._owner_pid)
        self._check_not_over()

    def _check_not_over(self) -> None:
        if self._is_over:
            raise WorkerError("the workers were closed while a reply was waited for")


def _close_all(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)
