"""Columns: named arrays with a row for each lane and slot.

A row id is `lane * lane_stride + slot * slot_stride`, int64. The order of a store sets the strides: "lane" (capacity
and 1) keeps the rows of a lane together, "slot" (1 and n_lanes) the rows of one time. Only `RowIds` calculates with
row ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from rlstructs.debug import is_on, poison
from rlstructs.errors import MissingKeyError, SpecError, StateError
from rlstructs.replay.backing import Backing, Block, Heap, SharedBlock, available_bytes
from rlstructs.replay.objects import OBJECT, ObjectBlock, private_rows
from rlstructs.replay.ring import Ring

LANE, SLOT = "lane", "slot"
# The bits of NaN in bfloat16, which numpy lacks: such columns hold int16.
BFLOAT16_NAN = 0x7FC0


@dataclass(frozen=True)
class Spec:
    """The type of a column's rows.

    Attributes:
        dtype: numpy's; object for rows that are Python objects, whose shape is ().
        shape: of one row.
        fill: the value of rows that are written without this column; None for the default, see `unwritten`.
        is_bfloat16: whether the rows, int16, are the bits of bfloat16.
    """

    dtype: np.dtype
    shape: tuple[int, ...] = ()
    fill: Any = None
    is_bfloat16: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_object(self) -> bool:
        """Whether rows are Python objects."""
        return bool(self.dtype == OBJECT)

    @property
    def unwritten(self) -> Any:
        """The value of unwritten rows: `fill`, or NaN for floats and zero for others; poison in debug mode."""
        if self.fill is not None or self.is_object:
            return self.fill
        return self.poison if is_on() or self.is_bfloat16 or self.dtype.kind in "fc" else 0

    @property
    def poison(self) -> Any:
        """The value of rows that must not be read."""
        if self.is_object:
            return None
        return BFLOAT16_NAN if self.is_bfloat16 else poison(self.dtype)


class RowIds:
    """The row ids of a store.

    Args:
        n_lanes: number of rings.
        capacity: rows per lane.
        order: "lane" or "slot".
    """

    def __init__(self, n_lanes: int, capacity: int, order: str = LANE) -> None:
        self.n_lanes, self.capacity, self.order = n_lanes, capacity, order
        self.lane_stride, self.slot_stride = (capacity, 1) if order == LANE else (1, n_lanes)
        self._first_rows = np.arange(n_lanes) * self.lane_stride

    @property
    def n_rows(self) -> int:
        """Number of row ids."""
        return self.n_lanes * self.capacity

    def rows(self, lanes: Any, slots: Any) -> np.ndarray:
        """Row ids of slots in [0, capacity)."""
        return np.asarray(lanes * self.lane_stride + slots * self.slot_stride)

    def at_steps(self, lanes: Any, steps: Any) -> np.ndarray:
        """Row ids of the rows for these steps; `lanes` is an index, or an array of the shape of the steps."""
        if self.n_lanes == 1:
            return np.asarray(steps % self.capacity)
        slots = steps % self.capacity
        return np.asarray(self._first_rows[lanes] + (slots if self.order == LANE else slots * self.slot_stride))

    def places(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The lanes and slots of row ids."""
        major, minor = np.divmod(rows, self.capacity if self.order == LANE else self.n_lanes)
        return (major, minor) if self.order == LANE else (minor, major)

    def lanes(self, rows: np.ndarray) -> np.ndarray:
        """The lanes of row ids."""
        return np.asarray(rows // self.capacity if self.order == LANE else rows % self.n_lanes)

    def numbered(self, index: np.ndarray, low: int, n: int) -> np.ndarray:
        """Row ids by number if each lane has `n` rows from the step `low` on; they are in the order of the store."""
        if self.order == LANE:
            lanes, ages = np.divmod(index, n) if self.n_lanes > 1 else (0, index)
            return self.at_steps(lanes, low + ages)
        return np.asarray((index + low * self.n_lanes) % self.n_rows)

    def steps(self, rows: np.ndarray, last: Any) -> np.ndarray:
        """The newest steps that rows can hold, up to `last`: one step for all lanes, or int64 (n_lanes,)."""
        slots = rows  # modulo the capacity, in order "lane"
        if self.order != LANE or isinstance(last, np.ndarray):
            lanes, slots = self.places(rows)
            last = last[lanes] if isinstance(last, np.ndarray) else last
        return np.asarray(last - (last - slots) % self.capacity)

    def shifted(self, rows: np.ndarray, by: Any) -> np.ndarray:
        """Row ids of the rows so many steps after these in their lanes; `by` (L,) for rows (B, 1) must be ascending."""
        lanes, slots = (0, rows) if self.n_lanes == 1 else self.places(rows)
        if self.order == LANE and rows.size and rows.ndim == 2 and np.ndim(by) == 1:
            low, high = slots.min() + by[0], slots.max() + by[-1]
            if low >= 0 and high < self.capacity:  # nearly always: none crosses the end of its ring
                return np.asarray(rows + by)
        return self.at_steps(lanes, slots + by)


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
        layout: counts changes of the columns, twice each; odd during a change.
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
    # The counters, set by the store.
    ring: Ring

    def __init__(self, n_lanes: int, capacity: int, order: str = LANE, backing: Backing | None = None) -> None:
        super().__init__(n_lanes, capacity, order)
        self.specs: dict[str, Spec] = {}
        self.layout = 0
        self.has_objects = False
        self._backing = Heap() if backing is None else backing
        self._blocks: dict[str, Block] = {}
        self._map()

    def _map(self) -> None:
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

    def _rows_of(self, name: str) -> np.ndarray:
        return self._rows_in(self._blocks[name], self.specs[name])

    def _rows_in(self, block: Block, spec: Spec) -> np.ndarray:
        if isinstance(block, ObjectBlock):
            return block.values
        return block.bytes().view(spec.dtype).reshape(self.n_rows, *spec.shape)

    def _allocate(self, name: str, spec: Spec) -> None:
        self._blocks[name] = self._block(name, spec)

    def _block(self, name: str, spec: Spec) -> Block:
        return ObjectBlock(self.n_rows) if spec.is_object else self._backing.allocate(name, spec.nbytes * self.n_rows)

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(spec.nbytes for spec in self.specs.values()) * self.n_rows

    def available_bytes(self) -> int | None:
        """Bytes that are available for more columns; None if unknown."""
        return available_bytes()

    def add(self, name: str, spec: Spec) -> None:
        """Adds a column; all of its rows are unwritten."""
        self.layout += 1
        self._allocate(name, spec)
        self.specs, self.has_objects = {**self.specs, name: spec}, self.has_objects or spec.is_object
        self._map_one(name)
        self.layout += 1
        if spec.unwritten != 0:  # NaN is not equal to it either
            self.put_rows(name, slice(None), self.value(name, spec.unwritten))

    def exchange(self, made: Mapping[str, tuple[Spec, np.ndarray]], gone: Iterable[str] = ()) -> None:
        """Gives columns other specs and values, `(n_rows, *shape)` by row id, and removes others.

        A thread that reads meanwhile gets the old or the new ones; `layout` tells whether they were exchanged.
        """
        blocks = {name: self._block(name, spec) for name, (spec, _) in made.items()}
        for name, (spec, values) in made.items():
            self._rows_in(blocks[name], spec)[...] = values
        self.layout += 1
        gone = set(gone) - made.keys()
        self._blocks = {name: block for name, block in (self._blocks | blocks).items() if name not in gone}
        specs = self.specs | {name: spec for name, (spec, _) in made.items()}
        self.specs = {name: spec for name, spec in specs.items() if name not in gone}
        self.has_objects = any(spec.is_object for spec in self.specs.values())
        for name in made:
            self._map_one(name)
        for name in gone:
            del self.flat[name], self.cells[name]
        self.layout += 1

    def move(self, backing: Backing) -> None:
        """Copies all columns to memory of another kind; views of the old memory no longer follow."""
        if objects := [name for name, spec in self.specs.items() if spec.is_object]:
            raise StateError(f"{objects[0]!r} holds objects, which cannot be moved to where processes share them")
        moved = {}
        for name, spec in self.specs.items():
            moved[name] = backing.allocate(name, spec.nbytes * self.n_rows)
            moved[name].bytes()[...] = self._blocks[name].bytes()
        self._backing, self._blocks = backing, moved
        self._map()

    def resize(self, capacity: int) -> None:
        """Changes the number of rows per lane; rows that still fit keep their lanes and slots."""
        old, n = dict(self.cells), min(self.capacity, capacity)
        RowIds.__init__(self, self.n_lanes, capacity, self.order)
        for name, cells in old.items():
            self.add(name, self.specs[name])
            self.cells[name][:, :n] = cells[:, :n]

    def gather(self, names: Iterable[str], rows: np.ndarray) -> list[Any]:
        """Copies of some rows of columns that are not linked, `(*rows.shape, *shape)` each, in their kind of memory."""
        # mode="clip" skips numpy's check of the indices; row ids are in range.
        taken = [self.flat[name].take(rows, axis=0, mode="clip") for name in names]
        if self.has_objects:
            return [private_rows(values) if values.dtype == OBJECT else values for values in taken]
        return taken

    def host(self, name: str, values: Any) -> np.ndarray:
        """Values of a column, as `gather` returns them, in host memory."""
        return np.asarray(values)

    def to_file(self, name: str, shape: tuple[int, ...]) -> Any:
        """A column in this shape, for a file: an array, or an object that numpy turns into one."""
        return self.flat[name].reshape(shape)

    def slots_to_file(self, name: str, n: int) -> Any:
        """The first n slots of every lane, `(n_lanes, n, *shape)`, for a file; see `to_file`."""
        return np.ascontiguousarray(self.cells[name][:, :n])

    def shared_storage(self, name: str) -> Any:
        """torch's storage of a column in shared memory; None for any other."""
        block = self._blocks.get(name)
        return block.storage() if isinstance(block, SharedBlock) else None

    def read_into(self, name: str, read: Callable[[np.ndarray], None]) -> None:
        """Fills a column by a function that fills an array (n_rows, *shape)."""
        read(self.flat[name])

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
            values: what `converted` or `check` returned, or one number.
        """
        self.flat[name][rows] = values

    def put_cells(self, name: str, lanes: Any, slots: Any, values: Any) -> None:
        """Writes to slots of lanes, an index of the first two axes of `cells`; see `put_rows`."""
        self.cells[name][lanes, slots] = values

    def restore_slots(self, name: str, values: np.ndarray) -> None:
        """Sets the first n slots of every lane to `values`, (n_lanes, n, *shape) of the column's dtype."""
        self.put_cells(name, slice(None), slice(0, values.shape[1]), self.converted(name, values, self.specs[name]))

    def replace(self, name: str, rows: np.ndarray, values: Any) -> None:
        """Overwrites valid rows, int64 (n,), no two the same; the other columns keep what they hold."""
        self.put_rows(name, rows, values)

    def write_links(
        self, block: Mapping[str, Any], lanes: slice | np.ndarray, n_timesteps: int, lengths: np.ndarray | None = None
    ) -> None:
        """Writes the linked columns; here there are none."""

    def own(self, value: Any, spec: Spec) -> Any:
        """Returns a value that a column of this spec takes without passing through the host; otherwise None."""
        return None

    def converted(self, name: str, values: Any, spec: Spec) -> Any:
        """Converts values for a column of this spec, to the columns' kind of memory.

        Raises:
            SpecError: the dtype does not fit.
        """
        return values if values.dtype == spec.dtype else cast(name, values, spec.dtype)

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
        """Converts values `(*lead, *shape)` for a column of this spec, which need not exist yet.

        Raises:
            SpecError: the shape or dtype does not fit.
        """
        if tuple(values.shape) != (*lead, *spec.shape):
            raise SpecError(f"{name!r} has shape {tuple(values.shape)}, needed is {(*lead, *spec.shape)}")
        return self.converted(name, values, spec)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in ("flat", "cells", "ring")}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._map()


def cast(name: str, values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Converts values to another dtype; only the precision of floats may be lost.

    Raises:
        SpecError: values would change in other ways.
    """
    whole = "biu"
    if np.can_cast(values.dtype, dtype, "safe"):
        return values.astype(dtype)
    if not (values.dtype.kind in whole and dtype.kind in whole) and not np.can_cast(values.dtype, dtype, "same_kind"):
        raise SpecError(f"{name!r} is {values.dtype}, which would lose its values as {dtype}; convert it first")
    with np.errstate(over="ignore", invalid="ignore"):
        converted = values.astype(dtype)
        back = converted.astype(values.dtype)  # numpy would compare an int with a float as floats
    if values.dtype.kind in whole:
        fit = np.array_equal(back, values) and (dtype.kind not in whole or np.array_equal(converted, values))
    else:
        fit = np.array_equal(np.isfinite(converted), np.isfinite(values))
    if not fit:
        raise SpecError(f"{name!r} holds {values.dtype} values that do not fit {dtype}")
    return converted
