"""gymnasium spaces as flat columns: one for each Box, Discrete, MultiDiscrete or MultiBinary.

The keys of nested Dict and Tuple spaces are joined with `/`; the entries of a Tuple are called 0, 1, ...
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rlstructs.checks import can_hold
from rlstructs.envs.array_values import as_numpy, native_dtype
from rlstructs.envs.space_tree import SpaceLeaf, flatten_space
from rlstructs.errors import SpecError

# Up to so many columns, copying one column at a time is faster.
FEW = 16


@dataclass(frozen=True)
class Leaf(SpaceLeaf):
    """A leaf of a space, and the column that keeps its values.

    Attributes:
        key: its name, the path joined with `/`; "" when the outermost space itself is the leaf.
        dtype: of the column.
    """

    key: str
    dtype: np.dtype[Any]

    @property
    def name(self) -> str:
        """The key in an observation: `frame` when the space itself is the leaf. (An entry may be called "".)"""
        return self.key if self.path else "frame"

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a row of observations: a Discrete one has a feature axis."""
        return (1,) if isinstance(self.space, spaces.Discrete) else self.shape

    def read(self, name: str, observation: Any, shape: tuple[int, ...]) -> np.ndarray:
        """Reads this leaf of an observation as numbers that the column can hold.

        Raises:
            SpecError: it is not in the space; the message begins with `name`.
        """
        try:
            got = as_numpy(self.pick(observation))
        except (TypeError, ValueError, LookupError, RuntimeError) as error:
            raise SpecError(f"{name} cannot be read: {error!r}") from error
        if got.shape != shape and not got.size == math.prod(shape) == 1:
            raise SpecError(f"{name} has shape {got.shape}, the space says {shape}")
        if got.dtype.kind not in "biuf" or not can_hold(self.dtype, got):
            raise SpecError(f"{name} has dtype {got.dtype}, and values that the space's {self.dtype} cannot hold")
        return got.reshape(shape)


def list_leaves(space: gymnasium.Space[Any], what: str, keep_float64: bool = False) -> list[Leaf]:
    """Lists the leaves of a space with their keys and dtypes.

    Raises:
        SpecError: a leaf is of an unsupported kind, the space has no entries, or two entries have the same key;
            the message names it.
    """
    found: dict[str, Leaf] = {}
    for space_leaf in flatten_space(space):
        leaf = _column_leaf(space_leaf, what, keep_float64)
        if leaf.key in found:
            raise SpecError(f"{what}: two entries of space {space} are called {leaf.key!r}")
        found[leaf.key] = leaf
    if not found:
        raise SpecError(f"{what}: space {space} has no entries")
    return list(found.values())


def _column_leaf(leaf: SpaceLeaf, what: str, keep_float64: bool) -> Leaf:
    path, space, key = leaf.path, leaf.space, "/".join(map(str, leaf.path))
    if not leaf.is_array:
        raise SpecError(
            f"{what}: space {space} is not supported; needed is Box, Discrete, MultiDiscrete, "
            f"MultiBinary, or a Dict or Tuple of them{f' (it is entry {key!r})' if path else ''}"
        )
    if isinstance(space, spaces.Discrete):
        return Leaf(path, space, key, np.dtype(np.int64))
    dtype = native_dtype(space.dtype)
    shrinks = dtype == np.float64 and not keep_float64
    return Leaf(path, space, key, np.dtype(np.float32) if shrinks else dtype)


def space_of_array(array: np.ndarray) -> gymnasium.Space[Any] | None:
    """The space of all arrays of this dtype and shape; None if they are no real numbers."""
    if array.dtype.kind == "b":
        return spaces.MultiBinary(array.shape)
    if array.dtype.kind not in "iuf":
        return None
    low, high = (-np.inf, np.inf) if array.dtype.kind == "f" else (np.iinfo(array.dtype).min, np.iinfo(array.dtype).max)
    return spaces.Box(low, high, array.shape, array.dtype.type)


def example_value(leaf: Leaf) -> np.ndarray:
    """A legal value of a leaf: 1 between bounds of 0 and 1, so that a mask allows all actions; else nearest to zero."""
    space = leaf.space
    if isinstance(space, spaces.MultiBinary):
        return np.ones(leaf.shape, leaf.dtype)
    if isinstance(space, spaces.Box):
        zeros = np.zeros(leaf.shape, space.dtype)  # in the bounds' dtype: int64 stays exact
        nearest = np.minimum(np.maximum(zeros, space.low), space.high)
        return np.asarray(np.where((space.low == 0) & (space.high == 1), space.high, nearest), leaf.dtype)
    start = getattr(space, "start", 0)
    return np.broadcast_to(np.asarray(start, leaf.dtype), leaf.shape).copy()
