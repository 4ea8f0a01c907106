"""`PrioritizedMemory`, which draws rows in proportion to their priorities."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rlstructs.errors import SpecError
from rlstructs.memories.sampling import RandomMemory
from rlstructs.replay.draw.packed import PackedWindows
from rlstructs.replay.draw.plan import Picker, Selection, Windows
from rlstructs.replay.draw.priorities import LEAVES, Priorities, exponent, importance_weights
from rlstructs.replay.keep.checks import Claims, whole

# Of each drawn row: the smallest priority of all rows at the draw, to the power of alpha.
SMALLEST = "smallest"


class PrioritizedMemory(RandomMemory):
    """A memory that draws rows in proportion to priorities.

    For sequences, it draws their first rows in this way. A new row gets the largest priority that was ever set,
    initially 1. See section 3 of Schaul et al., Prioritized Experience Replay (2016).

    Args:
        alpha: exponent of priorities, at least 0; 0 draws uniformly.
        beta: exponent of importance weights, at least 0; or a function of the number of earlier batches.
        normalize: weights are divided by the largest of the "memory" or of the "batch".
        memory_size, num_envs, device, export, export_format, export_directory, seed, strict: see `Memory`.
    """

    def __init__(
        self,
        *,
        alpha: float = 0.6,
        beta: float | Callable[[int], float] = 0.4,
        normalize: str = "memory",
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        if self._uniform.replacement is False:
            raise SpecError("replacement must be True: draws in proportion to priorities may repeat a row")
        if normalize not in ("memory", "batch"):
            raise SpecError(f"normalize must be 'memory' or 'batch', got {normalize!r}")
        self._alpha = exponent("alpha", alpha)
        self.beta = beta if callable(beta) else exponent("beta", beta)
        self.normalize = normalize
        self.n_samples = 0
        self._beta = 0.0  # at the last sample
        n_rows, clock = self.memory_size * self.num_envs, self._storage.clock
        self._priorities = Priorities(n_rows, self.num_envs, self._alpha, clock=clock)

    @property
    def alpha(self) -> float:
        """Exponent of priorities."""
        return self._alpha

    @property
    def nbytes(self) -> int:
        """Bytes of memory once rows have been written, priorities included."""
        return super().nbytes + Priorities.nbytes_of(self.memory_size * self.num_envs, self.num_envs)

    def _note(self, picked: Selection, rows: np.ndarray, discounts: Any) -> None:
        beta = exponent("beta", self.beta(self.n_samples)) if callable(self.beta) else self.beta
        super()._note(picked, rows, discounts)
        self._beta, self.n_samples = beta, self.n_samples + 1

    def reset(self) -> None:
        """Drops every row and resets the largest priority to 1."""
        super().reset()
        self._priorities.clear()

    def get_sampling_weights(self) -> Any:
        """Returns the importance weights of the last `sample`, float32 (batch_size,).

        There is one for each row or sequence.
        """
        fields = self._last_selection().fields
        leaves = fields[LEAVES]
        smallest = leaves.min() if self.normalize == "batch" else fields[SMALLEST].min(initial=np.inf)
        return self._tensors.hand_over_one(importance_weights(leaves, smallest, self._beta))

    def update_priorities(self, indexes: Any, priorities: Any) -> None:
        """Sets the priorities of rows; if an index is repeated, its last priority counts.

        Priorities of rows that were overwritten after they were drawn are ignored.

        Args:
            indexes: int (n,), from `get_sampling_indexes`.
            priorities: (n,), finite and at least 0.

        Raises:
            IndexError, SpecError: an argument is invalid; nothing changes.
        """
        self._priorities.set(self._storage, indexes, priorities)

    def _held_priorities(self) -> Priorities:
        return self._priorities

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), **self._priorities.state(), "n_samples": self.n_samples}

    def _restorer(
        self, state: Mapping[str, Any], arrays: Mapping[str, np.ndarray], claims: Claims
    ) -> Callable[[], None]:
        priorities = self._priorities.restored(arrays, state, claims)
        n_samples = whole("n_samples", state.get("n_samples", 0))

        def restore() -> None:
            self._priorities, self.n_samples = priorities, n_samples

        return restore

    @property
    def _picker(self) -> Picker:
        return self._priorities

    def _select(self, n: int, windows: Windows | PackedWindows) -> Selection:
        with self._priorities.lock:
            picked = super()._select(n, windows)
            picked.fields[SMALLEST] = np.full(len(picked.rows), self._priorities.tree.minimum)
            self._priorities.drawn.remember(picked.view, picked.rows)
        return picked
