"""What users give to a buffer, as flat names and arrays."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from rlstructs.errors import SpecError
from rlstructs.replay.columns import Spec
from rlstructs.replay.values import encoded, host_array
from rlstructs.replay.widening import is_too_wide
from rlstructs.structures.tree import TensorMap

BFLOAT16 = np.dtype(np.int16)
# Dtypes of columns, as numpy writes them: of this machine's byte order, and no longer than other libraries have them.
PLAIN = frozenset(np.dtype(code).str for code in "?bhilqBHILQefdFD")
# numpy's kind -> what Python calls such numbers.
PYTHON: dict[str, type] = {"b": bool, "i": int, "u": int, "f": float}


def plain_items(batch: Mapping[str, Any]) -> dict[str, Any] | None:
    """As `flat_items`, of dicts in dicts, and the rest as it is; None if a key is no string, or given twice."""
    flat: dict[str, Any] = {}
    n = 0
    for key, value in batch.items():
        if type(key) is not str:
            return None
        if type(value) is dict:
            inside = plain_items(value)
            if inside is None:
                return None
            n += len(inside)
            for name, each in inside.items():
                flat[f"{key}/{name}"] = each
        else:
            n += 1
            flat[key] = value
    return flat if n == len(flat) else None


def flat_items(batch: Any, owner: str) -> dict[str, Any]:
    """A batch as one dict, nested names joined with `/`; the values as they are.

    A list or an array of mappings, as environments give their infos, is as one of arrays with a row for each; what some
    of them lack is zero there.

    Args:
        batch: a mapping, a `DictTensor`, or whatever has `keys` and `[]` as tensordict's and tianshou's have.
        owner: who asks, for messages.

    Raises:
        TypeError: it is nothing of these, or a key is no string.
        SpecError: two keys are the same once joined, or mappings of a list do not fit.
    """
    if isinstance(batch, TensorMap):
        return dict(batch.items())
    if not is_mapping(batch):
        raise TypeError(f"{owner}: needs a mapping of names to arrays, got {type(batch).__name__}")
    flat: dict[str, Any] = {}
    for key in batch.keys():  # noqa: SIM118 - not every batch iterates over its keys
        if not isinstance(key, str):
            raise TypeError(f"{owner}: a key must be a string, got {key!r}")
        value = batch[key]
        if is_mapping(value):
            inside = _prefixed(key, flat_items(value, owner))
        else:
            inside = _prefixed(key, _stacked(value, owner)) if are_mappings(value) else {key: value}
        if twice := flat.keys() & inside.keys():
            raise SpecError(f"{owner}: key {sorted(twice)[0]!r} is given twice")
        flat |= inside
    return flat


def is_mapping(value: Any) -> bool:
    """Whether it has keys."""
    return isinstance(value, (Mapping, TensorMap)) or (hasattr(value, "keys") and hasattr(value, "__getitem__"))


def are_mappings(value: Any) -> bool:
    """Whether it is a list, or an array of objects, each of which has keys."""
    is_array = type(value) is np.ndarray and value.dtype == object and value.ndim == 1
    return (is_array or type(value) in (list, tuple)) and len(value) > 0 and all(map(is_mapping, value))


def _stacked(values: Iterable[Any], owner: str) -> dict[str, Any]:
    """Mappings as one of arrays, with a row for each."""
    rows = [{k: v for k, v in flat_items(value, owner).items() if v is not None} for value in values]
    stacked = {}
    for name in dict.fromkeys(itertools.chain.from_iterable(rows)):
        arrays = {at: host_array(name, row[name]) for at, row in enumerate(rows) if name in row}
        absent = np.zeros_like(next(iter(arrays.values())))
        try:
            stacked[name] = np.stack([arrays.get(at, absent) for at in range(len(rows))])
        except ValueError as error:
            shapes = sorted({array.shape for array in arrays.values()})
            raise SpecError(f"{owner}: {name!r} has not the same shape in all rows, but {shapes}") from error
    return stacked


def _prefixed(key: str, inside: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{key}/{name}": value for name, value in inside.items()}


def as_rows(name: str, value: Any, spec: Spec | None) -> tuple[Any, Spec]:
    """A value as an array that a column takes but for a cast, and the spec of a column for it, without rows' shape.

    Args:
        name: of the column.
        value: any library's array, or numbers.
        spec: of the column, if it is there.

    Raises:
        SpecError: it is not made of numbers.
    """
    if type(value) is np.ndarray and value.dtype.str in PLAIN and not (spec and spec.is_bfloat16):
        return value, Spec(value.dtype)
    is_bfloat16 = "bfloat16" in str(getattr(value, "dtype", ""))
    array = host_array(name, value)
    if array.dtype.kind not in "biufc":
        raise SpecError(f"{name!r} holds {array.dtype}; a buffer keeps numbers only")
    if spec is None and is_too_wide(array.dtype):
        raise SpecError(f"{name!r} holds {array.dtype}, which only numpy has; convert it first")
    made = Spec(BFLOAT16, is_bfloat16=True) if is_bfloat16 else Spec(array.dtype.newbyteorder("="))
    return encoded(name, array, made if spec is None else spec), made


def spec_of(name: str, dtype: Any) -> Spec:
    """The spec of a column of single numbers.

    Args:
        name: of the column.
        dtype: what numpy takes for one, or torch's.

    Raises:
        SpecError: it is none, or none of numbers.
    """
    named = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    if named == "bfloat16" or getattr(dtype, "__name__", getattr(dtype, "name", "")) == "bfloat16":  # or jax's
        return Spec(BFLOAT16, is_bfloat16=True)
    try:
        found = None if named is None else np.dtype(named)
    except TypeError:
        found = None
    if found is None or found.kind not in "biufc" or is_too_wide(found):
        raise SpecError(f"{name!r} must have a dtype of numbers, got {dtype!r}")
    return Spec(found.newbyteorder("="))


class OneRow:
    """Makes arrays with one row of plain numbers and arrays, where a glance shows that they fit.

    Args:
        specs: of the columns.
        widening: of columns that widen: of those a number is only taken as it is if its kind holds it exactly.

    Example:
        >>> one_row = OneRow({"x": Spec(np.dtype(np.uint8))})
        >>> one_row({"x": 255}), one_row({"x": 256})
        ({'x': array([255], dtype=uint8)}, None)
    """

    def __init__(self, specs: Mapping[str, Spec], widening: Callable[[str], bool] = lambda name: False) -> None:
        # Of numpy's own objects: a dtype that was pickled is equal to one, but not the same.
        self._known = {
            name: (np.dtype(spec.dtype.str), _limits(spec, widening(name))) for name, spec in specs.items()
        }

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """name -> `(1, ...)`; None if it takes more than a glance."""
        rows = {}
        for name, value in row.items():
            if name not in self._known:
                return None
            array = _at_a_glance(value, *self._known[name])
            if array is None:
                return None
            rows[name] = array
        return rows


def _at_a_glance(value: Any, dtype: np.dtype, limits: Mapping[type, tuple[Any, Any]]) -> Any:
    # As nearly always; asking whether it is a tensor takes longer than all else.
    kind: Any = type(value)
    if issubclass(kind, (np.ndarray, np.generic)) and value.dtype is dtype:
        return value[None]
    if isinstance(value, torch.Tensor):
        return value[None]
    if isinstance(value, np.ndarray):
        if value.dtype is dtype:
            return value[None]
        between = limits.get(PYTHON.get(value.dtype.kind, object))
        fits = between and value.size and between[0] <= value.min().item() and value.max().item() <= between[1]
        return value.astype(dtype)[None] if fits else None
    if isinstance(value, np.generic):
        value = value.item()
    between = limits.get(type(value))
    fits = between and between[0] <= value <= between[1]  # not true of NaN
    return np.array([value], dtype) if fits else None


def _limits(spec: Spec, exactly: bool) -> dict[type, tuple[Any, Any]]:
    """Python's type -> between what its numbers certainly keep their value, and if `exactly` floats their precision."""
    kind, dtype = spec.dtype.kind, spec.dtype
    if kind == "c" or spec.is_bfloat16 or spec.is_object:
        return {}
    bits = {bool: (0, 1)}
    if kind == "b":
        return bits | {int: (0, 1)}
    if kind in "iu":
        return bits | {int: (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))}
    whole, largest = 2 ** (np.finfo(dtype).nmant + 1), float(np.finfo(dtype).max)
    limits: dict[type, tuple[Any, Any]] = {bool: (0, 1), int: (-whole, whole)}
    return limits if exactly and dtype.itemsize < 8 else {**limits, float: (-largest, largest)}
