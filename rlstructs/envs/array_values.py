"""Values that environments return, of whatever library: as numpy arrays, copied or compared."""

from __future__ import annotations

import copy
import numbers
import sys
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np

# Immutable types; the most frequent ones first.
CONSTANTS = (float, int, np.generic, str, bytes, type(None), numbers.Number)


def as_numpy(value: Any) -> np.ndarray:
    """Converts a value to an array that shares its memory where possible.

    Takes tensors on any device, and tensors with gradients.

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
    """Copies a value that an environment may change later.

    As an array if it cannot be copied otherwise.
    """
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, CONSTANTS):
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # a memoryview, or a tensor computed with gradients
        return np.array(as_numpy(value))


def may_share_memory(values: Iterable[Any]) -> bool:
    """Whether any two of these values may overlap in memory.

    True also if that is unknown.
    """
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


def native_dtype(dtype: Any) -> np.dtype[Any]:
    """Returns the dtype in this machine's byte order.

    float64 for floats wider than 64 bits.
    """
    dtype = np.dtype(dtype)
    return np.dtype(np.float64) if dtype.kind == "f" and dtype.itemsize > 8 else dtype.newbyteorder("=")


def _is_tensor(value: Any) -> bool:
    # Workers of a `SharedVectorEnv` need not load torch; without it no value is a tensor.
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))
