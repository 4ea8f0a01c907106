"""Columns of Python objects, one per row, for values that are not numbers.

Containers and arrays are copied when they are stored and when they are read: a list that an environment keeps appending
to is stored as it was at each step. Other objects are kept by reference.

Objects are converted to JSON and back for files: plain values of Python, and arrays of numbers.

    None, bool, int, float, str        unchanged
    [...]                              a list
    {"dict": {...}}                    a dict of strings
    {"tuple": [...]}                   a tuple
    {"complex": [re, im]}              a complex number
    {"bytes": "..."}                   bytes, base64
    {"array": [dtype, shape, "..."]}   an array of numbers, its bytes base64
    {"objects": [shape, [...]]}        an array of objects

Nothing else is written or read. Reading calls nothing that a file names.
"""

from __future__ import annotations

import base64
import copy
import json
import math
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from rlstructs.errors import FileError, SpecError

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
    """Copies a container or an array; returns other objects unchanged.

    Containers and arrays inside it are copied, too.
    """
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
    """Whether a value is a torch tensor, without importing torch."""
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
    """Converts a value of an info to plain Python or numpy.

    Tensors become arrays; numpy's scalars and arrays without axes become Python's numbers.
    """
    if _is_tensor(value) or (hasattr(value, "__array__") and hasattr(value, "ndim")):
        value = _host(value)
    if isinstance(value, np.ndarray) and not value.ndim:
        value = value[()]
    if isinstance(value, np.generic):
        plain = value.item()
        return value if isinstance(plain, np.generic) or value.dtype.kind in "mM" else plain
    return value


def _host(value: Any) -> Any:
    """Converts an array of any library to numpy.

    It is returned unchanged if numpy lacks its dtype.
    """
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
    """Splits an array by its first `n_lead` axes.

    Returns an array of objects of the shape of these axes.
    """
    values = _host(values)
    lead = values.shape[:n_lead]
    flat = values.reshape(int(np.prod(lead)), *values.shape[n_lead:])
    if flat.ndim == 1 and _is_python(flat.dtype):
        flat = flat.tolist()
    return objects_of(flat).reshape(lead)


def _is_python(dtype: np.dtype) -> bool:
    """Whether Python has values of this dtype."""
    return dtype.kind in "biufcUS" and (dtype.kind in "US" or dtype.itemsize <= (16 if dtype.kind == "c" else 8))


KINDS = "biufc"
# The most digits of an int: parsing takes time in proportion to their square.
LONGEST_NUMBER = 4300
# The most bytes in memory per comma and bracket of a text.
PER_VALUE = 128


class _Unfit(Exception):
    """A file cannot hold this value."""


def to_json(name: str, values: np.ndarray) -> np.ndarray:
    """Converts a column of objects to a text, uint8 (n,).

    Args:
        name: of the column.
        values: objects.

    Raises:
        SpecError: a file cannot hold one of them.
    """
    plain = []
    for value in values.flat:
        try:
            plain.append(_plain(value))
        except (_Unfit, RecursionError) as error:
            what = "an object that contains itself" if isinstance(error, RecursionError) else str(error)
            raise SpecError(
                f"save: {name!r} holds {what}, which a file cannot: it holds numbers, text, None, arrays, and lists, "
                "tuples and dicts of them; leave this key out of the infos, or pickle the buffer"
            ) from None
    text = json.dumps(plain, separators=(",", ":")).encode()
    return np.frombuffer(bytearray(text), np.uint8)


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind is int and value.bit_length() > 3 * LONGEST_NUMBER:
        raise _Unfit(f"a number of {value.bit_length():,} bits")
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_plain(each) for each in value]
    if kind is tuple:
        return {"tuple": [_plain(each) for each in value]}
    if kind is dict:
        if wrong := [key for key in value if type(key) is not str]:
            raise _Unfit(f"a dict with the key {wrong[0]!r}, which is not a string")
        return {"dict": {key: _plain(each) for key, each in value.items()}}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind is np.ndarray:
        return _plain_array(value)
    raise _Unfit(f"a {kind.__module__}.{kind.__qualname__}")


def _plain_array(array: np.ndarray) -> dict[str, Any]:
    if array.dtype == object:
        return {"objects": [list(array.shape), [_plain(each) for each in array.flat]]}
    if array.dtype.kind not in KINDS:
        raise _Unfit(f"an array of {array.dtype}")
    host = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return {"array": [host.dtype.str, list(array.shape), base64.b64encode(host.tobytes()).decode()]}


def nbytes_of(text: np.ndarray) -> int:
    """Returns the most bytes that a text's values take in memory."""
    return int(text.size + PER_VALUE * np.isin(text, np.frombuffer(b",[{", np.uint8)).sum())


def from_json(name: str, text: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Converts a text of `to_json` to an array of objects.

    Raises:
        FileError, ValueError: the text is not one of `to_json`, or of an array of another size.
    """
    values = json.loads(text.tobytes(), parse_int=_whole)
    if not isinstance(values, list) or len(values) != math.prod(shape):
        raise FileError(f"column {name!r} has not one object for each of its {math.prod(shape)} rows")
    return _objects(shape, values)


def _whole(digits: str) -> int:
    if len(digits) > LONGEST_NUMBER:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(each) for each in plain]
    if not isinstance(plain, dict):
        return plain
    [(tag, inside)] = plain.items()
    if tag == "dict":
        return {key: _value(each) for key, each in dict(inside).items()}
    if tag == "tuple":
        return tuple(_value(list(inside)))
    if tag == "complex":
        return complex(*map(float, inside))
    if tag == "bytes":
        return base64.b64decode(inside, validate=True)
    if tag == "array":
        return _array(*inside)
    if tag == "objects":
        return _objects(*inside)
    raise ValueError(f"there are no objects of the kind {tag!r}")


def _array(dtype: str, shape: Any, data: str) -> np.ndarray:
    kind = np.dtype(str(dtype))
    if kind.kind not in KINDS:
        raise ValueError(f"there are no arrays of {dtype!r}")
    flat = np.frombuffer(base64.b64decode(data, validate=True), kind)
    return flat.reshape(_sizes(shape)).astype(kind.newbyteorder("="))


def _objects(shape: Any, values: Any) -> np.ndarray:
    found = np.empty(len(values), object)
    for at, value in enumerate(list(values)):
        found[at] = _value(value)
    return found.reshape(_sizes(shape))


def _sizes(shape: Any) -> tuple[int, ...]:
    sizes = tuple(shape)
    if any(type(n) is not int or n < 0 for n in sizes):
        raise ValueError(f"there are no arrays of shape {sizes}")
    return sizes
