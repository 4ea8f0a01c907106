"""The parts of a buffer: storage, sampler, writer and transforms.

`Assembly` exchanges them, and has what they share.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlstructs.errors import SpecError
from rlstructs.replay.draw.reading import DISCOUNT, Reading
from rlstructs.replay.leave.export import Exporter
from rlstructs.replay.rows.copies import lock_that_forks
from rlstructs.replay.rows.spec import Spec
from rlstructs.replay.rows.step_writer import StepWriter
from rlstructs.replay.rows.store import Storage
from rlstructs.replay.torchrl.episode_marks import EpisodeMarks
from rlstructs.replay.torchrl.given_rows import Axes, restore_form
from rlstructs.replay.torchrl.part import create_part
from rlstructs.replay.torchrl.samplers import INDEX, RandomSampler, Sampler
from rlstructs.replay.torchrl.storages import ReplayStorage
from rlstructs.replay.torchrl.transforms import Compose, Inverted, as_transform
from rlstructs.replay.torchrl.writers import RoundRobinWriter, Writer
from rlstructs.seeding import Stream


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
