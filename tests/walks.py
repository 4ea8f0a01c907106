"""Environments of short episodes for programs of other libraries, and a comparison of what vectorised ones return.

It stands apart because workers import the module that defines an environment, and this one imports little.
"""

from __future__ import annotations

import os

import gymnasium
import numpy as np
from gymnasium import spaces

BOX = spaces.Box(-1, 1, (3,), np.float32)
SPACES = {
    "box": BOX,
    "float64": spaces.Box(-1, 1, (2, 2), np.float64),
    "discrete": spaces.Discrete(5),
    "dict": spaces.Dict({"a": BOX, "image": spaces.Box(0, 255, (4, 4, 1), np.uint8), "n": spaces.Discrete(3)}),
    "text": spaces.Text(6, charset="ab"),
}


class Walks(gymnasium.Env):
    """Episodes of 3 to 6 steps, terminated or truncated by turns, with infos of reset and step."""

    def __init__(self, space=BOX, number=0, action_space=None):
        self.observation_space, self.action_space = space, action_space or spaces.Discrete(2)
        self.render_mode, self.number, self.n_episodes = "rgb_array", number, 0

    def _observe(self):
        self.observation_space.seed(int(self.np_random.integers(2**30)))
        return self.observation_space.sample()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.n_episodes += 1
        self.left = 3 + int(self.np_random.integers(4))
        return self._observe(), {"episode": self.n_episodes, "options": options}

    def step(self, action):
        self.left -= 1
        ended, by_turns = self.left <= 0, self.n_episodes % 2 == 0
        info = {"left": self.left, "action": action} if self.left % 2 else {}
        return self._observe(), self.left + 0.25, ended and by_turns, ended and not by_turns, info

    def render(self):
        return np.full((8, 8, 3), self.number, np.uint8)

    def add(self, a, b=0):
        return self.number + a + b

    @property
    def death(self):
        os._exit(3)


class SeededWalks(Walks):
    """Has a method `seed`, as environments had before gymnasium."""

    def seed(self, seed):
        self.number = seed
        return [seed, "own"]


def short_pendulum():
    """Pendulum with episodes of nine steps."""
    return gymnasium.wrappers.TimeLimit(gymnasium.make("Pendulum-v1").unwrapped, 9)


def assert_same(found, wanted):
    """Whole numbers may be Python's or numpy's."""
    assert type(found) is type(wanted) or isinstance(wanted, (int, np.integer))
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key in wanted:
            assert_same(found[key], wanted[key])
    elif isinstance(wanted, (list, tuple)) or (isinstance(wanted, np.ndarray) and wanted.dtype == object):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    elif isinstance(wanted, np.ndarray):
        assert found.dtype == wanted.dtype and np.array_equal(found, wanted)
    else:
        assert found == wanted
