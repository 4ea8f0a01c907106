"""`ParallelEnvs` hands out every transition of PettingZoo's environments, and no other."""

from __future__ import annotations

import warnings
from functools import partial

import numpy as np
import pytest
from guests import Guests, record, streams_of
from gymnasium import spaces
from helpers import Counting, rollout
from mpe2 import simple_spread_v3
from pettingzoo import ParallelEnv

from rlstructs import DeviceEnv, NormalizeObservation, NormalizeReward, RL_Batcher
from rlstructs.integrations.pettingzoo import ParallelEnvs
from rlstructs.testing import check_env


def create_env(seed, make=Guests, n_envs=2, wrap=None, **arguments):
    env = ParallelEnvs([make] * n_envs, seed, **arguments)
    return env if wrap is None else wrap(env)


def collected(n_rollouts, n_processes=0, n_timesteps=7, n_agents=3, create_agent=Counting, **arguments):
    """Rollouts of two environments in each worker, and the steps of each slot."""
    n_workers, batches = max(1, n_processes), []
    seeds = [100 * worker for worker in range(n_workers)]
    with RL_Batcher(n_timesteps, create_agent, {}, create_env, arguments, n_processes, seeds) as batcher:
        n_running = 0
        for _ in range(n_rollouts):
            if not n_running:
                batcher.reset()
            trajectories, n_running = rollout(batcher)
            batches.append(trajectories)
    return batches, streams_of(batches, n_workers * 2 * n_agents)


def moved(env):
    return DeviceEnv(env, "cpu", "cpu")


def tic_tac_toe():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from pettingzoo.classic import tictactoe_v3
    return tictactoe_v3.env()


KINDS = {
    "guests": {"make": Guests},
    "guests that come back": {"make": partial(Guests, n_returns=2)},
    "guests that leave without a flag": {"make": partial(Guests, hides_flags=True)},
    "behind a wrapper": {"make": partial(Guests, n_returns=2), "wrap": moved},
    "resets between rollouts": {"make": partial(Guests, n_returns=1), "reset_at": "rollout"},
    "resets by the caller": {"make": partial(Guests, n_returns=1), "reset_at": "reset"},
    "resets by the caller, behind a wrapper": {"make": Guests, "reset_at": "reset", "wrap": moved},
    "parallel": {"make": simple_spread_v3.parallel_env},
    "converted": {"make": simple_spread_v3.env, "reset_at": "rollout"},
    "turn by turn": {"make": tic_tac_toe},
}
IN_PROCESSES = ("guests that come back", "resets between rollouts")


@pytest.mark.parametrize(("kind", "n_processes"), [*((kind, 0) for kind in KINDS), *((k, 2) for k in IN_PROCESSES)])
def test_every_transition_is_what_a_loop_over_the_environment_sees(kind, n_processes):
    arguments, frames = KINDS[kind], ("frame",)
    make, names, n_timesteps = arguments["make"], ["a", "b", "c"], 7
    if kind == "turn by turn":
        names, frames = ["player_1", "player_2"], ("observation", "action_mask")
    if arguments.get("reset_at") == "reset":
        n_timesteps = 40  # whole episodes
    _, streams = collected(12, n_processes, n_timesteps, len(names), **arguments)
    n = len(names)
    for k in range(2 * max(1, n_processes)):
        own = streams[k * n : (k + 1) * n]
        seed = 100 * (k // 2) + k % 2
        reference = ParallelEnvs([make], 0)._groups[0].env if kind in ("converted", "turn by turn") else make()
        assert record(reference, seed, own, frames=frames) == sum(map(len, own)) > 50
        for steps in own:  # the agent's state: the number of the step in its episode
            counts = [0]
            for step in steps:
                assert step["action/n"] == counts[-1]
                counts.append(0 if step["_observation/done"] else counts[-1] + 1)


def test_the_environment_of_these_tests_keeps_the_rules_of_pettingzoo(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from pettingzoo.test import parallel_api_test
    parallel_api_test(Guests(), 100)
    assert "Passed" in capsys.readouterr().out


@pytest.mark.parametrize(("reset_at", "wrap"), [("step", None), ("rollout", moved), ("reset", None)])
def test_it_is_a_sound_environment(reset_at, wrap):
    check_env(create_env, {"make": partial(Guests, n_returns=1), "reset_at": reset_at, "wrap": wrap})


@pytest.mark.parametrize("wrap", [NormalizeObservation, lambda env: NormalizeReward(NormalizeObservation(env))])
def test_statistics_count_what_agents_saw_and_nothing_else(wrap):
    with RL_Batcher(8, Counting, {}, create_env, {"wrap": wrap}, 0, [0]) as batcher:
        batcher.reset()
        for _ in range(9):
            rollout(batcher)
        statistics = batcher.statistics()
    found = statistics["observation/frame"]
    raw = [step for own in collected(9, n_timesteps=8)[1] for step in own]
    seen = [step["_observation/frame"] for step in raw]
    seen += [step["observation/frame"] for step in raw if step["observation/initial_state"]]
    # Episodes that began with the last steps have no transition yet.
    assert len(seen) <= found.count <= len(seen) + 6
    assert abs(found.mean - np.mean(seen, axis=0)).max() < 0.1
    assert "return" not in statistics or statistics["return"].count == len(raw)


class Visited(ParallelEnv):
    """`host` is always there, five steps an episode; `guest` only in the first three steps of some episodes."""

    metadata, render_mode = {"name": "visited_v0"}, None
    possible_agents = ["host", "guest"]  # noqa: RUF012

    def __init__(self, comes=(), agents=("host", "guest")):
        self.comes, self.possible_agents, self.n_episodes = comes, list(agents), -1

    def observation_space(self, agent):
        return spaces.Box(-1, 1, (1,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.t, self.n_episodes = 0, self.n_episodes + 1
        self.agents = ["host", "guest"] if self.n_episodes in self.comes else ["host"]
        return self._of(self.agents, np.zeros(1, np.float32)), {}

    def step(self, actions):
        acted, self.t = self.agents, self.t + 1
        ended = [agent for agent in acted if self.t == {"host": 5, "guest": 3}[agent]]
        self.agents = [agent for agent in acted if agent not in ended]
        over = {agent: agent in ended for agent in acted}
        return self._of(acted, np.zeros(1, np.float32)), self._of(acted, 1.0), over, self._of(acted, False), {}

    def _of(self, agents, value):
        return dict.fromkeys(agents, value)


@pytest.mark.parametrize("reset_at", ["step", "rollout", "reset"])
@pytest.mark.parametrize(("comes", "n", "played"), [
    ((), 1, [0]), ((), 2, [0, 0]), ((), 7, [0, 0, 0, 0, 2, 2, 2]),
    ((0,), 4, [0, 1, 2, 3]), ((0,), 8, [0, 0, 0, 1, 2, 2, 2, 3]), (range(9), 5, [0, 0, 1, 2, 3]),
    (range(0, 9, 2), 8, [0, 0, 1, 1, 2, 2, 3, 3]),
])  # fmt: skip
def test_an_evaluation_plays_the_episodes_of_agents_that_do_not_come_where_others_are(reset_at, comes, n, played):
    def create_env(seed):
        return ParallelEnvs([partial(Visited, comes)] * (1 + (max(played) > 1)), seed, reset_at=reset_at)

    with RL_Batcher(4, Counting, {}, create_env, {}, 0, 0) as batcher:
        batcher.reset()
        found = batcher.evaluate(n, seed=1)
    assert found["env_index"].tolist() == played
    assert found["length"].tolist() == [3 if env % 2 else 5 for env in played]


@pytest.mark.parametrize("n_processes", [0, 2])
def test_an_evaluation_begins_with_agents_that_come_wherever_their_slot_is(n_processes):
    def create_env(seed):
        return ParallelEnvs([partial(Visited, agents=("guest", "host"))], seed)

    with RL_Batcher(50, Counting, {}, create_env, {}, n_processes, 0) as batcher:
        batcher.reset()
        assert batcher.evaluate(1, seed=1)["env_index"].tolist() == [1]
        assert batcher.evaluate(1, seed=1, max_steps=20)["env_index"].tolist() == [1]


def test_episodes_of_an_evaluation_do_not_depend_on_the_number_of_workers():
    def create_env(seed, n_envs):
        return ParallelEnvs([partial(Visited, (0,))] * n_envs, seed)

    found = []
    for n_workers in (1, 2):
        with RL_Batcher(16, Counting, {}, create_env, {"n_envs": 2 // n_workers}, n_workers, 0) as batcher:
            batcher.reset()
            found.append(batcher.evaluate(9, seed=1))
    assert found[0] == found[1] and found[0]["env_index"].tolist() == [0, 0, 0, 0, 1, 2, 2, 2, 3]
