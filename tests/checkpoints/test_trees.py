"""What a checkpoint holds comes back as it was, type and all; the rest is refused by name."""

from __future__ import annotations

import io
import os
import pickle
import tracemalloc
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple

import numpy as np
import pytest
import torch

from rlstructs import Checkpoint, FileError, SpecError
from rlstructs.checkpoints.trees import load_tree, save_tree

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
        ({(1, object): 2}, r"extra\['v'\] has the key \(1, <class 'object'>\); expected a text"),
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


TENSORS = {
    "view": torch.arange(10)[3:5], "transposed": torch.arange(6).reshape(2, 3).T, "empty": torch.zeros(0, 3),
    "expanded": torch.zeros(1).expand(1000), "float8": torch.ones(2).to(torch.float8_e4m3fn),
    "uint16": torch.ones(2, dtype=torch.uint16), "bfloat16": torch.ones(2, dtype=torch.bfloat16),
    "conjugate": torch.full((2,), 1j).conj(), "bool": torch.tensor([True, False]),
    "with a gradient": torch.ones(2, requires_grad=True),
    "sparse": torch.eye(3).to_sparse(), "shared": [torch.ones(4)] * 3, "views": [*torch.arange(6).reshape(2, 3)],
}  # fmt: skip
OTHERS = {
    "bytes": [b"\0\xff", b""], "complex": 1 + 2j, "torch": [torch.Size([1, 2]), torch.float32, torch.device("cuda", 1)],
    "integers": [2**3000, -(2**70), 2**31, -1, 255, 70_000], "half a pair": "\ud800", "floats": [float("nan"), 1e300],
    "a long tuple": tuple(range(20_000)), "many keys": {n: str(n) for n in range(3000)}, "deep": [[[[[[{"a": ()}]]]]]],
}  # fmt: skip


@pytest.mark.parametrize("value", [*TENSORS.values(), *OTHERS.values()], ids=[*TENSORS, *OTHERS])
def test_every_tensor_and_value_is_read_as_it_was(value, tmp_path):
    save_tree(tmp_path / "x.pt", "x", value)
    found = load_tree(tmp_path / "x.pt")
    assert type(found) is type(value) and repr(found) == repr(value)


def test_a_tensor_that_no_read_makes_is_refused(tmp_path):
    with pytest.raises(SpecError, match=r"extra\['x'\]\[0\] is a tensor that a checkpoint cannot hold: meta"):
        Checkpoint(tmp_path, extra={"x": [torch.zeros(2, device="meta")]}).save(1)


def test_a_tree_that_is_nested_too_deeply_to_be_read_is_refused(tmp_path):
    value = []
    for _ in range(150):
        value = [value]
    with pytest.raises(SpecError, match="extra cannot be read again: its pickle is nested too deeply"):
        Checkpoint(tmp_path, extra={"x": value}).save(1)


def compressed(path, megabytes=100):
    """A state in an archive that unpacks to a thousand times its size."""
    torch.save({"x": torch.zeros(megabytes << 18)}, whole := io.BytesIO())
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))


def archive(path, pickled):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x/data.pkl", b"\x80\2" + pickled + b".")
        file.writestr("x/data/0", b"12")


def tensor(n_bytes, size, stride, offset=0):
    """The pickle of a tensor of bytes that says this of itself."""

    def number(n):
        return b"\x8a\x08" + n.to_bytes(8, "little")

    size, stride = (b"(" + b"".join(map(number, each)) + b"t" for each in (size, stride))
    storage = b"(X\7\0\0\0storagectorch\nByteStorage\nX\1\0\0\0000X\3\0\0\0cpu" + number(n_bytes) + b"tQ"
    rest = number(offset) + size + stride + b"\x89ccollections\nOrderedDict\n)RtR"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + rest


def write_shared(path):
    """A small storage in many tensors, gigabytes in all."""
    numbers = torch.zeros(1 << 16)
    torch.save([numbers[n % 7 :] for n in range(9000)], path)


HOSTILE = {
    "stride 0": lambda path: torch.save({"x": torch.zeros(1, dtype=torch.uint8).expand(3 << 30)}, path),
    "stride 0 for an array": lambda path: torch.save(
        {"__array__": "numpy", "dtype": "uint8", "shape": [3 << 30], "bytes": torch.zeros(1).byte().expand(3 << 30)},
        path,
    ),
    "compressed": compressed,
    "more numbers than bytes": lambda path: archive(path, tensor(1 << 30, [1 << 30], [1])),
    "numbers behind its bytes": lambda path: archive(path, tensor(2, [1], [1], 1 << 20)),
    "a few numbers in many tensors": write_shared,
    "an exponential list": lambda path: archive(
        path, b"]q\0" + b"".join(b"(h%ch%ctq%c" % (n, n, n + 1) for n in range(80))
    ),
    "a list in itself": lambda path: archive(path, b"]q\0h\0a"),
    "a deep tuple": lambda path: archive(path, b")" + b"\x85" * 100_000),
    "a name": lambda path: archive(path, b"cos\nsystem\n"),
    "another pickle": lambda path: path.write_bytes(pickle.dumps({"x": 1})),
    "torch's old format": lambda path: torch.save({"x": torch.zeros(3)}, path, _use_new_zipfile_serialization=False),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_tree_from_a_stranger_takes_little_memory_and_is_refused(what, tmp_path):
    path = tmp_path / "x.pt"
    HOSTILE[what](path)
    tracemalloc.start()
    try:
        with pytest.raises(FileError, match=r"x\.pt: damaged: "):
            load_tree(path)
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()


def test_nothing_but_a_regular_file_is_opened(tmp_path):
    os.mkfifo(tmp_path / "x.pt")
    with pytest.raises(FileError, match=r"x\.pt: is a named pipe"):
        load_tree(tmp_path / "x.pt")
    checkpoint = Checkpoint(tmp_path / "runs", extra={"n": 1})
    checkpoint.save(1)
    for name in ("extra.pt", "checkpoint.json"):
        path = tmp_path / "runs/step_000000000001" / name
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(FileError, match=f"{name}: is a named pipe"):
            checkpoint.restore()
