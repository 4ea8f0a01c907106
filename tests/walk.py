"""How far a reader has to walk through the library: the files of one call, and the changes between them.

    python tests/walk.py
    python tests/walk.py --order

Two workers with four CartPoles and a random agent each have finished a rollout. The trainer then hands it out, once by
`RL_Batcher.get`, once by `RL_Batcher.lease`, and once by `RayBatcher.get` if ray is installed. For each call the table
has the number of files of `workers/` and `rlstructs/` in which a function was called, and how often control went from
one of these files to another, by a call or by a return. `--order` lists the files, in the order in which the call
reaches them.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from pathlib import Path

import gymnasium
from clusters import ray_cluster

import rlstructs
from rlstructs import GymEnvInf, RandomAgent, RayBatcher, RL_Batcher

ROOT = Path(rlstructs.__file__).parent.parent
FOLDER, LINK = f"{ROOT}/rlstructs/", "rlstructs/workers/"  # the link leads to `workers/`
PAUSE = 1.0  # seconds in which the workers finish: a trainer that waits would poll more or less often


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
    walk = Walk()
    sys.setprofile(walk)
    try:
        found = getattr(batcher, method)()
    finally:
        sys.setprofile(None)
    if method == "lease":
        found.release()
    return walk


def ray_walk():
    with ray_cluster(1), RayBatcher(**arguments(), n_nodes=1) as batcher:
        return walk_of(batcher, "get")


def walks():
    """The walk of each call, by its name."""
    found = {}
    for method in ("get", "lease"):
        with RL_Batcher(**arguments()) as batcher:
            found[f"RL_Batcher.{method}"] = walk_of(batcher, method)
    if importlib.util.find_spec("ray") is not None:
        found["RayBatcher.get"] = ray_walk()
    return found


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
