"""Finds gymnasium environments in the registry, makes them, and checks lists of them."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, find_highest_version, get_env_id, parse_env_id

from rlstructs.checks import hint_wrapper
from rlstructs.envs.array_values import as_numpy
from rlstructs.envs.jax_functions import is_functional
from rlstructs.envs.shared_vector.arguments import innermost
from rlstructs.envs.spaces import are_equal, space_of_array
from rlstructs.envs.stepping import read_reset
from rlstructs.errors import SpecError
from rlstructs.seeding import PrivateStreams


def find_env(env_id: str) -> str:
    """Finds an environment in the registry; returns its full id.

    Args:
        env_id: `[module:][namespace/]name[-vN]`; the module is imported, the default is the newest version.

    Raises:
        SpecError: there is no such environment.
    """
    module, _, name = env_id.rpartition(":")
    if name.startswith("ALE/"):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module("ale_py")
    if module:
        import_module(module, env_id)
    try:
        namespace, base, version = parse_env_id(name)
        newest = find_highest_version(namespace, base) if version is None else None
        return str(gymnasium.spec(name if newest is None else get_env_id(namespace, base, newest)).id)
    except gymnasium.error.Error as error:
        raise SpecError(f"{env_id}: {error}") from error


def import_module(module: str, what: str) -> Any:
    """Imports a module that the user named.

    Raises SpecError, which begins with `what`, if that fails.
    """
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise SpecError(f"{what}: cannot import {module!r}: {type(error).__name__}: {error}") from error


def env_factory(env: Any, arguments: Mapping[str, Any] | None) -> Callable[..., Any]:
    """Returns a function that makes environments.

    Args:
        env: an id or spec of gymnasium's registry, a function, or an environment in jax (see `JaxEnv`).
        arguments: further arguments of `gymnasium.make`, or of the function; None for none.

    Raises:
        SpecError: the id is not in the registry.
        TypeError: `env` is neither, or the arguments are no mapping.
    """
    if arguments is not None and not isinstance(arguments, Mapping):
        raise TypeError(f"env_args must be a mapping of names to values, got {type(arguments).__name__}")
    more = dict(arguments or {})
    if is_functional(env):
        if more:
            raise SpecError(f"env_args: environments in jax take none, got {sorted(more)}; give a pair (env, params)")
        from rlstructs.envs.jax_env import JaxEnvs  # imports jax

        return JaxEnvs(env)
    if isinstance(env, str):
        return partial(gymnasium.make, find_env(env), **more)
    if isinstance(env, EnvSpec):
        return partial(gymnasium.make, env, **more)
    if not callable(env):
        hint = "; give a function that makes it" if hasattr(env, "reset") else ""
        raise TypeError(f"env must be an id of gymnasium's registry or a function, got {type(env).__name__}{hint}")
    return partial(env, **more) if more else env


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
    """Returns the observation space of an environment.

    If it has none, a space for its first observation, an array.

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
            f"observation is not an array of numbers, but {type(observation).__name__}"
        )
    return space


def check_new(env: Any, k: int, envs: Sequence[gymnasium.Env[Any, Any]]) -> None:
    """Raises SpecError if an environment cannot replace number k of a list."""
    if any(innermost(env) is innermost(each) for each in envs):
        raise SpecError(f"environment {k}: it was to be made anew, but its function gave an environment again")
    for name in ("observation_space", "action_space"):
        found, before = (getattr(each, name, None) for each in (env, envs[k]))
        if found is not before and not are_equal(found, before):
            raise SpecError(f"environment {k}: {name} is {found} after it was made anew, and was {before}")


def _suggest_list(envs: Any) -> str:
    """Describes what was given instead of a list, and suggests a remedy."""
    if isinstance(envs, gymnasium.vector.VectorEnv):
        return f"{type(envs).__name__}: give it to GymVectorEnv"
    if callable(envs):
        return f"{type(envs).__name__}: call it, once for each environment, [make() for _ in range(n)]"
    return f"{type(envs).__name__}: put it into a list, [env]"
