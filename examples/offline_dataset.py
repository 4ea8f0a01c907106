"""Collects a dataset, saves it, and learns from the file alone: behaviour cloning, and offline reinforcement learning.

    python examples/offline_dataset.py --path cartpole.npz

Controllers of very different skill play CartPole-v1 in parallel workers; what they did goes to a file: `.npz`, `.pt`,
or `.h5` for other programs (`rlstructs[hdf5]`); `rlstructs info` says what is in it. `--stage collect` and `--stage
train` do one half each.
From the file two policies are trained, and play without exploration:

- a clone learns to do what is done most often (behaviour cloning), and stays far from what can be reached;
- advantage-weighted regression (Peng et al., 2019) learns the same way, but an action counts for more, the more its
  return exceeds what is usual where it was taken: of what was done it learns what went well.

It prints:

    cartpole.npz: 32768 steps of 16 environments, 2.4 MB, 1706 episodes, mean return 18.9
    clone: loss 0.644 after 20 epochs
    weighted: loss 0.575 after 20 epochs
    clone: 20 episodes, mean return 34.1
    weighted: 20 episodes, mean return 500.0
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path

import gymnasium
import torch
from torch import nn

from rlstructs import DictTensor, GymEnvInf, RL_Agent, RL_Batcher, Trajectories, lambda_returns, transitions

ENV_ID = "CartPole-v1"


@dataclass
class Args:
    """What the command line sets."""

    path: str = "cartpole.npz"
    stage: str = "both"
    n_processes: int = 2
    n_envs: int = 8
    n_timesteps: int = 256
    n_rollouts: int = 8
    least_skill: float = 0.1
    most_skill: float = 0.8
    n_epochs: int = 20
    batch_size: int = 256
    learning_rate: float = 3e-3
    gamma: float = 0.98
    td_lambda: float = 0.95
    temperature: float = 0.5
    max_weight: float = 20.0
    n_eval: int = 20
    seed: int = 0


class Controller(RL_Agent):
    """Pushes to the side to which the pole falls with probability `skill`, of `agent_info`; otherwise to the other."""

    def __call__(self, state, observation, agent_info, history=None):
        position, velocity, angle, turning = observation["frame"].unbind(dim=1)
        is_right = angle + 0.3 * turning + 0.02 * position + 0.05 * velocity > 0
        return DictTensor({"action": (is_right == (torch.rand(len(angle)) < agent_info["skill"])).long()}), state

    def initial_state(self, agent_info, B):
        return DictTensor()


class Greedy(RL_Agent):
    """Takes the most likely action of a network."""

    def __init__(self) -> None:
        self.network = layers(2)

    def __call__(self, state, observation, agent_info, history=None):
        return DictTensor({"action": self.network(observation["frame"]).argmax(dim=1)}), state

    def initial_state(self, agent_info, B):
        return DictTensor()

    def update(self, info):
        self.network.load_state_dict(info)


def layers(n_outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, n_outputs))


def create_env(n_envs: int, seed: int) -> GymEnvInf:
    return GymEnvInf([gymnasium.make(ENV_ID) for _ in range(n_envs)], seed)


def collect(args: Args) -> None:
    """Lets the controllers play, and writes what happened to a file."""
    with RL_Batcher(
        args.n_timesteps, Controller, {}, create_env, {"n_envs": args.n_envs}, args.n_processes, args.seed,
        agent_info=DictTensor({"skill": torch.zeros(1)}),
    ) as batcher:  # fmt: skip
        n_all, rollouts = batcher.n_elems(), []
        batcher.reset(agent_info=DictTensor({"skill": torch.linspace(args.least_skill, args.most_skill, n_all)}))
        for _ in range(args.n_rollouts):
            batcher.execute()
            rollouts.append(batcher.get()[0])
        returns = batcher.episodes()["return"]
    dataset = Trajectories.cat(rollouts)
    dataset.save(args.path)
    size = Path(args.path).stat().st_size / 1e6
    print(f"{args.path}: {dataset.lengths.sum()} steps of {n_all} environments, {size:.1f} MB, "
          f"{len(returns)} episodes, mean return {returns.mean():.1f}")  # fmt: skip


class Critic:
    """Values of observations, learnt from lambda returns; of 1 / (1 - gamma), so that they are about 1."""

    def __init__(self, dataset: Trajectories, args: Args) -> None:
        self.steps, self.args, self.network = dataset.trajectories, args, layers(1)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=args.learning_rate)

    def values(self, observations: torch.Tensor) -> torch.Tensor:
        return self.network(observations)[..., 0] / (1 - self.args.gamma)

    @torch.no_grad()
    def targets(self) -> torch.Tensor:
        """(B, T): returns, as they are now; episodes that the data cuts go on with a value."""
        return lambda_returns(
            next_values=self.values(self.steps["_observation/frame"]), gamma=self.args.gamma,
            lambda_=self.args.td_lambda, **transitions(self.steps),
        )  # fmt: skip

    def learn(self) -> None:
        mask = self.steps.mask(torch.bool)
        observations, targets = self.steps["observation/frame"][mask], self.targets()[mask]
        for rows in torch.randperm(len(targets)).split(self.args.batch_size):
            errors = self.values(observations[rows]) - targets[rows]
            minimise(self.optimizer, ((1 - self.args.gamma) * errors).square().mean())

    @torch.no_grad()
    def weights(self) -> torch.Tensor:
        """(B, T): what each action counts for."""
        advantages = self.targets() - self.values(self.steps["observation/frame"])
        deviation = advantages[self.steps.mask(torch.bool)].std()
        return (advantages / deviation / self.args.temperature).exp().clamp(max=self.args.max_weight)


def cloned(name: str, dataset: Trajectories, weights: torch.Tensor, args: Args) -> nn.Module:
    """A policy that learns actions, each of which counts for its weight, (B, T)."""
    steps = dataset.trajectories
    mask, policy = steps.mask(torch.bool), layers(2)
    optimizer = torch.optim.Adam(policy.parameters(), lr=args.learning_rate)
    observations, actions, weights = (x[mask] for x in (steps["observation/frame"], steps["action/action"], weights))
    for _ in range(args.n_epochs):
        losses = []
        for rows in torch.randperm(len(actions)).split(args.batch_size):
            errors = nn.functional.cross_entropy(policy(observations[rows]), actions[rows], reduction="none")
            # A weighted mean: the sum of the weights, which the paper leaves out, only changes the step size.
            losses.append(minimise(optimizer, (weights[rows] * errors).sum() / weights[rows].sum()))
    print(f"{name}: loss {sum(losses) / len(losses):.3f} after {args.n_epochs} epochs")
    return policy


def minimise(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def train(args: Args) -> dict[str, nn.Module]:
    """Trains policies from the file alone."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # for networks this small more are slower
    dataset = Trajectories.load(args.path)
    critic = Critic(dataset, args)
    for _ in range(args.n_epochs):
        critic.learn()
    weights = {"clone": torch.ones_like(critic.targets()), "weighted": critic.weights()}
    return {name: cloned(name, dataset, weight, args) for name, weight in weights.items()}


def evaluate(args: Args, policies: dict[str, nn.Module]) -> None:
    """Lets policies play whole episodes, the same ones each."""
    with RL_Batcher(
        args.n_timesteps, Greedy, {}, create_env, {"n_envs": args.n_envs}, args.n_processes, args.seed
    ) as batcher:
        batcher.reset()
        for name, policy in policies.items():
            batcher.update(policy.state_dict())
            returns = batcher.evaluate(args.n_eval, args.seed + 1)["return"]
            print(f"{name}: {args.n_eval} episodes, mean return {returns.mean():.1f}")


def main(args: Args) -> None:
    if args.stage in ("collect", "both"):
        collect(args)
    if args.stage in ("train", "both"):
        evaluate(args, train(args))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Args):
        choices = {"choices": ("collect", "train", "both")} if field.name == "stage" else {}
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default, **choices
        )
    main(Args(**vars(parser.parse_args())))
