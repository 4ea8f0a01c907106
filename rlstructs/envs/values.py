"""Values that environments give, of whatever library: as numpy's, and copied."""

from __future__ import annotations

import copy
import numbers
import sys
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np

# What cannot change; the most frequent ones first.
CONSTANTS = (float, int, np.generic, str, bytes, type(None), numbers.Number)


def as_numpy(value: Any) -> np.ndarray:
    """A value as an array, which shares its memory where that can be: tensors on any device and with gradients too.

    Raises:
        Exception: what numpy or the value's own library raises if it is no array.
    """
    if type(value) is np.ndarray:
        return value
    if _is_tensor(value):
        tensor = value.detach().cpu().resolve_conj().resolve_neg()
        return np.asarray((tensor.float() if tensor.dtype is sys.modules["torch"].bfloat16 else tensor).numpy())
    if hasattr(value, "numpy") and not hasattr(value, "__array__"):  # a warp array
        value = value.numpy()
    return np.asarray(value)


def copy_value(value: Any) -> Any:
    """A copy of a value that an environment may change; where it cannot be copied, an array of its numbers."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, CONSTANTS):
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # a memoryview, a tensor that has been computed with gradients
        return np.array(as_numpy(value))


def share_memory(values: Iterable[Any]) -> bool:
    """Whether two of these may lie, in part, in the same memory: also if what they lie in cannot be seen."""
    arrays, places = [], []
    for value in values:
        if isinstance(value, CONSTANTS):
            continue
        if isinstance(value, memoryview) or hasattr(value, "__array__"):
            arrays.append(as_numpy(value))
        elif not isinstance(value, (list, tuple)) or not all(isinstance(number, CONSTANTS) for number in value):
            return True
        places.append(id(value))
    arrays.sort(key=lambda array: int(array.__array_interface__["data"][0]))
    return len(set(places)) < len(places) or any(np.may_share_memory(*two) for two in pairwise(arrays))


def native(dtype: Any) -> np.dtype[Any]:
    """The dtype in this machine's byte order; of floats that are wider than 64 bits, float64."""
    dtype = np.dtype(dtype)
    return np.dtype(np.float64) if dtype.kind == "f" and dtype.itemsize > 8 else dtype.newbyteorder("=")


def _is_tensor(value: Any) -> bool:
    # Workers of a `SharedVectorEnv` need no torch, and what is not imported has made nothing.
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))
