"""`NStepReplayBuffer`: Stable-Baselines3's buffer of n-step returns, over a store of this library."""

from __future__ import annotations

from typing import Any

import numpy as np
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize

from rlstructs.checks import check_count, check_gamma
from rlstructs.integrations.sb3.replay_buffer import DONES, REWARDS, TIMEOUTS, ReplayBuffer
from rlstructs.workers.public_names import set_module


@set_module("rlstructs.integrations.sb3")
class NStepReplayBuffer(ReplayBuffer):
    """Replaces Stable-Baselines3's `NStepReplayBuffer`, which an algorithm takes where `n_steps` is more than 1.

    It draws the same rows and returns the same numbers. Unlike Stable-Baselines3's it takes `optimize_memory_usage`.

    Args:
        settings: as of `ReplayBuffer`.
        n_steps: n, the most rewards that are added up. Fewer where the episode ends, or where rows end.
        gamma: discount of a step, from 0 to 1; that of the algorithm.

    Raises:
        SpecError, TypeError: `n_steps` is no int from 1 on, or `gamma` is not from 0 to 1.

    Example:
        >>> from gymnasium import spaces
        >>> box, action = spaces.Box(0, 9, (1,)), spaces.Discrete(2)
        >>> buffer = NStepReplayBuffer(3, box, action, "cpu", n_steps=3, gamma=0.5)
        >>> for t in range(3):
        ...     buffer.add(np.array([[t]]), np.array([[t + 1]]), np.array([0]), np.ones(1), np.zeros(1), [{}])
        >>> np.random.seed(0)
        >>> batch = buffer.sample(4)
        >>> batch.observations.flatten(), batch.next_observations.flatten()
        (tensor([0., 1., 0., 1.]), tensor([3., 3., 3., 3.]))
        >>> batch.rewards.flatten(), batch.discounts.flatten()
        (tensor([1.7500, 1.5000, 1.7500, 1.5000]), tensor([0.1250, 0.2500, 0.1250, 0.2500]))
    """

    def __init__(self, *settings: Any, n_steps: int = 3, gamma: float = 0.99, **more_settings: Any) -> None:
        super().__init__(*settings, **more_settings)
        if "discounts" not in ReplayBufferSamples._fields:
            raise ImportError("NStepReplayBuffer needs stable-baselines3 2.7 or newer, whose algorithms take discounts")
        check_gamma(gamma)
        self.n_steps, self.gamma = check_count("n_steps", n_steps), gamma

    def _get_samples(self, batch_inds: np.ndarray, env: VecNormalize | None = None) -> Any:
        lanes = np.random.randint(0, high=self.n_envs, size=batch_inds.shape)
        slots = (batch_inds[:, None] + np.arange(self.n_steps)) % self.buffer_size
        rows = self._storage.columns.rows(lanes[:, None], slots)
        steps = self._gather([REWARDS, DONES, TIMEOUTS], rows.reshape(-1))
        rewards, dones, timeouts = (steps[name].reshape(rows.shape) for name in (REWARDS, DONES, TIMEOUTS))
        # Nothing follows the newest row: the slot behind it is empty, or has the oldest one.
        is_end = (dones != 0) | (timeouts != 0) | (slots == (self.pos - 1) % self.buffer_size)
        is_end[:, -1] = True
        last = is_end.argmax(axis=1)
        counts = np.arange(self.n_steps) <= last[:, None]
        discounts = self.gamma ** np.arange(self.n_steps, dtype=np.float32)
        returns = np.where(counts, self._normalize_reward(rewards, env) * discounts, 0).astype(np.float32)
        found = self._read(rows[:, 0], env, rows[np.arange(len(rows)), last])
        return found._replace(
            rewards=self.to_torch(returns.sum(axis=1, keepdims=True)),
            discounts=self.to_torch(self.gamma ** counts.sum(axis=1, keepdims=True).astype(np.float32)),
        )
