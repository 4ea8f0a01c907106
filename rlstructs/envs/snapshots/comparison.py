"""Compares an environment with its copy: numbers, texts and arrays in all their attributes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from rlstructs.envs.snapshots.adapters import find_adapter

NUMBERS = (bool, int, float, complex, str, bytes, np.generic, np.ndarray, torch.Tensor)
# The most objects that are looked at.
MAX_OBJECTS = 100_000
MISSING = object()


def find_difference(own: Any, copy: Any) -> str | None:
    """Where a copy differs from its original in a number, text, array or random stream; None if nowhere.

    Functions, classes, objects that adapters save, and what neither has attributes nor entries, are not compared.
    """
    seen: dict[int, Any] = {}  # holds the objects, so that no other one gets their id
    queue: deque[tuple[str, Any, Any]] = deque([("", own, copy)])
    while queue and len(seen) < MAX_OBJECTS:
        path, one, other = queue.popleft()
        if isinstance(one, NUMBERS):
            if not _are_equal(one, other):
                return path.removeprefix(".") or type(one).__name__
            continue
        if id(one) in seen or other is MISSING or one is other:
            continue
        seen[id(one)] = one
        queue.extend(_pair_parts(path, one, other))
    return None


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two numbers, texts or arrays have the same type and the same bits, any NaN being equal to any other."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        one, other = one.detach().cpu(), other.detach().cpu()
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, (np.ndarray, np.generic)):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return one.dtype.hasobject or one.tobytes() == other.tobytes()
    return bool(one == other or one != one)


def _pair_parts(path: str, one: Any, other: Any) -> Iterator[tuple[str, Any, Any]]:
    """Pairs the parts of two objects, each with its path."""
    if isinstance(one, np.random.Generator):
        one, other = one.bit_generator.state, getattr(getattr(other, "bit_generator", None), "state", None)
    elif isinstance(one, np.random.RandomState) and isinstance(other, np.random.RandomState):
        one, other = one.get_state(), other.get_state()
    if isinstance(one, Mapping):
        for key in one:
            yield f"{path}[{key!r}]", one[key], _get(other, key)
    elif isinstance(one, (list, tuple, deque)):
        if not isinstance(other, type(one)) or len(one) != len(other):
            yield path, len(one), -1
            return
        yield from ((f"{path}[{at}]", *pair) for at, pair in enumerate(zip(one, other, strict=True)))
    elif not isinstance(one, type) and find_adapter(type(one)) is None:
        for name in _attributes(one):
            yield f"{path}.{name}", getattr(one, name, MISSING), getattr(other, name, MISSING)


def _attributes(thing: Any) -> Iterable[str]:
    slots = (name for kind in type(thing).__mro__ for name in _names(vars(kind).get("__slots__", ())))
    return {**getattr(thing, "__dict__", {}), **dict.fromkeys(name for name in slots if name[:2] != "__")}


def _names(slots: Any) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def _get(thing: Any, key: Any) -> Any:
    try:
        return thing[key]
    except (LookupError, TypeError):
        return MISSING
