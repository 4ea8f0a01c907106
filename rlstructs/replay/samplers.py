"""Which rows are drawn: anchors, as row ids. What is around an anchor is for `expand`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from rlstructs.errors import SpecError
from rlstructs.replay.columns import LANE, Columns
from rlstructs.replay.ring import Ring


@dataclass(frozen=True)
class Span:
    """The rows that may be drawn: steps `[low, high)` of each lane, as the counters stood at one time.

    Attributes:
        low, high: int64 (n_lanes,).
        head: int64 (n_lanes,), the heads then; says which step a row id means.
    """

    low: np.ndarray
    high: np.ndarray
    head: np.ndarray
    columns: Columns

    @classmethod
    def of(cls, ring: Ring, columns: Columns, length: int = 1) -> Span:
        """Every valid row that has `length - 1` others after it."""
        head = ring.head.copy()
        low = ring.oldest()
        return cls(low, np.maximum(head - (length - 1), low), head, columns)

    def counts(self) -> np.ndarray:
        """Rows per lane, int64."""
        return np.asarray(self.high - self.low)

    def row_ids(self, index: np.ndarray) -> np.ndarray:
        """The rows with these numbers, when all are counted; every row has one number below `counts().sum()`."""
        columns, counts = self.columns, self.counts()
        aligned = columns.n_lanes == 1 or bool((self.low == self.low[0]).all() and (counts == counts[0]).all())
        if aligned and columns.order == LANE:
            lanes, ages = np.divmod(index, counts[0]) if columns.n_lanes > 1 else (0, index)
            return columns.rows(lanes, (self.low[0] + ages) % columns.capacity)
        if aligned:  # counted by step: the rows of one step, and then those of the next, lie in a row
            return np.asarray((index + self.low[0] * columns.n_lanes) % columns.n_rows)
        ends = np.cumsum(counts)
        lanes = np.searchsorted(ends, index, side="right")
        steps = self.low[lanes] + index - (ends - counts)[lanes]
        return columns.rows(lanes, steps % columns.capacity)

    def by_step(self) -> np.ndarray:
        """Every row, by step and then by lane."""
        steps = np.arange(self.low.min(), self.high.max())
        inside = (steps[:, None] >= self.low) & (steps[:, None] < self.high)
        at, lanes = np.nonzero(inside)
        return self.columns.rows(lanes, steps[at] % self.columns.capacity)

    def by_lane(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Every row, by lane and then by step, and where in them a sequence of `length` begins."""
        counts = self.counts()
        ages = np.concatenate([np.arange(n) for n in counts]) if counts.sum() else np.zeros(0, np.int64)
        lanes = np.repeat(np.arange(counts.size), counts)
        rows = self.columns.rows(lanes, (self.low[lanes] + ages) % self.columns.capacity)
        return rows, np.flatnonzero(ages % length == 0)

    def every_row(self) -> np.ndarray:
        """Every row, by number."""
        return self.row_ids(np.arange(int(self.counts().sum())))


# Draws that may have to be thrown away before all rows that fit are listed.
TRIES = 8


def draw_fitting(
    draw: Callable[[int], np.ndarray],
    fits: Callable[[np.ndarray], np.ndarray],
    n: int,
    choose: Callable[[np.ndarray, int], np.ndarray],
    span: Span,
) -> np.ndarray:
    """`n` row ids as `draw` gives them, of those that fit only.

    Args:
        draw: so many row ids.
        fits: which of some row ids do, bool.
        choose: so many of some row ids, as `draw` would if there were only those.
        span: where they lie.

    Raises:
        SpecError: none fits.
    """
    rows = draw(n)
    found: np.ndarray = rows[fits(rows)]
    for _ in range(TRIES):
        if found.size >= n:
            return found[:n]
        rows = draw(n)
        found = np.concatenate([found, rows[fits(rows)]])
    if found.size >= n:
        return found[:n]
    every: np.ndarray = span.every_row()
    every = every[fits(every)]
    if not every.size:
        raise SpecError("nothing to sample: no window of this length is stored")
    return np.concatenate([found, choose(every, n - found.size)])


class Uniform:
    """Every row as likely as any other.

    Args:
        replacement: whether one draw may hold a row twice.
    """

    def __init__(self, replacement: bool = True) -> None:
        self.replacement = replacement

    def draw(self, span: Span, n: int, rng: np.random.Generator) -> np.ndarray:
        """`n` row ids.

        Raises:
            SpecError: there are none, or fewer than `n` to draw without replacement.
        """
        total = int(span.counts().sum())
        if total == 0:
            raise SpecError("nothing to sample: no row, or no window of this length, is stored")
        if self.replacement:
            return span.row_ids(rng.integers(total, size=n))
        if n > total:
            raise SpecError(f"cannot sample {n} rows without replacement, there are {total}")
        return span.row_ids(rng.choice(total, n, replace=False))


class Epoch:
    """Every row once, in random order, and then again.

    Args:
        drop_last: whether an epoch ends before a batch that would be smaller.
    """

    def __init__(self, drop_last: bool = False) -> None:
        self.drop_last = drop_last

    def batches(self, span: Span, n: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
        """The row ids of one epoch, `n` at a time; the last batch may be smaller."""
        order = rng.permutation(int(span.counts().sum()))
        for start in range(0, len(order), n):
            if start + n > len(order) and self.drop_last:
                return
            yield span.row_ids(order[start : start + n])
