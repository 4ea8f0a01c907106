"""Copies, pickles and forks of objects that other threads change.

None of them has half of a change.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import rlstructs.frameworks.start_warp  # noqa: F401 # its lock is taken after these, before a fork too
from rlstructs.errors import StateError

_forking = threading.RLock()  # one fork at a time
# Held while a lock is added, and during a fork. Always the last lock to be taken: copies make locks while holding some.
_gate = threading.RLock()
_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_held: list[Any] = []  # during a fork


def lock_that_forks() -> Any:
    """Makes a `threading.RLock` that `os.fork` waits for.

    In the child the guarded data is whole, and the lock is free.
    """
    lock = threading.RLock()
    with _gate:
        _locks.add(lock)
    return lock


def _hold() -> None:
    """Takes every lock.

    It waits for a lock only while it holds no other, because threads take them in any order.
    """
    _forking.acquire()
    missing: Any = None
    while True:
        if missing is not None:
            missing.acquire()
            _held.append(missing)
        _gate.acquire()
        missing = next((lock for lock in list(_locks) if not _take(lock)), None)
        if missing is None:
            return
        _gate.release()
        _let_go()


def _take(lock: Any) -> bool:
    """Takes a lock if no other thread has it; returns whether it did."""
    if lock.acquire(blocking=False):
        _held.append(lock)
        return True
    return False


def _let_go() -> None:
    while _held:
        _held.pop().release()


def _release() -> None:
    _let_go()
    _gate.release()
    _forking.release()


class Owner(Protocol):
    """An object with an attribute `lock`."""

    lock: Any


_owners: weakref.WeakSet[Any] = weakref.WeakSet()


def renew_lock_after_fork(owner: Owner) -> None:
    """Gives an object a new lock in every forked child.

    The child's copy of the lock might be held by a thread that the child lacks.
    """
    _owners.add(owner)


def _renew_locks() -> None:
    for owner in _owners:
        owner.lock = threading.RLock()


os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_release)
os.register_at_fork(after_in_child=_renew_locks)


# The last key of a pickled state.
UNCHANGED = "_unchanged"
C = TypeVar("C", bound="CopiedWhole")


class Unchanged:
    """Ends a pickled state; pickling it raises StateError after a change.

    It is the last value of the state, so that the values before it have been pickled.

    Args:
        content: returns a value that differs after a change.
    """

    def __init__(self, content: Callable[[], Any]) -> None:
        self._content, self._before = content, content()

    def __reduce__(self) -> Any:
        if self._content() != self._before:
            raise StateError("a buffer was changed by another thread while it was pickled: save gives what there is")
        return bool, ()


class CopiedWhole:
    """Base class of stores, buffers and memories, copied or pickled as a whole.

    Threads may write to them at any time. A deep copy is taken while its locks are held. A pickle is taken without
    them, and raises StateError after a write.
    """

    def _locks(self) -> Sequence[Any]:
        """Returns the locks that keep other threads from changing it.

        They are in the order in which they are taken.
        """
        raise NotImplementedError

    def _content(self) -> Any:
        """Returns a value that differs after every write."""
        raise NotImplementedError

    @contextlib.contextmanager
    def _hold_locks(self) -> Iterator[None]:
        with contextlib.ExitStack() as held:
            for lock in self._locks():
                held.enter_context(lock)
            yield

    def __deepcopy__(self: C, memo: dict[int, Any]) -> C:
        made = memo[id(self)] = type(self).__new__(type(self))
        with self._hold_locks():
            made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return made

    def __getstate__(self) -> dict[str, Any]:
        with self._hold_locks():
            return {**vars(self), UNCHANGED: Unchanged(self._content)}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update({name: value for name, value in state.items() if name != UNCHANGED})
