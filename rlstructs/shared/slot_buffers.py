"""Several sets of slots in one arena, so that workers write one while the trainer reads another."""

from __future__ import annotations

from dataclasses import dataclass
from mmap import ALLOCATIONGRANULARITY, mmap
from typing import Any

from rlstructs.shared.layout import Layout
from rlstructs.shared.slots import Slots

# Bytes of a cut, the rollout number below which a worker ends rollouts early; and the cut that ends all.
CUT_BYTES = 8
ALL_ROLLOUTS = 2**63 - 1


@dataclass(frozen=True)
class SlotBuffers:
    """The places of the slot buffers in the arena, and after them of one cut per worker.

    A worker ends every rollout early whose number is below its cut. It reads the cut without a lock: 8 aligned bytes,
    which are whole on every processor, and nothing else is read by them, so it does no harm if they come late. Rows and
    lengths are read after a message in a pipe, which orders memory on every processor, and so are updates of weights.

    Args:
        layout: the layout of each buffer.
        n: number of buffers; rollout number i is written to buffer i % n.
        n_workers: number of workers that write to them.
    """

    layout: Layout
    n: int
    n_workers: int

    @property
    def reserved_nbytes(self) -> int:
        """Bytes of address space."""
        return self.n * self._stride + self.n_workers * CUT_BYTES

    @property
    def nbytes(self) -> int:
        """Bytes of memory that rollouts take, without the sparse columns."""
        return self.n * self.layout.nbytes

    def slots(self, buffer: mmap, **arguments: Any) -> list[Slots]:
        """The slots of every buffer; `arguments` are those of `Slots`."""
        view = memoryview(buffer)
        return [Slots(self.layout, view[index * self._stride :], **arguments) for index in range(self.n)]

    def cuts(self, buffer: mmap) -> memoryview:
        """The cuts, int64 (n_workers,); a worker reads its own after every step."""
        return memoryview(buffer)[self.n * self._stride : self.reserved_nbytes].cast("q")

    @property
    def _stride(self) -> int:
        return -(-self.layout.reserved_nbytes // ALLOCATIONGRANULARITY) * ALLOCATIONGRANULARITY
