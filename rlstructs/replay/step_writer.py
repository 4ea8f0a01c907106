"""Writes one row to each of some lanes by a plan: what such a row takes is found out once, and kept.

`StepWriter` does what `Storage.write` does for T = 1. Each column is looked at once: what comes in its dtype and shape
is stored as it is, all else is converted first. Lanes that are in step are written as one block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from rlstructs.errors import SpecError
from rlstructs.replay.columns import Spec
from rlstructs.replay.counters import EPISODE_CHANGES
from rlstructs.replay.episodes import EPISODE, LENGTH, TIME
from rlstructs.replay.given import PYTHON
from rlstructs.replay.ring import keep_order
from rlstructs.replay.roles import is_info
from rlstructs.replay.store import ALL, Storage
from rlstructs.replay.values import host_array

# What no array of numbers has: bits of bfloat16 are always converted.
NONE = np.dtype(np.void)
add = np.add  # looking up names is part of what a write costs

# Converts a value for a column: (name, value, its spec) -> an array that the column takes after a cast without loss.
Convert = Callable[[str, Any, Spec], Any]


class _Column(NamedTuple):
    """A column of a plan for n rows."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    is_end: bool
    unwritten: Any


class StepWriter:
    """Writes to a store.

    Args:
        storage: the store.
        ends: columns that end an episode where they are not zero, if the store has them.
    """

    def __init__(self, storage: Storage, ends: Iterable[str]) -> None:
        self._storage = storage
        self._every_end = tuple(ends)
        self._version = -1  # the store's when `_prepare` was called, and after each write
        self._head: int | None = None  # of all lanes, if they are in step
        self._plans: dict[int, list[_Column]] = {}  # number of rows -> columns; empty if nothing can be written

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
        if is_row:
            tensors = self._one_row(tensors, convert is not None) or {}
        n = self._n_lanes if lanes is None else lanes.size
        plan = self._plans.get(n)
        if plan is None:
            plan = self._make_plan(n)
        if not plan or not tensors or not (fills or len(tensors) == len(plan)):
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
            if lanes is None and self._head is not None:
                self._write_block(values, ended)
            else:
                self._write_lanes(values, ALL if lanes is None else lanes, ended)
            self._version = storage.version
        return tensors

    def _take(
        self,
        plan: list[_Column],
        tensors: Mapping[str, Any],
        convert: Convert | None,
        fills: bool,
        live: Collection[str],
    ) -> tuple[list[Any] | None, list[Any]]:
        """Converts a row: the value of each column, None for live ones; and the marks of ends that are not all zero."""
        values: list[Any] = []
        ended: list[Any] = []
        n_missing = 0
        for name, shape, dtype, is_end, unwritten in plan:
            value: Any = tensors.get(name)
            if type(value) is not ndarray:
                if type(value) is Tensor:
                    try:
                        value = value.numpy()
                    except (RuntimeError, TypeError):  # it has a gradient or is on another device
                        pass
                elif value is None:
                    n_missing += 1
                    if name in live and is_end:
                        return None, ended
                    values.append(None if name in live else unwritten)
                    continue
            # A pickled dtype is equal, but another object.
            is_array = type(value) is ndarray and value.shape == shape
            if not is_array or (value.dtype is not dtype and value.dtype != dtype):
                if convert is None:
                    return None, ended
                spec = self._storage.columns.specs[name]
                value = convert(name, value, spec)
                if value is None:
                    return None, ended
                value = self._storage.columns.fitted(name, value, shape[:1], spec)
            if is_end and value.tobytes().count(0) != value.nbytes:
                ended.append(value)
            values.append(value)
        if n_missing and (not fills or n_missing == len(plan)):
            return None, ended
        return values, ended

    def _write_block(self, values: list[Any], ended: list[Any]) -> None:
        """Writes to all lanes, which are in step."""
        head = self._head
        assert head is not None
        slot, following = head % self._capacity, head + 1
        self._reserved.fill(following)
        keep_order()
        for rows, value in zip(self._rows, values):  # noqa: B905 - linked columns, the last, have none
            if value is not None:
                rows[slot] = value
        if self._linked:
            links = {name: values[at][:, None] for name, at in self._linked}
            self._storage.columns.write_links(links, ALL, 1)
        if self._has_episodes:
            open_pairs = self._open_pairs
            self._pairs[slot] = open_pairs
            add(open_pairs, self._one_step, open_pairs)
            if ended:
                self._end(self._every_lane, ended)
        keep_order()
        self._heads.fill(following)
        self._head = following
        self._seen.fill(following)

    def _write_lanes(self, values: list[Any], lanes: Any, ended: list[Any]) -> None:
        """Writes to some lanes, or to lanes that are not in step."""
        columns, heads = self._storage.columns, self._heads[lanes]
        rows = columns.at_steps(lanes, heads)
        self._reserved[lanes] = heads + 1
        keep_order()
        for flat, value in zip(self._flat, values):  # noqa: B905 - see `_write_block`
            if value is not None:
                flat[rows] = value
        if self._linked:
            columns.write_links({name: values[at][:, None] for name, at in self._linked}, lanes, 1)
        if self._has_episodes:
            self._flat_pairs[rows] = self._open_pairs[lanes]
            self._open_pairs[lanes] += self._one_step[lanes]
            if ended:
                self._end(self._every_lane[lanes], ended)
        keep_order()
        self._heads[lanes] = self._seen[lanes] = heads + 1
        self._find_head()

    def _end(self, lanes: ndarray, ended: list[Any]) -> None:
        """Ends the episodes of those lanes (n,) in which one of the marks (n, ...) is not zero; before heads rise."""
        episodes, n = self._storage.episodes, len(lanes)
        assert episodes is not None
        done = np.logical_or.reduce([(marks != 0).reshape(n, -1).any(1) for marks in ended])
        lanes = lanes[done]
        totals = self._open[lanes, TIME]
        rows = episodes.columns.at_steps(lanes, self._heads[lanes])
        self._flat_episodes[rows, LENGTH] = totals
        episodes.set_lengths(lanes, totals - 1, totals, 1)
        self._open[lanes, TIME] = 0

    def _knows(self, lanes: ndarray | None) -> bool:
        """Whether the open episodes of these lanes are as this writer left them; if not, looks at the store again."""
        some: Any = ALL if lanes is None else lanes
        is_changed = self._storage.counters.notes[EPISODE_CHANGES] != self._n_changes
        if is_changed or not np.array_equal(self._heads[some], self._seen[some]):
            self._prepare()
        # Unless workers write, or a writer was killed.
        return self._can_write and np.array_equal(self._heads[some], self._reserved[some])

    def _find_head(self) -> None:
        low = int(self._seen.min())
        self._head = low if (self._seen == low).all() else None

    def _prepare(self) -> None:
        """Finds out what is needed to write to the store as it is now."""
        storage, columns = self._storage, self._storage.columns
        with storage.lock:
            storage.hand_over_to(self)
            self._version = storage.version
            ring, self._n_lanes, self._capacity = storage.ring, columns.n_lanes, columns.capacity
            self._reserved, self._heads = ring.reserved, ring.head
            self._can_write = (
                columns.on_host
                and storage.counters.shown is None
                and (not storage.is_private or bool((ring.reserved == ring.head).all()))
                and not columns.has_objects
            )
            self._plans = {}
            names = list(columns.flat) if self._can_write else []
            self._one_row = OneRow({name: columns.specs[name] for name in [*names, *columns.links]})
            # The linked columns and their sources, and where their values are among all.
            linked = {*columns.links, *(link.source for link in columns.links.values())}
            every = [*names, *columns.links]
            self._linked: list[tuple[str, int]] = [(name, at) for at, name in enumerate(every) if name in linked]
            self._flat = [columns.flat[name] for name in names]
            self._rows = [columns.cells[name].swapaxes(0, 1) for name in names]
            self._every_lane = np.arange(self._n_lanes)
            self._has_episodes: bool = storage.episodes is not None
            if storage.episodes is not None:
                # Pairs of time and length, of int32 and as one int64 each.
                self._flat_episodes = storage.episodes.columns.flat[EPISODE]
                self._flat_pairs: ndarray = self._flat_episodes.view(np.int64)[..., 0]
                self._pairs: ndarray = storage.episodes.columns.cells[EPISODE].swapaxes(0, 1).view(np.int64)[..., 0]
                self._open = np.zeros((self._n_lanes, 2), np.int32)  # those of the next rows
                self._open[:, TIME] = storage.episodes.open_lengths(ALL)
                self._open_pairs: ndarray = self._open.view(np.int64)[:, 0]
                one = np.zeros_like(self._open)
                one[:, TIME] = 1
                self._one_step: ndarray = one.view(np.int64)[:, 0]
            self._seen, self._n_changes = ring.head.copy(), int(storage.counters.notes[EPISODE_CHANGES])
            self._find_head()

    def _make_plan(self, n: int) -> list[_Column]:
        """The columns of n rows; none if this writer cannot write."""
        columns = self._storage.columns
        plan = []
        for name in [*columns.flat, *columns.links] if self._can_write else ():
            spec = columns.specs[name]
            dtype = NONE if spec.is_bfloat16 else np.dtype(spec.dtype.str)
            unwritten = columns.value(name, spec.unwritten)
            plan.append(_Column(name, (n, *spec.shape), dtype, name in self._every_end, unwritten))
        self._plans[n] = plan
        return plan


class OneRow:
    """Converts plain numbers and arrays to arrays with one row, if it is obvious that they fit.

    A column of infos, which may be widened, takes a number only if its dtype holds it exactly.

    Args:
        specs: of the columns.

    Example:
        >>> one_row = OneRow({"x": Spec(np.dtype(np.uint8))})
        >>> one_row({"x": 255}), one_row({"x": 256})
        ({'x': array([255], dtype=uint8)}, None)
    """

    def __init__(self, specs: Mapping[str, Spec]) -> None:
        # numpy's own dtype objects, which are compared by identity.
        self._known = {name: (np.dtype(spec.dtype.str), _limits(spec, is_info(name))) for name, spec in specs.items()}

    def __call__(self, row: Mapping[str, Any], takes_all: bool = False) -> dict[str, Any] | None:
        """Returns name -> `(1, ...)`; None if it is not obvious that all values fit.

        Args:
            row: name -> number or array.
            takes_all: whether all other values become arrays too, for somebody else to convert.
        """
        rows = {}
        for name, value in row.items():
            if name not in self._known:
                return None
            try:
                array = _convert(value, *self._known[name])
            except (TypeError, IndexError):  # it is a list, or no number
                array = None
            if array is None:
                if not takes_all or value is None:
                    return None
                array = host_array(name, value)[None]
            rows[name] = array
        return rows


def _convert(value: Any, dtype: np.dtype, limits: Mapping[type, tuple[Any, Any]]) -> Any:
    # First, because it is nearly always so, and the check for a tensor is slow.
    kind: Any = type(value)
    if issubclass(kind, (np.ndarray, np.generic)) and value.dtype is dtype:
        return value[None]
    if isinstance(value, torch.Tensor):
        return value[None]
    if isinstance(value, np.ndarray):
        between = limits.get(PYTHON.get(value.dtype.kind, object))
        fits = between and value.size and between[0] <= value.min().item() and value.max().item() <= between[1]
        return value.astype(dtype)[None] if fits else None
    if isinstance(value, np.generic):
        value = value.item()
    between = limits.get(type(value))
    fits = between and between[0] <= value <= between[1]  # not true of NaN
    return np.array([value], dtype) if fits else None


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
