"""What users give to a buffer, as flat names and arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlstructs.errors import SpecError
from rlstructs.replay.columns import Spec
from rlstructs.replay.values import encoded, host_array
from rlstructs.structures.base import TensorMap

BFLOAT16 = np.dtype(np.int16)


def flat_items(batch: Any, owner: str) -> dict[str, Any]:
    """A batch as one dict, nested names joined with `/`; the values as they are.

    Args:
        batch: a mapping, a `DictTensor`, or whatever has `keys` and `[]` as tensordict's and tianshou's have.
        owner: who asks, for messages.

    Raises:
        TypeError: it is nothing of these, or a key is no string.
        SpecError: two keys are the same once joined.
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
        inside = {key: value} if not is_mapping(value) else _prefixed(key, flat_items(value, owner))
        if twice := flat.keys() & inside.keys():
            raise SpecError(f"{owner}: key {sorted(twice)[0]!r} is given twice")
        flat |= inside
    return flat


def is_mapping(value: Any) -> bool:
    """Whether it has keys."""
    return isinstance(value, (Mapping, TensorMap)) or (hasattr(value, "keys") and hasattr(value, "__getitem__"))


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
    if type(value) is np.ndarray and value.dtype.kind in "biufc" and not (spec and spec.is_bfloat16):
        return value, Spec(value.dtype)
    is_bfloat16 = "bfloat16" in str(getattr(value, "dtype", ""))
    array = host_array(name, value)
    if array.dtype.kind not in "biufc":
        raise SpecError(f"{name!r} holds {array.dtype}; a buffer keeps numbers only")
    made = Spec(BFLOAT16, is_bfloat16=True) if is_bfloat16 else Spec(array.dtype.newbyteorder("="))
    return encoded(name, array, made if spec is None else spec), made
