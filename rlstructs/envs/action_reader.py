"""Converts an agent's actions to the form that environments take."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from rlstructs.checks import can_hold
from rlstructs.envs.array_values import native_dtype
from rlstructs.envs.spaces import Leaf, list_leaves, nest, nest_rows
from rlstructs.errors import MissingKeyError, SpecError
from rlstructs.structures.arrays import as_array, fit_to_jax
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.tree import show

# Takes the key of an action and its array, which nobody else uses; returns what an environment takes.
Conversion = Callable[[str, np.ndarray], Any]


def keep_numpy(key: str, array: np.ndarray) -> np.ndarray:
    """Returns the array itself."""
    return array


def choose_conversion(observations: Iterable[Any]) -> Conversion:
    """Chooses the conversion to the library and device of these observations."""
    for found in observations:
        if isinstance(found, torch.Tensor):
            return partial(_to_tensor, found.device)
        if is_jax_array(found):
            devices = list(found.devices())
            return partial(_to_jax, devices[0] if len(devices) == 1 else None)
    return keep_numpy


def is_jax_array(value: Any) -> bool:
    """Whether a value is a jax array; does not import jax."""
    return isinstance(value, getattr(sys.modules.get("jax"), "Array", ()))


def _to_tensor(device: torch.device, key: str, array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.astype(native_dtype(array.dtype), copy=False)).to(device)


def _to_jax(device: Any, key: str, array: np.ndarray) -> Any:
    import jax

    fitting = fit_to_jax(key, array.astype(native_dtype(array.dtype), copy=False))
    return jax.device_put(jax.numpy.array(fitting), device)


class ActionReader:
    """Converts the agent's action tensors to the argument of each environment's `step`.

    An unstructured space is read from the key `action`, a Dict or Tuple from `action/<key>`.

    Args:
        space: the action space of one environment.
        keep_float64: whether float64 actions are recorded as float64.
        clips: whether environments get the actions of a Box clipped to its bounds.
    """

    def __init__(self, space: gymnasium.Space[Any], keep_float64: bool = False, clips: bool = False) -> None:
        self.space, self._clips = space, clips
        self.leaves = list_leaves(space, "action", keep_float64)
        self._wanted = [(leaf, self.key(leaf), isinstance(leaf.space, spaces.Discrete)) for leaf in self.leaves]
        self._approved: dict[str, tuple[int, torch.Size, torch.dtype]] = {}

    @staticmethod
    def key(leaf: Leaf) -> str:
        """The key of a leaf in the agent's output."""
        return f"action/{leaf.key}" if leaf.path else "action"

    def read(self, action: DictTensor, n: int) -> tuple[list[Any], dict[str, np.ndarray]]:
        """Returns the action of each of `n` environments, and the columns that hold them.

        Raises:
            MissingKeyError, SpecError: the action does not fit the space; the message names the key.
        """
        columns = self._columns(action, n)
        values = [
            columns[leaf.key].tolist() if is_discrete else self._split(columns[leaf.key], leaf)
            for leaf, _, is_discrete in self._wanted
        ]
        if self.leaves[0].path == ():
            return values[0], columns
        return nest_rows(self.space, iter(values), n), columns

    def read_batch(
        self, action: DictTensor, n: int, convert: Conversion = keep_numpy
    ) -> tuple[Any, dict[str, np.ndarray]]:
        """Returns the actions of `n` environments as one batch, and their columns.

        Args:
            action: the agent's output.
            n: number of environments.
            convert: converts a leaf's key and array to what the environment takes.

        Raises:
            MissingKeyError, SpecError: as in `read`.
        """
        columns = self._columns(action, n)
        if self.leaves[0].path == ():
            [leaf] = self.leaves
            return convert("action", self._copy(columns[leaf.key], leaf)), columns
        batch = (convert(key, self._copy(columns[leaf.key], leaf)) for leaf, key, _ in self._wanted)
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
        needs_integers = leaf.dtype.kind != "f"
        takes_bools = leaf.dtype.kind == "b" or isinstance(leaf.space, spaces.MultiBinary)
        is_integer = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
        if needs_integers != is_integer or tensor.dtype.is_complex or (tensor.dtype == torch.bool and not takes_bools):
            wanted = "an integer" if needs_integers else "a floating point"
            raise SpecError(f"agent: {key!r} is {show(tensor)}, expected {wanted} dtype for {leaf.space}")
        self._approved[key] = (n, tensor.shape, tensor.dtype)

    def _split(self, array: np.ndarray, leaf: Leaf) -> list[Any]:
        """One copied row for each environment."""
        own = self._copy(array, leaf)
        return list(own) if leaf.shape else [own[k, ...] for k in range(len(own))]

    def _copy(self, array: np.ndarray, leaf: Leaf) -> np.ndarray:
        """Copies actions in the space's dtype: an environment may keep or change them."""
        space = leaf.space
        if self._clips and isinstance(space, spaces.Box):
            clipped: np.ndarray = np.clip(array, space.low, space.high)
            return clipped.astype(space.dtype, copy=False)
        own = array.astype(space.dtype)
        if own.dtype != array.dtype and own.dtype.kind != "f" and not can_hold(own.dtype, array):
            raise SpecError(f"agent: {self.key(leaf)!r} has values that {space} cannot hold")
        return own
