"""The counters of a store.

They tell how many rows each lane has had, and which of them are valid.

The steps of a lane are numbered from 0, and no number is used twice; step s is in slot `s % capacity`. There are four
counters per lane, int64, in memory that other processes may share:

    base       the end of the cleared steps
    reserved   raised before rows are written: the end of the steps that may be incomplete
    head       raised after rows are written: the end of the complete steps
    floor      raised before rows are written whose bytes take the place of older ones': the end of those

The steps `[max(base, reserved - capacity, floor), head)` are valid. A reader without a lock looks at
the counters again after it has gathered rows: rows that are no longer valid may be torn. If a writer is killed while it
writes, the rows that it was about to overwrite are lost, and the next writer starts at `head`.

This rests on the order in which other processes see loads and stores. x86 keeps the order of loads, and that of stores,
which is all that is needed. ARM and others do not: there `keep_order` keeps it, between the counters and the rows on
both sides. Threads of one process take a lock, which keeps the order everywhere.

Row ids, int64: `lane * lane_stride + slot * slot_stride`.

The order of a store sets the strides: "lane" (capacity and 1) keeps the rows of a lane together, "slot" (1 and n_lanes)
the rows of one time. Only `RowIds` calculates with row ids.

`Continuity` knows which rows of a lane follow one another. A row that does not follow the one before begins an episode.

Rollouts say the number of each row's first step in its environment's own count (`TemporalDictTensor.first_steps`). A
rollout that a memory was not given leaves a gap in these numbers. For each lane there are three int64:

    OFFSET     number of a step in its environment's count - number of the step in the lane
    SINCE      the steps of the lane from here on have this offset
    END        up to here

Rows whose numbers are not known leave them as they are, and follow whatever is before them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
from _thread import allocate_lock
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from rlstructs.checks import UNKNOWN
from rlstructs.errors import StateError
from rlstructs.replay.rows.backing import Backing, Heap

BASE, RESERVED, HEAD, FLOOR = range(4)
N_COUNTERS = 4
ALL = slice(None)


def is_ordered(machine: str) -> bool:
    """Whether processors of this name keep the order of loads and stores.

    The name is from `platform.machine`. Loads stay in the order of loads, and stores in the order of stores.
    """
    return machine.lower() in ("x86_64", "amd64", "i386", "i486", "i586", "i686", "x86")


IS_ORDERED = is_ordered(platform.machine())


def keep_order() -> None:
    """Orders the loads and stores before this call before those after it.

    Other processes see them in this order.
    """
    if not IS_ORDERED:
        fence()


def fence() -> None:
    """Orders memory by means of Python's locks.

    Everything before a release stays before it, everything after an acquisition stays after it, and an acquisition
    stays after an earlier release. So a release that an acquisition follows is a full barrier; neither alone is. The
    lock is new, so that no fork copies one that another thread holds.
    """
    lock = allocate_lock()
    for _ in range(2):
        lock.acquire()
        lock.release()


class Ring:
    """Counters of `n_lanes` lanes with `capacity` rows each.

    Args:
        counters: int64 (4, n_lanes), zeros for a new ring.
        capacity: rows per lane.

    Example:
        >>> ring = Ring(np.zeros((N_COUNTERS, 2), np.int64), capacity=4)
        >>> ring.reserve(slice(0, 1), 6)
        >>> ring.publish(slice(0, 1), 6)
        >>> ring.oldest().tolist(), ring.head.tolist(), len(ring)
        ([2, 0], [6, 0], 4)
    """

    def __init__(self, counters: np.ndarray, capacity: int) -> None:
        self.counters = counters
        self.capacity = capacity
        self.base, self.reserved, self.head, self.floor = counters

    @property
    def n_lanes(self) -> int:
        """Number of lanes."""
        return int(self.head.size)

    def __len__(self) -> int:
        return int((self.head - self.oldest()).clip(0).sum())

    def oldest(self) -> np.ndarray:
        """Returns the first valid step of each lane, int64 (n_lanes,)."""
        return np.asarray(np.maximum(np.maximum(self.base, self.floor), self.reserved - self.capacity))

    def reserve(self, lanes: slice | np.ndarray, n: int | np.ndarray) -> None:
        """Announces a write of `n` rows from `head` on to each of these lanes."""
        self.reserved[lanes] = np.maximum(self.reserved[lanes], self.head[lanes] + n)
        keep_order()

    def skip_lost(self, lanes: slice | np.ndarray) -> None:
        """Clears lanes in which a killed writer had reserved every row."""
        lost = self.reserved[lanes] - self.capacity >= self.head[lanes]
        if lost.any():
            self.base[lanes] = np.where(lost, self.head[lanes], self.base[lanes])

    def drop_before(self, step: int, lane: int) -> None:
        """Drops the rows of a lane before this step."""
        self.floor[lane] = max(int(self.floor[lane]), step)
        keep_order()

    def publish(self, lanes: slice | np.ndarray, n: int | np.ndarray) -> None:
        """Announces that `n` rows are complete in each of these lanes."""
        keep_order()
        self.head[lanes] += n

    def clear(self, alignment: int | None = None, lanes: slice | np.ndarray = ALL) -> None:
        """Drops all rows of some lanes; the next row is written to slot 0.

        Args:
            alignment: the next step is a multiple of it; itself a multiple of the capacity, or None for the capacity.
            lanes: the lanes.
        """
        alignment = self.capacity if alignment is None else alignment
        # Above all steps of these lanes: they stay in step, and objects that follow the heads notice.
        start = (int(np.maximum(self.head, self.reserved)[lanes].max()) // alignment + 1) * alignment
        # The head last: until then a reader finds no rows rather than invalid ones.
        self.base[lanes] = start
        keep_order()
        self.reserved[lanes] = start
        keep_order()
        self.head[lanes] = start

    def is_full(self) -> np.ndarray:
        """Marks full lanes, bool (n_lanes,)."""
        return np.asarray(self.head - self.base >= self.capacity)


# After the counters of the lanes: the last change of existing rows, whether a program has live tensors, and the last
# change of episodes without new rows.
REWRITES, EXPOSED, EDITS = range(3)
N_NOTES = 3
_numbers = itertools.count(1)


class Instant(NamedTuple):
    """What a store has gone through up to now; it differs after every change.

    Attributes:
        snapshot: the bytes of the counters of the lanes: any process has written or dropped rows.
        rewrites: any process has given existing rows other values or columns.
        edits: any process has changed episodes without new rows.
        columns: how often this process has exchanged columns, their memory or the counters that it reads by, twice
            each time; odd meanwhile.
        draws: how often what draws depend on beside the rows has changed: priorities, samplers, transforms.
        changes: how often this process has changed rows, columns or episodes; a `StepWriter` does not count its rows.
    """

    snapshot: bytes
    rewrites: int
    edits: int
    columns: int
    draws: int
    changes: int


class Clock:
    """The clock of a store, the only place where changes are counted.

    Whoever remembers something of a store compares the parts of an `Instant` on which it depends:

        rows that priorities follow                     snapshot
        rows of a view, as they are read                snapshot, columns: a load may bring the same counters
        slices, windows of a shard                      snapshot, edits
        where a `StepWriter` writes                     changes, columns; of a shared store also heads and edits
        keys of a table, columns read without a lock    columns
        marks of ends                                   snapshot, rewrites, columns
        rows in an earlier checkpoint                   rewrites, heads
        batches made ahead, pickles                     all

    Attributes:
        columns, draws, changes: see `Instant`.
        on_columns: is called after columns, their memory or counters were exchanged.
        notes: int64 (3,), `REWRITES`, `EXPOSED` and `EDITS`, which all processes share; set by the store.
    """

    def __init__(self) -> None:
        self.columns = self.draws = self.changes = self._writer = 0
        self.notes = np.zeros(N_NOTES, np.int64)
        self.on_columns: Callable[[], None] | None = None

    @property
    def rewrites(self) -> int:
        """See `Instant`."""
        return self.notes.item(REWRITES)

    @property
    def edits(self) -> int:
        """See `Instant`."""
        return self.notes.item(EDITS)

    def read(self, ring: Ring) -> Instant:
        """Returns the present instant of the store with these counters."""
        snapshot = ring.counters.tobytes()
        return Instant(snapshot, self.rewrites, self.edits, self.columns, self.draws, self.changes)

    def count(self, *notes: int) -> None:
        """Counts a change of rows, columns or episodes; call it before the change.

        Args:
            notes: `REWRITES`, `EDITS`, or none for rows that are appended or dropped.
        """
        self.changes += 1
        for note in notes:  # a number that was never there: two processes that count at once cannot undo each other
            self.notes[note] = (os.getpid() << 32) + next(_numbers)

    @property
    def is_exposed(self) -> bool:
        """Whether a program has live tensors.

        Through them it may change rows that are there at any time.
        """
        return bool(self.notes[EXPOSED])

    def expose(self, has_live: bool = True) -> None:
        """Records that a program gets a live tensor, or has none any more."""
        self.notes[EXPOSED] = has_live

    def count_draws(self) -> None:
        """Counts a change of later draws that the rows do not show.

        Call it before the change.
        """
        self.draws += 1

    @contextlib.contextmanager
    def counting(self, *notes: int, of_columns: bool = False) -> Iterator[None]:
        """Counts before and after a change at which others may look in between.

        These are other processes, and threads that read columns without a lock.
        """
        of_columns = of_columns and not self.columns % 2  # a change may be part of another
        self.columns += of_columns
        self.count(*notes)
        try:
            yield
        finally:
            self.count(*notes)
            self.columns += of_columns
            if of_columns and self.on_columns is not None:
                self.on_columns()

    def hand_over_to(self, writer: object) -> None:
        """Counts a change if another `StepWriter` was the last one.

        That one then looks at the store again.
        """
        self.changes += self._writer not in (0, id(writer))
        self._writer = id(writer)

    def __getstate__(self) -> dict[str, Any]:
        columns = self.columns + self.columns % 2
        own = {"columns": columns, "notes": np.zeros(N_NOTES, np.int64), "_writer": 0, "on_columns": None}
        return {**vars(self), **own}


class Counters:
    """The counters of a store, int64.

    There are four for each lane (see `Ring`), three more (see `Continuity`), and three for the store.

    Args:
        n_lanes: number of lanes.
        backing: where the bytes are stored.

    Attributes:
        shown: the private counters that this process uses for reading while others write, int64 (4, n_lanes); None if
            it uses the shared ones.
    """

    def __init__(self, n_lanes: int, backing: Backing) -> None:
        self._block = backing.allocate("counters", ((N_COUNTERS + N_NUMBERS) * n_lanes + N_NOTES) * 8)
        self.shown: np.ndarray | None = None
        self._following = np.zeros(0, np.int64)
        self._settle: Callable[[], None] | None = None

    @property
    def notes(self) -> np.ndarray:
        """The notes of the store's clock; all processes share them."""
        return self._block.bytes().view(np.int64)[-N_NOTES:]

    @property
    def shared(self) -> np.ndarray:
        """The counters that all processes share, int64 (4, n_lanes)."""
        return self._of_lanes()[:N_COUNTERS]

    @property
    def continuity(self) -> Continuity:
        """The numbers of the newest rows in their environments.

        All processes share them.
        """
        return Continuity(self._of_lanes()[N_COUNTERS:])

    def _of_lanes(self) -> np.ndarray:
        return self._block.bytes().view(np.int64)[:-N_NOTES].reshape(N_COUNTERS + N_NUMBERS, -1)

    def read(self) -> np.ndarray:
        """Returns the counters that this process reads by, int64 (4, n_lanes)."""
        return self.shared if self.shown is None else self.shown

    def following(self) -> np.ndarray:
        """Returns the steps that would follow the newest readable rows, int64 (n_lanes,).

        See `Continuity.following`.
        """
        return self.continuity.following(self.shared[HEAD]) if self.shown is None else self._following

    def show(self, shown: np.ndarray, following: np.ndarray, settle: Callable[[], None]) -> None:
        """Pins the counters that this process reads by.

        Args:
            shown: int64 (4, n_lanes).
            following: int64 (n_lanes,), the steps that follow the rows up to these heads: others that have written
                more rows may have left a gap since.
            settle: waits until no other process writes.
        """
        self.shown, self._following, self._settle = shown, following, settle

    def show_all(self) -> None:
        """Unpins the counters."""
        self.shown = self._settle = None

    def settle(self) -> None:
        """Waits until no other process writes, if counters are pinned."""
        if self._settle is not None:
            self._settle()

    def take_back(self) -> None:
        """Drops the rows that others have written after the pinned counters.

        These processes must have ended.
        """
        assert self.shown is not None
        # The head last: the rows that it drops are reserved by then.
        self.shared[RESERVED] = self.shown[RESERVED]
        keep_order()
        self.shared[HEAD] = self.shown[HEAD]
        self.continuity.restore(self._following, self.shown[HEAD])
        self.show_all()

    def check_writable(self) -> None:
        """Raises StateError while other processes write."""
        if self.shown is not None:
            raise StateError("workers write to this memory: wait for their rollouts, or reset the batcher")

    def copy_to(self, backing: Backing) -> Callable[[], None]:
        """Copies the bytes elsewhere; the returned function moves there."""
        before = self._block.bytes()
        block = backing.allocate("counters", before.nbytes)
        block.bytes()[...] = before

        def move() -> None:
            self._block = block

        return move

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "shown": None, "_settle": None, "n_counters": N_COUNTERS}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        if vars(self).pop("n_counters", FLOOR) == FLOOR:  # pickled by 0.2, which had no floors
            old = self._block.bytes().view(np.int64)
            n_lanes = (old.size - N_NOTES) // (FLOOR + N_NUMBERS)
            Counters.__init__(self, n_lanes, Heap())
            self._block.bytes().view(np.int64)[...] = np.insert(old, FLOOR * n_lanes, np.zeros(n_lanes, np.int64))


LANE, SLOT = "lane", "slot"


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
        # Of arrays of slots of every lane in the order of the store.
        self.slot_axis = 1 if order == LANE else 0
        self._first_rows = np.arange(n_lanes) * self.lane_stride
        self._in_numpy = np.array(capacity), np.array(self.slot_stride)  # with plain numbers it takes twice as long

    @property
    def n_rows(self) -> int:
        """Number of row ids."""
        return self.n_lanes * self.capacity

    def lead(self, n_slots: int) -> tuple[int, int]:
        """Returns the first two axes of an array of `n_slots` slots per lane.

        They are in the order of the store.
        """
        return (self.n_lanes, n_slots) if self.order == LANE else (n_slots, self.n_lanes)

    def by_lane(self, array: Any) -> Any:
        """Views an array in the store's order by lane and slot.

        It is its own inverse: it also converts from this order to the store's.
        """
        return array if self.order == LANE else array.swapaxes(0, 1)

    def rows(self, lanes: Any, slots: Any) -> np.ndarray:
        """Returns the row ids of slots in [0, capacity)."""
        return np.asarray(lanes * self.lane_stride + slots * self.slot_stride)

    def at_steps(self, lanes: Any, steps: Any) -> np.ndarray:
        """Returns the row ids of these steps.

        `lanes` is an index, or an array of the shape of the steps.
        """
        capacity, slot_stride = self._in_numpy
        slots = steps % capacity
        if self.n_lanes == 1:
            return np.asarray(slots)
        return np.asarray(self._first_rows[lanes] + (slots if self.order == LANE else slots * slot_stride))

    def between(self, low: int, high: int) -> np.ndarray:
        """Lists the row ids of steps `[low, high)`, lane by lane."""
        slots = np.arange(low % self.capacity, low % self.capacity + high - low)
        slots[self.capacity - low % self.capacity :] -= self.capacity
        return slots if self.n_lanes == 1 else (self._first_rows[:, None] + slots * self.slot_stride).reshape(-1)

    def places(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the lanes and slots of row ids."""
        major, minor = np.divmod(rows, self.capacity if self.order == LANE else self.n_lanes)
        return (major, minor) if self.order == LANE else (minor, major)

    def lanes(self, rows: np.ndarray) -> np.ndarray:
        """Returns the lanes of row ids."""
        return np.asarray(rows // self.capacity if self.order == LANE else rows % self.n_lanes)

    def numbered(self, index: np.ndarray, low: int, n: int) -> np.ndarray:
        """Returns the row ids of row numbers, in the order of the store.

        Each lane has `n` rows from the step `low` on.
        """
        if self.order == LANE:
            lanes, ages = np.divmod(index, n) if self.n_lanes > 1 else (0, index)
            return self.at_steps(lanes, low + ages)
        return np.asarray((index + low * self.n_lanes) % self.n_rows)

    def steps(self, rows: np.ndarray, last: Any) -> np.ndarray:
        """Returns the newest steps that rows can hold, up to `last`.

        `last` is one step for all lanes, or int64 (n_lanes,).
        """
        slots = rows  # modulo the capacity, in order "lane"
        if self.order != LANE or isinstance(last, np.ndarray):
            lanes, slots = self.places(rows)
            last = last[lanes] if isinstance(last, np.ndarray) else last
        return np.asarray(last - (last - slots) % self.capacity)

    def shifted(self, rows: np.ndarray, by: Any) -> np.ndarray:
        """Returns the row ids of the rows `by` steps later in their lanes.

        `by` (L,) for rows (B, 1) must be ascending.
        """
        if self.order != LANE:  # every lane goes round the end of the store alike
            shifted = rows + by * self.n_lanes
            # In a third of the time of %.
            return np.asarray(shifted - shifted // self.n_rows * self.n_rows)
        lanes, slots = (0, rows) if self.n_lanes == 1 else self.places(rows)
        if rows.size and rows.ndim == 2 and np.ndim(by) == 1:
            low, high = slots.min() + by[0], slots.max() + by[-1]
            if low >= 0 and high < self.capacity:  # nearly always: none crosses the end of its ring
                return np.asarray(rows + by)
        return self.at_steps(lanes, slots + by)


OFFSET, SINCE, END = range(3)
N_NUMBERS = 3
# What follows the newest row of an empty lane.
ANY = -2


class Continuity:
    """The continuity of lanes: whether rows follow the newest ones.

    Args:
        numbers: int64 (3, n_lanes), zeros for lanes of which nothing is known.

    Example:
        >>> continuity, ring = Continuity(np.zeros((N_NUMBERS, 1), np.int64)), Ring(np.zeros((4, 1), int), 9)
        >>> lane, four = np.array([0]), np.array([4])
        >>> ring.publish(lane, 4)
        >>> continuity.record(lane, np.array([100]), four, ring)  # steps 100 to 103 of some environment
        >>> [continuity.find_gaps(lane, np.array([first]), four, ring).item() for first in (104, 108)]
        [False, True]
    """

    def __init__(self, numbers: np.ndarray) -> None:
        self._numbers = numbers

    def find_gaps(self, lanes: np.ndarray, first_steps: np.ndarray, lengths: np.ndarray, ring: Ring) -> np.ndarray:
        """Finds trajectories that do not follow the rows before them, bool (B,).

        Args:
            lanes, first_steps, lengths: int64 (B,), of the trajectories; those of one lane follow one another.
            ring: of the store.
        """
        (offset, _, end), at = self._numbers, _as_index(lanes)
        if isinstance(at, slice):  # as nearly always
            heads = ring.head[at]
            if (end[at] == heads).all() and (first_steps - offset[at] == heads).all():
                return np.zeros(lanes.size, bool)
        following = np.where(ring.head > ring.base, self.following(ring.head), ANY)
        before = following[lanes]
        if not isinstance(at, slice):
            for row, (lane, first, n) in enumerate(zip(lanes.tolist(), first_steps.tolist(), lengths, strict=True)):
                before[row], following[lane] = following[lane], UNKNOWN if first == UNKNOWN else first + n
        return np.asarray((first_steps != UNKNOWN) & (before != first_steps) & (before != ANY))

    def record(self, lanes: np.ndarray, first_steps: np.ndarray, lengths: np.ndarray, ring: Ring) -> None:
        """Records which steps the newest rows are.

        Call it after the rows are written, with the arguments of `find_gaps`. Without the numbers of a lane's last
        trajectory nothing is known of the lane.
        """
        at = _as_index(lanes)
        if not isinstance(at, slice):
            last = lanes.size - 1 - np.unique(lanes[::-1], return_index=True)[1]
            at, first_steps, lengths = lanes[last], first_steps[last], lengths[last]
        own, heads = self._numbers[:, at], ring.head[at]
        begins = heads - lengths
        offset = first_steps - begins
        goes_on = own[OFFSET] == offset
        if goes_on.all() and (own[END] == begins).all():  # as nearly always
            self._numbers[END, at] = heads
            return
        goes_on &= (own[SINCE] < begins) & (begins <= own[END])
        since = np.where(goes_on, own[SINCE], begins)
        self._numbers[:, at] = np.where(first_steps != UNKNOWN, [offset, since, heads], 0)

    def following(self, heads: np.ndarray) -> np.ndarray:
        """Returns the steps that would follow the newest rows, int64 (n_lanes,).

        They are numbered in their environments; `UNKNOWN` where the number is unknown.

        Args:
            heads: int64 (n_lanes,), the steps up to which there are rows; some may have been taken back.
        """
        offset, since, end = self._numbers
        return np.asarray(np.where((since < heads) & (heads <= end), heads + offset, UNKNOWN))

    def restore(self, following: np.ndarray, heads: np.ndarray) -> None:
        """Restores a result of `following` for these heads."""
        self._numbers[...] = np.where(following == UNKNOWN, 0, [following - heads, heads - 1, heads])


def _as_index(lanes: np.ndarray) -> Any:
    """Converts consecutive lanes to a slice; returns others unchanged.

    Lanes are nearly always consecutive.
    """
    is_slice = lanes.size > 0 and (lanes[1:] - lanes[:-1] == 1).all()
    return slice(int(lanes[0]), int(lanes[0]) + lanes.size) if is_slice else lanes
