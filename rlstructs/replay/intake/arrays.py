"""Converts arrays of any library to numpy, and bfloat16 to bits.

numpy lacks bfloat16.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from rlstructs.errors import SpecError
from rlstructs.replay.rows.spec import Spec, is_too_wide
from rlstructs.structures.arrays import tensor_to_array
from rlstructs.structures.tree import TensorMap


def host_array(name: str, value: Any) -> np.ndarray:
    """Converts an array of any library to numpy, without a copy if possible.

    bfloat16 becomes float32.

    Raises:
        SpecError: it is no array, or numpy lacks its dtype or layout.
    """
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, torch.Tensor):
        array = view_tensor(value)  # as nearly always
        if array is None:
            array = tensor_to_array(name, value.float() if value.dtype is torch.bfloat16 else value)
        return array
    if hasattr(value, "numpy") and not hasattr(value, "__array__"):  # a warp array
        value = value.numpy()
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise SpecError(f"{name!r} must be an array, got {type(value).__name__}: {error}") from error
    is_bfloat16 = array.dtype.kind == "V" and array.dtype.name == "bfloat16"  # looking up the name is slow
    return np.asarray(array, np.float32) if is_bfloat16 else array


def host_arrays(values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Calls `host_array` for values by name."""
    return {name: host_array(name, value) for name, value in values.items()}


def ready_arrays(values: Mapping[str, Any], specs: Mapping[str, Spec]) -> dict[str, np.ndarray]:
    """Selects the values that need no conversion for their columns.

    These are arrays of numpy or torch with the column's dtype; all are returned as numpy arrays.
    """
    found = {}
    for name, value in values.items():
        spec = specs.get(name)
        if isinstance(value, torch.Tensor):
            value = view_tensor(value)
        if type(value) is np.ndarray and spec is not None and value.dtype == spec.dtype and not spec.is_bfloat16:
            found[name] = value
    return found


def view_tensor(tensor: torch.Tensor) -> np.ndarray | None:
    """Views a tensor as an array; None if numpy cannot have it."""
    try:
        array: np.ndarray = tensor.numpy()
    except (RuntimeError, TypeError):
        return None
    return array


def find_marks(columns: Mapping[str, Any], n_lead: int = 2) -> np.ndarray | None:
    """Finds the rows in which one of these columns is not zero.

    Returns:
        bool, of the first `n_lead` axes of the columns; None if there are no columns.
    """
    marks = []
    for name, values in columns.items():
        if isinstance(values, torch.Tensor) and not values.is_cpu:
            values = values != 0  # on the device, because bools are smaller to copy
        mark = host_array(name, values) != 0
        marks.append(mark.any(axis=tuple(range(n_lead, mark.ndim))))
    return np.asarray(np.logical_or.reduce(marks)) if marks else None


def any_marks(ended: list[np.ndarray]) -> np.ndarray:
    """Marks rows in which a mark, (n, ...), is not zero, bool (n,)."""
    done: Any = None
    for mark in ended:
        flags: Any = mark if mark.dtype == bool else mark != 0
        flags = flags.reshape(-1) if flags.size == len(flags) else flags.reshape(len(flags), -1).any(axis=1)
        done = flags if done is None else done | flags
    return np.asarray(done)


def row_ids(indexes: Any, n_rows: int) -> np.ndarray:
    """Converts what a program gives as row ids to int64, with the same shape.

    Raises:
        SpecError: they are no integers.
        IndexError: one is not in [0, n_rows).
    """
    rows = host_array("index", indexes)
    if rows.size and rows.dtype.kind not in "iu":
        raise SpecError(f"index must hold integers, got {rows.dtype}")
    if rows.size and (rows.min() < 0 or rows.max() >= n_rows):
        raise IndexError(f"index {rows[(rows < 0) | (rows >= n_rows)][0]} is not in [0, {n_rows})")
    return rows.astype(np.int64)


def real_numbers(name: str, value: Any) -> np.ndarray:
    """Converts an array of real numbers of any library to float64.

    An array that is float64 already is not copied.

    Raises:
        SpecError: these are no real numbers.
    """
    array = host_array(name, value)
    if array.dtype.kind not in "biuf" and array.size:
        raise SpecError(f"{name} must hold numbers, got {array.dtype}")
    return array.astype(np.float64, copy=False)


def generator_of(seed: np.random.Generator | int | None) -> np.random.Generator:
    """Returns `seed` if it is a generator, or a new one with this seed.

    None draws a seed from torch's global generator.
    """
    if isinstance(seed, np.random.Generator):
        return seed
    if seed is None:
        return np.random.default_rng(int(torch.randint(2**63 - 1, (), device="cpu")))
    if isinstance(seed, (bool, np.bool_)) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise SpecError(f"a seed must be a Generator or an int of at least 0, got {seed!r}")
    return np.random.default_rng(int(seed))


def encoded(name: str, values: Any, spec: Spec) -> Any:
    """Encodes numbers for a column of bfloat16 as bits.

    Values of other columns, and tensors, are returned unchanged.
    """
    return values if not spec.is_bfloat16 or isinstance(values, torch.Tensor) else to_bits(name, values)


def as_whole(values: np.ndarray, spec: Spec) -> np.ndarray:
    """Converts floats to int64 if all of them are whole numbers.

    Only for a column of integers or bools: flags are often floats. Other values are returned unchanged.
    """
    if values.dtype.kind != "f" or spec.is_bfloat16 or spec.dtype.kind not in "biu":
        return values
    wide = values.astype(np.float64)
    return values.astype(np.int64) if ((np.trunc(wide) == wide) & (np.abs(wide) <= 2**53)).all() else values


def cast_freely(values: np.ndarray, spec: Spec) -> np.ndarray:
    """Casts real numbers to a column's dtype as torch's `copy_` does.

    They may be cut off, wrapped, or become infinite.
    """
    kind = spec.dtype.kind
    if spec.is_bfloat16 or values.dtype == spec.dtype or values.dtype.kind not in "biuf":
        return values
    if kind == "b":
        return np.asarray(values != 0)
    with np.errstate(over="ignore", invalid="ignore"):
        if kind in "iu" and values.dtype.kind == "f":
            values = values.astype(np.int64)
        return values.astype(spec.dtype)


def from_bits(values: np.ndarray) -> np.ndarray:
    """Decodes the bits of bfloat16 to float32."""
    numbers: np.ndarray = torch.from_numpy(values).view(torch.bfloat16).float().numpy()
    return numbers


def to_bits(name: str, values: np.ndarray) -> np.ndarray:
    """Encodes numbers as the bits of bfloat16."""
    if values.dtype.kind not in "biuf":
        raise SpecError(f"{name!r} is {values.dtype}, which would lose its values as bfloat16; convert it first")
    bits: np.ndarray = torch.from_numpy(values.astype(np.float32)).bfloat16().view(torch.int16).numpy()
    return bits


BFLOAT16 = np.dtype(np.int16)
# Dtypes of columns, as numpy writes them: in this machine's byte order, and those that other libraries have too.
PLAIN = frozenset(np.dtype(code).str for code in "?bhilqBHILQefdFD")
# Numbers of numpy, or arrays that may hold one.
NUMBERS = (np.generic, np.ndarray)


def plain_items(batch: Any) -> dict[str, Any] | None:
    """Flattens a batch quickly if nothing needs conversion.

    None if only `flat_items` can do it: a key is not a string or is given twice, or there are lists or arrays of
    mappings.
    """
    flat: dict[str, Any] = {}
    items = getattr(batch, "items", None)
    for key, value in items() if callable(items) else [(key, batch[key]) for key in batch.keys()]:  # noqa: SIM118
        kind = type(value)
        if type(key) is not str or key in flat:
            return None
        if kind is np.ndarray or kind is torch.Tensor:  # first, as nearly all are
            if kind is np.ndarray and value.dtype == object and are_mappings(value):
                return None
            flat[key] = value
        elif kind is dict or is_mapping(value):
            inside = plain_items(value)
            if inside is None:
                return None
            for name, each in inside.items():
                if f"{key}/{name}" in flat:
                    return None
                flat[f"{key}/{name}"] = each
        elif are_mappings(value):
            return None
        else:
            flat[key] = value
    return flat


def flat_items(batch: Any, owner: str) -> dict[str, Any]:
    """Flattens a batch to one dict, nested names joined with `/`.

    Values are returned as they are. A list or an array of mappings, such as the infos of environments, becomes arrays
    with a row for each mapping, zero where a mapping lacks the key.

    Args:
        batch: a mapping, a `DictTensor`, or any object with `keys` and `[]`, such as tensordict's and tianshou's.
        owner: caller, for messages.

    Raises:
        TypeError: it is none of these, or a key is no string.
        SpecError: two keys are the same once joined, or the mappings of a list differ in shape.
    """
    if isinstance(batch, TensorMap):
        return dict(batch.items())
    if not is_mapping(batch):
        raise TypeError(f"{owner}: needs a mapping of names to arrays, got {type(batch).__name__}")
    plain = plain_items(batch)
    if plain is not None:
        return plain
    flat: dict[str, Any] = {}
    for key in batch.keys():  # noqa: SIM118 - not every batch iterates over its keys
        if not isinstance(key, str):
            raise TypeError(f"{owner}: a key must be a string, got {key!r}")
        value = batch[key]
        value = _stacked(value, owner) if are_mappings(value) else value
        inside = _prefixed(key, flat_items(value, owner)) if is_mapping(value) else {key: value}
        if twice := flat.keys() & inside.keys():
            raise SpecError(f"{owner}: key {sorted(twice)[0]!r} is given twice")
        flat |= inside
    return flat


def is_mapping(value: Any) -> bool:
    """Whether a value has keys."""
    return isinstance(value, (Mapping, TensorMap)) or (hasattr(value, "keys") and hasattr(value, "__getitem__"))


def are_mappings(value: Any) -> bool:
    """Whether a value is a list or an array of mappings."""
    is_array = type(value) is np.ndarray and value.dtype == object and value.ndim == 1
    return (is_array or type(value) in (list, tuple)) and len(value) > 0 and all(map(is_mapping, value))


def _stacked(values: Iterable[Any], owner: str) -> dict[str, Any]:
    """Stacks mappings to arrays, with a row for each mapping."""
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
    """Converts a value to an array that a column can take after a cast.

    Args:
        name: of the column.
        value: an array of any library, or numbers.
        spec: of the column; None if it does not exist yet.

    Returns:
        The array, and the spec of a new column for it, with the shape ().

    Raises:
        SpecError: it does not consist of numbers.
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
    """Returns the spec of a column of single numbers.

    Args:
        name: of the column.
        dtype: of torch, or anything that numpy takes for a dtype.

    Raises:
        SpecError: it is no dtype of numbers.
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


def is_number_of(dtype: np.dtype, value: Any, limits: Mapping[type, tuple[Any, Any]]) -> bool:
    """Whether a column of this dtype takes a number as it is.

    `limits` are those of `number_limits`.
    """
    if isinstance(value, NUMBERS):
        if value.ndim or value.dtype is dtype:
            return not value.ndim
        value = value.item()
    between = limits.get(type(value))
    return between is not None and bool(between[0] <= value <= between[1])  # not true of NaN


def number_limits(spec: Spec, exactly: bool) -> dict[type, tuple[Any, Any]]:
    """Returns the range that a column holds, for each Python type.

    With `exactly`, floats count only if they are not rounded.
    """
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
