"""`SharedVectorWrapper`: a `SharedVectorEnv` as an environment of torchrl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import EnvBase
from torchrl.envs.libs.gym import _gym_to_torchrl_spec_transform

from rlstructs.envs.shared_vector.arguments import RESET_MASK
from rlstructs.envs.shared_vector.shared_vector_env import SharedVectorEnv
from rlstructs.errors import SpecError
from rlstructs.workers.public_names import set_module

ENDS = ("done", "terminated", "truncated")


@set_module("rlstructs.integrations.torchrl")
class SharedVectorWrapper(EnvBase):  # type: ignore[misc]
    """Replaces torchrl's `ParallelEnv` of `GymEnv`: one environment of batch size (N,), stepped by worker processes.

    It steps and resets as torchrl expects: ("next", "observation") of a last step is the true last observation of the
    episode, and `reset` starts an episode only in the environments of "_reset". What torchrl does not reset, a
    `SharedVectorEnv` of the default mode resets itself in the step after.

    Args:
        envs: in autoreset mode NEXT_STEP, the default, or DISABLED. Its observations are arrays or a Dict of them.
        categorical_action_encoding: whether discrete actions are numbers; otherwise one-hot, as in `GymWrapper`.
        device: of what `step` and `reset` return.

    Raises:
        TypeError: `envs` is no `SharedVectorEnv`.
        SpecError: its autoreset mode is SAME_STEP, which returns no last observations.
        Exception: what `SharedVectorEnv` raises.
    """

    def __init__(
        self,
        envs: SharedVectorEnv,
        *,
        categorical_action_encoding: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        if not isinstance(envs, SharedVectorEnv):
            raise TypeError(f"SharedVectorWrapper: needs a SharedVectorEnv, got {type(envs).__name__}")
        if envs.autoreset_mode is AutoresetMode.SAME_STEP:
            raise SpecError("SharedVectorWrapper: needs the autoreset mode NEXT_STEP or DISABLED, got SAME_STEP")
        n = envs.num_envs
        super().__init__(device=device, batch_size=torch.Size([n]))
        self._envs = envs
        self._seed: int | None = None  # of the next reset of all environments

        def batch(space: Any) -> Any:
            spec = _gym_to_torchrl_spec_transform(
                space, device=self.device, categorical_action_encoding=categorical_action_encoding
            )
            return spec.expand(n, *spec.shape)

        seen = batch(envs.single_observation_space)
        self.observation_spec = seen if isinstance(seen, Composite) else Composite(observation=seen, shape=[n])
        self.action_spec = batch(envs.single_action_space)
        self.reward_spec = Unbounded(shape=(n, 1), device=self.device)
        done = {name: Categorical(2, dtype=torch.bool, shape=(n, 1), device=self.device) for name in ENDS}
        self.done_spec = Composite(done, shape=[n])

    def _step(self, tensordict: Any) -> Any:
        actions = self.action_spec.to_numpy(tensordict.get(self.action_key))
        observations, rewards, terminated, truncated, _ = self._envs.step(actions)
        signals = {"reward": rewards.astype(np.float32), "terminated": terminated, "truncated": truncated}
        return self._make_tensordict(observations, signals | {"done": terminated | truncated})

    def _reset(self, tensordict: Any = None, *, seed: int | None = None, options: Any = None, **kwargs: Any) -> Any:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is None or mask.all():
            seed, self._seed = self._seed if seed is None else seed, None
        else:
            options = {**(options or {}), RESET_MASK: mask.cpu().numpy().reshape(self._envs.num_envs)}
        observations, _ = self._envs.reset(seed=seed, options=options)
        return self._make_tensordict(observations, dict.fromkeys(ENDS, np.zeros(self._envs.num_envs, bool)))

    def _set_seed(self, seed: int | None) -> None:
        self._seed = seed

    def close(self, **kwargs: Any) -> None:
        """Closes every environment and ends every worker."""
        super().close(**kwargs)
        self._envs.close()

    def _make_tensordict(self, observations: Any, signals: Mapping[str, np.ndarray]) -> Any:
        seen = observations if isinstance(observations, dict) else {"observation": observations}
        found = self.observation_spec.encode(seen, ignore_device=True)
        for name, values in signals.items():
            found[name] = torch.from_numpy(values)[:, None]
        made = TensorDict(found, batch_size=self.batch_size, device=self.device)
        return made if self._envs.copy else made.clone()
