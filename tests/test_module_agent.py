"""`ModuleAgent`: actions of every kind of space, drawn from the policy that the network gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.distributions import Categorical, Normal

from rlstructs import DictTensor, ModuleAgent, SpecError
from rlstructs.shared.module_state import plain_state

N = 2000


class Constant(torch.nn.Module):
    """The same output in every row; keeps its last input."""

    def __init__(self, row, wrap=lambda output: output):
        super().__init__()
        self.row, self.wrap = torch.nn.Parameter(torch.as_tensor(row, dtype=torch.float32)), wrap

    def forward(self, inputs):
        self.inputs = inputs
        n = len(next(iter(inputs.values())) if isinstance(inputs, dict) else inputs)
        return self.wrap(self.row.expand(n, *self.row.shape))


def act(module, space, observation=None, **settings):
    torch.manual_seed(0)
    agent = ModuleAgent(module, space, **settings)
    observation = {"frame": torch.zeros(N, 3)} if observation is None else observation
    with torch.no_grad():
        output, state = agent(DictTensor(), DictTensor(observation), DictTensor())
    assert state == DictTensor() == agent.initial_state(DictTensor(), N)
    return agent, output


@pytest.mark.parametrize(
    ("space", "row", "probabilities"),
    [
        (spaces.Discrete(3), [0.0, 1.0, 2.0], [[0, 1, 2]]),
        (spaces.Discrete(3, start=-1), [0.0, 1.0, 2.0], [[-1, 0, 1]]),
        (spaces.MultiDiscrete([2, 3]), [0.0, 1.0, 0.0, 1.0, 2.0], [[0, 1], [0, 1, 2]]),
        (spaces.MultiDiscrete([2, 3], start=[5, 7]), [0.0, 1.0, 0.0, 1.0, 2.0], [[5, 6], [7, 8, 9]]),
    ],
)
def test_numbers_are_drawn_by_their_logits(space, row, probabilities):
    _, output = act(Constant(row), space)
    actions = output["action"].reshape(N, -1)
    log_prob, first = torch.zeros(N, dtype=torch.float64), 0
    for column, values in enumerate(probabilities):
        wanted = torch.tensor(row[first : first + len(values)], dtype=torch.float64).softmax(0)
        first += len(values)
        for value, share in zip(values, wanted, strict=True):
            is_it = actions[:, column] == value
            assert abs(is_it.double().mean() - share) < 0.05
            log_prob[is_it] += share.log()
    assert all(space.contains(np.asarray(action, space.dtype).reshape(space.shape)) for action in output["action"])
    torch.testing.assert_close(output["log_prob"].double(), log_prob, atol=1e-5, rtol=0)


def test_bits_are_drawn_one_by_one():
    _, output = act(Constant([-100.0, 100.0, 0.0]), spaces.MultiBinary(3))
    assert output["action"].dtype == torch.int8
    shares = output["action"].float().mean(0)
    assert shares[:2].tolist() == [0, 1] and abs(shares[2] - 0.5) < 0.05
    torch.testing.assert_close(output["log_prob"], torch.full((N,), 0.5).log(), atol=1e-5, rtol=0)


def test_a_tensor_for_a_box_is_the_action():
    _, output = act(Constant([0.5, -0.5]), spaces.Box(-1, 1, (2,)))
    assert set(output.keys()) == {"action"} and output["action"][7].tolist() == [0.5, -0.5]


@pytest.mark.parametrize("event_dims", [0, 1])
def test_a_distribution_is_drawn_from(event_dims):
    def wrap(mean):
        return torch.distributions.Independent(Normal(mean, 0.1), event_dims)

    _, output = act(Constant([0.5, -0.5], wrap), spaces.Box(-1, 1, (2,)))
    action = output["action"]
    assert abs(action.mean(0) - torch.tensor([0.5, -0.5])).max() < 0.02 and abs(action.std() - 0.51).max() < 0.05
    wanted = Normal(torch.tensor([0.5, -0.5]), 0.1).log_prob(action).sum(1)
    torch.testing.assert_close(output["log_prob"], wanted)
    _, output = act(Constant([0.0, 100.0], lambda logits: Categorical(logits=logits)), spaces.Discrete(2, start=4))
    assert (output["action"] == 5).all()


def test_a_network_gets_the_frame_or_a_dict_of_entries():
    module = Constant([0.0, 0.0])
    agent, _ = act(module, spaces.Discrete(2))
    assert agent.module.inputs.shape == (N, 3)
    space = spaces.Dict({"frame": spaces.Box(-1, 1, (3,)), "more": spaces.Dict({"n": spaces.Discrete(4)})})
    given = {"frame": torch.zeros(N, 3), "more/n": torch.zeros(N, 1), "reward": torch.zeros(N)}
    agent, _ = act(module, spaces.Discrete(2), given, observation_space=space)
    assert set(agent.module.inputs) == {"frame", "more/n"}


def compiled(module):
    return torch.compile(module, backend="eager")


def weight_norm(module):
    return torch.nn.utils.parametrizations.weight_norm(module)


@pytest.mark.parametrize("wrap", [compiled, torch.nn.DataParallel, weight_norm, lambda module: module])
def test_wrapped_networks_are_copied_plain_and_updated_as_the_batcher_sends_them(wrap):
    network = torch.nn.Sequential(wrap(torch.nn.Linear(3, 2)))
    agent, _ = act(network, spaces.Discrete(2))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 1
    agent.update(plain_state(network))
    inputs, plain = torch.randn(5, 3), torch.nn.Linear(3, 2)
    plain.load_state_dict({name.removeprefix("0."): value for name, value in plain_state(network).items()})
    assert not any(a is b for a in agent.module.parameters() for b in network.parameters())
    with torch.no_grad():
        torch.testing.assert_close(agent.module(inputs), plain(inputs))


@pytest.mark.parametrize(
    ("space", "row", "message"),
    [
        (spaces.Discrete(3), [0.0, 1.0], r"must return a tensor \(2000, 3\) or a distribution for Discrete\(3\), got"),
        (spaces.MultiDiscrete([2, 3]), [0.0], r"a tensor \(2000, 5\)"),
        (spaces.Box(-1, 1, (2,)), [0.0], r"a tensor \(2000, 2\)"),
    ],
)
def test_an_output_of_another_shape_is_refused(space, row, message):
    with pytest.raises(SpecError, match=message):
        act(Constant(row), space)


def test_what_the_network_was_called_with_is_named():
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        act(torch.nn.Linear(9, 3), spaces.Discrete(3))
    assert caught.value.__notes__ == ["the module of the agent was called with observations (2000, 3) float32"]
    with pytest.raises(SpecError, match="got tuple; compute values and what else there is in the trainer"):
        act(torch.nn.GRU(3, 3), spaces.Discrete(3))


def test_what_is_no_network_or_no_supported_space_is_refused():
    with pytest.raises(TypeError, match=r"module must be a torch.nn.Module, got function"):
        ModuleAgent(lambda inputs: inputs, spaces.Discrete(2))
    with pytest.raises(SpecError, match=r"must be one of Discrete, MultiDiscrete, MultiBinary, Box, got Dict"):
        ModuleAgent(torch.nn.Identity(), spaces.Dict({"a": spaces.Discrete(2)}))
