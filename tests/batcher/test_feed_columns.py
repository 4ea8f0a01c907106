"""A fed memory has the columns, dtypes and rows of one to which the same rollouts are added, whatever these hold."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, Tuple
from surfaces import EVERY_SURFACE, N_LANES
from test_feed import assert_equal, contents

from rlstructs import DictTensor, GymEnvInf, RandomAgent, RL_Agent, RL_Batcher, SpecError
from rlstructs.errors import MissingKeyError
from rlstructs.memories.torch import RandomMemory
from rlstructs.replay import DictTensorReplayBuffer, VectorReplayBuffer
from rlstructs.replay.intake.trajectories import POLICY_VERSION

FRAME, STATE = Box(-1, 1, (3,)), Box(-1, 1, (2,), np.float64)
OBSERVATIONS = {
    "Box": FRAME,
    "Discrete": Discrete(5),
    "uint8 image": Box(0, 255, (6, 5, 3), np.uint8),
    "frame and state": Dict(frame=FRAME, state=STATE),
    "frame and nested state": Dict(frame=FRAME, state=Dict(a=STATE, b=Discrete(3))),
    "state alone": Dict(state=STATE, other=FRAME),
    "nested": Dict(camera=Dict(left=Box(0, 255, (4, 4, 1), np.uint8), right=FRAME), bits=MultiBinary(3)),
    "Tuple": Tuple((FRAME, Discrete(3))),
}
ACTIONS = {"Discrete": Discrete(3), "Box": Box(-1, 1, (2,)), "nested": Dict(a=Discrete(2), b=Box(-1, 1, (2,)))}
# A pair of each observation space with an action space and an agent, each of which comes up more than once.
CASES = [
    ("Box", "Discrete", "plain"), ("Discrete", "Box", "rich"), ("uint8 image", "nested", "plain"),
    ("frame and state", "Discrete", "rich"), ("frame and nested state", "Box", "plain"),
    ("state alone", "Discrete", "plain"), ("nested", "nested", "rich"), ("Tuple", "Box", "history"),
    ("frame and state", "nested", "history"),
]  # fmt: skip


class Env(gymnasium.Env):
    """Shows drawn observations and infos; its episodes have 3 and 5 steps in turns."""

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space, self.n, self.t = observation_space, action_space, 0, 0

    def show(self):
        return self.observation_space.sample(), {"t": self.t, "deep": {"height": self.t / 7}}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.n, self.t = self.n + 1, 0
        return self.show()

    def step(self, action):
        self.t += 1
        observation, info = self.show()
        is_over = self.t == 3 + 2 * (self.n % 2)
        return observation, self.t / 3, is_over and self.n % 3 == 0, is_over and self.n % 3 > 0, info


class Rich(RL_Agent):
    """Acts at random, and writes more than actions; its state counts steps."""

    def __init__(self, action_space, has_history):
        self.random, self.has_history = RandomAgent(action_space), has_history

    def require_history(self):
        return self.has_history

    def initial_state(self, agent_info, B):
        return DictTensor({"n": torch.zeros(B, dtype=torch.int64)})

    def __call__(self, state, observation, agent_info, history=None):
        action, _ = self.random(DictTensor(), observation, agent_info)
        n = state["n"]
        seen = n if history is None else history.lengths
        more = {"log_prob": n / 2, "values": n[:, None].double(), "deep/seen": seen, "deep/half": n.to(torch.bfloat16)}
        return DictTensor({**dict(action.items()), **more}), DictTensor({"n": n + 1})


def make_batcher(observation, action, agent, info_keys=("t", "deep/height"), **settings):
    """A batcher without processes, of as many environments as memories have lanes."""
    spaces = OBSERVATIONS[observation], ACTIONS[action]

    def make_env(seed):
        return GymEnvInf([Env(*spaces) for _ in range(N_LANES)], seed, info_keys=list(info_keys))

    made = None if agent == "plain" else Rich(spaces[1], agent == "history")
    return RL_Batcher.make(make_env, made or RandomAgent(spaces[1]), n_envs=N_LANES, n_workers=0, n_timesteps=6,
                           seed=0, **settings)  # fmt: skip


def outcome(call):
    """The result of a call, or what it raises about keys and shapes."""
    try:
        return call()
    except (SpecError, MissingKeyError) as error:
        return type(error)


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_a_fed_memory_of_every_surface_has_the_columns_of_add_trajectories(case):
    n_compared = 0
    with make_batcher(*case) as batcher:
        batcher.reset()
        for parameter in EVERY_SURFACE:
            [surface] = parameter.values
            if parameter.marks or not hasattr(surface.make(), "make_feed"):
                continue  # it needs a GPU, or is a part of a RayReplay
            fed, other = surface.make(), surface.make()
            took = outcome(lambda memory=fed: batcher.feed(memory))
            for _ in range(2):
                batcher.execute()
                trajectories = batcher.get()[0]
                added = outcome(lambda memory=other, batch=trajectories: memory.add_trajectories(batch))
                assert added == took, parameter.id  # both fit, or neither does
            batcher.feed(None)
            for store, theirs in zip(surface.stores(fed), surface.stores(other), strict=True):
                mine, its = store.columns.specs, theirs.columns.specs
                assert {name: spec for name, spec in mine.items() if name != POLICY_VERSION} == its, parameter.id
                assert_equal(contents(store), contents(theirs), {POLICY_VERSION})
                n_compared += took is None
    assert n_compared >= 10


@pytest.mark.parametrize("make", [
    lambda: RandomMemory(60, N_LANES, device="cpu", seed=0), lambda: VectorReplayBuffer(60 * N_LANES, N_LANES),
    lambda: DictTensorReplayBuffer(generator=0),
], ids=["RandomMemory", "VectorReplayBuffer", "DictTensorReplayBuffer"])  # fmt: skip
def test_rollouts_added_to_a_memory_that_was_fed_have_their_policy_version_too(make):
    memory = make()
    with make_batcher("Box", "Discrete", "plain") as batcher:
        batcher.reset()
        for version in range(4):
            batcher.feed(memory if version % 2 == 0 else None)
            batcher.execute()
            batcher.wait() if version % 2 == 0 else memory.add_trajectories(batcher.get()[0])
            batcher.update({})
    store = memory._storage
    [versions] = store.gather([POLICY_VERSION], np.sort(store.view().every_row()))
    assert np.unique(versions, return_counts=True)[1].tolist() == [6 * N_LANES] * 4


def test_a_mapping_may_name_the_policy_version_of_what_is_added():
    memory = RandomMemory(60, N_LANES, device="cpu", seed=0)
    with make_batcher("Box", "Discrete", "plain") as batcher:
        [trajectories] = batcher.rollouts(n_steps=6 * N_LANES)
    memory.add_trajectories(trajectories, {"rewards": "_observation/reward", "version": "policy_version"})
    assert memory.get_tensor_by_name("version").dtype == torch.int64 and len(memory) == 6 * N_LANES
