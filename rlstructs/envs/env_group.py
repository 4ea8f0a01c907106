"""Environments that are stepped one after another, in whichever process: a worker's, or all there are.

What they observe is written to the columns, what else there is comes back: an `Outcome`.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from rlstructs.envs.columns import Columns, Outcome
from rlstructs.errors import SpecError
from workers import SharedArena, messages

# First byte of a request: to step every environment, to step the one of a row, to call a method.
EVERY, ONE, CALL = b"E", b"O", b"C"
ROW = struct.Struct("<I")
# What a request or reply holds where numbers in shared memory do not say it all.
PICKLED = b"\x80"


class Description(NamedTuple):
    """What the first environment says of itself."""

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    metadata: dict[str, Any]
    render_mode: str | None


class EnvGroup:
    """Some of the environments of a `SharedVectorEnv`.

    Args:
        env_fns: make them.
        first: index of the first among all; they follow each other.

    Raises:
        Exception: what one of them raised, here as in every method with a note that names it.
    """

    def __init__(self, env_fns: Iterable[Callable[[], gymnasium.Env[Any, Any]]], first: int) -> None:
        self._first, self._envs = first, []
        for env_fn in env_fns:
            try:
                self._envs.append(env_fn())
            except Exception as error:
                self._name(error, len(self._envs))
                with contextlib.suppress(Exception):
                    self.close()
                raise

    def describe(self) -> Description:
        """Of the first of them."""
        env = self._envs[0]
        return Description(env.observation_space, env.action_space, dict(env.metadata), env.render_mode)

    def attach(self, described: Description, n_envs: int, mode: AutoresetMode, buffer: Any = None) -> Columns:
        """Gives the environments their rows of the columns, and gives back those.

        Args:
            described: what all environments have to be like.
            n_envs: how many there are in all.
            mode: what becomes of those that end.
            buffer: where the columns lie.

        Raises:
            SpecError: an environment has other spaces.
        """
        for k, env in enumerate(self._envs):
            for name in ("observation_space", "action_space"):
                if getattr(env, name) != getattr(described, name):
                    raise SpecError(
                        f"env_fns: {name} of environment {self._first + k} is {getattr(env, name)}, "
                        f"of environment 0 {getattr(described, name)}"
                    )
        spaces = described.observation_space, described.action_space
        columns, mine = Columns(*spaces, n_envs, buffer), slice(self._first, self._first + len(self._envs))
        self._actions, self._objects = columns.actions, columns.objects
        self._observations = [column.rows(mine) for column in columns.observations]
        self._rewards = columns.rewards[mine]
        self._terminations, self._truncations = columns.terminations[mine], columns.truncations[mine]
        self._mode, self._mine, self._at = mode, mine, columns.at[mine.start : mine.start + 1]
        self._at[0] = -1
        self._needs_reset = [False] * len(self._envs)
        return columns

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
                observation, info = env.reset(seed=seeds[k], options=copy.deepcopy(options))
                self._terminations[k] = self._truncations[k] = self._needs_reset[k] = False
                self._write([observation], slice(k, k + 1), outcome)
            except Exception as error:
                self._name(error, k)
                raise
            self._tell(k, info, outcome)
        return outcome

    def step(self, actions: Iterable[Any]) -> Outcome:
        """Steps all of them."""
        outcome, observations, k = Outcome([], []), [], 0
        try:
            for k, action in enumerate(actions):
                observations.append(self._stepped(k, action, outcome))
        except Exception as error:
            self._name(error, k)
            raise
        try:
            self._write(observations, None, outcome)
        except Exception:
            self._name_misfit(observations)
            raise
        return outcome

    def step_one(self, k: int, action: Any) -> Outcome:
        """Steps one of them."""
        outcome = Outcome([], [])
        try:
            self._write([self._stepped(k, action, outcome)], slice(k, k + 1), outcome)
        except Exception as error:
            self._name(error, k)
            raise
        return outcome

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """What a method of each gives, or the attribute where it is no method."""
        values = []
        for k, env in enumerate(self._envs):
            self._at[0] = self._first + k
            try:
                found = env.get_wrapper_attr(name)
                values.append(found(*args, **kwargs) if callable(found) else found)
            except Exception as error:
                self._name(error, k)
                raise
        return values

    def render(self) -> list[Any]:
        """What `render` of each gives."""
        return self.call("render", (), {})

    def set_attr(self, name: str, values: Sequence[Any]) -> None:
        """Sets an attribute, a value for each."""
        for k, (env, value) in enumerate(zip(self._envs, values, strict=True)):
            try:
                env.set_wrapper_attr(name, value)
            except Exception as error:
                self._name(error, k)
                raise

    def close(self) -> None:
        """Closes every environment, also when one of them raises; then raises what the first did."""
        errors: list[Exception] = []
        for k, env in enumerate(self._envs):
            try:
                env.close()
            except Exception as error:
                self._name(error, k)
                errors.append(error)
        if errors:
            raise errors[0]

    def _stepped(self, k: int, action: Any, outcome: Outcome) -> Any:
        """Steps environment k, or resets it where that is due; what it observes."""
        env = self._envs[k]
        self._at[0] = self._first + k
        if self._needs_reset[k]:
            observation, info = env.reset()
            self._rewards[k] = 0.0
            self._terminations[k] = self._truncations[k] = self._needs_reset[k] = False
        else:
            observation, self._rewards[k], terminated, truncated, info = env.step(action)
            self._terminations[k], self._truncations[k] = terminated, truncated
            if terminated or truncated:
                if self._mode is AutoresetMode.NEXT_STEP:
                    self._needs_reset[k] = True
                elif self._mode is AutoresetMode.SAME_STEP:
                    # As they are now: the reset that comes next may write into the same arrays.
                    final = {"final_obs": copy.deepcopy(observation), "final_info": _as_it_is(info)}
                    self._tell(k, final, outcome)
                    observation, info = env.reset()
        if info:
            self._tell(k, info, outcome)
        return observation

    def _tell(self, k: int, info: Mapping[str, Any], outcome: Outcome) -> None:
        if info:
            outcome.infos.append((self._first + k, info))

    def _write(self, observations: list[Any], rows: slice | None, outcome: Outcome) -> None:
        for column in self._observations:
            (column if rows is None else column.rows(rows)).fill(observations)
        if self._objects:
            start = self._first + (0 if rows is None else rows.start)
            outcome.objects.extend((start + k, self._objects.pick(each)) for k, each in enumerate(observations))

    def _name_misfit(self, observations: list[Any]) -> None:
        """Raises what one of these observations cannot be written for, with the name of its environment."""
        for k, observation in enumerate(observations):
            try:
                self._write([observation], slice(k, k + 1), Outcome([], []))
            except Exception as error:
                self._name(error, k)
                raise

    def _name(self, error: Exception, k: int) -> None:
        messages.add_note(error, f"raised by environment {self._first + k}")


class WorkerGroup(EnvGroup):
    """The environments of one worker: reads requests to step, and writes what is to be told of a step.

    Args:
        env_fns: make all environments there are.
        rows: which of them are whose, by worker index.
        index: of this worker.
        arena: where the columns will lie.
    """

    def __init__(
        self,
        index: int,
        arena: SharedArena,
        *,
        env_fns: Sequence[Callable[[], gymnasium.Env[Any, Any]]],
        rows: Sequence[slice],
    ) -> None:
        # Forked from one server, all workers would draw the same numbers; `random` sees to that by itself.
        np.random.seed()
        self._arena = arena
        super().__init__(env_fns[rows[index]], rows[index].start)

    def attach_here(self, described: Description, n_envs: int, mode: AutoresetMode) -> None:
        """As `attach`, in the shared memory."""
        self.attach(described, n_envs, mode, self._arena.map())

    def answer(self, data: bytes) -> bytes:
        """Follows a request.

        Args:
            data: `CALL` and a pickled method with its arguments; or `EVERY`, or `ONE` and a row, and then the types
                of the actions in shared memory, or the pickled actions.

        Returns:
            What it gave, pickled; nothing for an empty outcome.
        """
        try:
            if data.startswith(EVERY):
                outcome = self.step(self._read(data[1:], self._mine))
            elif data.startswith(ONE):
                [k] = ROW.unpack_from(data, 1)
                [action] = self._read(data[1 + ROW.size :], slice(self._first + k, self._first + k + 1))
                outcome = self.step_one(k, action)
            else:
                method, arguments = messages.loads(data[1:])
                return packed(getattr(self, method)(*arguments))
            return packed(outcome) if outcome.infos or outcome.objects else b""
        finally:
            self._at[0] = -1

    def _read(self, data: bytes, rows: slice) -> list[Any]:
        if data.startswith(PICKLED):
            actions: list[Any] = messages.loads(data)
            return actions
        return self._actions.read(data.decode("ascii"), rows)


def _as_it_is(info: Any) -> Any:
    """An info whose dicts and arrays nobody else has; the rest is held as gymnasium holds it."""
    if isinstance(info, dict):
        return {key: _as_it_is(value) for key, value in info.items()}
    return info.copy() if isinstance(info, np.ndarray) else info


def packed(value: Any) -> bytes:
    """A value as bytes."""
    try:  # numbers, strings and arrays, which pickle alone handles ten times as fast as cloudpickle
        buffer = io.BytesIO()
        _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
        return buffer.getvalue()
    except Exception:
        return messages.dumps(value)


def _as_number(value: np.generic) -> tuple[Any, ...]:
    return type(value), (value.item(),)


class _Pickler(pickle.Pickler):
    # numpy itself packs a scalar as bytes with a dtype, which takes three times as long.
    dispatch_table = dict.fromkeys((np.dtype(letter).type for letter in "?bBhHiIlLqQefd"), _as_number)


def unpacked(data: bytes) -> Any:
    """What `packed` packed; nothing stands for an empty outcome."""
    return messages.loads(data) if data else NOTHING


NOTHING = Outcome([], [])
