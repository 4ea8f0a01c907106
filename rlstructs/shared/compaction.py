"""Removes steps that are not transitions, and closes the gaps."""

from __future__ import annotations

import numpy as np


class Mover:
    """Moves the steps of n environments to their slots, without the steps to remove."""

    def __init__(self, n: int) -> None:
        self._n = n
        # By number of timesteps and strides. Each rollout overwrites them, which is cheaper than allocating new ones.
        self._indexes: dict[tuple[int, ...], np.ndarray] = {}
        self._gaps: tuple[np.ndarray, np.ndarray] | None = None
        self._ready: set[tuple[int, ...]] = set()

    def begin(self, gaps: tuple[np.ndarray, np.ndarray] | None) -> None:
        """Starts a rollout.

        Args:
            gaps: rows, ascending, and places of the K steps to remove, int64 (K,) each; None if there are none. A place
                is the number of steps before it in its row that stay.
        """
        self._gaps = gaps
        self._ready.clear()

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """Moves the steps in one column.

        Args:
            source: (n, T, ...), of any strides.
            target: (n, T', ...); may be the source. Values after the last step of a row are undefined.
        """
        if not source.size or not target.size:
            return
        origin, to = view_entries(source), view_entries(target)
        if self._gaps is None:
            to[...] = origin[:, : to.shape[1]]
            return
        strides = [stride // origin.itemsize for stride in origin.strides]
        size = (origin.shape[0] - 1) * strides[0] + (origin.shape[1] - 1) * strides[1] + 1
        flat = np.lib.stride_tricks.as_strided(origin, (size,), (origin.itemsize,), writeable=False)
        index = self._index(to.shape[1], *strides)
        if source is target:
            to[...] = flat.take(index, mode="clip")
        else:
            flat.take(index, out=to, mode="clip")  # mode "raise" would write to a copy first

    def _index(self, n_timesteps: int, per_env: int, per_step: int) -> np.ndarray:
        """Computes the source of each step, int64 (n, n_timesteps).

        It is an index into a flat array with these strides.
        """
        # One index for both axes, because numpy is four times as fast with one as with two.
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


def view_entries(array: np.ndarray) -> np.ndarray:
    """Views an array (n, T, ...) as opaque entries (n, T).

    numpy copies each of them at once.
    """
    if array.ndim > 2:
        array = array.reshape(*array.shape[:2], -1)
        return array.view(f"V{array.shape[2] * array.itemsize}")[..., 0]
    return array.view(f"V{array.itemsize}")
