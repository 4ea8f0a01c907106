"""Environments of gymnax and Brax: every transition is that of a Python loop over their own functions."""

from __future__ import annotations

import importlib
import sys

import gymnax
import jax
import numpy as np
import pytest

from rlstructs import RL_Batcher
from rlstructs.envs import JaxFunctions, from_gymnax
from rlstructs.errors import SpecError
from rlstructs.seeding import EnvSeed

# Of gymnax: dtypes that jax does not have, or will refuse some day. Of Brax: that nobody maintains it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype:UserWarning"),
    pytest.mark.filterwarnings("ignore:Brax System:UserWarning"),
    pytest.mark.filterwarnings("ignore:Accessing:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types:FutureWarning"),
]
N, T, N_ROLLOUTS, SEED = 3, 25, 2, 5
# The most steps of an episode, so that there are episodes of both ends.
GYMNAX = {"CartPole-v1": 15, "Catch-bsuite": 100}
SLOW = {"Acrobot-v1": 9, "MountainCar-v0": 12, "Pendulum-v1": 10, "DeepSea-bsuite": 100, "Breakout-MinAtar": 14,
        "FourRooms-misc": 11}  # fmt: skip
ROUNDED, ENDLESS = ("Acrobot-v1", "Pendulum-v1"), ("Acrobot-v1", "FourRooms-misc", "MountainCar-v0", "Pendulum-v1")
ENVS = [*GYMNAX.items(), *(pytest.param(*item, marks=pytest.mark.slow) for item in SLOW.items())]


def collect(env):
    """Rollouts with random actions, as arrays."""
    found = []
    with RL_Batcher.make(env, n_envs=N, n_workers=0, n_timesteps=T, seed=SEED) as batcher:
        for _, trajectories in zip(range(N_ROLLOUTS), batcher, strict=False):
            found.append({key: tensor.numpy() for key, tensor in trajectories.trajectories.items()})
    return {key: np.concatenate([each[key] for each in found], axis=1) for key in found[0]}


def keys_of(k):
    """The keys of environment k: a function of the number of the step, and of whether it is for a reset in it."""
    key = jax.random.PRNGKey(EnvSeed(SEED, 0).for_environments(N)[k])
    return lambda n, is_reset=False: jax.random.fold_in(key, 2 * n + is_reset)


def assert_equal(got, expected, tolerance, what):
    expected = np.asarray(expected).reshape(np.shape(got))
    same = np.allclose(got, expected, tolerance, tolerance) if tolerance else np.array_equal(got, expected)
    assert same, (what, got, expected)


def follow(rows, reset, step, params, tolerance=0.0):
    """Plays the recorded actions in a Python loop, and compares every row; counts the ends of both kinds."""
    reset, step = jax.jit(reset), jax.jit(step)
    ends = np.zeros(2, int)
    for k in range(N):
        key = keys_of(k)
        state, seen = reset(key(0), params)
        for t in range(N_ROLLOUTS * T):
            assert_equal(rows["observation/frame"][k, t], seen, tolerance, (k, t, "seen"))
            action = rows["action/action"][k, t]
            state, after, reward, terminated, truncated = step(key(t + 1), state, action, params)
            for name, expected in (("frame", after), ("reward", reward)):
                assert_equal(rows[f"_observation/{name}"][k, t], expected, tolerance, (k, t, name))
            flags = [bool(rows[f"_observation/{name}"][k, t]) for name in ("terminated", "truncated", "done")]
            assert flags == [bool(terminated), bool(truncated), bool(terminated) or bool(truncated)], (k, t)
            ends += flags[:2]
            seen = after
            if flags[2]:
                state, seen = reset(key(t + 1, True), params)
    return ends


@pytest.mark.parametrize(("name", "limit"), ENVS)
def test_every_transition_of_gymnax_is_that_of_its_own_functions(name, limit):
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

    # A compiler that sees many environments at once rounds some of their formulas differently.
    tolerance = 1e-5 if name in ROUNDED else 0.0
    ends = follow(collect((env, params)), reset, step, params, tolerance)
    assert ends[1] > 0 or limit == 100, ends
    assert ends[0] > 0 or name in ENDLESS, ends


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inverted_pendulum"])
def test_every_transition_of_brax_is_that_of_its_own_functions(name):
    envs = pytest.importorskip("brax.envs")
    env, limit = envs.get_environment(name, backend="generalized"), 8

    def reset(key, params):
        state = env.reset(key)
        return (state, 0), state.obs

    def step(key, state, action, params):
        after, n = env.step(state[0], action), state[1] + 1
        return (after, n), after.obs, after.reward, after.done > 0, (n >= limit) & (after.done == 0)

    rows = collect(envs.training.EpisodeWrapper(env, limit, 1))
    assert follow(rows, reset, step, None, 1e-4)[1] > 0


def test_params_without_a_limit_cannot_tell_the_ends_apart():
    env, _ = gymnax.make("CartPole-v1")
    with pytest.raises(
        SpecError, match="CartPole-v1 cannot tell terminated from truncated: its params have no max_step"
    ):
        from_gymnax(env, object())


def test_without_jax_an_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    monkeypatch.delitem(sys.modules, "rlstructs.envs.jax_trees", raising=False)
    with pytest.raises(ImportError, match=r"jax is needed .*pip install 'rlstructs\[jax-envs\]'"):
        importlib.import_module("rlstructs.envs.jax_trees")


def test_an_environment_of_gymnax_becomes_functions_of_gymnasium_s_spaces():
    functions = from_gymnax(*gymnax.make("CartPole-v1"))
    assert isinstance(functions, JaxFunctions)
    assert functions.action_space.n == 2 and functions.observation_space.shape == (4,)
