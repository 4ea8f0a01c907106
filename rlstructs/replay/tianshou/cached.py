"""`CachedReplayBuffer`: unfinished episodes wait in caches; its parts join the main buffer and these."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlstructs.checks import check_count
from rlstructs.errors import SpecError, StateError
from rlstructs.replay.buffer import Buffer
from rlstructs.replay.draw.view import AnyView, JoinedView
from rlstructs.replay.intake.infos import OBJECTS, Plan, adopt, held_values, require_bytes
from rlstructs.replay.intake.roles import is_info
from rlstructs.replay.intake.trajectories import Steps
from rlstructs.replay.rows.blocks import rounds
from rlstructs.replay.rows.spec import Spec, widened
from rlstructs.replay.rows.store import Storage
from rlstructs.replay.tianshou.editor import Editor
from rlstructs.replay.tianshou.intake import MalformedBufferError, TransitionIntake, as_float64
from rlstructs.replay.tianshou.options import Options
from rlstructs.replay.tianshou.reader import Reader
from rlstructs.replay.tianshou.replay_buffer import ReplayBuffer
from rlstructs.replay.tianshou.running import Added
from rlstructs.replay.tianshou.table import Keys, LazyColumn, Table, read_only
from rlstructs.replay.tianshou.transitions import REW
from rlstructs.replay.tianshou.vector import VectorReplayBuffer
from rlstructs.workers.public_names import set_module

if TYPE_CHECKING:
    from typing_extensions import Self

# Most bytes of a row of a column that is joined when it is read, as compiled code and torch need it: a reward, a flag,
# a small action or observation.
LARGEST_JOINED = 64


class JoinedTable(Table):
    """The rows of the main buffer, and after them those of the caches.

    Args:
        main: the table of the main buffer.
        storage: the store of the caches, one lane each.
        lane_size: rows of a cache.
    """

    is_joined = True

    def __init__(self, main: Table, storage: Storage, lane_size: int) -> None:
        super().__init__(storage, lane_size, is_stacked=True)
        self.main = main
        self._unified = (-1, -1)  # the layouts of both when they last had the same columns

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_unified": (-1, -1)}

    @property
    def maxsize(self) -> int:
        return self.main.maxsize + super().maxsize

    @property
    def edges(self) -> np.ndarray:
        return np.concatenate([[0], self.main.maxsize + super().edges])

    def lane_around(self, row: int) -> tuple[int, int]:
        edge = self.main.maxsize
        if 0 <= row < edge:
            return 0, edge
        low, high = super().lane_around(row - edge)
        return (low + edge, high + edge) if low < high else (low, high)

    @property
    def columns(self) -> dict[str, Spec]:
        self.follow_main()
        return super().columns

    def _look(self) -> Keys:
        self.follow_main()
        return super()._look()

    def follow_main(self) -> None:
        """Gives both the same columns, after the main buffer was changed alone."""
        main, own = self.main.storage.clock, self.storage.clock
        if self._unified != (main.columns, own.columns):
            unify(self.main.storage, self.storage)
            self._unified = main.columns, own.columns

    def rows(self) -> AnyView:
        self.follow_main()
        parts, sizes = [self.main.own_rows(), self.own_rows()], [self.main.maxsize, super().maxsize]
        return JoinedView(parts, sizes)

    def gather(self, names: Sequence[str], at: np.ndarray) -> list[Any]:
        specs = [self.storage.columns.specs[name] for name in names]
        arrays = [np.full((*at.shape, *spec.shape), None if spec.is_object else 0, spec.dtype) for spec in specs]
        edge = self.main.maxsize
        for storage, inside, offset in ((self.main.storage, at < edge, 0), (self.storage, at >= edge, edge)):
            for array, values in zip(arrays, storage.gather(names, at[inside] - offset), strict=True):
                array[inside] = values
        return arrays

    def column(self, name: str) -> np.ndarray | LazyColumn:
        self.follow_main()
        column = self.gather_lazily(name)
        if column.dtype.itemsize * math.prod(column.shape[1:]) > LARGEST_JOINED:
            return column
        return read_only(np.concatenate([self.main.column(name), super().column(name)]))

    def ends(self) -> np.ndarray:
        return read_only(np.concatenate([self.main.ends(), super().ends()]))

    def read_column(self, name: str, at: np.ndarray) -> np.ndarray:
        edge = self.main.maxsize
        is_own = at >= edge
        own = super().read_column(name, at[is_own] - edge)
        values = np.empty((at.size, *own.shape[1:]), own.dtype)
        values[is_own] = own
        if not is_own.all():
            values[~is_own] = self.main.read_column(name, at[~is_own])
        return values


def unify(main: Storage, own: Storage) -> None:
    """Gives both stores the same columns, with one dtype for infos.

    The main one may have been changed on its own.
    """
    for storage, others in ((main, own.columns.specs), (own, main.columns.specs)):
        specs = storage.columns.specs
        nested = {name: [key for key in specs if key.startswith(f"{name}/")] for name in others}
        adopt(storage, Plan({}, folded={name: below for name, below in nested.items() if below}))
        if lacking := {name: spec for name, spec in others.items() if name not in storage.columns.specs}:
            require_bytes(storage.columns, lacking, lacking)
            storage.add_columns(lacking)
    theirs, ours = main.columns.specs, own.columns.specs
    for name in [name for name in ours if is_info(name) and theirs.get(name, ours[name]) != ours[name]]:
        one, other = theirs[name], ours[name]
        dtype = None
        if not (one.is_object or other.is_object) and one.shape == other.shape:
            held = held_values(main, name, one)
            dtype = widened(held, held_values(own, name, other), held.dtype)
        spec = OBJECTS if dtype is None else Spec(dtype, other.shape, 0)
        for storage in (main, own):
            if storage.columns.specs[name] != spec:
                adopt(storage, Plan({}, {name: spec}))


class CachedIntake(TransitionIntake):
    """Writes to the caches, and moves episodes that have ended to the main buffer.

    Args:
        table: the rows of both.
        owner, options: see `TransitionIntake`.
        main: the intake of the main buffer.
    """

    table: JoinedTable
    is_for_one_process = True  # a row is in one store first, and later in another

    def __init__(self, table: JoinedTable, owner: str, options: Options, main: TransitionIntake) -> None:
        super().__init__(table, owner, options)
        self.main = main
        if main.specs:
            super().add_columns(dict(main.specs))

    # Columns

    def add_columns(self, made: dict[str, Spec]) -> None:
        theirs = self.main.specs
        for name, one in made.items():
            if (its := theirs.get(name, one)) != one:
                text = f"{one.dtype}{list(one.shape)}, in the main buffer {its.dtype}{list(its.shape)}"
                raise SpecError(f"{name!r} is {text}")
        if lacking := {name: spec for name, spec in made.items() if name not in theirs}:
            self.main.add_columns(lacking)
        super().add_columns(made)

    def plan_columns(self, rows: Mapping[str, Any], n_lead: int) -> Plan:
        if self.specs:
            unify(self.main.storage, self.storage)
        return super().plan_columns(rows, n_lead)

    def read_held(self, name: str) -> np.ndarray:
        return np.concatenate([self.main.read_held(name), super().read_held(name)])

    def adopt(self, plan: Plan) -> None:
        self.main.adopt(plan)
        super().adopt(plan)

    # Rows

    def check_room(self, lanes: np.ndarray, done: np.ndarray) -> None:
        steps = self.storage.ring.head[lanes] - self.running.begins[lanes]
        if (steps + len(lanes) > self.table.lane_size).any():  # one may have no room; it costs more to know
            self.check_steps(Steps({}, 1, np.ones(len(lanes), np.int64), lanes, done[:, None]))

    def check_steps(self, steps: Steps) -> None:
        longest, limit = self.find_longest(steps), self.table.lane_size
        if (longest > limit).any():
            raise MalformedBufferError(
                f"environment {steps.lanes[longest > limit][0]}: an episode of {longest.max()} steps or more is longer "
                f"than max_episode_length, {limit}"
            )

    def has_room(self, lanes: Any, heads: np.ndarray) -> bool:
        return bool((heads - self.running.begins[lanes] + heads.size <= self.table.lane_size).all())

    def add_quickly(self, batch: Any, buffer_ids: Any) -> Added | None:
        if self.specs:
            self.table.follow_main()
        return super().add_quickly(batch, buffer_ids)

    def split(self, lanes: np.ndarray) -> Iterable[Any]:
        # A repeated lane is written row by row, so that episodes move in the order in which they end.
        return [[at] for at in range(lanes.size)] if len(set(lanes.tolist())) < lanes.size else [slice(None)]

    def settle(self, added: Added, lanes: slice | np.ndarray, done: np.ndarray | None) -> Added:
        index, ep_return, ep_len, start = added
        index, start = index + self.main.table.maxsize, start + self.main.table.maxsize
        if done is not None and done.any():
            start[done], index[done] = self._move(np.arange(self.table.n_lanes)[lanes][done])
        return index, ep_return, ep_len, start

    def _move(self, lanes: np.ndarray) -> tuple[Any, Any]:
        """Moves the episodes in n caches to the main buffer, in order.

        Returns:
            Their first and last row ids there, int64 (n,), or -1 for none.
        """
        main, rows = self.main.storage, self.table.own_rows()
        first: Any = -1
        last: Any = -1
        if self.main.table.lane_size:
            counts = rows.counts()[lanes]
            ends = np.cumsum(counts)
            steps = np.arange(ends[-1]) + np.repeat(rows.low[lanes] - (ends - counts), counts)
            at = self.storage.columns.at_steps(np.repeat(lanes, counts), steps)
            names = list(self.specs)
            block = {name: values[None] for name, values in zip(names, self.storage.gather(names, at), strict=True)}
            done = np.zeros((1, at.size), bool)
            done[0, ends - 1] = True
            # If an episode is longer than the main buffer, its last rows stay.
            kept = np.minimum(counts, main.columns.capacity)
            first, last = (main.columns.at_steps(0, main.ring.head[0] + ends - n) for n in (kept, 1))
            main.write(block, done=done, starts=(rows.prev(at) == at)[None])
            self.main.running.clear()
            self.main.running.find_begins()
        self.storage.clear(lanes)
        self.running.find_begins()
        return first, last

    def write_steps(self, block: Mapping[str, Any], steps: Steps) -> None:
        rewards, lanes, done = as_float64(steps.values[REW]), steps.lanes, steps.done
        assert done is not None, "there are flags"
        for part in rounds(lanes):
            for t in range(int(steps.lengths[part].max(initial=0))):
                at = np.arange(len(lanes))[part]
                at = at[t < steps.lengths[at]]
                if steps.starts is not None:
                    self._drop(lanes[at[steps.starts[at, t]]])
                rows = {name: values[at, t : t + 1] for name, values in block.items()}
                self.write_rows(rows, lanes[at], rewards[at, t], done[at, t])

    def _drop(self, lanes: np.ndarray) -> None:
        """Drops episodes that another one cuts short."""
        if lanes.size:
            self.storage.clear(lanes)
            self.running.find_begins()
            self.running.clear(lanes)

    def reset(self, keep_statistics: bool) -> None:
        self.main.reset(keep_statistics)
        super().reset(keep_statistics)


class CachedEditor(Editor):
    """Changes rows of both.

    Args:
        table: the rows of both.
        intake: their intake.
        main: the editor of the main buffer.
    """

    def __init__(self, table: JoinedTable, intake: CachedIntake, main: Editor) -> None:
        super().__init__(table, intake)
        self.main = main

    def set_batch(self, batch: Any) -> None:
        if not self.table.rows().total:
            raise StateError("set_batch: an empty CachedReplayBuffer has no rows to be changed")
        super().set_batch(batch)

    def put(self, name: str, at: np.ndarray, values: Any) -> None:
        edge = self.main.table.maxsize
        in_main = at < edge
        if in_main.any():
            self.main.put(name, at[in_main], values[in_main])
        super().put(name, at[~in_main] - edge, values[~in_main])

    def fill(self, name: str, value: Any) -> None:
        self.main.fill(name, value)
        super().fill(name, value)

    def prepare_rebuild(self) -> Callable[[], None]:
        rebuild_main, rebuild_caches = self.main.prepare_rebuild(), super().prepare_rebuild()

        def rebuild() -> None:
            rebuild_main()
            rebuild_caches()

        return rebuild

    def drop_nulls(self) -> np.ndarray | None:
        self.main.drop_nulls()
        return super().drop_nulls()


@set_module("rlstructs.replay")
class CachedReplayBuffer(VectorReplayBuffer):
    """A `ReplayBuffer` of complete episodes, with a cache for each environment.

    An episode of the main buffer lies in one piece. Rows are added to the caches. The row that ends an episode moves
    all of it to the main buffer. Row ids count from the main buffer to the caches. Samples are of all rows. It is for
    one thread: episodes move.

    Args:
        main_buffer: a plain `ReplayBuffer`, which keeps its rows; of size 0 to drop complete episodes.
        cached_buffer_num: number of environments.
        max_episode_length: rows of a cache; a longer episode is an error.

    Raises:
        TypeError, SpecError: an argument is invalid.

    Example:
        >>> buffer = CachedReplayBuffer(ReplayBuffer(10), cached_buffer_num=2, max_episode_length=5)
        >>> def add(terminated):
        ...     zeros = [0, 0]
        ...     return buffer.add(
        ...         {"obs": [1, 2], "act": zeros, "rew": [1, 1], "terminated": terminated, "truncated": zeros}
        ...     )
        >>> add([0, 0])[0], add([0, 1])[0]  # row ids
        (array([10, 15]), array([11,  1]))
        >>> buffer.sample_indices(0), buffer.unfinished_index(), len(buffer.main_buffer)
        (array([ 0,  1, 10, 11]), array([11]), 2)
    """

    _keeps_dropped = True  # as programs for tianshou expect, which read caches without asking what is in them

    def __init__(self, main_buffer: ReplayBuffer, cached_buffer_num: int, max_episode_length: int) -> None:
        if type(main_buffer) is not ReplayBuffer:
            raise TypeError(f"main_buffer must be a plain ReplayBuffer, got {type(main_buffer).__name__}")
        n = check_count("cached_buffer_num", cached_buffer_num)
        length = check_count("max_episode_length", max_episode_length)
        self.main_buffer = main_buffer
        seed, device = int(main_buffer._rng.integers(2**63 - 1)), main_buffer._export.device
        super().__init__(n * length, n, random_seed=seed, device=device, **vars(main_buffer._options))
        self._table = table = JoinedTable(main_buffer._table, self._storage, length)
        self._intake = CachedIntake(table, type(self).__name__, self._options, main_buffer._intake)
        self._reader = Reader(table, self._options, self._export, self._stream)
        self._editor = CachedEditor(table, self._intake, main_buffer._editor)

    def __len__(self) -> int:
        return len(self.main_buffer) + super().__len__()

    @property
    def nbytes(self) -> int:
        return self.main_buffer.nbytes + super().nbytes

    @property
    def cached_buffer_num(self) -> int:
        """Number of caches."""
        return self._n_lanes

    @property
    def max_episode_length(self) -> int:
        """Rows of a cache."""
        return self._table.lane_size

    @property
    def cached_buffers(self) -> np.ndarray:
        """The caches as views; see `VectorReplayBuffer.buffers`."""
        return super().buffers

    @property
    def buffers(self) -> np.ndarray:
        """The main buffer, and the caches as views; see `VectorReplayBuffer`."""
        views = np.empty(1 + self._n_lanes, object)
        views[0], views[1:] = self.main_buffer, self.cached_buffers
        return views

    # Files

    def _inner(self) -> dict[str, Buffer]:
        return {"main": self.main_buffer}

    def _settings(self) -> dict[str, Any]:
        own = {"cached_buffer_num": self._n_lanes, "max_episode_length": self.max_episode_length}
        return {"main": self.main_buffer._settings(), **own, "stack_num": self.stack_num}

    @classmethod
    def _of_settings(cls, settings: Any, given: Mapping[str, Any]) -> Self:
        main = ReplayBuffer(**settings["main"], **given)
        buffer = cls(main, settings["cached_buffer_num"], settings["max_episode_length"])
        buffer.stack_num = settings["stack_num"]
        return buffer
