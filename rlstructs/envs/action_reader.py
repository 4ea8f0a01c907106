"""Turns an agent's actions into what single environments take."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from rlstructs.checks import holds
from rlstructs.envs.libraries import Wanted, same
from rlstructs.envs.parts import nest, nest_rows
from rlstructs.envs.spaces import Leaf, leaves
from rlstructs.errors import MissingKeyError, SpecError
from rlstructs.structures.arrays import as_array
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.tree import show


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
