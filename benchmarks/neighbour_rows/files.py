"""Constructing, saving, loading and copying memories; what is resident before the first row."""

from __future__ import annotations

import copy
import glob
import os
import pickle
import subprocess
import sys
import tempfile
from functools import cache, partial
from typing import Any

import numpy as np

import rlstructs.replay as tianshou_ours
from neighbour_rows import Call, Iterator, Row, both, on, peer
from neighbour_rows.skrl import SK, full, make_memory, values
from rlstructs.memories.torch import RandomMemory

tianshou_theirs = peer("tianshou.data")

# Prints the resident memory, in MB, that a buffer of a million rows takes before its first row.
RESIDENT = """
import psutil, numpy as np
from gymnasium import spaces
{imports}
before = psutil.Process().memory_info().rss
made = {make}
print((psutil.Process().memory_info().rss - before) / 1e6)
"""
SKRL = """RandomMemory(memory_size=62_500, num_envs=16, device='cpu')
[made.create_tensor(name, size=17) for name in 'abcde']"""
SB3 = "ReplayBuffer(1_000_000, spaces.Box(-1, 1, (17,), np.float32), spaces.Box(-1, 1, (6,), np.float32), device='cpu')"
CONSTRUCTED = {
    "skrl": ("rlstructs.memories.torch import RandomMemory", "skrl.memories.torch import RandomMemory", SKRL),
    "sb3": (
        "rlstructs.integrations.sb3 import ReplayBuffer",
        "stable_baselines3.common.buffers import ReplayBuffer",
        SB3,
    ),
    "tianshou": (
        "rlstructs.replay import VectorReplayBuffer",
        "tianshou.data import VectorReplayBuffer",
        "VectorReplayBuffer(1_000_000, 16)",
    ),
}


def print_resident_memory() -> None:
    """Not rows: what a process holds is no time of a call. At most 10% and 2 MB more than the original."""
    for name, (ours, theirs, make) in CONSTRUCTED.items():
        found = []
        for module in (ours, theirs):
            program = RESIDENT.format(imports=f"from {module}", make=make)
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True
            )
            found.append(float(done.stdout.split()[-1]))
        verdict = "ok" if found[0] <= 1.1 * found[1] + 2 else "TOO MUCH"
        sizes = f"ours {found[0]:.1f} MB, theirs {found[1]:.1f} MB: {verdict}"
        print(f"files resident before the first row | {name}, 1M rows: {sizes}")


def memory_files() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        for n in (10_000, 1_000_000):
            pair = cache(lambda n=n: (full(RandomMemory, n // 16, 16), full(SK, n // 16, 16)))
            for suffix in ("pt", "npz"):
                save = lambda m, s=suffix: save_anew(m, folder, s)
                yield Row("memory.save", f"{suffix}, {n:,}", on(pair, save, "skrl"))

                def load(memory: Any, suffix: str = suffix) -> Call:
                    path = save_anew(memory, folder, suffix)
                    return lambda: memory.load(path)

                contenders = {"ours": lambda f=load, p=pair: f(p()[0]), "skrl": lambda f=load, p=pair: f(p()[1])}
                yield Row("memory.load", f"{suffix}, {n:,}", contenders)
            for call in (pickle.dumps, copy.deepcopy):
                yield Row(f"memory, {call.__name__}", f"{n:,}", on(pair, call, "skrl"))
        save = lambda m: save_anew(m, folder, "csv")
        small = cache(lambda: (full(RandomMemory, 625, 16), full(SK, 625, 16)))
        yield Row("memory.save", "csv, 10,000", on(small, save, "skrl"))


def save_anew(memory: Any, folder: str, suffix: str) -> str:
    """Saves, after deleting what was saved before; skrl names files by the time of day."""
    own = os.path.join(folder, type(memory).__module__.partition(".")[0])
    for path in glob.glob(f"{own}/memories/*"):
        os.remove(path)
    memory.save(own, format=suffix)
    [path] = glob.glob(f"{own}/memories/*.{suffix}")  # a .csv of ours has a .json beside it
    return path


def constructors() -> Iterator[Row]:
    for rows_, n_envs in ((6250, 16), (2048, 1), (24, 4096), (62_500, 16)):
        make = lambda cls, r=rows_, n=n_envs: lambda: make_memory(cls, n, rows=r)
        yield Row("memory and 5 tensors", f"{n_envs} x {rows_}", both(make, RandomMemory, SK, "skrl"), bound=2.0)
        given = values(n_envs)
        make = lambda cls, r=rows_, n=n_envs, v=given: lambda: make_memory(cls, n, rows=r).add_samples(**v)
        yield Row("memory and 5 tensors, a row", f"{n_envs} x {rows_}", both(make, RandomMemory, SK, "skrl"), bound=2.0)
    for n in (100, 1_000_000):
        for name, args in {
            "ReplayBuffer": (n,),
            "PrioritizedReplayBuffer": (n, 0.6, 0.4),
            "VectorReplayBuffer": (n, 16),
        }.items():
            make = lambda module, name=name, a=args: partial(getattr(module, name), *a)
            yield Row(f"tianshou {name}()", f"{n:,}", both(make, tianshou_ours, tianshou_theirs, "tianshou"), bound=2.0)


def tianshou_files() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        for n in (10_000, 200_000):
            ends = np.arange(n) % 100 == 99
            arrays = {
                "obs": np.random.rand(n, 17).astype(np.float32),
                "act": np.random.rand(n, 6).astype(np.float32),
                "rew": np.random.rand(n),
                "terminated": ends,
                "truncated": np.zeros(n, bool),
                "done": ends,
                "obs_next": np.random.rand(n, 17).astype(np.float32),
            }
            modules = (tianshou_ours, tianshou_theirs)
            pair = cache(lambda a=arrays: tuple(module.ReplayBuffer.from_data(**a) for module in modules))
            make = lambda module, a=arrays: partial(module.ReplayBuffer.from_data, **a)
            yield Row("ReplayBuffer.from_data", f"{n:,}", both(make, *modules, "tianshou"))
            path = lambda b: f"{folder}/{type(b).__module__.partition('.')[0]}.h5"
            yield Row("save_hdf5", f"{n:,}", on(pair, lambda b: b.save_hdf5(path(b)), "tianshou"))
            yield Row("load_hdf5", f"{n:,}", on(pair, lambda b: type(b).load_hdf5(path(b)), "tianshou"))


def rows() -> Iterator[Row]:
    print_resident_memory()
    for part in (constructors, memory_files, tianshou_files):
        yield from part()
