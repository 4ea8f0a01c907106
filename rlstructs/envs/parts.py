"""A gymnasium space as the parts that are no Dict or Tuple, and values of them nested again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import gymnasium
from gymnasium import spaces

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
