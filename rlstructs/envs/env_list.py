"""`EnvList`: environments that are stepped one after another, and made anew where they fail.

One mechanism for the environments of a `GymEnv` and of a worker of a `SharedVectorEnv`, which may not load torch.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from rlstructs.checks import check_count
from rlstructs.envs.array_values import copy_value, may_share_memory
from rlstructs.envs.stepping import NO_RESULT, add_origin, check_step, explain_step_error, find_env_name, read_reset
from rlstructs.errors import EnvTimeout, SpecError
from rlstructs.seeding import next_stream
from rlstructs.trace.lane import RESET, within

if TYPE_CHECKING:  # spaces load gymnasium
    from rlstructs.envs.spaces import Leaf

logger = logging.getLogger("rlstructs")

#: The values of `on_env_failure`.
RAISE, RESTART = POLICIES = ("raise", "restart")
# How often in a row an environment may fail without a step in between before the first error is raised.
MAX_ATTEMPTS = 3
# Seconds that an environment that has failed may take to close.
CLOSE_SECONDS = 3.0


def check_policy(on_env_failure: Any, max_env_restarts: Any) -> None:
    """Raises SpecError or TypeError unless these arguments are valid.

    They are arguments of a batcher or a vector environment.
    """
    if on_env_failure not in POLICIES:
        raise SpecError(f"on_env_failure must be one of {POLICIES}, got {on_env_failure!r}")
    if max_env_restarts is not None:
        check_count("max_env_restarts", max_env_restarts, 0)


class LivesRule(NamedTuple):
    """The rule by which failed environments are replaced.

    Attributes:
        make: makes environment k for its n-th new life, from 1 on, given k, n and `seed`.
        limit: how often each environment may be made anew; None for any number.
        first: the index of the first environment among all, for the log.
        seed: of the worker, unless there was a rule before.
        only_late: whether only environments are replaced that did not return in time.
    """

    make: Callable[[int, int, Any], Any]
    limit: int | None = None
    first: int = 0
    seed: Any = None
    only_late: bool = False


class RestartPolicy(NamedTuple):
    """The rule for environments of a `SharedVectorEnv` that fail.

    Attributes:
        is_on: whether they are made anew.
        limit: how often each; None for any number.
        first: the index of environment 0 in a larger whole, for the log.
        holds: whether they then wait for a reset; otherwise their episode is truncated.
    """

    is_on: bool = False
    limit: int | None = None
    first: int = 0
    holds: bool = False


class EnvLives:
    """The lives of each environment of a list: its restarts, and its present life.

    Args:
        n_envs: the number of environments.

    Attributes:
        n_steps: how often all of them were stepped together; the caller increments it before each step.
        counts: how often each environment was made anew.
    """

    def __init__(self, n_envs: int) -> None:
        self.n_steps, self.counts = 0, [0] * n_envs
        self._rule: LivesRule | None = None  # None to raise errors
        self._seed: Any = None
        # Of each environment: how often it was stepped alone; the number of its steps when its episode began; the
        # episodes of its present life; and the failures in a row without a step, the first of which is kept.
        self._n_alone, self._began, self._n_episodes = [0] * n_envs, [0] * n_envs, [0] * n_envs
        self._failures: dict[int, list[Exception]] = {}
        self._n_taken = [0] * n_envs

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_rule": None, "_failures": {}}

    def set_rule(self, rule: LivesRule | None) -> None:
        """Sets how environments that fail are made anew; None to raise errors."""
        self._rule = rule
        if rule is not None and self._seed is None:
            self._seed = rule.seed

    def begin_episode(self, k: int) -> None:
        """Notes that environment k was reset."""
        self._began[k] = self.n_steps + self._n_alone[k]
        self._n_episodes[k] += 1

    def count_one(self, k: int) -> None:
        """Notes that environment k alone is stepped."""
        self._n_alone[k] += 1

    def name_step(self, k: int) -> str:
        """The step that environment k is in."""
        return f"step {self._count_steps(k)} of its episode"

    def _count_steps(self, k: int) -> int:
        return self.n_steps + self._n_alone[k] - self._began[k]

    def replace(self, k: int, env: Any, error: Exception, in_reset: bool) -> Any:
        """Closes environment k, which has failed, and makes it anew.

        Args:
            k: its index in the list.
            env: that environment.
            error: what it raised.
            in_reset: whether its reset has raised, not a step.

        Returns:
            The new environment, not yet reset.

        Raises:
            Exception: `error`, if environments are not made anew, if it says that a result or an argument is wrong, or
                if the limit is reached; or the first one, if the environment has failed too often in a row.
        """
        rule, is_late = self._rule, isinstance(error, EnvTimeout)
        if rule is None or isinstance(error, SpecError) or (rule.only_late and not is_late):
            raise error
        has_begun = self._n_episodes[k] > 0
        if self._n_episodes[k] > 1 or (has_begun and (in_reset or self._count_steps(k) > 1)):
            self._failures.pop(k, None)  # this life has made a step
        place = "reset" if in_reset else self.name_step(k)
        while True:
            failures = self._failures.setdefault(k, [])
            failures.append(error)
            if rule.limit is not None and self.counts[k] >= rule.limit:
                raise error
            if len(failures) > MAX_ATTEMPTS:
                raise failures[0]
            self.counts[k] += 1
            self._n_episodes[k] = 0
            logger.warning(
                "environment %d (%s) failed in %s, and is made anew: %s: %s",
                rule.first + k,
                find_env_name(env),
                place,
                type(error).__name__,
                error,
                exc_info=error,
            )
            if place != "its constructor":
                close_in_time({rule.first + k: env}, 0.0 if is_late else CLOSE_SECONDS)
            try:
                return rule.make(k, self.counts[k], self._seed)
            except SpecError:
                raise
            except Exception as failure:
                error, place = failure, "its constructor"

    def take_counts(self) -> dict[int, int]:
        """Returns the number of restarts since the last call, by index.

        Environments that had none are left out.
        """
        new = {k: n - taken for k, (n, taken) in enumerate(zip(self.counts, self._n_taken, strict=True)) if n > taken}
        self._n_taken = list(self.counts)
        return new


def close_in_time(envs: Mapping[int, Any], seconds: float = CLOSE_SECONDS) -> None:
    """Closes environments that have failed, by index, all of them within so many seconds.

    Afterwards they are left to daemon threads; errors are ignored.
    """

    def close(k: int, env: Any) -> None:
        try:
            env.close()
        except Exception:
            logger.debug("environment %d raised while it was closed", k, exc_info=True)

    threads, end = {}, monotonic() + seconds
    for k, env in envs.items():
        threads[k] = threading.Thread(target=close, args=(k, env), name=f"rlstructs-close-{k}", daemon=True)
        threads[k].start()
    for k, thread in threads.items():
        thread.join(max(0.0, end - monotonic()))
        if thread.is_alive():
            logger.warning("environment %d has failed, and does not close within %g s: it is left", k, seconds)


# In the place of an observation: the row keeps the one before it.
KEPT = object()


class EnvList:
    """gymnasium environments that are stepped one after another.

    A `GymEnv`, or a group of a `SharedVectorEnv`.

    Subclasses say what becomes of what a step has returned: `_keep`, `_take_info`, `_end` and `_fail`.
    """

    _first = 0  # index of the first environment among all, for messages
    _at: Any = None  # int64 (1,), where to write the index of the environment that is being stepped
    _takes_infos = True  # whether `_take_info` is called
    _takes_all_infos = False  # whether it is called with an empty info too
    _leaves: Mapping[str, Leaf]  # of an observation: those that are arrays

    def _set_envs(self, envs: list[Any], stream_seeds: Sequence[int | None]) -> None:
        self._envs, self._lives = envs, EnvLives(len(envs))
        # The seeds of the streams; and of the next reset, where an environment was made anew.
        self._stream_seeds: list[Any] = list(stream_seeds)
        self._new_seeds: dict[int, int] = {}
        # False until a step has shown that no two environments write observations into the same memory.
        self._have_own_memory = False

    def close(self) -> None:
        """Closes every environment, even if some raise; then raises the first error."""
        self._for_each("close", lambda k, env: env.close())

    def _for_each(
        self, call: str, function: Callable[[int, Any], Any], only: Container[int] | None = None
    ) -> list[Any]:
        """Calls a function for environments, then raises the first error.

        For all of them, or for `only` some. An error does not keep the others from being called.
        """
        values, errors = [], []
        for k, env in enumerate(self._envs):
            if only is not None and k not in only:
                continue
            try:
                values.append(function(k, env))
            except Exception as error:
                add_origin(error, call, env, self._first + k)
                errors.append(error)
        if errors:
            raise errors[0]
        return values

    @within(RESET)
    def _reset_one(self, k: int, seed: int | None, options: Mapping[str, Any] | None) -> tuple[Any, Any]:
        """Resets environment k; returns its observation and info."""
        env = self._envs[k]
        arguments: dict[str, Any] = {}
        if seed is not None:
            arguments["seed"] = seed
        if options is not None:
            arguments["options"] = copy.deepcopy(options)  # the environment may change them
        try:
            result = env.reset(**arguments)
        except Exception as error:
            add_origin(error, "reset", env, self._first + k)
            raise
        observation, info = read_reset(result, env, self._first + k)
        self._lives.begin_episode(k)
        return observation, info

    def _begin(self, k: int, reset: Callable[..., Any], *arguments: Any) -> tuple[Any, Exception | None]:
        """Calls `reset` with k; makes environment k anew if that fails.

        Returns the result, and what was raised.
        """
        failure = None
        while True:
            try:
                return reset(k, *arguments), failure
            except Exception as error:
                failure = error
                self._replace(k, error, in_reset=True)

    def _replace(self, k: int, error: Exception, in_reset: bool) -> None:
        """Makes environment k anew, which has raised this error.

        Raises an error if that is not wanted.
        """
        env = self._lives.replace(k, self._envs[k], error, in_reset)
        self._check_new(env, k)
        self._envs[k], self._have_own_memory = env, False
        if (seed := self._stream_seeds[k]) is not None:
            self._stream_seeds[k] = self._new_seeds[k] = next_stream(seed, self._lives.counts[k])

    def _step_envs(
        self, envs: Sequence[Any], actions: Iterable[Any], rewards: Any, alone: int | None = None
    ) -> list[Any]:
        """Steps environments, and returns their observations.

        Args:
            envs: the environments, or what is stepped in their place.
            actions: one for each.
            rewards: a list or an array to write the rewards to, at the environments' rows.
            alone: the row of a single environment, whose observation is used at once; None for all that run.
        """
        at, first, result = self._at, self._first, NO_RESULT
        observations: list[Any] = []
        shared: list[tuple[Any, Any]] | None = None if self._have_own_memory or alone is not None else []
        takes, takes_all = self._takes_infos, self._takes_all_infos or shared is not None
        steps = enumerate(zip(envs, actions, strict=True), alone or 0)
        while True:  # more than once only where an environment fails: the others are stepped all the same
            try:
                for row, (env, action) in steps:
                    if at is not None:
                        at[0] = first + row
                    result = env.step(action)
                    observation, rewards[row], terminated, truncated, info = result
                    if terminated or truncated or takes_all or (takes and info):
                        observation = self._take_result(row, result, rewards, shared)
                    observations.append(observation)
                break
            except Exception as error:
                k = self._find_index(row)
                explain_step_error(error, result, self._envs[k], first + k, self._lives.name_step(k))
                observation, rewards[row] = self._fail(row, k, error)
                if shared is not None:
                    shared.clear()
                    observation = self._keep(row, observation)
                observations.append(observation)
        if shared is not None:
            self._have_own_memory = len(shared) == len(self._envs) and self._find_own_memory(shared)
        return observations

    def _take_result(self, row: int, result: Any, rewards: Any, shared: list[tuple[Any, Any]] | None) -> Any:
        """Takes the result of an unusual step; returns its observation.

        Args:
            row, result: of the step.
            rewards: where its reward stands.
            shared: the observations and rewards so far, as environments gave them; None if they share no memory.
        """
        observation, reward, terminated, truncated, info = result
        if shared is not None:
            shared.append((observation, reward))
        if terminated or truncated:
            try:  # they may be numpy's, or None
                terminated, truncated = bool(terminated), bool(truncated)
            except Exception:
                k = self._find_index(row)
                check_step(result, self._envs[k], self._first + k)
                raise
            rewards[row] = reward = copy_value(reward)  # before a reset writes into it
            observation = self._end(row, observation, reward, terminated, truncated, info)
        elif self._takes_all_infos or (self._takes_infos and info):
            self._take_info(row, info)
        if shared is not None:  # another environment may write into the same array
            if type(reward) is not float:
                rewards[row] = copy_value(reward)
            observation = self._keep(row, observation)
        return observation

    def _find_own_memory(self, results: Sequence[tuple[Any, Any]]) -> bool:
        """Whether these observations and rewards, one pair for each environment, share no memory."""
        observations, rewards = zip(*results, strict=True)
        if any(each is KEPT for each in observations) or may_share_memory(rewards):
            return False
        try:
            return not any(may_share_memory(map(leaf.pick, observations)) for leaf in self._leaves.values())
        except (TypeError, LookupError):  # one is not in the space: writing it will raise
            return False

    def _find_index(self, row: int) -> int:
        """The index of the environment of a row that is stepped."""
        return row

    def _check_new(self, env: Any, k: int) -> None:
        """Raises SpecError unless an environment can take the place of number k."""
        raise NotImplementedError

    def _keep(self, row: int, observation: Any) -> Any:
        """Returns an observation that later steps leave unchanged, or writes it."""
        raise NotImplementedError

    def _take_info(self, row: int, info: Any) -> None:
        """Takes the info of a step that has not ended the episode."""
        raise NotImplementedError

    def _end(self, row: int, observation: Any, reward: Any, terminated: bool, truncated: bool, info: Any) -> Any:
        """Takes a step that has ended the episode; returns its observation."""
        raise NotImplementedError

    def _fail(self, row: int, k: int, error: Exception) -> tuple[Any, Any]:
        """Makes environment k anew, which has raised.

        Returns an observation and a reward that replace its own.
        """
        raise NotImplementedError
