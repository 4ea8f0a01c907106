"""What our fork server does before it serves: imports the preload, and says what went wrong with that.

The end of the server's pipe alone would not end it: a forked child of the main process holds it open. So it watches
the main process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import warnings
from multiprocessing import forkserver
from typing import Any

from workers import loop
from workers.failures import Failure
from workers.pickling import dumps

# Ends the name of a module in what the server reports: the one that it imports now.
IMPORTING = b"\0"
# Bytes, of the 64 KiB that a pipe holds.
MOST = 60_000


def prepare(report: int, preload: list[str]) -> None:
    """Makes this process ready to fork workers; ends it, if a module of the preload raises.

    Args:
        report: a descriptor to which goes the name of each module before it is imported, and what raises.
        preload: modules; one that is not found is left to the worker that needs it.
    """
    os.environ.update(dict.fromkeys(loop.THREAD_VARIABLES, "1"))  # before torch and numpy read them
    # The watching thread does nothing but wait, so forking beside it is safe.
    warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
    os.set_inheritable(report, False)
    try:
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):  # a sandbox may not allow it
                loop.end_with(os.pidfd_open(os.getppid()))
        for name in preload:
            os.write(report, name.encode() + IMPORTING)
            with contextlib.suppress(ImportError):
                __import__(name)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the main process has ended
            _write(report, _pickled(Failure.of(error)))
        os._exit(1)
    os.close(report)
    forkserver.os = _Os()  # type: ignore[attr-defined]


class _Os:
    """The module `os` for the server's loop, which would end at a process that cannot be started."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fork(self) -> int:
        """Forks; when that fails, the client reads the error's number, negative, in place of a pid."""
        try:
            return os.fork()
        except OSError as error:
            served = sys._getframe(1).f_locals
            forkserver.write_signed(served["child_w"], -(error.errno or errno.EAGAIN))
            for fd in (served["child_r"], served["child_w"], *served["fds"]):
                os.close(fd)
            # The one error that the loop takes for a client's, and goes on.
            raise OSError(errno.ECONNABORTED, os.strerror(errno.ECONNABORTED)) from error


def _pickled(failure: Failure) -> bytes:
    """At most what the pipe holds, which nobody reads before this process has ended."""
    data = dumps(failure)
    if len(data) <= MOST:
        return data
    return dumps(Failure(None, failure.summary[: MOST // 8], failure.text[-MOST // 8 :]))


def _write(fd: int, data: bytes) -> None:
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
