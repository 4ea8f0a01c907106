"""gymnasium spaces as flat columns: a leaf for each Box, Discrete, MultiDiscrete or MultiBinary.

Nested Dict and Tuple spaces give keys joined with `/`; a Tuple's parts are called 0, 1, ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from rlstructs.errors import MissingKeyError, SpecError
from rlstructs.structures.base import show
from rlstructs.structures.dict_tensor import DictTensor

Path = tuple[Any, ...]


@dataclass(frozen=True)
class Leaf:
    """One flat column of a space.

    Attributes:
        key: its name, "" when the space itself is the leaf.
        path: how to get from a sample of the space to this leaf's value.
        space: the leaf's space.
        shape: row shape of the column.
        dtype: dtype of the column.
    """

    key: str
    path: Path
    space: gymnasium.Space[Any]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def pick(self, sample: Any) -> Any:
        for part in self.path:
            sample = sample[part]
        return sample


def leaves(space: gymnasium.Space[Any], what: str, keep_float64: bool = False) -> list[Leaf]:
    """The flat columns of a space.

    Raises:
        SpecError: a space of another kind, or a Dict or Tuple without entries; names it.
    """
    found = list(_leaves(space, "", (), what, keep_float64))
    if not found:
        raise SpecError(f"{what}: space {space} has no entries")
    return found


def _leaves(space: Any, key: str, path: Path, what: str, keep_float64: bool) -> Any:
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        parts = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        for part, inner in parts:
            yield from _leaves(inner, f"{key}/{part}" if key else str(part), (*path, part), what, keep_float64)
    elif isinstance(space, spaces.Discrete):
        yield Leaf(key, path, space, (), np.dtype(np.int64))
    elif isinstance(space, (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)):
        dtype = np.dtype(np.float32) if space.dtype == np.float64 and not keep_float64 else space.dtype
        yield Leaf(key, path, space, tuple(space.shape), np.dtype(dtype))
    else:
        raise SpecError(
            f"{what}: space {space} is not supported; needed is Box, Discrete, MultiDiscrete, "
            "MultiBinary, or a Dict or Tuple of them"
        )


def example(leaf: Leaf) -> np.ndarray:
    """A legal value of a leaf, as near to zero as may be."""
    space = leaf.space
    if isinstance(space, spaces.Box):
        return np.clip(np.zeros(leaf.shape), space.low, space.high).astype(leaf.dtype)
    start = getattr(space, "start", 0)
    return np.broadcast_to(np.asarray(start, leaf.dtype), leaf.shape).copy()


class Column:
    """Gathers one leaf of E observations into the rows of an array.

    A Discrete leaf gives rows of shape (1,): scalars of observations have a feature axis.
    """

    def __init__(self, leaf: Leaf, n_envs: int) -> None:
        self.leaf = leaf
        self.shape = leaf.shape or ((1,) if isinstance(leaf.space, spaces.Discrete) else ())
        self.array = np.zeros((n_envs, *self.shape), leaf.dtype)
        # Observations laid one behind another along their first axis: a single concatenation.
        self._chain = self.array.reshape(-1, *leaf.shape[1:]) if leaf.shape else self.array.reshape(-1)

    def fill(self, observations: Sequence[Any]) -> np.ndarray:
        """Writes the leaf of each observation; the rows, valid until the next call."""
        leaf, n = self.leaf, len(observations)
        values = [leaf.pick(sample) for sample in observations] if leaf.path else observations
        try:
            if leaf.shape:
                np.concatenate(values, out=self._chain[: n * leaf.shape[0]])
            else:
                np.copyto(self._chain[:n], np.asarray(values).reshape(n), casting="same_kind")
        except (TypeError, ValueError):
            self._fill_slowly(values)
        return self.array[:n]

    def rows(self, observations: Sequence[Any]) -> np.ndarray:
        """As `fill`, into an array of its own."""
        kept = Column(self.leaf, len(observations))
        return kept.fill(observations)

    def _fill_slowly(self, values: Sequence[Any]) -> None:
        """Finds which environment is wrong; takes values of another dtype where none is changed by it."""
        leaf = self.leaf
        for number, value in enumerate(values):
            got = np.asarray(value)
            if got.shape != leaf.shape and not (got.size == 1 and not leaf.shape):
                raise SpecError(
                    f"environment {number}: observation {leaf.key or 'frame'!r} has shape {got.shape}, "
                    f"the space says {leaf.shape}"
                )
            cast = got.astype(leaf.dtype) if got.dtype.kind in "biuf" else None
            if cast is None or not np.array_equal(cast, got, equal_nan=got.dtype.kind == "f"):
                raise SpecError(
                    f"environment {number}: observation {leaf.key or 'frame'!r} has dtype {got.dtype}, and "
                    f"values that the space's {leaf.dtype} cannot hold"
                )
            self.array[number] = cast


class ActionReader:
    """Turns the agent's action tensors into what each environment's `step` gets.

    An unstructured space is read from the key `action`; a Dict or Tuple from `action/<key>`.
    """

    def __init__(self, space: gymnasium.Space[Any], n_envs: int) -> None:
        self.space = space
        self.leaves = leaves(space, "action")
        self.n_envs = n_envs
        self._approved: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._to_values = [_discrete if isinstance(leaf.space, spaces.Discrete) else _array for leaf in self.leaves]

    @staticmethod
    def key(leaf: Leaf) -> str:
        return f"action/{leaf.key}" if leaf.key else "action"

    def read(self, action: DictTensor, n: int) -> tuple[list[Any], dict[str, np.ndarray]]:
        """What each of `n` environments gets, and the columns that it came from.

        Raises:
            MissingKeyError, SpecError: the action is not what the space needs; names the key.
        """
        columns: dict[str, np.ndarray] = {}
        values: list[list[Any]] = []
        for leaf, to_values in zip(self.leaves, self._to_values, strict=True):
            key = self.key(leaf)
            if key not in action:
                raise MissingKeyError(f"agent: no {key!r} in its output, there are {sorted(action.keys())}")
            tensor = action[key]
            if self._approved.get(key) != (tensor.shape, tensor.dtype):
                self._check(key, leaf, tensor, n)
            array = tensor.detach().cpu().numpy()
            columns[leaf.key] = array
            values.append(to_values(array, leaf))
        if self.leaves[0].path == ():
            return values[0], columns
        paths = [leaf.path for leaf in self.leaves]
        return [_nested(self.space, dict(zip(paths, row, strict=True)), ()) for row in zip(*values, strict=True)], columns

    def _check(self, key: str, leaf: Leaf, tensor: torch.Tensor, n: int) -> None:
        if tuple(tensor.shape) != (n, *leaf.shape):
            raise SpecError(
                f"agent: {key!r} has shape {tuple(tensor.shape)}, expected {(n, *leaf.shape)} "
                f"({n} environments, {leaf.space})"
            )
        whole = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
        wants_whole = leaf.dtype.kind != "f"
        if wants_whole != whole or (tensor.dtype == torch.bool and not isinstance(leaf.space, spaces.MultiBinary)):
            wanted = "an integer" if wants_whole else "a floating point"
            raise SpecError(f"agent: {key!r} is {show(tensor)}, expected {wanted} dtype for {leaf.space}")
        self._approved[key] = (tensor.shape, tensor.dtype)


def _discrete(array: np.ndarray, leaf: Leaf) -> list[Any]:
    return array.tolist()  # type: ignore[no-any-return]


def _array(array: np.ndarray, leaf: Leaf) -> list[Any]:
    # One copy for all: an environment may keep or change what it is given.
    own = array.astype(leaf.space.dtype)
    return list(own) if leaf.shape else [own[k, ...] for k in range(len(own))]


def _nested(space: Any, values: dict[Path, Any], path: Path) -> Any:
    if isinstance(space, spaces.Dict):
        return {part: _nested(inner, values, (*path, part)) for part, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_nested(inner, values, (*path, part)) for part, inner in enumerate(space.spaces))
    return values[path]


