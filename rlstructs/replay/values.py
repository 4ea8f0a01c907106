"""What users give as arrays, of whatever library, as numpy's; and bfloat16, which numpy has not, as its bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlstructs.errors import SpecError
from rlstructs.replay.columns import Spec
from rlstructs.structures.arrays import as_array


def host_array(name: str, value: Any) -> np.ndarray:
    """What any library calls an array as numpy's, without a copy where that can be; bfloat16 as float32.

    Raises:
        SpecError: it is none, or one that numpy cannot have.
    """
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, torch.Tensor):
        try:
            return as_array(value.float() if value.dtype is torch.bfloat16 else value)
        except TypeError as error:  # sparse, or of 8-bit floats
            why = f"{str(value.dtype).removeprefix('torch.')}, {error}"
            raise SpecError(f"{name!r} is a tensor that numpy cannot have; convert it first: {why}") from error
    if hasattr(value, "numpy") and not hasattr(value, "__array__"):  # a warp array
        value = value.numpy()
    try:
        array: np.ndarray = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise SpecError(f"{name!r} must be an array, got {type(value).__name__}: {error}") from error
    return np.asarray(array, np.float32) if array.dtype.name == "bfloat16" else array


def real_numbers(name: str, value: Any) -> np.ndarray:
    """The same, float64.

    Raises:
        SpecError: they are no real numbers.
    """
    array = host_array(name, value)
    if array.dtype.kind not in "biuf" and array.size:
        raise SpecError(f"{name} must hold numbers, got {array.dtype}")
    return array.astype(np.float64)


def generator_of(seed: np.random.Generator | int | None) -> np.random.Generator:
    """A generator: `seed` itself, one with this seed, or one seeded from torch's global generator."""
    if isinstance(seed, np.random.Generator):
        return seed
    if seed is None:
        return np.random.default_rng(int(torch.randint(2**63 - 1, (), device="cpu")))
    if isinstance(seed, (bool, np.bool_)) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise SpecError(f"a seed must be a Generator or an int of at least 0, got {seed!r}")
    return np.random.default_rng(int(seed))


def encoded(name: str, values: Any, spec: Spec) -> Any:
    """Numbers as a column holds them, but for a cast; tensors that it takes are as they should be."""
    return values if not spec.is_bfloat16 or isinstance(values, torch.Tensor) else to_bits(name, values)


def as_whole(values: np.ndarray, spec: Spec) -> np.ndarray:
    """Values for a column of whole numbers as such, where they are floats that lose nothing by it, as flags often."""
    if values.dtype.kind != "f" or spec.is_bfloat16 or spec.dtype.kind not in "biu":
        return values
    wide = values.astype(np.float64)
    return values.astype(np.int64) if ((np.trunc(wide) == wide) & (np.abs(wide) <= 2**53)).all() else values


def from_bits(values: np.ndarray) -> np.ndarray:
    """The bits of bfloat16 as float32."""
    numbers: np.ndarray = torch.from_numpy(values).view(torch.bfloat16).float().numpy()
    return numbers


def to_bits(name: str, values: np.ndarray) -> np.ndarray:
    """Numbers as the bits of bfloat16."""
    if values.dtype.kind not in "biuf":
        raise SpecError(f"{name!r} is {values.dtype}, which would lose its values as bfloat16; convert it first")
    bits: np.ndarray = torch.from_numpy(values.astype(np.float32)).bfloat16().view(torch.int16).numpy()
    return bits
