"""Double Q-learning with n-step targets in jax: agent, learner and memory.

    python examples/jax_dqn.py --seed 1

One network acts in the workers and learns in the trainer. In the workers jax sees the CPU alone: they do not take the
memory of a GPU that the learner is on. It needs `pip install -e '.[jax]'`, has `--plot`, `--track` and `--trace` as in
`ppo.py`, shows a progress bar, and at the end the mean return of `--n-eval` episodes in which no action is random:

    CartPole-v1: score 500.0, 50048 steps, 1397 steps/s
"""

from __future__ import annotations

import argparse
import importlib
import math
import multiprocessing
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import torch
from tqdm import tqdm

from rlstructs import DictTensor, GymEnvInf, RL_Agent, RL_Batcher, VecEnv
from rlstructs.integrations.logging import open_log
from rlstructs.memories.jax import RandomMemory

COLUMNS = ["observations", "actions", "rewards", "next_observations", "terminated"]
Params = Any  # a list with (weights, biases) of each layer


@dataclass
class Args:
    """What the command line sets."""

    env_id: str = "CartPole-v1"
    n_steps: int = 50_000  # rounded up to whole rollouts
    n_processes: int = 2
    n_envs: int = 4
    n_timesteps: int = 16
    memory_size: int = 50_000
    n_before: int = 1_000
    n_updates: int = 64
    n_between_copies: int = 200
    batch_size: int = 128
    n_step: int = 3
    gamma: float = 0.99
    learning_rate: float = 1e-3
    last_epsilon: float = 0.05
    n_eval: int = 100
    seed: int = 0
    plot: str = ""
    track: str = ""
    trace: str = ""


def create_params(env: VecEnv, seed: int) -> Params:
    sizes = math.prod(env.observation_space.shape), 128, 128, int(env.action_space.n)
    keys = jax.random.split(jax.random.PRNGKey(seed), len(sizes) - 1)
    pairs = zip(keys, pairwise(sizes), strict=True)
    return [(jax.random.normal(key, shape) * math.sqrt(2 / shape[0]), jnp.zeros(shape[1])) for key, shape in pairs]


def q_values(params: Params, observations: jax.Array) -> jax.Array:
    """The value of every action, (B, n_actions), for observations (B, ...)."""
    *hidden, (weights, biases) = params
    observations = observations.reshape(len(observations), -1)
    for w, b in hidden:
        observations = jax.nn.relu(observations @ w + b)
    return observations @ weights + biases


@jax.jit
def act(params: Params, key: jax.Array, observations: jax.Array, epsilon: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The best actions (B,), or with probability epsilon (B,) any; and the next key."""
    key, *keys = jax.random.split(key, 3)
    values = q_values(params, observations)
    explores = jax.random.uniform(keys[0], epsilon.shape) < epsilon
    return jnp.where(explores, jax.random.randint(keys[1], epsilon.shape, 0, values.shape[1]), values.argmax(1)), key


class Policy(RL_Agent):
    """Takes the best action, or with the probability `epsilon` of `agent_info` any.

    Args:
        params: numpy arrays. Arrays of jax would look for a GPU as they arrive in a worker, before this is called.
    """

    def __init__(self, params: Params) -> None:
        if multiprocessing.parent_process() is not None:  # in a worker: with --n-processes 0 the learner is here too
            jax.config.update("jax_platforms", "cpu")
        self.key = jax.random.PRNGKey(np.random.randint(2**31))  # numpy has a seed of its own in every worker
        self.update(params)

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        actions, self.key = act(self.params, self.key, observation["frame"].numpy(), agent_info["epsilon"].numpy())
        return DictTensor({"action": torch.from_numpy(np.array(actions, np.int64))}), state

    def update(self, info):
        self.params = jax.device_put(info)


def create_env(env_id: str, n_envs: int, seed: int) -> GymEnvInf:
    return GymEnvInf([gymnasium.make(env_id, disable_env_checker=k > 0) for k in range(n_envs)], seed)


class Learnt(NamedTuple):
    """The network, and what Adam keeps of it: how many updates there were, and the moments of the gradients."""

    params: Params
    count: jax.Array
    means: Params
    squares: Params


def loss_of(params: Params, target: Params, discounts: jax.Array, batch: list[jax.Array]) -> jax.Array:
    observations, actions, rewards, following, terminated = batch
    best = q_values(params, following).argmax(axis=1, keepdims=True)
    next_values = jnp.take_along_axis(q_values(target, following), best, axis=1)
    targets = jax.lax.stop_gradient(rewards + discounts[:, None] * ~terminated * next_values)
    errors = jnp.abs(jnp.take_along_axis(q_values(params, observations), actions, axis=1) - targets)
    return jnp.where(errors < 1, 0.5 * errors**2, errors - 0.5).mean()


@jax.jit
def improved(learnt: Learnt, target: Params, discounts: jax.Array, batch: list, rate: float) -> tuple[Learnt, Any]:
    """What one step of Adam (Kingma and Ba, 2015) makes of the network, and the loss before it."""
    loss, gradients = jax.value_and_grad(loss_of)(learnt.params, target, discounts, batch)
    count = learnt.count + 1
    means = jax.tree.map(lambda mean, g: 0.9 * mean + 0.1 * g, learnt.means, gradients)
    squares = jax.tree.map(lambda square, g: 0.999 * square + 0.001 * g * g, learnt.squares, gradients)
    rate = rate * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
    params = jax.tree.map(lambda p, mean, s: p - rate * mean / (jnp.sqrt(s) + 1e-8), learnt.params, means, squares)
    return Learnt(params, count, means, squares), loss


class Learner:
    """Improves a network from what is in a memory."""

    def __init__(self, params: Params, memory: RandomMemory, args: Args) -> None:
        zeros = jax.tree.map(jnp.zeros_like, params)
        self.learnt, self.target = Learnt(params, jnp.zeros(()), zeros, zeros), params
        self.memory, self.args, self.n_updates = memory, args, 0

    def learn(self, learning_rate: float) -> jax.Array:
        """One update; its loss, which may still be under way."""
        args, memory = self.args, self.memory
        [batch] = memory.sample(COLUMNS, batch_size=args.batch_size, n_step=args.n_step, gamma=args.gamma)
        # The discounts: gamma to the number of steps that there were up to the end of the episode.
        self.learnt, loss = improved(self.learnt, self.target, memory.get_sampling_discounts(), batch, learning_rate)
        self.n_updates += 1
        if self.n_updates % args.n_between_copies == 0:
            self.target = self.learnt.params  # arrays of jax never change: no copy
        return loss


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


def main(args: Args, create_agent: Any = Policy, own_env: Any = create_env) -> None:
    params, n_all = create_params(own_env(args.env_id, 1, args.seed), args.seed), args.n_envs * max(args.n_processes, 1)
    memory = RandomMemory(memory_size=max(args.memory_size // n_all, 1), num_envs=n_all, seed=args.seed)
    learner, losses = Learner(params, memory, args), {}
    with RL_Batcher(
        args.n_timesteps, create_agent, {"params": jax.device_get(params)}, own_env,
        {"env_id": args.env_id, "n_envs": args.n_envs}, args.n_processes, args.seed,
        agent_info=DictTensor({"epsilon": torch.zeros(1)}),
    ) as batcher, batcher.trace(args.trace):  # fmt: skip
        log = Log(args)
        batcher.reset(agent_info=DictTensor({"epsilon": torch.ones(n_all)}))
        while log.n_steps < args.n_steps:
            share = log.n_steps / args.n_steps
            epsilon = max(1 - 5 * share, args.last_epsilon)  # falls in the first fifth
            batcher.execute(agent_info=DictTensor({"epsilon": torch.full((n_all,), epsilon)}))
            if log.n_steps >= max(args.n_before, 1):  # while the workers act
                rate = args.learning_rate * (1 - share)
                losses = {"loss": float(sum(learner.learn(rate) for _ in range(args.n_updates))) / args.n_updates}
            batch, _ = batcher.get()
            memory.add_trajectories(batch)
            batcher.update(jax.device_get(learner.learnt.params))
            log.add(int(batch.lengths.sum()), batcher.episodes(), {**batcher.metrics(), **losses})
        speed = log.close()
        episodes = batcher.evaluate(args.n_eval, args.seed + 1, agent_info=DictTensor({"epsilon": torch.zeros(n_all)}))
    print(f"{args.env_id}: score {episodes['return'].mean():.1f}, {log.n_steps} steps, {speed:.0f} steps/s")


def parse_args(description: str | None, defaults: Args) -> Args:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in vars(defaults).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default: {value!r}")
    return Args(**vars(parser.parse_args()))


if __name__ == "__main__":
    main(parse_args(__doc__, Args()))
