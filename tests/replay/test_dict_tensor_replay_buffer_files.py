"""`DictTensorReplayBuffer` kept elsewhere and restored, and batches made ahead: the stream of samples is the same.

"R" and "B" as in test_dict_tensor_replay_buffer.py.
"""

from __future__ import annotations

import ast
import copy
import gc
import io
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import LIMIT
from replay_storages import DeviceStorage

from rlstructs import FileError, SpecError
from rlstructs.replay import (
    DictTensorPrioritizedReplayBuffer,
    DictTensorReplayBuffer,
    ImmutableWriter,
    ListStorage,
    MaxValueWriter,
    MemmapStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)

SAMPLERS = {
    "random": RandomSampler,
    "without replacement": SamplerWithoutReplacement,
    "drop last": lambda: SamplerWithoutReplacement(drop_last=True),
    "prioritised": lambda: PrioritizedSampler(alpha=0.7, beta=0.5),
    "slices": lambda: SliceSampler(slice_len=2),
    "trajectories": lambda: SliceSampler(slice_len=2, strict_length=False, per="trajectory"),
    "prioritised slices": lambda: PrioritizedSliceSampler(alpha=0.7, beta=0.5, slice_len=2, strict_length=False),
    "slices without replacement": lambda: SliceSamplerWithoutReplacement(slice_len=2),
}
STORAGES = {"list": ListStorage, "device": DeviceStorage, "memmap": MemmapStorage}


def made(sampler="random", storage="list", max_size=40, **settings):
    return DictTensorReplayBuffer(
        storage=STORAGES[storage](max_size), sampler=SAMPLERS[sampler], **{"batch_size": 6, "generator": 0, **settings}
    )


def rows(start, n):
    t = torch.arange(start, start + n)
    return {"x": t, "half": (t / 2).bfloat16(), "count": t.to(torch.uint16),
            "obs": t[:, None].repeat(1, 100).float(), "next": {"obs": (t + 1)[:, None].repeat(1, 100).float(),
            "reward": t.float(), "done": t % 7 == 6}}  # fmt: skip


def step(buffer, n):
    """A sample, priorities for it, and more rows; what was sampled."""
    batch, info = buffer.sample(return_info=True)
    if isinstance(buffer.sampler, PrioritizedSampler) and n % 2:
        buffer.update_priority(batch["index"], (batch["x"] % 5).float())
    if n % 3 == 2:
        buffer.extend(rows(1000 + n, n))
    return {key: value.tolist() for key, value in {**dict(batch.items()), **info}.items()}


def as_state(buffer, other, tmp_path):
    data = io.BytesIO()
    torch.save(buffer.state_dict(), data)
    data.seek(0)
    other.load_state_dict(torch.load(data, weights_only=True))
    return other


def as_file(suffix):
    def kept(buffer, other, tmp_path):
        buffer.save(tmp_path / f"x{suffix}")
        other.load(tmp_path / f"x{suffix}")
        return other

    return kept


def as_folder(buffer, other, tmp_path):
    buffer.dumps(tmp_path / "new" / "folder")
    other.loads(tmp_path / "new" / "folder")
    return other


WAYS = {
    "npz": as_file(".npz"), "pt": as_file(".pt"), "h5": as_file(".h5"), "folder": as_folder, "state_dict": as_state,
    "pickle": lambda buffer, other, tmp_path: pickle.loads(pickle.dumps(buffer)),
    "deepcopy": lambda buffer, other, tmp_path: copy.deepcopy(buffer),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("storage", STORAGES)
def test_what_is_restored_goes_on_in_the_same_stream(way, sampler, storage, tmp_path):  # R30, B6 TestRNG
    n_rows = {"npz": 25, "pt": 55}.get(way, 37)
    buffer, other = (made(sampler, storage, prefetch=prefetch) for prefetch in (2, None))
    buffer.extend(rows(0, n_rows))
    other.extend(rows(500, 9))  # what it held is gone
    other.sample()
    for n in range(4):
        step(buffer, n)
    restored = WAYS[way](buffer, other, tmp_path)
    assert restored[:] == buffer[:] and restored.write_count == buffer.write_count
    assert [step(restored, n) for n in range(9)] == [step(buffer, n) for n in range(9)]
    buffer.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_late_priority_is_dropped_after_restoring_too(way, tmp_path):
    buffer, other = (made("prioritised", max_size=6) for _ in range(2))
    buffer.extend(rows(0, 6))
    batch = buffer.sample()
    buffer.extend(rows(6, 3))
    restored = WAYS[way](buffer, other, tmp_path)
    for each in (buffer, restored):
        each.update_priority(batch["index"], 50.0)
        each.sample()
    values = [each.sampler._of().tree.values for each in (buffer, restored)]
    assert values[0].tolist() == values[1].tolist() and (values[0][:3] < 2).all()
    assert restored.sampler.max_priority == pytest.approx(buffer.sampler.max_priority)


@pytest.mark.parametrize("way", WAYS)
def test_a_grown_list_storage_is_restored_into_one_that_is_smaller_or_larger(way, tmp_path):
    for n, n_other in ((3000, 0), (10, 3000), (5000, 10), (7000, 6000)):
        buffer, other = (
            DictTensorReplayBuffer(storage=ListStorage(5000), sampler=PrioritizedSampler, generator=1) for _ in range(2)
        )
        for each, size in ((buffer, n), (other, n_other)):
            for start in range(0, size, 1000):
                each.extend({"x": torch.arange(start, min(start + 1000, size))})
        if n_other == 6000:
            other.empty()
        restored = WAYS[way](buffer, other, tmp_path)
        for each in (buffer, restored):
            each.extend({"x": torch.arange(-1500, 0)})
        assert restored["x"].tolist() == buffer["x"].tolist()
        assert restored.sample(50)["x"].tolist() == buffer.sample(50)["x"].tolist()


def test_a_sampler_comes_back_with_its_exponents_and_its_writer_with_its_ranks(tmp_path):
    def ranked():
        return DictTensorPrioritizedReplayBuffer(
            alpha=0.5, beta=0.5, storage=ListStorage(5), writer=MaxValueWriter("x"), generator=0
        )

    buffer, other = ranked(), ranked()
    buffer.extend({"x": torch.tensor([4, 8, 1, 9, 6, 7])})
    buffer.sampler.alpha, buffer.sampler.beta = 0.8, 0.9
    buffer.update_priority(torch.arange(5), torch.arange(5.0))
    other.load_state_dict(buffer.state_dict())
    assert (other.sampler.alpha, other.sampler.beta) == (0.8, 0.9)
    for each in (buffer, other):
        assert each.extend({"x": torch.tensor([5, 3, 7])}).tolist() == [-1, -1, 0]
    assert other.sample(20)["priority_weight"].tolist() == buffer.sample(20)["priority_weight"].tolist()


def test_a_folder_holds_one_file_of_plain_arrays(tmp_path):
    buffer = made()
    buffer.extend(rows(0, 5))
    buffer.dump(tmp_path / "x")
    first = (tmp_path / "x" / "buffer.npz").read_bytes()
    buffer.extend(rows(5, 5))
    buffer.dumps(tmp_path / "x")  # over what was there
    assert [file.name for file in (tmp_path / "x").iterdir()] == ["buffer.npz"]
    assert (tmp_path / "x" / "buffer.npz").read_bytes() != first
    np.load(tmp_path / "x" / "buffer.npz", allow_pickle=False)["rows/x"]
    other = made()
    other.load(tmp_path / "x")  # the folder, or the file in it
    assert len(other) == 10
    empty, into = made(), made()  # B4: torchrl cannot
    empty.dumps(tmp_path / "empty")
    into.loads(tmp_path / "empty")
    assert len(into) == 0 and into.extend(rows(0, 2)).tolist() == [0, 1]


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("name", ["x", "x.d", "exp_0.5"])
def test_a_folder_is_saved_to_as_torchrl_does(name, is_there, tmp_path):
    buffer, other = made(), made()
    buffer.extend(rows(0, 5))
    if is_there:
        (tmp_path / name).mkdir()
    buffer.save(str(tmp_path / name))
    assert (tmp_path / name / "buffer.npz").is_file()
    other.load(str(tmp_path / name))
    assert other["x"].tolist() == buffer["x"].tolist() and len(other) == 5


def test_a_dump_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    buffer = made()
    buffer.extend(rows(0, 5))
    buffer.dumps(tmp_path / "x")
    before = (tmp_path / "x" / "buffer.npz").read_bytes()

    def full(*args, **kwargs):
        raise OSError(28, "the disk is full")

    monkeypatch.setattr(np.lib.format, "write_array_header_1_0", full)
    for folder in ("x", "y"):
        with pytest.raises(OSError, match="the disk is full"):
            buffer.dumps(tmp_path / folder)
    assert (tmp_path / "x" / "buffer.npz").read_bytes() == before and not (tmp_path / "y").exists()
    assert [file.name for file in (tmp_path / "x").iterdir()] == ["buffer.npz"]


def test_state_dicts_are_copies():
    buffer = made("without replacement", "list", 10)
    buffer.extend(rows(0, 10))
    buffer.sample()
    state = buffer.state_dict()
    kept = copy.deepcopy(state)
    buffer.extend(rows(50, 7))
    buffer.sample()
    assert all(state["arrays"][name].equal(kept["arrays"][name]) for name in kept["arrays"])
    other = made("without replacement", "list", 10)
    other.load_state_dict(state)
    for tensor in state["arrays"].values():
        tensor.zero_()
    assert other["x"].tolist() == list(range(10)) and set(other.sample()["x"].tolist()) <= set(range(10))


OTHERS = {
    "another size": (lambda: made(max_size=41), "it has room for 40 rows|holds 1 lanes of"),
    "another sampler": (lambda: made("slices"), "expected .40, 'SliceSampler'"),
    "other columns": (lambda: made(), "has columns"),
    "another class": (
        lambda: DictTensorPrioritizedReplayBuffer(alpha=0.5, beta=0.5, storage=ListStorage(40), batch_size=6),
        "holds a DictTensorReplayBuffer, not a DictTensorPrioritizedReplayBuffer",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
@pytest.mark.parametrize("way", ["npz", "folder", "state_dict"])
def test_what_does_not_fit_changes_nothing(case, way, tmp_path):
    buffer = made()
    buffer.extend(rows(0, 5))
    make, message = OTHERS[case]
    other = make()
    other.extend({"y": torch.arange(4), "done": torch.ones(4)} if case == "other columns" else rows(9, 4))
    state = other.state_dict()
    with pytest.raises(FileError, match=message):
        WAYS[way](buffer, other, tmp_path)
    after = other.state_dict()
    assert state["state"] == after["state"] and all(v.equal(after["arrays"][k]) for k, v in state["arrays"].items())


def change(state, path, value):
    for key in path[:-1]:
        state = state[key]
    state[path[-1]] = value


DAMAGES = {
    "no state": (["state"], {}),
    "version": (["version"], 99),
    "a sampler's order": (["arrays", "more/order"], torch.zeros(2)),
    "the counters": (["arrays", "ring"], torch.zeros(3, 1)),
    "counters that cannot be": (["arrays", "ring"], torch.tensor([[5], [0], [3]])),
    "a column": (["arrays", "rows/x"], torch.zeros(1, 3)),
    "the generator": (["state", "rng"], {"bit_generator": "PCG64"}),
    "the sampler": (["state", "own", "sampler"], {}),
    "arrays": (["arrays"], {"ring": "text"}),
    "what is stored once": (["arrays", "links/next/obs/at"], torch.zeros(1, 2)),
    "where that lies": (["arrays", "links/next/obs/at"], torch.tensor([[0, 99]])),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_state_dict_changes_nothing(case):
    buffer = made("without replacement", max_size=9)
    buffer.extend(rows(0, 9))
    buffer.sample()
    before = buffer[:]
    state = buffer.state_dict()
    change(state, *DAMAGES[case])
    with pytest.raises(FileError, match="^load_state_dict: "):
        buffer.load_state_dict(state)
    assert buffer[:] == before and sorted(buffer.sampler._order.steps) == list(range(9))
    for nonsense in ({}, 3, None, {"class": "x", "version": 1}):
        with pytest.raises(FileError, match="^load_state_dict: not the state of a buffer"):
            buffer.load_state_dict(nonsense)


def test_a_file_that_is_not_there_or_damaged(tmp_path):
    buffer = made()
    with pytest.raises(FileNotFoundError):
        buffer.loads(tmp_path)
    buffer.extend(rows(0, 5))
    buffer.dumps(tmp_path / "x")
    file = tmp_path / "x" / "buffer.npz"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(FileError):
        buffer.loads(tmp_path / "x")
    assert len(buffer) == 5


def test_what_torchrls_own_buffers_wrote_is_refused_by_name(tmp_path):
    buffer = made()
    buffer.extend(rows(0, 5))
    before, advice = buffer[:], "load it into a buffer of torchrl, and give that one's rows"
    theirs = {"_storage": {"_storage": {}, "_len": 5}, "_sampler": {}, "_writer": {"_cursor": 5}, "_batch_size": None}
    with pytest.raises(FileError, match=f"^load_state_dict: this is a state of torchrl's own, .*; {advice}"):
        buffer.load_state_dict(theirs)
    (tmp_path / "storage").mkdir()
    (tmp_path / "buffer_metadata.json").write_text('{"batch_size": null}')
    for method in (buffer.loads, buffer.load):
        with pytest.raises(FileError, match=f": this is a folder of torchrl's own, .*; {advice}"):
            method(tmp_path)
    assert buffer[:] == before
    buffer.dumps(tmp_path)  # into the same folder
    buffer.loads(tmp_path)
    assert buffer[:] == before


def test_an_immutable_buffer_can_be_loaded(tmp_path):
    buffer = made()
    buffer.extend(rows(0, 5))
    buffer.dumps(tmp_path / "x")
    frozen = made(writer=ImmutableWriter)
    frozen.loads(tmp_path / "x")
    assert frozen["x"].tolist() == [0, 1, 2, 3, 4]


# Batches made ahead


def prefetching(sampler="random", depth=3, **settings):
    buffer = made(sampler, prefetch=depth, **settings)
    buffer.extend(rows(0, 20))
    return buffer


@pytest.mark.parametrize("sampler", SAMPLERS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_the_stream_is_the_same_with_and_without_prefetch(sampler, data):  # issue 4
    buffers = [made(sampler, prefetch=prefetch) for prefetch in (None, 3)]
    shared = [np.random.default_rng(5) for _ in buffers]
    for buffer, generator in zip(buffers, shared, strict=True):
        buffer.extend(rows(0, 20))
        buffer.generator = generator  # that somebody else draws from, too
    operations = ["sample"] * 8 + ["iterate", "extend", "add", "empty", "put", "priority", "beta", "draw", "larger",
                                   "transform", "without info", "fail"]  # fmt: skip
    streams = [iter(()), iter(())]
    for n in range(data.draw(st.integers(1, 25))):
        operation = data.draw(st.sampled_from(operations))
        found = []
        for at, (buffer, generator) in enumerate(zip(buffers, shared, strict=True)):
            found.append(operate(operation, buffer, generator, n, streams, at))
        assert found[0] == found[1]
    buffers[1].close()


def operate(operation, buffer, generator, n, streams, at):
    """What one operation gives."""
    batch = None
    if operation in ("sample", "priority", "larger", "without info"):
        if operation == "larger":
            with pytest.warns(UserWarning, match="batch_size 8 is another"):
                batch = buffer.sample(8)
        else:
            batch = buffer.sample(include_info=operation != "without info")
        if operation == "priority" and isinstance(buffer.sampler, PrioritizedSampler):
            buffer.update_priority(batch["index"], (batch["x"] % 3).float())
    elif operation == "iterate":
        streams[at] = iter(buffer)
    elif operation == "extend":
        buffer.extend(rows(100 * n, n % 9 + 1))
    elif operation == "add":
        buffer.add({key: value[0] for key, value in dict(buffer[:1].items()).items()})
    elif operation == "empty":
        buffer.empty()
        buffer.extend(rows(n, 15))
    elif operation == "put":
        buffer[n % 10] = {"x": -n}
    elif operation == "beta" and isinstance(buffer.sampler, PrioritizedSampler):
        buffer.sampler.beta = n / 10
    elif operation == "draw":
        return generator.random()
    elif operation == "transform":
        buffer.append_transform(lambda batch: batch)
    elif operation == "fail":
        with pytest.raises(SpecError):
            buffer.extend({"nothing": torch.zeros(3)})
    batch = next(streams[at], None) if operation in ("iterate", "fail") else batch
    return None if batch is None else {key: value.tolist() for key, value in batch.items()}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_no_batch_is_older_than_what_changed_last(sampler):  # B5.4
    buffer = prefetching(sampler)
    for n in range(1, 6):
        for _ in range(3):
            buffer.sample()
        buffer.empty()
        buffer.extend(rows(1000 * n, 14))
        assert (buffer.sample()["x"] >= 1000 * n).all()
        buffer["x"] = torch.full((14,), -n)
        assert (buffer.sample()["x"] == -n).all()
    buffer.close()


def test_as_many_batches_are_made_ahead_as_were_asked_for():  # R44: "prefetch=1 fetches nothing"
    where = []
    for depth in (1, 4):
        made_by = []

        def watched(batch, made_by=made_by):
            made_by.append(threading.current_thread().name)
            return batch

        buffer = prefetching(depth=depth, transform=watched)
        buffer.sample()
        assert buffer.stats()["prefetch_queue_size"] == depth
        for batch in list(buffer._sampling.ahead._queue):
            batch.future.result()
        assert len(made_by) == depth + 1 and sum(name.startswith("rlstructs-prefetch") for name in made_by) >= depth
        where += made_by
        buffer.extend(rows(0, 1))
        buffer.sample()  # nothing that was made counts, and what changes now would not either
        assert buffer.stats()["prefetch_queue_size"] == 0
        buffer.sample()
        assert buffer.stats()["prefetch_queue_size"] == depth
        buffer.close()
    assert threading.main_thread().name in where


def own_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("rlstructs-prefetch")]


def test_threads_end_with_the_buffer():
    before = set(own_threads())
    buffer = prefetching()
    for _ in range(5):
        buffer.sample()
    threads = set(own_threads()) - before
    assert threads
    del buffer
    gc.collect()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()


def test_a_buffer_that_was_closed_makes_nothing_ahead():
    buffer, plain = prefetching(), made()
    plain.extend(rows(0, 20))
    before = set(own_threads())
    streams = [[], []]
    for n in range(6):
        if n == 3:
            buffer.close()
            buffer.close()
            assert not set(own_threads()) - before
        for stream, each in zip(streams, (buffer, plain), strict=True):
            stream.append(each.sample()["x"].tolist())
    assert streams[0] == streams[1] and buffer.stats()["prefetch_queue_size"] == 0


@pytest.mark.parametrize("way", ["pickle", "deepcopy", "state_dict", "npz"])
def test_what_is_restored_while_batches_are_made_goes_on_in_the_same_stream(way, tmp_path):
    buffer = prefetching("without replacement")
    for _ in range(5):
        buffer.sample()
    restored = WAYS[way](buffer, prefetching("without replacement"), tmp_path)
    for _ in range(5):
        assert restored.sample()["x"].tolist() == buffer.sample()["x"].tolist()
    assert restored._sampling.ahead.depth == 3
    buffer.close()
    restored.close()


def test_what_goes_wrong_ahead_is_told_when_its_turn_comes():  # B4
    plain = made("random")
    plain.extend(rows(0, 20))
    drawn = [plain.sample()["x"].tolist() for _ in range(7)]

    def sometimes(batch):
        number = drawn.index(batch["x"].tolist())
        if number in (2, 3):
            raise ZeroDivisionError(f"batch {number}")
        return batch

    buffer = prefetching(depth=1, transform=sometimes)
    outcomes = []
    for _ in range(7):
        try:
            outcomes.append(buffer.sample().n_elems())
        except ZeroDivisionError as error:
            outcomes.append(str(error))
    assert outcomes == [6, 6, "batch 2", "batch 3", 6, 6, 6]
    buffer.close()


EXIT = """
import time, torch
from rlstructs.replay import *
def slow(batch):
    time.sleep(0.2)
    return batch
buffer = DictTensorReplayBuffer(storage=ListStorage(10), batch_size=2, prefetch=4, transform=slow)
buffer.extend({"x": torch.arange(5)})
buffer.sample()
print("done")
"""

FORK = """
import os, torch
from rlstructs.replay import *
buffer = DictTensorReplayBuffer(storage=ListStorage(10), batch_size=2, prefetch=2, generator=0)
buffer.extend({"x": torch.arange(5)})
for _ in range(3):
    buffer.sample()
pid = os.fork()
stream = [buffer.sample()["x"].tolist() for _ in range(4)]
if pid == 0:
    print(stream, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
print(stream)
"""

FORK_WHILE_WRITTEN = """
import os, signal, threading, torch
from rlstructs.replay import *
inside, go_on = threading.Event(), threading.Event()
class Slow(Transform):
    def inv(self, batch):
        inside.set()
        go_on.wait()
        return batch
buffer = DictTensorReplayBuffer(storage=ListStorage(20), batch_size=2, transform=Slow())
threading.Thread(target=buffer.extend, args=({"x": torch.arange(5)},)).start()
inside.wait()
go_on.set()
pid = os.fork()
if pid == 0:
    signal.alarm(600)  # ends it if it hangs
    print(len(buffer), buffer.sample().n_elems(), flush=True)
    os._exit(0)
print(os.waitpid(pid, 0)[1])
"""


def run(code):
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=LIMIT,
                          check=True, cwd=Path(__file__).parents[2])  # fmt: skip
    return done.stdout.splitlines()


def test_a_program_ends_while_batches_are_made():
    assert run(EXIT) == ["done"]


def test_a_process_that_was_forked_samples_on():
    [child, parent] = run(FORK)
    assert len(ast.literal_eval(child)) == 4 and child != parent  # from a stream of its own
    alone = FORK.replace("os.fork()", "os.getpid()").replace("os.waitpid(pid, 0)", "")
    assert run(alone) == [parent]  # as without a child


def test_a_process_that_was_forked_while_a_thread_wrote_samples_on():
    assert run(FORK_WHILE_WRITTEN) == ["5 2", "0"]
