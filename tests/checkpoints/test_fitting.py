"""A state that an object refuses changes nothing; one that it adapts to is restored."""

from __future__ import annotations

import re

import pytest
import torch

from rlstructs import Checkpoint, FileError, SpecError
from rlstructs.memories.torch import RandomMemory

L = torch.optim.lr_scheduler


class Picky:
    """Loads a state only if its number is even, and notes it before it looks."""

    def __init__(self, number):
        self.number = number

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]
        if self.number % 2:
            raise ValueError("an odd number")


class Linear(torch.nn.Module):
    """Has a layer that was called `old` in an earlier version of it."""

    def __init__(self):
        super().__init__()
        self.new = torch.nn.Linear(2, 2)

    def _load_from_state_dict(self, state, prefix, *others):
        for key in ("weight", "bias"):
            if f"{prefix}old.{key}" in state:
                state[f"{prefix}new.{key}"] = state.pop(f"{prefix}old.{key}")
        super()._load_from_state_dict(state, prefix, *others)


class Seen(torch.nn.Module):
    """Has a buffer that grows."""

    def __init__(self, n):
        super().__init__()
        self.register_buffer("seen", torch.arange(n))

    def _load_from_state_dict(self, state, prefix, *others):
        self.seen = torch.zeros_like(state[f"{prefix}seen"])
        super()._load_from_state_dict(state, prefix, *others)


def trained(make_optimizer, n_in=2, value=1.0):
    """A network and its optimizer after a step."""
    model = torch.nn.Linear(n_in, 3)
    torch.nn.init.constant_(model.weight, value)
    optimizer = make_optimizer(model.parameters())
    model(torch.ones(1, n_in)).sum().backward()
    optimizer.step()
    return model, optimizer


def in_turn(optimizer, n):
    return L.SequentialLR(optimizer, [L.ConstantLR(optimizer) for _ in range(n)], [3 * i for i in range(1, n)])


def scaler(enabled):
    return torch.amp.GradScaler("cpu", enabled=enabled)


@pytest.mark.parametrize(
    ("make", "label"),
    [
        (lambda optimizer, is_saved: {"optimizer": {"z": scaler(not is_saved)}}, "optimizer.z.pt: optimizer/z"),
        (lambda optimizer, is_saved: {"optimizer": {"z": in_turn(optimizer, 3 if is_saved else 2)}},
         "optimizer.z.pt: optimizer/z"),
        (lambda optimizer, is_saved: {"model": {"z": Picky(3 if is_saved else 4)}}, "model.z.pt: model/z"),
        (lambda optimizer, is_saved: {"extra": {"n": 1 - is_saved, "z": Picky(3 if is_saved else 4)}},
         "extra.pt: extra['z']"),
    ],
)  # fmt: skip
def test_what_was_restored_before_an_error_is_put_back(make, label, tmp_path):
    def training(is_saved):
        model, optimizer = trained(torch.optim.Adam, value=float(is_saved))
        memory = RandomMemory(memory_size=5, num_envs=1, device="cpu", seed=0)
        memory.create_tensor("x", 1)
        memory.add_samples(x=torch.full((1, 1), float(is_saved)))
        given = {"model": {"a": model}, "optimizer": {"a": optimizer}}
        for name, each in make(optimizer, is_saved).items():
            given[name] = {**given.get(name, {}), **each}
        return given, memory

    given, memory = training(True)
    Checkpoint(tmp_path, memory=memory, **given).save(1)
    given, memory = training(False)
    states = [each for of in given.values() for each in of.values() if hasattr(each, "state_dict")]

    def take():
        number = given.get("extra", {}).get("n")
        return repr([each.state_dict() for each in states]), torch.get_rng_state().tolist(), number

    before = take()
    with pytest.raises(FileError, match=re.escape(f"{label} refuses its state: ")) as found:
        Checkpoint(tmp_path, memory=memory, **given).restore()
    assert type(found.value.__cause__) in (RuntimeError, IndexError, ValueError)
    assert take() == before and memory.get_tensor_by_name("x")[0] == 0.0


def test_a_state_of_another_optimizer_is_refused(tmp_path):
    def momentum(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    for name, make, words in (
        ("class", momentum, r"optimizer is another optimizer: it has \['betas'\], this one has \['momentum'\]"),
        ("shape", torch.optim.Adam, r"of another network: 'exp_avg' of parameter 0 is \(3, 2\), .* is \(3, 4\)"),
    ):
        Checkpoint(tmp_path / name, optimizer=trained(torch.optim.Adam)[1], rng=False).save(1)
        other = trained(make, n_in=4)[1]
        before = repr(other.state_dict())
        with pytest.raises(FileError, match=words):
            Checkpoint(tmp_path / name, optimizer=other, rng=False).restore()
        assert repr(other.state_dict()) == before


@pytest.mark.parametrize(
    "name", ["Adadelta", "Adafactor", "Adagrad", "Adamax", "ASGD", "LBFGS", "NAdam", "RMSprop", "Rprop"]
)
def test_every_optimizer_loads_its_own_state(name, tmp_path):
    def make():
        model = torch.nn.Linear(2, 3)
        optimizer = getattr(torch.optim, name)(model.parameters())
        L.OneCycleLR(optimizer, 0.1, 10, cycle_momentum=False)  # adds settings

        def loss():
            optimizer.zero_grad()
            value = model(torch.ones(1, 2)).square().sum()
            value.backward()
            return value

        optimizer.step(loss)
        return optimizer

    Checkpoint(tmp_path, optimizer=(saved := make())).save(1)
    assert Checkpoint(tmp_path, optimizer=(again := make())).restore() == 1
    assert repr(again.state_dict()) == repr(saved.state_dict())


def test_a_module_that_adapts_an_old_state_loads_it(tmp_path):
    old, new = torch.nn.ModuleDict({"old": torch.nn.Linear(2, 2)}), Linear()
    Checkpoint(tmp_path, model={"layer": old, "seen": Seen(5)}).save(1)
    seen = Seen(0)
    assert Checkpoint(tmp_path, model={"layer": new, "seen": seen}).restore() == 1
    assert torch.equal(new.new.weight, old["old"].weight) and seen.seen.tolist() == [0, 1, 2, 3, 4]


def test_a_lazy_module_is_saved_once_it_has_its_shape(tmp_path):
    model, again = torch.nn.LazyLinear(2), torch.nn.LazyLinear(2)
    checkpoint = Checkpoint(tmp_path, model=model)
    with pytest.raises(SpecError, match=r"model\['weight'\] has no shape yet"):
        checkpoint.save(1)
    model(torch.ones(1, 3))
    checkpoint.save(1)
    Checkpoint(tmp_path, model=again).restore()
    assert torch.equal(again.weight, model.weight)
