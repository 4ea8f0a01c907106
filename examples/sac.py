r"""Soft actor-critic (Haarnoja et al., 2018) with a temperature that is learnt too.

    python examples/sac.py --seed 1
    python examples/sac.py --env-id HalfCheetah-v5 --n-steps 500000 --n-hidden 256 --batch-size 256 --n-before 10000 \
        --updates-per-step 1 --learning-rate 3e-4 --n-eval 10

Workers act, and write to the memory, while the learner draws from it; the first `--n-before` steps are the untrained
policy's. It prints at the end the mean return of `--n-eval` episodes with mean actions, and how fast it was:

    Pendulum-v1: score -148.5, 20000 steps, 420 steps/s

`--plot curve.png` draws the returns of the training, `--track tensorboard:runs/sac` keeps its metrics there; either
needs the extra `plot`. `--track wandb:PROJECT` or `trackio:PROJECT` sends them to these services. HalfCheetah needs
`gymnasium[mujoco]`. `--checkpoint FOLDER` saves all every minute, at SIGTERM, and at the end; run again it goes on.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import math
import time
from dataclasses import dataclass

import gymnasium
import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from rlstructs import Checkpoint, DictTensor, GymEnvInf, RL_Agent, RL_Batcher
from rlstructs.integrations.logging import open_log
from rlstructs.memories.torch import RandomMemory


@dataclass
class Args:  # what the command line sets
    env_id: str = "Pendulum-v1"
    n_steps: int = 20_000  # rounded up to whole rollouts
    n_processes: int = 2
    n_envs: int = 2
    n_timesteps: int = 8
    memory_size: int = 1_000_000
    n_before: int = 1_000
    updates_per_step: float = 0.5
    batch_size: int = 128
    n_hidden: int = 64
    learning_rate: float = 1e-3
    gamma: float = 0.99
    tau: float = 0.005
    n_eval: int = 100
    seed: int = 0
    plot: str = ""
    track: str = ""
    checkpoint: str = ""
    trace: str = ""


def layers(n_inputs: int, n_hidden: int, n_outputs: int) -> nn.Sequential:
    first, second, last = nn.Linear(n_inputs, n_hidden), nn.Linear(n_hidden, n_hidden), nn.Linear(n_hidden, n_outputs)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)


class Actor(nn.Module):
    """A normal distribution, squashed by tanh: actions in (-1, 1)."""

    def __init__(self, n_inputs: int, n_actions: int, n_hidden: int) -> None:
        super().__init__()
        self.layers = layers(n_inputs, n_hidden, 2 * n_actions)

    def forward(self, observations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_std = self.layers(observations).chunk(2, dim=-1)
        return mean, log_std.clamp(-5, 2).exp()  # before the tanh, (B, n_actions) each

    def sample(self, observations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions (B, n_actions) and their log-probabilities (B, 1), both with gradients."""
        normal = torch.distributions.Normal(*self(observations), validate_args=False)
        drawn = normal.rsample()
        # The last term is log(1 - tanh(x)^2), in a form that is exact for large x too.
        stretch = 2 * (math.log(2) - drawn - nn.functional.softplus(-2 * drawn))
        return drawn.tanh(), (normal.log_prob(drawn) - stretch).sum(dim=-1, keepdim=True)


class Critics(nn.Module):
    """Two estimates of the value of an action, of which the smaller counts."""

    def __init__(self, n_inputs: int, n_actions: int, n_hidden: int) -> None:
        super().__init__()
        self.both = nn.ModuleList(layers(n_inputs + n_actions, n_hidden, 1) for _ in range(2))

    def forward(self, observations: torch.Tensor, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(critic(torch.cat([observations, actions], dim=-1)) for critic in self.both)


class Policy(RL_Agent):
    """Draws actions; takes the means where `agent_info` says `greedy`."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        mean, std = self.actor(observation["frame"])
        drawn = mean if agent_info["greedy"][0] else torch.normal(mean, std)
        return DictTensor({"action": drawn.tanh()}), state

    def update(self, info):
        self.actor.load_state_dict(info)


def make(env_id: str) -> gymnasium.Env:
    return gymnasium.wrappers.RescaleAction(gymnasium.make(env_id), np.float32(-1), np.float32(1))


def create_env(env_id: str, n_envs: int, seed: int) -> GymEnvInf:
    return GymEnvInf([make(env_id) for _ in range(n_envs)], seed)


class Learner(nn.Module):
    """Improves actor, critics and temperature from what is in a memory."""

    def __init__(self, args: Args) -> None:
        super().__init__()
        with make(args.env_id) as env:
            sizes = env.observation_space.shape[0], env.action_space.shape[0], args.n_hidden
        self.args, self.actor, self.critics = args, Actor(*sizes), Critics(*sizes)
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_alpha, self.wanted_entropy = nn.Parameter(torch.zeros(())), -float(sizes[1])
        learnt = {"critics": self.critics.parameters(), "actor": self.actor.parameters(), "alpha": [self.log_alpha]}
        self.optimizers = {name: torch.optim.Adam(each, lr=args.learning_rate) for name, each in learnt.items()}

    def learn(self, memory: RandomMemory) -> dict[str, float]:
        """One update of each; the losses."""
        names = ["observations", "actions", "rewards", "next_observations", "terminated"]
        [batch] = memory.sample(names, batch_size=self.args.batch_size)
        alpha = self.log_alpha.exp().detach()
        critic_loss = self.step("critics", self.critic_loss(alpha, *batch))
        actions, log_probs = self.actor.sample(batch[0])
        actor_loss = self.step("actor", (alpha * log_probs - torch.minimum(*self.critics(batch[0], actions))).mean())
        self.step("alpha", -self.log_alpha * (log_probs.detach().mean() + self.wanted_entropy))
        with torch.no_grad():
            for target, source in zip(self.targets.parameters(), self.critics.parameters(), strict=True):
                target.lerp_(source, self.args.tau)
        return {"critic_loss": critic_loss, "actor_loss": actor_loss, "alpha": alpha.item()}

    def critic_loss(self, alpha, observations, actions, rewards, following, terminated) -> torch.Tensor:
        with torch.no_grad():
            next_actions, log_probs = self.actor.sample(following)
            values = torch.minimum(*self.targets(following, next_actions)) - alpha * log_probs
            # Without what follows a step that terminated; one that was truncated goes on.
            targets = rewards + self.args.gamma * values * ~terminated
        return sum(nn.functional.mse_loss(values, targets) for values in self.critics(observations, actions))

    def step(self, name: str, loss: torch.Tensor) -> float:
        self.optimizers[name].zero_grad()
        loss.backward()
        self.optimizers[name].step()
        return loss.item()


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
    learner, losses = Learner(args), {}
    with RL_Batcher(
        args.n_timesteps, Policy, {"actor": learner.actor}, create_env, {"env_id": args.env_id, "n_envs": args.n_envs},
        args.n_processes, args.seed, agent_info=DictTensor({"greedy": torch.tensor([False])}),
    ) as batcher, batcher.trace(args.trace):  # fmt: skip
        log, n_all, greedy = Log(args), batcher.n_elems(), torch.zeros(batcher.n_elems(), dtype=torch.bool)
        n_updates = max(round(args.updates_per_step * n_all * args.n_timesteps), 1)
        rows = max(min(args.memory_size, args.n_steps) // n_all, args.n_timesteps)
        memory = RandomMemory(memory_size=rows, num_envs=n_all, device="cpu")
        batcher.feed(memory)
        parts = {"memory": memory, "model": learner, "optimizer": learner.optimizers, "extra": log.kept}
        checkpoint = Checkpoint(args.checkpoint, batcher=batcher, **parts)
        if checkpoint.restore() is None:
            batcher.reset(agent_info=DictTensor({"greedy": greedy}))
        with checkpoint.preemption():
            while log.n_steps < args.n_steps:
                batcher.execute()
                if log.n_steps >= max(args.n_before, 1):  # while the workers act
                    for _ in range(n_updates):
                        losses = learner.learn(memory)
                n_steps, _ = batcher.wait()
                batcher.update(learner.actor.state_dict())
                log.add(n_steps, batcher.episodes(), {**batcher.metrics(), **losses})
                checkpoint.save_if_due(log.n_steps)
        speed = log.close()
        checkpoint.save(log.n_steps)
        episodes = batcher.evaluate(args.n_eval, args.seed + 1, agent_info=DictTensor({"greedy": ~greedy}))
    print(f"{args.env_id}: score {episodes['return'].mean():.1f}, {log.n_steps} steps, {speed:.0f} steps/s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in vars(Args()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default: {value!r}")
    main(Args(**vars(parser.parse_args())))
