"""The rows of a buffer at one time, and their neighbours in their episodes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from rlstructs.replay.rows.span import Span, draw_numbers
from rlstructs.replay.rows.store import Storage


class Snapshot:
    """The rows of one store.

    Args:
        storage: the store, which tracks episodes.
        span: its counters at that time; None for now.
    """

    def __init__(self, storage: Storage, span: Span | None = None) -> None:
        assert storage.episodes is not None
        self.storage, self.episodes = storage, storage.episodes
        self.span = storage.span() if span is None else span
        self.total: int = self.span.total

    def every_row(self) -> np.ndarray:
        """Every row, lane by lane and from the oldest on."""
        return self.span.every_row()

    def numbered(self, index: np.ndarray) -> np.ndarray:
        """The rows with these numbers, counted lane by lane and from the oldest on."""
        return self.span.row_ids(index)

    def draw(self, n: int, rng: np.random.Generator) -> np.ndarray:
        """Draws `n` rows, each as likely as any other."""
        return self.span.draw(n, rng)

    def has(self, rows: np.ndarray) -> np.ndarray:
        """Which of these are valid, bool."""
        return self.span.has(rows)

    def newest(self) -> np.ndarray:
        """The newest row of each lane, int64 (n_lanes,); the first slot of an empty lane."""
        return self.span.newest()

    def unfinished(self) -> np.ndarray:
        """The newest rows of the lanes whose episodes go on, int64."""
        newest = self.newest()
        if self.total < self.span.columns.n_rows:  # lanes may be empty
            newest = newest[self.span.counts() > 0]
        return np.asarray(newest[~self.episodes.end(newest)])

    def prev(self, rows: np.ndarray) -> np.ndarray:
        """The row before each in its episode, or the row itself if there is none."""
        stays = self.episodes.begin(rows) | (self.span.ages(rows) == 0)
        return self.shifted(rows, stays - np.int64(1))

    def next(self, rows: np.ndarray) -> np.ndarray:
        """The row after each in its episode, or the row itself if there is none."""
        stays = self.episodes.end(rows) | (self.span.left(rows) == 1)
        return self.shifted(rows, ~stays)

    def shifted(self, rows: np.ndarray, by: np.ndarray) -> np.ndarray:
        """The rows so many steps after these in their lanes."""
        return self.span.columns.shifted(rows, by)

    def depths(self, rows: np.ndarray) -> np.ndarray:
        """The number of valid rows before each in its episode, int64."""
        return np.asarray(np.minimum(self.episodes.times(rows), self.span.ages(rows)))

    def following(self, rows: np.ndarray) -> np.ndarray:
        """The number of valid rows after each (B,) in its episode, int64."""
        return np.asarray(np.minimum(self.episodes.remaining(rows), self.span.left(rows)) - 1)

    def frames(self, rows: np.ndarray, n: int) -> np.ndarray:
        """Each row (B,) after the n - 1 before it in its episode, (B, n); the first valid one is repeated."""
        back = np.minimum(np.arange(n - 1, -1, -1), self.depths(rows)[:, None])
        return self.shifted(rows[:, None], -back)

    def n_step(self, rows: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Each row (B,) and those after it, up to n, the end of its episode or the newest row.

        Returns:
            Rows (B, n), the last one repeated; a mask of those that count, bool (B, n); their number, int64 (B,).
        """
        counts, index = np.minimum(self.following(rows) + 1, n), np.arange(n)
        return self.shifted(rows[:, None], np.minimum(index, counts[:, None] - 1)), index < counts[:, None], counts

    def episodes_of(self, rows: np.ndarray) -> np.ndarray:
        """A number for each row (B,) that only rows of the same episode share, int64."""
        columns = self.span.columns
        first = self.span.steps(rows) - self.episodes.times(rows)
        return np.asarray(first * columns.n_lanes + columns.lanes(rows))

    def gather(self, names: Sequence[str], rows: np.ndarray) -> list[Any]:
        """These rows of some columns, private memory, `(*rows.shape, *shape)` each."""
        return self.storage.gather(names, rows)


class JoinedSnapshot:
    """The rows of several stores, one after another; its methods are those of `Snapshot`.

    Args:
        parts: one of each store.
        sizes: how many row ids each takes.
    """

    def __init__(self, parts: Sequence[Snapshot], sizes: Sequence[int]) -> None:
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

    def numbered(self, index: np.ndarray) -> np.ndarray:
        rows, start = np.zeros(index.shape, np.int64), 0
        for part, offset in zip(self.parts, self.offsets, strict=False):
            inside = (index >= start) & (index < start + part.total)
            if inside.any():
                rows[inside] = part.numbered(index[inside] - start) + offset
            start += part.total
        return rows

    def draw(self, n: int, rng: np.random.Generator) -> np.ndarray:
        return self.numbered(draw_numbers(self.total, n, rng))

    def has(self, rows: np.ndarray) -> np.ndarray:
        return self._fill(np.zeros(rows.shape, bool), rows, lambda part, own, _: part.has(own))

    def depths(self, rows: np.ndarray) -> np.ndarray:
        return self._fill(np.zeros_like(rows), rows, lambda part, own, _: part.depths(own))

    def prev(self, rows: np.ndarray) -> np.ndarray:
        return self._fill(np.zeros_like(rows), rows, lambda part, own, offset: part.prev(own) + offset)

    def next(self, rows: np.ndarray) -> np.ndarray:
        return self._fill(np.zeros_like(rows), rows, lambda part, own, offset: part.next(own) + offset)

    def frames(self, rows: np.ndarray, n: int) -> np.ndarray:
        frames = np.zeros((*rows.shape, n), np.int64)
        return self._fill(frames, rows, lambda part, own, offset: part.frames(own, n) + offset)

    def n_step(self, rows: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        window, mask = np.zeros((*rows.shape, n), np.int64), np.zeros((*rows.shape, n), bool)
        for part, at, own, offset in self._parts_of(rows):
            after, mask[at], _ = part.n_step(own, n)
            window[at] = after + offset
        return window, mask, mask.sum(axis=-1)

    def gather(self, names: Sequence[str], rows: np.ndarray) -> list[Any]:
        specs = [self.parts[-1].storage.columns.specs[name] for name in names]
        arrays = [np.full((*rows.shape, *spec.shape), None if spec.is_object else 0, spec.dtype) for spec in specs]
        for part, at, own, _ in self._parts_of(rows):
            for array, values in zip(arrays, part.gather(names, own), strict=True):
                array[at] = values
        return arrays

    def _fill(
        self, found: np.ndarray, rows: np.ndarray, find: Callable[[Snapshot, np.ndarray, int], np.ndarray]
    ) -> np.ndarray:
        """Fills an array with what `find` returns for a part, its own row ids, and their offset."""
        for part, at, own, offset in self._parts_of(rows):
            found[at] = find(part, own, offset)
        return found

    def _parts_of(self, rows: np.ndarray) -> Iterator[tuple[Snapshot, np.ndarray, np.ndarray, int]]:
        """The parts of these rows: where its rows are in `rows`, bool; their ids in the part; and their offset."""
        for part, (start, stop) in zip(self.parts, itertools.pairwise(self.offsets), strict=True):
            inside = (rows >= start) & (rows < stop)
            if inside.any():
                yield part, inside, rows[inside] - start, start


AnySnapshot = Snapshot | JoinedSnapshot
