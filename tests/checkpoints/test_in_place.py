"""Values of `extra` are written into the objects that the program has, which others may hold too."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, deque

import numpy as np
import pytest
import torch

from rlstructs import Checkpoint, FileError

# How a value lies in `extra`.
NESTINGS = {
    "itself": lambda x: x, "list": lambda x: [0, x], "tuple": lambda x: (x, "a"), "dict": lambda x: {"a": {3: x}},
    "deque": lambda x: deque([x], 5), "ordered": lambda x: OrderedDict(b=[x]), "keys": lambda x: {(1, "a"): [x]},
    "twice": lambda x: {"a": [x], "b": [x]}, "twice a list": lambda x: dict.fromkeys("ab", [x]),  # noqa: RUF024
}  # fmt: skip
LEARNED = {
    "parameter": lambda: torch.nn.Parameter(torch.zeros(2, 3)),
    "leaf": lambda: torch.zeros(3, dtype=torch.float64, requires_grad=True),
    "frozen": lambda: torch.nn.Parameter(torch.zeros(1), requires_grad=False),
    "transposed": lambda: torch.nn.Parameter(torch.zeros(3, 2).T),
}


def save(folder, extra, **others):
    checkpoint = Checkpoint(folder, extra=extra, rng=False, **others)
    checkpoint.save(1)
    checkpoint.close()


def restore(folder, extra, **others):
    return Checkpoint(folder, extra=extra, rng=False, **others).restore()


@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.parametrize("kind", LEARNED)
def test_a_learned_tensor_in_extra_is_the_one_that_its_optimizer_goes_on_with(kind, nesting, tmp_path):
    def program():
        learned = LEARNED[kind]()
        return learned, torch.optim.Adam([learned], lr=0.1), {"x": NESTINGS[nesting](learned)}

    def train(learned, optimizer):
        learned.grad = torch.full_like(learned, 2.0) + learned.detach()
        optimizer.step()

    learned, optimizer, extra = program()
    with torch.no_grad():
        learned += 5
    train(learned, optimizer)
    save(tmp_path, extra, optimizer=optimizer)
    train(learned, optimizer)
    again, its_optimizer, its_extra = program()
    assert restore(tmp_path, its_extra, optimizer=its_optimizer) == 1
    train(again, its_optimizer)
    assert torch.equal(again, learned) and again.requires_grad == learned.requires_grad and again.is_leaf
    assert its_optimizer.param_groups[0]["params"][0] is again
    assert repr(its_extra) == repr(extra)


@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.parametrize(
    "make",
    [lambda: np.zeros((2, 3)), lambda: np.zeros((2, 3), np.float32)[::-1, ::2], lambda: torch.zeros(2, 3).double(),
     lambda: torch.zeros(2, 6).double()[:, ::2], lambda: np.zeros((), bool), lambda: torch.tensor(False),
     lambda: torch.zeros(2, dtype=torch.bfloat16)],
)  # fmt: skip
def test_an_array_in_extra_stays_the_one_that_others_hold(make, nesting, tmp_path):
    held = make()
    held[...] = 1
    save(tmp_path, {"x": NESTINGS[nesting](held), "n": 3})
    held, extra = make(), {"n": 0}
    extra["x"] = NESTINGS[nesting](held)
    before = extra["x"]
    restore(tmp_path, extra)
    assert extra["x"] is before and extra["n"] == 3
    assert (held == 1).all() and repr(before) == repr(NESTINGS[nesting](held))


@pytest.mark.parametrize(
    ("empty", "full"),
    [([], [1, [2]]), ({}, {"a": 1}), (deque([9], 3), deque([1, 2], 3)), (set(), {1, 2}), (Counter("b"), Counter("aab")),
     (OrderedDict(c=1), OrderedDict(b=1, a=2))],
)  # fmt: skip
def test_a_collection_in_extra_stays_the_one_that_others_hold(empty, full, tmp_path):
    save(tmp_path, {"x": full, "y": {"of": (full, 1)}})
    extra = {"x": empty, "y": {"of": (other := empty.copy(), 2)}}
    restore(tmp_path, extra)
    assert extra["x"] is empty and extra["y"]["of"][0] is other and extra["y"]["of"][1] == 1
    assert repr(empty) == repr(other) == repr(full)


@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.parametrize(
    ("saved", "words"),
    [
        (torch.ones(3), r"is a Tensor of shape \(3,\) and float32, here a Parameter"),
        (torch.ones(2).double(), r"is a Tensor of shape \(2,\) and float64, here a Parameter"),
        (np.ones(2, np.float32), r"is a ndarray of shape \(2,\) and float32, here a Parameter"),
        (1.5, "is a float, here a Parameter"),
    ],
)
def test_what_does_not_fit_a_parameter_is_refused_and_nothing_changes(nesting, saved, words, tmp_path):
    save(tmp_path, {"a": np.ones(2), "p": NESTINGS[nesting](saved), "b": 1})
    held, parameter = np.zeros(2), torch.nn.Parameter(torch.zeros(2))
    extra = {"a": held, "p": NESTINGS[nesting](parameter), "b": 0}
    before = repr(extra)
    here = rf"{words} of shape \(2,\) and float32, which others may hold"
    with pytest.raises(FileError, match=rf"extra\.pt: extra\['p'\].* {here}: .* as model="):
        restore(tmp_path, extra)
    assert repr(extra) == before and extra["a"] is held


@pytest.mark.parametrize("saved", [None, {}, [], {"a": [0]}, (0, 0), deque(maxlen=5), {"a": [0], "b": [0, 0]}])
@pytest.mark.parametrize("nesting", [name for name in NESTINGS if name not in ("keys", "itself")])
def test_a_parameter_that_would_be_left_out_is_refused(nesting, saved, tmp_path):
    save(tmp_path, {"p": saved})
    extra = {"p": NESTINGS[nesting](torch.nn.Parameter(torch.zeros(2)))}
    before = repr(extra)
    with pytest.raises(FileError, match=r"extra\.pt: extra\['p'\].* here a Parameter of .* as model="):
        restore(tmp_path, extra)
    assert repr(extra) == before


def test_a_parameter_comes_back_as_one_where_there_is_none(tmp_path):
    save(tmp_path, {"x": [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(1), False)]})
    extra = {"x": None}
    restore(tmp_path, extra)
    assert [(type(each), each.requires_grad) for each in extra["x"]] == [
        (torch.nn.Parameter, True), (torch.nn.Parameter, False)
    ]  # fmt: skip


def read_only(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "own",
    [np.zeros(3), np.zeros(2, int), read_only(np.zeros(2)), np.broadcast_to(np.zeros(1), 2), torch.zeros(2), None, [0]],
)
def test_what_cannot_be_written_into_is_replaced(own, tmp_path):
    save(tmp_path, {"x": np.ones(2)})
    extra, before = {"x": own}, repr(own)
    restore(tmp_path, extra)
    assert extra["x"].tolist() == [1, 1] and extra["x"].dtype == float and repr(own) == before


@pytest.mark.parametrize("make", [np.zeros, torch.zeros])
def test_names_of_one_array_get_the_values_of_each_that_was_saved(make, tmp_path):
    save(tmp_path, {"a": make(3) + 1, "b": make(3) + 2, "c": make(2) + 3, "d": {"e": [4]}, "f": {"e": [5]}})
    one, inner = make(5), {"e": []}
    extra = {"a": one[:3], "b": one[:3], "c": one[2:4], "d": inner, "f": inner}
    restore(tmp_path, extra)
    assert [extra[key].tolist() for key in "abc"] == [[1, 1, 1], [2, 2, 2], [3, 3]]
    assert one.tolist() == [1, 1, 1, 0, 0] and extra["d"] is inner
    assert (extra["d"], extra["f"]) == ({"e": [4]}, {"e": [5]})


def test_parts_of_one_array_are_written_into_it(tmp_path):
    save(tmp_path, {"a": np.ones(2), "b": np.full(3, 2.0)})
    whole = np.zeros(5)
    restore(tmp_path, {"a": whole[:2], "b": whole[2:]})
    assert whole.tolist() == [1, 1, 2, 2, 2]


def test_what_was_written_into_objects_is_put_back_after_an_error(tmp_path):
    class Picky:
        is_picky = False

        def state_dict(self):
            return {"a": 1}

        def load_state_dict(self, state):
            if self.is_picky:
                raise ValueError("no")

    def make(value):
        values = torch.full((2,), value), np.full(2, value), {value}
        return {"a": torch.nn.Parameter(values[0]), "b": [values[1]], "c": {"d": deque(values)}, "z": Picky()}

    save(tmp_path, make(1.0))
    extra = make(0.0)
    extra["z"].is_picky = True
    objects = extra["a"], extra["b"], extra["b"][0], extra["c"]["d"], extra["c"]["d"][2]
    before = repr((objects, [*extra]))
    with pytest.raises(FileError, match=re.escape("extra['z'] refuses its state: ValueError: no")):
        restore(tmp_path, extra)
    assert repr((objects, [*extra])) == before and extra["b"] is objects[1] and extra["c"]["d"][2] is objects[4]
