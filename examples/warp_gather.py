"""A Warp kernel over a batch of trajectories: returns of every step, gathered without the padding.

    python examples/warp_gather.py --n-processes 2

Workers play whole episodes of different lengths. A thread for each of them goes back from its last step, and writes the
discounted returns to where its steps lie when those of all are put one behind another. `discounted_returns` computes
them for the padded batch, from which a mask takes the steps. The kernel reads the batch where it lies, without a copy.
Prints what there was, and at the end how far the two are apart and what each of them takes:

    64 episodes of 10 to 61 steps, 1455 steps in all
    largest difference 0.0e+00 of up to 45.8, warp 74 us, torch 95 us: 1.3 times as fast

`--device cuda` does both on a GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import gymnasium
import torch
import warp as wp

from rlstructs import (
    DictTensor,
    GymEnv,
    RandomAgent,
    RL_Batcher,
    TemporalDictTensor,
    Trajectories,
    discounted_returns,
    transitions,
)

REWARD = "_observation/reward"


@dataclass
class Args:
    """What the command line sets."""

    env_id: str = "CartPole-v1"
    n_processes: int = 2
    n_envs: int = 32
    n_timesteps: int = 200
    gamma: float = 0.99
    n_repeats: int = 200
    device: str = "cpu"
    seed: int = 0
    trace: str = ""


@wp.kernel(enable_backward=False)
def gather_returns(
    rewards: wp.array2d(dtype=wp.float32),
    lengths: wp.array(dtype=wp.int64),
    ends: wp.array(dtype=wp.int64),
    gamma: wp.float32,
    returns: wp.array(dtype=wp.float32),
):
    """A thread for each trajectory b, of which the steps end before row ends[b] of the returns."""
    b = wp.tid()
    length, end = wp.int32(lengths[b]), wp.int32(ends[b])
    total = wp.float32(0.0)
    for back in range(length):
        total = rewards[b, length - 1 - back] + gamma * total
        returns[end - 1 - back] = total


def create_env(env_id: str, n_envs: int, seed: int) -> GymEnv:
    return GymEnv([gymnasium.make(env_id, disable_env_checker=k > 0) for k in range(n_envs)], seed)


def create_agent(env_id: str) -> RandomAgent:
    with gymnasium.make(env_id) as env:
        return RandomAgent(env.action_space)


def collect(args: Args) -> Trajectories:
    with RL_Batcher(
        args.n_timesteps, create_agent, {"env_id": args.env_id},
        create_env, {"env_id": args.env_id, "n_envs": args.n_envs}, args.n_processes, args.seed,
    ) as batcher, batcher.trace(args.trace):  # fmt: skip
        batcher.reset()
        batcher.execute()
        return batcher.get()[0]


def with_torch(steps: TemporalDictTensor, gamma: float) -> torch.Tensor:
    """(sum of the lengths,): the discounted sum of the rewards from each step to the end of its row."""
    told = transitions(steps)
    returns = discounted_returns(next_values=torch.zeros_like(told["rewards"]), gamma=gamma, **told)
    return returns[told["mask"]]


def with_warp(steps: TemporalDictTensor, gamma: float) -> torch.Tensor:
    """As `with_torch`."""
    ends = DictTensor({"row": steps.lengths.cumsum(dim=0)})
    returns = DictTensor({"return": torch.empty(int(steps.lengths.sum()), device=steps.device())})
    # Views: the kernel reads and writes the memory of the tensors.
    read, written = steps.get([REWARD]).warp(view=True), returns.warp(view=True)["return"]
    inputs = [read[REWARD], read["lengths"], ends.warp(view=True)["row"], gamma]
    wp.launch(gather_returns, len(steps), inputs, [written], device=written.device)
    return returns["return"]


def seconds(function: Callable[[], torch.Tensor], n_repeats: int) -> float:
    """The least that one call takes."""
    times = []
    for _ in range(n_repeats):
        wp.synchronize()
        start = time.perf_counter()
        function()
        wp.synchronize()  # a GPU may still be at it
        times.append(time.perf_counter() - start)
    return min(times)


def main(args: Args) -> None:
    torch.set_num_threads(1)
    wp.config.log_level = wp.LOG_WARNING  # or it says when it has compiled the kernel
    steps = collect(args).trajectories.to(args.device)
    lengths = steps.lengths
    print(f"{len(steps)} episodes of {lengths.min()} to {lengths.max()} steps, {lengths.sum()} steps in all")
    calls = [lambda: with_warp(steps, args.gamma), lambda: with_torch(steps, args.gamma)]
    found, wanted = (call() for call in calls)
    warp_time, torch_time = (1e6 * seconds(call, args.n_repeats) for call in calls)
    print(
        f"largest difference {(found - wanted).abs().max():.1e} of up to {wanted.abs().max():.1f}, "
        f"warp {warp_time:.0f} us, torch {torch_time:.0f} us: {torch_time / warp_time:.1f} times as fast"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in vars(Args()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default: {value!r}")
    main(Args(**vars(parser.parse_args())))
