"""A fork server of our own: it imports what the trainer would import, and says why it does not start.

It is the standard library's, started with the trainer's import path and with `workers.preload` before its loop.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Sequence
from functools import partial
from multiprocessing import forkserver, process

from workers import import_path
from workers.errors import RemoteTraceback, describe_exit
from workers.failures import Failure
from workers.pickling import loads
from workers.start_errors import StartError

# Bytes: a pickle begins so, and no name of a module does.
PICKLE = b"\x80"


class ForkServer(forkserver.ForkServer):
    """A fork server of our own.

    Args:
        preload: modules that it imports.

    Attributes:
        has_answered: whether it is through with its preload, which may take longer than some have patience for.
    """

    has_answered = False
    _lock: threading.Lock
    _forkserver_address: str | None
    _forkserver_alive_fd: int | None
    _forkserver_pid: int | None

    def __init__(self, preload: Sequence[str]) -> None:
        super().__init__()
        self._preload = list(preload)
        self.set_forkserver_preload([])  # it imports them before the standard library's part begins
        self._report: int | None = None  # from where comes what it says as it imports
        self._said = b""

    @property
    def pid(self) -> int | None:
        """Its process id; None if it was not started."""
        return self._forkserver_pid

    def ensure_running(self) -> None:
        """Starts it, unless it runs.

        Raises:
            OSError: it cannot be started.
        """
        self._leave_lost_folder()
        _wait_for_ended()
        reads, writes = os.pipe()
        try:
            with import_path.sent_to_children(partial(_command, writes, self._preload), [writes]):
                before = self._forkserver_pid
                super().ensure_running()
                if self._forkserver_pid != before:
                    self.has_answered, self._said = False, b""
                    self._report, reads = reads, -1 if self._report is None else self._report
        finally:
            for fd in (reads, writes):
                if fd >= 0:
                    os.close(fd)

    def give_up(self) -> None:
        """Has the next process started by another server, unless this one still imports, as that would have to.

        It ends with the last of those that it has started.
        """
        with self._lock:
            if self.has_answered:
                self._let_go()

    def check_preload(self) -> None:
        """Raises StartError if it has ended because of a module that it was to import."""
        names, failure = self._reported()
        if failure is not None:
            at = f"as it imported {names[-1]!r}" if names else "before it imported anything"
            step = f"; `python -c 'import {names[-1]}'` should show the same" if names else ""
            text = f"the fork server raised {at}: {failure.summary}{step}"
            raise StartError(text) from RemoteTraceback(failure.text, 0)

    def last_words(self) -> str:
        """How it ended and what it imported then, for a message."""
        names, _ = self._reported()
        during = f" as it imported {names[-1]!r}" if names and not self.has_answered else ""
        return f": {describe_exit(self._exit_code())}{during} ({os.fsdecode(sys.executable or 'no sys.executable')})"

    def _reported(self) -> tuple[list[str], Failure | None]:
        """The modules that it began to import, and what one of them raised; of a server that has ended."""
        if self._report is not None:
            with open(self._report, "rb", closefd=False) as file:
                os.set_blocking(self._report, False)  # whoever it has forked may hold the other end
                self._said += file.read() or b""
        names, data = [], self._said
        while data and not data.startswith(PICKLE):
            name, _, data = data.partition(b"\0")
            names.append(name.decode())
        failure = loads(data) if data else None
        return names, failure

    def _exit_code(self) -> int | None:
        """As multiprocessing gives it; leaves the process to be waited for."""
        with contextlib.suppress(ChildProcessError, TypeError):
            found = os.waitid(os.P_PID, self._forkserver_pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)  # type: ignore[arg-type]
            if found is not None:
                return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        return None

    def _leave_lost_folder(self) -> None:
        """Forgets the folder with its socket if that was removed, and the server that nobody reaches any more."""
        config = process.current_process()._config  # type: ignore[attr-defined]
        folder = config.get("tempdir")
        if folder is not None and not os.path.isdir(folder):
            config.pop("tempdir", None)
        with self._lock:
            address = self._forkserver_address
            if address is not None and not address.startswith("\0") and not os.path.exists(address):
                self._let_go()

    def forget_if_ended(self) -> None:
        """Leaves no zombie of a server that has ended, once its last words are said."""
        with self._lock:
            if self._exit_code() is not None:
                self._let_go()

    def _let_go(self) -> None:
        if self._forkserver_alive_fd is not None:
            os.close(self._forkserver_alive_fd)
            if self._forkserver_pid is not None:
                _let_go.add(self._forkserver_pid)
            self._forkserver_address = self._forkserver_alive_fd = self._forkserver_pid = None
            self.has_answered = False
        _wait_for_ended()


# Servers that nobody asks any more, and that have to be waited for when they have ended.
_let_go: set[int] = set()


def _wait_for_ended() -> None:
    for pid in tuple(_let_go):
        try:
            ended, _ = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # another thread has; or this is a forked copy, whose children they are not
            ended = pid
        if ended:
            _let_go.discard(pid)


def _command(report: int, preload: list[str], command: str) -> str:
    return import_path.with_import_path(
        f"from workers.preload import prepare; prepare({report}, {preload!a}); {command}"
    )
