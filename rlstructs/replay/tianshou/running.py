"""The running episodes, one per lane.

They have returns, lengths, and first steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlstructs.replay.rows.store import Storage

# The result of `add`: row ids, returns, lengths, and the first rows of the episodes.
Added = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class Running:
    """Sums over running episodes, whose first rows may have been overwritten already.

    Args:
        storage: the store, which tracks episodes.

    Attributes:
        returns: float64 (n_lanes, *shape of a reward).
        lengths: int64 (n_lanes,).
        begins: int64 (n_lanes,), the first step of the running episode of each lane, or of its next one.

    Example:
        >>> storage = Storage(2, 4)
        >>> _ = storage.track_episodes()
        >>> running = Running(storage)
        >>> for done in (False, True):
        ...     added = running.add(slice(None), storage.ring.head, np.array([1.0, 2.0]), np.array([done, False]))
        >>> added[1], added[2]  # return and length of the episode that has ended
        (array([2., 0.]), array([2, 0]))
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.returns = np.zeros(storage.columns.n_lanes)
        self.lengths = np.zeros(storage.columns.n_lanes, np.int64)
        self.find_begins()

    def find_begins(self) -> None:
        """Finds the first step of each episode, after rows have changed."""
        self.begins = self._storage.ring.head - self._storage.track_episodes().open_lengths(slice(None))
        self._first: np.ndarray | None = None  # the row ids of the first steps, once `add` needs them

    def clear(self, lanes: slice | np.ndarray = slice(None)) -> None:
        """Sets returns and lengths to zero."""
        self.returns[lanes] = 0
        self.lengths[lanes] = 0

    def shape(self, shape: tuple[int, ...]) -> None:
        """Sets the shape of a reward; if it was another, returns become zero."""
        if self.returns.shape[1:] != shape:
            self.returns = np.zeros((len(self.lengths), *shape))

    def add(self, lanes: slice | np.ndarray, heads: np.ndarray, rewards: np.ndarray, done: Any) -> Added:
        """Adds one more row of each of some lanes, which have been written.

        Args:
            lanes: n, no two the same.
            heads: int64 (n,), the heads of these lanes before.
            rewards: (n, *shape).
            done: bool (n,), which episodes end with it; None for none of them.

        Returns:
            The result of `ReplayBuffer.add`.
        """
        columns, ring = self._storage.columns, self._storage.ring
        if self._first is None:
            self._first, self._low = columns.at_steps(slice(None), self.begins), int(self.begins.min())
        index = columns.at_steps(lanes, heads)
        if self._low >= max(
            np.maximum.reduce(ring.reserved) - ring.capacity, np.maximum.reduce(ring.floor)
        ):  # all there
            first = self._first[lanes].copy()
        else:
            first = columns.at_steps(lanes, np.maximum(self.begins[lanes], ring.oldest()[lanes]))
        totals, lengths = self.returns[lanes] + rewards, self.lengths[lanes] + 1
        ep_returns, ep_lengths = np.zeros(totals.shape), np.zeros(lengths.shape, np.int64)
        if done is not None:
            ep_returns[done], ep_lengths[done] = totals[done], lengths[done]
            totals[done] = lengths[done] = 0
            self.begins[lanes], self._first = np.where(done, heads + 1, self.begins[lanes]), None
        self.returns[lanes], self.lengths[lanes] = totals, lengths
        return index, ep_returns, ep_lengths, first

    def add_one(self, head: int, reward: float, done: bool) -> Added:
        """Adds a row to a single lane with scalar rewards.

        It takes a third of the time of `add`.
        """
        ring = self._storage.ring
        capacity = ring.capacity
        total, length = self.returns.item() + reward, self.lengths.item() + 1
        start = max(self.begins.item(), head + 1 - capacity, ring.floor.item(0))
        if done:
            self.begins[0], self._first = head + 1, None
        self.returns[0], self.lengths[0] = (0.0, 0) if done else (total, length)
        ended = (total, length) if done else (0.0, 0)
        return np.array([head % capacity]), np.array(ended[:1]), np.array(ended[1:]), np.array([start % capacity])

    def add_many(self, lanes: np.ndarray, rewards: np.ndarray, goes_on: np.ndarray) -> None:
        """Adds many rows at once, which have been written.

        Call `find_begins` first.

        Args:
            lanes: int64 (n,), of each row, those of a lane in order.
            rewards: (n, *shape).
            goes_on: bool (n_lanes,), in which lanes all of the rows belong to the episode that was running before.
        """
        self.shape(rewards.shape[1:])
        open_lengths = self._storage.ring.head - self.begins
        n_new = np.bincount(lanes, minlength=len(self.lengths))
        order = np.argsort(lanes, kind="stable")
        to_end = np.cumsum(n_new)[lanes[order]] - np.arange(len(order))  # 1 for the last row of a lane
        inside = order[to_end <= open_lengths[lanes[order]]]
        self.returns[~goes_on] = 0
        np.add.at(self.returns, lanes[inside], rewards[inside])
        self.lengths = np.where(goes_on, self.lengths + n_new, open_lengths).astype(np.int64)

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the arrays of a file."""
        return {"returns": self.returns, "lengths": self.lengths}
