"""Locks that no thread holds which is not there, in a process that was forked."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

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
