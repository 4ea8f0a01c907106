"""Files that were made to do harm: none is followed elsewhere, hangs, takes memory that it has not, or is half read."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path

import fuzz_subjects
import h5py
import numpy as np
import pytest
import torch
from hostile import GOOD, HEAD, refused

from rlstructs import DictTensor, FileError, TemporalDictTensor, Trajectories
from rlstructs.cli import report
from rlstructs.distributed import replay_files
from rlstructs.files import layout
from rlstructs.files.archives import HEADER
from rlstructs.files.opening import parse_json
from rlstructs.memories.torch import RandomMemory
from rlstructs.replay import DictTensorReplayBuffer, ListStorage, ReplayBuffer, VectorReplayBuffer

HERE = Path(__file__).parents[1]
SUBJECTS = fuzz_subjects.subjects()


# --- what is no regular file --------------------------------------------------------------------------


def memory_load(path):
    RandomMemory(memory_size=4, num_envs=2).load(path)


LOADERS = {
    "DictTensor.npz": DictTensor.load, "Trajectories.pt": Trajectories.load,
    "TemporalDictTensor.h5": TemporalDictTensor.load,
    "Memory.pt": memory_load, "Memory.npz": memory_load, "Memory.csv": memory_load,
    "ReplayBuffer.npz": lambda path: ReplayBuffer(4).load(path),
    "ReplayBuffer.h5": lambda path: ReplayBuffer(4).load(path),
    "ReplayBuffer.hdf5": ReplayBuffer.load_hdf5, "VectorReplayBuffer.anything": VectorReplayBuffer.load_hdf5,
    "DictTensorReplayBuffer.pt": lambda path: DictTensorReplayBuffer(storage=ListStorage(4)).load(path),
    "info.npz": lambda path: list(report.describe(path)), "info.h5": lambda path: list(report.describe(path)),
    "replay.json": lambda path: replay_files.read(path.parent, {}, 1),
}  # fmt: skip
OF_FOLDERS = ("Trajectories.pt", "info.npz", "info.h5")
PLACES = {
    "a named pipe": os.mkfifo,
    "a folder": os.mkdir,
    "a device": lambda path: os.symlink("/dev/zero", path),
    "a terminal": lambda path: os.symlink("/dev/tty", path),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", LOADERS)
def test_what_is_no_regular_file_is_not_opened(name, place, tmp_path):
    path = tmp_path / name
    try:
        PLACES[place](path)
    except OSError as error:
        pytest.skip(f"{place} cannot be made here: {error}")
    if not path.exists():
        pytest.skip("there is no such device")
    needed = "folder" if (place, name) == ("a folder", "DictTensorReplayBuffer.pt") else "is a"
    if needed == "folder":  # such a buffer is kept in folders, too; this one is empty
        with pytest.raises(FileNotFoundError):
            LOADERS[name](path)
        return
    if place == "a folder" and name in OF_FOLDERS:  # rollouts are kept in folders, too; this one is empty
        refused(LOADERS[name], path, "a folder without part_000000.npz")
        return
    refused(LOADERS[name], path, "is a (named pipe|folder|device), expected a regular file")


def test_a_socket_is_not_opened(tmp_path):
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "x.npz"))
        refused(DictTensor.load, tmp_path / "x.npz", "is a socket")


def test_a_pipe_beside_a_csv_file_or_in_a_folder_is_not_opened(tmp_path):
    (tmp_path / "x.csv").write_text("x.0\n")
    os.mkfifo(tmp_path / "x.json")
    refused(memory_load, tmp_path / "x.csv", "x.json: is a named pipe")
    header = ["npz", "shard-0-01234567.npz"]
    os.mkfifo(tmp_path / header[1])
    with pytest.raises(FileError, match="is a named pipe"), replay_files.open_shard(tmp_path / header[1]):
        pass
    os.mkfifo(tmp_path / "replay.json")
    with pytest.raises(OSError, match="replay.json|rename|Is"), contextlib.suppress(FileError):  # whichever: no hang
        replay_files.write(tmp_path, {}, np.random.default_rng(0).bit_generator.state, [])
        raise OSError("replay.json was replaced")


# --- pickles ------------------------------------------------------------------------------------------


def pt_of(path, pickled, **data):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", pickled)
        for key, values in data.items():
            archive.writestr(f"x/data/{key}", values)
    return path


def number(value):
    """An instruction for a whole number of any length."""
    data = value.to_bytes((value.bit_length() + 8) // 8, "little")
    return b"\x8a" + bytes([len(data)]) + data if len(data) < 256 else b"\x8b" + struct.pack("<I", len(data)) + data


TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\n"
    b"X\x01\0\0\x000X\x03\0\0\0cpuK\x03tQK\x00%s%s\x89ccollections\nOrderedDict\n)RtR"
)
PICKLES = {
    "doubling tuples as a key": b"\x80\x02})" + b"2\x86" * 60 + b"K\x01s.",
    "noted doubling tuples as a key": b"\x80\x02}q\x00)" + b"".join(
        b"q%ch%c\x86" % (n, n) for n in range(1, 60)) + b"K\x01s.",
    "keys that collide": b"\x80\x02}(" + b"".join(
        number(n * ((1 << 61) - 1)) + b"K\x01" for n in range(60_000)) + b"u.",
    "a shape of huge numbers": b"\x80\x02}X\x01\0\0\0x" + TENSOR % (
        b"(" + number(1 << 1_000_000) * 8 + b"t", b"(" + b"K\x01" * 8 + b"t") + b"s.",
    "a deep tuple": b"\x80\x02}X\x01\0\0\0x)" + b"\x85" * 300_000 + b"s.",
    "a deep list": b"\x80\x02}X\x01\0\0\0x" + b"](" * 100_000 + b"e" * 100_000 + b"s.",
    "many dictionaries": b"\x80\x02(" + b"}" * 3_000_000 + b".",
    "a tuple of everything": b"\x80\x02(" + b"K\x01" * 1_000_000 + b"t.",
    "a long number in text": b"L" + b"9" * 3_000_000 + b"L\n.",
    "an object": b"\x80\x02ccollections\nOrderedDict\n)\x81.",
}  # fmt: skip


@pytest.mark.parametrize("what", PICKLES)
def test_a_pickle_takes_neither_time_nor_memory(what, tmp_path):
    path = pt_of(tmp_path / "x.pt", PICKLES[what], **{"0": bytes(12)})
    refused(DictTensor.load, path)
    refused(memory_load, path)


@pytest.mark.parametrize("name", ["torch\nonnx", "torch\n_made_up", "torch\nload", "torch.onnx\nexport", "os\nsystem"])
def test_no_name_in_a_pickle_is_imported_or_asked_for(name, tmp_path, monkeypatch):
    asked, before = [], set(sys.modules)
    monkeypatch.setattr(torch, "__getattr__", asked.append, raising=False)
    path = pt_of(tmp_path / "x.pt", b"\x80\x02c" + name.encode() + b"\n.")
    refused(DictTensor.load, path, "more than tensors")
    assert (asked, [name for name in set(sys.modules) - before if name.startswith("torch")]) == ([], [])


def test_files_of_torch_with_whatever_plain_tensors_are_read(tmp_path):
    tensors = {f"x{n}": torch.zeros(shape, dtype=dtype) for n, (shape, dtype) in enumerate(
        [((), torch.bool), ((0,), torch.int8), ((1, 1, 1, 1), torch.complex128), ((2, 0, 3), torch.float16),
         ((5,), torch.uint16), ((5, 4), torch.uint64), ((7,), torch.bfloat16)])}  # fmt: skip
    specs = {name: {"dtype": str(t.dtype)[6:], "shape": list(t.shape)} for name, t in tensors.items()}
    many = {f"y{n}": torch.zeros(1) for n in range(1500)}  # more than are written at a time
    specs |= {name: {"dtype": "float32", "shape": [1]} for name in many}
    torch.save({**tensors, **many, HEADER: json.dumps(HEAD | {"arrays": specs})}, tmp_path / "x.pt")
    with layout.open_reader(tmp_path / "x.pt") as (reader, header):
        reader.verify()
        assert {name: reader.spec_of(name)[1] for name in tensors} == {n: tuple(t.shape) for n, t in tensors.items()}
        assert len(header["arrays"]) == 1507


# --- archives -----------------------------------------------------------------------------------------


def npz_of(path, members, header=GOOD):
    raw = np.frombuffer(json.dumps(header).encode(), np.uint8)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members:
            archive.writestr(name, content)
        with archive.open(f"{HEADER}.npy", "w") as member:
            np.lib.format.write_array(member, raw)
    return path


def npy(text, data=bytes(12)):
    head = text.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + data


PLAIN = "{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }"
NPY = {
    "deep brackets": PLAIN.replace("(3,)", "(" * 4000 + ")" * 4000),
    "deep signs": PLAIN.replace("(3,)", "-" * 9000 + "3"),
    "many digits": PLAIN.replace("(3,)", f"({'3' * 9000},)"),
    "digits and no end": PLAIN.replace("(3,)", f"({'3' * 3500}"),
    "a size below zero": PLAIN.replace("(3,)", "(-3,)"),
    "a size that overflows": PLAIN.replace("(3,)", "(4294967296, 4294967296)"),
    "nothing of much": PLAIN.replace("(3,)", "(0, 9223372036854775807)"),
    "less than there is": PLAIN.replace("(3,)", "(2,)"),
    "columns": PLAIN.replace("False", "True"),
    "objects": PLAIN.replace("<f4", "|O"),
    "records": PLAIN.replace("'<f4'", "[('a', '<f4')]"),
    "the other way round": PLAIN.replace("<f4", ">f4"),
    "text": PLAIN.replace("<f4", "<U3"),
    "a call": PLAIN.replace("(3,)", "__import__('os').getpid()"),
}


def test_plain_members_are_read(tmp_path):
    assert DictTensor.load(npz_of(tmp_path / "x.npz", [("x.npy", npy(PLAIN))]))["x"].shape == (3,)


@pytest.mark.parametrize("what", NPY)
def test_an_array_says_plainly_what_it_is(what, tmp_path):
    refused(DictTensor.load, npz_of(tmp_path / "x.npz", [("x.npy", npy(NPY[what]))]), "x.npy")


def patched(path, at, form, value, mark=b"PK\x01\x02"):
    data = bytearray(path.read_bytes())
    struct.pack_into(form, data, data.index(mark) + at, value)
    path.write_bytes(data)


ZIPS = {
    "encrypted": lambda path: patched(path, 8, "<H", 1),
    "compressed": lambda path: patched(path, 10, "<H", 8),
    "larger": lambda path: patched(path, 24, "<I", 1 << 30),
    "in another disk": lambda path: patched(path, 34, "<H", 1),
    "in another member": lambda path: patched(path, 42, "<I", path.read_bytes().index(b"PK\x03\x04", 9)),
    "members without bytes": lambda path: patched(path, 10, "<H", 60_000, b"PK\x05\x06"),
    "a directory that is not there": lambda path: patched(path, 16, "<I", 0, b"PK\x05\x06"),
    "a long directory": lambda path: patched(path, 12, "<I", 0xFFFFFFFF, b"PK\x05\x06"),
    "a remark": lambda path: path.write_bytes(path.read_bytes()[:-2] + b"\x05\0hello"),
    "something in front": lambda path: path.write_bytes(b"#!/bin/sh\n" + path.read_bytes()),
}


@pytest.mark.parametrize("what", ZIPS)
def test_every_byte_of_an_archive_belongs_to_one_member(what, tmp_path):
    path = npz_of(tmp_path / "x.npz", [("x.npy", npy(PLAIN))])
    ZIPS[what](path)
    refused(DictTensor.load, path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_member_that_is_there_twice_is_refused(tmp_path):
    path = npz_of(tmp_path / "x.npz", [("x.npy", npy(PLAIN)), ("x.npy", npy(PLAIN))])
    refused(DictTensor.load, path, "twice")
    refused(DictTensor.load, npz_of(tmp_path / "y.npz", [("x.npy", npy(PLAIN)), ("x", npy(PLAIN))]), "twice")


def test_a_directory_of_nothing_but_names_takes_little_memory(tmp_path):
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", b"")
    data = path.read_bytes()
    entry = data[data.index(b"PK\x01\x02") : data.index(b"PK\x05\x06")]
    n, start = 65_000, data.index(b"PK\x01\x02")
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, n, n, n * len(entry), start, 0)
    path.write_bytes(data[:start] + entry * n + end)
    refused(DictTensor.load, path, "too small")


def test_bools_are_true_or_false(tmp_path):
    spec = {"arrays": {"x": {"dtype": "bool", "shape": [3]}}}
    path = npz_of(tmp_path / "x.npz", [("x.npy", npy(PLAIN.replace("<f4", "|b1"), b"\0\1\7"))], HEAD | spec)
    refused(DictTensor.load, path, "neither true nor false")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file[HEADER] = np.frombuffer(json.dumps(HEAD | spec).encode(), np.uint8)
        file["x"] = np.array([0, 1, 7], np.uint8).view(bool)
    refused(DictTensor.load, tmp_path / "x.h5", "neither true nor false")


# --- JSON ---------------------------------------------------------------------------------------------

TEXTS = {
    "deep": "[" * 100_000, "deep names": '{"a":' * 100_000, "many brackets": "[" + "{}," * 2_000_000 + "{}]",
    "many texts": "[" + '"",' * 2_000_000 + '""]', "many digits": "1" * 1_000_000, "a number above all": "1e400",
    "no number": "NaN", "no limit": "-Infinity", "a long number": "0." + "1" * 1_000_000,
    "a name twice": '{"x": 1, "x": 2}',
    "half of a letter": '{"\\ud800": 1}', "two texts": "{} {}", "another encoding": "{}".encode("utf-16"),
    "not text": b"\xff", "nothing": "",
}  # fmt: skip


@pytest.mark.parametrize("what", TEXTS)
def test_json_means_one_thing_and_takes_little(what):
    tracemalloc.start()
    try:
        with pytest.raises((ValueError, RecursionError)):
            parse_json(TEXTS[what])
        assert tracemalloc.get_traced_memory()[1] < 30 << 20
    finally:
        tracemalloc.stop()


def test_json_of_ours_is_read_as_it_was_written():
    arrays = {f"é/{n}": {"dtype": "float32", "shape": [n, 2]} for n in range(3000)}
    held = {"arrays": arrays, "state": np.random.PCG64(0).state, "more": [[0, -1]] * 5000, "x": 1e-300, "n": None}
    assert parse_json(json.dumps(held)) == held


# --- what is shown ------------------------------------------------------------------------------------


def test_info_shows_no_control_characters(tmp_path):
    DictTensor({"x\x1b[2J\x07": torch.ones(3)}).save(tmp_path / "x.npz")
    lines = list(report.describe(tmp_path / "x.npz"))
    assert all(line.isprintable() for line in lines) and "\\x1b[2J" in lines[1]
    header = HEAD | {"class": "\x1b]0;title\x07" * 99}
    text = refused(DictTensor.load, npz_of(tmp_path / "y.npz", [], header), "holds a ")
    assert text.isprintable() and len(text) < 600


def test_info_counts_episodes_of_environments_of_any_number(tmp_path):
    steps = {f"_observation/{key}": torch.ones(2, 3) for key in ("reward", "raw_reward")}
    steps["_observation/done"] = torch.tensor([[False, True, False], [True, False, True]])
    batch = Trajectories(DictTensor({"env_index": torch.tensor([5, 2**62])}), TemporalDictTensor(steps))
    batch.save(tmp_path / "x.npz")
    assert any("episodes: 3 ended" in line for line in report.describe(tmp_path / "x.npz"))
    assert sorted(report.ended_episodes(batch)["env_index"].tolist()) == [5, 2**62, 2**62]


# --- at random ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_changed_files_of_every_kind_are_refused_or_can_be_used():
    """A few of each; tests/fuzz_files.py says how there are more."""
    names = [part for name in SUBJECTS for part in ("--case", name)]
    command = [sys.executable, HERE / "fuzz_files.py", "--files", "4", *names]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    assert done.stdout.count(": 4 files, ") == len(SUBJECTS)
