"""Two tasks for agents with a memory, of `a2c_recurrent.py` and `ppo_transformer.py`."""

from __future__ import annotations

import gymnasium
import numpy as np

from rlstructs.envs import GymEnvInf, NormalizeReward


class TMaze(gymnasium.Env):
    """A corridor, and a turn at its end (Bakker, 2001); only the first observation tells which turn is right.

    An observation says at the first place, by 1 or -1, where the goal is, and everywhere whether this is the end.
    Actions are forward, left and right. Bumping into a wall costs 0.1. A turn ends the episode, the
    right one with a reward of 1.
    """

    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, length: int) -> None:
        self.length = length

    def show(self):
        return np.array([self.goal if self.place == 0 else 0, self.place == self.length], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.goal = 0, self.np_random.choice([-1, 1])
        return self.show(), {}

    def step(self, action):
        turn, is_at_end = (0, -1, 1)[action], self.place == self.length
        if turn and is_at_end:
            return self.show(), float(turn == self.goal), True, False, {}
        bumps = bool(turn) != is_at_end
        self.place += not bumps
        return self.show(), -0.1 * bumps, False, False, {}


def t_maze() -> gymnasium.Env:
    return gymnasium.wrappers.TimeLimit(TMaze(20), 60)


def cart_pole() -> gymnasium.Env:
    """CartPole without velocities."""
    env = gymnasium.make("CartPole-v1")
    low, high = (bound[::2] for bound in (env.observation_space.low, env.observation_space.high))
    space = gymnasium.spaces.Box(low, high)
    env = gymnasium.wrappers.TransformObservation(env, lambda observation: observation[::2], space)
    # An episode ends at half of the bounds, which is at 1 then.
    return gymnasium.wrappers.RescaleObservation(env, np.float32(-2), np.float32(2))


# What `--task` takes: what it is called, and how it is made.
TASKS = {"cart-pole": ("CartPole-v1 without velocities", cart_pole), "t-maze": ("T-maze of 20 steps", t_maze)}


def create_env(task: str, n_envs: int, gamma: float, seed: int) -> NormalizeReward:
    _, make = TASKS[task]
    return NormalizeReward(GymEnvInf([make() for _ in range(n_envs)], seed), gamma=gamma)
