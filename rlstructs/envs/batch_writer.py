"""Writes a batch of values into the rows of one array with a single call of numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class BatchWriter:
    """Writes the values of up to N environments into the rows of an array.

    Args:
        rows: (N, ...), contiguous.
        shape: of a value; () also where a row has shape (1,).
    """

    def __init__(self, rows: np.ndarray, shape: tuple[int, ...]) -> None:
        self._n = len(rows)
        # Values laid end to end along their first axis: `np.concatenate` takes half as long as `np.stack`, which
        # gives every array one more axis first.
        n_rows, rest = (self._n * shape[0], shape[1:]) if shape else (self._n, ())
        self._chain = rows.reshape(n_rows, *rest)
        self._length = shape[0] if shape else 1
        self._lengths = [shape[0]] * self._n if shape else []
        self._has_axes = bool(shape)
        # Floats may be rounded. Whole numbers of a wider dtype have to be checked one by one.
        self._casting: Any = "same_kind" if rows.dtype.kind == "f" else "safe"

    def try_write(self, values: Sequence[Any]) -> bool:
        """Writes the values to the first rows; returns False if one has another shape, type or a wider dtype."""
        n, is_full = len(values), len(values) == self._n
        chain = self._chain if is_full else self._chain[: n * self._length]
        try:
            if not self._has_axes:
                np.copyto(chain, np.asarray(values).reshape(n), casting=self._casting)
                return True
            # Too long and too short ones may add up.
            if list(map(len, values)) != (self._lengths if is_full else self._lengths[:n]):
                return False
            np.concatenate(values, out=chain, casting=self._casting)
        except (TypeError, ValueError, LookupError, RuntimeError):  # torch's own, of tensors with gradients
            return False
        return True
