"""The counters of a store: how many rows each lane has had, and which of them are valid.

The steps of a lane are numbered from 0, and no number is used twice; step s is in slot `s % capacity`. There are three
counters per lane, int64, in memory that other processes may share:

    base       the end of the cleared steps
    reserved   raised before rows are written: the end of the steps that may be incomplete
    head       raised after rows are written: the end of the complete steps

The steps `[max(base, reserved - capacity), head)` are valid. A reader without a lock looks at `reserved` again after
it has gathered rows: rows that are no longer valid may be torn. If a writer is killed while it writes, the rows that it
was about to overwrite are lost, and the next writer starts at `head`.

This rests on the order in which other processes see loads and stores. x86 keeps the order of loads, and that of stores,
which is all that is needed. ARM and others do not: there `keep_order` keeps it, between the counters and the rows on
both sides. Threads of one process take a lock, which keeps the order everywhere.
"""

from __future__ import annotations

import platform
from _thread import allocate_lock

import numpy as np

from rlstructs.replay.row_ids import RowIds

BASE, RESERVED, HEAD = range(3)
N_COUNTERS = 3
ALL = slice(None)


def is_ordered(machine: str) -> bool:
    """Whether processors of this name, as `platform.machine` gives it, keep the order of loads and that of stores."""
    return machine.lower() in ("x86_64", "amd64", "i386", "i486", "i586", "i686", "x86")


IS_ORDERED = is_ordered(platform.machine())


def keep_order() -> None:
    """Keeps loads and stores before this call before those after it, as other processes see them."""
    if not IS_ORDERED:
        fence()


def fence() -> None:
    """Orders memory by what Python has.

    What comes before a release stays before it, what comes after an acquisition stays after it, and an acquisition
    stays after an earlier release. So a release that an acquisition follows is a full barrier; neither alone is. The
    lock is new, so that no fork copies one that another thread holds.
    """
    lock = allocate_lock()
    for _ in range(2):
        lock.acquire()
        lock.release()


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
        """Announces a write of `n` rows from `head` on to each of these lanes."""
        self.reserved[lanes] = np.maximum(self.reserved[lanes], self.head[lanes] + n)
        keep_order()

    def skip_lost(self, lanes: slice | np.ndarray) -> None:
        """Clears lanes in which a killed writer had announced to overwrite every row."""
        lost = self.reserved[lanes] - self.capacity >= self.head[lanes]
        if lost.any():
            self.base[lanes] = np.where(lost, self.head[lanes], self.base[lanes])

    def publish(self, lanes: slice | np.ndarray, n: int | np.ndarray) -> None:
        """Announces that `n` rows are complete in each of these lanes."""
        keep_order()
        self.head[lanes] += n

    def clear(self, alignment: int | None = None, lanes: slice | np.ndarray = ALL) -> None:
        """Drops all rows of some lanes; the next row is written to slot 0.

        Args:
            alignment: the next step is a multiple of it; itself a multiple of the capacity, or None for the capacity.
            lanes: the lanes.
        """
        alignment = self.capacity if alignment is None else alignment
        # Above all steps of these lanes: they stay in step, and those who follow the heads notice.
        start = (int(np.maximum(self.head, self.reserved)[lanes].max()) // alignment + 1) * alignment
        # The head last: until then a reader finds no rows rather than invalid ones.
        self.base[lanes] = start
        keep_order()
        self.reserved[lanes] = start
        keep_order()
        self.head[lanes] = start

    def is_full(self) -> np.ndarray:
        """Which lanes are full, bool (n_lanes,)."""
        return np.asarray(self.head - self.base >= self.capacity)


class InStep:
    """Which lanes of a ring are in step, for a writer that follows the heads.

    Args:
        ring: the counters.

    Attributes:
        head: of all lanes; None if they differ.
        n_ahead: so many lanes, the first ones, have one more row than `head` says.

    Example:
        >>> step = InStep(ring := Ring(np.zeros((N_COUNTERS, 3), np.int64), capacity=4))
        >>> step.next_lanes(2), step.find_block(slice(0, 2), 1, RowIds(3, 4, "slot"))
        (slice(0, 2, None), slice(0, 2, 1))
        >>> ring.publish(slice(0, 2), 1)
        >>> step.advance(slice(0, 2), 1, is_block=True)
        >>> step.head, step.n_ahead, step.next_lanes(2)
        (0, 2, None)
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._base = int(ring.base[0]) if (ring.base == ring.base[0]).all() else None
        self._find()

    def _find(self) -> None:
        heads = self._ring.head
        low = int(heads.min())
        n = int((heads != low).sum())
        is_known = bool((heads[:n] == low + 1).all())
        self.head: int | None = low if is_known else None
        self.n_ahead = n if is_known else 0

    def next_lanes(self, n: int) -> slice | np.ndarray | None:
        """The first `n` lanes that lack the row that others have; None if there are fewer."""
        if self.head is not None:
            end = self.n_ahead + n
            return slice(self.n_ahead, end) if end <= self._ring.n_lanes else None
        behind = np.flatnonzero(self._ring.head == self._ring.head.min())
        return behind[:n] if n <= behind.size else None

    def count_least(self) -> int:
        """Counts the rows that the lane with the fewest has had since all were dropped."""
        if self.head is not None and self._base is not None:
            return self.head - self._base
        return int((self._ring.head - self._ring.base).min())

    def find_block(self, lanes: slice | np.ndarray, n_timesteps: int, ids: RowIds) -> slice | None:
        """Indexes the next rows of lanes, or of the only lane; None if they are no block.

        Args:
            lanes: a slice has bounds, or is of all lanes.
            n_timesteps: rows of each; more than one only if there is one lane.
            ids: the row ids of the store.
        """
        if self.head is None or not isinstance(lanes, slice) or (lanes.start or 0) != self.n_ahead:
            return None
        slot = self.head % ids.capacity
        if n_timesteps > 1:
            return slice(slot, slot + n_timesteps) if slot + n_timesteps <= ids.capacity else None
        last = (ids.n_lanes if lanes.stop is None else lanes.stop) - 1
        first, end = (slot * ids.slot_stride + lane * ids.lane_stride for lane in (self.n_ahead, last))
        return slice(first, end + 1, ids.lane_stride)

    def advance(self, lanes: slice | np.ndarray, n_timesteps: int, is_block: bool) -> None:
        """Follows the heads of lanes that have risen; `is_block` says whether `find_block` found their rows."""
        head = self.head
        if isinstance(lanes, slice) and lanes == ALL and (head is None or not is_block):
            self.head = None if head is None else head + n_timesteps  # they keep their distances
        elif head is None or not isinstance(lanes, slice) or not is_block:
            self._find()
        elif lanes.stop is None or lanes.stop == self._ring.n_lanes:
            self.head, self.n_ahead = head + n_timesteps, 0
        else:
            self.n_ahead = lanes.stop

