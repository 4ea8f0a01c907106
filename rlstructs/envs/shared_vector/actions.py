"""The actions of N environments as arrays that the trainer writes and workers read."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector.utils import batch_space, iterate

from rlstructs.envs.parts import nest_rows, parts_of
from rlstructs.errors import SpecError

# The number types that actions may come in, as numpy's letters, and the bytes of the widest.
TYPES, WIDEST = frozenset("?bBhHiIlLqQefd"), 8
ALL = slice(None)


class Actions:
    """Actions as they come: an environment gets the number type that the trainer gave, not that of the space.

    Args:
        space: of one environment.
        n_envs: N.
        arrays: uint8, `WIDEST` bytes for each number, an array for each part of the space.
    """

    def __init__(self, space: gymnasium.Space[Any], n_envs: int, arrays: Sequence[np.ndarray]) -> None:
        self._space, self._n_envs = space, n_envs
        self._parts = list(parts_of(space))
        self._has_arrays = bool(self._parts) and all(part.is_array for part in self._parts)
        self._shapes = [part.shape for part in self._parts]
        self._is_plain = self._has_arrays and self._parts[0].path == ()
        self._arrays = arrays
        self._views: dict[tuple[int, str], np.ndarray] = {}

    def write(self, actions: Any, envs: Any = ALL, n: int | None = None) -> str:
        """Writes the actions of some environments, if they can be written as they are.

        Args:
            actions: n rows of what the batched space has.
            envs: an index: whose they are.
            n: how many they are; None for all N.

        Returns:
            What `read` needs: a letter for each part. Empty if they have to travel in another way.
        """
        types, n_rows = "", self._n_envs if n is None else n
        for at, part in enumerate(self._parts if self._has_arrays else ()):
            try:
                values = part.pick(actions)
            except (LookupError, TypeError):
                return ""
            if type(values) is not np.ndarray or values.shape != (n_rows, *self._shapes[at]):
                return ""
            letter = values.dtype.char
            if letter not in TYPES:
                return ""
            self._view(at, letter)[envs] = values
            types += letter
        return types

    def read(self, types: str, envs: Any) -> list[Any]:
        """The actions of some environments, one for each, in memory of their own."""
        if self._is_plain:
            return list(self._view(0, types)[envs].copy())
        arrays = [self._view(at, letter)[envs].copy() for at, letter in enumerate(types)]
        return nest_rows(self._space, iter(arrays), len(arrays[0]))

    def apart(self, actions: Any, n: int) -> list[Any]:
        """A batch of actions as one for each of n environments, taken apart as gymnasium does it.

        Raises:
            SpecError: they are not as many.
            Exception: what gymnasium raises if they are no batch.
        """
        # How a batch is taken apart depends on the kind of its space alone.
        rows = list(iterate(batch_space(self._space, 1), actions))
        if len(rows) != n:
            raise SpecError(f"actions: needs one for each of {n} environments, got {len(rows)}")
        seen: set[int] = set()
        for k, row in enumerate(rows):
            if id(row) in seen:  # `[action] * n`: an environment may change its own
                rows[k] = copy.deepcopy(row)
            seen.add(id(row))
        return rows

    def _view(self, at: int, letter: str) -> np.ndarray:
        found = self._views.get((at, letter))
        if found is None:
            dtype, shape, whole = np.dtype(letter), self._shapes[at], self._arrays[at]
            # A row lies at the same place in every type: rows that are under way may differ in it.
            strides = whole.size // self._n_envs, *np.empty(shape, dtype).strides
            found = np.ndarray((self._n_envs, *shape), dtype, whole.data, strides=strides)
            self._views[at, letter] = found
        return found
