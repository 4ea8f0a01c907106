"""Environments that are stepped one after another, in whichever process.

What they observe is written to the columns, what else there is comes back: an `Outcome`.
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

from rlstructs.envs.answers import check_step, checked_reset
from rlstructs.envs.parts import are_equal, copy_parts
from rlstructs.envs.shared_vector.columns import Columns
from rlstructs.envs.shared_vector.step_results import Outcome
from rlstructs.errors import SpecError
from workers import failures


class OtherSpacesError(SpecError, RuntimeError):
    """Environments that are to be stepped together have different spaces; gymnasium raises a RuntimeError."""


class Description(NamedTuple):
    """What the first environment says of itself, and whether bounds of what others observe may differ from that."""

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    metadata: dict[str, Any]
    render_mode: str | None
    bounds_differ: bool = False

    def check(self, k: int, env: gymnasium.Env[Any, Any]) -> None:
        """Raises OtherSpacesError if environment k is not like this."""
        found, wanted = env.observation_space, self.observation_space
        if not are_equal(found, wanted) and not (self.bounds_differ and is_space_dtype_shape_equiv(found, wanted)):
            rule = "shapes and dtypes must be equal" if self.bounds_differ else 'observation_mode="same"'
            raise OtherSpacesError(f"env_fns: observation_space of environment {k} is {found}, not {wanted} ({rule})")
        if not are_equal(env.action_space, self.action_space):
            raise OtherSpacesError(
                f"env_fns: action_space of environment {k} is {env.action_space}, not {self.action_space}"
            )


# What a group has of its columns.
VIEWS = ("_objects", "_observations", "_rewards", "_terminations", "_truncations", "_at")


class EnvGroup:
    """Some of the environments of a `SharedVectorEnv`.

    Args:
        env_fns: make them.
        first: index of the first among all; they follow each other.
        others: further groups in this process.
        apart: makes what `call` and `set_attr` hand to one environment its own.

    Attributes:
        rows: where they are among all.

    Raises:
        Exception: what one of them raised, here as in every method with a note that names it.
    """

    def __init__(
        self,
        env_fns: Iterable[Callable[[], gymnasium.Env[Any, Any]]],
        first: int,
        others: Iterable[EnvGroup] = (),
        apart: Callable[[Any], Any] = lambda value: value,
    ) -> None:
        self._first, self._apart = first, apart
        self._envs: list[Any] = []
        taken = {id(innermost(env)) for group in others for env in group._envs}
        for k, env_fn in enumerate(env_fns):
            try:
                self._envs.append(_own(env_fn(), taken))
                _check_spaces(self._envs[k])
            except Exception as error:
                self._name(error, k)
                with contextlib.suppress(Exception):
                    self.close()
                raise
        self.rows = slice(first, first + len(self._envs))

    def describe(self) -> Description:
        """Of the first of them."""
        env = self._envs[0]
        return Description(env.observation_space, env.action_space, dict(env.metadata or {}), env.render_mode)

    def attach(self, described: Description, n_envs: int, mode: AutoresetMode, buffer: Any = None) -> Columns:
        """Gives the environments their rows of the columns, and gives back those.

        Args:
            described: what all environments have to be like.
            n_envs: how many there are in all.
            mode: what becomes of those that end.
            buffer: where the columns lie.

        Raises:
            OtherSpacesError: an environment has other spaces.
        """
        for k, env in enumerate(self._envs):
            described.check(self._first + k, env)
        spaces = described.observation_space, described.action_space
        self._columns, self._mode = Columns(*spaces, n_envs, buffer), mode
        self._space = described.observation_space
        self._find_rows()
        self.rest()
        self._needs_reset = [False] * len(self._envs)
        self._are_apart = False  # until a step has shown that no two write their observations into the same memory
        return self._columns

    def _find_rows(self) -> None:
        columns, mine = self._columns, self.rows
        self._objects = columns.objects
        self._observations = [column.rows(mine) for column in columns.observations]
        self._rewards = columns.rewards[mine]
        self._terminations, self._truncations = columns.terminations[mine], columns.truncations[mine]
        self._at = columns.at[mine.start : mine.start + 1]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in VIEWS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._find_rows()

    def rest(self) -> None:
        """Says that they are busy with nothing."""
        self._at[0] = -1

    def reset(
        self, seeds: Sequence[int | None], options: dict[str, Any] | None, mask: np.ndarray | None
    ) -> Outcome:
        """Resets those of the mask, or all; the rows of others stay as they are.

        Args:
            seeds: one for each environment.
            options: each environment gets a copy: it may change them.
            mask: bool, one for each; None for all.
        """
        outcome = Outcome([], [])
        for k, env in enumerate(self._envs):
            if mask is not None and not mask[k]:
                continue
            self._at[0] = self._first + k
            try:
                answer = env.reset(seed=seeds[k], options=copy.deepcopy(options))
                observation, info = checked_reset(answer, env, self._first + k)
                self._terminations[k] = self._truncations[k] = self._needs_reset[k] = False
                self._write_one(k, observation, outcome)
            except Exception as error:
                self._name(error, k)
                raise
            self._tell(k, info, outcome)
        return outcome

    def step(self, actions: Iterable[Any]) -> Outcome:
        """Steps all of them."""
        outcome, observations, k = Outcome([], []), [], 0
        write_each = not self._are_apart
        try:
            for k, action in enumerate(actions):
                observations.append(self._stepped(k, action, outcome))
                if write_each:
                    self._write_one(k, observations[k], outcome)
        except Exception as error:
            self._name(error, k)
            raise
        if write_each:
            self._are_apart = not any(column.share_memory(observations) for column in self._observations)
            return outcome
        try:
            for column in self._observations:
                column.fill(observations)
        except Exception:
            self._name_misfit(observations)
            raise
        if self._objects:
            for k, observation in enumerate(observations):
                self._note_objects(k, observation, outcome)
        return outcome

    def step_one(self, k: int, action: Any) -> Outcome:
        """Steps one of them."""
        outcome = Outcome([], [])
        try:
            self._write_one(k, self._stepped(k, action, outcome), outcome)
        except Exception as error:
            self._name(error, k)
            raise
        return outcome

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """What a method of each gives, or the attribute where it is no method."""

        def call_one(k: int, env: Any) -> Any:
            self._at[0] = self._first + k
            found = env.get_wrapper_attr(name)
            if callable(found) and (args or kwargs):
                own_args, own_kwargs = self._apart((args, kwargs))
                return found(*own_args, **own_kwargs)
            return found() if callable(found) else found

        return self._of_each(call_one)

    def render(self) -> list[Any]:
        """What `render` of each gives."""
        return self.call("render", (), {})

    def set_attr(self, name: str, values: Sequence[Any]) -> None:
        """Sets an attribute, a value for each."""
        self._of_each(lambda k, env: env.set_wrapper_attr(name, self._apart(values[k])))

    def close(self) -> None:
        """Closes every environment, also when one of them raises; then raises what the first did."""
        self._of_each(lambda k, env: env.close())

    def _of_each(self, ask: Callable[[int, Any], Any]) -> list[Any]:
        """What `ask` gives of each, asked for all of them; then raises what it raised first."""
        values, errors = [], []
        for k, env in enumerate(self._envs):
            try:
                values.append(ask(k, env))
            except Exception as error:
                self._name(error, k)
                errors.append(error)
        if errors:
            raise errors[0]
        return values

    def _stepped(self, k: int, action: Any, outcome: Outcome) -> Any:
        """Steps environment k, or resets it where that is due; what it observes."""
        env = self._envs[k]
        self._at[0] = self._first + k
        if self._needs_reset[k]:
            observation, info = checked_reset(env.reset(), env, self._first + k)
            self._rewards[k] = 0.0
            self._terminations[k] = self._truncations[k] = self._needs_reset[k] = False
        else:
            answer = env.step(action)
            try:
                observation, self._rewards[k], terminated, truncated, info = answer
                self._terminations[k], self._truncations[k] = terminated, truncated
                has_ended = terminated or truncated
            except (TypeError, ValueError):
                check_step(answer, env, self._first + k)
                raise
            if has_ended:
                if self._mode is AutoresetMode.NEXT_STEP:
                    self._needs_reset[k] = True
                elif self._mode is AutoresetMode.SAME_STEP:
                    # As they are now: the reset that comes next may write into the same arrays.
                    final = {"final_obs": self._copied(observation), "final_info": _as_it_is(info)}
                    outcome.infos.append((self._first + k, final))
                    observation, info = checked_reset(env.reset(), env, self._first + k)
        if info:
            self._tell(k, info, outcome)
        return observation

    def _copied(self, observation: Any) -> Any:
        """What the space has of an observation."""
        return copy_parts(self._space, observation)

    def _tell(self, k: int, info: Mapping[str, Any], outcome: Outcome) -> None:
        if info:  # a copy: environments of one class may share what is in it, and write into it again
            outcome.infos.append((self._first + k, _as_it_is(info)))

    def _write_one(self, k: int, observation: Any, outcome: Outcome) -> None:
        for column in self._observations:
            column.put(k, observation)
        if self._objects:
            self._note_objects(k, observation, outcome)

    def _note_objects(self, k: int, observation: Any, outcome: Outcome) -> None:
        outcome.objects.append((self._first + k, self._objects.pick(observation)))

    def _name_misfit(self, observations: list[Any]) -> None:
        """Raises what one of these observations cannot be written for, with the name of its environment."""
        for k, observation in enumerate(observations):
            try:
                self._write_one(k, observation, Outcome([], []))
            except Exception as error:
                self._name(error, k)
                raise

    def _name(self, error: Exception, k: int) -> None:
        failures.add_note(error, f"raised by environment {self._first + k}")


def innermost(env: Any) -> Any:
    """The environment within all wrappers."""
    while isinstance(env, gymnasium.Wrapper):
        env = env.env
    return env


def _own(env: Any, taken: set[int]) -> Any:
    """The environment, or a copy of one that is taken: `[lambda: env] * n` is common, and works in n processes."""
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
            raise SpecError(f"env_fns: {wanted}, got {type(env).__name__} where it is {space!r}")


def _as_it_is(info: Any) -> Any:
    """An info whose dicts and arrays nobody else has; the rest is held as gymnasium holds it."""
    if isinstance(info, dict):
        return {key: _as_it_is(value) for key, value in info.items()}
    return info.copy() if isinstance(info, np.ndarray) else info
