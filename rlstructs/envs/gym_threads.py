"""`GymEnvThreads`: gymnasium environments that are each stepped in a thread of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np

from rlstructs.checks import check_count, check_timeout, other_words
from rlstructs.envs.env_infos import InfoKeys
from rlstructs.envs.env_list import POLICIES, RAISE, RESTART, close_in_time
from rlstructs.envs.env_threads import NO_ACTION, Call, EnvThreads
from rlstructs.envs.gym_env import GymEnvInf, copy_observation
from rlstructs.envs.row_env import Pace, Step, check_running
from rlstructs.envs.stepping import Episode, SingleEnv, add_origin, explain_step_error
from rlstructs.errors import SpecError
from rlstructs.shared.layout import Target
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.workers.public_names import set_module

# Seconds that `close` gives to steps under way, and then to closing their environments from other threads: a worker
# that needs more than three seconds for all is killed.
LAST_SECONDS = 0.5


@set_module("rlstructs")
class GymEnvThreads(GymEnvInf):
    """A `GymEnvInf` that steps each environment in a thread of its own.

    It is meant for environments that wait.

    A simulator in another process, a game server or a robot lets its environment wait for an answer. In threads all of
    them wait at once. In a rollout of `RL_Batcher` the agent is called for the environments that are ready, and each
    row advances on its own: it ends after T steps, or where it is when the rollout ends. A step that is under way then
    goes on, and is the first of that row's next rollout. `policy_version` in the trajectories says for each step which
    update its action came from. Elsewhere (`step`, `RL_Batcher.evaluate`) all environments are stepped together, and
    wait together.

    An environment that computes gains nothing from a thread.

    Args:
        min_ready: how many environments have to be ready before the agent is called for them.
        max_wait: the seconds after the first one is ready in which that has to be; then the agent is called for
            those that are ready. None for any number.
        deadline: the seconds after which a rollout ends, if it has at least one step; None to end it when all
            environments have made T steps, or as `preempt` and `min_workers` of `get` say.
        step_timeout: the seconds that a step or a reset may take; None for any number. `EnvTimeout` says which
            environment was late. Its thread is left where it is, as nothing can end it; the environment is closed from
            another thread.
        on_env_timeout: "raise" treats an environment that is late as `on_env_failure` of the batcher says; "restart"
            makes it anew also where other failures are raised.

    Other arguments are those of `GymEnv`.

    Raises:
        SpecError, TypeError: as for `GymEnv`; or an argument is out of range.

    Example:
        >>> import gymnasium
        >>> from rlstructs import RandomAgent, RL_Batcher
        >>> def create_env(n_envs, seed):
        ...     return GymEnvThreads([gymnasium.make("CartPole-v1") for _ in range(n_envs)], seed, deadline=5.0)
        >>> with RL_Batcher(
        ...     10, lambda: RandomAgent(gymnasium.spaces.Discrete(2)), {}, create_env, {"n_envs": 4}, 1, seeds=0
        ... ) as batcher:
        ...     batcher.reset()
        ...     batcher.execute()
        ...     trajectories, n_running = batcher.get()
        >>> trajectories.lengths.tolist(), trajectories.trajectories["policy_version"].shape
        ([10, 10, 10, 10], torch.Size([4, 10]))
    """

    @other_words(seeds="seed")
    def __init__(
        self,
        envs: Sequence[gymnasium.Env[Any, Any]],
        seed: int | Sequence[int],
        *,
        keep_float64: bool = False,
        info_keys: InfoKeys = (),
        episode_seeds: bool = False,
        clip_actions: bool = False,
        min_ready: int = 1,
        max_wait: float | None = None,
        deadline: float | None = None,
        step_timeout: float | None = None,
        on_env_timeout: str = RAISE,
    ) -> None:
        super().__init__(
            envs,
            seed,
            keep_float64=keep_float64,
            info_keys=info_keys,
            episode_seeds=episode_seeds,
            clip_actions=clip_actions,
        )
        if check_count("min_ready", min_ready) > len(self._envs):
            raise SpecError(f"min_ready is {min_ready}, there are {len(self._envs)} environments")
        if on_env_timeout not in POLICIES:
            raise SpecError(f"on_env_timeout must be one of {POLICIES}, got {on_env_timeout!r}")
        self.pace = Pace(min_ready, check_timeout(max_wait, "max_wait"), check_timeout(deadline, "deadline"))
        self.replaces_late = on_env_timeout == RESTART
        copy = partial(copy_observation, self.observation_space)
        self._threads = EnvThreads(copy, check_timeout(step_timeout, "step_timeout"))
        self._stepped = np.zeros(0, np.int64)  # the environments of the rows of the last step
        # The actions of the steps under way, a row for each environment.
        self._given = {key: np.zeros_like(self._after.view[key]) for key in self._last_actions}

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        return vars(self)

    def single_envs(self) -> Sequence[SingleEnv]:
        self._settle()
        return super().single_envs()

    @property
    def under_way(self) -> np.ndarray:
        return np.array(sorted([*self._threads.under_way, *(call.k for call in self._threads.returned)]), np.int64)

    def start_rows(self, which: np.ndarray, action: DictTensor) -> None:
        """Starts a step of some environments; see `WaitingEnv.start_rows`."""
        actions, columns = self._actions.read(action, which.size)
        for key, leaf in self._last_actions.items():
            self._given[key][which] = columns[leaf.key]
        for k, own in zip(which.tolist(), actions, strict=True):
            self._lives.count_one(k)
            seed = Episode.after(*self._next_episode(k)).seed if self._has_episode_seeds else None
            self._threads.begin(self._envs[k], Call(k, own, seed, self._options[k]))

    def collect_rows(self, until: float | None, is_over: Callable[[], bool] | None) -> tuple[np.ndarray, Step]:
        """Waits for steps; see `WaitingEnv.collect_rows`."""
        assert self.pace is not None
        self._threads.wait(self.pace.min_ready, self.pace.max_wait, until, is_over)
        return self._take_step()

    def step_rows(self, action: DictTensor, target: Target | None = None) -> Step:
        """Steps all at once.

        The rows returned are its own, and stay valid until the next step.
        """
        running = check_running(self._running)
        self._drop_calls()
        self.start_rows(running, action)
        self._threads.wait(running.size)
        return self._take_step()[1]

    def close(self) -> None:
        """Closes every environment in its thread, even if some raise.

        Then raises the first error.

        One that does not return from its step within half a second is closed from another thread, and left.
        """
        errors: dict[int, BaseException] = {}

        def close(k: int, env: Any) -> None:
            try:
                env.close()
            except BaseException as error:  # SystemExit too
                errors[k] = error

        hanging = self._threads.close(self._envs, close, LAST_SECONDS)
        close_in_time({k: self._envs[k] for k in hanging}, LAST_SECONDS)
        for k, error in sorted(errors.items()):
            add_origin(error, "close", self._envs[k], k)
            raise error

    def _settle(self) -> None:
        """Waits for all steps under way, and keeps them."""
        self._threads.wait(len(self._envs))
        self._note_calls()

    def _drop_calls(self) -> None:
        """Waits for all steps under way, and forgets them.

        Makes environments anew that have failed.
        """
        self._settle()
        for call in self._threads.take():
            if call.error is not None:
                self._replace(call.k, self._explain(call), call.in_reset)

    def _take_step(self) -> tuple[np.ndarray, Step]:
        """Takes the steps that have returned."""
        self._note_calls()
        calls = self._threads.take()
        self._stepped = rows = np.array([call.k for call in calls], np.int64)
        self._forget_ends()
        rewards: list[Any] = [None] * len(calls)
        frames = [self._read_call(row, call, rewards) for row, call in enumerate(calls)]
        given = {leaf.key: self._given[key][rows] for key, leaf in self._last_actions.items()}
        return rows, self._fill_step(frames, rewards, given, rows)

    def _read_call(self, row: int, call: Call, rewards: list[Any]) -> Any:
        """Reads a step into a row; returns its observation."""
        error = None if call.error is None else self._explain(call)
        if error is not None and not call.in_reset:
            observation, rewards[row] = self._fail(row, call.k, error)
            return observation
        observation, rewards[row], terminated, truncated, info = call.result
        if self._infos:
            self._take_info(row, info)
        if call.in_reset:
            view, self._final = self._after.view, (observation, rewards[row])
            self._ended.append(row)
            view["done"][row], view["terminated"][row], view["truncated"][row] = True, terminated, truncated
        if error is not None:
            self._fail(row, call.k, error)
        elif call.first is not None:
            if self._infos:
                self._infos.write(self._fresh.view, len(self._shown), call.first[1], call.k)
            self._shown.append(call.first[0])
        return observation

    def _explain(self, call: Call) -> Exception:
        """Names environment and step in the error of a call.

        Returns it, or raises one that ends the worker.
        """
        error = call.error
        if not isinstance(error, Exception):
            assert error is not None
            raise error
        if call.in_reset:
            add_origin(error, "reset", self._envs[call.k], call.k)
        else:
            explain_step_error(error, call.result, self._envs[call.k], call.k, self._lives.name_step(call.k))
        return error

    def _note_calls(self) -> None:
        """Notes calls that have returned in the running episodes of their environments."""
        for call in self._threads.returned:
            if call.is_noted:
                continue
            call.is_noted = True
            if self._has_episode_seeds and call.action is not NO_ACTION and (call.error is None or call.in_reset):
                episode = self._episodes[call.k]
                assert episode is not None
                episode.actions.append(call.action)
                episode.last = call.result[:2]
            if call.first is not None:
                self._lives.begin_episode(call.k)
                if self._has_episode_seeds:
                    episode = self._episodes[call.k] = Episode.after(*self._next_episode(call.k))
                    episode.last = call.first[0], None

    def _next_episode(self, k: int) -> tuple[Any, int, Any]:
        """The arguments that `Episode.after` takes for the next episode of environment k."""
        return self._episodes[k], self._stream_seeds[k], self._options[k]

    def _begin_episodes(self, which: Sequence[int], seeds: Sequence[int] | None = None) -> list[Any]:
        if len(which) == len(self._envs):
            self._drop_calls()
        rows, frames = {k: row for row, k in enumerate(which)}, list[Any]([None] * len(which))
        for k in which:
            self._begin_reset(k, None if seeds is None else seeds[k])
        while not self._threads.under_way.keys().isdisjoint(rows):
            self._threads.wait(len(self._threads.returned) + 1)
            self._note_calls()
            for call in self._threads.take(rows):
                if call.error is not None:
                    self._replace(call.k, self._explain(call), in_reset=True)
                    self._begin_reset(call.k, call.seed)
                    continue
                assert call.first is not None
                frames[rows[call.k]], info = call.first
                if self._infos:
                    self._infos.write(self._fresh.view, rows[call.k], info, call.k)
        return frames

    def _begin_reset(self, k: int, seed: int | None) -> None:
        seed = self._new_seeds.get(k, seed)
        if self._has_episode_seeds:
            seed = Episode.after(*self._next_episode(k)).seed
        self._threads.begin(self._envs[k], Call(k, seed=seed, options=self._options[k]))

    def _find_index(self, row: int) -> int:
        return int(self._stepped[row])

    def _stop(self, running: np.ndarray, kept: np.ndarray) -> None:
        assert self._running is not None
        self._set_running(np.setdiff1d(self._running, np.delete(running, kept)))
