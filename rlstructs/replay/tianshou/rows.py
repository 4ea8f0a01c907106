"""Writing for tianshou's buffers: lanes of transitions, with the return and length of each running episode."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import numpy as np

from rlstructs.checks import check_count, check_size
from rlstructs.errors import SpecError, StateError
from rlstructs.public_names import set_module
from rlstructs.replay.array_dict import ArrayDict
from rlstructs.replay.blocks import as_slice, rounds
from rlstructs.replay.buffer import ERROR, FILL, GROW
from rlstructs.replay.claims import MOST, Claims, check_aligned
from rlstructs.replay.columns import Spec
from rlstructs.replay.from_trajectories import Steps
from rlstructs.replay.given import plain_items
from rlstructs.replay.reading import Reading, Source
from rlstructs.replay.snapshot import AnySnapshot, Snapshot
from rlstructs.replay.step_writer import StepWriter
from rlstructs.replay.tianshou import transitions
from rlstructs.replay.tianshou.checked_rows import CheckedRows
from rlstructs.replay.tianshou.foreign import check_arguments
from rlstructs.replay.tianshou.reading import sources_of
from rlstructs.replay.tianshou.running import Running
from rlstructs.replay.tianshou.transitions import DONE, FLAGS, OBS_NEXT, REW
from rlstructs.replay.values import generator_of, host_array

Added = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class _Known(NamedTuple):
    """Facts derived from the columns, valid while their `layout` is the same."""

    layout: int
    names: list[str]
    specs: dict[str, Spec]
    sources: dict[str, Source]


@set_module("rlstructs.replay")
class MalformedBufferError(StateError):
    """Raised when an episode is longer than the rows reserved for it."""


class EpisodeRows(CheckedRows):
    """Lanes of transitions; see `ReplayBuffer` for the arguments."""

    # tianshou's attributes, for programs that read them; other keys of a batch become columns too.
    _reserved_keys, _required_keys_for_add = transitions.RESERVED, transitions.REQUIRED
    # Number of lanes; subclasses with several set it before they call this constructor.
    _n_lanes = 1
    # Whether a batch always has an axis for lanes.
    _is_stacked = False

    def __init__(
        self,
        size: int | None = None,
        stack_num: int = 1,
        ignore_obs_next: bool = False,
        save_only_last_obs: bool = False,
        sample_avail: bool = False,
        random_seed: np.random.Generator | int | None = 42,
        *,
        framework: str = "numpy",
        device: Any = None,
        n_step: int = 1,
        gamma: float = 0.99,
        new_keys: str = GROW,
        missing_keys: str = FILL,
        **unknown: NoReturn,
    ) -> None:
        check_arguments(type(self).__name__, size, stack_num, unknown)
        # One of size 0 is a placeholder; no store is that small.
        is_zero = isinstance(size, (int, np.integer)) and not isinstance(size, bool) and size == 0
        self._lane_size = 0 if is_zero else check_size("size", size)
        if new_keys not in (ERROR, GROW) or missing_keys not in (ERROR, FILL):
            raise SpecError(
                f"new_keys must be {ERROR!r} or {GROW!r} and missing_keys {ERROR!r} or {FILL!r}, "
                f"got {new_keys!r} and {missing_keys!r}"
            )
        capacity, seed, reading = max(self._lane_size, 1), generator_of(random_seed), Reading(n_step, gamma)
        super().__init__(
            self._n_lanes, capacity, seed=seed, framework=framework, device=device, reading=reading
        )
        self.stack_num = stack_num
        self.ignore_obs_next, self.save_only_last_obs = bool(ignore_obs_next), bool(save_only_last_obs)
        self.sample_avail = bool(sample_avail)
        self._unknown, self._missing = new_keys, missing_keys
        self._ignored = frozenset([DONE, OBS_NEXT] if ignore_obs_next else [DONE])
        self._running = Running(self._n_lanes)
        self._step_writer = StepWriter(self._storage, FLAGS)
        self._every_lane = list(range(self._n_lanes))
        self._find_begins()
        self._drop_caches()

    def _drop_caches(self) -> None:
        """Drops caches and values that are not saved."""
        # Values that `rew` returns instead of the stored rewards, (maxsize, ...).
        self._stand_in: np.ndarray | None = None
        self._known: _Known | None = None

    @property
    def stack_num(self) -> int:
        """Number of rows that a read observation consists of; may be set at any time."""
        return self._reading.stack_num

    @stack_num.setter
    def stack_num(self, stack_num: int) -> None:
        self._reading = replace(self._reading, stack_num=check_count("stack_num", stack_num))

    @property
    def options(self) -> dict[str, Any]:
        """The current values of tianshou's settings, without `framework`, `n_step` and other own ones."""
        names = ("stack_num", "ignore_obs_next", "save_only_last_obs", "sample_avail")
        return {name: getattr(self, name) for name in names}

    @property
    def maxsize(self) -> int:
        """Capacity in rows."""
        return self._n_lanes * self._lane_size

    @property
    def _size(self) -> int:
        """The number of rows, under tianshou's name."""
        return len(self)

    @property
    def last_index(self) -> np.ndarray:
        """The newest row of each lane, int64 (n_lanes,); the first slot of an empty lane."""
        return self._rows().newest()

    @property
    def subbuffer_edges(self) -> np.ndarray:
        """The first row id of each lane, and the end of the last lane, int64 (n_lanes + 1,)."""
        return np.arange(self._n_lanes + 1) * self._lane_size

    def _rows(self) -> AnySnapshot:
        """A snapshot of the rows."""
        return self._own_rows()

    def _own_rows(self) -> Snapshot:
        return Snapshot(self._storage)

    def _names(self) -> list[str]:
        """The keys of a batch: the columns, and keys that are computed from them."""
        return self._look().names

    @property
    def _known_specs(self) -> dict[str, Spec]:
        """The specs of the keys of a batch."""
        return self._look().specs

    def _look(self) -> _Known:
        """The facts about the current columns."""
        known, columns = self._known, self._storage.columns
        if known is None or known.layout != columns.layout:
            layout, specs = columns.layout, columns.specs
            names = transitions.names_of(specs)
            known = self._known = _Known(
                layout, names, transitions.specs_of(specs, names), sources_of(names, specs)
            )
        return known

    # Writing

    def add(self, batch: Any, buffer_ids: Any = None) -> Added:
        """Appends one transition to each of some lanes.

        Args:
            batch: a mapping with `obs`, `act`, `rew`, `terminated`, `truncated`, and whatever else; arrays of numbers
                of any library, possibly nested, and `info` of anything. `done` is ignored: it follows from them.
            buffer_ids: the lane of each row of `batch`, whose arrays have a first axis for them; None for each lane
                once. A repeated lane gets its rows in order. For a buffer of one lane, None if the arrays have no
                such axis, or `[0]` if they have.

        Returns:
            Four arrays with one entry per row: its row id, int64; the return of the episode that ends with it, float64,
            and the length of that episode, int64, both 0 if none ends; and the row id of the oldest present row of its
            episode, int64. Return and length count all rows of the episode, overwritten ones too.

        Raises:
            SpecError, MissingKeyError, IndexError: an argument does not fit; nothing is added.
            StateError: the size is 0.
        """
        with self._storage.lock:  # a file holds returns and lengths as they are with all of these rows, or none
            if self._is_every_lane(buffer_ids) and (added := self._add_quickly(batch, buffer_ids)) is not None:
                return added
            return self._add_converted(batch, buffer_ids)

    def _add_converted(self, batch: Any, buffer_ids: Any) -> Added:
        self._require_room()
        lanes, n_axes = self._choose_lanes(buffer_ids)
        rows = transitions.as_transitions(batch, "add", self._ignored, n_axes, self.save_only_last_obs)
        transitions.check_required(rows)
        for name, values in rows.items():
            if len(values) != len(lanes):
                raise SpecError(f"{name!r} has {len(values)} rows, needed is one for each of {len(lanes)} lanes")
        if not lanes.size:  # empty lists do not say what they hold
            return np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64)
        done = transitions.ends_of(rows)
        self._check_room(lanes, done)
        block = self._checked({name: values[:, None] for name, values in rows.items()}, self._unknown, self._missing)
        return self._write_rows(block, lanes, self._rewards(rows[REW]), done)

    def _check_room(self, lanes: np.ndarray, done: np.ndarray) -> None:
        """Raises MalformedBufferError if one more row of each of these lanes cannot be taken."""

    def _is_every_lane(self, buffer_ids: Any) -> bool:
        """Whether these are all lanes, each once and in order."""
        if buffer_ids is None:
            return True
        if isinstance(buffer_ids, np.ndarray) and buffer_ids.dtype.kind in "iu":
            buffer_ids = buffer_ids.tolist()
        # Types first: other objects may define == in their own way, or raise.
        is_plain = type(buffer_ids) is list and all(type(lane) is int for lane in buffer_ids)
        return is_plain and bool(buffer_ids == self._every_lane)

    def _add_quickly(self, batch: Any, buffer_ids: Any) -> Added | None:
        """Adds one row to each lane if no conversion is needed; otherwise changes nothing and returns None."""
        if type(batch) not in (dict, ArrayDict) or self.save_only_last_obs or not self._lane_size:
            return None
        flat: Mapping[str, Any] | None = batch
        if type(batch) is ArrayDict:  # whose length is that of its rows
            flat = batch._arrays()
        elif dict in map(type, batch.values()):
            flat = plain_items(batch)
        if flat is None:
            return None
        if not self._ignored.isdisjoint(flat):
            flat = {name: values for name, values in flat.items() if name not in self._ignored}
        heads = self._storage.ring.head.copy()
        rows = self._step_writer.write(flat, is_row=buffer_ids is None and not self._is_stacked)
        if rows is None:
            return None
        rewards = self._rewards(rows[REW])
        if rewards.shape == (1,):
            return self._result_of_one(heads.item(), rewards.item(), any(rows[flag].item() for flag in FLAGS))
        self._running.shape(rewards.shape[1:])
        return self._result(slice(None), heads, rewards, transitions.ends_of(rows))

    def _write_rows(self, block: Mapping[str, Any], lanes: np.ndarray, rewards: np.ndarray, done: np.ndarray) -> Added:
        """Writes checked rows `(n, 1, ...)`, those of a repeated lane in order."""
        self._running.shape(rewards.shape[1:])
        counts = np.empty((3, len(lanes)), np.int64)
        index, ep_return, ep_len, start = counts[0], np.empty(rewards.shape), counts[1], counts[2]
        for part in rounds(lanes):
            heads = self._storage.ring.head[lanes[part]]
            rows = {name: values[part] for name, values in block.items()}
            self._storage.write(rows, as_slice(lanes[part]), done=done[part][:, None])
            index[part], ep_return[part], ep_len[part], start[part] = self._result(
                lanes[part], heads, rewards[part], done[part]
            )
        return index, ep_return, ep_len, start

    def _result(self, lanes: slice | np.ndarray, heads: np.ndarray, rewards: np.ndarray, done: np.ndarray) -> Added:
        """The result of `add` for one row written to each of these lanes, whose heads were `heads`."""
        columns, ring = self._storage.columns, self._storage.ring
        ep_return, ep_len = self._running.add(lanes, rewards, done)
        begins = self._begins[lanes]
        starts = np.maximum(begins, ring.oldest()[lanes])
        self._begins[lanes] = np.where(done, heads + 1, begins)
        return columns.at_steps(lanes, heads), ep_return, ep_len, columns.at_steps(lanes, starts)

    def _result_of_one(self, head: int, reward: float, done: bool) -> Added:
        """`_result` for a single lane, in a third of the time."""
        capacity = self._storage.ring.capacity
        ep_return, ep_len = self._running.add_one(reward, done)
        start = max(self._begins.item(), head + 1 - capacity)
        if done:
            self._begins[0] = head + 1
        return np.array([head % capacity]), np.array([ep_return]), np.array([ep_len]), np.array([start % capacity])

    def _find_begins(self) -> None:
        """Finds the first step of the unfinished episode of each lane, or of its next one."""
        assert self._storage.episodes is not None
        self._begins = self._storage.ring.head - self._storage.episodes.open_lengths(slice(None))

    def _rewards(self, values: Any) -> np.ndarray:
        return np.asarray(host_array(REW, values), np.float64)

    def _require_room(self) -> None:
        if not self._lane_size:
            raise StateError("a buffer of size 0 takes no rows")

    def _choose_lanes(self, buffer_ids: Any) -> tuple[np.ndarray, int]:
        """The lanes, and the number of axes that a batch has for them."""
        if buffer_ids is None:
            return np.zeros(1, np.int64), 0
        ids = host_array("buffer_ids", buffer_ids)
        if ids.shape != (1,) or ids.dtype.kind not in "iu" or ids[0] != 0:
            raise SpecError(f"buffer_ids must be None or [0] for a buffer of one lane, got {buffer_ids!r}")
        return np.zeros(1, np.int64), 1

    def _find_end_columns(self, names: Iterable[str]) -> list[str]:
        return [name for name in FLAGS if name in names]

    def _check_steps(self, steps: Steps) -> None:
        self._require_room()

    def _write_steps(self, block: Mapping[str, Any], steps: Steps) -> None:
        ring, lanes, lengths = self._storage.ring, steps.lanes, steps.lengths
        before = ring.head - self._begins
        super()._write_steps(block, steps)
        rewards = self._rewards(steps.values[REW])
        self._running.shape(rewards.shape[2:])
        self._find_begins()
        after, n_new = ring.head - self._begins, np.bincount(lanes, lengths, self._n_lanes)
        goes_on = (n_new == 0) | (after == before + n_new)
        if steps.starts is not None:
            _, first = np.unique(lanes, return_index=True)  # the first trajectory of each lane
            goes_on[lanes[first]] &= ~steps.starts[first, 0]
        self._running.add_many(np.repeat(lanes, lengths), rewards[steps.valid()], after, goes_on)

    def _trajectory_names(self, keys: Collection[str]) -> dict[str, str]:
        return transitions.trajectory_names(keys, self.ignore_obs_next)

    def _prepare_column(self, name: str, values: Any) -> Any:
        return transitions.as_column(name, values, 2, self.save_only_last_obs)

    def reset(self, keep_statistics: bool = False) -> None:
        """Drops every row.

        Args:
            keep_statistics: whether to continue the returns and lengths of unfinished episodes.
        """
        self._storage.clear()
        self._find_begins()
        if not keep_statistics:
            self._running.clear()

    def _recount(self) -> None:
        """Recomputes returns and lengths after rows have changed."""
        rows = self._own_rows()
        self._find_begins()
        self._running.clear()
        if REW not in self._specs or not rows.total:
            return
        every = rows.every_row()
        rewards = transitions.raw_numbers(rows.gather([REW], every)[0], self._specs[REW])
        self._running.shape(self._specs[REW].shape)
        begun = np.zeros(self._n_lanes, bool)
        open_lengths, lanes = self._storage.ring.head - self._begins, self._storage.columns.lanes(every)
        self._running.add_many(lanes, self._rewards(rewards), open_lengths, begun)

    # Files and pickles

    def _more_arrays(self) -> dict[str, np.ndarray]:
        return self._running.arrays()

    def _check_columns(self, specs: Mapping[str, Spec]) -> None:
        transitions.check_specs(specs, self._beside_names())

    def _restorer(
        self, state: Mapping[str, Any], arrays: Mapping[str, np.ndarray], claims: Claims
    ) -> Callable[[], None]:
        check_aligned(claims.ring)
        running, returns, lengths = Running(self._n_lanes), arrays["returns"], arrays["lengths"]
        shapes = returns.shape[:1] == lengths.shape == running.lengths.shape
        shapes &= REW not in claims.specs or returns.shape[1:] in ((), claims.specs[REW].shape)
        shapes &= returns.dtype == np.float64 and lengths.dtype == np.int64
        if not shapes or not ((lengths >= 0) & (lengths <= MOST)).all():
            raise ValueError("its returns and lengths of episodes are not what they can be")
        running.returns, running.lengths = returns, lengths

        def restore() -> None:
            self._running = running
            self._find_begins()
            self._drop_caches()

        return restore

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {name: value for name, value in state.items() if name not in ("_stand_in", "_known")}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        super().__setstate__(state)
        self._drop_caches()
