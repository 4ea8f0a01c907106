"""Rows of a `ReplayBuffer` that are changed: whole columns, some of them, appended buffers, gaps, given data.

"A" is a section of spec/tianshou-torchrl.md, "R" a scenario of spec/user-demand.md.
"""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from replay_rows import fill, listed, row, rows, state_of

from rlstructs import MissingKeyError, SpecError
from rlstructs.replay import ArrayDict, CachedReplayBuffer, ReplayBuffer, VectorReplayBuffer

nan = float("nan")

# update


def test_an_appended_buffer_keeps_its_order_and_its_episodes():  # A9, A22 test_update
    first, second = fill(ReplayBuffer(6), 3, ends=[0]), fill(ReplayBuffer(4, stack_num=3), 7, ends=[4], start=10)
    second = fill(ReplayBuffer(4, stack_num=3), 7, ends=[14], start=10)  # 13, 14 | 15, 16
    assert first.update(second).tolist() == [3, 4, 5, 0]
    assert first[:].obs.tolist() == [1, 2, 13, 14, 15, 16]  # R16: rows, and not their stacks
    assert first.prev(first.sample_indices(0)).tolist() == [1, 1, 3, 3, 5, 5]  # 1, 2 | 13, 14 | 15, 16
    # The episode that goes on is that of the other buffer, which has not changed.
    assert listed(first.add(row(17, True))) == [[1], [15 + 16 + 17], [3], [5]]
    assert second[:].act.tolist() == [13, 14, 15, 16] and second.stack_num == 3


def test_more_rows_than_there_is_room_for_leave_the_last_ones():  # C1
    first, second = fill(ReplayBuffer(3), 2), fill(ReplayBuffer(9), 8, start=10)
    placed = first.update(second)
    assert placed[5:].tolist() == [1, 2, 0] and (placed[:5] < 0).all()
    for refuse in (lambda: first[placed[0]], lambda: first.get(placed, "obs"), lambda: first.prev(placed[:1]),
                   lambda: first.set_array_at_key([1], "act", placed[:1]), lambda: first.obs[placed[0]]):  # fmt: skip
        with pytest.raises(IndexError):  # -1 would be the newest row
            refuse()
    assert first[:].obs.tolist() == [15, 16, 17]
    # All of the episode counts, what was overwritten too.
    assert listed(first.add(row(18, True))) == [[1], [sum(range(10, 19))], [9], [2]]


def test_an_empty_buffer_appends_nothing_even_to_itself():  # A22 test_replaybuffer
    empty, other = ReplayBuffer(4), fill(ReplayBuffer(4), 2)
    assert empty.update(empty).tolist() == other.update(empty).tolist() == [] and len(empty) == 0 and len(other) == 2


def test_all_environments_of_another_buffer_come_one_after_the_other():
    first, second = ReplayBuffer(10), VectorReplayBuffer(8, 2)
    for t in range(5):
        second.add(rows([t, 10 + t], [t == 2, 0]))
    assert first.update(second).tolist() == list(range(8))
    assert first[:].obs.tolist() == [1, 2, 3, 4, 11, 12, 13, 14]
    assert first.next(np.arange(8)).tolist() == [1, 1, 3, 3, 5, 6, 7, 7]
    assert listed(first.add(row(15, True))) == [[8], [75], [6], [4]]


def test_next_observations_of_appended_rows_are_what_they_were():
    stores = fill(ReplayBuffer(9), 3, obs_next=7)
    makes = fill(ReplayBuffer(9), 3, start=10, ends=[11])
    expected = [7, 7, 7, 11, 11, 12]
    assert stores.update(makes).tolist() == [3, 4, 5] and stores[:].obs_next.tolist() == expected
    ignores = fill(ReplayBuffer(9, ignore_obs_next=True), 1)
    ignores.update(stores)
    assert "obs_next" not in ignores._specs and len(ignores) == 7


def test_an_episode_that_was_cut_stays_cut():
    first, second = ReplayBuffer(8), fill(ReplayBuffer(8), 4)
    second.set_array_at_key([0.0, 0.0, 0.0, nan], "x", index=np.arange(4))
    second.dropnull()
    assert second.unfinished_index().tolist() == []
    second.set_array_at_key([True], "terminated", index=[0])
    assert second.unfinished_index().tolist() == []
    first.update(second)
    assert first.unfinished_index().tolist() == [] and first.next(np.arange(3)).tolist() == [0, 2, 2]
    for flag in (True, False):  # a flag takes the place of the cut, and is taken back
        second.set_array_at_key([flag], "terminated", index=[2])
        assert second.unfinished_index().tolist() == [[2], []][flag]
    assert listed(first.add(row(3, True, x=0.0))) == [[3], [3], [1], [3]]


def test_only_the_flags_of_a_transition_end_an_episode():
    first, second = ReplayBuffer(4), fill(ReplayBuffer(4), 3, dones=np.ones(2, bool))
    assert second.next([0, 1, 2]).tolist() == [1, 2, 2]
    first.update(second)
    assert first.next([0, 1, 2]).tolist() == [1, 2, 2] and first.unfinished_index().tolist() == [2]
    assert listed(first.add(row(3, True, dones=[0, 0]))) == [[3], [6], [4], [0]]


def test_an_update_that_does_not_fit_changes_nothing():  # A9: doubled rows there
    buffer = fill(ReplayBuffer(4), 3)
    before = state_of(buffer)
    with pytest.raises(SpecError, match="^update: a buffer cannot be appended to itself$"):
        buffer.update(buffer)
    with pytest.raises(TypeError, match="^update: needs a ReplayBuffer, got dict$"):
        buffer.update(buffer={})
    other = ReplayBuffer(4)
    other.add({**row(1), "obs": 0.5})
    with pytest.raises(SpecError, match="^'obs' is float64"):
        buffer.update(other)
    assert buffer.update(ReplayBuffer(5)).tolist() == [] and state_of(buffer) == before


# set_batch


def test_whole_columns_fill_an_empty_buffer():  # A21.10: it stayed empty
    for buffer in (ReplayBuffer(6), VectorReplayBuffer(6, 2)):
        data = rows(np.arange(6), [0, 1, 0, 0, 0, 0], info={"x": np.ones((6, 2))})
        buffer.set_batch(data)
        assert len(buffer) == 6 and buffer[:].obs.tolist() == list(range(6)) and buffer.info.x.shape == (6, 2)
        one_lane = type(buffer) is ReplayBuffer
        assert buffer.prev(np.arange(6)).tolist() == ([0, 0, 2, 2, 3, 4] if one_lane else [0, 0, 2, 3, 3, 4])
        assert buffer.unfinished_index().tolist() == ([5] if one_lane else [2, 5])
        data["obs"][0] = 99
        assert buffer.obs[0] == 0
        more = row(6, True, info={"x": [1.0, 1]}) if one_lane else rows([6, 7], [1, 1], info={"x": np.ones((2, 2))})
        expected = [[0], [20], [5], [2]] if one_lane else [[0, 3], [8, 19], [2, 4], [2, 4]]
        assert listed(buffer.add(more)) == expected


def test_columns_of_rows_that_are_there_are_replaced_and_the_others_kept():  # A10
    buffer = fill(ReplayBuffer(5), 3)
    buffer.set_batch({"act": np.arange(5) * 2, "info": {"y": np.arange(5.0)}})
    assert len(buffer) == 3 and buffer[:].act.tolist() == [0, 2, 4] and buffer[:].info.y.tolist() == [0, 1, 2]
    assert buffer[:].obs.tolist() == [0, 1, 2]
    buffer.set_batch({"truncated": [0, 1, 0, 0, 0]})
    assert buffer.prev([1, 2]).tolist() == [0, 2] and listed(buffer.add(row(3, True, act=0)))[1:] == [[5], [2], [2]]


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        ({"act": np.zeros(4)}, SpecError, "^set_batch: 'act' has 4 rows, expected 5$"),
        ({"returns": np.zeros(5)}, SpecError, r"^set_batch: unknown key\(s\) \['returns'\], a transition has"),
        ({"act": np.zeros(5, int), "obs": np.zeros((5, 2), int)}, SpecError, r"^'obs' has shape \(5, 2\), expected"),
        ({"act": np.zeros(5, int), "obs": np.full(5, 0.5)}, SpecError, "^'obs' is float64, which would lose"),
        ({"act": np.zeros(5, int), "policy": ["a"] * 5}, SpecError, "^'policy' holds <U1; a buffer keeps numbers"),
        ({"act/x": np.zeros(5, int)}, SpecError, "^'act' cannot be an array and have 'act/x' in it$"),
        (3, TypeError, "^set_batch: needs a mapping"),
    ],
)
def test_columns_that_do_not_fit_change_nothing(batch, error, message):
    buffer = fill(ReplayBuffer(5), 3)
    before = state_of(buffer)
    with pytest.raises(error, match=message):
        buffer.set_batch(batch)
    assert state_of(buffer) == before
    with pytest.raises(MissingKeyError, match="are missing"):
        ReplayBuffer(5).set_batch({"act": np.zeros(5)})


# set_array_at_key


def test_a_key_may_be_set_over_an_episode_or_over_all_that_there_is_room_for():  # A10
    buffer = fill(ReplayBuffer(5), 3)
    buffer.set_array_at_key(np.arange(5.0), "returns")
    assert buffer.returns.tolist() == [0, 1, 2, 3, 4]
    buffer.set_array_at_key([7.0, 8.0], "returns", index=[2, -3])
    assert buffer[:].returns.tolist() == [8, 1, 7]
    buffer.set_array_at_key([1.0], "later", index=[1])
    assert np.isnan(buffer.later).tolist() == [True, False, True, True, True]
    buffer.set_array_at_key(torch.tensor([[1, 2]]), "info/pair", index=1, default_value=-1)
    assert buffer.info.pair.tolist() == [[-1, -1], [1, 2], [-1, -1], [-1, -1], [-1, -1]]
    assert buffer[1].info.pair.tolist() == [1, 2]
    buffer.add(row(3))  # rows that are added later have 0
    assert buffer[3].returns == 0 and buffer[3].later == 0 and buffer[3].info.pair.tolist() == [0, 0]


def test_columns_may_be_changed_as_programs_of_tianshou_change_them():
    zeros = np.zeros(5, bool)
    for obs in (np.arange(10, dtype=np.float32).reshape(5, 2), np.arange(500, dtype=np.float32).reshape(5, 100)):
        buffer = ReplayBuffer.from_data(obs, zeros, np.ones(5), zeros, zeros, zeros, obs + 1)
        mean, std = obs.mean(0, np.float64), obs.std(0, dtype=np.float64)
        buffer._meta["obs"] = (buffer.obs - mean) / std
        buffer._meta["obs_next"] = (buffer.obs_next - mean) / std
        batch = buffer[:]
        np.testing.assert_allclose(batch.obs, (obs - mean) / std, rtol=1e-6)
        np.testing.assert_allclose(batch.obs_next, (obs + 1 - mean) / std, rtol=1e-6)
        assert buffer._meta[1:3].rew.tolist() == [1, 1] and buffer.obs.dtype == np.float32
    nested = ReplayBuffer.from_data({"a": np.arange(5), "b": np.arange(5)}, zeros, np.ones(5), zeros, zeros)
    nested._meta.obs.a = np.arange(5) * 2
    assert nested.obs.a.tolist() == [0, 2, 4, 6, 8] and nested[:].obs.b.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(SpecError, match="^'rew': 2 rows came for 5"):
        nested._meta["rew"] = np.zeros(2)


def agents(made=ReplayBuffer, size=6, **more):
    """Rewards of two agents."""
    buffer = made(size, **more)
    for t in range(4):
        one = {**row(t, t == 1), "rew": np.array([t, 10.0 + t]), "info": {"n": t}}
        buffer.add(one if made is ReplayBuffer else ArrayDict.stack([one, one]))
    return buffer


@pytest.mark.parametrize(
    "made", [agents, lambda: agents(lambda n: CachedReplayBuffer(ReplayBuffer(n), 2, 3))], ids=["plain", "cached"]
)
def test_rewards_of_one_agent_may_stand_in_for_those_of_all(made):  # A20, as multi-agent programs process batches
    buffer, stored = made(), made()
    before, index = state_of(buffer), buffer.sample_indices(0)
    saved = buffer.rew
    buffer._meta.rew = ArrayDict()
    assert buffer.rew.shape == (buffer.maxsize, 2)  # nothing stands in yet
    for agent in (1, 0, [1]):
        one = saved[:, agent]
        buffer._meta.rew = one
        for shown in (buffer.rew, buffer._meta.rew):
            assert shown.tolist() == one.tolist() and not shown.flags.writeable
        for at in (index, index[1], index.reshape(2, -1)):
            assert buffer[at].rew.tolist() == buffer.get(at, "rew").tolist() == one[at].tolist()
        pairs = buffer.get(index, "rew", stack_num=2)
        assert (pairs == np.stack([one[stored.prev(index)], one[index]], axis=1)).all()
        assert buffer[index].obs.tolist() == stored[index].obs.tolist()
    # What is stored is as it was.
    assert state_of(buffer) == before and buffer.sample(3)[0].rew.shape == (3, 2)
    for same in (copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))):
        assert same.rew.tolist() == saved.tolist()
    buffer._meta.rew = saved
    assert state_of(buffer)["rew"] == before["rew"] and buffer.rew.tolist() == saved.tolist()
    assert buffer[index].rew.tolist() == stored[index].rew.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_stands_in_is_of_the_kind_that_is_stored(dtype):
    buffer = ReplayBuffer(3, framework="torch")
    for t in range(3):
        buffer.add({**row(t), "rew": torch.tensor([t, 0.5 + t], dtype=dtype)})
    buffer._meta.rew = buffer.rew[:, 1]
    assert buffer.rew.tolist() == buffer[:]["rew"].tolist() == [0.5, 1.5, 2.5] and buffer[1]["rew"].item() == 1.5
    assert buffer[:]["rew"].dtype is dtype and buffer.rew.dtype == np.float32


def test_columns_may_be_replaced_all_at_once_and_others_be_with_them():  # as calibrated CQL adds its returns
    frames = np.arange(6 * 300, dtype=np.float32).reshape(6, 300)
    buffer = ReplayBuffer(5)
    for t in range(5):
        buffer.add({**row(t, t == 2), "obs": frames[t], "obs_next": frames[t + 1], "info": {"n": t, "x": nan}})
    before, n_bytes = state_of(buffer), buffer.nbytes
    buffer._meta = ArrayDict(**buffer._meta.__dict__, returns=np.arange(5.0))
    assert buffer._storage.columns.links and buffer.nbytes - n_bytes < 100  # no frame is stored again
    assert buffer.returns.tolist() == [0, 1, 2, 3, 4] and buffer.sample(0)[0].returns.tolist() == [0, 1, 2, 3, 4]
    after = state_of(buffer)
    del after["returns"]
    np.testing.assert_equal(after, before)
    doubled = ArrayDict(**vars(buffer._meta))
    doubled.act, doubled.terminated, doubled.done = doubled.act * 2, doubled.act == 0, None
    buffer._meta = doubled
    assert buffer.act.tolist() == [0, 2, 4, 6, 8] and buffer.next(0) == 0 and buffer.next(2) == 3
    plain = pickle.loads(pickle.dumps(buffer._meta)), copy.deepcopy(buffer._meta)
    assert all(type(each) is ArrayDict and each.act.tolist() == [0, 2, 4, 6, 8] for each in plain)


def test_columns_that_cannot_be_replaced_change_nothing():
    buffer = agents()
    before, columns = state_of(buffer), dict(buffer._meta)

    def whole(**more):
        return {name: value for name, value in {**columns, **more}.items() if value is not None}

    wrong = [
        (whole(obs=None), "^_meta: 'obs' is a column, which cannot be taken away$"),
        (whole(act=np.zeros(2)), "^_meta: 'act' has 2 rows, expected 6$"),
        (whole(x=np.zeros(2)), "^_meta: 'x' has 2 rows, expected 6$"),
        (whole(act=np.full(6, 0.5)), "^'act' is float64, which would lose its values as int64"),
        (whole(rew=np.zeros(6)), r"^'rew' has shape \(6,\), expected \(6, 2\)$"),
        (whole(x=np.array(["a"] * 6)), "^'x' holds <U1; a buffer keeps numbers only$"),
    ]
    for given, message in wrong:
        with pytest.raises(SpecError, match=message):
            buffer._meta = given
    columns_alone = [
        ("rew", np.zeros(2), "^'rew': 2 rows came for 6$"),
        ("rew", np.array(["a"] * 6), "^'rew' must hold numbers"),
        ("obs", {}, "^_meta: 'obs' is a column, which cannot be taken away$"),
        ("act", np.zeros((6, 2)), r"^'act' has shape \(6, 2\), expected \(6,\)$"),
    ]
    for name, value, message in columns_alone:
        with pytest.raises(SpecError, match=message):
            buffer._meta[name] = value
    with pytest.raises(SpecError, match=r"^'rew' has shape \(5, 2\), expected \(5,\)$"):  # of one agent each
        fill(ReplayBuffer(5), 2)._meta.rew = np.zeros((5, 2))
    with pytest.raises(MissingKeyError, match="are missing"):
        ReplayBuffer(5)._meta = {"x": np.zeros(5)}
    assert state_of(buffer) == before and buffer.rew.shape == (6, 2)


def test_changed_flags_change_the_episodes():
    buffer = fill(ReplayBuffer(5), 4)
    buffer.set_array_at_key([True], "terminated", index=[1])
    assert buffer.done.tolist() == [False, True, False, False, False] and buffer.next(1) == 1 and buffer.prev(2) == 2
    assert listed(buffer.add(row(4, True))) == [[4], [9], [3], [2]]


def test_a_changed_next_observation_is_read_as_it_is_and_so_is_the_one_before_a_changed_observation():
    frames = np.arange(4 * 300).reshape(4, 300)
    buffer = ReplayBuffer(8)
    for t in range(3):
        buffer.add({**row(t), "obs": frames[t], "obs_next": frames[t + 1]})
    assert buffer._storage.columns.links
    buffer.set_array_at_key(np.zeros((1, 300), int), "obs", index=[1])
    buffer.set_array_at_key(np.ones((2, 300), int), "obs_next", index=[1, 2])
    batch = buffer[:]
    assert (batch.obs == [frames[0], np.zeros(300), frames[2]]).all()
    assert (batch.obs_next == [frames[1], np.ones(300), np.ones(300)]).all()
    buffer.set_array_at_key(np.full((8, 300), 5), "obs_next")
    buffer.add({**row(3), "obs": frames[3], "obs_next": frames[0]})
    assert (buffer[:].obs_next == [np.full(300, 5)] * 3 + [frames[0]]).all()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1, 2], "x"), SpecError, "^'x': 2 rows came for 5$"),
        (([1], "x", [0, 1]), SpecError, "^'x': 1 rows came for 2$"),
        (([1, 2], "x", [0, 4]), IndexError, "^index 4 holds no row; 3 of 5 are there$"),
        (([1], "x", [0]), SpecError, "^'x' is int64, which has no NaN: default_value is needed$"),
        (([1], "x", [0], 0.5), SpecError, "^'x' is float64, which would lose its values as int64"),
        (([1], "x", [0], [1, 2]), SpecError, r"^default_value must be a number, got \[1, 2\]$"),
        (([0.5], "act", [0]), SpecError, "^'act' is float64, which would lose its values as int64"),
        (([[1, 2]], "act", [0]), SpecError, r"^'act' has shape \(1, 2\), expected \(1,\)$"),
        (([1], "info", [0]), SpecError, "^'info' is nested; name one of its arrays$"),
        (([1], "act/x", [0], 0), SpecError, "^'act' cannot be an array and have 'act/x' in it$"),
        (([True], "done", [0]), SpecError, "^'done' is not stored: set terminated or truncated$"),
        (([3], "truncated", [0]), SpecError, "^'truncated' must hold bools"),
        (([3], 7, [0]), TypeError, "^key must be a string, got 7$"),
        ((["a"], "x", [0], 0), SpecError, "^'x' holds <U1; a buffer keeps numbers only$"),
    ],
)
def test_values_that_do_not_fit_change_nothing(arguments, error, message):
    buffer = fill(ReplayBuffer(5), 3, info={"n": 1})
    before = state_of(buffer)
    with pytest.raises(error, match=message):
        buffer.set_array_at_key(*arguments)
    assert state_of(buffer) == before


def test_a_key_that_is_ignored_cannot_be_set():
    buffer = fill(ReplayBuffer(5, ignore_obs_next=True), 3)
    with pytest.raises(SpecError, match="^'obs_next' is not stored: this buffer ignores it$"):
        buffer.set_array_at_key(np.zeros(5), "obs_next")


# Gaps


def gaps():
    """Row 3 and the newest, 7, hold NaN; an episode ends with 4."""
    buffer = ReplayBuffer(6)
    for t in range(8):
        buffer.add(row(t, t == 4, info={"x": np.array([0.0, nan if t in (3, 7) else 1.0])}, n=t))
    return buffer


def test_where_rows_are_nan():  # A11
    buffer = gaps()
    assert buffer.hasnull() and not fill(ReplayBuffer(4), 3).hasnull() and not ReplayBuffer(4).hasnull()
    null = buffer.isnull()
    assert len(null) == len(buffer)
    assert null.info.x.tolist() == [[False, t in (3, 7)] for t in range(2, 8)] and null.obs.tolist() == [False] * 6
    unwritten = fill(ReplayBuffer(4), 3)
    unwritten.set_array_at_key([1.0, 2.0, 3.0], "x", index=[0, 1, 2])  # the row that is not there has NaN
    assert not unwritten.hasnull()


def test_rows_with_nan_are_dropped_and_the_buffer_goes_on():  # A21.10, A22 test_buffer_dropnull
    buffer = gaps()
    buffer.dropnull()
    assert len(buffer) == 4 and buffer.maxsize == 6 and not buffer.hasnull()
    assert buffer[:].obs.tolist() == buffer.obs[:4].tolist() == [2, 4, 5, 6]
    # What comes before a gap and after it is not one episode: nor is what is added to one at the end.
    assert buffer.prev(np.arange(4)).tolist() == [0, 1, 2, 2] and buffer.next(np.arange(4)).tolist() == [0, 1, 3, 3]
    assert buffer.unfinished_index().tolist() == []
    for t in range(8, 12):
        added = listed(buffer.add(row(t, t == 11, info={"x": np.ones(2)}, n=t)))
    assert added == [[1], [38], [4], [4]] and buffer[:].obs.tolist() == [5, 6, 8, 9, 10, 11]
    before = state_of(buffer)
    buffer.dropnull()
    assert state_of(buffer) == before


def test_an_empty_buffer_has_no_rows_to_drop():
    buffer = VectorReplayBuffer(4, 1)
    buffer.add(rows([1], x=[[nan, 1.0]]))
    for _ in range(2):
        buffer.dropnull()
        assert not len(buffer) and not buffer.hasnull()
    assert listed(buffer.add(rows([2], [1], x=[[0.0, 1.0]]))) == [[0], [2], [1], [0]]


def test_rows_with_nan_are_dropped_of_each_environment():
    buffer = VectorReplayBuffer(8, 2)
    for t in range(3):
        buffer.add(rows([t, 10 + t], x=[nan if t == 1 else 0.0, nan]))
    buffer.dropnull()
    assert buffer[:].obs.tolist() == [0, 2] and buffer.sample_indices(0).tolist() == [0, 1]
    assert listed(buffer.add(rows([3, 13], [1, 1], x=[0.0, 0.0]))) == [[2, 4], [5, 13], [2, 1], [1, 4]]


def test_linked_frames_survive_a_gap():
    frames = np.arange(6 * 300).reshape(6, 300) * 1.0
    frames[2, 7] = nan
    buffer = ReplayBuffer(8)
    for t in range(5):
        buffer.add({**row(t), "obs": frames[t], "obs_next": frames[t + 1]})
    buffer.dropnull()
    assert buffer[:].act.tolist() == [0, 3, 4]
    assert (buffer[:].obs == frames[[0, 3, 4]]).all() and (buffer[:].obs_next == frames[[1, 4, 5]]).all()


# from_data


def test_a_buffer_of_given_data_is_full_and_in_order():  # A13, A22 test_from_data, A21.10
    data = rows(np.arange(6), [0, 0, 1, 0, 0, 0])
    buffer = ReplayBuffer.from_data(**data, obs_next=np.arange(6) + 1, stack_num=2)
    assert len(buffer) == buffer.maxsize == 6 and buffer.last_index.tolist() == [5] and buffer.stack_num == 2
    assert buffer.prev(np.arange(6)).tolist() == [0, 0, 1, 3, 3, 4]
    assert buffer.next(np.arange(6)).tolist() == [1, 2, 2, 4, 5, 5]
    assert buffer.unfinished_index().tolist() == [5] and buffer.obs_next.tolist() == [1, 2, 3, 4, 5, 6]
    assert listed(buffer.add(row(6, True, obs_next=7))) == [[0], [18], [4], [3]]
    data["obs"][...] = 0
    assert buffer.obs[1] == 1
    empty = ReplayBuffer.from_data(*[np.zeros(0)] * 5)
    assert len(empty) == empty.maxsize == 0


def test_given_data_may_lie_in_a_file_be_nested_or_of_torch(tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["obs/x"], file["obs/y"] = np.arange(3, dtype=np.uint8), np.zeros((3, 2))
        file["act"], file["rew"] = [1, 2, 3], [1, 2, 3]
        file["terminated"], file["truncated"] = [0, 0, 1], [0, 0, 0]
        parts = [file[key] for key in ("obs", "act", "rew", "terminated", "truncated")]
        buffer = ReplayBuffer.from_data(*parts, done=file["terminated"])
    assert buffer[:].obs.x.tolist() == [0, 1, 2] and buffer.obs.x.dtype == np.uint8 and buffer.rew.dtype == np.float64
    tensors = [torch.ones(3, dtype=torch.bfloat16), *[torch.zeros(3)] * 4]
    assert ReplayBuffer.from_data(*tensors, framework="torch")[:]["obs"].dtype is torch.bfloat16


def test_an_end_of_given_data_that_is_not_terminated_was_truncated():  # as data of D4RL has them
    flags = {"terminated": np.array([0, 1, 0, 0, 0.0]), "truncated": np.array([0, 0, 0, 1, 0.0])}
    data = {**rows(np.arange(5)), **flags}
    for done, truncated in (([0, 1, 0, 0, 0], [3]), ([1, 1, 0, 1, 0], [0, 3]), ([0] * 5, [3]), (None, [3])):
        buffer = ReplayBuffer.from_data(**data, done=done)
        assert np.flatnonzero(buffer.truncated).tolist() == truncated
        assert np.flatnonzero(buffer.terminated).tolist() == [1]
        assert np.flatnonzero(buffer.next(np.arange(4)) == np.arange(4)).tolist() == sorted([1, *truncated])
    assert data["truncated"].tolist() == [0, 0, 0, 1, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"act": np.zeros(5)}, "^'act' has 5 rows, 'terminated' has 6$"),
        ({"done": [0, 0, 1, 0, 2, 0]}, "^'done' must hold bools, or 0 and 1, got int64"),
        ({"done": [0, 0, 1]}, r"^'done' has shape \(3,\), expected \(6,\)$"),
        ({"obs": 3}, r"^'obs' has shape \(\), expected a first axis of rows$"),
        ({"obs_next": np.zeros(2)}, "^'obs_next' has 2 rows, 'terminated' has 6$"),
        ({"obs": None}, r"^key\(s\) \['obs'\] are missing"),
        ({"terminated": None}, r"^key\(s\) \['terminated'\] are missing"),
        ({"terminated": {"x": [0] * 6}}, "^'terminated' must be an array, got one that is nested$"),
        ({"terminated": 0}, r"^'terminated' has shape \(\), expected a first axis of rows$"),
    ],
)
def test_given_data_that_does_not_fit_is_an_error(changes, message):
    with pytest.raises(SpecError, match=message):
        ReplayBuffer.from_data(**{**rows(np.arange(6), [0, 0, 1, 0, 0, 0]), **changes})


@pytest.mark.parametrize("key", ["returns", "terminated", "obs"])
def test_a_column_alone_does_not_make_rows(key):
    buffer = ReplayBuffer(8)
    with pytest.raises(MissingKeyError, match="are missing"):
        buffer.set_array_at_key(np.zeros(8), key)
    fill(buffer, 2)
    assert len(buffer) == 2 and buffer.done.tolist()[:2] == [False, False]
