"""What does a batcher cost beside a bare scan of jax? Steps/s of compiled rollouts as a share of the scan's.

    python benchmarks/jax_rollouts.py [--rows cartpole cartpole-policy ...] [--repeats 30]

The bare scan is what one writes without this library: one jitted `lax.scan` over the environment's own step with its
automatic reset, and the same agent, which returns observations, rewards, ends and actions, and hands nothing out. All
contenders of a row run in turn, each on one core; the table shows medians of processor time, so that other work on the
machine does not count. "2 workers" have twice the environments, and are compared with two scans: their time is that of
the slower worker and of the trainer, which waits for it, as on two idle cores. The last columns are `get` of a batcher
of as many environments of gymnasium that are vectorised in numpy, and, where it is installed, EnvPool with one thread,
which is only stepped with random actions.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
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


@dataclass(frozen=True)
class Run:
    """A contender: `call` runs T steps of all environments, in the processes `pids` too."""

    call: Callable[[], Any]
    pids: tuple[int, ...] = ()

    def seconds(self) -> float:
        """Seconds of processor time of one call: those of this process, and of the slowest of the others."""
        # The clock of another process, as `clock_getcpuclockid` names it.
        clocks = [time.CLOCK_PROCESS_CPUTIME_ID, *(~pid << 3 | 2 for pid in self.pids)]
        before = [time.clock_gettime(clock) for clock in clocks]
        self.call()
        own, *others = (time.clock_gettime(clock) - then for clock, then in zip(clocks, before, strict=True))
        return own + max(others, default=0)


def step_envpool(task: Task) -> Callable[[], Any]:
    import envpool

    env = envpool.make(task.env_id, env_type="gymnasium", num_envs=task.n_envs, num_threads=1)
    random = np.random.default_rng(0)
    env.reset()

    def rollout() -> None:
        for _ in range(task.n_timesteps):
            env.step(random.integers(2, size=task.n_envs))

    return rollout


def get(batcher: RL_Batcher) -> None:
    batcher.execute()
    batcher.get()


def lease(batcher: RL_Batcher) -> None:
    batcher.execute()
    with batcher.lease():
        pass


def make_runs(task: Task, opened: contextlib.ExitStack) -> dict[str, Run]:
    """The contenders, by name."""
    parts = make_parts(task)
    params = make_params(4, 2) if task.has_policy else None
    runs = {"bare scan": Run(make_scan(task, params, parts))}

    def make_batcher(env: Any, agent: Any, n_workers: int) -> RL_Batcher:
        n_envs = task.n_envs * max(n_workers, 1)
        batcher = RL_Batcher.make(env, agent, n_envs=n_envs, n_workers=n_workers, n_timesteps=task.n_timesteps, seed=0)
        opened.enter_context(batcher).reset()
        return batcher

    for n_workers, suffix in ((0, ""), (2, ", 2 workers")):
        batcher = make_batcher(parts[0], None if params is None else JaxAgent(act, params), n_workers)
        pids = tuple(worker["pid"] for worker in batcher.stats()["workers"]) if n_workers else ()
        for hand_out in (get, lease):
            runs[hand_out.__name__ + suffix] = Run(partial(hand_out, batcher), pids)
    if task.env_id == "CartPole-v1" and not task.has_policy:
        make = partial(gymnasium.make_vec, task.env_id, vectorization_mode="vector_entry_point")
        runs["numpy"] = Run(partial(get, make_batcher(make, None, 0)))
        if importlib.util.find_spec("envpool") is not None:
            runs["EnvPool"] = Run(step_envpool(task))
    return runs


def measure(task: Task, n_repeats: int) -> dict[str, float]:
    """Median seconds of processor time for T steps of E environments."""
    with contextlib.ExitStack() as opened:
        runs = make_runs(task, opened)
        for run in runs.values():
            run.call()  # compiles
        turns = [{name: run.seconds() for name, run in runs.items()} for _ in range(n_repeats)]
    return {name: statistics.median(turn[name] for turn in turns) for name in runs}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [task.name for task in TASKS]
    parser.add_argument("--rows", nargs="+", choices=names, default=[name for name in names if name != SLOW])
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(1)
    columns = ("get", "lease", "get, 2 workers", "lease, 2 workers", "numpy", "EnvPool")
    print(f"| row | bare scan | {' | '.join(columns)} |\n{'| --- ' * (len(columns) + 2)}|")
    for task in TASKS:
        if task.name in args.rows:
            found = measure(task, args.repeats)
            bare = found["bare scan"]
            shares = [f"{bare / found[name]:.2f}" if name in found else "" for name in columns]
            speed = task.n_envs * task.n_timesteps / bare / 1e6
            print(f"| {task.name} | {speed:.3f} million steps/s | {' | '.join(shares)} |", flush=True)
