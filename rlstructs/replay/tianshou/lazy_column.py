"""Columns as a buffer shows them: read-only arrays, and those that are put together when they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from rlstructs.errors import SpecError


class LazyColumn(NDArrayOperatorsMixin):
    """A column of a buffer, `(maxsize, ...)`, that does not lie in memory as it is: what is indexed is gathered.

    Anything else that an array of numpy can do is done on a copy of the whole column.

    Args:
        shape, dtype: of the whole.
        gather: what gives the values of row ids (n,).
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, gather: Callable[[np.ndarray], np.ndarray]) -> None:
        self.shape, self.ndim, self.dtype, self._gather = shape, len(shape), dtype, gather

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        found = self._at(index)
        return read_only(found) if isinstance(found, np.ndarray) else found

    def __setitem__(self, index: Any, value: Any) -> None:
        """Raises SpecError, which names the method that changes rows."""
        raise _not_writable()

    def _at(self, index: Any) -> Any:
        """What the whole column has there, of its own memory."""
        first, *inside = index if isinstance(index, tuple) and index else (index,)
        if isinstance(first, slice):
            return self._gather(np.arange(len(self))[first])[(slice(None), *inside)]
        first = np.asarray(first)
        if first.dtype == bool and first.ndim and first.shape == self.shape[: first.ndim]:
            # A mask, of further axes too, is what its places are: so numpy has it.
            first, *others = first.nonzero()
            inside = [*others, *inside]
        if first.dtype.kind not in "iu":  # None, ..., and what numpy refuses
            return np.asarray(self)[index]
        values = self._gather(self._rows(first).reshape(-1))
        # Beside other arrays it is one of the same shape that numpy needs.
        at = np.arange(first.size).reshape(first.shape)
        return values[(at, *inside)] if inside else values.reshape((*first.shape, *self.shape[1:]))[()]

    def _rows(self, index: np.ndarray) -> np.ndarray:
        """The row ids that whole numbers mean, int64 of the same shape."""
        n = len(self)
        if index.size and (index.min() < -n or index.max() >= n):
            np.arange(n)[index]  # raises as numpy does
        at = index.astype(np.int64, copy=False)
        return np.asarray(np.where(at < 0, at + n, at))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._gather(np.arange(len(self))).astype(self.dtype if dtype is None else dtype, copy=False)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **settings: Any) -> Any:
        whole = (np.asarray(each) if isinstance(each, LazyColumn) else each for each in inputs)
        return getattr(ufunc, method)(*whole, **settings)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(np.asarray(self), name)

    def __repr__(self) -> str:
        return repr(np.asarray(self))


class ReadOnlyArray(np.ndarray):
    """An array of numpy whose error, when it is written to, names the method that changes rows of a buffer.

    What is computed of it is plain, and so are its pickles.
    """

    def __setitem__(self, index: Any, value: Any) -> None:
        if not self.flags.writeable:  # a copy is
            raise _not_writable()
        super().__setitem__(index, value)

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        plain = np.asarray(array)
        return plain if plain.ndim else plain[()]

    def __reduce__(self) -> Any:
        return np.asarray(self).__reduce__()

    def __repr__(self) -> str:
        return repr(np.asarray(self))


def _not_writable() -> SpecError:
    return SpecError("a column is read-only: call set_array_at_key(values, key, index) of the buffer to change rows")


def read_only(array: np.ndarray) -> np.ndarray:
    """The same array, which cannot be written to any more."""
    array.flags.writeable = False
    # Arrays of objects stay plain: what environments say is taken apart by the types of what it is.
    return array if array.dtype == object else array.view(ReadOnlyArray)
