"""Bottlenecks that are planted are found, by the running program and from its timeline."""

from __future__ import annotations

import os
import threading
import time

import gymnasium
import numpy as np
import pytest
import torch
from clusters import ray_cluster
from gymnasium import spaces

from rlstructs import DictTensor, GymEnvInf, RayBatcher, RL_Agent, RL_Batcher
from rlstructs.trace.timeline import read_events
from rlstructs.trace.verdict import Account, explain

NEVER = threading.Event()


def compute(seconds):
    """Keeps the processor busy for so long, however long that takes."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Planted(gymnasium.Env):
    """Waits, or computes, in steps and resets; may end its process."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, step=0.0, reset=0.0, computes=0.0, length=1000, dies_after=None):
        self.seconds, self.reset_seconds, self.computes = step, reset, computes
        self.length, self.dies_after, self.n = length, dies_after, 0

    def reset(self, *, seed=None, options=None):
        self.n = 0
        NEVER.wait(self.reset_seconds)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.n += 1
        if self.n == self.dies_after:
            os._exit(3)
        NEVER.wait(self.seconds)
        compute(self.computes)
        return np.zeros(2, np.float32), 1.0, self.n == self.length, False, {}


class Slow(RL_Agent):
    """Waits in each call, and in each update."""

    def __init__(self, call=0.0, update=0.0):
        self.seconds, self.update_seconds = call, update

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        NEVER.wait(self.seconds)
        return DictTensor({"action": torch.zeros(observation.n_elems(), dtype=torch.int64)}), state

    def update(self, info):
        NEVER.wait(self.update_seconds)


class Plan:
    """What is planted where."""

    def __init__(
        self, n_workers=2, n_envs=2, n_cores=2, run_ahead=1, agent=(0.0, 0.0), learn=0.0, one=None, pins=False, **env
    ):
        self.n_workers, self.n_envs, self.n_cores, self.run_ahead = n_workers, n_envs, n_cores, run_ahead
        self.agent, self.learn, self.one, self.pins, self.env = agent, learn, one, pins, env

    def batcher(self):
        def create_env(seed):
            envs = [Planted(**self.env) for _ in range(self.n_envs)]
            if self.one is not None and seed == 100:
                envs[1] = Planted(step=self.one)
            return GymEnvInf(envs, seed)

        def pin(index):
            if self.pins:
                os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

        return RL_Batcher(
            n_timesteps=8, create_agent=Slow, agent_args=dict(zip(("call", "update"), self.agent, strict=True)),
            create_env=create_env, env_args={}, n_processes=self.n_workers, run_ahead=self.run_ahead,
            seeds=[100 * worker for worker in range(self.n_workers)], init_worker=pin, on_worker_failure="restart",
        )  # fmt: skip


PLANS = {
    "environments": Plan(computes=0.005),
    "reset": Plan(reset=0.05, length=2),
    "one environment": Plan(n_envs=4, one=0.02),
    "agent": Plan(n_envs=32, agent=(0.03, 0.0)),
    "small batches": Plan(n_envs=1, agent=(0.03, 0.0)),
    "learner": Plan(learn=0.3),
    "no overlap": Plan(run_ahead=0, n_envs=1, step=0.03, learn=0.24),
    "too many workers": Plan(n_workers=4, pins=True, computes=0.005, n_cores=1),
    "too few workers": Plan(n_workers=1, n_cores=4, computes=0.005),
    "update": Plan(run_ahead=0, agent=(0.0, 0.3)),
    "restarts": Plan(dies_after=12),
    "waiting environments": Plan(step=0.01),
}


def run(plan, path):
    """Runs four rollouts after a first one; returns what the program says, and what its timeline says."""
    with plan.batcher() as batcher:
        batcher.reset()
        batcher.execute()
        batcher.get()
        batcher.explain()
        with batcher.trace(path):
            for _ in range(4):
                batcher.execute()
                batcher.get()
                NEVER.wait(plan.learn)
                batcher.update(None)
            said = batcher.explain()
    return said, "\n".join(explain(Account.of_events(read_events(path))))


@pytest.mark.parametrize("name", PLANS)
def test_a_planted_bottleneck_is_found(name, tmp_path, monkeypatch):
    monkeypatch.setattr("rlstructs.trace.board.n_cores", lambda: PLANS[name].n_cores)
    for said in run(PLANS[name], tmp_path / "run.json"):
        lines = said.splitlines()
        assert len(lines) == 5
        assert lines[0].split(":")[0] == name, said
        if name == "one environment":
            assert "environment 5 takes" in lines[0]  # the second of worker 1


def test_without_a_rollout_there_is_nothing_to_explain():
    with Plan().batcher() as batcher:
        assert batcher.explain() == "nothing to explain: no rollout has ended yet"


def test_rollouts_in_the_trainers_process_are_explained():
    with RL_Batcher.make(lambda: Planted(reset=0.02, length=2), n_envs=2, n_workers=0, n_timesteps=8) as batcher:
        batcher.reset()
        batcher.execute()
        batcher.get()
        assert batcher.explain().startswith("reset: ")


@pytest.mark.slow
def test_the_workers_of_nodes_are_explained(tmp_path):
    with ray_cluster(2), RayBatcher.make(
        lambda: Planted(reset=0.05, length=2), n_envs=4, n_workers=2, n_timesteps=8, n_nodes=2
    ) as batcher:  # fmt: skip
        batcher.reset()
        with batcher.trace(tmp_path / "run.json"):
            for _ in range(2):
                batcher.execute()
                batcher.get()
        said = batcher.explain()
    for text in said, "\n".join(explain(Account.of_events(read_events(tmp_path / "run.json")))):
        lines = text.splitlines()
        assert lines[0].startswith("reset: ") and lines[3].startswith("workers, 2 on ")
        assert lines[4].startswith("64 steps")
