"""What does a batcher cost beside a bare scan of jax? Steps/s of compiled rollouts as a share of the scan's.

    python benchmarks/jax_rollouts.py [--rows cartpole cartpole-policy ...] [--repeats 30]

The bare scan is what one writes without this library: one jitted `lax.scan` over the environment's own step with its
automatic reset, and the same agent, which returns observations, rewards, ends and actions, and hands nothing out. All
contenders of a row run in turn in one process, on one core; the table shows medians of processor time, so that other
work on the machine does not count. The last column is `get` of a batcher of as many environments of gymnasium that are
vectorised in numpy.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

# Before jax is imported: one core for everybody.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
os.environ.setdefault("NPROC", "1")

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import torch

from rlstructs import JaxAgent, RL_Batcher

# Compiles in a minute or two, and is left out unless it is named.
SLOW = "ant"


@dataclass(frozen=True)
class Task:
    """One row: an environment, how many of it, for how many steps, and whether a network of 64x64 acts."""

    name: str
    n_envs: int
    n_timesteps: int = 128
    env_id: str = "CartPole-v1"
    has_policy: bool = False


TASKS = [
    Task("cartpole", 1024),
    Task("cartpole-policy", 1024, has_policy=True),
    Task("breakout", 256, env_id="Breakout-MinAtar"),
    Task(SLOW, 256, 32, env_id="ant"),
]


def act(params: Any, state: Any, observation: Any, key: Any) -> Any:
    x = observation["frame"]
    for weights, bias in params[:-1]:
        x = jnp.tanh(x @ weights + bias)
    logits = x @ params[-1][0] + params[-1][1]
    return jax.random.categorical(key, logits), state


def make_params(n_inputs: int, n_actions: int) -> Any:
    random, sizes = np.random.default_rng(0), [n_inputs, 64, 64, n_actions]
    pairs = pairwise(sizes)
    return [(random.normal(0, 0.1, pair).astype(np.float32), np.zeros(pair[1], np.float32)) for pair in pairs]


def make_parts(task: Task) -> tuple[Any, Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """The environment; and of one environment with automatic resets: reset, step, and how an action is drawn."""
    if task.env_id == "ant":
        from brax import envs

        env = envs.get_environment("ant", backend="generalized")
        single = envs.training.AutoResetWrapper(envs.training.EpisodeWrapper(env, 1000, 1))

        def step(key: Any, state: Any, action: Any) -> Any:
            after = single.step(state, action)
            return after, after.obs, (after.reward, after.done)

        def reset(key: Any) -> Any:
            state = single.reset(key)
            return state, state.obs

        return env, reset, step, lambda key: jax.random.uniform(key, (8,), minval=-1.0)
    env, params = gymnax.make(task.env_id)

    def reset_gymnax(key: Any) -> Any:
        return env.reset(key, params)[::-1]

    def step_gymnax(key: Any, state: Any, action: Any) -> Any:
        seen, state, reward, done, _ = env.step(key, state, action, params)
        return state, seen, (reward, done)

    return (env, params), reset_gymnax, step_gymnax, lambda key: jax.random.randint(key, (), 0, env.num_actions)


def make_scan(task: Task, agent_params: Any, parts: Any) -> Callable[[], Any]:
    """The bare scan; each call runs T steps of all environments and waits for them."""
    _, reset, step, draw = parts
    own_keys = jax.random.split(jax.random.PRNGKey(0), (2, task.n_envs))

    def advance(carried: Any, t: Any) -> Any:
        state, seen = carried
        drawing, stepping = (jax.vmap(jax.random.fold_in, (0, None))(keys, t) for keys in own_keys)
        if agent_params is None:
            action = jax.vmap(draw)(drawing)
        else:
            action, _ = jax.vmap(act, (None, None, 0, 0))(agent_params, None, {"frame": seen}, drawing)
        state, following, told = jax.vmap(step)(stepping, state, action)
        return (state, following), (seen, following, action, told)

    run = jax.jit(lambda carried, first: jax.lax.scan(advance, carried, first + jnp.arange(task.n_timesteps)))
    now = {"carried": jax.jit(jax.vmap(reset))(own_keys[0]), "first": 0}

    def rollout() -> None:
        now["carried"], steps = run(now["carried"], now["first"])
        now["first"] += task.n_timesteps
        jax.block_until_ready(steps)

    return rollout


def get(batcher: RL_Batcher) -> None:
    batcher.execute()
    batcher.get()


def lease(batcher: RL_Batcher) -> None:
    batcher.execute()
    with batcher.lease():
        pass


def make_runs(task: Task) -> dict[str, Callable[[], Any]]:
    """The contenders, by name; each call runs T steps of all environments."""
    parts = make_parts(task)
    params = make_params(4, 2) if task.has_policy else None
    agent = None if params is None else JaxAgent(act, params)
    batcher = RL_Batcher.make(parts[0], agent, n_envs=task.n_envs, n_workers=0, n_timesteps=task.n_timesteps, seed=0)
    batcher.reset()

    runs = {
        "bare scan": make_scan(task, params, parts),
        "get": partial(get, batcher),
        "lease": partial(lease, batcher),
    }
    if task.env_id == "CartPole-v1" and not task.has_policy:
        make = partial(gymnasium.make_vec, task.env_id, vectorization_mode="vector_entry_point")
        other = RL_Batcher.make(make, n_envs=task.n_envs, n_workers=0, n_timesteps=task.n_timesteps, seed=0)
        other.reset()
        runs["numpy"] = partial(get, other)
    return runs


def measure(task: Task, n_repeats: int) -> dict[str, float]:
    """Median steps per second of processor time."""
    runs, seconds = make_runs(task), dict[str, list[float]]()
    for repeat in range(n_repeats + 1):
        for name, run in runs.items():
            begin = time.process_time()
            run()
            if repeat:  # the first one compiles
                seconds.setdefault(name, []).append(time.process_time() - begin)
    return {name: task.n_envs * task.n_timesteps / statistics.median(each) for name, each in seconds.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [task.name for task in TASKS]
    parser.add_argument("--rows", nargs="+", choices=names, default=[name for name in names if name != SLOW])
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| row | bare scan | get | lease | numpy |\n| --- | --- | --- | --- | --- |")
    for task in TASKS:
        if task.name in args.rows:
            found = measure(task, args.repeats)
            bare = found.pop("bare scan")
            shares = [f"{found[name] / bare:.2f}" if name in found else "" for name in ("get", "lease", "numpy")]
            print(f"| {task.name} | {bare / 1e6:.3f} million steps/s | {' | '.join(shares)} |", flush=True)
