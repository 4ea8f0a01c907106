"""Starts worker processes by the standard library's start methods, with three changes.

- The child never imports the program's main module, so a script needs no `__main__` guard.
- The fork server is our own, so it has our preload even if the program has started another server.
- SIGINT is blocked until the worker ignores it, so that Ctrl-C never interrupts a worker while it starts.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import (
    context,
    forkserver,
    popen_forkserver,
    popen_spawn_posix,
    process,
    reduction,
    resource_tracker,
    spawn,
    util,
)
from typing import Any

from rlstructs.workers import imports as import_path
from rlstructs.workers.arena import open_pidfd
from rlstructs.workers.errors import StartError
from rlstructs.workers.fork_server import ForkServer
from rlstructs.workers.interrupts import defer_interrupt
from rlstructs.workers.messages import deadline_in, milliseconds_until

# Milliseconds between two checks for a Ctrl-C while a fork server does not answer.
SIGINT_DELAY = 100.0

START_METHODS = ("forkserver", "spawn", "fork")

_CONFIG_LOCK = threading.Lock()
# Seconds in which a fork server that closed its connection ends, if it does end.
END_DELAY = 1.0
_servers: dict[tuple[str, ...], ForkServer] = {}


def default_start_method() -> str:
    """`forkserver` on Linux, `spawn` elsewhere; never the global default, never `fork`."""
    return "forkserver" if sys.platform == "linux" else "spawn"


def check_start_method(start_method: str | None) -> None:
    """Raises ValueError unless this is a start method or None, the default."""
    if start_method is not None and start_method not in START_METHODS:
        raise ValueError(f"start_method must be one of {START_METHODS}, got {start_method!r}")


def new_process(
    start_method: str, preload: tuple[str, ...], timeout: float | None, **arguments: Any
) -> process.BaseProcess:
    """Makes a process object, but does not start it.

    The fork server must answer in `timeout` seconds.
    """
    check_start_method(start_method)
    if start_method == "fork":
        return multiprocessing.get_context("fork").Process(**arguments)
    if start_method == "spawn":
        return _SpawnProcess(**arguments)
    new = _ForkServerProcess(**arguments)
    new.server, new.timeout = _get_server(preload), timeout
    return new


@contextlib.contextmanager
def allow_children_of_daemons() -> Iterator[None]:
    """Lets a daemonic process start workers.

    multiprocessing forbids children, but workers end with their parent.
    """
    config = process.current_process()._config  # type: ignore[attr-defined]
    with _CONFIG_LOCK:
        daemon = config.pop("daemon", None)
        try:
            yield
        finally:
            if daemon is not None:
                config["daemon"] = daemon


def dies_with_parent(start_method: str) -> bool:
    """Whether the starting thread lives until its process ends.

    Only then may the kernel end a worker with it.
    """
    return start_method == "forkserver" or threading.current_thread() is threading.main_thread()


def _get_server(preload: tuple[str, ...]) -> ForkServer:
    if preload not in _servers:
        _servers[preload] = ForkServer(preload)
    return _servers[preload]


def forget_child(child: process.BaseProcess) -> None:
    """Keeps this program's exit from waiting for a lost process.

    Its exit code never comes.
    """
    process._children.discard(child)  # type: ignore[attr-defined]


def _reset_after_fork() -> None:
    """Makes a forked copy start its own server.

    It waits for no worker at its exit.
    """
    global _CONFIG_LOCK
    _CONFIG_LOCK = threading.Lock()  # held if the fork came while a worker was started
    import_path.renew_lock()
    _servers.clear()
    children: set[Any] = process._children  # type: ignore[attr-defined]
    children -= {child for child in children if isinstance(child, (_SpawnProcess, _ForkServerProcess))}


os.register_at_fork(after_in_child=_reset_after_fork)


def _dump_start_data(process_object: process.BaseProcess, popen: Any) -> bytes:
    """Pickles what the child reads first: its preparation and the process object."""
    preparation = spawn.get_preparation_data(process_object.name)
    preparation.pop("init_main_from_name", None)
    preparation.pop("init_main_from_path", None)
    preparation["sys_path"] = import_path.get_import_path()
    buffer = io.BytesIO()
    context.set_spawning_popen(popen)
    try:
        reduction.dump(preparation, buffer)
        reduction.dump(process_object, buffer)
    finally:
        context.set_spawning_popen(None)
    return buffer.getvalue()


class _SpawnPopen(popen_spawn_posix.Popen):
    _fds: list[int]

    def _launch(self, process_obj: Any) -> None:
        tracker = resource_tracker.getfd()
        assert tracker is not None
        data = _dump_start_data(process_obj, self)
        sentinel, child_end = os.pipe()
        child_reads, parent_writes = os.pipe()
        self._fds += [tracker, child_end, child_reads]
        try:
            command = import_path.change_command(spawn.get_command_line(tracker_fd=tracker, pipe_handle=child_reads))
            self.pid = util.spawnv_passfds(spawn.get_executable(), command, self._fds)  # type: ignore[arg-type]
        finally:
            os.close(child_end)
            os.close(child_reads)
            self.finalizer = util.Finalize(self, _close, (sentinel, parent_writes))
        self.sentinel = sentinel
        _write(parent_writes, data)


class _ForkServerPopen(popen_forkserver.Popen):
    _fds: list[int]

    def __init__(self, process_obj: Any) -> None:
        self._server, self._timeout = process_obj.server, process_obj.timeout
        del process_obj.server, process_obj.timeout
        super().__init__(process_obj)

    def _launch(self, process_obj: Any) -> None:
        data = _dump_start_data(process_obj, self)
        self._server.ensure_running()
        pid = self._server.pid
        try:
            self._request_process(data)
        except (ConnectionError, EOFError):
            # A killed server seems to run until it can be reaped, a moment later.
            if not _ends_soon(pid):
                raise
            try:
                self._retry(data)
            finally:
                self._server.forget_if_ended()

    def _retry(self, data: bytes) -> None:
        """Requests the process from a new server.

        Not if the old one reported an error that would end both.
        """
        self._server.check_preload()
        try:
            self._request_process(data)
        except (ConnectionError, EOFError) as error:
            if _ends_soon(self._server.pid):
                self._server.check_preload()
                raise StartError(f"the fork server has ended twice{self._server.describe_end()}") from error
            raise

    def _request_process(self, data: bytes) -> None:
        """Makes the server fork a process, and sends it `data`."""
        self.sentinel, parent_writes = self._server.connect_to_new_process(self._fds)
        self.finalizer = util.Finalize(self, _close, (self.sentinel, parent_writes))
        try:
            write_error: BrokenPipeError | None = None
            try:
                _write(parent_writes, data)
            except BrokenPipeError as error:  # there is no process; the server's answer may say why
                write_error = error
            if not _wait_until_readable(self.sentinel, deadline_in(self._timeout)):
                self._server.give_up()
                raise TimeoutError("the fork server does not answer")
            pid = forkserver.read_signed(self.sentinel)
            self._server.has_answered = True
            if pid < 0:  # the fork failed: this is the negative errno
                raise OSError(-pid, os.strerror(-pid))
            if write_error is not None:
                raise write_error
            self.pid = pid
        except OSError as error:
            if not isinstance(error, TimeoutError):
                self.finalizer()
            raise
        except EOFError:
            self.finalizer()
            raise


def _ends_soon(pid: int | None) -> bool:
    """Whether a fork server has ended or ends within `END_DELAY`.

    True, too, if another thread gave it up.
    """
    if pid is None:
        return True
    pidfd, deadline = open_pidfd(pid), time.monotonic() + END_DELAY
    if pidfd is None:
        return _is_waitable_by(pid, deadline)
    try:
        return _wait_until_readable(pidfd.fileno(), deadline)
    finally:
        pidfd.close()


def _is_waitable_by(pid: int, deadline: float) -> bool:
    """Whether a child ends by a deadline, or was reaped by another thread.

    Leaves the zombie.
    """
    with contextlib.suppress(ChildProcessError):
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            if time.monotonic() >= deadline:
                return False
            time.sleep(SIGINT_DELAY / 1000)
    return True


class _SpawnProcess(process.BaseProcess):
    _start_method = "spawn"
    _Popen = staticmethod(_SpawnPopen)


class _ForkServerProcess(process.BaseProcess):
    _start_method = "forkserver"
    _Popen = staticmethod(_ForkServerPopen)
    server: ForkServer
    timeout: float | None


def _wait_until_readable(fd: int, deadline: float | None) -> bool:
    """Waits for a descriptor; False after the deadline or a Ctrl-C.

    The caller has deferred the Ctrl-C and raises it later.
    """
    n_deferred = defer_interrupt.n_deferred
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while not poll.poll(SIGINT_DELAY if deadline is None else min(SIGINT_DELAY, milliseconds_until(deadline) or 0.0)):
        is_interrupted = signal.SIGINT in signal.sigpending() or defer_interrupt.n_deferred > n_deferred
        if is_interrupted or (deadline is not None and time.monotonic() >= deadline):
            return False
    return True


def _write(fd: int, data: bytes) -> None:
    # The descriptor stays open: once it is closed, the child takes this process for dead.
    with open(fd, "wb", closefd=False) as file:
        file.write(data)


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)
