# mypy: disable-error-code="valid-type,untyped-decorator,attr-defined"
"""Trees of sums and minima of priorities.

They draw leaves in proportion and are updated in batches. There are two Warp kernels in float64, which go level by
level. A draw moves all of its masses down one level before the next, because the loads of a level overlap. An update
writes leaves, and then computes the parents of each level from their children: a parent is always the sum of its
children, so errors do not accumulate. A node has eight children, which share a cache line. With a million leaves the
levels above take 1 MB, so that a draw waits for memory about once; with two children per node it would be four times.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import warp as wp

from rlstructs.errors import SpecError
from rlstructs.frameworks.start_warp import quiet_warp, start_warp

# Children of a node: their sums fill one cache line, so that a level costs a draw one load from memory.
FAN_OUT = 8
CACHE_LINE = 64  # bytes


Node = wp.types.vector(length=FAN_OUT, dtype=wp.float64)


@wp.struct
class Arrays:
    """The arguments of a kernel, as one parameter.

    A launch passes each parameter by itself, which takes longer.
    """

    sums: wp.array(dtype=wp.float64)
    nodes: wp.array(dtype=Node)
    minima: wp.array(dtype=wp.float64)
    least_nodes: wp.array(dtype=Node)
    offsets: wp.array(dtype=wp.int32)
    values: wp.array(dtype=wp.float64)
    leaves: wp.array(dtype=wp.int64)
    count: wp.array(dtype=wp.int32)


@wp.kernel(enable_backward=False)
def _draw(arrays: Arrays) -> None:
    sums = arrays.sums
    nodes = arrays.nodes
    offsets = arrays.offsets
    masses = arrays.values
    leaves = arrays.leaves
    n = arrays.count[0]
    zero = wp.float64(0.0)
    share = sums[sums.shape[0] - 1] / wp.float64(n)
    for i in range(n):  # each mass is a fraction of its share of the total
        masses[i] = (wp.float64(i) + masses[i]) * share
    # The masses ascend: one walk along a level of a few hundred sums finds all of them, instead of the levels above it.
    top = offsets.shape[0] - 1
    while top > 0 and offsets[top] - offsets[top - 1] <= 256:
        top = top - 1
    start = offsets[top]
    last = wp.int32(0)
    if top < offsets.shape[0] - 1:
        last = offsets[top + 1] - start - 1
    while last > 0 and not sums[start + last] > zero:
        last = last - 1
    at_top = wp.int32(0)
    passed = zero
    for i in range(n):
        while at_top < last and masses[i] >= passed + sums[start + at_top]:
            passed = passed + sums[start + at_top]
            at_top = at_top + 1
        masses[i] = masses[i] - passed
        leaves[i] = wp.int64(at_top)
    for down in range(top):
        level = offsets[top - 1 - down]
        if offsets[top - down] - level > 65536:
            # The level does not fit in a core's cache: load all lines before waiting for the first.
            touched = zero
            for i in range(n):
                touched = touched + sums[level + 8 * wp.int32(leaves[i])]
            masses[n] = touched  # or the compiler would omit the loads
        for i in range(n):
            first = 8 * wp.int32(leaves[i])
            at = level + first
            # Without branches: a mispredicted one costs more than the step, and delays the loads of the next draws.
            mass = masses[i]
            s = nodes[at / 8]
            # Chooses a half of the node, then a quarter, then a child.
            end = (s[0] + s[1]) + (s[2] + s[3])
            upper = mass >= end
            before = wp.where(upper, end, zero)
            child = wp.where(upper, 4, 0)
            left = wp.where(upper, s[4], s[0])
            right = wp.where(upper, s[6], s[2])
            end = before + (left + wp.where(upper, s[5], s[1]))
            upper = mass >= end
            before = wp.where(upper, end, before)
            child = child + wp.where(upper, 2, 0)
            end = before + wp.where(upper, right, left)
            upper = mass >= end
            before = wp.where(upper, end, before)
            child = child + wp.where(upper, 1, 0)
            # A sum of zero is never entered, even if a mass was rounded; this branch is hardly ever taken.
            if not sums[at + child] > zero:
                end = zero
                before = zero
                child = wp.int32(0)
                for c in range(8):
                    if sums[at + c] > zero:
                        child = c
                        before = end
                    end = end + sums[at + c]
            masses[i] = mass - before
            leaves[i] = wp.int64(first + child)
    for i in range(n):
        masses[i] = sums[leaves[i]]


@wp.kernel(enable_backward=False)
def _update(arrays: Arrays) -> None:
    sums = arrays.sums
    nodes = arrays.nodes
    minima = arrays.minima
    least_nodes = arrays.least_nodes
    offsets = arrays.offsets
    values = arrays.values
    leaves = arrays.leaves
    n = arrays.count[0]
    zero = wp.float64(0.0)
    inf = wp.float64(wp.inf)
    for i in range(n):
        sums[leaves[i]] = values[i]
    for level in range(offsets.shape[0] - 1):
        first_node = offsets[level] / 8
        here = offsets[level + 1]
        n_parents = wp.int32(0)
        previous = wp.int32(-1)
        for i in range(n):
            parent = wp.int32(leaves[i]) / 8
            if parent != previous:  # consecutive leaves share parents, so that sorted leaves cost little
                s = nodes[first_node + parent]
                # In pairs, which the processor can add in parallel.
                sums[here + parent] = ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]))
                if level == 0:  # leaves have no minima; a zero does not count
                    for c in range(8):
                        s[c] = wp.where(s[c] > zero, s[c], inf)
                else:
                    s = least_nodes[first_node + parent - offsets[1] / 8]
                minima[here + parent - offsets[1]] = wp.min(
                    wp.min(wp.min(s[0], s[1]), wp.min(s[2], s[3])), wp.min(wp.min(s[4], s[5]), wp.min(s[6], s[7]))
                )
                leaves[n_parents] = wp.int64(parent)
                n_parents = n_parents + 1
                previous = parent
        n = n_parents


class SumTree:
    """A tree over `n_leaves` values, float64, initially zero.

    Args:
        n_leaves: number of values.

    Example:
        >>> tree = SumTree(3)
        >>> tree.update(np.array([0, 1, 2]), np.array([1.0, 0.0, 2.0]))
        >>> tree.total, tree.minimum, tree.draw(3, np.random.default_rng(0)).tolist()
        (3.0, 1.0, [0, 2, 2])
    """

    def __init__(self, n_leaves: int) -> None:
        self.n_leaves = n_leaves
        sizes = _level_sizes(n_leaves)
        offsets = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        self._offsets = offsets.astype(np.int32)
        self.sums = _aligned(sum(sizes))
        self.minima = _aligned(sum(sizes[1:]))  # of all but the leaves
        self.minima[:] = np.inf
        self._room = -1  # of the memory that kernels read and write

    @staticmethod
    def nbytes_of(n_leaves: int) -> int:
        """Returns the bytes of a tree."""
        sizes = _level_sizes(n_leaves)
        return 8 * (sum(sizes) + sum(sizes[1:]))

    @property
    def total(self) -> float:
        """The sum of all values."""
        return float(self.sums[-1])

    @property
    def minimum(self) -> float:
        """The smallest value above zero; infinity if there is none."""
        return float(self.minima[-1])

    @property
    def values(self) -> np.ndarray:
        """The values, float64 (n_leaves,), a view that must not be written to."""
        return self.sums[: self.n_leaves]

    def draw(self, n: int, rng: np.random.Generator) -> np.ndarray:
        """Draws n leaves in proportion to the values, int64 (n,), ascending.

        The total is divided into n equal parts, and each part gives one leaf. None of them is zero, unless all leaves
        are.
        """
        return self.draw_with_values(n, rng)[0]

    def draw_with_values(self, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draws; also returns the values of the leaves, float64 (n,)."""
        if n > self._room:
            self._make_room(n)
        rng.random(out=self._values[:n])
        self._count[0] = n  # in an array, because setting a parameter of a launch costs more
        self._draw.launch()
        return self._leaves[:n].copy(), self._values[:n].copy()

    def update(self, leaves: np.ndarray, values: np.ndarray) -> None:
        """Sets values; if a leaf is repeated, its last value counts.

        Args:
            leaves: int (B,), in [0, n_leaves).
            values: float64 (B,), finite, at least 0.
        """
        n = len(leaves)
        if n > self._room:
            self._make_room(n)
        self._values[:n] = values
        self._leaves[:n] = leaves
        self._count[0] = n
        self._update.launch()

    def fill(self, values: np.ndarray) -> None:
        """Sets all values, float64 (n_leaves,)."""
        self.sums[: self.n_leaves] = values
        least = np.where(self.sums > 0, self.sums, np.inf)[: self._offsets[1]]
        for below, here in itertools.pairwise(self._offsets.tolist()):
            n = (here - below) // FAN_OUT
            pairs = self.sums[below:here].reshape(n, 4, 2).sum(axis=2)  # in the order of the kernel: the same bits
            self.sums[here : here + n] = (pairs[:, 0] + pairs[:, 1]) + (pairs[:, 2] + pairs[:, 3])
            start = here - self._offsets[1]
            self.minima[start : start + n] = least.reshape(n, FAN_OUT).min(axis=1)
            least = self.minima[start : start + -(-n // FAN_OUT) * FAN_OUT]

    def _make_room(self, n: int) -> None:
        """Makes memory for n leaves, and records launches that use it.

        Making both for each call would cost more than the launch.
        """
        start_warp()
        self._room = max(n, 256)
        self._values, self._leaves = np.zeros(self._room + 1), np.zeros(self._room, np.int64)
        self._count = np.zeros(1, np.int32)
        arrays = Arrays()
        arrays.sums, arrays.nodes = _view(self.sums), _nodes(self.sums)
        arrays.minima, arrays.least_nodes = _view(self.minima), _nodes(self.minima)
        arrays.offsets, arrays.count = _view(self._offsets), _view(self._count)
        arrays.values, arrays.leaves = _view(self._values), _view(self._leaves)
        with quiet_warp():
            self._draw, self._update = (
                wp.launch(kernel, dim=1, inputs=[arrays], device="cpu", record_cmd=True) for kernel in (_draw, _update)
            )

    def __getstate__(self) -> dict[str, Any]:
        names = ("n_leaves", "_offsets", "sums", "minima")
        return {"_room": -1, **{name: vars(self)[name] for name in names}}  # launches belong to their process


def _view(array: np.ndarray) -> Any:
    return wp.array(array, copy=False, device="cpu")


def _nodes(array: np.ndarray) -> Any:
    n = array.size // FAN_OUT  # without the root
    return wp.array(array[: n * FAN_OUT].reshape(n, FAN_OUT), dtype=Node, copy=False, device="cpu")


def _aligned(n: int) -> np.ndarray:
    """Makes n zeros, aligned to a cache line."""
    space = np.zeros(n + CACHE_LINE // 8)
    start = -space.ctypes.data % CACHE_LINE // 8
    return space[start : start + n]


def _level_sizes(n_leaves: int) -> list[int]:
    """Returns the sizes of the levels, from the leaves to the root.

    They are padded so that every node has all of its children.
    """
    if n_leaves < 1:
        raise SpecError(f"a sum tree needs at least 1 leaf, got {n_leaves}")
    sizes: list[int] = []
    n = n_leaves
    while not sizes or n > 1:
        sizes.append(-(-n // FAN_OUT) * FAN_OUT)
        n = sizes[-1] // FAN_OUT
    return [*sizes, 1]
