"""File descriptors: one that travels to a child while it is being started, and whether there are enough."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

from workers.errors import WorkerError
from workers.interrupts import uninterrupted

# What a worker holds open here: its pipe, the two ends that its process object keeps, and its pidfd; and
# what more there is while the last one starts, the fork server included.
PER_WORKER, WHILE_STARTING = 4, 12


class Descriptor:
    """Owns a file descriptor; pickled into a starting process, it is a duplicate there."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd

    def fileno(self) -> int:
        if self._fd is None:
            raise ValueError("the file descriptor is closed")
        return self._fd

    def close(self) -> None:
        with uninterrupted():  # closed twice, it may be the number of somebody else's file
            if self._fd is not None:
                fd, self._fd = self._fd, None
                os.close(fd)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # as a program ends, `os` may be gone before
        if self._fd is not None:
            close(self._fd)

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self.fileno()),)


def check_enough(n_workers: int) -> None:
    """Raises WorkerError, before anything is started, if so many workers need more than this process may open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    with contextlib.suppress(OSError):  # no /proc
        left = limit - len(os.listdir("/proc/self/fd"))
        needed = PER_WORKER * n_workers + WHILE_STARTING
        if limit != resource.RLIM_INFINITY and needed > left:
            raise WorkerError(
                f"{n_workers} workers need {needed} file descriptors, {left} of {limit} are left: raise the limit "
                "RLIMIT_NOFILE (ulimit -n), or start fewer workers"
            )


def _received(duplicate: Any) -> Descriptor:
    fd = duplicate.detach()
    os.set_inheritable(fd, False)  # it is not for programs that an environment starts
    return Descriptor(fd)
