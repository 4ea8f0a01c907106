"""Episodes: the position of each row in its episode, and the episode's length.

There are two int32 per row: `time`, the position in the episode, and `length`, the number of steps of the episode, 0
while it goes on. So the first step of the episode is `step - time`, and the last is `step - time + length - 1`. The
newest row tells whether an episode is unfinished: nothing else has to agree with it after a writer was killed.
"""

from __future__ import annotations

from itertools import repeat
from typing import Any

import numpy as np

from rlstructs.replay.rows.backing import Backing
from rlstructs.replay.rows.blocks import rounds
from rlstructs.replay.rows.columns import Columns
from rlstructs.replay.rows.lanes import ALL, Ring
from rlstructs.replay.rows.spec import Spec

EPISODE = "episode"
PAIR = Spec(np.dtype(np.int32), (2,))
TIME, LENGTH = 0, 1  # of a pair
BYTES_PER_ROW = PAIR.nbytes
# For so many lanes a loop is faster than arithmetic with indexes.
FEW = 16
# Larger than any step: the episode has not ended.
NO_END = np.iinfo(np.int64).max


class Episodes:
    """The episodes of a ring.

    Args:
        ring: the counters; later ones are set as `columns.ring`.
        order: of row ids.
        backing: where the bytes are stored.
    """

    def __init__(self, ring: Ring, order: str, backing: Backing | None = None) -> None:
        self.columns = Columns(ring.n_lanes, ring.capacity, order, backing)
        self.columns.add(EPISODE, PAIR)
        self.columns.ring = ring

    @property
    def nbytes(self) -> int:
        """Bytes of the bookkeeping."""
        return self.columns.nbytes

    def open_lengths(self, lanes: slice | np.ndarray, head: int | None = None) -> np.ndarray:
        """Returns the steps so far of unfinished episodes, int (n,).

        It is 0 for a lane without one.

        Args:
            lanes: n of them.
            head: of all these lanes, if they have the same; saves time.
        """
        ring, pairs = self.columns.ring, self.columns.cells[EPISODE]
        heads: Any = ring.head[lanes] if head is None else head
        at: Any = lanes if head is not None else np.arange(self.columns.n_lanes)[lanes]
        slots = (heads - 1) % ring.capacity
        n_steps = pairs[at, slots, TIME] + 1
        n_open = np.where(pairs[at, slots, LENGTH] == n_steps, 0, n_steps)
        n_open[heads == ring.base[lanes]] = 0
        return n_open

    def write(
        self,
        lanes: slice | np.ndarray,
        done: np.ndarray,
        starts: np.ndarray | None = None,
        lengths: np.ndarray | None = None,
        head: int | None = None,
    ) -> None:
        """Records the T rows that follow each head, before the heads are raised.

        Args:
            lanes: n of them.
            done: bool (n, T), whether an episode ends with this row.
            starts: bool (n, T), whether one starts with it whatever came before.
            lengths: int64 (n,), how many of the T rows are valid; None for all.
            head: of all these lanes, if they have the same.
        """
        n_timesteps = done.shape[1]
        if not n_timesteps:
            return
        carried, index = self.open_lengths(lanes, head), np.arange(n_timesteps)
        pairs = np.zeros((*done.shape, 2), np.int32)
        if starts is None and lengths is None and not done.any():
            pairs[..., TIME] = carried[:, None] + index
            if n_timesteps == 1 and head is not None:  # as nearly always
                self.columns.put_cells(EPISODE, lanes, head % self.columns.capacity, pairs[:, 0])
            else:
                self.columns.write_block({EPISODE: pairs}, lanes, n_timesteps, None, head)
            return
        valid = index < (n_timesteps if lengths is None else lengths[:, None])
        first = _find_first(done, starts, valid)
        time, ends = _times(carried, first), done.copy()
        ends[:, :-1] |= first[:, 1:]
        # The first end from each row on, T if there is none.
        end = np.where(ends & valid, index, n_timesteps)
        end = np.minimum.accumulate(end[:, ::-1], axis=1)[:, ::-1]
        total = time[np.arange(len(time))[:, None], np.minimum(end, n_timesteps - 1)] + 1
        pairs[..., TIME], pairs[..., LENGTH] = time, np.where(end < n_timesteps, total, 0)
        self.columns.write_block({EPISODE: pairs}, lanes, n_timesteps, lengths, head)
        cut, every = first[:, 0], np.arange(self.columns.n_lanes)[lanes]
        closed = np.flatnonzero((carried > 0) & (cut | (end[:, 0] < n_timesteps)))
        if closed.size:
            before, n_new = carried[closed], n_timesteps if lengths is None else lengths[closed]
            totals = np.where(cut[closed], before, total[closed, 0])
            self.set_lengths(every[closed], before, totals, n_new)

    def longest(
        self, lanes: np.ndarray, done: np.ndarray, starts: np.ndarray | None = None, lengths: np.ndarray | None = None
    ) -> np.ndarray:
        """Finds the longest episode that each n rows would be part of.

        Returns its length in steps, int64 (n,).

        Args:
            lanes: int (n,); rows of a repeated lane would follow one another.
            done, starts, lengths: see `write`.
        """
        n, n_timesteps = done.shape
        valid = np.ones_like(done) if lengths is None else np.arange(n_timesteps) < lengths[:, None]
        first = _find_first(done, starts, valid)
        carried, found = self.open_lengths(ALL).astype(np.int64), np.zeros(n, np.int64)
        for part in rounds(lanes) if n_timesteps else ():
            time = np.where(valid[part], _times(carried[lanes[part]], first[part]), -1)
            found[part] = time.max(axis=1) + 1
            counts = valid[part].sum(axis=1)
            last = np.maximum(counts - 1, 0)[:, None]
            ended = np.take_along_axis(done[part], last, axis=1)[:, 0]
            after = np.where(ended, 0, np.take_along_axis(time, last, axis=1)[:, 0] + 1)
            carried[lanes[part]] = np.where(counts > 0, after, carried[lanes[part]])
        return found

    def reopen(self, lanes: slice | np.ndarray) -> None:
        """Removes the lengths of episodes whose ends were lost.

        A killed writer may have set the length without writing all rows.
        """
        every = np.arange(self.columns.n_lanes)[lanes]
        self.set_lengths(every, self.open_lengths(lanes), np.zeros_like(every), 0)

    def set_lengths(
        self, lanes: np.ndarray, before: np.ndarray, totals: np.ndarray, n_new: Any, heads: Any = None
    ) -> None:
        """Sets the lengths of the newest episodes of n lanes.

        Only rows that will not be overwritten get them.

        Args:
            lanes: int64 (n,).
            before: int (n,), how many rows the episodes have.
            totals: int (n,), their lengths; 0 for those that go on.
            n_new: int or int (n,), how many rows are being written after them.
            heads: int or int (n,), the end of their rows; None for the heads of the lanes.
        """
        capacity, n = self.columns.ring.capacity, lanes.size
        heads = self.columns.ring.head[lanes] if heads is None else heads
        if n <= FEW:
            ends, n_news = (x.tolist() if isinstance(x, np.ndarray) else repeat(x, n) for x in (heads, n_new))
            for each in zip(lanes.tolist(), before.tolist(), totals.tolist(), n_news, ends, strict=True):
                self.set_length(*each)
            return
        counts = np.clip(before, 0, capacity - n_new)
        ends, which = counts.cumsum(), np.repeat(np.arange(n), counts)  # of each row that stays: whose it is
        rows = self.columns.at_steps(lanes[which], (heads - ends)[which] + np.arange(which.size))
        self.columns.flat[EPISODE][:, LENGTH][rows] = totals[which]

    def set_length(self, lane: int, before: int, total: int, n_new: int, head: int) -> None:
        """Sets the length of the newest episode of one lane; see `set_lengths`."""
        capacity, pairs = self.columns.capacity, self.columns.cells[EPISODE]
        count = max(0, min(before, capacity - n_new))
        start = (head - count) % capacity
        pairs[lane, start : start + count, LENGTH] = total
        if start + count > capacity:
            pairs[lane, : start + count - capacity, LENGTH] = total

    def close(self, lanes: np.ndarray, n_steps: np.ndarray | None = None) -> None:
        """Ends the unfinished episodes of these lanes at their newest rows.

        The lanes are int64 (n,). `n_steps` are the lengths of the episodes, if known.
        """
        n_steps = self.open_lengths(lanes) if n_steps is None else n_steps
        self.set_lengths(lanes, n_steps, n_steps, 0)

    def rebuild(self, done: np.ndarray) -> None:
        """Recomputes all episodes from `done`, bool (n_lanes, capacity) by slot."""
        ring = self.columns.ring
        for lane, (low, head) in enumerate(zip(ring.oldest().tolist(), ring.head.tolist(), strict=True)):
            slots = np.arange(low, head) % ring.capacity
            ends = np.flatnonzero(done[lane, slots])
            bounds = np.concatenate([[0], ends + 1])
            which = np.searchsorted(ends, np.arange(slots.size))
            time = np.arange(slots.size) - bounds[which]
            length = np.append(np.diff(bounds), 0)[which]
            self.columns.cells[EPISODE][lane, slots] = np.stack([time, length], axis=1)

    def times(self, rows: np.ndarray) -> np.ndarray:
        """Returns the positions of rows in their episodes, int64."""
        return self.columns.flat[EPISODE].take(rows, axis=0)[..., TIME].astype(np.int64)

    def begin(self, rows: np.ndarray) -> np.ndarray:
        """Which rows begin an episode, bool."""
        pairs = self.columns.flat[EPISODE].take(rows, axis=0, mode="clip")
        return np.asarray(pairs[..., TIME] == 0)

    def end(self, rows: np.ndarray | None = None) -> np.ndarray:
        """Marks rows that end an episode, bool; None for all, by row id."""
        pairs = self.columns.flat[EPISODE]
        pairs = pairs if rows is None else pairs.take(rows, axis=0)
        return np.asarray(pairs[..., TIME] + 1 == pairs[..., LENGTH])

    def remaining(self, rows: np.ndarray) -> np.ndarray:
        """Counts the steps from each row to the end of its episode.

        The row itself counts. `NO_END` if the episode goes on.
        """
        pairs = self.columns.flat[EPISODE].take(rows, axis=0).astype(np.int64)
        return np.where(pairs[..., LENGTH] > 0, pairs[..., LENGTH] - pairs[..., TIME], NO_END)


def _find_first(done: np.ndarray, starts: np.ndarray | None, valid: np.ndarray) -> np.ndarray:
    """Marks the first rows of episodes, as far as known, bool (n, T).

    Whether the first of the T rows begins an episode depends on the rows before it, too.
    """
    first = np.zeros_like(done) if starts is None else starts & valid
    first[:, 1:] |= done[:, :-1]
    return first


def _times(carried: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Computes the positions of T rows in their episodes, int64 (n, T).

    Args:
        carried: (n,), the position of the first row unless it begins an episode.
        first: bool (n, T), which rows begin an episode.
    """
    index = np.arange(first.shape[1])
    origin = np.where(first, index, -NO_END)
    origin[:, 0] = np.where(first[:, 0], 0, -carried)
    return np.asarray(index - np.maximum.accumulate(origin, axis=1))
