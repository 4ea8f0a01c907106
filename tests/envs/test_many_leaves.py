"""Spaces of very many leaves: what a number costs does not grow with how many there are."""

from __future__ import annotations

import subprocess
import sys

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlstructs import DictTensor, GymEnvInf, GymVectorEnv, NormalizeObservation, RandomAgent, SharedVectorEnv

N_ENVS = 8


class Wide(gymnasium.Env):
    """Observes a number for each of many leaves, or is told one."""

    def __init__(self, n_leaves, is_told):
        many = spaces.Dict({f"leaf{k}": spaces.Discrete(9) if is_told else spaces.Box(-1, 1) for k in range(n_leaves)})
        few = spaces.Box(-1, 1, (1,), np.float32)
        self.observation_space, self.action_space = (few, many) if is_told else (many, spaces.Discrete(2))
        one = np.ones(1, np.float32)
        self.observed = one if is_told else dict.fromkeys(many, one)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observed, {}

    def step(self, action):
        return self.observed, 0.0, False, False, {}


def calls(function):
    """How many calls it takes: what time would say if the machine did nothing else."""
    n_calls = 0

    def count(frame, event, argument):
        nonlocal n_calls
        n_calls += event.endswith("call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return n_calls


SURFACES = {
    "GymEnvInf": lambda envs: GymEnvInf(envs, 0),
    "SharedVectorEnv": lambda envs: GymVectorEnv(SharedVectorEnv([lambda env=env: env for env in envs], 0), 0),
    "NormalizeObservation": lambda envs: NormalizeObservation(GymEnvInf(envs, 0)),
}


@pytest.mark.parametrize(
    ("surface", "is_told", "most"),
    [
        ("GymEnvInf", False, 95),
        ("GymEnvInf", True, 80),
        ("SharedVectorEnv", False, 160),
        ("SharedVectorEnv", True, 80),
        ("NormalizeObservation", False, 110),
    ],
)
def test_first_calls_take_time_by_how_many_numbers_there_are(surface, is_told, most):
    def first_calls(n_leaves):
        envs = [Wide(n_leaves, is_told) for _ in range(N_ENVS)]
        agent = RandomAgent(envs[0].action_space)

        def first():
            env = SURFACES[surface](envs)
            observation, _ = env.reset(DictTensor())
            for _ in range(2):
                action, _ = agent(DictTensor(), observation, DictTensor())
                (_, _), (observation, _) = env.step(action)

        return calls(first)

    few, many = first_calls(100), first_calls(200)
    assert (many - few) / (100 * N_ENVS) < most  # of which gymnasium takes a part, to batch and to seed spaces
    assert many < 2.2 * few


PROGRAM = """
import resource, sys
import torch
from gymnasium import spaces
from rlstructs import DictTensor, RandomAgent

SPACES = {
    "MultiDiscrete": spaces.MultiDiscrete([7] * 1792),
    "Dict": spaces.Dict({str(k): spaces.Discrete(7) for k in range(1792)}),
    "Box": spaces.Box(0, 255, (84, 84, 4), "uint8"),
}
agent = RandomAgent(SPACES[sys.argv[1]])
observation = DictTensor({"reward": torch.zeros(64)})
RandomAgent(spaces.Discrete(2))(DictTensor(), observation, DictTensor())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
agent(DictTensor(), observation, DictTensor())
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.parametrize("space", ["MultiDiscrete", "Dict", "Box"])
def test_random_actions_are_drawn_ahead_within_some_megabytes(space, subprocess_env):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, space], env=subprocess_env, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 150


def test_what_is_drawn_ahead_of_small_spaces_comes_from_one_stream_as_ever():
    with torch.random.fork_rng():
        torch.manual_seed(7)
        wanted = list(torch.randint(0, 5, (512 * 4,)).reshape(512, 4))
        torch.manual_seed(7)
        agent, observation = RandomAgent(spaces.Discrete(5)), DictTensor({"reward": torch.zeros(4)})
        drawn = [agent(DictTensor(), observation, DictTensor())[0]["action"].tolist() for _ in range(512)]
    assert drawn == [batch.tolist() for batch in reversed(wanted)]
