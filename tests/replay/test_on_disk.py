"""Rows in a folder: those of raw columns, bit for bit, also after the program that wrote them was killed."""

from __future__ import annotations

import copy
import errno
import gc
import json
import multiprocessing
import os
import pickle
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from frameworks import flat
from hypothesis import given, settings
from hypothesis import strategies as st
from surfaces import EVERY_SURFACE, trajectories
from test_compressed import rows_of

from rlstructs import FileError, SpecError, StateError
from rlstructs.memories.torch import PrioritizedMemory, RandomMemory
from rlstructs.replay import (
    ChunkReplayBuffer,
    Compression,
    DictTensorReplayBuffer,
    ReplayBuffer,
    TensorStorage,
    VectorReplayBuffer,
)
from rlstructs.replay.rows import compressed, on_disk, step_writer
from rlstructs.replay.rows.folder import make_storage
from rlstructs.replay.rows.lanes import FLOOR, HEAD, LANE, SLOT
from rlstructs.replay.rows.spec import Spec

FRAME = Spec(np.dtype(np.uint8), (20, 20))
SPECS = {
    "frame": FRAME,
    "value": Spec(np.dtype(np.float32), (100,)),
    "reward": Spec(np.dtype(np.float32)),
    "action": Spec(np.dtype(np.int64), (2,)),
}
COMPRESSED = {"frame": "zstd:1", "value": "zstd:1"}


def store(path, n_lanes=2, capacity=5, order=LANE, compression=None):
    made = make_storage("test", n_lanes, capacity, order, compression=compression, path=path)
    if not made.columns.specs:
        made.add_columns(SPECS)
    made.track_episodes()
    return made


def held(storage):
    """The valid rows of each column as bytes, and their episodes."""
    rows = storage.view().by_lane(1)[0]
    found = {name: storage.gather([name], rows)[0].tobytes() for name in storage.columns.specs}
    return found, storage.ring.head.tolist(), storage.episodes.end(rows).tolist(), storage.episodes.times(rows).tolist()


ACTIONS = st.lists(
    st.sampled_from(["write", "write", "some", "put", "clear", "copy", "pickle", "grow", "reopen", "reopen"]),
    max_size=14,
)


@settings(max_examples=20, deadline=None)
@given(
    actions=ACTIONS, seed=st.integers(0, 2**32 - 1), order=st.sampled_from([LANE, SLOT]),
    compression=st.sampled_from([None, COMPRESSED]),
)  # fmt: skip
def test_rows_are_those_of_raw_columns_after_whatever_happens_to_them(
    actions, seed, order, compression, tmp_path_factory
):
    path = tmp_path_factory.mktemp("rows")
    made, raw = store(path, order=order, compression=compression), store(None, order=order)
    rng, is_copy = np.random.default_rng(seed), False
    for action in actions:
        lanes = rng.permutation(2)[: rng.integers(1, 3)]
        if action in ("write", "some"):
            n = int(rng.integers(1, 12))
            names = list(SPECS)[: 4 if action == "write" else 3]
            block, done = (
                {name: rows_of(rng, (len(lanes), n), SPECS[name]) for name in names},
                rng.random((len(lanes), n)) < 0.3,
            )
            for each in (made, raw):
                each.write(block, lanes, done=done)
        elif action == "put":
            rows = rng.permutation(made.columns.n_rows)[: rng.integers(1, 6)]
            block = {"frame": rows_of(rng, (len(rows),), FRAME)}
            for each in (made, raw):
                each.put(block, rows)
        elif action == "clear":
            made.clear(lanes), raw.clear(lanes)
        elif action in ("copy", "pickle"):
            made, is_copy = copy.deepcopy(made) if action == "copy" else pickle.loads(pickle.dumps(made)), True
        elif action == "grow" and (raw.ring.reserved <= raw.columns.capacity).all():
            for each in (made, raw):
                each.grow(each.columns.capacity + 2)
        elif action == "reopen" and not is_copy:
            capacity = made.columns.capacity
            del made
            gc.collect()
            made = store(path, capacity=capacity, order=order, compression=compression)
            made.alignment = raw.alignment
            raw.end_episodes()
        assert held(made) == held(raw)


SURFACES = [case for case in EVERY_SURFACE if case.id.startswith("on-disk") and "Cached" not in case.id]


@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize("n", [6, 45])  # some, and more than there is room for
def test_a_folder_opens_again_with_every_row_on_every_surface(surface, n, tmp_path, monkeypatch):
    monkeypatch.setattr("surfaces._NewPath.__fspath__", lambda path: str(tmp_path / "rows"))

    def everything():
        return {name: surface.episodes(made, name) for name in surface.stores(made)[0].columns.specs}

    made = surface.make()
    made.add_trajectories(trajectories(0, n), names=surface.names)
    before = everything()
    for start in (1000, 2000):
        del made
        gc.collect()
        made = surface.make()
        assert everything() == before
        made.add_trajectories(trajectories(start, 3), names=surface.names)  # of episodes of their own
        before = everything()
        assert [float(start), start + 1.0, start + 2.0] in before[surface.action]


def killed(function, *args, after=200):
    """Kills a process that calls a function with a counter of its rows, once these are so many."""
    context = multiprocessing.get_context("forkserver")
    counter = context.RawValue("l", 0)
    process = context.Process(target=function, args=(counter, *args))
    process.start()
    while counter.value < after and process.is_alive():
        pass
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL


def frames_of(numbers, size):
    """Frames (n, size) that tell their numbers; but for every third they are noise, which does not become smaller."""
    numbers = np.asarray(numbers).reshape(-1, 1)
    noise = (numbers + 1) * 2_654_435_761 * (np.arange(size) + 7) ** 2 >> 16
    return np.where(numbers % 3 == 0, numbers % 251, noise % 256).astype(np.uint8)


def memory_at(path, compression):
    made = PrioritizedMemory(memory_size=64, num_envs=2, device="cpu", seed=0, path=path, compression=compression)
    for name, size, dtype in (("frame", 4000, torch.uint8), ("count", 1, torch.int64), ("last", 500, torch.int64)):
        made.create_tensor(name, size, dtype)
    return made


def write_memory(counter, path, compression):
    made, lanes = memory_at(path, compression), np.arange(2)
    while True:
        row = (counter.value * 2 + lanes)[:, None]
        made.add_samples(frame=frames_of(row, 4000), count=row, last=np.repeat(row, 500, 1))
        counter.value += 1


def check_memory(path, compression, least):
    """Checks that every row is whole; returns how many rows each environment has had, at least."""
    made = memory_at(path, compression)
    [[frame, count, last]] = made.sample_all(["frame", "count", "last"])
    assert len(made) >= 2 * least
    assert (frame.numpy() == frames_of(count, 4000)).all() and (last == count).all()
    for lane in range(2):
        rows = count[count % 2 == lane]
        assert (rows.diff() == 2).all()
    [[again, of_row]] = made.sample(["frame", "count"], 50)
    assert (again.numpy() == frames_of(of_row, 4000)).all()
    return int(count.max()) // 2


def buffer_at(path, compression):
    return ReplayBuffer(64, path=path, compression=compression)


def after_of(numbers):
    """The numbers of the frames after these, of another episode after each seventh."""
    return np.where(numbers % 7 == 6, 10**6 + numbers, numbers + 1)


def write_buffer(counter, path, compression):
    made = buffer_at(path, compression)
    while True:
        t = counter.value
        obs, after = frames_of([t, after_of(np.array(t))], 3000)
        ends = {"terminated": t % 7 == 6, "truncated": False}
        made.add({"obs": obs, "act": t, "rew": float(t), "obs_next": after, **ends})
        counter.value += 1


def check_buffer(path, compression, least):
    made = buffer_at(path, compression)
    batch = made[:]
    count = np.asarray(batch.act)
    assert len(made) >= least and (np.diff(count) == 1).all()
    assert "obs_next" in made._storage.columns.links
    assert (batch.obs == frames_of(count, 3000)).all() and (batch.obs_next == frames_of(after_of(count), 3000)).all()
    made.add(
        {"obs": batch.obs[0], "act": -1, "rew": 0.0, "terminated": True, "truncated": False, "obs_next": batch.obs[0]}
    )
    assert made[[made.last_index[0]]].act == [-1]
    return int(count[-1])


# What writes and what checks, the compression, and how many rows there are at least: all but those being overwritten.
KINDS = {
    "memory": (write_memory, check_memory, None, 62),
    "linked": (write_buffer, check_buffer, None, 63),
    "compressed memory": (write_memory, check_memory, "zstd:1", 62),
    "compressed linked": (write_buffer, check_buffer, "zstd:1", 63),
    "limited memory": (write_memory, check_memory, Compression("zstd:1", max_bytes=2 * 24 * 4000), 8),
    "limited linked": (write_buffer, check_buffer, Compression("zstd:1", max_bytes=24 * 3000), 8),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_that_is_killed_leaves_whole_rows_alone(kind, tmp_path):
    write, check, compression, least = KINDS[kind]
    for number in range(3 if compression is None else 1):
        path = tmp_path / str(number)
        killed(write, path, compression, after=200 + number)
        assert check(path, compression, least) >= 198 + number


class Killed(BaseException):
    pass


@pytest.mark.parametrize("n_before", [3, 10])  # in a ring that has room, and in a full one
def test_no_write_of_a_row_leaves_half_of_it_wherever_it_ends(n_before, tmp_path, monkeypatch):
    write, left = on_disk.FileBlock.write, [10**9]

    def step(*_):
        if not left[0]:
            raise Killed
        left[0] -= 1

    monkeypatch.setattr(on_disk.FileBlock, "write", lambda *given: (step(), write(*given)))
    monkeypatch.setattr(step_writer, "keep_order", step)  # before rows are written, and after it

    def add(t):
        frames = [np.full(300, number, np.uint8) for number in (t, t + 1 if t % 3 else 255)]
        row = {"act": t, "rew": float(t), "terminated": t % 3 == 0, "truncated": False}
        buffer.add({"obs": frames[0], "obs_next": frames[1], **row})

    ends = 0
    for at in range(8):
        buffer = ReplayBuffer(8, path=tmp_path / str(at))
        for t in range(n_before):
            add(t)
        left[0] = at
        try:
            add(n_before)
            ends += 1
        except Killed:
            pass
        left[0] = 10**9
        del buffer
        gc.collect()
        buffer = ReplayBuffer(8, path=tmp_path / str(at))
        batch = buffer[:]
        count = np.asarray(batch.act)
        assert count.tolist() == list(range(max(0, n_before - 8 + 1), n_before + (ends > 0)))[-8:]
        assert (batch.obs == (count % 251)[:, None]).all() and (batch.rew == count).all()
        assert (batch.obs_next == np.where(count % 3 == 0, 255, (count + 1) % 251)[:, None]).all()
        for t in range(n_before + (ends > 0), n_before + 9):
            add(t)
        assert np.asarray(buffer[:].act).tolist() == list(range(n_before + 1, n_before + 9))
    assert ends


LEFT = [10**9]


def store_one():
    if not LEFT[0]:
        raise Killed
    LEFT[0] -= 1


class Stores:
    """Numbers or bytes that are stored, until the program is killed."""

    def __init__(self, inner):
        self._inner = inner

    def __getitem__(self, at):
        return self._inner[at]

    def __setitem__(self, at, value):
        store_one()
        self._inner[at] = value


class StoredArray(np.ndarray):
    def __setitem__(self, at, value):
        store_one()
        super().__setitem__(at, value)


@pytest.mark.parametrize("n_fit", [None, 12], ids=["all rows fit", "some rows fit"])
@pytest.mark.parametrize("where", ["memory", "folder"])
def test_no_store_of_a_compressed_row_leaves_half_of_it_wherever_it_ends(where, n_fit, tmp_path, monkeypatch):
    made_whole, size, capacity = compressed.CompressedBlock._map, 400, 30

    def watch(block):
        made_whole(block)
        block._fast, block._bytes = Stores(block._fast), Stores(block._bytes)
        block._counts, block._lanes = block._counts.view(StoredArray), block._lanes.view(StoredArray)

    monkeypatch.setattr(compressed.CompressedBlock, "_map", watch)
    monkeypatch.setattr(compressed, "SEGMENT", 4 * size)
    setting = Compression({"frame": "zstd:1"}, None if n_fit is None else n_fit * size)

    def opened():
        made = make_storage("test", 1, capacity, compression=setting, path=None if where == "memory" else tmp_path)
        if not made.columns.specs:
            made.add_columns({"frame": Spec(np.dtype(np.uint8), (size,)), "step": Spec(np.dtype(np.int64))})
        return made

    def frames(numbers):
        found = frames_of(numbers, size)
        found[:, :8] = np.asarray(numbers, np.int64)[:, None].view(np.uint8)
        return found

    made, rng, n_killed = opened(), np.random.default_rng(0), 0
    for number in range(1500):
        rows, LEFT[0] = made.view().every_row(), int(rng.integers(60))
        try:
            if rows.size and rng.random() < 0.6:
                made.put({"frame": frames([number])}, rng.choice(rows, 1))
            else:
                n = int(rng.integers(1, 4))
                steps = made.ring.head[0] + np.arange(n)
                made.write({"frame": frames(number + 3 * steps)[None], "step": steps[None]})
        except Killed:
            n_killed += 1
            if where == "folder":
                del made
                gc.collect()
        LEFT[0] = 10**9
        if where == "folder" and "made" not in locals():
            made = opened()
        head, rows = int(made.ring.head[0]), made.view().every_row()
        frame, step = made.gather(["frame", "step"], rows)
        assert (frame == frames(frame[:, :8].copy().view(np.int64)[:, 0])).all()
        assert sorted(step.tolist()) == list(range(head - len(rows), head))
        assert len(rows) >= min(head, capacity - 3 if n_fit is None else 4)
    assert n_killed > 100


def filled(path, n=10, size=8, **more):
    buffer = ReplayBuffer(size, path=path, **more)
    for t in range(n):
        row = {"obs": np.full(300, t, np.uint8), "act": t, "rew": 0.0, "terminated": False, "truncated": False}
        buffer.add(row)
    return buffer


def change(path, **entries):
    file = path / on_disk.MANIFEST
    changed = {**json.loads(file.read_text()), **entries}
    file.write_text(json.dumps({**changed, on_disk.CHECKSUM: on_disk.checksum_of(changed)}))


def change_to_raw(path):
    columns = json.loads((path / on_disk.MANIFEST).read_text())["columns"]
    columns["obs"] |= {"file": columns["obs"].pop("files")[0], "by_row": True}
    change(path, columns=columns)


def change_a_name(path):
    file = path / on_disk.MANIFEST
    file.write_text(file.read_text().replace("terminated", "terminatex"))


def read_small_rows(path):
    columns = json.loads((path / on_disk.MANIFEST).read_text())["columns"]
    columns["act"] |= {"by_row": True, "record": None}
    change(path, columns=columns)


def change_places(path):
    file = json.loads((path / on_disk.MANIFEST).read_text())["columns"]["obs"]["files"][0]
    numbers = np.fromfile(path / file, np.int64)
    numbers[3] += 1 << 40
    numbers.tofile(path / file)


def change_numbers(path, name, dtype, at, number):
    file = path / json.loads((path / on_disk.MANIFEST).read_text())[name]
    numbers = np.fromfile(file, dtype)
    numbers[at] = number
    numbers.tofile(file)


PACKED = {"compression": {"obs": "zstd"}}
DAMAGES = {
    "version": (lambda path: change(path, version=9), "is version 9 of 'rlstructs rows', expected version 1"),
    "format": (lambda path: change(path, format="x"), "is version 1 of 'x', expected"),
    "no JSON": (lambda path: (path / on_disk.MANIFEST).write_text("{"), "store.json: "),
    "another object": (lambda path: (path / on_disk.MANIFEST).write_text("[]"), "expected an object"),
    "size": (lambda path: change(path, capacity=80), "lanes of 80 rows in order 'lane', this memory is"),
    "class": (lambda path: change(path, kind="Memory"), "holds 'Memory' of"),
    "columns": (lambda path: change(path, columns={"obs": 3}), "store.json: TypeError"),
    "a name": (change_a_name, "its checksum is another one; it is damaged"),
    "small rows": (read_small_rows, "column 'act' is too small to be read by row: 8 bytes"),
    "deep": (lambda path: (path / on_disk.MANIFEST).write_text("[" * 100_000), "store.json: "),
    "long": (lambda path: change(path, kind="x" * 5000), r"holds .{,600}, this memory is"),
    "counters": (lambda path: change_numbers(path, "counters", np.int64, HEAD, 1 << 62), "<= base <= head <= reserved"),
    "floors": (lambda path: change_numbers(path, "counters", np.int64, FLOOR, -1), "0 <= floor <= head"),
    "episodes": (
        lambda path: change_numbers(path, "episodes", np.int32, 6, 5), "steps and lengths of its episodes contradict"
    ),
    "no counters": (lambda path: change(path, counters="../x"), "'../x' is no name of a file"),
    "packed places": (change_places, "the places of the compressed rows of 'obs' make no sense"),
    "packed column": (change_to_raw, "store.json: KeyError: 'files'"),
    "packed otherwise": (
        lambda path: change(path, compression="zstd:9"), "compression 'zstd:9', this memory is .*, compression {'obs'"
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_folder_that_is_damaged_or_of_another_memory_is_an_error_that_says_so(damage, tmp_path):
    act, message = DAMAGES[damage]
    settings = PACKED if damage.startswith("packed") else {}
    filled(tmp_path, **settings)
    gc.collect()
    act(tmp_path)
    content = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(FileError, match=message):
        ReplayBuffer(8, path=tmp_path, **settings)
    gc.collect()
    # A file of counters may have been made, and is removed by the next one that opens the folder.
    assert content.items() <= {file.name: file.read_bytes() for file in tmp_path.iterdir()}.items()


@pytest.mark.parametrize("settings", [{}, PACKED], ids=["raw", "compressed"])
def test_a_file_that_is_missing_or_truncated_is_named(settings, tmp_path):
    for number, file in enumerate(sorted(json_files(tmp_path / "model", settings))):
        for way in ("truncated", "missing"):
            path = tmp_path / f"{number}{way}"
            filled(path, **settings)
            gc.collect()
            if way == "missing":
                (path / file).unlink()
            else:
                os.truncate(path / file, (path / file).stat().st_size - 1)
            with pytest.raises(FileError, match=f"{file}: (has .* bytes, expected|there is no such file)"):
                ReplayBuffer(8, path=path, **settings)


def test_damaged_bytes_in_a_folder_are_named_by_column_and_row(tmp_path):
    filled(tmp_path, n=6, **PACKED)
    gc.collect()
    file = json.loads((tmp_path / on_disk.MANIFEST).read_text())["columns"]["obs"]["files"][1]
    data = np.fromfile(tmp_path / file, np.uint8)
    data[np.flatnonzero(data)[-1] - 2] ^= 255  # of the last row
    data.tofile(tmp_path / file)
    buffer = ReplayBuffer(8, path=tmp_path, **PACKED)
    with pytest.raises(StateError, match="the compressed bytes of row 5 of 'obs' are damaged"):
        buffer.get(np.arange(6), "obs")
    assert buffer.get(np.arange(5), "obs")[:, 0].tolist() == [0, 1, 2, 3, 4]


def json_files(path, settings):
    filled(path, **settings)
    gc.collect()
    return set(on_disk.FILE.findall((path / on_disk.MANIFEST).read_text()))


def test_a_folder_with_something_else_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(SpecError, match=r"is not empty and holds no rows, but \['mine.txt'\]"):
        ReplayBuffer(8, path=tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


def test_one_memory_at_a_time_has_a_folder_open(tmp_path):
    buffer = filled(tmp_path)
    with pytest.raises(StateError, match="a memory has this folder open"):
        ReplayBuffer(8, path=tmp_path)
    del buffer
    gc.collect()
    assert len(ReplayBuffer(8, path=tmp_path)) == 8


@pytest.mark.parametrize("settings", [{}, PACKED], ids=["raw", "compressed"])
def test_a_full_disk_is_an_error_and_what_was_there_stays(settings, tmp_path, monkeypatch):
    buffer = filled(tmp_path, n=3, **settings)
    before = (np.asarray(buffer[:].act).tolist(), len(buffer))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match="bytes are needed in .*, .* are free"):
            buffer.add({"obs": np.zeros(300, np.uint8), "act": 0, "rew": 0.0, "terminated": False, "truncated": False,
                        "policy": {"logits": np.zeros(3)}})  # fmt: skip
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/.*bin'"):
            buffer.add({"obs": np.zeros(300, np.uint8), "act": 9, "rew": 0.0, "terminated": False, "truncated": False})
        assert (np.asarray(buffer[:].act).tolist(), len(buffer)) == before
    for t in (3, 4):
        buffer.add({"obs": np.full(300, t, np.uint8), "act": t, "rew": 0.0, "terminated": False, "truncated": False})
    assert np.asarray(buffer[:].obs)[:, 0].tolist() == np.asarray(buffer[:].act).tolist() == [0, 1, 2, 3, 4]


def test_what_does_not_go_with_a_folder_is_refused(tmp_path):
    with pytest.raises(SpecError, match="holds Python objects, which no file of"):
        ReplayBuffer(9, path=tmp_path).add(
            {"obs": 0, "act": 0, "rew": 0.0, "terminated": False, "truncated": False, "info": {"name": "a"}}
        )
    memory = RandomMemory(9, device="cpu", path=tmp_path / "memory")
    memory.create_tensor("frame", 1000, torch.uint8)
    with pytest.raises(StateError, match="'frame' is in a file, and has no live tensor: read its rows by"):
        memory.get_tensor_by_name("frame")


@pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning", "ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("settings", [{}, PACKED], ids=["raw", "compressed"])
def test_a_forked_process_reads_the_rows_and_writes_none(settings, tmp_path):
    buffer = filled(tmp_path, n=4, **settings)
    if not (pid := os.fork()):
        code = 1
        try:
            assert np.asarray(buffer[:].obs)[:, 0].tolist() == [0, 1, 2, 3]
            with pytest.raises(StateError, match="the rows are of the process that forked this one"):
                filled_row = {"obs": np.zeros(300, np.uint8), "act": 9, "rew": 0.0}
                buffer.add({**filled_row, "terminated": False, "truncated": False})
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert np.asarray(buffer[:].act).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_shared_rows_are_those_of_the_folder_in_every_process(compression, tmp_path):
    memory = RandomMemory(20, 2, device="cpu", path=tmp_path, compression=compression)
    memory.create_tensor("frame", 1000, torch.uint8)
    memory.share_memory()
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=write_frames, args=(memory,))
    process.start()
    process.join()
    [[frame]] = memory.sample_all(["frame"])
    assert process.exitcode == 0 and frame[:, 0].tolist() == frame[:, -1].tolist() == [0, 0, 1, 1, 2, 2]


def write_frames(memory):
    for t in range(3):
        memory.add_samples(frame=np.full((2, 1000), t, np.uint8))


def test_columns_that_were_exchanged_leave_no_file(tmp_path):
    buffer = filled(tmp_path, n=3)
    before = len(list(tmp_path.iterdir()))
    for dtype in (np.float64, np.float32):
        buffer._storage.exchange({"rew": (Spec(np.dtype(dtype)), np.arange(8, dtype=dtype))})
    assert buffer[:].rew.tolist() == [0, 1, 2]
    assert len(list(tmp_path.iterdir())) == before


@pytest.mark.parametrize("compression", [None, "zstd:1"])
def test_a_folder_of_frames_takes_no_memory(compression, tmp_path):
    memory = RandomMemory(2000, device="cpu", path=tmp_path, seed=0, compression=compression)
    noise = np.random.default_rng(0).integers(0, 256, 64_000, np.uint8)
    noise[0], frames = 0, np.zeros((100, 64_000), np.uint8)
    memory.create_tensor("frame", 64_000, torch.uint8)
    memory.add_samples(frame=frames)
    memory.sample(["frame"], 100)
    before = resident()
    for number in range(20):  # 128 MB
        np.bitwise_xor(noise, np.uint8(number), out=frames)
        memory.add_samples(frame=frames)
    for _ in range(20):
        [[frame]] = memory.sample(["frame"], 100)
        assert all((row ^ row[0] == noise).all() for row in frame.numpy())
    del frame
    assert resident() - before < 64e6


def resident():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_what_a_folder_has_not_begins_anew(tmp_path):
    buffer = VectorReplayBuffer(16, 2, path=tmp_path / "a")
    row = {
        "obs": np.zeros((2, 300)),
        "act": [0, 0],
        "rew": [1.0, 2.0],
        "terminated": [False] * 2,
        "truncated": [False] * 2,
    }
    for _ in range(2):
        buffer.add(row)
    del buffer
    gc.collect()
    buffer = VectorReplayBuffer(16, 2, path=tmp_path / "a")
    assert buffer.unfinished_index().tolist() == []
    _, returns, lengths, begins = buffer.add({**row, "terminated": [True] * 2})
    assert returns.tolist() == [1, 2] and lengths.tolist() == [1, 1] and begins.tolist() == [2, 10]

    chunks = ChunkReplayBuffer(9, 0, path=tmp_path / "b")
    chunks.setup_entry("obs", np.float32)
    chunks.append({"obs": np.ones(100)})
    del chunks
    gc.collect()
    chunks = ChunkReplayBuffer(9, 0, path=tmp_path / "b")
    assert chunks.tags == ["obs"]
    chunks.append({"obs": np.zeros(100)})
    assert sorted(flat(chunks.sample(20, 1).data["obs"][:, 0, 0]))[::19] == [0, 1]

    def torchrl():
        return DictTensorReplayBuffer(storage=TensorStorage(9, path=tmp_path / "c"), batch_size=4, generator=0)

    of_torchrl = torchrl()
    of_torchrl.extend({"obs": torch.arange(12.0)[:, None].expand(12, 90), "done": torch.zeros(12, dtype=torch.bool)})
    del of_torchrl
    gc.collect()
    of_torchrl = torchrl()
    assert of_torchrl.write_count == 12 and len(of_torchrl) == 9
    assert of_torchrl.extend({"obs": torch.zeros(1, 90), "done": torch.ones(1, dtype=torch.bool)}).tolist() == [3]
    assert of_torchrl.sample()["obs"].shape == (4, 90)
