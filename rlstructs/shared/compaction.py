"""Leaves out the steps that were no transitions, and closes the gaps."""

from __future__ import annotations

import numpy as np


class Mover:
    """Moves the steps of n environments to where they stay, one rollout after another."""

    def __init__(self, n: int) -> None:
        self._n = n
        # By strides and number of timesteps; written anew for each rollout: new memory would cost more than that.
        self._indexes: dict[tuple[int, ...], np.ndarray] = {}
        self._gaps: tuple[np.ndarray, np.ndarray] | None = None
        self._ready: set[tuple[int, ...]] = set()

    def begin(self, gaps: tuple[np.ndarray, np.ndarray] | None) -> None:
        """For each step that is left out its row, in ascending order, and the place that it would have had.

        Args:
            gaps: int64 (K,) twice; None for no such steps.
        """
        self._gaps = gaps
        self._ready.clear()

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """Moves the steps in one column.

        Args:
            source: (n, T, ...), of any strides.
            target: (n, T', ...), without gaps; may be the source. What stands behind the last step has no meaning.
        """
        if not source.size or not target.size:
            return
        found, to = entries(source), entries(target)
        if self._gaps is None:
            to[...] = found[:, : to.shape[1]]
            return
        strides = [stride // found.itemsize for stride in found.strides]
        size = (found.shape[0] - 1) * strides[0] + (found.shape[1] - 1) * strides[1] + 1
        flat = np.lib.stride_tricks.as_strided(found, (size,), (found.itemsize,), writeable=False)
        index = self._index(to.shape[1], *strides)
        if source is target:
            to[...] = flat.take(index, mode="clip")
        else:
            flat.take(index, out=to, mode="clip")  # "raise" would write to a copy first

    def _index(self, n_timesteps: int, per_env: int, per_step: int) -> np.ndarray:
        """From where in a flat array of these strides each step comes."""
        # One index for both axes: numpy takes by one four times as fast as by two.
        key = n_timesteps, per_env, per_step
        index = self._indexes.get(key)
        if index is None:
            index = self._indexes[key] = np.empty((self._n, n_timesteps), np.int64)
        if key not in self._ready:
            assert self._gaps is not None
            rows, places = self._gaps
            index[...] = per_step
            index[:, 0] = np.arange(self._n) * per_env
            within = places < n_timesteps
            np.add.at(index.reshape(-1), (rows * n_timesteps + places)[within], per_step)
            index.cumsum(axis=1, out=index)
            self._ready.add(key)
        return index


def entries(array: np.ndarray) -> np.ndarray:
    """(n, T, ...) as (n, T) of opaque bytes, which numpy moves whole."""
    if array.ndim > 2:
        array = array.reshape(*array.shape[:2], -1)
        return array.view(f"V{array.shape[2] * array.itemsize}")[..., 0]
    return array.view(f"V{array.itemsize}")
