"""Buffers that draw in proportion to priorities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlstructs.errors import SpecError
from rlstructs.replay.draw.plan import Fields, Picker
from rlstructs.replay.draw.priorities import LEAVES, Priorities, exponent, importance_weights
from rlstructs.replay.draw.view import View
from rlstructs.replay.intake.arrays import host_array, real_numbers
from rlstructs.replay.keep.checks import Claims
from rlstructs.replay.keep.stored import Arrays, Restore
from rlstructs.replay.tianshou.editor import Editor
from rlstructs.replay.tianshou.options import forward
from rlstructs.replay.tianshou.reader import Pick, Reader
from rlstructs.replay.tianshou.replay_buffer import ReplayBuffer
from rlstructs.replay.tianshou.vector import VectorReplayBuffer
from rlstructs.workers.public_names import set_module

# Added to the absolute value of a priority, so that every row may be drawn.
EPSILON = float(np.finfo(np.float32).eps)
WEIGHT = "weight"
# Of each drawn row: the smallest priority of all rows at the draw, to the power of alpha.
SMALLEST = "smallest"


class PrioritizedReader(Reader):
    """Draws in proportion to priorities, and adds importance weights.

    Args:
        plain: the reader of the buffer so far.
        alpha, beta, weight_norm: see `PrioritizedReplayBuffer`.

    Raises:
        TypeError, SpecError: an exponent is invalid.
    """

    def __init__(self, plain: Reader, alpha: float, beta: float, weight_norm: bool) -> None:
        super().__init__(plain.table, plain.options, plain.export, plain.stream)
        self.alpha = exponent("alpha", alpha)
        if not self.alpha:
            raise SpecError("alpha must be above 0; a ReplayBuffer draws uniformly")
        self.beta, self.weight_norm = exponent("beta", beta), bool(weight_norm)
        storage = self.table.storage
        self.priorities = Priorities(storage.columns.n_rows, self.table.n_lanes, self.alpha, clock=storage.clock)

    def settings(self) -> dict[str, Any]:
        """Returns the settings that a plain buffer lacks."""
        return {"alpha": self.alpha, "beta": self.beta, "weight_norm": self.weight_norm}

    @property
    def picker(self) -> Picker:
        return self.priorities

    def pick(self, n: int) -> Pick:
        with self.priorities.lock:
            pick = super().pick(n)
            pick.fields[SMALLEST] = np.full(pick.at.size, self.priorities.tree.minimum)
        return pick

    def remember(self, pick: Pick) -> Pick:
        assert isinstance(pick.rows, View)
        with self.priorities.lock:
            self.priorities.drawn.remember(pick.rows, pick.at)
        return pick

    def compute_beside(self, at: np.ndarray, fields: Fields | None = None) -> dict[str, Any]:
        fields = fields or {}
        leaves = fields[LEAVES] if LEAVES in fields else self.read_leaves(at)
        smallest = self.priorities.tree.minimum
        if self.weight_norm or SMALLEST in fields:
            smallest = (leaves if self.weight_norm else fields[SMALLEST]).min(initial=np.inf)
        return {WEIGHT: importance_weights(leaves, smallest, self.beta)}

    def read_leaves(self, at: Any) -> np.ndarray:
        """Copies the priorities of rows to the power of alpha, float64.

        New rows get their priorities first.
        """
        with self.priorities.lock:
            self.priorities.follow(self.table.own_rows())
            leaves = self.priorities.tree.values[at]
            return leaves.copy() if isinstance(at, slice) else np.asarray(leaves)

    def get_weight(self, index: Any) -> Any:
        """Computes the weights of rows, divided by the buffer's largest.

        They are float64, of the shape of `index`.
        """
        rows = self.table.locate(index)
        with self.priorities.lock:
            return (self.read_leaves(rows) / self.priorities.tree.minimum) ** -self.beta

    def update_weight(self, index: Any, new_weight: Any) -> None:
        """Sets priorities; see `PrioritizedReplayBuffer.update_weight`."""
        rows, given = host_array("index", index), real_numbers("priorities", new_weight)
        with self.priorities.lock:
            if rows.dtype.kind == "i" and (rows < 0).any():
                rows = np.where(rows < 0, rows.astype(np.int64) + self.table.index_end(self.table.rows()), rows)
            self.priorities.set(self.table.storage, rows, np.abs(given) + EPSILON, may_be_of_now=True)

    def drop_nulls(self, editor: Editor) -> None:
        """Drops rows, and keeps the priorities of the others, which get new ids."""
        with self.priorities.lock:
            leaves = self.read_leaves(slice(None))
            if (kept := editor.drop_nulls()) is not None:
                now = self.table.own_rows()
                self.priorities.follow(now)
                self.priorities.clock.count_draws()
                self.priorities.tree.update(now.every_row(), leaves[kept])


@set_module("rlstructs.replay")
class PrioritizedReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` that draws in proportion to priorities.

    Schaul et al., Prioritized Experience Replay (2016).

    P(i) = p_i^alpha / sum of p_k^alpha; a draw of n takes one row from each n-th of the sum, in the order of row ids. A
    new row has the largest priority that was ever given, at first 1. Batches have a key `weight`, float32: the
    importance weight (N P(i))^-beta over the largest of them.

    Args:
        size: number of rows.
        alpha: exponent of priorities, above 0.
        beta: exponent of weights, at least 0.
        weight_norm: whether weights are divided by the largest of the batch; if not, by the largest of the buffer.
        settings: see `ReplayBuffer`.

    Raises:
        TypeError, SpecError: an argument is invalid.

    Example:
        >>> buffer = PrioritizedReplayBuffer(8, alpha=1.0, beta=1.0)
        >>> for t in range(2):
        ...     _ = buffer.add({"obs": t, "act": 0, "rew": 0.0, "terminated": False, "truncated": False})
        >>> buffer.update_weight([0, 1], [1.0, -4.0])
        >>> buffer[[0, 1]].weight.round(3)
        array([1.  , 0.25], dtype=float32)
    """

    _reader: PrioritizedReader

    def __init__(
        self, size: int, alpha: float, beta: float, weight_norm: bool = True, *args: Any, **settings: Any
    ) -> None:
        super().__init__(size, *args, **settings)
        self._reader = PrioritizedReader(self._reader, alpha, beta, weight_norm)
        self._intake.beside.add(WEIGHT)

    @property
    def options(self) -> dict[str, Any]:
        return {**super().options, **self._reader.settings()}

    @property
    def alpha(self) -> float:
        """Exponent of priorities."""
        return self._reader.alpha

    @property
    def beta(self) -> float:
        """Exponent of weights."""
        return self._reader.beta

    def set_beta(self, beta: float) -> None:
        """Sets the exponent of weights, at least 0."""
        self._reader.beta = exponent("beta", beta)

    weight_norm: bool = forward("_reader", "weight_norm", "Whether weights are divided by the largest of the batch.")

    @property
    def nbytes(self) -> int:
        return super().nbytes + Priorities.nbytes_of(self._storage.columns.n_rows, self._n_lanes)

    @property
    def weight(self) -> np.ndarray:
        """The priorities of all rows to the power of alpha, a copy.

        It is float64 (maxsize,), 0 in empty rows.
        """
        return self._reader.read_leaves(slice(0, self.maxsize))

    def update_weight(self, index: Any, new_weight: Any) -> None:
        """Sets priorities to |new_weight| and a little more.

        If a row is repeated, its last priority counts. Priorities of rows that were overwritten since they were drawn
        are dropped. Ids of rows that were added since the last draw, and ids of all rows together, refer to the rows
        stored now.

        Args:
            index: int (n,), row ids.
            new_weight: (n,), of any library, finite.

        Raises:
            SpecError, IndexError: an argument does not fit; nothing changes.
        """
        self._reader.update_weight(index, new_weight)

    def get_weight(self, index: Any) -> Any:
        """Computes the importance weights of rows.

        They are divided by the largest in the buffer, float64 of the shape of `index`.
        """
        return self._reader.get_weight(index)

    def reset(self, keep_statistics: bool = False) -> None:
        super().reset(keep_statistics)
        self._reader.priorities.clear()

    def dropnull(self) -> None:
        self._reader.drop_nulls(self._editor)

    # Files and copies

    def _held_priorities(self) -> Priorities:
        return self._reader.priorities

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), **self._reader.settings()}

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), **self._reader.priorities.state()}

    def _restorer(self, state: Mapping[str, Any], arrays: Arrays, claims: Claims) -> Restore:
        restore_rest, reader = super()._restorer(state, arrays, claims), self._reader
        alpha, beta = (exponent(name, state["settings"][name]) for name in ("alpha", "beta"))
        priorities = reader.priorities.restored(arrays, state, claims, alpha)

        def restore() -> None:
            restore_rest()
            reader.priorities, reader.alpha, reader.beta = priorities, alpha, beta

        return restore


@set_module("rlstructs.replay")
class PrioritizedVectorReplayBuffer(VectorReplayBuffer, PrioritizedReplayBuffer):
    """A `PrioritizedReplayBuffer` of several environments, each in a ring of its own.

    Args:
        total_size, buffer_num: see `VectorReplayBuffer`.
        alpha, beta, weight_norm: see `PrioritizedReplayBuffer`.
        settings: see `ReplayBuffer`.

    Example:
        >>> buffer = PrioritizedVectorReplayBuffer(10, 2, alpha=0.6, beta=0.4)
        >>> _ = buffer.add({"obs": [1, 2], "act": [0, 0], "rew": [1, 1], "terminated": [0, 1], "truncated": [0, 0]})
        >>> batch, rows = buffer.sample(4)
        >>> sorted(set(rows.tolist())), batch.weight.tolist()
        ([0, 5], [1.0, 1.0, 1.0, 1.0])
    """
