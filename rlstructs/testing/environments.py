"""`check_env`: whether an environment does what rollouts rely on."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
import torch

from rlstructs.envs.action_reader import ActionReader
from rlstructs.envs.gym_env import GymEnv
from rlstructs.envs.row_env import gives_rows
from rlstructs.envs.spaces import list_leaves
from rlstructs.envs.vec_env import VecEnv
from rlstructs.errors import SpecError
from rlstructs.seeding import PrivateStreams, seed_global_streams
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.tree import equal, show
from rlstructs.testing.apart import check_apart
from rlstructs.testing.ends import Ends
from rlstructs.testing.inside import forget_inside, innermost, reseed, reseeds, reset_by_mask, watch_inside
from rlstructs.testing.sources import EnvSource, close, env_source
from rlstructs.testing.spaces import check_declared
from rlstructs.testing.watched_env import WatchedEnv, done_of, repeated

Act = Callable[[DictTensor], DictTensor]
Stream = list[tuple[str, DictTensor]]


def check_env(
    env: VecEnv | gymnasium.Env[Any, Any] | Callable[..., Any],
    env_args: Mapping[str, Any] | None = None,
    *,
    act: Act | None = None,
    env_info: DictTensor | None = None,
    n_steps: int = 100,
    seed: int = 0,
    uses_seed: bool = True,
    keeps_state: bool = False,
) -> None:
    """Runs an environment and checks all that `RL_Batcher` relies on; raises on the first thing that is wrong.

    Checked are: the methods; the observations' keys, dtypes, shapes and values, which have to be in the space, if there
    is one; rewards; which environments run; the flags of episodes; that final observations are those of their episodes;
    that what was handed out does not change later; `reset` at any time, and by a mask; that the seed decides what
    happens, and nothing else, for each environment by itself; that nothing survives a reset with a seed; `close`,
    twice; that the factory can be pickled. Below a `GymEnv` and a `GymVectorEnv` what gymnasium's environments answer
    is checked: flags that are bool, infos that are dicts, masks.

    Args:
        env: the `create_env` of a batcher, which is checked best; a `VecEnv`; or, to be used in a `GymEnv`, a
            gymnasium environment, its class, or a function that makes one. Its environments are closed.
        env_args: arguments for a factory.
        act: gives an action for an observation, B rows each; None for random ones of the `action_space`.
        env_info: one row, as for `RL_Batcher`; every reset gets it.
        n_steps: how many steps each run takes; some episodes should end meanwhile.
        seed: for the factory.
        uses_seed: whether another seed gives something else; False where there is no chance in the environment.
        keeps_state: whether something is meant to survive a reset, such as a running mean or a curriculum. (Gymnasium's
            own wrappers that keep a running mean are known.)

    Raises:
        TypeError, SpecError: something is not as it has to be; says which method or key, and what to change.

    Example:
        >>> check_env(gymnasium.make("CartPole-v1"))
        >>> class Forgetful(gymnasium.Env):
        ...     observation_space, action_space = gymnasium.spaces.Discrete(3), gymnasium.spaces.Discrete(2)
        ...     def reset(self, seed=None):
        ...         return 0, {}
        >>> check_env(Forgetful)
        Traceback (most recent call last):
        rlstructs.errors.SpecError: Forgetful.reset must take seed= and options=, as gymnasium.Env.reset does
    """
    source = env_source(env, dict(env_args or {}))
    with PrivateStreams()():
        _check_streams(source, _Run(act, env_info, n_steps, keeps_state or not uses_seed), seed, uses_seed)
    if not source.is_new:
        close_twice(env, source.name)


def _check_streams(source: EnvSource, run: _Run, seed: int, uses_seed: bool) -> None:
    """Runs environments with the same seed, and with another, and compares what they give."""
    first, _ = run.stream(source, seed)
    if not source.can_repeat:
        return
    if source.is_new or not (source.is_kept or run.keeps_state):
        again, anew = run.stream(source, seed, resets=True)
        if (label := _first_difference(first, again)) is not None:
            more = "" if source.is_new else ", and let nothing survive a reset"
            raise SpecError(
                f"{source.name}: two environments made with seed={seed} differ, first in {label}; "
                f"draw from generators only that are seeded with {source.seeded_by}{more}"
            )
        if (label := _first_difference(again, anew)) is not None:
            raise SpecError(
                f"{source.name}: after another reset with seed={seed} the same actions give something else, first in "
                f"{label}: something survives a reset; let reset set all that an episode begins with, or, if this is "
                "meant, check with keeps_state=True"
            )
    if uses_seed:
        if _first_difference(first, run.stream(source, seed + 1)[0]) is None:
            raise SpecError(
                f"{source.name}: seed={seed} and seed={seed + 1} give the same {run.n_steps} steps; if there is no "
                f"chance in it, check with uses_seed=False, or else draw from what is seeded with {source.seeded_by}"
            )
        check_apart(source, run, seed)


class _Run:
    """Runs environments, each with the same actions.

    Args:
        act, env_info, n_steps: as of `check_env`.
        keeps_state: whether something may survive a reset.
    """

    def __init__(self, act: Act | None, env_info: DictTensor | None, n_steps: int, keeps_state: bool) -> None:
        self._act, self._env_info, self.n_steps, self.keeps_state = act, env_info, n_steps, keeps_state

    def stream(self, source: EnvSource, seed: int, resets: bool = False) -> tuple[Stream, Stream]:
        """Everything that an environment with this seed gives, and where it gave it.

        Args:
            source: makes the environment.
            seed: of it.
            resets: whether it is run once more, after another reset with the seed; the second stream is of that. It is
                empty where there is no such reset, or something is meant to survive it.
        """
        seed_global_streams(seed, None)  # as in a worker: environments may draw from them
        env = source.make(seed)
        try:
            watch_inside(env)
            resets = resets and source.is_new and reseeds(env) and not (self.keeps_state or source.is_kept)
            found, anew = self._checked(env, source.name), Stream()
            if resets and reseed(env, seed):
                seed_global_streams(seed, None)
                anew = self._checked(env, source.name)
        except BaseException:
            with contextlib.suppress(Exception):
                env.close()
            raise
        finally:
            forget_inside(env)
        if source.is_new:
            close_twice(env, source.name)
        return found, anew

    def alike(self, source: EnvSource, seed: int, n_steps: int) -> list[DictTensor] | None:
        """What all environments show alike until one ends, with the same actions; None if they differ."""
        seed_global_streams(seed, None)
        env = source.make(seed)
        with contextlib.closing(env) if source.is_new else contextlib.nullcontext():
            n, act = env.n_envs(), self._acting(env, source.name)
            observation, _ = env.reset(repeated(self._env_info, n))
            found: list[DictTensor] = []
            for _ in range(n_steps):
                if n < 2 or not _are_alike(observation):
                    return None
                found.append(observation.slice(0, 1).clone())
                action = act(observation).index(torch.zeros(n, dtype=torch.int64, device="cpu"))
                (after, _), (observation, _) = env.step(action)
                if (done := done_of(after)) is not None and done.any():
                    break  # of one before another, which may be longer
            return found

    def _acting(self, env: VecEnv, name: str) -> Act:
        return self._act or RandomActions(env, name)

    def _checked(self, env: VecEnv, name: str) -> Stream:
        watched, ends, act = WatchedEnv(env, name, self._env_info), Ends(name), self._acting(env, name)
        observation = watched.reset()
        _check_example(env, observation, name)
        check_declared(env, observation, name)
        ends.begin(observation)
        found: Stream = [("the first observation", observation.clone())]
        for t in range(self.n_steps):
            if not watched.running.numel():
                observation = watched.reset()
                ends.begin(observation)
                found.append((f"the reset before step {t}", observation.clone()))
            before = watched.running
            after, observation = watched.step(act(observation))
            check_declared(env, after, name)
            ends.step(before, after, watched.running, observation)
            found += [(f"step {t}", after.clone()), (f"what follows step {t}", observation.clone())]
        if not isinstance(innermost(env), GymEnv):  # which keeps them itself
            ends.check()
        reset_by_mask(env)
        watched.reset()  # in the middle of episodes
        return found


class RandomActions:
    """Random actions of an environment's action space, the same ones each time.

    Args:
        env: has an `action_space`.
        name: of the environment, for messages.
    """

    def __init__(self, env: Any, name: str) -> None:
        if not isinstance(getattr(env, "action_space", None), gymnasium.Space):
            raise SpecError(
                f"{name} has no action_space to draw actions from: check with act=, a function of the observation"
            )
        self._space = copy.deepcopy(env.action_space)
        self._space.seed(0)
        self._leaves = list_leaves(self._space, "action")

    def __call__(self, observation: DictTensor) -> DictTensor:
        samples = [self._space.sample() for _ in range(observation.n_elems())]
        values = {
            ActionReader.key(leaf): np.array([leaf.pick(sample) for sample in samples], leaf.dtype)
            for leaf in self._leaves
        }
        return DictTensor({key: torch.from_numpy(value) for key, value in values.items()})


def close_twice(env: Any, name: str) -> None:
    """Closes an environment, and once more.

    Raises:
        SpecError: it does not let itself be closed.
    """
    for _ in range(2):
        close(env, name)


def _check_example(env: VecEnv, observation: DictTensor, name: str) -> None:
    """Raises unless what an environment that gives rows says of its observations is true: memory is made by it."""
    if gives_rows(env) and hasattr(env, "example"):
        example = env.example().tensors()
        if example.specs() != observation.specs():
            raise SpecError(f"{name}.example gives {example!r}, reset gives {observation!r}")


def _are_alike(observation: DictTensor) -> bool:
    """Whether all rows are the same."""
    return all(equal(tensor, tensor[:1].expand_as(tensor)) for tensor in observation.values())


def _first_difference(stream: Stream, other: Stream) -> str | None:
    """Where two streams differ; None if they do not."""
    for (label, mine), (_, theirs) in zip(stream, other, strict=False):
        for key in mine:
            if key not in theirs or not equal(mine[key], theirs[key]):
                came = show(theirs[key]) if key in theirs and theirs[key].shape != mine[key].shape else "other values"
                return f"{key!r} of {label} ({show(mine[key])}, then {came})"
    return None
