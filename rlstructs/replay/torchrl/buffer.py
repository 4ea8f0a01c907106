"""torchrl's `TensorDictReplayBuffer`: a store with a storage, a sampler, a writer and transforms."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from rlstructs.checks import check_count, check_names
from rlstructs.errors import SpecError, StateError
from rlstructs.files.layout import WRITERS, ending_of
from rlstructs.replay.buffer import Buffer
from rlstructs.replay.draw.ahead import Batches
from rlstructs.replay.draw.reading import Reading
from rlstructs.replay.intake.arrays import generator_of
from rlstructs.replay.intake.trajectories import take_trajectories
from rlstructs.replay.keep.checks import Claims
from rlstructs.replay.torchrl import editing, keeping
from rlstructs.replay.torchrl.assembly import Assembly
from rlstructs.replay.torchrl.batches import Sampling
from rlstructs.replay.torchrl.given_rows import GivenRows, take_rows
from rlstructs.replay.torchrl.part import ANY, check_neutral, create_part, join_key
from rlstructs.replay.torchrl.prioritized_sampler import PrioritizedSampler, find_priorities
from rlstructs.replay.torchrl.rows_in import RowIntake
from rlstructs.replay.torchrl.samplers import Arrays, RandomSampler, Sampler, State
from rlstructs.replay.torchrl.storages import ListStorage, ReplayStorage
from rlstructs.replay.torchrl.transforms import Compose, compose
from rlstructs.replay.torchrl.writers import ImmutableWriter, RoundRobinWriter, Writer
from rlstructs.structures.trajectories import Trajectories
from rlstructs.workers.public_names import set_module

S = TypeVar("S", bound="DictTensorBase")
Generator = np.random.Generator | torch.Generator | int | None


class DictTensorBase(Buffer):
    """Base class; see `DictTensorReplayBuffer`.

    Args:
        parts: of this buffer, and of no other.
        generator: see `DictTensorReplayBuffer`.
        framework, device: of samples.
    """

    _may_be_aligned = True

    def __init__(self, parts: Assembly, generator: Generator, framework: str, device: Any) -> None:
        parts.check(parts.sampler, parts.writer, self)
        self._parts = parts
        device = parts.storage.device if device is None and framework == "torch" else device
        super().__init__(
            1,
            parts.storage.capacity,
            seed=_find_seed(generator),
            framework=framework,
            device=device,
            reading=parts.reading,
            columns=parts.storage.columns(),
            compression=parts.storage.compression,
            path=parts.storage.path,
        )
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
        """The storage: its settings and the stored rows.

        It gives rows by index and one by one, without the transforms.
        """
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
        """The random generator; may be set as in the constructor.

        A copy of a buffer in its process continues the same stream, and draws the same rows. A copy in another process,
        such as a worker of torch's `DataLoader`, has a stream of its own, which follows from the seed.
        """
        return self._parts.stream.generator

    @generator.setter
    def generator(self, generator: Generator) -> None:
        with self._parts.lock:
            self._stream.restart(generator_of(_find_seed(generator)))

    _rng = generator

    def set_rng(self, generator: Generator) -> None:
        """Sets `generator`."""
        self.generator = generator

    def append_transform(self: S, transform: Any, *, invert: bool = False) -> S:
        """Adds a transform after the others, and returns the buffer.

        With `invert`, its `forward` changes rows that are written, and its `inv` batches.
        """
        self._parts.insert(None, transform, invert)
        return self

    def insert_transform(self: S, index: int, transform: Any, *, invert: bool = False) -> S:
        """Inserts a transform before the `index`-th, and returns the buffer.

        Raises SpecError if there is no such place.
        """
        self._parts.insert(index, transform, invert)
        return self

    def set_sampler(self, sampler: Any) -> None:
        """Exchanges the sampler; for the new sampler all rows are new.

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
        """Returns rows or a column, as private copies, through the transforms.

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
        """Reads rows as `[]` does, without the transforms; also `storage[index]`."""
        return editing.read(self._parts, index, Compose())

    def __setitem__(self, index: Any, values: Any) -> None:
        """Changes rows in place; their priorities stay as they are.

        Args:
            index: see `[]`.
            values: a mapping of some columns to values for these rows; for a single column only its values. A sample
                may be written back as it is: keys that are not columns are left out, and so are the marks of slices'
                ends (`done`, `truncated`, `is_init`). Samples of n steps or stacks differ from the stored rows: give
                columns without their `index`. A mapping for all rows may have new columns.

        Raises:
            IndexError, SpecError, MissingKeyError, StateError: something does not fit; nothing changes.
        """
        editing.change(self._rows, index, values)

    def set_(self: S, key: Any, value: Any) -> S:
        """Changes a column in all rows, and returns the buffer.

        Values are in the order of row ids. Raises the same errors as `[]`.
        """
        editing.change_columns(self._rows, slice(None), {join_key(key): value})
        return self

    def set_at_(self: S, key: Any, value: Any, index: Any) -> S:
        """Changes a column in some rows, and returns the buffer.

        For `index` and errors see `[]`.
        """
        editing.change_columns(self._rows, index, {join_key(key): value})
        return self

    def update_(self: S, values: Any, clone: bool = False, *, keys_to_update: Sequence[Any] | None = None) -> S:
        """Changes columns in all rows, and returns the buffer.

        Values are in the order of row ids. Raises the same errors as `[]`.

        Args:
            values: a mapping of names to `(len(self), ...)`.
            clone: changes nothing, as values are always copied.
            keys_to_update: the names to use; None for all.
        """
        editing.change_all(self._rows, values, keys_to_update)
        return self

    def read_all_in_order(self, end: int | None = None) -> Any:
        """Returns all rows, or the first `end`, in order: `[:end]`.

        The order is that of row ids.
        """
        return self[:end]

    def write_all(self, data: Any, end: int | None = None) -> None:
        """Changes the first rows, `end` or as many as `data` has.

        Raises the same errors as `[]`. If these are all rows, there may be new columns.
        """
        self[: take_rows(data, "write_all").n if end is None else end] = data

    # Files and copies

    def save(self, path: str | Path) -> None:
        """Writes rows, counters, episodes, priorities and the random stream, whole or not at all.

        Args:
            path: a file that ends in `.npz`, `.pt` or `.h5` (which needs the extra `hdf5`); any other name stands for a
                folder, which `dumps` writes.
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
        """Writes the same data as `save`, to a folder.

        An older file in it stays whole until the new one is complete.
        """
        keeping.dump(self, Path(path))

    def loads(self, path: str | Path) -> None:
        """Restores a folder of `dumps`; raises the same errors as `load`."""
        self.load(keeping.find_file(path))

    dump = dumps

    def state_dict(self) -> dict[str, Any]:
        """Copies the same data as `save`, to tensors and plain values.

        `torch.load` takes them with `weights_only=True`.
        """
        return keeping.state_dict(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores the result of `state_dict`.

        The next samples are those that would have followed it.

        Raises:
            FileError: it is damaged, or of a buffer of another size or class, or with another sampler; nothing changes.
        """
        with self._parts.lock:
            keeping.load_state_dict(self, state_dict)

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
    """Converts a generator for a buffer.

    A generator of torch draws a number, which is the seed.
    """
    if isinstance(generator, torch.Generator):
        return int(torch.randint(2**63 - 1, (), generator=generator, device=generator.device))
    return generator  # type: ignore[no-any-return] # `generator_of` checks it


# Arguments of torchrl's buffers without a meaning here, and the values that are accepted.
NEUTRAL = {
    "sample_unit": None,
    "transform_factory": None,
    "dim_extend": ANY,
    "checkpointer": None,
    "consume_after_n_samples": None,
    "delayed_init": ANY,
    "service_backend": "direct",
    "service_backend_options": None,
    "transport": "auto",
    "transport_options": None,
    "sampler_device": ANY,
    "sync": True,
}


@set_module("rlstructs.replay")
class DictTensorReplayBuffer(DictTensorBase):
    """Rows of one schema; also called `TensorDictReplayBuffer`.

    The first rows define the schema. A row keeps its id, its place in the store, until another row overwrites it. Every
    sample has an int64 `index` of row ids, `(batch_size,)`. Episodes end where `terminated`, `truncated` or `done`
    (also under `next/`) or the keys of the sampler say so. Several threads may write and sample at once. `save`,
    `state_dict` and `copy.deepcopy` see the state between two writes; pickling a buffer that changes meanwhile raises
    StateError.

    Args:
        storage: a `ListStorage`, `TensorStorage` or `MemmapStorage`; None for a `ListStorage` of 1,000 rows.
        sampler: a `RandomSampler` (the default), `SamplerWithoutReplacement`, `PrioritizedSampler`,
            `SliceSampler` or `PrioritizedSliceSampler`.
        writer: a `RoundRobinWriter` (the default), `MaxValueWriter` or `ImmutableWriter`. Storage, sampler and writer
            belong to one buffer; each may also be a function that creates it.
        collate_fn: applied to a batch before all transforms, with its columns only.
        pin_memory: whether batches are in page-locked memory, from which copies to a GPU are asynchronous.
        prefetch: number of batches that are made ahead, by as many threads, in which transforms run at once. Batches
            are the same as without, so nothing is gained if rows or priorities change between any two samples.
        transform: a `Transform`, or any function of a batch that returns one; a `Compose` is kept as it is.
        batch_size: of `sample` and of iteration.
        priority_key: the column of new priorities.
        generator: of numpy or torch, or a seed; None for one seeded by torch's global generator.
        framework: of batches, "torch" (a `DictTensor`), "numpy", "jax" or "warp" (an `ArrayDict`).
        device: of batches.
        n_step: rewards become the discounted sum of so many steps, up to the end of the episode; values from after a
            step come from the last of them, and `discount` is gamma to the power of their number.
        gamma: discount per step.
        stack_num: observations become the last so many of their episode, on a new axis in front of their own.
        stack_keys: the observations that are stacked; None for all.
        shared: must be False: a buffer belongs to one process, whose threads may share it.
        compilable: changes nothing, as nothing is compiled.
        others: further arguments of torchrl's, which change nothing or must have their defaults.

    Raises:
        TypeError, SpecError, StateError: an argument does not fit.

    Example:
        >>> buffer = DictTensorReplayBuffer(storage=ListStorage(100), batch_size=4, generator=0)
        >>> buffer.extend({"obs": torch.arange(6.0), "next": {"reward": torch.ones(6)}})
        tensor([0, 1, 2, 3, 4, 5])
        >>> batch = buffer.sample()
        >>> batch
        DictTensor(n_elems=4, device=cpu, obs=(4,) float32, next/reward=(4,) float32, index=(4,) int64)
        >>> bool((batch["obs"] == batch["index"]).all())
        True
    """

    def __init__(
        self,
        *,
        storage: Any = None,
        sampler: Any = None,
        writer: Any = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Any = None,
        batch_size: int | None = None,
        priority_key: Any = "td_error",
        generator: Generator = None,
        framework: str = "torch",
        device: Any = None,
        n_step: int = 1,
        gamma: float = 0.99,
        stack_num: int = 1,
        stack_keys: Sequence[str] | None = None,
        shared: bool = False,
        compilable: bool | None = False,
        **others: Any,
    ) -> None:
        check_neutral(type(self).__name__, others, NEUTRAL)
        if shared:
            raise SpecError("shared must be False: a buffer belongs to one process; processes can share a RayReplay")
        depth = 0 if not prefetch else check_count("prefetch", prefetch)
        if prefetch and batch_size is None:
            raise SpecError("prefetch needs a batch_size: the size of the batches that are made ahead")
        if pin_memory and not torch.accelerator.is_available():
            raise StateError("pin_memory: torch sees no accelerator to copy page-locked memory to")
        keys = None if stack_keys is None else tuple(join_key(key) for key in check_names("stack_keys", stack_keys))
        parts = Assembly(
            create_part("storage", storage, ReplayStorage, partial(ListStorage, 1000)),  # as many rows as in torchrl
            create_part("sampler", sampler, Sampler, RandomSampler),
            create_part("writer", writer, Writer, RoundRobinWriter),
            compose(transform),
            Reading(n_step, gamma, stack_num, keys),
            None if batch_size is None else check_count("batch_size", batch_size),
            join_key(priority_key),
        )
        super().__init__(parts, generator, framework, device)
        if pin_memory and (framework != "torch" or self._export.device is not None):
            raise SpecError(f"pin_memory needs tensors on the host, not {framework} on {self._export.device}")
        self._sampling = Sampling(parts, collate_fn, pin_memory, depth)
        self._has_warned = False

    # Writing

    def add(self, data: Any) -> int:
        """Adds one row.

        Args:
            data: a mapping of names to values without a batch axis; names of nested values are joined with `/`.

        Returns:
            Its row id; -1 if a transform or the writer dropped it.

        Raises:
            TypeError, SpecError, MissingKeyError, StateError: it does not fit; nothing changes.
        """
        row_id = self._rows.add_quickly(data) if type(data) is dict else None
        return self._rows.add(data) if row_id is None else row_id

    def extend(self, tensordicts: Any, update_priority: bool | None = None) -> torch.Tensor:
        """Adds rows.

        Args:
            tensordicts: a mapping of names to `(n, ...)`, a `DictTensor` or a tensordict; a `TemporalDictTensor` or
                `Trajectories`, of which the valid steps are added and each trajectory begins an episode; or a list of
                mappings, each a row. Batches leave as tensordicts if the first rows were one. A sample, of this buffer
                or another, is taken without its int64 `index` and weights: its rows get new ones.
            update_priority: whether the column `priority_key` sets the priorities of these rows; None: if it exists.

        Returns:
            int64 (n,), the row ids in order, -1 for rows that were not kept.

        Raises:
            TypeError, SpecError, MissingKeyError, StateError: something does not fit; nothing changes.
        """
        with self._parts.lock:
            rows = take_rows(tensordicts, "extend")
            return torch.from_numpy(self._rows.store(rows, "extend", update_priority))

    def add_trajectories(self, trajectories: Trajectories, names: Mapping[str, str] | None = None) -> None:
        """Appends the valid steps of a batch of `RL_Batcher.get`, one trajectory after another.

        Args:
            trajectories: the batch.
            names: column -> key of the trajectories; None for all keys as they are.

        Raises:
            TypeError, MissingKeyError, SpecError: something does not fit; nothing is added.
        """
        steps = take_trajectories(trajectories, self._intake.default_names if names is None else names)
        self._rows.store(GivenRows.from_steps(steps), "add_trajectories")

    def empty(self, empty_write_count: bool = True) -> None:
        """Drops every row; row ids begin with 0 again.

        The sampler and the writer forget the rows, too. The next rows may be of another schema: they define the columns
        anew.

        Args:
            empty_write_count: whether `write_count` becomes 0.

        Raises:
            StateError: the writer is an `ImmutableWriter`.
        """
        self._rows.empty(empty_write_count)

    @property
    def write_count(self) -> int:
        """Rows that were kept since the buffer was made or emptied, overwritten ones included."""
        return self._rows.n_written

    # Sampling

    def sample(
        self, batch_size: int | None = None, return_info: bool = False, include_info: bool | None = None,
        *, packed: bool = False, **windows: Any,
    ) -> Any:  # fmt: skip
        """Draws a batch of rows, private copies.

        Args:
            batch_size: number of rows, 0 for an empty batch; None for the constructor's `batch_size`.
            return_info: whether to return facts about the rows (`index`, `priority_weight`, ...) as a dict, too.
            include_info: whether the batch has these facts as columns; None for yes.
            packed: whether to return a `PackedTrajectories` of windows of one episode each, which may be shorter at its
                end. A slice sampler says where windows begin and how long they are; `batch_size` counts their steps.
                Other samplers draw the first row of each, and `batch_size` counts windows. `index` has the drawn rows;
                weights are in the pack's `info`, too. Buffers of jax and warp return its `jax()` and `warp()`.
            windows: of packs: `slice_len`, the length of windows where a sampler draws single rows; and `context`,
                `max_steps` and `states` as of `RandomMemory.sample`.

        Returns:
            The batch; with `return_info`, the batch and the dict.

        Raises:
            StateError: no size is given, here or to the constructor; an EmptyBufferError if there are no rows.
            SpecError: there is nothing to draw.
        """
        own = self.batch_size
        if batch_size is not None and own not in (None, batch_size):
            text = f"sample: batch_size {batch_size} is another than that of the constructor, {own}; it counts"
            warnings.warn(text, stacklevel=2)
        with_info = include_info is None or bool(include_info)
        made = self._sampling.sample(self._sampling.size(batch_size), with_info, packed, windows)
        return made if return_info else made[0]

    def batches(self, batch_size: int | None = None, *, prefetch: int = 2) -> Batches:
        """Makes batches ahead, for ever, while rows and priorities change; see `RandomMemory.batches`.

        Without replacement, all that was drawn ahead is drawn anew after any change.

        Args:
            batch_size: number of rows; None for that of the constructor.
            prefetch: how many batches are drawn ahead; the constructor's is for `sample` alone.

        Returns:
            An iterator over what `sample` returns.
        """
        return self._sampling.batches(self._sampling.size(batch_size), prefetch)

    def __iter__(self) -> Iterator[Any]:
        """Yields batches of the constructor's size, for ever.

        Without replacement it ends after one pass over the rows.
        """
        if self.batch_size is None:
            raise StateError("batch_size not specified: give one to the constructor to iterate over the buffer")
        self._sampling.begin_pass()
        while (made := self._sampling.make(self.batch_size, in_pass=True)) is not None:
            yield made[0]

    def next(self) -> Any:
        """Returns the next batch of an iteration.

        None at the end of a pass over the rows, after which another begins.

        Raises:
            StateError: no size was given to the constructor, or there are no rows.
        """
        return self._sampling.next()

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether `sample` would return a batch now.

        It draws nothing, and raises StateError without a batch size.
        """
        return self._sampling.is_possible(batch_size)

    def close(self) -> None:
        """Ends the threads that make batches ahead; from now on none are made."""
        self._sampling.close()

    # Priorities

    def update_priority(self, index: Any, priority: Any) -> None:
        """Sets the priorities of rows.

        If an id is repeated, its last priority counts. Ids below 0 are left out, and so are rows that were overwritten
        since they were drawn. The ids of the last `add` or `extend` refer to the rows that it wrote, all others to
        drawn rows. A buffer without priorities warns, once.

        Args:
            index: int (n,), row ids from samples or `extend`.
            priority: `(n,)`, or one number for all, finite and at least 0; `(n, ...)` is reduced.

        Raises:
            SpecError, IndexError: they do not fit; nothing changes.
        """
        with self._parts.lock:
            if isinstance(self.sampler, PrioritizedSampler):
                self.sampler.update(self._storage, index, priority)
            elif not self._has_warned:
                self._has_warned = True
                warnings.warn(f"update_priority: a {type(self.sampler).__name__} has no priorities", stacklevel=2)

    def update_tensordict_priority(self, data: Any) -> None:
        """Sets the priorities of a batch's rows to its column `priority_key`; also `update_dict_tensor_priority`.

        Steps that are padding according to `mask` are left out. Of a batch that was reshaped to slices, the first step
        of each gets the reduction of all its priorities. Without priorities this does nothing.

        Raises:
            MissingKeyError: the batch has no `index`, or no such column.
            SpecError: they do not fit; nothing changes.
        """
        if isinstance(self.sampler, PrioritizedSampler):
            self.update_priority(*find_priorities(data, self.priority_key, self.sampler))

    update_dict_tensor_priority = update_tensordict_priority

    def stats(self) -> dict[str, int | float | bool]:
        """Returns `size`, `capacity`, `utilization`, `write_count`, `prefetch_queue_size`, `initialized`."""
        with self._parts.lock:
            size, capacity = len(self), self.storage.max_size
            return {
                "size": size,
                "write_count": self.write_count,
                "prefetch_queue_size": len(self._sampling.ahead),
                "initialized": True,
                "capacity": capacity,
                "utilization": size / capacity,
            }

    @property
    def nbytes(self) -> int:
        """Bytes of rows, priorities and bookkeeping."""
        return super().nbytes + self.sampler.nbytes

    def __repr__(self) -> str:
        dtypes = {name: "bfloat16" if spec.is_bfloat16 else spec.dtype for name, spec in self._specs.items()}
        columns = [f"{name}={self._specs[name].shape} {dtype}" for name, dtype in dtypes.items()]
        parts = [f"len={len(self)}", repr(self.storage), repr(self.sampler), repr(self.writer)]
        sizes = [] if self.batch_size is None else [f"batch_size={self.batch_size}"]
        return f"{type(self).__name__}({', '.join(parts + sizes + columns)})"


@set_module("rlstructs.replay")
class DictTensorPrioritizedReplayBuffer(DictTensorReplayBuffer):
    """A `DictTensorReplayBuffer` with a `PrioritizedSampler`; also called `TensorDictPrioritizedReplayBuffer`.

    Args:
        alpha, beta, eps, reduction: see `PrioritizedSampler`.
        settings: of `DictTensorReplayBuffer`, except a sampler.

    Example:
        >>> buffer = DictTensorPrioritizedReplayBuffer(alpha=1.0, beta=1.0, generator=0)
        >>> index = buffer.extend({"obs": torch.arange(3.0)})
        >>> buffer.update_priority(index, torch.tensor([1.0, 0.0, 3.0]))
        >>> buffer.sample(4)["obs"], buffer.sample(4)["priority_weight"].min() > 0
        (tensor([0., 2., 2., 2.]), tensor(True))
    """

    def __init__(
        self, *, alpha: float, beta: float, eps: float = 1e-8, reduction: str = "max", **settings: Any
    ) -> None:
        if "sampler" in settings:
            raise TypeError("sampler: this buffer has its own; give it to a DictTensorReplayBuffer")
        super().__init__(sampler=PrioritizedSampler(None, alpha, beta, eps, reduction=reduction), **settings)


TensorDictReplayBuffer = DictTensorReplayBuffer
TensorDictPrioritizedReplayBuffer = DictTensorPrioritizedReplayBuffer
