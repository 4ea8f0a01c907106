"""Restores the columns of a store from a file.

It makes room, drops the rows, and reads column by column, in pieces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, cast

import numpy as np

from rlstructs.files.archives import Reader
from rlstructs.files.zstd import DEFAULT_LEVEL, codec_of
from rlstructs.replay.rows.columns import Columns, pieces
from rlstructs.replay.rows.compressed import CompressedRows
from rlstructs.replay.rows.episodes import Episodes
from rlstructs.replay.rows.lanes import HEAD, LANE, REWRITES, Ring, RowIds
from rlstructs.replay.rows.linked import LinkedColumns, fill_unlinked
from rlstructs.replay.rows.spec import Spec
from rlstructs.replay.rows.store import Storage

# Names of arrays in a file. Those of columns begin with ROWS, so they differ from all others.
ROWS, RING, EPISODES, LINKS, MORE = "rows/", "ring", "episodes", "links/", "more/"
# Prefixes of the two arrays of a compressed column: the bytes of its rows, uint8 (n_bytes,), one slot of all lanes
# after another; and how many each row has, int32 (n_slots, n_lanes), 0 for an unwritten one.
PACKED, LENGTHS = "packed/", "lengths/"
# Prefix of the encoded text of a column of objects.
OBJECTS = "objects/"
# Prefix of the arrays of an inner buffer.
INNER = "inner/"
# Bytes of bookkeeping that a load takes without a look at the free memory: of a store, or of each of its rows.
BYTES_OF_ALL, BYTES_OF_ROW = 1 << 20, 64


class SavedArrays:
    """The arrays in a file, or those of an inner buffer.

    Args:
        reader: reads them.
        names: of the arrays -> their names in the file.

    Attributes:
        specs: name -> dtype and shape.
    """

    def __init__(self, reader: Reader, names: Mapping[str, str]) -> None:
        self._reader, self._names = reader, names
        self.specs = {name: reader.spec_of(stored) for name, stored in names.items()}

    def inside(self, prefix: str) -> SavedArrays:
        """Returns the arrays whose names begin with a prefix.

        They are named by the rest of their names.
        """
        return self.renamed({name[len(prefix) :]: name for name in self._names if name.startswith(prefix)})

    def renamed(self, names: Mapping[str, str]) -> SavedArrays:
        """Returns some of the arrays by new names: new name -> name."""
        return SavedArrays(self._reader, {new: self._names[name] for new, name in names.items()})

    def check(self, name: str, dtype: Any, shape: tuple[int, ...]) -> None:
        """Checks the dtype and shape of an array.

        Raises ValueError if they differ, and KeyError if there is no such array.
        """
        if self.specs[name] != (dtype, shape):
            raise ValueError(f"{name!r} is {self.specs[name]}, expected {np.dtype(dtype)} {shape}")

    def read(self, name: str, *needed: Any) -> np.ndarray:
        if needed:
            self.check(name, *needed)
        dtype, shape = self.specs[name]
        array = np.empty(shape, dtype)
        self._reader.read_into(self._names[name], array)
        return array

    def pieces(self, name: str) -> Iterator[tuple[int, np.ndarray]]:
        """Reads an array `(n, ...)` in pieces.

        Yields the number of the first row of each piece, and its rows.
        """
        dtype, (n, *shape) = self.specs[name]
        size = math.prod(shape)
        for start, some in pieces(n, size * dtype.itemsize):
            array = np.empty((some, *shape), dtype)
            self._reader.read_into(self._names[name], array, start * size)
            yield start, array

    def packed(self, name: str, spec: Spec) -> Iterator[tuple[np.ndarray, list[bytes]]]:
        """Reads the rows of a compressed column in pieces.

        Yields the numbers of some rows, one slot of all lanes after another, and the bytes of each.
        """
        lengths = self.read(LENGTHS + name).reshape(-1)
        ends = np.cumsum(lengths, dtype=np.int64)
        for start, n in pieces(lengths.size, spec.nbytes):
            last, first = ends[start : start + n], int(ends[start] - lengths[start])
            data = np.empty(int(last[-1]) - first, np.uint8)
            self._reader.read_into(self._names[PACKED + name], data, first)
            held, begins = data.tobytes(), last - lengths[start : start + n] - first
            bounds = zip(begins.tolist(), (last - first).tolist(), strict=True)
            yield np.arange(start, start + n), [held[low:high] for low, high in bounds]

    def slots(self, names: Collection[str], rows: RowIds, n_slots: int) -> Iterator[tuple[str, int, np.ndarray]]:
        """Reads arrays some slots at a time, all arrays in turns.

        Yields the name, the first slot, and the values.

        Args:
            names: of arrays of the first `n_slots` slots, `(*rows.lead(n_slots), *shape)`.
            rows: the row ids of their store.
            n_slots: how many slots of each lane there are.
        """
        shapes = {name: (dtype, shape[2:]) for name, (dtype, shape) in self.specs.items() if name in names}
        n_bytes = sum(dtype.itemsize * math.prod(shape) for dtype, shape in shapes.values())
        for start, some in pieces(n_slots, rows.n_lanes * n_bytes):
            for name, (dtype, shape) in shapes.items():
                array = np.empty((*rows.lead(some), *shape), dtype)
                if rows.order == LANE:
                    self._reader.read_slots(self._names[name], array, start)
                else:
                    self._reader.read_into(self._names[name], array, start * rows.n_lanes * math.prod(shape))
                yield name, start, rows.by_lane(array)


def count_bytes(
    storage: Storage, specs: Mapping[str, Spec], linked: Mapping[str, str], arrays: SavedArrays, slots: tuple[int, int]
) -> int:
    """Counts the bytes that a load takes beyond those of the buffer.

    0 if columns take no more, and the rest is little.

    Args:
        storage: the store of the buffer.
        specs: of the columns in the file.
        linked: the columns that will be linked.
        arrays: in the file; all except the rows are read before anything changes.
        slots: of each lane: how many there are, and how many are in the file.
    """
    columns = storage.columns
    capacity, n_slots = slots
    # Memory that nothing was written to yet is not taken yet.
    n_untouched = max(0, n_slots - int(storage.ring.reserved.max()))
    n_bytes = 0
    for name, spec in specs.items():
        is_there = columns.specs.get(name) == spec and columns.capacity == capacity
        if name in columns.links and f"{LINKS}{name}/at" not in arrays.specs:
            n_bytes += spec.nbytes * n_slots  # it gets rows of its own
        elif name not in columns.links and name not in linked:
            n_bytes += columns.nbytes_of(name, spec) * (n_untouched if is_there else capacity)
    read = [spec for name, spec in arrays.specs.items() if not name.startswith((ROWS, PACKED, INNER))]
    n_read = sum(dtype.itemsize * math.prod(shape) for dtype, shape in read)
    # Finding out what is available takes as long as reading thousands of rows.
    is_little = n_read <= max(BYTES_OF_ALL, BYTES_OF_ROW * columns.n_rows)
    return 0 if is_little and not n_bytes else n_bytes * columns.n_lanes + n_read


def make_room(
    storage: Storage, specs: Mapping[str, Spec], linked: Mapping[str, str], capacity: int
) -> Callable[[], None]:
    """Allocates memory for these columns.

    The returned function drops every row and makes the store use the new columns.

    Args:
        storage: the store.
        specs: all columns after the load.
        linked: names among these that are linked if the store has no column yet; see `Storage.add_columns`.
        capacity: rows per lane.

    Raises:
        OutOfMemoryError: there is too little memory; nothing changes.
    """
    columns, held = storage.columns, storage.columns.specs
    if capacity == columns.capacity and not linked:
        made = {name: spec for name, spec in specs.items() if held.get(name) != spec}
        gone = [name for name in held if name not in specs]
        blocks = columns.make_blocks(made) if made else {}

        def take_over() -> None:
            if made or gone:
                columns.install(made, blocks, gone)
    else:
        fresh, episodes = columns.emptied(capacity), None
        fresh.add_all({name: spec for name, spec in specs.items() if name not in linked})
        for name in specs:
            if name in linked:
                cast(LinkedColumns, fresh).link(name, linked[name])
        if storage.episodes is not None and capacity != columns.capacity:
            episodes = Episodes(Ring(storage.ring.counters, capacity), columns.order, storage._backing)

        def take_over() -> None:
            storage.take_columns(fresh, episodes)

    def drop_rows() -> None:
        with storage.lock, storage.clock.counting(REWRITES, of_columns=True):
            storage.clear()
            take_over()
            storage.poison(specs)

    return drop_rows


def restore_columns(
    storage: Storage,
    arrays: SavedArrays,
    linked: Mapping[str, str],
    links: Mapping[str, Mapping[str, np.ndarray]],
    n_slots: int,
    counters: np.ndarray,
) -> None:
    """Reads the columns of numbers into a store, piece by piece.

    A column may be linked in the file, in the store, or in both.

    Args:
        storage: the store, without rows.
        arrays: the file.
        linked: the columns that are linked in the file -> their sources.
        links: the arrays `at` and `newest` of each, from the file.
        n_slots: how many slots of each lane the file holds.
        counters: of the file; their floors rise where rows do not fit.
    """
    columns = storage.columns
    columns.use(Ring(counters, columns.capacity))  # where rows do not fit, it says which are the oldest
    try:
        for name in [name for name in columns.links if name not in linked]:
            cast(LinkedColumns, columns).unlink(name)
        own = [name for name, spec in columns.specs.items() if name not in linked and not spec.is_object]
        for name, start, rows in arrays.slots([ROWS + name for name in own], columns, n_slots):
            columns.restore_slots(name.removeprefix(ROWS), start, rows)
        for name in own:
            if PACKED + name in arrays.specs:
                _restore_packed(columns, arrays, name)
        for name, source in linked.items():
            values = arrays.pieces(f"{LINKS}{name}/values")
            if name in columns.links:
                cast(LinkedColumns, columns).restore_link(name, links[name], values, counters[HEAD])
            else:
                fill_unlinked(columns, name, source, links[name], values, n_slots, counters)
    finally:
        columns.use(storage.ring)


def check_column(columns: Columns, arrays: SavedArrays, name: str, spec: Spec, n_slots: int) -> None:
    """Checks the arrays of a column in a file.

    Raises:
        ValueError, KeyError: they do not hold the rows of these slots.
    """
    if PACKED + name not in arrays.specs:
        arrays.check(ROWS + name, spec.dtype, (*columns.lead(n_slots), *spec.shape))
        return
    lengths = arrays.read(LENGTHS + name, np.int32, (n_slots, columns.n_lanes))
    if lengths.size and not 0 <= lengths.min() <= lengths.max() <= spec.nbytes:
        raise ValueError(f"rows of {name!r} have from {lengths.min()} to {lengths.max()} bytes, expected {spec.nbytes}")
    arrays.check(PACKED + name, np.uint8, (int(lengths.sum(dtype=np.int64)),))
    decodes = columns.compression.level_of(name, spec) is None or spec.dtype == bool
    for rows, data in arrays.packed(name, spec):
        for row, each in zip(_ids_of(columns, rows).tolist(), data, strict=True):
            if each:
                _check_row(name, row, each, spec, decodes)


def _restore_packed(columns: Columns, arrays: SavedArrays, name: str) -> None:
    """Reads a column that is compressed in the file."""
    spec, flat = columns.specs[name], columns.flat[name]
    for rows, data in arrays.packed(name, spec):
        ids = _ids_of(columns, rows)
        if isinstance(flat, CompressedRows):
            flat.put_packed(ids, data)
            continue
        values = np.full((len(data), *spec.shape), spec.unwritten, spec.dtype)
        for at, each in enumerate(data):
            if each:
                values[at] = np.frombuffer(_check_row(name, int(ids[at]), each, spec), spec.dtype).reshape(spec.shape)
        columns.put_rows(name, ids, columns.converted(name, values, spec))


def _ids_of(columns: Columns, numbers: np.ndarray) -> np.ndarray:
    """Returns row ids of rows, numbered slot after slot of all lanes."""
    return columns.rows(numbers % columns.n_lanes, numbers // columns.n_lanes)


def _check_row(name: str, row: int, data: bytes, spec: Spec, decodes: bool = True) -> bytes:
    """Returns the bytes of a row from its compressed ones.

    These come from a file.

    Args:
        name: of the column.
        row: its id.
        data: the compressed bytes, or as many as the row has.
        spec: of the column.
        decodes: whether to decode them; if not, only what they say of themselves is checked, and they are returned.

    Raises:
        ValueError: they are damaged.
    """
    codec = codec_of(DEFAULT_LEVEL)
    try:
        if len(data) == spec.nbytes:
            found = data
        elif codec.size_of(data) != spec.nbytes:
            raise ValueError(f"they hold {codec.size_of(data):,} bytes, expected {spec.nbytes:,}")
        else:
            found = codec.decompress(data, spec.nbytes) if decodes else data
        if spec.dtype == bool and max(found) > 1:
            raise ValueError("they hold bools that are neither true nor false")
    except (codec.error, ValueError) as error:
        raise ValueError(f"the compressed bytes of row {row} of {name!r} are damaged: {error}") from error
    return bytes(found)
