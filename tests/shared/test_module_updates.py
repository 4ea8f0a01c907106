"""`update(module)` sends what the module's plain twin has, whatever wraps the module, or parts of it."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
from helpers import create_gym, rollout
from torch.nn.utils import parametrizations

from rlstructs import DictTensor, RL_Agent, RL_Batcher, SpecError
from rlstructs.shared.module_state import plain_state
from rlstructs.shared.weights import Inbox, LocalOutbox, Packer, Parcel

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


def state_dicts():
    """Flat dicts of tensors, and what nearly is one, many of which differ in one thing alone."""
    shared, x = torch.arange(3.0), torch.randn(2, 3)
    versions = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).state_dict()
    others = copy.deepcopy(versions)
    others._metadata["1"]["version"] = 1
    yield from ({"a": x}, {"a": x + 1}, {"b": x}, {"a": x.double()}, {"a": x[:1]}, {"a": torch.nn.Parameter(x)})
    yield from ({"a": x.clone().requires_grad_()}, {"a": x.T}, {"a": x, "b": x[:0]}, {"a": x[:0], "b": x}, {})
    yield from ({"a": shared, "b": shared}, {"a": shared, "b": shared.clone()}, {"a": x, "n": 3}, {1: x})
    yield from ({"a": {"b": x}}, [x], x, None, versions, others, OrderedDict(versions), dict(versions))
    yield from ({"a": x.bfloat16()}, {"a": torch.nn.Buffer(x)}, {"a": x.to_sparse()})
    yield from ({"b": x, "a": x + 1}, {"a": x, "b": x + 1})


def test_a_kept_pickle_gives_what_a_new_one_gives():
    packer = Packer()
    for first in state_dicts():
        for info in (first, first, *state_dicts(), first):
            wanted, found = Parcel.of(info), packer.pack(info)
            assert (found.nbytes, found.pickled) == (wanted.nbytes, wanted.pickled)
            for (place, tensor), (other, same) in zip(found.tensors, wanted.tensors, strict=True):
                assert place == other and torch.equal(tensor, same) and tensor.dtype == same.dtype


def test_an_update_in_this_process_is_the_agents_own_and_is_kept_as_it_was():
    outbox, inbox = LocalOutbox(), Inbox(None)
    assert outbox.read_last() is None
    for number in range(1, 6):
        info = {"a": torch.full((3,), float(number)), "n": number, "e": torch.zeros(0)}
        packed = outbox.pack(info)
        info["a"] += 100
        outbox.record_sent(packed, [])
        outbox.pack({"a": torch.zeros(3), "n": 0, "e": torch.zeros(0)})  # was not sent
        for _ in range(2):
            found = inbox.unpack(packed)
            assert found["a"].tolist() == [number] * 3 and found["n"] == number == inbox.version == outbox.version
            found["a"] += 100
        assert inbox.held_versions() == ()
    other = LocalOutbox()
    assert inbox.unpack(other.pack(outbox.read_last()))["a"].tolist() == [5] * 3
