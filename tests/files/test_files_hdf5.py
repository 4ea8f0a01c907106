"""HDF5 files that were made to do harm lead nowhere, and are unpacked no further than they say."""

from __future__ import annotations

import json
import os
import zlib

import h5py
import numpy as np
import pytest
from hostile import HEAD, SPEC, refused

from rlstructs import DictTensor
from rlstructs.cli import report
from rlstructs.files import layout as files
from rlstructs.files.archives import HEADER
from rlstructs.replay import ReplayBuffer


def h5_of(path, add, names=("x",)):
    """A file whose arrays are what `add` puts there."""
    specs = dict.fromkeys(names, SPEC)
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
        with files.open_reader(tmp_path / "x.h5", compressed=True) as (reader, _):
            reader.verify()
            read = np.ones_like(x)
            reader.read_into("x", read)
        assert not read.any()
