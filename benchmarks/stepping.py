"""How fast is stepping from the trainer? Steps/s of `SharedVectorEnv` beside the peers that are installed.

    python benchmarks/stepping.py [--rows cartpole-16 ...] [--repeats 15] [--seconds 0.5] [--no-peers]

Every contender steps the same environments with actions that were drawn before, and nothing else. They take turns,
`--repeats` times over, in one process tree; the table shows medians. Peers with a process for each environment get at
most 16 of them, with which they are faster than with more. "here" is `n_workers=0`, the same in this process.

The row "central" is another thing: rollouts with the agent in the trainer, which waits (as for a GPU) for as long as a
step takes. With two groups (`n_groups=2`) it waits for what it is to do with one while the workers step the other.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import gymnasium
import numpy as np
import torch
from rollouts import MOST_PROCESSES, Run, is_playable, make_env, makers, timed

from rlstructs import DictTensor, GymVectorEnv, RL_Agent, RL_Batcher, SharedVectorEnv

# What the row of 16 CartPoles must reach and aims at, in multiples of gymnasium async; and, on every row, what
# stepping in this process must reach of gymnasium sync.
MUST, AIM, HERE = 4.0, 4.8, 0.95
N_WORKERS = 2


@dataclass(frozen=True)
class Row:
    """An environment, and how many of it."""

    name: str
    env_id: str
    n_all: int
    envpool_id: str


ROWS = [
    Row("cartpole-2", "CartPole-v1", 2, "CartPole-v1"),
    Row("cartpole-16", "CartPole-v1", 16, "CartPole-v1"),
    Row("cartpole-128", "CartPole-v1", 128, "CartPole-v1"),
    Row("halfcheetah-16", "HalfCheetah-v5", 16, "HalfCheetah-v4"),
    Row("pong-8", "ALE/Pong-v5", 8, "Pong-v5"),
]


def actions(row: Row, n: int) -> Iterator[np.ndarray]:
    """Batches of n actions."""
    with contextlib.closing(make_env(row.env_id)) as env:
        space = gymnasium.vector.utils.batch_space(env.action_space, n)
        space.seed(0)
        return cycle([space.sample() for _ in range(257)])


def stepping(env: Any, row: Row, n: int) -> Run:
    """Steps whatever takes a batch of actions and resets what ends by itself."""
    env.reset()
    batches = actions(row, n)

    def step() -> int:
        env.step(next(batches))
        return n

    return lambda seconds: timed(step, seconds)


@contextlib.contextmanager
def ours(row: Row) -> Iterator[Run]:
    with SharedVectorEnv([lambda: make_env(row.env_id)] * row.n_all, N_WORKERS) as env:
        yield stepping(env, row, row.n_all)


@contextlib.contextmanager
def here(row: Row) -> Iterator[Run]:
    with SharedVectorEnv([lambda: make_env(row.env_id)] * row.n_all, 0) as env:
        yield stepping(env, row, row.n_all)


@contextlib.contextmanager
def gymnasium_sync(row: Row) -> Iterator[Run]:
    with contextlib.closing(gymnasium.vector.SyncVectorEnv([lambda: make_env(row.env_id)] * row.n_all)) as env:
        yield stepping(env, row, row.n_all)


@contextlib.contextmanager
def gymnasium_async(row: Row) -> Iterator[Run]:
    with contextlib.closing(gymnasium.vector.AsyncVectorEnv(makers(row))) as env:
        yield stepping(env, row, env.num_envs)


@contextlib.contextmanager
def stable_baselines3(row: Row) -> Iterator[Run]:
    from stable_baselines3.common.vec_env import SubprocVecEnv

    with contextlib.closing(SubprocVecEnv(makers(row))) as env:
        yield stepping(env, row, env.num_envs)


@contextlib.contextmanager
def tianshou(row: Row) -> Iterator[Run]:
    from tianshou.env import ShmemVectorEnv

    with contextlib.closing(ShmemVectorEnv(makers(row))) as env:
        env.reset()
        batches = actions(row, len(env))

        def step() -> int:
            _, _, terminated, truncated, _ = env.step(next(batches))
            ended = np.flatnonzero(terminated | truncated)
            if ended.size:
                env.reset(ended)
            return len(env)

        yield lambda seconds: timed(step, seconds)


@contextlib.contextmanager
def torchrl(row: Row) -> Iterator[Run]:
    from torchrl.envs import GymWrapper, ParallelEnv

    n = min(row.n_all, MOST_PROCESSES)
    env = ParallelEnv(n, lambda: GymWrapper(make_env(row.env_id)))
    try:
        state = env.reset()
        batches = cycle([env.action_spec.rand() for _ in range(257)])

        def step() -> int:
            nonlocal state
            state = env.step_and_maybe_reset(state.set("action", next(batches)))[1]
            return n

        yield lambda seconds: timed(step, seconds)
    finally:
        env.close()


@contextlib.contextmanager
def envpool(row: Row) -> Iterator[Run]:
    import envpool as pool

    env = pool.make(row.envpool_id, env_type="gymnasium", num_envs=row.n_all, num_threads=N_WORKERS)
    with contextlib.closing(env):
        yield stepping(env, row, row.n_all)


# Name, module, contender, and whether it is Python in several processes.
PEERS: dict[str, tuple[str, Callable[[Row], Any], bool]] = {
    "gymnasium sync": ("gymnasium", gymnasium_sync, False),
    "gymnasium async": ("gymnasium", gymnasium_async, True),
    "SB3": ("stable_baselines3", stable_baselines3, True),
    "tianshou": ("tianshou", tianshou, True),
    "torchrl": ("torchrl", torchrl, True),
    "envpool": ("envpool", envpool, False),
}


class Waiting(RL_Agent):
    """An agent that takes so many seconds for each row it is given, and no core."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def initial_state(self, agent_info: DictTensor, B: int) -> DictTensor:
        return DictTensor()

    def __call__(self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: Any = None) -> Any:
        n = len(observation["frame"])
        time.sleep(n * self.seconds)
        return DictTensor({"action": torch.randint(2, (n,))}), state


CENTRAL, N_CENTRAL = "central", 256


@contextlib.contextmanager
def central(n_groups: int, seconds: float) -> Iterator[Run]:
    def create_env(seed: int) -> GymVectorEnv:
        makers = [lambda: make_env("CartPole-v1")] * N_CENTRAL
        return GymVectorEnv(SharedVectorEnv(makers, N_WORKERS, autoreset_mode="SameStep", n_groups=n_groups), seed)

    with RL_Batcher(32, lambda: Waiting(seconds), {}, create_env, {}, 0, 0) as batcher:
        batcher.reset()

        def rollout() -> int:
            batcher.execute()
            return int(batcher.get()[0].lengths.sum())

        yield lambda seconds: timed(rollout, seconds)


def show_central(repeats: int, seconds: float) -> None:
    """How much is gained by stepping one group while the agent is busy with the other; at most it is 2."""
    speeds: dict[str, list[float]] = {"no agent to speak of": [], "one group": [], "two groups": []}
    with contextlib.ExitStack() as stack:
        quick = stack.enter_context(central(1, 0.0))
        quick(seconds)
        per_step = 1 / quick(seconds)
        runs = quick, *(stack.enter_context(central(n_groups, per_step)) for n_groups in (1, 2))
        for _ in range(repeats):
            for name, run in zip(speeds, runs, strict=True):
                speeds[name].append(run(seconds))
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    print(f"{CENTRAL:16} " + " | ".join(f"{name} {speed:,.0f}" for name, speed in medians.items()))
    ratio = statistics.median(two / one for one, two in zip(speeds["one group"], speeds["two groups"], strict=True))
    print(f"{'':16} two groups {ratio:.2f} of one, at most 2", flush=True)


def measure(row: Row, repeats: int, seconds: float, names: list[str]) -> dict[str, float]:
    """Medians of steps/s, every contender in turn."""
    contenders = {"rlstructs": ours, "here": here} | {name: PEERS[name][1] for name in names}
    speeds: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        runs: dict[str, Run] = {}
        for name, contender in contenders.items():
            try:
                runs[name] = stack.enter_context(contender(row))
            except Exception as error:  # a peer that this environment is too much for
                if name in ("rlstructs", "here"):
                    raise
                print(f"    {name} does not run {row.name}: {type(error).__name__}: {str(error)[:100]}")
        for _ in range(repeats):
            for name, run in runs.items():
                speeds.setdefault(name, []).append(run(seconds))
    return {name: statistics.median(values) for name, values in speeds.items()}


def show(row: Row, speeds: dict[str, float]) -> None:
    """One row of the table, and what must hold on it."""
    ours = speeds["rlstructs"]
    print(f"{row.name:16} " + " | ".join(f"{name} {speed:,.0f}" for name, speed in speeds.items()))
    checks = {}
    if row.name == "cartpole-16" and "gymnasium async" in speeds:
        ratio = ours / speeds["gymnasium async"]
        checks[f"{ratio:.2f} of gymnasium async, must {MUST}, aim {AIM}"] = ratio >= MUST
    if peers := {name: speed for name, speed in speeds.items() if name in PEERS and PEERS[name][2]}:
        name, speed = max(peers.items(), key=lambda item: item[1])
        checks[f"{ours / speed:.2f} of {name}, the fastest Python peer with processes, must 1"] = ours >= speed
    if "gymnasium sync" in speeds:
        ratio = speeds["here"] / speeds["gymnasium sync"]
        checks[f"here {ratio:.2f} of gymnasium sync, must {HERE}"] = ratio >= HERE
    for check, holds in checks.items():
        print(f"{'':16} {check}: {'ok' if holds else 'TOO SLOW'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rows = [row.name for row in ROWS if is_playable(row.env_id)]
    parser.add_argument("--rows", nargs="*", default=[*rows, CENTRAL])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--no-peers", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # what a thread pool does after its work would slow whoever is measured next
    installed = [name for name, (module, *_) in PEERS.items() if importlib.util.find_spec(module)]
    installed = ["gymnasium sync", "gymnasium async"] if arguments.no_peers else installed
    print(f"{os.cpu_count()} cores, {N_WORKERS} workers, gymnasium {gymnasium.__version__}; steps/s")
    for row in ROWS:
        if row.name in arguments.rows:
            show(row, measure(row, arguments.repeats, arguments.seconds, installed))
    if CENTRAL in arguments.rows:
        show_central(arguments.repeats, arguments.seconds)


if __name__ == "__main__":
    main()
