"""Environments that wait and write down what happened in them, and a judge of the rows that are handed out.

`python tests/waits.py STEPS [RUN_AHEAD]` runs for so many steps, and kills a worker every two seconds.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import gymnasium
import numpy as np
import torch

from rlstructs import DictTensor, GymEnvThreads, RL_Agent, RL_Batcher

# Of a step of an environment: how many it has made, the action it was given, and what it answered.
RECORD = np.dtype([("n", "i8"), ("action", "i8"), ("chain", "i8"), ("episode", "i8"), ("reward", "f8"), ("done", "i8")])
FACTOR, LIMIT = 1_000_003, 1 << 40


class Recorder(gymnasium.Env):
    """Waits in each step; shows who it is, its number of steps, a checksum of its actions, and its episode.

    Without a folder it writes nothing down.
    """

    observation_space = gymnasium.spaces.Box(0, LIMIT, (4,), np.int64)
    action_space = gymnasium.spaces.Discrete(1000)

    def __init__(self, folder, mean):
        self.who, self.mean = int.from_bytes(os.urandom(4), "little"), mean
        self.n = self.chain = 0
        self.episode, self.random = -1, random.Random(self.who)
        self.file = None if folder is None else os.open(Path(folder, str(self.who)), os.O_WRONLY | os.O_CREAT)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.left = self.episode + 1, self.random.randint(1, 12)
        return self._show(), {}

    def step(self, action):
        if self.mean:
            time.sleep(self.random.expovariate(1 / self.mean))
        self.n, self.left = self.n + 1, self.left - 1
        self.chain = (self.chain * FACTOR + int(action) + 1) % LIMIT
        reward, done = self.chain % 64, self.left == 0
        if self.file is not None:
            os.write(self.file, np.array((self.n, action, self.chain, self.episode, reward, done), RECORD).tobytes())
        return self._show(), reward, done and self.n % 2 == 0, done and self.n % 2 == 1, {}

    def close(self):
        if self.file is not None:
            os.close(self.file)

    def _show(self):
        return np.array([self.who, self.n, self.chain, self.episode], np.int64)


gymnasium.register("Waits-v0", Recorder, kwargs={"folder": None, "mean": 0.05})


class Teller(RL_Agent):
    """Acts at random; tells which update it had, and how often it has acted in each environment."""

    version = torch.zeros((), dtype=torch.int64)

    def initial_state(self, agent_info, B):
        return DictTensor({"n": torch.zeros(B, dtype=torch.int64)})

    def __call__(self, state, observation, agent_info, history=None):
        n = state["n"].clone()
        told = {"action": torch.randint(0, 1000, n.shape), "version": self.version.expand(n.shape), "n": n}
        state["n"].fill_(-1)  # its own, to write to
        return DictTensor(told), DictTensor({"n": n + 1})

    def update(self, info):
        self.version = info["version"]


def create_env(n_envs, seed, folder, mean, **pace):
    means = [mean * (10 if k == n_envs - 1 else 1) for k in range(n_envs)]
    return GymEnvThreads([Recorder(folder, each) for each in means], seed, **pace)


class Judge:
    """Compares the rows that are handed out with each other, and with what the environments wrote down."""

    def __init__(self, folder):
        self.folder, self.found, self.n_steps, self.n_late = folder, {}, 0, 0

    def add(self, trajectories):
        """Takes a rollout; raises unless its rows follow those before."""
        steps = {key: tensor.numpy() for key, tensor in trajectories.trajectories.items()}
        for row, length in enumerate(trajectories.lengths.tolist()):
            if length:
                own = {key: array[row, :length] for key, array in steps.items()}
                self._add_row(own, trajectories.info["agent_state/n"][row], trajectories.info["policy_version"][row])

    def _add_row(self, own, state, version):
        seen, following = own["observation/frame"], own["_observation/frame"]
        who, n = int(seen[0, 0]), int(seen[0, 1])
        assert (seen[:, 0] == who).all() and (following[:, 0] == who).all()
        rows = self.found.setdefault(who, [])
        assert n == sum(map(len, rows)), f"{n} follows {sum(map(len, rows))}"
        assert (seen[:, 1] == np.arange(n, n + len(seen))).all() and (following[:, 1] == seen[:, 1] + 1).all()
        done = own["_observation/done"]
        assert (done == own["_observation/terminated"] | own["_observation/truncated"]).all()
        assert (own["_observation/terminated"][done] == (following[done, 1] % 2 == 0)).all()
        assert (own["observation/initial_state"][1:] == done[:-1]).all()
        assert (seen[1:, 2] == following[:-1, 2]).all() and (seen[1:, 3] == following[:-1, 3] + done[:-1]).all()
        assert (own["_observation/last_action"] == own["action/action"]).all()
        assert (own["action/n"] == int(state) + np.arange(len(seen))).all() and int(state) == n
        versions = own["policy_version"]
        assert (versions == own["action/version"]).all() and (versions[1:] == int(version)).all()
        assert versions[0] <= int(version)
        self.n_late += int(versions[0] < int(version))
        found = np.zeros(len(seen), RECORD)
        found["n"], found["chain"], found["episode"] = following[:, 1], following[:, 2], following[:, 3]
        found["action"], found["reward"], found["done"] = own["action/action"], own["_observation/reward"], done
        rows.append(found)
        self.n_steps += len(seen)

    def compare(self, most_lost):
        """Raises unless each environment's rows are its record, but for at most so many steps at its end."""
        for who, rows in self.found.items():
            record, found = np.fromfile(Path(self.folder, str(who)), RECORD), np.concatenate(rows)
            assert len(found) <= len(record) <= len(found) + most_lost
            assert (record[: len(found)] == found).all(), f"environment {who}"


def make_batcher(n_processes, n_timesteps=6, run_ahead=0, n_envs=4, mean=0.001, folder=None, **pace):
    env_args = {"n_envs": n_envs, "folder": folder, "mean": mean, **pace}
    return RL_Batcher(
        n_timesteps, Teller, {}, create_env, env_args, n_processes, seeds=0, run_ahead=run_ahead, timeout=60,
        on_worker_failure="restart",
    )  # fmt: skip


def update(batcher):
    """Gives the agents the number of their update."""
    batcher.update(DictTensor({"version": torch.tensor(batcher.policy_version + 1)}))


def run(n_steps, n_processes, run_ahead=0, n_timesteps=6, kill_every=None, **settings):
    """Collects so many steps, with an update after each rollout; returns the judge, and how many workers it killed."""
    with tempfile.TemporaryDirectory() as folder:
        judge, n_killed, last = Judge(folder), 0, time.monotonic()
        with make_batcher(n_processes, n_timesteps, run_ahead, folder=folder, **settings) as batcher:
            batcher.reset()
            while judge.n_steps < n_steps:
                batcher.execute()
                if kill_every is not None and time.monotonic() > last + kill_every:
                    os.kill(random.choice(batcher.stats()["workers"])["pid"], signal.SIGKILL)
                    n_killed, last = n_killed + 1, time.monotonic()
                judge.add(batcher.get()[0])
                update(batcher)
        # A lost rollout, those that were run ahead, and a step that was under way.
        judge.compare((run_ahead + 2) * n_timesteps + 1)
    return judge, n_killed


if __name__ == "__main__":
    judge, n_killed = run(
        int(sys.argv[1]), 2, int(sys.argv[2]), n_timesteps=32, kill_every=2.0, n_envs=16, deadline=0.05
    )
    sys.stdout.write(
        f"{judge.n_steps} steps of {len(judge.found)} environments, {judge.n_late} rows whose first step is older, "
        f"{n_killed} workers killed\n"
    )
