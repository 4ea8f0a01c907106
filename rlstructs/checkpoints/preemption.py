"""Signals by which a cluster asks a program to stop.

They come before it takes the machine away.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rlstructs.checks import check_timeout
from rlstructs.errors import StateError


class Preemption:
    """Notes that a signal came, and ends the program at a deadline.

    The rest is up to the program.

    Attributes:
        is_requested: whether a signal has come.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._n_blocks = 0  # nested ones that are under way
        self._deadline = 0.0
        self._has_ended: _thread.LockType | None = None  # held from the signal on, until the program goes on

    @contextlib.contextmanager
    def handle(self, deadline: float | None, signals: Sequence[int]) -> Iterator[None]:
        """Notes signals during a block; restores the earlier handlers after it.

        An outermost block first forgets signals that were noted before.

        Args:
            deadline: seconds from the first signal to the end of the program; then it is ended. None for no deadline.
            signals: the signals.

        Raises:
            StateError: this is not the main thread, which alone can handle signals.
        """
        seconds = check_timeout(deadline)
        if threading.current_thread() is not threading.main_thread():
            raise StateError("preemption: only the main thread can handle signals; enter the block there")
        if not self._n_blocks:
            self.is_requested = False
            self._call_off()
        outer, self._deadline = self._deadline, float("inf") if seconds is None else seconds
        before, has_exited = dict[int, Any](), False
        self._n_blocks += 1
        try:
            for number in signals:
                before[number] = signal.signal(number, self._note)
            yield
        except SystemExit:
            has_exited = True
            raise
        finally:
            self._n_blocks, self._deadline = self._n_blocks - 1, outer
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            # Unless the block ended with SystemExit, the deadline no longer applies.
            if not has_exited and not self._n_blocks:
                self._call_off()

    def _note(self, number: int, _: object) -> None:
        if self.is_requested:
            return
        self.is_requested = True
        if self._deadline < float("inf"):
            self._has_ended = _thread.allocate_lock()
            self._has_ended.acquire()
            # Not a threading.Timer: the code that this handler interrupts may hold its locks.
            _thread.start_new_thread(_end_late, (self._has_ended, self._deadline, number))

    def _call_off(self) -> None:
        if self._has_ended is not None and self._has_ended.locked():
            self._has_ended.release()


def _end_late(has_ended: _thread.LockType, deadline: float, number: int) -> None:
    """Ends this process, and so its workers, unless the program goes on in time."""
    until = time.monotonic() + deadline
    if not has_ended.acquire(timeout=min(deadline, threading.TIMEOUT_MAX)) and time.monotonic() >= until:
        name = signal.Signals(number).name
        sys.stderr.write(f"rlstructs: {deadline} s after {name} the program has not ended; it ends without a save\n")
        sys.stderr.flush()
        os._exit(128 + number)
