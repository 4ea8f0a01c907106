"""`check_env`: checks that an environment behaves as rollouts require."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import gymnasium
import numpy as np
import torch

from rlstructs.envs.action_reader import ActionReader
from rlstructs.envs.gym_env import GymEnv
from rlstructs.envs.gym_vector import GymVectorEnv
from rlstructs.envs.row_adapter import row_env
from rlstructs.envs.spaces import list_leaves
from rlstructs.envs.vec_env import VecEnv
from rlstructs.errors import SpecError
from rlstructs.rollout.job_specs import repeat_row
from rlstructs.seeding import PrivateStreams, seed_global_streams
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.tree import equal, show
from rlstructs.testing.checked_env import CheckedEnv, done_of
from rlstructs.testing.checked_gymnasium import (
    check_declared,
    find_innermost,
    install_gymnasium_checks,
    remove_gymnasium_checks,
    reset_by_mask,
    restarts_with_seed,
    seed_next_reset,
)
from rlstructs.testing.env_source import BY_RESET, EnvSource, close, env_source

# Keys of observations that `episodes` and `evaluate` read.
STEP_KEYS = ("reward", "done")

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
    """Runs an environment and checks all that `RL_Batcher` relies on.

    Raises at the first mistake.

    It checks:
    - the methods; `reset` at any time and by a mask; `close`, twice; that the factory can be pickled;
    - keys, dtypes, shapes and values of observations, which have to lie in the space if there is one; rewards;
    - which environments run, the flags of episodes, and that a final observation belongs to its own episode;
    - that observations do not change after they were returned;
    - that the seed alone decides what happens, separately for each environment, and nothing survives a reset with it;
    - that `reset` of a gymnasium environment does not ignore its seed;
    - flags, infos and masks of the gymnasium environments in a `GymEnv` or `GymVectorEnv`.

    Args:
        env: best the `create_env` of a batcher; or a `VecEnv`; or a gymnasium environment, its class or a function
            that makes one, to be used in a `GymEnv`. All environments are closed at the end.
        env_args: arguments for a factory.
        act: takes an observation and gives an action, B rows each; None for random actions of the `action_space`.
        env_info: one row, as for `RL_Batcher`; every reset gets it.
        n_steps: steps of each run; some episodes should end in them.
        seed: for the factory.
        uses_seed: whether another seed changes what happens; False for a deterministic environment.
        keeps_state: whether something, other than the state of gymnasium's own wrappers, may survive a reset.

    Raises:
        TypeError, SpecError: something is wrong; the message names the method or key, and says what to change.

    Example:
        >>> check_env(gymnasium.make("CartPole-v1"))
        >>> class Forgetful(gymnasium.Env):
        ...     observation_space, action_space = gymnasium.spaces.Discrete(3), gymnasium.spaces.Discrete(2)
        ...     def reset(self, seed=None):
        ...         return 0, {}
        >>> check_env(Forgetful)
        Traceback (most recent call last):
        rlstructs.SpecError: Forgetful.reset must take seed= and options=, as gymnasium.Env.reset does
    """
    source = env_source(env, dict(env_args or {}))
    with PrivateStreams()():
        _check_streams(source, _Run(act, env_info, n_steps, keeps_state or not uses_seed), seed, uses_seed)
    if not source.is_new:
        close_twice(env, source.name)


def _check_streams(source: EnvSource, run: _Run, seed: int, uses_seed: bool) -> None:
    """Compares runs with the same seed, and with another one."""
    first, _ = run.stream(source, seed)
    if missing := [key for key in STEP_KEYS if key not in first[0][1].keys()]:  # noqa: SIM118 - a DictTensor
        warnings.warn(
            f"{source.name}: its observations lack {', '.join(map(repr, missing))}, "
            "which `episodes` and `evaluate` need",
            stacklevel=3,
        )
    if not source.can_repeat:
        return
    if source.is_new or not (source.is_kept or run.keeps_state):
        again, anew = run.stream(source, seed, resets=True)
        if (label := _first_difference(first, again)) is not None:
            more = "" if source.is_new else ", and let nothing survive a reset"
            raise SpecError(
                f"{source.name}: two environments made with seed={seed} differ, first in {label}; "
                f"draw only from generators that are seeded with {source.seeded_by}{more}"
            )
        if (label := _first_difference(again, anew)) is not None:
            raise SpecError(
                f"{source.name}: after another reset with seed={seed} the same actions give something else, first in "
                f"{label}: something survives a reset; let reset set all that an episode begins with, or, if this is "
                "intended, check with keeps_state=True"
            )
    if uses_seed:
        if _first_difference(first, run.stream(source, seed + 1)[0]) is None:
            raise SpecError(
                f"{source.name}: seed={seed} and seed={seed + 1} give the same {run.n_steps} steps; if it is "
                "deterministic, check with uses_seed=False; otherwise draw only from generators that are seeded with "
                f"{source.seeded_by}"
            )
        alike = run.stream(source, seed + 1, roots=seed)[0] if run.is_gymnasium else None
        if alike is not None and _first_difference(first, alike) is None:
            raise SpecError(
                f"{source.name}.reset ignores its seed: with seed={seed} and seed={seed + 1} it gives the same "
                f"{run.n_steps} steps, if only the global random streams are alike; draw only from generators that are "
                f"seeded with {BY_RESET}"
            )
        check_separate_streams(source, run, seed)


class _Run:
    """Runs environments, always with the same actions.

    Args:
        act, env_info, n_steps: as of `check_env`.
        keeps_state: whether something may survive a reset.

    Attributes:
        is_gymnasium: whether the environments of the last run are gymnasium's, whose `reset` takes a seed.
    """

    is_gymnasium = False

    def __init__(self, act: Act | None, env_info: DictTensor | None, n_steps: int, keeps_state: bool) -> None:
        self._act, self._env_info, self.n_steps, self.keeps_state = act, env_info, n_steps, keeps_state

    def stream(
        self, source: EnvSource, seed: int, resets: bool = False, roots: int | None = None
    ) -> tuple[Stream, Stream]:
        """Runs an environment, and once more after another reset with its seed.

        Args:
            source: makes the environment.
            seed: of the environment.
            resets: whether to run it the second time.
            roots: seeds the global random streams; None for the same seed.

        Returns:
            Every observation of the first run and of the second, with labels. The second is empty without `resets`,
            for an environment that takes no other seed, and where something is meant to survive a reset.
        """
        seed_global_streams(seed if roots is None else roots, None)  # as a worker does
        env = source.make(seed)
        self.is_gymnasium = isinstance(find_innermost(env), (GymEnv, GymVectorEnv))
        try:
            install_gymnasium_checks(env)
            resets = resets and source.is_new and restarts_with_seed(env) and not (self.keeps_state or source.is_kept)
            first, again = self._run_checked(env, source.name), Stream()
            if resets and seed_next_reset(env, seed):
                seed_global_streams(seed, None)
                again = self._run_checked(env, source.name)
        except BaseException:
            with contextlib.suppress(Exception):
                env.close()
            raise
        finally:
            remove_gymnasium_checks(env)
        if source.is_new:
            close_twice(env, source.name)
        return first, again

    def run_in_parallel(self, source: EnvSource, seed: int, n_steps: int) -> list[DictTensor] | None:
        """Returns the observations until an episode ends.

        None if environments differ, or if there is only one.
        """
        seed_global_streams(seed, None)
        env = source.make(seed)
        with contextlib.closing(env) if source.is_new else contextlib.nullcontext():
            n, act = env.n_envs(), self._make_act(env, source.name)
            observation, _ = env.reset(repeat_row(self._env_info, n))
            trace: list[DictTensor] = []
            for _ in range(n_steps):
                if n < 2 or not _rows_are_equal(observation):
                    return None
                trace.append(observation.slice(0, 1).clone())
                action = act(observation).index(torch.zeros(n, dtype=torch.int64, device="cpu"))
                (after, _), (observation, _) = env.step(action)
                if (done := done_of(after)) is not None and done.any():
                    break  # the others may go on
            return trace

    def _make_act(self, env: VecEnv, name: str) -> Act:
        return self._act or RandomActions(env, name)

    def _run_checked(self, env: VecEnv, name: str) -> Stream:
        checked, finals, act = CheckedEnv(env, name, self._env_info), FinalObservations(name), self._make_act(env, name)
        observation = checked.reset()
        _check_example(env, observation, name)
        check_declared(env, observation, name)
        finals.begin(observation)
        stream: Stream = [("the first observation", observation.clone())]
        for t in range(self.n_steps):
            if not checked.running.numel():
                observation = checked.reset()
                finals.begin(observation)
                stream.append((f"the reset before step {t}", observation.clone()))
            before = checked.running
            after, observation = checked.step(act(observation))
            check_declared(env, after, name)
            finals.step(before, after, checked.running, observation)
            stream += [(f"step {t}", after.clone()), (f"what follows step {t}", observation.clone())]
        if not isinstance(find_innermost(env), GymEnv):  # `GymEnv` itself keeps final observations
            finals.check()
        reset_by_mask(env)
        checked.reset()  # in the middle of episodes
        return stream


class RandomActions:
    """Draws random actions of an environment's action space, the same sequence in every object.

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
    """Closes an environment twice.

    Raises:
        SpecError: `close` raised.
    """
    for _ in range(2):
        close(env, name)


def _check_example(env: VecEnv, observation: DictTensor, name: str) -> None:
    """Raises unless the environment's example, if any, agrees with `reset`.

    Memory is allocated by the example.
    """
    example = row_env(env).example()
    if example is not None and example.tensors().specs() != observation.specs():
        raise SpecError(f"{name}.example gives {example.tensors()!r}, reset gives {observation!r}")


def _rows_are_equal(observation: DictTensor) -> bool:
    """Whether all rows are equal."""
    return all(equal(tensor, tensor[:1].expand_as(tensor)) for tensor in observation.values())


def _first_difference(stream: Stream, other: Stream) -> str | None:
    """Says where two streams first differ; None if they do not."""
    for (label, mine), (_, theirs) in zip(stream, other, strict=False):
        for key in mine:
            if key not in theirs or not equal(mine[key], theirs[key]):
                came = show(theirs[key]) if key in theirs and theirs[key].shape != mine[key].shape else "other values"
                return f"{key!r} of {label} ({show(mine[key])}, then {came})"
    return None


# Environments that do the same for `N_STEPS` steps, with each of `N_SEEDS` seeds, are taken to share a stream.
N_SEEDS, N_STEPS = 10, 8


class ParallelRun(Protocol):
    """Runs several environments with the same actions."""

    def run_in_parallel(self, source: EnvSource, seed: int, n_steps: int) -> list[DictTensor] | None:
        """Returns the observations until an episode ends.

        None if environments differ, or if there is only one.
        """
        ...


def check_separate_streams(source: EnvSource, run: ParallelRun, seed: int) -> None:
    """Raises SpecError if all environments behave alike with every seed.

    Only if the seed changes their behaviour at all.
    """
    if not source.is_new or source.seeded_by == BY_RESET:  # each environment gets its own seed then
        return
    traces = []
    for k in range(N_SEEDS):
        trace = run.run_in_parallel(source, seed + k, N_STEPS)
        if trace is None:
            return
        traces.append(trace)
    if any(_differ(traces[0], trace) for trace in traces[1:]):
        raise SpecError(
            f"{source.name}: all its environments do the same when they get the same actions, with each of {N_SEEDS} "
            "seeds, although the seed changes what they do: give every environment a seed of its own, such as seed + k"
        )


def _differ(one: list[DictTensor], other: list[DictTensor]) -> bool:
    if len(one) != len(other):
        return True
    pairs = zip(one, other, strict=True)
    return any(not equal(tensor, theirs[key]) for mine, theirs in pairs for key, tensor in mine.items())


# Keys with the result of a step; the others hold the agent's observation.
NOT_SEEN = ("reward", "raw_reward", "done", "terminated", "truncated", "initial_state")
# If all episode ends look wrong, it is an error only after so many episodes.
MIN_ENDS = 2


class FinalObservations:
    """Compares each final observation with the first observation of the next episode.

    Now and then an episode may end in the state in which the next one begins. If every episode does, the observation
    of the reset has replaced the final one.

    Args:
        name: of the environment, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._n_same = self._n_others = 0
        # The agent's last observation, and the environments of its rows.
        self._seen, self._rows = DictTensor(), np.zeros(0, np.int64)
        # By environment: the last two observations of an episode that ended, until the next step starts another one.
        self._ended: dict[int, tuple[DictTensor, DictTensor]] = {}

    def begin(self, observation: DictTensor) -> None:
        """Starts anew, after a reset of all environments."""
        self._ended = {}
        self._see(np.arange(observation.n_elems()), observation)

    def step(self, before: torch.Tensor, after: DictTensor, left: torch.Tensor, following: DictTensor) -> None:
        """Compares the episodes that end or begin in a step.

        Args:
            before, after: the environments that were stepped, and the observation after the step.
            left, following: those that still run, and the agent's next observation of them.
        """
        done = done_of(after)
        if done is None:
            return
        rows, place = before.tolist(), {env: row for row, env in enumerate(left.tolist())}
        for row, env in enumerate(rows):
            if env in self._ended:
                self._compare(*self._ended.pop(env), _row(after, row))
            elif done[row] and env in place:
                seen, final = self._seen_of(env), _row(after, row)
                first = following.slice(place[env], place[env] + 1)
                if "initial_state" in first and not bool(first["initial_state"]):  # the next step starts it
                    self._ended[env] = seen, final.clone()
                else:
                    self._compare(seen, final, _row(following, place[env]))
        self._see(left.numpy(), following)

    def check(self) -> None:
        """Raises SpecError if every final observation equalled the first one of the next episode."""
        if self._n_same >= MIN_ENDS and not self._n_others:
            raise SpecError(
                f"{self._name}: the final observations of {self._n_same} episodes equal the first ones of the next "
                "episodes: the reset has overwritten the observation that the step led to; copy it before the reset "
                "(to 'final_obs' if the autoreset mode is SameStep)"
            )

    def _compare(self, before: DictTensor, final: DictTensor, first: DictTensor) -> None:
        if _same(before, final):
            return  # nothing can be concluded from a step that changed nothing
        if _same(final, first):
            self._n_same += 1
        else:
            self._n_others += 1

    def _see(self, envs: np.ndarray, observation: DictTensor) -> None:
        self._seen, self._rows = observation.clone(), envs.copy()

    def _seen_of(self, env: int) -> DictTensor:
        return _row(self._seen, int(np.searchsorted(self._rows, env)))


def _row(observation: DictTensor, row: int) -> DictTensor:
    """The observation of one row: all keys but those of `NOT_SEEN` and last actions."""
    kept = [key for key in observation if key not in NOT_SEEN and key.partition("/")[0] != "last_action"]
    return observation.get(kept).slice(row, row + 1)


def _same(one: DictTensor, other: DictTensor) -> bool:
    return all(equal(tensor, other[key]) for key, tensor in one.items())
