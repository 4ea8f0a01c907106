"""Numbers that environments say in their infos, as columns of what they show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlstructs.checks import several
from rlstructs.errors import SpecError
from rlstructs.structures.arrays import Spec

# What the keys of these columns begin with.
PREFIX = "info/"
FINAL = "final_info"

InfoKeys = Sequence[str] | Mapping[str, Any]


class InfoColumns:
    """The columns `info/<key>`.

    Args:
        info_keys: names of infos, for float32; or a mapping from those to a dtype of numpy, torch or Python. `a/b` is
            entry `b` of the info `a`, if there is no info of that very name.

    Attributes:
        specs: key -> row shape and dtype.

    Raises:
        TypeError, SpecError: they are not what is needed.

    Example:
        >>> columns = InfoColumns({"is_success": bool, "episode/r": np.float32})
        >>> arrays = {key: np.zeros(2, dtype) for key, (_, dtype) in columns.specs.items()}
        >>> columns.write(arrays, 0, {"is_success": True}, 0)
        >>> columns.write(arrays, 1, {"episode": {"r": 2.5}}, 1)
        >>> {key: array.tolist() for key, array in arrays.items()}
        {'info/is_success': [True, False], 'info/episode/r': [nan, 2.5]}
    """

    def __init__(self, info_keys: InfoKeys = ()) -> None:
        dtypes = info_keys if isinstance(info_keys, Mapping) else dict.fromkeys(several("info_keys", info_keys), "f4")
        checked = {name: _dtype(name, dtype) for name, dtype in dtypes.items()}
        self._wanted = [(PREFIX + name, name, dtype) for name, dtype in checked.items()]
        self.specs: dict[str, Spec] = {key: ((), dtype) for key, _, dtype in self._wanted}

    def __bool__(self) -> bool:
        return bool(self._wanted)

    def write(self, arrays: Mapping[str, np.ndarray], row: int, info: Any, env: int) -> None:
        """Writes the info of environment `env` to a row: NaN, 0 or False for what it does not say."""
        if not isinstance(info, Mapping):
            raise SpecError(f"environment {env}: its info must be a dict, got {type(info).__name__}")
        for key, name, dtype in self._wanted:
            arrays[key][row] = _number(_found(info, name), name, dtype, env)

    def write_batch(self, arrays: Mapping[str, np.ndarray], infos: Any, at: Any = slice(None)) -> None:
        """Writes what a vector environment said of its environments.

        Args:
            arrays: of all columns, a row for each environment.
            infos: a dict of arrays, each with a mask `_<key>` of whom it is of (none: of all); or a dict for each.
            at: which rows are written.
        """
        n = len(arrays[self._wanted[0][0]])
        if not isinstance(infos, Mapping):
            for env in np.arange(n)[at].tolist():
                self.write(arrays, env, {} if infos is None or infos[env] is None else infos[env], env)
            return
        for key, name, dtype in self._wanted:
            arrays[key][at] = _numbers(*_column(infos, name), name, dtype, n)[at]


def final_infos(infos: Any) -> Any:
    """What a vector environment that resets in the same step said of steps that ended an episode; None if nothing."""
    return infos.get(FINAL) if isinstance(infos, Mapping) else None


def _dtype(name: Any, dtype: Any) -> np.dtype[Any]:
    if not isinstance(name, str) or not name:
        raise TypeError(f"info_keys: needs names, such as ['is_success'], got {name!r}")
    try:
        found = torch.empty(0, dtype=dtype).numpy().dtype if isinstance(dtype, torch.dtype) else np.dtype(dtype)
    except TypeError as error:
        raise TypeError(f"info_keys: {name!r} needs a dtype, such as np.float32, got {dtype!r}") from error
    if found.kind not in "biuf":
        raise SpecError(f"info_keys: {name!r} must be numbers or bools, got {found}")
    return found


def _found(info: Mapping[str, Any], name: str) -> Any:
    """What an info says under a name; None if it does not."""
    if name in info:
        return info[name]
    first, _, rest = name.partition("/")
    inner = info.get(first) if rest else None
    return _found(inner, rest) if isinstance(inner, Mapping) else None


def _number(value: Any, name: str, dtype: np.dtype[Any], env: int) -> Any:
    """A value as a number of this dtype."""
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


def _column(infos: Mapping[str, Any], name: str) -> tuple[Any, Any]:
    """The rows under a name, None if there are none, and the mask of whom they are of, None for all."""
    if name in infos:
        return infos[name], infos.get(f"_{name}")
    first, _, rest = name.partition("/")
    if not rest or not isinstance(infos.get(first), Mapping):
        return None, None
    values, mask = _column(infos[first], rest)
    return values, infos.get(f"_{first}") if mask is None else mask


def _numbers(values: Any, mask: Any, name: str, dtype: np.dtype[Any], n: int) -> np.ndarray:
    """A column of n environments, of rows and of whom they are."""
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
        found[env] = _number(given[env], name, dtype, env)
    return found
