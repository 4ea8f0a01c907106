"""The fast path of writes: one row per lane, by a kept plan.

`StepWriter` does what `Storage.write` does for T = 1. A plan has the dtype and shape of each column: values that match
are stored as they are, all others are converted first. Lanes that are in step are written as one block; where all of
its values are tensors like their columns, torch copies them at once (`StepCopies`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
from numpy import ndarray
from torch import Tensor

from rlstructs.errors import SpecError
from rlstructs.replay.intake.arrays import any_marks, host_array, is_number_of, number_limits, view_tensor
from rlstructs.replay.intake.roles import is_info
from rlstructs.replay.rows.blocks import InStep
from rlstructs.replay.rows.episodes import EPISODE, FEW, LENGTH, TIME
from rlstructs.replay.rows.lanes import keep_order
from rlstructs.replay.rows.records import as_items
from rlstructs.replay.rows.spec import Spec
from rlstructs.replay.rows.step_copies import BITS, Copied, PlanColumn, StepCopies
from rlstructs.replay.rows.store import ALL, Storage

# A dtype that no array has: objects are always copied.
NONE = np.dtype(np.void)
# In place of the number of rows: one row without an axis for lanes. In place of a value: the column keeps its own.
ROW, KEPT = -1, object()
ONE = np.ones(1, bool)
# A step, as numpy adds it to counters and to times most quickly.
STEP, TIME_STEP = np.array(1), np.array(1, np.int32)
add, count_nonzero = np.add, np.count_nonzero  # looking up names is part of what a write costs
# Kinds of dtypes that numpy casts to one another.
NUMBERS = frozenset("biuf")

Given = Mapping[str, Any]  # name -> values
# Converts a value for a column: (name, value, its spec) -> an array that the column takes after a cast without loss.
Convert = Callable[[str, Any, Spec], Any]


def has_mark(value: ndarray) -> bool:
    """Whether an array holds a number that is not zero.

    Comparing bytes is quicker than counting; but -0.0 has a byte that is not 0.
    """
    return value.tobytes() != bytes(value.nbytes) and bool(count_nonzero(value))


class StepWriter:
    """Writes to a store.

    Args:
        storage: the store.
        ends: columns that end an episode where they are not zero, if the store has them.
        casts: whether arrays of numbers are cast to a column's dtype as numpy does in assignments.

    Attributes:
        done: which of the rows that were written last end an episode, bool (n,); None for none of them.
    """

    def __init__(self, storage: Storage, ends: Iterable[str], casts: bool = False) -> None:
        self._storage = storage
        self._every_end, self._casts = tuple(ends), casts
        self._clock = storage.clock
        self._changes = -1  # of the clock when `_prepare` was called, and after each write
        self._columns = -1  # of the clock when the plans were made
        self._step = InStep(storage.ring)
        self._plans: dict[int, list[PlanColumn]] = {}  # number of rows -> columns
        self._detaches = False  # whether tensors with a gradient have been given; asking each tensor takes long
        self.done: ndarray | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The rest follows from them.
        return {"storage": self._storage, "ends": self._every_end, "casts": self._casts}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def write(
        self,
        tensors: Given,
        lanes: slice | ndarray | None = None,
        convert: Convert | None = None,
        *,
        n_timesteps: int = 1,
        is_row: bool = False,
        fills: bool = False,
        live: Collection[str] = (),
        casts: bool = False,
    ) -> Given | None:
        """Appends rows to lanes and returns the arrays given.

        None if `Storage.write` has to do it.

        Args:
            tensors: name -> `(n, ...)`, a row for each lane.
            lanes: int64 (n,), no two the same, or a slice with bounds; None for all lanes, in order.
            convert: converts values that a column cannot take as they are; None if there should be none.
            n_timesteps: rows of each lane, at most the capacity; more than one, `(n_timesteps, ...)`, only in a store
                of one lane.
            is_row: whether these are plain numbers and arrays without an axis for lanes, of a single lane.
            fills: whether columns may be omitted, and become unwritten, and names without a column are skipped.
            live: columns whose rows keep their values where they are omitted.
            casts: whether tensors of numbers may be cast to a column's dtype as torch does in `copy_`.
        """
        storage = self._storage
        if self._changes != self._clock.changes:
            self._prepare()
        n_lanes = self._n_lanes if lanes is None else lanes.stop - lanes.start if type(lanes) is slice else lanes.size
        n = ROW if is_row else n_lanes if n_timesteps == 1 else n_timesteps
        plan = self._plans.get(n) or self._make_plan(n)
        if not self._can_write or not tensors or not (fills or len(tensors) == len(plan)):
            return None
        if n_timesteps > 1 and n_timesteps > storage.columns.most_rows_at_once:
            return None
        is_block = self._is_block(lanes, n_timesteps)
        copied = self._copies.pick(tensors, fills, live, casts) if is_block and not is_row else None
        values = [] if copied is not None else self._take(plan, tensors, convert, fills, live)
        if values is None:
            return None
        with storage.lock:
            if self._changes != self._clock.changes or not (storage.is_private or self._knows(lanes)):
                return None
            is_block = self._is_block(lanes, n_timesteps)
            if copied is not None and not is_block:  # another process has written since
                return None
            self._changes = -1  # until all is done, in case of Ctrl-C
            if is_block:
                self._write_block(self._flat if is_row else self._rows, values, copied)
            else:
                self._write_rows(values, ALL if lanes is None else lanes, n_timesteps, is_row)
            self._changes = self._clock.changes
        return tensors

    def _is_block(self, lanes: slice | ndarray | None, n_timesteps: int) -> bool:
        return lanes is None and n_timesteps == 1 and self._step.head is not None and not self._step.n_ahead

    def _take(
        self, plan: list[PlanColumn], given: Given, convert: Convert | None, fills: bool, live: Collection[str]
    ) -> list[Any] | None:
        """Converts a row to a value for each column, or `KEPT`.

        None if `Storage.write` has to do it.
        """
        values = list[Any]()
        n_missing, detaches, casts = 0, self._detaches and convert is not None, self._casts
        for name, shape, dtype, is_end, unwritten, limits in plan:
            value: Any = given.get(name)
            kind = type(value)
            if kind is ndarray and value.dtype is dtype and value.shape == shape:  # as nearly always
                values.append(value)
                continue
            if casts and kind is ndarray and value.dtype.kind in NUMBERS:
                values.append(value if value.shape == shape else value.reshape(shape))
                continue
            if kind is Tensor:
                array = None if dtype is BITS else view_tensor(value.detach() if detaches else value)
                self._detaches = self._detaches or (array is None and value.requires_grad)
                value = value if array is None else array
            elif value is None:
                n_missing += 1
                if name in live and is_end:
                    return None
                values.append(KEPT if name in live else unwritten)
                continue
            elif limits and (kind is not ndarray or value.dtype is not dtype) and is_number_of(dtype, value, limits):
                values.append(value)
                continue
            # A pickled dtype is equal, but another object.
            is_array = type(value) is ndarray and value.shape == shape
            if not is_array or (value.dtype is not dtype and value.dtype != dtype):
                value = None if convert is None else self._convert(name, value, shape, convert)
                if value is None:
                    return None
            values.append(value)
        if n_missing and (not fills or n_missing == len(plan) or (self._linked and not self._has_linked(values))):
            return None
        return values

    def _has_linked(self, values: list[Any]) -> bool:
        return all(type(values[at]) is type(values[source]) is ndarray for _, at, source in self._linked)

    def _convert(self, name: str, value: Any, shape: tuple[int, ...], convert: Convert) -> Any:
        """Converts a value of a column to this shape.

        None if impossible: `Storage.write` says what does not fit.
        """
        columns, spec = self._storage.columns, self._storage.columns.specs[name]
        is_row = len(shape) == len(spec.shape)
        with contextlib.suppress(SpecError):
            if is_row and spec.is_object:
                one = np.empty(1, object)
                one[0] = value
                value = one
            elif is_row:
                value = (value if isinstance(value, (ndarray, Tensor)) else host_array(name, value))[None]
            value = convert(name, value, spec)
            if value is not None:
                value = columns.fitted(name, value, (1,) if is_row else shape[:1], spec)
                return value[0] if is_row else value
        return None

    def _write_block(self, places: list[ndarray], values: list[Any], copied: Copied | None) -> None:
        """Writes values, or what torch copies, to slots of all lanes.

        All lanes are in step. `places` are the rows of each column by slot.
        """
        head = self._step.head
        assert head is not None
        slot, following = head % self._capacity, head + 1
        self._reserved.fill(following)
        keep_order()
        if copied is not None:
            copied.write(slot)
        for rows, value in zip(places, values):  # noqa: B905 - linked columns, the last, have none
            if value is not KEPT:
                rows[slot] = value
        self._find_done(places, slot, places is self._flat)
        for name, at, source in self._linked:
            pair = values[at], values[source]
            if places is self._flat:  # one row without an axis for lanes
                pair = np.asarray(pair[0])[None], np.asarray(pair[1])[None]
            self._storage.columns.write_step(name, *pair, head)
        if self._has_episodes:
            self._write_episodes(slot, head)
        keep_order()
        self._heads.fill(following)
        self._step.head = following
        if not self._storage.is_private:
            self._seen.fill(following)

    def _write_episodes(self, slot: int, head: int) -> None:
        """Writes each row's place in its episode.

        The rows are those of a slot; episodes that are done end.
        """
        few = () if self.done is None else self.done.nonzero()[0].tolist()
        open_pairs, ends = self._open_pairs, self._mark_ends(ALL) if len(few) > FEW else None
        self._pairs[slot] = open_pairs
        add(open_pairs, self._one_step, open_pairs)
        if ends is not None:
            self._end(ends, head)
        for lane in few if ends is None else ():  # quicker for few than numpy
            total = self._open_times.item(lane)
            self._storage.episodes.set_length(lane, total, total, 0, head + 1)  # type: ignore[union-attr]
            open_pairs[lane] = 0

    def _write_rows(self, values: list[Any], lanes: Any, n_timesteps: int, is_row: bool) -> None:
        """Writes rows to some lanes, or several rows to the only lane.

        The lanes need not be in step.
        """
        heads, columns = self._heads[lanes], self._storage.columns
        rows: Any = self._step.find_block(lanes, n_timesteps, columns)
        is_block = rows is not None
        if rows is None:
            rows = columns.at_steps(lanes, heads if n_timesteps == 1 else heads + np.arange(n_timesteps))
        following = heads + (STEP if n_timesteps == 1 else n_timesteps)
        self._reserved[lanes] = following
        keep_order()
        for flat, items, value in zip(self._flat, self._items, values):  # noqa: B905 - see `_write_block`
            if value is not KEPT:
                given = None if is_block or items is None else as_items(value, items.dtype)
                if given is None:
                    flat[rows] = value
                else:
                    items[rows] = given  # type: ignore[index]
        self._find_done(self._flat, rows, is_row)
        if self._linked:
            links = {name: values[at] for name, at, _ in self._linked}
            links |= {columns.links[name].source: values[source] for name, _, source in self._linked}
            lead = heads.size, n_timesteps
            links = {name: np.reshape(value, lead + columns.specs[name].shape) for name, value in links.items()}
            columns.write_links(links, lanes, n_timesteps)
        episodes, is_one = self._storage.episodes, n_timesteps == 1
        if episodes is not None and self.done is not None and not is_one:
            episodes.write(lanes, self.done[None], head=self._step.head)
        elif episodes is not None:
            ends, pairs, step = self._mark_ends(lanes), self._open_pairs[lanes], self._one_step[lanes]
            self._flat_pairs[rows] = pairs if is_one else pairs + step * np.arange(n_timesteps)
            self._open_pairs[lanes] += step if is_one else step * n_timesteps
            if ends is not None:
                self._end(ends, heads[self.done])
        keep_order()
        self._heads[lanes] = self._seen[lanes] = following
        if episodes is not None and self.done is not None and not is_one:
            self._open_times[:] = episodes.open_lengths(ALL)
        self._step.advance(lanes, n_timesteps, is_block)

    def _find_done(self, places: list[ndarray], rows: Any, is_row: bool) -> None:
        """Finds which of the rows that have been written end an episode."""
        marks = [np.asarray(places[at][rows]) for at in self._ends]  # wide ones may be compressed, or on the disk
        ended = [mark for mark in marks if has_mark(mark)]
        self.done = None if not ended else ONE if is_row else any_marks(ended)

    def _mark_ends(self, lanes: Any) -> Any:
        """Returns the lanes whose episodes end with the rows being written.

        These rows get the lengths of their episodes. None if no episode ends.
        """
        if self.done is None:
            return None
        is_every = lanes is ALL and count_nonzero(self.done) == self._n_lanes
        ends = ALL if is_every else self._every_lane[lanes][self.done]
        self._open_lengths[ends] = self._open_times[ends] + TIME_STEP
        return ends

    def _end(self, lanes: Any, heads: Any) -> None:
        """Ends the episodes of these lanes.

        Their last rows follow these heads.
        """
        episodes = self._storage.episodes
        assert episodes is not None
        totals = self._open_times[lanes].copy()
        before = totals - TIME_STEP
        if count_nonzero(before):
            episodes.set_lengths(self._every_lane[lanes], before, totals, 1, heads)
        self._open_pairs[lanes] = 0

    def end_episodes(self, lanes: slice | ndarray = ALL, longest: int = 1) -> None:
        """Ends unfinished episodes of these lanes at their newest rows.

        Only episodes of at least `longest` steps are ended.
        """
        storage = self._storage
        with storage.lock:
            if self._changes != self._clock.changes or not storage.is_private:
                self._prepare()
            n_steps = self._open[lanes, TIME]
            is_ended = n_steps >= longest
            if np.count_nonzero(is_ended):  # several times faster than `any`
                self._changes = -1
                storage.end_episodes(lanes, n_steps * is_ended)
                self._open[lanes, TIME] = n_steps * ~is_ended
                self._edits, self._changes = self._clock.edits, self._clock.changes

    def _knows(self, lanes: slice | ndarray | None) -> bool:
        """Whether this writer can write to these lanes by its plan.

        It looks at the store again if their open episodes are not as it left them.
        """
        some: Any = ALL if lanes is None else lanes
        if self._clock.edits != self._edits or self._heads[some].tobytes() != self._seen[some].tobytes():
            self._prepare()
        # Unless workers write, or a writer was killed.
        return self._can_write and self._heads[some].tobytes() == self._reserved[some].tobytes()

    def find_step(self) -> InStep:
        """Which lanes are in step."""
        if not self._storage.is_private:  # other processes may have written
            return InStep(self._storage.ring)
        if self._changes != self._clock.changes:
            self._prepare()
        return self._step

    def _prepare(self) -> None:
        """Looks at the store, to be able to write to it."""
        storage, columns = self._storage, self._storage.columns
        with storage.lock:
            storage.clock.hand_over_to(self)
            self._changes = self._clock.changes
            if self._columns != self._clock.columns:
                self._columns = self._clock.columns
                self._find_columns()
            ring = storage.ring
            self._can_write = columns.on_host and storage.counters.shown is None
            self._can_write &= not storage.is_private or bool((ring.reserved == ring.head).all())
            if storage.episodes is not None:
                self._open[:, TIME] = storage.episodes.open_lengths(ALL)
            self._seen, self._edits = ring.head.copy(), self._clock.edits
            self._step = InStep(ring)

    def _find_columns(self) -> None:
        """Finds the memory of the columns."""
        storage, columns = self._storage, self._storage.columns
        ring, self._n_lanes, self._capacity = storage.ring, columns.n_lanes, columns.capacity
        self._reserved, self._heads, self._plans = ring.reserved, ring.head, {}
        names, self._every_lane = list(columns.flat) if columns.on_host else [], np.arange(self._n_lanes)
        # The linked columns, and where the values of each and of its source are among all.
        every = [*names, *columns.links]
        self._linked = [(name, every.index(name), every.index(link.source)) for name, link in columns.links.items()]
        self._flat = [columns.flat[name] for name in names]
        self._items = [columns.items_of(name) for name in names]
        self._rows = [columns.cells[name].swapaxes(0, 1) for name in names]
        self._ends = [at for at, name in enumerate(names) if name in self._every_end]
        self._copies = StepCopies([] if self._linked else self._make_plan(self._n_lanes), self._rows)
        self._has_episodes: bool = storage.episodes is not None
        if storage.episodes is not None:
            # Pairs of time and length, of int32 and as one int64 each.
            self._flat_pairs: ndarray = storage.episodes.columns.flat[EPISODE].view(np.int64)[..., 0]
            self._pairs: ndarray = storage.episodes.columns.cells[EPISODE].swapaxes(0, 1).view(np.int64)[..., 0]
            self._open = np.zeros((self._n_lanes, 2), np.int32)  # those of the next rows
            self._open_pairs: ndarray = self._open.view(np.int64)[:, 0]
            self._open_times, self._open_lengths = self._open[:, TIME], self._open[:, LENGTH]
            one = np.zeros_like(self._open)
            one[:, TIME] = 1
            self._one_step: ndarray = one.view(np.int64)[:, 0]

    def _make_plan(self, n: int) -> list[PlanColumn]:
        """Makes the plan for n rows: the columns."""
        columns, lead = self._storage.columns, () if n == ROW else (n,)
        plan = []
        for name in [*columns.flat, *columns.links] if columns.on_host else ():
            spec = columns.specs[name]
            dtype = BITS if spec.is_bfloat16 else NONE if spec.is_object else np.dtype(spec.dtype.str)
            limits = number_limits(spec, is_info(name)) if n == ROW and not spec.shape else {}
            unwritten, is_end = columns.value(name, spec.unwritten), name in self._every_end
            plan.append(PlanColumn(name, (*lead, *spec.shape), dtype, is_end, unwritten, limits))
        self._plans[n] = plan
        return plan
