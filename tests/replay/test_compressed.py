"""Compressed columns hold the rows of raw ones, bit for bit, in the memory that their bytes need."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import signal
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstructs import SpecError, StateError
from rlstructs.files import zstd
from rlstructs.memories.torch import RandomMemory
from rlstructs.replay import ReplayBuffer
from rlstructs.replay.draw.plan import Selection
from rlstructs.replay.rows import compressed
from rlstructs.replay.rows.backing import Heap
from rlstructs.replay.rows.columns import Columns
from rlstructs.replay.rows.compressed import SEGMENT
from rlstructs.replay.rows.lanes import LANE, SLOT
from rlstructs.replay.rows.spec import Compression, Spec
from rlstructs.replay.rows.store import Storage

FRAME = Spec(np.dtype(np.uint8), (84, 84))
LARGE_ROWS = {"frame": FRAME, "mask": Spec(np.dtype(bool), (1000,)), "value": Spec(np.dtype(np.float32), (200,))}
SETTING = dict.fromkeys(LARGE_ROWS, "zstd:1")


def store(n_lanes=2, capacity=5, order=LANE, specs=LARGE_ROWS, setting=SETTING):
    made = Storage(n_lanes, capacity, order=order)
    made.columns.compression = Compression.of(setting)
    made.add_columns(specs)
    made.track_episodes()
    return made


def rows_of(rng, lead, spec):
    """Rows of which some are noise, which does not become smaller."""
    noise = rng.integers(0, 256, (*lead, spec.nbytes), np.uint8)
    noise[rng.random(lead) < 0.5] //= 128
    if spec.dtype == bool:
        noise %= 2
    return noise.view(spec.dtype).reshape(*lead, *spec.shape)


def held(storage):
    """All rows of each column, as bytes."""
    rows = np.arange(storage.columns.n_rows)
    return {name: storage.gather([name], rows)[0].tobytes() for name in storage.columns.specs}


ACTIONS = st.lists(st.sampled_from(["write", "some", "put", "clear", "copy", "pickle", "grow", "share"]), max_size=12)


@settings(max_examples=30, deadline=None)
@given(actions=ACTIONS, seed=st.integers(0, 2**32 - 1), order=st.sampled_from([LANE, SLOT]))
def test_rows_are_those_of_raw_columns_after_whatever_happens_to_them(actions, seed, order):
    rng, made, raw = np.random.default_rng(seed), store(order=order), store(order=order, setting=None)
    for action in actions:
        lanes = rng.permutation(2)[: rng.integers(1, 3)]
        if action in ("write", "some"):
            n = int(rng.integers(1, 12))
            names = list(LARGE_ROWS)[: 3 if action == "write" else 2]
            block = {name: rows_of(rng, (len(lanes), n), LARGE_ROWS[name]) for name in names}
            for each in (made, raw):
                each.write(block, lanes)
        elif action == "put":
            rows = rng.permutation(made.columns.n_rows)[: rng.integers(1, 6)]
            block = {"frame": rows_of(rng, (len(rows),), FRAME)}
            for each in (made, raw):
                each.put(block, rows)
        elif action == "clear":
            made.clear(lanes), raw.clear(lanes)
        elif action == "copy":
            made = copy.deepcopy(made)
        elif action == "pickle":
            made = pickle.loads(pickle.dumps(made)) if made.is_private else made
        elif action == "share":
            made.share()
        elif action == "grow" and made.is_private and (raw.ring.reserved <= raw.columns.capacity).all():
            for each in (made, raw):
                each.grow(each.columns.capacity + 2)
        assert held(made) == held(raw)


def test_wrapping_rings_take_the_memory_of_the_rows_that_they_hold():
    made, frames = (
        store(1, 1000, specs={"frame": FRAME}),
        np.random.default_rng(0).integers(0, 2, (1000, 84, 84), np.uint8),
    )
    frames[:, 40:] = 0
    made.write({"frame": frames[None]})
    before = made.nbytes
    assert before < FRAME.nbytes * 1000 / 8
    for _ in range(5):
        made.write({"frame": frames[None]})
        assert made.nbytes <= before + 2 * SEGMENT


def test_memory_that_rows_may_never_take_is_neither_needed_nor_shared():
    memory = RandomMemory(400_000, 2, compression="zstd", device="cpu")
    memory.create_tensor("frame", 600_000, "uint8")  # 480 GB
    frame = np.arange(2, dtype=np.uint8).repeat(600_000).reshape(2, -1)
    memory.add_samples(frame=frame)
    memory.share_memory()
    memory.add_samples(frame=frame[::-1])
    [[found]] = memory.sample_all(["frame"])
    np.testing.assert_array_equal(found[:, 0], [0, 1, 1, 0])


def test_more_rows_than_places_can_name_are_an_error_before_anything_changes():
    made = Storage(2, 1_000_000_000)
    made.columns.compression = Compression.of("zstd")
    with pytest.raises(
        SpecError, match=r"compression of 'frame': 2,000,000,000 rows of 7,056 bytes may need 2.* bytes"
    ):
        made.add_columns({"frame": FRAME})
    assert not made.columns.specs


def test_rows_that_are_replaced_at_random_never_run_out_of_memory():
    rng, made = np.random.default_rng(0), store(1, 100, specs={"frame": FRAME})
    block = made.columns._blocks["frame"]
    held_rows = rng.integers(0, 256, (100, 84, 84), np.uint8)
    made.write({"frame": held_rows[None]})
    for _ in range(3000):  # each leaves a gap, until all are taken together
        row = rng.integers(100)
        held_rows[row] = rng.integers(0, 256, (84, 84))
        made.put({"frame": held_rows[row][None]}, np.array([row]))
    np.testing.assert_array_equal(made.gather(["frame"], np.arange(100))[0], held_rows)
    assert block._lanes[0, compressed.USED] <= block._n_segments


def test_by_default_large_rows_of_bytes_are_compressed():
    memory = RandomMemory(10, 2, compression="zstd", device="cpu")
    for name, size, dtype in [("frame", (84, 84), "uint8"), ("mask", 512, "bool"), ("small", 511, "uint8"),
                              ("state", 300, "float32"), ("signed", 600, "int8")]:  # fmt: skip
        memory.create_tensor(name, size, dtype, keep_dimensions=isinstance(size, tuple))
    columns = memory._tensors.allocate().columns
    assert {name for name in columns.specs if columns.is_compressed(name)} == {"frame", "mask"}


def test_a_live_tensor_of_a_compressed_one_names_what_to_call():
    memory = RandomMemory(10, 2, compression="zstd", device="cpu")
    memory.create_tensor("frame", 600, "uint8")
    frames = np.random.default_rng(0).integers(0, 256, (10, 2, 600), np.uint8)
    for get in (memory.get_tensor_by_name, lambda name: memory.tensors[name], lambda name: memory._tensor_frame):
        with pytest.raises(StateError, match="'frame' is compressed, and has no live tensor: read its rows by sample"):
            get("frame")
    memory.set_tensor_by_name("frame", frames)
    memory.filled = True
    [[found]] = memory.sample_by_index(["frame"], np.arange(20))
    np.testing.assert_array_equal(found.numpy().reshape(10, 2, 600), frames)


@pytest.mark.parametrize("setting", ["gzip", "zstd:", "zstd:23", "zstd:x", 3, {"obs": "lz4"}, {"obs": 1}], ids=repr)
def test_unknown_settings_are_named(setting):
    with pytest.raises(SpecError, match="compression must be None, 'zstd', 'zstd:LEVEL' or a mapping"):
        ReplayBuffer(10, compression=setting)


def test_a_column_that_cannot_be_compressed_is_named_before_anything_changes(monkeypatch):
    monkeypatch.setattr("rlstructs.replay.rows.spec.LEAST", 64)
    buffer = ReplayBuffer(10, compression={"obs": "zstd"})
    row = {"obs": np.zeros(3), "act": 0, "rew": 0.0, "terminated": False, "truncated": False}
    with pytest.raises(SpecError, match=r"compression of 'obs': its rows are 24 bytes, expected 64 to 8,388,607 bytes"):
        buffer.add(row)
    assert len(buffer) == 0
    buffer.add({**row, "obs": np.zeros(100)})
    assert len(buffer) == 1


def test_without_zstd_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr(zstd, "_CODECS", zstd._OwnCodecs())
    for module in ("zstandard", "compression"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"compression needs zstd: pip install zstandard"):
        RandomMemory(10, compression="zstd", device="cpu")


def test_damaged_bytes_are_named_by_column_and_row():
    made = store(1, 4, specs={"frame": FRAME})
    made.write({"frame": np.arange(4, dtype=np.uint8).repeat(84 * 84).reshape(1, 4, 84, 84)})
    block = made.columns._blocks["frame"]
    bytes_of = block.read(2)
    bytes_of[len(bytes_of) // 2] ^= 255
    with pytest.raises(StateError, match="the compressed bytes of row 2 of 'frame' are damaged"):
        made.gather(["frame"], np.arange(4))
    assert (made.gather(["frame"], np.array([0, 1, 3]))[0][:, 0, 0] == [0, 1, 3]).all()


def test_rows_too_long_for_a_segment_have_segments_of_their_own():
    spec, rng = Spec(np.dtype(np.uint8), (3 * SEGMENT,)), np.random.default_rng(0)
    made = store(2, 3, specs={"frame": spec})
    rows = rng.integers(0, 256, (2, 7, *spec.shape), np.uint8)
    made.write({"frame": rows})
    for lane in range(2):
        found = made.gather(["frame"], made.columns.at_steps(np.full(3, lane), np.arange(4, 7)))[0]
        np.testing.assert_array_equal(found, rows[lane, 4:])


def test_columns_without_a_setting_are_raw():
    columns = Columns(1, 3, backing=Heap())
    columns.add("frame", FRAME)
    assert not columns.is_compressed("frame") and isinstance(columns.flat["frame"], np.ndarray)


def _write_for_ever(storage, lane, rng):
    while True:
        number = rng.integers(0, 256)
        frame = np.full((1, 1, 84, 84), number, np.uint8)
        frame[..., :40, :] = rng.integers(0, 2, (40, 84))
        frame[..., 0, 0] = frame[..., -1, -1]
        storage.write({"frame": frame}, np.array([lane]))


def test_writers_that_are_killed_leave_whole_rows_and_all_of_the_memory():
    made, context = store(2, 50, specs={"frame": FRAME}), multiprocessing.get_context("fork")
    made.share()
    for attempt in range(10):
        writers = [
            context.Process(target=_write_for_ever, args=(made, lane, np.random.default_rng([attempt, lane])))
            for lane in range(2)
        ]
        heads = made.ring.head.copy()
        for writer in writers:
            writer.start()
        while (made.ring.head < heads + 60).any():  # beside a reader
            if len(made):
                _, [frames] = made.sample(
                    8, lambda n: _select(made, n), lambda at: made.gather(["frame"], at.rows[:, 0])
                )
                assert (frames[:, 0, 0] == frames[:, -1, -1]).all()
        for writer in writers:
            os.kill(writer.pid, signal.SIGKILL)
            writer.join()
        frames = made.gather(["frame"], made.view().every_row())[0]
        assert (frames[:, 0, 0] == frames[:, -1, -1]).all()
    n_segments = made.columns._blocks["frame"]._lanes[:, compressed.USED]
    assert (n_segments < made.columns._blocks["frame"]._n_segments).all()


def _select(storage, n):
    view = storage.view()
    rows = view.every_row()
    return Selection(np.random.default_rng().choice(rows, n)[:, None], view)


@pytest.mark.parametrize("ignore_obs_next", [False, True])
def test_a_draw_of_stacks_decodes_each_frame_once(monkeypatch, ignore_obs_next):
    frames = np.random.default_rng(0).integers(0, 2, (101, 32, 32), np.uint8)
    made = [
        ReplayBuffer(100, stack_num=4, ignore_obs_next=ignore_obs_next, random_seed=0, compression=each)
        for each in (None, "zstd")
    ]
    for t in range(100):
        row = {"obs": frames[t], "act": t, "rew": 0.0, "terminated": False, "truncated": t % 30 == 29}
        for buffer in made:
            buffer.add(row if ignore_obs_next else {**row, "obs_next": frames[t + 1]})
    sizes, codec = [], zstd.codec_of()

    def decompress(data, size):
        sizes.append(size)
        return codec.decompress(data, size)

    monkeypatch.setattr(compressed, "codec_of", lambda level: SimpleNamespace(decompress=decompress, error=codec.error))
    (raw, at), (batch, _) = (buffer.sample(32) for buffer in made)
    for key in ("obs", "obs_next"):
        np.testing.assert_array_equal(batch[key], raw[key])
    # The stack of a row, and the row after it; of the last row of an episode that one is stored beside.
    wanted = {t for row in at.tolist() for t in range(max(row - 3, row // 30 * 30), min(row + 2, 100))}
    assert sizes and len(sizes) <= len(wanted) + len(set(at.tolist()))
