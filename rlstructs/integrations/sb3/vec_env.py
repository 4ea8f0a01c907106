"""Stable-Baselines3: its `VecEnv` over worker processes of several environments each.

from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from rlstructs.integrations.sb3 import SharedVecEnv

model = PPO("MlpPolicy", make_vec_env("CartPole-v1", 16, vec_env_cls=SharedVecEnv))
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import methodcaller
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from stable_baselines3.common.vec_env import VecEnv

from rlstructs.envs.shared_vector.columns import split_infos
from rlstructs.envs.shared_vector.shared_vector_env import SharedVectorEnv
from rlstructs.integrations import env_functions
from rlstructs.workers.public_names import set_module

Indices = int | Iterable[int] | None
Info = dict[str, Any]
# The names under which gymnasium puts the last observation and info of an episode into the info of the reset.
FINAL = ("final_obs", "final_info")


@set_module("rlstructs.integrations.sb3")
class SharedVecEnv(VecEnv):  # type: ignore[misc]
    """Replaces Stable-Baselines3's `SubprocVecEnv`, with several environments in each process.

    For the same seeds it returns what `DummyVecEnv` returns. A worker that dies or raises is an error at once, and
    scripts need no `__main__` guard.

    Args:
        env_fns: make the environments, which have equal spaces. May be lambdas.
        n_workers: number of processes that share the environments, in order; None for one per core, at most one per
            environment; 0 steps them in this process.
        settings: further arguments of `rlstructs.SharedVectorEnv`, such as `start_method` and `timeout`.

    Raises:
        Exception: what the constructor of `SharedVectorEnv` raises.
    """

    def __init__(
        self, env_fns: Sequence[Callable[[], gymnasium.Env[Any, Any]]], n_workers: int | None = None, **settings: Any
    ) -> None:
        self._envs = SharedVectorEnv(env_fns, n_workers, autoreset_mode=AutoresetMode.SAME_STEP, **settings)
        self._calls = self._envs._calls  # gives the infos of each environment apart
        self._split = partial(split_infos, range(self._envs.num_envs))
        super().__init__(self._envs.num_envs, self._envs.single_observation_space, self._envs.single_action_space)
        # The environment's own, as `DummyVecEnv` has them: `VecVideoRecorder` looks there for the frames per second.
        self.metadata = {name: value for name, value in self._envs.metadata.items() if name != "autoreset_mode"}

    def reset(self) -> Any:
        """Starts an episode in every environment; returns the observations, (N, ...).

        What `seed` and `set_options` have set before takes effect; `reset_infos` holds the infos.
        """
        self._calls.reset(self._seeds, [options or None for options in self._options], None)
        observations, infos = self._calls.finish_reset(None, True, self._split)
        self.reset_infos = infos
        self._reset_seeds()
        self._reset_options()
        return observations

    def step_async(self, actions: np.ndarray) -> None:
        """Starts a step of every environment; `step_wait` waits for it."""
        self._envs.step_async(actions)

    def step_wait(self) -> tuple[Any, np.ndarray, np.ndarray, list[Info]]:
        """Waits for the step that `step_async` started.

        Returns:
            Observations (N, ...), where an episode ended those after the reset; rewards float32 (N,); dones bool (N,);
            and an info for each environment, with `TimeLimit.truncated`, and `terminal_observation` where an episode
            ended.
        """
        step = self._calls.finish_step(None, True, self._split)
        observations, rewards, terminated, truncated, infos = step
        dones = terminated | truncated
        for env in np.flatnonzero(dones).tolist():
            self.reset_infos[env] = {name: value for name, value in infos[env].items() if name not in FINAL}
            infos[env] = {**infos[env]["final_info"], "terminal_observation": infos[env]["final_obs"]}
        for info, is_truncated in zip(infos, (truncated & ~terminated).tolist(), strict=True):
            info["TimeLimit.truncated"] = is_truncated
        return observations, rewards.astype(np.float32), dones, infos

    def close(self) -> None:
        """Closes every environment and ends every worker. Idempotent."""
        self._envs.close()

    def get_images(self) -> Sequence[np.ndarray | None]:
        """The image of each environment, None unless their render mode is "rgb_array"."""
        if self.render_mode != "rgb_array":
            warnings.warn(f"get_images needs the render mode 'rgb_array', it is {self.render_mode!r}", stacklevel=2)
            return [None] * self.num_envs
        return self._envs.render()

    def has_attr(self, attr_name: str) -> bool:
        """Whether every environment, or a wrapper of it, has this attribute."""
        return all(self._calls.apply(methodcaller("has_wrapper_attr", attr_name)))

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """Reads an attribute of each environment, or of those of `indices`.

        Raises:
            AttributeError: one has no such attribute.
        """
        return self._apply(methodcaller("get_wrapper_attr", attr_name), indices)

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Sets an attribute of each environment's outermost wrapper.

        It does so in all environments, or in those of `indices`.
        """
        self._apply(partial(env_functions.set_attribute, attr_name, value), indices)

    def env_method(
        self, method_name: str, *method_args: Any, indices: Indices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Calls a method of each environment, or of those of `indices`; returns the values."""
        return self._apply(partial(env_functions.call_method, method_name, method_args, method_kwargs), indices)

    def env_is_wrapped(self, wrapper_class: type[gymnasium.Wrapper], indices: Indices = None) -> list[bool]:
        """Whether each environment, or those of `indices`, has a wrapper of this class."""
        return self._apply(partial(env_functions.is_wrapped, wrapper_class), indices)

    def _apply(self, function: Callable[[Any], Any], indices: Indices) -> list[Any]:
        """Calls a function with environments; returns values in the order of `indices`.

        Indices may repeat.
        """
        wanted = [index % self.num_envs for index in self._get_indices(indices)]
        if not wanted:
            return []
        envs = sorted(set(wanted))
        values = dict(zip(envs, self._calls.apply(function, envs), strict=True))
        return [values[env] for env in wanted]
