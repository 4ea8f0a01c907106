"""How much does a replay of frames take, and how fast are stacks drawn from it?

    python benchmarks/frames.py [--steps 200000] [--repeats 9] [--env-id ALE/Pong-v5]

Parallel workers play an Atari game, 84x84 grey frames; the buffer keeps each frame once, though it gives stacks of
four and next observations. Bytes are what the process holds more than before, and what the buffer says; a draw of 32
stacks is compared with `numpy.take` of as many bytes from an array that holds the same frames.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from typing import Any

import gymnasium
import numpy as np
import psutil
from rollouts import create_agent

from rlstructs import GymEnvInf, RL_Batcher
from rlstructs.replay import VectorReplayBuffer

STACK, BATCH = 4, 32
FRAME = 84 * 84
N_WORKERS, N_ENVS, N_TIMESTEPS = 2, 4, 64


def create_env(env_id: str, n_envs: int, seed: int) -> GymEnvInf:
    import ale_py

    gymnasium.register_envs(ale_py)
    raw = [gymnasium.make(env_id, frameskip=1) for _ in range(n_envs)]
    return GymEnvInf([gymnasium.wrappers.AtariPreprocessing(env) for env in raw], seed)


def filled(env_id: str, n_steps: int) -> tuple[Any, int]:
    """A buffer of so many steps, and the bytes that the process holds for it."""
    n_all = N_WORKERS * N_ENVS
    with RL_Batcher(
        N_TIMESTEPS, create_agent, {"env_id": env_id, "policy": False}, create_env,
        {"env_id": env_id, "n_envs": N_ENVS}, N_WORKERS, 0,
    ) as batcher:  # fmt: skip
        batcher.reset()
        batcher.execute()
        batcher.get()  # whatever is taken once
        before = psutil.Process().memory_info().rss
        buffer = VectorReplayBuffer(n_steps, n_all, stack_num=STACK)
        while len(buffer) < n_steps // n_all * n_all:
            batcher.execute()
            buffer.add_trajectories(batcher.get()[0])
        return buffer, psutil.Process().memory_info().rss - before


def timed(call: Any, repeats: int, seconds: float = 0.2) -> float:
    """Microseconds, the median of some repetitions."""
    found = []
    for _ in range(repeats):
        n, started = 0, time.perf_counter()
        while (now := time.perf_counter()) < started + seconds:
            call()
            n += 1
        found.append((now - started) / n * 1e6)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--env-id", default="ALE/Pong-v5")
    arguments = parser.parse_args()
    started = time.perf_counter()
    buffer, resident = filled(arguments.env_id, arguments.steps)
    n, took = len(buffer), time.perf_counter() - started
    print(f"{arguments.env_id}: {n:,} steps kept after {took:.0f} s of play")
    for name, nbytes in (("the buffer says", buffer.nbytes), ("the process holds", resident)):
        ratio = nbytes / n / FRAME
        print(f"{name} {nbytes / 1e6:,.0f} MB, {ratio:.3f} times a frame for each step, must 1.1: "
              f"{'ok' if ratio <= 1.1 else 'TOO MUCH'}")  # fmt: skip
    frames = np.random.default_rng(0).integers(0, 255, (n, 84, 84), np.uint8)
    rng = np.random.default_rng(1)
    rows = itertools.cycle([rng.integers(n - STACK, size=BATCH)[:, None] + np.arange(STACK) for _ in range(300)])
    repeats = arguments.repeats
    limit = timed(lambda: np.take(frames, next(rows), axis=0), repeats)
    stacks = timed(lambda: buffer.get(buffer.sample_indices(BATCH), "obs"), repeats)
    both = timed(lambda: [np.take(frames, next(rows), axis=0) for _ in range(2)], repeats)
    samples = timed(lambda: buffer.sample(BATCH), repeats)
    for what, micros, bare in (
        (f"{BATCH} stacks of {STACK}", stacks, limit),
        (f"a sample of {BATCH}, stacks of observations and next ones", samples, both),
    ):
        print(f"{what}: {micros:.0f} us, numpy.take of as many bytes {bare:.0f} us, "
              f"{micros / bare:.2f} times, must 2: {'ok' if micros <= 2 * bare else 'TOO SLOW'}")  # fmt: skip


if __name__ == "__main__":
    main()
