"""Collects a dataset, saves it to HDF5, loads it elsewhere, and trains a policy to act as its agent did.

    python examples/offline_dataset.py --path cartpole.h5

A hand-written controller with some noise plays CartPole-v1 in parallel workers; what it did goes to a file. From
the file alone a small network is trained to give its actions (behaviour cloning), and then plays without noise:

    cartpole.h5: 16384 steps of 16 environments, 0.6 MB, 32 episodes, mean return 500.0
    epoch 0: loss 0.501, accuracy 0.783
    ...
    clone: 10 episodes, mean return 500.0

`--stage collect` and `--stage train` do one half each.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path

import gymnasium
import torch
from torch import nn

from rlstructs import DictTensor, GymEnvInf, RL_Agent, RL_Batcher
from rlstructs.replay import VectorReplayBuffer

ENV_ID = "CartPole-v1"


@dataclass
class Args:
    """What the command line sets."""

    path: str = "cartpole.h5"
    stage: str = "both"
    n_processes: int = 2
    n_envs: int = 8
    n_timesteps: int = 128
    n_rollouts: int = 8
    noise: float = 0.2
    n_epochs: int = 5
    batch_size: int = 256
    n_episodes: int = 10
    seed: int = 0


class Controller(RL_Agent):
    """Pushes to the side to which the pole falls; with probability `noise` to any."""

    def __init__(self, noise: float) -> None:
        self.noise = noise

    def __call__(self, state, observation, agent_info, history=None):
        position, velocity, angle, turning = observation["frame"].unbind(dim=1)
        action = (angle + 0.3 * turning + 0.02 * position + 0.05 * velocity > 0).long()
        random = torch.rand(len(action)) < self.noise
        action = torch.where(random, torch.randint_like(action, 2), action)
        return DictTensor({"action": action}), state

    def initial_state(self, agent_info, B):
        return DictTensor()

    def update(self, info):
        pass


class Policy(nn.Module):
    """Logits of the two actions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return self.layers(observations)


def create_env(n_envs: int, seed: int) -> GymEnvInf:
    return GymEnvInf([gymnasium.make(ENV_ID) for _ in range(n_envs)], seed)


def collect(args: Args) -> None:
    """Lets the controller play, and writes what happened to a file."""
    n_all = args.n_envs * max(args.n_processes, 1)
    buffer = VectorReplayBuffer(n_all * args.n_timesteps * args.n_rollouts, n_all, ignore_obs_next=True)
    with RL_Batcher(
        args.n_timesteps, Controller, {"noise": args.noise}, create_env, {"n_envs": args.n_envs},
        args.n_processes, args.seed,
    ) as batcher:  # fmt: skip
        batcher.reset()
        for _ in range(args.n_rollouts):
            batcher.execute()
            buffer.add_trajectories(batcher.get()[0])
        returns = batcher.episodes()["return"]
    buffer.save_hdf5(args.path)
    size = Path(args.path).stat().st_size / 1e6
    print(f"{args.path}: {len(buffer)} steps of {n_all} environments, {size:.1f} MB, "
          f"{len(returns)} episodes, mean return {returns.mean():.1f}")  # fmt: skip


def train(args: Args) -> Policy:
    """Trains a policy from the file alone."""
    torch.manual_seed(args.seed)
    buffer = VectorReplayBuffer.load_hdf5(args.path)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for epoch in range(args.n_epochs):
        order = buffer.sample_indices(None)  # every step once, in random order
        losses, right = [], []
        for start in range(0, len(order), args.batch_size):
            batch = buffer[order[start : start + args.batch_size]]
            logits, actions = policy(torch.from_numpy(batch["obs"])), torch.from_numpy(batch["act"]).flatten()
            loss = nn.functional.cross_entropy(logits, actions)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            right.append((logits.argmax(dim=1) == actions).float().mean().item())
        print(f"epoch {epoch}: loss {sum(losses) / len(losses):.3f}, accuracy {sum(right) / len(right):.3f}")
    return policy


def play(args: Args, policy: Policy) -> None:
    """Lets the policy play whole episodes."""
    env = gymnasium.make(ENV_ID)
    total = 0.0
    for episode in range(args.n_episodes):
        observation, _ = env.reset(seed=args.seed + 1000 + episode)
        ended = False
        while not ended:
            with torch.no_grad():
                action = int(policy(torch.from_numpy(observation)).argmax())
            observation, reward, terminated, truncated, _ = env.step(action)
            total, ended = total + float(reward), terminated or truncated
    env.close()
    print(f"clone: {args.n_episodes} episodes, mean return {total / args.n_episodes:.1f}")


def main(args: Args) -> None:
    if args.stage in ("collect", "both"):
        collect(args)
    if args.stage in ("train", "both"):
        play(args, train(args))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Args):
        choices = {"choices": ("collect", "train", "both")} if field.name == "stage" else {}
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default, **choices
        )
    main(Args(**vars(parser.parse_args())))
