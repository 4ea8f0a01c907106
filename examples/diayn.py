"""Diversity is all you need (Eysenbach et al., 2018): skills that are learnt without a reward.

    python examples/diayn.py --seed 1

Every slot has a skill, which travels as a row of `agent_info`; the policy knows it. A discriminator learns to tell from
an observation with which skill it was reached, and the reward of a step is how much better than by chance it does,
log q(z | s) - log p(z): skills move apart until they can be told from what they do. The policy learns by PPO. The
rewards of the environment are not used: the returns that are shown say only how long the poles stood. It shows a
progress bar, and prints at the end in what share of the steps of `--n-eval` fresh rollouts, with the most likely
actions, the discriminator finds the skill (by chance: 1 / `--n-skills`), and how fast the training was:

    CartPole-v1 with 4 skills: score 0.852, 200704 steps, 4820 steps/s

`--plot curve.png` draws the returns of the training, `--track tensorboard:runs/diayn` keeps its metrics there; either
needs `pip install -e '.[plot]'`. With `--track wandb:PROJECT` or `--track trackio:PROJECT` they go to these
services, whose package is needed.
"""

from __future__ import annotations

import argparse
import importlib
import math
import time
from dataclasses import dataclass

import gymnasium
import torch
from torch import nn
from tqdm import tqdm

from rlstructs import DictTensor, GymEnvInf, RL_Agent, RL_Batcher, Trajectories, gae, transitions
from rlstructs.integrations.logging import open_log


@dataclass
class Args:
    """What the command line sets."""

    env_id: str = "CartPole-v1"
    n_skills: int = 4
    n_steps: int = 200_000  # rounded up to whole rollouts
    n_processes: int = 2
    n_envs: int = 16
    n_timesteps: int = 64
    n_epochs: int = 4
    minibatch_size: int = 512
    learning_rate: float = 1e-3
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    entropy_weight: float = 0.01
    n_eval: int = 10
    seed: int = 0
    plot: str = ""
    track: str = ""
    trace: str = ""


def layers(n_inputs: int, n_outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(n_inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, n_outputs))


class Networks(nn.Module):
    """Policy and values of observations (..., n_inputs) for skills (...), and what skills observations are of."""

    def __init__(self, n_inputs: int, n_actions: int, n_skills: int) -> None:
        super().__init__()
        self.actor, self.critic = layers(n_inputs + n_skills, n_actions), layers(n_inputs + n_skills, 1)
        self.discriminator, self.n_skills = layers(n_inputs, n_skills), n_skills

    def policy(self, observations: torch.Tensor, skills: torch.Tensor) -> torch.distributions.Categorical:
        logits = self.actor(self.inputs(observations, skills))
        return torch.distributions.Categorical(logits=logits, validate_args=False)

    def values(self, observations: torch.Tensor, skills: torch.Tensor) -> torch.Tensor:
        return self.critic(self.inputs(observations, skills))[..., 0]

    def inputs(self, observations: torch.Tensor, skills: torch.Tensor) -> torch.Tensor:
        return torch.cat([observations, nn.functional.one_hot(skills, self.n_skills).float()], dim=-1)


class Policy(RL_Agent):
    """Acts in each slot by the skill that `agent_info` has for it; the most likely actions where it says `greedy`."""

    def __init__(self, networks: Networks) -> None:
        self.networks = networks

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        policy = self.networks.policy(observation["frame"], agent_info["skill"])
        action = policy.mode if agent_info["greedy"][0] else policy.sample()
        return DictTensor({"action": action, "log_prob": policy.log_prob(action)}), state

    def update(self, info):
        self.networks.load_state_dict(info)


def create_env(env_id: str, n_envs: int, seed: int) -> GymEnvInf:
    return GymEnvInf([gymnasium.make(env_id, disable_env_checker=k > 0) for k in range(n_envs)], seed)


def create_networks(env_id: str, n_skills: int) -> Networks:
    with gymnasium.make(env_id) as env:
        return Networks(env.observation_space.shape[0], int(env.action_space.n), n_skills)


@torch.no_grad()
def told_apart(networks: Networks, batch: Trajectories) -> tuple[torch.Tensor, float]:
    """The reward of each step, log q(z | s) - log p(z) of what it led to, (B, T), and how often q finds the skill."""
    skills = batch.info["agent_info/skill"][:, None].expand(-1, batch.trajectories.n_timesteps())
    logits = networks.discriminator(batch.trajectories["_observation/frame"])
    log_q = logits.log_softmax(dim=-1).gather(-1, skills[..., None])[..., 0]
    # Skills are equally likely: there are as many slots of each.
    return log_q + math.log(networks.n_skills), (logits.argmax(dim=-1) == skills).float().mean().item()


def learn(networks: Networks, optimizer: torch.optim.Optimizer, batch: Trajectories, args: Args) -> dict[str, float]:
    """A few epochs of PPO, and of the discriminator, over a rollout; what there is to say of it."""
    steps = batch.trajectories
    rewards, accuracy = told_apart(networks, batch)
    seen, reached = steps["observation/frame"], steps["_observation/frame"]
    skills = batch.info["agent_info/skill"][:, None].expand_as(rewards)
    with torch.no_grad():
        values, next_values = networks.values(seen, skills), networks.values(reached, skills)
    # Times 1 - gamma values are as large as rewards are, and not 100 times larger.
    told = {**transitions(steps), "rewards": (1 - args.gamma) * rewards}
    advantages, targets = gae(values=values, next_values=next_values, gamma=args.gamma, lambda_=args.gae_lambda, **told)
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    actions, log_probs = steps["action/action"], steps["action/log_prob"]
    flat = [x.flatten(0, 1) for x in (seen, reached, skills, actions, log_probs, advantages, targets)]
    for _ in range(args.n_epochs):
        for rows in torch.randperm(targets.numel()).split(args.minibatch_size):
            losses = losses_of(networks, args, *(x[rows] for x in flat))
            optimizer.zero_grad()
            sum(losses.values()).backward()
            nn.utils.clip_grad_norm_(networks.parameters(), 0.5)
            optimizer.step()
    return {"accuracy": accuracy, "reward": rewards.mean().item()} | {name: x.item() for name, x in losses.items()}


def losses_of(networks, args, seen, reached, skills, actions, log_probs, gains, targets) -> dict[str, torch.Tensor]:
    policy = networks.policy(seen, skills)
    ratios = (policy.log_prob(actions) - log_probs).exp()
    clipped = ratios.clamp(1 - args.clip, 1 + args.clip)
    return {
        "policy_loss": -torch.minimum(ratios * gains, clipped * gains).mean(),
        "value_loss": 0.5 * nn.functional.mse_loss(networks.values(seen, skills), targets),
        "entropy_loss": -args.entropy_weight * policy.entropy().mean(),
        "discriminator_loss": nn.functional.cross_entropy(networks.discriminator(reached), skills),
    }


def info_of(args: Args, n_all: int, greedy: bool) -> DictTensor:
    """Skills 0, 1, 2, ... and again 0: as many slots of each.

    Raises:
        ValueError: that cannot be.
    """
    if n_all % args.n_skills:
        raise ValueError(f"n_processes * n_envs must be a multiple of n_skills, {args.n_skills}, got {n_all}")
    return DictTensor({"skill": torch.arange(n_all) % args.n_skills, "greedy": torch.full((n_all,), greedy)})


class Log:
    """A progress bar, and metrics for `--track` and a learning curve where they are asked for."""

    n_steps = property(lambda self: self.kept["n_steps"])

    def __init__(self, args: Args) -> None:
        # Before the first rollout: who lacks a package or a folder is to know it now.
        self.track = open_log(args.track, vars(args))
        self.figure = optional("matplotlib.figure").Figure(figsize=(9, 5)) if args.plot else None
        if self.figure is not None:
            self.figure.savefig(args.plot)
        self.bar = tqdm(total=args.n_steps, unit=" steps", unit_scale=True)
        self.path, self.start = args.plot, time.perf_counter()
        self.kept = {"n_steps": 0, "steps": [], "returns": [], "curve": []}  # of episodes; means of the latest 100

    def add(self, n_steps: int, episodes: DictTensor, scalars: dict[str, float]) -> None:
        self.kept["n_steps"] += n_steps
        self.kept["returns"] += episodes["return"].tolist()
        self.kept["steps"] += [self.n_steps] * episodes.n_elems()
        scalars = {"return": torch.tensor(self.kept["returns"][-100:]).mean().item(), **scalars}
        self.kept["curve"].append((self.n_steps, scalars["return"]))
        self.bar.set_postfix_str(f"return {scalars['return']:.1f}", refresh=False)
        self.bar.total = max(self.bar.total, self.n_steps)  # the last rollout is a whole one
        self.bar.update(n_steps)
        self.track(scalars, self.n_steps)

    def close(self) -> float:
        """Writes what there is to write; steps/s of the training."""
        speed = self.bar.n / (time.perf_counter() - self.start)
        self.bar.close()
        self.track.close()
        if self.figure is not None:
            axes = self.figure.subplots()
            axes.plot(self.kept["steps"], self.kept["returns"], ".", markersize=2, label="an episode")
            axes.plot(*zip(*self.kept["curve"], strict=True), label="mean of 100")
            axes.legend()
            axes.set(xlabel="steps", ylabel="return")
            self.figure.savefig(self.path)
        return speed


def optional(module: str, install: str = "--plot needs pip install matplotlib"):
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SystemExit(f"{error}: {install}") from error


def main(args: Args) -> None:
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # for networks this small more are slower, and the workers need the cores
    networks = create_networks(args.env_id, args.n_skills)
    optimizer = torch.optim.Adam(networks.parameters(), lr=args.learning_rate, eps=1e-5)
    with RL_Batcher(
        args.n_timesteps, Policy, {"networks": networks}, create_env, {"env_id": args.env_id, "n_envs": args.n_envs},
        args.n_processes, args.seed, agent_info=info_of(args, args.n_skills, False),
    ) as batcher, batcher.trace(args.trace):  # fmt: skip
        log = Log(args)
        batcher.reset(agent_info=info_of(args, batcher.n_elems(), False))
        while log.n_steps < args.n_steps:
            batcher.execute()
            batch, _ = batcher.get()
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - log.n_steps / args.n_steps)
            losses = learn(networks, optimizer, batch, args)
            batcher.update(networks.state_dict())
            log.add(int(batch.lengths.sum()), batcher.episodes(), {**batcher.metrics(), **losses})
        speed = log.close()
        batcher.reset(agent_info=info_of(args, batcher.n_elems(), True))
        accuracies = []
        for _ in range(args.n_eval):
            batcher.execute()
            accuracies.append(told_apart(networks, batcher.get()[0])[1])
    score = sum(accuracies) / len(accuracies)
    print(f"{args.env_id} with {args.n_skills} skills: score {score:.3f}, {log.n_steps} steps, {speed:.0f} steps/s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in vars(Args()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default: {value!r}")
    main(Args(**vars(parser.parse_args())))
