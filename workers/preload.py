"""Prepares our fork server: imports its preload and reports which import failed.

The server also watches the main process: the end of its pipe alone would not end it, as a forked child of the main
process may hold the pipe open.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import warnings
from multiprocessing import forkserver
from typing import Any

from rlstructs.workers import loop
from rlstructs.workers.collector import uncollected_imports
from rlstructs.workers.descriptors import open_pidfd
from rlstructs.workers.failures import Failure
from rlstructs.workers.pickling import dumps
from rlstructs.workers.termination import leave_sigterm_to

# Ends the name of each module in the server's report.
NAME_END = b"\0"
# The most bytes of a reported failure; a pipe holds 64 KiB.
MAX_BYTES = 60_000


def prepare(report: int, preload: list[str]) -> None:
    """Makes this process ready to fork workers; ends it if a module of the preload raises.

    Args:
        report: the descriptor that gets each module's name before its import, and then the failure, if any.
        preload: the modules; a missing one raises later, in a worker that needs it.
    """
    os.environ.update(dict.fromkeys(loop.THREAD_VARIABLES, "1"))  # before torch and numpy read them
    # Forking is safe: the second thread only waits for the end of the main process.
    warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
    os.set_inheritable(report, False)
    leave_sigterm_to(os.getppid())  # the kernel kills its workers when it ends
    try:
        main_process = open_pidfd(os.getppid())
        if main_process is not None:
            loop.exit_when_readable(main_process)
        with uncollected_imports():
            for name in preload:
                os.write(report, name.encode() + NAME_END)
                with contextlib.suppress(ImportError):
                    __import__(name)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the main process has ended
            _write(report, _dump_failure(Failure.of(error)))
        os._exit(1)
    os.close(report)
    forkserver.os = _Os()  # type: ignore[attr-defined]


class _Os:
    """Replaces the module `os` in the server's loop, which would otherwise end when a fork fails."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fork(self) -> int:
        """Forks; if that fails, sends the client the negative errno in place of a pid."""
        try:
            return os.fork()
        except OSError as error:
            served = sys._getframe(1).f_locals
            forkserver.write_signed(served["child_w"], -(error.errno or errno.EAGAIN))
            for fd in (served["child_r"], served["child_w"], *served["fds"]):
                os.close(fd)
            # The server's loop ends at every other error; this one means that the client is gone.
            raise OSError(errno.ECONNABORTED, os.strerror(errno.ECONNABORTED)) from error


def _dump_failure(failure: Failure) -> bytes:
    """Pickles a failure and shortens it to fit into the pipe, which is read only when this process has ended."""
    data = dumps(failure)
    if len(data) <= MAX_BYTES:
        return data
    return dumps(Failure(None, failure.summary[: MAX_BYTES // 8], failure.text[-MAX_BYTES // 8 :]))


def _write(fd: int, data: bytes) -> None:
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
