"""`CachedReplayBuffer`: only complete episodes reach the main buffer.

"A" is a section of spec/tianshou-torchrl.md.
"""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_rows import draws, fill, listed, row, rows, state_of
from test_replay_buffer_vector import trajectories

from rlstructs import FileError, SpecError, StateError
from rlstructs.replay import (
    CachedReplayBuffer,
    HERReplayBuffer,
    MalformedBufferError,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    VectorReplayBuffer,
)
from rlstructs.replay.rows.spec import Spec
from rlstructs.replay.rows.store import Storage


def cached(size=10, n=4, length=5, **arguments):
    return CachedReplayBuffer(ReplayBuffer(size, **arguments), n, length)


def test_an_episode_moves_to_the_main_buffer_when_it_ends():  # A18, A22 test_cachedbuffer
    buffer = cached()
    assert buffer.sample_indices(0).tolist() == [] and buffer.maxsize == 30
    assert listed(buffer.add(rows([1]), [1])) == [[15], [0], [0], [15]]
    obs = np.zeros(30)
    obs[15] = 1
    assert buffer.sample_indices(0).tolist() == [15] and buffer.obs.tolist() == obs.tolist()
    assert buffer.prev([15]).tolist() == buffer.next([15]).tolist() == [15]
    assert listed(buffer.add(rows([2], [1]), [3])) == [[0], [2], [1], [0]]
    obs[[0, 25]] = 2
    assert buffer.sample_indices(0).tolist() == [0, 15] and buffer.obs.tolist() == obs.tolist()
    assert buffer.prev([0, 15]).tolist() == buffer.next([0, 15]).tolist() == [0, 15]
    assert buffer.unfinished_index().tolist() == [15]
    assert listed(buffer.add(rows([3, 4], [0, 1]), [3, 1])) == [[25, 2], [0, 5], [0, 2], [25, 1]]
    obs[[0, 1, 2, 15, 16, 25]] = [2, 1, 4, 1, 4, 3]
    assert buffer.obs.tolist() == obs.tolist() and buffer.unfinished_index().tolist() == [25]
    index = buffer.sample_indices(0)
    assert index.tolist() == [0, 1, 2, 25] and buffer.done[index].tolist() == [True, False, True, False]
    assert buffer.prev(index).tolist() == [0, 1, 1, 25] and buffer.next(index).tolist() == [0, 2, 2, 25]
    assert np.bincount(buffer.sample_indices(10000))[[0, 1, 2, 25]].min() > 2000
    assert len(buffer) == 4 and buffer.last_index.tolist() == [2, 10, 15, 20, 25]


def test_a_main_buffer_of_size_0_keeps_no_complete_episode():  # A22 test_cachedbuffer
    buffer, data = cached(0, sample_avail=True), np.zeros(4)
    found = [
        listed(buffer.add({**rows(data, done), "rew": np.ones((4, 4)), "obs_next": data}))
        for done in ([0, 0, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0], [0, 1, 0, 1], [1, 0, 0, 0])
    ]
    ones, zeros = [1.0] * 4, [0.0] * 4
    assert found == [
        [[0, 5, -1, -1], [zeros, zeros, ones, ones], [0, 0, 1, 1], [0, 5, -1, -1]],
        [[1, 6, 10, 15], [zeros] * 4, [0] * 4, [0, 5, 10, 15]],
        [[2, 7, 11, 16], [zeros] * 4, [0] * 4, [0, 5, 10, 15]],
        [[3, -1, 12, -1], [zeros, [4.0] * 4, zeros, [3.0] * 4], [0, 4, 0, 3], [0, -1, 10, -1]],
        [[-1, 5, 13, 15], [[5.0] * 4, zeros, zeros, zeros], [5, 0, 0, 0], [-1, 5, 10, 15]],
    ]
    assert len(buffer) == 6 and buffer.sample_indices(0).tolist() == [5, 10, 11, 12, 13, 15]
    assert buffer.subbuffer_edges.tolist() == [0, 0, 5, 10, 15, 20]
    assert buffer.obs.shape == (20,) and buffer[:].rew.shape == (6, 4)
    with pytest.raises(StateError, match="size 0"):
        buffer.main_buffer.add(row(0))


def test_stacks_over_main_buffer_and_caches():  # A22 test_multibuf_stack
    four = cached(9, 3, 5, stack_num=4, ignore_obs_next=True)
    avail = cached(9, 3, 5, stack_num=4, ignore_obs_next=True, sample_avail=True)
    for t in range(18):
        obs = t % 4 + 1 + 5 * np.arange(3)
        for buffer in (four, avail):
            buffer.add({**rows(obs, [t % 4 == 3] * 3), "obs_next": -obs, "info": {"n": [t] * 3}})
    assert four.obs.tolist() == [12, 13, 14, 4, 6, 7, 8, 9, 11, 1, 2, 3, 4, 0, 6, 7, 8, 9, 0, 11, 12, 13, 14, 0]
    done = [0, 0, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0]
    assert four.done.astype(int).tolist() == avail.terminated.astype(int).tolist() == done
    assert four.unfinished_index().tolist() == [10, 15, 20]
    index = np.sort(four.sample_indices(0))
    assert index.tolist() == [*range(9), 9, 10, 14, 15, 19, 20]
    assert four[index].obs.tolist() == [
        [11, 11, 11, 12], [11, 11, 12, 13], [11, 12, 13, 14], [4, 4, 4, 4], [6, 6, 6, 6], [6, 6, 6, 7],
        [6, 6, 7, 8], [6, 7, 8, 9], [11, 11, 11, 11], [1, 1, 1, 1], [1, 1, 1, 2], [6, 6, 6, 6], [6, 6, 6, 7],
        [11, 11, 11, 11], [11, 11, 11, 12],
    ]  # fmt: skip
    assert four[index].obs_next.tolist() == [
        [11, 11, 12, 13], [11, 12, 13, 14], [11, 12, 13, 14], [4, 4, 4, 4], [6, 6, 6, 7], [6, 6, 7, 8],
        [6, 7, 8, 9], [6, 7, 8, 9], [11, 11, 11, 12], [1, 1, 1, 2], [1, 1, 1, 2], [6, 6, 6, 7], [6, 6, 6, 7],
        [11, 11, 11, 12], [11, 11, 11, 12],
    ]  # fmt: skip
    index = avail.sample_indices(0)
    assert sorted(index) == [2, 7] and np.isin(avail.sample_indices(100), index).all()
    avail.stack_num = 2
    assert sorted(avail.sample_indices(0)) == [0, 1, 2, 5, 6, 7, 10, 15, 20]
    assert avail.sample(0)[0].obs.shape == (9, 2)


def test_stacked_frames_are_saved_once():  # A22 test_multibuf_stack, Atari
    buffer = cached(9, 3, 5, stack_num=4, ignore_obs_next=True, save_only_last_obs=True)
    obs = np.random.default_rng(0).random((5, 4, 8, 8))

    def add(at, done, ids):
        buffer.add({**rows(np.zeros(len(ids)), done), "obs": obs[at], "obs_next": obs[at]}, ids)

    add([2, 0], [0, 1], [1, 2])
    assert buffer.obs.shape == (24, 8, 8)
    add([3], [0], [1])
    add([4, 1], [1, 0], [1, 2])
    assert buffer.sample_indices(0).tolist() == [0, 1, 2, 3, 19]
    for place, source in ((0, 0), (1, 2), (2, 3), (3, 4), (19, 1)):
        assert (buffer.obs[place] == obs[source, -1]).all()
    assert (buffer[3].obs == obs[[2, 2, 3, 4], -1]).all()
    assert buffer.get([3, 1], "obs").shape == (2, 4, 8, 8)


def test_the_main_buffer_keeps_what_it_holds_and_wraps():
    main = fill(ReplayBuffer(6), 4, info=5)  # an open episode
    buffer = CachedReplayBuffer(main, 2, 3)
    for t in range(3):
        added = listed(buffer.add(rows([10 + t, 20 + t], [t == 1, t == 2], info=[t, t])))
    assert buffer.main_buffer is main and main.last_index.tolist() == [2]
    assert main[:].obs.tolist() == [3, 10, 11, 20, 21, 22] and main[:].info.tolist() == [5, 0, 1, 0, 1, 2]
    assert added == [[6, 2], [0, 63], [0, 3], [6, 0]]
    index = main.sample_indices(0)
    assert main.prev(index).tolist() == [3, 4, 4, 0, 0, 1]  # what was open does not go on
    assert listed(main.add(row(1, True, info=0))) == [[3], [1], [1], [3]]


def test_frames_are_stored_once_and_move_with_what_followed_them():
    video = np.arange(40 * 300, dtype=np.float32).reshape(40, 300)
    buffer = cached(30, 2, 9)
    for t in range(20):
        done = t % 7 == 6
        after = video[[t + 1, t + 1]] + done
        buffer.add({**rows([t, t], [done] * 2), "obs": video[[t, t]], "obs_next": after})
    assert buffer._storage.columns.links and buffer.main_buffer._storage.columns.links
    batch = buffer[:]
    assert batch.act.tolist() == [*range(7), *range(7), *range(7, 14), *range(7, 14), *range(14, 20), *range(14, 20)]
    np.testing.assert_array_equal(batch.obs, video[batch.act])
    np.testing.assert_array_equal(batch.obs_next, video[batch.act + 1] + (batch.act % 7 == 6)[:, None])
    assert buffer.nbytes < 1200 * (30 + 18 + 6) + 5000


def test_an_episode_longer_than_the_main_buffer_leaves_its_end():
    buffer = cached(3, 1, 6)
    for t in range(5):
        added = listed(buffer.add(rows([t], [t == 4])))
    assert added == [[1], [10], [5], [2]] and buffer[:].obs.tolist() == [2, 3, 4]


def test_an_episode_longer_than_its_cache_changes_nothing():  # A18: its tail remained
    buffer = cached(20, 2, 3)
    for t in range(3):
        buffer.add(rows([t, t], [0, t == 1]))
    before = state_of(buffer)
    message = "^environment 0: an episode of 4 steps or more is longer than max_episode_length, 3$"
    for done in ([0, 0], [1, 1]):
        with pytest.raises(MalformedBufferError, match=message):
            buffer.add(rows([9, 9], done, new=[1, 1]))
    with pytest.raises(MalformedBufferError, match="^environment 1: "):
        buffer.add(rows([9, 9, 9], [0, 0, 0]), [1, 1, 1])
    assert state_of(buffer) == before and issubclass(MalformedBufferError, RuntimeError)
    buffer.reset()
    assert len(buffer) == len(buffer.main_buffer) == 0
    assert listed(buffer.add(rows([9, 9], [0, 1]))) == [[20, 0], [0, 9], [0, 1], [20, 0]]


def test_an_environment_may_end_several_episodes_in_one_call():
    buffer = cached(9, 2, 3)
    added = buffer.add(rows([1, 2, 3, 4, 5], [1, 0, 0, 1, 1]), [0, 0, 1, 0, 1])
    assert listed(added) == [[0, 9, 12, 2, 4], [1, 0, 0, 6, 8], [1, 0, 0, 2, 2], [0, 9, 12, 1, 3]]
    assert buffer[:].obs.tolist() == [1, 2, 4, 3, 5]


@pytest.mark.parametrize(
    "main", [PrioritizedReplayBuffer(9, 0.5, 0.5), VectorReplayBuffer(9, 3), HERReplayBuffer(9, max, 3), 9], ids=str
)
def test_the_main_buffer_is_a_plain_one(main):  # A18
    with pytest.raises(TypeError, match="^main_buffer must be a plain ReplayBuffer, got"):
        CachedReplayBuffer(main, 2, 3)


def test_its_arguments_have_the_names_of_tianshou_and_are_attributes():
    main = ReplayBuffer(10)
    buffer = CachedReplayBuffer(main_buffer=main, cached_buffer_num=3, max_episode_length=5)
    assert buffer.main_buffer is main and buffer.cached_buffer_num == 3 and buffer.max_episode_length == 5


def test_wrong_sizes_and_environments():
    with pytest.raises(SpecError, match="^cached_buffer_num must be at least 1, got 0$"):
        cached(n=0)
    with pytest.raises(SpecError, match="^max_episode_length must be at least 1, got 0$"):
        cached(length=0)
    with pytest.raises(IndexError, match=r"^buffer_ids: 4 is not in \[0, 4\)$"):
        cached().add(rows([1]), [4])
    with pytest.raises(NotImplementedError):
        cached().update(ReplayBuffer(3))
    with pytest.raises(StateError, match="^set_batch: an empty CachedReplayBuffer"):
        cached().set_batch(rows(np.zeros(30)))
    with pytest.raises(SpecError, match="are not in one of the lanes"):
        cached().get_buffer_indices(9, 12)
    for index in (3, 7, 14):
        with pytest.raises(IndexError, match=f"^index {index} holds no row"):
            _ = some()[index]


def test_columns_that_the_main_buffer_got_by_itself_must_be_those_of_the_caches():
    main = ReplayBuffer(6)
    buffer = CachedReplayBuffer(main, 2, 4)
    main.add({**row(1), "obs": np.zeros(3)})
    with pytest.raises(SpecError, match=r"^'obs' is int64\[\], in the main buffer float64\[3\]$"):
        buffer.add(rows([1, 2]))
    assert len(buffer) == 1
    frames = np.ones((2, 3))
    buffer.add({**rows([1, 2], [1, 0]), "obs": frames})
    assert buffer[:].obs.tolist() == [[0] * 3, [1] * 3, [1] * 3]


def one(t, **info):
    return {**row(t), "info": info}


def test_infos_that_the_main_buffer_widened_by_itself_are_read_as_they_are():
    buffer = CachedReplayBuffer(ReplayBuffer(6), 2, 4)
    buffer.add(rows([1, 2], [1, 0], info={"x": [1, 2]}))
    buffer.main_buffer.add(one(3, x=0.5))
    assert buffer[:].info.x.tolist() == buffer.get(buffer.sample_indices(0), "info").x.tolist() == [1, 0.5, 2]
    assert buffer.info.x[:2].tolist() == [1, 0.5]
    batch, index = buffer.sample(20)
    assert batch.info.x.tolist() == [{0: 1, 1: 0.5, 10: 2}[at] for at in index.tolist()]
    buffer.main_buffer.add(one(4, x="text", y={"z": 4}))
    assert buffer[:].info.x.tolist() == [1, 0.5, "text", 2] and buffer[:].info["y/z"].tolist() == [0, 0, 4, 0]
    buffer.main_buffer.add(one(5, x=5, y=5))
    assert [str(each) for each in buffer[:].info.y] == ["{'z': 0}", "{'z': 0}", "{'z': 4}", "5", "{'z': 0}"]
    buffer.add(rows([6, 7], [1, 1], info={"x": [6, 7], "y": [6, 7]}))
    assert buffer[:].info.x.tolist() == [1, 0.5, "text", 5, 6, 7] or len(buffer) == 6


def some(**arguments):
    """Rows 0 to 2 in the main buffer, one row in each of two caches."""
    buffer = cached(6, 2, 4, **arguments)
    for t in range(4):
        buffer.add(rows([t, 10 + t], [t == 2, 0], x=[1.0 * t, 2.0]))
    return buffer


def test_n_step_sums_over_main_buffer_and_caches():
    buffer = some(n_step=2, gamma=1.0)
    batch, index = buffer.sample(0)
    assert index.tolist() == [0, 1, 2, 6, 10, 11, 12, 13]
    assert batch.rew.tolist() == [1, 3, 2, 3, 21, 23, 25, 13]
    assert batch.discount.tolist() == [1] * 8


def test_rows_in_main_buffer_and_caches_can_be_changed():
    buffer = some()
    buffer.set_array_at_key(np.arange(8.0), "returns", index=buffer.sample_indices(0), default_value=-1)
    assert buffer[:].returns.tolist() == list(range(8))
    assert buffer.returns[3] == -1 and buffer.main_buffer.returns[2] == 2
    buffer.set_array_at_key([True], "truncated", index=[11])
    assert buffer.next([10, 11]).tolist() == [11, 11]
    buffer.set_array_at_key(np.zeros(14, bool), "terminated")
    assert buffer.unfinished_index().tolist() == [2, 6, 13]
    buffer.set_batch({"act": np.arange(14)})
    assert buffer[:].act.tolist() == buffer.sample_indices(0).tolist()
    buffer.set_array_at_key([float("nan")] * 2, "x", index=[1, 12])
    assert buffer.hasnull() and buffer.isnull().x.tolist() == [False, True, False, False, False, False, True, False]
    buffer.dropnull()
    assert buffer[:].obs.tolist() == [0, 2, 3, 10, 11, 13] and not buffer.hasnull()
    buffer.add(rows([5, 15], [1, 1], x=[0.0, 0.0]))
    assert buffer[:].obs.tolist() == [3, 5, 10, 11, 13, 15]  # of 6 that there is room for


def test_small_columns_are_arrays_of_numpy_and_large_ones_give_what_such_would():  # as compiled code needs it
    buffer = cached(6, 2, 4)
    for t in range(4):
        obs = np.arange(80.0).reshape(2, 4, 10) + t
        buffer.add({**rows([t, 10 + t], [t == 2, 0]), "obs": obs, "info": {"x": np.full((2, 8), t), "n": [t, t]}})
    for column in (buffer.rew, buffer.done, buffer.terminated, buffer.act, buffer.info.x, buffer.info.n):
        assert isinstance(column, np.ndarray) and len(column) == buffer.maxsize and not column.flags.writeable
    np.testing.assert_array_equal(buffer.rew, [0, 1, 2, 0, 0, 0, 3, 1, 2, 0, 10, 11, 12, 13])
    assert torch.from_numpy(buffer.rew.copy()).sum() == 55 and not isinstance(buffer.obs, np.ndarray)
    whole, mask, pair = np.asarray(buffer.obs), np.asarray(buffer.obs > 60), ([1, 13], [0, 3])
    indexes = [
        mask, mask[..., 0], mask[:, 0, 0], (mask[..., 0], 1), (mask[:, 0, 0], slice(2), 3), 3, (3, slice(None), [0, 1]),
        pair, (pair[0], slice(None), pair[1]), ([[1], [13]], [0, 3]), (slice(1, 9, 3), [0, 1]), slice(None, None, -2),
        (), [], None, ..., (..., 0), (None, 2), ([1, 2], None), True, (2, 3, 4), torch.tensor([1, 2]), np.array(13),
    ]  # fmt: skip
    for index in indexes:
        found = buffer.obs[index]
        np.testing.assert_array_equal(found, whole[index])
        assert isinstance(found, type(whole[index]))
    for wrong in (14, [0, 14], mask[1:], mask[:, 1:], np.zeros(3), (0, 4), "x"):
        with pytest.raises(IndexError):
            buffer.obs[wrong]


def test_updating_another_buffer_with_it_takes_all_rows():
    other = ReplayBuffer(20)
    assert other.update(some()).tolist() == list(range(8))
    assert other[:].obs.tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    assert other.prev(np.arange(8)).tolist() == [0, 0, 1, 3, 4, 4, 5, 6]
    assert listed(other.add(row(14, True, x=0.0))) == [[8], [60], [5], [4]]


@pytest.mark.parametrize("n", [1, 2])
def test_trajectories_reach_the_main_buffer_when_they_are_complete(n):
    buffer, slow = cached(40, n, 6), cached(40, n, 6)
    rng = np.random.default_rng(1)
    for part in range(10):
        frames, done = rng.integers(0, 9, (n, 4)) * 1.0, np.zeros((n, 4), bool)
        done[:, 1] = True
        lengths = rng.integers(2, 5, n)
        buffer.add_trajectories(trajectories(frames, done, lengths))
        for t in range(4):
            ids = np.flatnonzero(t < lengths)
            one = rows(frames[ids, t], obs_next=frames[ids, t] + 0.5, act=frames[ids, t].astype(np.int32))
            slow.add({**one, "rew": frames[ids, t].astype(np.float32), "truncated": done[ids, t]}, ids)
        assert state_of(buffer) == state_of(slow), part
    with pytest.raises(MalformedBufferError):
        buffer.add_trajectories(trajectories(np.zeros((n, 7)), np.zeros((n, 7))))
    assert state_of(buffer) == state_of(slow)


def test_an_episode_that_was_cut_short_is_dropped():
    buffer = cached(40, 1, 6)
    buffer.add_trajectories(trajectories([[1.0, 2]], np.zeros((1, 2))))
    batch = trajectories([[3.0, 4]], [[False, True]])
    batch.trajectories["observation/initial_state"][0, 0] = True
    buffer.add_trajectories(batch)
    assert buffer[:].obs.tolist() == [3, 4] and len(buffer.main_buffer) == 2
    assert listed(buffer.add(rows([5.0], [1], act=[5], obs_next=[5.0])))[1:3] == [[5], [1]]


def test_copies_pickles_and_files_give_the_identical_stream(tmp_path):  # A21.2
    def used():
        buffer = some(stack_num=2, sample_avail=False)
        buffer.sample(3)
        return buffer

    expected = draws(used())
    buffer = used()
    buffer.stack_num = 2
    buffer.save_hdf5(tmp_path / "x", compression="gzip")
    buffer.save(tmp_path / "x.npz")
    loaded = cached(6, 2, 4, stack_num=2)
    loaded.load(tmp_path / "x.npz")
    copied, pickled = copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))
    for same in (copied, pickled, CachedReplayBuffer.load_hdf5(tmp_path / "x"), loaded):
        assert state_of(same) == state_of(buffer)
        assert draws(same) == expected
        added = listed(same.add(rows([7], [1], x=[1]), [0]))
        assert added == listed(copy.deepcopy(buffer).add(rows([7], [1], x=[1]), [0])) == [[4], [10], [2], [3]]
        assert same.unfinished_index().tolist() == [13]
    other = cached(7, 2, 4)
    with pytest.raises(FileError, match="holds 1 lanes of 6 rows, this buffer has 1 of 7"):
        other.load(tmp_path / "x.npz")
    assert len(other) == 0 and not other._specs


def test_its_bytes_and_its_text():
    buffer = some()
    assert buffer.nbytes > buffer.main_buffer.nbytes > 6 * 34
    assert repr(buffer).startswith("CachedReplayBuffer(8 of 14 rows: obs int64, ")
    assert buffer.max_episode_length == 4


@settings(max_examples=80, deadline=None)
@given(
    data=st.data(), size=st.integers(0, 7), n=st.integers(1, 3), length=st.integers(1, 4), stack_num=st.integers(1, 3)
)  # fmt: skip
def test_it_does_what_plain_lists_do(data, size, n, length, stack_num):
    buffer, main, caches, count = cached(size, n, length, stack_num=stack_num), [], [[] for _ in range(n)], 0
    heads = 0
    for _ in range(data.draw(st.integers(1, 12))):
        ids = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=4))
        ends = data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
        number, expected, after = np.arange(count, count + len(ids)), [], [list(cache) for cache in caches]
        moved, is_long = [], False
        for i, end, value in zip(ids, ends, number.tolist(), strict=True):
            after[i].append(value)
            is_long |= len(after[i]) > length
            index, start = size + i * length + len(after[i]) - 1, size + i * length
            total, steps = (sum(after[i]), len(after[i])) if end else (0, 0)
            if end:
                first = heads + len(moved)
                moved += after[i]
                last = heads + len(moved) - 1
                index, start = (last % size, max(first, last + 1 - size) % size) if size else (-1, -1)
                after[i] = []
            expected.append((index, total, steps, start))
        if is_long:
            before = state_of(buffer)
            with pytest.raises(MalformedBufferError):
                buffer.add(rows(number, ends), ids)
            assert state_of(buffer) == before
            continue
        added = buffer.add(rows(number, ends), ids)
        assert list(zip(*listed(added), strict=True)) == expected
        main, caches, heads, count = main + moved, after, heads + len(moved), count + len(ids)
        held = main[len(main) - min(len(main), size) :]
        in_order = held + [value for cache in caches for value in cache]
        assert buffer[:].act.tolist() == in_order and len(buffer) == len(in_order)
        index = buffer.sample_indices(0)
        unfinished = [size + i * length + len(cache) - 1 for i, cache in enumerate(caches) if cache]
        assert buffer.unfinished_index().tolist() == unfinished
        assert not len(index) or set(buffer.sample(20)[1]) <= set(index)
        assert (buffer.act[index] == in_order).all() and (buffer.get(index, "act", stack_num=1) == in_order).all()


def test_one_lane_of_a_store_is_cleared_and_the_others_stay():
    storage = Storage(3, 4)
    episodes = storage.track_episodes()
    storage.columns.add("x", Spec(np.dtype(np.int64)))
    storage.write({"x": np.arange(18).reshape(3, 6)}, done=np.arange(18).reshape(3, 6) % 6 == 4)
    assert episodes.end().tolist() == [True, False, False, False] * 3
    assert episodes.end(np.array([4, 5])).tolist() == [True, False]
    storage.clear(np.array([1]))
    assert storage.view().every_row().tolist() == [2, 3, 0, 1, 10, 11, 8, 9]
    storage.write({"x": np.array([[7]])}, np.array([1]), done=np.zeros((1, 1), bool))
    assert storage.view().has(np.arange(12)).tolist() == [True] * 5 + [False] * 3 + [True] * 4
    assert episodes.times(np.array([4])).tolist() == [0] and episodes.open_lengths(slice(None)).tolist() == [1, 1, 1]
