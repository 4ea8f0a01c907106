"""A Ray cluster of several nodes on this machine, and what tests run on it; imported by actors and workers too."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import gymnasium
import psutil
import torch
from folders import PYTHONPATH
from helpers import Count, create_gym
from processes import command_of, worker_pids

from rlstructs import DictTensor, GymEnvInf, NormalizeObservation, NormalizeReward, RL_Agent

# Bytes: about the least that Ray takes.
STORE = 80 * 2**20
# Actors find what tests are made of. By default Ray gives way to every other program, so also to the other tests.
ENVIRONMENT = {"PYTHONPATH": PYTHONPATH, "RAY_worker_niceness": "0"}


@contextlib.contextmanager
def ray_cluster(n_nodes, store=STORE):
    """A cluster of so many nodes of one CPU, and this process connected to the first of them; nothing is left of it."""
    import ray
    from ray.cluster_utils import Cluster

    before, handler = worker_pids(), signal.getsignal(signal.SIGTERM)
    kept = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        args = {"num_cpus": 1, "object_store_memory": store, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=args)
        ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
        try:
            for _ in range(n_nodes - 1):
                add_node(cluster, store)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
    finally:
        signal.signal(signal.SIGTERM, handler)  # `ray.init` sets its own
        for name, value in kept.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        # Without the fork server and the resource tracker of the tests, whose import path names a folder of Ray.
        for pid in worker_pids() - before:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if "ray" in command_of(process):
                    process.kill()


def add_node(cluster, store=STORE, **arguments):
    """One node more; it, and Ray's name of it."""
    import ray

    before = {node["NodeID"] for node in ray.nodes()}
    made = cluster.add_node(num_cpus=1, object_store_memory=store, **arguments)
    [node_id] = {node["NodeID"] for node in ray.nodes()} - before
    return made, node_id


def pids_in(stats):
    """The actors and their worker processes, of what `RayBatcher.stats` gave."""
    return [each["pid"] for each in stats["nodes"] + stats["workers"]]


def pids_of(batcher):
    """The actors and their worker processes."""
    return pids_in(batcher.stats())


class Noisy(RL_Agent):
    """Acts at random; tells what it was given, and how many steps its state has gone through."""

    def __init__(self):
        self.weights, self.generator = {"a": torch.zeros(3), "b": torch.zeros((), dtype=torch.bfloat16)}, None

    def seed(self, seed):
        self.generator = torch.Generator().manual_seed(int(seed))

    def initial_state(self, agent_info, B):
        return DictTensor({"n": torch.zeros(B, dtype=torch.int64)})

    def __call__(self, state, observation, agent_info, history=None):
        n = torch.where(observation["initial_state"], torch.zeros_like(state["n"]), state["n"])
        noise = torch.rand(len(n), generator=self.generator)
        output = {
            "action": (noise < agent_info["right"]).long(),
            "noise": noise,
            "n": n,
            "a": self.weights["a"].expand(len(n), 3),
            "b": self.weights["b"].expand(len(n)),
        }
        return DictTensor(output), DictTensor({"n": n + 1})

    def update(self, info):
        self.weights = info


def create_cartpoles(n_envs, seed, autoreset=True, limit=25):
    """CartPoles that end, whose observations and rewards are normalised."""
    env = create_gym("CartPole-v1", n_envs, seed, autoreset, max_episode_steps=limit)
    return NormalizeReward(NormalizeObservation(env))


class Broken(Exception):
    """A user's own exception, of two arguments."""

    def __init__(self, what, code):
        super().__init__(f"{what}: {code}")
        self.code = code


class Failing(Count):
    """Fails in its third step, or as it is reset, in the environments of one worker; others count."""

    def __init__(self, seed, how, worker, generations, file, length, pid, in_episode):
        super().__init__(length)
        self.how = how if seed.worker_index == worker and seed.restart_number < generations else ""
        self.file, self.pid, self.in_episode = file, pid, in_episode
        if self.how == "constructor":
            raise Broken("no licence", 7)

    def reset(self, **arguments):
        if self.how == "reset":
            raise Broken("lost in reset", 7)
        return super().reset(**arguments)

    def step(self, action):
        if self.how == "slow":
            time.sleep(0.1)
        if self.how and self.steps == 2 and self.episode == self.in_episode:
            if self.how == "interrupt":  # the trainer, when that is about to wait
                self.how = ""
                while not os.path.exists(self.file):
                    os.sched_yield()
                os.kill(self.pid, signal.SIGINT)
            if self.how == "raise":
                raise Broken("lost in step", 7)
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "wait":  # for its end
                Path(self.file).touch()
                while True:
                    signal.pause()
        return super().step(action)


def create_failing(seed, n_envs=2, how="", worker=2, generations=1, file="", length=100, pid=0, in_episode=0):
    """Environments of a worker, of which those of one worker fail."""
    how_and_when = how, worker, generations, file, length, pid, in_episode
    return GymEnvInf([Failing(seed, *how_and_when) for _ in range(n_envs)], seed)


def discrete():
    """What the agents of these environments do."""
    return gymnasium.spaces.Discrete(2)
