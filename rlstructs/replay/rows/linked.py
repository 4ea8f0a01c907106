"""Columns of next observations, each stored as the observation of the following row.

Except at the end of an episode, the next observation of a step
is the observation of the following step. A linked column stores nothing where the following row holds the same bits in
its source. Other values are stored separately, in sparse memory. The newest row of a lane has no following row yet, so
its value waits until that row is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlstructs.errors import StateError
from rlstructs.replay.rows.backing import Backing
from rlstructs.replay.rows.columns import Columns, pieces
from rlstructs.replay.rows.compressed import CompressedBlock
from rlstructs.replay.rows.lanes import ALL, BASE, HEAD, LANE, RowIds
from rlstructs.replay.rows.spec import Spec

# Columns with smaller rows (bytes) are not linked: looking up where a value is stored would cost more than it saves.
SMALLEST = 256
# Stands for no step.
NONE = -2
# Bytes -> numbers that differ where a bit does.
BITS = {width: np.dtype(f"u{width}") for width in (1, 2, 4, 8)}
# Values (n, *shape) of some rows, in pieces: the number of the first, and the values.
Values = Iterable[tuple[int, np.ndarray]]


@dataclass
class Link:
    """The storage of a linked column's values.

    Attributes:
        source: the column that holds most of them, in the following rows.
        is_separate: bool (n_rows,), the rows whose values are stored separately.
        waiting: (2, n_lanes, *shape), values of two rows per lane. The newest row's value is never overwritten before
            the head has passed the next row, so an interrupted write changes nothing.
        steps: int64 (2, n_lanes), the steps of these rows.
        file: which has the last three; None in memory.
    """

    source: str
    is_separate: np.ndarray
    waiting: np.ndarray
    steps: np.ndarray
    file: str | None = None

    def find_newest(self, head: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """Finds the waiting value of the newest row: 0 or 1 per lane."""
        return np.asarray(self.steps[1, lanes] == head[lanes] - 1, np.intp)


def make_link(ids: RowIds, source: str, spec: Spec, backing: Backing) -> Link:
    """Makes the storage of a column like `source`, in one block."""
    n_bytes = 2 * ids.n_lanes * spec.nbytes
    block = backing.allocate(source, 16 * ids.n_lanes + n_bytes + ids.n_rows)
    steps, waiting, is_separate = np.split(block.bytes(), [16 * ids.n_lanes, 16 * ids.n_lanes + n_bytes])
    waiting = waiting.view(spec.dtype).reshape(2, ids.n_lanes, *spec.shape)
    steps = steps.view(np.int64).reshape(2, ids.n_lanes)
    return Link(source, is_separate.view(bool), waiting, steps, getattr(block, "file", None))


class _Step:
    """The plan for writing one row per lane to a linked column.

    The lanes are in step.

    Args:
        waiting: see `Link`.
        separate, is_separate: of a column and of its `Link`, by slot: `(capacity, n_lanes, ...)`.
        head: of all lanes, when it is used next.
        newest: which of the waiting values are those of the newest rows.
    """

    def __init__(
        self, waiting: np.ndarray, separate: np.ndarray, is_separate: np.ndarray, head: int, newest: int
    ) -> None:
        self.separate, self.is_separate, self.head, self.newest = separate, is_separate, head, newest
        self._waiting, self._rows = [_bits(values) for values in waiting], (waiting.shape[1], -1)

    def differ(self, following: np.ndarray) -> np.ndarray:
        """Marks newest rows that differ from these, bool (n_lanes,).

        `following` is `(n_lanes, *shape)`.
        """
        before = self._waiting[self.newest]
        after = np.ascontiguousarray(following).reshape(self._rows).view(before.dtype)
        differs: np.ndarray = np.logical_or.reduce(before != after, axis=1)
        return differs


class LinkedColumns(Columns):
    """Columns in host memory, some of which may be linked.

    Linked ones are not in `flat` and `cells`. `ring` must be set before a linked column is written or read.

    Example:
        >>> from rlstructs.replay.rows.lanes import Ring
        >>> columns = LinkedColumns(n_lanes=1, capacity=4)
        >>> columns.ring = Ring(np.zeros((4, 1), np.int64), 4)
        >>> columns.add("obs", Spec(np.dtype(np.int64)))
        >>> columns.link("obs_next", "obs")
        >>> block = {"obs": np.array([[1, 2, 5]]), "obs_next": np.array([[2, 3, 6]])}  # an episode ends with 3
        >>> columns.put_cells("obs", slice(None), slice(0, 3), block["obs"])
        >>> columns.write_links(block, slice(None), 3)
        >>> columns.ring.head[:] = 3
        >>> columns.gather_linked(["obs_next"], np.arange(3)), columns.links["obs_next"].is_separate.tolist()
        ([array([2, 3, 6])], [False, True, False, False])
    """

    def __init__(self, n_lanes: int, capacity: int, order: str = LANE, backing: Backing | None = None) -> None:
        self.links: dict[str, Link] = {}
        super().__init__(n_lanes, capacity, order, backing)

    def _map(self) -> None:
        super()._map()
        self._separate: dict[str, np.ndarray] = {}  # name -> (n_rows, *shape), filled by `_separate_rows`
        self._steps: dict[str, _Step] = {}  # filled by `write_step`

    def _by_slot(self, rows: np.ndarray) -> np.ndarray:
        """Views rows (n_rows, ...) by slot and lane, (capacity, n_lanes, ...)."""
        if self.order == LANE:
            return rows.reshape(self.n_lanes, self.capacity, *rows.shape[1:]).swapaxes(0, 1)
        return rows.reshape(self.capacity, self.n_lanes, *rows.shape[1:])

    def _separate_rows(self, name: str) -> np.ndarray:
        """Returns the memory of a linked column, `(n_rows, *shape)`."""
        rows = self._separate.get(name)
        if rows is None:
            rows = self._separate[name] = self._rows_of(name)
        return rows

    @property
    def nbytes(self) -> int:
        """Bytes of all columns.

        Of linked columns only values that are not stored through their sources count.
        """
        total = super().nbytes
        for name, link in self.links.items():
            n_shared = self.n_rows - int(link.is_separate.sum())
            total += link.is_separate.nbytes + link.waiting.nbytes
            total -= 0 if self.is_compressed(name) else n_shared * self.specs[name].nbytes
        return total

    def link(self, name: str, source: str) -> None:
        """Adds a linked column, or empties the one of this name.

        It is like `source`, which must be empty.
        """
        spec = self.specs[source]
        link = make_link(self, source, spec, self._backing)
        link.steps[...] = NONE
        below = self._blocks[source]
        with self.clock.counting(of_columns=True):
            # Empty rows are not even marked as unwritten, so that sparse memory stays untouched.
            if isinstance(below, CompressedBlock):
                self._blocks[name] = below.beside(name, spec, self._backing)
            else:
                self._blocks[name] = self._backing.rows(name, spec, self.n_rows, sparse=True)
            self._separate.pop(name, None), self._steps.pop(name, None)
            self.links[name] = link
            self.specs = {**self.specs, name: Spec(spec.dtype, spec.shape, 0, spec.is_bfloat16)}

    def unlink(self, name: str) -> None:
        """Makes a column store its own rows, which must be written anew."""
        with self.clock.counting(of_columns=True):
            del self.links[name]
            self._map_one(name)

    def emptied(self, capacity: int) -> Columns:
        other = super().emptied(capacity)
        assert isinstance(other, LinkedColumns)
        other.links = {}
        return other

    def copy_to(self, backing: Backing) -> Callable[[], None]:
        """Copies the columns; raises StateError if one is linked.

        See `Columns.copy_to`.
        """
        if self.links:
            raise StateError("a store with linked columns cannot be shared")
        return super().copy_to(backing)

    def resize(self, capacity: int) -> None:
        """Changes the number of rows per lane; no lane may have wrapped.

        See `Columns.resize`.
        """
        held = {name: self.link_arrays(name) for name in self.links}
        super().resize(capacity)
        for name, arrays in held.items():
            self.link(name, self.links[name].source)
            self.restore_link(name, arrays, [(0, arrays["values"])], self.ring.head)

    def write_links(
        self, block: Mapping[str, Any], lanes: slice | np.ndarray, n_timesteps: int, lengths: np.ndarray | None = None
    ) -> None:
        """Writes the linked columns of T rows from each head on.

        It comes before the heads are raised.

        Args:
            block: name -> (n, T, ...); linked columns and sources that it lacks become zero.
            lanes: the n lanes.
            n_timesteps: T.
            lengths: int64 (n,), how many of the T rows are valid; None for all.
        """
        lanes = np.arange(self.n_lanes)[lanes]
        for name, link in self.links.items():
            values, following = (self._find_values(block, each, lanes, n_timesteps) for each in (name, link.source))
            if lengths is None:
                self._write_link(name, lanes, values, following)
                continue
            for at in np.flatnonzero(lengths):
                part, n = slice(at, at + 1), int(lengths[at])
                self._write_link(name, lanes[part], values[part, :n], following[part, :n])

    def _find_values(self, block: Mapping[str, Any], name: str, lanes: np.ndarray, n_timesteps: int) -> np.ndarray:
        """Returns the values (n, T, *shape) of a column in a block.

        Zeros if there are none.
        """
        if name in block:
            return np.asarray(block[name])
        spec = self.specs[name]
        return np.broadcast_to(np.zeros((), spec.dtype), (len(lanes), n_timesteps, *spec.shape))

    def _write_link(self, name: str, lanes: np.ndarray, values: np.ndarray, following: np.ndarray) -> None:
        """Writes values (n, T, *shape) of a linked column.

        The source holds `following`, of the same shape.
        """
        link, head, n_more = self.links[name], self.ring.head[lanes], values.shape[1] - 1
        if n_more < 0:
            return
        # The newest rows have a following one now.
        at, old = link.find_newest(self.ring.head, lanes), head > self.ring.base[lanes]
        had: Any = ALL if old.all() else old
        newest = self.at_steps(lanes[had], head[had] - 1)
        self._store(name, newest, link.waiting[at[had], lanes[had]], following[had, 0])
        if n_more:
            rows = self.at_steps(lanes[:, None], head[:, None] + np.arange(n_more)).ravel()
            before, after = (each.reshape(-1, *each.shape[2:]) for each in (values[:, :-1], following[:, 1:]))
            self._store(name, rows, before, after)
        link.waiting[1 - at, lanes] = values[:, -1]
        link.steps[1 - at, lanes] = head + n_more

    def _store(self, name: str, rows: np.ndarray, values: np.ndarray, following: np.ndarray) -> None:
        """Stores values (n, *shape) that differ from the source's following rows."""
        different = _differ(values, following)
        self.links[name].is_separate[rows] = different
        if different.any():
            self._separate_rows(name)[rows[different]] = values[different]

    def write_step(self, name: str, value: np.ndarray, following: np.ndarray, head: int) -> None:
        """Writes the links of a linked column for one row of each lane.

        Args:
            name: of the column.
            value: `(n_lanes, *shape)`.
            following: of its source, of the same shape.
            head: of all lanes.
        """
        link, step = self.links[name], self._steps.get(name)
        if step is None or step.head != head:
            newest = next((at for at in (0, 1) if (link.steps[at] == head - 1).all()), None)
            if newest is None:
                self._write_link(name, np.arange(self.n_lanes), value[:, None], following[:, None])
                return
            places = (self._by_slot(self._separate_rows(name)), self._by_slot(link.is_separate))
            step = self._steps[name] = _Step(link.waiting, *places, head, newest)
        before, slot = link.waiting[step.newest], (head - 1) % self.capacity
        different = step.differ(following)
        step.is_separate[slot] = different
        if n_same := different.tobytes().count(0):
            if n_same < self.n_lanes:
                step.separate[slot][different] = before[different]
        else:
            step.separate[slot] = before
        step.newest = other = 1 - step.newest
        link.waiting[other] = value
        link.steps[other].fill(head)
        step.head = head + 1

    def gather_linked(self, names: Iterable[str], rows: np.ndarray) -> list[Any]:
        """Gathers, also from linked columns; a lock must keep writers away."""
        names, ids = tuple(names), rows.reshape(-1)
        sources = {name: self.links[name].source for name in names if name in self.links}
        if not sources:
            return self.gather(names, rows)
        plain = [name for name in names if name not in sources and name not in sources.values()]
        found = dict(zip(plain, self.gather(plain, ids), strict=True)) if plain else {}
        for name, source in sources.items():
            # A source that is wanted, too, is gathered with what the link shares: a compressed row is decoded once.
            is_wanted = source in names and source not in found
            found[name], values = self._gather_link(name, ids, ids if is_wanted else ids[:0])
            if is_wanted:
                found[source] = values
        return [found[name].reshape(*rows.shape, *self.specs[name].shape) for name in names]

    def _gather_link(self, name: str, ids: np.ndarray, own: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Gathers rows (n,) of a linked column, and rows (m,) of its source."""
        link = self.links[name]
        is_separate = link.is_separate[ids]
        n_separate = np.count_nonzero(is_separate)
        # Copies all values from where most of them are, then corrects the others: a mask makes copies slow.
        if 2 * n_separate <= ids.size:
            [both] = self.gather([link.source], np.concatenate([own, self.shifted(ids, 1)]))
            values = both[own.size :]
            if n_separate:
                values[is_separate] = self._separate_rows(name)[ids[is_separate]]
        else:
            values = self._separate_rows(name).take(ids, axis=0, mode="clip")
            [both] = self.gather([link.source], np.concatenate([own, self.shifted(ids[~is_separate], 1)]))
            values[~is_separate] = both[own.size :]
        newest, lanes = self._find_newest(ids)
        if lanes.size:
            values[newest] = link.waiting[link.find_newest(self.ring.head, lanes), lanes]
        return values, both[: own.size]

    def _find_newest(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Marks rows (n,) that are the newest of their lanes, bool (n,).

        Also returns their lanes.
        """
        ring, lanes = self.ring, self.lanes(rows)
        newest = np.where(ring.head > ring.base, self.at_steps(np.arange(self.n_lanes), ring.head - 1), -1)
        is_newest = np.asarray(rows == newest[lanes])
        return is_newest, lanes[is_newest]

    def replace(self, name: str, rows: np.ndarray, values: Any) -> None:
        """Overwrites valid rows; values stored through them stay as they are.

        See `Columns.replace`.
        """
        if name in self.links:
            self._replace_link(name, rows, values)
            return
        for each, link in self.links.items():
            if link.source == name:
                is_first = self.steps(rows, self.ring.head - 1) <= self.ring.oldest()[self.lanes(rows)]
                before = self.shifted(rows[~is_first], -1)
                self._replace_link(each, before, self.gather_linked([each], before)[0])
        super().replace(name, rows, values)

    def _replace_link(self, name: str, rows: np.ndarray, values: np.ndarray) -> None:
        link, (newest, lanes) = self.links[name], self._find_newest(rows)
        link.is_separate[rows] = ~newest
        self._separate_rows(name)[rows[~newest]] = values[~newest]
        link.waiting[link.find_newest(self.ring.head, lanes), lanes] = values[newest]

    def link_arrays(self, name: str) -> dict[str, np.ndarray]:
        """Returns the arrays of a linked column for a file.

        Returns:
            `at`: int64 (n, 2), the lanes and slots of the values that are stored separately. `values`: (n, *shape).
            `newest`: (n_lanes, *shape), the values of the newest rows.
        """
        link, every = self.links[name], np.arange(self.n_lanes)
        rows = np.flatnonzero(link.is_separate)
        at = np.stack(self.places(rows), axis=1)
        newest = link.waiting[link.find_newest(self.ring.head, every), every]
        return {"at": at, "values": self._separate_rows(name)[rows], "newest": newest}

    def restore_link(self, name: str, arrays: Mapping[str, np.ndarray], values: Values, head: np.ndarray) -> None:
        """Restores a linked column from the result of `link_arrays`.

        Args:
            name: of the column.
            arrays: `at` and `newest`.
            values: `values`, in pieces.
            head: int64 (n_lanes,), the heads at that time.
        """
        link, (lanes, slots) = self.links[name], arrays["at"].T
        fits, rows = slots < self.capacity, self.rows(lanes, slots)
        link.is_separate[...] = False
        link.is_separate[rows[fits]] = True
        for start, piece in values:
            part = slice(start, start + len(piece))
            self._separate_rows(name)[rows[part][fits[part]]] = piece[fits[part]]
        link.waiting[0], link.steps[0], link.steps[1] = arrays["newest"], head - 1, NONE
        self._steps.pop(name, None)


def check_link(
    name: str, arrays: Mapping[str, np.ndarray], values: tuple[Any, tuple[int, ...]], spec: Spec, shape: tuple[int, int]
) -> None:
    """Checks that arrays can be a result of `LinkedColumns.link_arrays`.

    Args:
        name: of the linked column.
        arrays: `at` and `newest`.
        values: the dtype and shape of `values`.
        spec: of the column.
        shape: lanes, and rows of each.

    Raises:
        ValueError: they cannot.
    """
    at, newest = arrays["at"], arrays["newest"]
    fit = at.shape[1:] == (2,) and newest.shape == (shape[0], *spec.shape)
    fit &= values == (spec.dtype, (len(at), *spec.shape)) and at.dtype.kind == "i" and newest.dtype == spec.dtype
    if not fit:
        raise ValueError(f"the arrays of {name!r} have other shapes or dtypes")
    if at.size and not ((at >= 0) & (at < shape)).all():
        raise ValueError(f"{name!r} refers to rows outside the store")


def fill_unlinked(
    columns: Columns,
    name: str,
    source: str,
    arrays: Mapping[str, np.ndarray],
    values: Values,
    n_slots: int,
    counters: np.ndarray,
) -> None:
    """Fills a column that is linked only in the file.

    Args:
        columns: of the store, in which the rows of `source` have been restored.
        name: of the column.
        source: the column that it was stored through.
        arrays: `at` and `newest` of `LinkedColumns.link_arrays`.
        values: its `values`, in pieces.
        n_slots: how many slots of each lane the file holds.
        counters: of the ring, int64 (4, n_lanes).
    """
    spec, every = columns.specs[name], slice(None)
    for start, n in pieces(n_slots, spec.nbytes * columns.n_lanes):
        n_before = min(n, n_slots - 1 - start)  # the last slot is followed by the first
        following = columns.cells[source][:, start + 1 : start + 1 + n_before]
        columns.put_cells(name, every, slice(start, start + n_before), following)
        if n_before < n:
            columns.put_cells(name, every, n_slots - 1, columns.cells[source][:, 0])
    lanes, slots = arrays["at"].T
    fits, rows = slots < n_slots, columns.rows(lanes, slots)
    for start, piece in values:
        part = slice(start, start + len(piece))
        columns.put_rows(name, rows[part][fits[part]], columns.converted(name, piece[fits[part]], spec))
    base, head = counters[BASE], counters[HEAD]
    slots = (head - 1) % columns.capacity
    lanes = np.flatnonzero((head > base) & (slots < n_slots))
    columns.put_rows(name, columns.rows(lanes, slots[lanes]), columns.converted(name, arrays["newest"][lanes], spec))


def _differ(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Marks rows that differ in any bit, bool (n,).

    NaN is equal to itself, and 0.0 not to -0.0.
    """
    if not a.size:
        return np.zeros(len(a), bool)
    differs: np.ndarray = np.logical_or.reduce(_bits(a) != _bits(b), axis=1)
    return differs


def _bits(values: np.ndarray) -> np.ndarray:
    """Views the bits of rows (n, *shape) as numbers (n, k).

    No row may be empty.
    """
    n_bytes = values.nbytes // len(values)
    bits = BITS[next(width for width in (8, 4, 2, 1) if n_bytes % width == 0)]
    return np.ascontiguousarray(values).reshape(len(values), -1).view(bits)
