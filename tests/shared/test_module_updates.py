"""`update(module)` sends what the module's plain twin has, whatever wraps the module, or parts of it."""

from __future__ import annotations

import pytest
import torch
from helpers import create_gym, rollout
from torch.nn.utils import parametrizations

from rlstructs import DictTensor, RL_Agent, RL_Batcher, SpecError
from rlstructs.shared.module_state import plain_state

# Of torch's own modules, which the first compilation imports.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit")


def network():
    """Linear layers at two depths, and buffers."""
    parts = torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Sequential(torch.nn.Linear(3, 2))
    return torch.nn.Sequential(*parts)


class Plain(RL_Agent):
    """Has the network itself, and puts out the sum of its numbers."""

    def __init__(self):
        self.network = network()

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        B = observation.n_elems()
        total = sum(tensor.double().sum() for tensor in self.network.state_dict().values())
        return DictTensor({"action": torch.zeros(B, dtype=torch.int64), "total": total.expand(B)}), state

    def update(self, info):
        self.network.load_state_dict(info)


def with_part(wrapper):
    """A wrapper of one part of a network in place of the whole."""

    def wrap(module):
        module[2] = wrapper(module[2])
        return module

    return wrap


compiled, parallel = torch.compile, torch.nn.DataParallel
WRAPPERS = {
    "none": lambda module: module,
    "compiled": compiled,
    "compiled in place": lambda module: (module.compile(), module)[1],
    "parallel": parallel,
    "averaged": torch.optim.swa_utils.AveragedModel,
    "scripted": torch.jit.script,
    "traced": lambda module: torch.jit.trace(module.eval(), torch.zeros(2, 4)),
    "a compiled part": with_part(compiled),
    "a parallel part": with_part(parallel),
    "both, and parts of it": lambda module: parallel(compiled(with_part(lambda p: parallel(compiled(p)))(module))),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_the_state_of_a_wrapped_module_is_that_of_its_plain_twin(wrap):
    module = network()
    expected = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    state = plain_state(wrap(module))
    assert list(state) == list(expected)
    assert all(torch.equal(state[key], expected[key]) for key in expected)
    assert not any(tensor.requires_grad for tensor in state.values())
    network().load_state_dict(state)


@pytest.mark.parametrize("name", ["spectral_norm", "weight_norm", "orthogonal"])
def test_parametrisations_are_applied_and_left_as_they_are(name):
    module = getattr(parametrizations, name)(torch.nn.Linear(4, 3))
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    twin = torch.nn.Linear(4, 3)
    twin.load_state_dict(plain_state(compiled(torch.nn.Sequential(parallel(module))[0])))
    assert module.training and all(part.training for part in module.modules())
    assert all(torch.equal(tensor, before[key]) for key, tensor in module.state_dict().items())
    observation = torch.randn(5, 4)
    torch.testing.assert_close(twin(observation), module.eval()(observation))


def test_names_that_are_the_users_own_stay():
    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.module, self.nothing = torch.nn.Linear(1, 1), None
            self.again = self.module
            self.parametrizations = torch.nn.ModuleDict({"weight": torch.nn.Linear(1, 1)})

    assert list(plain_state(Own())) == list(Own().state_dict())
    assert list(plain_state(compiled(Own()))) == list(Own().state_dict())


@pytest.mark.parametrize("n_processes", [0, 2])
@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("wrap", [compiled, parallel, with_part(compiled)], ids=["compiled", "parallel", "a part"])
def test_a_wrapped_module_can_be_sent(n_processes, run_ahead, wrap):
    learner = network()
    total = sum(tensor.double().sum() for tensor in learner.state_dict().values())
    with batcher_of(n_processes, run_ahead=run_ahead) as batcher:
        batcher.update(wrap(learner))
        batcher.reset()
        assert set(rollout(batcher)[0].trajectories["action/total"].flatten().tolist()) == {total.item()}


@pytest.mark.parametrize("n_processes", [0, 1])
@pytest.mark.parametrize(
    ("state", "words"),
    [
        (lambda: compiled(network()).state_dict(), "a compiled module .it has '_orig_mod.0.weight'"),
        (lambda: parallel(network()).state_dict(), "a wrapped module .it has 'module.2.0.bias'"),
        (lambda: with_part(compiled)(network()).state_dict(), "a compiled module .it has '2._orig_mod.0.weight'"),
    ],
    ids=["compiled", "parallel", "a part"],
)  # fmt: skip
def test_a_state_dict_that_names_the_wrapper_is_refused_by_an_error_that_names_what_to_call(n_processes, state, words):
    told = rf"^update: the agent could not take the state dict of {words}.*: call update\(module\), which sends the "
    with batcher_of(n_processes) as batcher:
        with pytest.raises(SpecError, match=f"{told}.*The agent raised RuntimeError: Error"):
            batcher.update(state())


class Compiling(Plain):
    """Has a compiled network too."""

    def __init__(self):
        self.network = compiled(network())


def test_an_agent_that_takes_the_names_of_a_wrapper_goes_on_to_get_them():
    learner = compiled(network())
    total = sum(tensor.double().sum() for tensor in learner.state_dict().values())
    with batcher_of(1, Compiling) as batcher:
        batcher.update(learner.state_dict())
        batcher.reset()
        assert set(rollout(batcher)[0].trajectories["action/total"].flatten().tolist()) == {total.item()}


def batcher_of(n_processes, create_agent=Plain, **arguments):
    settings = {"env_id": "CartPole-v1", "n_envs": 2}
    return RL_Batcher(2, create_agent, {}, create_gym, settings, n_processes, 0, **arguments)
