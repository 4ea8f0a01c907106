"""Defers Ctrl-C during a block, and forgets the last Ctrl-C.

The interpreter keeps that exception and its frames.

Also leaves SIGTERM to the main process, if that handles it: clusters send it to all processes of a program at once.

The main process then finishes what it does, for which it needs its workers; they end with it. A handler, and not
SIG_IGN: programs that an environment starts would inherit that, and could no longer be ended by SIGTERM.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _thread
import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from multiprocessing import resource_tracker
from typing import Any, ClassVar

from rlstructs.workers import imports

SIGINT = int(signal.SIGINT)
_main_thread_id = threading.main_thread().ident


def _note_fork() -> None:
    global _main_thread_id
    _main_thread_id = threading.main_thread().ident  # the thread that forked is the main thread here


os.register_at_fork(after_in_child=_note_fork)


class defer_interrupt:
    """Defers a Ctrl-C until the block ends.

    It replaces the signal handler. Blocking the signal would not do: each thread has its own mask, and any thread that
    takes the signal makes Python run the handler in the main thread. It calls `_signal`, not `signal`: every reply is
    read in such a block, and the enumerations that `signal` creates took longer than the reading.
    """

    #: The number of interrupts deferred so far; code that waits in such a block stops when this grows.
    n_deferred: ClassVar[int] = 0

    def __enter__(self) -> None:
        self._is_pending, self._before = False, None
        if _thread.get_ident() == _main_thread_id and callable(_signal.getsignal(SIGINT)):
            self._before = _signal.signal(SIGINT, self._handle_sigint)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            _signal.signal(SIGINT, self._before)
            if self._is_pending:
                signal.raise_signal(signal.SIGINT)

    def _handle_sigint(self, *_: object) -> None:
        self._is_pending = True
        defer_interrupt.n_deferred += 1


@contextlib.contextmanager
def block_sigint() -> Iterator[None]:
    """Blocks SIGINT in this thread and in processes that it starts.

    A Ctrl-C raises when the block ends.
    """
    with imports.change_commands_of_children():
        resource_tracker.ensure_running()  # on CPython 3.11, starting it later would unblock SIGINT
    with defer_interrupt():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


# Seconds that a block may still take after a Ctrl-C: the user must be able to interrupt code that hangs.
PATIENCE = 5.0


class defer_first_interrupt(defer_interrupt):
    """Defers the first Ctrl-C until the block ends, for at most `PATIENCE` seconds.

    A second one raises at once.

    For blocks that should not stop halfway but may hang: they run the code of an environment or agent in this process,
    or wait for a worker. Each of several nested blocks defers one Ctrl-C.
    """

    _has_ended: _thread.LockType | None = None  # held from the first Ctrl-C until the block ends

    def __exit__(self, *raised: object) -> None:
        try:
            super().__exit__(*raised)  # a Ctrl-C may come until this has restored the handler
        finally:
            if self._has_ended is not None:
                self._has_ended.release()

    def _handle_sigint(self, *signal_and_frame: object) -> None:
        if not self._is_pending or not callable(self._before):
            super()._handle_sigint(*signal_and_frame)
            if self._has_ended is None:
                self._has_ended = _thread.allocate_lock()
                self._has_ended.acquire()
                # Not a threading.Timer: the code that this handler interrupts may hold its locks.
                _thread.start_new_thread(_interrupt_again, (self._has_ended,))
            return
        self._is_pending = False
        self._before(*signal_and_frame)


def _interrupt_again(has_ended: _thread.LockType) -> None:
    """Interrupts the main thread again unless its block ends within `PATIENCE` seconds."""
    if not has_ended.acquire(timeout=PATIENCE):
        signal.pthread_kill(threading.main_thread().ident or 0, SIGINT)


def forget_last_interrupt() -> None:
    """Clears the local variables of the last KeyboardInterrupt shown.

    A notebook or prompt has shown it.

    The interpreter keeps that exception, and its traceback keeps every frame: a pool whose variable has a new value
    would live on there, with its workers. Other exceptions stay as they are, for a debugger.
    """
    for error in _list_interrupts(getattr(sys, "last_exc", None), getattr(sys, "last_value", None)):
        traceback.clear_frames(error.__traceback__)  # skips frames that are still executing


def _list_interrupts(*errors: Any) -> Iterator[BaseException]:
    """Lists the interrupts among these errors, and their causes and contexts."""
    left, seen = [error for error in errors if isinstance(error, KeyboardInterrupt)], set[int]()
    while left:
        error: BaseException | None = left.pop()
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            left += [error.__cause__, error.__context__]  # type: ignore[list-item]
            yield error


# The line of /proc/PID/status with the signals that a process handles, as a hexadecimal mask.
CAUGHT = b"SigCgt:"


def leave_sigterm_to(main_pid: int) -> None:
    """Makes this process ignore SIGTERM as long as the process `main_pid` handles it."""
    own_pid = os.getpid()

    def handle(number: int, _: Any) -> None:
        # A forked child of this process is not meant: its parent may end it.
        if os.getpid() != own_pid or not handles_sigterm(main_pid):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, handle)


def handles_sigterm(pid: int) -> bool:
    """Whether a process has a handler for SIGTERM.

    False where the system does not tell.
    """
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            masks = [line.split()[1] for line in file if line.startswith(CAUGHT)]
    except OSError:
        return False
    return bool(masks) and bool(int(masks[0], 16) >> (signal.SIGTERM - 1) & 1)
