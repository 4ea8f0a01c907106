"""Copies, pickles and files of memories while another thread adds rows: they hold what there was between two writes."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from frameworks import EVERY_KIND, array, host, make

from rlstructs.errors import StateError
from rlstructs.replay import ChunkReplayBuffer, PrioritizedVectorReplayBuffer

N_ENVS, ALPHA = 2, 0.6
# How often a memory is saved in each format, its rows, and the numbers per row of its widest tensor.
FILES = {"npz": (8, 2000, 20), "pt": (8, 2000, 20), "csv": (2, 2200, 1)}
N_COPIES = 60


@contextlib.contextmanager
def writing(write):
    """Another thread calls `write` over and over, and switches to this one between any two instructions."""
    stop, errors, interval = threading.Event(), [], sys.getswitchinterval()

    def run():
        try:
            while not stop.is_set():
                write()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not errors


class Memories:
    """A memory whose rows hold their number in every column."""

    def __init__(self, kind, capacity, width=1, cls="RandomMemory", **settings):
        self.kind, self.capacity, self.n = kind, capacity, 0
        self.shapes = {"a": (N_ENVS, 1), "wide": (N_ENVS, width), "z": (N_ENVS, 1)}
        self.make = lambda: make(kind, capacity, N_ENVS, {n: ("float32", s[1]) for n, s in self.shapes.items()},
                                 cls=cls, **settings)  # fmt: skip
        self.memory = self.make()

    def write(self):
        number = float(self.n)
        self.memory.add_samples(**{name: array(self.kind, np.full(s, number)) for name, s in self.shapes.items()})
        self.n += 1

    def fill(self):
        for _ in range(self.capacity):
            self.write()

    def check(self, memory, break_after=None):
        """Checks that all columns of a row hold one number, and those of an environment successive ones.

        After a row with the number `break_after` any row may come.
        """
        [tensors] = memory.sample_all(["a", "wide", "z"])
        assert len(memory) == self.capacity * N_ENVS
        first, wide, last = (host(tensor).reshape(self.capacity, N_ENVS, -1) for tensor in tensors)
        assert (first == last).all() and (wide == first).all()
        numbers = first[:, 0, 0]
        assert (first[:, 0] == first[:, 1]).all() and ((np.diff(numbers) == 1) | (numbers[:-1] == break_after)).all()


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("form", FILES)
@pytest.mark.slow
def test_a_saved_memory_holds_whole_steps(kind, form, tmp_path):
    n_files, capacity, width = FILES[form]
    made = Memories(kind, capacity, width)
    made.fill()
    loaded = made.make()
    with writing(made.write):
        for _ in range(n_files):
            loaded.load(made.memory.save(tmp_path / f"memory.{form}"))
            made.check(loaded)


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("form", FILES)
@pytest.mark.slow
def test_rows_that_a_thread_adds_during_a_load_follow_those_of_the_file(kind, form, tmp_path):
    n_files, capacity, width = FILES[form]
    saved, made = (Memories(kind, capacity, width, "PrioritizedMemory") for _ in range(2))
    saved.fill()
    path, made.n = saved.memory.save(tmp_path / f"memory.{form}"), 10**6
    with writing(made.write):
        for _ in range(n_files):
            made.memory.load(path)
            made.check(copy.deepcopy(made.memory), break_after=capacity - 1)


class PrioritizedMemories(Memories):
    """A memory in which the priority of row t of each environment is 1 + t % 7."""

    def __init__(self, kind):
        super().__init__(kind, 500, cls="PrioritizedMemory", alpha=ALPHA)

    def write(self):
        super().write()
        newest = (self.n - 1) % self.capacity * N_ENVS + np.arange(N_ENVS)
        self.memory.update_priorities(newest, np.full(N_ENVS, 1.0 + (self.n - 1) % 7))

    def get(self):
        return self.memory

    @staticmethod
    def priorities(memory):
        """The number of each row, and its priority to the power of alpha."""
        [[numbers]], tree = memory.sample_all(["a"]), memory._priorities
        tree.follow(memory._storage.view())
        rows = memory._storage.view().by_step()
        return host(numbers).ravel(), tree.tree.values[rows]


class PrioritizedTianshous(PrioritizedMemories):
    """The same as a buffer of tianshou."""

    def __init__(self, kind):
        self.memory, self.n = PrioritizedVectorReplayBuffer(1000, N_ENVS, alpha=ALPHA, beta=0.4), 0

    def fill(self):
        for _ in range(500):
            self.write()

    def write(self):
        row, flags = np.full(N_ENVS, 1.0 * self.n), np.zeros(N_ENVS, bool)
        rows = self.memory.add({"obs": row, "act": row, "rew": row, "terminated": flags, "truncated": flags})[0]
        self.memory.update_weight(rows, np.full(N_ENVS, 1.0 + self.n % 7))
        self.n += 1

    @staticmethod
    def priorities(buffer):
        batch, rows = buffer.sample(0)
        return batch.act, buffer.weight[rows]


class PrioritizedChunks(PrioritizedTianshous):
    """The same as a buffer of rlberry."""

    def __init__(self, kind):
        self.n = 0
        self.memory = ChunkReplayBuffer(1000, 0, enable_prioritized=True, alpha=ALPHA, n_lanes=N_ENVS)
        self.memory.setup_entry("a", np.float64)

    def write(self):
        self.memory.append({"a": np.full(N_ENVS, 1.0 * self.n)})
        rows = np.arange(N_ENVS)[:, None] * 500 + self.n % 500
        self.memory.update_priorities(rows, np.full((N_ENVS, 1), 1.0 + self.n % 7))
        self.n += 1

    @staticmethod
    def priorities(buffer):
        rows = buffer._storage.view().every_row()
        [numbers] = buffer._storage.gather(["a"], rows)
        buffer._priorities.follow(buffer._storage.view())
        return numbers, buffer._priorities.tree.values[rows]


PRIORITIZED = [pytest.param(PrioritizedMemories, *(kind.values if hasattr(kind, "values") else [kind]),
                            marks=getattr(kind, "marks", ())) for kind in EVERY_KIND]  # fmt: skip
PRIORITIZED += [(PrioritizedTianshous, ""), (PrioritizedChunks, "")]


@pytest.mark.parametrize(("surface", "kind"), PRIORITIZED)
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_has_the_priorities_of_its_rows(surface, kind, way):
    made = surface(kind)
    made.fill()
    n_copies = 0
    with writing(made.write):
        for _ in range(N_COPIES):
            try:
                copied = copy.deepcopy(made.memory) if way == "deepcopy" else pickle.loads(pickle.dumps(made.memory))
            except StateError as error:
                assert way == "pickle" and "changed by another thread while it was pickled" in str(error)
                continue
            numbers, leaves = made.priorities(copied)
            assert numbers.size == 1000
            # The newest rows may not have got theirs yet, and have the largest.
            has_own = numbers < numbers.max()
            np.testing.assert_allclose(leaves[has_own], (1 + numbers[has_own] % 7) ** ALPHA)
            n_copies += 1
    assert n_copies or way == "pickle"
    assert len(pickle.loads(pickle.dumps(made.memory))) == len(made.memory)


MAKE = {
    "memory": "PrioritizedMemory(memory_size=100)",
    "torchrl": "TensorDictReplayBuffer(storage=ListStorage(9), sampler=PrioritizedSampler(9, 0.6, 0.4), generator=0)",
    "tianshou": "PrioritizedReplayBuffer(100, alpha=0.6, beta=0.4)",
    "rlberry": "ChunkReplayBuffer(100, 0, enable_prioritized=True)",
}
FORK_WHILE_COPIED = """
import copy, faulthandler, os, sys, threading
from rlstructs.memories.torch import PrioritizedMemory
from rlstructs.replay import *
faulthandler.dump_traceback_later(60, exit=True)
sys.setswitchinterval(1e-5)
store, stop = {}, threading.Event()
def run():
    while not stop.is_set():
        copy.deepcopy(store)
thread = threading.Thread(target=run)
thread.start()
for _ in range(15):
    pid = os.fork()
    if not pid:
        copy.deepcopy(store)  # its locks are free
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
stop.set()
thread.join()
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("surface", MAKE)
@pytest.mark.slow
def test_a_process_forks_while_a_thread_copies(surface):
    program = FORK_WHILE_COPIED.replace("{}", MAKE[surface], 1)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True,
                          cwd=Path(__file__).parents[2])  # fmt: skip
    assert done.stdout == "done\n", done.stderr
