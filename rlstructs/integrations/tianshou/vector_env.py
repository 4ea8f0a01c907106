"""`WorkerVectorEnv`: tianshou's `BaseVectorEnv` over worker processes of several environments each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import methodcaller
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import concatenate, create_empty_array, iterate
from tianshou.env import BaseVectorEnv

from rlstructs.envs.shared_vector.arguments import check_env_ids, expand_seeds
from rlstructs.envs.shared_vector.columns import split_infos
from rlstructs.envs.shared_vector.shared_vector_env import SharedVectorEnv
from rlstructs.errors import SpecError
from rlstructs.integrations import env_functions
from rlstructs.workers.public_names import set_module

Ids = int | Sequence[int] | np.ndarray | None
Info = dict[str, Any]


@set_module("rlstructs.integrations.tianshou")
class WorkerVectorEnv(BaseVectorEnv):  # type: ignore[misc]
    """Replaces tianshou's `SubprocVectorEnv` and `ShmemVectorEnv`, with several environments in each process.

    For the same seeds it returns what `DummyVectorEnv` returns. It resets only the environments that it is told to. A
    step waits for all environments that it steps: it is for `Collector`, not for `AsyncCollector`. A worker that dies
    or raises is an error at once, and scripts need no `__main__` guard.

    Args:
        env_fns: make the environments, which have equal spaces; observations are not a Tuple. May be lambdas.
        n_workers: number of processes that share the environments, in order; None for one per core, at most one per
            environment; 0 steps them in this process.
        settings: further arguments of `rlstructs.SharedVectorEnv`, such as `start_method` and `timeout`.

    Attributes:
        env_num: N, the number of environments.

    Raises:
        TypeError: the observations are a Tuple.
        Exception: what the constructor of `SharedVectorEnv` raises, here and in every method.
    """

    is_async = False
    # tianshou's own compares every name with those of these attributes, in Python.
    __getattribute__ = object.__getattribute__
    action_space = property(methodcaller("get_env_attr", "action_space"))
    observation_space = property(methodcaller("get_env_attr", "observation_space"))
    metadata = property(methodcaller("get_env_attr", "metadata"))
    reward_range = property(methodcaller("get_env_attr", "reward_range"))
    spec = property(methodcaller("get_env_attr", "spec"))

    def __init__(
        self, env_fns: Sequence[Callable[[], gymnasium.Env[Any, Any]]], n_workers: int | None = None, **settings: Any
    ) -> None:
        self._envs = SharedVectorEnv(env_fns, n_workers, autoreset_mode=AutoresetMode.DISABLED, **settings)
        self._calls, self._columns = self._envs._calls, self._envs._columns
        if isinstance(space := self._envs.single_observation_space, gymnasium.spaces.Tuple):
            self._envs.close()
            raise TypeError(f"env_fns: tianshou takes observations that are arrays or a Dict, got {space}")
        self.env_num = self.wait_num = self._envs.num_envs
        self._everyone = list(range(self.env_num))
        # The same objects each time, as in `DummyVectorEnv`: a `Collector` draws random actions from them.
        self._action_spaces = self._calls.apply(methodcaller("get_wrapper_attr", "action_space"))

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._envs.closed

    def reset(
        self,
        env_id: Ids = None,
        *,
        id: Ids = None,  # noqa: A002 - tianshou calls it so in `step`
        seed: int | None = None,
        options: Info | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Starts an episode in some environments.

        Args:
            env_id, id: index or n indexes of environments, each once; None for all.
            seed, options: each of them gets these.

        Returns:
            Observations (n, ...), which are dicts if their space is a Dict; and infos (n,), dicts.
        """
        ids = self._check_ids("reset", id if env_id is None else env_id)
        return self._reset(ids, [seed] * self.env_num, options)

    def step(
        self,
        action: Any,
        id: Ids = None,  # noqa: A002 - tianshou's name
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Steps some environments.

        Args:
            action: n actions.
            id: index or n indexes of environments, each once; None for all.

        Returns:
            Observations (n, ...), like those of `reset`; rewards float64, terminations and truncations bool (n,); and
            infos (n,), dicts with `env_id`.

        Raises:
            StateError: an environment has ended and was not reset; no environment was stepped.
            SpecError: the numbers of actions and of environments differ.
        """
        ids, calls = self._check_ids("step", id), self._calls
        actions, split = self._batch_actions(action, len(ids)), partial(split_infos, ids)
        if ids == self._everyone:
            calls.step(actions)
            seen, rewards, terminated, truncated, infos = calls.finish_step(None, True, split)
        else:
            envs, columns = np.array(ids), self._columns
            calls.step_some(actions, envs)
            infos = split(calls.wait_for_some(None, envs, None).values())
            calls.mark_received(envs)
            seen, rewards = columns.batch_some(envs), columns.rewards[envs]
            terminated, truncated = columns.terminations[envs], columns.truncations[envs]
        for info, env in zip(infos, ids, strict=True):
            info["env_id"] = env
        return self._stack(seen), rewards, terminated, truncated, np.array(infos, dtype=object)

    def seed(self, seed: int | Sequence[int | None] | None = None) -> list[Any]:
        """Seeds environments and their action spaces.

        Starts an episode in environments that have no method `seed`.

        Args:
            seed: environment k gets `seed + k`; or a sequence with a seed or None for each.

        Returns:
            For each environment a list with its seed, or what its method `seed` returned.
        """
        seeds, values, without = expand_seeds(seed, self.env_num), [], []
        for env, (space, each) in enumerate(zip(self._action_spaces, seeds, strict=True)):
            space.seed(each)
            [(has_method, value)] = self._calls.apply(partial(env_functions.seed, each), [env])
            values.append(value if has_method else [each])
            if not has_method:
                without.append(env)
        if without:
            self._reset(without, seeds, None)
        return values

    def render(self, **kwargs: Any) -> list[Any]:
        """Calls `render` of each environment; returns the values."""
        return self._calls.apply(partial(env_functions.call_method, "render", (), kwargs))

    def close(self) -> None:
        """Closes every environment and ends every worker. Idempotent."""
        self._envs.close()

    def get_env_attr(self, key: str, id: Ids = None) -> list[Any]:  # noqa: A002 - tianshou's name
        """Reads an attribute of each environment, or of those of `id`.

        Raises:
            AttributeError: neither an environment nor a wrapper of it has the attribute.
        """
        if key == "action_space":
            return [self._action_spaces[env] for env in self._check_ids("get_env_attr", id)]
        return self._apply("get_env_attr", methodcaller("get_wrapper_attr", key), id)

    def set_env_attr(self, key: str, value: Any, id: Ids = None) -> None:  # noqa: A002 - tianshou's name
        """Sets an attribute of each environment inside its wrappers, or of those of `id`."""
        self._apply("set_env_attr", partial(env_functions.set_inner_attribute, key, value), id)

    def _check_ids(self, call: str, ids: Ids) -> list[int]:
        """The environments."""
        if ids is None or (isinstance(ids, np.ndarray) and ids.dtype.kind == "i" and ids.tolist() == self._everyone):
            return self._everyone
        found: list[int] = check_env_ids(call, np.atleast_1d(ids), self.env_num).tolist()
        return found

    def _apply(self, call: str, function: Callable[[Any], Any], ids: Ids) -> list[Any]:
        envs = self._check_ids(call, ids)
        values = dict(zip(sorted(envs), self._calls.apply(function, envs), strict=True))
        return [values[env] for env in envs]

    def _reset(
        self, ids: list[int], seeds: Sequence[int | None], options: Info | None
    ) -> tuple[np.ndarray, np.ndarray]:
        vector, calls = self._envs, self._calls
        vector._order.check_free("reset", vector._order.pending)
        vector._drop_pending()
        mask = None
        if len(ids) < len(seeds):
            mask = np.zeros(len(seeds), bool)
            mask[ids] = True
        calls.reset(seeds, options, mask)
        _, infos = calls.finish_reset(None, False, partial(split_infos, ids))
        return self._stack(self._columns.batch_some(np.array(ids))), np.array(infos, dtype=object)

    def _stack(self, batch: Any) -> np.ndarray:
        """Stacks observations as `DummyVectorEnv` does.

        For a Dict space, makes an array of dicts.
        """
        return batch if isinstance(batch, np.ndarray) else np.stack(list(iterate(self._envs.observation_space, batch)))

    def _batch_actions(self, action: Any, n: int) -> Any:
        """Makes a batch of n actions."""
        if len(action) != n:
            raise SpecError(f"step: needs an action for each of {n} environments, got {len(action)}")
        space = self._envs.single_action_space
        if isinstance(space, gymnasium.spaces.Dict | gymnasium.spaces.Tuple):
            return concatenate(space, list(action), create_empty_array(space, n))
        return np.asarray(action)
