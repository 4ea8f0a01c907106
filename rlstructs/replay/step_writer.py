"""Writes one row to each of some lanes by a plan: what such a row takes is found out once, and kept.

`StepWriter` does what `Storage.write` does for T = 1. Each column is looked at once: what comes in its dtype and shape
is stored as it is, all else is converted first. Lanes that are in step are written as one block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray
from torch import Tensor

from rlstructs.errors import SpecError
from rlstructs.replay.columns import Spec
from rlstructs.replay.counters import EPISODE_CHANGES
from rlstructs.replay.episodes import EPISODE, TIME
from rlstructs.replay.ring import keep_order
from rlstructs.replay.roles import is_info
from rlstructs.replay.store import ALL, Storage
from rlstructs.replay.values import host_array, view_tensor

# What no array has: bits of bfloat16 are always converted, and objects copied.
NONE = np.dtype(np.void)
# In place of the number of rows: one row without an axis for lanes. In place of a value: the column keeps its own.
ROW, KEPT = -1, object()
ONE = np.ones(1, bool)
NUMBERS = (np.generic, ndarray)
add = np.add  # looking up names is part of what a write costs

# Converts a value for a column: (name, value, its spec) -> an array that the column takes after a cast without loss.
Convert = Callable[[str, Any, Spec], Any]


class _Column(NamedTuple):
    """A column of a plan.

    Attributes:
        shape: of what is written to it, with an axis for lanes unless the plan is of `ROW`.
        unwritten: its value where it is omitted.
        limits: Python type -> the range of such numbers that are written as they are.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    is_end: bool
    unwritten: Any
    limits: Mapping[type, tuple[Any, Any]]


class StepWriter:
    """Writes to a store.

    Args:
        storage: the store.
        ends: columns that end an episode where they are not zero, if the store has them.

    Attributes:
        done: which of the rows that were written last end an episode, bool (n,); None for none of them.
    """

    def __init__(self, storage: Storage, ends: Iterable[str]) -> None:
        self._storage = storage
        self._every_end = tuple(ends)
        self._version = -1  # the store's when `_prepare` was called, and after each write
        self._layout: tuple[Any, ...] = ()  # of the columns that the plans are for
        self._head: int | None = None  # of all lanes, if they are in step
        self._plans: dict[int, list[_Column]] = {}  # number of rows -> columns
        self.done: ndarray | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The rest follows from them.
        return {"storage": self._storage, "ends": self._every_end}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def forget(self) -> None:
        """Forgets what it knows of the store, to which another writes from now on."""
        self._version = -1

    def write(
        self,
        tensors: Mapping[str, Any],
        lanes: ndarray | None = None,
        convert: Convert | None = None,
        *,
        is_row: bool = False,
        fills: bool = False,
        live: Collection[str] = (),
    ) -> Mapping[str, Any] | None:
        """Appends a row to every lane and returns the arrays given; returns None if `Storage.write` has to do it.

        Args:
            tensors: name -> `(n, ...)`.
            lanes: int64 (n,), no two the same; None for all lanes, in order.
            convert: converts values that a column cannot take as they are; None if there should be none.
            is_row: whether these are plain numbers and arrays without an axis for lanes, of a store with one lane.
            fills: whether columns may be omitted, and become unwritten, and names without a column are skipped.
            live: columns that keep what they hold where they are omitted.
        """
        storage = self._storage
        if self._version != storage.version:
            self._prepare()
        n = ROW if is_row else self._n_lanes if lanes is None else lanes.size
        plan = self._plans.get(n)
        if plan is None:
            plan = self._make_plan(n)
        if not self._can_write or not tensors or not (fills or len(tensors) == len(plan)):
            return None
        try:
            values, ended = self._take(plan, tensors, convert, fills, live)
        except SpecError:  # `Storage.write` says what does not fit
            return None
        if values is None:
            return None
        with storage.lock:
            if self._version != storage.version or not (storage.is_private or self._knows(lanes)):
                return None
            self._version = -1  # until all is done, in case of Ctrl-C
            self.done = None if not ended else ONE if is_row else _find_done(ended)
            if lanes is None and self._head is not None:
                self._write_block(self._flat if is_row else self._rows, values)
            else:
                self._write_lanes(values, ALL if lanes is None else lanes)
            self._version = storage.version
        return tensors

    def _take(
        self, plan: list[_Column], tensors: Mapping[str, Any], convert: Convert | None, fills: bool,
        live: Collection[str],
    ) -> tuple[list[Any] | None, list[Any]]:  # fmt: skip
        """Converts a row: the value of each column, or `KEPT`; and the marks of ends that are not all zero."""
        values: list[Any] = []
        ended: list[Any] = []
        n_missing = 0
        for name, shape, dtype, is_end, unwritten, limits in plan:
            value: Any = tensors.get(name)
            kind = type(value)
            if kind is ndarray and value.dtype is dtype and value.shape == shape and not is_end:  # as nearly always
                values.append(value)
                continue
            if kind is Tensor:
                array = view_tensor(value)
                value = value if array is None else array
            elif value is None:
                n_missing += 1
                if name in live and is_end:
                    return None, ended
                values.append(KEPT if name in live else unwritten)
                continue
            elif limits and (kind is not ndarray or value.dtype is not dtype) and _is_number_of(dtype, value, limits):
                if is_end and value:
                    ended.append(value)
                values.append(value)
                continue
            # A pickled dtype is equal, but another object.
            is_array = type(value) is ndarray and value.shape == shape
            if not is_array or (value.dtype is not dtype and value.dtype != dtype):
                value = None if convert is None else self._convert(name, value, shape, convert)
                if value is None:
                    return None, ended
            if is_end and value.tobytes().count(0) != value.nbytes:
                ended.append(value)
            values.append(value)
        is_lacking = n_missing and (not fills or n_missing == len(plan))
        if is_lacking or (n_missing and self._linked and not self._has_linked(values)):
            return None, ended
        return values, ended

    def _has_linked(self, values: list[Any]) -> bool:
        return all(type(values[at]) is type(values[source]) is ndarray for _, at, source in self._linked)

    def _convert(self, name: str, value: Any, shape: tuple[int, ...], convert: Convert) -> Any:
        """Converts a value of a column to this shape; None if it cannot be."""
        columns, spec = self._storage.columns, self._storage.columns.specs[name]
        is_row = len(shape) == len(spec.shape)
        if is_row:
            if spec.is_object:
                one = np.empty(1, object)
                one[0] = value
                value = one
            else:
                value = (value if isinstance(value, (ndarray, Tensor)) else host_array(name, value))[None]
        value = convert(name, value, spec)
        if value is None:
            return None
        value = columns.fitted(name, value, (1,) if is_row else shape[:1], spec)
        return value[0] if is_row else value

    def _write_block(self, places: list[ndarray], values: list[Any]) -> None:
        """Writes to slots of `places`, those of all lanes, which are in step."""
        head = self._head
        assert head is not None
        slot, following = head % self._capacity, head + 1
        self._reserved.fill(following)
        keep_order()
        for rows, value in zip(places, values):  # noqa: B905 - linked columns, the last, have none
            if value is not KEPT:
                rows[slot] = value
        for name, at, source in self._linked:
            pair = values[at], values[source]
            if places is self._flat:  # one row without an axis for lanes
                pair = np.asarray(pair[0])[None], np.asarray(pair[1])[None]
            self._storage.columns.write_step(name, *pair, head)
        if self._has_episodes:
            open_pairs = self._open_pairs
            self._pairs[slot] = open_pairs
            add(open_pairs, self._one_step, open_pairs)
            if self.done is not None:
                self._end(self._every_lane[self.done], following)
        keep_order()
        self._heads.fill(following)
        self._head = following
        if not self._storage.is_private:
            self._seen.fill(following)

    def _write_lanes(self, values: list[Any], lanes: Any) -> None:
        """Writes to some lanes, or to lanes that are not in step."""
        columns, heads = self._storage.columns, self._heads[lanes]
        rows, following = columns.at_steps(lanes, heads), heads + 1
        self._reserved[lanes] = following
        keep_order()
        for flat, value in zip(self._flat, values):  # noqa: B905 - see `_write_block`
            if value is not KEPT:
                flat[rows] = value
        if self._linked:
            links = {name: values[at] for name, at, _ in self._linked}
            links |= {columns.links[name].source: values[source] for name, _, source in self._linked}
            columns.write_links({name: value[:, None] for name, value in links.items()}, lanes, 1)
        if self._has_episodes:
            self._flat_pairs[rows] = self._open_pairs[lanes]
            self._open_pairs[lanes] += self._one_step[lanes]
            if self.done is not None:
                self._end(self._every_lane[lanes][self.done], following[self.done])
        keep_order()
        self._heads[lanes] = self._seen[lanes] = following
        self._find_head()

    def _end(self, lanes: ndarray, heads: Any) -> None:
        """Ends the episodes of these lanes before `heads`, to which their heads will rise."""
        episodes = self._storage.episodes
        assert episodes is not None
        totals = self._open[lanes, TIME]
        episodes.set_lengths(lanes, totals, totals, 0, heads)
        self._open[lanes, TIME] = 0

    def end_episodes(self, lanes: slice | ndarray = ALL, longest: int = 1) -> None:
        """Ends the unfinished episodes of these lanes that have at least `longest` steps, at their newest rows."""
        storage = self._storage
        with storage.lock:
            if self._version != storage.version or not storage.is_private:
                self._prepare()
            n_steps = self._open[lanes, TIME]
            is_ended = n_steps >= longest
            if np.count_nonzero(is_ended):  # several times faster than `any`
                self._version = -1
                storage.end_episodes(lanes, n_steps * is_ended)
                self._open[lanes, TIME] = n_steps * ~is_ended
                self._n_changes, self._version = int(storage.counters.notes[EPISODE_CHANGES]), storage.version

    def _knows(self, lanes: ndarray | None) -> bool:
        """Whether the open episodes of these lanes are as this writer left them; if not, looks at the store again."""
        some: Any = ALL if lanes is None else lanes
        is_changed = self._storage.counters.notes[EPISODE_CHANGES] != self._n_changes
        if is_changed or not np.array_equal(self._heads[some], self._seen[some]):
            self._prepare()
        # Unless workers write, or a writer was killed.
        return self._can_write and np.array_equal(self._heads[some], self._reserved[some])

    def _find_head(self) -> None:
        low = int(self._heads.min())
        self._head = low if (self._heads == low).all() else None

    def _prepare(self) -> None:
        """Finds out what is needed to write to the store as it is now."""
        storage, columns = self._storage, self._storage.columns
        with storage.lock:
            storage.hand_over_to(self)
            self._version = storage.version
            layout = (columns, columns.layout, storage.ring, storage.episodes)
            if self._layout != layout:
                self._layout = layout
                self._find_columns()
            ring = storage.ring
            self._can_write = columns.on_host and storage.counters.shown is None
            self._can_write &= not storage.is_private or bool((ring.reserved == ring.head).all())
            if storage.episodes is not None:
                self._open[:, TIME] = storage.episodes.open_lengths(ALL)
            self._seen, self._n_changes = ring.head.copy(), int(storage.counters.notes[EPISODE_CHANGES])
            self._find_head()

    def _find_columns(self) -> None:
        """Finds out where the columns are."""
        storage, columns = self._storage, self._storage.columns
        ring, self._n_lanes, self._capacity = storage.ring, columns.n_lanes, columns.capacity
        self._reserved, self._heads, self._plans = ring.reserved, ring.head, {}
        names, self._every_lane = list(columns.flat) if columns.on_host else [], np.arange(self._n_lanes)
        # The linked columns, and where the values of each and of its source are among all.
        every = [*names, *columns.links]
        self._linked = [(name, every.index(name), every.index(link.source)) for name, link in columns.links.items()]
        self._flat = [columns.flat[name] for name in names]
        self._rows = [columns.cells[name].swapaxes(0, 1) for name in names]
        self._has_episodes: bool = storage.episodes is not None
        if storage.episodes is not None:
            # Pairs of time and length, of int32 and as one int64 each.
            self._flat_pairs: ndarray = storage.episodes.columns.flat[EPISODE].view(np.int64)[..., 0]
            self._pairs: ndarray = storage.episodes.columns.cells[EPISODE].swapaxes(0, 1).view(np.int64)[..., 0]
            self._open = np.zeros((self._n_lanes, 2), np.int32)  # those of the next rows
            self._open_pairs: ndarray = self._open.view(np.int64)[:, 0]
            one = np.zeros_like(self._open)
            one[:, TIME] = 1
            self._one_step: ndarray = one.view(np.int64)[:, 0]

    def _make_plan(self, n: int) -> list[_Column]:
        """The columns of n rows."""
        columns, lead = self._storage.columns, () if n == ROW else (n,)
        plan = []
        for name in [*columns.flat, *columns.links] if columns.on_host else ():
            spec = columns.specs[name]
            dtype = NONE if spec.is_bfloat16 or spec.is_object else np.dtype(spec.dtype.str)
            limits = _limits(spec, is_info(name)) if n == ROW and not spec.shape else {}
            unwritten, is_end = columns.value(name, spec.unwritten), name in self._every_end
            plan.append(_Column(name, (*lead, *spec.shape), dtype, is_end, unwritten, limits))
        self._plans[n] = plan
        return plan


def _find_done(ended: list[ndarray]) -> ndarray:
    """Where one of these marks, (n, ...), is not zero, bool (n,)."""
    done = None
    for mark in ended:
        if mark.dtype != bool or mark.ndim > 1:
            mark = (mark != 0).reshape(len(mark), -1).any(axis=1)
        done = mark if done is None else done | mark
    assert done is not None
    return done


def _is_number_of(dtype: np.dtype, value: Any, limits: Mapping[type, tuple[Any, Any]]) -> bool:
    """Whether a column of this dtype, and with these limits, takes a number as it is."""
    if isinstance(value, NUMBERS):
        if value.ndim or value.dtype is dtype:
            return not value.ndim
        value = value.item()
    between = limits.get(type(value))
    return between is not None and bool(between[0] <= value <= between[1])  # not true of NaN


def _limits(spec: Spec, exactly: bool) -> dict[type, tuple[Any, Any]]:
    """Python type -> the range of its numbers that a column holds; with `exactly`, without rounding floats."""
    kind, dtype = spec.dtype.kind, spec.dtype
    if kind == "c" or spec.is_bfloat16 or spec.is_object:
        return {}
    bits = {bool: (0, 1)}
    if kind == "b":
        return bits | {int: (0, 1)}
    if kind in "iu":
        return bits | {int: (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))}
    whole, largest = 2 ** (np.finfo(dtype).nmant + 1), float(np.finfo(dtype).max)
    limits: dict[type, tuple[Any, Any]] = {bool: (0, 1), int: (-whole, whole)}
    return limits if exactly and dtype.itemsize < 8 else {**limits, float: (-largest, largest)}
