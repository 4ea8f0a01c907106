"""Fills a replay memory from parallel workers, and draws the same rows as torch, jax and warp arrays.

    python examples/collect_to_memory.py --env-id CartPole-v1 --n-processes 2

needs the extra `jax`, and prints what each library gets, and at the end how much the memory holds:

    torch: observations torch.Size([64, 4]) torch.float32, rewards torch.Size([64, 1]) torch.float32
    jax: observations (64, 4) float32, rewards (64, 1) float32
    warp: observations (64, 4) float32, rewards (64, 1) float32
    torch: 16 sequences of 8 steps, 105 of 128 count
    ...
    CartPole-v1: 8192 rows of 32 environments, 0.4 MB
"""

from __future__ import annotations

import argparse
import importlib
from dataclasses import dataclass

import gymnasium

from rlstructs import GymEnvInf, RandomAgent, RL_Batcher

KINDS = ("torch", "jax", "warp")


@dataclass
class Args:
    """What the command line sets."""

    env_id: str = "CartPole-v1"
    n_processes: int = 2
    n_envs: int = 16
    n_timesteps: int = 64
    n_rollouts: int = 8
    memory_size: int = 256
    batch_size: int = 64
    sequence_length: int = 8
    seed: int = 0
    trace: str = ""


def create_env(env_id: str, n_envs: int, seed: int) -> GymEnvInf:
    return GymEnvInf([gymnasium.make(env_id, disable_env_checker=k > 0) for k in range(n_envs)], seed)


def create_agent(env_id: str) -> RandomAgent:
    return RandomAgent(gymnasium.make(env_id).action_space)


def show_batch(kind, memory, args):
    """Rows drawn uniformly; a replay memory of this kind gives arrays of its library."""
    [[observations, rewards]] = memory.sample(["observations", "rewards"], batch_size=args.batch_size)
    shown = [f"{name} {x.shape} {getattr(x.dtype, '__name__', x.dtype)}"
             for name, x in (("observations", observations), ("rewards", rewards))]  # fmt: skip
    print(f"{kind}: {', '.join(shown)}")


def show_sequences(kind, memory, args):
    """Sequences that may hold the end of an episode: the mask tells which steps belong to the first one."""
    n = args.batch_size // 4
    memory.sample(["observations"], batch_size=n, sequence_length=args.sequence_length, episode_ends="mask")
    mask = memory.get_sampling_mask()
    n_valid = int((mask.numpy() if kind == "warp" else mask).sum())
    print(f"{kind}: {n} sequences of {args.sequence_length} steps, {n_valid} of {n * args.sequence_length} count")


def main(args: Args) -> None:
    n_all = args.n_envs * max(args.n_processes, 1)
    memories = {
        kind: importlib.import_module(f"rlstructs.memories.{kind}").RandomMemory(
            memory_size=args.memory_size, num_envs=n_all, seed=args.seed
        )
        for kind in KINDS
    }
    with RL_Batcher(
        args.n_timesteps, create_agent, {"env_id": args.env_id},
        create_env, {"env_id": args.env_id, "n_envs": args.n_envs}, args.n_processes, args.seed,
    ) as batcher, batcher.trace(args.trace):  # fmt: skip
        batcher.reset()
        for _ in range(args.n_rollouts):
            batcher.execute()
            trajectories, _ = batcher.get()
            for memory in memories.values():
                memory.add_trajectories(trajectories)  # makes the tensors it needs
    for show in (show_batch, show_sequences):
        for kind, memory in memories.items():
            show(kind, memory, args)
    memory = memories["torch"]
    print(f"{args.env_id}: {len(memory)} rows of {n_all} environments, {memory.nbytes / 1e6:.1f} MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in vars(Args()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default: {value!r}")
    main(Args(**vars(parser.parse_args())))
