"""How rows of a `ReplayBuffer` are read: indexes, columns, draws, stacks, n-step sums, frameworks.

"A" is a section of spec/tianshou-torchrl.md, "R" a scenario of spec/user-demand.md.
"""

from __future__ import annotations

import copy
import pickle
import threading

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from replay_rows import draws, fill, row, rows

from rlstructs import (
    DictTensor,
    EmptyBufferError,
    MissingKeyError,
    SpecError,
    StateError,
    TemporalDictTensor,
    Trajectories,
)
from rlstructs.replay import (
    ArrayDict,
    CachedReplayBuffer,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    VectorReplayBuffer,
)

# Indexing


def wrapped():
    """Rows 5 6 2 3 4; an episode ends with 3."""
    return fill(ReplayBuffer(5), 7, ends=[3], info={"a": {"b": 1}})


@pytest.mark.parametrize(
    ("index", "obs"),
    [
        (2, 2), (-1, 4), (np.int64(1), 6), ([3, 0, 0], [3, 5, 5]), (np.array([[0], [1]]), [[5], [6]]),
        (torch.tensor([4, -5]), [4, 5]), ([], []), (np.array([False, True, False, False, True]), [6, 4]),
        (slice(None), [2, 3, 4, 5, 6]), (slice(1, 3), [3, 4]), (slice(-2, None), [5, 6]),
        (slice(None, None, -2), [6, 4, 2]), (slice(3, 99), [5, 6]), (np.array([1], np.uint8), [6]),
    ],
    ids=str,
)  # fmt: skip
def test_rows_are_found_by_any_kind_of_index_and_slices_are_in_order(index, obs):  # A6, A21.11
    batch = wrapped()[index]
    assert batch.obs.tolist() == obs
    assert batch.info.a.b.shape == batch.rew.shape == np.shape(obs)
    assert list(batch) == ["obs", "act", "rew", "terminated", "truncated", "done", "obs_next", "info/a/b"]


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (3, IndexError, "^index 3 holds no row; 3 of 5 are there$"),
        (-4, IndexError, "^index -4 holds no row; 3 of 5 are there$"),
        ([0, 7], IndexError, "^index 7 holds no row"),
        (np.array([2**64 - 1], np.uint64), IndexError, "^index 18446744073709551615 holds no row"),  # not -1
        (22, IndexError, "^index 22 holds no row"),  # A22 test_replaybuffer
        (np.zeros(4, bool), IndexError, r"^a mask must have a bool for each of 5 rows, got shape \(4,\)$"),
        ([True] * 5, IndexError, "^index 3 holds no row"),
        (1.5, SpecError, "^index must hold integers, got float64$"),
        ("obs", SpecError, "^index must hold integers, got <U3$"),
        (None, SpecError, "^index must hold integers, got object$"),
    ],
    ids=str,
)
def test_rows_that_are_not_there_are_errors(index, error, message):
    buffer = fill(ReplayBuffer(5), 3)
    with pytest.raises(error, match=message):
        _ = buffer[index]
    with pytest.raises(error, match=message):
        buffer.get(index, "obs")


def test_a_mask_may_be_over_the_rows_that_are_there_or_over_all_that_there_is_room_for():
    buffer = fill(ReplayBuffer(5), 3)
    assert buffer[np.array([True, False, True])].obs.tolist() == [0, 2]
    assert buffer[buffer.obs == 2].obs.tolist() == [2]


def test_a_slice_of_several_lanes_is_in_order_lane_by_lane():  # A6: unwritten rows there
    buffer = VectorReplayBuffer(8, 2)
    for t in range(6):
        buffer.add(rows([t, 10 + t]))
        if t > 3:
            buffer.add(rows([90 + t]), [0])
    assert buffer[:].obs.tolist() == [4, 94, 5, 95, 12, 13, 14, 15]
    assert buffer[2:6].obs.tolist() == [5, 95, 12, 13]


def test_what_is_read_is_copied():  # A6: a view there, for an int
    buffer = fill(ReplayBuffer(4), 3, x=np.zeros(2))
    for index in (1, [1], slice(None), np.array([1])):
        batch = buffer[index]
        for array in batch.values():
            array[...] = 1
    buffer.get(1, "x")[...] = 5
    buffer.sample(3)[0].x[...] = 5
    assert buffer.x.sum() == 0 and buffer[:].obs.tolist() == [0, 1, 2]


def test_attributes_of_a_batch_are_its_items():  # as tianshou's algorithms set returns and weights
    batch = wrapped()[[2, 3]]
    batch.rew = batch.rew * 2
    batch.returns = np.ones(2)
    assert batch["rew"].tolist() == [4, 6] and "returns" in batch
    again = pickle.loads(pickle.dumps(copy.deepcopy(batch)))
    assert type(again) is type(batch) and again.returns.tolist() == [1, 1] and list(again) == list(batch)


def test_a_batch_has_the_length_of_its_rows_and_is_indexed_by_them():  # A19
    buffer = fill(ReplayBuffer(6), 5, info={"a": {"b": 1}, "c": 2})
    batch, _ = buffer.sample(0)
    assert len(batch) == len(batch.info) == len(batch.info.a) == len(buffer[:]) == 5 and len(buffer.sample(-1)[0]) == 0
    batch.name = "not of rows"
    for index, expected in ((slice(1, 3), [1, 2]), ([4, 0], [4, 0]), (batch.obs > 2, [3, 4]), (np.int64(-1), 4)):
        part = batch[index]
        assert type(part) is type(batch) and part.act.tolist() == expected
        assert part.info.a.b.shape == part.rew.shape and part.name == "not of rows"
    assert batch.info[:2].c.tolist() == [2, 2] and [next(iter(batch)), len(dict(batch))] == ["obs", 10]
    assert len(batch.policy) == 0 and not batch.policy and buffer.sample(-1)[0] and buffer[0]
    with pytest.raises(TypeError):
        len(buffer[0])


def test_what_is_put_into_a_batch_replaces_what_was_nested():
    batch = fill(ReplayBuffer(3), 2, info={"a": {"b": 1}, "c": 2})[:]
    batch.info = {"d": {"e": np.ones(2)}, "f": np.zeros(2)}
    assert sorted(key for key in batch if key.startswith("info")) == ["info/d/e", "info/f"]
    assert batch.info.d.e.tolist() == [1, 1] and batch[:1].info.f.tolist() == [0]
    batch.info = np.arange(2)
    assert batch.info.tolist() == [0, 1] and "info/f" not in batch
    batch["info"] = {"g": np.ones(2)}
    assert batch.info.g.tolist() == [1, 1]
    other = ReplayBuffer(3)
    other.add({name: value[0] for name, value in batch.items()})
    assert other[:].info.g.tolist() == [1]


def test_what_is_nested_may_be_taken_out_of_a_batch():
    batch = fill(ReplayBuffer(3), 2, info={"a": {"b": 1}, "c": 2})[:]
    assert batch.pop("weight", 1.0) == 1.0 and batch.pop("rew").tolist() == [0, 1]
    assert batch.pop("info").a.b.tolist() == [1, 1] and "info" not in batch and batch.pop("info", None) is None
    with pytest.raises(KeyError, match="rew"):
        batch.pop("rew")
    del batch.act
    assert "act" not in batch
    with pytest.raises(AttributeError, match="act"):
        del batch.act


def test_an_index_is_left_alone():  # R12, A6
    buffer = fill(ReplayBuffer(4, stack_num=3), 4)
    index = np.array([-1, 2, -3])
    _ = buffer[index], buffer.get(index, "obs_next"), buffer.prev(index), buffer.next(index)
    assert index.tolist() == [-1, 2, -3]


def test_numpy_takes_buffers_for_objects_and_rows_are_iterated_over():  # A14, A22 test_replaybuffermanager
    found = np.array([ReplayBuffer(0), ReplayBuffer(3), fill(ReplayBuffer(3), 2)])
    assert found.dtype == object and found.shape == (3,)
    assert [int(one.obs) for one in found[2]] == [0, 1] and list(found[1]) == []
    with pytest.raises(IndexError, match="^index 0 holds no row; 0 of 3 are there$"):
        _ = ReplayBuffer(3)[0]
    assert dict(ReplayBuffer(3)[:]) == {}


def test_rows_of_every_lane_are_iterated_over():
    several = VectorReplayBuffer(8, 2)
    for t in range(3):
        several.add(rows([t, 10 + t]))
    several.add(rows([13]), [1])
    assert [int(one.obs) for one in several] == [0, 1, 2, 10, 11, 12, 13]
    cached = CachedReplayBuffer(ReplayBuffer(4), 2, 3)
    for t in range(2):
        cached.add(rows([t, 10 + t], [t == 1, 0]))
    assert [int(one.obs) for one in cached] == [0, 1, 10, 11]
    assert [int(one.obs) for one in wrapped()] == [5, 6, 2, 3, 4] and list(ReplayBuffer(0)) == []


def test_get_takes_names_of_arrays_and_of_what_is_nested():  # A6
    buffer = wrapped()
    assert buffer.get([0, 1], "rew").tolist() == [5, 6]
    assert buffer.get(3, "done") and not buffer.get(2, "done")
    assert buffer.get([0], "info/a/b").tolist() == [1]
    nested = buffer.get([0, 2], "info")
    assert isinstance(nested, ArrayDict) and nested.a.b.tolist() == [1, 1]
    assert len(nested) == 2 and nested[:1].a.b.tolist() == [1]
    assert buffer.get([0], "inf", default_value=7) == 7
    with pytest.raises(MissingKeyError, match="^no 'inf' in this buffer, there are "):
        buffer.get([0], "inf")
    with pytest.raises(SpecError, match="^stack_num must be at least 1, got 0$"):
        buffer.get([0], "obs", stack_num=0)


def test_what_is_nested_in_columns_is_indexed_by_rows():
    buffer = fill(ReplayBuffer(4), 3, info={"step": 7, "b": {"c": np.arange(2)}})
    assert len(buffer.info) == 4 and buffer.info[0].step == 7 and buffer.info[[2, 3]].b.c.tolist() == [[0, 1], [0, 0]]
    with pytest.raises(ValueError, match="read-only"):
        buffer.info.step[0] = 1


def test_a_row_of_a_column_that_is_stored_once_is_read_without_the_others(monkeypatch):
    buffer = ReplayBuffer(50)
    for t in range(60):
        buffer.add({"obs": np.full(300, t), "act": 0, "rew": 0.0, "terminated": t % 7 == 6, "truncated": False,
                    "obs_next": np.full(300, t + 1)})  # fmt: skip
    read = []
    gather = buffer._storage.gather
    monkeypatch.setattr(buffer._storage, "gather", lambda *args: read.append(args[1].size) or gather(*args))
    column = buffer.obs_next
    assert column.shape == (50, 300) and len(column) == 50 and column.dtype == np.int64 and not any(read)
    index = np.array([[3, 20], [9, 49]])
    assert column[3].tolist() == [54] * 300 and column[index][..., 0].tolist() == [[54, 21], [60, 50]]
    assert column[-1, 5] == 50 and column[10:12, :2].tolist() == [[11, 11], [12, 12]] and max(read) == 4
    assert column[np.arange(50) == 9, 0].tolist() == [60] and column[..., 0].shape == (50,)
    whole = np.asarray(column)
    assert (whole == buffer[np.arange(50)].obs_next).all() and (column + 1 == whole + 1).all() and column.max() == 60
    for part in (column, column[3], column[index], column[...]):
        with pytest.raises(SpecError, match="^a column is read-only: call set_array_at_key"):
            part[0] = 1
    with pytest.raises(IndexError):
        column[50]


def test_columns_are_read_only_and_have_all_rows():  # A2
    buffer = fill(ReplayBuffer(4), 2, x=np.ones(3), obs_next=np.int64(9))
    assert buffer.obs.tolist() == [0, 1, 0, 0] and buffer.x.shape == (4, 3) and buffer.obs_next.tolist() == [9, 9, 0, 0]
    assert buffer.done.dtype == bool
    message = r"^a column is read-only: call set_array_at_key\(values, key, index\) of the buffer to change rows$"
    for name in ("obs", "x", "done"):
        for column in (getattr(buffer, name), getattr(buffer, name)[1:]):
            with pytest.raises(SpecError, match=message):
                column[0] = 1
    with pytest.raises(SpecError, match=message):
        buffer._meta.obs[0] = 1
    for name in ("obs", "done", "info"):  # A2: it would hide the column
        with pytest.raises(AttributeError, match=f"^'{name}' is a column of this buffer; use set_array_at_key or"):
            setattr(buffer, name, np.zeros(4))
    for name in ("nothing", "_nothing"):
        with pytest.raises(AttributeError, match=f"^'ReplayBuffer' object has no attribute '{name}'$"):
            getattr(buffer, name)
    with pytest.raises(AttributeError):
        _ = ReplayBuffer(4).obs
    with pytest.raises(AttributeError):  # it is made when it is read
        _ = fill(ReplayBuffer(4), 2).obs_next


def test_what_is_computed_of_a_column_is_plain():
    buffer = fill(ReplayBuffer(4), 4, x=np.ones(3))
    column = buffer.rew
    for value in (column * 2, -column, np.sqrt(column), column == 1, column + buffer.x[:, 0], column @ buffer.x):
        assert type(value) is np.ndarray and value.flags.writeable
    assert type(column.sum()) is type(column.mean()) is type(column[0]) is np.float64 and type(column.any()) is np.bool_
    assert repr(column) == repr(np.asarray(column)) and type(pickle.loads(pickle.dumps(column))) is np.ndarray
    copied = column.copy()
    copied[0] = 7
    assert copied[0] == 7 and buffer.rew[0] == 0
    changed = np.array(column)
    changed += 1
    buffer.set_array_at_key(changed, "rew")
    assert buffer.rew.tolist() == column.tolist() == [1, 2, 3, 4]
    assert jnp.asarray(buffer.rew).tolist() == torch.tensor(buffer.rew).tolist() == [1, 2, 3, 4]


# Draws


def test_every_row_is_drawn_as_often_as_any_other():  # A8
    buffer = fill(ReplayBuffer(10), 17)
    counts = np.bincount(buffer.sample_indices(20_000), minlength=10)
    assert abs(counts - 2000).max() < 4 * np.sqrt(2000)
    few = fill(ReplayBuffer(10), 3)
    assert set(few.sample_indices(200).tolist()) == {0, 1, 2}


def test_none_is_a_permutation_zero_is_the_order_and_below_is_nothing():  # A8, C1
    buffer = fill(ReplayBuffer(20), 33)
    orders = [buffer.sample_indices(None).tolist() for _ in range(5)]
    assert all(sorted(order) == list(range(20)) for order in orders) and len(set(map(tuple, orders))) == 5
    assert buffer.sample_indices(0).tolist() == [*range(13, 20), *range(13)]
    assert buffer.sample_indices(-1).tolist() == []
    for size, n in ((None, 20), (0, 20), (-3, 0), (7, 7), (np.int32(4), 4)):
        batch, index = buffer.sample(size)
        assert index.dtype == np.int64 and index.shape == batch.obs.shape == batch.done.shape == (n,)
        assert batch.obs.tolist() == buffer.obs[index].tolist()


class Newest:
    """Draws the newest rows only, by tianshou's way to change what is drawn."""

    def sample_indices(self, batch_size):
        return super().sample_indices(0)[-batch_size:]


def test_a_subclass_may_draw_in_a_way_of_its_own():
    class Plain(Newest, ReplayBuffer):
        pass

    class Several(Newest, VectorReplayBuffer):
        pass

    class Prioritized(Newest, PrioritizedReplayBuffer):
        pass

    buffer = fill(Plain(8, n_step=2, gamma=0.5, stack_num=2), 6)
    batch, index = buffer.sample(3)
    assert index.tolist() == [3, 4, 5] and batch.rew.tolist() == [5, 6.5, 5]  # n-step sums as of any
    assert batch.obs.tolist() == [[2, 3], [3, 4], [4, 5]]
    several = Several(8, 2)
    several.add({name: [value, value] for name, value in row(1).items()})
    assert several.sample(1)[1].tolist() == [4]
    prioritized = fill(Prioritized(8, 1.0, 1.0), 4)
    prioritized.update_weight([2, 3], [1.0, 4.0])
    np.testing.assert_allclose(prioritized.sample(2)[0].weight, [1, 0.25], rtol=1e-6)


def test_a_subclass_may_read_in_a_way_of_its_own_and_draw_sequences():
    class Scaled(ReplayBuffer):
        def __getitem__(self, index):
            batch = super().__getitem__(index)
            batch.rew = batch.rew * 10
            return batch

    class Sequences(ReplayBuffer):
        def sample_indices(self, batch_size):
            return self._rng.integers(0, len(self) - 1, batch_size)[:, None] + np.arange(2)

    batch, index = fill(Scaled(8), 4).sample(0)
    assert batch.rew.tolist() == [0, 10, 20, 30] and index.tolist() == [0, 1, 2, 3]
    batch, index = fill(Sequences(8), 4).sample(5)
    assert batch.rew.tolist() == index.tolist() and index.shape == (5, 2)
    for kind in (Scaled, Sequences):
        with pytest.raises(SpecError, match=f"^sample: {kind.__name__} reads by index, which gives no n-step"):
            fill(kind(8, n_step=2), 4).sample(2)


def test_an_empty_buffer_gives_empty_indexes_and_no_sample():  # issue 4, A21.15
    for buffer in (ReplayBuffer(4), ReplayBuffer(0), VectorReplayBuffer(8, 2), fill(ReplayBuffer(4), 2)):
        buffer.reset()
        for size in (0, None, -1):
            assert buffer.sample_indices(size).tolist() == [] and buffer.sample_indices(size).dtype == np.int64
            batch, index = buffer.sample(size)
            assert index.tolist() == [] and all(len(value) == 0 for value in batch.values())
        for method in (buffer.sample, buffer.sample_indices):
            for error in (EmptyBufferError, StateError, ValueError):  # numpy raises a ValueError in tianshou
                with pytest.raises(error, match=r"^Cannot sample from an empty storage\.$"):
                    method(3)


@pytest.mark.parametrize("size", [1.0, "3", True, [2]])
def test_a_batch_size_is_an_int_or_none(size):
    with pytest.raises(TypeError, match="^batch_size must be an int or None, got"):
        fill(ReplayBuffer(4), 2).sample(size)


def test_a_seed_gives_the_same_draws_and_another_one_others():
    def made(**seed):
        return fill(ReplayBuffer(50, **seed), 50)

    assert draws(made()) == draws(made(random_seed=42)) == draws(made(random_seed=np.random.default_rng(42)))
    assert draws(made()) != draws(made(random_seed=1))
    torch.manual_seed(5)
    first = draws(made(random_seed=None))
    torch.manual_seed(5)
    assert draws(made(random_seed=None)) == first


def test_draws_leave_the_global_generators_alone():
    state, torch_state = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    draws(fill(ReplayBuffer(5), 5))
    assert np.random.get_state()[1].tolist() == state and torch.get_rng_state().tolist() == torch_state


@pytest.mark.parametrize("stack_num", [1, 3])
def test_a_sample_is_whole_while_another_thread_writes(stack_num):  # R44
    buffer = ReplayBuffer(1000, stack_num=stack_num)
    for t in range(1000):
        buffer.add(row(t, x=np.full(500, t)))
    stop = threading.Event()

    def write():
        t = 1000
        while not stop.is_set():
            buffer.add(row(t, x=np.full(500, t)))
            t += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(100):
            batch, _ = buffer.sample(40)
            obs = batch.obs if stack_num == 1 else batch.obs[:, -1]
            assert (batch.x == obs[:, None]).all() and (batch.rew == obs).all()
            if stack_num > 1:
                steps = np.diff(batch.obs)  # the oldest row is repeated, and then they count on
                assert np.isin(steps, (0, 1)).all() and (np.diff(steps) >= 0).all()
    finally:
        stop.set()
        thread.join()


# Stacks


def episodes_of_four(n=16, **arguments):
    """16 rows in a ring of 9, episodes of obs 1 2 3 4."""
    buffer = ReplayBuffer(9, **arguments)
    for t in range(n):
        obs, done = t % 4 + 1, t % 4 == 3
        stacked = [obs, obs, obs] if buffer.save_only_last_obs else obs
        buffer.add({"obs": stacked, "act": 1, "rew": 0, "terminated": done, "truncated": False,
                    "obs_next": [obs, obs] if buffer.save_only_last_obs else obs, "info": {"n": t}})  # fmt: skip
    return buffer


STACKS = [
    [1, 1, 1, 2], [1, 1, 2, 3], [1, 2, 3, 4], [1, 1, 1, 1], [1, 1, 1, 2], [1, 1, 2, 3], [1, 2, 3, 4], [4, 4, 4, 4],
    [1, 1, 1, 1],
]  # fmt: skip


@pytest.mark.parametrize("save_only_last_obs", [False, True])
def test_stacks_go_around_the_end_and_repeat_the_first_frame(save_only_last_obs):  # A22 test_stack, R7, R10
    buffer = episodes_of_four(stack_num=4, save_only_last_obs=save_only_last_obs)
    assert buffer.obs.shape == (9,)
    for key in ("obs", "obs_next"):
        assert buffer.get(np.arange(9), key).tolist() == STACKS
        assert buffer[np.arange(9)][key].tolist() == STACKS
    assert buffer.get(2, "obs").tolist() == STACKS[2]
    assert buffer.get([[2], [7]], "obs").tolist() == [[STACKS[2]], [STACKS[7]]]
    assert buffer.get([2, 7], "act").shape == (2, 4)  # `get` stacks what it is asked for
    batch = buffer[[2, 7]]
    assert batch.act.shape == batch.rew.shape == batch.done.shape == (2,)
    assert batch.info.n.tolist() == [[8, 9, 10, 11], [7, 7, 7, 7]]
    assert buffer.get([2], "obs", stack_num=1).tolist() == [4]
    assert buffer.get([2], "obs", stack_num=2).tolist() == [[3, 4]]


def test_only_rows_with_enough_before_them_are_drawn_if_so_wished():  # A22 test_stack
    buffer = episodes_of_four(stack_num=4, sample_avail=True)
    assert buffer.sample_indices(0).tolist() == [2, 6]
    assert sorted(buffer.sample_indices(None).tolist()) == [2, 6]
    counts = np.bincount(buffer.sample_indices(1000), minlength=9)
    assert counts.sum() == counts[2] + counts[6] and abs(counts[2] - 500) < 4 * np.sqrt(250)
    assert buffer.sample(5)[0].obs.tolist() == [[1, 2, 3, 4]] * 5
    assert len(buffer.sample(-1)[1]) == 0
    buffer.stack_num = 3
    assert buffer.sample_indices(0).tolist() == [1, 2, 5, 6]
    buffer.stack_num = 1
    assert len(buffer.sample_indices(0)) == 9
    buffer.stack_num = 5
    assert buffer.sample_indices(0).tolist() == []
    with pytest.raises(SpecError, match="^nothing to sample: no row with so many others before it in its episode"):
        buffer.sample(2)


def nested_without_next():
    """A22 test_ignore_obs_next: ends at 0, 3, 6, 9."""
    buffer = ReplayBuffer(10, ignore_obs_next=True)
    for i in range(10):
        obs = {"mask1": np.array([i, 1, 1, 0, 0]), "mask": i}
        buffer.add({"obs": obs, "obs_next": {"mask": 99}, "act": {"act_id": i, "position_id": i + 3}, "rew": i,
                    "terminated": i % 3 == 0, "truncated": False, "info": {"if": i}})  # fmt: skip
    return buffer


def test_an_ignored_next_observation_of_trajectories_is_not_stored_even_if_it_is_named():
    seen, ends = torch.arange(8.0).reshape(2, 4), torch.zeros(2, 4, dtype=torch.bool)
    steps = {"observation/frame": seen, "_observation/frame": seen + 9, "action/action": seen,
             "_observation/reward": seen, "_observation/terminated": ends, "_observation/truncated": ends}  # fmt: skip
    info, lengths = DictTensor({"env_index": torch.arange(2)}), torch.full((2,), 4)
    buffer = VectorReplayBuffer(8, 2, ignore_obs_next=True)
    names = "obs", "obs_next", "act", "rew", "terminated", "truncated"
    trajectories = Trajectories(info, TemporalDictTensor(steps, lengths))
    buffer.add_trajectories(trajectories, dict(zip(names, steps, strict=True)))
    assert "obs_next" not in buffer._specs
    assert buffer.sample(0)[0].obs_next.tolist() == [1, 2, 3, 3, 5, 6, 7, 7]


def test_an_ignored_next_observation_is_that_of_the_next_row():  # A22 test_ignore_obs_next
    buffer, index = nested_without_next(), np.arange(10)
    assert "obs_next/mask" not in buffer._specs
    batch = buffer[index]
    assert batch.obs_next.mask.tolist() == [0, 2, 3, 3, 5, 6, 6, 8, 9, 9]
    assert batch.obs_next.mask1[:, 0].tolist() == batch.obs_next.mask.tolist()
    assert batch.act.position_id.tolist() == list(range(3, 13))
    assert buffer.get(index, "obs_next").mask.tolist() == batch.obs_next.mask.tolist()
    buffer.stack_num = 4
    batch = buffer[index]
    assert buffer.sample(0)[0].obs_next.mask.tolist() == batch.obs_next.mask.tolist()
    assert batch.obs_next.mask.tolist() == [
        [0, 0, 0, 0], [1, 1, 1, 2], [1, 1, 2, 3], [1, 1, 2, 3], [4, 4, 4, 5], [4, 4, 5, 6], [4, 4, 5, 6],
        [7, 7, 7, 8], [7, 7, 8, 9], [7, 7, 8, 9],
    ]  # fmt: skip
    assert batch.info["if"].tolist() == [
        [0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 2], [1, 1, 2, 3], [4, 4, 4, 4], [4, 4, 4, 5], [4, 4, 5, 6],
        [7, 7, 7, 7], [7, 7, 7, 8], [7, 7, 8, 9],
    ]  # fmt: skip
    assert batch.obs_next.mask1.shape == (10, 4, 5)


def test_a_next_observation_that_is_never_given_is_made():
    buffer = fill(ReplayBuffer(5), 7, ends=[3])
    assert buffer[:].obs_next.tolist() == [3, 3, 5, 6, 6]


def test_save_only_last_obs_takes_nested_observations_and_rows_and_needs_no_next_one():  # A3.4
    buffer = VectorReplayBuffer(8, 2, save_only_last_obs=True)
    frames = np.arange(2 * 4 * 3).reshape(2, 4, 3)
    given = {**rows([0, 1]), "obs": {"image": frames}}
    buffer.add(given)
    assert buffer.obs.image[[0, 4]].tolist() == frames[:, -1].tolist()
    for wrong in (np.zeros(2), np.zeros((2, 0, 3))):
        with pytest.raises(SpecError, match="^'obs/image' has shape .*: there is no axis of which to save the last$"):
            buffer.add({**given, "obs": {"image": wrong}})


def test_the_stack_of_a_short_episode_and_at_the_head():  # R10
    buffer = fill(ReplayBuffer(6, stack_num=4), 9, ends=[4, 5])  # ring: 6 7 8 3 4 5
    assert buffer[np.arange(6)].obs.tolist() == [
        [6, 6, 6, 6], [6, 6, 6, 7], [6, 6, 7, 8], [3, 3, 3, 3], [3, 3, 3, 4], [5, 5, 5, 5],
    ]  # fmt: skip


# n-step sums


def test_n_step_sums_stop_at_ends_and_at_the_newest_row():  # R7, R8, R9
    buffer = ReplayBuffer(6, n_step=3, gamma=0.5)
    for t in range(9):  # ring: 6 7 8 3 4 5; 4 is truncated
        buffer.add({**row(t), "truncated": t == 4, "obs_next": t + 100})
    batch, index = buffer.sample(0)
    assert batch.obs.tolist() == [3, 4, 5, 6, 7, 8] and index.tolist() == [3, 4, 5, 0, 1, 2]
    assert batch.rew.tolist() == [3 + 2, 4, 5 + 3 + 7 / 4, 6 + 3.5 + 2, 7 + 4, 8]
    assert batch.obs_next.tolist() == [104, 104, 107, 108, 108, 108]
    assert batch.discount.tolist() == [0.25, 0.5, 0.125, 0.125, 0.25, 0.5] and batch.discount.dtype == np.float32
    assert batch.truncated.tolist() == batch.done.tolist() == [True, True, False, False, False, False]
    assert not batch.terminated.any()
    # What is stored is what was added.
    assert buffer[:].rew.tolist() == [3, 4, 5, 6, 7, 8] and "discount" not in buffer[:]


@pytest.mark.parametrize("given", [True, False])
def test_n_step_sums_and_stacks_go_together(given):
    buffer = ReplayBuffer(10, stack_num=2, n_step=2, gamma=1.0)
    for t in range(6):
        buffer.add({**row(t, t == 3), **({"obs_next": t + 1} if given else {})})
    batch, _ = buffer.sample(0)
    assert batch.rew.tolist() == [1, 3, 5, 3, 9, 5]
    assert batch.obs.tolist() == [[0, 0], [0, 1], [1, 2], [2, 3], [4, 4], [4, 5]]
    # What follows the last of the two steps: the stack of what was stored there, or of the next row.
    stored = [[1, 2], [2, 3], [3, 4], [3, 4], [5, 6], [5, 6]]
    made = [[1, 2], [2, 3], [2, 3], [2, 3], [4, 5], [4, 5]]
    assert batch.obs_next.tolist() == (stored if given else made)


def test_vector_rewards_have_n_step_sums_and_whole_numbers_were_made_floats():
    buffer = ReplayBuffer(4, n_step=2, gamma=0.5)
    for t in range(2):
        buffer.add({**row(t), "rew": [1, 10]})
    assert buffer.sample(0)[0].rew.tolist() == [[1.5, 15], [1, 10]]


# Frames


def test_a_frame_is_stored_once():  # the issue: bytes asserted
    n, size = 500, 84 * 84
    video = np.random.default_rng(0).integers(0, 256, (n + 1, 84, 84), np.uint8)
    with_next, without = ReplayBuffer(n, stack_num=4), ReplayBuffer(n, stack_num=4, ignore_obs_next=True)
    for t in range(n):
        done = t % 100 == 99
        after = video[t + 1] + np.uint8(done)  # the true last frame is not what the next episode begins with
        one = {**row(t, done), "obs": video[t], "obs_next": after}
        with_next.add(one)
        without.add(one)
    assert without.nbytes < n * (size + 30)
    assert with_next.nbytes < n * (size + 30) + 7 * size
    batch = with_next[:]
    assert (batch.obs[:, -1] == video[:n]).all()
    ends = np.arange(n) % 100 == 99
    assert (batch.obs_next[:, -1] == video[1:] + ends[:, None, None].astype(np.uint8)).all()
    assert (without[:].obs_next[:-1][~ends[:-1]] == without[:].obs[1:][~ends[:-1]]).all()
    assert (with_next.obs_next == batch.obs_next[:, -1]).all()


# Frameworks


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax", "warp"])
def test_samples_are_of_the_framework_and_row_ids_of_numpy(framework):
    buffer = fill(ReplayBuffer(6, framework=framework, stack_num=2), 4, info={"x": np.float32(0.5)})
    batch, index = buffer.sample(3)
    assert type(index) is np.ndarray and index.dtype == np.int64
    module = {"numpy": "numpy", "torch": "torch", "jax": "jaxlib", "warp": "warp"}[framework]
    for name in ("obs", "rew", "done", "info/x"):
        for value in (batch[name], buffer[[0, 1]][name], buffer.get([0, 1], name)):
            assert type(value).__module__.split(".")[0] == module
    assert isinstance(batch, DictTensor if framework == "torch" else ArrayDict)
    host = np.asarray(batch["obs"].numpy() if framework == "warp" else batch["obs"])
    assert host.tolist() == [[max(0, i - 1), i] for i in index]
    nested = buffer.get([0], "info")
    assert isinstance(nested, DictTensor if framework == "torch" else ArrayDict) and list(nested.keys()) == ["x"]
    if framework != "warp":  # which has no arrays without axes
        assert int(buffer[1]["act"]) == 1
    assert isinstance(buffer.obs, np.ndarray)


def test_bfloat16_stays_what_it_is():
    buffer = ReplayBuffer(4, framework="torch", stack_num=2)
    for t in range(3):
        buffer.add({**row(t, t == 1), "obs": torch.tensor([t + 0.5], dtype=torch.bfloat16)})
    batch, _ = buffer.sample(0)
    assert batch["obs"].dtype is batch["obs_next"].dtype is torch.bfloat16
    assert batch["obs"][:, -1, 0].tolist() == [0.5, 1.5, 2.5]
    assert batch["obs_next"][:, -1, 0].tolist() == [1.5, 1.5, 2.5]
    assert buffer.obs[:, 0].tolist() == [0.5, 1.5, 2.5, 0]
    assert not buffer.hasnull() and buffer.isnull()["obs"].dtype is torch.bool
    buffer.set_array_at_key(torch.tensor([[float("nan")]], dtype=torch.bfloat16), "obs", index=[1])
    assert buffer.isnull()["obs"].tolist() == [[False], [True], [False]]


@pytest.mark.parametrize("key", ["obs", "rew", "info/s"])
def test_one_key_has_the_axes_of_the_index(key):
    buffer = ReplayBuffer(4)
    for t in range(3):
        row = {"obs": np.full(2, t), "act": 0, "rew": float(t), "terminated": False, "truncated": False}
        buffer.add({**row, "info": {"s": "abc"[t]}})
    every = buffer.get([0, 1, 2], key)
    for index in (1, [2, 0], np.array([[0, 1], [2, 2]]), slice(1, 3)):
        found = buffer.get(index, key)
        np.testing.assert_equal(found, every[index])
        assert type(found) is (str if key == "info/s" and isinstance(index, int) else np.ndarray)
