"""The parts of a buffer: storage, sampler, writer and transforms.

`Assembly` exchanges them, and has what they share; `EpisodeMarks` finds where episodes end and begin.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlstructs.errors import SpecError
from rlstructs.replay.draw.reading import DISCOUNT, Reading
from rlstructs.replay.intake.arrays import find_marks
from rlstructs.replay.intake.roles import ends_among
from rlstructs.replay.leave.export import Exporter
from rlstructs.replay.rows.copies import lock_that_forks
from rlstructs.replay.rows.spec import Spec
from rlstructs.replay.rows.step_writer import StepWriter
from rlstructs.replay.rows.store import Storage
from rlstructs.replay.torchrl.given_rows import Axes, GivenRows, restore_form
from rlstructs.replay.torchrl.part import create_part
from rlstructs.replay.torchrl.samplers import INDEX, RandomSampler, Sampler
from rlstructs.replay.torchrl.storages import ReplayStorage
from rlstructs.replay.torchrl.transforms import Compose, Inverted, as_transform
from rlstructs.replay.torchrl.writers import RoundRobinWriter, Writer, to_host
from rlstructs.seeding import Stream

# torchrl's columns of trajectory ids: where the id changes, an episode begins.
TRAJECTORY_IDS = ("collector/traj_ids", "episode")


@dataclass(eq=False)
class Assembly:
    """The parts of a buffer, and the objects that they share.

    Attributes:
        storage, sampler, writer, transform: the parts.
        reading: how rows are read when they are sampled.
        batch_size: of samples; None if it was not given.
        priority_key: the column of new priorities.
        lock: held while rows are written, drawn or read.
        axes: axes of the `TensorDict`s that batches become if the first rows were some; None for a `DictTensor`.
        quick: writes one row that only has to be copied; None if not known yet, False if no row is like that.
        store: the rows.
        export: makes batches of arrays.
        stream: draws rows.
        marks: where episodes end and begin.
    """

    storage: ReplayStorage
    sampler: Sampler
    writer: Writer
    transform: Compose
    reading: Reading
    batch_size: int | None
    priority_key: str
    lock: Any = field(default_factory=lock_that_forks)
    axes: Axes | None = None
    quick: StepWriter | bool | None = None
    store: Storage = field(init=False)
    export: Exporter = field(init=False)
    stream: Stream = field(init=False)
    marks: EpisodeMarks = field(init=False)

    def start(self, store: Storage, export: Exporter, owner: Any) -> None:
        """Gives the parts to a buffer with this store."""
        self.store, self.export, self.marks = store, export, EpisodeMarks(store, self.sampler)
        self.marks.are_known = self.marks.are_in(store.columns.specs)  # those of a folder
        store.alignment, store.max_size = self.storage.alignment, self.storage.max_size
        self.sampler.start(store, self.storage.max_size)
        self.writer.changed()
        self.belong(owner)

    def belong(self, owner: Any) -> None:
        """Attaches the parts to a buffer; None detaches them."""
        for each in (self.storage, self.sampler, self.writer):
            each.belong(owner)

    @property
    def specs(self) -> dict[str, Spec]:
        """The specs of the columns."""
        return self.store.columns.specs

    def reserved_names(self) -> set[str]:
        """Returns the names that samples have beside the columns."""
        return {INDEX, *self.sampler.fields} | (set() if self.reading.n_step == 1 else {DISCOUNT})

    def hand_over(self, arrays: dict[str, Any], n_axes: int = 1) -> Any:
        """Makes a batch of private arrays, in the form of the first rows.

        `n_axes` is the number of axes that index rows.
        """
        return restore_form(self.export(arrays, self.specs), self.axes, n_axes)

    def note_change(self) -> None:
        """Forgets everything that was computed from the parts.

        It is called when a part was exchanged.
        """
        self.store.clock.count_draws()
        self.quick = None

    def check(self, sampler: Sampler, writer: Writer, owner: Any) -> None:
        """Raises SpecError if these do not fit, or belong to another buffer."""
        for each in (self.storage, sampler, writer):
            each.check_free(owner)
        if sampler.drop_last and self.batch_size is None:
            raise SpecError("drop_last needs the batch_size of the buffer: it drops smaller batches")
        if not writer.keeps_order and (sampler.needs_episodes or not self.reading.is_plain):
            raise SpecError(f"the rows of a {type(writer).__name__} have no order: no slices, n_step or stacks of them")

    def insert(self, index: int | None, transform: Any, invert: bool) -> None:
        """Inserts a transform before the `index`-th, or after the last one."""
        transform = as_transform(transform)
        with self.lock:
            changed = Compose(*self.transform.parts)  # batches that are being made keep the old one
            changed.insert(len(changed) if index is None else index, Inverted(transform) if invert else transform)
            self.transform = changed
            self.note_change()

    def set_sampler(self, sampler: Any, owner: Any) -> None:
        """Exchanges the sampler of the buffer `owner`."""
        sampler = create_part("sampler", sampler, Sampler, RandomSampler)
        with self.lock:
            self.check(sampler, self.writer, owner)
            if self.specs:
                sampler.check_keys(self.specs)
                if taken := sorted(set(sampler.fields) & set(self.specs)):
                    raise SpecError(f"key(s) {taken} are stored, and this sampler has {taken} of its own")
            sampler.start(self.store, self.storage.max_size)
            before = self.marks.read()
            self.sampler.belong(None)
            sampler.belong(owner)
            self.sampler = self.marks.sampler = sampler
            self.note_change()
            if sampler.end_key is not None or sampler.traj_key is not None:
                self.marks.recompute(*before)
                self.marks.are_known = True

    def set_writer(self, writer: Any, owner: Any) -> None:
        """Exchanges the writer of the buffer `owner`."""
        writer = create_part("writer", writer, Writer, RoundRobinWriter)
        with self.lock:
            self.check(self.sampler, writer, owner)
            self.writer.belong(None)
            writer.belong(owner)
            writer.changed()
            self.writer = writer
            self.note_change()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "lock": None, "quick": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lock=lock_that_forks())


class EpisodeMarks:
    """Finds where episodes end and begin.

    Args:
        store: the rows.
        sampler: its `end_key` and `traj_key` are further columns with ends and starts.

    Attributes:
        are_known: whether any column or batch has said where episodes end.
    """

    def __init__(self, store: Storage, sampler: Sampler) -> None:
        self._store, self.sampler, self.are_known = store, sampler, False

    def end_keys(self, names: Collection[str]) -> list[str]:
        """Lists the columns that end an episode where they are true."""
        more, ends = self.sampler.end_key, ends_among(names)
        return ends if more is None or more in ends or more not in names else [*ends, more]

    def id_keys(self, names: Collection[str]) -> list[str]:
        """Lists the columns that begin an episode where they change."""
        own = self.sampler.traj_key
        return [name for name in (TRAJECTORY_IDS if own is None else (own,)) if name in names]

    def are_in(self, names: Collection[str]) -> bool:
        """Whether one of these columns says where episodes end or begin."""
        return bool(self.end_keys(names) or self.id_keys(names))

    def are_changed(self, block: Mapping[str, Any], rows: np.ndarray) -> bool:
        """Whether new values of rows would change ends or starts of episodes.

        `block` has the values (n, ...) by column.
        """
        names, columns = [*self.end_keys(block), *self.id_keys(block)], self._store.columns
        held = self._store.gather(names, rows)
        return any(
            not np.array_equal(to_host(columns, name, block[name]), to_host(columns, name, values))
            for name, values in zip(names, held, strict=True)
        )

    def find(self, block: Mapping[str, Any], rows: GivenRows) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Marks ends and starts of episodes in rows about to be written.

        Returns bool (1, n) each; None for nowhere.

        Args:
            block: name -> (1, n, ...), the rows in the form that columns take.
            rows: the rows as they were given.
        """
        own = find_marks({name: block[name] for name in self.end_keys(block)})
        done = [marks for marks in (rows.done, None if own is None else own[0]) if marks is not None]
        starts = [] if rows.starts is None else [rows.starts]
        for name in self.id_keys(block):
            ids = to_host(self._store.columns, name, block[name][0])
            changes = _find_changes(ids)
            if n_rows := len(self._store):
                newest = self._store.view().row_ids(np.array([n_rows - 1]))
                changes[0] = (self._read_ids(name, newest)[0] != ids[0]).any()
            starts.append(changes)
        self.are_known |= bool(done or starts)
        return _join(done), _join(starts)

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Marks rows that end an episode, and rows with a new id.

        Every row is marked, the oldest first; bool (n,) each.
        """
        rows, specs = self._store.view().every_row(), self._store.columns.specs
        ends = find_marks({name: self._store.gather([name], rows)[0] for name in self.end_keys(specs)}, 1)
        changes = np.zeros(rows.size, bool)
        for name in self.id_keys(specs):
            changes |= _find_changes(self._read_ids(name, rows))
        return np.zeros(rows.size, bool) if ends is None else ends, changes

    def recompute(self, ends: np.ndarray, changes: np.ndarray) -> None:
        """Recomputes all episodes after columns, or the sampler, have changed.

        It takes the result of `read` before the change.
        """
        rows = self._store.view().every_row()
        # Episodes that began for another reason, as each trajectory of a batch does, still begin there.
        begins = self._store.track_episodes().begin(rows) & ~changes
        begins[1:] &= ~ends[:-1]
        done, changed = self.read()
        done[:-1] |= (begins | changed)[1:]
        by_slot = np.zeros((1, self._store.columns.capacity), bool)
        by_slot[0, rows] = done
        self._store.rebuild_episodes(by_slot)
        self.sampler.reordered()

    def _read_ids(self, name: str, rows: np.ndarray) -> np.ndarray:
        return to_host(self._store.columns, name, self._store.gather([name], rows)[0])


def _join(marks: list[np.ndarray]) -> np.ndarray | None:
    """Joins marks by "or", bool (1, n); None if there are none."""
    return np.asarray(np.logical_or.reduce(marks))[None] if marks else None


def _find_changes(ids: np.ndarray) -> np.ndarray:
    """Marks rows that differ from the one before, bool (n,).

    The first row is not marked.
    """
    changes = np.zeros(len(ids), bool)
    changes[1:] = (ids[1:] != ids[:-1]).any(axis=tuple(range(1, ids.ndim)))
    return changes
