"""What copies and files of a buffer hold while another thread writes to it: what there was between two writes."""

from __future__ import annotations

import copy
import pickle
import sys
import threading

import numpy as np
import pytest
import torch

from rlstructs.errors import StateError
from rlstructs.replay import PrioritizedSampler, TensorDictReplayBuffer, TensorStorage, VectorReplayBuffer

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
        self.storage, self.versions = storage, {storage.version}

    def __call__(self, frame, event, _):
        if event == "return" and self.storage.version not in self.versions and self.could_write():
            self.versions.add(self.storage.version)

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
