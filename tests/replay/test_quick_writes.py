"""On every surface a row that needs no conversion is written quickly, and leaves what any other row leaves."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from frameworks import ON_HOST, make
from replay_rows import row as transition

from rlstructs.errors import SpecError
from rlstructs.memories.torch import RandomMemory
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
from rlstructs.replay.rows.episodes import Episodes
from rlstructs.replay.rows.step_writer import StepWriter

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


# Forms in which the same row can come: all are written by a plan.
FORMS = {
    "as stored": lambda surface, row: row,
    "float64": lambda surface, row: {**row, "obs": np.asarray(row["obs"], np.float64)},
    "int32": lambda surface, row: {**row, "act": np.asarray(row["act"], np.int32)},
    "ends as numbers": lambda surface, row: {**row, "terminated": np.asarray(row["terminated"], np.uint8)},
    "torch": lambda surface, row: {name: torch.from_numpy(np.array(each)) for name, each in row.items()},
    "gradients": lambda surface, row: {**row, "obs": torch.tensor(row["obs"], requires_grad=True)},
    "strided": lambda surface, row: {**row, "obs": np.array(row["obs"].swapaxes(-1, -2)).swapaxes(-1, -2)},
}


def add_slowly(surface, made, row):
    """Adds a row by `Storage.write`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepWriter, "write", lambda *_, **__: None)
        surface.add(made, row)


def content(made):
    """All that a store holds: counters, rows and episodes."""
    storage = made._storage
    rows = storage.view().by_lane(1)[0]
    found = {name: storage.gather([name], rows)[0].tolist() for name in sorted(storage.columns.specs)}
    episodes = storage.episodes.times(rows).tolist(), storage.episodes.remaining(rows).tolist()
    return storage.ring.counters.tolist(), found, episodes


@pytest.mark.parametrize("form", FORMS)
def test_quick_and_other_writes_leave_the_same(surface, form):
    rng, quick, other, n_quick = np.random.default_rng(0), surface.make(), surface.make(), 0
    for number in range(3 * CAPACITY):
        row = row_of(surface, rng)
        version = quick._storage.clock.changes
        surface.add(quick, FORMS[form](surface, row) if number else row)  # the first row may define the columns
        n_quick += quick._storage.clock.changes == version
        add_slowly(surface, other, row)
        assert content(quick) == content(other)
    assert n_quick >= 3 * CAPACITY - 2  # the first of them makes the columns


LANES = {
    "memory of torch": lambda made, row, n: made.add_samples(
        **{name: value[:n].reshape((n, 2, 2) if name == "obs" else (n, 1)) for name, value in row.items()}
    ),
    "VectorReplayBuffer": lambda made, row, n: made.add(
        {name: value[:n] for name, value in row.items()}, np.arange(N_LANES)[::-1][:n]
    ),
}


@pytest.mark.parametrize("name", LANES)
@pytest.mark.parametrize("is_shared", [False, True])
def test_lanes_that_are_not_in_step_are_written_quickly(name, is_shared):
    """Rows of some lanes, or of all after that; in shared memory too."""
    rng, surface, add = np.random.default_rng(3), SURFACES[name], LANES[name]
    quick, other = surface.make(), surface.make()
    for made in (quick, other):
        surface.add(made, row_of(surface, np.random.default_rng(0)))
        if is_shared:
            made._storage.share()
    surface.add(quick, row := row_of(surface, rng))  # the writer looks at the store
    add_slowly(surface, other, row)
    for turn in range(4 * CAPACITY):
        row, n, version = row_of(surface, rng), (2, 1, 3)[turn % 3], quick._storage.clock.changes
        if n == N_LANES and len(set(quick._storage.ring.head.tolist())) > 1 and "memory" in name:
            n = 1
        add(quick, row, n)
        assert quick._storage.clock.changes == version
        add_slowly(Surface(surface.make, lambda made, given, n=n: add(made, given, n)), other, row)
        assert content(quick) == content(other)


def test_episodes_that_end_in_many_lanes_at_once_have_their_lengths():
    """One store, whatever the number of lanes: the loop for a few, and the arithmetic for many."""
    for n_lanes in (3, 40):
        rng, made = np.random.default_rng(n_lanes), VectorReplayBuffer(7 * n_lanes, n_lanes)
        ends = rng.random((30, n_lanes)) < 0.3
        for done in ends:
            zeros = np.zeros(n_lanes)
            made.add({"obs": zeros, "act": zeros, "rew": zeros, "terminated": done, "truncated": done & False})
        storage = made._storage
        slow = Episodes(storage.ring, storage.columns.order)
        by_slot = np.zeros((n_lanes, 7), bool)
        by_slot[:, np.arange(23, 30) % 7] = ends[23:].T
        slow.rebuild(by_slot)
        rows = storage.view().every_row()
        # What remains of an episode; its first steps may have been overwritten.
        assert storage.episodes.remaining(rows).tolist() == slow.remaining(rows).tolist()
        assert storage.episodes.end(rows).tolist() == slow.end(rows).tolist()


def test_a_copy_writes_quickly_to_itself(surface):
    rng, made = np.random.default_rng(2), surface.make()
    for _ in range(2):
        surface.add(made, row_of(surface, rng))
    before = content(made)
    for copied in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        surface.add(copied, row_of(surface, rng))  # torchrl's finds its quick way with the first
        version = copied._storage.clock.changes
        surface.add(copied, row_of(surface, rng))
        assert copied._storage.clock.changes == version
        assert content(made) == before and content(copied) != before


NOTHING = {"obs": 0.0, "act": 0, "terminated": False, "truncated": False}
PAIR = {name: np.zeros(2) for name in (*NOTHING, "rew")}


def test_an_info_that_a_float_cannot_hold_exactly_is_not_rounded():
    buffer = ReplayBuffer(9)
    for x in (0.5, 2**53 + 1):
        buffer.add({**NOTHING, "rew": 0.0, "info": {"x": x}})
    assert buffer[1].info.x == 2**53 + 1


@pytest.mark.parametrize("n", [0, 1])
def test_returns_are_sums_of_the_rewards_as_they_were_given(n):
    """Also where the column, float32 by the first row, rounds them."""
    buffer = VectorReplayBuffer(9, n) if n else ReplayBuffer(9)
    for rew, end in ((np.float32(0), False), (0.1, True)):
        row = {**NOTHING, "rew": rew, "terminated": end}
        added = buffer.add({name: np.full(n, value) for name, value in row.items()} if n else row)
    assert added[1].item() == 0.1


@pytest.mark.parametrize("kind", ["bfloat16", "gradient"])
def test_flags_of_any_tensor_end_episodes(kind):
    flags = torch.ones(2, requires_grad=True) if kind == "gradient" else torch.ones(2).bfloat16()
    buffer = VectorReplayBuffer(8, 2)
    for _ in range(2):
        _, _, lengths, _ = buffer.add({**PAIR, "terminated": flags})
        assert lengths.tolist() == [1, 1]


def test_flags_that_are_no_flags_are_named():
    buffer = VectorReplayBuffer(8, 2)
    buffer.add(PAIR)
    with pytest.raises(SpecError, match="^'terminated'"):
        buffer.add({**PAIR, "terminated": [[1], [2, 3]]})
    assert len(buffer) == 2


def test_an_empty_info_of_any_batch_makes_no_column():
    class Bag:  # like tianshou's, it is no Mapping
        def __init__(self, **items):
            self._items = items

        def keys(self):
            return self._items.keys()

        def __getitem__(self, name):
            return self._items[name]

    for info in (Bag(), Bag(a=Bag()), {}):
        buffer = ReplayBuffer(9)
        for _ in range(2):
            buffer.add(Bag(**NOTHING, rew=0.0, info=info))
        assert sorted(buffer._storage.columns.specs) == sorted([*NOTHING, "rew"])


def test_a_value_without_a_tensor_says_how_many_rows_come_whatever_its_axes():
    memory = make("torch", 4, 2, {"x": ("float32", (1,))})
    for turn in range(2):
        memory.add_samples(x=torch.full((2, 1), float(turn)), observations=torch.ones(2, 3, 4))
    assert memory.tensors["x"][:2, :, 0].tolist() == [[0, 0], [1, 1]]


@pytest.mark.parametrize("change", ["set", "end"])
def test_another_process_may_change_episodes_of_a_shared_memory(change):
    """It moves no head: a writer that remembers open episodes has to look."""
    memory = make("torch", 6, 2, {"x": ("float32", (1,)), "terminated": ("bool", (1,))})
    memory.share_memory()
    row = {"x": torch.ones(2, 1), "terminated": torch.zeros(2, 1, dtype=torch.bool)}
    for _ in range(3):
        memory.add_samples(**row)
    other = pickle.loads(ForkingPickler.dumps(memory))  # what a process that is started with it gets
    if change == "set":
        other.set_tensor_by_name("terminated", torch.ones(6, 2, 1, dtype=torch.bool))
    else:
        other._storage.end_episodes()
    memory.add_samples(**row)
    storage = memory._storage
    times = storage.episodes.times(storage.view().by_lane(1)[0]).reshape(2, 4)
    assert times[:, 3].tolist() == [0, 0]


def infos(rng, n):
    """Infos of n rows, or of one without an axis: some keys are missing, some hold text, some are empty."""
    one = {"text": "ab"[rng.integers(2)], "x": float(rng.random()), "d": [{}, {"a": 1}][rng.integers(2)], "none": None}
    kept = [name for name in one if rng.random() < (0.2 if name == "d" else 0.8)]
    if n is None:
        return {name: one[name] for name in kept}
    arrays = {
        "text": np.array(["a", "b", "c"][:n], object),
        "x": rng.random(n),
        "d": [{"a": i} for i in range(n)],
        "none": np.array([None] * n),
    }
    return {name: arrays[name] for name in kept}


def link_rows(rng, before, n):
    """Observations of 300 bytes and the next ones; the following row often has those as its own."""
    obs = rng.integers(0, 255, (n, 300), np.uint8)
    same = rng.random(n) < 0.5
    obs[same] = before[same]
    return obs, rng.integers(0, 255, (n, 300), np.uint8)


@pytest.mark.parametrize("seed", range(12))
def test_infos_ends_and_linked_observations_are_written_alike_by_a_plan(seed):
    rng = np.random.default_rng(seed)
    n = [None, 1, 3][seed % 3]
    quick, general = (ReplayBuffer(7) if n is None else VectorReplayBuffer(7 * n, n) for _ in range(2))
    general._intake.add_quickly = lambda batch, buffer_ids: None
    n_lanes, version, n_quick = n or 1, None, 0
    before = np.zeros((n_lanes, 300), np.uint8)
    for _ in range(60):
        lanes = None if n is None or rng.random() < 0.7 else rng.permutation(n)[: rng.integers(1, n + 1)]
        some = np.arange(n_lanes) if lanes is None else lanes
        obs, before[some] = link_rows(rng, before[some], some.size)
        row = {"obs": obs, "obs_next": before[some].copy(), "act": rng.random(some.size), "rew": rng.random(some.size)}
        row |= {name: rng.random(some.size) < 0.3 for name in ("terminated", "truncated")}
        row = {name: value[0] for name, value in row.items()} if n is None else row
        row["info"] = infos(rng, None if n is None else some.size)
        version = quick._storage.clock.changes
        added = [made.add(row, lanes) for made in (quick, general)]
        n_quick += version == quick._storage.clock.changes
        np.testing.assert_equal(*added)
        if rng.random() < 0.05:
            quick.reset(), general.reset()
            continue
        for index in (slice(None), int(added[0][0][-1])):
            ours, theirs = (made[index].to_dict() for made in (quick, general))
            np.testing.assert_equal(ours, theirs)
        np.testing.assert_equal(np.asarray(quick.done), quick.terminated | quick.truncated)
        np.testing.assert_equal(quick.prev(quick.sample_indices(0)), general.prev(general.sample_indices(0)))
    assert n_quick > 5


@pytest.mark.parametrize("n_lanes", [1, 4])
def test_parts_of_the_environments_single_rows_and_several_rows_are_written_quickly(n_lanes):
    """Also across the end of the memory, and after a write that leaves lanes out of step."""
    rng, capacity = np.random.default_rng(n_lanes), 7
    tensors = {"observations": ("float32", (3,)), "rewards": ("float32", (1,)), "terminated": ("bool", (1,))}
    quick, other = (make("torch", capacity, n_lanes, tensors) for _ in range(2))
    n_quick = 0
    for turn in range(60):
        left = n_lanes - quick.env_index
        n = int(rng.integers(0, (capacity if n_lanes == 1 else left) + 1))  # 0 is a row without an axis for lanes
        n = n_lanes if n_lanes > 1 and turn % 9 == 8 else n
        lead = (n,) if n else ()
        row = {
            "observations": torch.from_numpy(rng.random((*lead, 3), np.float32)),
            "rewards": torch.from_numpy(rng.random((*lead, 1))),  # float64
            "terminated": torch.from_numpy(rng.random((*lead, 1)) < 0.3),
        }
        version = quick._storage.clock.changes
        quick.add_samples(**row)
        n_quick += quick._storage.clock.changes == version
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StepWriter, "write", lambda *_, **__: None)
            other.add_samples(**row)
        assert content(quick) == content(other)
        assert (quick.memory_index, quick.env_index, len(quick)) == (other.memory_index, other.env_index, len(other))
    assert n_quick >= 58  # the first of them allocates the tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_flag_of_minus_zero_ends_no_episode(dtype):
    memory = RandomMemory(memory_size=4, num_envs=1, device="cpu")
    memory.create_tensor("observations", 2)
    memory.create_tensor("terminated", 1, dtype)
    for _ in range(3):
        memory.add_samples(observations=torch.zeros(2), terminated=torch.tensor([-0.0], dtype=dtype))
    assert memory._storage.episodes.open_lengths(slice(None)).tolist() == [3]


def test_an_empty_info_of_a_column_of_objects_is_an_empty_one():
    buffer = ReplayBuffer(4)
    for info in ("text", {}):
        buffer.add(transition(0, info=info))
    assert list(buffer.get([0, 1], "info")) == ["text", {}]
