"""`EpisodeTracker`: returns and lengths of episodes, however rollouts cut them."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstructs import DictTensor, SpecError, TemporalDictTensor, Trajectories
from rlstructs.episodes import EpisodeTracker


def chunk(rows, flags=("done", "terminated", "truncated"), padding=float("nan")):
    """Trajectories of `{env_index: [(reward, ending), ...]}`; an ending is "", "terminated", "truncated" or "both"."""
    n_timesteps = max((len(steps) for steps in rows.values()), default=0)
    rewards = torch.full((len(rows), n_timesteps), padding)
    found = {flag: torch.ones(len(rows), n_timesteps, dtype=torch.bool) for flag in flags}
    for row, steps in enumerate(rows.values()):
        for t, (reward, ending) in enumerate(steps):
            rewards[row, t] = reward
            told = {"done": bool(ending), "terminated": ending in ("terminated", "both")}
            told["truncated"] = ending in ("truncated", "both")
            for flag in flags:
                found[flag][row, t] = told[flag]
    tensors = {"_observation/reward": rewards, **{f"_observation/{flag}": tensor for flag, tensor in found.items()}}
    lengths = torch.tensor([len(steps) for steps in rows.values()], dtype=torch.int64)
    index = torch.tensor(list(rows), dtype=torch.int64)
    return Trajectories(DictTensor({"env_index": index}), TemporalDictTensor(tensors, lengths))


def episodes(tracker):
    """What was taken, sorted: tuples of env_index, return, length, terminated, truncated."""
    taken = tracker.take()
    names = ("env_index", "return", "length", "terminated", "truncated")
    return sorted(zip(*(taken[name].tolist() for name in names), strict=True))


def counted_by_hand(chunks):
    """The same, one step after another."""
    totals, lengths, found = {}, {}, []
    for rows in chunks:
        if rows is None:
            totals, lengths = {}, {}
            continue
        for env, steps in rows.items():
            for reward, ending in steps:
                totals[env] = totals.get(env, 0.0) + reward
                lengths[env] = lengths.get(env, 0) + 1
                if ending:
                    flags = ending in ("terminated", "both"), ending in ("truncated", "both")
                    found.append((env, totals.pop(env), lengths.pop(env), *flags))
    return sorted(found)


steps_of_a_row = st.lists(
    st.tuples(
        st.integers(-40, 40).map(lambda quarter: quarter / 4),  # sums of quarters are exact
        st.sampled_from(["", "", "", "terminated", "truncated", "both"]),
    ),
    max_size=6,
)
rows_of_a_chunk = st.dictionaries(st.integers(0, 4), steps_of_a_row, max_size=5)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(rows_of_a_chunk, st.none()), max_size=6))
def test_episodes_are_those_that_a_loop_over_all_steps_finds(chunks):
    """Rows are ragged, come and go; None is a reset."""
    tracker, taken = EpisodeTracker(), []
    for number, rows in enumerate(chunks):
        if rows is None:
            tracker.forget(np.arange(5))
        else:
            tracker.add(chunk(rows))
        if number % 2:
            taken += episodes(tracker)
    assert sorted(taken + episodes(tracker)) == counted_by_hand(chunks)


@pytest.mark.parametrize("odd", [float("inf"), float("-inf"), float("nan")])
def test_one_odd_reward_stays_in_its_episode(odd):
    tracker = EpisodeTracker()
    tracker.add(chunk({0: [(1, ""), (odd, "terminated"), (2, "terminated")], 1: [(odd, ""), (3, "")]}))
    tracker.add(chunk({0: [(4, "truncated")], 1: [(5, "terminated"), (6, "both")]}))
    assert [row for row in episodes(tracker) if np.isfinite(row[1])] == [
        (0, 2, 1, True, False), (0, 4, 1, False, True), (1, 6, 1, True, True),
    ]  # fmt: skip


def test_sums_are_in_double_precision():
    tracker = EpisodeTracker()
    tracker.add(chunk({0: [(2.0**24, ""), (1, ""), (1, ""), (1, "")]}))
    tracker.add(chunk({0: [(1, ""), (1, "terminated")]}))
    assert episodes(tracker) == [(0, 2**24 + 5, 6, True, False)]


def test_taking_forgets_and_gives_columns_also_of_nothing():
    tracker = EpisodeTracker()
    for n in (0, 1, 0):
        if n:
            tracker.add(chunk({3: [(1, "terminated")]}))
        taken = tracker.take()
        assert taken.n_elems() == n
        assert {key: (tensor.dtype, tensor.ndim) for key, tensor in taken.items()} == {
            "return": (torch.float64, 1), "length": (torch.int64, 1), "env_index": (torch.int64, 1),
            "terminated": (torch.bool, 1), "truncated": (torch.bool, 1),
        }  # fmt: skip


def every_step_ends(n_envs, n_timesteps, first):
    """Trajectories whose every step is an episode; the rewards count on from `first`."""
    rewards = first + torch.arange(n_envs * n_timesteps, dtype=torch.float64).reshape(n_timesteps, n_envs).T
    tensors = {"_observation/reward": rewards, "_observation/done": torch.ones(n_envs, n_timesteps, dtype=torch.bool)}
    return Trajectories(DictTensor({"env_index": torch.arange(n_envs)}), TemporalDictTensor(tensors))


@pytest.mark.parametrize(("n_envs", "n_timesteps", "n_rollouts"), [(50, 20, 900), (1, 1000, 700), (100, 1000, 6)])
def test_episodes_that_nobody_takes_do_not_add_up(n_envs, n_timesteps, n_rollouts):
    tracker, n = EpisodeTracker(), n_envs * n_timesteps
    sizes = []
    for rollout in range(n_rollouts):
        tracker.add(every_step_ends(n_envs, n_timesteps, rollout * n))
        sizes.append(n * (rollout + 1) - tracker.n_dropped)
    assert max(sizes) <= 3 * 100_000
    kept = tracker.take()
    assert kept.n_elems() + tracker.n_dropped == n * n_rollouts
    assert kept.n_elems() >= 100_000
    assert sorted(kept["return"].tolist()) == list(range(tracker.n_dropped, n * n_rollouts))  # the latest
    tracker.add(every_step_ends(n_envs, n_timesteps, 0))
    assert tracker.take().n_elems() == n


def test_all_of_the_last_rollout_is_kept_however_many_ended_in_it():
    tracker = EpisodeTracker()
    tracker.add(every_step_ends(1, 10, 0))
    tracker.add(every_step_ends(500, 500, 0))
    assert (tracker.take().n_elems(), tracker.n_dropped) == (250_000, 10)


def test_what_few_episodes_take_in_memory_is_as_small_as_they_are():
    tracker, one = EpisodeTracker(), every_step_ends(1, 1, 0)
    tracker.add(one)
    tracemalloc.start()
    for _ in range(5_000):
        tracker.add(one)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 5_000 * 40 + 200_000


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (("done",), [(True, False), (True, False)]),
        (("done", "truncated"), [(True, False), (False, True)]),
        (("done", "terminated"), [(True, False), (False, True)]),
    ],
    ids=["done", "truncated", "terminated"],
)
def test_flags_that_an_environment_does_not_give_follow_from_the_others(flags, wanted):
    tracker = EpisodeTracker()
    tracker.add(chunk({0: [(1, ""), (1, "terminated"), (1, "truncated")]}, flags))
    assert [row[3:] for row in sorted(episodes(tracker), key=lambda row: -row[2])] == wanted


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"_observation/reward": None}, "^episodes: the trajectories have no _observation/reward$"),
        ({"_observation/done": None}, "^episodes: the trajectories have no _observation/done$"),
        ({"_observation/reward": torch.zeros(1, 2, 3)}, r"no _observation/reward of shape \(B, T\)"),
    ],
    ids=["reward", "done", "vector"],
)
def test_what_is_needed_is_said_when_episodes_are_asked_for(changed, message):
    whole = chunk({0: [(1, ""), (1, "terminated")]})
    tensors = {key: changed.get(key, tensor) for key, tensor in whole.trajectories.items()}
    tensors = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    tracker = EpisodeTracker()
    tracker.add(Trajectories(whole.info, TemporalDictTensor(tensors, whole.lengths)))
    with pytest.raises(SpecError, match=message):
        tracker.take()
    tracker.add(whole)
    assert episodes(tracker) == [(0, 2, 2, True, False)]
