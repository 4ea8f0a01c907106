"""Compressed columns: rows as bytes of their own lengths, in segments of their lanes.

    table      row id -> place of its bytes and their number, one int64, so that no reader sees half of it; 0: unwritten
    segments   of a lane, one after another; a row lies in one of them
    counts     of the rows in each segment: one without any is written again, the lowest first

A writer that is killed at any moment leaves whole rows, and perhaps counts that are too high: see `_make_space`.
The memory is as large as rows that do not become smaller would need, but only segments that were written take any.
Rows are appended to a segment, never changed in place: a reader that finds other bytes finds another place, too.
With a limit the memory may be smaller; where it is full, the oldest rows of the lane are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from rlstructs.errors import SpecError, StateError
from rlstructs.files.zstd import codec_of
from rlstructs.replay.rows.backing import Backing
from rlstructs.replay.rows.lanes import Ring, RowIds, keep_order
from rlstructs.replay.rows.spec import MOST, Spec

# Bits of an entry of the table for the number of bytes; the rest is the place.
LENGTH_BITS, LENGTH_MASK = MOST.bit_length(), MOST
MOST_BYTES = 1 << (63 - LENGTH_BITS)
# Bytes of a segment, unless a row is larger.
SEGMENT = 1 << 16
# Of a lane: the segment that is written, its bytes that are taken, and how many segments were ever written.
CURRENT, TAKEN, USED = range(3)
N_STATE = 3
# Rows whose bytes are put together at a time for a file.
ROWS_AT_ONCE = 1 << 10
# Bytes of bookkeeping that a row takes.
BYTES_PER_ROW = 8
# Of a lane with a limit: the least number of segments, and how many there are if rows are small.
LEAST_SEGMENTS, MANY_SEGMENTS = 8, 64


class CompressedBlock:
    """The memory of a compressed column.

    Args:
        name: of the column.
        spec: of the column.
        ids: the row ids of the store, which are copied.
        level: zstd's.
        backing: where the bytes are stored.
        max_bytes: that the rows of all lanes take at most; None for no limit.

    Raises:
        SpecError: the rows may need more bytes than places can name, or the limit is too low.
    """

    ring: Ring | None = None

    def __init__(
        self, name: str, spec: Spec, ids: RowIds, level: int, backing: Backing, max_bytes: int | None = None
    ) -> None:
        self._name, self.spec, self.level, self._max_bytes = name, spec, level, max_bytes
        self.ids = RowIds(ids.n_lanes, ids.capacity, ids.order)
        most = MOST_BYTES if max_bytes is None else max_bytes // ids.n_lanes
        self._segment = (
            max(1, min(SEGMENT // spec.nbytes, ids.capacity, most // MANY_SEGMENTS // spec.nbytes)) * spec.nbytes
        )
        # Twice as many as the rows need if none becomes smaller: rows that are replaced leave gaps.
        needed = 2 * math.ceil(ids.capacity / (self._segment // spec.nbytes)) + 2
        self._n_segments = min(needed, most // self._segment)
        if self._n_segments < min(needed, LEAST_SEGMENTS):
            least = ids.n_lanes * min(needed, LEAST_SEGMENTS) * self._segment
            raise SpecError(f"compression of {name!r}: max_bytes is {max_bytes:,}, expected at least {least:,}")
        if (n_bytes := ids.n_lanes * self._n_segments * self._segment) > MOST_BYTES:
            raise SpecError(
                f"compression of {name!r}: {ids.n_rows:,} rows of {spec.nbytes:,} bytes may need {n_bytes:,} bytes, "
                f"expected at most {MOST_BYTES:,}; use fewer rows"
            )
        self._allocate(backing)

    def _allocate(self, backing: Backing) -> None:
        n_lanes = self.ids.n_lanes
        n_numbers = self.ids.n_rows + n_lanes * (self._n_segments + N_STATE)
        self._numbers = backing.allocate(self._name, 8 * n_numbers, sparse=True)
        self._memory = backing.allocate_slices(self._name, n_lanes * self._n_segments * self._segment)
        self._map()

    def _map(self) -> None:
        n_lanes, numbers = self.ids.n_lanes, self._numbers.bytes().view(np.int64)
        self._first_state = self.ids.n_rows + n_lanes * self._n_segments
        table, counts, lanes = np.split(numbers, [self.ids.n_rows, self._first_state])
        self._table, self._counts = table, counts.reshape(n_lanes, self._n_segments)
        self._lanes, memory = lanes.reshape(n_lanes, N_STATE), self._memory.bytes()
        # Single numbers and slices of views take half the time; what is no array is a file.
        self._fast, self._bytes = numbers.data, getattr(memory, "data", memory)
        self._none = np.frombuffer(np.full(self.spec.shape, self.spec.unwritten, self.spec.dtype).tobytes(), np.uint8)

    def rows(self, ring: Ring | None = None) -> CompressedRows:
        """Returns the column, `(n_rows, *shape)`, by row id.

        `ring` has the counters of the store.
        """
        self.ring, n_rows = ring, self.ids.n_rows
        return CompressedRows(self, np.arange(n_rows, dtype=np.int32 if n_rows < 1 << 31 else np.int64))

    def bytes(self) -> np.ndarray:
        """Raises TypeError: the rows have bytes of different lengths."""
        raise TypeError("a compressed column has no bytes of one length")

    @property
    def nbytes(self) -> int:
        """Bytes of the segments that hold rows, and of the bookkeeping."""
        held = np.count_nonzero(self._counts) * self._segment
        return int(held) + self._table.nbytes + self._lanes.nbytes

    @property
    def files(self) -> list[str]:
        """The names of its files, if it has any.

        One has the bookkeeping, the other one the rows.
        """
        blocks: list[Any] = [self._numbers, self._memory]
        return [block.file for block in blocks]

    def recover(self) -> None:
        """Counts the rows of each segment anew.

        A program that was killed may have counted too many.

        Raises:
            ValueError: the bookkeeping makes no sense.
        """
        rows = np.flatnonzero(self._table)
        starts, lengths = self._table[rows] >> LENGTH_BITS, self._table[rows] & LENGTH_MASK
        segments, lanes = starts // self._segment, self.ids.lanes(rows)
        current, taken, used = self._lanes.T
        most = [self._n_segments - 1, self._segment, self._n_segments]
        fit = bool(((self._lanes >= 0) & (self._lanes <= most)).all())
        # A row lies in a segment of its lane that was written, before what the next rows will be written to.
        own, ends = segments - lanes * self._n_segments, starts % self._segment + lengths
        fit &= bool(((own >= 0) & (own < used[lanes]) & (lengths > 0) & (lengths <= self.spec.nbytes)).all())
        fit &= bool((ends <= np.where(own == current[lanes], taken[lanes], self._segment)).all())
        if not fit:
            raise ValueError(f"the places of the compressed rows of {self._name!r} make no sense")
        self._counts.reshape(-1)[...] = np.bincount(segments, minlength=self._counts.size)

    def beside(self, name: str, spec: Spec, backing: Backing) -> CompressedBlock:
        """Makes the memory of another column like this one."""
        return CompressedBlock(name, spec, self.ids, self.level, backing, self._max_bytes)

    @property
    def most_rows(self) -> int:
        """Rows of each lane that can be written at once, however large.

        Half of the memory holds them.
        """
        return (self._n_segments // 2 - 1) * (self._segment // self.spec.nbytes)

    def moved(self, backing: Backing) -> CompressedBlock:
        """Copies the column to memory of another kind."""
        other = CompressedBlock.__new__(CompressedBlock)
        vars(other).update(vars(self))
        other._allocate(backing)
        for mine, its in ((self._table, other._table), (self._counts, other._counts), (self._lanes, other._lanes)):
            its[...] = mine
        for lane, used in enumerate(self._lanes[:, USED].tolist()):
            start = lane * self._n_segments * self._segment
            for at in range(start, start + used * self._segment, self._segment):
                other._bytes[at : at + self._segment] = self._bytes[at : at + self._segment]
        return other

    def write(self, rows: np.ndarray, values: Any) -> None:
        """Writes rows (n,) by their ids.

        Values are `(n, *shape)`, or one number for all of them.
        """
        lanes = self.ids.lanes(rows)
        for row, lane, data in zip(rows.tolist(), lanes.tolist(), self._encoded(rows.size, values), strict=True):
            self.put(row, lane, data)

    def _encoded(self, n: int, values: Any) -> Iterator[Any]:
        """Yields the bytes of n rows; None for unwritten ones."""
        if isinstance(values, CompressedRows):
            yield from values.encoded(self)
            return
        array = np.asarray(values, self.spec.dtype)
        compress = codec_of(self.level).compress
        if not array.ndim:  # the same for all
            row = np.broadcast_to(array, self.spec.shape)
            yield from n * [None if row.tobytes() == self._none.tobytes() else self._encode(compress, row)]
            return
        for row in np.broadcast_to(array, (n, *self.spec.shape)):
            yield self._encode(compress, row)

    def _encode(self, compress: Callable[[Any], Any], row: np.ndarray) -> Any:
        raw = row.tobytes()
        data = compress(raw)
        return data if len(data) < self.spec.nbytes else raw

    def put(self, row: int, lane: int, data: Any) -> None:
        """Appends the bytes of a row to its lane's segments.

        None stands for an unwritten row.
        """
        if data is None:
            self._refer(row, 0)
            return
        numbers, n, state = self._fast, len(data), self._first_state + lane * N_STATE
        while numbers[state + TAKEN] + n > self._segment or not numbers[state + USED]:
            self._begin_segment(lane)
        taken = numbers[state + TAKEN]
        start = (lane * self._n_segments + numbers[state + CURRENT]) * self._segment + taken
        self._bytes[start : start + n] = data
        numbers[state + TAKEN] = taken + n
        self._refer(row, start << LENGTH_BITS | n)

    def _refer(self, row: int, entry: int) -> None:
        """Gives a row the bytes at a place, which were written; 0 for none."""
        numbers = self._fast
        if entry:  # first: a writer that is killed leaves too many, never too few
            numbers[self.ids.n_rows + (entry >> LENGTH_BITS) // self._segment] += 1
            keep_order()
        before, numbers[row] = numbers[row], entry
        if before:
            numbers[self.ids.n_rows + (before >> LENGTH_BITS) // self._segment] -= 1

    def _begin_segment(self, lane: int) -> None:
        """Finds the next segment to write.

        It is the lowest that is free, while another one is left.
        """
        state = self._lanes[lane]
        used = int(state[USED])
        free = np.flatnonzero(self._counts[lane, :used] == 0)
        if free.size + self._n_segments - used < 2:
            self._make_space(lane)
            return
        # In this order: a writer that is killed in between leaves a gap in the new segment at most.
        current = int(free[0]) if free.size else used
        state[USED] = max(used, current + 1)
        state[CURRENT] = current
        state[TAKEN] = 0

    def _make_space(self, lane: int) -> None:
        """Moves the rows of two segments to the last free one.

        If they do not fit into it, drops the oldest rows.

        Rows are read while they move: each has bytes at its place at any time. Meanwhile the segment that they move to
        is the current one, and counts as full: if the writer is killed, the next one goes on from there.
        """
        rows = self.ids.rows(lane, np.arange(self.ids.capacity))
        rows = rows[self._table[rows] != 0]
        starts, lengths = self._table[rows] >> LENGTH_BITS, self._table[rows] & LENGTH_MASK
        segments = starts // self._segment - lane * self._n_segments
        # Counted anew: a killed writer has counted too many.
        self._counts[lane] = np.bincount(segments, minlength=self._n_segments)
        taken, state = np.bincount(segments, lengths, self._n_segments), self._lanes[lane]
        free = np.flatnonzero(taken == 0)
        target = int(free[0] if free.size else state[CURRENT])
        at = int((starts % self._segment + lengths)[segments == target].max(initial=0))
        smallest = np.argsort(taken, kind="stable")[free.size :]
        smallest = smallest[smallest != target][:2]
        if at + taken[smallest].sum() > self._segment:
            self._drop_oldest(lane, rows, segments)
            return
        state[USED] = self._n_segments
        state[TAKEN] = self._segment
        state[CURRENT] = target
        for row in rows[np.isin(segments, smallest)].tolist():
            data, start = bytes(self.read(row)), (lane * self._n_segments + target) * self._segment + at
            self._bytes[start : start + len(data)] = data
            self._refer(row, start << LENGTH_BITS | len(data))
            at += len(data)
        state[TAKEN] = at

    def _drop_oldest(self, lane: int, rows: np.ndarray, segments: np.ndarray) -> None:
        """Drops the oldest rows of a lane, until a segment has none.

        The newest row stays, as do those that are being written; without them the lane is half empty.
        """
        assert self.ring is not None
        head = int(self.ring.head[lane])
        steps = self.ids.steps(rows, min(int(self.ring.reserved[lane]), head + self.most_rows) - 1)
        newest = np.full(self._n_segments, -1)
        np.maximum.at(newest, segments, steps)
        newest = newest[(newest >= 0) & (newest < head - 1)]
        end = int(newest.min(initial=head - 2)) + 1
        self.ring.drop_before(end, lane)
        for row in rows[steps < end].tolist():
            self.put(row, lane, None)

    def read(self, row: int) -> Any:
        """Returns the bytes of a row; no bytes for an unwritten one.

        Of memory this is a view.
        """
        return self._at(self._fast[row])

    def _at(self, entry: int) -> Any:
        start = entry >> LENGTH_BITS
        return self._bytes[start : start + (entry & LENGTH_MASK)]

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """Returns the bytes that rows take, int32; 0 for unwritten ones."""
        return np.asarray(self._table[rows] & LENGTH_MASK, np.int32)

    def decode(self, rows: np.ndarray) -> np.ndarray:
        """Returns rows by their ids, `(*rows.shape, *shape)`.

        Raises:
            StateError: bytes were damaged.
        """
        spec, ids = self.spec, rows.reshape(-1)
        found = np.empty((ids.size, spec.nbytes), np.uint8)
        decompress, error = (codec := codec_of(self.level)).decompress, codec.error
        places: dict[int, int] = {}  # row -> where it is among these: stacks have the same rows
        for at, (row, entry) in enumerate(zip(ids.tolist(), self._table[ids].tolist(), strict=True)):
            if (first := places.setdefault(row, at)) != at:
                found[at] = found[first]
                continue
            before = None
            while entry != before:  # a row that is written or moved meanwhile has another place now
                damage, before = None, entry
                try:
                    found[at] = self._decoded(entry, decompress)
                except (error, ValueError) as reason:
                    damage = reason
                entry = self._fast[row]
            if damage is not None:
                text = f"the compressed bytes of row {row} of {self._name!r} are damaged"
                raise StateError(f"{text}: {damage}") from damage
        return found.view(spec.dtype).reshape(*rows.shape, *spec.shape)

    def _decoded(self, entry: int, decompress: Callable[[Any, int], Any]) -> np.ndarray:
        if not entry:
            return self._none
        data = self._at(entry)
        return np.frombuffer(data if len(data) == self.spec.nbytes else decompress(data, self.spec.nbytes), np.uint8)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in _MAPPED}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._map()


_MAPPED = frozenset(["ring", "_table", "_counts", "_lanes", "_bytes", "_none", "_fast"])


class CompressedRows:
    """A compressed column, indexed as the array that it would be otherwise.

    As with arrays, slices are views; other indices copy, and so does numpy when it asks for an array.

    Args:
        block: the memory of the column.
        ids: the row ids, in the order and shape in which they are shown.

    Example:
        >>> from rlstructs.replay.rows.backing import Heap
        >>> block = CompressedBlock("frame", Spec(np.dtype(np.uint8), (8, 8)), RowIds(2, 3), 3, Heap())
        >>> rows = block.rows()
        >>> rows[np.array([4])] = np.full((1, 8, 8), 7)
        >>> rows.shape, rows[3:5].shape, np.asarray(rows).max(axis=(1, 2)).tolist()
        ((6, 8, 8), (2, 8, 8), [0, 0, 0, 0, 7, 0])
    """

    # Files are written without decoding the whole column at once.
    is_made_in_pieces = True

    def __init__(self, block: CompressedBlock, ids: np.ndarray) -> None:
        self._block, self._ids = block, ids
        self.dtype, self.shape = block.spec.dtype, (*ids.shape, *block.spec.shape)
        self.ndim, self.size = len(self.shape), math.prod(self.shape)
        self.nbytes = self.size * self.dtype.itemsize
        self.flags = SimpleNamespace(c_contiguous=False, writeable=True)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        ids = self._ids[index]
        if ids.ndim and all(isinstance(part, (int, np.integer, slice, type(Ellipsis))) for part in parts):
            return CompressedRows(self._block, ids)
        return self._block.decode(np.asarray(ids))

    def __setitem__(self, index: Any, values: Any) -> None:
        ids = np.asarray(self._ids[index])
        row = self._block.spec.shape
        if not isinstance(values, CompressedRows) and np.ndim(values):
            values = np.broadcast_to(np.asarray(values), (*ids.shape, *row)).reshape(-1, *row)
        self._block.write(ids.reshape(-1), values)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self._block.decode(self._ids)
        return array if dtype is None else array.astype(dtype, copy=False)

    def packed(self, n_slots: int) -> PackedRows:
        """Returns the compressed bytes of the first slots.

        One slot of all lanes follows another.
        """
        block = self._block
        return PackedRows(block, block.ids.rows(np.arange(block.ids.n_lanes), np.arange(n_slots)[:, None]))

    def put_packed(self, rows: np.ndarray, data: Iterable[bytes]) -> None:
        """Writes rows (n,) by their ids, given their compressed bytes.

        Unwritten rows have no bytes.
        """
        for row, lane, each in zip(rows.tolist(), self._block.ids.lanes(rows).tolist(), data, strict=True):
            self._block.put(row, lane, each or None)

    def encoded(self, block: CompressedBlock) -> Iterator[Any]:
        """Yields the bytes of each row for a column of this spec.

        None for unwritten ones.
        """
        for row in self._ids.reshape(-1).tolist():
            data = self._block.read(row)
            yield bytes(data) if data else None

    def take(self, rows: np.ndarray, axis: int = 0, mode: str = "raise") -> np.ndarray:
        """Copies rows, `(*rows.shape, *shape)`; they are in range."""
        return self._block.decode(self._ids[rows])

    def astype(self, dtype: Any, copy: bool = True) -> np.ndarray:
        """Copies the column, with another dtype."""
        return np.asarray(self).astype(dtype, copy=False)

    def copy(self) -> np.ndarray:
        """Copies the column."""
        return np.asarray(self)

    def reshape(self, *shape: Any) -> Any:
        """Shows the rows in another shape; copies them if their own shape changes."""
        shape = shape[0] if isinstance(shape[0], tuple) else shape
        lead = len(shape) - len(self._block.spec.shape)
        if lead < 1 or tuple(shape[lead:]) != self._block.spec.shape:
            return np.asarray(self).reshape(shape)
        return CompressedRows(self._block, self._ids.reshape(shape[:lead]))

    def swapaxes(self, first: int, second: int) -> CompressedRows:
        """Swaps two axes before those of a row."""
        return CompressedRows(self._block, self._ids.swapaxes(first, second))


class PackedRows:
    """The compressed bytes of rows, one row after another.

    For files it is an array `(n_bytes,)` that is made in pieces.

    Args:
        block: the memory of the column.
        ids: the row ids, (n_slots, n_lanes).

    Attributes:
        lengths: the bytes of each row, int32, in the shape of the ids; 0 for unwritten ones.
    """

    dtype, itemsize, ndim, is_made_in_pieces = np.dtype(np.uint8), 1, 1, True

    def __init__(self, block: CompressedBlock, ids: np.ndarray) -> None:
        self._block, self._ids, self.lengths = block, ids, block.lengths(ids)
        self.size = self.nbytes = int(self.lengths.sum(dtype=np.int64))
        self.shape = (self.size,)

    def __getitem__(self, index: Any) -> PackedRows:
        """Returns the bytes of some slots, and of some lanes."""
        return PackedRows(self._block, self._ids[index])

    def reshape(self, *shape: Any) -> PackedRows:
        """Shows the ids in another shape."""
        return PackedRows(self._block, self._ids.reshape(*shape))

    def pieces(self) -> Iterator[np.ndarray]:
        """Yields the bytes in pieces, uint8 (n,)."""
        rows = self._ids.reshape(-1).tolist()
        for start in range(0, len(rows), ROWS_AT_ONCE):
            some = rows[start : start + ROWS_AT_ONCE]
            yield np.frombuffer(b"".join([self._block.read(row) for row in some]), np.uint8)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.concatenate([np.zeros(0, np.uint8), *self.pieces()])
