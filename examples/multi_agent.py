"""PPO for several agents: one policy that all share, or one for each, in an environment of PettingZoo.

    python examples/multi_agent.py --seed 1
    python examples/multi_agent.py --policies each

Three agents are to cover three landmarks without collisions. Each agent of each environment has a slot of its own;
`info/agent_index` in its observations says which agent it is, and `--policies each` chooses the network by it. Agents
that leave before others have shorter slots, which the mask says. It shows a progress bar, and prints at the end the
mean return of an agent in `--n-eval` episodes in which policies take their most likely action, and how fast the
training was:

    simple_spread_v3: score -18.3, 400800 steps, 1439 steps/s

`--env-id` may be another module of mpe2 whose agents have equal spaces. Needs the extra `pettingzoo` and `mpe2`.
`--track tensorboard:runs/multi_agent`, `wandb:PROJECT` or `trackio:PROJECT` keeps metrics there.
"""

from __future__ import annotations

import argparse
import importlib
import time
from dataclasses import dataclass

import torch
from torch import nn
from tqdm import tqdm

from rlstructs import (
    DictTensor,
    NormalizeObservation,
    NormalizeReward,
    RL_Agent,
    RL_Batcher,
    Trajectories,
    VecEnv,
    gae,
    transitions,
)
from rlstructs.integrations.logging import open_log
from rlstructs.integrations.pettingzoo import ParallelEnvs


@dataclass
class Args:
    """What the command line sets."""

    env_id: str = "simple_spread_v3"
    policies: str = "shared"  # or "each"
    n_steps: int = 400_000  # of all agents, rounded up to whole rollouts
    n_processes: int = 2
    n_envs: int = 8
    n_timesteps: int = 50
    n_epochs: int = 5
    n_minibatches: int = 4
    learning_rate: float = 1e-3
    gamma: float = 0.95
    gae_lambda: float = 0.95
    clip: float = 0.2
    entropy_weight: float = 0.01
    n_eval: int = 90
    seed: int = 0
    track: str = ""
    trace: str = ""


def layers(n_inputs: int, n_outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(n_inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, n_outputs))


class Policies(nn.Module):
    """One network for all agents, or one for each; the first output is the value, the others are logits."""

    def __init__(self, n_policies: int, n_inputs: int, n_actions: int) -> None:
        super().__init__()
        self.networks = nn.ModuleList(layers(n_inputs, 1 + n_actions) for _ in range(n_policies))

    def forward(self, frame: torch.Tensor, agent_index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Values (...) and logits (..., n_actions) of observations (..., n_inputs) of these agents (...)."""
        if len(self.networks) == 1:
            found = self.networks[0](frame)
        else:
            found = torch.stack([network(frame) for network in self.networks], dim=-2)
            found = found.take_along_dim(agent_index[..., None, None], dim=-2).squeeze(-2)
        return found[..., 0], found[..., 1:]


class Team(RL_Agent):
    """Draws actions; takes the most likely ones where `agent_info` says `greedy`."""

    def __init__(self, policies: Policies) -> None:
        self.policies = policies

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        _, logits = self.policies(observation["frame"], observation["info/agent_index"])
        policy = torch.distributions.Categorical(logits=logits, validate_args=False)
        action = logits.argmax(dim=1) if agent_info["greedy"][0] else policy.sample()
        return DictTensor({"action": action, "log_prob": policy.log_prob(action)}), state

    def update(self, info):
        self.policies.load_state_dict(info)


def create_env(env_id: str, n_envs: int, gamma: float, seed: int) -> VecEnv:
    make = importlib.import_module(f"mpe2.{env_id}").parallel_env
    return NormalizeReward(NormalizeObservation(ParallelEnvs([make] * n_envs, seed)), gamma=gamma)


def create_policies(env_id: str, policies: str) -> Policies:
    env = ParallelEnvs([importlib.import_module(f"mpe2.{env_id}").parallel_env], 0)
    n_policies = {"shared": 1, "each": len(env.agents)}[policies]
    return Policies(n_policies, env.observation_space.shape[0], int(env.action_space.n))


def learn(policies: Policies, optimizer: torch.optim.Optimizer, batch: Trajectories, args: Args) -> None:
    """A few epochs over the transitions of a rollout."""
    steps = batch.trajectories.zero_padding()
    index, told = steps["observation/info/agent_index"], transitions(steps)
    with torch.no_grad():
        values, _ = policies(steps["observation/frame"], index)
        next_values, _ = policies(steps["_observation/frame"], index)
    advantages, targets = gae(values=values, next_values=next_values, gamma=args.gamma, lambda_=args.gae_lambda, **told)
    names = ("observation/frame", "observation/info/agent_index", "action/action", "action/log_prob")
    flat = [tensor[told["mask"]] for tensor in (*(steps[name] for name in names), advantages, targets)]
    for _ in range(args.n_epochs):
        for rows in torch.randperm(len(flat[0])).chunk(args.n_minibatches):
            frames, indexes, actions, log_probs, advantages, targets = (tensor[rows] for tensor in flat)
            values, logits = policies(frames, indexes)
            policy = torch.distributions.Categorical(logits=logits, validate_args=False)
            ratios = (policy.log_prob(actions) - log_probs).exp()
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
            clipped = ratios.clamp(1 - args.clip, 1 + args.clip)
            policy_loss = -torch.minimum(ratios * advantages, clipped * advantages).mean()
            loss = policy_loss + (values - targets).square().mean() - args.entropy_weight * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policies.parameters(), 0.5)
            optimizer.step()


def main(args: Args) -> None:
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # for networks this small more are slower, and the workers need the cores
    policies = create_policies(args.env_id, args.policies)
    optimizer = torch.optim.Adam(policies.parameters(), lr=args.learning_rate, eps=1e-5)
    with open_log(args.track, vars(args)) as track, RL_Batcher(
        args.n_timesteps, Team, {"policies": policies},
        create_env, {"env_id": args.env_id, "n_envs": args.n_envs, "gamma": args.gamma}, args.n_processes, args.seed,
        agent_info=DictTensor({"greedy": torch.tensor([False])}),
    ) as batcher, batcher.trace(args.trace):  # fmt: skip
        n_steps, start, bar = 0, time.perf_counter(), tqdm(total=args.n_steps, unit=" steps", unit_scale=True)
        greedy = torch.zeros(batcher.n_elems(), dtype=torch.bool)  # a row for each agent of each environment
        batcher.reset(agent_info=DictTensor({"greedy": greedy}))
        while n_steps < args.n_steps:
            batcher.execute()
            batch, _ = batcher.get()
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - n_steps / args.n_steps)
            learn(policies, optimizer, batch, args)
            batcher.update(policies.state_dict())
            n_steps += int(batch.lengths.sum())
            if (episodes := batcher.episodes()).n_elems():
                bar.set_postfix_str(f"return {episodes['return'].mean():.1f}", refresh=False)
            bar.update(int(batch.lengths.sum()))
            track(batcher.metrics(), n_steps)
        bar.close()
        speed = n_steps / (time.perf_counter() - start)
        episodes = batcher.evaluate(args.n_eval, args.seed + 1, agent_info=DictTensor({"greedy": ~greedy}))
    print(f"{args.env_id}: score {episodes['return'].mean():.1f}, {n_steps} steps, {speed:.0f} steps/s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in vars(Args()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default: {value!r}")
    main(Args(**vars(parser.parse_args())))
