"""Files of compressed columns: they hold the compressed bytes, and any memory of these columns reads them."""

from __future__ import annotations

import copy
import os

import numpy as np
import pytest
from frameworks import ON_HOST
from surfaces import CAPACITY, COMPRESSED, _memory, _surfaces
from test_compressed_limits import columns_of, steps
from test_restoring import save
from test_streams import draw

from rlstructs import Checkpoint, FileError, StateError
from rlstructs.files import layout, segments
from rlstructs.files.zstd import codec_of
from rlstructs.replay import VectorReplayBuffer
from rlstructs.replay.keep import restoring
from rlstructs.replay.rows import compressed, spec

WAYS = ("npz", "pt", "h5", "checkpoint")
RAW, PACKED = ({f"memory of {kind}": _memory(kind, "PrioritizedMemory", **each) for kind in ON_HOST} | _surfaces(**each)
               for each in ({}, COMPRESSED))  # fmt: skip
NAMES = [name for name in RAW if name != "Shard"]


def filled(surface, n=3 * CAPACITY // 2, start=0):
    made = surface.make()
    for first in range(start, start + n, 5):
        made.add_trajectories(steps(first, 5, np.random.default_rng(first)), names=surface.names)
    return made


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    """Checkpoints cut memories into several files."""
    monkeypatch.setattr(segments, "LEAST_BYTES", 2000)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_raw_and_compressed_memories_read_each_others_files(name, way, tmp_path):
    for source, target in ((RAW, PACKED), (PACKED, RAW), (PACKED, PACKED)):
        made = filled(source[name])
        other = filled(target[name], 10, start=1000)
        (folder := tmp_path / f"{source is RAW} {target is RAW}").mkdir()
        save(made, way, folder)(other)
        held, found = (list(columns_of(source[name], each)) for each in (made, other))
        assert len(held) == len(found) > 0
        for mine, its in zip(held, found, strict=True):
            for a, b in zip(mine, its, strict=True):
                np.testing.assert_array_equal(a, b)
        assert draw(copy.deepcopy(made)) == draw(other)


def frames(n, lanes=2):
    """A buffer of n frames of each lane, on which something moves."""
    buffer = VectorReplayBuffer(lanes * n, lanes, compression="zstd")
    add(buffer, n)
    return buffer


def add(buffer, n, start=0):
    for t in range(start, start + n):
        frame = np.zeros((2, 84, 84), np.uint8)
        frame[:, t % 80 : t % 80 + 4, 40 : 40 + t % 9] = 100 + t % 100
        ends = np.full(2, t % 10 == 9)
        buffer.add({"obs": frame, "act": [t, t], "rew": [0.0, 0.0], "terminated": ends, "truncated": ~ends & False})


def refuse_codecs(monkeypatch):
    def refuse(*args):
        raise AssertionError("neither")

    codec = copy.copy(codec_of(3))
    codec.compress = codec.decompress = refuse
    for module in (compressed, restoring, spec):
        monkeypatch.setattr(module, "codec_of", lambda level: codec)


@pytest.mark.parametrize("way", ["npz", "pt", "checkpoint"])
def test_rows_are_saved_and_loaded_without_being_decoded(way, tmp_path, monkeypatch):
    buffer, other = frames(100), VectorReplayBuffer(200, 2, compression="zstd")
    with monkeypatch.context() as patch:
        refuse_codecs(patch)
        save(buffer, way, tmp_path)(other)
    np.testing.assert_array_equal(buffer.get(np.arange(200), "obs"), other.get(np.arange(200), "obs"))
    assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) < 200 * 400


def test_a_checkpoint_writes_files_only_of_frames_that_are_new(tmp_path):
    buffer = frames(300)
    checkpoint = Checkpoint(tmp_path / "c", memory=buffer, keep=2)
    checkpoint.save(1)
    add(buffer, 5, 300)
    checkpoint.save(2)
    checkpoint.close()
    rows = list((tmp_path / "c").rglob("rows*.npz"))
    shared = {os.stat(file).st_ino for file in rows if os.stat(file).st_nlink > 1}
    new = {os.stat(file).st_ino for file in rows if os.stat(file).st_nlink == 1}
    assert len(shared) > 10 and len(new) <= 4
    other = VectorReplayBuffer(600, 2, compression="zstd")
    Checkpoint(tmp_path / "c", memory=other).restore()
    np.testing.assert_array_equal(buffer.get(np.arange(600), "obs"), other.get(np.arange(600), "obs"))


def damage(path, place, change):
    """Writes a file again, with other compressed bytes and right checksums."""
    with layout.open_reader(path) as (reader, header):
        arrays = {}
        for name in header["arrays"]:
            dtype, shape = reader.spec_of(name)
            arrays[name] = np.empty(shape, dtype)
            reader.read_into(name, arrays[name])
    change(arrays, place)
    path.unlink()
    layout.write(path, header["class"], arrays, state=header["state"])


def flip(arrays, place):
    ends = np.cumsum(arrays["lengths/obs"].reshape(-1))
    arrays["packed/obs"][ends[place] - 8] ^= 255


def claim(arrays, place):
    """The row says that it holds 2 GB."""
    codec = codec_of(3)
    data = np.frombuffer(codec.compress(bytes(1 << 24)), np.uint8)
    ends = np.cumsum(arrays["lengths/obs"].reshape(-1))
    before, after = arrays["packed/obs"][: ends[place - 1]], arrays["packed/obs"][ends[place] :]
    arrays["packed/obs"] = np.concatenate([before, data, after])
    arrays["lengths/obs"].reshape(-1)[place] = data.size


def lengthen(arrays, place):
    arrays["lengths/obs"].reshape(-1)[place] += 1


@pytest.mark.parametrize("change", [flip, claim, lengthen])
@pytest.mark.parametrize("setting", [None, "zstd"])
def test_damaged_bytes_of_a_file_are_named_by_column_and_row(change, setting, tmp_path):
    frames(10).save(tmp_path / "x.npz")
    damage(tmp_path / "x.npz", 13, change)  # slot 6 of lane 1
    buffer = VectorReplayBuffer(20, 2, compression=setting)
    text = "compressed bytes of row 16 of 'obs' are damaged"
    if change is flip and setting is not None:  # it is not decoded yet
        buffer.load(tmp_path / "x.npz")
        with pytest.raises(StateError, match=text):
            buffer.get(np.arange(20), "obs")
        buffer.get(np.arange(16), "obs")
        return
    add(buffer, 3)
    before = buffer.get(np.arange(3), "obs")
    with pytest.raises(FileError, match=r"'packed/obs' is .* expected" if change is lengthen else text):
        buffer.load(tmp_path / "x.npz")
    np.testing.assert_array_equal(buffer.get(np.arange(3), "obs"), before)


def test_bools_of_a_file_are_true_or_false(tmp_path):
    def make():
        return VectorReplayBuffer(20, 2, compression={"mask": "zstd"})

    buffer = make()
    for t in range(10):
        row = {"obs": [t, t], "act": [t, t], "rew": [0.0, 0.0], "terminated": [False] * 2, "truncated": [False] * 2}
        buffer.add({**row, "mask": np.random.default_rng(t).random((2, 3000)) < 0.1})
    buffer.save(tmp_path / "x.npz")

    def change(arrays, place):
        data = np.frombuffer(codec_of(3).compress(bytes([0, 1, 2] * 1000)), np.uint8)
        lengths = arrays["lengths/mask"].reshape(-1)
        arrays["packed/mask"] = np.concatenate([data, arrays["packed/mask"][lengths[0] :]])
        lengths[0] = data.size

    damage(tmp_path / "x.npz", 0, change)
    with pytest.raises(FileError, match="row 0 of 'mask' are damaged: they hold bools that are neither true nor false"):
        make().load(tmp_path / "x.npz")
