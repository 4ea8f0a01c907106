"""Episodes: where each row stands in its own, without a scan.

Two int32 per row: `time`, the position in the episode, and `length`, the number of steps of the episode,
0 while it goes on. So the episode's first step is `step - time` and its last `step - time + length - 1`.
What is open at the head follows from the newest row alone: there is no third place that could disagree
after a writer was killed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlstructs.replay.backing import Backing
from rlstructs.replay.blocks import rounds
from rlstructs.replay.columns import Columns, Spec
from rlstructs.replay.ring import Ring

EPISODE = "episode"
PAIR = Spec(np.dtype(np.int32), (2,))
TIME, LENGTH = 0, 1  # of a pair
BYTES_PER_ROW = PAIR.nbytes
ALL = slice(None)
# Later than any step.
NO_END = np.iinfo(np.int64).max


class Episodes:
    """The episodes of a ring.

    Args:
        ring: its counters.
        order: of row ids.
        backing: where the bytes lie.
    """

    def __init__(self, ring: Ring, order: str, backing: Backing | None = None) -> None:
        self.ring = ring
        self.columns = Columns(ring.n_lanes, ring.capacity, order, backing)
        self.columns.add(EPISODE, PAIR)

    def __getstate__(self) -> dict[str, Columns]:
        return {"columns": self.columns}  # whoever keeps the counters puts `ring` back

    @property
    def nbytes(self) -> int:
        """Bytes of the bookkeeping."""
        return self.columns.nbytes

    def open_lengths(self, lanes: slice | np.ndarray, head: int | None = None) -> np.ndarray:
        """Steps so far of the episodes that go on at the head, int; 0 where none does.

        Args:
            lanes: n of them.
            head: theirs, if they have the same; spares looking.
        """
        ring, pairs = self.ring, self.columns.cells[EPISODE]
        at: tuple[Any, Any]
        heads: Any = head
        if head is None:
            every = np.arange(ring.n_lanes)[lanes]
            heads = ring.head[every]
            at = every, (heads - 1) % ring.capacity
        else:
            at = lanes, (head - 1) % ring.capacity
        n_steps = pairs[(*at, TIME)] + 1
        n_open = np.where(pairs[(*at, LENGTH)] == n_steps, 0, n_steps)
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
        """Writes the bookkeeping of the T rows that follow each head, before the head is raised.

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
        carried = self.open_lengths(lanes, head)
        if n_timesteps == 1 and starts is None and lengths is None:
            self._write_step(lanes, done[:, 0], carried, head)
            return
        index = np.arange(n_timesteps)
        if starts is None and lengths is None and not done.any():
            self._scatter(lanes, carried[:, None] + index, np.zeros(done.shape, np.int32), None, head)
            return
        valid = None if lengths is None else index < lengths[:, None]
        first = np.zeros_like(done) if starts is None else starts & (True if valid is None else valid)
        first[:, 1:] |= done[:, :-1]
        time = _times(carried, first)
        ends = done.copy()
        ends[:, :-1] |= first[:, 1:]
        if valid is not None:
            ends &= valid
        end = np.where(ends, index, n_timesteps)
        end = np.minimum.accumulate(end[:, ::-1], axis=1)[:, ::-1]
        total = time[np.arange(len(time))[:, None], np.minimum(end, n_timesteps - 1)] + 1
        length = np.where(end < n_timesteps, total, 0)
        self._scatter(lanes, time, length, valid, head)
        counts = np.full(len(done), n_timesteps) if lengths is None else lengths
        self._close_carried(lanes, carried, first[:, 0], end[:, 0], time, counts)

    def longest(
        self, lanes: np.ndarray, done: np.ndarray, starts: np.ndarray | None = None, lengths: np.ndarray | None = None
    ) -> np.ndarray:
        """How many steps the longest episode would have that these rows are of, int64 (n,).

        Args:
            lanes: int (n,); of several that are the same, one would come after the other.
            done, starts, lengths: as of `write`.
        """
        n, n_timesteps = done.shape
        index = np.arange(n_timesteps)
        inside = np.ones_like(done) if lengths is None else index < lengths[:, None]
        first = np.zeros_like(done) if starts is None else starts & inside
        first[:, 1:] |= done[:, :-1]
        carried, found = self.open_lengths(ALL).astype(np.int64), np.zeros(n, np.int64)
        for part in rounds(lanes):
            if not n_timesteps:
                break
            time = np.where(inside[part], _times(carried[lanes[part]], first[part]), -1)
            found[part] = time.max(axis=1) + 1
            counts = inside[part].sum(axis=1)
            last = np.maximum(counts - 1, 0)[:, None]
            ended = np.take_along_axis(done[part], last, axis=1)[:, 0]
            after = np.where(ended, 0, np.take_along_axis(time, last, axis=1)[:, 0] + 1)
            carried[lanes[part]] = np.where(counts > 0, after, carried[lanes[part]])
        return found

    def _write_step(
        self, lanes: slice | np.ndarray, done: np.ndarray, carried: np.ndarray, head: int | None
    ) -> None:
        ring, pairs = self.ring, self.columns.cells[EPISODE]
        every = np.arange(ring.n_lanes)[lanes]
        at: tuple[Any, Any] = (every, ring.head[every] % ring.capacity)
        if head is not None:
            at = lanes, head % ring.capacity
        pairs[(*at, TIME)] = carried
        pairs[(*at, LENGTH)] = 0
        if done.any():
            pairs[(*at, LENGTH)] = np.where(done, carried + 1, 0)
            for row in np.flatnonzero(done & (carried > 0)):
                self.set_length(int(every[row]), int(carried[row]), int(carried[row]) + 1, 1)

    def _scatter(
        self,
        lanes: slice | np.ndarray,
        time: np.ndarray,
        length: np.ndarray,
        valid: np.ndarray | None,
        head: int | None,
    ) -> None:
        ring = self.ring
        pairs = np.empty((*time.shape, 2), np.int32)
        pairs[..., TIME], pairs[..., LENGTH] = time, length
        if head is not None and valid is None:  # of all lanes the same slots, around the end at most once
            cells, slot = self.columns.cells[EPISODE], head % ring.capacity
            n = min(time.shape[1], ring.capacity - slot)
            cells[lanes, slot : slot + n] = pairs[:, :n]
            cells[lanes, : time.shape[1] - n] = pairs[:, n:]
            return
        every = np.arange(ring.n_lanes)[lanes]
        rows = self.columns.at_steps(every[:, None], ring.head[every][:, None] + np.arange(time.shape[1]))
        if valid is None:
            self.columns.flat[EPISODE][rows] = pairs
        else:
            self.columns.flat[EPISODE][rows[valid]] = pairs[valid]

    def _close_carried(
        self,
        lanes: slice | np.ndarray,
        carried: np.ndarray,
        cut: np.ndarray,
        end: np.ndarray,
        time: np.ndarray,
        counts: np.ndarray,
    ) -> None:
        every = np.arange(self.ring.n_lanes)[lanes]
        for at in np.flatnonzero((carried > 0) & (cut | (end < time.shape[1]))):
            total = int(carried[at]) if cut[at] else int(time[at, end[at]]) + 1
            self.set_length(int(every[at]), int(carried[at]), total, int(counts[at]))

    def reopen(self, lanes: slice | np.ndarray) -> None:
        """Takes back the lengths that a dead writer gave to episodes whose ends were lost with it."""
        ring = self.ring
        every = np.arange(ring.n_lanes)[lanes]
        for lane, n in zip(every, self.open_lengths(lanes), strict=True):
            self.set_length(int(lane), int(n), 0, 0)

    def set_length(self, lane: int, n_before: int, total: int, n_new: int) -> None:
        """Gives the newest `n_before` rows of a lane, which are still there after `n_new` more, their length."""
        ring = self.ring
        head = int(ring.head[lane])
        steps = np.arange(max(head - n_before, head + n_new - ring.capacity), head)
        self.columns.cells[EPISODE][lane, steps % ring.capacity, LENGTH] = total

    def close(self, lane: int) -> None:
        """Ends the episode that goes on in a lane with its newest row."""
        if n := int(self.open_lengths(np.array([lane]))[0]):
            self.set_length(lane, n, n, 0)

    def rebuild(self, done: np.ndarray) -> None:
        """Works everything out again from `done`, bool (n_lanes, capacity) by slot."""
        ring = self.ring
        for lane in range(ring.n_lanes):
            head = int(ring.head[lane])
            steps = np.arange(int(ring.oldest()[lane]), head)
            if not steps.size:
                continue
            slots = steps % ring.capacity
            ends = np.flatnonzero(done[lane, slots])
            bounds = np.concatenate([[0], ends + 1])
            which = np.searchsorted(ends, np.arange(steps.size))
            time = np.arange(steps.size) - bounds[which]
            length = np.append(np.diff(bounds), 0)[which]
            self.columns.cells[EPISODE][lane, slots] = np.stack([time, length], axis=1)

    def times(self, rows: np.ndarray) -> np.ndarray:
        """Positions in their episodes, int64."""
        return self.columns.flat[EPISODE].take(rows, axis=0)[..., TIME].astype(np.int64)

    def begin(self, rows: np.ndarray) -> np.ndarray:
        """Which rows begin an episode, bool."""
        pairs = self.columns.flat[EPISODE].view(np.int64)[:, 0]
        return np.asarray(pairs.take(rows, mode="clip").view(np.int32)[..., TIME::2] == 0)

    def end(self, rows: np.ndarray | None = None) -> np.ndarray:
        """Which rows are the last of an episode that has ended, bool; None for all, in the order of row ids."""
        pairs = self.columns.flat[EPISODE]
        pairs = pairs if rows is None else pairs.take(rows, axis=0)
        return np.asarray(pairs[..., TIME] + 1 == pairs[..., LENGTH])

    def remaining(self, rows: np.ndarray) -> np.ndarray:
        """Steps from each row to the end of its episode, itself included; `NO_END` while it goes on."""
        pairs = self.columns.flat[EPISODE].take(rows, axis=0).astype(np.int64)
        return np.where(pairs[..., LENGTH] > 0, pairs[..., LENGTH] - pairs[..., TIME], NO_END)


def _times(carried: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Where T rows stand in their episodes, int64 (n, T): after `carried` (n,), where `first` (n, T) says from 0 on."""
    index = np.arange(first.shape[1])
    origin = np.where(first, index, -NO_END)
    origin[:, 0] = np.where(first[:, 0], 0, -carried)
    return np.asarray(index - np.maximum.accumulate(origin, axis=1))
