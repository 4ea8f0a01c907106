"""Rows that another process has changed since the last checkpoint are in the next one, which writes no others."""

from __future__ import annotations

import multiprocessing

import numpy as np
import pytest
from helpers import count_batcher, rollout
from processes import LIMIT

from rlstructs import Checkpoint
from rlstructs.files import segments
from rlstructs.memories.memory import Memory
from rlstructs.memories.torch import PrioritizedMemory
from rlstructs.replay import PrioritizedVectorReplayBuffer
from rlstructs.replay.keep import saving

N_ROWS, T = 40, 4


def make_memory():
    return PrioritizedMemory(memory_size=N_ROWS, num_envs=2, device="cpu", seed=0)


def make_buffer():
    return PrioritizedVectorReplayBuffer(2 * N_ROWS, 2, alpha=0.6, beta=0.4)


EVERY_KIND = pytest.mark.parametrize("make", [make_memory, make_buffer])


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    monkeypatch.setattr(segments, "LEAST_BYTES", 1)  # one row of each lane in each file


@pytest.fixture
def counts():
    """A batcher with one worker of two environments."""
    with count_batcher([[3, 5]], T, autoreset=True) as batcher:
        yield batcher


def content(memory):
    """Everything that a file of a memory would hold, priorities too."""
    arrays, _, state = saving.contents(memory)
    return {name: np.asarray(array).tobytes() for name, array in arrays.items()}, state


def draw(memory):
    """Draws once, which gives new rows their priorities, and sets those of the drawn ones."""
    if isinstance(memory, Memory):
        memory.sample(["observations"], 8)
        memory.update_priorities(memory.get_sampling_indexes(), np.arange(1.0, 9.0))
    else:
        memory.update_weight(memory.sample(8)[1], np.arange(1.0, 9.0))


def add_rows(memory, trajectories):
    memory.add_trajectories(trajectories)


def replace_rows(memory, _):
    if isinstance(memory, Memory):
        values = memory.get_tensor_by_name("observations").clone()
        values[1] = -1.0
        memory.set_tensor_by_name("observations", values)
    else:
        memory.set_array_at_key(np.full((1, 2), -1.0, np.float32), "obs", [1])


def write_to_live_tensor(memory, _):
    memory.get_tensor_by_name("observations")[1] = -1.0


def count_new(folder):
    """How many files of rows only the newest checkpoint has."""
    return sum(path.stat().st_nlink == 1 for path in max(folder.glob("step_*")).rglob("rows*.npz"))


def assert_restored(folder, memory, make):
    again = make()
    assert Checkpoint(folder, memory=again, rng=False).restore() is not None
    assert content(again) == content(memory)


@EVERY_KIND
def test_rows_of_a_worker_reach_the_next_checkpoint(make, counts, tmp_path):
    memory = make()
    counts.feed(memory)
    counts.reset()
    checkpoint = Checkpoint(tmp_path, memory=memory, rng=False)
    for step in range(16):  # the rings wrap
        rollout(counts)
        if step % 3 == 0:
            checkpoint.save(step)
            assert_restored(tmp_path, memory, make)
            draw(memory)
    assert count_new(tmp_path) == 3 * T < N_ROWS


@pytest.mark.parametrize(
    ("make", "change", "n_new"),
    [(make_memory, add_rows, T), (make_buffer, add_rows, T), (make_memory, replace_rows, 1),
     (make_buffer, replace_rows, 1), (make_memory, write_to_live_tensor, 1)],
)  # fmt: skip
def test_what_a_child_does_to_rows_reaches_the_next_checkpoint(start_method, make, change, n_new, counts, tmp_path):
    memory = make()
    counts.reset()
    for _ in range(3):
        memory.add_trajectories(rollout(counts)[0])
    memory._storage.share()
    checkpoint = Checkpoint(tmp_path, memory=memory, rng=False)
    for step in range(2):
        checkpoint.save(step)
    assert count_new(tmp_path) == 0
    before = content(memory)
    child = multiprocessing.get_context(start_method).Process(target=change, args=(memory, rollout(counts)[0]))
    child.start()
    child.join(LIMIT)
    assert child.exitcode == 0 and content(memory) != before
    draw(memory)
    checkpoint.save(2)
    assert count_new(tmp_path) == n_new
    assert_restored(tmp_path, memory, make)
