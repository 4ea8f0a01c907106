"""`max_bytes` of compressed columns: where they are used up the oldest rows leave, as if the memory were smaller."""

from __future__ import annotations

import copy
import json
import pickle

import numpy as np
import pytest
import torch
from frameworks import ON_HOST, make
from hypothesis import given, settings
from hypothesis import strategies as st
from surfaces import CAPACITY, COMPRESSED, N_LANES, ShardMemory, _memory, _surfaces
from test_compressed import FRAME, LARGE_ROWS, SETTING, _select, rows_of
from test_restoring import save
from test_streams import draw

from rlstructs import (
    DictTensor,
    FileError,
    GymEnvInf,
    RandomAgent,
    RL_Batcher,
    SpecError,
    TemporalDictTensor,
    Trajectories,
)
from rlstructs.memories.torch import RandomMemory
from rlstructs.replay import Compression, ReplayBuffer, VectorReplayBuffer
from rlstructs.replay.rows.lanes import LANE, SLOT
from rlstructs.replay.rows.store import Storage

# Bytes of a row of the surfaces, and how many noisy rows of each lane fit: every other row is of no use to compression.
ROW, FIT = 4 * 80, 12
LIMIT = Compression(COMPRESSED["compression"], max_bytes=N_LANES * FIT * ROW)
SURFACES = [
    *(pytest.param(_memory(kind, "PrioritizedMemory", compression=LIMIT), id=f"memory of {kind}") for kind in ON_HOST),
    *(pytest.param(surface, id=name) for name, surface in _surfaces(compression=LIMIT).items()),
]


def bounded(n_fit, n_lanes=2, capacity=60, order=LANE, specs=LARGE_ROWS):
    made = Storage(n_lanes, capacity, order=order)
    largest = max(spec.nbytes for spec in specs.values())
    made.columns.compression = Compression(SETTING, max_bytes=n_lanes * n_fit * largest)
    made.add_columns(specs)
    made.track_episodes()
    return made


def raw(**settings):
    made = bounded(100, **settings)
    made.columns.compression = Compression(None)
    made.exchange({name: (spec, np.zeros((made.columns.n_rows, *spec.shape), spec.dtype))
                   for name, spec in made.columns.specs.items()})  # fmt: skip
    return made


def newest(storage, lane, n):
    """The newest n rows of a lane, as bytes."""
    rows = storage.columns.at_steps(lane, np.arange(storage.ring.head[lane] - n, storage.ring.head[lane]))
    return {name: storage.gather([name], rows)[0].tobytes() for name in storage.columns.specs}


ACTIONS = st.lists(st.sampled_from(["write", "some", "put", "clear", "copy", "share"]), min_size=3, max_size=15)


@settings(max_examples=40, deadline=None)
@given(actions=ACTIONS, seed=st.integers(0, 2**32 - 1), order=st.sampled_from([LANE, SLOT]))
def test_what_is_left_are_the_newest_rows_of_a_memory_without_a_limit(actions, seed, order):
    rng, made, whole = np.random.default_rng(seed), bounded(9, order=order), raw(order=order)
    for action in actions:
        lanes = rng.permutation(2)[: rng.integers(1, 3)]
        if action in ("write", "some"):
            n = int(rng.integers(1, 40))
            names = list(LARGE_ROWS)[: 3 if action == "write" else 2]
            block = {name: rows_of(rng, (len(lanes), n), LARGE_ROWS[name]) for name in names}
            done = rng.random((len(lanes), n)) < 0.1
            for each in (made, whole):
                each.write(block, lanes, done=done)
        elif action == "put" and len(made):
            rows = rng.choice(made.view().every_row(), min(len(made), 3), replace=False)
            block = {"frame": rows_of(rng, (len(rows),), FRAME)}
            for each in (made, whole):
                each.put(block, rows)
        elif action == "clear":
            made.clear(lanes), whole.clear(lanes)
        elif action == "copy":
            made = pickle.loads(pickle.dumps(made)) if made.is_private else copy.deepcopy(made)
        elif action == "share":
            made.share()
        left = made.ring.head - made.ring.oldest()
        assert ((left > 0) == (whole.ring.head > whole.ring.oldest())).all()  # the newest row stays
        for lane in range(2):
            assert newest(made, lane, left[lane]) == newest(whole, lane, left[lane])
            rows = made.columns.at_steps(lane, np.arange(made.ring.oldest()[lane], made.ring.head[lane]))
            np.testing.assert_array_equal(made.episodes.times(rows), whole.episodes.times(rows))
        assert made.nbytes <= 3 * 2 * 9 * FRAME.nbytes + made.columns.n_rows * 3 * 8 + 4096


def test_as_many_rows_stay_as_fit():
    rng, made = np.random.default_rng(0), bounded(80, n_lanes=1, capacity=10_000, specs={"frame": FRAME})
    for n in (1, 1, 7, 30, 1, 100, 500):
        made.write({"frame": rng.integers(0, 256, (1, n, 84, 84), np.uint8)})
        assert len(made) >= min(n, 80 * 0.9) and made.columns.nbytes <= 80 * FRAME.nbytes + 8 * 10_100
    frames = np.zeros((1, 9000, 84, 84), np.uint8)
    made.write({"frame": frames})
    assert 9000 <= len(made) < 10_000  # which are small: those before them left only where they had to


def test_rows_that_are_replaced_for_ever_leave_no_room_for_fewer_and_fewer():
    rng, made = np.random.default_rng(0), bounded(20, n_lanes=1, capacity=100, specs={"frame": FRAME})
    made.write({"frame": rng.integers(0, 256, (1, 100, 84, 84), np.uint8)})
    for _ in range(2000):
        made.put({"frame": rng.integers(0, 256, (1, 84, 84), np.uint8)}, rng.choice(made.view().every_row(), 1))
    assert len(made) >= 20 * 0.4


def test_a_limit_that_is_too_low_is_named_before_anything_changes():
    buffer = ReplayBuffer(1000, compression=Compression("zstd", max_bytes=10_000))
    row = {"obs": np.zeros((84, 84), np.uint8), "act": 0, "rew": 0.0, "terminated": False, "truncated": False}
    with pytest.raises(SpecError, match="compression of 'obs': max_bytes is 10,000, expected at least 56,448$"):
        buffer.add(row)
    assert len(buffer) == 0
    for wrong, error in [(0, SpecError), (1.5, TypeError), ("1 GB", TypeError)]:
        with pytest.raises(error, match="max_bytes must be"):
            Compression(max_bytes=wrong)


def steps(start, n, rng):
    """Steps of all lanes with frames of noise, which their actions number from `start` on."""
    shape = (N_LANES, n)
    number = torch.arange(start, start + n).expand(shape)
    frames = torch.from_numpy(rng.random((*shape, 80), np.float32))
    frames[..., 0] = number
    values = {
        "observation/frame": frames, "_observation/frame": frames + 1, "action/action": number,
        "_observation/reward": number.float(), "_observation/terminated": number % 5 == 4,
        "_observation/truncated": torch.zeros(shape, dtype=torch.bool),
    }  # fmt: skip
    return Trajectories(
        DictTensor({"env_index": torch.arange(N_LANES)}), TemporalDictTensor(values, torch.full((N_LANES,), n))
    )


def columns_of(surface, made):
    """The frames and actions of the rows of each store."""
    for store in surface.stores(made):
        if not (rows := store.view().every_row()).size:
            continue
        yield [store.columns.host(name, store.gather([name], rows)[0]).reshape(len(rows), -1)
               for name in (surface.frame, surface.action)]  # fmt: skip


@pytest.mark.parametrize("surface", SURFACES)
def test_every_surface_goes_on_with_the_rows_that_are_left(surface, tmp_path):
    made, rng = surface.make(), np.random.default_rng(0)
    for start in range(0, 3 * CAPACITY, 5):
        made.add_trajectories(steps(start, 5, rng), names=surface.names)
        if start >= 5 and not surface.is_one and not isinstance(made, ShardMemory):
            draw(made)
        for frames, actions in columns_of(surface, made):
            np.testing.assert_array_equal(frames[:, 0], actions[:, 0])
            assert len(frames) <= N_LANES * FIT
    assert any(len(frames) and actions.max() == 3 * CAPACITY - 1 for frames, actions in columns_of(surface, made))
    if isinstance(made, ShardMemory):
        return
    for number, way in enumerate(["npz", "checkpoint"]):
        (folder := tmp_path / str(number)).mkdir()
        load = save(made, way, folder)
        other = surface.make()
        load(other)
        held, found = (list(columns_of(surface, each)) for each in (made, other))
        for (frames, actions), (frames_2, actions_2) in zip(held, found, strict=True):
            np.testing.assert_array_equal(actions, actions_2)
            np.testing.assert_array_equal(frames, frames_2)
        assert draw(copy.deepcopy(made)) == draw(other)


@pytest.mark.parametrize("kind", ON_HOST)
def test_a_file_with_more_rows_than_fit_leaves_the_newest(kind, tmp_path):
    whole = make(kind, CAPACITY, N_LANES, cls="PrioritizedMemory")
    small = make(kind, CAPACITY, N_LANES, cls="PrioritizedMemory", compression=LIMIT)
    for start in range(0, 2 * CAPACITY - 10, 5):  # its ring has wrapped
        whole.add_trajectories(steps(start, 5, np.random.default_rng(start)))
    whole.save(tmp_path / "memory.npz")
    small.load(tmp_path / "memory.npz")
    store = small._storage
    left = store.ring.head - store.ring.oldest()
    assert (left >= FIT // 2).all() and (left <= FIT).all()
    for lane in range(N_LANES):
        assert newest(store, lane, left[lane]) == newest(whole._storage, lane, left[lane])


def test_a_file_of_another_program_which_may_not_fit_is_refused(tmp_path):
    small = make("torch", CAPACITY, N_LANES, compression=LIMIT)
    small.create_tensor("observations", 80, "float32")
    np.savez(tmp_path / "skrl.npz", observations=np.ones((CAPACITY, N_LANES, 80), np.float32))
    with pytest.raises(FileError, match="skrl.npz: load it into a memory without max_bytes"):
        small.load(tmp_path / "skrl.npz")


def test_the_limit_of_a_buffer_comes_from_its_file(tmp_path):
    pytest.importorskip("h5py")
    buffer = VectorReplayBuffer(60, 3, compression=LIMIT)
    buffer.add_trajectories(steps(0, 15, np.random.default_rng(0)))
    buffer.save_hdf5(tmp_path / "x.h5")
    other = VectorReplayBuffer.load_hdf5(tmp_path / "x.h5")
    assert other._storage.columns.compression.max_bytes == LIMIT.max_bytes
    assert json.loads(json.dumps(other._settings())) == other._settings()


def test_readers_of_another_process_see_no_row_whose_bytes_were_taken():
    from multiprocessing import get_context

    from test_compressed import _write_for_ever

    made, context = bounded(12, capacity=500, specs={"frame": FRAME}), get_context("fork")
    made.share()
    for attempt in range(4):
        writers = [context.Process(target=_write_for_ever, args=(made, lane, np.random.default_rng([attempt, lane])))
                   for lane in range(2)]  # fmt: skip
        heads = made.ring.head.copy()
        for writer in writers:
            writer.start()
        while (made.ring.head < heads + 200).any():
            if len(made):
                _, [frames] = made.sample(
                    8, lambda n: _select(made, n), lambda at: made.gather(["frame"], at.rows[:, 0])
                )
                assert (frames[:, 0, 0] == frames[:, -1, -1]).all()
        for writer in writers:
            writer.kill()
            writer.join()
        view = made.view()
        frames = made.gather(["frame"], view.every_row())[0]
        assert (frames[:, 0, 0] == frames[:, -1, -1]).all() and (view.counts() > 0).all()
    assert (made.ring.floor > 0).all()


def test_a_batcher_feeds_a_memory_with_a_limit_and_draws_do_not_depend_on_its_workers():
    import gymnasium

    def env(n_envs, seed):
        return GymEnvInf([gymnasium.make("CartPole-v1") for _ in range(n_envs)], seed)

    found = []
    for n_processes in (1, 1):
        memory = RandomMemory(50, 2, device="cpu", seed=0, compression=Compression({"observations": "zstd"}, 1000))
        with RL_Batcher(
            8, RandomAgent, {"action_space": gymnasium.spaces.Discrete(2)}, env, {"n_envs": 2}, n_processes, 0
        ) as batcher:
            batcher.feed(memory)
            batcher.reset()
            for _ in range(10):
                batcher.execute()
                batcher.get()
                memory.sample(["observations"], 4)
                found.append(np.asarray(memory.sampling_indexes).tolist())
        assert 0 < len(memory) < 100
    assert found[:10] == found[10:]
