"""The actions of N environments as arrays that the trainer writes and workers read."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector.utils import batch_space, iterate

from rlstructs.envs.space_tree import flatten_space, nest_rows
from rlstructs.errors import SpecError

# Dtypes that actions may have, as numpy's character codes, and the bytes of the widest.
TYPES, WIDEST = frozenset("?bBhHiIlLqQefd"), 8
ALL = slice(None)


class Actions:
    """Stores actions in the dtypes in which they are given, which may differ from those of the space.

    Args:
        space: of one environment.
        n_envs: N.
        arrays: uint8, one for each leaf of the space, `WIDEST` bytes for each number.
    """

    def __init__(self, space: gymnasium.Space[Any], n_envs: int, arrays: Sequence[np.ndarray]) -> None:
        self._space, self._n_envs = space, n_envs
        self._leaves = list(flatten_space(space))
        self._has_arrays = bool(self._leaves) and all(leaf.is_array for leaf in self._leaves)
        self._shapes = [leaf.shape for leaf in self._leaves]
        self._is_plain = self._has_arrays and self._leaves[0].path == ()
        self._arrays = arrays
        self._views: dict[tuple[int, str], np.ndarray] = {}

    def write(self, actions: Any, envs: Any = ALL, n: int | None = None) -> str:
        """Writes the actions of some environments, if all of them are arrays of numbers.

        Args:
            actions: a batch of n actions, in the form of the batched space.
            envs: an index of the environments.
            n: number of environments; None for all N.

        Returns:
            The dtypes that `read` needs, a character for each leaf; empty if the actions have to be pickled.
        """
        arrays = self._find_arrays(actions, self._n_envs if n is None else n)
        for at, values in enumerate(arrays):
            self._view(at, values.dtype.char)[envs] = values
        return "".join([values.dtype.char for values in arrays])

    def read(self, types: str, envs: Any) -> list[Any]:
        """Returns a copy of the action of each of these environments."""
        return self._split_arrays([self._view(at, letter)[envs].copy() for at, letter in enumerate(types)])

    def copy(self, actions: Any, n: int) -> list[Any]:
        """Returns a copy of the action of each of n environments, as `write` and `read` do, or `split`."""
        arrays = [np.array(values, values.dtype.char, order="C") for values in self._find_arrays(actions, n)]
        return self._split_arrays(arrays) if arrays else self.split(actions, n)

    def _find_arrays(self, actions: Any, n: int) -> list[np.ndarray]:
        """The array of each leaf of a batch of n actions; empty if one is not an array of numbers."""
        found: list[np.ndarray] = []
        for leaf, shape in zip(self._leaves, self._shapes, strict=True) if self._has_arrays else ():
            try:
                values = leaf.pick(actions)
            except (LookupError, TypeError):
                return []
            if type(values) is not np.ndarray or values.shape != (n, *shape) or values.dtype.char not in TYPES:
                return []
            found.append(values)
        return found

    def _split_arrays(self, arrays: list[np.ndarray]) -> list[Any]:
        return list(arrays[0]) if self._is_plain else nest_rows(self._space, iter(arrays), len(arrays[0]))

    def split(self, actions: Any, n: int) -> list[Any]:
        """Splits a batch of actions into one for each of n environments, as gymnasium does.

        Raises:
            SpecError: there are more or fewer than n.
            Exception: what gymnasium raises if `actions` is not a batch.
        """
        # gymnasium splits by the type of the batched space, whatever its batch size.
        rows = list(iterate(batch_space(self._space, 1), actions))
        if len(rows) != n:
            raise SpecError(f"actions: needs one for each of {n} environments, got {len(rows)}")
        seen: set[int] = set()
        for k, row in enumerate(rows):
            if id(row) in seen:  # as in `[action] * n`: an environment may change its action
                rows[k] = copy.deepcopy(row)
            seen.add(id(row))
        return rows

    def _view(self, at: int, letter: str) -> np.ndarray:
        """The array of one leaf, (N, ...), in this dtype."""
        found = self._views.get((at, letter))
        if found is None:
            dtype, shape, whole = np.dtype(letter), self._shapes[at], self._arrays[at]
            # A row starts at the same byte in every dtype, because rows not yet read may have another one.
            strides = whole.size // self._n_envs, *np.empty(shape, dtype).strides
            found = np.ndarray((self._n_envs, *shape), dtype, whole.data, strides=strides)
            self._views[at, letter] = found
        return found
