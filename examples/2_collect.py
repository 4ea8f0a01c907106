"""Collects rollouts of CartPole with a policy of one's own, in parallel workers.

    python examples/2_collect.py --n-processes 2 --n-rollouts 5

prints a line for each rollout, and at the end how many episodes there were:

    rollout 1: 32 trajectories of up to 64 steps, loss 0.00
    ...
    322 episodes, mean return 29.1
"""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import dataclass

import gymnasium
import torch

from rlstructs import DictTensor, GymEnvInf, RL_Agent, RL_Batcher, discounted_returns, replay_agent, transitions
from rlstructs.integrations.logging import open_log


@dataclass
class Args:
    """What the command line sets."""

    env_id: str = "CartPole-v1"
    n_processes: int = 2
    n_envs: int = 16
    n_timesteps: int = 64
    n_rollouts: int = 5
    seed: int = 0
    track: str = ""  # tensorboard:FOLDER, wandb:PROJECT or trackio:PROJECT
    trace: str = ""


class Policy(RL_Agent):
    """A categorical policy of a small network. Workers have copies of it, which `update` replaces."""

    def __init__(self, n_inputs: int, n_actions: int) -> None:
        self.network = torch.nn.Sequential(
            torch.nn.Linear(n_inputs, 64), torch.nn.Tanh(), torch.nn.Linear(64, n_actions)
        )

    def initial_state(self, agent_info, B):
        return DictTensor()  # a recurrent policy would have one

    def __call__(self, state, observation, agent_info, history=None):
        logits = self.network(observation["frame"])
        action = torch.distributions.Categorical(logits=logits).sample()
        return DictTensor({"action": action, "logits": logits}), state

    def update(self, info):
        self.network.load_state_dict(info)


def create_env(env_id: str, n_envs: int, seed: int) -> GymEnvInf:
    return GymEnvInf([gymnasium.make(env_id, disable_env_checker=k > 0) for k in range(n_envs)], seed)


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
    policy = Policy(n_inputs, n_actions)
    optimizer = torch.optim.Adam(policy.network.parameters(), lr=1e-2)
    with (
        RL_Batcher(
            n_timesteps=args.n_timesteps,
            create_agent=Policy,
            agent_args={"n_inputs": n_inputs, "n_actions": n_actions},
            create_env=create_env,
            env_args={"env_id": args.env_id, "n_envs": args.n_envs},
            n_processes=args.n_processes,
            seeds=args.seed,
        ) as batcher,
        batcher.trace(args.trace),
        open_log(args.track, vars(args)) as log,
    ):
        batcher.update(policy.network.state_dict())
        batcher.reset()
        for number in range(1, args.n_rollouts + 1):
            batcher.execute()
            trajectories, _ = batcher.get()
            steps = trajectories.trajectories
            # What the workers' copies did, done again here with gradients.
            logits = replay_agent(policy, trajectories)["logits"]
            chosen = logits.log_softmax(-1).gather(-1, steps["action/action"][..., None])[..., 0]
            loss = -(chosen * advantages(steps) * steps.mask()).sum() / steps.mask().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            batcher.update(policy.network.state_dict())
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
