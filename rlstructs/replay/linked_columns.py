"""Stores a next observation once, as the observation of the following row.

Except at the end of an episode, the next observation of a step is the observation of the following step. A linked
column stores nothing where the following row holds the same bits in its source. Other values are stored separately, in
sparse memory. The newest row of a lane has no following row yet, so its value waits until that row is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlstructs.replay.columns import Columns, Spec
from rlstructs.replay.ring import Ring

# Columns with smaller rows (bytes) are not linked: looking up where a value is stored would cost more than it saves.
SMALLEST = 256
# Stands for no step.
NONE = -2


class Link:
    """A linked column, whose values are stored in the following rows of its source.

    Args:
        columns: get a sparse column `name` for values that are stored separately.
        name: of the linked column.
        source: the column that holds most of its values.
    """

    def __init__(self, columns: Columns, name: str, source: str) -> None:
        self.name, self.source = name, source
        self._columns = columns
        spec = columns.specs[source]
        # Empty rows are not even marked as unwritten, so that sparse memory stays untouched.
        columns.add(name, Spec(spec.dtype, spec.shape, 0, spec.is_bfloat16), sparse=True)
        self.is_beside = np.zeros((columns.n_lanes, columns.capacity), bool)
        # The values and steps of two rows per lane. The value of the newest row stays here until the head has passed
        # the next row: an interrupted write changes nothing.
        self._waiting = np.zeros((2, columns.n_lanes, *spec.shape), spec.dtype)
        self._steps = np.full((2, columns.n_lanes), NONE)

    @property
    def nbytes(self) -> int:
        """Bytes of the linked column, without its source."""
        row = self._columns.specs[self.name].nbytes
        return self.is_beside.nbytes + self._waiting.nbytes + int(self.is_beside.sum()) * row

    def write(self, ring: Ring, lanes: np.ndarray, values: np.ndarray, following: np.ndarray) -> None:
        """Takes T values of the rows from each head on, before it is raised.

        Args:
            ring: the counters.
            lanes: int (n,).
            values: (n, T, *shape), T at least 1.
            following: what the source holds in these rows, (n, T, *shape).
        """
        head, capacity = ring.head[lanes], ring.capacity
        n_following = values.shape[1] - 1
        # The newest rows have a next one now.
        old, at = head > ring.base[lanes], self._at(ring, lanes)
        self._settle(lanes[old], (head[old] - 1) % capacity, self._waiting[at[old], lanes[old]], following[old, 0])
        if n_following:
            slots = (head[:, None] + np.arange(n_following)) % capacity
            rows = np.broadcast_to(lanes[:, None], slots.shape)
            before, after = (x.reshape(-1, *x.shape[2:]) for x in (values[:, :-1], following[:, 1:]))
            self._settle(rows.ravel(), slots.ravel(), before, after)
        self._waiting[1 - at, lanes] = values[:, -1]
        self._steps[1 - at, lanes] = head + n_following

    def _at(self, ring: Ring, lanes: np.ndarray) -> np.ndarray:
        """Where the values of the newest rows of these lanes wait, 0 or 1."""
        return np.asarray(self._steps[1, lanes] == ring.head[lanes] - 1, np.intp)

    def zeros(self, n: int, n_timesteps: int) -> np.ndarray:
        """Values that nobody gave, (n, T, *shape)."""
        spec = self._columns.specs[self.name]
        return np.broadcast_to(np.zeros((), spec.dtype), (n, n_timesteps, *spec.shape))

    def _settle(self, lanes: np.ndarray, slots: np.ndarray, values: np.ndarray, following: np.ndarray) -> None:
        different = _differ(values, following)
        self.is_beside[lanes, slots] = different
        if different.any():
            self._columns.cells[self.name][lanes[different], slots[different]] = values[different]

    def read(self, ring: Ring, rows: np.ndarray) -> np.ndarray:
        """The values of these rows, `(*rows.shape, *shape)`."""
        columns = self._columns
        flat_rows = rows.reshape(-1)
        lanes, slots = columns.places(flat_rows)
        values = columns.flat[self.source].take(columns.shifted(flat_rows, 1), axis=0)
        beside = self.is_beside[lanes, slots]
        if beside.any():
            values[beside] = columns.flat[self.name][flat_rows[beside]]
        newest = (ring.head[lanes] > ring.base[lanes]) & (slots == (ring.head[lanes] - 1) % columns.capacity)
        if newest.any():
            lanes = lanes[newest]
            values[newest] = self._waiting[self._at(ring, lanes), lanes]
        return np.asarray(values.reshape(*rows.shape, *values.shape[1:]))

    def put(self, ring: Ring, rows: np.ndarray, values: Any) -> None:
        """Changes values of rows that are there."""
        lanes, slots = self._columns.places(rows)
        newest = slots == (ring.head[lanes] - 1) % ring.capacity
        self.is_beside[lanes, slots] = ~newest
        self._columns.flat[self.name][rows[~newest]] = values[~newest]
        lanes = lanes[newest]
        self._waiting[self._at(ring, lanes), lanes] = values[newest]

    def keep(self, ring: Ring, rows: np.ndarray) -> None:
        """Keeps what the rows before these hold, whose sources in these rows are about to be changed."""
        columns = self._columns
        lanes, slots = columns.places(rows)
        before = columns.shifted(rows, -1)
        steps = ring.steps_of(lanes, slots, ring.head)
        before = before[steps - 1 >= ring.oldest()[lanes]]
        values = self.read(ring, before)
        self.put(ring, before, values)

    def resize(self, capacity: int) -> None:
        """Makes room for more rows of lanes none of which has wrapped, or for fewer."""
        resized, n = np.zeros((len(self.is_beside), capacity), bool), min(capacity, self.is_beside.shape[1])
        resized[:, :n] = self.is_beside[:, :n]
        self.is_beside = resized

    def arrays(self, ring: Ring) -> dict[str, np.ndarray]:
        """What a file needs: which rows lie beside, their values, and the newest ones."""
        at = np.ascontiguousarray(np.argwhere(self.is_beside))  # files take nothing else
        every = np.arange(ring.n_lanes)
        newest = self._waiting[self._at(ring, every), every]
        return {"at": at, "values": self._columns.cells[self.name][at[:, 0], at[:, 1]], "newest": newest}

    def restore(self, arrays: Mapping[str, np.ndarray], head: np.ndarray) -> None:
        """Takes back what `arrays` gave, when the heads were these.

        Raises:
            ValueError: it does not fit.
        """
        check_arrays(self.name, arrays, self._columns.specs[self.name], self.is_beside.shape)
        at, values, newest = arrays["at"], arrays["values"], arrays["newest"]
        self.is_beside[...] = False
        self.is_beside[at[:, 0], at[:, 1]] = True
        self._columns.cells[self.name][at[:, 0], at[:, 1]] = values
        self._waiting[0], self._steps[0], self._steps[1] = newest, head - 1, NONE


def put_linked(
    links: Mapping[str, Link],
    ring: Ring,
    block: Mapping[str, Any],
    lanes: np.ndarray,
    n_timesteps: int,
    lengths: np.ndarray | None,
) -> None:
    """Takes what a block, as of `Storage.write`, holds of linked columns; zeros where it holds nothing.

    Args:
        links: by name.
        ring: the counters, before the heads are raised.
        block: name -> (n, T, ...).
        lanes: int (n,).
        n_timesteps: T.
        lengths: int64 (n,), how many of the T rows are valid; None for all.
    """
    for link in links.values():
        values, following = (
            block[name] if name in block else link.zeros(len(lanes), n_timesteps) for name in (link.name, link.source)
        )
        if lengths is None:
            if n_timesteps:
                link.write(ring, lanes, values, following)
            continue
        for at in np.flatnonzero(lengths):
            one, n = slice(at, at + 1), int(lengths[at])
            link.write(ring, lanes[one], values[one, :n], following[one, :n])


def check_arrays(name: str, arrays: Mapping[str, np.ndarray], spec: Spec, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless these are what a link gives.

    Args:
        name: of the linked column.
        arrays: as of `Link.arrays`.
        spec: of the column.
        shape: lanes, and rows of each.
    """
    at, values, newest = arrays["at"], arrays["values"], arrays["newest"]
    fit = at.shape[1:] == (2,) and values.shape == (len(at), *spec.shape) and newest.shape == (shape[0], *spec.shape)
    if not (fit and at.dtype.kind == "i" and values.dtype == newest.dtype == spec.dtype):
        raise ValueError(f"what belongs to {name!r} has other shapes or dtypes")
    if at.size and not ((at >= 0) & (at < shape)).all():
        raise ValueError(f"{name!r} has rows that there are not")


def unlinked(source: np.ndarray, arrays: Mapping[str, np.ndarray], counters: np.ndarray, capacity: int) -> np.ndarray:
    """What a column that was linked holds, for a store in which it is not.

    Args:
        source: the first slots of the column that it was stored through, (n_lanes, n_slots, *shape).
        arrays: as of `Link.arrays`.
        counters: of the ring, int64 (3, n_lanes).
        capacity: rows per lane.

    Returns:
        Of the shape and dtype of `source`.
    """
    values, n_slots = np.roll(source, -1, axis=1), source.shape[1]
    lanes, slots = arrays["at"].T
    used = slots < n_slots
    values[lanes[used], slots[used]] = arrays["values"][used]
    base, _, head = counters
    slots = (head - 1) % capacity
    lanes = np.flatnonzero((head > base) & (slots < n_slots))
    values[lanes, slots[lanes]] = arrays["newest"][lanes]
    return values


def _differ(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Which rows differ in any bit, bool (n,): NaN is equal to itself, and 0.0 not to -0.0."""
    if not a.size:
        return np.zeros(len(a), bool)
    a, b = (np.ascontiguousarray(x).reshape(len(x), -1).view(np.uint8) for x in (a, b))
    width = 8 if a.shape[1] % 8 == 0 else 1
    differs: np.ndarray = (a.view(f"u{width}") != b.view(f"u{width}")).any(axis=1)
    return differs
