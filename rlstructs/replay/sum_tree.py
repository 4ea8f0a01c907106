# mypy: disable-error-code="valid-type,untyped-decorator,attr-defined"
"""Sums and minima over priorities, in trees that draw in proportion and update in batches.

Two Warp kernels in float64, level by level: a draw walks all its masses down one level before the next
(the loads of one level overlap, those of one walk cannot), an update writes leaves and then each level's
parents from their two children. A parent is always the sum of its children as they are: nothing drifts.
The levels need no power of two, so that leaves keep their order and no leaf lies beyond the last.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import warp as wp

from rlstructs.errors import SpecError
from rlstructs.structures.interop import quiet_warp, start_warp


@wp.kernel(enable_backward=False)
def _draw(
    sums: wp.array(dtype=wp.float64),
    offsets: wp.array(dtype=wp.int32),
    masses: wp.array(dtype=wp.float64),
    leaves: wp.array(dtype=wp.int32),
    n: wp.int32,
) -> None:
    for i in range(n):
        leaves[i] = 0
    for up in range(1, offsets.shape[0]):
        level = offsets[offsets.shape[0] - 1 - up]
        for i in range(n):
            node = 2 * leaves[i]
            left = sums[level + node]
            # A sum that is zero is never entered, wherever a mass was rounded to.
            if masses[i] >= left and sums[level + node + 1] > wp.float64(0.0):
                masses[i] = masses[i] - left
                node = node + 1
            leaves[i] = node


@wp.kernel(enable_backward=False)
def _update(
    sums: wp.array(dtype=wp.float64),
    minima: wp.array(dtype=wp.float64),
    offsets: wp.array(dtype=wp.int32),
    leaves: wp.array(dtype=wp.int32),
    values: wp.array(dtype=wp.float64),
    n: wp.int32,
) -> None:
    for i in range(n):
        sums[leaves[i]] = values[i]
        # An empty leaf is no minimum.
        minima[leaves[i]] = wp.where(values[i] > wp.float64(0.0), values[i], wp.float64(wp.inf))
    for level in range(offsets.shape[0] - 1):
        below = offsets[level]
        here = offsets[level + 1]
        for i in range(n):
            node = leaves[i] / 2
            leaves[i] = node
            left = below + 2 * node
            sums[here + node] = sums[left] + sums[left + 1]
            minima[here + node] = wp.min(minima[left], minima[left + 1])


class SumTree:
    """`n_leaves` values, float64, all zero at first.

    Args:
        n_leaves: how many.

    Example:
        >>> tree = SumTree(3)
        >>> tree.update(np.array([0, 1, 2]), np.array([1.0, 0.0, 2.0]))
        >>> tree.total, tree.minimum, tree.draw(np.array([0.5, 1.5, 2.5])).tolist()
        (3.0, 1.0, [0, 2, 2])
    """

    def __init__(self, n_leaves: int) -> None:
        self.n_leaves = n_leaves
        sizes = _level_sizes(n_leaves)
        offsets = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        self._offsets = offsets.astype(np.int32)
        self.sums = np.zeros(sum(sizes))
        self.minima = np.full(sum(sizes), np.inf)
        self._launches: dict[str, Any] = {}

    @staticmethod
    def nbytes_of(n_leaves: int) -> int:
        """Bytes that a tree takes."""
        return 16 * sum(_level_sizes(n_leaves))

    @property
    def total(self) -> float:
        """The sum of all values."""
        return float(self.sums[self._offsets[-1]])

    @property
    def minimum(self) -> float:
        """The smallest value above zero, infinity if there is none."""
        return float(self.minima[self._offsets[-1]])

    @property
    def values(self) -> np.ndarray:
        """float64 (n_leaves,), a view: to be read only."""
        return self.sums[: self.n_leaves]

    def draw(self, masses: np.ndarray) -> np.ndarray:
        """The leaves in which these masses lie, int32 (B,).

        Args:
            masses: float64 (B,), in [0, total). None ends in a leaf of value zero unless all are.
        """
        buffer, leaves = self._buffers("draw", len(masses))
        buffer[: len(masses)] = masses
        self._launch("draw", len(masses))
        return leaves[: len(masses)].copy()

    def update(self, leaves: np.ndarray, values: np.ndarray) -> None:
        """Sets values; of equal leaves the last counts.

        Args:
            leaves: int (B,), in [0, n_leaves).
            values: float64 (B,), finite, at least 0.
        """
        buffer, target = self._buffers("update", len(leaves))
        buffer[: len(leaves)] = values
        target[: len(leaves)] = leaves
        self._launch("update", len(leaves))

    def fill(self, values: np.ndarray) -> None:
        """Sets every value."""
        self.sums[: self.n_leaves] = values
        self.minima[: self.n_leaves] = np.where(values > 0, values, np.inf)
        offsets = self._offsets.tolist()
        for below, here in itertools.pairwise(offsets):
            n = (here - below) // 2
            self.sums[here : here + n] = self.sums[below:here].reshape(n, 2).sum(axis=1)
            self.minima[here : here + n] = self.minima[below:here].reshape(n, 2).min(axis=1)

    def _buffers(self, kind: str, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Arrays that a launch was recorded with; kept, for making them costs more than the launch."""
        if kind not in self._launches or len(self._launches[kind][1]) < n:
            size = max(n, 256)
            values, leaves = np.zeros(size), np.zeros(size, np.int32)
            self._launches[kind] = self._record(kind, values, leaves), values, leaves
        _, values, leaves = self._launches[kind]
        return values, leaves

    def _record(self, kind: str, values: np.ndarray, leaves: np.ndarray) -> Any:
        start_warp()
        if kind == "draw":
            kernel, arrays = _draw, [self.sums, self._offsets, values, leaves]
        else:
            kernel, arrays = _update, [self.sums, self.minima, self._offsets, leaves, values]
        inputs = [wp.array(array, copy=False, device="cpu") for array in arrays]
        with quiet_warp():
            return wp.launch(kernel, dim=1, inputs=[*inputs, 0], device="cpu", record_cmd=True), inputs

    def _launch(self, kind: str, n: int) -> None:
        (command, inputs), _, _ = self._launches[kind]
        command.set_param_at_index(len(inputs), n)
        command.launch()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_launches": {}}


def _level_sizes(n_leaves: int) -> list[int]:
    """Entries of each level from the leaves up, even so that every node has two children; the last is the root."""
    if n_leaves < 1:
        raise SpecError(f"a sum tree needs at least 1 leaf, got {n_leaves}")
    sizes, n = [], n_leaves
    while n > 1:
        sizes.append(n + n % 2)
        n = sizes[-1] // 2
    return [*sizes, 1]
