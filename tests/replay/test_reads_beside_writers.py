"""Reads by index and of all rows while another process writes: no row is torn, whichever call reads it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from frameworks import EVERY_KIND, make
from frameworks import flat as numbers
from replay_rows import row, rows

from rlstructs import StateError
from rlstructs.replay import ChunkReplayBuffer, PrioritizedVectorReplayBuffer, ReplayBuffer, VectorReplayBuffer
from rlstructs.replay.rows import columns, on_device

SIZE = 6


@pytest.fixture
def interrupt(monkeypatch):
    """Returns a function that says what another process writes while the next rows are gathered, or copied.

    The first column of these rows is read before the write, and the others after it.
    """
    waiting = []

    def read(owner, *which, old):
        found = old(owner, *which)
        if not waiting:
            return found
        waiting.pop()()
        return [found[0], *old(owner, *which)[1:]]

    for kind in (columns.Columns, on_device.TensorColumns):
        for name in ("gather", "copy_steps"):
            old = getattr(kind, name)
            monkeypatch.setattr(kind, name, lambda owner, *which, old=old: read(owner, *which, old=old))
    return waiting.append


def memory(kind):
    made = make(kind, SIZE, 2)
    for name in ("a", "b"):
        made.create_tensor(name, 1)
    return made


def write(made, start, n):
    for t in range(start, start + n):
        both = np.array([[t], [t + 100]], np.float32)
        made.add_samples(a=both, b=both)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_rows_of_a_memory_by_index_are_whole_beside_a_writer(kind, interrupt):
    made = memory(kind)
    write(made, 0, SIZE)
    interrupt(lambda: write(made, SIZE, 2))
    [[a, b]] = made.sample_by_index(["a", "b"], np.arange(2 * SIZE).reshape(3, 4))
    assert numbers(a) == numbers(b) == [6, 106, 7, 107, 2, 102, 3, 103, 4, 104, 5, 105]
    assert a.shape[:2] == (3, 4)


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("length", [1, 2, 4])
def test_all_rows_of_a_memory_are_whole_beside_a_writer_and_without_those_that_are_gone(kind, length, interrupt):
    made = memory(kind)
    write(made, 0, SIZE)
    interrupt(lambda: write(made, SIZE, 3))
    [[a, b]] = made.sample_all(["a", "b"], sequence_length=length)
    wanted = [3, 103, 4, 104, 5, 105] if length == 1 else [3, 4, 5, 103, 104, 105]
    assert numbers(a) == numbers(b) == wanted
    write(made, 20, 1)
    interrupt(lambda: write(made, 30, 1))
    parts = made.sample_all(["a", "b"], mini_batches=2, sequence_length=length)
    assert [numbers(a) for a, _ in parts] == [numbers(b) for _, b in parts]


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_row_that_is_never_written_to_its_end_is_an_error_that_names_it(kind):
    made = memory(kind)
    write(made, 0, SIZE)
    made._storage.ring.reserve(slice(0, 1), 1)  # by a process that is killed
    with pytest.raises(StateError, match="^row 0 is being written"):
        made.sample_by_index(["a"], [0, 1])
    assert numbers(made.sample_by_index(["a"], [1, 2])[0][0]) == [100, 1]


def one_lane(cls=ReplayBuffer, **settings):
    buffer = cls(SIZE, **settings)
    for t in range(SIZE):
        buffer.add(row(t, obs_next=t))
    buffer._storage.share()  # otherwise no other process can write
    return buffer, lambda: [buffer.add(row(t, obs_next=t)) for t in (6, 7)]


def lanes(cls=VectorReplayBuffer, **settings):
    buffer = cls(2 * SIZE, 2, **settings)
    for t in range(SIZE):
        buffer.add(rows([t, t + 100], obs_next=[t, t + 100]))
    buffer._storage.share()
    return buffer, lambda: [buffer.add(rows([t, t + 100], obs_next=[t, t + 100])) for t in (6, 7)]


@pytest.mark.parametrize(
    "made", [one_lane, lanes, lambda: lanes(PrioritizedVectorReplayBuffer, alpha=0.6, beta=0.4)],
    ids=["ReplayBuffer", "VectorReplayBuffer", "PrioritizedVectorReplayBuffer"],
)  # fmt: skip
@pytest.mark.parametrize("index", [slice(None), [0, 1, 2, 3, 4, 5], [[0, 1], [2, 3]], 0])
def test_rows_of_a_buffer_by_index_are_whole_beside_a_writer(made, index, interrupt):
    buffer, writes = made()
    interrupt(writes)
    batch = buffer[index]
    for name in ("act", "rew", "obs_next"):
        assert np.asarray(batch[name]).tolist() == np.asarray(batch.obs).tolist()
    buffer, writes = made()
    interrupt(writes)
    assert np.asarray(buffer.get([0, 1, 2], "rew")).tolist() in ([0, 1, 2], [6, 7, 2])


def test_stacks_by_index_are_whole_beside_a_writer(interrupt):
    buffer, writes = one_lane(stack_num=3)
    interrupt(writes)
    batch = buffer[[2, 3, 4, 5]]
    assert batch.obs.tolist() == batch.obs_next.tolist() == [[2, 2, 2], [2, 2, 3], [2, 3, 4], [3, 4, 5]]


def test_the_data_of_a_chunk_buffer_is_whole_beside_a_writer(interrupt):
    buffer = ChunkReplayBuffer(SIZE, 0)
    buffer.setup_entry("a", np.float32)

    def add(*numbers):
        for t in numbers:
            buffer.append({"a": [t, t]})

    add(*range(SIZE))
    buffer._storage.share()
    interrupt(lambda: add(6, 7))
    assert buffer.data["a"].tolist() == [[6, 6], [7, 7], [2, 2], [3, 3], [4, 4], [5, 5]]  # it shows what is there now


def test_samples_of_sb3_are_whole_beside_a_writer(interrupt):
    spaces, sb3 = pytest.importorskip("gymnasium").spaces, pytest.importorskip("rlstructs.integrations.sb3")
    box = spaces.Box(-9, 9, (1,), np.float32)
    buffer = sb3.ReplayBuffer(SIZE, box, box, "cpu", handle_timeout_termination=False)

    def add(*numbers):
        for t in numbers:
            each = np.full((1, 1), t, np.float32)
            buffer.add(each, each, each, each[0], np.zeros(1), [{}])

    add(*range(SIZE))
    buffer._storage.share()
    interrupt(lambda: add(6, 7, 8))
    batch = buffer.sample(40)
    assert torch.equal(batch.observations, batch.rewards) and torch.equal(batch.actions, batch.next_observations)
    assert set(batch.rewards.flatten().tolist()) == {3, 4, 5, 6, 7, 8}
