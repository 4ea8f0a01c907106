"""`VectorReplayBuffer`: a ring for each environment, and what the batcher hands out.

"A" is a section of spec/tianshou-torchrl.md.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from replay_rows import draws, fill, listed, row, rows, state_of

from rlstructs import DictTensor, EmptyBufferError, MissingKeyError, SpecError, TemporalDictTensor, Trajectories
from rlstructs.replay import (
    ArrayDict,
    CachedReplayBuffer,
    PrioritizedReplayBuffer,
    PrioritizedVectorReplayBuffer,
    ReplayBuffer,
    VectorReplayBuffer,
)


def test_rings_of_several_environments():  # A22 test_replaybuffermanager
    buffer = VectorReplayBuffer(20, 4)
    assert listed(buffer.add(rows([1, 2, 3], [0, 0, 1]), [0, 1, 2])) == [[0, 5, 10], [0, 0, 3], [0, 0, 1], [0, 5, 10]]
    with pytest.raises(NotImplementedError, match="^VectorReplayBuffer cannot be updated"):
        buffer.update(ReplayBuffer(4))
    assert np.bincount(buffer.sample_indices(11000))[[0, 5, 10]].min() >= 3000
    batch, index = buffer.sample(0)
    assert index.tolist() == [0, 5, 10] and batch.obs.tolist() == [1, 2, 3]
    assert buffer.prev(index).tolist() == buffer.next(index).tolist() == [0, 5, 10]
    assert buffer.unfinished_index().tolist() == [0, 5]
    buffer.add(rows([4], [1]), [3])
    assert buffer.unfinished_index().tolist() == [0, 5]
    assert buffer.sample_indices(0).tolist() == [0, 5, 10, 15]
    zeros = [0, 0, 0, 0]
    for done in (zeros, [1] * 4):
        buffer.add(rows(zeros, done), [0, 1, 2, 3])
    assert len(buffer) == 12
    for done in (zeros, [0, 1, 0, 1]):
        buffer.add(rows(zeros, done))
    assert len(buffer) == 20
    counts = np.bincount(buffer.sample_indices(120000))
    assert counts.min() >= 5000
    index = buffer.sample_indices(0)
    assert index.tolist() == list(range(20))
    assert buffer.done.astype(int).tolist() == [0, 0, 1, 0, 0, 0, 0, 1, 0, 1, 1, 0, 1, 0, 0, 1, 0, 1, 0, 1]
    assert buffer.prev(index).tolist() == [0, 0, 1, 3, 3, 5, 5, 6, 8, 8, 10, 11, 11, 13, 13, 15, 16, 16, 18, 18]
    assert buffer.next(index).tolist() == [1, 2, 2, 4, 4, 6, 7, 7, 9, 9, 10, 12, 12, 14, 14, 15, 17, 17, 19, 19]
    assert buffer.unfinished_index().tolist() == [4, 14]
    assert listed(buffer.add(rows([1], [1]), [2])) == [[10], [1], [3], [13]]
    assert buffer.unfinished_index().tolist() == [4]
    assert sorted(buffer.sample_indices(0)) == list(range(20))
    assert buffer.prev(index).tolist() == [0, 0, 1, 3, 3, 5, 5, 6, 8, 8, 14, 11, 11, 13, 13, 15, 16, 16, 18, 18]
    assert buffer.next(index).tolist() == [1, 2, 2, 4, 4, 6, 7, 7, 9, 9, 10, 12, 12, 14, 10, 15, 17, 17, 19, 19]
    assert buffer.prev(-1) == buffer.prev([19])[0] and buffer.next(-1) == buffer.next([19])[0]
    assert buffer.last_index.tolist() == [4, 9, 10, 19]
    buffer.set_batch({**{name: getattr(buffer, name) for name in rows([0])}, "info": np.ones(20)})
    assert buffer.info.tolist() == [1] * 20 and buffer.unfinished_index().tolist() == [4]
    assert buffer.sample_indices(-1).tolist() == []


def test_the_size_is_rounded_up():  # A15
    buffer = VectorReplayBuffer(10, 3)
    assert buffer.maxsize == 12 and buffer.subbuffer_edges.tolist() == [0, 4, 8, 12] and buffer.buffer_num == 3


def test_another_buffer_is_made_with_the_options_of_one():  # A0
    buffer = VectorReplayBuffer(10, 2, stack_num=3, save_only_last_obs=True)
    buffer.stack_num = 4
    options = {"stack_num": 4, "ignore_obs_next": False, "save_only_last_obs": True, "sample_avail": False}
    assert buffer.options == options and ReplayBuffer(5, **buffer.options).options == options
    prioritized = PrioritizedReplayBuffer(5, 0.6, 0.4, weight_norm=False, ignore_obs_next=True)
    prioritized.set_beta(0.7)
    again = PrioritizedVectorReplayBuffer(6, 2, **prioritized.options)
    assert again.options == prioritized.options and (again.alpha, again.beta, again.weight_norm) == (0.6, 0.7, False)


def test_rows_of_one_environment_may_come_several_times():  # A15
    buffer = VectorReplayBuffer(6, 2)
    added = buffer.add(rows([1, 2, 3, 4, 5], [0, 0, 1, 0, 1]), [1, 0, 1, 1, 1])
    assert listed(added) == [[3, 0, 4, 5, 3], [0, 0, 4, 0, 9], [0, 0, 2, 0, 2], [3, 0, 3, 5, 5]]
    assert buffer.obs.tolist() == [2, 0, 0, 5, 3, 4]
    assert buffer.prev([3, 4, 5]).tolist() == [5, 4, 5]


def rings(made):
    """A buffer of two rings of four rows, of which the second has wrapped, and each as a buffer of its own."""
    apart = [ReplayBuffer(4, stack_num=2), ReplayBuffer(4, stack_num=2)]
    buffer = made()
    for t in range(6):
        lanes = [0, 1] if t < 3 else [1]
        batch = rows([10 * lane + t for lane in lanes], [t == 1] * len(lanes), info={"n": np.array(lanes)})
        buffer.add(batch, lanes)
        for at, lane in enumerate(lanes):
            one = {name: value[at] for name, value in batch.items() if name != "info"}
            apart[lane].add({**one, "info": {"n": lane}})
    return buffer, apart


MADE = {
    "plain": lambda: VectorReplayBuffer(8, 2, stack_num=2),
    "prioritised": lambda: PrioritizedVectorReplayBuffer(8, 2, alpha=0.6, beta=0.4, stack_num=2),
}


@pytest.mark.parametrize("kind", MADE)
def test_each_ring_is_read_as_a_buffer_of_its_own(kind):  # A15: `buffers` of tianshou's managers
    buffer, apart = rings(MADE[kind])
    views = buffer.buffers
    assert views.shape == (2,) and views.dtype == object
    for view, alone in zip(views, apart, strict=True):
        n = len(alone)
        assert (len(view), view.maxsize) == (n, 4) and view.last_index.tolist() == alone.last_index.tolist()
        assert view.unfinished_index().tolist() == alone.unfinished_index().tolist()
        assert view.sample_indices(0).tolist() == alone.sample_indices(0).tolist()
        every = np.arange(n)
        assert view.prev(every).tolist() == alone.prev(every).tolist() and view.next(-1) == alone.next(-1)
        for index in (slice(None), slice(1, -1), [0, n - 1, 0], -1, np.arange(n) > 1, np.arange(4) == 2, []):
            one, other = view[index], alone[index]
            assert all(np.array_equal(one[name], other[name]) for name in other), index
            assert np.array_equal(view.get(index, "obs", stack_num=3), alone.get(index, "obs", stack_num=3))
        for name in ("obs", "done", "rew"):
            assert getattr(view, name).tolist() == getattr(alone, name).tolist()
        assert view.info.n.tolist() == alone.info.n.tolist() and view.policy == {}
        batch, index = view.sample(50)
        assert set(index.tolist()) == set(range(n)) and batch.obs.tolist() == view[index].obs.tolist()
        assert sorted(view.sample_indices(None).tolist()) == list(range(n)) and len(view.sample_indices(-1)) == 0
        assert [batch.obs.tolist() for batch in view] == [batch.obs.tolist() for batch in alone]
        for wrong in (n, -n - 1, [0, 4]):
            with pytest.raises(IndexError):
                view[wrong]
        with pytest.raises(AttributeError):
            _ = view.nothing


def test_a_ring_shows_what_is_added_to_the_buffer():
    buffer = VectorReplayBuffer(6, 2)
    first, second = buffer.buffers
    with pytest.raises(EmptyBufferError):
        second.sample(2)
    assert len(second) == 0 and second.sample_indices(0).tolist() == [] and len(second[:]) == 0
    buffer.add(rows([5], [0]), [1])
    assert (len(first), len(second)) == (0, 1) and second[0].obs == 5 and second.obs.tolist() == [5, 0, 0]
    with pytest.raises(SpecError, match="^a column is read-only"):
        second.obs[0] = 1
    buffer.reset()
    assert len(second) == 0


def test_the_rings_of_a_cached_buffer_are_the_main_one_and_the_caches():  # A18
    buffer = CachedReplayBuffer(ReplayBuffer(10), 2, 4)
    for t in range(3):
        buffer.add(rows([t, 10 + t], [t == 1, False]))
    main, *caches = buffer.buffers
    assert main is buffer.main_buffer and [len(cache) for cache in caches] == [1, 3]
    assert caches[0][:].obs.tolist() == [2] and caches[1][:].obs.tolist() == [10, 11, 12]
    assert caches[1].prev([0, 1, 2]).tolist() == [0, 0, 1] and caches[1].unfinished_index().tolist() == [2]
    assert caches[1].obs.tolist()[:3] == [10, 11, 12] and caches[1].maxsize == 4


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([0, 3], IndexError, r"^buffer_ids: 3 is not in \[0, 3\)$"),
        ([-1, 0], IndexError, r"^buffer_ids: -1 is not in \[0, 3\)$"),
        ([0.0, 1.0], SpecError, r"^buffer_ids must be a list of ints, got"),
        (1, SpecError, r"^buffer_ids must be a list of ints, got 1$"),
        ([0], SpecError, r"^'obs' has 2 rows, expected one for each of 1 lanes$"),
        (None, SpecError, r"^'obs' has 2 rows, expected one for each of 3 lanes$"),
        ([], SpecError, r"^'obs' has 2 rows, expected one for each of 0 lanes$"),
    ],
)
def test_wrong_environments_change_nothing(ids, error, message):  # A15
    buffer = VectorReplayBuffer(9, 3)
    buffer.add(rows([1, 2, 3]))
    before = state_of(buffer)
    with pytest.raises(error, match=message):
        buffer.add(rows([1, 2]), ids)
    ragged = {**rows([1, 2]), "act": [1, 2, 3]}
    with pytest.raises(SpecError, match="^'act' has 3 rows, expected one for each of 2 lanes$"):
        buffer.add(ragged, [0, 1])
    assert state_of(buffer) == before


def test_no_rows_are_no_change():
    buffer = VectorReplayBuffer(9, 3)
    buffer.add(rows([1, 2, 3]))
    assert [part.tolist() for part in buffer.add(rows(np.zeros(0, int)), [])] == [[], [], [], []]
    assert len(buffer) == 3


def test_rows_of_each_environment_are_taken_in_any_form():
    expected = None
    forms = (np.asarray, lambda x: np.asarray(x).tolist(), torch.as_tensor)
    for form in forms:
        buffer = VectorReplayBuffer(8, 2)
        found = []
        for t in range(6):
            one = {name: form(value) for name, value in rows([t, 10 + t], [t == 2, t == 4]).items()}
            found.append(listed(buffer.add(one)))
        state = found, state_of(buffer)
        assert expected is None or state == expected
        expected = state


@pytest.mark.parametrize("form", [list, tuple, lambda dicts: np.array(dicts, object)], ids=["list", "tuple", "objects"])
def test_mappings_of_each_environment_are_taken(form):  # A22 test_multibuf_stack; so environments give their infos
    buffer = VectorReplayBuffer(8, 2)
    obs = [{"x": np.ones(3), "y": {"z": 1}}, {"x": np.zeros(3), "y": {"z": 2.5}}]
    buffer.add({**rows([1, 2]), "obs": form(obs), "info": form([{}, {}])})
    assert sorted(buffer._specs) == ["act", "obs/x", "obs/y/z", "rew", "terminated", "truncated"]
    ended = {"lives": np.int64(3), "episode": {"r": 7.0}, "nothing": None}
    buffer.add({**rows([1, 2]), "obs": form(obs), "info": form([{"lives": np.int64(4)}, ended])})
    assert buffer[[1, 5]].obs.y.z.tolist() == [1, 2.5] and buffer[[0, 4]].obs.x.tolist() == [[1, 1, 1], [0, 0, 0]]
    assert buffer[[1, 5]].info.lives.tolist() == [4, 3] and buffer[[1, 5]].info.episode.r.tolist() == [0, 7]
    before = state_of(buffer)
    obs[1]["x"] = np.zeros(4)
    with pytest.raises(SpecError, match=r"^add: 'x' has not the same shape in all rows, but \[\(3,\), \(4,\)\]$"):
        buffer.add({**rows([1, 2]), "obs": form(obs)})
    with pytest.raises(SpecError, match="^'info/lives' has 3 rows, expected one for each of 2"):
        buffer.add({**rows([1, 2]), "obs": form(obs[:1] * 2), "info": form([ended] * 3)})
    assert state_of(buffer) == before


@pytest.mark.parametrize("n", [1, 2])
def test_naming_every_environment_is_naming_none(n):
    def added(ids):
        buffer = VectorReplayBuffer(4 * n, n)
        found = [listed(buffer.add(rows(np.arange(n) + t, np.arange(n) == t % 3), ids)) for t in range(9)]
        return found, state_of(buffer)

    expected = added(None)
    for ids in (list(range(n)), np.arange(n), np.arange(n, dtype=np.uint8), tuple(range(n)), torch.arange(n)):
        assert added(ids) == expected
    one = VectorReplayBuffer(4, 1)
    one.add(rows([0], obs=[[1, 2]]))
    with pytest.raises(SpecError, match=r"^'act' has shape \(\), expected a first axis of rows$"):
        one.add(row(0, obs=np.array([1, 2])))
    jax = pytest.importorskip("jax")
    assert added(jax.numpy.arange(n)) == expected  # which compares itself with no list
    for wrong in (np.arange(n) * 1.0, np.ones(n, bool), [np.arange(n)] * n):
        with pytest.raises(SpecError, match=r"^buffer_ids must be a list of ints, got"):
            VectorReplayBuffer(n * 3, n).add(rows(np.arange(n)), wrong)
    with pytest.raises(SpecError, match=r"^buffer_ids must be a list of ints, got \[0\.0\]$"):
        one.add(rows([0], obs=[[1, 2]]), [0.0])
    assert len(one) == 1


def test_extra_keys_are_kept():  # A21.16: dropped there
    buffer = VectorReplayBuffer(4, 2)
    buffer.add(rows([1, 2], returns=[5.0, 6.0]))
    assert buffer[:].returns.tolist() == [5, 6]


@pytest.mark.parametrize("n", [4, 5, 6])
def test_keys_that_come_later_are_kept_however_many_environments_there_are(n):
    buffer, strict = VectorReplayBuffer(10 * n, n), VectorReplayBuffer(10 * n, n, new_keys="error")
    flags = np.zeros(n, bool)
    first = {"obs": np.arange(n), "act": flags, "rew": np.ones(n), "terminated": flags, "truncated": flags}
    for each in (buffer, strict):
        each.add(ArrayDict(first))
    more = ArrayDict(first, info={"r": np.arange(n)})
    buffer.add(more)
    assert buffer[:].info.r.reshape(n, 2)[:, 1].tolist() == list(range(n))
    with pytest.raises(SpecError, match="info/r"):
        strict.add(more)


def test_environments_do_not_share_a_random_stream():  # A21.1
    buffer = VectorReplayBuffer(80_000, 8)
    for part in range(8):
        buffer.add_trajectories(trajectories(np.full((8, 1250), part), np.zeros((8, 1250)), lanes=range(8)))
    index = buffer.sample_indices(256)
    assert len(np.unique(index % 10_000)) > 240  # which step, of whatever environment
    assert np.bincount(index // 10_000, minlength=8).min() > 10


def test_uneven_environments_are_drawn_from_by_their_rows():
    buffer = VectorReplayBuffer(40, 2)
    for t in range(20):
        buffer.add(rows([t]), [1])
    for t in range(5):
        buffer.add(rows([t]), [0])
    counts = np.bincount(buffer.sample_indices(25_000), minlength=40)
    assert counts[5:20].sum() == 0 and abs(counts[[*range(5), *range(20, 40)]] - 1000).max() < 150


def test_negative_ids_count_from_the_end_and_unwritten_rows_are_errors():
    buffer = VectorReplayBuffer(8, 2)
    buffer.add(rows([1, 2]))
    assert buffer[-4].obs == 2 and buffer[[0, 4]].obs.tolist() == [1, 2]
    for index in (1, -1, 8, -9):
        with pytest.raises(IndexError, match=f"^index {index} holds no row; 2 of 8 are there$"):
            _ = buffer[index]
    assert buffer[np.isin(np.arange(8), [0, 4])].obs.tolist() == [1, 2]


# What the batcher hands out


def trajectories(frames, done, lengths=None, lanes=None, **more):
    """Trajectories whose observations are `frames` (B, T), and their next ones 0.5 more; rewards are the frames."""
    frames, done = torch.as_tensor(np.asarray(frames)), torch.as_tensor(np.asarray(done)).bool()
    n, n_timesteps = frames.shape
    steps = {
        "observation/frame": frames, "observation/initial_state": torch.zeros(n, n_timesteps, dtype=torch.bool),
        "observation/reward": frames, "observation/last_action": frames, "observation/done": done,
        "action/action": frames.to(torch.int32), "action/extra": frames, "_observation/frame": frames + 0.5,
        "_observation/reward": frames.float(), "_observation/terminated": torch.zeros_like(done),
        "_observation/truncated": done, "_observation/done": done, **more,
    }  # fmt: skip
    lengths = torch.full((n,), n_timesteps) if lengths is None else torch.as_tensor(lengths)
    info = DictTensor({"env_index": torch.as_tensor(list(range(n) if lanes is None else lanes))})
    return Trajectories(info, TemporalDictTensor(steps, lengths))


def test_trajectories_go_to_the_rings_of_their_environments():
    buffer = VectorReplayBuffer(12, 3)
    frames = np.arange(12.0).reshape(3, 4)
    done = np.zeros((3, 4), bool)
    done[0, 1] = done[1, 3] = True
    assert buffer.add_trajectories(trajectories(frames, done, lengths=[4, 4, 2], lanes=[2, 0, 1])) is None
    assert sorted(buffer._specs) == ["act", "obs", "obs_next", "rew", "terminated", "truncated"]
    assert buffer[:].obs.tolist() == [4, 5, 6, 7, 8, 9, 0, 1, 2, 3] and buffer[:].obs_next[0] == 4.5
    assert buffer.act.dtype == np.int32 and buffer.truncated[[3, 9]].tolist() == [True, True]
    # Returns and lengths count on from what came in so.
    added = listed(buffer.add(rows([100.0] * 3, [1, 1, 1], act=[1, 1, 1])))
    assert added == [[0, 6, 8], [100, 117, 105], [1, 3, 3], [0, 4, 10]]


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (2, 0)])
def test_trajectories_without_a_step_change_nothing(shape):
    for buffer in (ReplayBuffer(5), VectorReplayBuffer(6, 2)):
        buffer.add_trajectories(trajectories(np.zeros(shape), np.zeros(shape)))
        assert not len(buffer) and not buffer._specs


@pytest.mark.parametrize("n_steps", [2, 5, 9])
def test_returns_count_on_over_several_batches_and_more_rows_than_there_is_room_for(n_steps):
    quick, slow = VectorReplayBuffer(8, 2), VectorReplayBuffer(8, 2)
    rng = np.random.default_rng(0)
    for _ in range(12):
        frames, done = rng.integers(0, 9, (2, n_steps)) * 1.0, rng.random((2, n_steps)) < 0.1
        lengths = rng.integers(0, n_steps + 1, 2)
        quick.add_trajectories(trajectories(frames, done, lengths))
        for t in range(n_steps):
            ids = np.flatnonzero(t < lengths)
            one = rows(frames[ids, t], obs_next=frames[ids, t] + 0.5, act=frames[ids, t].astype(np.int32))
            slow.add({**one, "rew": frames[ids, t].astype(np.float32), "truncated": done[ids, t]}, ids)
        assert quick._intake.running.lengths.tolist() == slow._intake.running.lengths.tolist()
        np.testing.assert_allclose(quick._intake.running.returns, slow._intake.running.returns)
        assert quick[:].obs.tolist() == slow[:].obs.tolist()
        every_row = quick.sample_indices(0)
        assert every_row.tolist() == slow.sample_indices(0).tolist()
        assert quick.prev(every_row).tolist() == slow.prev(every_row).tolist()


def test_a_buffer_of_one_lane_takes_one_trajectory_after_another():
    buffer = ReplayBuffer(10)
    done = np.zeros((2, 3), bool)
    done[0, 1] = True
    buffer.add_trajectories(trajectories([[0.0, 1, 2], [3, 4, 5]], done, lengths=[3, 2]))
    assert buffer[:].obs.tolist() == [0, 1, 2, 3, 4]
    assert buffer.prev(np.arange(5)).tolist() == [0, 0, 2, 3, 3]  # what was open is cut off
    assert listed(buffer.add(row(1.0, True, act=np.int32(0), obs_next=0.0))) == [[5], [8], [3], [3]]


def test_a_buffer_of_several_lanes_goes_on_where_a_ring_of_one_environment_does():
    buffer = VectorReplayBuffer(10, 1)
    for frames in ([[0.0, 1]], [[2.0, 3]]):
        buffer.add_trajectories(trajectories(frames, np.zeros((1, 2))))
    assert buffer.prev(np.arange(4)).tolist() == [0, 0, 1, 2]


def test_structured_observations_of_trajectories_are_nested():
    def steps(key, at):
        return {f"{at}observation/{key}": torch.zeros(1, 2, 3)}

    batch = trajectories([[0.0, 1]], np.zeros((1, 2)), **steps("goal/x", ""), **steps("goal/x", "_"))
    batch.trajectories.set("observation/raw_reward", torch.ones(1, 2))  # of `NormalizeReward`: it is no observation
    buffer = VectorReplayBuffer(4, 1)
    buffer.add_trajectories(batch)
    assert sorted(buffer._specs) == [
        "act", "obs/frame", "obs/goal/x", "obs_next/frame", "obs_next/goal/x", "rew", "terminated", "truncated"
    ]  # fmt: skip
    assert buffer[:].obs.frame.tolist() == [0, 1] and buffer[:].obs_next.goal.x.shape == (2, 3)


def test_trajectories_follow_the_settings_of_the_buffer():
    buffer = VectorReplayBuffer(4, 1, ignore_obs_next=True, new_keys="error", missing_keys="error")
    buffer.add_trajectories(trajectories([[0.0, 1]], np.zeros((1, 2))))
    assert "obs_next" not in buffer._specs and buffer[:].obs_next.tolist() == [1, 1]
    names = {"obs": "observation/frame", "act": "action/action", "rew": "_observation/reward",
             "terminated": "_observation/terminated", "truncated": "_observation/truncated"}  # fmt: skip
    before = state_of(buffer)
    with pytest.raises(SpecError, match=r"^unknown key\(s\) \['extra'\]"):
        buffer.add_trajectories(trajectories([[0.0, 1]], np.zeros((1, 2))), {**names, "extra": "action/extra"})
    del names["rew"]
    with pytest.raises(MissingKeyError, match=r"^key\(s\) \['rew'\] are missing"):
        buffer.add_trajectories(trajectories([[0.0, 1]], np.zeros((1, 2))), names)
    with pytest.raises(SpecError, match=r"^add_trajectories: env_index 3 is not in \[0, 1\)"):
        buffer.add_trajectories(trajectories([[0.0, 1]], np.zeros((1, 2)), lanes=[3]))
    assert state_of(buffer) == before


def test_only_the_last_of_stacked_observations_of_trajectories_is_stored():
    stacked = torch.arange(12.0).reshape(1, 3, 4)
    frames = {"observation/frame": stacked, "_observation/frame": stacked}
    batch = trajectories([[0.0, 1, 2]], np.zeros((1, 3)), **frames)
    buffer = VectorReplayBuffer(4, 1, save_only_last_obs=True)
    buffer.add_trajectories(batch)
    assert buffer[:].obs.tolist() == buffer[:].obs_next.tolist() == [3, 7, 11]


def test_from_data_and_update_are_for_one_environment():
    with pytest.raises(NotImplementedError, match="^VectorReplayBuffer.from_data"):
        VectorReplayBuffer.from_data(*[np.zeros(3)] * 5)
    with pytest.raises(SpecError, match="^buffer_num must be at least 1, got 0$"):
        VectorReplayBuffer(10, 0)
    with pytest.raises(SpecError, match="^total_size must be at least 1, got 0$"):
        VectorReplayBuffer(0, 2)
    assert draws(VectorReplayBuffer(10, 2), batch_size=0)[0][0] == []
    assert fill(ReplayBuffer(3), 1).update(VectorReplayBuffer(10, 2)).tolist() == []
