"""Prepares a memory to be fed, by the workers or, where they cannot write to it, by the trainer."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping
from typing import Any, cast

import torch

from rlstructs.batcher.engine import Engine
from rlstructs.batcher.feed import Fed, FedByWorkers, FedHere
from rlstructs.batcher.lifecycle import Lifecycle
from rlstructs.batcher.transport import ROW_INFO, Batch, SlotTransport
from rlstructs.errors import SpecError, StateError
from rlstructs.replay.intake.trajectories import POLICY_VERSION
from rlstructs.rollout.feeding import FedMemory, Feed
from rlstructs.shared.layout import Layout
from rlstructs.shared.reading import specs_of_steps
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
from rlstructs.structures.trajectories import Trajectories
from rlstructs.workers import SharedArena
from rlstructs.workers.arena import pack

# The lifecycle of the batcher that feeds a memory, by its store, or by the memory if it has none in this process.
_fed: weakref.WeakKeyDictionary[Any, weakref.ref[Lifecycle]] = weakref.WeakKeyDictionary()


def feed_memory(engine: Engine, life: Lifecycle, memory: Any, names: Mapping[str, str] | None) -> Fed:
    """Prepares a memory, so that workers can write to it where that is possible.

    Args:
        engine: runs the rollouts.
        life: the lifecycle of the batcher.
        memory, names: see `RL_Batcher.feed`.

    Raises:
        TypeError, StateError, SpecError, OutOfMemoryError: the memory cannot be fed; none of its rows has changed.
    """
    if not hasattr(memory, "make_feed"):
        raise TypeError(f"feed: needs a memory of rlstructs.memories or rlstructs.replay, got {type(memory).__name__}")
    own: FedMemory = memory.make_feed()
    key = memory if own.storage is None else own.storage
    owner = _fed.get(key, lambda: None)()
    if owner is not None and owner is not life and not owner.is_closed:
        raise StateError("feed: another batcher feeds this memory: close it first, or call its feed(None)")
    example = _make_example(engine.transport.layout)
    names = own.choose_names([*example.trajectories, POLICY_VERSION]) if names is None else dict(names)
    if not names:
        raise SpecError("feed: names is empty; expected names of columns and the keys that they get")
    fed = _feed_by_workers(engine, life, own, example, names)
    if fed is None:
        is_here = isinstance(engine.transport, SlotTransport)
        fed = FedHere(memory.add_trajectories, names, Batch.lend if is_here else Batch.read)
    stop_feeding(life)
    _fed[key] = weakref.ref(life)
    return fed


def stop_feeding(life: Lifecycle) -> None:
    """Forgets which memory a batcher feeds."""
    for key, owner in list(_fed.items()):
        if owner() is life:
            del _fed[key]


def _feed_by_workers(
    engine: Engine, life: Lifecycle, own: FedMemory, example: Trajectories, names: Mapping[str, str]
) -> Fed | None:
    """Prepares a memory for workers; returns None if only this process can write to it."""
    transport, storage = engine.transport, own.storage
    if storage is None:
        return None
    n_slots, columns, has_one_lane = transport.layout.n_slots, storage.columns, own.takes_any_environment
    if columns.n_lanes < n_slots and not has_one_lane:
        raise SpecError(f"feed: the memory has {columns.n_lanes} lanes, expected {n_slots}, one for each environment")
    has_writers = isinstance(transport, SlotTransport) and not (has_one_lane and engine.pool.n_workers > 1)
    if own.is_for_one_process or not has_writers:
        return None
    n_timesteps = transport.layout.n_timesteps * (n_slots if has_one_lane else 1)
    if n_timesteps > columns.capacity:
        raise SpecError(f"feed: a lane of the memory has {columns.capacity} rows, and a rollout up to {n_timesteps}")
    if not _can_attach(engine, life):
        return None
    try:
        storage.share()
    except StateError:  # it lies on a device, or holds objects
        return None
    own.define_columns(example, names)
    feed = Feed(own.writer, names)
    return FedByWorkers(feed, storage, has_one_lane, engine.supervisor, cast(SlotTransport, transport))


def _can_attach(engine: Engine, life: Lifecycle) -> bool:
    """Whether workers can open shared memory of this process: not outside Linux, nor where /proc hides processes."""
    with contextlib.closing(SharedArena()) as arena, life.note_failures("feed", engine.is_halfway):
        return engine.supervisor.can_attach(pack(arena))


def _make_example(layout: Layout) -> Trajectories:
    """Makes one step of zeros, with the keys, shapes and dtypes of rollouts."""
    specs = specs_of_steps(layout.observation, layout.action)
    steps = {name: torch.zeros(1, 1, *shape, dtype=dtype, device="cpu") for name, (shape, dtype) in specs.items()}
    info = {name: torch.zeros(1, *shape, dtype=dtype, device="cpu") for name, (shape, dtype) in ROW_INFO.items()}
    return Trajectories(DictTensor(info), TemporalDictTensor(steps, torch.ones(1, dtype=torch.int64, device="cpu")))
