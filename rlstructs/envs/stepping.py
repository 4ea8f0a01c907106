"""Checks what environments return, names them in errors, and keeps their running episodes."""

from __future__ import annotations

import contextlib
import copy
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from rlstructs.envs.array_values import copy_value
from rlstructs.errors import SpecError
from rlstructs.seeding import episode_seed
from rlstructs.workers.failures import add_note

STEP = ("observation", "reward", "terminated", "truncated", "info")
RESET = ("observation", "info")
# Number of values that `step` returned in gym before version 0.26.
OLD_STEP = 4
OLD = "gym's old interface: wrap it, for example with shimmy's GymV21CompatibilityV0"
# Begins the note that names an environment.
ORIGIN = "raised by "
# The attribute of an exception with the step in which an environment raised it.
STEP_ATTRIBUTE = "rlstructs_step"
#: Replaces the result of a step that has not returned yet.
NO_RESULT = object()


# How many actions are packed at once, and the most that are kept of an episode. To play more would take minutes, and an
# episode without an end would take all memory.
BLOCK, MOST_ACTIONS = 1000, 1_000_000


def add_origin(error: BaseException, call: str, env: Any, k: int | None = None) -> None:
    """Adds a note with the environment's name to its error, if it has none.

    Args:
        error: what was raised.
        call: name of the method that raised it.
        env: the environment, or a vector environment; None if there is none yet.
        k: its number; None for a vector environment.
    """
    if not any(str(note).startswith(ORIGIN) for note in getattr(error, "__notes__", ())):
        which = "environments" if k is None else f"environment {k}"
        name = "" if env is None else f" ({find_env_name(env)})"
        add_note(error, f"{ORIGIN}{which}{name} in {call}")


def explain_step_error(error: Exception, result: Any, env: Any, k: int, step: str) -> None:
    """Names the environment and the step in an error.

    Raises a clearer error if the environment returned something wrong.

    Args:
        error: what was raised.
        result: what the step returned, or another step before it; `NO_RESULT` for nothing.
        env, k: the environment and its number.
        step: says which step it was.

    Raises:
        SpecError: the result is not what gymnasium's `step` returns.
    """
    trace = error.__traceback__
    if result is not NO_RESULT and trace is not None and trace.tb_next is None:  # not raised in the environment
        check_step(result, env, k)
    add_origin(error, "step", env, k)
    add_step(error, step)


def add_step(error: Exception, step: str) -> None:
    """Adds the step in which it was raised to an error, for the log.

    A copy in another process has it too.
    """
    with contextlib.suppress(Exception):  # a class with slots, or one that refuses attributes
        setattr(error, STEP_ATTRIBUTE, step)


def find_step(error: BaseException) -> str:
    """The step that `add_step` has added to an error; empty without one."""
    return str(getattr(error, STEP_ATTRIBUTE, ""))


def read_reset(result: Any, env: Any, k: int | None = None) -> tuple[Any, Any]:
    """Returns the observation and info of a `reset`, after checking them.

    They come from environment k, or from a vector environment.

    Raises:
        SpecError: it returned something else.
    """
    if isinstance(result, (tuple, list)) and len(result) == len(RESET):
        return tuple(result)
    wanted = f"reset must give {_list_names(RESET)}, got {_describe(result)}"
    raise SpecError(f"{_describe_env(env, k)}: {wanted}; an observation alone is {OLD}")


def check_step(result: Any, env: Any, k: int | None = None) -> None:
    """Raises SpecError if `step` returned something wrong.

    For a vector environment, only the number of values is checked.
    """
    if not isinstance(result, (tuple, list)) or len(result) != len(STEP):
        is_old = isinstance(result, (tuple, list)) and len(result) == OLD_STEP
        hint = f"; (observation, reward, done, info) is {OLD}" if is_old else ""
        raise SpecError(f"{_describe_env(env, k)}: step must give {_list_names(STEP)}, got {_describe(result)}{hint}")
    for name, value in zip(STEP[1:4], result[1:4], strict=True):
        # A reward of shape (1,) is not taken by arrays of rewards.
        if k is not None and not (_is_number(value) and (name != "reward" or not np.shape(value))):
            wanted = "a number" if name == "reward" else "a bool"
            raise SpecError(f"{_describe_env(env, k)}: {name} must be {wanted}, got {value!r}")


def reward_array(rewards: list[Any], running: Iterable[object]) -> np.ndarray:
    """Returns the rewards of these environments as an array.

    Raises:
        SpecError: one is no number; the message names the environment.
    """
    found = _try_array(rewards)
    if found.ndim == 1 and found.dtype.kind in "biuf":
        return found
    for k, reward in zip(running, rewards, strict=True):
        one = _try_array(reward)
        is_number = one.dtype.kind in "biuf" or isinstance(reward, int)  # an int may be too large for an array
        if one.ndim or not is_number:
            raise SpecError(f"environment {k}: reward must be a number, got {reward!r}")
    return np.array([float(reward) for reward in rewards])


def _try_array(values: Any) -> np.ndarray:
    """Converts values to an array; returns an array of None if numpy cannot."""
    try:
        return np.asarray(values)
    except (TypeError, ValueError):  # their shapes differ
        return np.asarray(None)


def find_env_name(env: Any) -> str:
    """Returns an environment's registered id, PettingZoo name, or class name."""
    spec = getattr(env, "spec", None)
    found = getattr(spec, "id", None) or getattr(getattr(spec, "config", None), "task_id", None)
    metadata = getattr(env, "metadata", None)
    if found is None and isinstance(metadata, Mapping):
        found = metadata.get("name")
    if isinstance(found, str):
        return found
    return type(getattr(env, "unwrapped", env)).__name__


def _describe_env(env: Any, k: int | None) -> str:
    return f"environment ({find_env_name(env)})" if k is None else f"environment {k} ({find_env_name(env)})"


def _list_names(names: Sequence[str]) -> str:
    return f"{len(names)} values, ({', '.join(names)})"


def _describe(result: Any) -> str:
    """Describes a result in a few words: its types, or its shape."""
    if isinstance(result, (tuple, list)):
        return f"{len(result)}, ({', '.join(type(value).__name__ for value in result)})"
    shape = getattr(result, "shape", None)
    return type(result).__name__ if shape is None else f"{type(result).__name__} of shape {tuple(shape)}"


def _is_number(value: Any) -> bool:
    if isinstance(value, (bool, int, float, np.number, np.bool_)):
        return True
    try:
        array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    except (TypeError, ValueError):
        return False
    return array.size == 1 and array.dtype.kind in "biuf" and not isinstance(value, (list, tuple))


class Actions:
    """The actions of a running episode, packed; forgotten once there are more than `MOST_ACTIONS`."""

    def __init__(self) -> None:
        self._blocks: list[Iterable[Any]] = []
        self._newest: list[Any] = []
        self._n = 0

    def append(self, action: Any) -> None:
        """Adds the newest one."""
        self._n += 1
        if not self.are_kept:
            self._blocks, self._newest = [], []
            return
        self._newest.append(action)
        if len(self._newest) == BLOCK:
            self._blocks.append(_pack(self._newest))
            self._newest = []

    @property
    def are_kept(self) -> bool:
        """Whether there are few enough."""
        return self._n <= MOST_ACTIONS

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[Any]:
        return chain(*self._blocks, self._newest)


def _pack(actions: list[Any]) -> Iterable[Any]:
    """Packs actions of one type into an array; others stay a list.

    Each element of the array is equal to an action.
    """
    first = actions[0]
    if any(type(each) is not type(first) for each in actions):
        return actions
    if type(first) in (int, float):
        try:
            return array("q" if type(first) is int else "d", actions)
        except OverflowError:
            return actions
    if isinstance(first, (np.number, np.bool_)):
        return np.array(actions, first.dtype)
    is_plain = type(first) is np.ndarray and first.ndim > 0 and not first.dtype.hasobject
    if is_plain and all(each.dtype == first.dtype and each.shape == first.shape for each in actions):
        return np.stack(actions)
    return actions


@dataclass
class Episode:
    """A running episode, from which another environment can reach the same state.

    Attributes:
        number: how many episodes came before it.
        seed, options: of its reset.
        actions: of all steps so far.
        last: the last observation, and the reward of its step.
    """

    number: int
    seed: int
    options: dict[str, Any] | None
    actions: Actions = field(default_factory=Actions)
    last: tuple[Any, Any] | None = None

    @classmethod
    def after(cls, earlier: Episode | None, seed: int, options: dict[str, Any] | None) -> Episode:
        """Returns the next episode, with the next seed of the stream.

        `seed` is the stream's own.
        """
        number = 0 if earlier is None else earlier.number + 1
        return cls(number, episode_seed(seed, number), options)

    def replay(self, env: Any) -> tuple[Any, Any]:
        """Plays the episode in an environment.

        Returns the last observation, and the reward of its step.
        """
        arguments = {} if self.options is None else {"options": copy.deepcopy(self.options)}
        shown, reward = env.reset(seed=self.seed, **arguments)[0], None
        for action in self.actions:
            shown, reward = env.step(copy.deepcopy(action))[:2]
        return shown, reward


class LoggedEnv(NamedTuple):
    """An environment whose steps are added to its running episode.

    Attributes:
        env, episode: they.
        copy_observation: copies an observation.
    """

    env: Any
    episode: Episode
    copy_observation: Callable[[Any], Any]

    def step(self, action: Any) -> Any:
        """Steps the environment."""
        result = self.env.step(copy.deepcopy(action))
        if isinstance(result, (tuple, list)) and len(result) == len(STEP):  # all else is an error, and found later
            self.episode.actions.append(action)
            self.episode.last = self.copy_observation(result[0]), copy_value(result[1])
        return result


class SingleEnv(NamedTuple):
    """An environment that is brought back by a method of its own.

    Attributes:
        env: it; of an unknown class of vectorised environments all of it.
        episode: its running episode, if it is kept.
    """

    env: Any
    episode: Episode | None = None
