"""An environment of PettingZoo whose agents come and go, and a recorder: a loop over PettingZoo's own interface."""

from __future__ import annotations

import functools

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv


class Guests(ParallelEnv):
    """`a` is there from the start, `b` and `c` often come later; each leaves at another time, by turns of both flags.

    Args:
        n_returns: how many times each agent comes back within an episode. PettingZoo's rules allow none.
        hides_flags: whether agents leave without a flag.
    """

    metadata, render_mode = {"name": "guests_v0"}, None
    possible_agents = ["a", "b", "c"]  # noqa: RUF012

    def __init__(self, n_returns=0, hides_flags=False):
        self.n_visits, self.hides_flags, self.n_episodes = 1 + n_returns, hides_flags, 0

    @functools.cache  # noqa: B019
    def observation_space(self, agent):
        return spaces.Box(-1e6, 1e6, (3,), np.float32)

    @functools.cache  # noqa: B019
    def action_space(self, agent):
        return spaces.Discrete(5)

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.t, self.n_episodes, self.options = 0, self.n_episodes + 1, options
        self.visits = {}
        for number, agent in enumerate(self.possible_agents):
            start = int(self.rng.integers(3)) if number else 0
            self.visits[agent] = []
            for _ in range(self.n_visits):
                end = start + int(self.rng.integers(2, 6)) + 2 * (agent == "a")
                self.visits[agent].append((start, end))
                start = end + int(self.rng.integers(1, 3))
        self.agents = self._there()
        return self._observe(self.agents), self._infos(self.agents)

    def step(self, actions):
        assert set(actions) == set(self.agents), "exactly the agents that are there act"
        acted, self.t = self.agents, self.t + 1
        self.agents = self._there()
        shown = [agent for agent in self.possible_agents if {agent} & {*acted, *self.agents}]
        gone = {agent: agent in acted and agent not in self.agents and not self.hides_flags for agent in shown}
        rewards = {agent: float(actions[agent]) + self.t if agent in actions else 0.0 for agent in shown}
        is_even = (self.t + self.n_episodes) % 2 == 0
        terminated = {agent: gone[agent] and is_even for agent in shown}
        truncated = {agent: gone[agent] and not is_even for agent in shown}
        return self._observe(shown), rewards, terminated, truncated, self._infos(shown)

    def _there(self):
        return [agent for agent, own in self.visits.items() if any(first <= self.t < end for first, end in own)]

    def _observe(self, agents):
        return {agent: self.rng.normal(size=3).astype(np.float32) + self.t for agent in agents}

    def _infos(self, agents):
        return {agent: {"t": self.t, "option": (self.options or {}).get("option", -1)} for agent in agents}


def streams_of(batches, n_slots):
    """Of each slot, its steps in order: dicts of the keys of trajectories."""
    streams = [[] for _ in range(n_slots)]
    for batch in batches:
        steps = batch.trajectories
        columns = {key: steps[key].numpy() for key in steps.keys()}  # noqa: SIM118 - no dict
        for row, slot in enumerate(batch.info["env_index"].tolist()):
            streams[slot] += [{key: columns[key][row, t] for key in columns} for t in range(int(steps.lengths[row]))]
    return streams


def record(env, seed, streams, to_action=int, frames=("frame",)):
    """Steps an environment by the actions of these streams, one for each agent, and compares all that it shows.

    Args:
        env: by PettingZoo's parallel interface.
        seed: of its first reset.
        streams: steps of each possible agent.
        to_action: turns a recorded action into one that the environment takes.
        frames: keys of an observation.

    Returns:
        How many transitions were compared.
    """
    streams = {agent: iter(own) for agent, own in zip(env.possible_agents, streams, strict=True)}
    seen, _ = env.reset(seed=seed)
    there, is_first, n = list(env.agents), dict.fromkeys(env.possible_agents, True), 0
    while True:
        steps = {agent: next(streams[agent], None) for agent in there}
        if None in steps.values():  # a rollout ended within an episode
            return n
        for agent, step in steps.items():
            same(step, "observation", seen[agent], frames)
            assert step["observation/initial_state"] == is_first[agent]
            assert step["observation/info/agent_index"] == env.possible_agents.index(agent)
        seen, rewards, terminated, truncated, _ = env.step(
            {agent: to_action(step["action/action"]) for agent, step in steps.items()}
        )
        for agent, step in steps.items():
            same(step, "_observation", seen[agent], frames)
            left = agent not in env.agents and not terminated[agent]
            assert step["_observation/reward"] == np.float32(rewards[agent])
            assert step["_observation/terminated"] == terminated[agent]
            assert step["_observation/truncated"] == (truncated[agent] or left)
            is_first[agent] = bool(step["_observation/done"])
            n += 1
        there = [agent for agent in env.agents if not (terminated.get(agent) or truncated.get(agent))]
        if not there:
            seen, _ = env.reset()
            there, is_first = list(env.agents), dict.fromkeys(env.possible_agents, True)


def same(step, side, wanted, frames):
    for key in frames:
        found = step[f"{side}/{key}"]
        value = np.asarray(wanted if key == "frame" else wanted[key])
        np.testing.assert_array_equal(found.reshape(value.shape), value.astype(found.dtype), err_msg=f"{side}/{key}")
