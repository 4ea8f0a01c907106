"""A store: columns, the ring of valid rows, and their episodes.

    write:   check the whole block -> reserve -> scatter -> episodes -> publish
    sample:  look at the counters -> draw anchors -> expand -> gather -> look again, redraw overwritten samples

Several processes may each write lanes of their own while others read, without a lock. Threads of one
process take turns at writing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

import numpy as np

from rlstructs.debug import is_on
from rlstructs.errors import StateError
from rlstructs.replay.draw.plan import Selection
from rlstructs.replay.draw.view import View
from rlstructs.replay.rows.backing import Backing, Heap, Shared
from rlstructs.replay.rows.blocks import lead_of
from rlstructs.replay.rows.columns import Columns
from rlstructs.replay.rows.copies import CopiedWhole, renew_lock_after_fork
from rlstructs.replay.rows.episodes import EPISODE, Episodes
from rlstructs.replay.rows.lanes import ALL, EDITS, LANE, REWRITES, Clock, Counters, Instant, Ring, RowIds, keep_order
from rlstructs.replay.rows.linked import LinkedColumns
from rlstructs.replay.rows.on_disk import Disk
from rlstructs.replay.rows.spec import Spec
from rlstructs.trace.lane import DRAW, within

__all__ = ["ALL", "MAX_REDRAWS", "Storage"]

# A reader whose rows are overwritten this often reads from a ring that is too small to be read at all.
MAX_REDRAWS = 100
NOTHING = nullcontext()
A = TypeVar("A", list[Any], dict[str, Any])


class Storage(CopiedWhole):
    """Rows of `n_lanes` lanes, the newest `capacity` of each.

    Args:
        n_lanes: rings; an environment has one of its own.
        capacity: rows per lane.
        order: of row ids, "lane" or "slot".
        backing: where the bytes are stored; None for ordinary memory.
        columns: existing ones of this size and order; None for new ones in `backing`.

    Example:
        >>> from rlstructs.replay.rows.spec import Spec
        >>> storage = Storage(n_lanes=2, capacity=4)
        >>> storage.columns.add("reward", Spec(np.dtype(np.float32)))
        >>> storage.write({"reward": np.ones((2, 3), np.float32)})  # 2 lanes, 3 rows each
        >>> len(storage)
        6
    """

    # Number of rows, read by programs written for torchrl as `buffer._storage.max_size`.
    max_size: int | None = None

    def __init__(
        self,
        n_lanes: int,
        capacity: int,
        *,
        order: str = LANE,
        backing: Backing | None = None,
        columns: Columns | None = None,
    ) -> None:
        self._backing = backing = Heap() if backing is None else backing
        self.columns = LinkedColumns(n_lanes, capacity, order, backing) if columns is None else columns
        self.episodes: Episodes | None = None
        # Clearing the store continues the steps at a multiple of this.
        self.alignment = capacity
        self.counters = Counters(n_lanes, backing)
        self.lock = threading.RLock()
        self._view: View | None = None
        self.clock = Clock()
        self.is_private = not isinstance(backing, Shared)
        self._map()
        renew_lock_after_fork(self)

    def show(self, counters: np.ndarray, following: np.ndarray, settle: Callable[[], None]) -> None:
        """Pins the counters this process reads by, and refuses writes; see `Counters.show`."""
        self._exchange(lambda: self.counters.show(counters, following, settle))

    def show_all(self) -> None:
        """Unpins the counters."""
        self._exchange(self.counters.show_all)

    def take_back(self, shown: np.ndarray) -> None:
        """Drops the rows that others have written after the pinned counters.

        These processes must have ended. Does nothing if other counters than `shown` are pinned.
        """
        if self.counters.shown is shown:
            with self.clock.counting(EDITS):
                self._exchange(self.counters.take_back)
                if self.episodes is not None:
                    self.episodes.reopen(ALL)

    def _exchange(self, change: Callable[[], Any]) -> None:
        """Changes where columns or counters are, or which this process reads by."""
        with self.clock.counting(of_columns=True):
            change()
            self._map()

    def _map(self) -> None:
        columns, self.clock.notes = self.columns, self.counters.notes
        self.ring = Ring(self.counters.read(), columns.capacity)
        columns.use(self.ring)
        columns.clock = self.clock
        # Spans have these: they live longer than columns, whose memory they would keep.
        self._ids, self._view = RowIds(columns.n_lanes, columns.capacity, columns.order), None
        if self.episodes is not None:
            self.episodes.columns.ring, self.episodes.columns.clock = self.ring, self.clock

    def __len__(self) -> int:
        return self.view().total

    @property
    def nbytes(self) -> int:
        """Bytes of columns and bookkeeping."""
        return self.columns.nbytes + self.ring.counters.nbytes + (0 if self.episodes is None else self.episodes.nbytes)

    def add_columns(self, specs: Mapping[str, Spec], linked: Mapping[str, str] | None = None) -> None:
        """Adds columns; all of their rows are unwritten.

        Args:
            specs: name -> spec.
            linked: names among these -> the columns in whose following rows they are stored; see `LinkedColumns`. The
                store must be empty, and its columns `LinkedColumns`.
        """
        linked = linked or {}
        with self.lock, self.clock.counting(REWRITES):
            self.columns.add_all({name: spec for name, spec in specs.items() if name not in linked})
            for name in specs:
                if name in linked:
                    cast(LinkedColumns, self.columns).link(name, linked[name])
            self.poison(specs)

    def exchange(self, made: Mapping[str, tuple[Spec, np.ndarray]], gone: Iterable[str] = ()) -> None:
        """Gives columns other specs and values, and removes others; see `Columns.exchange`.

        Raises:
            StateError: the store is shared with other processes, which would go on with the old ones.
        """
        if not self.is_private:
            raise StateError(f"a store that processes share cannot change its columns {sorted({*made, *gone})}")
        with self.lock, self.clock.counting(REWRITES):
            self.columns.exchange(made, gone)
            self.poison(made)

    def take_columns(self, columns: Columns, episodes: Episodes | None = None) -> Columns:
        """Replaces the columns by others of the same order; returns the old ones.

        Args:
            columns: of the same capacity, or of another if the store is empty.
            episodes: new ones for another capacity; None to keep the existing ones.
        """
        with self.lock, self.clock.counting(REWRITES, of_columns=True):
            before, self.columns = self.columns, columns
            self.episodes = self.episodes if episodes is None else episodes
            self._map()
            return before

    def restore(self, counters: np.ndarray, episodes: np.ndarray | None, following: np.ndarray) -> None:
        """Sets the counters and episodes of a file.

        Args:
            counters: int64 (4, n_lanes).
            episodes: int32 (n_lanes, n_slots, 2); None if the rows of each lane are one episode.
            following: int64 (n_lanes,), the result of `Continuity.following`.
        """
        with self.lock, self._rewriting(REWRITES, EDITS):
            self.ring.counters[...] = counters
            self.counters.continuity.restore(following, self.ring.head)
            if episodes is not None:
                self.track_episodes().columns.cells[EPISODE][:, : episodes.shape[1]] = episodes
            elif self.episodes is not None:
                self.rebuild_episodes(np.zeros((self.columns.n_lanes, self.columns.capacity), bool))

    def now(self) -> Instant:
        """Returns the present instant: it differs from that of before any change."""
        return self.clock.read(self.ring)

    def _rewriting(self, *notes: int) -> AbstractContextManager[None]:
        """Counts a change of existing rows or episodes while it is made.

        Rows are counted by `REWRITES`, episodes by `EDITS`.

        The lock is held.

        Raises:
            StateError: other processes write.
        """
        self.counters.check_writable()
        if not self.is_private:
            return self.clock.counting(*notes)
        self.clock.count(*notes)
        return NOTHING

    def track_episodes(self) -> Episodes:
        """Records episodes from now on; the rows already in a lane become one episode."""
        if self.episodes is None:
            with self.clock.counting(EDITS, of_columns=True):
                self.episodes = Episodes(self.ring, self.columns.order, self._backing)
                self.episodes.columns.clock, self._view = self.clock, None  # the last view has no episodes
                if len(self.ring):
                    self.episodes.rebuild(np.zeros((self.columns.n_lanes, self.columns.capacity), bool))
        return self.episodes

    def end_episodes(self, lanes: slice | np.ndarray = ALL, n_steps: np.ndarray | None = None) -> None:
        """Ends the unfinished episodes of these n lanes at their newest rows.

        Args:
            lanes: the lanes.
            n_steps: int (n,), the steps of the episodes, 0 for lanes whose episode has ended; None if that is unknown.
        """
        with self.lock:
            n_steps = self.track_episodes().open_lengths(lanes) if n_steps is None else n_steps
            if np.count_nonzero(n_steps > 0):
                with self._rewriting(EDITS):
                    self.track_episodes().close(np.arange(self.columns.n_lanes)[lanes], n_steps)

    def rebuild_episodes(self, done: np.ndarray) -> None:
        """Recomputes all episodes from `done`, bool (n_lanes, capacity) by slot."""
        with self.lock, self._rewriting(EDITS):
            self.track_episodes().rebuild(done)

    def write(
        self, block: Mapping[str, Any], lanes: slice | np.ndarray = ALL, *, lengths: np.ndarray | None = None,
        done: np.ndarray | None = None, starts: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Appends up to T rows to each of n lanes.

        If T exceeds the capacity, or what `max_bytes` of the columns leaves, the last rows remain.

        Args:
            block: name -> (n, T, ...), at least one; rows of the other columns become unwritten.
            lanes: the n lanes, no two the same.
            lengths: int64 (n,), how many of the T rows are valid; None for all.
            done: bool (n, T), where an episode ends; None for nowhere.
            starts: bool (n, T), where an episode starts even if the one before has not ended; None for nowhere.

        Raises:
            SpecError: an argument does not fit; nothing changes.
        """
        lead = lead_of(block, self.columns.n_lanes, lanes, lengths, done, starts)
        block = self.columns.check_block(block, lead)
        if self.episodes is not None and done is None:
            done = np.zeros(lead, bool)
        n_timesteps, most = lead[1], self.columns.most_rows_at_once
        with self.lock:
            self.counters.check_writable()
            self.clock.count()
            if n_timesteps <= most:
                self._write(block, lanes, n_timesteps, lengths, done, starts)
                return
            for start in range(0, n_timesteps, most):
                part = slice(start, start + most)
                self._write(
                    {name: values[:, part] for name, values in block.items()},
                    lanes,
                    min(most, n_timesteps - start),
                    None if lengths is None else (lengths - start).clip(0, most),
                    None if done is None else done[:, part],
                    None if starts is None else starts[:, part],
                )

    def _write(
        self, block: Mapping[str, Any], lanes: slice | np.ndarray, n_timesteps: int, lengths: np.ndarray | None,
        done: np.ndarray | None, starts: np.ndarray | None,
    ) -> None:  # fmt: skip
        ring = self.ring
        count = n_timesteps if lengths is None else lengths
        if (ring.reserved[lanes] > ring.head[lanes]).any():  # a writer was killed
            ring.skip_lost(lanes)
            if self.episodes is not None:
                self.episodes.reopen(lanes)
        ring.reserve(lanes, count)
        heads = ring.head[lanes]
        first = int(heads[0]) if heads.size else 0
        head = first if heads.size == 1 or (heads == first).all() else None
        self.columns.write_block(block, lanes, n_timesteps, lengths, head)
        if self.episodes is not None:
            assert done is not None
            self.episodes.write(lanes, done, starts, lengths, head)
        ring.publish(lanes, count)

    def gather(self, names: Sequence[str], rows: np.ndarray) -> list[Any]:
        """Copies rows of some columns, `(*rows.shape, *shape)` each."""
        if not self.columns.links:
            return self.columns.gather(names, rows)
        with self.lock:  # a write moves the waiting values of linked columns
            return cast(LinkedColumns, self.columns).gather_linked(names, rows)

    def put(self, block: Mapping[str, Any], rows: np.ndarray) -> None:
        """Overwrites rows of some columns; the same rows stay valid.

        Args:
            block: name -> `(n, *shape)`.
            rows: int64 (n,), no two the same.

        Raises:
            MissingKeyError, SpecError: a value does not fit; nothing changes.
        """
        block = self.columns.check_block(block, rows.shape)
        with self.lock:
            self.counters.check_writable()
            self.clock.count(REWRITES)
            for name, values in block.items():
                self.columns.replace(name, rows, values)
            if not self.is_private:  # another process may have looked in between
                self.clock.count(REWRITES)

    def grow(self, capacity: int) -> None:
        """Increases the capacity per lane; no lane may have wrapped.

        Row ids stay the same in a store of one lane. The capacity of an empty store may also be lowered.

        Raises:
            StateError: the store is shared with other processes, or its rows would not fit.
        """
        if not self.is_private:
            raise StateError("a store that processes share cannot grow")
        if capacity < self.columns.capacity and len(self):
            raise StateError(f"a store with rows cannot shrink from {self.columns.capacity} to {capacity} per lane")
        with self.lock, self.clock.counting(REWRITES, of_columns=True):
            self.columns.resize(capacity)
            if self.episodes is not None:
                self.episodes.columns.resize(capacity)
            self._map()
            self.poison(self.columns.specs)

    def clear(self, lanes: slice | np.ndarray = ALL) -> None:
        """Drops every row of some lanes."""
        with self.lock:
            self.counters.check_writable()
            self.clock.count()
            self.ring.clear(self.alignment, lanes)
            self.poison(self.columns.specs, lanes)

    def poison(self, names: Iterable[str], lanes: slice | np.ndarray = ALL) -> None:
        """In debug mode, fills the empty rows of these columns with poison."""
        if not is_on():
            return
        columns = self.columns
        rows = columns.rows(np.arange(columns.n_lanes)[lanes][:, None], np.arange(columns.capacity)).ravel()
        rows = rows[columns.steps(rows, self.ring.head - 1) < self.ring.oldest()[columns.lanes(rows)]]
        for name in names:
            if name in columns.flat:  # only rows that are read are ever written to a linked column
                columns.put_rows(name, rows, columns.value(name, columns.specs[name].poison))

    def view(self, length: int = 1) -> View:
        """Returns the rows that can be drawn now.

        These are valid rows with at least `length - 1` rows after them.
        """
        last, now, columns = self._view, self.ring.counters.tobytes(), self.clock.columns
        if last is None or last.length != length or last.found_at != columns or last.snapshot != now:
            last = self._view = View(self.ring, self._ids, length, self.episodes, columns)
        return last

    @within(DRAW)
    def sample(
        self, n: int, select: Callable[[int], Selection], read: Callable[[Selection], A], redraws: int = MAX_REDRAWS
    ) -> tuple[Selection, A]:
        """Draws and reads `n` samples, none of them torn by a writer.

        Args:
            select: draws a given number of samples.
            read: gathers their values, a list or dict of arrays whose first axis is n.
            redraws: how often samples that were overwritten may be drawn again.

        Raises:
            StateError: writers overwrite or drop rows faster than they can be read.
        """
        arrays = read(picked := select(n))
        self.replace_overwritten(picked, arrays, select, read, redraws)
        return picked, arrays

    def replace_overwritten(
        self, picked: Selection, arrays: A, select: Callable[[int], Selection], read: Callable[[Selection], A],
        redraws: int = MAX_REDRAWS,
    ) -> bool:  # fmt: skip
        """Draws those of `sample`'s samples again that were overwritten since, in place.

        Returns whether there were any. The others were whole when they were read; later writes do not matter.
        """
        stale = self.find_overwritten(picked)
        if stale is None:
            return False
        if not redraws:
            raise StateError("sample: rows are overwritten faster than they are read; use a larger memory")
        again, replacements = self.sample(int(stale.sum()), select, read, redraws - 1)
        if len(again.rows) < stale.sum():  # without replacement there may be fewer
            raise StateError("sample: rows were dropped while they were read")
        picked.put(stale, again)
        for at in arrays if isinstance(arrays, dict) else range(len(arrays)):
            arrays[at][stale] = replacements[at]
        return True

    def read_at(
        self,
        rows: np.ndarray,
        read: Callable[[View, np.ndarray], A],
        find_first: Callable[[View, np.ndarray], np.ndarray] = lambda view, rows: rows,
    ) -> A:
        """Reads rows by their ids, none of them torn.

        Threads of this process wait, and rows that other processes overwrite are read again.

        Args:
            rows: int64 (n,).
            read: reads some of them, given the present counters; a list or dict of arrays with their first axis.
            find_first: finds the earliest row that is read for each.

        Raises:
            StateError: another process writes to these rows, or does not end a write.
        """
        with self.lock:
            view = self.view()
            arrays, left = read(view, rows), rows
            if self.is_current(view) and view.is_settled:
                return arrays
            at = np.arange(len(rows))
            for attempt in range(MAX_REDRAWS):
                first = find_first(view, left)
                steps, lanes = view.steps(first), self.columns.lanes(first)
                torn = steps < self.ring.reserved[lanes] - self.ring.capacity
                torn |= (steps < self.ring.floor[lanes]) & view.holds(first, steps)  # its bytes were taken meanwhile
                if not torn.any():
                    return arrays
                time.sleep(0.001 * (attempt > MAX_REDRAWS // 10))
                at, left = at[torn], left[torn]
                replacements = read(view := self.view(), left)
                keep_order()
                for name in arrays if isinstance(arrays, dict) else range(len(arrays)):
                    arrays[name][at] = replacements[name]
        raise StateError(f"row {left[0]} is being written; use a larger memory, or read it later")

    def is_current(self, view: View) -> bool:
        """Whether nothing was written or loaded since, so that earlier reads are whole."""
        keep_order()
        return self.clock.columns == view.found_at and self.ring.counters.tobytes() == view.snapshot

    def find_overwritten(self, picked: Selection) -> np.ndarray | None:
        """Marks samples with rows that have been overwritten since, bool (B,).

        None if there are none.
        """
        if self.is_current(picked.view):
            return None
        if self.clock.columns != picked.view.found_at:  # a load may have brought other rows, and the same counters
            return np.ones(len(picked.rows), bool)
        first = picked.rows[:, 0] if picked.earliest is None else picked.earliest
        stale = np.asarray(picked.view.steps(first) < self.ring.oldest()[self.columns.lanes(first)])
        return stale if stale.any() else None

    def share(self) -> None:
        """Moves everything to shared memory, for processes that are started with this object.

        Raises:
            StateError: the columns are on a device, linked, or of objects; nothing changes.
            OutOfMemoryError: there is too little memory; nothing changes.
        """
        with self.lock:
            if isinstance(self._backing, Disk) and not self.columns.links:  # which every process may map
                self._backing.is_shared, self.is_private = True, False
            if not self.is_private:  # it is shared, and other processes map it
                return
            backing = Shared()
            moves = [self.columns.copy_to(backing), self.counters.copy_to(backing)]
            if self.episodes is not None:
                moves.append(self.episodes.columns.copy_to(backing))
            self._exchange(lambda: [move() for move in moves])  # there is room for everything
            self._backing, self.is_private = backing, False

    def _locks(self) -> Sequence[Any]:
        return (self.lock,)

    def _content(self) -> Any:
        # Other processes write to a shared store at any time: it can only be copied as it is.
        return self.now() if self.is_private else self.clock.draws

    def __getstate__(self) -> dict[str, Any]:
        own = super().__getstate__()
        return {key: own[key] for key in own if key not in ("ring", "lock", "_view", "_ids")}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        super().__setstate__(state)
        self.lock, self._view = threading.RLock(), None
        self._map()
        renew_lock_after_fork(self)
