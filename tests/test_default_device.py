"""`torch.set_default_device`, as trainings on a GPU set it: rollouts and replay are on the host all the same.

"meta" stands for any device that is not the host.
"""

from __future__ import annotations

import contextlib

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import create_gym

from rlstructs import (
    DictTensor,
    GymVectorEnv,
    NormalizeObservation,
    RandomAgent,
    RL_Batcher,
    gae,
    transitions,
)
from rlstructs.memories.torch import PrioritizedMemory, RandomMemory
from rlstructs.replay import (
    DictTensorPrioritizedReplayBuffer,
    DictTensorReplayBuffer,
    ListStorage,
    PrioritizedVectorReplayBuffer,
    SliceSampler,
)

ELSEWHERE = {"host": contextlib.nullcontext, "elsewhere": lambda: torch.device("meta")}


class Recalls(RandomAgent):
    """Acts at random, asks for its history, and tells what it was given; its weights are on the host."""

    def __init__(self, action_space):
        super().__init__(action_space)
        self.given = {"a": torch.zeros(2, device="cpu")}

    def require_history(self):
        return True

    def __call__(self, state, observation, agent_info, history=None):
        output, state = super().__call__(state, observation, agent_info)
        assert history.lengths.device.type == "cpu"
        return output.set("given", self.given["a"].expand(output.n_elems(), 2)), state

    def update(self, info):
        self.given = info


def create_cartpoles(seed, n_envs=2):
    return NormalizeObservation(create_gym("CartPole-v1", n_envs, seed))


def create_native(seed, n_envs=2):
    return GymVectorEnv(gymnasium.make_vec("CartPole-v1", n_envs, "vector_entry_point"), seed)


def collected(where, n_processes, create_env, create_agent):
    """What a batcher hands out, in every way there is."""
    torch.manual_seed(0)
    given = {"agent_seeds": [7] * max(1, n_processes), "agent_info": DictTensor({"e": torch.zeros(1, device="cpu")})}
    space = {"action_space": spaces.Discrete(2)}
    with where(), RL_Batcher(6, create_agent, space, create_env, {}, n_processes, 0, **given) as batcher:
        batcher.reset(agent_info=DictTensor({"e": torch.ones(batcher.n_elems(), device="cpu")}))
        found = []
        for _ in range(4):
            batcher.update({"a": torch.full((2,), 3.0, device="cpu"), "none": torch.zeros(0, device="cpu")})
            batcher.execute()
            found.append(batcher.get()[0])
        batcher.execute()
        found.append(batcher.get(out=found[0].clone())[0])
        batcher.execute()
        with batcher.lease() as (leased, _):
            found.append(leased.clone())
        found += [batcher.evaluate(4, 3), batcher.episodes()]
        batcher.load_state_dict(batcher.state_dict())
        return found


@pytest.mark.parametrize("create_agent", [RandomAgent, Recalls])
@pytest.mark.parametrize("n_processes", [0, 2])
def test_a_batcher_collects_on_the_host(n_processes, create_agent):
    there = collected(ELSEWHERE["elsewhere"], n_processes, create_cartpoles, create_agent)
    assert there == collected(ELSEWHERE["host"], n_processes, create_cartpoles, create_agent)


def test_a_native_vector_environment_is_stepped_on_the_host():
    there = collected(ELSEWHERE["elsewhere"], 0, create_native, RandomAgent)
    assert there == collected(ELSEWHERE["host"], 0, create_native, RandomAgent)


@pytest.mark.parametrize("space", [
    spaces.Box(-1, 1, (2,)), spaces.Box(0, np.inf, (2,)), spaces.Box(0, 255, (3,), np.uint8), spaces.MultiBinary(3),
    spaces.Box(-np.inf, np.inf, (2,), np.float64), spaces.MultiDiscrete([3, 2**40]), spaces.Discrete(3, start=-1),
], ids=str)  # fmt: skip
def test_random_actions_are_on_the_host(space):
    with torch.device("meta"):
        output, _ = RandomAgent(space)(DictTensor({}), DictTensor({"x": torch.zeros(5, device="cpu")}), DictTensor({}))
    actions = output["action"]
    assert actions.device.type == "cpu" and all(space.contains(each.astype(space.dtype)) for each in actions.numpy())


def of_a_memory(trajectories):
    memory = PrioritizedMemory(memory_size=20, num_envs=4, device="cpu")
    memory.add_trajectories(trajectories)
    found = memory.sample(memory.get_tensor_names(), 8, n_step=2)[0]
    memory.update_priorities(memory.get_sampling_indexes(), torch.ones(8, device="cpu"))
    plain = RandomMemory(memory_size=2, device="cpu")
    plain.create_tensor("rewards", 1)
    plain.add_samples(rewards=torch.ones(1, 1, device="cpu"))
    return [*found, *plain.sample_all(["rewards"])[0]]


def of_rows(buffer, trajectories, n=8):
    buffer.add_trajectories(trajectories)
    batch = buffer.sample(n)
    return batch if isinstance(batch, DictTensor) else batch[0]


def of_returns(steps):
    values = steps["rewards"] * 2
    return list(gae(values=values, next_values=values, gamma=0.9, lambda_=0.9, **steps))


REPLAYS = {
    "memories": of_a_memory,
    "torchrl": lambda t: of_rows(
        DictTensorPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=ListStorage(99), n_step=2), t
    ),
    "slices": lambda t: of_rows(DictTensorReplayBuffer(storage=ListStorage(99), sampler=SliceSampler(slice_len=2)), t),
    "tianshou": lambda t: of_rows(
        PrioritizedVectorReplayBuffer(99, 4, alpha=0.6, beta=0.4, n_step=2, stack_num=2, framework="torch"), t
    ),
    "sampled": lambda t: t.sample(2),
    "returns": lambda t: of_returns(transitions(t)),
}


@pytest.mark.parametrize("replay", REPLAYS)
def test_replay_is_on_the_host(replay):
    found = {}
    for name, where in ELSEWHERE.items():
        trajectories = collected(contextlib.nullcontext, 0, create_cartpoles, RandomAgent)[0]
        torch.manual_seed(1)
        with where():
            found[name] = REPLAYS[replay](trajectories)
    if isinstance(found["host"], list):
        assert all(map(torch.equal, found["host"], found["elsewhere"]))
    else:
        assert found["host"] == found["elsewhere"]
