"""`HERReplayBuffer` and its kind for several environments, each episode against brute force.

"A" is a section of spec/tianshou-torchrl.md, "R" a scenario of spec/user-demand.md. Seeds are fixed.
"""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from replay_rows import draws, state_of

from rlstructs import MissingKeyError, SpecError
from rlstructs.replay import HERReplayBuffer, HERVectorReplayBuffer

ORIGINAL = -1.0  # the goal that is stored


def reward(achieved, desired):
    """Distinct for every pair: what it was computed from can be told."""
    assert achieved.shape == desired.shape and achieved.shape[1:] == (2,)
    return achieved[:, 0] * 1000 + desired[:, 0]


def transition(number, done=False, given=True):
    """After step `number` the number itself is achieved."""

    def obs(achieved):
        return {"observation": np.float32(achieved), "achieved_goal": np.full(2, achieved * 1.0),
                "desired_goal": np.full(2, ORIGINAL)}  # fmt: skip

    following = {"obs_next": obs(number)} if given else {}
    return {"obs": obs(number - 1), "act": number, "rew": -0.5, "terminated": done, "truncated": False, **following}


def add(buffer, lane, number, done=False, given=True):
    one = transition(number, done, given)
    if isinstance(buffer, HERVectorReplayBuffer):
        one = {key: {k: np.asarray(v)[None] for k, v in value.items()} if isinstance(value, dict) else [value]
               for key, value in one.items()}  # fmt: skip
        buffer.add(one, [lane])
    else:
        buffer.add(one)


def filled(lengths, size=20, horizon=50, future_k=8.0, lanes=1, given=True, **arguments):
    """Episodes of these lengths, in turn for each lane; the last one of each goes on. Numbers never come twice."""
    if lanes == 1:
        buffer = HERReplayBuffer(size, reward, horizon, future_k, **arguments)
    else:
        buffer = HERVectorReplayBuffer(size * lanes, lanes, reward, horizon, future_k, **arguments)
    number = 0
    for at, length in enumerate(lengths):
        for t in range(length):
            number += 1
            add(buffer, at % lanes, number, t == length - 1 and at < len(lengths) - lanes, given)
        number += 1  # what an episode begins with was achieved by none
    return buffer


def episodes(buffer):
    """Lists of rows, in order, as a walk along the `done` column finds them."""
    found = []
    for low, high in zip(buffer.subbuffer_edges[:-1], buffer.subbuffer_edges[1:], strict=True):
        rows = [row for row in buffer.sample_indices(0).tolist() if low <= row < high]
        current = []
        for row in rows:
            current.append(row)
            if buffer.done[row]:
                found.append(current)
                current = []
        found += [current] if current else []
    return found


def check(buffer, horizon, batch, rows, offsets=None):
    """That each episode in a batch is as it was, or wholly relabelled with what was achieved later in it."""
    achieved = buffer.act * 1.0
    n_relabelled = n_groups = 0
    for episode in episodes(buffer):
        at = np.flatnonzero(np.isin(rows, episode))
        if not at.size:
            continue
        n_groups += 1
        goals = np.unique([batch[f"{name}/desired_goal"][at] for name in ("obs", "obs_next")])
        assert goals.size == 1
        if goals[0] == ORIGINAL:
            assert (batch.rew[at] == -0.5).all()
            continue
        n_relabelled += 1
        latest = max(episode.index(row) for row in rows[at])
        possible = episode[latest : latest + horizon]
        assert goals[0] in achieved[possible]
        if offsets is not None:
            offsets.append(achieved[possible].tolist().index(goals[0]))
        np.testing.assert_array_equal(batch.rew[at], achieved[rows[at]] * 1000 + goals[0])
        np.testing.assert_array_equal(batch["obs_next/achieved_goal"][at][:, 0], achieved[rows[at]])
    return n_relabelled, n_groups


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("horizon", [50, 3])
@pytest.mark.parametrize("size", [20, 13])  # with room for all, and wrapped in the midst of an episode
def test_each_episode_is_relabelled_as_a_whole_with_what_comes_later_in_it(lanes, horizon, size):  # A17, R33
    buffer = filled([4, 1, 5, 3, 6, 2, 4][: 5 if size == 20 else 7] * lanes, size, horizon, 4.0, lanes)
    before, totals = state_of(buffer), np.zeros(2)
    for n in [1, 2, 7, 30, 0, None] * 8:
        totals += check(buffer, horizon, *buffer.sample(n))
    assert abs(totals[0] / totals[1] - 0.75) < 0.1
    after = state_of(buffer)
    del before["rng"], after["rng"]
    assert before == after  # A21.14: it was written into the store
    assert (buffer[:]["obs/desired_goal"] == ORIGINAL).all() and (buffer[:].rew == -0.5).all()


def test_another_buffer_is_made_with_the_options_of_one():
    buffer = filled([4, 1], future_k=3.0, stack_num=2)
    again = HERReplayBuffer(5, **buffer.options)
    assert again.options == buffer.options and again.compute_reward_fn is reward
    assert (again.horizon, again.future_k, again.stack_num) == (50, 3.0, 2)


@pytest.mark.parametrize("lanes", [1, 2])
def test_the_share_of_relabelled_episodes_may_be_set(lanes, tmp_path):  # A22 test_herreplaybuffer
    buffer = filled([4, 1, 5, 3], lanes=lanes)
    for future_p in (0, 1):
        buffer.future_p = future_p
        n_relabelled, n_groups = check(buffer, 50, *buffer.sample(0))
        assert buffer.future_p == future_p and n_relabelled == n_groups * future_p
    buffer.save_hdf5(tmp_path / "x.h5")
    assert type(buffer).load_hdf5(tmp_path / "x.h5", reward).future_p == 1
    for wrong in (-0.1, 1.1, float("nan"), True, "1"):
        with pytest.raises(SpecError, match=r"^future_p must be a number in \[0, 1\], got "):
            buffer.future_p = wrong


def test_every_step_from_the_last_drawn_row_on_may_be_the_goal():
    buffer, offsets = filled([6], future_k=1e12), []
    for _ in range(600):
        rows = buffer.sample_indices(1)
        check(buffer, 50, *buffer.sample(1), offsets)
    assert set(offsets) == set(range(6))
    del rows
    whole = [buffer.sample(0)[0]["obs/desired_goal"][0, 0] for _ in range(5)]
    assert whole == [6.0] * 5  # all rows are drawn: what the last one achieved


def test_the_offset_is_a_uniform_share_of_the_distance_rounded():  # A17
    buffer = filled([4], future_k=1e12)
    counts = np.zeros(4)
    for _ in range(4000):
        batch, [row] = buffer.sample(1)
        if row == 0:
            counts[int(batch["obs/desired_goal"][0, 0]) - 1] += 1
    expected = counts.sum() * np.array([1, 2, 2, 1]) / 6
    assert (abs(counts - expected) < 4 * np.sqrt(expected)).all()


@pytest.mark.parametrize("future_k", [1.0, 2.0, 8.0])
def test_a_single_episode_is_relabelled_as_often_as_any(future_k):  # A21.14: never, for int(1 * 0.875) is 0
    buffer = filled([5], future_k=future_k)
    found = sum(check(buffer, 50, *buffer.sample(3))[0] for _ in range(800))
    p = 1 - 1 / future_k
    assert buffer.future_p == p and abs(found - 800 * p) <= 4 * np.sqrt(800 * p * (1 - p))


@pytest.mark.parametrize("given", [True, False])
def test_n_step_sums_are_of_the_new_rewards(given):
    buffer = filled([4, 5], future_k=1e12, n_step=3, gamma=0.5, given=given)
    for n in [4, 0, 9] * 5:
        batch, rows = buffer.sample(n)
        for at, row in enumerate(rows):
            goal, walk = batch["obs/desired_goal"][at, 0], [int(row)]
            while len(walk) < 3 and buffer.next(walk[-1]) != walk[-1]:
                walk.append(int(buffer.next(walk[-1])))
            reached = buffer.get(walk, "obs_next/achieved_goal")[:, 0]
            assert batch.rew[at] == sum(0.5**i * (a * 1000 + goal) for i, a in enumerate(reached))
            assert goal == batch["obs_next/desired_goal"][at, 0] != ORIGINAL
        assert (batch.discount == 0.5 ** np.array([min(3, 4 - r if r < 4 else 9 - r) for r in rows])).all()


def test_all_frames_of_a_stack_get_the_goal_and_a_next_observation_need_not_be_stored():
    buffer = filled([4, 3], future_k=1e12, stack_num=2, ignore_obs_next=True)
    batch, rows = buffer.sample(0)
    assert batch["obs/desired_goal"].shape == batch["obs_next/desired_goal"].shape == (7, 2, 2)
    # What was achieved is seen with the next step: after the last one, what was seen with that itself.
    assert batch["obs/desired_goal"][:, 0, 0].tolist() == [3] * 4 + [7] * 3
    assert (batch["obs/desired_goal"] == batch["obs_next/desired_goal"]).all()
    assert batch["obs/achieved_goal"][:, :, 0].tolist() == [[0, 0], [0, 1], [1, 2], [2, 3], [5, 5], [5, 6], [6, 7]]
    assert batch.rew.tolist() == [1003, 2003, 3003, 3003, 6007, 7007, 7007]
    assert rows.tolist() == list(range(7))


def test_seeds_pickles_and_copies():  # A21.14: the global generator there
    def made(**seed):
        return filled([4, 3, 5], **seed)

    first = draws(made(random_seed=1))
    assert first == draws(made(random_seed=1)) != draws(made(random_seed=2))
    buffer = made(random_seed=1)
    buffer.sample(3)
    for same in (pickle.loads(pickle.dumps(buffer)), copy.deepcopy(buffer)):
        assert draws(same) == draws(copy.deepcopy(buffer))


def test_a_file_keeps_all_but_the_function(tmp_path):
    for lanes in (1, 2):
        buffer = filled([4, 3, 5, 2], horizon=7, future_k=3.0, lanes=lanes, stack_num=2)
        buffer.sample(3)
        buffer.save_hdf5(tmp_path / "x.hdf5")
        same = type(buffer).load_hdf5(tmp_path / "x.hdf5", reward)
        assert (same.horizon, same.future_k, same.stack_num) == (7, 3.0, 2)
        assert draws(same) == draws(buffer)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_other_frameworks_get_the_same(framework):
    plain = filled([4, 3], future_k=1e12)
    batch = filled([4, 3], future_k=1e12, framework=framework).sample(5)[0]
    expected = plain.sample(5)[0]
    for name in ("obs/desired_goal", "rew"):
        np.testing.assert_allclose(np.asarray(batch[name]), expected[name])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"future_k": 0.5}, SpecError, "^future_k must be a number of at least 1, got 0.5$"),
        ({"future_k": float("nan")}, SpecError, "^future_k must be a number of at least 1, got nan$"),
        ({"horizon": 0}, SpecError, "^horizon must be at least 1, got 0$"),
        ({"compute_reward_fn": None}, TypeError, "^compute_reward_fn must be callable, got None$"),
        ({"horizont": 1}, TypeError, "unexpected keyword argument 'horizont'"),
    ],
)
def test_wrong_arguments_are_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        HERReplayBuffer(**{"size": 5, "compute_reward_fn": reward, "horizon": 3, **arguments})


def test_goals_must_be_there_and_alike():
    buffer = HERReplayBuffer(5, reward, 3)
    one = transition(1)
    del one["obs"]["desired_goal"]
    with pytest.raises(MissingKeyError, match=r"^key\(s\) \['obs/desired_goal'\] are missing, got \['obs/ach"):
        buffer.add(one)
    with pytest.raises(MissingKeyError, match=r"^key\(s\) \['obs/achieved_goal', 'obs/desired_goal'\] are missing"):
        buffer.add({**transition(1), "obs": 1})
    one = transition(1)
    one["obs_next"]["desired_goal"] = np.zeros(3)
    with pytest.raises(SpecError, match=r"^'obs_next/achieved_goal' has shape \(2,\), 'obs_next/desired_go"):
        buffer.add(one)
    assert not len(buffer) and not buffer._specs


@pytest.mark.parametrize("given", [np.zeros((3, 3)), np.zeros(2), np.zeros((1, 4)), 0.0, None, "text"], ids=str)
def test_a_function_that_gives_something_else_is_an_error(given):
    buffer = HERReplayBuffer(5, lambda achieved, desired: given, 3, 1e12)
    add(buffer, 0, 1)
    for n in (1, 4):
        with pytest.raises(SpecError, match="compute_reward_fn"):
            buffer.sample(n)
    assert buffer[:].rew.tolist() == [-0.5]


def test_an_empty_buffer_gives_nothing():
    buffer = HERReplayBuffer(5, reward, 3)
    assert len(buffer.sample(0)[1]) == len(filled([2]).sample(-1)[1]) == 0
