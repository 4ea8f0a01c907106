"""`ArrayValues`: conversion, arithmetic and clearing of the arrays of a batch, whatever their names."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from rlstructs.replay import array_ops

V = TypeVar("V", bound="ArrayValues")


class ArrayValues(dict[str, Any]):
    """The part of `ArrayDict` that looks at values, whatever names they have."""

    def _arrays(self) -> dict[str, Any]:
        """All but what is empty."""
        raise NotImplementedError

    def _set(self, name: str, value: Any) -> None:
        """Puts an array under a name."""
        raise NotImplementedError

    def _like(self: V, items: Any) -> V:
        """Another batch of this kind."""
        raise NotImplementedError

    def _of_same_names(self, given: Any) -> dict[str, Any]:
        """The arrays of another batch, which must have the names of these.

        Raises:
            ValueError: it has others.
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
        """Whether it holds anything, of which there may be no rows, or a single one without an axis for rows."""
        return bool(self._arrays())

    @property
    def shape(self) -> list[int]:
        """The axes that all arrays have."""
        shapes = [array_ops.shape(value) or () for value in self._arrays().values()]
        return [min(sizes) for sizes in zip(*shapes, strict=False)]

    # Conversion

    def apply_values_transform(self: V, values_transform: Callable[[Any], Any], inplace: bool = False) -> V | None:
        """Each array put through a function; a new batch, or with `inplace` this one, and then None is returned."""
        made = self._mapped(values_transform)
        if not inplace:
            return made
        self._put(made)
        return None

    def _mapped(self: V, function: Callable[[Any], Any]) -> V:
        made: V = self._like({**self, **{name: function(value) for name, value in self._arrays().items()}})
        return made

    def to_torch(self: V, dtype: torch.dtype | None = None, device: torch.device | str | int = "cpu") -> V:
        """Numbers as tensors of this dtype (None: as they are) and device; those of numpy share their memory."""
        return self._mapped(lambda value: array_ops.tensor(value, dtype, device))

    def to_torch_(self, dtype: torch.dtype | None = None, device: torch.device | str | int = "cpu") -> None:
        """`to_torch` of this one."""
        self.apply_values_transform(lambda value: array_ops.tensor(value, dtype, device), inplace=True)

    def to_numpy(self: V) -> V:
        """Tensors as arrays of numpy, which share the memory of those on the CPU."""
        return self._mapped(array_ops.array)

    def to_numpy_(self) -> None:
        """`to_numpy` of this one."""
        self.apply_values_transform(array_ops.array, inplace=True)

    def isnull(self: V) -> V:
        """Where values are NaN or None: arrays of bools."""
        return self._mapped(array_ops.nulls)

    def hasnull(self) -> bool:
        """Whether a value is NaN or None."""
        return any(array_ops.nulls(value).any() for value in self._arrays().values())

    # Arithmetic

    def __add__(self: V, other: Any) -> V:
        """Sums with the arrays of another batch, or with a number."""
        return self._with(operator.add, other)

    def __mul__(self: V, other: Any) -> V:
        """Products, likewise."""
        return self._with(operator.mul, other)

    def __truediv__(self: V, other: Any) -> V:
        """Quotients, likewise."""
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
        """A copy of a batch in which some rows, or all, are zeros."""
        return copy.deepcopy(batch).empty_(index)

    def empty_(self: V, index: Any = None) -> V:
        """Fills rows with zeros, those of objects with None; what is no array becomes 0, or None.

        Args:
            index: of the rows; None for all.

        Returns:
            The batch.
        """
        for name, value in self._arrays().items():
            self._set(name, array_ops.cleared(value, ... if index is None else index))
        return self
