"""Advantage actor-critic with an LSTM, on a CartPole that does not show velocities.

    python examples/a2c_recurrent.py --seed 1

The policy sees where cart and pole are, not how they move: it has to remember. Its memory is an agent state, which
goes on from one rollout to the next; the learner packs the episodes of a rollout, and runs the LSTM over them from the
states that were recorded. It shows a progress bar, and prints at the end the mean return of `--n-eval` episodes in
which the policy takes its most likely action, and how fast the training was:

    CartPole-v1 without velocities: score 500.0, 1000448 steps, 24452 steps/s

`--plot curve.png` draws the returns of the training, `--track tensorboard:runs/a2c` keeps its metrics there; either
needs `pip install -e '.[plot]'`. With `--track wandb:PROJECT` or `--track trackio:PROJECT` they go to these
services, whose package is needed. `--checkpoint FOLDER` saves the training every minute, at its end, and at SIGTERM,
which then ends it; run again it goes on from there.
"""

from __future__ import annotations

import argparse
import importlib
import time
from dataclasses import dataclass

import torch
from memory_tasks import TASKS, create_env
from torch import nn
from tqdm import tqdm

from rlstructs import Checkpoint, DictTensor, RL_Agent, RL_Batcher, Trajectories, gae, transitions
from rlstructs.integrations.logging import open_log


@dataclass
class Args:
    """What the command line sets."""

    task: str = "cart-pole"  # or t-maze
    n_steps: int = 1_000_000  # rounded up to whole rollouts
    n_processes: int = 2
    n_envs: int = 16
    n_timesteps: int = 32
    n_hidden: int = 64
    learning_rate: float = 3e-3
    gamma: float = 0.99
    gae_lambda: float = 0.95
    entropy_weight: float = 0.0
    n_eval: int = 100
    seed: int = 0
    plot: str = ""
    track: str = ""
    checkpoint: str = ""
    trace: str = ""


class Network(nn.Module):
    """A memory of observations, and from it logits of actions and a value."""

    def __init__(self, n_inputs: int, n_actions: int, n_hidden: int) -> None:
        super().__init__()
        self.memory = nn.LSTM(n_inputs, n_hidden)
        self.actor, self.critic = nn.Linear(n_hidden, n_actions), nn.Linear(n_hidden, 1)

    def policy(self, features: torch.Tensor) -> torch.distributions.Categorical:
        return torch.distributions.Categorical(logits=self.actor(features), validate_args=False)


class Policy(RL_Agent):
    """Draws actions; takes the most likely ones where `agent_info` says `greedy`."""

    def __init__(self, network: Network) -> None:
        self.network = network

    def initial_state(self, agent_info, B):
        zeros = torch.zeros(B, self.network.memory.hidden_size)
        return DictTensor({"h": zeros, "c": zeros.clone()})

    def __call__(self, state, observation, agent_info, history=None):
        is_first = observation["initial_state"][:, None]  # an episode begins without memories
        before = tuple(torch.where(is_first, 0.0, state[key])[None] for key in ("h", "c"))
        features, (h, c) = self.network.memory(observation["frame"][None], before)
        policy = self.network.policy(features[0])
        action = policy.mode if agent_info["greedy"][0] else policy.sample()
        return DictTensor({"action": action}), DictTensor({"h": h[0], "c": c[0]})

    def update(self, info):
        self.network.load_state_dict(info)


def learn(network: Network, optimizer: torch.optim.Optimizer, batch: Trajectories, args: Args) -> dict[str, float]:
    """One step from a rollout; its losses."""
    pack = batch.packed("episode")
    before = tuple(pack.state[key][None] for key in ("h", "c"))
    sequence, behind = network.memory(pack.as_packed_sequence("observation/frame"), before)
    features, last = pack.from_packed_sequence(sequence), pack.cu_seqlens[1:].long() - 1
    values = network.critic(features)[:, 0]
    with torch.no_grad():
        # Behind the last step of a segment the memory goes on with the observation that followed it.
        final, _ = network.memory(pack["_observation/frame"][last][None], behind)
        next_values = values.roll(-1).index_copy(0, last, network.critic(final[0])[:, 0])
    advantages, targets = gae(
        values=values.detach(), next_values=next_values, gamma=args.gamma, lambda_=args.gae_lambda, **transitions(pack)
    )
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    policy = network.policy(features)
    policy_loss = -(policy.log_prob(pack["action/action"]) * advantages).mean()
    value_loss, entropy = nn.functional.mse_loss(values, targets), policy.entropy().mean()
    optimizer.zero_grad()
    (policy_loss + value_loss - args.entropy_weight * entropy).backward()
    nn.utils.clip_grad_norm_(network.parameters(), 0.5)
    optimizer.step()
    return {"policy_loss": policy_loss.item(), "value_loss": value_loss.item(), "entropy": entropy.item()}


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
    name, make = TASKS[args.task]
    env = make()
    network = Network(env.observation_space.shape[0], int(env.action_space.n), args.n_hidden)
    optimizer = torch.optim.Adam(network.parameters(), lr=args.learning_rate)
    with RL_Batcher(
        args.n_timesteps, Policy, {"network": network},
        create_env, {"task": args.task, "n_envs": args.n_envs, "gamma": args.gamma}, args.n_processes, args.seed,
        agent_info=DictTensor({"greedy": torch.tensor([False])}),
    ) as batcher, batcher.trace(args.trace):  # fmt: skip
        log = Log(args)
        greedy = torch.zeros(batcher.n_elems(), dtype=torch.bool)
        checkpoint = Checkpoint(args.checkpoint, batcher=batcher, model=network, optimizer=optimizer, extra=log.kept)
        if checkpoint.restore() is None:
            batcher.reset(agent_info=DictTensor({"greedy": greedy}))
        with checkpoint.preemption():
            while log.n_steps < args.n_steps:
                batcher.execute()
                batch, _ = batcher.get()
                optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - log.n_steps / args.n_steps)
                losses = learn(network, optimizer, batch, args)
                batcher.update(network.state_dict())
                log.add(int(batch.lengths.sum()), batcher.episodes(), {**batcher.metrics(), **losses})
                checkpoint.save_if_due(log.n_steps)
        speed = log.close()
        checkpoint.save(log.n_steps)
        episodes = batcher.evaluate(args.n_eval, args.seed + 1, agent_info=DictTensor({"greedy": ~greedy}))
    print(f"{name}: score {episodes['return'].mean():.2f}, {log.n_steps} steps, {speed:.0f} steps/s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in vars(Args()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default: {value!r}")
    main(Args(**vars(parser.parse_args())))
