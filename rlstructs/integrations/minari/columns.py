"""Maps keys of trajectories to observations and actions of a space.

Also converts them to the form in which Minari stores them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rlstructs.envs.action_reader import ActionReader
from rlstructs.envs.spaces import list_leaves, nest
from rlstructs.errors import MissingKeyError, SpecError
from rlstructs.replay.intake.arrays import host_array
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor


class SpaceColumns:
    """The columns of an observation space or an action space, one for each leaf.

    Args:
        space: the space; Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of them.
        what: "observation" or "action".

    Attributes:
        space: the space.
        leaves: name of the column -> leaf. Observations have the names `frame` or `<key>`, actions `action` or
            `action/<key>`, as in trajectories.

    Raises:
        SpecError: the space has leaves of other kinds, or a name that HDF5 cannot hold.
    """

    def __init__(self, space: gymnasium.Space[Any], what: str) -> None:
        found = list_leaves(space, what, keep_float64=True)
        for leaf in found:
            if any(isinstance(name, str) and ("/" in name or name in ("", ".")) for name in leaf.path):
                raise SpecError(f"{what}: Minari cannot hold the key {leaf.path[-1]!r} of space {space}")
        self.space, self.what = space, what
        self.leaves = {ActionReader.key(leaf) if what == "action" else leaf.name: leaf for leaf in found}

    def fit(self, steps: TemporalDictTensor) -> SpaceColumns:
        """Returns the columns with the dtypes that Boxes have in trajectories.

        There float64 may have become float32.
        """
        dtypes = (find_array(steps, f"{self.what}/{name}").dtype for name in self.leaves)
        spaces_of_leaves = map(_with_dtype, [leaf.space for leaf in self.leaves.values()], dtypes)
        return SpaceColumns(_rebuild(self.space, spaces_of_leaves), self.what)

    def find(self, steps: TemporalDictTensor, name: str, prefix: str) -> np.ndarray:
        """Returns a column of trajectories, (B, T, ...), in the space's shape and dtype.

        Args:
            steps: the trajectories.
            name: of the column.
            prefix: the part of its key before the name.

        Raises:
            MissingKeyError, SpecError: it is missing, or has another shape or dtype.
        """
        leaf, array = self.leaves[name], find_array(steps, prefix + name)
        rows = leaf.shape if self.what == "action" else leaf.row_shape
        is_box = isinstance(leaf.space, spaces.Box)
        if array.shape[2:] not in (rows, leaf.shape) or (is_box and array.dtype != leaf.space.dtype):
            expected = ", ".join(["B", "T", *map(str, rows)])
            raise SpecError(
                f"to_minari: {prefix + name!r} is {array.shape} {array.dtype}, expected ({expected}) "
                f"{leaf.space.dtype}, for {leaf.space}"
            )
        return array.reshape(*array.shape[:2], *leaf.shape).astype(leaf.space.dtype, copy=False)

    def nest(self, arrays: Mapping[str, np.ndarray]) -> Any:
        """Puts the columns `observation/<name>` or `action/<name>` into the dicts and tuples of the space."""
        return nest(self.space, iter([arrays[f"{self.what}/{name}"] for name in self.leaves]))

    def from_minari(self, nested: Any, where: str, n: int) -> dict[str, np.ndarray]:
        """Takes the columns, (n, ...) each, from what Minari reads.

        It is the inverse of `nest` and `to_minari`.

        Raises:
            SpecError: a column is missing, or has another shape; the message begins with `where`.
        """
        found = {}
        for name, leaf in self.leaves.items():
            key = f"{self.what}s" + "".join(f"[{step!r}]" for step in leaf.path)
            try:
                array = np.asarray(leaf.pick(nested))
            except (LookupError, TypeError, ValueError) as error:
                raise SpecError(f"{where}: {key} cannot be read: {type(error).__name__}: {error}") from error
            rows = leaf.shape if self.what == "action" else leaf.row_shape
            check_rows(where, key, array, (n, *leaf.shape))
            found[name] = array.reshape(n, *rows)
        return found


def check_rows(where: str, key: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
    """Raises SpecError unless an array has the rows and size of a shape."""
    if array.shape[:1] != shape[:1] or array.size != math.prod(shape):
        raise SpecError(f"{where}: {key} is {array.shape} {array.dtype}, expected {shape}")


def find_array(steps: TemporalDictTensor, key: str) -> np.ndarray:
    """A column of trajectories, (B, T, ...).

    Raises:
        MissingKeyError, SpecError: it is missing, or of a dtype that numpy lacks.
    """
    if key not in steps:
        raise MissingKeyError(f"to_minari: no {key!r} in the trajectories, there are {sorted(steps.keys())}")
    return host_array(key, steps[key])


def _with_dtype(space: gymnasium.Space[Any], dtype: np.dtype[Any]) -> gymnasium.Space[Any]:
    if not isinstance(space, spaces.Box) or space.dtype == dtype:
        return space
    with np.errstate(over="ignore"):  # a bound beyond the range of this dtype becomes infinite
        return spaces.Box(space.low.astype(dtype), space.high.astype(dtype), dtype=dtype.type)


def _rebuild(space: gymnasium.Space[Any], leaves: Iterator[gymnasium.Space[Any]]) -> gymnasium.Space[Any]:
    """Rebuilds a Dict or Tuple with other leaves, given in order."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: _rebuild(inner, leaves) for key, inner in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([_rebuild(inner, leaves) for inner in space.spaces])
    return next(leaves)
