"""The rows of a store at one time, and the neighbours of each.

Neighbours are in the same lane, and in the same episode.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from rlstructs.replay.rows.episodes import Episodes
from rlstructs.replay.rows.lanes import LANE, Ring, RowIds, keep_order


class View:
    """The rows that can be drawn: steps `[low, high)` of each lane.

    They follow from a copy of the counters.

    A pickle has the counters without the episodes: what a drawn row stood for needs no more.

    Args:
        ring: the counters.
        columns: the row ids of the store.
        length: how many rows a sample has, from the drawn row on.
        episodes: of the rows; None if the store does not track them, and then nobody may ask about episodes.
        found_at: `Instant.columns` before the counters were read.

    Attributes:
        snapshot: see `Instant`.
    """

    def __init__(
        self, ring: Ring, columns: RowIds, length: int = 1, episodes: Episodes | None = None, found_at: int = 0
    ) -> None:
        self.columns, self.length, self.episodes, self.found_at = columns, length, episodes, found_at
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
        base, reserved, head, floor = counters[:, 0].tolist() if self.aligned else counters
        if self.aligned:
            low = max(base, reserved - ring.capacity, floor)
            high = max(head - length + 1, low)
            self.total = (high - low) * columns.n_lanes
        else:
            low = np.maximum(np.maximum(base, floor), reserved - ring.capacity)
            high = np.maximum(head - length + 1, low)
            self.total = int((high - low).sum())
        self._low, self._high, self._head, self._reserved, self._floor = low, high, head, reserved, floor
        # Rows need no others after them, and no writer is about to overwrite one.
        self.is_settled = length == 1 and bool((reserved == head) if self.aligned else (reserved == head).all())

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "episodes": None}

    @property
    def edits(self) -> int:
        """The last change of episodes without new rows; see `Instant`."""
        return 0 if self.episodes is None else self.episodes.columns.clock.edits

    # Rows

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
        """The head of each lane, int64 (n_lanes,).

        It determines the step of a row id.
        """
        return self._of_lanes(self._head)

    def _of_lanes(self, value: Any) -> np.ndarray:
        return np.full(self.columns.n_lanes, value) if self.aligned else np.asarray(value)

    @property
    def steps_of_all(self) -> tuple[int, int] | None:
        """The first step and the number of steps of every lane.

        None if lanes differ.
        """
        return (self._low, self._high - self._low) if self.aligned else None

    def counts(self) -> np.ndarray:
        """Counts the rows of each lane, int64."""
        return np.asarray(self.high - self.low)

    def row_ids(self, index: np.ndarray) -> np.ndarray:
        """Returns the row ids of row numbers, each in [0, total).

        Row numbers count lane by lane, from the oldest row on.
        """
        if self.aligned:
            return self.columns.numbered(index, self._low, self._high - self._low)
        return numbered(self.columns, self._low, self.counts(), index)

    def draw(self, n: int, rng: np.random.Generator) -> np.ndarray:
        """Draws `n` row ids, each row as likely as any other."""
        index = draw_numbers(self.total, n, rng)
        # In full lanes a row number is a row id too, though of another row.
        return index if self.total == self.columns.n_rows else self.row_ids(index)

    def every_row(self) -> np.ndarray:
        """Lists all row ids, sorted by row number."""
        if self.aligned and self.columns.order == LANE:
            return self.columns.between(self._low, self._high)
        return self.row_ids(np.arange(self.total))

    def by_step(self) -> np.ndarray:
        """Lists all row ids, sorted by step and then by lane."""
        if self.aligned:
            steps = np.arange(self._low, self._high)[:, None]
            return self.columns.at_steps(np.arange(self.columns.n_lanes), steps).reshape(-1)
        rows, _ = self.by_lane(1)
        return rows[np.lexsort((self.columns.lanes(rows), self.steps(rows)))]

    def by_lane(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Lists all row ids, sorted by lane and then by step.

        Also returns the positions where sequences of `length` begin.
        """
        counts = self.counts()
        lanes = np.repeat(np.arange(counts.size), counts)
        return self.columns.at_steps(lanes, self.low[lanes] + _places(lanes)), find_starts(lanes, length)

    def by_slot(self, index: np.ndarray) -> np.ndarray:
        """Returns the row ids with these numbers, counted by lane and slot.

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
        # The newest rows come first in a lane that has wrapped.
        first = low % capacity
        around = np.maximum(first + counts - capacity, 0)
        return self.columns.rows(lanes, np.where(number < around, number, first + number - around))

    def newest(self) -> np.ndarray:
        """Returns the newest row id of each lane, int64 (n_lanes,).

        For an empty lane it is the first slot.
        """
        steps = max(self._head - 1, self._low) if self.aligned else np.maximum(self._head - 1, self._low)
        return self.columns.rows(np.arange(self.columns.n_lanes), steps % self.columns.capacity)

    def newer(self, since: np.ndarray) -> np.ndarray:
        """Lists all row ids from the steps `since` (n_lanes,) on."""
        low = np.maximum(self.low, since)
        counts = np.maximum(self.head - low, 0)
        return numbered(self.columns, low, counts)

    # Neighbours in the lane

    def steps(self, rows: np.ndarray) -> np.ndarray:
        """Returns the steps of row ids, int64."""
        return self.columns.steps(rows, self._head - 1)

    def ages(self, rows: np.ndarray) -> np.ndarray:
        """How many rows are before each in its lane, int64."""
        return np.asarray(self.steps(rows) - (self._low if self.aligned else self._low[self.columns.lanes(rows)]))

    def left(self, rows: np.ndarray) -> np.ndarray:
        """How many rows there are in its lane from each on, int64."""
        return np.asarray((self._head if self.aligned else self._head[self.columns.lanes(rows)]) - self.steps(rows))

    def has(self, rows: np.ndarray) -> np.ndarray:
        """Which row ids are there, bool."""
        return self.holds(rows, self.steps(rows))

    def holds(self, rows: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Which rows are there and still hold these steps, bool."""
        if self.aligned:
            return np.asarray((steps >= self._low) & (steps < self._high))
        lanes = self.columns.lanes(rows)
        return np.asarray((steps >= self._low[lanes]) & (steps < self._high[lanes]))

    def is_taken(self, rows: np.ndarray) -> np.ndarray:
        """Marks rows that a writer has overwritten, bool.

        It has taken their slots, or their bytes, for newer rows.
        """
        steps, lanes = self.steps(rows), self.columns.lanes(rows)
        has_left = (steps >= 0) & (steps < self._of_lanes(self._floor)[lanes])
        return np.asarray(has_left | (steps + self.columns.capacity < self._of_lanes(self._reserved)[lanes]))

    def shifted(self, rows: np.ndarray, by: np.ndarray) -> np.ndarray:
        """Returns the row ids of the rows `by` steps later in their lanes."""
        return self.columns.shifted(rows, by)

    # Neighbours in the episode

    def unfinished(self) -> np.ndarray:
        """Returns the newest rows of the lanes whose episodes go on, int64."""
        newest = self.newest()
        if self.total < self.columns.n_rows:  # lanes may be empty
            newest = newest[self.counts() > 0]
        return np.asarray(newest[~self._tracked().end(newest)])

    def begin(self, rows: np.ndarray) -> np.ndarray:
        """Which rows begin an episode, bool."""
        return self._tracked().begin(rows)

    def depths(self, rows: np.ndarray) -> np.ndarray:
        """Counts the valid rows before each in its episode, int64."""
        return np.asarray(np.minimum(self._tracked().times(rows), self.ages(rows)))

    def remaining(self, rows: np.ndarray) -> np.ndarray:
        """The number of valid rows from each on in its episode, itself included, int64."""
        return np.asarray(np.minimum(self._tracked().remaining(rows), self.left(rows)))

    def prev(self, rows: np.ndarray) -> np.ndarray:
        """Returns the previous row of each row's episode.

        It is the row itself if there is none.
        """
        return self.columns.shifted(rows, (self.depths(rows) == 0) - np.int64(1))

    def next(self, rows: np.ndarray) -> np.ndarray:
        """Returns the next row of each row's episode.

        It is the row itself if there is none.
        """
        return self.columns.shifted(rows, self.remaining(rows) != 1)

    def frames(self, rows: np.ndarray, n: int) -> np.ndarray:
        """Returns the last n rows of an episode up to each row, (B, n).

        The first valid row is repeated.
        """
        back = np.minimum(np.arange(n - 1, -1, -1), self.depths(rows)[:, None])
        return self.columns.shifted(rows[:, None], -back)

    def run(self, rows: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Follows each row (B,) up to n rows or the end of its episode.

        Returns these rows, and which of them count.

        Returns:
            Rows (B, n), the last one repeated; a mask of those that are no repetition, bool (B, n).
        """
        counts, index = self.remaining(rows)[:, None], np.arange(n)
        mask = index < counts
        offsets = index if mask.all() else np.minimum(index, counts - 1)
        return self.columns.shifted(rows[:, None], offsets), mask

    def episodes_of(self, rows: np.ndarray) -> np.ndarray:
        """Returns a number for the episode of each row (B,), int64.

        Rows have the same number only if they are of the same episode.
        """
        first = self.steps(rows) - self._tracked().times(rows)
        return np.asarray(first * self.columns.n_lanes + self.columns.lanes(rows))

    def _tracked(self) -> Episodes:
        assert self.episodes is not None, "the store tracks episodes"
        return self.episodes


class JoinedView:
    """The rows of several stores, one after another; its methods are those of `View`.

    Args:
        parts: one of each store.
        sizes: how many row ids each takes.
    """

    def __init__(self, parts: Sequence[View], sizes: Sequence[int]) -> None:
        self.parts = parts
        self.offsets = np.cumsum([0, *sizes]).tolist()
        self.total = sum(part.total for part in parts)

    def every_row(self) -> np.ndarray:
        return self._join([part.every_row() for part in self.parts])

    def newest(self) -> np.ndarray:
        return self._join([part.newest() for part in self.parts])

    def unfinished(self) -> np.ndarray:
        return self._join([part.unfinished() for part in self.parts])

    def _join(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([own + offset for own, offset in zip(rows, self.offsets, strict=False)])

    def row_ids(self, index: np.ndarray) -> np.ndarray:
        rows, start = np.zeros(index.shape, np.int64), 0
        for part, offset in zip(self.parts, self.offsets, strict=False):
            inside = (index >= start) & (index < start + part.total)
            if inside.any():
                rows[inside] = part.row_ids(index[inside] - start) + offset
            start += part.total
        return rows

    def draw(self, n: int, rng: np.random.Generator) -> np.ndarray:
        return self.row_ids(draw_numbers(self.total, n, rng))

    def has(self, rows: np.ndarray) -> np.ndarray:
        return self._fill(np.zeros(rows.shape, bool), rows, lambda part, own, _: part.has(own))

    def depths(self, rows: np.ndarray) -> np.ndarray:
        return self._fill(np.zeros_like(rows), rows, lambda part, own, _: part.depths(own))

    def remaining(self, rows: np.ndarray) -> np.ndarray:
        return self._fill(np.zeros_like(rows), rows, lambda part, own, _: part.remaining(own))

    def begin(self, rows: np.ndarray) -> np.ndarray:
        return self._fill(np.zeros(rows.shape, bool), rows, lambda part, own, _: part.begin(own))

    def shifted(self, rows: np.ndarray, by: np.ndarray) -> np.ndarray:
        found = np.zeros_like(rows)
        for part, at, own, offset in self.split(rows):
            found[at] = part.shifted(own, by[at]) + offset
        return found

    def prev(self, rows: np.ndarray) -> np.ndarray:
        return self._fill(np.zeros_like(rows), rows, lambda part, own, offset: part.prev(own) + offset)

    def next(self, rows: np.ndarray) -> np.ndarray:
        return self._fill(np.zeros_like(rows), rows, lambda part, own, offset: part.next(own) + offset)

    def frames(self, rows: np.ndarray, n: int) -> np.ndarray:
        frames = np.zeros((*rows.shape, n), np.int64)
        return self._fill(frames, rows, lambda part, own, offset: part.frames(own, n) + offset)

    def run(self, rows: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
        after, mask = np.zeros((*rows.shape, n), np.int64), np.zeros((*rows.shape, n), bool)
        for part, at, own, offset in self.split(rows):
            after[at], mask[at] = part.run(own, n)
            after[at] += offset
        return after, mask

    def _fill(
        self, found: np.ndarray, rows: np.ndarray, find: Callable[[View, np.ndarray, int], np.ndarray]
    ) -> np.ndarray:
        """Fills an array with the results of `find` for each part.

        `find` takes the part, the rows' ids in it, and the part's offset.
        """
        for part, at, own, offset in self.split(rows):
            found[at] = find(part, own, offset)
        return found

    def split(self, rows: np.ndarray) -> Iterator[tuple[View, np.ndarray, np.ndarray, int]]:
        """Yields each part that has some of these rows.

        With it come a mask of its rows in `rows`, bool; their ids in the part; and the part's offset.
        """
        for part, (start, stop) in zip(self.parts, itertools.pairwise(self.offsets), strict=True):
            inside = (rows >= start) & (rows < stop)
            if inside.any():
                yield part, inside, rows[inside] - start, start


AnyView = View | JoinedView


def find_starts(lanes: np.ndarray, length: int) -> np.ndarray:
    """Returns the positions where sequences of `length` rows begin.

    `lanes`, one for each row, are sorted.
    """
    return np.flatnonzero(_places(lanes) % length == 0)


def _places(lanes: np.ndarray) -> np.ndarray:
    """Numbers the rows within their lanes; the lanes are sorted."""
    return np.asarray(np.arange(lanes.size) - np.searchsorted(lanes, lanes))


def numbered(columns: RowIds, low: np.ndarray, counts: np.ndarray, index: np.ndarray | None = None) -> np.ndarray:
    """Returns the row ids of row numbers; None for all rows.

    The numbers count `counts` rows of each lane, from the step `low` on.
    """
    ends = np.cumsum(counts)
    index = np.arange(ends[-1]) if index is None else index
    lanes = np.searchsorted(ends, index, side="right")
    steps = low[lanes] + index - (ends - counts)[lanes]
    return columns.at_steps(lanes, steps)


def draw_numbers(total: int, n: int, rng: np.random.Generator) -> np.ndarray:
    """Draws `n` numbers below `total`, uniformly; int64.

    It takes half the time of `rng.integers`.
    """
    return (rng.random(n) * total).astype(np.int64)
