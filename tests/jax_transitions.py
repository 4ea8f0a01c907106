"""Compares transitions of compiled rollouts with those of a Python loop over the same functions, with the same keys.

    python tests/jax_transitions.py --steps 10000

For each environment it prints how many transitions were compared, the ends among them, and the largest difference. Each
step of the loop is one call for all environments, because a compiler rounds some formulas otherwise for a single one.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from functools import partial

import gymnax
import jax
import numpy as np

from rlstructs import RL_Batcher
from rlstructs.seeding import EnvSeed

N, T, SEED = 3, 25, 5
# Environments of gymnax, and the most steps of an episode, so that there are episodes of both ends.
GYMNAX = {"CartPole-v1": 15, "Catch-bsuite": 100, "Acrobot-v1": 9, "MountainCar-v0": 12, "Pendulum-v1": 10,
          "DeepSea-bsuite": 100, "Breakout-MinAtar": 14, "FourRooms-misc": 11}  # fmt: skip
BRAX = {"inverted_pendulum": 8, "inverted_double_pendulum": 12}
FLAGS = ("terminated", "truncated", "done")


def gymnax_functions(name, limit):
    """The environment with its params, and reset and step in the form of `JaxFunctions`."""
    env, params = gymnax.make(name)
    params = params.replace(max_steps_in_episode=limit)

    def reset(key, params):
        seen, state = env.reset_env(key, params)
        return state, seen

    def step(key, state, action, params):
        seen, after, reward, done, _ = env.step_env(key, state, action, params)
        is_late = after.time >= limit
        unlimited = params.replace(max_steps_in_episode=10**6)
        terminated = jax.numpy.where(is_late, env.step_env(key, state, action, unlimited)[3], done)
        return after, seen, reward, terminated, is_late & ~terminated

    return (env, params), reset, step, params


def brax_functions(name, limit):
    from brax import envs

    env = envs.get_environment(name, backend="generalized")

    def reset(key, params):
        state = env.reset(key)
        return (state, 0), state.obs

    def step(key, state, action, params):
        after, n = env.step(state[0], action), state[1] + 1
        return (after, n), after.obs, after.reward, after.done > 0, (n >= limit) & (after.done == 0)

    return envs.training.EpisodeWrapper(env, limit, 1), reset, step, None


def collect(env, n_steps):
    """Rollouts with random actions, as arrays (N, n_steps, ...)."""
    found = []
    with RL_Batcher.make(env, n_envs=N, n_workers=0, n_timesteps=T, seed=SEED) as batcher:
        for _, trajectories in zip(range(-(-n_steps // T)), batcher, strict=False):
            found.append({key: tensor.numpy() for key, tensor in trajectories.trajectories.items()})
    return {key: np.concatenate([each[key] for each in found], axis=1)[:, :n_steps] for key in found[0]}


def play(actions, reset, step, params):
    """Plays actions (N, n_steps, ...) in a Python loop; returns what `collect` does."""
    keys = np.stack([jax.random.PRNGKey(one) for one in EnvSeed(SEED, 0).for_environments(N)])
    fold = jax.jit(jax.vmap(jax.random.fold_in, (0, None)))
    reset, step = jax.jit(jax.vmap(reset, (0, None))), jax.jit(jax.vmap(step, (0, 0, 0, None)))
    states, seen = reset(fold(keys, 0), params)
    steps = []
    for t in range(actions.shape[1]):
        states, after, reward, terminated, truncated = step(fold(keys, 2 * (t + 1)), states, actions[:, t], params)
        done = np.asarray(terminated) | np.asarray(truncated)
        steps.append((seen, after, reward, terminated, truncated, done))
        seen = after
        if done.any():
            fresh = reset(fold(keys, 2 * (t + 1) + 1), params)
            states, seen = jax.tree.map(partial(select, done), fresh, (states, after))
    names = (
        "observation/frame",
        "_observation/frame",
        "_observation/reward",
        *(f"_observation/{name}" for name in FLAGS),
    )
    return {name: np.stack([np.asarray(each) for each in column], 1) for name, column in
            zip(names, zip(*steps, strict=True), strict=True)}  # fmt: skip


def select(which, new, old):
    old = np.asarray(old)
    return np.where(which.reshape(-1, *[1] * (old.ndim - 1)), new, old).astype(old.dtype)


def compare(env, reset, step, params, n_steps, tolerance=0.0):
    """Raises unless all transitions are equal; returns the number of ends of both kinds, and the largest difference."""
    found = collect(env, n_steps)
    wanted, largest = play(found["action/action"], reset, step, params), 0.0
    for name, expected in wanted.items():
        got = found[name].reshape(expected.shape)
        if got.dtype == bool or not tolerance:
            assert np.array_equal(got, expected), (name, np.argwhere(got != expected)[:3])
        else:
            assert np.allclose(got, expected, tolerance, tolerance), (name, np.abs(got - expected).max())
            largest = max(largest, float(np.abs(got.astype(float) - expected).max()))
    return [int(wanted[f"_observation/{name}"].sum()) for name in FLAGS[:2]], largest


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000, help="of each environment; default: 10,000")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="of Brax; default: 1e-5")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    failed = 0
    for makers, names in ((gymnax_functions, GYMNAX), (brax_functions, BRAX)):
        for name, limit in names.items():
            tolerance = given.tolerance if makers is brax_functions else 0.0
            try:
                ends, largest = compare(*makers(name, limit), given.steps, tolerance)
                print(f"{name}: {N * given.steps} transitions, {ends[0]} terminated, {ends[1]} truncated, "
                      f"largest difference {largest:.1e}", flush=True)  # fmt: skip
            except AssertionError as error:
                failed += 1
                print(f"{name}: NOT EQUAL: {error}", flush=True)
    sys.exit(failed)
