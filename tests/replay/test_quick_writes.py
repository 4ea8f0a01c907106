"""On every surface a row that needs no conversion is written quickly, and leaves what any other row leaves."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from frameworks import ON_HOST, make

from rlstructs.replay import (
    ChunkReplayBuffer,
    DictTensorPrioritizedReplayBuffer,
    DictTensorReplayBuffer,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedVectorReplayBuffer,
    ReplayBuffer,
    VectorReplayBuffer,
)

N_LANES, CAPACITY = 3, 5
DTYPES = {"obs": np.float32, "act": np.int64, "rew": np.float64, "terminated": np.bool_, "truncated": np.bool_}


@dataclass(frozen=True)
class Surface:
    """A class of memories.

    Attributes:
        make: makes one.
        add: adds a row (n, ...), or, to a memory of one lane, a row without that axis.
        n: lanes; 0 for one whose rows have no axis for lanes.
    """

    make: Callable[[], Any]
    add: Callable[[Any, dict[str, Any]], Any]
    n: int = N_LANES


def _memory(kind):
    def make_memory():
        shapes = {"obs": (2, 2), "act": (1,), "rew": (1,), "terminated": (1,), "truncated": (1,)}
        dtypes = {name: (np.dtype(dtype).name, shapes[name]) for name, dtype in DTYPES.items()}
        return make(kind, CAPACITY, N_LANES, dtypes)

    def add(made, row):
        made.add_samples(**{name: value.reshape((N_LANES, 2, 2) if name == "obs" else (N_LANES, 1))
                            for name, value in row.items()})  # fmt: skip

    return Surface(make_memory, add)


def _chunks(n):
    def make_buffer():
        buffer = ChunkReplayBuffer(CAPACITY * (n or 1), 0, n_lanes=n or 1)
        for name, dtype in DTYPES.items():
            buffer.setup_entry(name, dtype)
        return buffer

    return Surface(make_buffer, lambda made, row: made.append(row), n)


PER = {"alpha": 0.6, "beta": 0.4}
SURFACES = {
    **{f"memory of {kind}": _memory(kind) for kind in ON_HOST if kind != "jax"},  # which has no 64 bits
    "ReplayBuffer": Surface(lambda: ReplayBuffer(CAPACITY), lambda made, row: made.add(row), 0),
    "ReplayBuffer of a batch": Surface(lambda: ReplayBuffer(CAPACITY), lambda made, row: made.add(row, [0]), 1),
    "PrioritizedReplayBuffer": Surface(
        lambda: PrioritizedReplayBuffer(CAPACITY, **PER), lambda made, row: made.add(row), 0
    ),
    "VectorReplayBuffer": Surface(
        lambda: VectorReplayBuffer(CAPACITY * N_LANES, N_LANES), lambda made, row: made.add(row)
    ),
    "PrioritizedVectorReplayBuffer": Surface(
        lambda: PrioritizedVectorReplayBuffer(CAPACITY * N_LANES, N_LANES, **PER), lambda made, row: made.add(row)
    ),
    "ChunkReplayBuffer": _chunks(0),
    "ChunkReplayBuffer of lanes": _chunks(N_LANES),
    "DictTensorReplayBuffer": Surface(
        lambda: DictTensorReplayBuffer(storage=ListStorage(CAPACITY)), lambda made, row: made.add(row), 0
    ),
    "DictTensorPrioritizedReplayBuffer": Surface(
        lambda: DictTensorPrioritizedReplayBuffer(storage=ListStorage(CAPACITY), **PER),
        lambda made, row: made.add(row), 0,
    ),
}  # fmt: skip


@pytest.fixture(params=SURFACES)
def surface(request):
    return SURFACES[request.param]


def row_of(surface, rng):
    lead = (surface.n,) if surface.n else ()
    row = {"obs": rng.random((*lead, 2, 2)), "act": rng.integers(0, 9, lead), "rew": rng.random(lead)}
    row |= {name: rng.random(lead) < 0.3 for name in ("terminated", "truncated")}
    return {name: np.asarray(value, DTYPES[name])[()] for name, value in row.items()}


def unlike(surface, row):
    """The same numbers, as they need to be converted: of another dtype, or, without lanes, as lists."""
    return {**row, "obs": row["obs"].astype(np.float64) if surface.n else row["obs"].tolist()}


def content(made):
    """All that a store holds: counters, rows and episodes."""
    storage = made._storage
    rows = storage.span().by_lane(1)[0]
    found = {name: storage.gather([name], rows)[0].tolist() for name in sorted(storage.columns.specs)}
    episodes = storage.episodes.times(rows).tolist(), storage.episodes.remaining(rows).tolist()
    return storage.ring.counters.tolist(), found, episodes


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_quick_and_other_writes_leave_the_same(surface, library):
    rng, quick, other, n_quick = np.random.default_rng(0), surface.make(), surface.make(), 0
    for number in range(3 * CAPACITY):
        row = row_of(surface, rng)
        given = row if library == "numpy" else {name: torch.from_numpy(np.array(each)) for name, each in row.items()}
        version = quick._storage.version
        surface.add(quick, given)
        n_quick += quick._storage.version == version
        surface.add(other, unlike(surface, row) if number else row)
        assert content(quick) == content(other)
    assert n_quick >= 3 * CAPACITY - 2  # the first of them makes the columns


def test_what_has_to_be_converted_is_written_the_other_way(surface):
    rng, made = np.random.default_rng(1), surface.make()
    for _ in range(2):
        surface.add(made, row_of(surface, rng))
    row, version = row_of(surface, rng), made._storage.version
    surface.add(made, unlike(surface, row))
    assert made._storage.version > version
    version = made._storage.version
    surface.add(made, row_of(surface, rng))
    assert made._storage.version == version  # quickly again


def test_a_copy_writes_quickly_to_itself(surface):
    rng, made = np.random.default_rng(2), surface.make()
    for _ in range(2):
        surface.add(made, row_of(surface, rng))
    before = content(made)
    for copied in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        surface.add(copied, row_of(surface, rng))  # torchrl's finds its quick way with the first
        version = copied._storage.version
        surface.add(copied, row_of(surface, rng))
        assert copied._storage.version == version
        assert content(made) == before and content(copied) != before
