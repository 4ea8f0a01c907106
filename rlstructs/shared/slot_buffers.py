"""Several generations of slots in one arena, so that workers may write one while another is read."""

from __future__ import annotations

from dataclasses import dataclass
from mmap import ALLOCATIONGRANULARITY, mmap
from typing import Any

from rlstructs.shared.layout import Layout
from rlstructs.shared.slots import Slots

# Bytes of such a number, and the largest.
CUT = 8
EVERY = 2**63 - 1


@dataclass(frozen=True)
class Generations:
    """Where they lie, and behind them, for each worker, below which number it is to end its rollouts.

    Args:
        layout: of each.
        n: how many; rollout number i lies in generation i % n.
        n_workers: how many write them.
    """

    layout: Layout
    n: int
    n_workers: int

    @property
    def reserved_nbytes(self) -> int:
        """Address space, in bytes."""
        return self.n * self._stride + self.n_workers * CUT

    @property
    def nbytes(self) -> int:
        """Memory that rollouts take, in bytes, without the sparse columns."""
        return self.n * self.layout.nbytes

    def slots(self, buffer: mmap, **arguments: Any) -> list[Slots]:
        """The same slots of every generation; arguments as of `Slots`."""
        view = memoryview(buffer)
        return [Slots(self.layout, view[index * self._stride :], **arguments) for index in range(self.n)]

    def cuts(self, buffer: mmap) -> memoryview:
        """int64 (n_workers,): a worker ends rollouts below this number after the step that it is in."""
        return memoryview(buffer)[self.n * self._stride : self.reserved_nbytes].cast("q")

    @property
    def _stride(self) -> int:
        return -(-self.layout.reserved_nbytes // ALLOCATIONGRANULARITY) * ALLOCATIONGRANULARITY
