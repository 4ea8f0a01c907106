"""Checks lists of gymnasium environments, and environments that take the place of one in a list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium

from rlstructs.checks import hint_wrapper
from rlstructs.envs.array_values import as_numpy
from rlstructs.envs.shared_vector.arguments import innermost
from rlstructs.envs.spaces import are_equal, space_of_array
from rlstructs.envs.stepping import read_reset
from rlstructs.errors import SpecError
from rlstructs.seeding import PrivateStreams


def check_envs(envs: Sequence[gymnasium.Env[Any, Any]]) -> list[gymnasium.Env[Any, Any]]:
    """Returns environments as a list.

    Raises:
        TypeError: they are not gymnasium environments.
        SpecError: none are given, one is given twice, their spaces differ, or one is missing.
    """
    try:
        envs = list(envs)
    except TypeError as error:
        raise TypeError(f"envs: needs a list of gymnasium environments, got {_suggest_list(envs)}") from error
    if not envs:
        raise SpecError("envs: needs at least one environment, got none")
    taken: set[int] = set()
    names = ["observation_space", "action_space"]
    if all(getattr(env, names[0], None) is None for env in envs):
        names.remove("observation_space")
    for k, env in enumerate(envs):
        if not isinstance(env, gymnasium.Env):
            got = f"{type(env).__name__}, call it" if callable(env) else f"{type(env).__name__}{hint_wrapper(env)}"
            raise TypeError(f"envs: number {k} must be a gymnasium.Env, got {got}")
        if id(innermost(env)) in taken:
            raise SpecError(f"envs: number {k} is given twice, each must be an environment of its own")
        taken.add(id(innermost(env)))
        for name in names:
            if getattr(env, name, None) is None:
                raise SpecError(f"envs: number {k} has no {name}, which says what keys, dtypes and shapes there are")
            if not are_equal(getattr(env, name), getattr(envs[0], name)):
                raise SpecError(
                    f"envs: {name} of number {k} is {getattr(env, name)}, of number 0 {getattr(envs[0], name)}"
                )
    return envs


def find_observation_space(env: gymnasium.Env[Any, Any], seed: int) -> gymnasium.Space[Any]:
    """The observation space of an environment; if it has none, that of the arrays which it shows.

    Raises:
        SpecError: it has none, and its first observation is no array.
    """
    if (own := getattr(env, "observation_space", None)) is not None:
        return own
    with PrivateStreams()():
        observation, _ = read_reset(env.reset(seed=seed), env, 0)
    if not hasattr(observation, "shape") or (space := space_of_array(as_numpy(observation))) is None:
        raise SpecError(
            "envs: number 0 has no observation_space, which says what keys, dtypes and shapes there are, and its first "
            f"observation is no array of numbers, but {type(observation).__name__}"
        )
    return space


def check_new(env: Any, k: int, envs: Sequence[gymnasium.Env[Any, Any]]) -> None:
    """Raises SpecError if an environment cannot take the place of number k of these, which it was made for."""
    if any(innermost(env) is innermost(each) for each in envs):
        raise SpecError(f"environment {k}: it was to be made anew, but its function gave an environment again")
    for name in ("observation_space", "action_space"):
        found, before = (getattr(each, name, None) for each in (env, envs[k]))
        if found is not before and not are_equal(found, before):
            raise SpecError(f"environment {k}: {name} is {found} after it was made anew, and was {before}")


def _suggest_list(envs: Any) -> str:
    """Names what was given instead of a list, and what to do with it."""
    if isinstance(envs, gymnasium.vector.VectorEnv):
        return f"{type(envs).__name__}: give it to GymVectorEnv"
    if callable(envs):
        return f"{type(envs).__name__}: call it, once for each environment, [make() for _ in range(n)]"
    return f"{type(envs).__name__}: put it into a list, [env]"
