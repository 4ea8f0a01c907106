"""Trains a policy that stays in this process, on a GPU perhaps, while worker processes step the environments.

    python examples/central_inference.py --n-workers 2 --device cpu

There are no copies of the policy, and nothing to `update`: the batcher calls the very network that is trained, on all
environments of a group at once. While it computes for one group, the workers step the other (`--n-groups 1` for the
difference). That is for networks that are too large to be in every worker, or much faster on a GPU.

    rollout 1: 64 trajectories of up to 32 steps, loss 0.00
    ...
    674 episodes, mean return 50.5
"""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import dataclass

import gymnasium
import torch
from torch.distributions import Categorical

from rlstructs import (
    DictTensor,
    GymVectorEnv,
    RL_Agent,
    RL_Batcher,
    SharedVectorEnv,
    discounted_returns,
    transitions,
)
from rlstructs.integrations.logging import open_log


@dataclass
class Args:
    """What the command line sets."""

    env_id: str = "CartPole-v1"
    n_workers: int = 2
    n_groups: int = 2
    n_envs: int = 64
    n_timesteps: int = 32
    n_rollouts: int = 20
    device: str = "cpu"
    seed: int = 0
    track: str = ""  # tensorboard:FOLDER, wandb:PROJECT or trackio:PROJECT
    trace: str = ""


class Policy(RL_Agent):
    """A categorical policy of a network that others may hold too."""

    def __init__(self, network: torch.nn.Module) -> None:
        self.network = network

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        return DictTensor({"action": Categorical(logits=self.network(observation["frame"])).sample()}), state


def create_env(env_id: str, n_workers: int, n_groups: int, n_envs: int, seed: int) -> GymVectorEnv:
    """Environments in workers; called in this process, as the batcher has no workers of its own."""
    envs = SharedVectorEnv(
        [lambda: gymnasium.make(env_id)] * n_envs, n_workers, autoreset_mode="SameStep", n_groups=n_groups, timeout=60
    )
    return GymVectorEnv(envs, seed)


def advantages(steps):
    """(B, T): how much better than the mean the rewards from t on are, in deviations.

    To the end of the episode or of the rollout: without a critic nothing is known of what follows that.
    """
    told = transitions(steps)
    returns = discounted_returns(next_values=torch.zeros_like(told["rewards"]), gamma=1.0, **told)
    return (returns - returns.mean()) / returns.std()


def main(args: Args) -> None:
    torch.manual_seed(args.seed)
    with contextlib.closing(gymnasium.make(args.env_id)) as env:
        n_inputs, n_actions = env.observation_space.shape[0], int(env.action_space.n)
    network = torch.nn.Sequential(torch.nn.Linear(n_inputs, 64), torch.nn.Tanh(), torch.nn.Linear(64, n_actions))
    network.to(args.device)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    with (
        RL_Batcher(
            n_timesteps=args.n_timesteps,
            create_agent=lambda: Policy(network),  # this one, not a copy
            agent_args={},
            create_env=create_env,
            env_args={name: getattr(args, name) for name in ("env_id", "n_workers", "n_groups", "n_envs")},
            n_processes=0,
            seeds=args.seed,
            device=args.device,
        ) as batcher,
        batcher.trace(args.trace),
        open_log(args.track, vars(args)) as log,
    ):
        batcher.reset()
        for number in range(1, args.n_rollouts + 1):
            batcher.execute()
            steps = batcher.get()[0].trajectories
            log_probs = network(steps["observation/frame"]).log_softmax(-1)
            chosen = log_probs.gather(-1, steps["action/action"][..., None])[..., 0]
            loss = -(chosen * advantages(steps) * steps.mask()).sum() / steps.mask().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()  # the next rollout acts by it
            shape = f"{steps.n_elems()} trajectories of up to {steps.n_timesteps()} steps"
            print(f"rollout {number}: {shape}, loss {loss:.2f}")
            log({**batcher.metrics(), "loss": loss.item()}, number)
        episodes = batcher.episodes()
    print(f"{episodes.n_elems()} episodes, mean return {episodes['return'].mean():.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in vars(Args()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default: {value!r}")
    main(Args(**vars(parser.parse_args())))
