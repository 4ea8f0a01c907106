"""tianshou: its `BaseVectorEnv` over worker processes of several environments each, and its replay buffers.

from tianshou.data import Collector
from rlstructs.integrations.tianshou import VectorReplayBuffer, WorkerVectorEnv

envs = WorkerVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 16, n_workers=4)
collector = Collector(policy, envs, VectorReplayBuffer(20_000, 16))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import methodcaller
from time import monotonic
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import concatenate, create_empty_array, iterate
from tianshou.data import CachedReplayBuffer as TianshouCachedReplayBuffer
from tianshou.data import ReplayBufferManager
from tianshou.env import BaseVectorEnv

from rlstructs import replay
from rlstructs.checks import check_count, check_timeout
from rlstructs.envs.shared_vector.arguments import check_env_ids, expand_seeds
from rlstructs.envs.shared_vector.columns import Outcome, split_infos
from rlstructs.envs.shared_vector.env_calls import Pending, Step
from rlstructs.envs.shared_vector.shared_vector_env import SharedVectorEnv
from rlstructs.errors import SpecError, WorkerTimeout
from rlstructs.integrations import env_functions

__all__ = [
    "CachedReplayBuffer",
    "HERVectorReplayBuffer",
    "PrioritizedVectorReplayBuffer",
    "VectorReplayBuffer",
    "WorkerVectorEnv",
]

Ids = int | Sequence[int] | np.ndarray | None
Info = dict[str, Any]


class WorkerVectorEnv(BaseVectorEnv):  # type: ignore[misc]
    """Replaces tianshou's `SubprocVectorEnv` and `ShmemVectorEnv`, with several environments in each process.

    For the same seeds it returns what `DummyVectorEnv` returns. It resets only the environments that it is told to. A
    worker that dies or raises is an error at once, and scripts need no `__main__` guard.

    With `wait_num` or `timeout` a step does not wait for all environments: `AsyncCollector` is for that. A worker steps
    its environments one after another, so that a slow one delays the others of its worker. A reset waits for steps of
    the environments that it resets, and drops their results.

    Args:
        env_fns: make the environments, which have equal spaces; observations are not a Tuple. May be lambdas.
        n_workers: number of processes that share the environments, in order, at most one per environment; None for one
            per core, or one per environment with `wait_num` or `timeout`; 0 steps them in this process.
        wait_num: how many environments a step waits for; it returns all that are ready then. None for all.
        timeout: the seconds after which a step returns those that are ready, and goes on waiting if none is; None for
            any number.
        worker_timeout: seconds within which workers must answer; None for any number.
        settings: further arguments of `rlstructs.SharedVectorEnv`, such as `start_method`.

    Attributes:
        env_num: N, the number of environments.
        is_async: whether a step may return before all environments are ready.

    Raises:
        SpecError, TypeError: `wait_num` is no int from 1 to N, `timeout` is not above 0, or the observations are a
            Tuple.
        Exception: what the constructor of `SharedVectorEnv` raises, here and in every method.
    """

    # tianshou's own compares every name with those of these attributes, in Python.
    __getattribute__ = object.__getattribute__
    action_space = property(methodcaller("get_env_attr", "action_space"))
    observation_space = property(methodcaller("get_env_attr", "observation_space"))
    metadata = property(methodcaller("get_env_attr", "metadata"))
    reward_range = property(methodcaller("get_env_attr", "reward_range"))
    spec = property(methodcaller("get_env_attr", "spec"))

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gymnasium.Env[Any, Any]]],
        n_workers: int | None = None,
        *,
        wait_num: int | None = None,
        timeout: float | None = None,
        worker_timeout: float | None = None,
        **settings: Any,
    ) -> None:
        self.env_num = n = len(env_fns := list(env_fns))
        self.wait_num = n if wait_num is None else check_count("wait_num", wait_num)
        if self.wait_num > n:
            raise SpecError(f"wait_num must be at most {n}, the number of environments, got {wait_num}")
        self.timeout = check_timeout(timeout)
        self.is_async = self.wait_num < n or timeout is not None
        n_workers = n if n_workers is None and self.is_async else n_workers
        self._envs = SharedVectorEnv(
            env_fns, n_workers, autoreset_mode=AutoresetMode.DISABLED, timeout=worker_timeout, **settings
        )
        self._calls, self._columns = self._envs._calls, self._envs._columns
        if isinstance(space := self._envs.single_observation_space, gymnasium.spaces.Tuple):
            self._envs.close()
            raise TypeError(f"env_fns: tianshou takes observations that are arrays or a Dict, got {space}")
        self._everyone = list(range(n))
        # The same objects each time, as in `DummyVectorEnv`: a `Collector` draws random actions from them.
        self._action_spaces = self._calls.apply(methodcaller("get_wrapper_attr", "action_space"))

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._envs.closed

    @property
    def waiting_id(self) -> list[int]:
        """The environments whose step no call has returned yet."""
        found: list[int] = self._calls.sent.tolist()
        return found

    @property
    def ready_id(self) -> list[int]:
        """The environments that can be stepped."""
        return sorted(set(self._everyone).difference(self.waiting_id))

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
            action: n actions. With `wait_num` or `timeout` None waits for steps that were begun before.
            id: index or n indexes of environments, each once; None for all.

        Returns:
            Observations (n, ...), like those of `reset`; rewards float64, terminations and truncations bool (n,); and
            infos (n,), dicts with `env_id`. With `wait_num` or `timeout` of the environments that are ready, by
            ascending index.

        Raises:
            StateError: an environment has ended and was not reset, or is being stepped; no environment was stepped.
            SpecError: the numbers of actions and of environments differ.
        """
        ids, calls = self._check_ids("step", id), self._calls
        if self.is_async:
            if action is not None:
                calls.step_some(self._batch_actions(action, len(ids)), np.array(ids))
            arrived = self._wait_for_ready()
            ids = sorted(arrived)
            seen, rewards, terminated, truncated, infos = self._receive(ids, arrived)
        elif ids == self._everyone:
            calls.step(self._batch_actions(action, len(ids)))
            split = partial(split_infos, ids)
            seen, rewards, terminated, truncated, infos = calls.finish_step(None, True, split)
        else:
            calls.step_some(self._batch_actions(action, len(ids)), np.array(ids))
            arrived = calls.wait_for_some(None, ids, None)
            seen, rewards, terminated, truncated, infos = self._receive(ids, arrived)
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

    def _wait_for_ready(self) -> dict[int, Outcome]:
        """Waits for `wait_num` environments, or for `timeout` seconds and an environment."""
        while True:
            began = monotonic()
            try:
                return self._calls.wait_for_ready(self.wait_num, self.timeout)
            except WorkerTimeout:
                if self.timeout is None or monotonic() < began + self.timeout:  # a worker is late
                    raise

    def _receive(self, ids: list[int], arrived: dict[int, Outcome]) -> Step[list[Info]]:
        """Returns the results of these environments, which have arrived; they can be stepped again."""
        envs, columns = np.array(ids), self._columns
        infos = split_infos(ids, arrived.values())
        self._calls.mark_received(envs)
        ends = columns.terminations[envs], columns.truncations[envs]
        return columns.batch_some(envs), columns.rewards[envs], *ends, infos

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
        order = self._envs._order
        if not (self.is_async and order.pending is Pending.SEND):
            order.check_free("reset", order.pending)
            self._envs._drop_pending()
        envs = np.array(ids)
        infos = split_infos(ids, self._calls.reset_some(envs, seeds, options).values())
        return self._stack(self._columns.batch_some(envs)), np.array(infos, dtype=object)

    def _stack(self, batch: Any) -> np.ndarray:
        """Stacks observations as `DummyVectorEnv` does.

        For a Dict space, makes an array of dicts.
        """
        return batch if isinstance(batch, np.ndarray) else np.stack(list(iterate(self._envs.observation_space, batch)))

    def _batch_actions(self, action: Any, n: int) -> Any:
        """Makes a batch of n actions."""
        if action is None or len(action) != n:
            got = "None" if action is None else len(action)
            raise SpecError(f"step: needs an action for each of {n} environments, got {got}")
        space = self._envs.single_action_space
        if isinstance(space, gymnasium.spaces.Dict | gymnasium.spaces.Tuple):
            return concatenate(space, list(action), create_empty_array(space, n))
        return np.asarray(action)


# For several environments, `Collector` asks whether a buffer is an instance of tianshou's own classes. These are the
# last bases here, so that every method is the one of `rlstructs.replay`.
class VectorReplayBuffer(replay.VectorReplayBuffer, ReplayBufferManager):  # type: ignore[misc]
    """`rlstructs.replay.VectorReplayBuffer`, which tianshou's `Collector` and algorithms take."""


class PrioritizedVectorReplayBuffer(replay.PrioritizedVectorReplayBuffer, ReplayBufferManager):  # type: ignore[misc]
    """`rlstructs.replay.PrioritizedVectorReplayBuffer`, which tianshou's `Collector` and algorithms take."""


class HERVectorReplayBuffer(replay.HERVectorReplayBuffer, ReplayBufferManager):  # type: ignore[misc]
    """`rlstructs.replay.HERVectorReplayBuffer`, which tianshou's `Collector` and algorithms take."""


class CachedReplayBuffer(replay.CachedReplayBuffer, TianshouCachedReplayBuffer):  # type: ignore[misc]
    """`rlstructs.replay.CachedReplayBuffer`, which tianshou's `Collector` and algorithms take."""
