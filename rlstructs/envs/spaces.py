"""gymnasium spaces as flat columns: a leaf for each Box, Discrete, MultiDiscrete or MultiBinary.

Nested Dict and Tuple spaces give keys joined with `/`; a Tuple's parts are called 0, 1, ...
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rlstructs.checks import holds
from rlstructs.envs.values import as_numpy, native
from rlstructs.errors import SpecError

Path = tuple[Any, ...]


@dataclass(frozen=True)
class Leaf:
    """One flat column of a space.

    Attributes:
        key: its name, which is the path joined with `/`; "" when the space itself is the leaf.
        path: how to get from a sample of the space to this leaf's value.
        space: the leaf's space.
        shape: of a value.
        dtype: dtype of the column.
    """

    key: str
    path: Path
    space: gymnasium.Space[Any]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def name(self) -> str:
        """The key in an observation: `frame` when the space itself is the leaf. (An entry may be called "".)"""
        return self.key if self.path else "frame"

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a row of observations: a Discrete one has a feature axis."""
        return (1,) if isinstance(self.space, spaces.Discrete) else self.shape

    def pick(self, sample: Any) -> Any:
        for part in self.path:
            sample = sample[part]
        return sample

    def read(self, name: str, observation: Any, shape: tuple[int, ...]) -> np.ndarray:
        """This leaf of an observation, as numbers that a column can hold.

        Raises:
            SpecError: it is not in the space; begins with `name`.
        """
        try:
            got = as_numpy(self.pick(observation))
        except (TypeError, ValueError, LookupError, RuntimeError) as error:
            raise SpecError(f"{name} cannot be read: {error!r}") from error
        if got.shape != shape and not got.size == math.prod(shape) == 1:
            raise SpecError(f"{name} has shape {got.shape}, the space says {shape}")
        if got.dtype.kind not in "biuf" or not holds(self.dtype, got):
            raise SpecError(f"{name} has dtype {got.dtype}, and values that the space's {self.dtype} cannot hold")
        return got.reshape(shape)


def leaves(space: gymnasium.Space[Any], what: str, keep_float64: bool = False) -> list[Leaf]:
    """The flat columns of a space.

    Raises:
        SpecError: a space of another kind, a Dict or Tuple without entries, or one with two entries
            of the same key; names it.
    """
    found: dict[str, Leaf] = {}
    for leaf in _leaves(space, (), what, keep_float64):
        if leaf.key in found:
            raise SpecError(f"{what}: two entries of space {space} are called {leaf.key!r}")
        found[leaf.key] = leaf
    if not found:
        raise SpecError(f"{what}: space {space} has no entries")
    return list(found.values())


def _leaves(space: Any, path: Path, what: str, keep_float64: bool) -> Iterator[Leaf]:
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        parts = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        for part, inner in parts:
            yield from _leaves(inner, (*path, part), what, keep_float64)
    elif isinstance(space, spaces.Discrete):
        yield Leaf(_key(path), path, space, (), np.dtype(np.int64))
    elif isinstance(space, (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)):
        dtype = native(space.dtype)
        shrinks = dtype == np.float64 and not keep_float64
        yield Leaf(_key(path), path, space, tuple(space.shape), np.dtype(np.float32) if shrinks else dtype)
    else:
        raise SpecError(
            f"{what}: space {space} is not supported; needed is Box, Discrete, MultiDiscrete, "
            f"MultiBinary, or a Dict or Tuple of them{f' (it is entry {_key(path)!r})' if path else ''}"
        )


def _key(path: Path) -> str:
    return "/".join(map(str, path))


def example(leaf: Leaf) -> np.ndarray:
    """A legal value of a leaf, as near to zero as may be."""
    space = leaf.space
    if isinstance(space, spaces.Box):
        zeros = np.zeros(leaf.shape, space.dtype)  # of the bounds' dtype: int64 is exact
        return np.asarray(np.minimum(np.maximum(zeros, space.low), space.high), leaf.dtype)
    start = getattr(space, "start", 0)
    return np.broadcast_to(np.asarray(start, leaf.dtype), leaf.shape).copy()


# Columns, up to which a copy column by column is the faster one.
FEW = 16
