"""gymnasium spaces as flat columns: a leaf for each Box, Discrete, MultiDiscrete or MultiBinary.

Nested Dict and Tuple spaces give keys joined with `/`; a Tuple's parts are called 0, 1, ...
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from rlstructs.checks import holds
from rlstructs.envs.libraries import Wanted, same
from rlstructs.envs.parts import nest, nest_rows
from rlstructs.envs.values import as_numpy, native
from rlstructs.errors import MissingKeyError, SpecError
from rlstructs.shared.packing import Packing, Rows
from rlstructs.structures.arrays import as_array
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.tree import show

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


class Column:
    """Gathers one leaf of E observations into the rows of an array.

    Args:
        leaf: which.
        n_envs: the most observations, E.
        array: the rows, without gaps; None for some of its own.
    """

    def __init__(self, leaf: Leaf, n_envs: int, array: np.ndarray | None = None) -> None:
        self.leaf = leaf
        self.array = np.zeros((n_envs, *leaf.row_shape), leaf.dtype) if array is None else array
        # Observations laid one behind another along their first axis: a single concatenation.
        n_rows, rest = (n_envs * leaf.shape[0], leaf.shape[1:]) if leaf.shape else (n_envs, ())
        self._chain = self.array.reshape(n_rows, *rest)
        self._n_envs, self._sizes = n_envs, [leaf.shape[0]] * n_envs if leaf.shape else []
        # Rounding a float is all right. Whole numbers of a wider dtype are looked at one by one.
        self._casting: Any = "same_kind" if leaf.dtype.kind == "f" else "safe"

    def fill(self, observations: Sequence[Any], environments: Iterable[int] | None = None) -> np.ndarray:
        """Writes the leaf of each observation; the rows, valid until the next call.

        Args:
            observations: at most E.
            environments: whose they are, for messages; None for 0, 1, ...

        Raises:
            SpecError: an observation is not in the space; names environment and key.
        """
        n = len(observations)
        try:
            self._fill_at_once(observations, n)
        except (TypeError, ValueError, LookupError, RuntimeError):  # torch's own, of tensors with gradients
            self._fill_one_by_one(observations, range(n) if environments is None else environments)
        return self.array if n == self._n_envs else self.array[:n]

    def _fill_at_once(self, observations: Sequence[Any], n: int) -> None:
        leaf = self.leaf
        values = [leaf.pick(sample) for sample in observations] if leaf.path else observations
        if not leaf.shape:
            np.copyto(self._chain[:n], np.asarray(values).reshape(n), casting=self._casting)
        elif list(map(len, values)) == (self._sizes if n == self._n_envs else self._sizes[:n]):
            chain = self._chain if n == self._n_envs else self._chain[: n * leaf.shape[0]]
            np.concatenate(values, out=chain, casting=self._casting)
        else:  # too long and too short ones may add up
            raise ValueError("an observation of another size")

    def _fill_one_by_one(self, observations: Sequence[Any], environments: Iterable[int]) -> None:
        """Finds what is wrong; takes values of another dtype where none is changed by it."""
        leaf = self.leaf
        for row, (environment, observation) in enumerate(zip(environments, observations, strict=True)):
            got = leaf.read(f"environment {environment}: observation {leaf.name!r}", observation, leaf.shape)
            self.array[row] = got.astype(leaf.dtype).reshape(leaf.row_shape)


class Sheet:
    """E rows of observations that are written over again and again.

    Args:
        found: key -> the leaf that it comes from; other keys are the owner's to write.
        packing: of all keys.
        n_envs: E.

    Attributes:
        rows: all E.
        view: each key's values, views.
    """

    def __init__(self, found: Mapping[str, Leaf], packing: Packing, n_envs: int) -> None:
        self._n_envs, self._leaves = n_envs, found
        self.rows = Rows.zeros(packing, n_envs)
        self.view = self.rows.arrays()
        # Filled in place, or, what lies in a record, copied into it.
        self._columns = [
            (Column(leaf, n_envs, self.view[key]), None)
            if key in self.rows.blocks
            else (Column(leaf, n_envs), self.view[key])
            for key, leaf in found.items()
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        # Made anew, also where an environment is copied: copies of views would be no views of the copied rows.
        return _sheet_of, (self._leaves, self.rows.packing, self._n_envs, self.rows.blocks)

    def fill(self, observations: Sequence[Any], environments: Iterable[int] | None = None) -> Rows:
        """Writes every leaf, as `Column.fill` does; the rows, valid until the next call."""
        n = len(observations)
        for column, record in self._columns:
            rows = column.fill(observations, environments)
            if record is not None:
                record[:n] = rows
        return self.rows if n == self._n_envs else self.rows.take(slice(n))

    def fill_batch(self, batch: Any, arrays: Mapping[str, np.ndarray]) -> None:
        """Writes every leaf of E observations that are one already to the arrays of its keys."""
        for key, leaf in self._leaves.items():
            got = leaf.read(f"environment: observation {key!r}", batch, (self._n_envs, *leaf.shape))
            _copy(arrays[key], got.reshape(self._n_envs, *leaf.row_shape))


def _sheet_of(
    found: Mapping[str, Leaf], packing: Packing, n_envs: int, blocks: Mapping[str, np.ndarray]
) -> Sheet:
    sheet = Sheet(found, packing, n_envs)
    for name, block in blocks.items():
        sheet.rows.blocks[name][...] = block
    return sheet


# Columns, up to which a copy column by column is the faster one.
FEW = 16


def _copy(target: np.ndarray, source: np.ndarray) -> None:
    """Copies rows, also those of an array that an environment keeps column by column."""
    if source.ndim == 2 and source.shape[1] <= FEW and source.strides[0] < source.strides[1]:
        for column in range(source.shape[1]):  # numpy would go row by row, and each of them is short
            target[:, column] = source[:, column]
    else:
        np.copyto(target, source, casting="unsafe")


class ActionReader:
    """Turns the agent's action tensors into what each environment's `step` gets.

    An unstructured space is read from the key `action`; a Dict or Tuple from `action/<key>`.
    """

    def __init__(self, space: gymnasium.Space[Any], keep_float64: bool = False) -> None:
        self.space = space
        self.leaves = leaves(space, "action", keep_float64)
        self._wanted = [(leaf, self.key(leaf), isinstance(leaf.space, spaces.Discrete)) for leaf in self.leaves]
        self._approved: dict[str, tuple[int, torch.Size, torch.dtype]] = {}

    @staticmethod
    def key(leaf: Leaf) -> str:
        return f"action/{leaf.key}" if leaf.path else "action"

    def read(self, action: DictTensor, n: int) -> tuple[list[Any], dict[str, np.ndarray]]:
        """What each of `n` environments gets, and the columns that it came from.

        Raises:
            MissingKeyError, SpecError: the action is not what the space needs; names the key.
        """
        columns = self._columns(action, n)
        values = [
            columns[leaf.key].tolist() if is_discrete else _array(columns[leaf.key], leaf)
            for leaf, _, is_discrete in self._wanted
        ]
        if self.leaves[0].path == ():
            return values[0], columns
        return nest_rows(self.space, iter(values), n), columns

    def read_batch(self, action: DictTensor, n: int, as_wanted: Wanted = same) -> tuple[Any, dict[str, np.ndarray]]:
        """What `n` environments get that take their actions as one, and the columns as `read` gives them.

        Args:
            action: as for `read`.
            n: how many environments there are.
            as_wanted: makes of a leaf's key and array what the environment takes.
        """
        columns = self._columns(action, n)
        if self.leaves[0].path == ():
            [leaf] = self.leaves
            return as_wanted("action", _own(columns[leaf.key], leaf)), columns
        batch = (as_wanted(key, _own(columns[leaf.key], leaf)) for leaf, key, _ in self._wanted)
        return nest(self.space, batch), columns

    def _columns(self, action: DictTensor, n: int) -> dict[str, np.ndarray]:
        columns: dict[str, np.ndarray] = {}
        try:
            tensors = action._tensors
        except AttributeError:
            keys = ", ".join(f"{key!r}: ..." for _, key, _ in self._wanted)
            raise TypeError(f"action: needs DictTensor({{{keys}}}), got {type(action).__name__}") from None
        for leaf, key, _ in self._wanted:
            tensor = tensors.get(key)
            if tensor is None:
                raise MissingKeyError(f"agent: no {key!r} in its output, there are {sorted(action.keys())}")
            if self._approved.get(key) != (n, tensor.shape, tensor.dtype):
                self._check(key, leaf, tensor, n)
            columns[leaf.key] = as_array(tensor.float() if tensor.dtype is torch.bfloat16 else tensor)
        return columns

    def _check(self, key: str, leaf: Leaf, tensor: torch.Tensor, n: int) -> None:
        if tuple(tensor.shape) != (n, *leaf.shape):
            raise SpecError(
                f"agent: {key!r} has shape {tuple(tensor.shape)}, expected {(n, *leaf.shape)} "
                f"({n} environments, {leaf.space})"
            )
        wants_whole = leaf.dtype.kind != "f"
        bits = leaf.dtype.kind == "b" or isinstance(leaf.space, spaces.MultiBinary)
        whole = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
        if wants_whole != whole or tensor.dtype.is_complex or (tensor.dtype == torch.bool and not bits):
            wanted = "an integer" if wants_whole else "a floating point"
            raise SpecError(f"agent: {key!r} is {show(tensor)}, expected {wanted} dtype for {leaf.space}")
        self._approved[key] = (n, tensor.shape, tensor.dtype)


def _array(array: np.ndarray, leaf: Leaf) -> list[Any]:
    own = _own(array, leaf)
    return list(own) if leaf.shape else [own[k, ...] for k in range(len(own))]


def _own(array: np.ndarray, leaf: Leaf) -> np.ndarray:
    # One copy for all: an environment may keep or change what it is given.
    own = array.astype(leaf.space.dtype)
    if own.dtype != array.dtype and own.dtype.kind != "f" and not holds(own.dtype, array):
        raise SpecError(f"agent: {ActionReader.key(leaf)!r} has values that {leaf.space} cannot hold")
    return own
