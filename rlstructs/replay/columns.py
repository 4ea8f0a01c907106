"""Columns: named arrays with a row for each lane and slot.

A row id is `lane * lane_stride + slot * slot_stride`, int64. The order of a store says which is which:
"lane" (strides capacity and 1) keeps a lane's rows together, "slot" (1 and n_lanes) the rows of one
time. Only this module knows it.
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
# The bits of bfloat16's NaN: numpy has no such dtype, so that its columns hold integers.
BFLOAT16_NAN = 0x7FC0


@dataclass(frozen=True)
class Spec:
    """What a column holds in a row.

    Attributes:
        dtype: of numpy; that of objects for rows of Python's objects, of shape ().
        shape: of one row.
        fill: what a row holds of a column that it was written without; None for `unwritten`.
        is_bfloat16: whether what the dtype, int16, holds are the bits of bfloat16.
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
        """Whether a row is one of Python's objects."""
        return bool(self.dtype == OBJECT)

    @property
    def unwritten(self) -> Any:
        """The value of what was never written: `fill`, or NaN in floats and zero in others; in debug mode poison."""
        if self.fill is not None or self.is_object:
            return self.fill
        return self.poison if is_on() or self.is_bfloat16 or self.dtype.kind in "fc" else 0

    @property
    def poison(self) -> Any:
        """The value of what is not to be read."""
        if self.is_object:
            return None
        return BFLOAT16_NAN if self.is_bfloat16 else poison(self.dtype)


class RowIds:
    """The row ids of a store.

    Args:
        n_lanes: rings.
        capacity: rows per lane.
        order: "lane" or "slot".
    """

    def __init__(self, n_lanes: int, capacity: int, order: str = LANE) -> None:
        self.n_lanes, self.capacity, self.order = n_lanes, capacity, order
        self.lane_stride, self.slot_stride = (capacity, 1) if order == LANE else (1, n_lanes)
        self._first_rows = np.arange(n_lanes) * self.lane_stride

    @property
    def n_rows(self) -> int:
        """Rows there is room for."""
        return self.n_lanes * self.capacity

    def rows(self, lanes: Any, slots: Any) -> np.ndarray:
        """Row ids of slots in [0, capacity)."""
        return np.asarray(lanes * self.lane_stride + slots * self.slot_stride)

    def at_steps(self, lanes: Any, steps: Any) -> np.ndarray:
        """Row ids of the rows that hold these steps, or will; lanes are an index of all."""
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
        """Row ids by number, if each lane has `n` rows from the step `low` on: by lane, or in order "slot" by step."""
        if self.order == LANE:
            lanes, ages = np.divmod(index, n) if self.n_lanes > 1 else (0, index)
            return self.at_steps(lanes, low + ages)
        return np.asarray((index + low * self.n_lanes) % self.n_rows)

    def steps(self, rows: np.ndarray, last: Any) -> np.ndarray:
        """The newest steps that rows can hold, up to `last`: one step for all lanes, or int64 (n_lanes,)."""
        slots = rows  # in order "lane" equal to their slots, modulo the capacity
        if self.order != LANE or isinstance(last, np.ndarray):
            lanes, slots = self.places(rows)
            last = last[lanes] if isinstance(last, np.ndarray) else last
        return np.asarray(last - (last - slots) % self.capacity)

    def shifted(self, rows: np.ndarray, by: Any) -> np.ndarray:
        """Row ids of the rows so many steps after these in their lanes; offsets (L,) for rows (B, 1) must rise."""
        lanes, slots = (0, rows) if self.n_lanes == 1 else self.places(rows)
        if self.order == LANE and rows.size and rows.ndim == 2 and np.ndim(by) == 1:  # the same offsets, which rise
            low, high = slots.min() + by[0], slots.max() + by[-1]
            if low >= 0 and high < self.capacity:  # none goes around the end of its ring, as nearly always
                return np.asarray(rows + by)
        return self.at_steps(lanes, slots + by)


class Columns(RowIds):
    """Named arrays over bytes of one kind.

    What is written goes through `converted` or `check`, and then `put_rows` or `put_cells`.

    Args:
        n_lanes: rings.
        capacity: rows per lane.
        order: "lane" or "slot".
        backing: where the bytes lie.

    Example:
        >>> columns = Columns(n_lanes=2, capacity=3, order="slot")
        >>> columns.add("reward", Spec(np.dtype(np.float32)))
        >>> columns.rows(np.array([0, 1]), np.array([2, 2])).tolist()
        [4, 5]
        >>> columns.flat["reward"][[4, 5]] = [1.0, 2.0]
        >>> columns.cells["reward"][:, 2].tolist()
        [1.0, 2.0]
    """

    # Whether `flat` and `cells` are arrays of numpy.
    on_host = True
    # The linked columns by name; only `LinkedColumns` has any.
    links: Mapping[str, Any] = MappingProxyType({})
    # The counters, set by the store.
    ring: Ring

    def __init__(self, n_lanes: int, capacity: int, order: str = LANE, backing: Backing | None = None) -> None:
        super().__init__(n_lanes, capacity, order)
        # Another dict with each change, as others may be looking at it.
        self.specs: dict[str, Spec] = {}
        # How often columns came, went or changed, twice each; odd while one does.
        self.layout = 0
        self.has_objects = False
        self._backing = Heap() if backing is None else backing
        self._blocks: dict[str, Block] = {}
        self._map()

    def _map(self) -> None:
        # name -> (n_rows, *shape) in the order of row ids, and (n_lanes, capacity, *shape): the same memory.
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

    def nbytes_of(self, name: str) -> int:
        """Bytes of one column."""
        return self.specs[name].nbytes * self.n_rows

    def available_bytes(self) -> int | None:
        """Bytes there is room for where columns lie; None if that cannot be told."""
        return available_bytes()

    def add(self, name: str, spec: Spec) -> None:
        """Adds a column, every row of which is unwritten."""
        self.layout += 1
        self._allocate(name, spec)
        self.specs, self.has_objects = {**self.specs, name: spec}, self.has_objects or spec.is_object
        self._map_one(name)
        self.layout += 1
        if spec.unwritten != 0:  # NaN is not equal to it either
            self.put_rows(name, slice(None), self.value(name, spec.unwritten))

    def exchange(self, made: Mapping[str, tuple[Spec, np.ndarray]], gone: Iterable[str] = ()) -> None:
        """Gives columns other specs and values, `(n_rows, *shape)` in the order of row ids, and takes others away.

        Who reads meanwhile has the old ones or the new ones; `layout` tells whether they were exchanged.
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
        """Copies every column to bytes of another kind; views of the old ones no longer follow."""
        moved = {}
        if objects := [name for name, spec in self.specs.items() if spec.is_object]:
            raise StateError(f"{objects[0]!r} holds objects, which cannot be moved to where processes share them")
        for name, spec in self.specs.items():
            moved[name] = backing.allocate(name, spec.nbytes * self.n_rows)
            moved[name].bytes()[...] = self._blocks[name].bytes()
        self._backing, self._blocks = backing, moved
        self._map()

    def resize(self, capacity: int) -> None:
        """Makes room for more rows per lane, or for fewer; those that still fit keep their lanes and slots."""
        old, n = dict(self.cells), min(self.capacity, capacity)
        RowIds.__init__(self, self.n_lanes, capacity, self.order)
        for name, cells in old.items():
            self.add(name, self.specs[name])
            self.cells[name][:, :n] = cells[:, :n]

    def gather(self, names: Iterable[str], rows: np.ndarray) -> list[Any]:
        """These rows of these columns, private memory of the columns' kind, `(*rows.shape, *shape)` each."""
        # mode="clip" reads without a look at every index first; row ids from here are in range.
        taken = [self.flat[name].take(rows, axis=0, mode="clip") for name in names]
        if self.has_objects:
            return [private_rows(values) if values.dtype == OBJECT else values for values in taken]
        return taken

    def host(self, name: str, values: Any) -> np.ndarray:
        """What `gather` gave, in host memory."""
        return np.asarray(values)

    def to_file(self, name: str, shape: tuple[int, ...]) -> Any:
        """A column in this shape: an array, or what becomes one in host memory when it is asked for."""
        return self.flat[name].reshape(shape)

    def slots_to_file(self, name: str, n: int) -> Any:
        """The first n slots of every lane, `(n_lanes, n, *shape)`, as `to_file` gives a column."""
        return np.ascontiguousarray(self.cells[name][:, :n])

    def shared_storage(self, name: str) -> Any:
        """torch's storage of a column that lies in shared memory; None of any other."""
        block = self._blocks.get(name)
        return block.storage() if isinstance(block, SharedBlock) else None

    def read_into(self, name: str, read: Callable[[np.ndarray], None]) -> None:
        """Has `read` fill an array of the size of a column, which becomes the column."""
        read(self.flat[name])

    def value(self, name: str, number: Any) -> Any:
        """One number of a column's dtype as `put_rows` takes it."""
        spec = self.specs[name]
        if spec.dtype.kind != "u" or number == 0:
            return number
        return self.converted(name, np.asarray(number, spec.dtype), spec)  # torch may hold its bits in a signed dtype

    def put_rows(self, name: str, rows: Any, values: Any) -> None:
        """Writes to rows by their ids.

        Args:
            name: of the column.
            rows: an index of the first axis of `flat`.
            values: what `converted` or `check` gave, or one number.
        """
        self.flat[name][rows] = values

    def put_cells(self, name: str, lanes: Any, slots: Any, values: Any) -> None:
        """Writes to slots of lanes, an index of the first axes of `cells`; else as `put_rows`."""
        self.cells[name][lanes, slots] = values

    def restore_slots(self, name: str, values: np.ndarray) -> None:
        """Sets the first n slots of every lane, `values` (n_lanes, n, *shape) of the column's dtype."""
        self.put_cells(name, slice(None), slice(0, values.shape[1]), self.converted(name, values, self.specs[name]))

    def replace(self, name: str, rows: np.ndarray, values: Any) -> None:
        """Overwrites valid rows, int64 (n,), no two the same; the other columns keep what they hold."""
        self.put_rows(name, rows, values)

    def write_links(
        self, block: Mapping[str, Any], lanes: slice | np.ndarray, n_timesteps: int, lengths: np.ndarray | None = None
    ) -> None:
        """Writes the linked columns; here there are none."""

    def own(self, value: Any, spec: Spec) -> Any:
        """`value`, if it lies where columns do and is what one of this spec takes without passing the host; or None."""
        return None

    def converted(self, name: str, values: Any, spec: Spec) -> Any:
        """`values` as a column of this spec takes them, in the columns' kind of memory.

        Raises:
            SpecError: the dtype does not fit.
        """
        return values if values.dtype == spec.dtype else cast(name, values, spec.dtype)

    def check(self, name: str, values: Any, lead: tuple[int, ...]) -> Any:
        """`values` as what the column takes, `(*lead, *shape)`.

        Raises:
            MissingKeyError, SpecError: there is no such column, or the shape or dtype does not fit.
        """
        spec = self.specs.get(name)
        if spec is None:
            raise MissingKeyError(f"no {name!r} in this store, there are {sorted(self.specs)}")
        return self.fitted(name, values, lead, spec)

    def fitted(self, name: str, values: Any, lead: tuple[int, ...], spec: Spec) -> Any:
        """As `check`, for a column of this spec, which need not be there yet.

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
    """`values` in another dtype; only the precision of floats may be lost.

    Raises:
        SpecError: something else would be.
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
