"""Finds environments in gymnasium's registry, and factories that make them."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, find_highest_version, get_env_id, parse_env_id

from rlstructs.errors import SpecError


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
    """Imports a module that the user named; raises SpecError, which begins with `what`, if that fails."""
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise SpecError(f"{what}: cannot import {module!r}: {type(error).__name__}: {error}") from error


def env_factory(env: Any, arguments: Mapping[str, Any] | None) -> Callable[..., Any]:
    """Returns a function that makes environments.

    Args:
        env: an id or spec of gymnasium's registry, or a function.
        arguments: further arguments of `gymnasium.make`, or of the function; None for none.

    Raises:
        SpecError: the id is not in the registry.
        TypeError: `env` is neither, or the arguments are no mapping.
    """
    if arguments is not None and not isinstance(arguments, Mapping):
        raise TypeError(f"env_args must be a mapping of names to values, got {type(arguments).__name__}")
    more = dict(arguments or {})
    if isinstance(env, str):
        return partial(gymnasium.make, find_env(env), **more)
    if isinstance(env, EnvSpec):
        return partial(gymnasium.make, env, **more)
    if not callable(env):
        hint = "; give a function that makes it" if hasattr(env, "reset") else ""
        raise TypeError(f"env must be an id of gymnasium's registry or a function, got {type(env).__name__}{hint}")
    return partial(env, **more) if more else env
