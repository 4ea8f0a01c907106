"""How a single environment is brought back, and the environments that this takes.

get_state       its own `get_state()` and `set_state(state)`, below its wrappers
pickle          pickled, simulators by their adapters
replay          the running episode is played again in a new environment
new episode     not at all: a new episode begins
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rlstructs.envs.row_env import RowEnv
from rlstructs.envs.single_env import MOST_ACTIONS, Episode, SingleEnv
from rlstructs.envs.snapshots.comparison import find_difference
from rlstructs.envs.vec_env import NO_INFO, VecEnv
from rlstructs.errors import RLError

GET_STATE, PICKLE, REPLAY, NEW_EPISODE = "get_state", "pickle", "replay", "new episode"
# The most steps of random actions before a state is set for a test.
N_BEFORE = 5


class CopyError(RLError):
    """A copy of an environment could not be made, or is not like it.

    Attributes:
        reasons: by the index of the environment.
    """

    def __init__(self, reasons: dict[int, str]) -> None:
        super().__init__("; ".join(f"environment {k} cannot be brought back: {why}" for k, why in reasons.items()))
        self.reasons = reasons


def list_methods(single: SingleEnv) -> list[str]:
    """The methods that may bring an environment back, the best one first."""
    inner = find_inner(single.env)
    own = all(callable(getattr(inner, name, None)) for name in ("get_state", "set_state"))
    return [GET_STATE] * own + [PICKLE] + [REPLAY] * (single.episode is not None)


def find_inner(env: Any) -> Any:
    """The environment inside all wrappers, whose state `get_state` gives."""
    inner = getattr(env, "unwrapped", env)
    return env if inner is None else inner


def make_tokens(singles: Sequence[SingleEnv], methods: Sequence[str]) -> dict[int, Any]:
    """What stands in a pickle for environments that are not pickled, by the `id` of the object; see `NewEnvs.resolve`.

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
    """New environments, which are brought to the state of others where these cannot be pickled.

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
            CopyError: it cannot be brought there.
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
        """Closes the environments that nothing stands for."""
        if self._made is None:
            return
        if not self._brought:
            self._made.close()
            return
        for k, single in enumerate(self._made.single_envs()):
            if k not in self._brought:
                single.env.close()


def check_replay(k: int, episode: Episode, shown: tuple[Any, Any]) -> None:
    """Raises CopyError unless a replay has shown what the episode showed last."""
    if episode.last is not None and (path := find_difference(list(episode.last), list(shown))):
        raise CopyError({k: f"after {len(episode.actions)} steps it shows something else ({path})"})
