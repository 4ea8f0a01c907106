"""`Batches`: hands copies of rows over as arrays of the library, in mini-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlstructs.errors import MissingKeyError
from rlstructs.memories.tensors import Tensors


class Batches:
    """Hands copies of rows over.

    Args:
        tensors: the tensors that the rows are of.
    """

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._own_dtypes: dict[np.dtype, Any] = {}  # dtype of numpy -> the library's, which takes time to find

    def check_names(self, names: Sequence[str], strict: bool) -> tuple[list[str], list[str]]:
        """Returns the names as a list, and those among them that are names of tensors.

        Raises:
            TypeError: a string is given for a list.
            MissingKeyError: a name is unknown, if `strict`.
        """
        if isinstance(names, str):
            raise TypeError(f"names must be a list of names, got the string {names!r}")
        dtypes = self._tensors.dtypes
        known = [name for name in names if name in dtypes]
        if strict and len(known) < len(names):
            unknown = sorted(set(names) - set(dtypes))
            raise MissingKeyError(f"no tensor(s) {unknown} in this memory, there are {sorted(dtypes)}")
        return list(names), known

    def split(
        self, names: list[str], known: list[str], arrays: list[Any], mini_batches: int, starts: np.ndarray | None = None
    ) -> list[list[Any]]:
        """Hands arrays over in parts of nearly equal size.

        Args:
            names: the names asked for; unknown ones give None.
            known: names of the arrays.
            arrays: `(n, *data)`, which nobody else holds.
            mini_batches: number of parts; one for numbers below 1.
            starts: the rows that a part may begin with, int64; None for all.
        """
        if isinstance(mini_batches, bool) or not hasattr(mini_batches, "__index__"):
            raise TypeError(f"mini_batches must be an int, got {mini_batches!r}")
        if mini_batches <= 1:
            return [self._hand_over(names, known, arrays)]
        n_rows = len(arrays[0]) if arrays else 0
        bounds = np.arange(n_rows + 1) if starts is None else np.append(starts, n_rows)
        batches = []
        for part in np.array_split(np.arange(len(bounds) - 1), mini_batches):
            low, high = (bounds[part[0]], bounds[part[-1] + 1]) if part.size else (n_rows, n_rows)
            batches.append(self._hand_over(names, known, [array[low:high] for array in arrays]))
        return batches

    def _hand_over(self, names: list[str], known: list[str], arrays: list[Any]) -> list[Any]:
        """Returns the library's array of each name, None for unknown ones."""
        tensors = self._tensors
        made = tensors.framework.hand_over(arrays, [tensors.dtypes[name] for name in known], tensors.device)
        if len(names) == len(known):
            return made
        found = iter(made)
        return [next(found) if name in known else None for name in names]

    def hand_over_one(self, array: np.ndarray) -> Any:
        """Hands over an array that belongs to no tensor, and that nobody else holds."""
        framework, dtypes = self._tensors.framework, self._own_dtypes
        if array.dtype not in dtypes:
            dtypes[array.dtype] = framework.dtype(array.dtype)
        return framework.hand_over([array], [dtypes[array.dtype]], self._tensors.device)[0]
