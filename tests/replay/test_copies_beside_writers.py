"""What copies and files of a buffer hold while another thread writes to it: what there was between two writes."""

from __future__ import annotations

import copy
import os
import pickle
import sys
import threading

import numpy as np
import pytest
import torch

from rlstructs.errors import StateError
from rlstructs.memories.torch import PrioritizedMemory
from rlstructs.replay import (
    ChunkReplayBuffer,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    PrioritizedVectorReplayBuffer,
    ReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
    VectorReplayBuffer,
)
from rlstructs.replay.rows import copies

N_COPIES = 40


class Torchrls:
    """A buffer whose rows each hold their number three times, and of which the newest 500 are there."""

    def __init__(self):
        self.buffer = TensorDictReplayBuffer(
            storage=TensorStorage(500), sampler=PrioritizedSampler(500, 0.6, 0.4), batch_size=16, generator=0
        )
        self.n = 0

    def write(self):
        rows = torch.arange(self.n, self.n + 125)
        self.buffer.extend({"a": rows, "wide": rows[:, None].expand(-1, 100), "b": rows})
        self.buffer.update_priority(self.buffer.sample()["index"], torch.rand(16))
        self.n += 125

    @staticmethod
    def columns(buffer):
        rows = buffer[:]
        rows = rows.index(rows["a"].argsort())  # the oldest first
        assert len(buffer.sample()) == 16
        return rows["a"].numpy(), rows["b"].numpy(), rows["wide"][:, -1].numpy()


class Tianshous:
    """The same in lanes, row by row."""

    def __init__(self):
        self.buffer, self.n = VectorReplayBuffer(1000, 2), 0

    def write(self):
        row, flags = np.full(2, self.n), np.zeros(2, bool)
        wide = np.repeat(row[:, None], 100, axis=1)
        self.buffer.add({"obs": wide, "act": row, "rew": 1.0 * row, "terminated": flags, "truncated": flags})
        self.n += 1

    @staticmethod
    def columns(buffer):
        batch, indices = buffer.sample(0)
        newest = batch[indices < 500]
        return newest.act, newest.rew, newest.obs[:, -1]


def by_file(buffer, path):
    if isinstance(buffer, VectorReplayBuffer):
        buffer.save_hdf5(path / "buffer.h5")
        return VectorReplayBuffer.load_hdf5(path / "buffer.h5")
    buffer.save(path / "buffer.npz")
    loaded = Torchrls().buffer
    loaded.load(path / "buffer.npz")
    return loaded


WAYS = {
    "deepcopy": lambda buffer, path: copy.deepcopy(buffer),
    "file": by_file,
    "pickle": lambda buffer, path: pickle.loads(pickle.dumps(buffer)),
}


@pytest.mark.parametrize("kind", [Torchrls, Tianshous])
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_is_of_between_two_writes(kind, way, tmp_path):
    made, stop = kind(), threading.Event()
    while made.n < 600:
        made.write()

    def write():
        while not stop.is_set():
            made.write()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(N_COPIES):
            try:
                copied = WAYS[way](made.buffer, tmp_path)
            except StateError as error:
                assert way == "pickle" and "changed by another thread while it was pickled" in str(error)
                continue
            first, second, third = kind.columns(copied)
            assert first.size == 500 and (np.diff(first) == 1).all()
            assert (first == second).all() and (first == third).all()
            if kind is Tianshous:
                assert (copied._intake.running.lengths == first[-1] + 1).all()
                assert (copied._intake.running.returns == first[-1] * (first[-1] + 1) / 2).all()
    finally:
        stop.set()
        thread.join()
    assert len(pickle.loads(pickle.dumps(made.buffer))) == len(made.buffer)


class Intruder:
    """A profile function: the versions of a store at which another thread could have written to it."""

    def __init__(self, storage):
        self.storage, self.versions = storage, {storage.clock.changes}

    def __call__(self, frame, event, _):
        if event == "return" and self.storage.clock.changes not in self.versions and self.could_write():
            self.versions.add(self.storage.clock.changes)

    def could_write(self):
        taken = []

        def take():
            taken.append(self.storage.lock.acquire(blocking=False))
            if taken[0]:
                self.storage.lock.release()

        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
        return taken[0]


@pytest.mark.parametrize("kind", [Torchrls, Tianshous])
def test_no_row_is_written_while_a_file_is_loaded(kind, tmp_path):
    writer, other = kind(), kind()
    for each in (writer, other):
        each.write()
    writer.buffer.save(tmp_path / "buffer.npz")
    intruder = Intruder(other.buffer._storage)
    sys.setprofile(intruder)
    try:
        other.buffer.load(tmp_path / "buffer.npz")
    finally:
        sys.setprofile(None)
    assert len(intruder.versions) == 2  # before and after


def memory():
    made = PrioritizedMemory(memory_size=8, num_envs=2, device="cpu")
    made.create_tensor("a", 1)
    for _ in range(8):
        made.add_samples(a=torch.zeros(2, 1))
    return made, made.update_priorities


def tianshous(cls, *sizes):
    buffer = cls(*sizes, alpha=0.6, beta=0.4)
    n = len(buffer.subbuffer_edges) - 1
    flags = [False] * n
    for _ in range(8):
        batch = {"obs": [0] * n, "act": [0] * n, "rew": [0.0] * n, "terminated": flags, "truncated": flags}
        buffer.add(batch, list(range(n)))
    return buffer, buffer.update_weight


def rlberrys():
    buffer = ChunkReplayBuffer(16, 0, enable_prioritized=True)
    buffer.setup_entry("a", np.float32)
    for _ in range(16):
        buffer.append({"a": 0.0})
    return buffer, lambda rows, values: buffer.update_priorities(np.array([rows]), np.array([values]))


def torchrls():
    buffer = TensorDictReplayBuffer(
        storage=TensorStorage(16), sampler=PrioritizedSampler(16, 0.6, 0.4), batch_size=4, generator=0
    )
    buffer.extend({"a": torch.zeros(16)})
    return buffer, lambda rows, values: buffer.update_priority(torch.tensor(rows), torch.tensor(values))


PRIORITISED = {
    "memory": memory,
    "PrioritizedReplayBuffer": lambda: tianshous(PrioritizedReplayBuffer, 8),
    "PrioritizedVectorReplayBuffer": lambda: tianshous(PrioritizedVectorReplayBuffer, 16, 2),
    "ChunkReplayBuffer": rlberrys,
    "TensorDictReplayBuffer": torchrls,
}


class Meanwhile:
    """Changes a buffer while it is pickled as a part of it."""

    def __init__(self, change):
        self.change = change

    def __reduce__(self):
        self.change()
        return bool, ()


@pytest.mark.parametrize("name", PRIORITISED)
def test_a_pickle_notices_priorities_that_are_set_meanwhile(name):
    buffer, update = PRIORITISED[name]()
    buffer.sample(*{"memory": (["a"], 4), "ChunkReplayBuffer": (4, 1, "prioritized")}.get(name, (4,)))
    update([0, 1], [2.0, 3.0])
    assert len(pickle.loads(pickle.dumps(buffer))) == len(buffer)
    buffer.meanwhile = Meanwhile(lambda: update([2, 3], [4.0, 5.0]))
    with pytest.raises(StateError, match="changed by another thread while it was pickled"):
        pickle.dumps(buffer)


class Watched:
    """A lock that tells when a fork has taken it."""

    def __init__(self):
        self.lock, self.is_taken = threading.RLock(), threading.Event()

    def acquire(self, blocking=True):
        is_taken = self.lock.acquire(blocking)
        self.is_taken.set()
        return is_taken

    def release(self):
        self.lock.release()


def test_a_fork_waits_for_a_thread_that_takes_a_lock_while_it_holds_another():
    """As a transform does that samples a second buffer while rows are written to the first."""
    kept = [Watched(), Watched()]
    copies._locks.update(kept)
    first, second = [lock for lock in copies._locks if lock in kept]  # in the order in which a fork takes them
    has_second, got_first = threading.Event(), []

    def write():
        with second.lock:
            has_second.set()
            first.is_taken.wait()
            got_first.append(first.lock.acquire(timeout=20))
            if got_first[0]:
                first.lock.release()

    thread = threading.Thread(target=write)
    thread.start()
    has_second.wait()
    if not (pid := os.fork()):
        os._exit(int(not all(lock.lock.acquire(blocking=False) for lock in kept)))
    thread.join()
    assert got_first == [True] and os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_forked_process_has_next_observations_of_its_own():
    buffer = ReplayBuffer(5)

    def add(value):
        ends = {"terminated": True, "truncated": False}
        buffer.add({"obs": np.full(100, value), "act": 0, "rew": 0.0, "obs_next": np.full(100, value + 0.5), **ends})

    for value in range(5):
        add(float(value))
    assert list(buffer._storage.columns.links) == ["obs_next"]
    if not (pid := os.fork()):
        try:
            for value in range(5):
                add(-float(value))
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert buffer[:].obs_next[:, 0].tolist() == [0.5, 1.5, 2.5, 3.5, 4.5]
