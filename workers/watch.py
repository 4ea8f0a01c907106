"""Waits for the first worker that replies or ends, unless another thread ends the waiting."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from multiprocessing import util

from rlstructs.workers.channel import milliseconds_until
from rlstructs.workers.errors import WorkerError, check_owner
from rlstructs.workers.interrupts import defer_interrupt
from rlstructs.workers.process import WorkerProcess
from rlstructs.workers.settings.log_records import LogPipe


class Watch:
    """One poll over the workers' pipes and sentinels and over the pipe of their log records.

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
        """Waits for the first events and reads them; False if only log records, or nothing, came in time.

        Args:
            deadline: in the time of `time.monotonic`; None for no deadline.
            read: called for each worker that has replied or ended: its index, and True if its pipe is readable.

        Raises:
            WorkerError: see `check`.
        """
        check_owner(self._owner_pid)  # before the lock: in a forked copy it may be locked for ever
        with self._lock:
            self._check_not_over()
            self._n_waiting += 1
        is_waiting = True
        try:
            events = self._poll.poll(milliseconds_until(deadline))
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
        """Raises WorkerError if the watch is over, and in a forked copy of the process that made it."""
        check_owner(self._owner_pid)
        self._check_not_over()

    def _check_not_over(self) -> None:
        if self._is_over:
            raise WorkerError("the workers were closed while a reply was waited for")


def _close_all(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)
