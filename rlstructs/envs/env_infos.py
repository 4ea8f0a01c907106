"""Reads infos: numbers for columns, and the final observations of episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rlstructs.checks import check_names
from rlstructs.envs.spaces import Leaf
from rlstructs.errors import SpecError
from rlstructs.structures.arrays import Spec

# Prefix of the keys of these columns.
PREFIX = "info/"
FINAL = "final_info"

# Names of final observations: in gymnasium, in its earlier versions, and in Stable-Baselines3.
FINAL_NAMES = ("final_obs", "final_observation", "terminal_observation")

InfoKeys = Sequence[str] | Mapping[str, Any]


class InfoColumns:
    """The columns `info/<key>`.

    Args:
        info_keys: names of infos, for float32 columns; or a mapping from names to dtypes of numpy, torch or Python.
            `a/b` is entry `b` of the info `a`, if no info has the name `a/b` itself.

    Attributes:
        specs: key -> row shape and dtype.

    Raises:
        TypeError, SpecError: a name or a dtype is wrong.

    Example:
        >>> columns = InfoColumns({"is_success": bool, "episode/r": np.float32})
        >>> arrays = {key: np.zeros(2, dtype) for key, (_, dtype) in columns.specs.items()}
        >>> columns.write(arrays, 0, {"is_success": True}, 0)
        >>> columns.write(arrays, 1, {"episode": {"r": 2.5}}, 1)
        >>> {key: array.tolist() for key, array in arrays.items()}
        {'info/is_success': [True, False], 'info/episode/r': [nan, 2.5]}
    """

    def __init__(self, info_keys: InfoKeys = ()) -> None:
        if isinstance(info_keys, Mapping):
            dtypes = info_keys
        else:
            dtypes = dict.fromkeys(check_names("info_keys", info_keys), "f4")
        dtypes = {name: _check_dtype(name, dtype) for name, dtype in dtypes.items()}
        self._wanted = [(PREFIX + name, name, dtype) for name, dtype in dtypes.items()]
        self.specs: dict[str, Spec] = {key: ((), dtype) for key, _, dtype in self._wanted}

    def __bool__(self) -> bool:
        return bool(self._wanted)

    def write(self, arrays: Mapping[str, np.ndarray], row: int, info: Any, env: object) -> None:
        """Writes the info of environment `env` to a row.

        NaN, 0 or False where it lacks a name.
        """
        if not isinstance(info, Mapping):
            raise SpecError(f"environment {env}: its info must be a dict, got {type(info).__name__}")
        for key, name, dtype in self._wanted:
            arrays[key][row] = _to_number(_look_up(info, name), name, dtype, env)

    def write_batch(self, arrays: Mapping[str, np.ndarray], infos: Any, at: Any = slice(None)) -> None:
        """Writes the infos of a vector environment.

        Args:
            arrays: all columns, a row for each environment.
            infos: a dict of arrays, each with a mask `_<key>` of the environments that have it (no mask: all);
                or one dict for each environment.
            at: which rows to write.
        """
        n = len(arrays[self._wanted[0][0]])
        if not isinstance(infos, Mapping):
            for env in np.arange(n)[at].tolist():
                self.write(arrays, env, {} if infos is None or infos[env] is None else infos[env], env)
            return
        for key, name, dtype in self._wanted:
            arrays[key][at] = _to_numbers(*_look_up_column(infos, name), name, dtype, n)[at]


def final_infos(infos: Any) -> Any:
    """Returns the infos of steps that ended an episode, or None.

    The vector environment resets in the same step.
    """
    return infos.get(FINAL) if isinstance(infos, Mapping) else None


def _check_dtype(name: Any, dtype: Any) -> np.dtype[Any]:
    if not isinstance(name, str) or not name:
        raise TypeError(f"info_keys: needs names, such as ['is_success'], got {name!r}")
    try:
        found = torch.empty(0, dtype=dtype).numpy().dtype if isinstance(dtype, torch.dtype) else np.dtype(dtype)
    except TypeError as error:
        raise TypeError(f"info_keys: {name!r} needs a dtype, such as np.float32, got {dtype!r}") from error
    if found.kind not in "biuf":
        raise SpecError(f"info_keys: {name!r} must be numbers or bools, got {found}")
    return found


def _look_up(info: Mapping[str, Any], name: str) -> Any:
    """The entry of an info under a name, or None."""
    if name in info:
        return info[name]
    first, _, rest = name.partition("/")
    inner = info.get(first) if rest else None
    return _look_up(inner, rest) if isinstance(inner, Mapping) else None


def _to_number(value: Any, name: str, dtype: np.dtype[Any], env: object) -> Any:
    """Converts a value to a number of this dtype.

    None becomes NaN, 0 or False.
    """
    if value is None:
        return np.nan if dtype.kind == "f" else 0
    try:
        given = np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError):
        given = np.asarray(None)
    if given.size != 1 or given.dtype.kind not in "biuf":
        raise SpecError(f"environment {env}: info {name!r} must be one number, got {value!r}")
    with np.errstate(invalid="ignore", over="ignore"):
        number = given.reshape(()).astype(dtype)
    if dtype.kind != "f" and number != given:
        raise SpecError(f"environment {env}: info {name!r} is {value!r}, which {dtype} cannot hold: see info_keys")
    return number


def _look_up_column(infos: Mapping[str, Any], name: str) -> tuple[Any, Any]:
    """Finds the rows under a name, and the mask of environments that have it.

    Rows are None if there are none, the mask if all have it.
    """
    if name in infos:
        return infos[name], infos.get(f"_{name}")
    first, _, rest = name.partition("/")
    if not rest or not isinstance(infos.get(first), Mapping):
        return None, None
    values, mask = _look_up_column(infos[first], rest)
    return values, infos.get(f"_{first}") if mask is None else mask


def _to_numbers(values: Any, mask: Any, name: str, dtype: np.dtype[Any], n: int) -> np.ndarray:
    """Converts the rows of n environments to a column of this dtype.

    Rows outside the mask are NaN, 0 or False.
    """
    found = np.full(n, np.nan if dtype.kind == "f" else 0, dtype)
    if values is None:
        return found
    given = np.asarray(values.detach().cpu() if isinstance(values, torch.Tensor) else values)
    if given.ndim < 1 or len(given) != n:
        raise SpecError(f"environment: info {name!r} must have a row for each of {n} environments, got {values!r}")
    envs = np.arange(n) if mask is None else np.flatnonzero(mask)
    if given.size == n and given.dtype.kind in "biuf":
        with np.errstate(invalid="ignore", over="ignore"):
            found[envs] = given.reshape(n)[envs].astype(dtype)
        if dtype.kind == "f" or (found[envs] == given.reshape(n)[envs]).all():
            return found
    for env in envs.tolist():
        found[env] = _to_number(given[env], name, dtype, env)
    return found


def has_finals(infos: Any) -> bool:
    """Whether infos, of whatever type, hold final observations under one of gymnasium's names."""
    each = [infos] if isinstance(infos, Mapping) else infos if _are_mappings(infos) else []
    return any(info.get(name) is not None for info in each for name in FINAL_NAMES[:2])


def find_finals(infos: Any, n_envs: int, name: str) -> Any:
    """Finds the final observations in infos.

    They are one batch of the space, or an array or list of E observations.

    Args:
        infos: a dict, or a sequence of one dict for each environment.
        n_envs: E.
        name: of the vector environment.

    Raises:
        SpecError: infos hold no final observations, or are of another type.
    """
    found: Any = None
    if isinstance(infos, Mapping):
        found = _get_final(infos)
        if found is None:
            raise SpecError(f"environment: {name} ended an episode without infos['final_obs']")
    elif _are_mappings(infos) and len(infos) == n_envs:
        finals = [_get_final(info) for info in infos]
        found = None if all(final is None for final in finals) else finals
    if found is None:
        got = type(infos).__name__
        raise SpecError(f"environment: infos with 'final_obs' must be a dict or {n_envs} dicts, got {got}")
    return found


def write_finals(leaves: Mapping[str, Leaf], at: np.ndarray, finals: Any, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes the final observations of some environments to their rows.

    Args:
        leaves: of the space, by key.
        at: int64, indexes of these environments.
        finals: what `find_finals` returned; only the observations of `at` are read.
        arrays: E rows for each key.

    Raises:
        SpecError: one is missing, or not in the space.
    """
    for key, leaf in leaves.items():
        name, n_envs = f"final {leaf.describe()}", len(arrays[key])
        each, row_leaf = _split_finals(leaf, finals, n_envs)
        if each is None:
            found = leaf.read(f"environment: {name}", finals, (n_envs, *leaf.shape))[at]
        else:
            found = np.stack([_read_final(row_leaf, f"environment {row}: {name}", each[row]) for row in at.tolist()])
        arrays[key][at] = found.reshape(len(at), *leaf.row_shape)


def _split_finals(leaf: Leaf, finals: Any, n_envs: int) -> tuple[Sequence[Any] | None, Leaf]:
    """Splits `finals` into one value for each environment.

    Also returns the leaf that reads each value. None for a single batch.
    """
    # In a Tuple space, a tuple is a single batch.
    is_list = isinstance(finals, list) or (isinstance(finals, tuple) and not leaf.path)
    if _is_object_array(finals) or (is_list and len(finals) == n_envs):
        return finals, leaf
    if leaf.path:  # a dict may hold arrays of objects
        try:
            values = leaf.pick(finals)
        except (TypeError, LookupError):
            return None, leaf
        if _is_object_array(values) and len(values) == n_envs:
            return values, replace(leaf, path=())
    return None, leaf


def _is_object_array(values: Any) -> bool:
    return isinstance(values, np.ndarray) and values.dtype == object and values.ndim == 1


def _read_final(leaf: Leaf, name: str, final: Any) -> np.ndarray:
    if final is None:
        raise SpecError(f"{name} is missing: the episode has ended, and infos['final_obs'] is None there")
    return leaf.read(name, final, leaf.shape)


def _get_final(info: Mapping[str, Any]) -> Any:
    return next((info[name] for name in FINAL_NAMES if info.get(name) is not None), None)


def _are_mappings(infos: Any) -> bool:
    return isinstance(infos, (list, tuple, np.ndarray)) and all(isinstance(info, Mapping) for info in infos)
