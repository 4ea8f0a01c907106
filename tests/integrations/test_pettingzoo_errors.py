"""What `ParallelEnvs` cannot hold, and environments that break PettingZoo's rules, give an error that names them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from guests import Guests
from gymnasium import spaces
from helpers import Counting, rollout
from mpe2 import simple_speaker_listener_v4, simple_spread_v3

from rlstructs import DictTensor, RL_Batcher
from rlstructs.errors import SpecError, StateError
from rlstructs.integrations.pettingzoo import ParallelEnvs


class Odd(Guests):
    """Breaks a rule of PettingZoo from its third step on."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def step(self, actions):
        result = super().step(actions)
        return self.change(self, result) if self.t == 1 else result


def without(place):
    return lambda env, result: [{} if number == place else part for number, part in enumerate(result)]


def join(env, result):
    env.agents = [*env.agents, "stranger"]
    return result


ODD = {
    "4 values": (lambda env, result: result[:4], r"environment \(guests_v0\): step must give 5 values"),
    "no observation": (without(0), r"environment 0 \(guests_v0\): step gave no observation of agent 'a', only of \[\]"),
    "no reward": (without(1), "step gave no reward of agent 'a'"),
    "no flag": (without(3), "step gave no truncated of agent 'a'"),
    "a list": (lambda env, result: [[], *result[1:]], "step must give observation as a dict by agent, got list"),
    "a stranger": (join, r"agents has \['stranger'\], which possible_agents lacks"),
    "a wrong shape": (
        lambda env, result: [dict.fromkeys(result[0], np.zeros(2, np.float32)), *result[1:]],
        r"environment 0 \(agent 'a'\): observation has shape \(2,\), the space says \(3,\)",
    ),
    "a wrong reward": (
        lambda env, result: [result[0], dict.fromkeys(result[1], "x"), *result[2:]],
        r"environment 0 \(agent 'a'\): reward must be a number, got 'x'",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_a_rule_that_a_step_breaks_is_named(name):
    change, words = ODD[name]
    env = ParallelEnvs([lambda: Odd(change)], 0)
    env.reset()
    with pytest.raises(SpecError, match=words):
        env.step(DictTensor({"action": torch.zeros(3, dtype=torch.int64)}))


def test_a_reset_that_begins_nothing_is_named():
    class Empty(Guests):
        def _there(self):
            return []

    with pytest.raises(SpecError, match=r"reset began no episode: the environment's agents are \[\]"):
        ParallelEnvs([Empty], 0).reset()


def test_an_error_of_an_environment_says_which_one_raised_it():
    def fail(env, result):
        raise ZeroDivisionError

    env = ParallelEnvs([Guests, lambda: Odd(fail)], 0)
    env.reset()
    with pytest.raises(ZeroDivisionError) as caught:
        env.step(DictTensor({"action": torch.zeros(6, dtype=torch.int64)}))
    assert "raised by environment 1 (guests_v0) in step" in caught.value.__notes__


SHARED = Guests()


class Wider(Guests):
    def observation_space(self, agent):
        return spaces.Box(-1e6, 1e6, (4,), np.float32)


@pytest.mark.parametrize(
    ("makers", "error", "words"),
    [
        ([simple_speaker_listener_v4.parallel_env], SpecError,
         r"observation_space of agent 'listener_0' is Box\(.*\(11,\).*, that of 'speaker_0' in environment 0 is "
         r"Box\(.*\(3,\).*SuperSuit's pad_observations_v0 and pad_action_space_v0"),
        ([Guests, Wider], SpecError, r"environment 1 \(guests_v0\): observation_space of agent 'a' is"),
        ([Guests, simple_spread_v3.parallel_env], SpecError, "has the agents .*'agent_0'.*, environment 0 .*'a'"),
        ([], SpecError, "needs at least one function that makes an environment"),
        (Guests, TypeError, r"needs a list of functions .*, got type: put it into a list, \[make\]"),
        ([Guests()], TypeError, "number 0 must be a function that makes a PettingZoo environment, .* got Guests"),
        ([dict], TypeError, "such as simple_spread_v3.parallel_env, it made dict"),
        ([lambda: SHARED] * 2, SpecError, "number 1 made an environment that another made"),
    ],
)  # fmt: skip
def test_what_one_batch_cannot_hold_is_refused(makers, error, words):
    with pytest.raises(error, match=words):
        ParallelEnvs(makers, 0)


def test_wrong_arguments_are_named():
    with pytest.raises(SpecError, match="reset_at must be 'step', 'rollout' or 'reset', got 'never'"):
        ParallelEnvs([Guests], 0, reset_at="never")
    with pytest.raises(SpecError, match="'agent_index' is recorded always"):
        ParallelEnvs([Guests], 0, info_keys=["agent_index"])
    with pytest.raises(StateError, match="call reset first"):
        ParallelEnvs([Guests], 0).step(DictTensor({"action": torch.zeros(3, dtype=torch.int64)}))


def test_options_and_infos_are_those_of_each_agent():
    env = ParallelEnvs([Guests, Guests], 0, info_keys={"t": np.int64, "option": np.int64})
    env.reset(DictTensor({"option": torch.tensor([4, 4, 4, 5, 5, 5])}))
    for _ in range(8):
        (after, _), (following, _) = env.step(DictTensor({"action": torch.zeros(6, dtype=torch.int64)}))
        acted = ~after["initial_state"]
        assert set(after["info/option"][:3][acted[:3]].tolist()) == {4}
        assert (following["info/t"] == 0)[after["done"] & following["initial_state"]].all()
        assert after["info/agent_index"].tolist() == [0, 1, 2, 0, 1, 2]
    with pytest.raises(SpecError, match="rows of environment 0 must be equal for all its agents, got .*4.* and .*5"):
        env.reset(DictTensor({"option": torch.tensor([4, 4, 5, 5, 5, 5])}))


def test_an_evaluation_plays_as_many_episodes_of_each_agent():
    def create_env(seed):
        return ParallelEnvs([Guests], seed)

    with RL_Batcher(8, Counting, {}, create_env, {}, 0, [0]) as batcher:
        batcher.reset()
        rollout(batcher)
        assert sorted(batcher.evaluate(6, 1)["env_index"].tolist()) == [0, 0, 1, 1, 2, 2]
