"""How a worker process is started: the standard library's start methods, with three things changed.

- The child never imports the program's main module, so a script needs no `__main__` guard.
- The fork server is our own, so that it holds our preload whatever else started one before.
- SIGINT is blocked from the start until the worker ignores it, so that Ctrl-C never finds it between.
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

from workers import import_path
from workers.channel import deadline_in, milliseconds
from workers.fork_server import ForkServer
from workers.interrupts import uninterrupted
from workers.start_errors import StartError

# Milliseconds within which a Ctrl-C is noticed while a fork server is waited for that does not answer.
SIGINT_DELAY = 100.0

START_METHODS = ("forkserver", "spawn", "fork")

_CONFIG_LOCK = threading.Lock()
# Seconds that a fork server takes at most from its last word to its end.
DYING = 1.0
_servers: dict[tuple[str, ...], ForkServer] = {}


def default_start_method() -> str:
    """`forkserver` on Linux, `spawn` elsewhere; never the global default, never `fork`."""
    return "forkserver" if sys.platform == "linux" else "spawn"


def check_start_method(start_method: str | None) -> None:
    """Raises ValueError unless it is one, or None for the default one."""
    if start_method is not None and start_method not in START_METHODS:
        raise ValueError(f"start_method must be one of {START_METHODS}, got {start_method!r}")


def new_process(
    start_method: str, preload: tuple[str, ...], timeout: float | None, **arguments: Any
) -> process.BaseProcess:
    """A process object of the given start method, not started yet; `timeout` is in seconds, for the fork server."""
    check_start_method(start_method)
    if start_method == "fork":
        return multiprocessing.get_context("fork").Process(**arguments)
    if start_method == "spawn":
        return _SpawnProcess(**arguments)
    made = _ForkServerProcess(**arguments)
    made.server, made.timeout = _server(preload), timeout
    return made


@contextlib.contextmanager
def daemons_may_have_children() -> Iterator[None]:
    """Lets a daemonic process start workers: they end with it, which is what the rule is to see to."""
    config = process.current_process()._config  # type: ignore[attr-defined]
    with _CONFIG_LOCK:
        daemon = config.pop("daemon", None)
        try:
            yield
        finally:
            if daemon is not None:
                config["daemon"] = daemon


def dies_with_parent(start_method: str) -> bool:
    """Whether the kernel may end a worker with the thread that starts it: one as long-lived as its process."""
    return start_method == "forkserver" or threading.current_thread() is threading.main_thread()


def _server(preload: tuple[str, ...]) -> ForkServer:
    if preload not in _servers:
        _servers[preload] = ForkServer(preload)
    return _servers[preload]


def forget_child(child: process.BaseProcess) -> None:
    """Has this program not wait at its exit for a process whose end nobody will tell it."""
    process._children.discard(child)  # type: ignore[attr-defined]


def _disown() -> None:
    """In a forked copy of this process: it starts its own server, and waits for no worker at its exit."""
    global _CONFIG_LOCK
    _CONFIG_LOCK = threading.Lock()  # held, if it was copied while a worker was started: it may be that worker
    import_path.disown()
    _servers.clear()
    children: set[Any] = process._children  # type: ignore[attr-defined]
    children -= {child for child in children if isinstance(child, (_SpawnProcess, _ForkServerProcess))}


os.register_at_fork(after_in_child=_disown)


def _start_data(process_object: process.BaseProcess, popen: Any) -> bytes:
    """What the child reads first: how to prepare itself, and the process object."""
    preparation = spawn.get_preparation_data(process_object.name)
    preparation.pop("init_main_from_name", None)
    preparation.pop("init_main_from_path", None)
    preparation["sys_path"] = import_path.import_path()
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
        data = _start_data(process_obj, self)
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
        data = _start_data(process_obj, self)
        self._server.ensure_running()
        pid = self._server.pid
        try:
            self._ask(data)
        except (ConnectionError, EOFError):
            # A server that is killed cannot be waited for at once, and is taken for one that runs until then.
            if not _is_over(pid):
                raise
            try:
                self._ask_again(data)
            finally:
                self._server.forget_if_ended()

    def _ask_again(self, data: bytes) -> None:
        """Has another server take the place of one that has ended, unless it said why that would end, too."""
        self._server.check_preload()
        try:
            self._ask(data)
        except (ConnectionError, EOFError) as error:
            if _is_over(self._server.pid):
                self._server.check_preload()
                raise StartError(f"the fork server has ended twice{self._server.last_words()}") from error
            raise

    def _ask(self, data: bytes) -> None:
        self.sentinel, parent_writes = self._server.connect_to_new_process(self._fds)
        self.finalizer = util.Finalize(self, _close, (self.sentinel, parent_writes))
        try:
            unread: BrokenPipeError | None = None
            try:
                _write(parent_writes, data)
            except BrokenPipeError as error:  # nobody reads it: no process, as the server may say
                unread = error
            if not _readable(self.sentinel, deadline_in(self._timeout)):
                self._server.give_up()
                raise TimeoutError("the fork server does not answer")
            pid = forkserver.read_signed(self.sentinel)
            self._server.has_answered = True
            if pid < 0:  # the number of the error of a fork that failed
                raise OSError(-pid, os.strerror(-pid))
            if unread is not None:
                raise unread
            self.pid = pid
        except OSError as error:
            if not isinstance(error, TimeoutError):
                self.finalizer()
            raise
        except EOFError:
            self.finalizer()
            raise


def _is_over(pid: int | None) -> bool:
    """Whether a fork server has ended, or does so in a moment; or was given up by another thread meanwhile."""
    if pid is None:
        return True
    try:
        over = os.pidfd_open(pid)
    except (AttributeError, ProcessLookupError):  # no Linux; another thread has waited for it
        return True
    try:
        return _readable(over, time.monotonic() + DYING)
    finally:
        os.close(over)


class _SpawnProcess(process.BaseProcess):
    _start_method = "spawn"
    _Popen = staticmethod(_SpawnPopen)


class _ForkServerProcess(process.BaseProcess):
    _start_method = "forkserver"
    _Popen = staticmethod(_ForkServerPopen)
    server: ForkServer
    timeout: float | None


def _readable(fd: int, deadline: float | None) -> bool:
    """Waits for a descriptor until a deadline, or a Ctrl-C, which is put off meanwhile and raised later."""
    n_noted = uninterrupted.n_noted
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while not poll.poll(SIGINT_DELAY if deadline is None else min(SIGINT_DELAY, milliseconds(deadline) or 0.0)):
        is_interrupted = signal.SIGINT in signal.sigpending() or uninterrupted.n_noted > n_noted
        if is_interrupted or (deadline is not None and time.monotonic() >= deadline):
            return False
    return True


def _write(fd: int, data: bytes) -> None:
    # The descriptor stays open: its other end is how a child sees that this process still lives.
    with open(fd, "wb", closefd=False) as file:
        file.write(data)


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)
