"""Storages, writers and transforms of `DictTensorReplayBuffer`. "R" and "B" as in test_dict_tensor_replay_buffer.py."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_storages import DeviceStorage

from rlstructs import DictTensor, MissingKeyError, OutOfMemoryError, SpecError, StateError, TemporalDictTensor
from rlstructs.replay import (
    Compose,
    CompressedListStorage,
    DictTensorPrioritizedReplayBuffer,
    DictTensorReplayBuffer,
    ImmutableDatasetWriter,
    ImmutableWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    MaxValueWriter,
    MemmapStorage,
    PrioritizedSampler,
    RandomSampler,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
    TensorStorage,
    Transform,
)
from rlstructs.replay.rows.on_device import TensorColumns
from rlstructs.replay.torchrl import storages, writers


def made(storage=None, **settings):
    storage = ListStorage(10) if storage is None else storage
    return DictTensorReplayBuffer(storage=storage, **{"generator": 0, **settings})


def numbers(start, n):
    return {"x": torch.arange(start, start + n), "reward": torch.arange(start, start + n).float()}


# Storages


def test_torchrls_names_are_the_same_classes():
    assert (LazyTensorStorage, LazyMemmapStorage) == (TensorStorage, MemmapStorage)
    assert (TensorDictRoundRobinWriter, TensorDictMaxValueWriter) == (RoundRobinWriter, MaxValueWriter)
    assert ImmutableDatasetWriter is ImmutableWriter


@pytest.mark.parametrize("given", [ListStorage, lambda: ListStorage(7), ListStorage(7)])
def test_a_part_is_given_as_it_is_or_as_what_makes_it(given):  # B0
    buffer = DictTensorReplayBuffer(storage=given, sampler=RandomSampler, writer=lambda: MaxValueWriter("x"))
    assert type(buffer.storage) is ListStorage and type(buffer.writer) is MaxValueWriter
    with pytest.raises(TypeError, match="^writer must be a Writer, or a function that creates one, got RandomSampler$"):
        DictTensorReplayBuffer(writer=RandomSampler)


def test_a_part_belongs_to_one_buffer():
    for name, part in (("storage", ListStorage(5)), ("sampler", RandomSampler()), ("writer", RoundRobinWriter())):
        first = DictTensorReplayBuffer(**{name: part})
        with pytest.raises(SpecError, match=f"^this {type(part).__name__} belongs to another buffer; make one for"):
            DictTensorReplayBuffer(**{name: part})
        for twin in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
            assert getattr(twin, name) is not part
            with pytest.raises(SpecError, match="belongs to another buffer"):
                DictTensorReplayBuffer(**{name: getattr(twin, name)})
        if name != "storage":
            getattr(first, f"set_{name}")(type(part)())
            DictTensorReplayBuffer(**{name: part})
    used = MaxValueWriter("x")
    buffer = made(writer=used)
    del buffer, first
    gc.collect()
    made(writer=used).extend(numbers(0, 2))


def test_a_writer_that_comes_from_another_buffer_knows_nothing_of_it():
    used = MaxValueWriter("x")
    first = made(storage=ListStorage(5), writer=used)
    first.extend(numbers(-5, 5))
    del first
    gc.collect()
    buffer = made(storage=ListStorage(3), writer=used)
    buffer.extend(numbers(0, 3))
    assert buffer.extend(numbers(3, 3)).tolist() == [0, 1, 2]
    assert sorted(buffer["x"].tolist()) == [3, 4, 5]


def test_rows_that_are_there_from_the_start():
    for data in (numbers(0, 4), DictTensor(numbers(0, 4)), [{"x": t, "reward": 1.0 * t} for t in range(4)]):
        buffer = made(TensorStorage(data), writer=ImmutableWriter)
        assert len(buffer) == buffer.storage.max_size == 4 and buffer["x"].tolist() == [0, 1, 2, 3]
        assert set(buffer.sample(50)["x"].tolist()) == {0, 1, 2, 3}
    rows = numbers(0, 4)
    buffer = made(LazyTensorStorage(rows, max_size=6))
    rows["x"].zero_()
    assert buffer.extend(numbers(4, 3)).tolist() == [4, 5, 0] and buffer["x"].tolist() == [6, 1, 2, 3, 4, 5]
    steps = TemporalDictTensor({"x": torch.arange(6).view(2, 3)}, torch.tensor([3, 1]))
    assert made(TensorStorage(steps))["x"].tolist() == [0, 1, 2, 3]
    assert LazyTensorStorage(max_size=3).max_size == LazyTensorStorage(3, device="cpu").max_size == 3
    assert buffer.storage.data is None  # R34
    for wrong, error in (((numbers(0, 4), 3), SpecError), ((), TypeError), ((0,), SpecError), (("x",), TypeError)):
        with pytest.raises(error):
            TensorStorage(*wrong)


def test_a_compressed_list_holds_frames_in_fewer_bytes():
    frames = torch.zeros(50, 84, 84, dtype=torch.uint8)
    frames[:, 10:20] = torch.arange(50, dtype=torch.uint8)[:, None, None]
    rows = {**numbers(0, 50), "frame": frames}
    buffers = [made(kind(100)) for kind in (ListStorage, CompressedListStorage)]
    for buffer in buffers:
        buffer.extend(rows)
    plain, packed = buffers
    assert packed.nbytes < plain.nbytes / 10 and repr(packed.storage) == "CompressedListStorage(max_size=100)"
    assert torch.equal(packed["frame"], frames) and torch.equal(packed[7:9]["frame"], frames[7:9])
    assert all(torch.equal(*pair) for pair in zip(plain.sample(9).values(), packed.sample(9).values(), strict=True))
    for wrong, error in (({"compression_fn": bytes}, SpecError), ({"compression_level": 23}, SpecError),
                         ({"compression_level": "fast"}, TypeError)):  # fmt: skip
        with pytest.raises(error):
            CompressedListStorage(3, **wrong)


@pytest.mark.parametrize("kind", [ListStorage, CompressedListStorage, TensorStorage, MemmapStorage])
def test_a_storage_is_as_long_as_its_buffer(kind):
    storage = kind(5)
    buffer = made(storage)
    assert len(storage) == len(buffer.storage) == 0
    for n, length in ((3, 3), (4, 5)):
        buffer.extend(numbers(0, n))
        assert len(storage) == len(buffer.storage) == len(pickle.loads(pickle.dumps(buffer)).storage) == length
    buffer.empty()
    assert len(storage) == 0


@pytest.mark.parametrize("kind", [ListStorage, TensorStorage])
def test_programs_find_how_many_rows_a_storage_will_hold(kind):
    buffer = made(kind(5000))
    for n in (1, 2000):
        buffer.extend(numbers(0, n))
        assert buffer.storage.max_size == buffer._storage.max_size == 5000 and len(buffer._storage) == len(buffer)


def test_a_storage_of_rows_has_them_before_it_has_a_buffer():
    storage = TensorStorage(numbers(0, 4))
    assert len(storage) == 4 and len(made(storage)) == len(storage) == 4


@pytest.mark.parametrize("kind", [ListStorage, TensorStorage, MemmapStorage])
def test_a_storage_needs_room(kind):
    with pytest.raises(SpecError, match="^max_size must be at least 1, got 0$"):
        kind(0)
    with pytest.raises(TypeError):
        kind(1.5)


def test_files_lie_in_the_folder_that_was_named_and_stay(tmp_path):
    folder = tmp_path / "new" / "rows"
    buffer = made(MemmapStorage(5, scratch_dir=folder))
    buffer.extend(numbers(0, 7))
    sizes = sorted(file.stat().st_size for file in folder.iterdir())
    assert sizes == [5 * 4, 5 * 8]
    assert np.fromfile(folder / "0001.bin", np.int64).tolist() == [5, 6, 2, 3, 4]
    with pytest.raises(SpecError, match="this folder is not empty, it holds"):
        made(MemmapStorage(5, scratch_dir=folder))
    del buffer
    gc.collect()
    assert len(list(folder.iterdir())) == 2
    again = made(MemmapStorage(6, folder, existsok=True))
    again.extend(numbers(0, 6))
    assert again["x"].tolist() == [0, 1, 2, 3, 4, 5]
    (folder / "notes.txt").touch()
    with pytest.raises(SpecError, match="not empty, it holds .'notes.txt'.$"):
        made(MemmapStorage(6, folder, existsok=True))


def test_the_folder_that_was_named_is_made_with_the_first_row(tmp_path):
    folder = tmp_path / "new" / "rows"
    buffer = made(LazyMemmapStorage(5, scratch_dir=folder))
    assert not folder.exists()
    other = made(LazyMemmapStorage(5, scratch_dir=folder))
    folder.mkdir(parents=True)
    gone = made(LazyMemmapStorage(5, scratch_dir=folder))
    folder.rmdir()
    gone.extend(numbers(0, 7))
    assert gone["x"].tolist() == [5, 6, 2, 3, 4] and len(list(folder.iterdir())) == 2
    for each in (buffer, other):
        with pytest.raises(SpecError, match="this folder is not empty, it holds"):
            each.extend(numbers(0, 1))
        assert len(each) == 0 and gone["x"].tolist() == [5, 6, 2, 3, 4]


def test_a_temporary_directory_may_be_given_and_stays_as_long_as_the_buffer():  # torchrl's rb_tutorial
    directory = tempfile.TemporaryDirectory()
    path = Path(directory.name)
    buffer = made(LazyMemmapStorage(5, scratch_dir=directory))
    assert repr(buffer.storage) == f"MemmapStorage(max_size=5, scratch_dir={str(path)!r})"
    del directory
    gc.collect()
    buffer.extend(numbers(0, 3))
    assert len(list(path.iterdir())) == 2
    copies = [copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))]
    del copies[0]
    gc.collect()
    assert path.exists() and folder_of(copies[0]) != path and copies[0]["x"].tolist() == [0, 1, 2]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # that it was not closed
        del buffer
        gc.collect()
    assert not path.exists()


@pytest.mark.parametrize("kind", [ListStorage, LazyTensorStorage, LazyMemmapStorage])
def test_sizes_may_be_written_as_1e4(kind):  # as torchrl's examples do
    for size in (1e4, np.float32(1e4)):
        buffer = made(kind(size))
        assert type(buffer.storage.max_size) is int and buffer.storage.max_size == 10_000
    buffer.extend(numbers(0, 3))
    assert len(buffer) == 3
    for wrong in (1.5, float("nan"), float("inf")):
        with pytest.raises(TypeError, match="^max_size must be an int"):
            kind(wrong)


def test_rows_lie_where_the_first_of_them_do(monkeypatch):  # B1 device="auto"
    for kind in (ListStorage, LazyTensorStorage, LazyMemmapStorage):
        buffer = made(kind(5, device="auto"))
        buffer.extend(numbers(0, 3))
        assert buffer._storage.columns.on_host and buffer["x"].tolist() == [0, 1, 2]
    buffer = made(LazyTensorStorage(numbers(0, 3), device="auto"))
    assert buffer._storage.columns.on_host and buffer["x"].tolist() == [0, 1, 2]
    found = []

    def on_cpu(values):  # as if this were a GPU
        found.append(sorted(values))
        return torch.device("cpu")

    monkeypatch.setattr(storages, "find_device", on_cpu)
    buffer = made(LazyTensorStorage(4, device="auto"), batch_size=4)
    assert buffer._storage.columns.on_host
    for start in (0, 3):
        buffer.extend(numbers(start, 3))
        assert isinstance(buffer._storage.columns, TensorColumns)
    assert found == [["reward", "x"]] and buffer["x"].tolist() == [4, 5, 2, 3]
    assert buffer.sample()["x"].device.type == "cpu" and buffer.storage.device == torch.device("cpu")
    buffer = made(LazyTensorStorage(numbers(0, 3), device="auto"))
    assert isinstance(buffer._storage.columns, TensorColumns) and buffer["x"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("as_tensordict", [False, True])
@pytest.mark.parametrize("kind", [ListStorage, LazyTensorStorage, LazyMemmapStorage])
def test_a_storage_gives_the_rows_of_its_buffer(kind, as_tensordict):  # B1
    storage = kind(5)
    for ask in (lambda: storage[:], lambda: storage.get(0)):
        with pytest.raises(StateError, match="Storage belongs to no buffer yet"):
            ask()
    assert list(storage) == []
    buffer = made(storage)
    rows = numbers(0, 7)
    buffer.extend(pytest.importorskip("tensordict").TensorDict(rows, [7]) if as_tensordict else rows)
    assert type(storage[:]) is type(buffer[:]) and (storage[:] == buffer[:] if not as_tensordict else True)
    assert storage[2]["x"] == buffer[2]["x"] == 2 and storage.get([0, 3])["x"].tolist() == [5, 3]
    assert storage["x"].tolist() == [row["x"] for row in buffer.storage] == [5, 6, 2, 3, 4]


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_files_are_mapped_on_the_cpu(device, tmp_path):  # what torchrl's own trainings pass
    buffer = made(LazyMemmapStorage(5, scratch_dir=tmp_path, device=device))
    buffer.extend(numbers(0, 3))
    assert buffer["x"].tolist() == [0, 1, 2]


def test_files_are_mapped_on_no_other_device():
    with pytest.raises(SpecError, match="^device must be the CPU, where files are mapped, got cuda:0; give that to"):
        LazyMemmapStorage(5, device="cuda:0")


@pytest.mark.parametrize("compilable", [False, True])
@pytest.mark.parametrize("kind", [DictTensorReplayBuffer, DictTensorPrioritizedReplayBuffer])
def test_what_torchrls_own_trainings_pass_changes_nothing(kind, compilable):
    exponents = {} if kind is DictTensorReplayBuffer else {"alpha": 0.7, "beta": 0.5}
    for storage in (ListStorage(3, compilable=compilable), LazyTensorStorage(3, ndim=1, compilable=compilable),
                    LazyMemmapStorage(3, ndim=1, compilable=compilable)):  # fmt: skip
        buffer = kind(storage=storage, shared=False, compilable=compilable, generator=0, **exponents)
        assert buffer.extend(numbers(0, 4)).tolist() == [-1, 1, 2, 0]
        assert buffer["x"].tolist() == [3, 1, 2]


def test_what_else_torchrl_takes_must_ask_for_nothing():
    sampler = SliceSampler(slice_len=2, end_key="done", span=False, compile=True, use_gpu=False, ends=None)
    storage = LazyTensorStorage(9, device="cpu", consolidated=False, shared_init=False)
    buffer = DictTensorReplayBuffer(
        storage=storage, sampler=sampler, writer=RoundRobinWriter(compilable=True, track_generations=False),
        transform_factory=None, dim_extend=0, checkpointer=None, transport="auto",
    )  # fmt: skip
    buffer.extend({"x": torch.arange(4), "done": torch.tensor([0, 1, 0, 1])})
    assert buffer.sample(2)["x"].tolist() in ([0, 1], [2, 3])
    DictTensorPrioritizedReplayBuffer(alpha=0.7, beta=0.5, sync=True, sampler_device="cpu")
    assert PrioritizedSampler(5, 0.7, 0.5, 1e-8, torch.float32, "mean").reduction == "mean"
    for asks, message in (
        (lambda: SliceSampler(slice_len=2, span=True), "SliceSampler: span must be False, got True"),
        (lambda: ListStorage(3, device="cuda"), "device must be the CPU, where these lists are, got cuda"),
        (lambda: LazyMemmapStorage(3, auto_cleanup=False), "MemmapStorage: auto_cleanup must be True, got False"),
        (lambda: DictTensorReplayBuffer(consume_after_n_samples=2), "consume_after_n_samples must be None, got 2"),
        (lambda: RoundRobinWriter(track_generations=True), "track_generations must be False, got True"),
    ):  # fmt: skip
        with pytest.raises(SpecError, match=message):
            asks()
    with pytest.raises(TypeError, match=r"^DictTensorReplayBuffer\(\) got an unexpected keyword argument 'sise'$"):
        DictTensorReplayBuffer(sise=3)


def test_what_a_buffer_is_not_says_what_is():
    with pytest.raises(SpecError, match="^shared must be False: a buffer belongs to one process; .* a RayReplay$"):
        DictTensorReplayBuffer(shared=True)
    for kind in (LazyTensorStorage, LazyMemmapStorage):
        with pytest.raises(SpecError, match="^ndim must be 1, got 2: rows have one axis; extend a TemporalDictTensor"):
            kind(10, ndim=2)


def folder_of(buffer):
    return buffer._storage.columns.folder.path


def test_a_temporary_folder_goes_with_the_buffer_and_copies_have_their_own():  # B5.10
    buffer = made(MemmapStorage(5))
    buffer.extend(numbers(0, 7))
    twins = [copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))]
    folders = [folder_of(each) for each in (buffer, *twins)]
    assert len(set(folders)) == 3 and all(folder.is_dir() for folder in folders)
    twins[0].extend(numbers(100, 2))
    del twins[1]
    gc.collect()
    assert [folder.is_dir() for folder in folders] == [True, True, False]
    assert buffer["x"].tolist() == [5, 6, 2, 3, 4] and twins[0]["x"].tolist() == [5, 6, 100, 101, 4]
    del buffer, twins
    gc.collect()
    assert not any(folder.exists() for folder in folders)


def test_a_process_that_was_forked_leaves_the_folder():  # B5.10
    code = """
import os, torch
from rlstructs.replay import *
buffer = DictTensorReplayBuffer(storage=MemmapStorage(5))
buffer.extend({"x": torch.arange(3)})
pid = os.fork()
if pid == 0:
    raise SystemExit
os.waitpid(pid, 0)
folder = buffer._storage.columns.folder.path
print(folder.is_dir(), buffer["x"].tolist(), folder)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True,
                          cwd=Path(__file__).parents[2])  # fmt: skip
    first, _, folder = done.stdout.strip().rpartition(" ")
    assert first == "True [0, 1, 2]" and not os.path.exists(folder)


def test_more_than_the_disk_has_is_refused(monkeypatch):
    usage = namedtuple("usage", ["total", "used", "free"])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 60, 40))
    buffer = made(MemmapStorage(5))
    with pytest.raises(OutOfMemoryError, match="60 bytes are needed, 40 are available"):
        buffer.extend(numbers(0, 1))
    assert len(buffer) == 0


# Writers


class TopModel:
    """The rows of highest rank, one after another, as a list of (rank, number) by row id."""

    def __init__(self, size):
        self.rows, self.size = [], size

    def add(self, rank, number):
        if len(self.rows) < self.size:
            self.rows.append((rank, number))
            return len(self.rows) - 1
        lowest = min(range(self.size), key=lambda row: (self.rows[row][0], row))
        if rank <= self.rows[lowest][0]:  # B2: ties are rejected
            return -1
        self.rows[lowest] = (rank, number)
        return lowest


@pytest.mark.parametrize("n_lowest", [1, 2, 1024])
@settings(max_examples=60, deadline=None)
@given(data=st.data(), size=st.integers(1, 8), storage=st.sampled_from([ListStorage, TensorStorage, DeviceStorage]))
def test_the_rows_of_highest_rank_stay(data, size, storage, n_lowest):  # B2, B6 test_writers, B5.17
    old, writers.N_LOWEST = writers.N_LOWEST, n_lowest
    try:
        buffer, model, n = made(storage(size), writer=MaxValueWriter("rank")), TopModel(size), 0
        for _ in range(data.draw(st.integers(1, 8))):
            ranks = data.draw(st.lists(st.integers(0, 6), max_size=12))
            ids = [model.add(rank, n + at) for at, rank in enumerate(ranks)]
            # Of what was taken and then displaced in one call no id remains.
            ids = [row if row >= 0 and model.rows[row][1] == n + at else -1 for at, row in enumerate(ids)]
            rows = {"rank": torch.tensor(ranks, dtype=torch.float32), "x": torch.arange(n, n + len(ranks))}
            if data.draw(st.booleans()):
                assert buffer.extend(rows).tolist() == ids
            else:
                for at, rank in enumerate(ranks):
                    buffer.add({"rank": float(rank), "x": n + at})
            n += len(ranks)
            if model.rows:
                held = buffer[np.arange(len(model.rows))]
                assert list(zip(held["rank"].tolist(), held["x"].tolist(), strict=True)) == model.rows
            if data.draw(st.integers(0, 5)) == 0:
                buffer = pickle.loads(pickle.dumps(buffer))
            if data.draw(st.integers(0, 8)) == 0:
                buffer.empty()
                model = TopModel(size)
    finally:
        writers.N_LOWEST = old


def test_many_ranks_are_those_of_a_sort():
    rng = np.random.default_rng(0)
    buffer = made(ListStorage(3000), writer=MaxValueWriter("rank"))
    ranks = np.concatenate([rng.normal(size=n) for n in (10, 5000, 1, 7000, 300)])
    at, kept = 0, 0
    for n in (10, 5000, 1, 7000, 300):
        ids = buffer.extend({"rank": ranks[at : at + n]})
        kept += int((ids >= 0).sum())
        at += n
    assert sorted(buffer["rank"].tolist()) == sorted(ranks)[-3000:]
    assert buffer.write_count == kept >= 3000


def test_a_rank_of_several_numbers_is_reduced():
    values = torch.tensor([[1.0, 5.0], [4.0, 4.0], [0.0, 9.0]])
    for reduction, gone in (("sum", 0), ("max", 1), ("min", 2), ("mean", 0)):
        buffer = made(ListStorage(2), writer=MaxValueWriter(("next", "rank"), reduction))
        buffer.extend({"next": {"rank": values}, "x": torch.arange(3)})
        assert set(buffer["x"].tolist()) == {0, 1, 2} - {gone}


@pytest.mark.parametrize("reduction", ["max", "min", "mean", "median", "sum"])
def test_a_rank_may_have_several_axes(reduction):
    buffer = made(ListStorage(2), writer=MaxValueWriter("rank", reduction=reduction))
    rank = torch.arange(3.0)[:, None, None].expand(3, 2, 3)
    assert buffer.extend({"x": torch.arange(3), "rank": rank}).tolist() == [-1, 1, 0]
    assert buffer["x"].tolist() == [2, 1]


def test_the_reward_is_the_rank_unless_told_otherwise():
    buffer = made(ListStorage(2), writer=MaxValueWriter)
    buffer.extend({"next": {"reward": torch.tensor([3.0, 1.0, 2.0])}})
    assert buffer["next/reward"].tolist() == [3, 2]
    buffer = made(ListStorage(1), writer=MaxValueWriter)
    buffer.extend({"reward": torch.tensor([3.0, 1.0]), "next": {"reward": torch.tensor([1.0, 2.0])}})
    assert buffer["reward"].tolist() == [1]
    with pytest.raises(SpecError, match="^rank_key must be given: the reward is one of"):
        made(writer=MaxValueWriter()).extend({"x": torch.zeros(2)})


BAD_RANKS = {
    "no such key": ({"x": torch.zeros(2)}, MissingKeyError, "^no 'rank' to rank rows by, there are .'x'.$"),
    "NaN": ({"rank": torch.tensor([1.0, float("nan")])}, SpecError, "^'rank' ranks a row as NaN$"),
    "complex": ({"rank": torch.zeros(2, dtype=torch.complex64)}, SpecError, "rows cannot be ranked by it$"),
}


@pytest.mark.parametrize("case", BAD_RANKS)
def test_a_rank_that_cannot_be_changes_nothing(case):
    rows, error, message = BAD_RANKS[case]
    buffer = made(writer=MaxValueWriter("rank"))
    with pytest.raises(error, match=message):
        buffer.extend(rows)
    assert buffer.extend({"rank": torch.arange(3.0)}).tolist() == [0, 1, 2]


def test_a_replaced_row_is_another_one_for_priorities():
    buffer = DictTensorPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.0, storage=ListStorage(3), writer=MaxValueWriter("x"), generator=0
    )
    buffer.extend({"x": torch.tensor([5.0, 1.0, 7.0])})
    batch = buffer.sample(30)
    assert buffer.extend({"x": torch.tensor([6.0, 0.0])}).tolist() == [1, -1]
    buffer.update_priority(batch["index"], torch.full((30,), 0.25))  # row 1 is not what was drawn
    values = lambda: buffer.sampler._of().tree.values.tolist()  # noqa: E731
    assert values() == [0.25, 1, 0.25]
    ids = buffer.extend({"x": torch.tensor([9.0, 0.0, 8.0])})
    buffer.update_priority(ids, [3.0, 50.0, 2.0])
    assert sorted(values()) == [0.25, 2, 3]
    found = buffer.sample(2000)["x"]
    assert (found == 9).float().mean() == pytest.approx(3 / 5.25, abs=0.05)


def test_priorities_that_come_with_rows_go_to_those_that_stay():
    buffer = DictTensorPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.0, storage=ListStorage(2), writer=MaxValueWriter("x"), generator=0
    )
    rows = {"x": torch.tensor([5.0, 1.0, 7.0, 0.0]), "td_error": torch.tensor([2.0, 3.0, 4.0, 9.0])}
    assert buffer.extend(rows).tolist() == [0, -1, 1, -1]
    assert buffer.sampler._of().tree.values.tolist() == [2, 4]


def test_a_replaced_row_waits_for_the_next_pass():
    buffer = made(ListStorage(4), writer=MaxValueWriter("x"), sampler=SamplerWithoutReplacement, batch_size=2)
    buffer.extend({"x": torch.tensor([1.0, 2.0, 3.0, 4.0])})
    stream = iter(buffer)
    first = next(stream)["x"].tolist()
    left = sorted({1, 2, 3, 4} - {int(x) for x in first})
    buffer.extend({"x": torch.tensor([10.0])})  # in the place of 1
    rest = [x for batch in stream for x in batch["x"].tolist()]
    assert sorted(rest) == [x for x in left if x != 1]
    assert sorted(x for batch in buffer for x in batch["x"].tolist()) == [2, 3, 4, 10]


def test_rows_without_an_order_make_no_slices_or_steps():
    for arguments in ({"sampler": SliceSampler(slice_len=2)}, {"n_step": 2}, {"stack_num": 2}):
        with pytest.raises(SpecError, match="^the rows of a MaxValueWriter have no order: no slices, n_step or stacks"):
            made(writer=MaxValueWriter("x"), **arguments)
    buffer = made(writer=MaxValueWriter("x"))
    with pytest.raises(SpecError, match="have no order"):
        buffer.set_sampler(SliceSampler(slice_len=2))


@pytest.mark.parametrize("kind", [ListStorage, TensorStorage, MemmapStorage])
def test_what_is_stored_once_is_right_in_rows_without_order(kind):
    wide = lambda values: torch.tensor(values)[:, None].repeat(1, 100)  # noqa: E731
    buffer = made(kind(3), writer=MaxValueWriter("reward"))
    for reward in ([1.0, 2.0, 3.0], [4.0, 0.0], [5.0, 2.5]):
        value = wide(reward)
        buffer.extend({"obs": value, "next_obs": value + 1, "reward": value[:, 0]})
    read = buffer[:]
    assert sorted(read["reward"].tolist()) == [3, 4, 5]
    assert (read["obs"] == read["reward"][:, None]).all() and (read["next_obs"] == read["obs"] + 1).all()


def test_a_writer_can_be_exchanged():
    buffer = made(ListStorage(4))
    buffer.extend(numbers(0, 6))
    buffer.set_writer(MaxValueWriter("x"))
    assert buffer.extend(numbers(10, 1)).tolist() == [2] and sorted(buffer["x"].tolist()) == [3, 4, 5, 10]
    buffer.set_writer(RoundRobinWriter)
    assert buffer.add({"x": 0, "reward": 0.0}) == 2
    buffer.set_writer(ImmutableWriter)
    with pytest.raises(StateError):
        buffer.extend(numbers(0, 1))
    with pytest.raises(TypeError, match="^writer must be a Writer"):
        buffer.set_writer("none")


def test_ranks_follow_rows_that_are_changed():
    buffer = made(ListStorage(3), writer=MaxValueWriter("x"))
    buffer.extend(numbers(5, 3))
    buffer[1] = {"x": 100}
    buffer[2] = {"x": 0}
    assert buffer.extend(numbers(6, 1)).tolist() == [2]


def test_an_immutable_buffer_refuses_every_change():  # B2
    buffer = made(TensorStorage(numbers(0, 4)), writer=ImmutableWriter())
    before = buffer[:]
    for change in (
        lambda: buffer.add({"x": 1, "reward": 1.0}), lambda: buffer.extend(numbers(0, 2)), buffer.empty,
        lambda: buffer.__setitem__(0, {"x": 3}), lambda: buffer.extend(numbers(0, 0)),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="^this buffer cannot be changed: its writer is an ImmutableWriter$"):
            change()
    assert buffer[:] == before


# Transforms


class Scaled(Transform):
    def __init__(self, factor):
        self.factor = factor

    def forward(self, batch):
        batch.set("reward", batch["reward"] * self.factor)
        return batch

    def inv(self, batch):
        batch.set("reward", batch["reward"] / self.factor)
        return batch


class Shifted(torch.nn.Module):
    def forward(self, batch):
        batch["reward"].add_(1)
        return batch

    def inv(self, batch):
        batch["reward"].sub_(1)
        return batch


def doubled(batch):
    batch["reward"].mul_(2)
    return batch


def test_transforms_go_one_way_out_and_the_other_way_in():  # B4, B6 test_rb_transforms
    buffer = made(transform=Compose(Scaled(10), Shifted()))
    rows = numbers(0, 5)
    buffer.extend(rows)
    stored = buffer._storage.gather(["reward"], np.arange(5))[0]
    np.testing.assert_allclose(stored, (np.arange(5) - 1) / 10)
    batch = buffer.sample(50)
    torch.testing.assert_close(batch["reward"], batch["x"].float())
    buffer.add({"x": 5, "reward": 5.0})
    buffer[0] = {"reward": 100.0}
    torch.testing.assert_close(buffer["reward"], torch.tensor([100.0, 1, 2, 3, 4, 5]))
    torch.testing.assert_close(buffer[5]["reward"], torch.tensor(5.0))
    assert rows["reward"].tolist() == [0, 1, 2, 3, 4]  # R12


def test_transforms_never_change_what_is_stored():  # B5.3
    buffer = made(ListStorage(4), transform=doubled)
    buffer.extend(numbers(0, 9))
    for _ in range(3):
        assert buffer["reward"].tolist() == buffer[:]["reward"].tolist() == [16, 10, 12, 14]
        batch = buffer.sample(8)
        assert (batch["reward"] == 2 * batch["x"]).all()


def test_transforms_are_appended_and_inserted():  # B6
    buffer = made()
    buffer.extend(numbers(0, 3))
    assert buffer.append_transform(doubled) is buffer
    buffer.insert_transform(0, Shifted())
    buffer.insert_transform(-1, lambda batch: batch)
    assert buffer["reward"].tolist() == [2, 4, 6] and len(buffer.transform) == 3
    assert repr(buffer.transform) == "Compose(Shifted, <lambda>, doubled)"
    for index in (4, -4):
        with pytest.raises(ValueError, match=rf"^index {index} is not in \[-3, 3\]: there are 3 transforms$"):
            buffer.insert_transform(index, doubled)
    with pytest.raises(TypeError, match="^a transform must be a function of a batch, got str$"):
        buffer.append_transform("double")
    assert buffer["reward"].tolist() == [2, 4, 6]


def test_those_that_a_compose_holds_are_the_transforms_of_the_buffer():
    class Twice(Compose):
        """Does what it holds two times."""

        def forward(self, batch):
            return super().forward(super().forward(batch))

    buffer = made(transform=Compose(Shifted(), doubled))
    buffer.insert_transform(1, Scaled(10))
    assert repr(buffer.transform) == "Compose(Shifted, Scaled, doubled)" and len(buffer.transform) == 3
    buffer.extend(numbers(0, 3))
    assert buffer.transform[2] is doubled and isinstance(buffer.transform[0], Shifted)
    assert made(transform=Compose()).transform.parts == []
    twice = made(transform=Twice(doubled))
    twice.append_transform(doubled)
    twice.extend(numbers(1, 1))
    assert len(twice.transform) == 2 and twice["reward"].tolist() == [8]


def test_what_was_appended_is_what_an_index_gives():  # torchrl's ObservationNorm: loc is set later
    class Moved(torch.nn.Module):
        loc = 0.0

        def forward(self, batch):
            batch["reward"].add_(self.loc)
            return batch

    buffer = made()
    buffer.append_transform(module := Moved())
    buffer.extend(numbers(0, 3))
    assert buffer.transform[0] is module and buffer["reward"].tolist() == [0, 1, 2]
    buffer.transform[0].loc = 3.0
    assert buffer.transform[0].loc == 3.0 and buffer["reward"].tolist() == [3, 4, 5]


def test_a_batch_that_is_being_made_keeps_its_transforms():
    def collate(batch):  # as another thread may, meanwhile
        buffer.append_transform(doubled)
        return batch

    buffer = made(collate_fn=collate)
    buffer.extend(numbers(1, 1))
    assert [buffer.sample(1)["reward"].item() for _ in range(3)] == [1, 2, 4]


def test_a_transform_can_be_for_rows_that_are_written_only():  # B4 invert=True
    buffer = made()
    buffer.extend(numbers(0, 2))
    buffer.append_transform(doubled, invert=True)
    buffer.extend(numbers(1, 2))
    assert buffer["reward"].tolist() == [0, 1, 2, 4]


class Above(Transform):
    def __init__(self, least):
        self.least = least

    def inv(self, batch):
        kept = batch["reward"] >= self.least
        return batch.index(kept) if kept.any() else None


def test_a_transform_may_say_what_it_set():
    buffer = made()
    buffer.append_transform(lambda batch: batch.set("y", batch["x"] + 1), invert=True)
    buffer.append_transform(lambda batch: batch.set("z", batch["y"] * 2))
    assert buffer.extend(numbers(0, 3)).tolist() == [0, 1, 2]
    assert buffer[:]["z"].tolist() == [2, 4, 6]


def test_what_is_known_of_rows_outlives_a_transform_that_picks_columns():
    buffer = DictTensorPrioritizedReplayBuffer(alpha=1.0, beta=1.0, transform=lambda batch: batch.get(["x"]))
    buffer.extend(numbers(0, 3))
    batch = buffer.sample(4)
    assert set(batch.keys()) == {"x", "index", "priority_weight"} and batch["x"].equal(batch["index"])
    batch.set("td_error", batch["x"] + 5.0)
    buffer.update_tensordict_priority(batch)
    assert buffer.sampler.max_priority >= 5
    fewer = made(transform=lambda batch: batch.get(["x"]).slice(0, 2))
    fewer.extend(numbers(0, 3))
    assert list(fewer.sample(4)) == ["x"]  # these are other rows


def test_transforms_of_rows_that_came_as_tensordicts_get_tensordicts():
    TensorDict = pytest.importorskip("tensordict").TensorDict

    class Halved(torch.nn.Module):  # as torchrl's are
        def forward(self, batch):
            batch["next", "reward"] = batch["next", "reward"] * 2
            return batch.select("x", ("next", "reward"))

        def inv(self, batch):
            return batch.update({"next": {"reward": batch["next", "reward"] / 2}})

    buffer = DictTensorPrioritizedReplayBuffer(alpha=1.0, beta=1.0, transform=Halved(), generator=0)
    rows = TensorDict({"x": torch.arange(4), "next": {"reward": torch.arange(4.0), "y": torch.ones(4)}}, [4])
    buffer.extend(rows)
    batch = buffer.sample(3)
    assert isinstance(batch, TensorDict) and (batch["next", "reward"] == batch["x"]).all()
    assert set(batch.keys()) == {"x", "next", "index", "priority_weight"}
    assert rows["next", "reward"].tolist() == [0, 1, 2, 3]
    assert buffer["next", "reward"].tolist() == [0, 1, 2, 3] and buffer[2]["next", "reward"] == 2


def test_a_transform_may_refuse_rows():  # B4
    buffer = made(transform=Above(3))
    assert buffer.extend(numbers(0, 3)).tolist() == [] and buffer.add({"x": 0, "reward": 0.0}) == -1
    assert buffer.extend(numbers(1, 4)).tolist() == [0, 1] and buffer.add({"x": 9, "reward": 9.0}) == 2
    assert buffer["x"].tolist() == [3, 4, 9] and buffer.write_count == 3


@pytest.mark.parametrize("prefetch", [None, 2])
def test_a_transform_that_raises_leaves_the_buffer_alive(prefetch):  # B4
    fails = [False]

    def sometimes(batch):
        if fails[0]:
            raise ZeroDivisionError("no")
        return batch

    buffer = made(transform=sometimes, batch_size=2, prefetch=prefetch)
    buffer.extend(numbers(0, 5))
    buffer.sample()
    buffer.empty()  # nothing of before is made ahead
    buffer.extend(numbers(0, 5))
    fails[0] = True
    for _ in range(3):
        with pytest.raises(ZeroDivisionError, match="^no$"):
            buffer.sample()
    with pytest.raises(ZeroDivisionError):
        buffer[:]
    fails[0] = False
    buffer.extend(numbers(5, 1))
    assert set(buffer.sample()["x"].tolist()) <= set(range(6)) and len(buffer) == 6
    buffer.close()


def test_what_gives_no_batch_is_an_error():
    buffer = made(transform=lambda batch: None)
    buffer.extend(numbers(0, 3))
    with pytest.raises(TypeError, match="^<lambda> returned None, not a batch$"):
        buffer.sample(2)


@pytest.mark.parametrize("framework", ["numpy", "jax"])
def test_transforms_get_batches_of_the_framework(framework):
    seen = []

    class Watch(Transform):
        def forward(self, batch):
            seen.append(batch)
            return {**batch, "twice": batch["reward"] * 2}

        def inv(self, batch):
            batch["reward"] = batch["reward"] + 1
            return batch

    buffer = made(transform=Watch(), framework=framework)
    buffer.extend(numbers(0, 3))
    batch = buffer.sample(4)
    assert type(batch["twice"]).__module__.startswith(framework[:5]) and seen[0]["index"].shape == (4,)
    assert np.asarray(batch["twice"]).tolist() == (2 * (np.asarray(batch["x"]) + 1.0)).tolist()
    assert np.asarray(buffer["twice"]).tolist() == [2, 4, 6]


def test_a_batch_is_collated_before_it_is_transformed():  # B4
    def collate(batch):
        assert set(batch.keys()) == {"x", "reward"}
        return batch.get(["reward"])

    buffer = made(collate_fn=collate, transform=doubled)
    buffer.extend(numbers(0, 3))
    batch = buffer.sample(5)
    assert set(batch.keys()) == {"reward", "index"} and (batch["reward"] == 2 * batch["index"]).all()
    batch, info = buffer.sample(5, True, False)
    assert set(batch.keys()) == {"reward"} and set(info) == {"index"}
    wrong = made(collate_fn=lambda batch: 3)
    wrong.extend(numbers(0, 3))
    with pytest.raises(TypeError, match="^collate_fn must return a batch with keys, got int$"):
        wrong.sample(2)


@pytest.mark.parametrize("way", ["collate_fn", "transform"])
def test_what_is_made_a_tensordict_stays_one(way):  # the nearest way from torchrl
    TensorDict = pytest.importorskip("tensordict").TensorDict
    buffer = DictTensorPrioritizedReplayBuffer(
        storage=ListStorage(9), alpha=1.0, beta=1.0, generator=0, **{way: DictTensor.to_tensordict}
    )
    buffer.extend({"x": torch.arange(3), "next": {"reward": torch.arange(3.0)}})
    batch = buffer.sample(5)
    assert isinstance(batch, TensorDict) and batch.batch_size == (5,)
    assert (batch["next", "reward"] == batch["index"]).all() and batch["priority_weight"].shape == (5,)
    batch["td_error"] = batch["next", "reward"] + 7
    buffer.update_tensordict_priority(batch)
    assert buffer.sampler.max_priority >= 7
    if way == "transform":
        assert buffer["next", "reward"].tolist() == buffer["next"]["reward"].tolist() == [0, 1, 2]
        assert buffer[1]["next", "reward"] == 1 and buffer["x"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("prefetch", [None, 2])
def test_a_transform_that_is_put_among_those_of_the_buffer_counts_at_once(prefetch):
    buffer = made(batch_size=2, prefetch=prefetch)
    for _ in range(4):
        buffer.add({"x": 1, "reward": 4.0})
    for _ in range(4):
        assert buffer.sample()["reward"].tolist() == [4, 4]
    buffer.transform.append(Scaled(2))
    assert buffer.sample()["reward"].tolist() == [8, 8]
    buffer.add({"x": 1, "reward": 4.0})
    buffer.extend({"x": [1], "reward": [4.0]})
    assert buffer["reward"].tolist() == [8, 8, 8, 8, 4, 4]


def test_composed_transforms_are_one():
    inner = Compose(Scaled(2))
    inner.append(doubled)
    inner.insert(0, Shifted())
    outer = Compose(inner, Scaled(10))
    assert outer.forward(DictTensor({"reward": torch.tensor([1.0])}))["reward"].tolist() == [80]
    assert outer.inv(DictTensor({"reward": torch.tensor([80.0])}))["reward"].tolist() == [3]  # `doubled` has no inverse
    assert len(outer) == 2 and outer[0] is inner and outer.has_inverse and not Compose(doubled).has_inverse
    with pytest.raises(SpecError, match="is not in"):
        inner.insert(5, doubled)


def test_a_sampler_of_priorities_and_a_transform_that_adds_them():
    class Rated(Transform):
        def inv(self, batch):
            batch.set("td_error", batch["x"] + 1.0)
            return batch

    buffer = made(sampler=PrioritizedSampler(alpha=1.0, beta=1.0, eps=0.0), transform=Rated())
    buffer.extend(numbers(0, 3))
    assert buffer.sampler._of().tree.values[:3].tolist() == [1, 2, 3]


def test_a_row_that_a_writer_replaced_is_part_of_no_slice():
    reward = {"next": {"reward": torch.arange(6.0), "done": torch.tensor([0, 0, 0, 0, 0, 1]).bool()}}
    buffer = DictTensorReplayBuffer(storage=TensorStorage(6), batch_size=6, generator=0)
    buffer.extend({"x": torch.arange(6), **reward})
    buffer.set_writer(MaxValueWriter("next/reward"))
    more = {"reward": torch.tensor([60.0, 50.0, 2.5]), "done": torch.zeros(3, dtype=torch.bool)}
    buffer.extend({"x": torch.tensor([100, 101, 102]), "next": more})  # for rows 0 to 2
    buffer.set_writer(RoundRobinWriter())
    buffer.set_sampler(SliceSampler(slice_len=2))
    slices = {tuple(pair) for _ in range(40) for pair in buffer.sample()["x"].view(3, 2).tolist()}
    assert slices == {(3, 4), (4, 5)}
