"""Ctrl-C put off while something is finished, and what the interpreter keeps of the last one."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _thread
import contextlib
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from multiprocessing import (
    resource_tracker,
)
from typing import Any, ClassVar

from workers import import_path

SIGINT = int(signal.SIGINT)


class uninterrupted:
    """Puts off what Ctrl-C raises until the block is through.

    By the handler and not by the mask of signals, which is each thread's own: the kernel gives the signal to any
    thread that takes it, and Python runs the handler in the main thread all the same. Not by the functions of `signal`
    but by those that they call: this is around the reading of every reply, and the enumerations which `signal` makes of
    what it gets and gives took longer than that.
    """

    #: How many were put off in all: who waits in such a block ends the waiting.
    n_noted: ClassVar[int] = 0

    def __enter__(self) -> None:
        self._is_pending, self._before = False, None
        if threading.get_ident() == threading.main_thread().ident and callable(_signal.getsignal(SIGINT)):
            self._before = _signal.signal(SIGINT, self._note)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            _signal.signal(SIGINT, self._before)
            if self._is_pending:
                signal.raise_signal(signal.SIGINT)

    def _note(self, *_: object) -> None:
        self._is_pending = True
        uninterrupted.n_noted += 1


@contextlib.contextmanager
def sigint_blocked() -> Iterator[None]:
    """Blocks SIGINT in this thread and in what it starts; a Ctrl-C raises when the block is through."""
    with import_path.change_commands_of_children():
        resource_tracker.ensure_running()  # its own start would unblock SIGINT on CPython 3.11
    with uninterrupted():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


# Seconds that a block may take once Ctrl-C was pressed: what is hung has to end, too.
PATIENCE = 5.0


class finished(uninterrupted):
    """Puts off the first Ctrl-C until the block is through, but no longer than `PATIENCE`; a second one raises at once.

    For what should be whole, but may take long, or for ever: the code of an environment or agent in this process, or
    a worker that does not answer. In nested blocks each puts off one.
    """

    _is_through: _thread.LockType | None = None

    def __exit__(self, *raised: object) -> None:
        try:
            super().__exit__(*raised)  # until it has put back the handler, one may still be noted
        finally:
            if self._is_through is not None:
                self._is_through.release()

    def _note(self, *signal_and_frame: object) -> None:
        if not self._is_pending or not callable(self._before):
            super()._note(*signal_and_frame)
            if self._is_through is None:
                self._is_through = _thread.allocate_lock()
                self._is_through.acquire()
                # Not a threading.Timer: its locks may be held by what this handler has interrupted.
                _thread.start_new_thread(_interrupt_again, (self._is_through,))
            return
        self._is_pending = False
        self._before(*signal_and_frame)


def _interrupt_again(is_through: _thread.LockType) -> None:
    """Interrupts the main thread once more, unless a block is through in time."""
    if not is_through.acquire(timeout=PATIENCE):
        signal.pthread_kill(threading.main_thread().ident or 0, SIGINT)


def forget_last_interrupt() -> None:
    """Clears the local variables of the last KeyboardInterrupt that a notebook or prompt has shown.

    The interpreter keeps it, and its traceback keeps every frame: what is bound to a name anew would live on in one of
    them, and its workers with it. Of other exceptions everything stays, for a debugger.
    """
    for error in _chain(getattr(sys, "last_exc", None), getattr(sys, "last_value", None)):
        traceback.clear_frames(error.__traceback__)  # leaves those that are still executed as they are


def _chain(*errors: Any) -> Iterator[BaseException]:
    """Interrupts, and what each was raised from or during."""
    left, seen = [error for error in errors if isinstance(error, KeyboardInterrupt)], set[int]()
    while left:
        error: BaseException | None = left.pop()
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            left += [error.__cause__, error.__context__]  # type: ignore[list-item]
            yield error
