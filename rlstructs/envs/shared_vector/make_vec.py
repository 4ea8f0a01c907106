"""`make_vec`: gymnasium's function of this name, for `SharedVectorEnv`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from rlstructs.checks import check_count, other_words
from rlstructs.envs.registry import env_factory, find_env
from rlstructs.envs.shared_vector.shared_vector_env import SharedVectorEnv
from rlstructs.errors import SpecError

# gymnasium's names for stepping environments in this process and in others.
SYNC, ASYNC = "sync", "async"


@other_words(n_processes="n_workers", n_envs="num_envs")
def make_vec(
    env: str | EnvSpec | Callable[..., gymnasium.Env[Any, Any]],
    num_envs: int = 1,
    n_workers: int | None = None,
    *,
    vectorization_mode: str | None = None,
    vector_kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[Callable[[gymnasium.Env[Any, Any]], gymnasium.Env[Any, Any]]] | None = None,
    **kwargs: Any,
) -> SharedVectorEnv:
    """Makes equal environments, which worker processes step: `gymnasium.make_vec` for `SharedVectorEnv`.

    Args:
        env: an id or spec of gymnasium's registry, or a function that makes one environment. May be a lambda.
        num_envs: number of environments.
        n_workers: number of processes that share the environments; 0 steps them in this process, None for one per
            core; there are at most as many as environments.
        vectorization_mode: gymnasium's: "sync" is `n_workers=0`; "async" and None change nothing.
        vector_kwargs: further arguments of `SharedVectorEnv`.
        wrappers: are applied to each environment, in this order.
        kwargs: further arguments of `gymnasium.make`, or of the function.

    Raises:
        SpecError, TypeError: an argument is wrong, or the id is not in the registry.
        Exception: what the constructor of `SharedVectorEnv` raises.

    Example:
        >>> with make_vec("CartPole-v1", num_envs=4, n_workers=2) as envs:
        ...     observations, infos = envs.reset(seed=42)
        >>> observations.shape
        (4, 4)
    """
    check_count("num_envs", num_envs)
    mode = getattr(vectorization_mode, "value", vectorization_mode)  # a member of gymnasium's enumeration
    if mode not in (None, SYNC, ASYNC):
        raise SpecError(f"vectorization_mode must be {SYNC!r}, {ASYNC!r} or None, got {vectorization_mode!r}")
    if mode == SYNC:
        if n_workers:
            raise SpecError(f"vectorization_mode {SYNC!r} steps in this process, n_workers is {n_workers}: give one")
        n_workers = 0
    make = partial(_make_one, env_factory(env, kwargs), tuple(wrappers or ()))
    envs = SharedVectorEnv([make] * num_envs, n_workers, **(vector_kwargs or {}))
    if isinstance(env, (str, EnvSpec)):
        envs.spec = copy.deepcopy(gymnasium.spec(find_env(env)) if isinstance(env, str) else env)
        envs.spec.kwargs.update(kwargs)
    return envs


def _make_one(make: Callable[..., Any], wrappers: Sequence[Callable[..., Any]]) -> Any:
    env = make()
    for wrap in wrappers:
        env = wrap(env)
    return env
