"""How fast are PettingZoo's environments through `ParallelEnvs`, beside bare loops over them?

    python benchmarks/multi_agent.py [--rows simple_spread_v3 multiwalker_v9] [--seconds 2] [--repeats 5]

A table in Markdown: steps of environments per second, of two workers with a random agent, and of as many bare loops
in processes of their own, in turns. Needs mpe2, and `pettingzoo[sisl]` for multiwalker.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import statistics
import time

import gymnasium
import torch

from rlstructs import RandomAgent, RL_Batcher
from rlstructs.integrations.pettingzoo import ParallelEnvs

ROWS = {
    "simple_spread_v3": "mpe2.simple_spread_v3",
    "simple_line_v1": "mpe2.simple_line_v1",
    "multiwalker_v9": "pettingzoo.sisl.multiwalker_v9",
}
N_WORKERS, N_ENVS, N_TIMESTEPS, MUST = 2, 8, 64, 0.6


def create_env(module: str, n_envs: int, seed: int) -> ParallelEnvs:
    return ParallelEnvs([importlib.import_module(module).parallel_env] * n_envs, seed)


def bare_loop(module: str, seconds: float, start: multiprocessing.Barrier, found: multiprocessing.Queue) -> None:
    """Steps `N_ENVS` environments in turn, with actions that were drawn before."""
    envs = [importlib.import_module(module).parallel_env() for _ in range(N_ENVS)]
    drawn = {}
    for seed, env in enumerate(envs):
        env.reset(seed=seed)
        for agent in env.possible_agents:
            drawn[agent] = [env.action_space(agent).sample() for _ in range(64)]
    start.wait()
    n, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        for env in envs:
            env.step({agent: drawn[agent][n % 64] for agent in env.agents})
            if not env.agents:
                env.reset()
            n += 1
    found.put(n / (time.perf_counter() - began))


def bare(module: str, seconds: float) -> float:
    """Steps per second of all loops together."""
    context = multiprocessing.get_context("spawn")
    start, found = context.Barrier(N_WORKERS), context.Queue()
    loops = [context.Process(target=bare_loop, args=(module, seconds, start, found)) for _ in range(N_WORKERS)]
    for loop in loops:
        loop.start()
    total = sum(found.get() for _ in loops)
    for loop in loops:
        loop.join()
    return float(total)


def collected(batcher: RL_Batcher, seconds: float) -> float:
    """Steps of environments per second."""
    n, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        batcher.execute()
        batcher.get()
        n += N_WORKERS * N_ENVS * N_TIMESTEPS
    return n / (time.perf_counter() - began)


def measure(name: str, space: gymnasium.Space, seconds: float, repeats: int) -> None:
    """One row of the table."""
    arguments = {"module": ROWS[name], "n_envs": N_ENVS}
    with RL_Batcher(N_TIMESTEPS, RandomAgent, {"action_space": space}, create_env, arguments, N_WORKERS, 0) as batcher:
        batcher.reset()
        collected(batcher, 0)  # whatever is taken once
        pairs = [(bare(ROWS[name], seconds), collected(batcher, seconds)) for _ in range(repeats)]
    loops, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(own / loop for loop, own in pairs)
    verdict = "ok" if ratio >= MUST else "TOO SLOW"
    print(f"| {name} | {loops:.0f} | {ours:.0f} | **{ratio:.2f}** | {MUST}: {verdict} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| steps/s | two bare loops | two workers | ratio | must |\n| --- | --- | --- | --- | --- |", flush=True)
    for name in arguments.rows:
        space = create_env(ROWS[name], 1, 0).action_space
        measure(name, space, arguments.seconds, arguments.repeats)


if __name__ == "__main__":
    main()
