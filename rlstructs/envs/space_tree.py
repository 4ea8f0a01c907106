"""Nested gymnasium spaces: their leaves, and values of them flattened, nested, copied and compared."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium
from gymnasium import spaces

from rlstructs.envs.array_values import copy_value

# Spaces whose values are arrays of one shape.
ARRAYS = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)

Path = tuple[Any, ...]


@dataclass(frozen=True)
class SpaceLeaf:
    """One space that is no Dict or Tuple, and its place in the outermost space.

    Attributes:
        path: keys and indexes that lead from a sample of the outermost space to the value of this one.
        space: the space of the leaf.
        shape: of a value, where it is an array; () for other values.
    """

    path: Path
    space: gymnasium.Space[Any]
    shape: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.space.shape or ()))

    @property
    def is_array(self) -> bool:
        """Whether its values are arrays of one shape."""
        return isinstance(self.space, ARRAYS)

    def pick(self, sample: Any) -> Any:
        """The leaf's value in a sample, or in a batch of samples."""
        for step in self.path:
            sample = sample[step]
        return sample


def flatten_space(space: gymnasium.Space[Any], path: Path = ()) -> Iterator[SpaceLeaf]:
    """Yields the leaves of a space, in order.

    Example:
        >>> space = spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Tuple([spaces.Text(3), spaces.MultiBinary(2)])})
        >>> [leaf.path for leaf in flatten_space(space)], [leaf.is_array for leaf in flatten_space(space)]
        ([('a',), ('b', 0), ('b', 1)], [True, False, True])
    """
    if isinstance(space, spaces.Dict):
        for key, inner in space.spaces.items():
            yield from flatten_space(inner, (*path, key))
    elif isinstance(space, spaces.Tuple):
        for index, inner in enumerate(space.spaces):
            yield from flatten_space(inner, (*path, index))
    else:
        yield SpaceLeaf(path, space)


def nest(space: gymnasium.Space[Any], values: Iterator[Any]) -> Any:
    """Puts a value for each leaf of a space, in order, into dicts and tuples.

    Example:
        >>> space = spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Tuple([spaces.Text(3), spaces.MultiBinary(2)])})
        >>> nest(space, iter("xyz"))
        {'a': 'x', 'b': ('y', 'z')}
    """
    if isinstance(space, spaces.Dict):
        return {key: nest(inner, values) for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(nest(inner, values) for inner in space.spaces)
    return next(values)


def nest_rows(space: gymnasium.Space[Any], columns: Iterator[Iterable[Any]], n: int) -> list[Any]:
    """Builds n values of a space from a column of n values for each leaf, in order.

    Example:
        >>> space = spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Tuple([spaces.Text(3), spaces.MultiBinary(2)])})
        >>> nest_rows(space, iter(["uv", "wx", "yz"]), 2)
        [{'a': 'u', 'b': ('w', 'y')}, {'a': 'v', 'b': ('x', 'z')}]
    """
    if isinstance(space, spaces.Dict):
        keys = tuple(space.spaces)
        rows = zip(*[nest_rows(inner, columns, n) for inner in space.spaces.values()], strict=True)
        return [dict(zip(keys, row, strict=True)) for row in rows] if keys else [{} for _ in range(n)]
    if isinstance(space, spaces.Tuple):
        rows = zip(*[nest_rows(inner, columns, n) for inner in space.spaces], strict=True)
        return list(rows) if space.spaces else [()] * n
    return list(next(columns))


def copy_sample(space: gymnasium.Space[Any], sample: Any) -> Any:
    """Copies a sample, without entries that its space does not have.

    Args:
        space: the sample's.
        sample: returned uncopied where an entry is missing: the next reader reports that.

    Example:
        >>> copy_sample(spaces.Dict({"x": spaces.Discrete(5)}), {"lock": object(), "x": 3})
        {'x': 3}
    """
    try:
        return _copy_nested(space, sample)
    except (LookupError, TypeError):
        return sample


def _copy_nested(space: Any, sample: Any) -> Any:
    if isinstance(space, spaces.Dict):
        # In the sample's order; in the space's order if the sample is no mapping or lacks an entry.
        keys = [key for key in sample if key in space.spaces] if isinstance(sample, Mapping) else []
        keys = keys if len(keys) == len(space.spaces) else list(space.spaces)
        entries = {key: _copy_nested(space.spaces[key], sample[key]) for key in keys}
        return OrderedDict(entries) if type(sample) is OrderedDict else entries
    if isinstance(space, spaces.Tuple):
        values = (_copy_nested(inner, sample[index]) for index, inner in enumerate(space.spaces))
        return list(values) if isinstance(sample, list) else tuple(values)
    return copy_value(sample)


def are_equal(space: Any, other: Any) -> bool:
    """Whether two spaces are equal; faster than `==`, which takes 30 microseconds for each Box."""
    if space is other:
        return True
    kind = type(space)
    if type(other) is kind and kind in (spaces.Dict, spaces.Tuple):
        ours, theirs = space.spaces, other.spaces
        if kind is spaces.Dict:
            return ours.keys() == theirs.keys() and all(are_equal(inner, theirs[key]) for key, inner in ours.items())
        return len(ours) == len(theirs) and all(map(are_equal, ours, theirs))
    if type(other) is kind is spaces.Box and space.shape == other.shape and space.dtype == other.dtype:
        bounds = (space.low, other.low), (space.high, other.high)
        if all(ours.tobytes() == theirs.tobytes() for ours, theirs in bounds):
            return True
    return bool(space == other)
