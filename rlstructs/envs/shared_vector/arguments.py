"""What the methods of `SharedVectorEnv` are given, checked."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from rlstructs.checks import check_count, check_start_method
from rlstructs.errors import SpecError
from workers.limits import n_cores

RESET_MASK = "reset_mask"
SAME, DIFFERENT = "same", "different"


def env_fns_of(env_fns: Iterable[Callable[[], gymnasium.Env[Any, Any]]]) -> list[Callable[[], Any]]:
    """The functions that make environments, as a list.

    Raises:
        SpecError, TypeError: none are given, or something that cannot be called.
    """
    found = list(env_fns)
    if not found:
        raise SpecError("env_fns: needs at least one function that makes an environment, got none")
    for k, env_fn in enumerate(found):
        if not callable(env_fn):
            raise TypeError(f"env_fns[{k}] must be a function that makes an environment, got {env_fn!r}")
    return found


def group_count(n_groups: int, n_envs: int) -> int:
    """How many groups there will be.

    Raises:
        SpecError, TypeError: not an int from 1 to `n_envs`.
    """
    if check_count("n_groups", n_groups, 1) > n_envs:
        raise SpecError(f"n_groups must be at most {n_envs}, the number of environments, got {n_groups}")
    return int(n_groups)


def observation_spaces_of(mode: Any) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]] | None:
    """The spaces, of all environments and of one, that what they observe is said to have; None if they tell.

    Raises:
        SpecError: neither such spaces nor "same" nor "different".
    """
    if isinstance(mode, str) and mode in (SAME, DIFFERENT):
        return None
    if isinstance(mode, tuple) and len(mode) == 2 and all(isinstance(space, gymnasium.Space) for space in mode):
        return mode
    raise SpecError(
        f"observation_mode must be {SAME!r}, {DIFFERENT!r} or two spaces, of all environments and of one, got {mode!r}"
    )


def worker_count(n_workers: int | None, n_envs: int, max_concurrency: int | None = None) -> int:
    """How many workers there will be; by itself one for each core that it may use, at most `n_envs`.

    Args:
        n_workers: as it was given.
        n_envs: how many environments there are, of the smallest group.
        max_concurrency: at most so many.

    Raises:
        SpecError, TypeError: not an int from 0 to `n_envs`, or no limit from 1 on.
    """
    limit = n_envs if max_concurrency is None else check_count("max_concurrency", max_concurrency)
    if n_workers is None:
        return min(n_cores(), n_envs, limit)
    if check_count("n_workers", n_workers, 0) > n_envs:
        raise SpecError(f"n_workers must be at most {n_envs}, the number of environments of a group, got {n_workers}")
    return min(int(n_workers), limit)


def start_method_of(start_method: str | None, context: str | None) -> str | None:
    """How workers are started, which gymnasium calls the context.

    Raises:
        SpecError: both are given, and differ; or there is no such method.
    """
    if start_method is not None and context not in (None, start_method):
        raise SpecError(f"start_method and context mean the same, got {start_method!r} and {context!r}")
    method = context if start_method is None else start_method
    check_start_method(method)
    return method


def autoreset_mode_of(mode: AutoresetMode | str) -> AutoresetMode:
    """The mode of this name.

    Raises:
        SpecError: there is none.
    """
    try:
        return AutoresetMode(mode)
    except ValueError as error:
        raise SpecError(f"autoreset_mode: must be one of {[m.value for m in AutoresetMode]}, got {mode!r}") from error


def seeds_of(seed: int | Sequence[int | None] | None, n_envs: int) -> list[int | None]:
    """A seed for each environment: `seed + k`, those of a sequence, or None.

    Raises:
        SpecError, TypeError: not as many as environments, or one that is no int.
    """
    if seed is None:
        return [None] * n_envs
    if isinstance(seed, (int, np.integer)):
        return [int(seed) + k for k in range(n_envs)]
    try:
        seeds = [None if each is None else operator.index(each) for each in seed]
    except TypeError as error:
        raise TypeError(f"reset: seed must be an int, or ints and None, got {seed!r}") from error
    if len(seeds) != n_envs:
        raise SpecError(f"reset: needs a seed for each of {n_envs} environments, got {len(seeds)}")
    return seeds


def options_of(
    options: dict[str, Any] | None, n_envs: int
) -> tuple[dict[str, Any] | None, np.ndarray | None]:
    """The options that environments get, and the mask that was among them.

    Raises:
        SpecError, TypeError: the mask is no array, of another shape or dtype, or names no environment.
    """
    if options is None or RESET_MASK not in options:
        return options, None
    mask = options[RESET_MASK]
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
        raise TypeError(f"reset: {RESET_MASK} must be an array of bool, got {mask!r}")
    if mask.shape != (n_envs,):
        raise SpecError(f"reset: {RESET_MASK} must have shape {(n_envs,)}, got {mask.shape}")
    if not mask.any():
        raise SpecError(f"reset: {RESET_MASK} must name an environment, got {mask}")
    return {key: value for key, value in options.items() if key != RESET_MASK}, mask.copy()


def env_ids_of(call: str, env_ids: Sequence[int] | np.ndarray | None, n_envs: int) -> np.ndarray:
    """Indexes of environments, int64.

    Raises:
        SpecError: none, one that is no index, or one twice.
    """
    if env_ids is None:
        return np.arange(n_envs)
    envs = np.asarray(env_ids)
    if envs.ndim != 1 or envs.dtype.kind not in "iu" or not envs.size:
        raise SpecError(f"{call}: env_ids must be indexes of environments, got {env_ids!r}")
    if envs.min() < 0 or envs.max() >= n_envs or len(set(envs.tolist())) < envs.size:
        raise SpecError(f"{call}: env_ids must lie in 0..{n_envs - 1}, each once, got {envs.tolist()}")
    return envs.astype(np.int64)


def value_for_each(values: Any, n_envs: int) -> list[Any]:
    """A value for each environment: those of a list or tuple, or the same for all."""
    if not isinstance(values, (list, tuple)):
        return [values] * n_envs
    if len(values) != n_envs:
        raise SpecError(f"set_attr: needs a value for each of {n_envs} environments, got {len(values)}")
    return list(values)
