"""Methods to restore a single environment, and the new environments that they need.

get_state       its own `get_state()` and `set_state(state)`, below its wrappers
pickle          pickled, simulators by their adapters
replay          the running episode is played again in a new environment
new episode     it is not restored: a new episode begins
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlstructs.envs.row_env import RowEnv
from rlstructs.envs.stepping import MOST_ACTIONS, Episode, SingleEnv
from rlstructs.envs.vec_env import NO_INFO, VecEnv
from rlstructs.errors import RLError
from rlstructs.exact.pickler import find_adapter

GET_STATE, PICKLE, REPLAY, NEW_EPISODE = "get_state", "pickle", "replay", "new episode"
# The most steps of random actions before a state is set for a test.
N_BEFORE = 5


class CopyError(RLError):
    """A copy of an environment could not be made, or differs from it.

    Attributes:
        reasons: by the index of the environment.
    """

    def __init__(self, reasons: dict[int, str]) -> None:
        super().__init__("; ".join(f"environment {k} cannot be brought back: {why}" for k, why in reasons.items()))
        self.reasons = reasons


def list_methods(single: SingleEnv) -> list[str]:
    """Lists the methods that may restore an environment, the best one first."""
    inner = find_inner(single.env)
    own = all(callable(getattr(inner, name, None)) for name in ("get_state", "set_state"))
    return [GET_STATE] * own + [PICKLE] + [REPLAY] * (single.episode is not None)


def find_inner(env: Any) -> Any:
    """The environment inside all wrappers, whose state `get_state` gives."""
    inner = getattr(env, "unwrapped", env)
    return env if inner is None else inner


def name_env(env: Any) -> str:
    """Returns the id of an environment in gymnasium's registry, or its class's name."""
    spec = getattr(env, "spec", None)
    return str(getattr(spec, "id", None) or type(find_inner(env)).__name__)


def make_tokens(singles: Sequence[SingleEnv], methods: Sequence[str]) -> dict[int, Any]:
    """Makes the tokens that replace unpicklable environments, by the object's `id`.

    See `NewEnvs.resolve`.

    Raises:
        CopyError: `get_state` raised, or an episode is too long to be played again.
    """
    tokens: dict[int, Any] = {}
    for k, (single, method) in enumerate(zip(singles, methods, strict=True)):
        if method == GET_STATE:
            inner = find_inner(single.env)
            with explain(k):
                tokens[id(inner)] = GET_STATE, k, inner.get_state()
        elif method == REPLAY:
            if single.episode is not None and not single.episode.actions.are_kept:
                raise CopyError({k: f"its episode has more than {MOST_ACTIONS:,} steps, whose actions are not kept"})
            tokens[id(single.env)] = REPLAY, k, single.episode
    return tokens


@contextlib.contextmanager
def explain(k: int) -> Iterator[None]:
    """Turns any exception into a CopyError of environment k."""
    try:
        yield
    except CopyError:
        raise
    except Exception as error:
        raise CopyError({k: f"{type(error).__name__}: {error}"}) from error


class NewEnvs:
    """New environments that take the states of unpicklable ones.

    Args:
        make: makes them, all of a worker; called when the first one is needed.
        made: environments that were made before and never reset; None for none.
        is_dirty: whether they play some steps before they get a state, which must make no difference.
    """

    def __init__(self, make: Callable[[], RowEnv], made: RowEnv | None = None, is_dirty: bool = False) -> None:
        self._make, self._made, self._is_dirty = make, made, is_dirty
        self._brought: dict[int, Any] = {}  # by index: a token comes again for each reference to its environment

    def resolve(self, token: Any) -> Any:
        """Returns an environment in the state of a token of `make_tokens`.

        Raises:
            CopyError: it cannot be brought to that state.
        """
        method, k, state = token
        if k not in self._brought:
            with explain(k):
                self._brought[k] = self._bring(method, k, state)
        return self._brought[k]

    def _bring(self, method: str, k: int, state: Any) -> Any:
        if self._made is None:
            self._made = self._make()
        env = self._made.single_envs()[k].env
        if method == REPLAY:
            check_replay(k, state, state.replay(env))
            return env
        inner = find_inner(env)
        self._reset(inner)
        inner.set_state(state)
        return inner

    def _reset(self, env: Any) -> None:
        if isinstance(env, VecEnv):
            env.reset(NO_INFO)
            return
        env.reset()
        gymnasium = sys.modules.get("gymnasium")
        if self._is_dirty and gymnasium is not None and isinstance(env, gymnasium.Env):
            for _ in range(N_BEFORE):
                if any(env.step(env.action_space.sample())[2:4]):
                    env.reset()

    def close_unused(self) -> None:
        """Closes the environments that no token has used."""
        if self._made is None:
            return
        if not self._brought:
            self._made.close()
            return
        for k, single in enumerate(self._made.single_envs()):
            if k not in self._brought:
                single.env.close()


def check_replay(k: int, episode: Episode, shown: tuple[Any, Any]) -> None:
    """Raises CopyError unless a replay ends with the episode's last observation and reward."""
    if episode.last is not None and (path := find_difference(list(episode.last), list(shown))):
        raise CopyError({k: f"after {len(episode.actions)} steps it shows something else ({path})"})


NUMBERS = (bool, int, float, complex, str, bytes, np.generic, np.ndarray, torch.Tensor)
# The most objects that are looked at.
MAX_OBJECTS = 100_000
MISSING = object()


def find_difference(own: Any, copy: Any) -> str | None:
    """Names the first difference between an object and its copy, or None.

    It compares numbers, texts, arrays and random streams.

    Skips functions, classes, objects that adapters save, and objects without attributes and entries.
    """
    seen: dict[int, Any] = {}  # holds the objects, so that no other one gets their id
    queue: deque[tuple[str, Any, Any]] = deque([("", own, copy)])
    while queue and len(seen) < MAX_OBJECTS:
        path, one, other = queue.popleft()
        if isinstance(one, NUMBERS):
            if not _are_equal(one, other):
                return path.removeprefix(".") or type(one).__name__
            continue
        if id(one) in seen or other is MISSING or one is other:
            continue
        seen[id(one)] = one
        queue.extend(_pair_parts(path, one, other))
    return None


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two numbers, texts or arrays have the same type and bits.

    NaNs are equal to each other.
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        one, other = one.detach().cpu(), other.detach().cpu()
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, (np.ndarray, np.generic)):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return one.dtype.hasobject or one.tobytes() == other.tobytes()
    return bool(one == other or one != one)


def _pair_parts(path: str, one: Any, other: Any) -> Iterator[tuple[str, Any, Any]]:
    """Pairs the parts of two objects, each with its path."""
    if isinstance(one, np.random.Generator):
        one, other = one.bit_generator.state, getattr(getattr(other, "bit_generator", None), "state", None)
    elif isinstance(one, np.random.RandomState) and isinstance(other, np.random.RandomState):
        one, other = one.get_state(), other.get_state()
    if isinstance(one, Mapping):
        for key in one:
            yield f"{path}[{key!r}]", one[key], _get(other, key)
    elif isinstance(one, (list, tuple, deque)):
        if not isinstance(other, type(one)) or len(one) != len(other):
            yield path, len(one), -1
            return
        yield from ((f"{path}[{at}]", *pair) for at, pair in enumerate(zip(one, other, strict=True)))
    elif not isinstance(one, type) and find_adapter(type(one)) is None:
        for name in _attributes(one):
            yield f"{path}.{name}", getattr(one, name, MISSING), getattr(other, name, MISSING)


def _attributes(thing: Any) -> Iterable[str]:
    slots = (name for kind in type(thing).__mro__ for name in _names(vars(kind).get("__slots__", ())))
    return {**getattr(thing, "__dict__", {}), **dict.fromkeys(name for name in slots if name[:2] != "__")}


def _names(slots: Any) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def _get(thing: Any, key: Any) -> Any:
    try:
        return thing[key]
    except (LookupError, TypeError):
        return MISSING
