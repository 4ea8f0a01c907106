"""`GatheredColumn`: a column that looks like a numpy array."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin


class GatheredColumn(NDArrayOperatorsMixin):
    """A column of a buffer, `(n, ...)`, whose rows are gathered when indexed.

    It has no bytes of its own. Any other operation of a numpy array copies the whole column.

    Args:
        shape, dtype: of the column.
        gather: returns the values of row ids (n,).
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, gather: Callable[[np.ndarray], np.ndarray]) -> None:
        self.shape, self.ndim, self.dtype, self._gather = shape, len(shape), dtype, gather

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        return self._at(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Copies the whole column, and sets rows of the copy.

        From then on this object has the copy.
        """
        own = np.array(self)
        own[index], self._gather = value, own.__getitem__

    def __iter__(self) -> Iterator[Any]:
        return iter(np.asarray(self))

    def _at(self, index: Any) -> Any:
        """Returns the values at an index, in private memory."""
        n = len(self)
        if type(index) is int and -n <= index < n:
            return self._gather(np.array([index % n]))[0]
        first, *inside = index if isinstance(index, tuple) and index else (index,)
        if isinstance(first, slice):
            return self._gather(np.arange(len(self))[first])[(slice(None), *inside)]
        first = np.asarray(first)
        if first.dtype == bool and first.ndim and first.shape == self.shape[: first.ndim]:
            # numpy replaces a mask, of several axes too, by the indexes where it is true.
            first, *others = first.nonzero()
            inside = [*others, *inside]
        if first.dtype.kind not in "iu":  # None, ..., and indexes that numpy refuses
            return np.asarray(self)[index]
        values = self._gather(self._rows(first).reshape(-1))
        # Beside other arrays, numpy needs one of the same shape.
        at = np.arange(first.size).reshape(first.shape)
        return values[(at, *inside)] if inside else values.reshape((*first.shape, *self.shape[1:]))[()]

    def _rows(self, index: np.ndarray) -> np.ndarray:
        """Converts integers to row ids, int64 of the same shape."""
        n = len(self)
        if index.size and (index.min() < -n or index.max() >= n):
            np.arange(n)[index]  # raises as numpy does
        at = index.astype(np.int64, copy=False)
        return np.asarray(np.where(at < 0, at + n, at))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._gather(np.arange(len(self))).astype(self.dtype if dtype is None else dtype, copy=False)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **settings: Any) -> Any:
        whole = (np.asarray(each) if isinstance(each, GatheredColumn) else each for each in inputs)
        out = settings.pop("out", ())
        if all(each is not self for each in out):
            return getattr(ufunc, method)(*whole, **settings, **({"out": out} if out else {}))
        own = np.array(self)  # what it shows from then on
        getattr(ufunc, method)(*whole, out=own, **settings)
        self._gather = own.__getitem__
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(np.asarray(self), name)

    def __repr__(self) -> str:
        return repr(np.asarray(self))
