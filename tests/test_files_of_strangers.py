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
import zlib
from pathlib import Path

import fuzz_subjects
import h5py
import mutations
import numpy as np
import pytest
import torch

from rlstructs import DictTensor, FileError, TemporalDictTensor, Trajectories, report
from rlstructs.distributed import folder as ray_folder
from rlstructs.memories.torch import PrioritizedMemory, RandomMemory
from rlstructs.replay import (
    DictTensorReplayBuffer,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    VectorReplayBuffer,
)
from rlstructs.structures import files, json_text
from rlstructs.structures.containers import HEADER

HERE = Path(__file__).parent
SUBJECTS = fuzz_subjects.subjects()
HEAD = {"format": "rlstructs", "version": 1, "class": "DictTensor", "arrays": {}}
GOOD = HEAD | {"arrays": {"x": {"dtype": "float32", "shape": [3]}}}
SPECS = {"x": {"dtype": "float32", "shape": [3]}}


def refused(load, path, message=None):
    """The file is refused by an error that names it, for little memory."""
    tracemalloc.start()
    try:
        with pytest.raises(FileError, match=message) as caught:
            load(path)
        assert tracemalloc.get_traced_memory()[1] < 30 << 20
    finally:
        tracemalloc.stop()
    assert str(path.parent) in str(caught.value) and len(str(caught.value)) < 2000
    return str(caught.value)


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
    "replay.json": lambda path: ray_folder.read(path.parent, {}, 1),
}  # fmt: skip
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
    refused(LOADERS[name], path, "is a (named pipe|folder|device), needed is a regular file")


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
    with pytest.raises(FileError, match="is a named pipe"), ray_folder.shard_bytes(tmp_path / header[1]):
        pass
    os.mkfifo(tmp_path / "replay.json")
    with pytest.raises(OSError, match="replay.json|rename|Is"), contextlib.suppress(FileError):  # whichever: no hang
        ray_folder.write(tmp_path, {}, np.random.default_rng(0).bit_generator.state, [])
        raise OSError("replay.json was replaced")


# --- HDF5 ---------------------------------------------------------------------------------------------


def h5_of(path, add, names=("x",)):
    """A file whose arrays are what `add` puts there."""
    specs = dict.fromkeys(names, SPECS["x"])
    with h5py.File(path, "w") as file:
        file[HEADER] = np.frombuffer(json.dumps(HEAD | {"arrays": specs}).encode(), np.uint8)
        add(file)
    return path


def unlimited(file, folder):
    layout = h5py.VirtualLayout((3,), np.float32, maxshape=(None,))
    source = h5py.VirtualSource(folder / "pipe", "x", (3,), maxshape=(None,))
    layout[: h5py.h5s.UNLIMITED :] = source[: h5py.h5s.UNLIMITED :]
    file.create_virtual_dataset("x", layout)


def nested(file, folder):
    kind = np.dtype("f4")
    for _ in range(30):
        kind = np.dtype([("x", kind)])
    file.create_dataset("x", (3,), kind)


OBJECTS = {
    "a link to a pipe": lambda file, folder: file.__setitem__("x", h5py.ExternalLink(str(folder / "pipe"), "x")),
    "a link to another file": lambda file, folder: file.__setitem__("x", h5py.ExternalLink(str(folder / "o.h5"), "x")),
    "a link of a name": lambda file, folder: file.__setitem__("x", h5py.SoftLink("/y")),
    "a link to itself": lambda file, folder: file.__setitem__("x", h5py.SoftLink("/x")),
    "a circle": lambda file, folder: file.__setitem__("x", file["/"]),
    "numbers in a pipe": lambda file, folder: file.create_dataset(
        "x", 3, np.float32, external=[(str(folder / "pipe"), 0, 12)]
    ),
    "numbers of another file": unlimited,
    "a type": lambda file, folder: file.__setitem__("x", np.dtype("f4")),
    "references": lambda file, folder: file.create_dataset("x", 3, h5py.ref_dtype),
    "references to regions": lambda file, folder: file.create_dataset("x", 3, h5py.regionref_dtype),
    "text": lambda file, folder: file.create_dataset("x", 3, h5py.string_dtype()),
    "nested types": nested,
    "nothing": lambda file, folder: file.create_dataset("x", data=h5py.Empty("f4")),
}  # fmt: skip


@pytest.mark.parametrize("what", OBJECTS)
def test_an_h5_file_leads_nowhere(what, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with h5py.File(tmp_path / "o.h5", "w") as file:
        file["x"] = file["y"] = np.ones(3, np.float32)
    path = h5_of(tmp_path / "x.h5", lambda file: OBJECTS[what](file, tmp_path))
    refused(DictTensor.load, path, "x")
    refused(lambda each: list(report.describe(each)), path)
    refused(ReplayBuffer.load_hdf5, path)


@pytest.mark.parametrize("link", [h5py.ExternalLink("pipe", "/"), h5py.SoftLink("/other")], ids=["external", "soft"])
def test_a_group_in_an_h5_file_is_no_link_either(link, tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)

    def add(file):
        file["group"] = link
        file["other/x"] = np.ones(3, np.float32)

    refused(DictTensor.load, h5_of(tmp_path / "x.h5", add, ["group/x"]), "group/x")


def test_what_else_lies_in_an_h5_file_is_not_looked_at(tmp_path):
    os.mkfifo(tmp_path / "pipe")

    def add(file):
        file["x"] = np.ones(3, np.float32)
        file["more"] = h5py.ExternalLink(str(tmp_path / "pipe"), "/")
        file["x"].attrs["more"] = np.zeros(8000)

    assert DictTensor.load(h5_of(tmp_path / "x.h5", add))["x"].tolist() == [1, 1, 1]


def packed(tmp_path, name, replace):
    """A compressed file of a buffer, with another dataset of this name."""
    buffer = ReplayBuffer(64)
    for _ in range(64):
        buffer.add({"obs": np.zeros(64), "act": 0, "rew": 0.0, "terminated": False, "truncated": False})
    path = tmp_path / "x.h5"
    buffer.save_hdf5(path, compression="gzip")
    with h5py.File(path, "r+") as file:
        values = file[name][()]
        del file[name]
        replace(file, name, values)
    return path


def zeros(n):
    """A stream of n zeros, compressed: a thousand times smaller."""
    packer = zlib.compressobj()
    return b"".join(packer.compress(bytes(1 << 20)) for _ in range(n >> 20)) + packer.flush()


def bomb(file, name, values):
    dataset = file.create_dataset(name, values.shape, values.dtype, chunks=values.shape, compression="gzip")
    dataset.id.write_direct_chunk((0,) * values.ndim, zeros(1 << 29))


def short(file, name, values):
    dataset = file.create_dataset(name, values.shape, values.dtype, chunks=values.shape, compression="gzip")
    dataset.id.write_direct_chunk((0,) * values.ndim, zlib.compress(values.tobytes()[:-8]))


def huge_chunk(file, name, values):
    chunk = (1, 1 << 16, *values.shape[2:])
    most = (None,) * values.ndim
    dataset = file.create_dataset(name, values.shape, values.dtype, chunks=chunk, maxshape=most, compression="gzip")
    dataset.id.write_direct_chunk((0,) * values.ndim, zeros(1 << 25))


def twice(file, name, values):
    made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    made.set_chunk(values.shape)
    made.set_deflate(9)
    made.set_deflate(9)
    space = h5py.h5s.create_simple(values.shape)
    dataset = h5py.h5d.create(file.id, name.encode(), h5py.h5t.py_create(values.dtype), space, made)
    dataset.write_direct_chunk((0,) * values.ndim, zlib.compress(zeros(1 << 29)))


@pytest.mark.parametrize("replace", [bomb, short, huge_chunk, twice])
def test_a_chunk_is_unpacked_to_what_it_should_be_and_no_further(replace, tmp_path):
    refused(ReplayBuffer.load_hdf5, packed(tmp_path, "rows/obs", replace))


def test_large_arrays_are_compressed_in_chunks_that_are_read_again(tmp_path):
    x = np.zeros((3, 70_001, 7), np.float32)
    for compression in ("gzip", "lzf"):
        files.write(tmp_path / "x.h5", "Anything", {"x": x, "one": x[:1, :1, :1]}, compression=compression)
        with files.reading(tmp_path / "x.h5", compressed=True) as (reader, _):
            reader.verify()
            read = np.ones_like(x)
            reader.read_into("x", read)
        assert not read.any()


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
    with files.reading(tmp_path / "x.pt") as (reader, header):
        reader.verify()
        assert {name: reader.found(name)[1] for name in tensors} == {n: tuple(t.shape) for n, t in tensors.items()}
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
            json_text.parse(TEXTS[what])
        assert tracemalloc.get_traced_memory()[1] < 30 << 20
    finally:
        tracemalloc.stop()


def test_json_of_ours_is_read_as_it_was_written():
    arrays = {f"é/{n}": {"dtype": "float32", "shape": [n, 2]} for n in range(3000)}
    held = {"arrays": arrays, "state": np.random.PCG64(0).state, "more": [[0, -1]] * 5000, "x": 1e-300, "n": None}
    assert json_text.parse(json.dumps(held)) == held


# --- numbers ------------------------------------------------------------------------------------------


def rewritten(path, state=None, arrays=None, compression=None):
    """Writes a file again with other numbers, and checksums that are right."""
    header, held = mutations.read(path, path.suffix)
    for where, value in (state or {}).items():
        at = header["state"]
        *above, last = where.split(".")
        for key in above:
            at = at[key]
        at[last] = value
    for name, value in (arrays or {}).items():
        held[name] = np.asarray(value(held[name].copy()) if callable(value) else value)
        header["arrays"][name] = {"dtype": held[name].dtype.name, "shape": list(held[name].shape)}
    mutations.write(path, path.suffix, json.dumps(header), held, compression)
    return path


def put(*places):
    """Numbers in places of an array."""

    def change(array):
        for at, value in places:
            array[at] = value
        return array

    return change


def huge(array):
    array[...] = 2**63 - 1
    return array


MT = {"bit_generator": "MT19937", "state": {"key": [0] * 624, "pos": 0}}
PHILOX = {"bit_generator": "Philox", "state": {"counter": [0] * 4, "key": [0] * 2}, "buffer": [0] * 4, "buffer_pos": 4,
          "has_uint32": 0, "uinteger": 0}  # fmt: skip
GENERATORS = {
    "a place beyond the key": {**MT, "state": {"key": [1] * 624, "pos": 625}},
    "a place before the buffer": PHILOX | {"buffer_pos": -1},
    "a place beyond the buffer": PHILOX | {"buffer_pos": 5},
    "nothing but zeros": MT,
    "a step of zero": {"bit_generator": "PCG64", "state": {"state": 0, "inc": 0}, "has_uint32": 0, "uinteger": 0},
    "a number too large": {
        "bit_generator": "PCG64", "state": {"state": 2**128, "inc": 1}, "has_uint32": 0, "uinteger": 0},
    "a name of something else": {"bit_generator": "seed"},
    "no state": {"bit_generator": "PCG64"},
}  # fmt: skip
MEMORY = {
    "a huge ring": {"arrays": {"__ring__": huge}},
    "a ring that wraps": {"arrays": {"__ring__": put(((1, 0), 2**62), ((2, 0), 2**62))}},
    "a writer of too many rows": {"arrays": {"__ring__": put(((1, 0), 99))}},
    "an episode that goes on": {"arrays": {"__episodes__": put((0, (5, 7)))}},
    "an episode below zero": {"arrays": {"__episodes__": put((slice(None), (-1, 0)))}},
    "no end of an episode": {"arrays": {"__episodes__": put((slice(None), (0, 9)))}},
    "a priority below zero": {"arrays": {"__leaves__": put((0, -1.0))}},
    "an infinite priority": {"arrays": {"__leaves__": put((0, np.inf))}},
    "no priority": {"arrays": {"__leaves__": put((0, np.nan))}},
    "a sum without limit": {"arrays": {"__leaves__": put((slice(None), 1e308))}},
    "draws of rows that are not": {"arrays": {"__drawn__": np.array([[99], [0], [0]])}},
    "draws out of order": {"arrays": {"__drawn__": np.array([[0, 0], [0, 0], [1, 0]])}},
    "a largest priority without limit": {"state": {"max_priority": 1e305}},
    "a largest priority of nothing": {"state": {"max_priority": 0}},
    "a largest priority in words": {"state": {"max_priority": "1"}},
    "samples below zero": {"state": {"n_samples": -1}},
    "samples in parts": {"state": {"n_samples": 1.5}},
    "sizes in parts": {"state": {"memory_size": 4.0}},
    "a dtype of torch's modules": {"state": {"tensors.x": ["onnx", [2]]}},
    "a shape below zero": {"state": {"tensors.x": ["float32", [-2]]}},
    "a shape of nothing of much": {"state": {"tensors.x": ["float32", [0, 2**62]]}},
    **{f"a generator: {name}": {"state": {"rng": state}} for name, state in GENERATORS.items()},
}  # fmt: skip


def memory(n_rows, **settings):
    made = PrioritizedMemory(memory_size=4, num_envs=2, seed=0, **settings)
    for name, dtype in (("x", torch.float32), ("terminated", torch.bool)):
        made.create_tensor(name, 2 if name == "x" else 1, dtype)
    for t in range(n_rows):
        made.add_samples(x=torch.full((2, 2), float(t)), terminated=torch.tensor([[t % 2], [0]]))
    return made


@pytest.mark.parametrize("form", ["npz", "pt"])
@pytest.mark.parametrize("what", MEMORY)
def test_numbers_of_a_memory_make_sense_before_it_is_changed(what, form, tmp_path):
    path = memory(3).save(tmp_path, format=form)
    rewritten(path)
    memory(2).load(path)
    rewritten(path, **MEMORY[what])
    target = memory(2)
    before = target.sample_all(["x"])[0][0].tolist(), target._state()
    refused(target.load, path)
    assert (target.sample_all(["x"])[0][0].tolist(), target._state()) == before
    target.sample(["x"], batch_size=3)
    target.reset()


def test_a_memory_without_its_episodes_is_not_given_others(tmp_path):
    path = memory(3).save(tmp_path, format="npz")
    header, held = mutations.read(path, ".npz")
    del held["__episodes__"], header["arrays"]["__episodes__"]
    mutations.write(path, ".npz", json.dumps(header), held)
    refused(memory(4).load, path, "no episodes")


def test_priorities_are_of_rows_that_are_there(tmp_path):
    path = memory(2).save(tmp_path, format="npz")
    made = memory(2)
    made.sample(["x"], batch_size=2)
    path = made.save(tmp_path, format="npz")
    rewritten(path, arrays={"__leaves__": put((7, 1.0))})
    refused(memory(2).load, path, "priorities of rows that it has not")


def vector(n):
    buffer = VectorReplayBuffer(10, 2)
    for t in range(n):
        flags = {"terminated": np.array([t == 2, False]), "truncated": np.zeros(2, bool)}
        buffer.add({"obs": np.zeros((2, 80)), "act": np.zeros(2), "rew": np.full(2, 1.0 * t), **flags})
    return buffer


def torchrl(n, sampler=SamplerWithoutReplacement):
    buffer = DictTensorReplayBuffer(storage=ListStorage(40), sampler=sampler(), batch_size=2, generator=0)
    for t in range(n):
        buffer.extend({"x": torch.tensor([t]), "done": torch.tensor([t % 3 == 2])})
    if n:
        buffer.sample()
    return buffer


def tianshou(n):
    buffer = PrioritizedReplayBuffer(9, 0.6, 0.4)
    for t in range(n):
        buffer.add({"obs": t, "act": 0, "rew": 0.0, "terminated": False, "truncated": False})
    return buffer


BUFFERS = {
    "an alignment of zero": (vector, {"state": {"alignment": 0}}),
    "an alignment that overflows": (vector, {"state": {"alignment": 2**62}}),
    "a huge ring": (vector, {"arrays": {"ring": huge}}),
    "rows in the middle": (vector, {"arrays": {"ring": put((slice(None), 7))}}),
    "lanes in parts": (vector, {"state": {"n_lanes": 2.0}}),
    "a capacity in words": (vector, {"state": {"capacity": "5"}}),
    "fewer slots than rows": (
        vector, {"state": {"n_slots": 0}, "arrays": {name: lambda array: array[:, :0] for name in (
            "episodes", "rows/obs", "rows/act", "rows/rew", "rows/terminated", "rows/truncated")}}),
    "episodes out of order": (vector, {"arrays": {"episodes": put(((0, 1), (3, 0)))}}),
    "lengths below zero": (vector, {"arrays": {"more/lengths": np.array([-1, 0])}}),
    "returns of another shape": (vector, {"arrays": {"more/returns": np.zeros((2, 3))}}),
    "a flag that is a number": (vector, {"state": {"columns.terminated": ["float64", [], False]},
                                         "arrays": {"rows/terminated": np.zeros((2, 3))}}),
    "a reward that is complex": (vector, {"state": {"columns.rew": ["complex64", [], False]},
                                          "arrays": {"rows/rew": np.zeros((2, 3), np.complex64)}}),
    "a dtype of objects": (vector, {"state": {"columns.rew": ["object", [], False]}}),
    "bfloat16 of floats": (vector, {"state": {"columns.rew": ["float64", [], True]}}),
    "a column through another": (vector, {"state": {"linked": {"act": "rew"}}}),
    "a generator without a step": (vector, {"state": {"rng": GENERATORS["a step of zero"]}}),
    "a generator that reads elsewhere": (vector, {"state": {"rng": GENERATORS["a place beyond the key"]}}),
    "an exponent below zero": (tianshou, {"state": {"own.settings.alpha": -0.5}}),
    "a priority without limit": (tianshou, {"state": {"own.max_priority": 1e307}}),
    "priorities without limit": (tianshou, {"arrays": {"more/__leaves__": np.full(9, 1e308)}}),
    "an order of rows that are not": (torchrl, {"arrays": {"more/order": np.array([99])}}),
    "an order from below": (torchrl, {"arrays": {"more/order": np.array([-1])}}),
    "a pass that is yet to come": (torchrl, {"state": {"own.sampler.pass": 2**62}}),
    "windows of nothing": (torchrl, {"state": {"own.sampler.length": 0}}),
    "rows of which there are none": (torchrl, {"state": {"own.n_rows": 2**40}}),
    "written in parts": (torchrl, {"state": {"own.n_written": 0.5}}),
    "episodes that are a word": (torchrl, {"state": {"own.knows_episodes": "no"}}),
    "axes of a batch that it is not": (torchrl, {"state": {"own.axes": {"": 9}}}),
    "axes without a batch": (torchrl, {"state": {"own.axes": {"x": 1}}}),
}  # fmt: skip


@pytest.mark.parametrize("suffix", [".npz", ".pt", ".h5"])
@pytest.mark.parametrize("what", BUFFERS)
def test_numbers_of_a_buffer_make_sense_before_it_is_changed(what, suffix, tmp_path):
    made, changes = BUFFERS[what]
    path = tmp_path / f"x{suffix}"
    made(3).save(path)
    rewritten(path)
    made(2).load(path)
    rewritten(path, **changes)
    target = made(2)
    before = fuzz_subjects.buffer_files.contents(target)[2]
    refused(target.load, path)
    assert fuzz_subjects.buffer_files.contents(target)[2] == before
    empty = made(0)
    refused(empty.load, path)
    assert len(empty) == 0
    target.sample(2)


def test_a_tree_of_more_leaves_than_there_are_takes_no_memory(tmp_path):
    path = tmp_path / "x.npz"
    torchrl(3, lambda: PrioritizedSampler(alpha=0.5, beta=0.5)).save(path)
    rewritten(path, state={"own.n_rows": 2**36})
    refused(torchrl(0, lambda: PrioritizedSampler(alpha=0.5, beta=0.5)).load, path)


SETTINGS = {
    "a size": ("size", 10**12), "frames of frames": ("stack_num", 10**9), "steps": ("n_step", 10**9),
    "a share": ("gamma", 1e9), "a library": ("framework", "os"), "a size in words": ("size", "7"),
}  # fmt: skip


@pytest.mark.parametrize("what", SETTINGS)
def test_settings_of_a_file_make_no_buffer_that_the_file_has_not(what, tmp_path):
    path = tmp_path / "x.h5"
    tianshou(3).save_hdf5(path)
    name, value = SETTINGS[what]
    rewritten(path, state={f"own.settings.{name}": value})
    refused(PrioritizedReplayBuffer.load_hdf5, path)


class Logged(ReplayBuffer):
    """A program's own, which does something with its argument."""

    opened: list[str] = []  # noqa: RUF012 - of all

    def __init__(self, size, log=None, **settings):
        super().__init__(size, **settings)
        self.opened.append(log)


def test_a_file_calls_no_constructor_with_arguments_that_are_none_of_ours(tmp_path):
    path = tmp_path / "x.h5"
    Logged(7).save_hdf5(path)
    Logged.opened.clear()
    rewritten(path, state={"own.settings.log": "/etc/passwd"})
    refused(Logged.load_hdf5, path, "has a setting 'log', which is none of ours")
    assert Logged.opened == []


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


def test_changed_files_of_every_kind_are_refused_or_can_be_used():
    """A few of each; tests/fuzz_files.py says how there are more."""
    names = [part for name in SUBJECTS for part in ("--case", name)]
    command = [sys.executable, HERE / "fuzz_files.py", "--files", "6", *names]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    assert done.stdout.count(": 6 files, ") == len(SUBJECTS)
