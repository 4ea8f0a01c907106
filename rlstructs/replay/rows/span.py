"""The rows that can be drawn, as row ids, and draws of them; `expand` adds the rows around a drawn row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rlstructs.errors import SpecError
from rlstructs.replay.rows.lanes import LANE, Ring, RowIds, keep_order


class Span:
    """The rows that can be drawn: steps `[low, high)` of each lane, from a snapshot of the counters.

    Args:
        ring: the counters.
        columns: the row ids of the store.
        length: how many rows a sample has, from the drawn row on.
    """

    def __init__(self, ring: Ring, columns: RowIds, length: int = 1) -> None:
        self.columns, self.length = columns, length
        # Two equal copies in a row are consistent: counters only grow, and a writer may interrupt a copy.
        self.snapshot = b""
        while self.snapshot != (seen := ring.counters.tobytes()):
            self.snapshot = seen
            keep_order()  # rows are read after the counters
        counters = np.frombuffer(self.snapshot, np.int64).reshape(ring.counters.shape)
        # Lanes are nearly always in step: then plain numbers replace arrays.
        self.aligned = columns.n_lanes == 1 or bool((counters == counters[:, :1]).all())
        low: Any
        head: Any
        self.total: int
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
        # Rows need no others after them, and no writer is about to overwrite one.
        self.is_settled = length == 1 and bool((reserved == head) if self.aligned else (reserved == head).all())

    @property
    def low(self) -> np.ndarray:
        """The first step of each lane, int64 (n_lanes,)."""
        return self._of_lanes(self._low)

    @property
    def high(self) -> np.ndarray:
        """The end of the steps of each lane, int64 (n_lanes,)."""
        return self._of_lanes(self._high)

    @property
    def head(self) -> np.ndarray:
        """The head of each lane, int64 (n_lanes,), which determines the step of a row id."""
        return self._of_lanes(self._head)

    def _of_lanes(self, value: Any) -> np.ndarray:
        return np.full(self.columns.n_lanes, value) if self.aligned else np.asarray(value)

    @property
    def steps_of_all(self) -> tuple[int, int] | None:
        """The first step and the number of steps, if they are the same in every lane."""
        return (self._low, self._high - self._low) if self.aligned else None

    def counts(self) -> np.ndarray:
        """Rows per lane, int64."""
        return np.asarray(self.high - self.low)

    def row_ids(self, index: np.ndarray) -> np.ndarray:
        """The row ids of row numbers, each in [0, total)."""
        if self.aligned:
            return self.columns.numbered(index, self._low, self._high - self._low)
        return numbered(self.columns, self._low, self.counts(), index)

    def draw(self, n: int, rng: np.random.Generator) -> np.ndarray:
        """Draws `n` row ids, each row as likely as any other."""
        index = draw_numbers(self.total, n, rng)
        # In full lanes a row number is a row id too, though of another row.
        return index if self.total == self.columns.n_rows else self.row_ids(index)

    def newest(self) -> np.ndarray:
        """The row id of the newest row of each lane, int64 (n_lanes,); the first slot of an empty lane."""
        steps = max(self._head - 1, self._low) if self.aligned else np.maximum(self._head - 1, self._low)
        return self.columns.rows(np.arange(self.columns.n_lanes), steps % self.columns.capacity)

    def newer(self, since: np.ndarray) -> np.ndarray:
        """The row ids of all rows from the steps `since` (n_lanes,) on."""
        low = np.maximum(self.low, since)
        counts = np.maximum(self.head - low, 0)
        return numbered(self.columns, low, counts)

    def steps(self, rows: np.ndarray) -> np.ndarray:
        """The steps of row ids, int64."""
        return self.columns.steps(rows, self._head - 1)

    def ages(self, rows: np.ndarray) -> np.ndarray:
        """The number of rows before each in its lane, int64."""
        return np.asarray(self.steps(rows) - (self._low if self.aligned else self._low[self.columns.lanes(rows)]))

    def left(self, rows: np.ndarray) -> np.ndarray:
        """The number of rows from each on in its lane, int64."""
        return np.asarray((self._head if self.aligned else self._head[self.columns.lanes(rows)]) - self.steps(rows))

    def has(self, rows: np.ndarray) -> np.ndarray:
        """Which row ids are in the span, bool."""
        return self.holds(rows, self.steps(rows))

    def holds(self, rows: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Which rows are in the span and still hold these steps, bool."""
        if self.aligned:
            return np.asarray((steps >= self._low) & (steps < self._high))
        lanes = self.columns.lanes(rows)
        return np.asarray((steps >= self._low[lanes]) & (steps < self._high[lanes]))

    def is_reserved(self, rows: np.ndarray) -> np.ndarray:
        """Which rows a writer is about to write, bool."""
        return np.asarray(
            self.steps(rows) + self.columns.capacity < self._of_lanes(self._reserved)[self.columns.lanes(rows)]
        )

    def by_step(self) -> np.ndarray:
        """All row ids, sorted by step and then by lane."""
        if self.aligned:
            steps = np.arange(self._low, self._high)[:, None]
            return self.columns.at_steps(np.arange(self.columns.n_lanes), steps).reshape(-1)
        rows, _ = self.by_lane(1)
        return rows[np.lexsort((self.columns.lanes(rows), self.steps(rows)))]

    def by_lane(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """All row ids, sorted by lane and then by step, and the positions where sequences of `length` begin."""
        counts = self.counts()
        lanes = np.repeat(np.arange(counts.size), counts)
        return self.columns.at_steps(lanes, self.low[lanes] + _places(lanes)), find_starts(lanes, length)

    def by_slot(self, index: np.ndarray) -> np.ndarray:
        """The row ids with these numbers, counted by lane and then by slot.

        Raises:
            IndexError: there are fewer rows.
        """
        if index.size and index.max() >= self.total:
            raise IndexError(f"row {index.max()} is not among {self.total}")
        capacity, low, counts = self.columns.capacity, self._low, self._high - self._low
        if self.aligned:
            lanes, number = divmod(index, counts) if self.columns.n_lanes > 1 else (0, index)
        else:
            ends = np.cumsum(counts)
            lanes = np.searchsorted(ends, index, side="right")
            number, low, counts = index - (ends - counts)[lanes], low[lanes], counts[lanes]
        # The newest rows come first where a lane has gone on to its first slot.
        first = low % capacity
        around = np.maximum(first + counts - capacity, 0)
        return self.columns.rows(lanes, np.where(number < around, number, first + number - around))

    def every_row(self) -> np.ndarray:
        """All row ids, sorted by row number."""
        if self.aligned and self.columns.order == LANE:
            return self.columns.between(self._low, self._high)
        return self.row_ids(np.arange(self.total))


def find_starts(lanes: np.ndarray, length: int) -> np.ndarray:
    """The positions where sequences of `length` rows begin; `lanes`, those of the rows, are sorted."""
    return np.flatnonzero(_places(lanes) % length == 0)


def _places(lanes: np.ndarray) -> np.ndarray:
    """The number of each row in its lane; the lanes are sorted."""
    return np.asarray(np.arange(lanes.size) - np.searchsorted(lanes, lanes))


def numbered(columns: RowIds, low: np.ndarray, counts: np.ndarray, index: np.ndarray | None = None) -> np.ndarray:
    """The row ids of row numbers, which count `counts` rows of each lane from the step `low` on; None for all."""
    ends = np.cumsum(counts)
    index = np.arange(ends[-1]) if index is None else index
    lanes = np.searchsorted(ends, index, side="right")
    steps = low[lanes] + index - (ends - counts)[lanes]
    return columns.at_steps(lanes, steps)


@dataclass(slots=True)
class Selection:
    """The drawn samples.

    Attributes:
        rows: int64 (B, L) row ids, the earliest of each sample in column 0.
        span: the counters at the time of the draw.
        fields: more values of each sample (mask, weights, ...), first axis B.
        earliest: int64 (B,), the first row that is read for each; None for column 0.
    """

    rows: np.ndarray
    span: Span
    fields: dict[str, np.ndarray] = field(default_factory=dict)
    earliest: np.ndarray | None = None

    def put(self, at: np.ndarray, other: Selection) -> None:
        """Replaces some samples, in place."""
        self.rows[at] = other.rows
        for name, values in self.fields.items():
            values[at] = other.fields[name]


class Listed(Protocol):
    """Rows that can be listed."""

    def every_row(self) -> np.ndarray:
        """Every row, int64 (n,)."""


# Number of draws before all rows that fit are listed instead.
TRIES = 8


def draw_fitting(
    draw: Callable[[int], np.ndarray],
    fits: Callable[[np.ndarray], np.ndarray],
    n: int,
    choose: Callable[[np.ndarray, int], np.ndarray],
    span: Listed,
    wanted: str = "window of this length",
) -> np.ndarray:
    """Draws `n` row ids that fit.

    Args:
        draw: draws a given number of row ids.
        fits: returns which row ids fit, bool.
        choose: draws a given number from an array of row ids, with the distribution of `draw`.
        span: lists all rows.
        wanted: what a row that fits is, for the message.

    Raises:
        SpecError: no row fits.
    """
    rows = draw(n)
    found: np.ndarray = rows[fits(rows)]
    for _ in range(TRIES):
        if found.size == n:
            return found
        # Only as many as are missing: a draw may be sorted by row, so dropping its end would favour low rows.
        rows = draw(n - found.size)
        found = np.concatenate([found, rows[fits(rows)]])
    if found.size == n:
        return found
    every: np.ndarray = span.every_row()
    every = every[fits(every)]
    if not every.size:
        raise SpecError(f"nothing to sample: no {wanted} is stored")
    return np.concatenate([found, choose(every, n - found.size)])


class Uniform:
    """Draws every row with equal probability.

    Args:
        replacement: whether a draw may hold a row twice; None for yes, except in a draw as large as the store.
    """

    def __init__(self, replacement: bool | None = True) -> None:
        self.replacement = None if replacement is None else bool(replacement)

    def draw(self, span: Span, n: int, rng: np.random.Generator) -> np.ndarray:
        """Draws `n` row ids; without replacement there may be fewer.

        Raises:
            SpecError: the span is empty.
        """
        total = span.total
        if total == 0:
            raise SpecError("nothing to sample: no row, or no window of this length, is stored")
        if self.replacement or (self.replacement is None and n != total):
            return span.draw(n, rng)
        return span.row_ids(rng.choice(total, min(n, total), replace=False))


def draw_numbers(total: int, n: int, rng: np.random.Generator) -> np.ndarray:
    """Draws `n` numbers below `total`, each as likely as any other, in half the time of `rng.integers`; int64."""
    return (rng.random(n) * total).astype(np.int64)
