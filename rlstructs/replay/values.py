"""Converts arrays of any library to numpy, and bfloat16, which numpy lacks, to its bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rlstructs.errors import SpecError
from rlstructs.replay.columns import Spec
from rlstructs.structures.arrays import tensor_to_array


def host_array(name: str, value: Any) -> np.ndarray:
    """Converts an array of any library to numpy, without a copy if possible; bfloat16 becomes float32.

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
    """Those values that need no conversion for their columns, as arrays: of numpy or torch, and of the same dtype."""
    found = {}
    for name, value in values.items():
        spec = specs.get(name)
        if isinstance(value, torch.Tensor):
            value = view_tensor(value)
        if type(value) is np.ndarray and spec is not None and value.dtype == spec.dtype and not spec.is_bfloat16:
            found[name] = value
    return found


def view_tensor(tensor: torch.Tensor) -> np.ndarray | None:
    """A tensor as an array over its memory; None if numpy cannot have it."""
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
    """Where one of these marks, (n, ...), is not zero, bool (n,)."""
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
    """Converts an array of real numbers of any library to float64, without a copy if it is that.

    Raises:
        SpecError: these are no real numbers.
    """
    array = host_array(name, value)
    if array.dtype.kind not in "biuf" and array.size:
        raise SpecError(f"{name} must hold numbers, got {array.dtype}")
    return array.astype(np.float64, copy=False)


def generator_of(seed: np.random.Generator | int | None) -> np.random.Generator:
    """Returns `seed` if it is a generator, or a new one with this seed; None seeds it from torch's global generator."""
    if isinstance(seed, np.random.Generator):
        return seed
    if seed is None:
        return np.random.default_rng(int(torch.randint(2**63 - 1, (), device="cpu")))
    if isinstance(seed, (bool, np.bool_)) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise SpecError(f"a seed must be a Generator or an int of at least 0, got {seed!r}")
    return np.random.default_rng(int(seed))


def encoded(name: str, values: Any, spec: Spec) -> Any:
    """Encodes numbers for a column of bfloat16 as bits; returns all others, and tensors, unchanged."""
    return values if not spec.is_bfloat16 or isinstance(values, torch.Tensor) else to_bits(name, values)


def as_whole(values: np.ndarray, spec: Spec) -> np.ndarray:
    """Converts floats to int64 for a column of integers or bools if they are whole numbers, as flags often are."""
    if values.dtype.kind != "f" or spec.is_bfloat16 or spec.dtype.kind not in "biu":
        return values
    wide = values.astype(np.float64)
    return values.astype(np.int64) if ((np.trunc(wide) == wide) & (np.abs(wide) <= 2**53)).all() else values


def cast_freely(values: np.ndarray, spec: Spec) -> np.ndarray:
    """Casts real numbers to the dtype of a column as torch's `copy_` does: cut off, wrapped, or infinite."""
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
