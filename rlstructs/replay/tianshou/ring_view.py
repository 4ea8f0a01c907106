"""`RingView`: one ring of a buffer of several environments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from rlstructs.errors import EmptyBufferError, SpecError
from rlstructs.replay.tianshou.reads import checked_size
from rlstructs.replay.values import host_array

if TYPE_CHECKING:
    from rlstructs.replay.tianshou.reads import EpisodeReads


class RingView:
    """A ring of a buffer, read as a `ReplayBuffer` of its rows alone; rows are added to the whole buffer.

    Row ids are those of the ring, in `[0, maxsize)`. Columns are attributes, `(maxsize, ...)`.

    Args:
        buffer: which has the ring.
        lane: which of its rings.
        first: the row id of the ring's first slot in the buffer.
    """

    def __init__(self, buffer: EpisodeReads, lane: int, first: int) -> None:
        self._buffer, self._lane, self._first = buffer, lane, first

    def __len__(self) -> int:
        return int(self._buffer._own_rows().span.counts()[self._lane])

    @property
    def maxsize(self) -> int:
        """Capacity in rows."""
        return self._buffer._lane_size

    @property
    def last_index(self) -> np.ndarray:
        """The newest row, int64 (1,); the first slot if there is none."""
        return self._buffer._own_rows().newest()[[self._lane]] - self._lane * self.maxsize

    def __getitem__(self, index: Any) -> Any:
        """Rows as a batch, as indexing the buffer gives them; a slice is of the rows from the oldest on."""
        return self._buffer[self._in_buffer(index)]

    def __iter__(self) -> Iterator[Any]:
        """Each row, in the order of row ids."""
        return (self[row] for row in np.sort(self._in_order() - self._first))

    def get(self, index: Any, key: str, default_value: Any = None, stack_num: int | None = None) -> Any:
        """One key of some rows; see `ReplayBuffer`."""
        return self._buffer.get(self._in_buffer(index), key, default_value, stack_num)

    def prev(self, index: Any) -> Any:
        """The row before each in its episode; see `ReplayBuffer`."""
        return self._buffer.prev(self._in_buffer(index)) - self._first

    def next(self, index: Any) -> Any:
        """The row after each in its episode; see `ReplayBuffer`."""
        return self._buffer.next(self._in_buffer(index)) - self._first

    def unfinished_index(self) -> np.ndarray:
        """The newest row if its episode goes on, int64 (0,) or (1,)."""
        every = self._buffer.unfinished_index() - self._first
        return np.asarray(every[(every >= 0) & (every < self.maxsize)])

    def sample_indices(self, batch_size: int | None) -> np.ndarray:
        """Draws rows uniformly; see `ReplayBuffer`."""
        size, at, fits = checked_size(batch_size), self._in_order(), self._buffer._fits(self._buffer._rows())
        at = at if fits is None else at[fits(at)]
        if size is None:
            at = self._buffer._rng.permutation(at)
        elif size > 0:
            if not at.size:
                raise EmptyBufferError("Cannot sample from an empty storage.")
            at = self._buffer._rng.choice(at, size)
        elif size < 0:
            at = at[:0]
        return np.asarray(at - self._first)

    def sample(self, batch_size: int | None) -> tuple[Any, np.ndarray]:
        """Draws rows and reads them as indexing does, without n-step sums or new goals."""
        index = self.sample_indices(batch_size)
        return self[index], index

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        found = self._buffer.__getattr__(name)  # a column, or what is nested
        return found[self._first : self._first + self.maxsize]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} of {self.maxsize} rows, of {self._buffer!r})"

    def _in_order(self) -> np.ndarray:
        """The rows from the oldest on, by their ids in the buffer, int64 (n,)."""
        low = int(self._buffer._own_rows().span.low[self._lane])
        return self._first + (low + np.arange(len(self))) % self.maxsize

    def _in_buffer(self, index: Any) -> np.ndarray:
        """The row ids in the buffer of what an index means here.

        Raises:
            SpecError, IndexError: it is no index, or there is no such row.
        """
        if isinstance(index, slice):
            return self._in_order()[index]
        n, given = len(self), host_array("index", index)
        if given.dtype == bool:
            if given.shape not in ((n,), (self.maxsize,)):
                raise IndexError(f"a mask must have a bool for each of {self.maxsize} rows, got shape {given.shape}")
            given = np.flatnonzero(given)
        elif given.dtype.kind not in "iu" and given.size:
            raise SpecError(f"index must hold integers, got {given.dtype}")
        at = given.astype(np.int64)
        at = np.where(at < 0, at + n, at)
        outside = (at < 0) | (at >= n)
        if outside.any():
            raise IndexError(f"index {given[outside].flat[0]} holds no row; {n} of {self.maxsize} are there")
        return self._first + at
