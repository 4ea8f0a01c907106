"""What a checkpoint holds comes back as it was, type and all; the rest is refused by name."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque, namedtuple

import numpy as np
import pytest
import torch

from rlstructs import Checkpoint, FileError, SpecError
from rlstructs.checkpoints.trees import load_tree

VALUES = {
    "counter": Counter("aab"), "ordered": OrderedDict(b=np.arange(2), a=1), "deque": deque([1, (2, 3)], 4),
    "endless": deque([np.float32(2)]), "set": {1, "a", (2, None)}, "frozenset": frozenset({b"a", 2j}),
    "tuple keys": {(1, "a"): torch.ones(2), frozenset({3}): [{4}]}, "numpy keys": {np.int64(3): 1, np.int8(4): 2},
    "None": {None: {"__array__": 3}}, "ordered keys": OrderedDict({(1,): 2, (0,): 1}), "empty": [set(), Counter(), {}],
    "big-endian": np.arange(3, dtype=">i4"), "little-endian": np.arange(3, dtype="<i4"),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_as_it_was(name, tmp_path):
    found = {"value": None}
    Checkpoint(tmp_path, extra={"value": VALUES[name]}).save(1)
    Checkpoint(tmp_path, extra=found).restore()
    assert type(found["value"]) is type(VALUES[name])
    # A representation shows types of keys and values, byte orders, and the order of items.
    if name not in ("set", "frozenset"):
        assert repr(found["value"]) == repr(VALUES[name])
    else:
        assert found["value"] == VALUES[name]


def test_a_scheduler_that_counts_comes_back(tmp_path):
    def make():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 4])

    (optimizer, scheduler), (again, its_scheduler) = make(), make()
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    Checkpoint(tmp_path, optimizer={"sgd": optimizer, "rate": scheduler}).save(1)
    Checkpoint(tmp_path, optimizer={"sgd": again, "rate": its_scheduler}).restore()
    again.step()
    its_scheduler.step()
    assert its_scheduler.state_dict()["milestones"] == Counter({4: 2, 2: 1})
    assert again.param_groups[0]["lr"] == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (defaultdict(int), r"extra\['v'\] is a defaultdict, which a checkpoint cannot hold"),
        (namedtuple("Point", "x")(1), r"extra\['v'\] is a Point, which a checkpoint cannot hold"),
        (type("Counts", (Counter,), {})("a"), r"extra\['v'\] is a Counts, which a checkpoint cannot hold"),
        ({(1, object): 2}, r"extra\['v'\] has the key \(1, <class 'object'>\); needed is a text"),
        ({(1,): [object()]}, r"extra\['v'\]\[\(1,\)\]\[0\] is a object"),
        (deque([object()]), r"extra\['v'\]\[0\] is a object"),
    ],
)
def test_what_would_not_come_back_as_it_was_is_refused(value, words, tmp_path):
    with pytest.raises(SpecError, match=words):
        Checkpoint(tmp_path, extra={"v": value}).save(1)


@pytest.mark.parametrize(
    "tree",
    [{"__array__": "set", "items": [[1]]}, {"__array__": "Counter", "items": [1]}, {"__array__": "eval", "items": []},
     {"__array__": "deque", "items": [], "maxlen": -1}, {"__array__": "deque", "items": []}],
)  # fmt: skip
def test_a_collection_that_no_save_writes_is_damaged(tree, tmp_path):
    torch.save(tree, tmp_path / "tree.pt")
    with pytest.raises(FileError, match=r"tree\.pt: damaged: "):
        load_tree(tmp_path / "tree.pt")


def test_arrays_beside_a_state_of_torch_leave_its_versions(tmp_path):
    class Norm(torch.nn.BatchNorm1d):
        def get_extra_state(self):
            return np.arange(2)

        def set_extra_state(self, state):
            self.versions = state.tolist()

        def _load_from_state_dict(self, state, prefix, metadata, *others):
            self.version = metadata["version"]
            super()._load_from_state_dict(state, prefix, metadata, *others)

    Checkpoint(tmp_path, model=Norm(2)).save(1)
    again = Norm(2)
    Checkpoint(tmp_path, model=again).restore()
    assert again.version == 2 and again.versions == [0, 1]
