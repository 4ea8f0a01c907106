"""Columns of an observation with numbers from the infos of environments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlstructs.checks import check_names
from rlstructs.errors import SpecError
from rlstructs.structures.arrays import Spec

# Prefix of the keys of these columns.
PREFIX = "info/"
FINAL = "final_info"

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
        """Writes the info of environment `env` to a row: NaN, 0 or False where it lacks a name."""
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
    """The infos of steps that ended an episode, from a vector environment that resets in the same step, or None."""
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
    """Converts a value to a number of this dtype; None becomes NaN, 0 or False."""
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
    """Finds the rows under a name (None: there are none), and the mask of environments that have it (None: all)."""
    if name in infos:
        return infos[name], infos.get(f"_{name}")
    first, _, rest = name.partition("/")
    if not rest or not isinstance(infos.get(first), Mapping):
        return None, None
    values, mask = _look_up_column(infos[first], rest)
    return values, infos.get(f"_{first}") if mask is None else mask


def _to_numbers(values: Any, mask: Any, name: str, dtype: np.dtype[Any], n: int) -> np.ndarray:
    """Converts the rows of n environments to a column of this dtype; rows outside the mask are NaN, 0 or False."""
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
