"""How a buffer is pickled while other threads may write: it raises rather than give half of a change."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from rlstructs.errors import StateError

_gate = threading.RLock()  # held by who adds a lock, and by who forks
_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_held: list[Any] = []  # while a process is forked


def lock_that_forks() -> Any:
    """A `threading.RLock` for which `os.fork` waits: what it guards is whole, and free, in the child."""
    lock = threading.RLock()
    with _gate:
        _locks.add(lock)
    return lock


def _hold() -> None:
    _gate.acquire()
    for lock in _locks:
        lock.acquire()
        _held.append(lock)


def _release() -> None:
    while _held:
        _held.pop().release()
    _gate.release()


os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_release)


#: The last key of a state that is pickled.
UNCHANGED = "_unchanged"


class Unchanged:
    """Stands under that key: what lies before it is pickled as it is in memory, without a lock.

    Args:
        content: gives something else after a change.
    """

    def __init__(self, content: Callable[[], Any]) -> None:
        self._content, self._before = content, content()

    def __reduce__(self) -> Any:
        if self._content() != self._before:
            raise StateError("a buffer was changed by another thread while it was pickled: save gives what there is")
        return bool, ()
