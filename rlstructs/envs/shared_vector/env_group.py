"""Steps environments one after another, in a worker or in the trainer's process.

Observations, rewards and flags are written to the columns; everything else is returned as an `Outcome`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from rlstructs.envs.env_lives import EnvLives, LivesRule, RestartPolicy, close_in_time
from rlstructs.envs.shared_vector.arguments import Description, check_spaces, copy_if_taken, innermost
from rlstructs.envs.shared_vector.columns import Columns, Outcome
from rlstructs.envs.spaces import copy_sample, flatten_space, nest
from rlstructs.envs.stepping import add_step, check_step, read_reset
from rlstructs.errors import SpecError
from rlstructs.seeding import next_stream
from rlstructs.workers import failures

# Attributes of a group that are views of its columns.
VIEWS = ("_objects", "_observations", "_rewards", "_terminations", "_truncations", "_at", "_restarts")
# The key of infos of environments that have failed and were made anew; its value says what they raised.
ENV_FAILURE = "env_failure"
#: In the place of an observation: the one before it stays.
KEPT = object()


# What the next step of an environment does: a step, a reset, or, until it is reset, nothing.
STEP, RESET, HELD = range(3)


class EnvGroup:
    """Some of the environments of a `SharedVectorEnv`.

    Args:
        env_fns: make the environments.
        first: index of the first environment among all; the others follow it.
        others: further groups in this process.
        copy_argument: copies what `call` and `set_attr` give to one environment.

    Attributes:
        rows: the environments' indexes among all.

    Raises:
        Exception: what an environment raised, here and in every method with a note that names it.
    """

    def __init__(
        self,
        env_fns: Iterable[Callable[[], gymnasium.Env[Any, Any]]],
        first: int,
        others: Iterable[EnvGroup] = (),
        copy_argument: Callable[[Any], Any] = lambda value: value,
    ) -> None:
        self._first, self._copy_argument = first, copy_argument
        self._envs: list[Any] = []
        self._env_fns, self._others = list(env_fns), others
        taken = {id(innermost(env)) for group in others for env in group._envs}
        for k, env_fn in enumerate(self._env_fns):
            try:
                self._envs.append(copy_if_taken(env_fn(), taken))
                check_spaces(self._envs[k])
            except Exception as error:
                self._add_origin(error, k)
                with contextlib.suppress(Exception):
                    self.close()
                raise
        self.rows = slice(first, first + len(self._envs))
        n = len(self._envs)
        self._lives, self._policy = EnvLives(n), RestartPolicy()
        # The last seed of a reset; and the seed of the next one, where an environment was made anew.
        self._seeds: list[int | None] = [None] * n
        self._new_seeds: dict[int, int] = {}

    def describe(self) -> Description:
        """Describes the first environment."""
        env = self._envs[0]
        return Description(env.observation_space, env.action_space, dict(env.metadata or {}), env.render_mode)

    def attach(self, described: Description, n_envs: int, mode: AutoresetMode, buffer: Any = None) -> Columns:
        """Lays out the columns, and has the environments write to their rows of them.

        Args:
            described: the spaces that all environments must have.
            n_envs: number of environments in all groups.
            mode: what happens to an environment whose episode ends.
            buffer: the memory of the columns; None to allocate it.

        Returns:
            The columns.

        Raises:
            OtherSpacesError: an environment has other spaces.
        """
        for k, env in enumerate(self._envs):
            described.check(self._first + k, env)
        spaces = described.observation_space, described.action_space
        self._columns, self._mode = Columns(*spaces, n_envs, buffer), mode
        self._space, self._described = described.observation_space, described
        self._find_rows()
        self.mark_idle()
        self._next = [STEP] * len(self._envs)
        self._picked: list[list[Any]] = [[] for _ in self._envs]  # the last values of `_objects`
        # False until a step has shown that no two environments write observations into the same memory.
        self._have_own_memory = False
        return self._columns

    def _find_rows(self) -> None:
        columns, mine = self._columns, self.rows
        self._objects = columns.objects
        self._observations = [column.select(mine) for column in columns.observations]
        self._rewards = columns.rewards[mine]
        self._terminations, self._truncations = columns.terminations[mine], columns.truncations[mine]
        self._at, self._restarts = columns.at[mine.start : mine.start + 1], columns.restarts[mine]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in VIEWS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._find_rows()
        self.set_policy(self._policy)

    def set_policy(self, policy: RestartPolicy) -> None:
        """Sets what happens to environments that fail."""
        self._policy = policy
        rule = LivesRule(self._make_anew, policy.limit, policy.first + self._first)
        self._lives.set_rule(rule if policy.is_on else None)

    def mark_idle(self) -> None:
        """Notes that no environment of the group is busy."""
        self._at[0] = -1

    def reset(
        self, seeds: Sequence[int | None], options: Sequence[dict[str, Any] | None], mask: np.ndarray | None
    ) -> Outcome:
        """Resets the environments of the mask; the rows of the others keep their values.

        Args:
            seeds: one for each environment.
            options: for each environment; it gets a copy, which it may change.
            mask: bool, one for each environment; None for all.
        """
        outcome = Outcome([], [])
        for k in range(len(self._envs)) if mask is None else np.flatnonzero(mask).tolist():
            self._at[0] = self._first + k
            try:
                observation, info = self._begin_episode(k, seed=seeds[k], options=options[k])
                self._terminations[k] = self._truncations[k] = False
                self._write_one(k, observation, outcome)
            except Exception as error:
                self._add_origin(error, k)
                raise
            if info:
                self._add_info(k, info, outcome)
        return outcome

    def step(self, actions: Iterable[Any]) -> Outcome:
        """Steps all environments."""
        outcome, write_each = Outcome([], []), not self._have_own_memory
        observations: list[Any] = []
        self._lives.n_steps += 1
        pending = enumerate(actions)
        while True:  # more than once only where an environment fails: the others are stepped all the same
            try:
                for k, action in pending:
                    observations.append(self._step_env(k, action, outcome))
                    if write_each:
                        self._write_one(k, observations[k], outcome)
                break
            except Exception as error:
                if len(observations) > k:  # an observation that cannot be written
                    self._add_origin(error, k)
                    raise
                observations.append(self._end_life(k, error, outcome))
                if write_each:
                    self._write_one(k, observations[k], outcome)
        if not self._have_own_memory:
            if not write_each:  # an environment has failed
                self._write_all(observations, outcome)
            self._have_own_memory = self._find_own_memory(observations)
            return outcome
        try:
            for column in self._observations:
                column.fill(observations)
        except Exception:
            self._write_all(observations, Outcome([], []))  # raises an error that names the environment
            raise
        if self._objects:
            self._picked = self._objects.pick_all(observations)
            outcome.objects.extend(enumerate(self._picked, self._first))
        return outcome

    def step_one(self, k: int, action: Any) -> Outcome:
        """Steps environment k of the group."""
        outcome = Outcome([], [])
        self._lives.count_one(k)
        try:
            observation = self._step_env(k, action, outcome)
        except Exception as error:
            observation = self._end_life(k, error, outcome)
        try:
            self._write_one(k, observation, outcome)
        except Exception as error:
            self._add_origin(error, k)
            raise
        return outcome

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Calls a method of each environment, or reads an attribute; returns the values."""

        def call_one(k: int, env: Any) -> Any:
            self._at[0] = self._first + k
            found = env.get_wrapper_attr(name)
            if callable(found) and (args or kwargs):
                own_args, own_kwargs = self._copy_argument((args, kwargs))
                return found(*own_args, **own_kwargs)
            return found() if callable(found) else found

        return self._for_each(call_one)

    def apply(self, function: Callable[[Any], Any], only: Sequence[int] | None = None) -> list[Any]:
        """Calls a function with each environment, or with those whose indexes among all are in `only`."""

        def call_one(k: int, env: Any) -> Any:
            self._at[0] = self._first + k
            return function(env)

        return self._for_each(call_one, only)

    def render(self) -> list[Any]:
        """Calls `render` of each environment; returns the values."""
        return self.call("render", (), {})

    def set_attr(self, name: str, values: Sequence[Any]) -> None:
        """Sets an attribute of each environment to its value of `values`."""
        self._for_each(lambda k, env: env.set_wrapper_attr(name, self._copy_argument(values[k])))

    def close(self) -> None:
        """Closes every environment, even if some raise; then raises the first error."""
        self._for_each(lambda k, env: env.close())

    def _for_each(self, function: Callable[[int, Any], Any], only: Sequence[int] | None = None) -> list[Any]:
        """Calls a function for each environment (see `apply`), even if some raise; then raises the first error."""
        values, errors = [], []
        for k, env in enumerate(self._envs):
            if only is not None and self._first + k not in only:
                continue
            try:
                values.append(function(k, env))
            except Exception as error:
                self._add_origin(error, k)
                errors.append(error)
        if errors:
            raise errors[0]
        return values

    def _step_env(self, k: int, action: Any, outcome: Outcome) -> Any:
        """Steps environment k, or resets it where that is due; returns its observation."""
        env = self._envs[k]
        self._at[0] = self._first + k
        if self._next[k]:
            observation, info = (KEPT, None) if self._next[k] == HELD else self._reset_in_step(k, KEPT)
            self._rewards[k] = 0.0
            self._terminations[k] = self._truncations[k] = False
        else:
            result = env.step(action)
            try:
                observation, self._rewards[k], terminated, truncated, info = result
                self._terminations[k], self._truncations[k] = terminated, truncated
                has_ended = terminated or truncated
            except (TypeError, ValueError):
                check_step(result, env, self._first + k)
                raise
            if has_ended:
                if self._mode is AutoresetMode.NEXT_STEP:
                    self._next[k] = RESET
                elif self._mode is AutoresetMode.SAME_STEP:
                    # Copies: the reset may write into the same arrays.
                    final = {"final_obs": copy_sample(self._space, observation), "final_info": _copy_info(info)}
                    outcome.infos.append((self._first + k, final))
                    observation, info = self._reset_in_step(k, observation)
        if info:
            self._add_info(k, info, outcome)
        return observation

    def _end_life(self, k: int, error: Exception, outcome: Outcome) -> Any:
        """Ends the episode of environment k, which has failed in a step, and makes it anew; returns its observation.

        Raises:
            Exception: what `EnvLives.replace` raises.
        """
        add_step(error, self._lives.name_step(k))
        failure, holds = {ENV_FAILURE: self._replace(k, error, in_reset=False)}, self._policy.holds
        self._rewards[k], self._terminations[k], self._truncations[k] = 0.0, False, not holds
        if holds or self._mode is not AutoresetMode.SAME_STEP:
            self._next[k] = HELD if holds else RESET if self._mode is AutoresetMode.NEXT_STEP else STEP
            self._add_info(k, failure, outcome)
            return KEPT
        final = {"final_obs": self._copy_last(k), "final_info": failure}
        outcome.infos.append((self._first + k, final))
        observation, info = self._begin_episode(k)
        self._add_info(k, {**info, **failure}, outcome)
        return observation

    def _reset_in_step(self, k: int, kept: Any) -> tuple[Any, Any]:
        """Resets environment k in a step; returns `kept` in place of an observation where it fails and is held."""
        if not self._policy.holds:
            return self._begin_episode(k)
        try:
            return self._reset_env(k)
        except Exception as error:
            failure = {ENV_FAILURE: self._replace(k, error, in_reset=True)}
            self._next[k] = HELD
            return kept, failure

    def _begin_episode(self, k: int, **arguments: Any) -> tuple[Any, Any]:
        """Resets an environment, which is made anew if it fails; the info then says so."""
        failure: dict[str, str] = {}
        while True:
            try:
                observation, info = self._reset_env(k, **arguments)
                return observation, {**info, **failure} if failure else info
            except Exception as error:
                failure = {ENV_FAILURE: self._replace(k, error, in_reset=True)}
                arguments.pop("seed", None)

    def _reset_env(self, k: int, **arguments: Any) -> tuple[Any, Any]:
        """Resets environment k with these arguments; returns its observation and info."""
        if k in self._new_seeds and arguments.get("seed") is None:
            arguments["seed"] = self._new_seeds[k]
        if arguments and arguments.get("options") is not None:
            arguments["options"] = copy.deepcopy(arguments["options"])
        env = self._envs[k]
        observation, info = read_reset(env.reset(**arguments), env, self._first + k)
        if arguments and (seed := arguments.get("seed")) is not None:
            self._seeds[k] = seed
        self._new_seeds.pop(k, None)
        self._next[k] = STEP
        self._lives.begin_episode(k)
        return observation, info

    def _replace(self, k: int, error: Exception, in_reset: bool) -> str:
        """Makes environment k, which has failed, anew; returns what it raised as text."""
        self._add_origin(error, k)
        self._envs[k] = self._lives.replace(k, self._envs[k], error, in_reset)
        self._restarts[k], self._have_own_memory = self._lives.counts[k], False
        if (seed := self._seeds[k]) is not None:
            self._seeds[k] = self._new_seeds[k] = next_stream(seed, self._lives.counts[k])
        return f"{type(error).__name__}: {error}"

    def _make_anew(self, k: int, number: int, seed: Any) -> Any:
        """Makes environment k by its function."""
        env = self._env_fns[k]()
        try:
            if any(innermost(env) is innermost(each) for group in (self, *self._others) for each in group._envs):
                raise SpecError(f"env_fns[{self._first + k}] gave an environment again that had failed, or is in use")
            check_spaces(env)
            self._described.check(self._first + k, env)
        except BaseException:
            close_in_time(env, self._first + k)
            raise
        return env

    def _copy_last(self, k: int) -> Any:
        """The last observation of environment k."""
        arrays = (column.array[k].copy() for column in self._observations)
        objects = iter(self._picked[k])
        return nest(self._space, (next(arrays if leaf.is_array else objects) for leaf in flatten_space(self._space)))

    def _find_own_memory(self, observations: list[Any]) -> bool:
        """Whether environments have shown, all of them, that they do not write observations into the same memory."""
        is_kept = HELD in self._next or any(observation is KEPT for observation in observations)
        return not is_kept and not any(column.may_share_memory(observations) for column in self._observations)

    def _add_info(self, k: int, info: Mapping[str, Any], outcome: Outcome) -> None:
        if info:  # a copy: environments of one class may share its values, and write into them again
            outcome.infos.append((self._first + k, _copy_info(info)))

    def _write_one(self, k: int, observation: Any, outcome: Outcome) -> None:
        if observation is KEPT:
            return
        for column in self._observations:
            column.put(k, observation)
        if self._objects:
            self._add_objects(k, observation, outcome)

    def _add_objects(self, k: int, observation: Any, outcome: Outcome) -> None:
        self._picked[k] = self._objects.pick(observation)
        outcome.objects.append((self._first + k, self._picked[k]))

    def _write_all(self, observations: list[Any], outcome: Outcome) -> None:
        """Writes observations one by one; an error about one names its environment."""
        for k, observation in enumerate(observations):
            try:
                self._write_one(k, observation, outcome)
            except Exception as error:
                self._add_origin(error, k)
                raise

    def _add_origin(self, error: Exception, k: int) -> None:
        note = f"raised by environment {self._first + k}"
        if note not in getattr(error, "__notes__", ()):
            failures.add_note(error, note)


def _copy_info(info: Any) -> Any:
    """Copies the dicts and arrays of an info; other values are kept, as gymnasium keeps them."""
    if isinstance(info, dict):
        return {key: _copy_info(value) for key, value in info.items()}
    return info.copy() if isinstance(info, np.ndarray) else info
