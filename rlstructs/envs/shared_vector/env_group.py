"""Steps environments one after another, in a worker or in the trainer's process.

Observations, rewards and flags are written to the columns; everything else is returned as an `Outcome`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector import AutoresetMode

from rlstructs.checks import PETTINGZOO_HINT
from rlstructs.envs.env_results import check_step, read_reset
from rlstructs.envs.shared_vector.columns import Columns
from rlstructs.envs.shared_vector.step_results import Outcome
from rlstructs.envs.space_tree import are_equal, copy_sample
from rlstructs.errors import SpecError
from rlstructs.workers import failures


class OtherSpacesError(SpecError, RuntimeError):
    """Environments have different spaces; gymnasium raises a RuntimeError then."""


class Description(NamedTuple):
    """Attributes of the first environment; `bounds_differ` allows the others other bounds of observations."""

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    metadata: dict[str, Any]
    render_mode: str | None
    bounds_differ: bool = False

    def check(self, k: int, env: gymnasium.Env[Any, Any]) -> None:
        """Raises OtherSpacesError if the spaces of environment k are not these."""
        found, wanted = env.observation_space, self.observation_space
        if not are_equal(found, wanted) and not (self.bounds_differ and is_space_dtype_shape_equiv(found, wanted)):
            rule = "shapes and dtypes must be equal" if self.bounds_differ else 'observation_mode="same"'
            raise OtherSpacesError(f"env_fns: observation_space of environment {k} is {found}, not {wanted} ({rule})")
        if not are_equal(env.action_space, self.action_space):
            raise OtherSpacesError(
                f"env_fns: action_space of environment {k} is {env.action_space}, not {self.action_space}"
            )


# Attributes of a group that are views of its columns.
VIEWS = ("_objects", "_observations", "_rewards", "_terminations", "_truncations", "_at")


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
        taken = {id(innermost(env)) for group in others for env in group._envs}
        for k, env_fn in enumerate(env_fns):
            try:
                self._envs.append(_copy_if_taken(env_fn(), taken))
                _check_spaces(self._envs[k])
            except Exception as error:
                self._add_origin(error, k)
                with contextlib.suppress(Exception):
                    self.close()
                raise
        self.rows = slice(first, first + len(self._envs))

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
        self._space = described.observation_space
        self._find_rows()
        self.mark_idle()
        self._needs_reset = [False] * len(self._envs)
        # False until a step has shown that no two environments write observations into the same memory.
        self._have_own_memory = False
        return self._columns

    def _find_rows(self) -> None:
        columns, mine = self._columns, self.rows
        self._objects = columns.objects
        self._observations = [column.select(mine) for column in columns.observations]
        self._rewards = columns.rewards[mine]
        self._terminations, self._truncations = columns.terminations[mine], columns.truncations[mine]
        self._at = columns.at[mine.start : mine.start + 1]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in VIEWS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._find_rows()

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
        for k, is_reset in enumerate([True] * len(self._envs) if mask is None else mask.tolist()):
            if not is_reset:
                continue
            env = self._envs[k]
            self._at[0] = self._first + k
            try:
                own_options = None if options[k] is None else copy.deepcopy(options[k])
                result = env.reset(seed=seeds[k], options=own_options)
                observation, info = read_reset(result, env, self._first + k)
                self._terminations[k] = self._truncations[k] = self._needs_reset[k] = False
                self._write_one(k, observation, outcome)
            except Exception as error:
                self._add_origin(error, k)
                raise
            self._add_info(k, info, outcome)
        return outcome

    def step(self, actions: Iterable[Any]) -> Outcome:
        """Steps all environments."""
        outcome, observations, k = Outcome([], []), [], 0
        write_each = not self._have_own_memory
        try:
            for k, action in enumerate(actions):
                observations.append(self._step_env(k, action, outcome))
                if write_each:
                    self._write_one(k, observations[k], outcome)
        except Exception as error:
            self._add_origin(error, k)
            raise
        if write_each:
            self._have_own_memory = not any(column.may_share_memory(observations) for column in self._observations)
            return outcome
        try:
            for column in self._observations:
                column.fill(observations)
        except Exception:
            self._raise_misfit(observations)
            raise
        if self._objects:
            for k, observation in enumerate(observations):
                self._add_objects(k, observation, outcome)
        return outcome

    def step_one(self, k: int, action: Any) -> Outcome:
        """Steps environment k of the group."""
        outcome = Outcome([], [])
        try:
            self._write_one(k, self._step_env(k, action, outcome), outcome)
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
        if self._needs_reset[k]:
            observation, info = read_reset(env.reset(), env, self._first + k)
            self._rewards[k] = 0.0
            self._terminations[k] = self._truncations[k] = self._needs_reset[k] = False
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
                    self._needs_reset[k] = True
                elif self._mode is AutoresetMode.SAME_STEP:
                    # Copies: the reset may write into the same arrays.
                    final = {"final_obs": copy_sample(self._space, observation), "final_info": _copy_info(info)}
                    outcome.infos.append((self._first + k, final))
                    observation, info = read_reset(env.reset(), env, self._first + k)
        if info:
            self._add_info(k, info, outcome)
        return observation

    def _add_info(self, k: int, info: Mapping[str, Any], outcome: Outcome) -> None:
        if info:  # a copy: environments of one class may share its values, and write into them again
            outcome.infos.append((self._first + k, _copy_info(info)))

    def _write_one(self, k: int, observation: Any, outcome: Outcome) -> None:
        for column in self._observations:
            column.put(k, observation)
        if self._objects:
            self._add_objects(k, observation, outcome)

    def _add_objects(self, k: int, observation: Any, outcome: Outcome) -> None:
        outcome.objects.append((self._first + k, self._objects.pick(observation)))

    def _raise_misfit(self, observations: list[Any]) -> None:
        """Finds the observation that cannot be written, and raises an error that names its environment."""
        for k, observation in enumerate(observations):
            try:
                self._write_one(k, observation, Outcome([], []))
            except Exception as error:
                self._add_origin(error, k)
                raise

    def _add_origin(self, error: Exception, k: int) -> None:
        failures.add_note(error, f"raised by environment {self._first + k}")


def innermost(env: Any) -> Any:
    """The environment inside all wrappers."""
    while isinstance(env, gymnasium.Wrapper):
        env = env.env
    return env


def _copy_if_taken(env: Any, taken: set[int]) -> Any:
    """Copies an environment that is taken already: `[lambda: env] * n` is common, and works in n processes."""
    if id(innermost(env)) in taken:
        try:
            env = copy.deepcopy(env)
        except Exception as error:
            raise SpecError(
                f"env_fns: {env} is given twice and cannot be copied ({error!r}), each function has to make its own"
            ) from error
    taken.add(id(innermost(env)))
    return env


def _check_spaces(env: Any) -> None:
    for name in ("observation_space", "action_space"):
        if not isinstance(space := getattr(env, name, None), gymnasium.Space):
            wanted = f"needed is an environment whose {name} is a gymnasium.Space"
            agents = PETTINGZOO_HINT if hasattr(env, "possible_agents") or hasattr(env, "max_num_agents") else ""
            raise SpecError(f"env_fns: {wanted}, got {type(env).__name__} where it is {space!r}{agents}")


def _copy_info(info: Any) -> Any:
    """Copies the dicts and arrays of an info; other values are kept, as gymnasium keeps them."""
    if isinstance(info, dict):
        return {key: _copy_info(value) for key, value in info.items()}
    return info.copy() if isinstance(info, np.ndarray) else info
