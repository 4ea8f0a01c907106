"""`DeviceEnv`: an environment whose observations are wanted on another device."""

from __future__ import annotations

from typing import Any

import torch

from rlstructs.envs.vec_env import VecEnv
from rlstructs.frameworks.torch import as_device
from rlstructs.structures.dict_tensor import DictTensor

NO_INFO = DictTensor()


class DeviceEnv:
    """Moves actions to the device of an environment, and what it returns to another one.

    `env_info` stays on the CPU. Every other attribute is that of the environment.

    Args:
        env: the environment.
        from_device: where it computes.
        to_device: where its observations, and the indexes of running environments, are wanted.
    """

    def __init__(self, env: VecEnv, from_device: torch.device | str, to_device: torch.device | str) -> None:
        self._env = env
        self._from, self._to = as_device(from_device), as_device(to_device)

    def n_envs(self) -> int:
        """Number of environments."""
        return self._env.n_envs()

    def reset(self, env_info: DictTensor = NO_INFO) -> tuple[DictTensor, torch.Tensor]:
        """As the environment's own."""
        return self._moved(self._env.reset(env_info))

    def step(
        self, action: DictTensor
    ) -> tuple[tuple[DictTensor, torch.Tensor], tuple[DictTensor, torch.Tensor]]:
        """As the environment's own."""
        after, following = self._env.step(action.to(self._from))
        moved = self._moved(after)
        if following[0] is after[0]:
            return moved, (moved[0], following[1].to(self._to))
        return moved, self._moved(following)

    def close(self) -> None:
        """Closes the environment."""
        self._env.close()

    def _moved(self, pair: tuple[DictTensor, torch.Tensor]) -> tuple[DictTensor, torch.Tensor]:
        return pair[0].to(self._to), pair[1].to(self._to)

    def __getattr__(self, name: str) -> Any:
        # What the rollout reads of an environment that gives rows would go past the moving.
        if name.startswith("_") or name in ("reset_rows", "step_rows", "step_into", "example"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._env, name)
