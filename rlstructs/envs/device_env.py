"""`DeviceEnv`: an environment with observations on another device than its own."""

from __future__ import annotations

from typing import Any

import torch

from rlstructs.envs.vec_env import NO_INFO, VecEnv
from rlstructs.frameworks.torch import as_device
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.workers.public_names import set_module


@set_module("rlstructs")
class DeviceEnv:
    """Moves actions to an environment's device, and observations to another device.

    `env_info` stays on the CPU. Every other attribute is the environment's.

    Args:
        env: the environment.
        from_device: the environment's device.
        to_device: where observations, and the indexes of running environments, are moved.
    """

    def __init__(self, env: VecEnv, from_device: torch.device | str, to_device: torch.device | str) -> None:
        self._env = env
        self._from, self._to = as_device(from_device), as_device(to_device)

    def n_envs(self) -> int:
        """Number of environments."""
        return self._env.n_envs()

    def reset(self, env_info: DictTensor = NO_INFO) -> tuple[DictTensor, torch.Tensor]:
        """Resets the environment; see `VecEnv.reset`."""
        return self._move(self._env.reset(env_info))

    def step(self, action: DictTensor) -> tuple[tuple[DictTensor, torch.Tensor], tuple[DictTensor, torch.Tensor]]:
        """Steps the environment; see `VecEnv.step`."""
        after, following = self._env.step(action.to(self._from))
        moved = self._move(after)
        if following[0] is after[0]:
            return moved, (moved[0], following[1].to(self._to))
        return moved, self._move(following)

    def close(self) -> None:
        """Closes the environment."""
        self._env.close()

    def _move(self, pair: tuple[DictTensor, torch.Tensor]) -> tuple[DictTensor, torch.Tensor]:
        return pair[0].to(self._to), pair[1].to(self._to)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._env, name)
