"""How fast are environments that wait? Steps/s as a share of what they could make if nobody waited for another.

    python benchmarks/waiting.py [--rows 16x1 ...] [--repeats 3] [--seconds 10] [--no-peers] [--quick]

A row is a number of environments and of workers. Each step waits: exponentially distributed, with a mean of 50 ms, and
in one environment of ten with a mean ten times as long. The limit is the sum over environments of one over the mean.
Actions are random. "threads" is `RL_Batcher.make(..., threads=True, deadline=)`, "one by one" the same without them,
"more workers" that with a worker for each environment, and "recv" `SharedVectorEnv.recv(min_envs=1)` with as many.
tianshou and gymnasium have a process for each environment, torchrl's pool a thread. Those are not run with more than
64 environments. `--quick` takes fewer environments and shorter waits, to see that everything runs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from rollouts import Run, timed

from rlstructs import GymEnvInf, GymEnvThreads, RandomAgent, RL_Batcher, SharedVectorEnv

MEAN, SLOWER, ONE_IN = 0.05, 10, 10
# Steps of a row, and the mean waits in which a rollout of threads ends: few rows are full by then.
N_TIMESTEPS, DEADLINE = 64, 20
MOST_PROCESSES = 64


@dataclass(frozen=True)
class Row:
    """So many environments in so many workers, and what share of the limit their threads must reach."""

    n_envs: int
    n_workers: int
    must: float
    mean: float = MEAN

    @property
    def name(self) -> str:
        return f"{self.n_envs}x{self.n_workers}"

    @property
    def makers(self) -> list[Callable[[], Waiting]]:
        means = [self.mean * (SLOWER if k % ONE_IN == ONE_IN - 1 else 1) for k in range(self.n_envs)]
        return [partial(Waiting, mean, k) for k, mean in enumerate(means)]

    @property
    def limit(self) -> float:
        return sum(1 / maker.args[0] for maker in self.makers)


ROWS = [Row(16, 1, 0.9), Row(16, 2, 0.9), Row(256, 1, 0.85)]
QUICK = [Row(4, 1, 0.0, 0.002)]


class Waiting(gymnasium.Env[np.ndarray, np.int64]):
    """Waits in each step; an episode has 100 of them."""

    observation_space = gymnasium.spaces.Box(0, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, mean: float, k: int) -> None:
        self.mean, self.random, self.n_steps = mean, np.random.default_rng(k), 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        self.n_steps = 0
        return np.zeros(4, np.float32), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        time.sleep(self.random.exponential(self.mean))
        self.n_steps += 1
        return np.zeros(4, np.float32), 1.0, self.n_steps == 100, False, {}


def create_env(row: Row, n_workers: int, pace: dict[str, float], seed: int) -> GymEnvInf:
    """The environments of a worker, whose index is its seed."""
    n_envs = row.n_envs // n_workers
    envs = [make() for make in row.makers[seed * n_envs :][:n_envs]]
    return GymEnvThreads(envs, seed, **pace) if pace else GymEnvInf(envs, seed)


@contextlib.contextmanager
def batcher(row: Row, n_workers: int, n_timesteps: int, **pace: float) -> Iterator[Run]:
    env_args = {"row": row, "n_workers": n_workers, "pace": pace}
    agent = partial(RandomAgent, Waiting.action_space)
    with RL_Batcher(n_timesteps, agent, {}, create_env, env_args, n_workers, seeds=range(n_workers)) as made:
        made.reset()

        def rollout() -> int:
            made.execute()
            return int(made.get()[0].lengths.sum())

        yield lambda seconds: timed(rollout, seconds)


def threads(row: Row) -> Any:
    return batcher(row, row.n_workers, N_TIMESTEPS, deadline=DEADLINE * row.mean)


def one_by_one(row: Row) -> Any:
    return batcher(row, row.n_workers, 1)


def more_workers(row: Row) -> Any:
    return batcher(row, row.n_envs, 4)


@contextlib.contextmanager
def recv(row: Row) -> Iterator[Run]:
    with SharedVectorEnv(row.makers, row.n_envs) as envs:
        envs.reset()
        envs.send(envs.action_space.sample())

        def step() -> int:
            ready = envs.recv(min_envs=1)[4]["env_id"]
            envs.send(envs.action_space.sample()[: len(ready)], ready)
            return len(ready)

        yield lambda seconds: timed(step, seconds)


@contextlib.contextmanager
def gymnasium_async(row: Row) -> Iterator[Run]:
    with contextlib.closing(gymnasium.vector.AsyncVectorEnv(row.makers)) as envs:
        envs.reset()

        def step() -> int:
            envs.step(envs.action_space.sample())
            return row.n_envs

        yield lambda seconds: timed(step, seconds)


@contextlib.contextmanager
def tianshou(row: Row) -> Iterator[Run]:
    from tianshou.env import SubprocVectorEnv

    envs = SubprocVectorEnv(row.makers, wait_num=1)
    try:
        envs.reset()
        ready = np.arange(row.n_envs)

        def step() -> int:
            nonlocal ready
            _, _, terminated, truncated, infos = envs.step(np.random.randint(2, size=len(ready)), ready)
            ready = np.array([info["env_id"] for info in infos])
            if (ended := terminated | truncated).any():
                envs.reset(ready[ended])
            return len(ready)

        yield lambda seconds: timed(step, seconds)
        while envs.waiting_id:
            envs.step(None)
    finally:
        envs.close()


@contextlib.contextmanager
def torchrl(row: Row) -> Iterator[Run]:
    from torchrl.envs import AsyncEnvPool, GymWrapper

    pool = AsyncEnvPool(
        [lambda maker=maker: GymWrapper(maker(), categorical_action_encoding=True) for maker in row.makers],
        backend="threading",
    )
    try:
        n_under_way = row.n_envs
        pool.async_step_and_maybe_reset_send(pool.rand_action(pool.reset()))

        def step() -> int:
            _, following = pool.async_step_and_maybe_reset_recv(min_get=1)
            pool.async_step_and_maybe_reset_send(following.set("action", torch.randint(2, (len(following),))))
            return len(following)

        yield lambda seconds: timed(step, seconds)
        pool.async_step_and_maybe_reset_recv(min_get=n_under_way)
    finally:
        pool.close()


OURS: dict[str, Callable[[Row], Any]] = {
    "threads": threads,
    "one by one": one_by_one,
    "more workers": more_workers,
    "recv": recv,
}
PEERS: dict[str, Callable[[Row], Any]] = {
    "gymnasium async": gymnasium_async,
    "tianshou wait_num": tianshou,
    "torchrl pool": torchrl,
}


def measure(row: Row, repeats: int, seconds: float, peers: list[str]) -> None:
    """Prints the medians of all contenders, which run one after another."""
    print(f"{row.name}: at most {row.limit:,.0f} steps/s")
    contenders = OURS | {name: PEERS[name] for name in peers}
    for name, contender in contenders.items():
        if name != "threads" and row.n_envs > MOST_PROCESSES:
            continue
        with contender(row) as run:
            speed = statistics.median(run(seconds) for _ in range(repeats))
        share = speed / row.limit
        check = f", must {row.must}: {'ok' if share >= row.must else 'TOO SLOW'}" if name == "threads" else ""
        print(f"    {name:18} {speed:8,.0f} steps/s, {share:.3f} of it{check}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=[row.name for row in ROWS])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=UserWarning)
    installed = [name for name in PEERS if importlib.util.find_spec(name.split()[0])]
    print(f"{os.cpu_count()} cores, mean waits of {1000 * MEAN:g} ms, every {ONE_IN}th {SLOWER} times as long")
    for row in QUICK if arguments.quick else ROWS:
        if arguments.quick or row.name in arguments.rows:
            repeats, seconds = (1, 0.1) if arguments.quick else (arguments.repeats, arguments.seconds)
            measure(row, repeats, seconds, [] if arguments.no_peers else installed)


if __name__ == "__main__":
    main()
