"""An environment that forbids actions, for tests and the programs that they run; importing it registers it."""

from __future__ import annotations

import gymnasium
import numpy as np
from gymnasium import spaces

N_ACTIONS = 4


class Masked(gymnasium.Env):
    """Ends after 5 steps, and fails if an action is forbidden; each step allows some, and the end of an episode none.

    An observation is `seen`, float32 (2,), and `action_mask`, int8 (4,).
    """

    observation_space = spaces.Dict(
        {"seen": spaces.Box(-1, 1, (2,), np.float32), "action_mask": spaces.Box(0, 1, (N_ACTIONS,), np.int8)}
    )

    def __init__(self, start=0):
        self.action_space = spaces.Discrete(N_ACTIONS, start=start)

    def _observe(self):
        self.mask = self.np_random.integers(0, 2, N_ACTIONS).astype(np.int8)
        self.mask[self.np_random.integers(N_ACTIONS)] = 1
        if self.n_steps == 5:
            self.mask[:] = 0
        return {"seen": self.np_random.uniform(-1, 1, 2).astype(np.float32), "action_mask": self.mask.copy()}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.n_steps = 0
        return self._observe(), {}

    def step(self, action):
        if not self.mask[action - self.action_space.start]:
            raise ValueError(f"action {action} is forbidden")
        self.n_steps += 1
        return self._observe(), 1.0, self.n_steps == 5, False, {}


gymnasium.register("Masked-v0", Masked)
