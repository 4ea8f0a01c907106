"""What is no number in the rows of a column: kept as Python's objects, each row one.

What goes in and what comes out shares no container and no array with anybody: a list that an environment
lets grow is in each row what it was then. Objects of other kinds are kept as they are, by reference.
"""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

OBJECT = np.dtype(object)
# What nobody can change.
IMMUTABLE = frozenset([type(None), bool, int, float, complex, str, bytes])


class ObjectBlock:
    """Room for one object in each row; pickled by value.

    Args:
        n_rows: how many rows; each holds None at first.
    """

    def __init__(self, n_rows: int) -> None:
        self.values = np.full(n_rows, None, object)

    def bytes(self) -> np.ndarray:
        """Raises TypeError: objects are no bytes."""
        raise TypeError("a column of objects lies in no bytes")

    def __deepcopy__(self, memo: dict[int, Any]) -> ObjectBlock:
        made = memo[id(self)] = type(self).__new__(type(self))
        made.values = private_rows(self.values)
        return made


def private(value: Any) -> Any:
    """A copy of a container or an array, and of all those in it; anything else as it is."""
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
    """Whether it is one of torch, which is loaded if there is one."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def private_rows(values: np.ndarray) -> np.ndarray:
    """An array of objects, each of them `private`; those that hold themselves are deep-copied."""
    found = np.empty(values.shape, object)
    flat = found.reshape(-1)  # a view: it is new
    for at, value in enumerate(values.flat):
        try:
            flat[at] = value if type(value) in IMMUTABLE else private(value)
        except RecursionError:
            flat[at] = copy.deepcopy(value)
    return found


def as_object(value: Any) -> Any:
    """A value of an info as a row keeps it: numpy's scalars and arrays without axes are Python's, tensors arrays."""
    if _is_tensor(value) or (hasattr(value, "__array__") and hasattr(value, "ndim")):
        value = _host(value)
    if isinstance(value, np.ndarray) and not value.ndim:
        value = value[()]
    if isinstance(value, np.generic):
        plain = value.item()
        return value if isinstance(plain, np.generic) or value.dtype.kind in "mM" else plain
    return value


def _host(value: Any) -> Any:
    """An array of any library as numpy's; as it is where numpy cannot have it."""
    try:
        if _is_tensor(value):
            value = value.detach().cpu()
            is_short = value.is_floating_point() and value.element_size() < 4 and str(value.dtype) != "torch.float16"
            return (value.float() if is_short else value).numpy()
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        return value


def objects_of(values: Iterable[Any]) -> np.ndarray:
    """Values as a column of objects, (n,): copies."""
    listed = list(values)
    found = np.empty(len(listed), object)
    for at, value in enumerate(listed):
        found[at] = as_object(value)
    return private_rows(found)


def objects_in(values: Any, n_lead: int) -> np.ndarray:
    """An array whose first axes are those of rows as objects of that shape, each what is behind those axes."""
    values = _host(values)
    lead = values.shape[:n_lead]
    flat = values.reshape(int(np.prod(lead)), *values.shape[n_lead:])
    if flat.ndim == 1:  # as Python has its numbers, if it has them
        return objects_of(flat if flat.dtype == object else flat.tolist() if _is_python(flat.dtype) else flat).reshape(
            lead
        )
    return objects_of(flat).reshape(lead)


def _is_python(dtype: np.dtype) -> bool:
    return dtype.kind in "bUS" or (dtype.kind in "iufc" and dtype.itemsize <= (16 if dtype.kind == "c" else 8))
