"""`PrioritizedReplayBuffer` and `PrioritizedDictReplayBuffer`: Stable-Baselines3 has no such buffers of its own."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from stable_baselines3.common.vec_env import VecNormalize

from rlstructs.integrations.sb3.replay_buffer import DictReplayBuffer, ReplayBuffer
from rlstructs.replay.priorities import Priorities, exponent, importance_weights
from rlstructs.replay.row_ids import LANE
from rlstructs.workers.public_names import set_module

Observations = torch.Tensor | dict[str, torch.Tensor]


@set_module("rlstructs.integrations.sb3")
class PrioritizedReplayBufferSamples(NamedTuple):
    """What `sample` of a prioritised buffer returns: the fields of `ReplayBufferSamples`, `weights` and `indices`."""

    observations: Observations
    actions: torch.Tensor
    next_observations: Observations
    dones: torch.Tensor
    rewards: torch.Tensor
    weights: torch.Tensor
    indices: np.ndarray
    discounts: torch.Tensor | None = None


@set_module("rlstructs.integrations.sb3")
class PrioritizedReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` that draws in proportion to priorities: Schaul et al., Prioritized Experience Replay (2016).

    P(i) = p_i^alpha / sum of p_k^alpha. A new row has the largest priority that was ever set, at first 1. What
    Stable-Baselines3's algorithms do in `train` neither uses weights nor sets priorities; "Your program, one line
    changed" shows a DQN that does.

    Args:
        settings: as of `ReplayBuffer`.
        alpha: exponent of priorities, at least 0; 0 draws uniformly.
        beta: exponent of weights, at least 0. It is an attribute, too, which `train` may set.

    Raises:
        SpecError: an exponent is invalid.

    Example:
        >>> from gymnasium import spaces
        >>> box, action = spaces.Box(0, 9, (1,)), spaces.Discrete(2)
        >>> buffer = PrioritizedReplayBuffer(8, box, action, "cpu", alpha=1.0, beta=1.0)
        >>> for t in range(2):
        ...     buffer.add(np.array([[t]]), np.array([[t + 1]]), np.array([0]), np.ones(1), np.zeros(1), [{}])
        >>> buffer.update_priorities(np.array([0, 1]), np.array([1.0, 4.0]))
        >>> batch = buffer.sample(5)
        >>> batch.indices, batch.weights.flatten()
        (array([0, 1, 1, 1, 1]), tensor([1.0000, 0.2500, 0.2500, 0.2500, 0.2500]))
    """

    # Draws go through the rows in the order of their ids.
    _order = LANE

    def __init__(self, *settings: Any, alpha: float = 0.6, beta: float = 0.4, **more_settings: Any) -> None:
        super().__init__(*settings, **more_settings)
        self.beta = beta
        self._priorities = Priorities(self._storage.columns.n_rows, self.n_envs, exponent("alpha", alpha))

    @property
    def alpha(self) -> float:
        """Exponent of priorities."""
        return self._priorities.alpha

    @property
    def beta(self) -> float:
        """Exponent of weights."""
        return self._beta

    @beta.setter
    def beta(self, beta: float) -> None:
        self._beta = exponent("beta", beta)

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> PrioritizedReplayBufferSamples:
        """Draws rows in proportion to their priorities, with replacement, from numpy's global random stream.

        One row is drawn from each n-th of the sum of priorities, so that rows come in the order of `indices`.

        Args:
            batch_size: B, the number of rows.
            env: normalises observations and rewards, if given.

        Returns:
            What `ReplayBuffer.sample` returns; `weights`, float32 (B, 1): (N P(i))^-beta over the largest of the
            buffer; and `indices`, int64 (B,), an array of numpy, for `update_priorities`.

        Raises:
            SpecError: there are no rows, or their priorities are all zero.
        """
        # The global stream, which Stable-Baselines3 seeds.
        stream = np.random.Generator(np.random.get_bit_generator())  # type: ignore[attr-defined]
        priorities = self._priorities
        with priorities.lock:
            span = self._storage.span()
            rows, leaves = priorities.draw_rows(span, batch_size, stream)
            weights = importance_weights(leaves, priorities.tree.minimum, self.beta)
            priorities.drawn.remember(span, rows)
        fields = self._read(rows, env)._asdict()
        return PrioritizedReplayBufferSamples(**fields, weights=self.to_torch(weights[:, None]), indices=rows)

    def update_priorities(self, indices: Any, priorities: Any) -> None:
        """Sets the priorities of rows; if an index is repeated, its last priority counts.

        Priorities of rows that were overwritten after they were drawn are ignored.

        Args:
            indices: int, B of them, from `sample`.
            priorities: B numbers in any shape, finite and at least 0, such as the absolute TD errors plus 1e-6. A row
                with priority 0 is not drawn again.

        Raises:
            IndexError, SpecError: an argument is invalid; nothing changes.
        """
        self._priorities.set(self._storage, indices, priorities)

    def reset(self) -> None:
        """Drops every row; the next one has priority 1."""
        super().reset()
        self._priorities.clear()


@set_module("rlstructs.integrations.sb3")
class PrioritizedDictReplayBuffer(PrioritizedReplayBuffer, DictReplayBuffer):
    """A `PrioritizedReplayBuffer` of observations that are dicts."""
