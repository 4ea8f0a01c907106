"""The three structures that everything comes in: `DictTensor`, `TemporalDictTensor` and `Trajectories`.

    python examples/1_structures.py

prints what is made and what each operation gives, without training and without processes:

    # DictTensor: one row for each of the batch
    DictTensor(n_elems=3, device=cpu, env_index=(3,) int64, agent_info/goal=(3, 2) float32)
    a nested key: (3, 2)
    the last row and the first: [2, 0]
    ...
    # Other libraries
    ...
    jax: (3, 4) float32, and back: True
"""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import dataclass

import torch

from rlstructs import DictTensor, TemporalDictTensor, Trajectories


@dataclass
class Args:
    """What the command line sets."""

    n_trajectories: int = 3
    n_timesteps: int = 4
    seed: int = 0


def rows_of(n: int) -> DictTensor:
    """Named tensors that share their first axis, the batch: here what is known of each trajectory."""
    print("# DictTensor: one row for each of the batch")
    rows = DictTensor({"env_index": torch.arange(n), "agent_info": {"goal": torch.rand(n, 2)}})
    print(rows)
    print("a nested key:", tuple(rows["agent_info/goal"].shape))
    print("the last row and the first:", rows.index([n - 1, 0])["env_index"].tolist())
    print("rows of a mask:", rows.index(rows["env_index"] > 0)["env_index"].tolist())
    print("cat:", DictTensor.cat([rows, rows])["env_index"].tolist())
    print("keys below agent_info/:", list(rows.truncate_key("agent_info/").keys()))
    return rows


def steps_of(n: int, n_timesteps: int) -> TemporalDictTensor:
    """Tensors (B, T, ...) with a length for each row: here a reward for each step, and what was seen before it."""
    print("\n# TemporalDictTensor: a row has as many steps as its length says, the rest is padding")
    rewards = torch.arange(1.0, n * n_timesteps + 1).view(n, n_timesteps)
    lengths = torch.arange(n) % n_timesteps + 1
    steps = TemporalDictTensor({"observation/frame": torch.rand(n, n_timesteps, 2), "reward": rewards}, lengths)
    print(steps)
    mask = steps.mask()
    print("mask:", mask.tolist())
    print("sums of the rewards that count:", (steps["reward"] * mask).sum(dim=1).tolist())
    print("last steps:", steps.temporal_multi_index(lengths - 1)["reward"].tolist())
    still, which = steps.masked_temporal_index(1)
    print("rows that have a step 1:", which.tolist(), "with rewards", still["reward"].tolist())
    print("as long as the longest:", steps.shorten().n_timesteps(), "steps")
    return steps


def pairs_of(rows: DictTensor, steps: TemporalDictTensor, seed: int) -> Trajectories:
    """Both: what is constant over a trajectory, and what is not. This is what a batcher hands out."""
    print("\n# Trajectories: both")
    batch = Trajectories(rows, steps)
    print(batch)
    print("lengths:", batch.lengths.tolist())
    print("the first two:", batch.slice(0, 2).lengths.tolist())
    short = Trajectories(rows, steps.temporal_slice(0, 1))
    both = Trajectories.cat([batch, short])  # the shorter ones get padding
    print("cat:", both.trajectories["reward"].shape, both.lengths.tolist())
    print("drawn:", both.sample(batch.n_elems(), torch.Generator().manual_seed(seed)).n_elems(), "of", both.n_elems())
    return batch


def convert(batch: Trajectories) -> None:
    """Other libraries get copies, in the same nesting, and what they have made comes back."""
    print("\n# Other libraries")
    arrays = batch.numpy()
    frames = arrays["trajectories"]["observation/frame"]
    print("numpy:", type(frames).__name__, frames.shape, frames.dtype, "lengths", arrays["trajectories"]["lengths"])
    frames[:] = 0  # a copy: `numpy(view=True)` shares memory
    print("back, and another now:", Trajectories.from_numpy(arrays) != batch)
    if importlib.util.find_spec("jax") is None:
        print("jax: is not here, pip install jax")
        return
    arrays = batch.trajectories.jax()  # of 32 bits where there were 64, unless jax_enable_x64 is set
    rewards, steps = arrays["reward"], TemporalDictTensor.from_jax(arrays)
    print(f"jax: {rewards.shape} {rewards.dtype}, and back: {steps == batch.trajectories}")


def main(args: Args) -> None:
    torch.manual_seed(args.seed)
    rows = rows_of(args.n_trajectories)
    steps = steps_of(args.n_trajectories, args.n_timesteps)
    convert(pairs_of(rows, steps, args.seed))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in vars(Args()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default: {value!r}")
    main(Args(**vars(parser.parse_args())))
