"""The rows of a buffer as a table.

A table knows which rows are valid, their keys, and whole columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from rlstructs.debug import is_on
from rlstructs.errors import SpecError, StateError
from rlstructs.replay.draw.reading import Sources
from rlstructs.replay.draw.view import AnyView, View, numbered
from rlstructs.replay.intake.arrays import from_bits, host_array
from rlstructs.replay.leave.array_dict import ArrayDict
from rlstructs.replay.leave.export import GatheredColumn
from rlstructs.replay.rows.spec import Spec
from rlstructs.replay.rows.store import MAX_REDRAWS, Storage
from rlstructs.replay.tianshou import transitions
from rlstructs.replay.tianshou.transitions import ADDED_EMPTY, FLAGS, REW, sources_of

R = TypeVar("R")
INT = np.dtype(np.int64)


class Keys(NamedTuple):
    """The keys of a batch: the columns, and keys that are computed from them.

    Attributes:
        of: `Clock.columns` for which they are valid.
        specs: spec of each key.
        sources: how each is read.
    """

    of: int
    specs: dict[str, Spec]
    sources: Sources


# Placeholder until the columns are first read.
UNKNOWN = Keys(-1, {}, Sources({}))


class Table:
    """The rows and columns of a buffer; row ids count from lane to lane.

    Args:
        storage: the store.
        lane_size: rows of a lane; 0 for a placeholder, whose store has one.
        is_stacked: whether the buffer is of several environments.

    Attributes:
        stand_in: values that are read in place of the stored rewards, `(maxsize, ...)`; None for none.
        views: name -> the memory of a column when it was last read, and the result of `column`.
    """

    # Whether it spans several stores.
    is_joined = False

    def __init__(self, storage: Storage, lane_size: int, is_stacked: bool) -> None:
        self.storage, self.lane_size, self.is_stacked = storage, lane_size, is_stacked
        self.n_lanes = storage.columns.n_lanes
        self.stand_in: np.ndarray | None = None
        self._keys, self._ends = UNKNOWN, _Ends(storage)
        self.views: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in vars(self).items() if name not in ("_keys", "_ends", "views")}
        return {**kept, "stand_in": None}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._keys, self._ends, self.views = UNKNOWN, _Ends(self.storage), {}

    # Rows

    @property
    def maxsize(self) -> int:
        """Capacity in rows."""
        return self.n_lanes * self.lane_size

    @property
    def edges(self) -> np.ndarray:
        """The first row id of each lane, int64 (n_lanes + 1,).

        The last number is the end of the last lane.
        """
        return np.arange(self.n_lanes + 1) * self.lane_size

    def lane_around(self, row: int) -> tuple[int, int]:
        """Finds the first row id and the end of a row's lane.

        (0, -1) if there is no such row.
        """
        if not 0 <= row < self.n_lanes * self.lane_size:
            return 0, -1
        low = row // self.lane_size * self.lane_size
        return low, low + self.lane_size

    def rows(self) -> AnyView:
        """The present rows."""
        return self.own_rows()

    def own_rows(self) -> View:
        """The present rows in the store of this buffer itself."""
        return self.storage.view()

    def gather(self, names: Sequence[str], at: np.ndarray) -> list[Any]:
        """Copies of rows of some columns, `(*at.shape, *shape)` each."""
        return self.storage.gather(names, at)

    def locate(self, index: Any) -> np.ndarray:
        """Converts an index, as `ReplayBuffer` takes it, to row ids, int64 of any shape.

        Raises:
            SpecError, IndexError: it is invalid, or there is no such row.
        """
        rows = self.rows()
        if isinstance(index, slice):
            return rows.row_ids(np.arange(*index.indices(rows.total)))
        end, maxsize = self.index_end(rows), self.maxsize
        given = as_integers(index, end, maxsize)
        at = given if given.dtype is INT else given.astype(np.int64, copy=False)
        # As unsigned numbers, negative ones are large.
        if not at.size or np.maximum.reduce(at.view(np.uint64), axis=None) < end:
            outside = None if rows.total == maxsize else ~rows.has(at)
        else:
            if given.dtype.kind == "i":  # large unsigned numbers became negative ones
                at = np.where(at < 0, at + end, at)
            outside = (at < 0) | (at >= end)
            if not outside.any():
                outside = ~rows.has(at)
        if outside is not None and outside.any():
            raise IndexError(f"index {given[outside].flat[0]} holds no row; {rows.total} of {maxsize} are there")
        return at

    def index_end(self, rows: AnyView) -> int:
        """Finds the end of the row ids, from which negative ones count.

        An interrupted write leaves a gap before it.
        """
        if self.is_stacked:
            return self.maxsize
        return rows.total if rows.total in (0, self.maxsize) or rows.newest()[0] == rows.total - 1 else self.maxsize

    # Keys and columns

    @property
    def columns(self) -> dict[str, Spec]:
        """The specs of the columns, by name."""
        return self.storage.columns.specs

    @property
    def specs(self) -> dict[str, Spec]:
        """The specs of the keys of a batch.

        The keys are the columns, and keys that are computed from them.
        """
        return self._look().specs

    @property
    def sources(self) -> Sources:
        """The way to read each key of a batch."""
        return self._look().sources

    def _look(self) -> Keys:
        keys, clock = self._keys, self.storage.clock
        if keys.of != clock.columns:
            now, stored = clock.columns, self.storage.columns.specs
            specs = transitions.specs_of(stored)
            keys = self._keys = Keys(now, specs, sources_of(tuple(specs), tuple(stored)))
        return keys

    def find(self, name: str) -> Any:
        """Finds the buffer's attribute of this name.

        It is a column, or nested columns; None for nothing.
        """
        columns = self.columns
        if name in columns:
            return self.show(name)
        if inside := [key for key in columns if key.startswith(f"{name}/")]:
            return ArrayDict.trusted({key[len(name) + 1 :]: self.column(key) for key in inside})
        return ArrayDict() if name in ADDED_EMPTY else None

    def show(self, name: str) -> np.ndarray | LazyColumn:
        """Returns a column, or the values that stand in for it."""
        if name != REW or self.stand_in is None:
            return self.column(name)
        return read_only(from_bits(self.stand_in) if self.columns[REW].is_bfloat16 else self.stand_in.view())

    def column(self, name: str) -> np.ndarray | LazyColumn:
        """Returns a column, `(maxsize, ...)`; a view if it stores its own rows."""
        if name in self.storage.columns.links or not self.storage.columns.is_in_memory(name):
            return self.gather_lazily(name)
        whole, n = self.storage.columns.flat[name], self.n_lanes * self.lane_size
        if self.columns[name].is_bfloat16:
            return read_only(from_bits(whole)[:n])
        view = read_only(whole[:n])
        if not self.is_joined:
            self.views[name] = whole, view
        return view

    def ends(self) -> np.ndarray:
        """Marks rows whose flag ends an episode, bool (maxsize,)."""
        found = self._ends.read()
        return found if self.lane_size else found[:0]

    def gather_lazily(self, name: str) -> LazyColumn:
        """Returns a column, `(maxsize, ...)`, whose rows are gathered when indexed."""
        none = self.read_column(name, np.zeros(0, np.int64))
        return LazyColumn((self.maxsize, *none.shape[1:]), none.dtype, functools.partial(self.read_column, name))

    def read_column(self, name: str, at: np.ndarray) -> np.ndarray:
        """Reads the values of a column at row ids (n,).

        The ids may be of empty rows.
        """
        spec = self.columns[name]
        if name in self.storage.columns.links:
            with self.storage.lock:
                rows = self.own_rows()
                values, held = np.zeros((at.size, *spec.shape), spec.dtype), rows.has(at)
                [values[held]] = self.storage.gather([name], at[held])
        else:
            values = self.storage.columns.flat[name][at]
        return from_bits(values) if spec.is_bfloat16 else values

    def read_whole(self, look: Callable[..., R], *given: Any) -> R:
        """Returns `look(*given)`; looks again if another thread changes the columns meanwhile.

        Raises:
            StateError: they change faster than they are read.
        """
        clock = self.storage.clock
        for _ in range(MAX_REDRAWS + 1):
            before = clock.columns
            try:
                found = look(*given)
                if before == clock.columns and not before & 1:
                    return found
            except Exception:  # a column may be gone
                if before == clock.columns and not before & 1:
                    raise
        raise StateError("columns change faster than they are read")


class _Ends:
    """Marks of rows that end episodes, by row id.

    They are computed again only for rows that have changed.

    Args:
        storage: the store.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._whole = self._shown = np.zeros(0, bool)
        self._of: tuple[Any, ...] = ()
        self._counters, self._heads = b"", np.zeros(0, np.int64)

    def read(self) -> np.ndarray:
        """Returns bool (n_rows,), read-only, which later calls may change."""
        storage = self._storage
        with storage.lock:  # a thread that changes rows has counted it before
            return self._read(storage)

    def _read(self, storage: Storage) -> np.ndarray:
        ring, columns, clock = storage.ring, storage.columns, storage.clock
        of = clock.columns, clock.rewrites
        is_same = of == self._of and not is_on()  # poison is written without notice
        counters = ring.counters.tobytes()
        if is_same and counters == self._counters:
            return self._shown
        flags = [columns.flat[name] for name in FLAGS]
        _, reserved, heads, _ = np.frombuffer(counters, np.int64).reshape(ring.counters.shape)
        if is_same and (self._heads <= heads).all():
            low = np.maximum(self._heads, reserved - ring.capacity)
            rows = numbered(columns, low, np.maximum(reserved - low, 0))
            self._whole[rows] = flags[0][rows] | flags[1][rows]
        else:
            self._whole = flags[0] | flags[1]
            self._shown = read_only(self._whole.view())
        # Rows from the heads on may be half written: they are looked at again next time.
        self._counters, self._heads, self._of = counters, heads, of
        return self._shown


def as_integers(index: Any, end: int, maxsize: int) -> np.ndarray:
    """Converts a list, an array or a mask to integers.

    Args:
        index: what was given.
        end: the end of the ids, which a mask may have as its length.
        maxsize: another length of masks.

    Raises:
        SpecError, IndexError: it is none of these.
    """
    given = host_array("index", index)
    if given.dtype == bool:
        if given.shape not in ((end,), (maxsize,)):
            raise IndexError(f"a mask must have a bool for each of {maxsize} rows, got shape {given.shape}")
        return np.flatnonzero(given)
    if given.dtype.kind not in "iu" and given.size:
        raise SpecError(f"index must hold integers, got {given.dtype}")
    return given


class LazyColumn(GatheredColumn):
    """A column of a buffer, `(maxsize, ...)`, without bytes of its own; read-only."""

    def __getitem__(self, index: Any) -> Any:
        found = self._at(index)
        return read_only(found) if isinstance(found, np.ndarray) else found

    def __setitem__(self, index: Any, value: Any) -> None:
        """Raises SpecError, which names the method that changes rows."""
        raise _not_writable()


class ReadOnlyArray(np.ndarray):
    """A numpy array that cannot be written to.

    The error of a write names the method that changes rows of a buffer. Results of computations are plain arrays, and
    so are its pickles.
    """

    def __setitem__(self, index: Any, value: Any) -> None:
        if not self.flags.writeable:  # a copy is writeable
            raise _not_writable()
        super().__setitem__(index, value)

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        plain = np.asarray(array)
        return plain if plain.ndim else plain[()]

    def __reduce__(self) -> Any:
        return np.asarray(self).__reduce__()

    def __repr__(self) -> str:
        return repr(np.asarray(self))


def _not_writable() -> SpecError:
    return SpecError("a column is read-only: call set_array_at_key(values, key, index) of the buffer to change rows")


def read_only(array: np.ndarray) -> np.ndarray:
    """Makes an array read-only."""
    array.flags.writeable = False
    # Arrays of objects stay plain: infos are split by the types of their values.
    return array if array.dtype == object else array.view(ReadOnlyArray)
