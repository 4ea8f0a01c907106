"""Which rows of a store have changed since a checkpoint."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from rlstructs.replay.counters import REWRITES
from rlstructs.replay.store import Storage


class Mark(NamedTuple):
    """The state of a store at a checkpoint.

    Attributes:
        storage: the store.
        rewrites: how often rows that were there had been changed; see `Storage`.
        head: the end of the rows of each lane, int64 (n_lanes,).
    """

    storage: weakref.ref[Storage]
    rewrites: int
    head: np.ndarray

    @classmethod
    def of(cls, storage: Storage) -> Mark:
        """The state of a store now, before its rows are saved: those that come meanwhile are changed ones."""
        return cls(weakref.ref(storage), int(storage.counters.notes[REWRITES]), storage.ring.head.copy())


# By a name for each store.
Marks = Mapping[str, Mark]


def find_changed(storage: Storage, since: Mark | None) -> np.ndarray | None:
    """Which slots hold a row, in any lane, that may have changed since, bool (capacity,); None if that is unknown."""
    if since is None or since.storage() is not storage or since.rewrites != storage.counters.notes[REWRITES]:
        return None
    ring, changed = storage.ring, np.zeros(storage.ring.capacity, bool)
    # From the head on: a killed writer may have left half of a row behind it.
    counts = (ring.reserved - since.head).clip(0, ring.capacity)
    for first, n in {*zip((since.head % ring.capacity).tolist(), counts.tolist(), strict=True)}:
        changed[first : first + n] = True
        changed[: max(0, first + n - ring.capacity)] = True
    return changed
