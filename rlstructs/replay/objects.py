"""Columns of Python objects, one per row, for what is no number.

Containers and arrays are copied when they are stored and when they are read: a list that an environment keeps appending
to is stored as it was at each step. Other objects are kept by reference.
"""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

OBJECT = np.dtype(object)
# Immutable types, whose values need no copy.
IMMUTABLE = frozenset([type(None), bool, int, float, complex, str, bytes])


class ObjectBlock:
    """One object per row; pickled by value.

    Args:
        n_rows: number of rows, which hold None at first.
    """

    def __init__(self, n_rows: int) -> None:
        self.values = np.full(n_rows, None, object)

    def bytes(self) -> np.ndarray:
        """Raises TypeError: objects have no bytes."""
        raise TypeError("a column of objects has no bytes")

    def __deepcopy__(self, memo: dict[int, Any]) -> ObjectBlock:
        made = memo[id(self)] = type(self).__new__(type(self))
        made.values = private_rows(self.values)
        return made


def private(value: Any) -> Any:
    """Copies a container or an array, and all those in it; returns other objects unchanged."""
    kind = type(value)
    if kind in IMMUTABLE:
        return value
    if kind is np.ndarray:
        return private_rows(value) if value.dtype == object else value.copy()
    if kind in (list, tuple):
        return kind(private(each) for each in value)
    if kind is deque:
        return deque(map(private, value), value.maxlen)
    if kind in (set, bytearray):
        return kind(value)
    if isinstance(value, Mapping):
        return {key: private(each) for key, each in value.items()}
    return value.detach().clone() if _is_tensor(value) else value


def _is_tensor(value: Any) -> bool:
    """Whether it is a tensor of torch, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def private_rows(values: np.ndarray) -> np.ndarray:
    """Copies an array of objects by `private`; objects that contain themselves are deep-copied."""
    found = np.empty(values.shape, object)
    flat = found.reshape(-1)  # a view
    for at, value in enumerate(values.flat):
        try:
            flat[at] = value if type(value) in IMMUTABLE else private(value)
        except RecursionError:
            flat[at] = copy.deepcopy(value)
    return found


def as_object(value: Any) -> Any:
    """Converts a value of an info: tensors to arrays, numpy's scalars and arrays without axes to Python's numbers."""
    if _is_tensor(value) or (hasattr(value, "__array__") and hasattr(value, "ndim")):
        value = _host(value)
    if isinstance(value, np.ndarray) and not value.ndim:
        value = value[()]
    if isinstance(value, np.generic):
        plain = value.item()
        return value if isinstance(plain, np.generic) or value.dtype.kind in "mM" else plain
    return value


def _host(value: Any) -> Any:
    """Converts an array of any library to numpy; returns it unchanged if numpy lacks its dtype."""
    try:
        if _is_tensor(value):
            value = value.detach().cpu()
            is_short = value.is_floating_point() and value.element_size() < 4 and str(value.dtype) != "torch.float16"
            return (value.float() if is_short else value).numpy()
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        return value


def objects_of(values: Iterable[Any]) -> np.ndarray:
    """Copies values into an array of objects, (n,)."""
    listed = list(values)
    found = np.empty(len(listed), object)
    for at, value in enumerate(listed):
        found[at] = value if type(value) in IMMUTABLE else as_object(value)
    return private_rows(found)


def objects_in(values: Any, n_lead: int) -> np.ndarray:
    """Splits an array by its first `n_lead` axes into an array of objects of that shape."""
    values = _host(values)
    lead = values.shape[:n_lead]
    flat = values.reshape(int(np.prod(lead)), *values.shape[n_lead:])
    if flat.ndim == 1 and _is_python(flat.dtype):
        flat = flat.tolist()
    return objects_of(flat).reshape(lead)


def _is_python(dtype: np.dtype) -> bool:
    """Whether Python has such values."""
    return dtype.kind in "biufcUS" and (dtype.kind in "US" or dtype.itemsize <= (16 if dtype.kind == "c" else 8))
