"""File descriptors: sends them to a child while it starts, and checks that enough are left."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

from rlstructs.workers.errors import WorkerError
from rlstructs.workers.interrupts import defer_interrupt

# Descriptors that this process keeps open for each worker: its pipe, two of its process object, and its pidfd. The
# second number is how many more it needs while the last worker starts, for the fork server, too.
PER_WORKER, WHILE_STARTING = 4, 12
# The errors of a system call that a sandbox forbids, or that the kernel lacks.
FORBIDDEN = errno.EPERM, errno.EACCES, errno.ENOSYS


class Descriptor:
    """Owns a file descriptor; pickling it into a starting process duplicates it there."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd

    def fileno(self) -> int:
        if self._fd is None:
            raise ValueError("the file descriptor is closed")
        return self._fd

    def close(self) -> None:
        with defer_interrupt():  # closing it twice might close another file that has got its number
            if self._fd is not None:
                fd, self._fd = self._fd, None
                os.close(fd)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # `os` may be gone when a program ends
        if self._fd is not None:
            close(self._fd)

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive_descriptor, (reduction.DupFd(self.fileno()),)


def open_pidfd(pid: int) -> Descriptor | None:
    """Opens a descriptor that becomes readable when a process ends; None if it has ended, or where there is none."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return Descriptor(os.pidfd_open(pid))
    except OSError as error:
        if error.errno not in (errno.ESRCH, *FORBIDDEN):
            raise
        return None


def check_enough(n_workers: int) -> None:
    """Raises WorkerError if this process may not open enough descriptors for `n_workers` more workers."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    with contextlib.suppress(OSError):  # there is no /proc
        left = limit - len(os.listdir("/proc/self/fd"))
        needed = PER_WORKER * n_workers + WHILE_STARTING
        if limit != resource.RLIM_INFINITY and needed > left:
            raise WorkerError(
                f"{n_workers} workers need {needed} file descriptors, {left} of {limit} are left: raise the limit "
                "RLIMIT_NOFILE (ulimit -n), or start fewer workers"
            )


def _receive_descriptor(duplicate: Any) -> Descriptor:
    fd = duplicate.detach()
    os.set_inheritable(fd, False)  # programs that an environment starts must not have it
    return Descriptor(fd)
