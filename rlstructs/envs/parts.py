"""A gymnasium space as the parts that are no Dict or Tuple, and values of them nested again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import gymnasium
from gymnasium import spaces

from rlstructs.envs.values import copy_value

# Spaces whose values are arrays of one shape.
ARRAYS = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


class Part(NamedTuple):
    """One space in a nesting of Dict and Tuple spaces.

    Attributes:
        path: how to get from a sample of the outermost space to the value of this one.
        space: this one.
    """

    path: tuple[Any, ...]
    space: gymnasium.Space[Any]

    @property
    def is_array(self) -> bool:
        """Whether its values are arrays of one shape."""
        return isinstance(self.space, ARRAYS)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a value, where it is an array."""
        return tuple(self.space.shape or ())

    def pick(self, sample: Any) -> Any:
        """Its value in a sample, or in a batch of them."""
        for step in self.path:
            sample = sample[step]
        return sample


def parts_of(space: gymnasium.Space[Any], path: tuple[Any, ...] = ()) -> Iterator[Part]:
    """The spaces in it that are no Dict or Tuple, in order.

    Example:
        >>> space = spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Tuple([spaces.Text(3), spaces.MultiBinary(2)])})
        >>> [part.path for part in parts_of(space)], [part.is_array for part in parts_of(space)]
        ([('a',), ('b', 0), ('b', 1)], [True, False, True])
    """
    if isinstance(space, spaces.Dict):
        for key, inner in space.spaces.items():
            yield from parts_of(inner, (*path, key))
    elif isinstance(space, spaces.Tuple):
        for index, inner in enumerate(space.spaces):
            yield from parts_of(inner, (*path, index))
    else:
        yield Part(path, space)


def nest(space: gymnasium.Space[Any], values: Iterator[Any]) -> Any:
    """Values of `parts_of(space)`, in order, in dicts and tuples.

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
    """n values of a space, of the n values of each of `parts_of(space)`, in order.

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


def copy_parts(space: gymnasium.Space[Any], sample: Any) -> Any:
    """A copy of what a sample holds of a space, and of nothing else that is in it.

    Args:
        space: the sample's.
        sample: given back as it is where a part is missing, which the next reader reports.

    Example:
        >>> copy_parts(spaces.Dict({"x": spaces.Discrete(5)}), {"lock": object(), "x": 3})
        {'x': 3}
    """
    try:
        return _copy_of(space, sample)
    except (LookupError, TypeError):
        return sample


def _copy_of(space: Any, sample: Any) -> Any:
    if isinstance(space, spaces.Dict):
        # In the sample's order, as far as it has one, and as the space's if that lacks an entry.
        keys = [key for key in sample if key in space.spaces] if isinstance(sample, Mapping) else []
        keys = keys if len(keys) == len(space.spaces) else list(space.spaces)
        copied = {key: _copy_of(space.spaces[key], sample[key]) for key in keys}
        return OrderedDict(copied) if type(sample) is OrderedDict else copied
    if isinstance(space, spaces.Tuple):
        parts = (_copy_of(inner, sample[index]) for index, inner in enumerate(space.spaces))
        return list(parts) if isinstance(sample, list) else tuple(parts)
    return copy_value(sample)


def are_equal(space: Any, other: Any) -> bool:
    """Whether two spaces are equal, as `==` says it, which takes 30 microseconds for each Box."""
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
