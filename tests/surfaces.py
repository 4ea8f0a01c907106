"""Every surface over the replay store, and what the tests of all of them ask of each."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from frameworks import EVERY_KIND, ON_HOST, make

from rlstructs import DictTensor, TemporalDictTensor, Trajectories
from rlstructs.distributed.shard import Shard, ShardSettings, columns_of
from rlstructs.replay import (
    CachedReplayBuffer,
    ChunkReplayBuffer,
    DictTensorPrioritizedReplayBuffer,
    DictTensorReplayBuffer,
    HERReplayBuffer,
    HERVectorReplayBuffer,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedVectorReplayBuffer,
    ReplayBuffer,
    TensorStorage,
    VectorReplayBuffer,
)
from rlstructs.replay.intake.trajectories import NAMES, take_trajectories
from rlstructs.replay.rows import on_disk, spec
from rlstructs.structures.arrays import raw_of

N_LANES, CAPACITY = 3, 20


def trajectories(start=0, n=7):
    """Steps of all lanes, which count from `start`; episodes end with every fourth."""
    shape = (N_LANES, n)
    number = torch.arange(start, start + N_LANES * n, dtype=torch.float32).reshape(shape)
    values = {
        "observation/frame": number[..., None].expand(*shape, 80),
        "_observation/frame": (number + 1)[..., None].expand(*shape, 80),
        "action/action": number.long(),
        "_observation/reward": number,
        "_observation/terminated": torch.arange(n).expand(shape) % 4 == 3,
        "_observation/truncated": torch.zeros(shape, dtype=torch.bool),
    }
    info = {"env_index": torch.arange(N_LANES)}
    return Trajectories(DictTensor(info), TemporalDictTensor(values, torch.full((N_LANES,), n)))


TIANSHOU = {
    "obs": "observation/frame", "act": "action/action", "rew": "_observation/reward",
    "terminated": "_observation/terminated", "truncated": "_observation/truncated",
}  # fmt: skip
GOALS = {"obs/achieved_goal": "observation/frame", "obs/desired_goal": "observation/frame", **TIANSHOU}
del GOALS["obs"]
TORCHRL = {"obs": "observation/frame", "action": "action/action", "next/reward": "_observation/reward",
           "next/terminated": "_observation/terminated", "next/truncated": "_observation/truncated"}  # fmt: skip


@dataclass(frozen=True)
class Surface:
    """A class of memories.

    Attributes:
        make: makes one of `N_LANES` lanes, or of one, with `CAPACITY` rows each.
        names: column -> key of trajectories, the frame first and the action second.
        is_one: whether it appends one trajectory after another to a single lane.
        stores: the stores of a memory, in which an episode is in one piece.
    """

    make: Callable[[], Any]
    names: Mapping[str, str]
    is_one: bool = False
    stores: Callable[[Any], list[Any]] = field(default=lambda made: [made._storage])

    @property
    def frame(self) -> str:
        return next(iter(self.names))

    @property
    def action(self) -> str:
        return next(name for name, key in self.names.items() if key == "action/action")

    def episodes(self, made: Any, column: str) -> list[list[float]]:
        """The first number of each row in a column, in a list for each episode, sorted."""
        found: list[list[float]] = []
        for store in self.stores(made):
            rows = store.view().by_lane(1)[0]
            if not rows.size:
                continue
            lanes = store.columns.lanes(rows)
            values = store.columns.host(column, store.gather([column], rows)[0]).reshape(len(rows), -1)[:, 0]
            begins = np.append(True, lanes[1:] != lanes[:-1]) | store.episodes.begin(rows)  # or goes on in what is left
            for value, begin in zip(values.tolist(), begins, strict=True):
                found += [[]] if begin else []
                found[-1].append(value)
        return sorted(found)


class ShardMemory(Shard):
    """A shard of a `RayReplay` that takes trajectories, as the trainer hands them to it."""

    def add_trajectories(self, trajectories, names):
        steps = take_trajectories(trajectories, names, N_LANES, limit="the memory's num_envs")
        dtypes = {name: values.dtype for name, values in steps.values.items()}
        steps.values.update({name: raw_of(values) for name, values in steps.values.items()})
        self.extend(dtypes, 1.0, columns_of(steps))


def _distance(achieved, desired):
    return -np.abs(achieved - desired).reshape(len(achieved), -1).sum(axis=1)


def _memory(kind, cls, **settings):
    return Surface(lambda: make(kind, CAPACITY, N_LANES, cls=cls, **settings), NAMES)


def _tianshou(cls, *args, n=N_LANES, names=TIANSHOU, **settings):
    sizes = (CAPACITY,) if n == 1 else (n * CAPACITY, n)
    return Surface(lambda: cls(*sizes, *args, **settings), names, is_one=n == 1)


PER = {"alpha": 0.6, "beta": 0.4}


def _surfaces(storage=ListStorage, **settings):
    """Every surface beside skrl's memories; all with these settings."""

    def tianshou(cls, *args, **more):
        return _tianshou(cls, *args, **more, **settings)

    return {
        "ReplayBuffer": tianshou(ReplayBuffer, n=1),
        "PrioritizedReplayBuffer": tianshou(PrioritizedReplayBuffer, n=1, **PER),
        "HERReplayBuffer": tianshou(HERReplayBuffer, _distance, 9, n=1, names=GOALS),
        "VectorReplayBuffer": tianshou(VectorReplayBuffer),
        "PrioritizedVectorReplayBuffer": tianshou(PrioritizedVectorReplayBuffer, **PER),
        "HERVectorReplayBuffer": tianshou(
            HERVectorReplayBuffer, compute_reward_fn=_distance, horizon=9, names=GOALS
        ),
        "CachedReplayBuffer": Surface(
            lambda: CachedReplayBuffer(ReplayBuffer(N_LANES * CAPACITY, **settings), N_LANES, CAPACITY), TIANSHOU,
            stores=lambda made: [made.main_buffer._storage, made._storage],
        ),
        "ChunkReplayBuffer": Surface(lambda: ChunkReplayBuffer(CAPACITY, 0, **settings), NAMES, is_one=True),
        "ChunkReplayBuffer of lanes": Surface(
            lambda: ChunkReplayBuffer(N_LANES * CAPACITY, 0, n_lanes=N_LANES, enable_prioritized=True, **settings),
            NAMES,
        ),
        "DictTensorReplayBuffer": Surface(
            lambda: DictTensorReplayBuffer(storage=storage(CAPACITY, **settings), generator=0), TORCHRL,
            is_one=True,
        ),
        "DictTensorPrioritizedReplayBuffer": Surface(
            lambda: DictTensorPrioritizedReplayBuffer(storage=storage(CAPACITY, **settings), generator=0, **PER),
            TORCHRL, is_one=True,
        ),
        "Shard": Surface(
            lambda: ShardMemory(ShardSettings(CAPACITY, 0.6, NAMES, **settings), N_LANES, 0), NAMES,
            stores=lambda made: [made._memory._storage],
        ),
    }  # fmt: skip


# Frames in these tests are smaller than those that are worth it.
spec.LEAST = 1
COMPRESSED = {"compression": dict.fromkeys(
    ["observations", "next_observations", "obs", "obs_next", "obs/achieved_goal", "obs/desired_goal", "next/obs"],
    "zstd:1",
)}  # fmt: skip
# Columns of longer rows than a number are read and written by row; the others are mapped.
on_disk.LARGE = 9
FOLDERS, _numbers = tempfile.TemporaryDirectory(prefix="rlstructs-"), itertools.count()


class _NewPath(os.PathLike):
    """Another folder each time."""

    def __fspath__(self):
        return f"{FOLDERS.name}/{next(_numbers)}"


ON_DISK = {"path": _NewPath()}
SURFACES = _surfaces()
EVERY_SURFACE = [
    *(pytest.param(_memory(*(kind.values if hasattr(kind, "values") else [kind]), "PrioritizedMemory"),
                   marks=getattr(kind, "marks", ()), id=f"memory of {getattr(kind, 'values', [kind])[0]}")
      for kind in EVERY_KIND),
    *(pytest.param(surface, id=name) for name, surface in SURFACES.items()),
    *(pytest.param(_memory(kind, "PrioritizedMemory", **COMPRESSED), id=f"compressed memory of {kind}")
      for kind in ON_HOST),
    *(pytest.param(surface, id=f"compressed {name}") for name, surface in _surfaces(**COMPRESSED).items()
      if name != "Shard"),
    *(pytest.param(_memory(kind, "PrioritizedMemory", **ON_DISK, **also), id=f"on-disk {what}memory of {kind}")
      for what, also in (("", {}), ("compressed ", COMPRESSED)) for kind in ON_HOST),
    *(pytest.param(surface, id=f"on-disk {what}{name}") for what, also in (("", {}), ("compressed ", COMPRESSED))
      for name, surface in _surfaces(TensorStorage, **ON_DISK, **also).items() if name != "Shard"),
]  # fmt: skip
