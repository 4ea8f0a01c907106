"""How rows come into a `DictTensorReplayBuffer`, and what is known of their episodes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rlstructs.errors import MissingKeyError, OutOfMemoryError, SpecError
from rlstructs.replay.array_dict import ArrayDict
from rlstructs.replay.buffer import ERROR, Buffer
from rlstructs.replay.export import Exporter
from rlstructs.replay.from_trajectories import take_trajectories
from rlstructs.replay.given import flat_items
from rlstructs.replay.reading import DISCOUNT
from rlstructs.replay.roles import ends_among
from rlstructs.replay.step_writer import StepWriter
from rlstructs.replay.torchrl.batches import Rows, rows_of, rows_of_steps, with_axis
from rlstructs.replay.torchrl.prioritized_sampler import PrioritizedSampler
from rlstructs.replay.torchrl.samplers import INDEX, WEIGHT, Sampler
from rlstructs.replay.torchrl.storages import ReplayStorage
from rlstructs.replay.torchrl.tensordicts import Axes, as_given, axes_of, refuse_tensorclass
from rlstructs.replay.torchrl.transforms import Compose
from rlstructs.replay.torchrl.writers import Writer
from rlstructs.replay.values import find_marks, host_array
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.trajectories import Trajectories

# Columns of trajectory ids as torchrl has them: another id than in the row before begins an episode.
TRAJECTORY_IDS = ("collector/traj_ids", "episode")


class DictTensorRows(Buffer):
    """What is written; see `DictTensorReplayBuffer`."""

    _settings: ReplayStorage
    _sampler: Sampler
    _writer: Writer
    _transform: Compose
    _priority_key: str
    _lock: Any  # held while rows are written, drawn or read
    _n_written = 0
    # Axes of the batches that leave as a `TensorDict`, as their rows came; None for a `DictTensor`.
    _axes: Axes | None = None
    _knows_episodes = False
    # The row ids of the last write, and which steps they are: a row id alone may mean what was drawn before.
    _written: tuple[np.ndarray, np.ndarray] | None = None
    # What writes one plain row; None before it is known, False if there are no plain rows.
    _quick: StepWriter | bool | None = None

    @property
    def write_count(self) -> int:
        """Rows that were kept since the buffer was made or emptied, those that are gone included."""
        return self._n_written

    # Writing

    def add(self, data: Any) -> int:
        """Adds one row.

        Args:
            data: a mapping of names to values without a batch axis; what is nested has names joined with `/`.

        Returns:
            Its row id; -1 if a transform or the writer did not take it.

        Raises:
            TypeError, SpecError, MissingKeyError, StateError: it does not fit; nothing has changed.
        """
        quick = self._quick
        if quick and type(data) is dict and (row_id := self._add_quickly(data)) is not None:
            return row_id
        refuse_tensorclass(data, "add")
        row = flat_items(data, "add")
        if quick and (row_id := self._add_quickly(row)) is not None:  # now that it is flat
            return row_id
        given = Rows({name: with_axis(name, value) for name, value in row.items()}, 1)
        rows = self._store(given, "add", came_as=data, n_more=1)
        return int(rows[0]) if rows.size else -1

    def extend(self, tensordicts: Any, update_priority: bool | None = None) -> torch.Tensor:
        """Adds rows.

        Args:
            tensordicts: a mapping of names to `(n, ...)`, a `DictTensor` or a tensordict; a `TemporalDictTensor` or
                `Trajectories`, whose valid steps are added, an episode beginning with each of their rows; or a
                list of mappings, each a row. Batches leave as tensordicts if the first rows came as such. A sample, of
                this buffer or another, is taken without its int64 `index` and weights: rows get their own here.
            update_priority: whether the column `priority_key` gives new rows their priority; None: if there is one.

        Returns:
            int64 (n,), the row id of each in order, -1 of those that were not kept.

        Raises:
            TypeError, SpecError, MissingKeyError, StateError: something does not fit; nothing has changed.
        """
        with self._lock:
            rows = self._store(rows_of(tensordicts, "extend"), "extend", update_priority, came_as=tensordicts)
        return torch.from_numpy(rows)

    def add_trajectories(self, trajectories: Trajectories, names: Mapping[str, str] | None = None) -> None:
        """Appends the valid steps of what `RL_Batcher.get` gives, one trajectory after another.

        Args:
            trajectories: a batch.
            names: name here -> key of the trajectories; None for all keys as they are.

        Raises:
            MissingKeyError, SpecError: something does not fit; the buffer is as it was.
        """
        steps = take_trajectories(trajectories, self._trajectory_names if names is None else names)
        self._store(rows_of_steps(steps), "add_trajectories")

    def empty(self, empty_write_count: bool = True) -> None:
        """Drops every row, and what samplers and writers know of them; row ids begin with 0 again.

        The first rows that come then may be of another schema: they say anew what the columns are.

        Args:
            empty_write_count: whether `write_count` does, too.

        Raises:
            StateError: the writer is an `ImmutableWriter`.
        """
        with self._lock:
            self._writer.refuse()
            self._storage.clear()
            self._sampler.cleared()
            self._writer.changed()
            self._quick = None  # what batches leave as is said anew, too
            if empty_write_count:
                self._n_written = 0

    def _to_form(self, batch: Any, n_axes: int = 1) -> Any:
        """A `DictTensor` as what rows came as, with so many axes in the place of that of the rows."""
        return as_given(batch, self._axes, n_axes)

    def _store(
        self,
        given: Rows,
        owner: str,
        update: bool | None = None,
        writer: Writer | None = None,
        came_as: Any = None,
        n_more: int = 0,
    ) -> np.ndarray:
        """Writes rows, which came as this batch, with so many axes in front that it has not; their ids, int64 (n,)."""
        with self._lock:
            if not len(self) and self.framework == "torch":  # the first rows say what batches leave as
                self._axes = axes_of(came_as, n_more)
            writer = self._writer if writer is None else writer
            writer.refuse()
            rows = self._invert_rows(given, owner)
            if rows is None or not rows.n:
                return np.zeros(0, np.int64)
            try:
                return self._write_rows(self._as_columns(rows), update, writer)
            except (SpecError, MissingKeyError):
                if len(self) or not self._specs:
                    raise
            with self._exchanging_columns():  # the buffer was emptied, and these are the first rows
                return self._write_rows(self._as_columns(rows), update, writer)

    def _write_rows(self, rows: Rows, update: bool | None, writer: Writer) -> np.ndarray:
        """Writes rows as the columns are, or makes them; nothing has changed if it raises SpecError."""
        self._check_names(rows.values)
        writer.check(rows.values, rows.n, self._specs)
        priorities = self._priorities_in(rows, update)
        if not self._specs and self._settings.settle(rows.values):
            self._storage.take_columns(self._settings.anew(self._storage.columns))
            if self.framework == "torch" and self._export.device is None:
                self._export = Exporter("torch", self._settings.device)
        block = self._checked({name: value[None] for name, value in rows.values.items()}, ERROR, ERROR)
        done, starts = self._marks(block, rows)
        self._make_room(rows.n)
        ids, replaced = writer.write(self._storage, block, rows.n, done, starts)
        self._n_written += rows.n if writer.is_plain else int((ids >= 0).sum())
        self._quick = self._find_quick_way() if self._quick is None else self._quick
        if replaced.size:
            self._sampler.replaced(self._storage, replaced)
        if isinstance(self._sampler, PrioritizedSampler):
            self._written = ids.copy(), self._span().steps(ids)
        if priorities is not None:
            assert isinstance(self._sampler, PrioritizedSampler)
            self._sampler.update(self._storage, ids, priorities, self._span().steps(ids))
        return ids

    @contextlib.contextmanager
    def _exchanging_columns(self) -> Iterator[None]:
        """Has a buffer without rows be without columns; if what is done then fails, it has those of before."""
        storage = self._storage
        before = storage.take_columns(self._settings.anew(storage.columns))
        knew_episodes, self._knows_episodes = self._knows_episodes, False
        try:
            yield
        except BaseException:
            self._settings.leave(storage.take_columns(before))
            self._knows_episodes = knew_episodes
            raise
        self._settings.leave(before)

    def _invert_rows(self, given: Rows, owner: str) -> Rows | None:
        """Rows as the transforms make them; None if one does not take them."""
        if not self._transform.has_inverse:
            return given
        batch: Any = ArrayDict({name: np.array(host_array(name, value)) for name, value in given.values.items()})
        if self.framework == "torch":
            batch = self._to_form(DictTensor({name: _private(name, value) for name, value in given.values.items()}))
        batch = self._transform.inv(batch)
        if batch is None:
            return None
        rows = rows_of(batch, owner)
        return Rows(rows.values, rows.n, given.done, given.starts) if rows.n == given.n else rows

    def _as_columns(self, rows: Rows) -> Rows:
        """Rows without what a sample holds beside columns, where the ids say that they are one."""
        index = rows.values.get(INDEX)
        if index is None or str(index.dtype).rpartition(".")[2] != "int64":
            return rows
        beside = self._beside_names() | {WEIGHT}
        if self._specs:
            beside |= self._sampler.marks(rows.values, self._specs)
        beside -= self._specs.keys()
        return replace(rows, values={name: value for name, value in rows.values.items() if name not in beside})

    def _check_names(self, values: Mapping[str, Any]) -> None:
        """Raises unless these can be the columns; once there are some, only they can."""
        if self._specs:
            return
        if not values:
            raise SpecError("a row needs a column, there is none")
        if taken := sorted(self._beside_names() & set(values)):
            raise SpecError(f"key(s) {taken} cannot be stored: samples have {taken} of their own")
        self._check_episode_keys(self._sampler, values)

    def _beside_names(self) -> set[str]:
        """What a sample holds that no column does."""
        more = () if self._reading.n_step == 1 else (DISCOUNT,)
        return {INDEX, *self._sampler.fields, *more}

    def _check_episode_keys(self, sampler: Sampler, names: Mapping[str, Any]) -> None:
        for argument, key in (("end_key", sampler.end_key), ("traj_key", sampler.traj_key)):
            if key is not None and key not in names:
                raise MissingKeyError(f"no {key!r}, the {argument} of the sampler; there are {sorted(names)}")

    def _priorities_in(self, rows: Rows, update: bool | None) -> np.ndarray | None:
        """Priorities that came with rows, float64 (n,)."""
        if not isinstance(self._sampler, PrioritizedSampler) or update is False:
            return None
        if self._priority_key in rows.values:
            return self._sampler.checked(rows.values[self._priority_key], rows.n)
        if update:
            raise MissingKeyError(f"no {self._priority_key!r} to update priorities with, got {sorted(rows.values)}")
        return None

    def _make_room(self, n_rows: int) -> None:
        columns = self._storage.columns
        if columns.capacity == self._settings.max_size:
            return
        capacity = self._settings.capacity_for(len(self) + n_rows)
        if capacity <= columns.capacity:
            return
        needed, available = columns.nbytes // columns.capacity * capacity, columns.available_bytes()
        if available is not None and needed > available:
            raise OutOfMemoryError(f"{capacity:,} rows: {needed:,} bytes are needed, {available:,} are available")
        self._storage.grow(capacity)
        self._sampler.grown(columns.n_rows)

    def _find_quick_way(self) -> StepWriter | bool:
        with_priority = isinstance(self._sampler, PrioritizedSampler) and self._priority_key in self._specs
        plain = self._writer.is_plain and not self._transform.has_inverse and not with_priority
        if not plain or self._id_keys(self._specs) or not self._storage.columns.on_host:
            return False
        return StepWriter(self._storage, self._end_keys(self._specs))

    def _add_quickly(self, row: Mapping[str, Any]) -> int | None:
        """Adds a row, if that takes no more than to copy it; its row id."""
        with self._lock:
            quick = self._quick
            if not isinstance(quick, StepWriter) or (len(self._transform) and self._transform.has_inverse):
                return None  # somebody may have put a transform into those that there are
            ring = self._storage.ring
            head, capacity = int(ring.head.item(0)), ring.capacity
            if capacity < self._settings.max_size and head - int(ring.base.item(0)) >= capacity:
                return None  # it has to grow
            if quick.write(row, is_row=True) is None:
                return None
            self._n_written += 1
            if isinstance(self._sampler, PrioritizedSampler):
                self._written = np.array([head % capacity]), np.array([head])
            return head % capacity

    # Episodes

    def _end_keys(self, names: Mapping[str, Any]) -> list[str]:
        """Columns whose truth ends an episode."""
        more, ends = self._sampler.end_key, ends_among(names)
        return ends if more is None or more in ends or more not in names else [*ends, more]

    def _id_keys(self, names: Mapping[str, Any]) -> list[str]:
        """Columns where another value than in the row before begins an episode."""
        own = self._sampler.traj_key
        return [name for name in (TRAJECTORY_IDS if own is None else (own,)) if name in names]

    def _marks(self, block: Mapping[str, Any], rows: Rows) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Where episodes end and begin in rows that are about to be written, bool (1, n) each."""
        own = find_marks({name: block[name] for name in self._end_keys(block)})
        done = [marks for marks in (rows.done, None if own is None else own[0]) if marks is not None]
        starts = [] if rows.starts is None else [rows.starts]
        for name in self._id_keys(block):
            ids = self._host(name, block[name][0])
            changes = _changes(ids)
            if len(self):
                newest = self._chronological(np.array([len(self) - 1]))
                changes[0] = (self._host(name, self._storage.gather([name], newest)[0])[0] != ids[0]).any()
            starts.append(changes)
        self._knows_episodes |= bool(done or starts)
        return _any_of(done), _any_of(starts)

    def _ends_and_changes(self) -> tuple[np.ndarray, np.ndarray]:
        """What the columns say of every row, the oldest first: whether an episode ends, whether its id is another."""
        rows = self._chronological(np.arange(len(self)))
        ends = find_marks({name: self._storage.gather([name], rows)[0] for name in self._end_keys(self._specs)}, 1)
        ends, changes = np.zeros(rows.size, bool) if ends is None else ends, np.zeros(rows.size, bool)
        for name in self._id_keys(self._specs):
            changes |= _changes(self._host(name, self._storage.gather([name], rows)[0]))
        return ends, changes

    def _recompute_episodes(self, ends: np.ndarray, changes: np.ndarray) -> None:
        """Works episodes out anew, after what `_ends_and_changes` gave has changed."""
        rows = self._chronological(np.arange(len(self)))
        # What began without the columns saying so, as each row of trajectories does, still does.
        begins = self._storage.track_episodes().begin(rows) & ~changes
        begins[1:] &= ~ends[:-1]
        done, changed = self._ends_and_changes()
        done[:-1] |= (begins | changed)[1:]
        by_slot = np.zeros((1, self._storage.columns.capacity), bool)
        by_slot[0, rows] = done
        self._storage.rebuild_episodes(by_slot)
        self._sampler.reordered()

    def _host(self, name: str, values: Any) -> np.ndarray:
        """Values of a column, or those that are about to become some, in host memory."""
        return values if isinstance(values, np.ndarray) else self._storage.columns.host(name, values)

    def _chronological(self, numbers: np.ndarray) -> np.ndarray:
        """The row ids of rows by number, the oldest has 0."""
        return self._span().row_ids(numbers)


def _private(name: str, value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if "bfloat16" in str(value.dtype):
        return torch.from_numpy(np.array(host_array(name, value))).bfloat16()
    return torch.from_numpy(np.array(host_array(name, value)))


def _any_of(marks: list[np.ndarray]) -> np.ndarray | None:
    """Where one of them is, bool (1, n); None of none."""
    return np.asarray(np.logical_or.reduce(marks))[None] if marks else None


def _changes(ids: np.ndarray) -> np.ndarray:
    """Where a row differs from the one before it, bool (n,); the first does not."""
    changes = np.zeros(len(ids), bool)
    changes[1:] = (ids[1:] != ids[:-1]).any(axis=tuple(range(1, ids.ndim)))
    return changes
