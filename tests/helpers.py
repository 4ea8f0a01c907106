"""Tiny deterministic environments and agents that the tests share; importable by workers."""

from __future__ import annotations

import io

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from rlstructs import DictTensor, GymEnv, GymEnvInf, RL_Agent, RL_Batcher


class Count(gymnasium.Env):
    """Counts: step s of an episode gives reward s and ends it when s == length.

    Observations are float32 [episode, step]; the first reset starts episode 0. A reset's option
    `length` changes the length for good.
    """

    action_space = spaces.Discrete(5)
    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def __init__(self, length, truncates=False):
        self.length, self.truncates = length, truncates
        self.episode, self.steps = -1, 0

    def _observation(self):
        return np.array([self.episode, self.steps], np.float32)

    def reset(self, *, seed=None, options=None):
        if options and "length" in options:
            self.length = options["length"]
        self.episode, self.steps = self.episode + 1, 0
        return self._observation(), {}

    def step(self, action):
        self.steps += 1
        ended = self.steps == self.length
        return self._observation(), float(self.steps), ended and not self.truncates, ended and self.truncates, {}


class Counting(RL_Agent):
    """State n, set to 0 where an episode starts (unless `resets` is False); acts n % 5, records n."""

    def __init__(self, resets=True):
        self.resets, self.given, self.agent_seed = resets, 0.0, 0

    def initial_state(self, agent_info, B):
        return DictTensor({"n": torch.zeros(B, dtype=torch.int64)})

    def __call__(self, state, observation, agent_info, history=None):
        n = state["n"]
        if self.resets:
            n = torch.where(observation["initial_state"], torch.zeros_like(n), n)
        given = torch.full((len(n),), self.given)
        seeds = torch.full((len(n),), self.agent_seed, dtype=torch.int64)
        return DictTensor({"action": n % 5, "n": n, "given": given, "seed": seeds}), DictTensor({"n": n + 1})

    def update(self, info):
        self.given = info

    def seed(self, seed):
        self.agent_seed = seed


SPACING = 100  # between the seeds of two workers


def create_counts(table, seed, autoreset=False):
    """A `GymEnv` or `GymEnvInf` of `Count`s, their lengths being the worker's row of `table`; a successor's is any."""
    lengths = table[seed // SPACING % len(table)]
    return (GymEnvInf if autoreset else GymEnv)([Count(length) for length in lengths], seed)


def count_batcher(table, n_timesteps, autoreset=False, n_processes=None, **arguments):
    """A batcher of `Count`s; `table[w]` are the lengths of worker w's environments."""
    arguments.setdefault("agent_args", {})
    return RL_Batcher(
        n_timesteps=n_timesteps,
        create_agent=Counting,
        create_env=create_counts,
        env_args={"table": table, "autoreset": autoreset},
        n_processes=len(table) if n_processes is None else n_processes,
        seeds=[SPACING * worker for worker in range(len(table))],
        **arguments,
    )


def rollout(batcher):
    """One `execute` and `get`."""
    batcher.execute()
    return batcher.get()


def create_gym(env_id, n_envs, seed, autoreset=True, **arguments):
    """A `GymEnv` or `GymEnvInf` of registered environments."""
    envs = [gymnasium.make(env_id, **arguments) for _ in range(n_envs)]
    return (GymEnvInf if autoreset else GymEnv)(envs, seed)


def through_file(state):
    """What is read of a state that was saved."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
