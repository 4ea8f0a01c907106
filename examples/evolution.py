"""Evolution strategies (Salimans et al., 2017): every slot has a policy of its own.

    python examples/evolution.py --seed 1

No gradient is computed: each environment plays one episode with parameters that lie around the present ones, and those
move towards what gave more. The parameters of each slot travel as a row of `agent_info`, so that a worker computes all
its policies in one batched product. It shows a progress bar, and prints at the end the mean return of `--n-eval`
episodes of the parameters in the middle, and how fast the training was:

    CartPole-v1: score 500.0, 200133 steps, 28763 steps/s

`--plot curve.png` draws the returns of the training, `--track tensorboard:runs/evolution` keeps its metrics there;
either needs `pip install -e '.[plot]'`. With `--track wandb:PROJECT` or `--track trackio:PROJECT` they go to
these services, whose package is needed.
"""

from __future__ import annotations

import argparse
import importlib
import math
import time
from dataclasses import dataclass
from itertools import pairwise

import gymnasium
import torch
from tqdm import tqdm

from rlstructs import DictTensor, GymEnv, RL_Agent, RL_Batcher, Trajectories
from rlstructs.integrations.logging import open_log


@dataclass
class Args:
    """What the command line sets."""

    env_id: str = "CartPole-v1"
    n_steps: int = 200_000  # rounded up to whole rollouts
    n_processes: int = 2
    n_envs: int = 16
    n_timesteps: int = 500
    n_hidden: int = 16
    noise: float = 0.3
    learning_rate: float = 0.1
    n_eval: int = 100
    seed: int = 0
    plot: str = ""
    track: str = ""
    trace: str = ""


def shapes_of(sizes: list[int]) -> list[tuple[int, int]]:
    """Of the weights and biases, in turns, of a network with layers of these sizes."""
    return [shape for n_from, n_to in pairwise(sizes) for shape in ((n_from, n_to), (1, n_to))]


def outputs_of(parameters: torch.Tensor, observations: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """What the network of row b makes of observation b.

    Args:
        parameters: (B, n_parameters), a network in each row.
        observations: (B, sizes[0]).
        sizes: of the layers, inputs and outputs among them.

    Returns:
        (B, sizes[-1]).
    """
    shapes = shapes_of(sizes)
    parts = parameters.split([math.prod(shape) for shape in shapes], dim=1)
    tensors = [part.view(-1, *shape) for part, shape in zip(parts, shapes, strict=True)]
    x = observations[:, None]  # (B, 1, n_inputs)
    for weights, biases in zip(tensors[::2], tensors[1::2], strict=True):
        x = torch.baddbmm(biases, x, weights)
        if weights is not tensors[-2]:
            x = x.tanh()
    return x[:, 0]


class Policies(RL_Agent):
    """Takes in each slot the best action of the network that `agent_info` has for it."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        outputs = outputs_of(agent_info["parameters"], observation["frame"], self.sizes)
        return DictTensor({"action": outputs.argmax(dim=1)}), state


def create_env(env_id: str, n_envs: int, seed: int) -> GymEnv:
    return GymEnv([gymnasium.make(env_id, disable_env_checker=k > 0) for k in range(n_envs)], seed)


def sizes_of(args: Args) -> list[int]:
    with gymnasium.make(args.env_id) as env:
        return [env.observation_space.shape[0], args.n_hidden, int(env.action_space.n)]


class Strategy:
    """A normal distribution of parameters, whose mean goes where returns are higher.

    Attributes:
        mean: (n_parameters,).
    """

    def __init__(self, n_parameters: int, args: Args) -> None:
        self.mean, self.noise = torch.nn.Parameter(torch.zeros(n_parameters)), args.noise
        self.optimizer = torch.optim.Adam([self.mean], lr=args.learning_rate)

    def drawn(self, n: int) -> torch.Tensor:
        """Parameters (n, n_parameters), in pairs on opposite sides of the mean.

        Raises:
            ValueError: n is odd.
        """
        if n % 2:
            raise ValueError(f"n_processes * n_envs must be even, for pairs of policies, got {n}")
        half = self.noise * torch.randn(n // 2, len(self.mean))
        return self.mean.detach() + torch.cat([half, -half])

    def learn(self, batch: Trajectories) -> dict[str, float]:
        """One step from the episodes of a population, whose parameters the batch has in its `info`."""
        returns = batch.trajectories["_observation/reward"].where(batch.mask(torch.bool), 0.0).sum(dim=1)
        # All 0 where every policy is as good as the others.
        fitness = (returns - returns.mean()) / (returns.std() + 1e-8)
        tried = batch.info["agent_info/parameters"] - self.mean.detach()
        self.mean.grad = -(fitness @ tried) / (len(tried) * self.noise**2)
        self.optimizer.step()
        return {"best": returns.max().item(), "worst": returns.min().item()}


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
    sizes = sizes_of(args)
    strategy = Strategy(sum(math.prod(shape) for shape in shapes_of(sizes)), args)
    with RL_Batcher(
        args.n_timesteps, Policies, {"sizes": sizes}, create_env, {"env_id": args.env_id, "n_envs": args.n_envs},
        args.n_processes, args.seed, agent_info=DictTensor({"parameters": strategy.mean.detach()[None]}),
    ) as batcher, batcher.trace(args.trace):  # fmt: skip
        log = Log(args)
        n_all = batcher.n_elems()
        while log.n_steps < args.n_steps:
            batcher.reset(agent_info=DictTensor({"parameters": strategy.drawn(n_all)}))
            batcher.execute()
            batch, _ = batcher.get()
            log.add(int(batch.lengths.sum()), batcher.episodes(), {**batcher.metrics(), **strategy.learn(batch)})
        speed = log.close()
        mean = DictTensor({"parameters": strategy.mean.detach().expand(n_all, -1)})
        episodes = batcher.evaluate(args.n_eval, args.seed + 1, agent_info=mean)
    print(f"{args.env_id}: score {episodes['return'].mean():.1f}, {log.n_steps} steps, {speed:.0f} steps/s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in vars(Args()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default: {value!r}")
    main(Args(**vars(parser.parse_args())))
