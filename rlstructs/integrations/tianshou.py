"""tianshou: its `BaseVectorEnv` over worker processes of several environments each.

    from tianshou.data import Collector
    from rlstructs.integrations.tianshou import WorkerVectorEnv

    envs = WorkerVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 16, n_workers=4)
    collector = Collector(policy, envs, buffer)
"""

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
from rlstructs.envs.shared_vector.shared_vector_env import SharedVectorEnv
from rlstructs.envs.shared_vector.step_results import split_infos
from rlstructs.errors import SpecError
from rlstructs.integrations import env_functions

Ids = int | Sequence[int] | np.ndarray | None
Info = dict[str, Any]


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

    def __init__(
        self, env_fns: Sequence[Callable[[], gymnasium.Env[Any, Any]]], n_workers: int | None = None, **settings: Any
    ) -> None:
        self._envs = SharedVectorEnv(env_fns, n_workers, autoreset_mode=AutoresetMode.DISABLED, **settings)
        self._calls, self._columns = self._envs._calls, self._envs._columns
        self._space = self._envs.single_observation_space
        if isinstance(self._space, gymnasium.spaces.Tuple):
            self._envs.close()
            raise TypeError(f"env_fns: tianshou takes observations that are arrays or a Dict, got {self._space}")
        self.env_num = self.wait_num = self._envs.num_envs
        # The same objects each time, as of `DummyVectorEnv`: a `Collector` draws random actions from them.
        self._action_spaces = self._calls.apply(methodcaller("get_wrapper_attr", "action_space"))

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._envs.closed

    def reset(
        self,
        env_id: Ids = None,
        *,
        id: Ids = None,  # noqa: A002 - tianshou's name before its version 1
        seed: int | None = None,
        options: Info | None = None,
    ) -> tuple[np.ndarray, list[Info]]:
        """Starts an episode in some environments.

        Args:
            env_id, id: index or n indexes of environments, each once; None for all.
            seed, options: each of them gets these.

        Returns:
            Observations (n, ...), which are dicts if their space is a Dict; and an info for each environment.
        """
        envs = self._check_ids("reset", id if env_id is None else env_id)
        return self._reset(envs, [seed] * self.env_num, options)

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
            Observations (n, ...), as of `reset`; rewards float64, terminations and truncations bool (n,); and infos
            (n,), dicts with `env_id`.

        Raises:
            StateError: an environment has ended and was not reset; none has been stepped.
            SpecError: the number of actions is not that of environments.
        """
        envs = self._check_ids("step", id)
        actions = self._batch_actions(action, len(envs))
        columns = self._columns
        if np.array_equal(envs, np.arange(self.env_num)):
            self._calls.step(actions)
            *_, infos = self._calls.finish_step(None, False, partial(split_infos, envs.tolist()))
        else:
            self._calls.step_some(actions, envs)
            infos = split_infos(envs.tolist(), self._calls.wait_for_some(None, envs, None).values())
            self._calls.mark_received(envs)
        for info, env in zip(infos, envs.tolist(), strict=True):
            info["env_id"] = env
        flags = columns.terminations[envs], columns.truncations[envs]
        return self._observe(envs), columns.rewards[envs], *flags, np.array(infos, dtype=object)

    def seed(self, seed: int | Sequence[int | None] | None = None) -> list[Any]:
        """Seeds environments and their action spaces, and starts an episode in those that have no method `seed`.

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
            self._reset(np.array(without), seeds, None)
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
            AttributeError: one has no such attribute, and no wrapper of it has.
        """
        if key == "action_space":
            return [self._action_spaces[env] for env in self._check_ids("get_env_attr", id)]
        return self._apply("get_env_attr", methodcaller("get_wrapper_attr", key), id)

    def set_env_attr(self, key: str, value: Any, id: Ids = None) -> None:  # noqa: A002 - tianshou's name
        """Sets an attribute of each environment inside its wrappers, or of those of `id`."""
        self._apply("set_env_attr", partial(env_functions.set_inner_attribute, key, value), id)

    def _check_ids(self, call: str, ids: Ids) -> np.ndarray:
        """The environments, int64 (n,)."""
        return check_env_ids(call, None if ids is None else np.atleast_1d(ids), self.env_num)

    def _apply(self, call: str, function: Callable[[Any], Any], ids: Ids) -> list[Any]:
        envs = self._check_ids(call, ids)
        values = dict(zip(sorted(envs.tolist()), self._calls.apply(function, envs), strict=True))
        return [values[env] for env in envs.tolist()]

    def _reset(
        self, envs: np.ndarray, seeds: Sequence[int | None], options: Info | None
    ) -> tuple[np.ndarray, list[Info]]:
        self._envs._order.check_free("reset", self._envs._order.pending)
        self._envs._drop_pending()
        mask = None if len(envs) == self.env_num else np.isin(np.arange(self.env_num), envs)
        self._calls.reset(seeds, options, mask)
        _, infos = self._calls.finish_reset(None, False, partial(split_infos, envs.tolist()))
        return self._observe(envs), infos

    def _observe(self, envs: np.ndarray) -> np.ndarray:
        """Copies of the newest observations of environments, as `DummyVectorEnv` stacks them."""
        batch = self._columns.batch_some(envs)
        return batch if isinstance(batch, np.ndarray) else np.stack(list(iterate(self._envs.observation_space, batch)))

    def _batch_actions(self, action: Any, n: int) -> Any:
        """Makes a batch of n actions."""
        if len(action) != n:
            raise SpecError(f"step: needs an action for each of {n} environments, got {len(action)}")
        space = self._envs.single_action_space
        if isinstance(space, gymnasium.spaces.Dict | gymnasium.spaces.Tuple):
            return concatenate(space, list(action), create_empty_array(space, n))
        return np.asarray(action)
