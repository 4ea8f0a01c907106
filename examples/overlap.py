"""Trains a policy by policy gradient while workers collect the next rollout: no copy, no waiting.

    python examples/overlap.py --run-ahead 1
    python examples/overlap.py --run-ahead 0

prints a line for each ten rollouts, and at the end the steps for each second of training:

    rollout 10: mean return 27.7, updates behind: 1
    ...
    163840 steps, 71042 steps/s

Without a run-ahead the workers wait while the trainer learns, and the trainer while they collect.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import gymnasium
import torch

from rlstructs import DictTensor, GymEnvInf, RL_Agent, RL_Batcher, discounted_returns, transitions
from rlstructs.integrations.logging import open_log


@dataclass
class Args:
    """What the command line sets."""

    env_id: str = "CartPole-v1"
    run_ahead: int = 1
    n_processes: int = 2
    n_envs: int = 16
    n_timesteps: int = 128
    n_rollouts: int = 40
    learning_rate: float = 0.003
    gamma: float = 0.99
    seed: int = 0
    track: str = ""  # tensorboard:FOLDER, wandb:PROJECT or trackio:PROJECT
    trace: str = ""


class Policy(RL_Agent):
    """A categorical policy of a small network."""

    def __init__(self, env_id: str) -> None:
        env = gymnasium.make(env_id)
        n_inputs, n_actions = env.observation_space.shape[0], int(env.action_space.n)
        self.network = torch.nn.Sequential(
            torch.nn.Linear(n_inputs, 64), torch.nn.Tanh(), torch.nn.Linear(64, n_actions)
        )

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        distribution = torch.distributions.Categorical(logits=self.network(observation["frame"]))
        return DictTensor({"action": distribution.sample()}), state

    def update(self, info):
        self.network.load_state_dict(info)


def create_env(env_id: str, n_envs: int, seed: int) -> GymEnvInf:
    return GymEnvInf([gymnasium.make(env_id, disable_env_checker=k > 0) for k in range(n_envs)], seed)


def learn(policy: Policy, optimizer: torch.optim.Optimizer, trajectories, gamma: float) -> None:
    steps = trajectories.trajectories
    batch = transitions(trajectories)
    returns = discounted_returns(**batch, next_values=torch.zeros_like(batch["rewards"]), gamma=gamma)
    advantages = (returns - returns.mean()) / (returns.std() + 1e-8)
    distribution = torch.distributions.Categorical(logits=policy.network(steps["observation/frame"]))
    loss = -(distribution.log_prob(steps["action/action"]) * advantages * batch["mask"]).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def main(args: Args) -> None:
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # the cores are the workers'
    policy, n_steps = Policy(args.env_id), 0
    optimizer = torch.optim.Adam(policy.network.parameters(), args.learning_rate)
    with RL_Batcher(
        args.n_timesteps, Policy, {"env_id": args.env_id}, create_env,
        {"env_id": args.env_id, "n_envs": args.n_envs}, args.n_processes, args.seed, run_ahead=args.run_ahead,
    ) as batcher, batcher.trace(args.trace), open_log(args.track, vars(args)) as log:  # fmt: skip
        batcher.update(policy.network.state_dict())
        batcher.reset()
        started = time.perf_counter()
        for number in range(1, args.n_rollouts + 1):
            batcher.execute()
            with batcher.lease() as (trajectories, _):  # workers write the next rollout meanwhile
                age = batcher.policy_version - int(trajectories.info["policy_version"].min())
                learn(policy, optimizer, trajectories, args.gamma)
                n_steps += int(trajectories.trajectories.lengths.sum())
            batcher.update(policy.network.state_dict())
            log(batcher.metrics(), n_steps)
            if number % 10 == 0:
                mean = batcher.episodes()["return"].mean()
                print(f"rollout {number}: mean return {mean:.1f}, updates behind: {age}")
        seconds = time.perf_counter() - started
    print(f"{n_steps} steps, {n_steps / seconds:.0f} steps/s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in vars(Args()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default: {value!r}")
    main(Args(**vars(parser.parse_args())))
