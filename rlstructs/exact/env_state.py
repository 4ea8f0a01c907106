"""The state of vectorised environments in the middle of their episodes.

Two copies made of it are stepped with the same actions, to verify that they behave like the originals.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from rlstructs.envs.action_reader import ActionReader
from rlstructs.envs.row_adapter import row_env
from rlstructs.envs.row_env import RowEnv, Step
from rlstructs.envs.stepping import SingleEnv
from rlstructs.envs.vec_env import VecEnv
from rlstructs.errors import SpecError
from rlstructs.exact.methods import (
    PICKLE,
    REPLAY,
    CopyError,
    NewEnvs,
    find_difference,
    list_methods,
    make_tokens,
    name_env,
)
from rlstructs.exact.pickler import Pickled, dumps, loads
from rlstructs.seeding import PrivateStreams
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.workers.public_names import set_module

# The number of steps for which copies are compared.
N_STEPS = 8


@set_module("rlstructs.envs.snapshots")
class EnvState(NamedTuple):
    """The state of vectorised environments.

    Attributes:
        methods: the method that restores each single environment: "get_state", "pickle" or "replay".
        pickled: the pickle that restores them.
    """

    methods: list[str]
    pickled: Pickled


def take_state(env: VecEnv, make_env: Callable[[], VecEnv]) -> EnvState:
    """Takes the state of environments, without changing them; all of them must run.

    Args:
        env: the environments, such as a `GymEnvInf`.
        make_env: makes others like them, where a state has to be set in a new environment.

    Raises:
        SpecError: one cannot be brought back; the message says which, and why.

    Example:
        >>> import gymnasium, torch
        >>> from rlstructs import DictTensor, GymEnvInf
        >>> def make_env():
        ...     return GymEnvInf([gymnasium.make("CartPole-v1") for _ in range(2)], seed=0)
        >>> env = make_env()
        >>> _ = env.reset()
        >>> state = take_state(env, make_env)
        >>> other = bring_back(state, make_env)
        >>> action = DictTensor({"action": torch.tensor([0, 1])})
        >>> state.methods, env.step(action)[0][0] == other.step(action)[0][0]
        (['pickle', 'pickle'], True)
    """
    rows = row_env(env)
    methods = choose_methods(rows, Trial(lambda: row_env(make_env()), np.arange(env.n_envs())))
    return EnvState(methods, dumps(env, make_tokens(rows.single_envs(), methods)))


def bring_back(state: EnvState, make_env: Callable[[], VecEnv]) -> Any:
    """Makes environments in a state that `take_state` returned. Runs code of whoever made it.

    Args:
        state: the state.
        make_env: makes new environments; called if a state has to be set in them.

    Raises:
        CopyError: an environment cannot be brought back.
    """
    new = NewEnvs(lambda: row_env(make_env()))
    made = loads(state.pickled, new.resolve)
    new.close_unused()
    return made


def choose_methods(env: RowEnv, trial: Trial) -> list[str]:
    """Chooses for each single environment the first method that brings it back.

    Raises:
        SpecError: no method restores one of them; the message says why.
    """
    singles = env.single_envs()
    left = [list_methods(single) for single in singles]
    reasons: list[dict[str, str]] = [{} for _ in singles]
    while True:
        methods = [each[0] for each in left]
        try:
            verify(env, methods, trial)
        except CopyError as error:
            for k, why in error.reasons.items():
                reasons[k][left[k].pop(0)] = why
                if not left[k]:
                    raise SpecError(_explain(k, singles[k], reasons[k])) from error
        else:
            return methods


def _explain(k: int, single: SingleEnv, reasons: dict[str, str]) -> str:
    tried = "; ".join(f"{method}: {why}" for method, why in reasons.items())
    advice = "" if REPLAY in reasons else "; GymEnvInf(..., episode_seeds=True) plays the episode again"
    return f"environment {k} ({name_env(single.env)}) cannot be brought back: {tried}{advice}"


class Trial(NamedTuple):
    """The inputs of a verification.

    Attributes:
        make_env: makes new environments like the first ones of a worker.
        running: int64, the environments that run.
        action: E rows of an action, for environments that do not tell their action space; None for none.
    """

    make_env: Callable[[], RowEnv]
    running: np.ndarray
    action: DictTensor | None = None


def verify(env: RowEnv, methods: Sequence[str], trial: Trial) -> None:
    """Verifies that these methods restore the environments.

    The environments and the global streams stay as they are.

    Args:
        env: the environments.
        methods: the method of each of `env.single_envs()`.
        trial: the inputs of the test.

    Raises:
        CopyError: some are not brought back; it says which.
        SpecError: the object around them cannot be pickled.
    """
    singles = env.single_envs()
    new = NewEnvs(trial.make_env), NewEnvs(trial.make_env, is_dirty=True)
    copies: list[RowEnv] = []
    with PrivateStreams()():
        pickled = _pickle(env, singles, methods)
        try:
            for each in new:
                copies.append(_unpickle(pickled, each, methods))
            _compare_attributes(singles, copies[0].single_envs(), methods)
            _compare_steps(copies, Actions(env, trial.action), trial.running, len(singles))
        finally:
            for close in [*(made.close for made in copies), *(each.close_unused for each in new)]:
                with contextlib.suppress(Exception):
                    close()


def _pickle(env: RowEnv, singles: Sequence[SingleEnv], methods: Sequence[str]) -> Pickled:
    tokens = make_tokens(singles, methods)
    try:
        return dumps(env, tokens)
    except Exception as error:
        reasons = {}
        for k, (single, method) in enumerate(zip(singles, methods, strict=True)):
            try:
                dumps(single.env if method == PICKLE else [token for token in tokens.values() if token[1] == k], tokens)
            except Exception as own:
                reasons[k] = f"{type(own).__name__}: {own}"
        if not reasons:
            raise SpecError(f"environment: a {type(env).__name__} cannot be pickled: {error}") from error
        raise CopyError(reasons) from error


def _unpickle(pickled: Pickled, new: NewEnvs, methods: Sequence[str]) -> RowEnv:
    try:
        found: RowEnv = loads(pickled, new.resolve)
        return found
    except CopyError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise CopyError(
            {k: why for k, method in enumerate(methods) if method == PICKLE or PICKLE not in methods}
        ) from error


def _compare_attributes(singles: Sequence[SingleEnv], copies: Sequence[SingleEnv], methods: Sequence[str]) -> None:
    """Compares pickled environments with their copies: a class may pickle less than its state."""
    reasons = {}
    for k, (single, other, method) in enumerate(zip(singles, copies, methods, strict=True)):
        if method == PICKLE and (path := find_difference(single.env, other.env)):
            reasons[k] = f"{path} is lost"
    if reasons:
        raise CopyError(reasons)


def _compare_steps(copies: Sequence[RowEnv], actions: Actions, running: np.ndarray, n_singles: int) -> None:
    """Steps two copies with the same actions and streams, and compares them."""
    n_rows = copies[0].n_envs() // n_singles
    streams = [PrivateStreams() for _ in copies]
    for _ in range(N_STEPS if actions else 0):
        if not running.size:
            return
        action = actions.draw(running)
        shown: list[Any] = []
        for env, own in zip(copies, streams, strict=True):
            with own():
                try:
                    shown.append(_read(env.step_rows(action)))
                except Exception as error:
                    shown.append(f"{type(error).__name__}: {error}")
        one, other = shown
        if isinstance(one, str) and one == other:
            return  # such an action is not allowed
        path = "one raises" if isinstance(one, str) != isinstance(other, str) else find_difference(one, other)
        if path is not None:
            why = f"two copies do not show the same ({path})"
            raise CopyError(dict.fromkeys(_find_rows(one, other, running // n_rows), why))
        kept = one["kept"]
        running = running if kept is None else running[kept]


def _read(step: Step) -> dict[str, Any]:
    """Copies all results of a step."""
    after = {key: array.copy() for key, array in step.after.arrays().items()}
    fresh = {} if step.fresh is None else {key: array.copy() for key, array in step.fresh.arrays().items()}
    return {
        "after": after,
        "fresh": fresh,
        "reset": step.reset,
        "kept": step.kept,
        "idle": step.idle,
        "failed": step.failed,
    }


def _find_rows(one: Any, other: Any, owners: np.ndarray) -> set[int]:
    """Returns the environments whose rows differ after a step.

    All of them if that is not known.
    """
    if isinstance(one, dict) and isinstance(other, dict):
        found = {
            int(owner)
            for row, owner in enumerate(owners)
            if any(array[row].tobytes() != other["after"][key][row].tobytes() for key, array in one["after"].items())
        }
        if found:
            return found
    return set(owners.tolist())


class Actions:
    """Random actions of environments.

    Args:
        env: the environments.
        example: E rows of an action, for environments that do not tell their action space.
    """

    def __init__(self, env: RowEnv, example: DictTensor | None) -> None:
        self._space, self._example = copy.deepcopy(getattr(env, "action_space", None)), example
        if self._space is not None:
            self._space.seed(0)
            self._leaves = ActionReader(self._space).leaves

    def __bool__(self) -> bool:
        return self._space is not None or self._example is not None

    def draw(self, running: np.ndarray) -> DictTensor:
        """Draws an action for each running environment."""
        if self._space is None:
            assert self._example is not None
            return self._example.index(torch.from_numpy(running))
        samples = [self._space.sample() for _ in running]
        columns: dict[str, torch.Tensor] = {}
        for leaf in self._leaves:
            values = [np.asarray(leaf.pick(sample), leaf.dtype) for sample in samples]
            columns[ActionReader.key(leaf)] = torch.from_numpy(np.stack(values))
        return DictTensor(columns)
