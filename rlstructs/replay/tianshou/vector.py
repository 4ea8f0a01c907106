"""Buffers of several lanes, one for each environment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from rlstructs.checks import check_count, check_size
from rlstructs.replay.tianshou.reader import checked_size
from rlstructs.replay.tianshou.replay_buffer import ReplayBuffer
from rlstructs.replay.tianshou.table import as_integers
from rlstructs.workers.public_names import set_module


@set_module("rlstructs.replay")
class VectorReplayBuffer(ReplayBuffer):
    """The newest transitions of several environments, each in a ring of its own.

    Row ids count from ring to ring, in `[0, maxsize)`. Samples are uniform over all rows.

    Args:
        total_size: rows of all environments; rounded up to a multiple of `buffer_num`.
        buffer_num: number of environments.
        settings: see `ReplayBuffer`.

    Raises:
        TypeError, SpecError: an argument is invalid.

    Example:
        >>> buffer = VectorReplayBuffer(total_size=10, buffer_num=2)
        >>> batch = {"obs": [1, 2], "act": [0, 0], "rew": [1, 1], "terminated": [0, 1], "truncated": [0, 0]}
        >>> buffer.add(batch)  # row ids, returns and lengths of ended episodes, their first rows
        (array([0, 5]), array([0., 1.]), array([0, 1]), array([0, 5]))
        >>> _ = buffer.add({name: [value[1]] for name, value in batch.items()}, buffer_ids=[1])
        >>> buffer.sample_indices(0), buffer.unfinished_index(), buffer.subbuffer_edges
        (array([0, 5, 6]), array([0]), array([ 0,  5, 10]))
    """

    _is_stacked = True

    def __init__(self, total_size: int, buffer_num: int, *args: Any, **settings: Any) -> None:
        self._n_lanes = check_count("buffer_num", buffer_num)
        super().__init__(-(-check_size("total_size", total_size) // self._n_lanes), *args, **settings)

    @property
    def buffer_num(self) -> int:
        """Number of rings."""
        return self._n_lanes

    @property
    def buffers(self) -> np.ndarray:
        """The rings as views, an array of objects.

        Each is read as a `ReplayBuffer`, with row ids of its own.
        """
        views = np.empty(self._n_lanes, object)
        views[:] = [RingView(self, lane) for lane in range(self._n_lanes)]
        return views

    def update(self, buffer: ReplayBuffer) -> np.ndarray:
        """Raises NotImplementedError: it is unknown which environment the rows are of."""
        raise NotImplementedError(f"{type(self).__name__} cannot be updated; add to one of its rings")

    @classmethod
    def from_data(cls, *args: Any, **settings: Any) -> Any:
        """Raises NotImplementedError: it is unknown which environments the rows are of."""
        raise NotImplementedError(f"{cls.__name__}.from_data: there is no order of several environments' rows")

    def _settings(self) -> dict[str, Any]:
        settings = super()._settings()
        return {"total_size": settings.pop("size") * self._n_lanes, "buffer_num": self._n_lanes, **settings}


class RingView:
    """A ring of a buffer, read as a `ReplayBuffer` by itself.

    Rows are added to the whole buffer. Row ids are those of the ring, in `[0, maxsize)`. Columns are attributes,
    `(maxsize, ...)`.

    Args:
        buffer: the buffer.
        lane: the number of the ring.
    """

    def __init__(self, buffer: VectorReplayBuffer, lane: int) -> None:
        self._buffer, self._table, self._lane = buffer, buffer._table, lane
        # The rings come last in the buffer.
        self._first = self._table.maxsize - (self._table.n_lanes - lane) * self._table.lane_size

    def __len__(self) -> int:
        return int(self._table.own_rows().counts()[self._lane])

    @property
    def maxsize(self) -> int:
        """Capacity in rows."""
        return self._table.lane_size

    @property
    def last_index(self) -> np.ndarray:
        """The newest row, int64 (1,); the first slot if there is none."""
        return self._table.own_rows().newest()[[self._lane]] - self._lane * self.maxsize

    def __getitem__(self, index: Any) -> Any:
        """Returns rows as a batch; see `ReplayBuffer`.

        A slice counts from the oldest row on.
        """
        return self._buffer[self._in_buffer(index)]

    def __iter__(self) -> Iterator[Any]:
        """Iterates over the rows, in the order of row ids."""
        return (self[row] for row in np.sort(self._in_order() - self._first))

    def get(self, index: Any, key: str, default_value: Any = None, stack_num: int | None = None) -> Any:
        """Returns one key of some rows; see `ReplayBuffer`."""
        return self._buffer.get(self._in_buffer(index), key, default_value, stack_num)

    def prev(self, index: Any) -> Any:
        """Returns the previous row of each row's episode; see `ReplayBuffer`."""
        return self._buffer.prev(self._in_buffer(index)) - self._first

    def next(self, index: Any) -> Any:
        """Returns the next row of each row's episode; see `ReplayBuffer`."""
        return self._buffer.next(self._in_buffer(index)) - self._first

    def unfinished_index(self) -> np.ndarray:
        """Returns the newest row if its episode is unfinished, int64 (0,) or (1,)."""
        every = self._buffer.unfinished_index() - self._first
        return np.asarray(every[(every >= 0) & (every < self.maxsize)])

    def sample_indices(self, batch_size: int | None) -> np.ndarray:
        """Draws rows uniformly; see `ReplayBuffer`."""
        size, reader = checked_size(batch_size), self._buffer._reader
        at = reader.list_candidates(self._table.rows(), self._in_order())
        return np.asarray(reader.choose(at, size) - self._first)

    def sample(self, batch_size: int | None) -> tuple[Any, np.ndarray]:
        """Draws rows and reads them as indexing does, without n-step sums or new goals."""
        index = self.sample_indices(batch_size)
        return self[index], index

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        found = self._buffer.__getattr__(name)  # a column, or nested columns
        return found[self._first : self._first + self.maxsize]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} of {self.maxsize} rows, of {self._buffer!r})"

    def _in_order(self) -> np.ndarray:
        """Lists the rows from the oldest on, by buffer ids, int64 (n,)."""
        low = int(self._table.own_rows().low[self._lane])
        return self._first + (low + np.arange(len(self))) % self.maxsize

    def _in_buffer(self, index: Any) -> np.ndarray:
        """Converts an index to row ids of the buffer.

        Raises:
            SpecError, IndexError: it is invalid, or there is no such row.
        """
        if isinstance(index, slice):
            return self._in_order()[index]
        n, maxsize = len(self), self.maxsize
        given = as_integers(index, n, maxsize)
        at = given.astype(np.int64)
        at = np.where(at < 0, at + n, at)
        outside = (at < 0) | (at >= n)
        if outside.any():
            raise IndexError(f"index {given[outside].flat[0]} holds no row; {n} of {maxsize} are there")
        return self._first + at
