"""`CachedReplayBuffer`: unfinished episodes wait in caches of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rlstructs.checks import check_count
from rlstructs.errors import SpecError, StateError
from rlstructs.public_names import set_module
from rlstructs.replay.blocks import rounds
from rlstructs.replay.buffer import Buffer
from rlstructs.replay.columns import Spec
from rlstructs.replay.from_trajectories import Steps
from rlstructs.replay.info_columns import OBJECTS, Plan, adopt
from rlstructs.replay.roles import is_info
from rlstructs.replay.snapshot import AnySnapshot, JoinedSnapshot
from rlstructs.replay.tianshou.lazy_column import LazyColumn, read_only
from rlstructs.replay.tianshou.reads import Fields, Pick
from rlstructs.replay.tianshou.replay_buffer import ReplayBuffer
from rlstructs.replay.tianshou.rows import Added, MalformedBufferError
from rlstructs.replay.tianshou.transitions import REW
from rlstructs.replay.tianshou.vector import VectorReplayBuffer
from rlstructs.replay.widening import widened

if TYPE_CHECKING:
    from typing_extensions import Self

# Bytes of a row up to which a column is joined when it is read, as compiled code and torch need it: those of a reward,
# of flags, of a small action or observation.
LARGEST_JOINED = 64


@set_module("rlstructs.replay")
class CachedReplayBuffer(VectorReplayBuffer):
    """A `ReplayBuffer` of complete episodes only, each in one piece, and a cache for each of several environments.

    Rows are added to the caches. With the row that ends an episode all of it moves to the main buffer. Row ids are
    those of the main buffer, and after them those of one cache after the other. Samples are of all rows. It is for one
    thread: episodes move.

    Args:
        main_buffer: a plain `ReplayBuffer`, of size 0 if complete episodes are not to be kept. What it holds stays.
        cached_buffer_num: environments.
        max_episode_length: rows of a cache; an episode that is longer is an error.

    Raises:
        TypeError, SpecError: an argument is not what is needed.

    Example:
        >>> buffer = CachedReplayBuffer(ReplayBuffer(10), cached_buffer_num=2, max_episode_length=5)
        >>> def add(terminated):
        ...     zeros = [0, 0]
        ...     return buffer.add(
        ...         {"obs": [1, 2], "act": zeros, "rew": [1, 1], "terminated": terminated, "truncated": zeros}
        ...     )
        >>> add([0, 0])[0], add([0, 1])[0]  # where they lie now
        (array([10, 15]), array([11,  1]))
        >>> buffer.sample_indices(0), buffer.unfinished_index(), len(buffer.main_buffer)
        (array([ 0,  1, 10, 11]), array([11]), 2)
    """

    def __init__(self, main_buffer: ReplayBuffer, cached_buffer_num: int, max_episode_length: int) -> None:
        if type(main_buffer) is not ReplayBuffer:
            raise TypeError(f"main_buffer must be a plain ReplayBuffer, got {type(main_buffer).__name__}")
        n = check_count("cached_buffer_num", cached_buffer_num)
        length = check_count("max_episode_length", max_episode_length)
        settings = main_buffer._settings()
        del settings["size"]
        self.main_buffer = main_buffer
        seed, device = int(main_buffer._rng.integers(2**63 - 1)), main_buffer._export.device
        super().__init__(n * length, n, random_seed=seed, device=device, **settings)
        if main_buffer._specs:
            super()._make(dict(main_buffer._specs))

    def __len__(self) -> int:
        return len(self.main_buffer) + super().__len__()

    @property
    def nbytes(self) -> int:
        return self.main_buffer.nbytes + super().nbytes

    @property
    def maxsize(self) -> int:
        """Rows there is room for, in the main buffer and in the caches."""
        return self.main_buffer.maxsize + super().maxsize

    @property
    def cached_buffer_num(self) -> int:
        """How many caches there are."""
        return self._n_lanes

    @property
    def max_episode_length(self) -> int:
        """Rows of a cache."""
        return self._lane_size

    @property
    def subbuffer_edges(self) -> np.ndarray:
        """Where the main buffer and each cache begin among the row ids, and where the last one ends."""
        return np.concatenate([[0], self.main_buffer.maxsize + super().subbuffer_edges])

    @property
    def buffers(self) -> np.ndarray:
        """The main buffer, and the caches as views; as of `VectorReplayBuffer`."""
        views = np.empty(1 + self._n_lanes, object)
        views[0], views[1:] = self.main_buffer, super().buffers
        return views

    def _rows(self) -> AnySnapshot:
        parts, sizes = [self.main_buffer._own_rows(), self._own_rows()], [self.main_buffer.maxsize, super().maxsize]
        return JoinedSnapshot(parts, sizes)

    def _column(self, name: str) -> np.ndarray | LazyColumn:
        column = self._gathered(name)
        if column.dtype.itemsize * math.prod(column.shape[1:]) > LARGEST_JOINED:
            return column
        return read_only(np.concatenate([self.main_buffer._column(name), super()._column(name)]))

    def _values_at(self, name: str, at: np.ndarray) -> np.ndarray:
        edge = self.main_buffer.maxsize
        is_own = at >= edge
        own = super()._values_at(name, at[is_own] - edge)
        values = np.empty((at.size, *own.shape[1:]), own.dtype)
        values[is_own] = own
        if not is_own.all():
            values[~is_own] = self.main_buffer._values_at(name, at[~is_own])
        return values

    # Writing

    def _make(self, made: dict[str, Spec]) -> None:
        theirs = self.main_buffer._specs
        if other := [name for name, spec in made.items() if theirs.get(name, spec) != spec]:
            one, its = made[other[0]], theirs[other[0]]
            raise SpecError(
                f"{other[0]!r} is {one.dtype}{list(one.shape)}, in the main buffer {its.dtype}{list(its.shape)}"
            )
        if lacking := {name: spec for name, spec in made.items() if name not in self.main_buffer._specs}:
            self.main_buffer._make(lacking)
        super()._make(made)

    def _planned(self, rows: Mapping[str, Any], n_lead: int) -> Plan:
        self._agree()
        return super()._planned(rows, n_lead)

    def _held(self, name: str) -> np.ndarray:
        return np.concatenate([self.main_buffer._held(name), super()._held(name)])

    def _adopt(self, plan: Plan) -> None:
        self.main_buffer._adopt(plan)
        super()._adopt(plan)

    def _agree(self) -> None:
        """Has the caches take what somebody let the main buffer hold of infos, and the other way round."""
        main, own = self.main_buffer._specs, self._specs
        for name in [name for name in own if is_info(name) and main.get(name, own[name]) != own[name]]:
            theirs, ours = self.main_buffer._held(name), super()._held(name)
            numbers = not (main[name].is_object or own[name].is_object) and main[name].shape == own[name].shape
            dtype = widened(theirs, ours, theirs.dtype) if numbers else None
            spec = OBJECTS if dtype is None else Spec(dtype, own[name].shape, 0)
            for buffer in (self.main_buffer, self):
                if buffer._specs[name] != spec:
                    adopt(buffer._storage, Plan({}, {name: spec}))

    def _check_room(self, lanes: np.ndarray, done: np.ndarray) -> None:
        steps = self._storage.ring.head[lanes] - self._begins[lanes]
        if (steps + len(lanes) > self._lane_size).any():  # it may be that one has no room; it costs more to know
            self._check_steps(Steps({}, 1, np.ones(len(lanes), np.int64), lanes, done[:, None]))

    def _check_steps(self, steps: Steps) -> None:
        longest = self._find_longest(steps)
        if (longest > self._lane_size).any():
            lane = steps.lanes[longest > self._lane_size][0]
            raise MalformedBufferError(
                f"environment {lane}: an episode of {longest.max()} steps or more is longer than max_episode_length, "
                f"{self._lane_size}"
            )

    def _add_quickly(self, batch: Any, buffer_ids: Any) -> Added | None:
        return None

    def _write_rows(self, block: Mapping[str, Any], lanes: np.ndarray, rewards: np.ndarray, done: np.ndarray) -> Added:
        counts = np.empty((3, len(lanes)), np.int64)
        added = counts[0], np.empty(rewards.shape), counts[1], counts[2]
        # If one comes several times then row by row, so that episodes move in the order in which they end.
        several = len(set(lanes.tolist())) < lanes.size
        parts: list[Any] = [[at] for at in range(lanes.size)] if several else [slice(None)]
        for part in parts:
            rows = {name: values[part] for name, values in block.items()}
            index, ep_return, ep_len, start = super()._write_rows(rows, lanes[part], rewards[part], done[part])
            index, start = index + self.main_buffer.maxsize, start + self.main_buffer.maxsize
            for at in np.flatnonzero(done[part]):
                start[at], index[at] = self._move(int(lanes[part][at]))
            for whole, own in zip(added, (index, ep_return, ep_len, start), strict=True):
                whole[part] = own
        return added

    def _move(self, lane: int) -> tuple[int, int]:
        """Moves the episode in a cache to the main buffer; where its first and last rows are then, -1 if nowhere."""
        main, rows = self.main_buffer._storage, self._own_rows()
        at = rows.every_row()
        at = at[self._storage.columns.lanes(at) == lane]
        placed = np.array([-1])
        if self.main_buffer.maxsize:
            names = list(self._specs)
            block = {name: values[None] for name, values in zip(names, rows.gather(names, at), strict=True)}
            done = np.zeros((1, at.size), bool)
            done[0, -1] = True
            capacity = main.columns.capacity
            placed = main.columns.at_steps(0, main.ring.head[0] + np.arange(at.size)[-capacity:])
            main.write(block, done=done, starts=(rows.prev(at) == at)[None])
            self.main_buffer._running.clear()
            self.main_buffer._find_begins()
        self._storage.clear(np.array([lane]))
        self._find_begins()
        return int(placed[0]), int(placed[-1])

    def _write_steps(self, block: Mapping[str, Any], steps: Steps) -> None:
        rewards, lanes, done = self._rewards(steps.values[REW]), steps.lanes, steps.done
        assert done is not None, "there are flags"
        for part in rounds(lanes):
            for t in range(int(steps.lengths[part].max(initial=0))):
                at = np.arange(len(lanes))[part]
                at = at[t < steps.lengths[at]]
                for lane in [] if steps.starts is None else lanes[at[steps.starts[at, t]]]:
                    self._drop(int(lane))
                rows = {name: values[at, t : t + 1] for name, values in block.items()}
                self._write_rows(rows, lanes[at], rewards[at, t], done[at, t])

    def _drop(self, lane: int) -> None:
        """Forgets an episode that another one cut short."""
        self._storage.clear(np.array([lane]))
        self._find_begins()
        self._running.returns[lane] = 0
        self._running.lengths[lane] = 0

    def reset(self, keep_statistics: bool = False) -> None:
        self.main_buffer.reset(keep_statistics)
        super().reset(keep_statistics)

    reset.__doc__ = ReplayBuffer.reset.__doc__

    # Reading and changing

    def _drawn(self, n: int, pick: Callable[[int], Pick]) -> tuple[np.ndarray, Fields, dict[str, Any]]:
        picked = pick(n)
        frames = self._frames(picked.rows, picked.at)
        return frames, picked.fields, self._read(picked.rows, frames)

    def set_batch(self, batch: Any) -> None:
        """As of `ReplayBuffer`; there must be rows: caches cannot be filled so."""
        if not len(self):
            raise StateError("set_batch: an empty CachedReplayBuffer has no rows to be changed")
        super().set_batch(batch)

    def _put(self, name: str, at: np.ndarray, values: Any) -> None:
        in_main = at < self.main_buffer.maxsize
        if in_main.any():
            self.main_buffer._put(name, at[in_main], values[in_main])
        super()._put(name, at[~in_main] - self.main_buffer.maxsize, values[~in_main])

    def _fill(self, name: str, value: Any) -> None:
        self.main_buffer._fill(name, value)
        super()._fill(name, value)

    def _rebuilder(self) -> Callable[[], None]:
        rebuild_main, rebuild_caches = self.main_buffer._rebuilder(), super()._rebuilder()

        def rebuild() -> None:
            rebuild_main()
            rebuild_caches()

        return rebuild

    def dropnull(self) -> None:
        self.main_buffer.dropnull()
        super().dropnull()

    dropnull.__doc__ = ReplayBuffer.dropnull.__doc__

    # Files

    def _inner(self) -> dict[str, Buffer]:
        return {"main": self.main_buffer}

    def _settings(self) -> dict[str, Any]:
        own = {"cached_buffer_num": self._n_lanes, "max_episode_length": self._lane_size, "stack_num": self.stack_num}
        return {"main": self.main_buffer._settings(), **own}

    @classmethod
    def _of_settings(cls, settings: Any, given: Mapping[str, Any]) -> Self:
        buffer = cls(
            ReplayBuffer(**settings["main"], **given), settings["cached_buffer_num"], settings["max_episode_length"]
        )
        buffer.stack_num = settings["stack_num"]
        return buffer
