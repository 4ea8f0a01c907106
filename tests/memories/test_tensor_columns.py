"""Columns that are torch tensors: as those of numpy, and without a way through the host."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from frameworks import CUDA, EVERY_KIND, ON_HOST, array, flat, host, library, make

from rlstructs import DictTensor, OutOfMemoryError, TemporalDictTensor, Trajectories
from rlstructs.errors import SpecError
from rlstructs.memories import tensors
from rlstructs.replay.intake import arrays as values
from rlstructs.replay.intake import intake
from rlstructs.replay.intake import trajectories as from_trajectories
from rlstructs.replay.rows import on_device
from rlstructs.replay.rows.linked import LinkedColumns
from rlstructs.replay.rows.on_device import TensorColumns
from rlstructs.replay.rows.spec import Spec
from rlstructs.replay.rows.store import Storage

NAMES = ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
         "float16", "float32", "float64", "complex64", "complex128"]  # fmt: skip
DEVICES = ["cpu", pytest.param("cuda:0", marks=[
    pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
])]  # fmt: skip


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)


@pytest.fixture(params=[kind for kind in EVERY_KIND if kind not in ON_HOST])
def kind(request):
    return request.param


def test_rows_that_first_came_in_inference_mode_are_written_outside_of_it_too(kind):
    memory = make(kind, 4, 2, {"x": ("float32", 3), "terminated": ("bool", 1)})
    with torch.inference_mode():
        memory.add_samples(x=array(kind, np.zeros((2, 3))), terminated=array(kind, [[False], [True]]))
        copied = pickle.loads(pickle.dumps(memory))
        given = array(kind, np.full((2, 3), 2.0))
    for written in (memory, copied):
        written.add_samples(x=array(kind, np.ones((2, 3))), terminated=array(kind, [[True], [False]]))
        written.add_samples(x=given)
        assert flat(written.sample_all(["x"])[0][0]) == [0] * 6 + [1] * 6 + [2] * 6
        written.set_tensor_by_name("x", array(kind, np.full((4, 2, 3), 5.0)))
        [[x]] = written.sample(["x"], batch_size=3)
        assert flat(x) == [5] * 9
        assert library(kind) != "torch" or not (x.is_inference() or written.tensors["x"].is_inference())


@pytest.mark.parametrize("order", ["lane", "slot"])
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_every_dtype_are_as_on_the_host(device, order, name):
    rng = np.random.default_rng(0)
    stores = [Storage(3, 5, order=order), Storage(3, 5, order=order, columns=TensorColumns(3, 5, order, device))]
    for storage in stores:
        storage.columns.add("x", Spec(np.dtype(name), (2,)))
        storage.columns.add("other", Spec(np.dtype(name)))
    for t in range(30):
        lanes = [slice(None), np.array([2, 0]), slice(1, 2)][rng.integers(3)]
        n, steps = len(np.arange(3)[lanes]), int(rng.integers(1, 8))
        values = rng.integers(0, 2 if name == "bool" else 100, (n, steps, 2)).astype(name)
        lengths = rng.integers(0, steps + 1, n) if rng.random() < 0.5 else None
        for storage in stores:
            block = {"x": values if t % 2 else values[:, ::-1], "other": values[..., 0]}
            storage.write({"x": block["x"]} if t % 3 else block, lanes, lengths=lengths)
        rows = rng.integers(0, 15, (4, 2))
        for at in (rows, rows[:, 0]):
            ours, theirs = (storage.columns.gather(["x", "other"], at) for storage in stores)
            for column, a, b in zip(["x", "other"], ours, theirs, strict=True):
                found = stores[1].columns.host(column, b)
                assert (found.dtype, found.shape, found.tobytes()) == (a.dtype, a.shape, a.tobytes())
                assert b.device == device


def test_tensors_of_another_dtype_are_converted_or_refused(device):
    columns = TensorColumns(1, 3, "slot", device)
    spec = Spec(np.dtype(np.uint16))
    columns.add("n", spec)
    columns.put_rows("n", slice(None), columns.check("n", torch.tensor([[1, 2, 65535]]), (1, 3))[0])
    assert columns.host("n", columns.flat["n"]).tolist() == [1, 2, 65535]
    with pytest.raises(SpecError, match="^'n' holds int64 values that do not fit uint16$"):
        columns.check("n", torch.tensor([[1, 2, -1]], device=device), (1, 3))
    with pytest.raises(SpecError, match=r"^'n' has shape \(3,\), expected \(1, 3\)$"):
        columns.check("n", torch.tensor([1, 2, 3]), (1, 3))
    assert columns.own(torch.zeros(3, dtype=torch.uint16), spec) is not None or device.type == "cuda"
    assert columns.own(torch.zeros(3), spec) is None and columns.own(np.zeros(3, np.uint16), spec) is None


def test_a_pickled_store_is_a_copy(device):
    columns = TensorColumns(1, 3, "slot", device)
    columns.add("x", Spec(np.dtype(np.float32)))
    columns.put_rows("x", slice(None), torch.arange(3.0, device=device))
    other = pickle.loads(pickle.dumps(columns))
    columns.put_rows("x", 0, 9)
    assert other.flat["x"].tolist() == other.cells["x"][0].tolist() == [0, 1, 2]
    assert other.flat["x"].device == device


def no_host(*values):
    raise AssertionError("this went through the host")


TENSORS = {"observations": ("float32", 2), "b": ("bfloat16", 1), "n": ("uint8", 1), "f": ("bool", 1)}


def test_what_lies_on_the_device_does_not_pass_the_host(kind, monkeypatch):
    memory = make(kind, 4, 2, TENSORS)
    given = {name: array(kind, np.ones((2, size)), of) for name, (of, size) in TENSORS.items()}
    if library(kind) != "torch":
        given.pop("b")  # the bits of it are not alike in all versions of these
    _ = memory.tensors
    for module, name in ((tensors, "host_array"), (values, "to_bits"), (TensorColumns, "_moved")):
        monkeypatch.setattr(module, name, no_host)
    memory.add_samples(**given)
    for name, value in given.items():
        memory.set_tensor_by_name(name, value)
    monkeypatch.undo()
    [[observations, f]] = memory.sample_all(["observations", "f"])
    assert (flat(observations), flat(f)) == ([1] * 4, [True] * 2)


def test_trajectories_on_the_device_do_not_pass_the_host(kind, monkeypatch):
    where = "cuda:0" if kind in CUDA else "cpu"
    memory = make(kind, 4, 2)
    steps = {"x": torch.arange(12.0).reshape(2, 3, 2), "b": torch.ones(2, 3).bfloat16(), "e": torch.ones(2, 3).bool()}
    batch = Trajectories(
        DictTensor({"env_index": torch.tensor([1, 0]).to(where)}),
        TemporalDictTensor({key: value.to(where) for key, value in steps.items()}, torch.tensor([3, 1]).to(where)),
    )
    seen = []
    plain = from_trajectories.host_array
    monkeypatch.setattr(intake, "as_rows", no_host)
    monkeypatch.setattr(from_trajectories, "host_array", lambda name, value: seen.append(name) or plain(name, value))
    memory.add_trajectories(batch, {"x": "x", "b": "b", "terminated": "e"})
    assert seen == ["env_index", "lengths"]
    assert flat(memory.sample_all(["x"], sequence_length=9)[0][0]) == [6, 7, 0, 1, 2, 3, 4, 5]


def test_the_tensor_that_it_gives_out_is_the_store(kind):
    memory = make(kind, 4, 2, TENSORS)
    if library(kind) == "torch":
        for name in TENSORS:
            assert memory.tensors[name].data_ptr() == memory._storage.columns.flat[name].data_ptr()
    assert host(memory.get_tensor_by_name("b")).shape == (4, 2, 1)


def test_what_a_memory_held_comes_back_from_a_pickle(kind):
    memory = make(kind, 4, 2, TENSORS)
    memory.add_samples(observations=array(kind, np.arange(4.0).reshape(2, 2)))
    other = pickle.loads(pickle.dumps(memory))
    memory.reset()
    assert flat(other.sample_all(["observations"])[0][0]) == [0, 1, 2, 3]
    other.add_samples(observations=array(kind, np.arange(4.0).reshape(2, 2)))
    assert len(other) == 4


def test_tensors_beyond_what_the_device_has_are_refused(kind, monkeypatch):
    memory = make(kind, 1000, 1)
    monkeypatch.setattr(on_device.TensorColumns, "available_bytes", lambda columns: 3999)
    with pytest.raises(OutOfMemoryError, match="^tensor 'x': 4,000 bytes are needed, 3,999 are available$"):
        memory.create_tensor("x", size=1)


def test_the_columns_of_a_memory_lie_where_its_device_is():
    assert type(make("torch", 2, 1)._storage.columns) is LinkedColumns
    assert type(make("torch-tensors", 2, 1)._storage.columns) is TensorColumns
    framework = type(make("torch", 2, 1)).framework
    assert framework.device_of_rows(torch.device("cuda:1")) == torch.device("cuda:1")
    assert framework.device_of_rows(torch.device("cpu")) is None
