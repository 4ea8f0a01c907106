"""`Stored`: a store and what belongs to it, saved and copied as a whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlstructs.replay.draw.priorities import Priorities
from rlstructs.replay.keep.checks import Claims
from rlstructs.replay.rows.copies import CopiedWhole
from rlstructs.replay.rows.store import Storage
from rlstructs.seeding import Stream

# The arrays of a file by name, and a function that restores what was checked.
Arrays = Mapping[str, np.ndarray]
Restore = Callable[[], None]


class Stored(CopiedWhole):
    """Base class of buffers and memories: a store and a random stream.

    Subclasses say what else belongs into their files.
    """

    _storage: Storage
    _stream: Stream
    _intake: Any
    # What its files look like, a `Form`.
    _form: Any
    # Whether `Storage.alignment` may differ from the capacity.
    _may_be_aligned = False
    # Whether a file also has the contents of slots whose rows were dropped.
    _keeps_dropped = False

    def __len__(self) -> int:
        """Returns the number of valid rows."""
        return len(self._storage)

    @property
    def _rng(self) -> np.random.Generator:
        return self._stream.generator

    @_rng.setter
    def _rng(self, generator: np.random.Generator) -> None:
        self._stream.restart(generator)

    def _locks(self) -> Sequence[Any]:
        own = [] if (priorities := self._held_priorities()) is None else [priorities.lock]
        return [*own, *(each._storage.lock for each in (self, *self._inner().values()))]

    def _content(self) -> Any:
        return [each._storage._content() for each in (self, *self._inner().values())]

    def _held_priorities(self) -> Priorities | None:
        """Returns the priorities of its rows; None if it draws without them."""
        return None

    def _takes_capacity(self, capacity: int) -> bool:
        """Whether a file with this capacity per lane fits."""
        return capacity == self._storage.columns.capacity

    def _state(self) -> dict[str, Any]:
        """Returns settings and counters for the header of a file, as JSON."""
        return {}

    def _inner(self) -> Mapping[str, Stored]:
        """Returns inner buffers, by name; they are saved in the same file."""
        return {}

    def _more_arrays(self) -> dict[str, np.ndarray]:
        """Returns more arrays for a file, beside rows, counters and episodes."""
        return {} if (priorities := self._held_priorities()) is None else priorities.arrays()

    def _restorer(self, state: Mapping[str, Any], arrays: Arrays, claims: Claims) -> Restore:
        """Checks `_state` and `_more_arrays` of a file and returns a function that restores them.

        Raises:
            ValueError, KeyError, TypeError: they do not fit.
        """
        return lambda: None
