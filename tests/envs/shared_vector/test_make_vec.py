"""`make_vec` takes what `gymnasium.make_vec` takes, and gives the same transitions."""

from __future__ import annotations

import contextlib
from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import TimeLimit, TransformReward

from rlstructs import SpecError, make_vec

CARTPOLE = "CartPole-v1"


def steps_of(envs):
    with contextlib.closing(envs):
        found = [envs.reset(seed=7)[0]]
        for step in range(30):
            found += envs.step(np.full(4, step % 2))[:4]
    return np.concatenate([np.asarray(each, np.float64).reshape(-1) for each in found])


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"vectorization_mode": "sync"},
        {"vectorization_mode": gymnasium.VectorizeMode.ASYNC},
        {"vector_kwargs": {"autoreset_mode": AutoresetMode.SAME_STEP}},
        {"max_episode_steps": 5},
        {"wrappers": [partial(TimeLimit, max_episode_steps=7), partial(TransformReward, func=lambda reward: -reward)]},
    ],
)
def test_it_gives_what_gymnasium_gives(arguments):
    wanted = steps_of(gymnasium.make_vec(CARTPOLE, 4, **{**arguments, "vectorization_mode": "sync"}))
    assert np.array_equal(steps_of(make_vec(CARTPOLE, 4, **arguments)), wanted)
    assert np.array_equal(steps_of(make_vec(gymnasium.spec(CARTPOLE), num_envs=4, **arguments)), wanted)


def test_a_function_makes_environments_too():
    assert np.array_equal(
        steps_of(make_vec(lambda limit: gymnasium.make(CARTPOLE, max_episode_steps=limit), 4, 2, limit=9)),
        steps_of(make_vec(CARTPOLE, 4, max_episode_steps=9)),
    )


def test_it_says_what_was_made():
    with make_vec(CARTPOLE, 4, n_workers=2, max_episode_steps=9) as envs:
        assert (envs.num_envs, envs.spec.id, envs.spec.kwargs) == (4, CARTPOLE, {"max_episode_steps": 9})
    assert not gymnasium.spec(CARTPOLE).kwargs


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"env": "CartPole-v99"}, SpecError, "CartPole-v99: .*v99"),
        ({"env": 3}, TypeError, "env must be an id of gymnasium's registry or a function, got int"),
        ({"env": CARTPOLE, "num_envs": 0}, SpecError, "num_envs must be at least 1"),
        ({"env": CARTPOLE, "vectorization_mode": "vector_entry_point"}, SpecError, "must be 'sync', 'async' or None"),
        ({"env": CARTPOLE, "vectorization_mode": "sync", "n_workers": 2}, SpecError, "n_workers is 2: give one"),
    ],
)
def test_a_wrong_argument_is_named(arguments, error, message):
    with pytest.raises(error, match=message):
        make_vec(**arguments)
