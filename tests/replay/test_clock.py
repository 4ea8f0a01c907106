"""Whoever remembers something of a store sees every change of it that matters, those of other processes too."""

from __future__ import annotations

import multiprocessing
import pickle
import threading

import numpy as np
import pytest
import torch

from rlstructs.checkpoints.memory_parts import Mark, find_changed
from rlstructs.distributed.shard import ShardMemory
from rlstructs.errors import StateError
from rlstructs.integrations import sb3
from rlstructs.memories.torch import PrioritizedMemory, RandomMemory
from rlstructs.replay import (
    ChunkReplayBuffer,
    DictTensorReplayBuffer,
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
)
from rlstructs.replay.draw.priorities import Priorities
from rlstructs.replay.rows.episodes import EPISODE
from rlstructs.replay.rows.lanes import Clock
from rlstructs.replay.rows.spec import Spec
from rlstructs.replay.rows.step_writer import StepWriter
from rlstructs.replay.rows.store import ALL, Storage
from rlstructs.replay.tianshou.table import Table
from rlstructs.replay.torchrl.slice_samplers import Slices

CAPACITY, N_ROWS = 8, 6
ENDS = ("terminated", "truncated")
FLOAT, BOOL = Spec(np.dtype(np.float32)), Spec(np.dtype(bool))


def block(values, ends=()):
    """Rows with these values, of which those at `ends` end an episode."""
    done = np.isin(np.arange(len(values)), ends)[None]
    return {"rew": np.array([values], np.float32), "terminated": done, "truncated": np.zeros_like(done)}


def write(storage, values, ends=()):
    rows = block(values, ends)
    storage.write(rows, done=rows["terminated"])


def make_storage(is_shared):
    storage = Storage(1, CAPACITY)
    storage.add_columns({"rew": FLOAT, "terminated": BOOL, "truncated": BOOL})
    storage.track_episodes()
    if is_shared:
        storage.share()
    write(storage, range(N_ROWS), ends=(3,))
    return storage


def write_quickly(storage):
    row = {name: values[:, 0] for name, values in block([9.0]).items()}
    assert StepWriter(storage, ENDS).write(row) is not None


def rewrite(storage):
    rows = np.array([1, 2])
    storage.put({"rew": np.full(2, 5.0, np.float32), "terminated": np.ones(2, bool)}, rows)


def end_elsewhere(storage):
    storage.rebuild_episodes(np.isin(np.arange(CAPACITY), (1, 4))[None])


def restore_other_episodes(storage):
    """Loads other episodes with counters that the store has had."""
    counters, pairs = storage.ring.counters.copy(), storage.episodes.columns.cells[EPISODE].copy()
    following = storage.counters.following()
    end_elsewhere(storage)
    other = storage.episodes.columns.cells[EPISODE].copy()
    storage.restore(counters, pairs, following)
    storage.clear()
    storage.restore(counters, other, following)


def take_larger_columns(storage):
    storage.clear()
    columns = storage.columns.emptied(CAPACITY)
    columns.add_all({**storage.columns.specs, "act": FLOAT})
    storage.take_columns(columns)


def pin_fewer_rows(storage):
    counters = storage.ring.counters.copy()
    counters[2] -= 2  # the heads
    storage.show(counters, storage.counters.following(), lambda: None)


# By any process of a shared store.
SHARED_CHANGES = {
    "write": lambda storage: write(storage, [7.0, 8.0, 9.0], ends=(1,)),
    "quick write": write_quickly,
    "clear": lambda storage: storage.clear(),
    "clear and write": lambda storage: (storage.clear(), write(storage, [7.0] * N_ROWS, ends=(1,))),
    "rewrite in place": rewrite,
    "end": lambda storage: storage.end_episodes(),
    "other ends": end_elsewhere,
    "other episodes": restore_other_episodes,
}
CHANGES = {
    **SHARED_CHANGES,
    "new column": lambda storage: storage.add_columns({"act": FLOAT}),
    "exchanged column": lambda storage: storage.exchange(
        {"rew": (Spec(np.dtype(np.float64)), np.arange(CAPACITY)), "truncated": (BOOL, np.arange(CAPACITY) == 2)}
    ),
    "other columns": take_larger_columns,
    "larger capacity": lambda storage: storage.grow(2 * CAPACITY),
    "share": lambda storage: storage.share(),
    "fewer rows pinned": pin_fewer_rows,
}


def contents(storage):
    """What a store holds."""
    view = storage.view()
    rows = view.every_row()
    columns = {name: repr(storage.gather([name], rows)[0].tolist()) for name in storage.columns.specs}  # NaN as text
    return rows.tolist(), columns, view.depths(rows).tolist(), view.remaining(rows).tolist()


def reads_rows(storage):
    return lambda: (storage.view().every_row().tolist(), storage.view(2).every_row().tolist())


def reads_slices(storage):
    slices = Slices(strict=False)

    def read():
        view = storage.view()
        return [each.tolist() for each in slices.draw(view, 30, 2, np.random.default_rng(0))] if view.total else None

    return read


def reads_windows(storage):
    shard = ShardMemory.__new__(ShardMemory)
    return lambda: shard._find_whole(storage.view(2)).tolist()


def reads_priorities(storage):
    priorities = Priorities(storage.columns.n_rows, 1, 0.5, clock=storage.clock)

    def read():
        priorities.follow(storage.view())
        return priorities.tree.values[: len(storage)].tolist(), priorities.tree.total

    return read


def reads_keys(storage):
    table = Table(storage, CAPACITY, False)
    return lambda: sorted(table.specs.items())


def reads_ends(storage):
    table = Table(storage, CAPACITY, False)
    return lambda: table.ends()[storage.view().every_row()].tolist()


def reads_by_writing(storage):
    writer = StepWriter(storage, ENDS)

    def read():
        rows = {name: np.zeros(1, spec.dtype) for name, spec in storage.columns.specs.items()}
        if writer.write(rows) is None and storage.counters.shown is None:
            storage.write({name: values[:, None] for name, values in rows.items()})
        return contents(storage)

    return read


READERS = {
    "rows": reads_rows,
    "slices": reads_slices,
    "windows": reads_windows,
    "priorities": reads_priorities,
    "keys": reads_keys,
    "ends": reads_ends,
    "quick writes": reads_by_writing,
}


def change_in_other_process(change, storage):
    process = multiprocessing.get_context("fork").Process(target=change, args=(storage,))
    process.start()
    process.join()
    assert process.exitcode == 0


def check_reader(reader, change, is_shared, in_process):
    """A reader that has read before says after a change what a new one says of the same rows."""
    found = []
    for remembers in (True, False):
        storage = make_storage(is_shared)
        read = READERS[reader](storage)
        read()
        in_process(change, storage)
        found.append(read() if remembers else READERS[reader](storage)())
    assert found[0] == found[1]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_reader_that_remembers_says_after_a_change_what_a_new_one_says(reader, change):
    if (reader, change) == ("priorities", "larger capacity"):
        pytest.skip("who lets a store grow lets its priorities grow")
    check_reader(reader, CHANGES[change], False, lambda made, storage: made(storage))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("change", SHARED_CHANGES)
def test_it_does_when_another_process_makes_the_change(reader, change):
    check_reader(reader, SHARED_CHANGES[change], True, change_in_other_process)


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_but_a_quick_write_moves_the_clock(change):
    storage = make_storage(False)
    before = storage.now()
    CHANGES[change](storage)
    assert storage.now() != before
    assert storage.now() == storage.now() and storage.now().columns % 2 == 0


@pytest.mark.parametrize("change", SHARED_CHANGES)
def test_changes_of_another_process_move_the_clock(change):
    storage = make_storage(True)
    before = storage.now()
    change_in_other_process(SHARED_CHANGES[change], storage)
    assert storage.now() != before


@pytest.mark.parametrize("in_other_process", [False, True])
@pytest.mark.parametrize("change", SHARED_CHANGES)
def test_a_checkpoint_knows_which_rows_have_changed(change, in_other_process):
    storage = make_storage(in_other_process)
    mark, before = Mark.of(storage), storage.columns.flat["rew"].copy()
    (change_in_other_process if in_other_process else lambda made, of: made(of))(SHARED_CHANGES[change], storage)
    found = find_changed(storage, mark)
    is_same = np.isclose(storage.columns.flat["rew"], before, equal_nan=True)
    assert found is None or found[~is_same].all()


def test_a_draw_beside_a_load_with_the_same_counters_is_of_one_of_both(tmp_path):
    """A thread loads a file while another one has read the first of two tensors."""

    def made(value):
        memory = RandomMemory(memory_size=8)
        memory.create_tensor("a", 1)
        memory.create_tensor("b", 1)
        for _ in range(8):
            memory.add_samples(a=torch.full((1, 1), value), b=torch.full((1, 1), value))
        return memory

    made(2.0).save(tmp_path / "other.npz")
    memory, n_loads = made(1.0), 0
    gather = memory._storage.columns.gather

    def gather_beside_a_load(names, rows):
        nonlocal n_loads
        first = gather(names[:1], rows)
        if not n_loads:
            n_loads += 1
            thread = threading.Thread(target=memory.load, args=(tmp_path / "other.npz",))
            thread.start()
            thread.join()
        return first + gather(names[1:], rows)

    memory._storage.columns.gather = gather_beside_a_load
    [[a, b]] = memory.sample(["a", "b"], 4)
    assert n_loads == 1 and a.tolist() == b.tolist() == [[2.0]] * 4


def test_two_processes_that_count_at_once_both_move_the_clock():
    """Each of two readers that see only the later count sees one that it has not seen before."""
    storage, seen = make_storage(True), set()
    for _ in range(3):
        for made in (change_in_other_process, lambda change, of: change(of)):
            storage.clock.notes[:] = 0  # what the one that was overtaken had read
            made(rewrite, storage)
            seen.add(storage.clock.rewrites)
    assert len(seen) == 6


def test_a_change_of_columns_that_fails_leaves_them_readable():
    clock = Clock()
    with pytest.raises(MemoryError), clock.counting(of_columns=True), clock.counting(of_columns=True):
        assert clock.columns % 2 == 1
        raise MemoryError
    assert clock.columns == 2


def test_columns_that_are_read_meanwhile_are_read_again():
    storage = make_storage(False)
    table, found = Table(storage, CAPACITY, False), []

    def look():
        found.append(storage.columns)
        if len(found) == 1:
            take_larger_columns(storage)
        return sorted(storage.columns.flat)

    assert table.read_whole(look) == ["act", "rew", "terminated", "truncated"]
    assert len(found) == 2


def skrl(n=4):
    memory = PrioritizedMemory(memory_size=8)
    memory.create_tensor("states", 1)
    for value in range(n):
        memory.add_samples(states=torch.full((1, 1), float(value)))
    return memory


def tianshou():
    buffer = PrioritizedReplayBuffer(8, alpha=0.5, beta=0.5)
    for value in range(4):
        buffer.add({"obs": value, "act": 0, "rew": 0.0, "terminated": False, "truncated": False})
    return buffer


def rlberry():
    buffer = ChunkReplayBuffer(8, 0, enable_prioritized=True)
    buffer.setup_entry("x", np.float32)
    for value in range(4):
        buffer.append({"x": value})
    return buffer


def torchrl(**settings):
    buffer = DictTensorReplayBuffer(
        storage=LazyTensorStorage(8), sampler=PrioritizedSampler(), batch_size=4, generator=0, **settings
    )
    buffer.extend({"x": torch.arange(4.0)})
    return buffer


def stable_baselines():
    from gymnasium import spaces

    buffer = sb3.PrioritizedReplayBuffer(8, spaces.Box(0, 9, (1,)), spaces.Discrete(2), "cpu")
    for value in range(4):
        buffer.add(np.array([[value]]), np.array([[value]]), np.array([0]), np.ones(1), np.zeros(1), [{}])
    return buffer


CHANGES_OF_DRAWS = {
    "skrl": (skrl, lambda memory: memory.update_priorities([0, 1], [2.0, 3.0])),
    "tianshou": (tianshou, lambda buffer: buffer.update_weight([0, 1], [2.0, 3.0])),
    "rlberry": (rlberry, lambda buffer: buffer.update_priorities([[0, 1]], [[2.0, 3.0]])),
    "sb3": (stable_baselines, lambda buffer: buffer.update_priorities([0, 1], [2.0, 3.0])),
    "torchrl": (torchrl, lambda buffer: buffer.update_priority([0, 1], [2.0, 3.0])),
    "torchrl, alpha": (torchrl, lambda buffer: setattr(buffer.sampler, "alpha", 0.9)),
    "torchrl, beta": (torchrl, lambda buffer: setattr(buffer.sampler, "beta", 0.9)),
    "torchrl, transform": (torchrl, lambda buffer: buffer.append_transform(lambda batch: batch)),
    "torchrl, sampler": (torchrl, lambda buffer: buffer.set_sampler(PrioritizedSampler())),
    "torchrl, key": (torchrl, lambda buffer: setattr(buffer, "priority_key", "x")),
    "draw after a write": (skrl, lambda memory: memory.sample(["states"], 2)),
}


@pytest.mark.parametrize("change", CHANGES_OF_DRAWS)
def test_what_changes_draws_moves_the_clock_of_the_store(change):
    make, made = CHANGES_OF_DRAWS[change]
    buffer = make()
    before = buffer._storage.now()
    made(buffer)
    assert buffer._storage.now().draws > before.draws


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("make", [skrl, tianshou, rlberry, torchrl])
def test_priorities_that_change_while_a_buffer_is_pickled_end_the_pickle(make, is_shared):
    buffer = make()
    if is_shared:
        buffer._storage.share()
    content = buffer.__getstate__()["_unchanged"]
    buffer._storage.clock.count_draws()
    with pytest.raises(StateError, match="changed by another thread"):
        pickle.dumps(content)


def test_a_tensor_that_is_set_while_a_memory_is_pickled_ends_the_pickle():
    memory = skrl()
    content = memory.__getstate__()["_unchanged"]
    memory.set_tensor_by_name("states", torch.ones(8, 1, 1))
    with pytest.raises(StateError, match="changed by another thread"):
        pickle.dumps(content)


@pytest.mark.parametrize("change", ["put", "write"])
def test_batches_made_ahead_show_what_another_process_changes(change):
    buffer = torchrl(prefetch=2)
    buffer._storage.share()
    for _ in range(4):
        buffer.sample()
    assert len(buffer._sampling.ahead) == 2

    def made(storage):
        if change == "put":
            storage.put({"x": np.full(4, 7.0, np.float32)}, np.arange(4))
        else:
            storage.clear()
            storage.write({"x": np.full((1, 4), 7.0, np.float32)})

    change_in_other_process(made, buffer._storage)
    assert buffer.sample()["x"].tolist() == [7.0] * 4


def test_batches_are_made_ahead_after_two_draws_that_follow_a_write():
    buffer = torchrl(prefetch=2)
    for _ in range(3):
        buffer.extend({"x": torch.arange(4.0)})
        buffer.sample()
        assert len(buffer._sampling.ahead) <= 2
        buffer.sample()
        assert len(buffer._sampling.ahead) == 2


def test_a_copy_counts_on_its_own():
    buffer = skrl()
    copy = pickle.loads(pickle.dumps(buffer))
    assert copy._priorities.clock is copy._storage.clock is copy._storage.columns.clock
    before = buffer._storage.now()
    copy.update_priorities([0], [3.0])
    copy._storage.end_episodes(ALL)
    copy.reset()
    assert buffer._storage.now() == before


def test_live_tensors_are_known_in_every_process():
    memory = RandomMemory(memory_size=4)
    memory.create_tensor("states", 1)
    memory._storage.share()
    change_in_other_process(lambda _: memory.get_tensor_by_name("states"), memory._storage)
    assert memory._storage.clock.is_exposed
