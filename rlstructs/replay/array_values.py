"""`ArrayValues`: converts, calculates with and clears the arrays of a batch."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from rlstructs.replay import array_ops

V = TypeVar("V", bound="ArrayValues")


class ArrayValues(dict[str, Any]):
    """Base class of `ArrayDict`, for what depends on values and not on names."""

    def _arrays(self) -> dict[str, Any]:
        """All values except empty batches, by name."""
        raise NotImplementedError

    def _set(self, name: str, value: Any) -> None:
        """Sets an array."""
        raise NotImplementedError

    def _like(self: V, items: Any) -> V:
        """Creates another batch of this kind."""
        raise NotImplementedError

    def _of_same_names(self, given: Any) -> dict[str, Any]:
        """Returns the arrays of another batch.

        Raises:
            ValueError: its names are others.
        """
        raise NotImplementedError

    # Rows

    def __len__(self) -> int:
        shapes = map(array_ops.shape, self._arrays().values())
        sizes = next((sizes for sizes in shapes if sizes is not None), (0,))
        if not sizes:
            raise TypeError("a batch without an axis for rows has no length")
        return sizes[0]

    def __bool__(self) -> bool:
        """Whether it has arrays, even without rows."""
        return bool(self._arrays())

    @property
    def shape(self) -> list[int]:
        """The shortest length of each axis that all arrays have."""
        shapes = [array_ops.shape(value) or () for value in self._arrays().values()]
        return [min(sizes) for sizes in zip(*shapes, strict=False)]

    # Conversion

    def apply_values_transform(self: V, values_transform: Callable[[Any], Any], inplace: bool = False) -> V | None:
        """Applies a function to each array; returns a new batch, or None if `inplace`."""
        made = self._mapped(values_transform)
        if not inplace:
            return made
        self._put(made)
        return None

    def _mapped(self: V, function: Callable[[Any], Any]) -> V:
        made: V = self._like({**self, **{name: function(value) for name, value in self._arrays().items()}})
        return made

    def to_torch(self: V, dtype: torch.dtype | None = None, device: torch.device | str | int = "cpu") -> V:
        """Converts numbers to tensors, which share numpy's memory; `dtype` None keeps their dtypes."""
        return self._mapped(lambda value: array_ops.tensor(value, dtype, device))

    def to_torch_(self, dtype: torch.dtype | None = None, device: torch.device | str | int = "cpu") -> None:
        """Does what `to_torch` does, in place."""
        self.apply_values_transform(lambda value: array_ops.tensor(value, dtype, device), inplace=True)

    def to_numpy(self: V) -> V:
        """Converts tensors to numpy arrays, which share memory on the CPU."""
        return self._mapped(array_ops.array)

    def to_numpy_(self) -> None:
        """Does what `to_numpy` does, in place."""
        self.apply_values_transform(array_ops.array, inplace=True)

    def to_at_least_2d(self: V) -> V:
        """Gives arrays of fewer than two axes more in front, as numpy's `atleast_2d` does."""
        return self._mapped(array_ops.at_least_2d)

    def isnull(self: V) -> V:
        """Where values are NaN or None, as arrays of bool."""
        return self._mapped(array_ops.nulls)

    def hasnull(self) -> bool:
        """Whether a value is NaN or None."""
        return any(array_ops.nulls(value).any() for value in self._arrays().values())

    # Arithmetic

    def __add__(self: V, other: Any) -> V:
        """Adds the arrays of another batch, or a number."""
        return self._with(operator.add, other)

    def __mul__(self: V, other: Any) -> V:
        """Multiplies by the arrays of another batch, or by a number."""
        return self._with(operator.mul, other)

    def __truediv__(self: V, other: Any) -> V:
        """Divides by the arrays of another batch, or by a number."""
        return self._with(operator.truediv, other)

    def __iadd__(self: V, other: Any) -> V:
        return self._put(self + other)

    def __imul__(self: V, other: Any) -> V:
        return self._put(self * other)

    def __itruediv__(self: V, other: Any) -> V:
        return self._put(self / other)

    def _with(self: V, function: Callable[[Any, Any], Any], other: Any) -> V:
        if not isinstance(other, Mapping):
            return self._mapped(lambda value: function(value, other))
        others = self._of_same_names(other)
        return self._like({**self, **{name: function(value, others[name]) for name, value in self._arrays().items()}})

    def _put(self: V, made: V) -> V:
        for name, value in made._arrays().items():
            self._set(name, value)
        return self

    # Cleared

    @staticmethod
    def empty(batch: V, index: Any = None) -> V:
        """Returns a copy of a batch with zeros in some rows, or in all."""
        return copy.deepcopy(batch).empty_(index)

    def empty_(self: V, index: Any = None) -> V:
        """Fills rows with zeros, or with None for objects; values that are no arrays become 0 or None.

        Args:
            index: of the rows; None for all.

        Returns:
            The batch.
        """
        for name, value in self._arrays().items():
            self._set(name, array_ops.cleared(value, ... if index is None else index))
        return self
