"""Which rows are drawn: anchors, as row ids. What is around an anchor is for `expand`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from rlstructs.replay.columns import LANE, Columns
from rlstructs.replay.ring import Ring


class Span:
    """The rows that may be drawn: steps `[low, high)` of each lane, as the counters stood at one time.

    Args:
        ring: whose counters.
        columns: whose row ids.
        length: how many rows each of them needs from itself on.
    """

    def __init__(self, ring: Ring, columns: Columns, length: int = 1) -> None:
        self.columns, self.length = columns, length
        # Seen twice alike they are of one time: they only grow, and a copy may be interrupted.
        self.snapshot = b""
        while self.snapshot != (seen := ring.counters.tobytes()):
            self.snapshot = seen
        counters = np.frombuffer(self.snapshot, np.int64).reshape(ring.counters.shape)
        # Most often the lanes are in step: then plain numbers do.
        self.aligned = columns.n_lanes == 1 or bool((counters == counters[:, :1]).all())
        low: Any
        head: Any
        base, reserved, head = counters[:, 0].tolist() if self.aligned else counters
        if self.aligned:
            low = max(base, reserved - ring.capacity)
            high = max(head - length + 1, low)
            self.total = (high - low) * columns.n_lanes
        else:
            low = np.maximum(base, reserved - ring.capacity)
            high = np.maximum(head - length + 1, low)
            self.total = int((high - low).sum())
        self._low, self._high, self._head, self._reserved = low, high, head, reserved
        # No row needs others after it, and no writer is about to overwrite one.
        self.is_settled = length == 1 and bool((reserved == head) if self.aligned else (reserved == head).all())

    @property
    def low(self) -> np.ndarray:
        """int64 (n_lanes,), the first step of each lane."""
        return self._of_lanes(self._low)

    @property
    def high(self) -> np.ndarray:
        """int64 (n_lanes,), behind the last one."""
        return self._of_lanes(self._high)

    @property
    def head(self) -> np.ndarray:
        """int64 (n_lanes,), the heads: they say which step a row id means."""
        return self._of_lanes(self._head)

    def _of_lanes(self, value: Any) -> np.ndarray:
        return np.full(self.columns.n_lanes, value) if self.aligned else np.asarray(value)

    def counts(self) -> np.ndarray:
        """Rows per lane, int64."""
        return np.asarray(self.high - self.low)

    def row_ids(self, index: np.ndarray) -> np.ndarray:
        """The rows with these numbers, when all are counted; every row has one number below `total`."""
        columns = self.columns
        if self.aligned and columns.order == LANE:
            lanes, ages = np.divmod(index, self._high - self._low) if columns.n_lanes > 1 else (0, index)
            return columns.rows(lanes, (self._low + ages) % columns.capacity)
        if self.aligned:  # counted by step: the rows of one step, and then those of the next, lie in a row
            return np.asarray((index + self._low * columns.n_lanes) % columns.n_rows)
        return _numbered(columns, self._low, self.counts(), index)

    def newer(self, since: np.ndarray) -> np.ndarray:
        """The rows from the steps `since` (n_lanes,) on, row ids."""
        low = np.maximum(self.low, since)
        counts = np.maximum(self.head - low, 0)
        return _numbered(self.columns, low, counts, np.arange(int(counts.sum())))

    def steps(self, rows: np.ndarray) -> np.ndarray:
        """The steps that row ids mean, int64."""
        if self.aligned and self.columns.order == LANE:  # a row id is its slot, but for a multiple of the capacity
            last = self._head - 1
            return np.asarray(last - (last - rows) % self.columns.capacity)
        lanes, slots = self.columns.places(rows)
        last = self._head - 1 if self.aligned else self._head[lanes] - 1
        return np.asarray(last - (last - slots) % self.columns.capacity)

    def has(self, rows: np.ndarray) -> np.ndarray:
        """Which of some row ids are in it, bool."""
        return self.holds(rows, self.steps(rows))

    def holds(self, rows: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Which of some row ids are in it and mean these steps, of which there are no other rows, bool."""
        if self.aligned:
            return np.asarray((steps >= self._low) & (steps < self._high))
        lanes, _ = self.columns.places(rows)
        return np.asarray((steps >= self._low[lanes]) & (steps < self._high[lanes]))

    def is_reserved(self, rows: np.ndarray) -> np.ndarray:
        """Which of some row ids a writer is about to write, bool."""
        lanes, _ = self.columns.places(rows)
        return np.asarray(self.steps(rows) + self.columns.capacity < self._of_lanes(self._reserved)[lanes])

    def by_step(self) -> np.ndarray:
        """Every row, by step and then by lane."""
        if self.aligned:
            steps = np.arange(self._low, self._high)[:, None] % self.columns.capacity
            return self.columns.rows(np.arange(self.columns.n_lanes), steps).reshape(-1)
        rows, _ = self.by_lane(1)
        lanes, _ = self.columns.places(rows)
        return rows[np.lexsort((lanes, self.steps(rows)))]

    def by_lane(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Every row, by lane and then by step, and where in them a sequence of `length` begins."""
        counts = self.counts()
        ages = np.concatenate([np.arange(n) for n in counts]) if counts.sum() else np.zeros(0, np.int64)
        lanes = np.repeat(np.arange(counts.size), counts)
        rows = self.columns.rows(lanes, (self.low[lanes] + ages) % self.columns.capacity)
        return rows, np.flatnonzero(ages % length == 0)

    def every_row(self) -> np.ndarray:
        """Every row, by number."""
        return self.row_ids(np.arange(self.total))


def _numbered(columns: Columns, low: np.ndarray, counts: np.ndarray, index: np.ndarray) -> np.ndarray:
    """The rows with these numbers, when `counts` rows of each lane are counted from the step `low` on."""
    ends = np.cumsum(counts)
    lanes = np.searchsorted(ends, index, side="right")
    steps = low[lanes] + index - (ends - counts)[lanes]
    return columns.rows(lanes, steps % columns.capacity)


class Epoch:
    """Every row once, in random order, and then again.

    Args:
        drop_last: whether an epoch ends before a batch that would be smaller.
    """

    def __init__(self, drop_last: bool = False) -> None:
        self.drop_last = drop_last

    def batches(self, span: Span, n: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
        """The row ids of one epoch, `n` at a time; the last batch may be smaller."""
        order = rng.permutation(span.total)
        for start in range(0, len(order), n):
            if start + n > len(order) and self.drop_last:
                return
            yield span.row_ids(order[start : start + n])
