"""torchrl's `TensorDictReplayBuffer`: one store, put together of a storage, a sampler, a writer and transforms."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from rlstructs.checks import check_count, check_names
from rlstructs.errors import EmptyBufferError, MissingKeyError, SpecError, StateError
from rlstructs.public_names import set_module
from rlstructs.replay.columns import Spec
from rlstructs.replay.copies import lock_that_forks
from rlstructs.replay.given import flat_items
from rlstructs.replay.reading import Reading
from rlstructs.replay.torchrl.assembly import DictTensorParts, seed_of
from rlstructs.replay.torchrl.batches import rows_of
from rlstructs.replay.torchrl.draws import Draws, Request
from rlstructs.replay.torchrl.part import ANY, check_neutral, joined, part
from rlstructs.replay.torchrl.prefetch import Prefetch
from rlstructs.replay.torchrl.prioritized_sampler import PrioritizedSampler, reduced_inside
from rlstructs.replay.torchrl.samplers import INDEX, MASK, RandomSampler, Sampler
from rlstructs.replay.torchrl.storages import ListStorage, ReplayStorage
from rlstructs.replay.torchrl.transforms import composed
from rlstructs.replay.torchrl.writers import ImmutableWriter, RoundRobinWriter, Writer
from rlstructs.replay.values import host_array

# Rows of a buffer that is given no storage, as of torchrl's.
DEFAULT_SIZE = 1000
# Arguments of torchrl's buffers that are not of these.
NEUTRAL = {
    "sample_unit": None, "transform_factory": None, "dim_extend": ANY, "checkpointer": None,
    "consume_after_n_samples": None, "delayed_init": ANY, "service_backend": "direct", "service_backend_options": None,
    "transport": "auto", "transport_options": None, "sampler_device": ANY, "sync": True,
}  # fmt: skip


@set_module("rlstructs.replay")
class DictTensorReplayBuffer(DictTensorParts):
    """Rows of one schema, that of the first ones; also called `TensorDictReplayBuffer`.

    A row keeps its id, its place in the store, until another takes it. Every sample has an int64 `index`
    of them, `(batch_size,)`. Where episodes end is what `terminated`, `truncated` and `done` say (under
    `next/` too), and what the sampler is told. Several threads may write and sample at once, and `save`, `state_dict`
    and `copy.deepcopy` give what there is between two writes; one that is changed while it is pickled raises.

    Args:
        storage: a `ListStorage`, `TensorStorage` or `MemmapStorage`; None for a `ListStorage` of 1,000 rows.
        sampler: a `RandomSampler` (the default), `SamplerWithoutReplacement`, `PrioritizedSampler`,
            `SliceSampler` or `PrioritizedSliceSampler`.
        writer: a `RoundRobinWriter` (the default), `MaxValueWriter` or `ImmutableWriter`. Each of the three may
            be what makes one, too, and belongs to one buffer.
        collate_fn: what is done to a batch before all transforms, of columns only.
        pin_memory: whether batches are in page-locked memory, from which copies to a GPU are asynchronous.
        prefetch: how many batches are made ahead, by as many threads. The stream of batches is the same as
            without, so that it gains nothing while rows or priorities change between any two samples.
            Transforms may then run in several threads at once.
        transform: a `Transform`, or what else takes a batch and gives one; those in a `Compose` are the buffer's.
        batch_size: of `sample` and of iteration.
        priority_key: the column of new priorities.
        generator: of numpy or torch, or a seed; None for one seeded by torch's global generator.
        framework: what batches are, "torch" (a `DictTensor`), "numpy", "jax" or "warp" (an `ArrayDict`).
        device: of batches.
        n_step: rewards become the discounted sum of so many steps, as far as the episode goes; what comes after
            a step comes from the last of them; and `discount` is gamma to their number.
        gamma: discount per step.
        stack_num: observations become the last so many of their episode, on a new axis in front of their own.
        stack_keys: which; None for all observations.
        shared: False: a buffer is of one process, whose threads may share it.
        compilable: changes nothing, as nothing is compiled.
        others: more of torchrl's arguments, which change nothing here or must ask for nothing.

    Raises:
        TypeError, SpecError, StateError: an argument is not what is needed.

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

    _in_pass = False  # of `next`

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
        generator: np.random.Generator | torch.Generator | int | None = None,
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
            raise SpecError("shared must be False: a buffer is of one process; processes can share a RayReplay")
        self._settings = part("storage", storage, ReplayStorage, partial(ListStorage, DEFAULT_SIZE))
        self._sampler = part("sampler", sampler, Sampler, RandomSampler)
        self._writer = part("writer", writer, Writer, RoundRobinWriter)
        self._batch_size = None if batch_size is None else check_count("batch_size", batch_size)
        self._priority_key = joined(priority_key)
        self._collate_fn, self._pin_memory, self._transform = collate_fn, pin_memory, composed(transform)
        self._lock, self._version, self._has_warned = lock_that_forks(), 0, False
        self._ahead = Prefetch(self._lock, 0 if not prefetch else check_count("prefetch", prefetch))
        _check_settings(prefetch, batch_size, pin_memory)
        keys = None if stack_keys is None else tuple(joined(key) for key in check_names("stack_keys", stack_keys))
        reading = Reading(n_step, gamma, stack_num, keys)
        self._check_parts(self._sampler, self._writer, reading)
        super().__init__(
            1,
            self._settings.capacity,
            seed=seed_of(generator),
            framework=framework,
            device=self._settings.device if device is None and framework == "torch" else device,
            reading=reading,
            columns=self._settings.columns(),
        )
        if pin_memory and (framework != "torch" or self._export.device is not None):
            raise SpecError(f"pin_memory is of tensors on the host, not of {framework} on {self._export.device}")
        self._connect_parts()

    def _connect_parts(self) -> None:
        """Tells the parts whose they are, and stores the rows that the storage came with."""
        self._storage.alignment, self._storage.max_size = self._settings.alignment, self._settings.max_size
        self._sampler.start(self._storage, self._settings.max_size)
        self._writer.changed()
        for each in (self._settings, self._sampler, self._writer):
            each.belong(self)
        if (data := self._settings.data) is not None:
            self._settings.data = None
            rows = rows_of(data, "TensorStorage")
            self._store(rows, "TensorStorage", writer=_first_writer(self._writer), came_as=data)

    # Sampling

    def sample(self, batch_size: int | None = None, return_info: bool = False, include_info: bool | None = None) -> Any:
        """A batch of rows, private copies.

        Args:
            batch_size: rows; None for that of the constructor.
            return_info: whether what is known of the rows (`index`, `priority_weight`, ...) comes as a dict, too.
            include_info: whether it is among the columns of the batch; None for yes.

        Returns:
            The batch; with `return_info`, the batch and the dict.

        Raises:
            StateError: no size is given here or there; as an EmptyBufferError, nothing is stored.
            SpecError: there is nothing to draw.
        """
        if batch_size is not None and self._batch_size not in (None, batch_size):
            own = self._batch_size
            text = f"sample: batch_size {batch_size} is another than that of the constructor, {own}; it counts"
            warnings.warn(text, stacklevel=2)
        made = self._next(self._size(batch_size), include_info is None or bool(include_info))
        assert made is not None
        return made if return_info else made[0]

    def __iter__(self) -> Iterator[Any]:
        """Batches of the constructor's size, for ever; without replacement, of one pass over the rows."""
        if self._batch_size is None:
            raise StateError("batch_size not specified: give one to the constructor to iterate over the buffer")
        with self._lock:
            self._sampler.begin_pass()
        while (made := self._next(self._batch_size, True, in_pass=True)) is not None:
            yield made[0]

    def next(self) -> Any:
        """The next batch of an iteration; None at the end of a pass over the rows, after which another begins.

        Raises:
            StateError: no size was given to the constructor, or nothing is stored.
        """
        n = self._size(None)
        with self._lock:
            if not self._in_pass:
                self._sampler.begin_pass()
        made = self._next(n, True, in_pass=True)  # which waits for threads that need the lock
        self._in_pass = made is not None
        return None if made is None else made[0]

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether `sample` would give a batch now; draws nothing.

        Raises:
            StateError: no size is given here or there.
        """
        with self._lock:
            draws, n = Draws(self), self._size(batch_size)
            before = draws.place()
            try:
                draws.draw(self._request(n, with_info=False), None)
            except (ValueError, RuntimeError):
                return False
            finally:
                draws.go_to(before)
            return True

    def _size(self, given: int | None) -> int:
        if given is None and self._batch_size is None:
            raise StateError("batch_size not specified: give one to the constructor or to sample")
        return check_count("batch_size", self._batch_size if given is None else given)

    def _next(self, n: int, with_info: bool, in_pass: bool = False) -> tuple[Any, dict[str, Any]] | None:
        """A batch of n rows and what is known of it; None if the pass is over and there should be none."""
        with self._lock:
            request = self._request(n, with_info)
            if in_pass and not self._sampler.remains(self._storage, request[0]):
                return None
            draws, batch = Draws(self), None
            if self._ahead.depth:
                batch = self._ahead.take(draws, request, self._content())
            else:
                picked = draws.draw(request, None)
                draws.drawn(picked)
                arrays = draws.read(picked)
        made: tuple[Any, dict[str, Any]]
        made = draws.finish(request, picked, arrays) if batch is None else batch.result()
        return made

    def _request(self, n: int, with_info: bool) -> Request:
        """What to draw for a batch of n rows."""
        request = (*self._sampler.plan(n), with_info)
        if not self._span().total:
            raise EmptyBufferError("Cannot sample from an empty storage.")
        if absent := sorted(set(self._reading.stack_keys or ()) - self._specs.keys()):
            raise MissingKeyError(f"stack_keys: no {absent} in this buffer, there are {sorted(self._specs)}")
        if not self._knows_episodes and (self._sampler.needs_episodes or not self._reading.is_plain):
            raise SpecError(
                "nothing says where episodes end: no terminated, truncated or done, and no end_key or traj_key"
            )
        return request

    def _content(self) -> Any:
        """Equal to what it was only if nothing has changed that draws depend on."""
        storage = self._storage
        own = self._version, len(self._transform)
        return storage.version, storage.ring.counters.tobytes(), self._sampler.version, own

    # Priorities

    def update_priority(self, index: Any, priority: Any) -> None:
        """Sets the priorities of rows; of equal ids the last counts.

        Ids below 0 are left out, and so are rows that were overwritten since they were drawn; just the ids of the last
        `add` or `extend` mean what was written. A buffer without priorities warns, once.

        Args:
            index: int (n,), row ids as samples and `extend` give them.
            priority: `(n,)`, or one number for all, finite and at least 0; `(n, ...)` is reduced.

        Raises:
            SpecError, IndexError: they do not fit; nothing has changed.
        """
        with self._lock:
            if isinstance(self._sampler, PrioritizedSampler):
                rows, steps = self._written or (None, None)
                if rows is None or not np.array_equal(host_array("index", index).reshape(-1), rows):
                    steps = None
                self._sampler.update(self._storage, index, priority, steps)
            elif not self._has_warned:
                self._has_warned = True
                warnings.warn(f"update_priority: a {type(self._sampler).__name__} has no priorities", stacklevel=2)

    def update_tensordict_priority(self, data: Any) -> None:
        """Sets the priorities of a batch's rows to its column `priority_key`; also `update_dict_tensor_priority`.

        Steps that its `mask` says are padding are left out. Of a batch that was reshaped to slices the first step of
        each gets what all of its priorities are reduced to. Without priorities this does nothing.

        Raises:
            MissingKeyError: the batch has no `index`, or no such column.
            SpecError: they do not fit; nothing has changed.
        """
        if not isinstance(self._sampler, PrioritizedSampler):
            return
        flat = flat_items(data, "update_tensordict_priority")
        if absent := sorted({INDEX, self._priority_key} - set(flat)):
            raise MissingKeyError(f"update_tensordict_priority: no {absent} in the batch, there are {sorted(flat)}")
        index, priorities = (host_array(key, flat[key]) for key in (INDEX, self._priority_key))
        is_padded = MASK in self._sampler.fields and MASK in flat
        mask = host_array(MASK, flat[MASK]).astype(bool) if is_padded else None
        if index.ndim > 1:  # rows of several steps, of which each has the index, or slices: that of the first step
            index = index.reshape(len(index), -1)[:, 0]
            if mask is not None and priorities.ndim > 1:
                some = mask.reshape(len(mask), -1).any(axis=1)  # nothing, of a row of several axes that is padding
                index, priorities = index[some], reduced_inside(priorities[some], mask[some], self._sampler.reduction)
        elif mask is not None:
            index, priorities = index[mask], priorities[mask]
        self.update_priority(index, priorities)

    update_dict_tensor_priority = update_tensordict_priority

    # Else

    def close(self) -> None:
        """Ends the threads that make batches ahead; from then on none are."""
        with self._lock:
            wait = self._ahead.close()
        wait()

    @property
    def nbytes(self) -> int:
        """Bytes that the rows and priorities take, and what is kept about them."""
        return super().nbytes + self._sampler.nbytes

    def __repr__(self) -> str:
        columns = [f"{name}={spec.shape} {_named(spec)}" for name, spec in self._specs.items()]
        parts = [f"len={len(self)}", repr(self._settings), repr(self._sampler), repr(self._writer)]
        sizes = [] if self._batch_size is None else [f"batch_size={self._batch_size}"]
        return f"{type(self).__name__}({', '.join(parts + sizes + columns)})"


@set_module("rlstructs.replay")
class DictTensorPrioritizedReplayBuffer(DictTensorReplayBuffer):
    """A `DictTensorReplayBuffer` with a `PrioritizedSampler`; also called `TensorDictPrioritizedReplayBuffer`.

    Args:
        alpha, beta, eps, reduction: as of `PrioritizedSampler`.
        settings: of `DictTensorReplayBuffer`, but a sampler.

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


def _check_settings(prefetch: int | None, batch_size: int | None, pin_memory: bool) -> None:
    if prefetch and batch_size is None:
        raise SpecError("prefetch needs a batch_size: it says how large the batches are that are made ahead")
    if pin_memory and not torch.accelerator.is_available():
        raise StateError("pin_memory: torch sees no accelerator that page-locked memory would be for")


def _first_writer(writer: Writer) -> Writer:
    """What writes the rows that a storage comes with."""
    return RoundRobinWriter() if isinstance(writer, ImmutableWriter) else writer


def _named(spec: Spec) -> str:
    return "bfloat16" if spec.is_bfloat16 else str(spec.dtype)


TensorDictReplayBuffer = DictTensorReplayBuffer
TensorDictPrioritizedReplayBuffer = DictTensorPrioritizedReplayBuffer
