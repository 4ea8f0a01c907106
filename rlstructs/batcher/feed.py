"""Feeds a memory as rollouts are ordered, handed out, lost or dropped.

Workers write to it where they can.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from rlstructs.batcher.lifecycle import Lifecycle
from rlstructs.batcher.supervisor import Supervisor
from rlstructs.batcher.transport import ROW_INFO, Batch, SlotTransport, Transport
from rlstructs.batcher.worker_record import RolloutOrder
from rlstructs.checks import UNKNOWN
from rlstructs.errors import SpecError, StateError
from rlstructs.replay.intake.trajectories import POLICY_VERSION
from rlstructs.replay.rows.lanes import HEAD, RESERVED
from rlstructs.replay.rows.store import Storage
from rlstructs.rollout.feeding import FedMemory, Feed
from rlstructs.shared.layout import Layout
from rlstructs.shared.slots import Slots
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
from rlstructs.structures.trajectories import Trajectories
from rlstructs.workers import SharedArena
from rlstructs.workers.arena import pack


class Fed(Protocol):
    """A memory that is fed.

    Attributes:
        feed: what workers need to write to it; None if they do not.
        first_numbers: by worker, the number of its first rollout that the memory gets.
    """

    feed: Feed | None
    first_numbers: Sequence[int]

    def hide(self) -> None:
        """Called before rollouts are ordered."""

    def show(self, orders: Mapping[int, RolloutOrder], batch: Batch) -> None:
        """Called when rollouts, by worker, are about to be handed out.

        An exception leaves the rollouts as they are.
        """

    def restart(self, workers: Collection[int]) -> None:
        """Called when these workers have ended, before their successors begin."""

    def drop(self) -> None:
        """Called when rollouts that were under way are dropped, and no worker writes."""

    def resume(self, first_numbers: Sequence[int], version_before: int) -> None:
        """Called when a loaded state has rollouts that wait; no worker writes.

        They wait to be handed out.

        Args:
            first_numbers: by worker, the number of its first rollout that the memory gets.
            version_before: the number of updates that the workers' own counts leave out.
        """


class FedByWorkers:
    """A memory written by workers; the trainer sees only rollouts it was handed.

    Workers are ahead of that. Rows that the rollouts under way may overwrite are hidden too, written or not, so that
    draws do not depend on what workers are doing.

    Args:
        feed: writes to the store.
        storage: the store, in shared memory.
        has_one_lane: whether a single worker appends to a single lane, one environment after another.
        supervisor, transport: of the rollouts.
    """

    def __init__(
        self, feed: Feed, storage: Storage, has_one_lane: bool, supervisor: Supervisor, transport: SlotTransport
    ) -> None:
        self.feed: Feed | None = feed
        self.first_numbers: Sequence[int] = ()
        self._storage, self._has_one_lane = storage, has_one_lane
        self._supervisor, self._transport = supervisor, transport
        # The counters by which this process reads while rollouts are under way.
        self._shown = storage.counters.shared.copy()
        # The steps that follow the rows shown: workers may have left gaps in what they wrote since.
        self._following = storage.counters.following().copy()
        # Below these steps rows may have been overwritten by rollouts that were lost.
        self._lost = self._shown[RESERVED].copy()
        # Gives the memory back if the batcher is dropped without `close`.
        weakref.finalize(self, storage.take_back, self._shown).atexit = False

    @property
    def _is_ahead(self) -> bool:
        """Whether rollouts are under way that the memory does not show."""
        return self._storage.counters.shown is self._shown

    def hide(self) -> None:
        """Hides the rows that workers will write until they are handed out."""
        if not self._is_ahead:
            with self._storage.lock:  # after another thread has saved the memory
                self._hide(self._storage.counters.shared, self._storage.counters.following())
        self._reserve(dict.fromkeys(range(len(self._transport.blocks)), self._supervisor.run_ahead + 1))

    def show(self, orders: Mapping[int, RolloutOrder], batch: Batch) -> None:
        """Shows the rows of rollouts that are handed out."""
        if not self._is_ahead:  # they were ordered before `feed`
            return
        for worker, order in orders.items():
            lanes, n = self._lanes_of(worker), self._count_rows(worker, order)
            self._shown[HEAD][lanes] += n
            first = UNKNOWN if self._has_one_lane else self._slots_of(order).first_steps[lanes]
            self._following[lanes] = np.where(n, np.where(first == UNKNOWN, UNKNOWN, first + n), self._following[lanes])
        records = self._supervisor.records
        n_under_way = {worker: len(record.orders) - (worker in orders) for worker, record in enumerate(records)}
        self._reserve(n_under_way)
        if not any(n_under_way.values()):  # both are the same now
            self._storage.show_all()

    def restart(self, workers: Collection[int]) -> None:
        """Removes rows that workers had written of a rollout lost with them."""
        if not self._is_ahead:
            return
        records, shared = self._supervisor.records, self._storage.counters.shared
        for worker in workers:
            lanes = self._lanes_of(worker)
            done = [self._count_rows(worker, order) for order in records[worker].orders if order.is_done]
            shared[HEAD][lanes] = self._shown[HEAD][lanes] + sum(done)
            self._lost[lanes] = shared[RESERVED][lanes]
        # Only for these workers: after a `reset` the other records are empty.
        self._reserve({worker: len(records[worker].orders) for worker in workers})

    def drop(self) -> None:
        """Removes the rows of rollouts that were not handed out."""
        self._storage.take_back(self._shown)

    def resume(self, first_numbers: Sequence[int], version_before: int) -> None:
        """Writes the waiting rollouts of a loaded state again, and hides them.

        They are shown when they are handed out.
        """
        assert self.feed is not None
        self.first_numbers = first_numbers
        orders = [record.orders for record in self._supervisor.records]
        if not any(orders):
            return
        before, following = self._storage.counters.shared.copy(), self._storage.counters.following()
        for worker, order in ((worker, order) for worker, each in enumerate(orders) for order in each):
            if not order.is_lost and order.number >= first_numbers[worker]:
                batch = self._transport.make_batch({worker: order}, version_before, version_before)
                self.feed.writer.add_trajectories(batch.read(), self.feed.names)
        self._hide(before, following)
        self._reserve({worker: len(each) for worker, each in enumerate(orders)})

    def _hide(self, counters: np.ndarray, following: np.ndarray) -> None:
        """Makes this process read by a private copy of the counters.

        From here on it does not see what workers add to the shared ones.
        """
        self._shown[...], self._lost[...], self._following[...] = counters, counters[RESERVED], following
        self._storage.show(self._shown, self._following, _only_in_this_thread(call_weakly(self._supervisor.settle)))

    def _lanes_of(self, worker: int) -> slice:
        block = self._transport.blocks[worker]
        return slice(0, 1) if self._has_one_lane else slice(block.start, block.stop)

    def _count_rows(self, worker: int, order: RolloutOrder) -> Any:
        """Returns the number of rows that a rollout wrote to each lane.

        An int if the worker has one lane, otherwise int64 (E,); 0 for a rollout that is lost or older than the memory's
        first.
        """
        if order.is_lost or order.number < self.first_numbers[worker]:
            return 0
        block = self._transport.blocks[worker]
        lengths = self._slots_of(order).lengths[block.start : block.stop]
        return lengths.sum() if self._has_one_lane else lengths

    def _slots_of(self, order: RolloutOrder) -> Slots:
        """Returns the slots that a rollout was written to."""
        slots = self._transport.slots
        return slots[order.number % len(slots)]

    def _reserve(self, n_rollouts: Mapping[int, int]) -> None:
        """Hides the rows that so many rollouts of these workers may overwrite."""
        heads, reserved, capacity = self._shown[HEAD], self._shown[RESERVED], self._storage.columns.capacity
        for worker, n in n_rollouts.items():
            lanes, n_each = self._lanes_of(worker), len(self._transport.blocks[worker]) if self._has_one_lane else 1
            least = heads[lanes] + n * self._transport.layout.n_timesteps * n_each
            # A capacity after the head hides all rows.
            reserved[lanes] = np.minimum(np.maximum(least, self._lost[lanes]), heads[lanes] + capacity)


class FedHere:
    """A memory to which the trainer adds rollouts as it hands them out.

    Workers cannot write to it.

    Args:
        add: `add_trajectories` of the memory.
        names: column -> key of the trajectories.
        take: gives the trajectories of a batch; they are used at once.
    """

    feed: Feed | None = None
    first_numbers: Sequence[int] = ()

    def __init__(
        self,
        add: Callable[[Trajectories, Mapping[str, str]], None],
        names: Mapping[str, str],
        take: Callable[[Batch], Trajectories],
    ) -> None:
        self._add, self._names, self._take = add, names, take

    def hide(self) -> None:
        """Does nothing."""

    def show(self, orders: Mapping[int, RolloutOrder], batch: Batch) -> None:
        """Adds the rollouts."""
        self._add(self._take(batch), self._names)

    def restart(self, workers: Collection[int]) -> None:
        """Does nothing: lost rollouts are not handed out."""

    def drop(self) -> None:
        """Does nothing."""

    def resume(self, first_numbers: Sequence[int], version_before: int) -> None:
        """Does nothing: rollouts are added when they are handed out."""


def call_weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Makes a function that calls a method while its object is alive.

    It holds only a weak reference, and does nothing afterwards. Avoids a reference cycle, so that dropping the batcher
    ends its workers at once.
    """
    found = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        alive = found()
        if alive is not None:
            alive(*arguments)

    return call


def _only_in_this_thread(settle: Callable[[], None]) -> Callable[[], None]:
    """Makes a function that calls `settle`, and raises StateError in other threads.

    Two threads that take the replies of workers would take each other's.
    """
    own = threading.get_ident()

    def call() -> None:
        if threading.get_ident() != own:
            raise StateError(
                "workers write to this memory: only the thread that uses their batcher can save or copy it; other "
                "threads can once no rollout is under way"
            )
        settle()

    return call


class Feeding:
    """Owns the memory that a batcher feeds, and which rollouts are written to it.

    Args:
        supervisor, transport: of the rollouts.

    Attributes:
        fed: the memory; None for none. Keeping it keeps its shared memory open, which successors of workers open too.
    """

    def __init__(self, supervisor: Supervisor, transport: Transport) -> None:
        self._supervisor, self._transport = supervisor, transport
        self.fed: Fed | None = None
        # After a load, until `feed`: each worker's first rollout for the memory.
        self._waiting_from: Sequence[int] | None = None
        supervisor.on_restart = call_weakly(self._restart)

    @property
    def first_numbers(self) -> Sequence[int] | None:
        """By worker, its first rollout for the memory; None if none is fed."""
        return None if self.fed is None else self.fed.first_numbers

    def prepare(self, memory: Any, names: Mapping[str, str] | None, life: Lifecycle) -> Fed | None:
        """Prepares a memory, so that workers can write to it where possible.

        None ends feeding.

        Args:
            memory, names: see `RL_Batcher.feed`.
            life: the lifecycle of the batcher.

        Raises:
            TypeError, StateError, SpecError, OutOfMemoryError: the memory cannot be fed; none of its rows has changed.
        """
        if memory is None:
            _stop_feeding(life)
            return None
        if not hasattr(memory, "make_feed"):
            raise TypeError(
                f"feed: needs a memory of rlstructs.memories or rlstructs.replay, got {type(memory).__name__}"
            )
        own: FedMemory = memory.make_feed()
        key = memory if own.storage is None else own.storage
        owner = _owners.get(key, lambda: None)()
        if owner is not None and owner is not life and not owner.is_closed:
            raise StateError("feed: another batcher feeds this memory: close it first, or call its feed(None)")
        example = _make_example(self._transport.layout)
        keys = dict.fromkeys([*example.trajectories, POLICY_VERSION])  # steps may have versions of their own
        names = own.choose_names([*keys]) if names is None else dict(names)
        if not names:
            raise SpecError("feed: names is empty; expected names of columns and the keys that they get")
        fed = self._prepare_workers(own, example, names, life)
        if fed is None:
            is_here = isinstance(self._transport, SlotTransport)
            fed = FedHere(memory.add_trajectories, names, Batch.lend if is_here else Batch.read)
        _stop_feeding(life)
        _owners[key] = weakref.ref(life)
        return fed

    def _prepare_workers(
        self, own: FedMemory, example: Trajectories, names: Mapping[str, str], life: Lifecycle
    ) -> Fed | None:
        """Prepares a memory for workers; None if only this process can write to it."""
        transport, storage, n_workers = self._transport, own.storage, self._supervisor.pool.n_workers
        if storage is None:
            return None
        n_slots, columns, has_one_lane = transport.layout.n_slots, storage.columns, own.takes_any_environment
        if columns.n_lanes < n_slots and not has_one_lane:
            raise SpecError(
                f"feed: the memory has {columns.n_lanes} lanes, expected {n_slots}, one for each environment"
            )
        # How many rows leave for lack of bytes depends on what is under way: the trainer adds these rollouts itself.
        if (
            columns.compression.max_bytes is not None
            or own.is_for_one_process
            or not isinstance(transport, SlotTransport)
            or (has_one_lane and n_workers > 1)
        ):
            return None
        n_timesteps = transport.layout.n_timesteps * (n_slots if has_one_lane else 1)
        if n_timesteps > columns.capacity:
            raise SpecError(
                f"feed: a lane of the memory has {columns.capacity} rows, and a rollout up to {n_timesteps}"
            )
        # Outside Linux, and where /proc hides processes, workers cannot open shared memory of this process.
        with (
            contextlib.closing(SharedArena()) as arena,
            life.note_failures("feed", lambda: self._supervisor.is_halfway),
        ):
            if not self._supervisor.can_attach(pack(arena)):
                return None
        try:
            storage.share()
        except StateError:  # it lies on a device, or holds objects
            return None
        own.define_columns(example, names)
        return FedByWorkers(Feed(own.writer, names), storage, has_one_lane, self._supervisor, transport)

    def feed(self, fed: Fed | None, version_before: int) -> None:
        """Has the steps of later rollouts written to a memory, or to none.

        Args:
            fed: what `prepare` returned.
            version_before: the number of updates that the workers' own counts leave out.
        """
        first_numbers = [record.n_ordered for record in self._supervisor.records]
        feed = None if fed is None else fed.feed
        if feed is not None or (self.fed is not None and self.fed.feed is not None):
            own = feed and dataclasses.replace(feed, first_numbers=first_numbers, version_before=version_before)
            self._supervisor.feed(pack(own))
        self.drop()
        self.fed = fed
        if fed is not None:
            fed.first_numbers = first_numbers

    def resume(self, first_numbers: Sequence[int] | None, version_before: int) -> None:
        """Feeds the same memory in a loaded state.

        `write_waiting` follows, once the memory has loaded its own state.

        Args:
            first_numbers: by worker, the number of its first rollout that the memory gets of those that wait to be
                handed out; None for none.
            version_before: see `feed`.
        """
        self._waiting_from = first_numbers
        self.feed(self.fed, version_before)

    def write_waiting(self, version_before: int) -> None:
        """Writes rollouts of a loaded state, which wait to be handed out."""
        if self.fed is not None and self._waiting_from is not None:
            self.fed.resume(self._waiting_from, version_before)
            self._waiting_from = None

    def hide(self) -> None:
        """Called before rollouts are ordered."""
        self._waiting_from = None
        if self.fed is not None:
            self.fed.hide()

    def drop(self) -> None:
        """Takes back what workers have written of rollouts that will not be handed out."""
        if self.fed is not None:
            self.fed.drop()

    def forget(self) -> None:
        """Feeds no memory from now on, when all workers have ended."""
        self.fed = None

    def _restart(self, workers: Collection[int]) -> None:
        if self.fed is not None:
            self.fed.restart(workers)


# The lifecycle of the batcher that feeds a memory, by its store, or by the memory if it has none in this process.
_owners: weakref.WeakKeyDictionary[Any, weakref.ref[Lifecycle]] = weakref.WeakKeyDictionary()


def _stop_feeding(life: Lifecycle) -> None:
    """Forgets which memory a batcher feeds."""
    for key, owner in list(_owners.items()):
        if owner() is life:
            del _owners[key]


def _make_example(layout: Layout) -> Trajectories:
    """Makes one step of zeros, with the keys, shapes and dtypes of rollouts."""
    specs = layout.steps.items()
    steps = {name: torch.zeros(1, 1, *shape, dtype=dtype, device="cpu") for name, (shape, dtype) in specs}
    info = {name: torch.zeros(1, *shape, dtype=dtype, device="cpu") for name, (shape, dtype) in ROW_INFO.items()}
    return Trajectories(DictTensor(info), TemporalDictTensor(steps, torch.ones(1, dtype=torch.int64, device="cpu")))
