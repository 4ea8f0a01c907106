"""Several buffers of slots in one arena, so that workers write one while another is read."""

from __future__ import annotations

from dataclasses import dataclass
from mmap import ALLOCATIONGRANULARITY, mmap
from typing import Any

from rlstructs.shared.layout import Layout
from rlstructs.shared.slots import Slots

# Bytes of the number below which a worker ends its rollouts, and the largest one.
CUT_BYTES = 8
ALL_ROLLOUTS = 2**63 - 1


@dataclass(frozen=True)
class SlotBuffers:
    """Where the slot buffers lie in the arena, followed by one number per worker.

    A worker ends early every rollout whose number is below its own.

    Args:
        layout: of each buffer.
        n: number of buffers; rollout number i is written to buffer i % n.
        n_workers: number of workers that write them.
    """

    layout: Layout
    n: int
    n_workers: int

    @property
    def reserved_nbytes(self) -> int:
        """Address space, in bytes."""
        return self.n * self._stride + self.n_workers * CUT_BYTES

    @property
    def nbytes(self) -> int:
        """Memory that rollouts take, in bytes, without the sparse columns."""
        return self.n * self.layout.nbytes

    def slots(self, buffer: mmap, **arguments: Any) -> list[Slots]:
        """The same slots of every buffer; further arguments as for `Slots`."""
        view = memoryview(buffer)
        return [Slots(self.layout, view[index * self._stride :], **arguments) for index in range(self.n)]

    def cuts(self, buffer: mmap) -> memoryview:
        """int64 (n_workers,): a worker ends rollouts below this number after their current step."""
        return memoryview(buffer)[self.n * self._stride : self.reserved_nbytes].cast("q")

    @property
    def _stride(self) -> int:
        return -(-self.layout.reserved_nbytes // ALLOCATIONGRANULARITY) * ALLOCATIONGRANULARITY
