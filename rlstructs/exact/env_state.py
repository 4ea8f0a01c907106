"""The state of vectorised environments in the middle of their episodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from rlstructs.envs.row_adapter import row_env
from rlstructs.envs.row_env import RowEnv
from rlstructs.envs.stepping import SingleEnv
from rlstructs.envs.vec_env import VecEnv
from rlstructs.errors import SpecError
from rlstructs.exact.methods import REPLAY, CopyError, NewEnvs, list_methods, make_tokens, name_env
from rlstructs.exact.pickler import Pickled, dumps, loads
from rlstructs.exact.verification import Trial, verify
from rlstructs.workers.public_names import set_module


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
