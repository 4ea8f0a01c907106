"""Waiting for whichever worker replies or ends first, until another thread says that it is over."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable
from multiprocessing import util

from workers.channel import milliseconds
from workers.errors import WorkerError, check_owner
from workers.interrupts import uninterrupted
from workers.process import WorkerProcess
from workers.settings.log_records import LogPipe


class Watch:
    """One poll over the pipes and sentinels of workers, and over the pipe through which their log records come.

    Replies are read under its lock: a thread that ends the watch lets whoever reads one be through with it.
    """

    def __init__(self, log: LogPipe) -> None:
        self._poll, self._log = select.poll(), log
        self._index_of: dict[int, tuple[int, bool]] = {}
        self._made_by = os.getpid()
        # A signal handler may end the watch while its thread reads.
        self._lock, self._is_over, self._n_waiting = threading.RLock(), False, 0
        with uninterrupted():  # until somebody is to close it
            woken, self._wakes = os.pipe()
            self._close_pipe = util.Finalize(self, _close_all, args=((woken, self._wakes),))
        self._poll.register(woken, select.POLLIN)

    def add(self, worker: WorkerProcess) -> None:
        """Watches a worker too.

        Raises:
            WorkerError: the watch is over.
        """
        with self._lock:
            self._check_going_on()
            # In this order, which is that of events: what a worker has written is read before its end is told.
            for fd, is_pipe in ((worker.channel.fileno(), True), (worker.sentinel(), False)):
                self._poll.register(fd, select.POLLIN)
                self._index_of[fd] = worker.index, is_pipe
            # Behind all of these, each time: what was logged before a reply is there when that is.
            with contextlib.suppress(KeyError):
                self._poll.unregister(self._log.fileno())
            self._poll.register(self._log.fileno(), select.POLLIN)

    def forget(self, worker: WorkerProcess) -> None:
        """Watches a worker no more."""
        with uninterrupted():  # what is unregistered once and still known could not be forgotten again
            for fd in [fd for fd, (index, _) in self._index_of.items() if index == worker.index]:
                self._poll.unregister(fd)
                del self._index_of[fd]

    def wait(self, deadline: float | None, read: Callable[[int, bool], None]) -> bool:
        """Reads what comes first; False when nothing, or nothing but log records, came before the deadline.

        Args:
            deadline: in the time of `time.monotonic`; None for none.
            read: called with the index of each worker that has replied or ended, and whether its pipe says so.

        Raises:
            WorkerError: as `check`.
        """
        check_owner(self._made_by)  # before the lock, which the other may have held as it was copied
        with self._lock:
            self._check_going_on()
            log = self._log.fileno()
            self._n_waiting += 1
        try:
            events = self._poll.poll(milliseconds(deadline))
        finally:
            with uninterrupted(), self._lock:
                self._n_waiting -= 1
                if self._is_over and not self._n_waiting:
                    self._close_pipe()
        with self._lock:
            self._check_going_on()
            with uninterrupted():  # a reply that was read and not kept would be waited for, for ever
                for fd, _ in events:
                    if fd in self._index_of:  # or the same worker's other descriptor has told of its end
                        read(*self._index_of[fd])
                    elif fd == log:
                        self._log.read()
        has_come = len(events) > 1 or (len(events) == 1 and events[0][0] != log)
        return has_come or deadline is None or time.monotonic() < deadline

    def end(self) -> None:
        """Ends the waiting of other threads, and all to come."""
        with self._lock, uninterrupted():
            if self._is_over:
                return
            self._is_over = True
            if self._n_waiting:
                os.write(self._wakes, b"\0")
            else:
                self._close_pipe()

    def check(self) -> None:
        """Raises WorkerError if the watch is over, or kept by the process that this one is a forked copy of."""
        check_owner(self._made_by)
        self._check_going_on()

    def _check_going_on(self) -> None:
        if self._is_over:
            raise WorkerError("the workers were closed while a reply was waited for")


def _close_all(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)
