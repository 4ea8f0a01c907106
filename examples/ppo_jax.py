"""Proximal policy optimisation with agents in numpy and a learner in jax: all epochs over a rollout are one call.

    python examples/ppo_jax.py --seed 1

The algorithm is that of `ppo.py`, for discrete actions. Advantages, epochs and minibatches are loops within one
function, which is compiled while the workers start. Workers need no jax: they get the weights as numpy arrays, and act
with them while the learner learns. It needs `pip install -e '.[jax]'`, shows a progress bar, and prints at the end
the mean return of `--n-eval` episodes in which the policy takes its most likely action, how fast the training was, and
for how much of it the learner had nothing to learn from:

    CartPole-v1: score 500.0, 200704 steps, 24464 steps/s, 45% of the time waiting for rollouts
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

# For networks this small more threads are slower, and the workers need the cores.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.example_libraries import optimizers
from tqdm import tqdm

from rlstructs import DictTensor, GymEnvInf, NormalizeObservation, NormalizeReward, RL_Agent, RL_Batcher, VecEnv

# The keys of a rollout that the learner needs.
KEYS = (
    "observation/frame", "action/action", "action/log_prob",
    *(f"_observation/{key}" for key in ("frame", "reward", "terminated", "done")),
)  # fmt: skip
Params = Any  # "actor" and "critic" -> a list with (weights, biases) of each layer


@dataclass
class Args:
    """What the command line sets."""

    env_id: str = "CartPole-v1"
    n_steps: int = 200_000  # rounded up to whole rollouts
    n_processes: int = 2
    n_envs: int = 16
    n_timesteps: int = 64
    run_ahead: int = 1
    n_epochs: int = 4
    n_minibatches: int = 4
    learning_rate: float = 1e-3
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    entropy_weight: float = 0.0
    n_eval: int = 100
    seed: int = 0
    trace: str = ""


def layers(x: Any, network: list, module: Any) -> Any:
    """The outputs of a small network; `module` is numpy or jax.numpy."""
    *hidden, (weights, biases) = network
    for w, b in hidden:
        x = module.tanh(x @ w + b)
    return x @ weights + biases


def create_params(env_id: str, seed: int) -> Params:
    with gymnasium.make(env_id) as env:
        if not isinstance(env.action_space, gymnasium.spaces.Discrete):
            raise SystemExit(f"{env_id}: --env-id needs a Discrete action space, got {env.action_space}: try ppo.py")
        n_inputs, n_actions = env.observation_space.shape[0], int(env.action_space.n)
    random, params = np.random.default_rng(seed), {}
    for name, n_outputs, scale in (("actor", n_actions, 0.01), ("critic", 1, 1.0)):
        sizes = list(pairwise((n_inputs, 64, 64, n_outputs)))
        scales = [math.sqrt(1 / n) for n, _ in sizes[:-1]] + [scale / 8]
        weights = [random.normal(0, scale, size).astype(np.float32) for scale, size in zip(scales, sizes, strict=True)]
        params[name] = [(w, np.zeros(w.shape[1], np.float32)) for w in weights]
    return params


class Policy(RL_Agent):
    """Draws actions; takes the most likely ones where `agent_info` says `greedy`."""

    def __init__(self, params: Params) -> None:
        self.actor, self.random = params["actor"], np.random.default_rng()

    def seed(self, seed):
        self.random = np.random.default_rng(seed)

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        logits = layers(observation["frame"].numpy(), self.actor, np)
        logits -= logits.max(axis=1, keepdims=True)
        log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        noise = 0 if agent_info["greedy"][0] else self.random.gumbel(size=logits.shape)
        actions = (logits + noise).argmax(axis=1)
        log_prob = log_probs[np.arange(len(actions)), actions]
        return DictTensor({"action": torch.from_numpy(actions), "log_prob": torch.from_numpy(log_prob)}), state

    def update(self, info):
        self.actor = info["actor"]


def create_env(env_id: str, n_envs: int, gamma: float, seed: int) -> VecEnv:
    envs = GymEnvInf([gymnasium.make(env_id, disable_env_checker=k > 0) for k in range(n_envs)], seed)
    return NormalizeReward(NormalizeObservation(envs), gamma=gamma)


def log_probs_of(params: Params, observations: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(layers(observations, params["actor"], jnp))


def values_of(params: Params, observations: jax.Array) -> jax.Array:
    return layers(observations, params["critic"], jnp)[..., 0]


def taken(log_probs: jax.Array, actions: jax.Array) -> jax.Array:
    return jnp.take_along_axis(log_probs, actions[..., None], -1)[..., 0]


def advantages_of(params: Params, batch: dict[str, jax.Array], args: Args) -> tuple[jax.Array, jax.Array]:
    """Advantages and values of all steps, (B, T)."""
    values, following = (values_of(params, batch[f"{side}/frame"]) for side in ("observation", "_observation"))
    following = jnp.where(batch["_observation/terminated"], 0, following)
    errors = batch["_observation/reward"] + args.gamma * following - values
    goes_on = args.gamma * args.gae_lambda * ~batch["_observation/done"]

    def back(later: jax.Array, step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        error, factor = step
        now = error + factor * later
        return now, now

    _, advantages = jax.lax.scan(back, jnp.zeros(len(errors)), (errors.T, goes_on.T), reverse=True)
    return advantages.T, values


def loss_of(params: Params, rows: dict[str, jax.Array], args: Args) -> tuple[jax.Array, dict[str, jax.Array]]:
    log_probs, gains = log_probs_of(params, rows["observation/frame"]), rows["advantage"]
    ratios = jnp.exp(taken(log_probs, rows["action/action"]) - rows["log_prob"])
    clipped = ratios.clip(1 - args.clip, 1 + args.clip)
    policy_loss = -jnp.minimum(ratios * gains, clipped * gains).mean()
    value_loss = ((values_of(params, rows["observation/frame"]) - rows["target"]) ** 2).mean()
    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
    losses = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
    return policy_loss + 0.5 * value_loss - args.entropy_weight * entropy, losses


class Learner:
    """A network, and what Adam keeps of it."""

    def __init__(self, params: Params, n_rollouts: int, args: Args) -> None:
        n_updates = n_rollouts * args.n_epochs * args.n_minibatches
        init, self.step, self.params_of = optimizers.adam(lambda i: args.learning_rate * (1 - i / n_updates), eps=1e-5)
        self.state, self.n, self.args = (init(params), jax.random.PRNGKey(args.seed)), 0, args
        self.learn = jax.jit(self._learn)

    def _learn(self, state: Any, n: int, batch: dict[str, jax.Array]) -> tuple[Any, Params, dict[str, jax.Array]]:
        """A few epochs over a rollout; `n` updates were before. The new state, the network, the losses at the end."""
        (optimizer, random), args = state, self.args
        params = self.params_of(optimizer)
        advantages, values = advantages_of(params, batch, args)
        rows = {key: array.reshape(-1, *array.shape[2:]) for key, array in batch.items()}
        rows["target"] = (advantages + values).reshape(-1)
        rows["log_prob"] = taken(log_probs_of(params, rows["observation/frame"]), rows["action/action"])
        # Weights of what an older policy has done, see `ppo.py`.
        weights = jnp.exp(rows["log_prob"] - rows["action/log_prob"]).clip(max=2.0)
        rows["advantage"] = (advantages.reshape(-1) - advantages.mean()) / (advantages.std() + 1e-8) * weights
        random, *keys = jax.random.split(random, args.n_epochs + 1)
        order = jnp.stack([jax.random.permutation(each, advantages.size) for each in keys])
        order = order.reshape(args.n_epochs * args.n_minibatches, -1)

        def update(optimizer: Any, step: tuple[jax.Array, jax.Array]) -> tuple[Any, dict[str, jax.Array]]:
            number, at = step
            minibatch = {key: array[at] for key, array in rows.items()}
            gradients, losses = jax.grad(loss_of, has_aux=True)(self.params_of(optimizer), minibatch, args)
            return self.step(number, optimizers.clip_grads(gradients, 0.5), optimizer), losses

        optimizer, losses = jax.lax.scan(update, optimizer, (n + jnp.arange(len(order)), order))
        return (optimizer, random), self.params_of(optimizer), {name: each[-1] for name, each in losses.items()}

    def compile(self, n_all: int, n_inputs: int) -> None:
        """Compiles `learn` for rollouts of this size."""
        shape, none = (n_all, self.args.n_timesteps), jnp.float32
        kinds = {"frame": none, "action": jnp.int32, "terminated": bool, "done": bool}
        zeros = {key: jnp.zeros(shape, kinds.get(key.rpartition("/")[2], none)) for key in KEYS}
        frames = {key: jnp.zeros((*shape, n_inputs)) for key in KEYS if key.endswith("frame")}
        jax.block_until_ready(self.learn(self.state, 0, zeros | frames))

    def improve(self, batch: dict[str, jax.Array]) -> tuple[Params, dict[str, jax.Array]]:
        self.state, params, losses = self.learn(self.state, self.n, batch)
        self.n += self.args.n_epochs * self.args.n_minibatches
        return jax.device_get((params, losses))


def main(
    args: Args, create_agent: Callable[..., RL_Agent] = Policy, own_env: Callable[..., VecEnv] = create_env
) -> None:
    params, n_all = create_params(args.env_id, args.seed), args.n_envs * max(args.n_processes, 1)
    n_rollouts = math.ceil(args.n_steps / (n_all * args.n_timesteps))
    learner, greedy = Learner(params, n_rollouts, args), torch.ones(n_all, dtype=torch.bool)
    with ThreadPoolExecutor(1) as pool:
        compiled = pool.submit(learner.compile, n_all, len(params["actor"][0][0]))
        with RL_Batcher(
            args.n_timesteps, create_agent, {"params": params}, own_env,
            {"env_id": args.env_id, "n_envs": args.n_envs, "gamma": args.gamma}, args.n_processes, args.seed,
            agent_info=DictTensor({"greedy": torch.tensor([False])}), run_ahead=args.run_ahead,
        ) as batcher, batcher.trace(args.trace):  # fmt: skip
            compiled.result()
            begin, waited, n_steps, returns = time.perf_counter(), 0.0, 0, []
            batcher.reset(agent_info=DictTensor({"greedy": ~greedy}))
            for _ in (bar := tqdm(range(n_rollouts), unit=" rollouts")):
                start = time.perf_counter()
                batcher.execute()
                batch, _ = batcher.get()
                waited += time.perf_counter() - start
                params, losses = learner.improve({key: jnp.asarray(batch.trajectories[key].numpy()) for key in KEYS})
                batcher.update(params)
                n_steps += int(batch.lengths.sum())
                returns = (returns + batcher.episodes()["return"].tolist())[-100:]
                shown = {name: float(each) for name, each in losses.items()}
                bar.set_postfix({"return": sum(returns) / max(len(returns), 1), **shown}, refresh=False)
            seconds = time.perf_counter() - begin
            episodes = batcher.evaluate(args.n_eval, args.seed + 1, agent_info=DictTensor({"greedy": greedy}))
    print(f"{args.env_id}: score {episodes['return'].mean():.1f}, {n_steps} steps, {n_steps / seconds:.0f} steps/s, "
          f"{waited / seconds:.0%} of the time waiting for rollouts")  # fmt: skip


def parse_args(description: str | None) -> Args:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in vars(Args()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default: {value!r}")
    return Args(**vars(parser.parse_args()))


if __name__ == "__main__":
    main(parse_args(__doc__))
