"""Base class of torchrl's buffers: the parts, rows by index, files and copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from rlstructs.files.layout import WRITERS, ending_of
from rlstructs.replay.buffer import Buffer
from rlstructs.replay.claims import Claims
from rlstructs.replay.torchrl import editing, keeping
from rlstructs.replay.torchrl.assembly import Assembly
from rlstructs.replay.torchrl.given_rows import take_rows
from rlstructs.replay.torchrl.part import join_key
from rlstructs.replay.torchrl.row_intake import RowIntake
from rlstructs.replay.torchrl.samplers import Arrays, Sampler, State
from rlstructs.replay.torchrl.storages import ReplayStorage
from rlstructs.replay.torchrl.transforms import Compose
from rlstructs.replay.torchrl.writers import ImmutableWriter, RoundRobinWriter, Writer
from rlstructs.replay.values import generator_of

S = TypeVar("S", bound="DictTensorBase")
Generator = np.random.Generator | torch.Generator | int | None


class DictTensorBase(Buffer):
    """Base class; see `DictTensorReplayBuffer`.

    Args:
        parts: of this buffer, and of no other.
        generator: as of `DictTensorReplayBuffer`.
        framework, device: of samples.
    """

    _may_be_aligned = True

    def __init__(self, parts: Assembly, generator: Generator, framework: str, device: Any) -> None:
        parts.check(parts.sampler, parts.writer, self)
        self._parts = parts
        device = parts.storage.device if device is None and framework == "torch" else device
        super().__init__(
            1, parts.storage.capacity, seed=_find_seed(generator), framework=framework, device=device,
            reading=parts.reading, columns=parts.storage.columns(),
        )  # fmt: skip
        self._parts.stream = self._stream
        self._intake.is_for_one_process = True  # writers would need turns, and samplers follow them
        parts.start(self._storage, self._export, self)
        self._rows = RowIntake(parts, self._intake)
        if (data := parts.storage.data) is not None:
            parts.storage.data = None
            writer = RoundRobinWriter() if isinstance(parts.writer, ImmutableWriter) else parts.writer
            self._rows.store(take_rows(data, "TensorStorage"), "TensorStorage", writer=writer)

    # The parts

    @property
    def batch_size(self) -> int | None:
        """Size of batches, unless `sample` is given another."""
        return self._parts.batch_size

    @property
    def priority_key(self) -> str:
        """The column of new priorities."""
        return self._parts.priority_key

    @priority_key.setter
    def priority_key(self, priority_key: Any) -> None:
        with self._parts.lock:
            self._parts.priority_key = join_key(priority_key)
            self._parts.note_change()

    @property
    def storage(self) -> ReplayStorage:
        """The storage: its settings, and its rows by index and one by one, without the transforms."""
        return self._parts.storage

    @property
    def sampler(self) -> Sampler:
        """The sampler."""
        return self._parts.sampler

    @property
    def writer(self) -> Writer:
        """The writer."""
        return self._parts.writer

    @property
    def transform(self) -> Compose:
        """The transforms."""
        return self._parts.transform

    @property
    def generator(self) -> np.random.Generator:
        """The generator that draws; it can be set to whatever the constructor takes.

        A copy of a buffer in its process continues the same stream, and draws the same rows. One in another process,
        such as a worker of torch's `DataLoader`, has a stream of its own, which follows from the seed.
        """
        return self._parts.stream.generator

    @generator.setter
    def generator(self, generator: Generator) -> None:
        with self._parts.lock:
            self._stream.generator = generator_of(_find_seed(generator))

    _rng = generator

    def set_rng(self, generator: Generator) -> None:
        """Sets `generator`."""
        self.generator = generator

    def append_transform(self: S, transform: Any, *, invert: bool = False) -> S:
        """Adds a transform behind the others, and returns the buffer.

        With `invert`, its `forward` changes rows that are written, and its `inv` batches.
        """
        self._parts.insert(None, transform, invert)
        return self

    def insert_transform(self: S, index: int, transform: Any, *, invert: bool = False) -> S:
        """Does the same before the `index`-th transform; raises SpecError if there is no such place."""
        self._parts.insert(index, transform, invert)
        return self

    def set_sampler(self, sampler: Any) -> None:
        """Exchanges the sampler; for the new one all rows are new.

        Raises:
            TypeError, SpecError: it does not go with the other parts, or the columns.
        """
        self._parts.set_sampler(sampler, self)

    def set_writer(self, writer: Any) -> None:
        """Exchanges the writer.

        Raises:
            TypeError, SpecError: it does not go with the other parts.
        """
        self._parts.set_writer(writer, self)

    # Rows by index

    def __getitem__(self, index: Any) -> Any:
        """Rows or a column, as private copies, through the transforms.

        Args:
            index: an int: a row id, or below 0 a place counted back from the highest one. A list or array of row ids.
                A slice of all rows, or a bool mask over them, in the order of their ids. The name of a column, or of
                several nested ones, for all rows in this order; a tuple stands for its parts joined with `/`.

        Returns:
            Every column; if rows came as `TensorDict`s also their `index`, as in a sample.

        Raises:
            IndexError, MissingKeyError: there is no such row or column.
        """
        return editing.read(self._parts, index, self._parts.transform)

    def read_stored(self, index: Any) -> Any:
        """What `[]` returns, without the transforms; also `storage[index]`."""
        return editing.read(self._parts, index, Compose())

    def __setitem__(self, index: Any, values: Any) -> None:
        """Changes rows in place; their priorities stay as they are.

        Args:
            index: as of `[]`.
            values: a mapping of some columns to values for these rows; for a single column only its values. A sample
                may be written back as it is: what it has beside its columns is left out, and of slices the marks of
                their ends (`done`, `truncated`, `is_init`). Samples of n steps or stacks are not what is stored: give
                columns without their `index`. A mapping for all rows may have new columns.

        Raises:
            IndexError, SpecError, MissingKeyError, StateError: something does not fit; nothing changes.
        """
        editing.change(self._rows, index, values)

    def set_(self: S, key: Any, value: Any) -> S:
        """Changes a column in all rows, in the order of their ids; raises as `[]` does. Returns the buffer."""
        editing.change_columns(self._rows, slice(None), {join_key(key): value})
        return self

    def set_at_(self: S, key: Any, value: Any, index: Any) -> S:
        """Changes a column in some rows; `index` and errors as of `[]`. Returns the buffer."""
        editing.change_columns(self._rows, index, {join_key(key): value})
        return self

    def update_(self: S, values: Any, clone: bool = False, *, keys_to_update: Sequence[Any] | None = None) -> S:
        """Changes columns in all rows, in the order of their ids; raises as `[]` does. Returns the buffer.

        Args:
            values: a mapping of names to `(len(self), ...)`.
            clone: changes nothing, as values are always copied.
            keys_to_update: the names to use; None for all.
        """
        editing.change_all(self._rows, values, keys_to_update)
        return self

    def read_all_in_order(self, end: int | None = None) -> Any:
        """All rows, or the first `end` of them, in the order of their ids: `[:end]`."""
        return self[:end]

    def write_all(self, data: Any, end: int | None = None) -> None:
        """Changes the first rows, `end` or as many as `data` has; raises as `[]` does.

        If these are all rows, there may be new columns.
        """
        self[: take_rows(data, "write_all").n if end is None else end] = data

    # Files and copies

    def save(self, path: str | Path) -> None:
        """Writes rows, counters, episodes, priorities and the random stream, whole or not at all.

        Args:
            path: a file that ends in `.npz`, `.pt` or `.h5` (which needs the extra `hdf5`); any other name is that of
                a folder, which `dumps` writes.
        """
        if Path(path).is_dir() or ending_of(Path(path)) not in WRITERS:
            self.dumps(path)
        else:
            super().save(path)

    def load(self, path: str | Path) -> None:
        if Path(path).is_dir():
            path = keeping.find_file(path)
        with self._parts.lock:
            super().load(path)

    load.__doc__ = Buffer.load.__doc__

    def dumps(self, path: str | Path) -> None:
        """Writes a folder with what `save` writes; an older file in it stays whole until the new one is."""
        keeping.dump(self, Path(path))

    def loads(self, path: str | Path) -> None:
        """Restores what `dumps` wrote; raises as `load` does."""
        self.load(keeping.find_file(path))

    dump = dumps

    def state_dict(self) -> dict[str, Any]:
        """Copies what `save` writes to tensors and plain values; `torch.load` takes them with `weights_only=True`."""
        return keeping.state_dict(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned; the next samples are those that would have followed it.

        Raises:
            FileError: it is damaged, or of a buffer of another size or class, or with another sampler; nothing changes.
        """
        with self._parts.lock:
            keeping.load_state_dict(self, state_dict)

    def _content(self) -> Any:
        return self._parts.content()

    def _takes_capacity(self, capacity: int) -> bool:
        return self._parts.storage.capacity_for(capacity) == capacity

    def _state(self) -> dict[str, Any]:
        return keeping.own_state(self._parts, self._rows)

    def _more_arrays(self) -> dict[str, np.ndarray]:
        return self._parts.sampler.arrays()

    def _restorer(self, state: State, arrays: Arrays, claims: Claims) -> Callable[[], None]:
        return keeping.own_restorer(self._parts, self._rows, state, arrays, claims)

    def _locks(self) -> Sequence[Any]:
        return [self._parts.lock, *super()._locks()]

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        super().__setstate__(state)
        self._parts.belong(self)


def _find_seed(generator: Any) -> np.random.Generator | int | None:
    """What a buffer takes for a generator; of torch's generators a number that it draws."""
    if isinstance(generator, torch.Generator):
        return int(torch.randint(2**63 - 1, (), generator=generator, device=generator.device))
    return generator  # type: ignore[no-any-return] # `generator_of` checks it
