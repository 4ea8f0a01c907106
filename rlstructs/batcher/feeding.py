"""Prepares a memory so that workers write their rollouts to it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch

from rlstructs.batcher.engine import Engine
from rlstructs.batcher.lifecycle import Lifecycle
from rlstructs.batcher.transport import SlotTransport
from rlstructs.errors import SpecError, StateError
from rlstructs.replay.from_trajectories import POLICY_VERSION
from rlstructs.replay.store import Storage
from rlstructs.rollout.feeding import FedMemory, Feed
from rlstructs.shared.layout import Layout
from rlstructs.shared.reading import specs_of_steps
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
from rlstructs.structures.trajectories import Trajectories

# The lifecycle of the batcher that feeds a store, by store.
_fed: weakref.WeakKeyDictionary[Storage, weakref.ref[Lifecycle]] = weakref.WeakKeyDictionary()


def feed_memory(engine: Engine, life: Lifecycle, memory: Any, names: Mapping[str, str] | None) -> Feed:
    """Moves a memory to shared memory and defines its columns; returns what workers need to write to it.

    Args:
        engine: runs the rollouts.
        life: the lifecycle of the batcher.
        memory, names: see `RL_Batcher.feed`.

    Raises:
        TypeError, StateError, SpecError, OutOfMemoryError: the memory cannot be fed; none of its rows has changed.
    """
    transport = engine.transport
    if not isinstance(transport, SlotTransport):
        raise StateError("feed: these workers run on other machines: add what get returns to a RayReplay")
    if not hasattr(memory, "make_feed"):
        raise TypeError(f"feed: needs a memory of rlstructs.memories or rlstructs.replay, got {type(memory).__name__}")
    fed: FedMemory = memory.make_feed()
    storage = fed.storage
    owner = _fed.get(storage, lambda: None)()
    if owner is not None and owner is not life and not owner.is_closed:
        raise StateError("feed: another batcher feeds this memory: close it first")
    _check_size(fed, engine, transport.layout)
    example = _make_example(transport.layout)
    keys = list(example.trajectories.keys())
    names = fed.choose_names(keys) if names is None else dict(names)
    if not names:
        raise SpecError("feed: names is empty; needed are names of columns and the keys that they get")
    storage.share()
    fed.define_columns(example, names)
    for other, by in list(_fed.items()):
        if by() is life:
            del _fed[other]
    _fed[storage] = weakref.ref(life)
    return Feed(fed.writer, names)


def _check_size(fed: FedMemory, engine: Engine, layout: Layout) -> None:
    """Raises SpecError unless the rows of every environment have a place of their own."""
    columns, n_workers, n_timesteps = fed.storage.columns, engine.pool.n_workers, layout.n_timesteps
    if fed.takes_any_environment:
        if n_workers > 1:
            raise SpecError(f"feed: the memory has one lane, and {n_workers} workers cannot share it: needed are "
                            f"{layout.n_slots} lanes, one for each environment")  # fmt: skip
        n_timesteps *= layout.n_slots
    elif columns.n_lanes < layout.n_slots:
        raise SpecError(f"feed: the memory has {columns.n_lanes} lanes, needed are {layout.n_slots}, "
                        "one for each environment")  # fmt: skip
    if n_timesteps > columns.capacity:
        raise SpecError(f"feed: a lane of the memory has {columns.capacity} rows, and a rollout up to {n_timesteps}")


def _make_example(layout: Layout) -> Trajectories:
    """Makes one step of zeros, with the keys, shapes and dtypes of rollouts."""
    specs = {**specs_of_steps(layout.observation, layout.action), POLICY_VERSION: ((), torch.int64)}
    steps = {name: torch.zeros(1, 1, *shape, dtype=dtype, device="cpu") for name, (shape, dtype) in specs.items()}
    info = DictTensor({"env_index": torch.zeros(1, dtype=torch.int64, device="cpu")})
    return Trajectories(info, TemporalDictTensor(steps, torch.ones(1, dtype=torch.int64, device="cpu")))
