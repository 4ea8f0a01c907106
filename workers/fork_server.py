"""A fork server that imports from the trainer's path and reports start errors.

It is the standard library's server; its command sets the import path and runs `rlstructs.workers.fork_server` before
the loop.

The server imports its preload before it forks workers, and reports which import failed.

The server also watches the main process: the end of its pipe alone would not end it, as a forked child of the main
process may hold the pipe open.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
import warnings
from collections.abc import Sequence
from functools import partial
from multiprocessing import forkserver, process
from typing import Any

from rlstructs.workers import imports as import_path
from rlstructs.workers import loop
from rlstructs.workers.arena import open_pidfd
from rlstructs.workers.errors import RemoteTraceback, StartError, describe_exit
from rlstructs.workers.failures import Failure
from rlstructs.workers.imports import uncollected_imports
from rlstructs.workers.interrupts import leave_sigterm_to
from rlstructs.workers.pickling import dumps, loads

# Every pickle begins with this byte, and no module's name does.
PICKLE = b"\x80"


class ForkServer(forkserver.ForkServer):
    """A fork server with its own preload, beside the program's other ones.

    Args:
        preload: modules that it imports.

    Attributes:
        has_answered: whether it has started a process, by which time its preload is imported.
    """

    has_answered = False
    _lock: threading.Lock
    _forkserver_address: str | None
    _forkserver_alive_fd: int | None
    _forkserver_pid: int | None

    def __init__(self, preload: Sequence[str]) -> None:
        super().__init__()
        self._preload = list(preload)
        self.set_forkserver_preload([])  # `rlstructs.workers.fork_server` imports the modules instead
        self._report_fd: int | None = None  # the pipe through which it reports on its imports
        self._report = b""

    @property
    def pid(self) -> int | None:
        """The server's process id; None if it was not started."""
        return self._forkserver_pid

    def ensure_running(self) -> None:
        """Starts the server unless it is running.

        Raises:
            OSError: the server cannot be started.
        """
        self._forget_lost_folder()
        _reap_ended_servers()
        reader, writer = os.pipe()
        try:
            with import_path.change_commands_of_children(partial(_make_command, writer, self._preload), [writer]):
                before = self._forkserver_pid
                super().ensure_running()
                if self._forkserver_pid != before:
                    self.has_answered, self._report = False, b""
                    self._report_fd, reader = reader, -1 if self._report_fd is None else self._report_fd
        finally:
            for fd in (reader, writer):
                if fd >= 0:
                    os.close(fd)

    def give_up(self) -> None:
        """Makes a new server start the next process.

        Not while this one is still importing its preload.

        A new server would have to import the same modules. The old one ends with the last process that it started.
        """
        with self._lock:
            if self.has_answered:
                self._abandon()

    def check_preload(self) -> None:
        """Raises StartError if importing a module of the preload has ended the server."""
        names, failure = self._read_report()
        if failure is not None:
            at = f"as it imported {names[-1]!r}" if names else "before it imported anything"
            step = f"; `python -c 'import {names[-1]}'` should show the same" if names else ""
            text = f"the fork server raised {at}: {failure.summary}{step}"
            raise StartError(text) from RemoteTraceback(failure.text, 0)

    def describe_end(self) -> str:
        """Says for a message how the server ended, and during which import."""
        names, _ = self._read_report()
        during = f" as it imported {names[-1]!r}" if names and not self.has_answered else ""
        return f": {describe_exit(self._exit_code())}{during} ({os.fsdecode(sys.executable or 'no sys.executable')})"

    def _read_report(self) -> tuple[list[str], Failure | None]:
        """Reads which modules an ended server began to import, and any failure."""
        if self._report_fd is not None:
            with open(self._report_fd, "rb", closefd=False) as file:
                os.set_blocking(self._report_fd, False)  # a forked process may hold the other end open
                self._report += file.read() or b""
        names, data = [], self._report
        while data and not data.startswith(PICKLE):
            name, _, data = data.partition(b"\0")
            names.append(name.decode())
        failure = loads(data) if data else None
        return names, failure

    def _exit_code(self) -> int | None:
        """Returns the exit code, negative for a signal; None while the server runs.

        The zombie is left.
        """
        flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
        with contextlib.suppress(ChildProcessError, TypeError):
            found = os.waitid(os.P_PID, self._forkserver_pid, flags)  # type: ignore[arg-type]
            if found is not None:
                return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        return None

    def _forget_lost_folder(self) -> None:
        """Forgets a deleted socket folder, and the server, which cannot be reached."""
        config = process.current_process()._config  # type: ignore[attr-defined]
        folder = config.get("tempdir")
        if folder is not None and not os.path.isdir(folder):
            config.pop("tempdir", None)
        with self._lock:
            address = self._forkserver_address
            if address is not None and not address.startswith("\0") and not os.path.exists(address):
                self._abandon()

    def forget_if_ended(self) -> None:
        """Reaps the server if it has ended.

        Afterwards `describe_end` cannot tell its exit code.
        """
        with self._lock:
            if self._exit_code() is not None:
                self._abandon()

    def _abandon(self) -> None:
        if self._forkserver_alive_fd is not None:
            os.close(self._forkserver_alive_fd)
            if self._forkserver_pid is not None:
                _abandoned.add(self._forkserver_pid)
            self._forkserver_address = self._forkserver_alive_fd = self._forkserver_pid = None
            self.has_answered = False
        _reap_ended_servers()


# The pids of servers that get no more requests and are reaped once they have ended.
_abandoned: set[int] = set()


def _reap_ended_servers() -> None:
    for pid in tuple(_abandoned):
        try:
            ended, _ = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # another thread has reaped it, or this is a forked copy, which has no such child
            ended = pid
        if ended:
            _abandoned.discard(pid)


def _make_command(report: int, preload: list[str], command: str) -> str:
    return import_path.prepend_import_path(
        f"from rlstructs.workers.fork_server import prepare; prepare({report}, {preload!a}); {command}"
    )


# Ends the name of each module in the server's report.
NAME_END = b"\0"
# The most bytes of a reported failure; a pipe holds 64 KiB.
MAX_BYTES = 60_000


def prepare(report: int, preload: list[str]) -> None:
    """Makes this process ready to fork workers.

    Ends it if a module of the preload raises.

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
    """Replaces the module `os` in the server's loop.

    The loop would otherwise end when a fork fails.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fork(self) -> int:
        """Forks.

        If that fails, sends the client the negative errno in place of a pid.
        """
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
    """Pickles a failure, shortened to fit into the pipe.

    The pipe is read only when this process has ended.
    """
    data = dumps(failure)
    if len(data) <= MAX_BYTES:
        return data
    return dumps(Failure(None, failure.summary[: MAX_BYTES // 8], failure.text[-MAX_BYTES // 8 :]))


def _write(fd: int, data: bytes) -> None:
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
