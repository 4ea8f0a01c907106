"""Buffers that draw in proportion to priorities."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlstructs.errors import SpecError
from rlstructs.public_names import set_module
from rlstructs.replay.claims import Claims
from rlstructs.replay.priorities import Priorities, exponent, importance_weights
from rlstructs.replay.snapshot import AnySnapshot, Snapshot
from rlstructs.replay.tianshou.reads import WANTED, Fields, Pick
from rlstructs.replay.tianshou.replay_buffer import ReplayBuffer
from rlstructs.replay.tianshou.vector import VectorReplayBuffer
from rlstructs.replay.values import host_array, real_numbers

# What is added to the absolute value of a priority, so that every row may be drawn.
EPSILON = float(np.finfo(np.float32).eps)
LEAVES, WEIGHT = "leaves", "weight"


@set_module("rlstructs.replay")
class PrioritizedReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` that draws in proportion to priorities: Schaul et al., Prioritized Experience Replay (2016).

    P(i) = p_i^alpha / sum of p_k^alpha; a draw of n takes one row from each n-th of the sum, in the order of row ids. A
    new row has the largest priority that was ever given, at first 1. What is read has a key `weight`, float32:
    (N P(i))^-beta over the largest of them.

    Args:
        size: how many rows.
        alpha: exponent of priorities, above 0.
        beta: exponent of weights, at least 0.
        weight_norm: weights are divided by the largest of the batch; otherwise by that of the buffer.
        settings: as of `ReplayBuffer`.

    Raises:
        TypeError, SpecError: an argument is not what is needed.

    Example:
        >>> buffer = PrioritizedReplayBuffer(8, alpha=1.0, beta=1.0)
        >>> for t in range(2):
        ...     _ = buffer.add({"obs": t, "act": 0, "rew": 0.0, "terminated": False, "truncated": False})
        >>> buffer.update_weight([0, 1], [1.0, -4.0])
        >>> buffer[[0, 1]].weight.round(3)
        array([1.  , 0.25], dtype=float32)
    """

    def __init__(
        self, size: int, alpha: float, beta: float, weight_norm: bool = True, *args: Any, **settings: Any
    ) -> None:
        super().__init__(size, *args, **settings)
        self._alpha = exponent("alpha", alpha)
        if not self._alpha:
            raise SpecError("alpha must be above 0; a ReplayBuffer draws uniformly")
        self.set_beta(beta)
        self.weight_norm = bool(weight_norm)
        self._priorities = Priorities(self._storage.columns.n_rows, self._n_lanes, self._alpha)

    @property
    def options(self) -> dict[str, Any]:
        return {**super().options, "alpha": self._alpha, "beta": self._beta, "weight_norm": self.weight_norm}

    @property
    def alpha(self) -> float:
        """Exponent of priorities."""
        return self._alpha

    @property
    def beta(self) -> float:
        """Exponent of weights."""
        return self._beta

    def set_beta(self, beta: float) -> None:
        """Sets the exponent of weights, at least 0."""
        self._beta = exponent("beta", beta)

    @property
    def nbytes(self) -> int:
        return super().nbytes + Priorities.nbytes_of(self._storage.columns.n_rows, self._n_lanes)

    @property
    def weight(self) -> np.ndarray:
        """The priorities of all rows to the power of alpha, float64 (maxsize,), 0 where there is none; a copy."""
        with self._priorities.lock:
            self._priorities.follow(self._own_rows().span)
            return self._priorities.tree.values[: self.maxsize].copy()

    def update_weight(self, index: Any, new_weight: Any) -> None:
        """Sets priorities to |new_weight| and a little more; of equal rows the last counts.

        Those of rows that were overwritten since they were drawn are dropped. Rows that were added since the last draw,
        and all rows together, are meant as they are now.

        Args:
            index: int (n,), row ids.
            new_weight: (n,), of any library, finite.

        Raises:
            SpecError, IndexError: something is not so; nothing has changed.
        """
        rows, given = host_array("index", index), real_numbers("priorities", new_weight)
        with self._priorities.lock:
            if rows.dtype.kind == "i" and (rows < 0).any():
                rows = np.where(rows < 0, rows.astype(np.int64) + self._index_end(self._own_rows()), rows)
            self._priorities.set(self._storage, rows, np.abs(given) + EPSILON, may_be_of_now=True)

    def get_weight(self, index: Any) -> Any:
        """The importance weights of rows, over the largest in the buffer, float64 of the shape of `index`."""
        rows, tree = self._rows_at(index), self._priorities.tree
        with self._priorities.lock:
            self._priorities.follow(self._own_rows().span)
            return (tree.values[rows] / tree.minimum) ** -self._beta

    def reset(self, keep_statistics: bool = False) -> None:
        super().reset(keep_statistics)
        self._priorities.clear()

    reset.__doc__ = ReplayBuffer.reset.__doc__

    def _pick(self, n: int) -> Pick:
        with self._priorities.lock:
            return super()._pick(n)

    def _anchors(self, rows: AnySnapshot, n: int) -> tuple[np.ndarray, Fields]:
        assert isinstance(rows, Snapshot)
        at = self._priorities.draw_rows(rows.span, n, self._rng, self._fits(rows), WANTED)
        return at, {LEAVES: self._priorities.tree.values.take(at)}

    def _picked(self, rows: AnySnapshot, at: np.ndarray, fields: Fields) -> Pick:
        assert isinstance(rows, Snapshot)
        with self._priorities.lock:
            self._priorities.drawn.remember(rows.span, at)
        return super()._picked(rows, at, fields)

    def _beside(self, at: np.ndarray, fields: Fields | None = None) -> dict[str, Any]:
        if not fields:
            with self._priorities.lock:
                self._priorities.follow(self._own_rows().span)
                fields = {LEAVES: np.asarray(self._priorities.tree.values[at])}
        leaves = fields[LEAVES]
        if not leaves.size:
            return {WEIGHT: np.zeros(leaves.shape, np.float32)}
        smallest = leaves.min() if self.weight_norm else self._priorities.tree.minimum
        return {WEIGHT: importance_weights(leaves, smallest, self._beta)}

    def _beside_names(self) -> set[str]:
        return super()._beside_names() | {WEIGHT}

    def dropnull(self) -> None:
        with self._priorities.lock:
            self._priorities.follow(self._own_rows().span)  # or the newest rows would have no priority to keep
            super().dropnull()

    dropnull.__doc__ = ReplayBuffer.dropnull.__doc__

    def _were_kept(self, rows: np.ndarray) -> None:
        leaves = self._priorities.tree.values[rows]  # those of rows whose ids have changed
        now = self._own_rows()
        self._priorities.follow(now.span)
        self._priorities.tree.update(now.every_row(), leaves)

    # Files and copies

    def _locks(self) -> Sequence[Any]:
        return [self._priorities.lock, *super()._locks()]

    def _settings(self) -> dict[str, Any]:
        own = {"alpha": self._alpha, "beta": self._beta, "weight_norm": self.weight_norm}
        return {**super()._settings(), **own}

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), **self._priorities.state()}

    def _more_arrays(self) -> dict[str, np.ndarray]:
        return {**super()._more_arrays(), **self._priorities.arrays()}

    def _restorer(
        self, state: Mapping[str, Any], arrays: Mapping[str, np.ndarray], claims: Claims
    ) -> Callable[[], None]:
        restore_rest = super()._restorer(state, arrays, claims)
        alpha, beta = (exponent(name, state["settings"][name]) for name in ("alpha", "beta"))
        priorities = self._priorities.restored(arrays, state, claims, alpha)

        def restore() -> None:
            restore_rest()
            self._priorities, self._alpha, self._beta = priorities, alpha, beta

        return restore


@set_module("rlstructs.replay")
class PrioritizedVectorReplayBuffer(VectorReplayBuffer, PrioritizedReplayBuffer):
    """A `PrioritizedReplayBuffer` of several environments, each in a ring of its own.

    Args:
        total_size, buffer_num: as of `VectorReplayBuffer`.
        alpha, beta, weight_norm: as of `PrioritizedReplayBuffer`.
        settings: as of `ReplayBuffer`.

    Example:
        >>> buffer = PrioritizedVectorReplayBuffer(10, 2, alpha=0.6, beta=0.4)
        >>> _ = buffer.add({"obs": [1, 2], "act": [0, 0], "rew": [1, 1], "terminated": [0, 1], "truncated": [0, 0]})
        >>> batch, rows = buffer.sample(4)
        >>> sorted(set(rows.tolist())), batch.weight.tolist()
        ([0, 5], [1.0, 1.0, 1.0, 1.0])
    """
