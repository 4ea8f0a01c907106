"""Columns: named arrays with a row for each lane and slot.

Small ones lie side by side in records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from rlstructs.errors import MissingKeyError, SpecError, StateError
from rlstructs.replay.rows.backing import Backing, Block, Heap, SharedBlock
from rlstructs.replay.rows.compressed import BYTES_PER_ROW, CompressedBlock
from rlstructs.replay.rows.lanes import LANE, SLOT, Clock, Ring, RowIds
from rlstructs.replay.rows.objects import OBJECT, ObjectBlock, private_rows
from rlstructs.replay.rows.on_disk import FileBlock
from rlstructs.replay.rows.records import (
    LEAST_RECORDS,
    MANY_LANES,
    Gathering,
    Record,
    group_columns,
    row_dtype,
    width_of,
)
from rlstructs.replay.rows.spec import Compression, Spec, cast

# How many sets of names `gather` remembers.
MOST_GATHERINGS = 64
# Bytes that are read from a file at a time: all columns of these rows stay in a core's cache meanwhile.
BYTES_AT_ONCE = 1 << 20
# The attributes that `_map` or a store sets again.
MAPPED = frozenset(["flat", "cells", "ring", "_gatherings", "_separate", "_steps"])
# Rows that are written at a time, all columns of them: their records stay in a core's cache meanwhile.
ROWS_AT_ONCE = 4096


class Columns(RowIds):
    """Named arrays in memory of one kind.

    Values are converted by `converted` or `check`, and then written by `put_rows` or `put_cells`.

    Args:
        n_lanes: number of rings.
        capacity: rows per lane.
        order: "lane" or "slot".
        backing: where the bytes are stored.

    Attributes:
        specs: name -> spec; replaced by another dict at each change, because other threads may be reading it.
        flat: name -> (n_rows, *shape), by row id.
        cells: name -> (n_lanes, capacity, *shape), the same memory.
        clock: counts changes of the columns; set by the store.
        has_objects: whether a column holds objects.

    Example:
        >>> columns = Columns(n_lanes=2, capacity=3, order="slot")
        >>> columns.add("reward", Spec(np.dtype(np.float32)))
        >>> columns.rows(np.array([0, 1]), np.array([2, 2])).tolist()
        [4, 5]
        >>> columns.flat["reward"][[4, 5]] = [1.0, 2.0]
        >>> columns.cells["reward"][:, 2].tolist()
        [1.0, 2.0]
    """

    # Whether `flat` and `cells` are numpy arrays.
    on_host = True
    # The linked columns by name; only `LinkedColumns` has any.
    links: Mapping[str, Any] = MappingProxyType({})
    # Which columns are compressed.
    compression = Compression(None)
    # The counters, set by the store.
    ring: Ring

    def __init__(self, n_lanes: int, capacity: int, order: str = LANE, backing: Backing | None = None) -> None:
        super().__init__(n_lanes, capacity, order)
        self.specs: dict[str, Spec] = {}
        self.clock = Clock()
        self.has_objects = False
        self._backing = Heap() if backing is None else backing
        # Where each column is; several may be in one record.
        self._blocks: dict[str, Block] = {}
        self._map()

    def _map(self) -> None:
        # Filled by `gather`, and replaced after each change of the columns.
        self._gatherings: dict[tuple[str, ...], Gathering] = {}
        self.flat: dict[str, np.ndarray] = {}
        self.cells: dict[str, np.ndarray] = {}
        for name in self.specs:
            if name not in self.links:
                self._map_one(name)

    def _map_one(self, name: str) -> None:
        spec = self.specs[name]
        self.flat[name] = flat = self._rows_of(name)
        if self.order == LANE:
            self.cells[name] = flat.reshape(self.n_lanes, self.capacity, *spec.shape)
        else:
            self.cells[name] = flat.reshape(self.capacity, self.n_lanes, *spec.shape).swapaxes(0, 1)
        self._gatherings = {}

    def _rows_of(self, name: str) -> np.ndarray:
        return self._rows_in(name, self._blocks[name], self.specs[name])

    def _rows_in(self, name: str, block: Block, spec: Spec) -> np.ndarray:
        if isinstance(block, ObjectBlock):
            return block.values
        if isinstance(block, CompressedBlock):
            return block.rows(getattr(self, "ring", None))  # type: ignore[return-value] # it is indexed as an array
        if isinstance(block, FileBlock):
            return block.rows()  # type: ignore[return-value] # so is this
        if isinstance(block, Record):
            return block.rows_of(name)
        return block.bytes().view(spec.dtype).reshape(self.n_rows, *spec.shape)

    def make_blocks(self, specs: Mapping[str, Spec]) -> dict[str, Block]:
        """Allocates memory for columns, for `install`; small ones share a record."""
        blocks: dict[str, Block] = {
            name: CompressedBlock(name, spec, self, level, self._backing, self.compression.max_bytes)
            for name, spec in specs.items()
            if (level := self.compression.level_of(name, spec)) is not None
        }
        for group in self._group({name: spec for name, spec in specs.items() if name not in blocks}):
            name = next(iter(group))
            record = Record(group, self.n_rows, lambda n_bytes, name=name: self._backing.allocate(name, n_bytes))  # type: ignore[misc]
            blocks |= dict.fromkeys(group, record)
        for name, spec in specs.items():
            if name not in blocks:
                blocks[name] = self._backing.rows(name, spec, self.n_rows)
        return blocks

    def use(self, ring: Ring) -> None:
        """Sets the counters."""
        self.ring = ring
        for block in self._compressed():
            block.ring = ring

    @property
    def most_rows_at_once(self) -> int:
        """The rows that can be written to each lane at once."""
        return min([self.capacity, *(block.most_rows for block in self._compressed())])

    def _compressed(self) -> list[CompressedBlock]:
        return [block for block in self._blocks.values() if isinstance(block, CompressedBlock)]

    def _group(self, specs: Mapping[str, Spec]) -> list[dict[str, Spec]]:
        if not self._backing.has_records or (self.order == SLOT and self.n_lanes >= MANY_LANES):
            return []
        return [each for each in group_columns(specs) if width_of(each.values()) * self.n_rows >= LEAST_RECORDS]

    def _records(self) -> list[Record]:
        return list({id(block): block for block in self._blocks.values() if isinstance(block, Record)}.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        blocks = [(spec, self._blocks.get(name)) for name, spec in self.specs.items()]
        own = sum(spec.nbytes for spec, block in blocks if not isinstance(block, (Record, CompressedBlock)))
        compressed = sum(block.nbytes for block in self._compressed())
        return (own + sum(record.width for record in self._records())) * self.n_rows + compressed

    def nbytes_of(self, name: str, spec: Spec) -> int:
        """Returns the bytes of a row of one column, without padding.

        Of a compressed one those of its bookkeeping: nobody knows how many its rows will take.
        """
        return spec.nbytes if self.compression.level_of(name, spec) is None else BYTES_PER_ROW

    def is_compressed(self, name: str) -> bool:
        """Whether a column is compressed."""
        return isinstance(self._blocks.get(name), CompressedBlock)

    def is_in_memory(self, name: str) -> bool:
        """Whether a column's rows are in memory as they are read.

        They are neither compressed nor in a file.
        """
        return not isinstance(self._blocks.get(name), (CompressedBlock, FileBlock))

    def nbytes_per_row(self, specs: Mapping[str, Spec]) -> int:
        """Counts the bytes of a row of columns that are added together; see `nbytes_of`."""
        groups = self._group(
            {name: spec for name, spec in specs.items() if self.compression.level_of(name, spec) is None}
        )
        padding = sum(width_of(group.values()) - sum(spec.nbytes for spec in group.values()) for group in groups)
        return sum(self.nbytes_of(name, spec) for name, spec in specs.items()) + padding

    def available_bytes(self) -> int | None:
        """Returns the bytes available for more columns; None if unknown."""
        return self._backing.available_bytes()

    def add(self, name: str, spec: Spec) -> None:
        """Adds a column; all of its rows are unwritten."""
        self.add_all({name: spec})

    def add_all(self, specs: Mapping[str, Spec]) -> None:
        """Adds columns; all of their rows are unwritten.

        Small ones are stored together.
        """
        blocks = self.make_blocks(specs)
        with self.clock.counting(of_columns=True):
            self._blocks = {**self._blocks, **blocks}
            self.specs = {**self.specs, **specs}
            self.has_objects = self.has_objects or any(spec.is_object for spec in specs.values())
            for name in specs:
                self._map_one(name)
        for name, spec in specs.items():
            if spec.unwritten != 0:  # NaN is not equal to it either
                self.put_rows(name, slice(None), self.value(name, spec.unwritten))

    def exchange(self, made: Mapping[str, tuple[Spec, np.ndarray]], gone: Iterable[str] = ()) -> None:
        """Gives columns other specs and values, and removes others.

        Values are `(n_rows, *shape)`, by row id. A thread that reads meanwhile gets the old or the new ones; the
        clock tells whether they were exchanged.
        """
        specs = {name: spec for name, (spec, _) in made.items()}
        blocks = self.make_blocks(specs)
        for name, (spec, values) in made.items():
            self._rows_in(name, blocks[name], spec)[...] = values
        self.install(specs, blocks, gone)

    def install(self, made: Mapping[str, Spec], blocks: Mapping[str, Block], gone: Iterable[str]) -> None:
        """Gives columns other specs and blocks, and removes others.

        `make_blocks` makes the blocks.
        """
        gone = set(gone) - made.keys()
        with self.clock.counting(of_columns=True):
            self._blocks = {name: block for name, block in {**self._blocks, **blocks}.items() if name not in gone}
            self.specs = {name: spec for name, spec in {**self.specs, **made}.items() if name not in gone}
            self.has_objects = any(spec.is_object for spec in self.specs.values())
            for name in made:
                self._map_one(name)
            for name in gone:
                del self.flat[name], self.cells[name]
            self._gatherings = {}

    def emptied(self, capacity: int) -> Columns:
        """Makes columns of the same kind and of this capacity, without any column."""
        other = type(self).__new__(type(self))
        vars(other).update(vars(self), specs={}, _blocks={}, has_objects=False, clock=Clock())
        RowIds.__init__(other, self.n_lanes, capacity, self.order)
        other._map()
        return other

    def copy_to(self, backing: Backing) -> Callable[[], None]:
        """Copies all columns to memory of another kind; the returned function moves there.

        Views of the old memory do not follow.
        """
        if objects := [name for name, spec in self.specs.items() if spec.is_object]:
            raise StateError(f"{objects[0]!r} holds objects, which cannot be moved to where processes share them")
        moved: dict[str, Block] = {}
        for record in self._records():
            copy = record.moved(lambda n_bytes: backing.allocate("record", n_bytes))
            moved |= {name: copy for name in record.specs if self._blocks.get(name) is record}
        for name, spec in self.specs.items():
            block = self._blocks[name]
            if isinstance(block, CompressedBlock):
                moved[name] = block.moved(backing)
            elif name not in moved:
                moved[name] = backing.allocate(name, spec.nbytes * self.n_rows)
                moved[name].bytes()[...] = self._blocks[name].bytes()

        def move() -> None:
            self._backing, self._blocks = backing, moved
            self._map()

        return move

    def move(self, backing: Backing) -> None:
        """Moves all columns to memory of another kind."""
        self.copy_to(backing)()

    def resize(self, capacity: int) -> None:
        """Changes the number of rows per lane.

        Rows that still fit keep their lanes and slots.
        """
        old, n = dict(self.cells), min(self.capacity, capacity)
        RowIds.__init__(self, self.n_lanes, capacity, self.order)
        self.add_all({name: self.specs[name] for name in old})
        for name, cells in old.items():
            self.cells[name][:, :n] = cells[:, :n]

    def gather(self, names: Iterable[str], rows: np.ndarray) -> list[Any]:
        """Copies rows of columns that are not linked, `(*rows.shape, *shape)` each.

        The copies are in the columns' kind of memory.
        """
        wanted, gatherings = tuple(names), self._gatherings
        gathering = gatherings.get(wanted)
        if gathering is None:
            if len(gatherings) >= MOST_GATHERINGS:
                gatherings.clear()
            records = {name: block for name, block in self._blocks.items() if isinstance(block, Record)}
            gathering = gatherings[wanted] = Gathering(wanted, self.flat, records)
        taken = gathering(rows)
        if self.has_objects:
            return [private_rows(values) if values.dtype == OBJECT else values for values in taken]
        return taken

    def copy_steps(self, names: Iterable[str], first: int, n: int, by_lane: bool) -> list[Any]:
        """Copies the rows of some steps of every lane.

        These are the steps `[first, first + n)`; each column gives `(n_lanes * n, *shape)`, sorted by step, or
        `by_lane`.
        """
        slot = first % self.capacity
        n_before = min(n, self.capacity - slot)  # up to the end of the rings
        parts = [(slice(0, n_before), slice(slot, slot + n_before)), (slice(n_before, n), slice(0, n - n_before))]
        return [self._copy_slots(name, n, parts if n_before < n else parts[:1], by_lane) for name in names]

    def _copy_slots(self, name: str, n: int, parts: list[tuple[slice, slice]], by_lane: bool) -> Any:
        cells, spec = self.cells[name], self.specs[name]
        copy = np.empty((self.n_lanes, n, *spec.shape) if by_lane else (n, self.n_lanes, *spec.shape), spec.dtype)
        target = copy if by_lane else copy.swapaxes(0, 1)
        for times, slots in parts:
            target[:, times] = cells[:, slots]
        return copy.reshape(n * self.n_lanes, *spec.shape)

    def items_of(self, name: str) -> np.ndarray | None:
        """Views a column as `(n_rows,)`, one item per row.

        An item is a number, or a piece of memory. None if rows are objects or have no bytes.
        """
        spec, block = self.specs[name], self._blocks[name]
        if isinstance(block, Record):
            return block.items_of(name)
        if spec.is_object or not spec.nbytes or not self.is_in_memory(name):
            return None
        return np.ndarray(self.n_rows, row_dtype(spec), self.flat[name])

    def host(self, name: str, values: Any) -> np.ndarray:
        """Returns values of a column, from `gather`, in host memory."""
        return np.asarray(values)

    def slots_to_file(self, name: str, n: int) -> Any:
        """Returns the first n slots of every lane, `(*lead(n), *shape)`.

        This is a view, or an object that numpy converts to an array.
        """
        return self.by_lane(self.cells[name][:, :n])

    def shared_storage(self, name: str) -> tuple[Any, int] | None:
        """Returns torch's storage of a column in shared memory, and an offset.

        The offset is the number of bytes before its first row. None for a column in other memory.
        """
        block, offset = self._blocks.get(name), 0
        if isinstance(block, Record):
            offset, block = block.offsets[name], block.block
        return (block.storage(), offset) if isinstance(block, SharedBlock) else None

    def value(self, name: str, number: Any) -> Any:
        """Converts a number for a column, for `put_rows`."""
        spec = self.specs[name]
        if spec.dtype.kind != "u" or number == 0:
            return number
        return self.converted(name, np.asarray(number, spec.dtype), spec)  # torch may hold its bits in a signed dtype

    def put_rows(self, name: str, rows: Any, values: Any) -> None:
        """Writes to rows by their ids.

        Args:
            name: of the column.
            rows: an index of the first axis of `flat`.
            values: a result of `converted` or `check`, or one number.
        """
        self.flat[name][rows] = values

    def put_cells(self, name: str, lanes: Any, slots: Any, values: Any) -> None:
        """Writes to slots of lanes; see `put_rows`.

        `lanes` and `slots` index the first two axes of `cells`.
        """
        cells = self.cells[name]
        if type(cells) is type(values) is np.ndarray and values.ndim == cells.ndim == 3 and values.dtype == cells.dtype:
            step, width = values.dtype.itemsize, values.shape[2]
            if width == cells.shape[2] > 1 and values.strides[2] == step:  # as pieces of memory, in half the time
                row = np.dtype((np.void, width * step))
                cells, values = cells.view(row)[..., 0], values.view(row)[..., 0]
        cells[lanes, slots] = values

    def restore_slots(self, name: str, start: int, values: np.ndarray) -> None:
        """Sets the slots of every lane from `start` on.

        `values` are (n_lanes, n, *shape), with the column's dtype.
        """
        slots = slice(start, start + values.shape[1])
        self.put_cells(name, slice(None), slots, self.converted(name, values, self.specs[name]))

    def replace(self, name: str, rows: np.ndarray, values: Any) -> None:
        """Overwrites valid rows of a column, int64 (n,), no two the same.

        The other columns keep their values.
        """
        self.put_rows(name, rows, values)

    def write_block(
        self,
        block: Mapping[str, Any],
        lanes: slice | np.ndarray,
        n_timesteps: int,
        lengths: np.ndarray | None,
        head: int | None,
    ) -> None:
        """Writes T rows from each head on, before the heads are raised.

        Columns that the block lacks become unwritten.

        Args:
            block, lanes, n_timesteps, lengths: see `Storage.write`; already checked, and T is at most the capacity.
            head: of all these lanes, if they have the same.
        """
        # Slots, and which of the T rows are written to them.
        parts: list[tuple[Any, Any]] = []
        rows = None
        valid: Any = ... if lengths is None else np.arange(n_timesteps) < lengths[:, None]
        if lengths is None and head is not None:
            if n_timesteps == 1:
                parts = [(head % self.capacity, 0)]
            else:
                at_once = max(1, ROWS_AT_ONCE // max(1, len(next(iter(block.values())))))
                parts = list(self._runs(head, n_timesteps, at_once))
        else:
            steps = self.ring.head[lanes][:, None] + np.arange(n_timesteps)
            rows = self.at_steps(np.arange(self.n_lanes)[lanes][:, None], steps)[valid]
        given = {name: block.get(name) for name in self.flat}
        absent = {n: self.value(n, self.specs[n].unwritten) for n, values in given.items() if values is None}
        for slots, times in parts:
            for name, values in given.items():
                self.put_cells(name, lanes, slots, absent[name] if values is None else values[:, times])
        for name, values in given.items() if rows is not None else ():
            self.put_rows(name, rows, absent[name] if values is None else values[valid])
        if self.links:
            self.write_links(block, lanes, n_timesteps, lengths)

    def _runs(self, head: int, n_timesteps: int, at_once: int) -> Iterator[tuple[slice, slice]]:
        """Yields the slots of T rows from a head on, in pieces.

        Each piece has its slots and its rows, as slices. No piece crosses the end of a ring.
        """
        at = 0
        while at < n_timesteps:
            slot = (head + at) % self.capacity
            n = min(at_once, n_timesteps - at, self.capacity - slot)
            yield slice(slot, slot + n), slice(at, at + n)
            at += n

    def write_links(
        self, block: Mapping[str, Any], lanes: slice | np.ndarray, n_timesteps: int, lengths: np.ndarray | None = None
    ) -> None:
        """Writes the linked columns; does nothing here, as there are none."""

    def write_step(self, name: str, value: np.ndarray, following: np.ndarray, head: int) -> None:
        """Writes links for one row of each lane; see `LinkedColumns`.

        All lanes have the same head.
        """

    def own(self, value: Any, spec: Spec) -> Any:
        """Returns the value if a column takes it without the host, else None.

        Such a value is on the columns' device, with the dtype of this spec.
        """
        return None

    def converted(self, name: str, values: Any, spec: Spec) -> Any:
        """Converts values for a column of this spec, to the columns' kind of memory.

        Raises:
            SpecError: the dtype does not fit.
        """
        return values if values.dtype == spec.dtype else cast(name, values, spec.dtype)

    def check_block(self, block: Mapping[str, Any], lead: tuple[int, ...]) -> dict[str, Any]:
        """Calls `check` for values by name."""
        return {name: self.check(name, values, lead) for name, values in block.items()}

    def check(self, name: str, values: Any, lead: tuple[int, ...]) -> Any:
        """Converts values `(*lead, *shape)` for a column.

        Raises:
            MissingKeyError, SpecError: there is no such column, or the shape or dtype does not fit.
        """
        spec = self.specs.get(name)
        if spec is None:
            raise MissingKeyError(f"no {name!r} in this store, there are {sorted(self.specs)}")
        return self.fitted(name, values, lead, spec)

    def fitted(self, name: str, values: Any, lead: tuple[int, ...], spec: Spec) -> Any:
        """Converts values `(*lead, *shape)` for a column of this spec.

        The column need not exist yet.

        Raises:
            SpecError: the shape or dtype does not fit.
        """
        if tuple(values.shape) != (*lead, *spec.shape):
            raise SpecError(f"{name!r} has shape {tuple(values.shape)}, expected {(*lead, *spec.shape)}")
        return self.converted(name, values, spec)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in MAPPED}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._map()


def pieces(n: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Divides n things of `nbytes` each for reading.

    Yields the first of each piece, and how many it has.
    """
    at_once = max(1, BYTES_AT_ONCE // max(1, nbytes))
    return ((at, min(at_once, n - at)) for at in range(0, n, at_once))
