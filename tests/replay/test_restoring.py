"""Loads and restores on every surface: room is made, then rows are dropped, then the file is read piece by piece."""

from __future__ import annotations

import contextlib
import itertools
import tracemalloc
from functools import partialmethod
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from replay_rows import fill, rows
from surfaces import CAPACITY, EVERY_SURFACE, trajectories

from rlstructs import Checkpoint, FileError, OutOfMemoryError
from rlstructs.memories.torch import RandomMemory
from rlstructs.replay import ReplayBuffer, VectorReplayBuffer
from rlstructs.replay.buffer import Buffer
from rlstructs.replay.keep import saving
from rlstructs.replay.keep.checks import check_episodes
from rlstructs.replay.rows import columns, on_device
from rlstructs.replay.rows.episodes import EPISODE
from rlstructs.replay.rows.lanes import Ring
from rlstructs.replay.rows.store import Storage

SURFACES = [surface for surface in EVERY_SURFACE if surface.id != "Shard"]  # which is no file's
# How a memory is written and read again.
WAYS = ("npz", "h5", "checkpoint")


def filled(surface, start=0, n=7):
    made = surface.make()
    made.add_trajectories(trajectories(start, n), names=surface.names)
    return made


def save(made, way, tmp_path):
    """Saves a memory; returns what loads it into another."""
    if way == "checkpoint":
        checkpoint = Checkpoint(tmp_path / "checkpoint", memory=made)
        checkpoint.save(1)
        checkpoint.close()
        return lambda other: Checkpoint(tmp_path / "checkpoint", memory=other).restore()
    if way == "h5" and not isinstance(made, Buffer):
        pytest.skip("it has no such files")
    made.save(tmp_path / f"memory.{way}")
    return lambda other: other.load(tmp_path / f"memory.{way}")


def held(surface, made):
    """Every column by episodes."""
    names = surface.stores(made)[0].columns.specs
    return {name: surface.episodes(made, name) for name in names}


@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n", [0, 7, 45])  # none, some, and more than there is room for
def test_what_is_read_in_pieces_is_what_was_saved(surface, way, n, tmp_path, monkeypatch):
    monkeypatch.setattr(columns, "BYTES_AT_ONCE", 500)
    made = filled(surface, n=n) if n else surface.make()
    load = save(made, way, tmp_path)
    for other in (surface.make(), filled(surface, 500, 9)) if n else (surface.make(),):
        load(other)
        assert held(surface, other) == held(surface, made)


@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize("way", ["npz", "checkpoint"])
def test_a_load_that_finds_no_memory_leaves_a_new_memory_as_it_was(surface, way, tmp_path, monkeypatch):
    made = filled(surface)
    load = save(made, way, tmp_path)
    for n_allowed in itertools.count():
        other, left = surface.make(), iter(range(n_allowed))

        def make(owner, specs, *, allocate, left=left):
            if specs and "episode" not in specs and next(left, None) is None:
                raise OutOfMemoryError("none is left")
            return allocate(owner, specs)

        with monkeypatch.context() as patch:
            for kind in (columns.Columns, on_device.TensorColumns):
                patch.setattr(kind, "make_blocks", partialmethod(make, allocate=kind.make_blocks))
            try:
                load(other)
            except OutOfMemoryError:
                assert [len(store.columns.specs) for store in surface.stores(other)] == [0] * len(surface.stores(other))
                assert len(other) == 0
                if not isinstance(other, Buffer):
                    assert other.get_tensor_names() == []
                continue
        assert held(surface, other) == held(surface, made)
        assert n_allowed
        return


def with_info(name, n=5):
    buffer = VectorReplayBuffer(20, 2)
    for t in range(n):
        buffer.add(rows([t, t + 100], info={name: np.array([t, t])}))
    return buffer


@pytest.mark.parametrize("way", WAYS)
def test_a_file_with_other_infos_is_refused_by_a_shared_buffer_which_stays_as_it_was(way, tmp_path):
    load, other = save(with_info("a"), way, tmp_path), with_info("b", 7)
    other._storage.share()  # as a batcher does that feeds it
    before = other[:]
    with pytest.raises(FileError, match="info/a int64.*, this buffer .*info/b int64.* which processes share"):
        load(other)
    assert len(other) == 14 and other[:].info.b.tolist() == before.info.b.tolist()
    same = with_info("a", 7)
    same._storage.share()
    load(same)
    assert len(same) == 10


@pytest.mark.parametrize("way", WAYS)
def test_a_load_of_other_infos_that_finds_no_memory_changes_nothing(way, tmp_path, monkeypatch):
    load, other = save(with_info("a"), way, tmp_path), with_info("b", 7)
    with monkeypatch.context() as patch:
        patch.setattr(columns.Columns, "make_blocks", Mock(side_effect=OutOfMemoryError("none is left")))
        with pytest.raises(OutOfMemoryError):
            load(other)
    assert len(other) == 14 and other[:].info.b.tolist() == [*range(7)] * 2
    load(other)
    assert len(other) == 10 and other[:].info.a.tolist() == [*range(5)] * 2 and "b" not in other[:].info


@pytest.mark.parametrize("way", ["npz", "checkpoint"])
def test_a_file_with_more_tensors_is_refused_by_a_shared_memory_which_stays_as_it_was(way, tmp_path):
    def memory(*names):
        made = RandomMemory(memory_size=4, num_envs=2, device="cpu")
        for name in names:
            made.create_tensor(name, 1)
            made.create_tensor("x", 1)
        made.add_samples(**{name: torch.ones(2, 1) for name in (*names, "x")})
        return made

    load, other = save(memory("a"), way, tmp_path), memory("x")
    other.share_memory()
    with pytest.raises(FileError, match=r"tensor\(s\) \['a'\], this memory, which processes share, has \['x'\]"):
        load(other)
    assert len(other) == 2 and other.get_tensor_names() == ["x"]


def frames(n):
    """A buffer of 4 MB."""
    return fill(ReplayBuffer(500), n, obs=np.zeros(1000, np.float64)) if n else ReplayBuffer(500)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n", [0, 3, 500])
def test_a_load_takes_no_more_memory_than_its_rows(way, n, tmp_path, monkeypatch):
    """So a buffer that is larger than half of the memory, and was saved, can be loaded."""
    made = frames(500)
    load, other = save(made, way, tmp_path), frames(n)
    monkeypatch.setattr(columns, "BYTES_AT_ONCE", 1 << 16)
    free = made.nbytes + 100_000 if n < 500 else 100_000
    monkeypatch.setattr(saving, "available_bytes", lambda: free)
    tracemalloc.start()
    try:
        load(other)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < (made.nbytes if n == 0 else 0) + 2_000_000
    assert len(other) == 500
    monkeypatch.setattr(saving, "available_bytes", lambda: made.nbytes // 2)
    with pytest.raises(OutOfMemoryError):
        load(frames(0))


assert CAPACITY > 9  # rows are overwritten in one of the cases only


def could_be(time, length, steps, head, was_killed, following):
    """Whether a row may have this place in its episode: what `check_episodes` says of all rows, for one."""
    ends = length == time + 1
    if not 0 <= time <= steps or (length and length <= time):
        return False
    if steps + 1 == head:
        return ends or length == 0 or was_killed
    return following[0] == 0 if ends else following == (time + 1, length)


def test_episodes_of_a_file_are_checked_as_row_by_row():
    rng, n_refused = np.random.default_rng(0), 0
    for _ in range(400):
        n_lanes, capacity = rng.integers(1, 4), rng.integers(1, 9)
        storage = Storage(n_lanes, capacity)
        storage.columns.add("x", columns.Spec(np.dtype(np.float32)))
        storage.track_episodes()
        for _ in range(rng.integers(1, 5)):
            shape = (n_lanes, rng.integers(1, 6))
            x = {"x": np.zeros(shape, np.float32)}
            storage.write(x, lengths=rng.integers(0, shape[1] + 1, n_lanes), done=rng.random(shape) < 0.3)
        pairs, counters = storage.episodes.columns.cells[EPISODE].copy(), storage.ring.counters.copy()
        counters[1] += rng.random() < 0.3  # a writer was killed
        for _ in range(rng.integers(0, 3)):
            place = rng.integers(n_lanes), rng.integers(capacity), rng.integers(2)
            pairs[place] = rng.choice([0, 1, 2, 3, -1, 2**31 - 1, -(2**31)])
        ring = Ring(counters, capacity)
        killed = ring.reserved > ring.head
        fits = all(
            could_be(*pairs[lane, step % capacity].tolist(), step, ring.head[lane], killed[lane],
                     tuple(pairs[lane, (step + 1) % capacity].tolist()))
            for lane in range(n_lanes) for step in range(ring.oldest()[lane], ring.head[lane])
        )  # fmt: skip
        n_refused += not fits
        with (
            contextlib.nullcontext()
            if fits
            else pytest.raises(ValueError, match="the steps and lengths of its episodes contradict each other")
        ):
            check_episodes(pairs, ring)
    assert 50 < n_refused < 350
