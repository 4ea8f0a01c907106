"""How far a reader has to walk through the library: the files of one call, and the changes between them.

    python tests/walk.py
    python tests/walk.py --order

Two workers with four CartPoles and a random agent each have finished a rollout. The trainer then hands it out, once by
`RL_Batcher.get`, once by `RL_Batcher.lease`, and once by `RayBatcher.get` if ray is installed. A `SharedVectorEnv` of
eight CartPoles in two workers makes a step. For each call the table has the number of files of `workers/` and
`rlstructs/` in which a function was called, and how often control went from one of these files to another, by a call or
by a return. `--order` lists the files, in the order in which the call reaches them.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from pathlib import Path

import gymnasium
import numpy as np
import torch
from clusters import ray_cluster

import rlstructs
from rlstructs import GymEnvInf, RandomAgent, RayBatcher, RL_Batcher, SharedVectorEnv
from rlstructs.memories.torch import PrioritizedMemory, RandomMemory
from rlstructs.replay import (
    ChunkReplayBuffer,
    DictTensorReplayBuffer,
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
)

ROOT = Path(rlstructs.__file__).parent.parent
FOLDER, LINK = f"{ROOT}/rlstructs/", "rlstructs/workers/"  # the link leads to `workers/`
PAUSE = 1.0  # seconds in which the workers finish: a trainer that waits would poll more or less often
ROWS = 64  # of the memories


class Walk:
    """A profile function: the files of ours that a call enters, and how often control changes between them."""

    def __init__(self):
        self.files: list[str] = []  # in the order of their first call
        self.n_changes = 0
        self._here = None

    def __call__(self, frame, event, _):
        if event == "call":
            file = frame.f_code.co_filename
            if file.startswith(FOLDER):
                self._go_to(file)
                if file not in self.files:
                    self.files.append(file)
        elif event == "return":
            caller = frame.f_back
            while caller is not None and not caller.f_code.co_filename.startswith(FOLDER):
                caller = caller.f_back
            if caller is not None:
                self._go_to(caller.f_code.co_filename)

    def _go_to(self, file):
        self.n_changes += self._here not in (None, file)
        self._here = file

    def relative_files(self):
        files = [str(Path(file).relative_to(ROOT)) for file in self.files]
        return [file.removeprefix("rlstructs/") if file.startswith(LINK) else file for file in files]


def create_env(n_envs, seed):
    return GymEnvInf([gymnasium.make("CartPole-v1") for _ in range(n_envs)], seed)


def arguments():
    return {
        "n_timesteps": 16,
        "create_agent": lambda: RandomAgent(gymnasium.spaces.Discrete(2)),
        "agent_args": {},
        "create_env": create_env,
        "env_args": {"n_envs": 4},
        "n_processes": 2,
        "seeds": 0,
    }


def walk_of(batcher, method):
    """The walk of the second rollout's `get` or `lease`."""
    batcher.reset()
    batcher.execute()
    batcher.get()
    batcher.execute()
    time.sleep(PAUSE)
    handed_out = []
    walk = walk_through(lambda: handed_out.append(getattr(batcher, method)()))
    if method == "lease":
        handed_out[0].release()
    return walk


def ray_walk():
    with ray_cluster(1), RayBatcher(**arguments(), n_nodes=1) as batcher:
        return walk_of(batcher, "get")


def step_walk():
    """The walk of the second step of a `SharedVectorEnv`."""
    with SharedVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 8, 2) as env:
        env.reset(seed=0)
        env.step(np.zeros(8, np.int64))
        return walk_through(lambda: env.step(np.ones(8, np.int64)))


def skrl(is_prioritized):
    memory = (PrioritizedMemory if is_prioritized else RandomMemory)(memory_size=ROWS)
    rows = {
        "states": torch.zeros(1, 3),
        "rewards": torch.zeros(1, 1),
        "terminated": torch.zeros(1, 1, dtype=torch.bool),
    }
    for name, value in rows.items():
        memory.create_tensor(name, value.shape[1], value.dtype)
    for _ in range(ROWS):
        memory.add_samples(**rows)
    return memory, lambda: memory.sample(["states", "rewards"], 8)


def rlberry(is_prioritized):
    buffer = ChunkReplayBuffer(ROWS, 0, enable_prioritized=is_prioritized)
    buffer.setup_entry("observations", np.float32)
    buffer.setup_entry("rewards", np.float32)
    for _ in range(ROWS):
        buffer.append({"observations": np.zeros(3), "rewards": 0.0})
    return buffer, lambda: buffer.sample(8, 2)


def tianshou(is_prioritized):
    buffer = PrioritizedReplayBuffer(ROWS, 0.6, 0.4) if is_prioritized else ReplayBuffer(ROWS)
    row = {"obs": np.zeros(3), "act": 0, "rew": 0.0, "terminated": False, "truncated": False, "obs_next": np.zeros(3)}
    for _ in range(ROWS):
        buffer.add(row)
    return buffer, lambda: buffer.sample(8)


def torchrl(is_prioritized):
    sampler = PrioritizedSampler() if is_prioritized else RandomSampler()
    buffer = DictTensorReplayBuffer(storage=LazyTensorStorage(ROWS), sampler=sampler, batch_size=8)
    buffer.extend(
        {"obs": torch.zeros(ROWS, 3), "reward": torch.zeros(ROWS), "done": torch.zeros(ROWS, dtype=torch.bool)}
    )
    return buffer, lambda: buffer.sample()


def replay_walks():
    """The walks of the second draw from full memories, and of loading ones with priorities."""
    for surface in (skrl, rlberry, tianshou, torchrl):
        _, sample = surface(is_prioritized=False)
        sample()
        yield f"sample of {surface.__name__}", walk_through(sample)
    with tempfile.TemporaryDirectory() as folder:
        for surface in (skrl, rlberry, tianshou, torchrl):
            path = Path(folder) / f"{surface.__name__}.npz"
            surface(is_prioritized=True)[0].save(path)
            loaded, _ = surface(is_prioritized=True)
            yield f"load of {surface.__name__}", walk_through(lambda load=loaded.load, path=path: load(path))


def walk_through(call):
    walk = Walk()
    sys.setprofile(walk)
    try:
        call()
    finally:
        sys.setprofile(None)
    return walk


def walks():
    """The walk of each call, by its name."""
    found = {}
    for method in ("get", "lease"):
        with RL_Batcher(**arguments()) as batcher:
            found[f"RL_Batcher.{method}"] = walk_of(batcher, method)
    found["SharedVectorEnv.step"] = step_walk()
    if importlib.util.find_spec("ray") is not None:
        found["RayBatcher.get"] = ray_walk()
    return found | dict(replay_walks())


def main():
    parser = argparse.ArgumentParser(description="Counts the files that a call passes through.")
    parser.add_argument("--order", action="store_true", help="list the files of each call")
    shows_order = parser.parse_args().order
    found = walks()
    print("| call | files | changes of file |")
    print("| --- | --- | --- |")
    for name, walk in found.items():
        print(f"| `{name}` | {len(walk.files)} | {walk.n_changes} |")
    for name, walk in found.items() if shows_order else ():
        print(f"\n{name}")
        for file in walk.relative_files():
            print(f"    {file}")


if __name__ == "__main__":
    main()
