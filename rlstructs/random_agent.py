"""`RandomAgent`: uniform actions, for any supported action space."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from rlstructs.agent import RL_Agent
from rlstructs.envs.spaces import ActionReader, Leaf, leaves
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor


class RandomAgent(RL_Agent):
    """Draws each action from its space: uniformly; where a Box is unbounded, from a standard normal.

    Args:
        action_space: Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of them.

    Example:
        >>> agent = RandomAgent(spaces.Box(-1, 1, (3,)))
        >>> observation = DictTensor({"reward": torch.zeros(2)})
        >>> output, _ = agent(DictTensor(), observation, DictTensor())
        >>> output["action"].shape
        torch.Size([2, 3])
    """

    def __init__(self, action_space: gymnasium.Space[Any]) -> None:
        self._draws = {ActionReader.key(leaf): _Draw(leaf) for leaf in leaves(action_space, "action")}

    def initial_state(self, agent_info: DictTensor, B: int) -> DictTensor:
        """Nothing: it has no state."""
        return DictTensor()

    def __call__(
        self,
        state: DictTensor,
        observation: DictTensor,
        agent_info: DictTensor,
        history: TemporalDictTensor | None = None,
    ) -> tuple[DictTensor, DictTensor]:
        """Random actions, B rows."""
        n = observation.n_elems()
        return DictTensor.trusted({key: draw(n) for key, draw in self._draws.items()}), state

    def update(self, info: Any) -> None:
        """Nothing: it does not learn."""


class _Draw:
    """Draws values of one leaf."""

    def __init__(self, leaf: Leaf) -> None:
        space = leaf.space
        self._shape = leaf.shape
        self._high: int | None = None
        self._start: Any = 0
        self._torch_dtype = torch.from_numpy(np.zeros(0, leaf.dtype)).dtype
        if isinstance(space, spaces.Discrete):
            self._high, self._start = int(space.n), int(space.start)
        elif isinstance(space, spaces.MultiBinary):
            self._high = 2
        else:
            self._prepare_bounds(space)

    def _prepare_bounds(self, space: Any) -> None:
        if isinstance(space, spaces.MultiDiscrete):
            low = space.start.astype(np.float64)
            span = space.nvec.astype(np.float64)
        else:
            low, span = space.low.astype(np.float64), space.high.astype(np.float64) - space.low.astype(np.float64)
            if self._whole:
                span = span + 1
        self._low, self._span = torch.from_numpy(low), torch.from_numpy(span)
        self._bounded = torch.isfinite(self._span)

    @property
    def _whole(self) -> bool:
        return not self._torch_dtype.is_floating_point

    def __call__(self, n: int) -> torch.Tensor:
        shape = (n, *self._shape)
        if self._high is not None:
            drawn = torch.randint(self._high, shape)
            return drawn + self._start if self._start else drawn.to(self._torch_dtype)
        if self._whole:
            return (self._low + torch.rand(shape, dtype=torch.float64) * self._span).floor().to(self._torch_dtype)
        if bool(self._bounded.all()):
            return torch.addcmul(self._low, torch.rand(shape), self._span).to(self._torch_dtype)
        uniform = torch.nan_to_num(self._low) + torch.rand(shape) * torch.nan_to_num(self._span)
        return torch.where(self._bounded, uniform, torch.randn(shape).double()).to(self._torch_dtype)
