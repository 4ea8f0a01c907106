"""Counts the numbers of a gymnasium space."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rlstructs.checks import check_count
from rlstructs.errors import SpecError


def n_elements(size: Any) -> int:
    """Counts the numbers in a row of this size.

    The size is an int, a list of ints, whose product counts, or a space. A Discrete space has one number, its value;
    Dict and Tuple spaces have the sum of their members.

    Raises:
        TypeError, SpecError: the size is something else.
    """
    if isinstance(size, (tuple, list)):
        return math.prod(check_count("size", n) for n in size)
    if isinstance(size, (bool, int, np.integer, float, str)):
        return check_count("size", size)
    return check_count("size", _n_elements_of_space(size))


def _n_elements_of_space(space: Any) -> int:
    from gymnasium import spaces

    if isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiBinary, spaces.MultiDiscrete)):
        return math.prod(space.shape)
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        members = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
        return sum(_n_elements_of_space(member) for member in members)
    if isinstance(space, spaces.Space):
        try:
            return int(spaces.flatdim(space))
        except (NotImplementedError, ValueError) as error:
            raise SpecError(f"size: the space {space} has no fixed number of elements") from error
    raise TypeError(f"size must be an int, a list of ints, a gymnasium space or None, got {space!r}")
