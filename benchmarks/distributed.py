"""What does Ray cost? `RayBatcher` with two actors beside `RL_Batcher` with two workers, on one machine.

    python benchmarks/distributed.py [--rows cartpole-64 ...] [--repeats 15] [--seconds 1] [--sizes 1e5 ...]

Steps/s, in turns, with RLlib's environment runners on the same work (random actions, two runners) where they are
installed. Then what a batch costs as its bytes grow: environments do nothing but hand out a frame, so that what is left
is what it takes to bring it to the trainer. "Ray alone" is the floor of both: as many calls of actors that do nothing,
answered with as many bytes. The exit code is 1 if a row is slower than it must be.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import ray
import torch
from rollouts import TASKS, Run, Task, batcher, create_agent, create_env, ours, timed

from rlstructs import GymEnvInf, RandomAgent, RayBatcher, RL_Batcher
from rlstructs.distributed.cluster import INLINE

# Share of what `RL_Batcher` reaches.
MUST = {"cartpole-64": 0.85, "halfcheetah-64": 0.95, "halfcheetah-8": 0.95}
ROWS = {task.name: task for task in TASKS}
ROWS["halfcheetah-64"] = dataclasses.replace(ROWS["halfcheetah-8"], name="halfcheetah-64", n_envs=64)
# Bytes of the object store: two of the largest batches, and some more.
STORE = 2**30
N_NODES, N_TIMESTEPS = 2, 16
MEGABYTE = 1e6


def stepping(batcher: RL_Batcher, n_steps: int, leases: bool) -> Callable[[], int]:
    """One rollout."""
    batcher.reset()

    def step() -> int:
        batcher.execute()
        if leases:
            with batcher.lease():
                pass
        else:
            batcher.get()
        return n_steps

    return step


@contextlib.contextmanager
def nodes(task: Task, leases: bool = False) -> Iterator[Run]:
    with RayBatcher(
        task.n_timesteps, create_agent, {"env_id": task.env_id, "policy": task.policy}, create_env,
        {"env_id": task.env_id, "n_envs": task.n_envs, "native": task.native}, task.n_workers, 0, n_nodes=N_NODES,
    ) as batcher:  # fmt: skip
        step = stepping(batcher, task.n_all * task.n_timesteps, leases)
        yield lambda seconds: timed(step, seconds)


@contextlib.contextmanager
def rllib(task: Task) -> Iterator[Run]:
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

    config = (
        PPOConfig()
        .environment(task.env_id)
        .env_runners(
            num_env_runners=N_NODES, num_envs_per_env_runner=task.n_envs, rollout_fragment_length=task.n_timesteps
        )
    )
    make = ray.remote(SingleAgentEnvRunner).remote
    runners = [make(config=config, worker_index=index + 1) for index in range(N_NODES)]

    def step() -> int:
        n = task.n_envs * task.n_timesteps
        found = ray.get([runner.sample.remote(num_timesteps=n, random_actions=True) for runner in runners])
        return sum(len(episode) for episodes in found for episode in episodes)

    try:
        yield lambda seconds: timed(step, seconds)
    finally:
        for runner in runners:
            ray.kill(runner)


class Sender:
    """Hands out so many bytes and does nothing else."""

    def __init__(self, n_bytes: int) -> None:
        self.frames = np.zeros(n_bytes, np.uint8)

    def send(self) -> np.ndarray:
        return self.frames


@contextlib.contextmanager
def ray_alone(n_bytes: int) -> Iterator[Callable[[], object]]:
    """A call of each of two actors, which share so many bytes."""
    in_reply = {"RAY_max_direct_call_object_size": str(INLINE)}  # as RayBatcher's: small ones do not go by the store
    make = ray.remote(Sender).options(num_cpus=0, runtime_env={"env_vars": in_reply}).remote
    senders = [make(max(1, n_bytes // N_NODES)) for _ in range(N_NODES)]
    try:
        yield lambda: ray.get([sender.send.remote() for sender in senders])
    finally:
        for sender in senders:
            ray.kill(sender)


def batch_bytes(task: Task) -> int:
    """Bytes of one batch."""
    with batcher(task, task.n_workers) as collecting:
        collecting.reset()
        collecting.execute()
        trajectories, _ = collecting.get()
        parts = (trajectories.info, trajectories.trajectories)
        return sum(tensor.nbytes for part in parts for tensor in part.values())


def compare(task: Task, repeats: int, seconds: float) -> bool:
    """One row: every contender in turn; whether it is as quick as it must be."""
    contenders: dict[str, Callable[[Task], Any]] = {"RL_Batcher": ours, "RayBatcher": nodes}
    contenders["with lease"] = functools.partial(nodes, leases=True)
    if importlib.util.find_spec("tree"):  # what Ray's extra `rllib` installs
        contenders["RLlib EnvRunners"] = rllib
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    with contextlib.ExitStack() as stack:
        runs = {name: stack.enter_context(contender(task)) for name, contender in contenders.items()}
        for _ in range(repeats):
            for name, run in runs.items():
                speeds[name].append(run(seconds))
    shares = {
        name: statistics.median(mine / alone for mine, alone in zip(found, speeds["RL_Batcher"], strict=True))
        for name, found in speeds.items()
    }
    cells = [f"{name} {statistics.median(found):,.0f} ({shares[name]:.2f})" for name, found in speeds.items()]
    is_quick = shares["RayBatcher"] >= MUST[task.name]
    print(f"{task.name:15} " + " | ".join(cells))
    verdict = "ok" if is_quick else "TOO SLOW"
    print(f"{'':15} share {shares['RayBatcher']:.2f}, must {MUST[task.name]:.2f}: {verdict}")
    n_bytes, batch_ms = batch_bytes(task), 1e3 * task.n_all * task.n_timesteps / statistics.median(speeds["RL_Batcher"])
    with ray_alone(n_bytes) as calls:
        calls_ms = statistics.median(milliseconds({"Ray alone": calls}, 20 * repeats)["Ray alone"])
    over_ms = batch_ms * (1 / shares["RayBatcher"] - 1)
    print(f"{'':15} a batch: RL_Batcher {batch_ms:.2f} ms, RayBatcher {over_ms:+.2f} ms, Ray alone with its "
          f"{n_bytes / MEGABYTE:.2f} MB {calls_ms:.2f} ms", flush=True)  # fmt: skip
    return is_quick


class Frames(gymnasium.Env):  # type: ignore[misc]
    """Frames of so many bytes that never end."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, n_bytes: int) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (n_bytes,), np.uint8)
        self.frame = np.zeros(n_bytes, np.uint8)

    def reset(self, **_: object) -> tuple[np.ndarray, dict[str, object]]:
        return self.frame, {}

    def step(self, _: object) -> tuple[np.ndarray, float, bool, bool, dict[str, object]]:
        return self.frame, 1.0, False, False, {}


def create_frames(n_bytes: int, seed: int) -> GymEnvInf:
    return GymEnvInf([Frames(n_bytes)], seed)


def milliseconds(steps: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """What each takes, in turns; the first three times are not counted."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats + 3):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            found[name].append(1e3 * (time.perf_counter() - start))
    return {name: values[3:] for name, values in found.items()}


def cost(size: float, repeats: int) -> None:
    """One row: milliseconds of a batch of so many bytes of frames, each once."""
    arguments = (
        N_TIMESTEPS, RandomAgent, {"action_space": gymnasium.spaces.Discrete(2)}, create_frames,
        {"n_bytes": max(1, int(size / N_NODES / (N_TIMESTEPS + 1)))}, N_NODES, 0,
    )  # fmt: skip
    with (
        RL_Batcher(*arguments) as alone,
        RayBatcher(*arguments, n_nodes=N_NODES) as over_ray,
        ray_alone(int(size)) as calls,
    ):
        found = milliseconds({
            "RL_Batcher": stepping(alone, 1, leases=False),
            "RayBatcher": stepping(over_ray, 1, leases=False),
            "with lease": stepping(over_ray, 1, leases=True),
            "Ray alone": calls,
        }, repeats)  # fmt: skip
    medians = {name: statistics.median(values) for name, values in found.items()}
    cells = " | ".join(f"{name} {median:7.2f} ms" for name, median in medians.items())
    print(f"{size / MEGABYTE:8.2f} MB: {cells} | RayBatcher {medians['RayBatcher'] - medians['RL_Batcher']:+7.2f} ms",
          flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", choices=MUST, default=list(MUST))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--sizes", nargs="*", type=float, default=[1e4, 1e5, 1e6, 1e7, 1e8])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ray.init("local", num_cpus=N_NODES + 2, object_store_memory=STORE, include_dashboard=False, logging_level="ERROR",
             log_to_driver=False)  # fmt: skip
    print(f"{os.cpu_count()} cores, ray {ray.__version__}; steps/s (share of RL_Batcher)")
    are_quick = [compare(ROWS[name], arguments.repeats, arguments.seconds) for name in arguments.rows]
    print("a batch of two nodes, median milliseconds:")
    for size in arguments.sizes:
        cost(size, 10 * arguments.repeats if size < 1e7 else arguments.repeats)
    ray.shutdown()
    sys.exit(0 if all(are_quick) else 1)


if __name__ == "__main__":
    main()
