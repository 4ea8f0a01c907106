"""The clock of a store: how many rows each lane has had, and which of them are there.

A lane's steps are numbered from 0 and never again; step s lies in slot `s % capacity`. Three counters
per lane, int64, in memory that other processes may share:

    base       steps before it were cleared
    reserved   raised before rows are written: what it has passed is about to be overwritten
    head       raised after rows are written: what it has passed can be read

Valid are the steps `[max(base, reserved - capacity), head)`. A reader that gathers without a lock looks
at `reserved` again afterwards: what fell out meanwhile may be torn. With one counter instead of two it
could not know. A writer killed in between loses what it was about to overwrite; the next one starts at
`head`. This order of loads and stores is what x86 keeps by itself.
"""

from __future__ import annotations

import numpy as np

BASE, RESERVED, HEAD = range(3)
N_COUNTERS = 3
ALL = slice(None)


class Ring:
    """Counters of `n_lanes` lanes with `capacity` rows each.

    Args:
        counters: int64 (3, n_lanes), zeros for a new ring.
        capacity: rows per lane.

    Example:
        >>> ring = Ring(np.zeros((N_COUNTERS, 2), np.int64), capacity=4)
        >>> ring.reserve(slice(0, 1), 6)
        >>> ring.publish(slice(0, 1), 6)
        >>> ring.oldest().tolist(), ring.head.tolist(), len(ring)
        ([2, 0], [6, 0], 4)
    """

    def __init__(self, counters: np.ndarray, capacity: int) -> None:
        self.counters = counters
        self.capacity = capacity
        self.base, self.reserved, self.head = counters

    @property
    def n_lanes(self) -> int:
        """Number of lanes."""
        return int(self.head.size)

    def __len__(self) -> int:
        return int((self.head - self.oldest()).clip(0).sum())

    def oldest(self) -> np.ndarray:
        """The first valid step of each lane, int64 (n_lanes,)."""
        return np.asarray(np.maximum(self.base, self.reserved - self.capacity))

    def reserve(self, lanes: slice | np.ndarray, n: int | np.ndarray) -> None:
        """Announces that `n` rows from `head` on will be written to each of these lanes."""
        self.reserved[lanes] = np.maximum(self.reserved[lanes], self.head[lanes] + n)

    def skip_lost(self, lanes: slice | np.ndarray) -> None:
        """Clears lanes of which a dead writer had announced to overwrite every row."""
        lost = self.reserved[lanes] - self.capacity >= self.head[lanes]
        if lost.any():
            self.base[lanes] = np.where(lost, self.head[lanes], self.base[lanes])

    def publish(self, lanes: slice | np.ndarray, n: int | np.ndarray) -> None:
        """Says that they are written."""
        self.head[lanes] += n

    def clear(self, alignment: int | None = None, lanes: slice | np.ndarray = ALL) -> None:
        """Drops every row of some lanes; the next one lies in slot 0, and old steps never come back.

        Args:
            alignment: what the next step is a multiple of; None for the capacity, of which it must be one.
            lanes: which.
        """
        alignment = self.capacity if alignment is None else alignment
        # One past every step of these lanes: they stay in step, and who follows the heads sees that they moved.
        start = (int(np.maximum(self.head, self.reserved)[lanes].max()) // alignment + 1) * alignment
        # Head last: until then a reader sees nothing rather than rows that are not there.
        self.base[lanes] = start
        self.reserved[lanes] = start
        self.head[lanes] = start

    def is_full(self) -> np.ndarray:
        """Which lanes have wrapped since they were cleared, bool (n_lanes,)."""
        return np.asarray(self.head - self.base >= self.capacity)
