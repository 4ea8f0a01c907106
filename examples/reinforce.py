"""REINFORCE (Williams, 1992): policy gradients from whole episodes, which end one after another.

    python examples/reinforce.py --seed 1

Environments do not reset themselves: a rollout holds one episode of each, as long as it lasted (`--n-timesteps` at
most), and padding after it that does not count. It shows a progress bar, and prints at the end the mean return of
`--n-eval` episodes in which the policy takes its most likely action, and how fast the training was:

    CartPole-v1: score 500.0, 502612 steps, 19360 steps/s

`--plot curve.png` draws the returns of the training, `--track tensorboard:runs/reinforce` keeps its metrics there;
either needs `pip install -e '.[plot]'`. With `--track wandb:PROJECT` or `--track trackio:PROJECT` they go to
these services, whose package is needed.
"""

from __future__ import annotations

import argparse
import importlib
import time
from dataclasses import dataclass

import gymnasium
import torch
from torch import nn
from tqdm import tqdm

from rlstructs import (
    DictTensor,
    GymEnv,
    RL_Agent,
    RL_Batcher,
    Trajectories,
    discounted_returns,
    replay_agent,
    transitions,
)
from rlstructs.integrations.logging import open_log


@dataclass
class Args:
    """What the command line sets."""

    env_id: str = "CartPole-v1"
    n_steps: int = 500_000  # rounded up to whole rollouts
    n_processes: int = 2
    n_envs: int = 8
    n_timesteps: int = 500
    learning_rate: float = 1e-2
    gamma: float = 0.99
    n_eval: int = 100
    seed: int = 0
    plot: str = ""
    track: str = ""
    trace: str = ""


class Policy(RL_Agent):
    """Draws actions; takes the most likely ones where `agent_info` says `greedy`."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        logits = self.network(observation["frame"])
        greedy = agent_info["greedy"][0]
        action = logits.argmax(dim=1) if greedy else torch.distributions.Categorical(logits=logits).sample()
        return DictTensor({"action": action, "logits": logits}), state

    def update(self, info):
        self.network.load_state_dict(info)


def create_env(env_id: str, n_envs: int, seed: int) -> GymEnv:
    return GymEnv([gymnasium.make(env_id, disable_env_checker=k > 0) for k in range(n_envs)], seed)


def create_network(env_id: str) -> nn.Module:
    with gymnasium.make(env_id) as env:
        n_inputs, n_actions = env.observation_space.shape[0], int(env.action_space.n)
    return nn.Sequential(nn.Linear(n_inputs, 64), nn.Tanh(), nn.Linear(64, n_actions))


def advantages_of(batch: Trajectories, gamma: float) -> torch.Tensor:
    """(B, T): how much more came after t than in the mean of episodes that got there, in deviations; 0 in padding."""
    told = transitions(batch)
    # Nothing is known of what would have followed an episode that was cut.
    returns = discounted_returns(next_values=torch.zeros_like(told["rewards"]), gamma=gamma, **told)
    mask = told["mask"]
    baseline = returns.sum(dim=0) / mask.sum(dim=0)
    advantages = (returns - baseline) * mask
    return advantages / (advantages[mask].std() + 1e-8)


def learn(policy: Policy, optimizer: torch.optim.Optimizer, batch: Trajectories, gamma: float) -> dict[str, float]:
    """One step from a batch of episodes; its loss."""
    # What the workers' copies did, done again here with gradients; in the padding too, which is no numbers if debugged.
    batch = Trajectories(batch.info, batch.trajectories.zero_padding())
    distribution = torch.distributions.Categorical(logits=replay_agent(policy, batch)["logits"])
    log_probs = distribution.log_prob(batch.trajectories["action/action"])
    loss = -(log_probs * advantages_of(batch, gamma)).sum() / batch.mask().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return {"loss": loss.item()}


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
    network = create_network(args.env_id)
    policy, optimizer = Policy(network), torch.optim.Adam(network.parameters(), lr=args.learning_rate)
    with RL_Batcher(
        args.n_timesteps, Policy, {"network": network}, create_env, {"env_id": args.env_id, "n_envs": args.n_envs},
        args.n_processes, args.seed, agent_info=DictTensor({"greedy": torch.tensor([False])}),
    ) as batcher, batcher.trace(args.trace):  # fmt: skip
        log = Log(args)
        greedy = torch.zeros(batcher.n_elems(), dtype=torch.bool)
        while log.n_steps < args.n_steps:
            batcher.reset(agent_info=DictTensor({"greedy": greedy}))
            batcher.execute()
            batch, _ = batcher.get()
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - log.n_steps / args.n_steps)
            losses = learn(policy, optimizer, batch, args.gamma)
            batcher.update(network.state_dict())
            log.add(int(batch.lengths.sum()), batcher.episodes(), {**batcher.metrics(), **losses})
        speed = log.close()
        episodes = batcher.evaluate(args.n_eval, args.seed + 1, agent_info=DictTensor({"greedy": ~greedy}))
    print(f"{args.env_id}: score {episodes['return'].mean():.1f}, {log.n_steps} steps, {speed:.0f} steps/s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in vars(Args()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default: {value!r}")
    main(Args(**vars(parser.parse_args())))
