"""A column that is put together when it is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin


class LazyColumn(NDArrayOperatorsMixin):
    """A column of a buffer, `(maxsize, ...)`, that does not lie in memory as it is: what is indexed is gathered.

    Anything else that an array of numpy can do is done on a copy of the whole column.

    Args:
        shape, dtype: of the whole.
        gather: what gives the values of row ids (n,).
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, gather: Callable[[np.ndarray], np.ndarray]) -> None:
        self.shape, self.dtype, self._gather = shape, dtype, gather

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        of_rows, *inside = index if isinstance(index, tuple) else (index,)
        if of_rows is None or of_rows is Ellipsis:
            return read_only(np.asarray(self))[index]
        rows = self._rows(of_rows)
        values = self._gather(rows.reshape(-1)).reshape((*rows.shape, *self.shape[1:]))
        return read_only(values)[(*(slice(None),) * rows.ndim, *inside)]

    def _rows(self, index: Any) -> np.ndarray:
        """The row ids that an index of the first axis means, int64 of any shape."""
        n, at = len(self), None if isinstance(index, slice) else np.asarray(index)
        if at is None or at.dtype.kind not in "iu" or (at.size and (at.min() < -n or at.max() >= n)):
            return np.asarray(np.arange(n)[index])  # or raises as numpy does
        at = at.astype(np.int64, copy=False)
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


def read_only(array: np.ndarray) -> np.ndarray:
    """The same array, which cannot be written to any more."""
    array.flags.writeable = False
    return array
