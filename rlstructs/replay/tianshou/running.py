"""Returns and lengths of the episodes that go on, one per lane."""

from __future__ import annotations

import numpy as np


class Running:
    """Sums over episodes, of which rows may have been overwritten already.

    Args:
        n_lanes: how many lanes.

    Attributes:
        returns: float64 (n_lanes, *shape of a reward).
        lengths: int64 (n_lanes,).

    Example:
        >>> running = Running(2)
        >>> for done in (False, True):
        ...     found = running.add(slice(None), np.array([1.0, 2.0]), np.array([done, False]))
        >>> found  # return and length of what has ended
        (array([2., 0.]), array([2, 0]))
    """

    def __init__(self, n_lanes: int) -> None:
        self.returns = np.zeros(n_lanes)
        self.lengths = np.zeros(n_lanes, np.int64)

    def clear(self) -> None:
        """Begins anew in every lane."""
        self.returns[...] = 0
        self.lengths[...] = 0

    def shape(self, shape: tuple[int, ...]) -> None:
        """Makes rewards have this shape, if they have another one."""
        if self.returns.shape[1:] != shape:
            self.returns = np.zeros((len(self.lengths), *shape))

    def add(
        self, lanes: slice | np.ndarray, rewards: np.ndarray, done: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Takes one more step of each of some lanes.

        Args:
            lanes: n, no two the same.
            rewards: (n, *shape).
            done: bool (n,), which episodes end with it.

        Returns:
            Return and length of those that do, zeros for the others, float64 (n, *shape) and int64 (n,).
        """
        totals, lengths = self.returns[lanes] + rewards, self.lengths[lanes] + 1
        if not done.any():
            self.returns[lanes], self.lengths[lanes] = totals, lengths
            return np.zeros(totals.shape), np.zeros(lengths.shape, np.int64)
        ends = done.reshape(done.shape + (1,) * (totals.ndim - 1))
        self.returns[lanes], self.lengths[lanes] = np.where(ends, 0, totals), np.where(done, 0, lengths)
        return np.where(ends, totals, 0), np.where(done, lengths, 0)

    def add_one(self, reward: float, done: bool) -> tuple[float, int]:
        """As `add`, for a single lane whose rewards are single numbers."""
        total, length = self.returns.item() + reward, self.lengths.item() + 1
        self.returns[0], self.lengths[0] = (0.0, 0) if done else (total, length)
        return (total, length) if done else (0.0, 0)

    def add_many(
        self, lanes: np.ndarray, rewards: np.ndarray, open_lengths: np.ndarray, goes_on: np.ndarray
    ) -> None:
        """Takes many steps at once.

        Args:
            lanes: int64 (n,), of each step, those of a lane in order.
            rewards: (n, *shape).
            open_lengths: int (n_lanes,), how many steps the episodes have that go on afterwards.
            goes_on: bool (n_lanes,), in which lanes all of the steps belong to the episode that went on before.
        """
        n_new = np.bincount(lanes, minlength=len(self.lengths))
        order = np.argsort(lanes, kind="stable")
        to_end = np.cumsum(n_new)[lanes[order]] - np.arange(len(order))  # 1 for the last one of a lane
        inside = order[to_end <= open_lengths[lanes[order]]]
        self.returns[~goes_on] = 0
        np.add.at(self.returns, lanes[inside], rewards[inside])
        self.lengths = np.where(goes_on, self.lengths + n_new, open_lengths).astype(np.int64)

    def arrays(self) -> dict[str, np.ndarray]:
        """What a file needs."""
        return {"returns": self.returns, "lengths": self.lengths}
