"""Checks the arguments of `SharedVectorEnv`, and that its environments agree."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector import AutoresetMode

from rlstructs.checks import PETTINGZOO_HINT, check_count
from rlstructs.envs.spaces import are_equal
from rlstructs.errors import SpecError
from rlstructs.worker_setup import check_start_method
from rlstructs.workers.limits import n_cores

RESET_MASK = "reset_mask"
SAME, DIFFERENT = "same", "different"
# The observation spaces of all environments and of one.
Spaces = tuple[gymnasium.Space[Any], gymnasium.Space[Any]]


def check_env_fns(env_fns: Iterable[Callable[[], gymnasium.Env[Any, Any]]]) -> list[Callable[[], Any]]:
    """Returns the functions that make environments as a list.

    Raises:
        SpecError, TypeError: none are given, or one cannot be called.
    """
    found = list(env_fns)
    if not found:
        raise SpecError("env_fns: needs at least one function that makes an environment, got none")
    for k, env_fn in enumerate(found):
        if not callable(env_fn):
            raise TypeError(f"env_fns[{k}] must be a function that makes an environment, got {env_fn!r}")
    return found


def check_group_count(n_groups: int, n_envs: int) -> int:
    """Returns the number of groups.

    Raises:
        SpecError, TypeError: it is no int from 1 to `n_envs`.
    """
    if check_count("n_groups", n_groups, 1) > n_envs:
        raise SpecError(f"n_groups must be at most {n_envs}, the number of environments, got {n_groups}")
    return int(n_groups)


def check_observation_mode(mode: Any) -> Spaces | None:
    """Returns the observation spaces of all environments and of one.

    None if the environments' own spaces count.

    Raises:
        SpecError: `mode` is neither two spaces nor "same" nor "different".
    """
    if isinstance(mode, str) and mode in (SAME, DIFFERENT):
        return None
    if isinstance(mode, tuple) and len(mode) == 2 and all(isinstance(space, gymnasium.Space) for space in mode):
        return mode
    raise SpecError(
        f"observation_mode must be {SAME!r}, {DIFFERENT!r} or two spaces, of all environments and of one, got {mode!r}"
    )


def choose_worker_count(n_workers: int | None, n_envs: int, max_concurrency: int | None = None) -> int:
    """Returns the number of workers, at most `n_envs`.

    By default one for each core that may be used.

    Args:
        n_workers: as the user gave it.
        n_envs: number of environments in the smallest group.
        max_concurrency: the most workers, None for no limit.

    Raises:
        SpecError, TypeError: `n_workers` is no int from 0 on, or the limit is no int from 1 on.
    """
    limit = n_envs if max_concurrency is None else check_count("max_concurrency", max_concurrency)
    wanted = n_cores() if n_workers is None else check_count("n_workers", n_workers, 0)
    return min(wanted, n_envs, limit)


def choose_start_method(start_method: str | None, context: str | None) -> str | None:
    """Returns the start method of workers, which gymnasium calls the context.

    Raises:
        SpecError: both are given and differ, or there is no such method.
    """
    if start_method is not None and context not in (None, start_method):
        raise SpecError(f"start_method and context mean the same, got {start_method!r} and {context!r}")
    method = context if start_method is None else start_method
    check_start_method(method)
    return method


def check_autoreset_mode(mode: AutoresetMode | str) -> AutoresetMode:
    """Returns the mode with this name.

    Raises:
        SpecError: there is no such mode.
    """
    try:
        return AutoresetMode(mode)
    except ValueError as error:
        raise SpecError(f"autoreset_mode: must be one of {[m.value for m in AutoresetMode]}, got {mode!r}") from error


def expand_seeds(seed: int | Sequence[int | None] | None, n_envs: int) -> list[int | None]:
    """Returns a seed or None for each environment.

    `seed + k`, or the entries of the sequence.

    Raises:
        SpecError, TypeError: the sequence has another length, or a seed is no int.
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


def split_options(options: dict[str, Any] | None, n_envs: int) -> tuple[dict[str, Any] | None, np.ndarray | None]:
    """Splits the options of a reset into those for the environments, and the mask.

    Raises:
        SpecError, TypeError: the mask is no array, has another shape or dtype, or names no environment.
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


def check_env_ids(call: str, env_ids: Sequence[int] | np.ndarray | None, n_envs: int) -> np.ndarray:
    """Returns indexes of environments, int64; all of them for None.

    Raises:
        SpecError: `env_ids` is empty, or has a duplicate or something that is no index.
    """
    if env_ids is None:
        return np.arange(n_envs)
    envs = np.asarray(env_ids)
    if envs.ndim != 1 or envs.dtype.kind not in "iu" or not envs.size:
        raise SpecError(f"{call}: env_ids must be indexes of environments, got {env_ids!r}")
    ids = envs.tolist()  # numpy's functions take longer for a few numbers
    if min(ids) < 0 or max(ids) >= n_envs or len(set(ids)) < len(ids):
        raise SpecError(f"{call}: env_ids must lie in 0..{n_envs - 1}, each once, got {ids}")
    return envs.astype(np.int64)


def expand_values(values: Any, n_envs: int) -> list[Any]:
    """Returns a value for each environment.

    Either the entries of a list or tuple, or the same value for all.
    """
    if not isinstance(values, (list, tuple)):
        return [values] * n_envs
    if len(values) != n_envs:
        raise SpecError(f"set_attr: needs a value for each of {n_envs} environments, got {len(values)}")
    return list(values)


class OtherSpacesError(SpecError, RuntimeError):
    """Environments have different spaces; gymnasium raises a RuntimeError then."""


class Description(NamedTuple):
    """Attributes of the first environment.

    `bounds_differ` allows the others to have other bounds of observations.
    """

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    metadata: dict[str, Any]
    render_mode: str | None
    bounds_differ: bool = False

    def check(self, k: int, env: gymnasium.Env[Any, Any]) -> None:
        """Raises OtherSpacesError if the spaces of environment k are not these."""
        found, wanted = env.observation_space, self.observation_space
        if not are_equal(found, wanted) and not (self.bounds_differ and is_space_dtype_shape_equiv(found, wanted)):
            rule = "shapes and dtypes must be equal" if self.bounds_differ else 'observation_mode="same"'
            raise OtherSpacesError(f"env_fns: observation_space of environment {k} is {found}, not {wanted} ({rule})")
        if not are_equal(env.action_space, self.action_space):
            raise OtherSpacesError(
                f"env_fns: action_space of environment {k} is {env.action_space}, not {self.action_space}"
            )


def innermost(env: Any) -> Any:
    """The environment inside all wrappers."""
    while isinstance(env, gymnasium.Wrapper):
        env = env.env
    return env


def copy_if_taken(env: Any, taken: set[int]) -> Any:
    """Copies an environment that was given before.

    `[lambda: env] * n` is common, and works in n processes.
    """
    if id(innermost(env)) in taken:
        try:
            env = copy.deepcopy(env)
        except Exception as error:
            raise SpecError(
                f"env_fns: {env} is given twice and cannot be copied ({error!r}), each function has to make its own"
            ) from error
    taken.add(id(innermost(env)))
    return env


def check_spaces(env: Any) -> None:
    for name in ("observation_space", "action_space"):
        if not isinstance(space := getattr(env, name, None), gymnasium.Space):
            wanted = f"expected an environment whose {name} is a gymnasium.Space"
            agents = PETTINGZOO_HINT if hasattr(env, "possible_agents") or hasattr(env, "max_num_agents") else ""
            raise SpecError(f"env_fns: {wanted}, got {type(env).__name__} where it is {space!r}{agents}")
