"""Collects a dataset, saves it, and learns from the file alone: behaviour cloning, and offline reinforcement learning.

    python examples/offline_dataset.py --path cartpole.npz

Controllers of very different skill play CartPole-v1 in parallel workers; what they did goes to a file: `.npz`, `.pt`,
or `.h5` for other programs (the extra `hdf5`). `--n-epochs 0` ends with that, `--n-rollouts 0` begins with what is
there. From the file two policies learn: a clone does what is done most often; in advantage-weighted regression (Peng et
al., 2019) an action counts for more, the more its return exceeds what is usual where it was taken. It shows a progress
bar, and prints how they play, the score of the second at the end:

    cartpole.npz: 32768 steps of 16 environments, 1706 episodes, mean return 18.9
    clone: loss 0.644, 20 episodes, mean return 34.1
    weighted: loss 0.575, 20 episodes, mean return 500.0
    CartPole-v1: score 500.0, 1966080 steps, 126202 steps/s

`--plot curve.png` draws the returns of the second after each epoch, `--track tensorboard:runs/offline` keeps its
metrics there; either needs `pip install -e '.[plot]'`. With `--track wandb:PROJECT` or `--track trackio:PROJECT`
they go to these services, whose package is needed.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import gymnasium
import torch
from torch import nn
from tqdm import tqdm

from rlstructs import DictTensor, GymEnvInf, RL_Agent, RL_Batcher, Trajectories, lambda_returns, transitions
from rlstructs.integrations.logging import open_log

ENV_ID = "CartPole-v1"


@dataclass
class Args:
    """What the command line sets."""

    path: str = "cartpole.npz"
    n_processes: int = 2
    n_envs: int = 8
    n_timesteps: int = 256
    n_rollouts: int = 8
    n_epochs: int = 20
    batch_size: int = 256
    learning_rate: float = 3e-3
    gamma: float = 0.98
    td_lambda: float = 0.95
    temperature: float = 0.5
    max_weight: float = 20.0
    n_eval: int = 20
    seed: int = 0
    plot: str = ""
    track: str = ""
    trace: str = ""


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


def create_batcher(args: Args, agent: type[RL_Agent], info: DictTensor | None = None) -> RL_Batcher:
    return RL_Batcher(
        args.n_timesteps, agent, {}, lambda seed: GymEnvInf([gymnasium.make(ENV_ID) for _ in range(args.n_envs)], seed),
        {}, args.n_processes, args.seed, agent_info=info,
    )  # fmt: skip


def collect(args: Args) -> None:
    """Lets the controllers play, and writes what happened to a file."""
    with create_batcher(args, Controller, DictTensor({"skill": torch.zeros(1)})) as batcher, batcher.trace(args.trace):
        n_all, rollouts = batcher.n_elems(), []
        batcher.reset(agent_info=DictTensor({"skill": torch.linspace(0.1, 0.8, n_all)}))
        for _ in range(args.n_rollouts):
            batcher.execute()
            rollouts.append(batcher.get()[0])
        returns = batcher.episodes()["return"]
    dataset = Trajectories.cat(rollouts)
    dataset.save(args.path)
    print(f"{args.path}: {dataset.lengths.sum()} steps of {n_all} environments, {len(returns)} episodes, "
          f"mean return {returns.mean():.1f}")  # fmt: skip


class Critic:
    """Values of observations, learnt from lambda returns; of 1 / (1 - gamma), so that they are about 1."""

    def __init__(self, dataset: Trajectories, args: Args) -> None:
        self.steps, self.mask, self.args, self.network = dataset.trajectories, dataset.mask(torch.bool), args, layers(1)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=args.learning_rate)

    def values(self, observations: torch.Tensor) -> torch.Tensor:
        return self.network(observations)[..., 0] / (1 - self.args.gamma)

    @torch.no_grad()
    def targets(self) -> torch.Tensor:
        """(B, T): returns, as they are now; episodes that the data cuts go on with a value."""
        told, next_values = transitions(self.steps), self.values(self.steps["_observation/frame"])
        return lambda_returns(next_values=next_values, gamma=self.args.gamma, lambda_=self.args.td_lambda, **told)

    def learn(self) -> None:
        observations, targets = (x[self.mask] for x in (self.steps["observation/frame"], self.targets()))
        for rows in torch.randperm(len(targets)).split(self.args.batch_size):
            errors = self.values(observations[rows]) - targets[rows]
            minimise(self.optimizer, ((1 - self.args.gamma) * errors).square().mean())

    @torch.no_grad()
    def weights(self) -> torch.Tensor:
        """(B, T): what each action counts for."""
        advantages = self.targets() - self.values(self.steps["observation/frame"])
        return (advantages / advantages[self.mask].std() / self.args.temperature).exp().clamp(max=self.args.max_weight)


def cloned(dataset: Trajectories, weights: torch.Tensor, args: Args) -> Iterator[tuple[nn.Module, float]]:
    """A policy that learns actions, each of which counts for its weight, (B, T); with its loss, after each epoch."""
    steps, mask, policy = dataset.trajectories, dataset.mask(torch.bool), layers(2)
    optimizer = torch.optim.Adam(policy.parameters(), lr=args.learning_rate)
    observations, actions, weights = (x[mask] for x in (steps["observation/frame"], steps["action/action"], weights))
    for _ in range(args.n_epochs):
        losses = []
        for rows in torch.randperm(len(actions)).split(args.batch_size):
            errors = nn.functional.cross_entropy(policy(observations[rows]), actions[rows], reduction="none")
            # A weighted mean: the sum of the weights, which the paper leaves out, only changes the step size.
            losses.append(minimise(optimizer, (weights[rows] * errors).sum() / weights[rows].sum()))
        yield policy, sum(losses) / len(losses)


def minimise(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def train(args: Args, batcher: RL_Batcher) -> None:
    """Trains policies from the file alone, and lets each play whole episodes, the same ones."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # for networks this small more are slower
    dataset = Trajectories.load(args.path)
    batcher.reset()
    n_steps, none = int(dataset.lengths.sum()), batcher.episodes()
    log = Log(argparse.Namespace(**{**vars(args), "n_steps": 3 * args.n_epochs * n_steps}))
    critic = Critic(dataset, args)
    for _ in range(args.n_epochs):
        critic.learn()
        log.add(n_steps, none, {})
    for name, weights in (("clone", torch.ones_like(critic.targets())), ("weighted", critic.weights())):
        for policy, loss in cloned(dataset, weights, args):
            batcher.update(policy.state_dict())
            episodes = batcher.evaluate(args.n_eval, args.seed + 1)
            log.add(n_steps, episodes if name == "weighted" else none, {f"loss of {name}": loss})
        score = episodes["return"].mean()
        tqdm.write(f"{name}: loss {loss:.3f}, {args.n_eval} episodes, mean return {score:.1f}")
    print(f"{ENV_ID}: score {score:.1f}, {log.n_steps} steps, {log.close():.0f} steps/s")


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
    if args.n_rollouts:
        collect(args)
    if args.n_epochs:
        with create_batcher(args, Greedy) as batcher:
            train(args, batcher)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in vars(Args()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default: {value!r}")
    main(Args(**vars(parser.parse_args())))
