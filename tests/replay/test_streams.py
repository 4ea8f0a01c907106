"""Copies of a memory in several processes: each draws from a stream of its own, which follows from the seed."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import signal
import threading

import numpy as np
import pytest
import torch
from surfaces import CAPACITY, EVERY_SURFACE, N_LANES

from rlstructs import DictTensor, TemporalDictTensor, Trajectories
from rlstructs.memories.memory import Memory
from rlstructs.replay import ChunkReplayBuffer, VectorReplayBuffer
from rlstructs.replay.torchrl.buffer import DictTensorBase

# jax and Warp must not be used in a forked process, and their memories draw as those of torch do.
SURFACES = [
    each for each in EVERY_SURFACE if not ({"Shard", "jax", "warp", "cuda"} & {*each.id.replace("-", " ").split()})
]
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning", "ignore:.*fork:DeprecationWarning")


def filled(surface):
    shape = (N_LANES, CAPACITY)
    number = torch.arange(N_LANES * CAPACITY, dtype=torch.float32).reshape(shape)
    values = {
        "observation/frame": number[..., None],
        "_observation/frame": number[..., None] + 1,
        "action/action": number.long(),
        "_observation/reward": number,
        "_observation/terminated": torch.arange(CAPACITY).expand(shape) % 5 == 4,
        "_observation/truncated": torch.zeros(shape, dtype=torch.bool),
    }
    made = surface.make()
    lengths = torch.full((N_LANES,), CAPACITY)
    trajectories = Trajectories(DictTensor({"env_index": torch.arange(N_LANES)}), TemporalDictTensor(values, lengths))
    made.add_trajectories(trajectories, names=surface.names)
    return made


def draw(made, n=8):
    """The rows of the next draws."""
    if isinstance(made, Memory):
        made.sample(made.get_tensor_names(), n)
        return np.asarray(made.sampling_indexes).tolist()
    if isinstance(made, ChunkReplayBuffer):
        return made.sample(n, 1).info["indices"].ravel().tolist()
    if isinstance(made, DictTensorBase):
        return made.sample(n)["index"].tolist()
    return made.sample(n)[1].tolist()


def in_child(made, function=draw):
    """What a function returns in a forked child."""
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        signal.alarm(60)  # rather than to wait for ever
        try:
            os.write(writing, pickle.dumps(function(made)))
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        text = file.read()
    os.waitpid(pid, 0)
    return pickle.loads(text)


@pytest.mark.parametrize("surface", SURFACES)
def test_forked_children_draw_rows_of_their_own_which_follow_from_the_seed(surface):
    plain = filled(surface)
    own = [draw(plain) for _ in range(2)]
    both = []
    for _ in range(2):
        made = filled(surface)
        drawn = [in_child(made), in_child(made, in_child), draw(made), in_child(made), draw(made)]
        assert [drawn[2], drawn[4]] == own  # as without children
        assert len({tuple(rows) for rows in drawn}) == 5
        both.append(drawn)
    assert both[0] == both[1]


@pytest.mark.parametrize("surface", SURFACES)
def test_a_child_that_is_forked_while_a_thread_draws_draws_too(surface):
    made, is_drawing, is_forked = filled(surface), threading.Event(), threading.Event()

    def hold():
        with made._rng.bit_generator.lock:  # as long as it draws
            is_drawing.set()
            is_forked.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    is_drawing.wait()
    try:
        rows = in_child(made)
    finally:
        is_forked.set()
        thread.join()
    assert len(rows) == 8 and rows != draw(made)


@pytest.mark.parametrize("surface", SURFACES)
def test_copies_that_stay_in_a_process_go_on_with_the_stream(surface):
    made = filled(surface)
    copied, pickled = copy.deepcopy(made), pickle.loads(pickle.dumps(made))
    assert draw(copied) == draw(pickled) == draw(made)


def test_the_stream_of_a_child_follows_from_a_file_that_is_loaded(tmp_path):
    surface = next(each.values[0] for each in EVERY_SURFACE if each.id == "VectorReplayBuffer")
    made = filled(surface)
    draw(made)
    made.save(tmp_path / "buffer.npz")
    drawn = []
    for _ in range(2):
        loaded = VectorReplayBuffer(N_LANES * CAPACITY, N_LANES, random_seed=None)
        loaded.load(tmp_path / "buffer.npz")
        drawn.append((in_child(loaded), draw(loaded)))
    assert drawn[0] == drawn[1] and drawn[0][0] != drawn[0][1]


def test_copies_that_are_sent_to_processes_of_a_pool_draw_rows_of_their_own():
    surface = next(each.values[0] for each in EVERY_SURFACE if each.id == "VectorReplayBuffer")
    made = filled(surface)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        drawn = pool.map(draw, [made] * 4, chunksize=1)
    assert len({tuple(rows) for rows in [*drawn, draw(made)]}) == 5


class Rows(torch.utils.data.IterableDataset):
    """What a memory draws, in a worker of torch's `DataLoader`."""

    def __init__(self, memory):
        self.memory = memory

    def __iter__(self):
        return iter([draw(self.memory), draw(self.memory)])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_data_loader_draw_rows_of_their_own_in_each_epoch(method):
    surface = next(each.values[0] for each in EVERY_SURFACE if each.id == "VectorReplayBuffer")
    every = []
    for _ in range(2):
        made = filled(surface)
        loader = torch.utils.data.DataLoader(Rows(made), None, num_workers=2, multiprocessing_context=method)
        n_epochs = 2 if method == "fork" else 1
        drawn = [np.asarray(rows).tolist() for _ in range(n_epochs) for rows in loader]
        assert len({tuple(rows) for rows in [*drawn, draw(made)]}) == 4 * n_epochs + 1
        every.append(drawn)
    assert every[0] == every[1]
