"""Slices of episodes, held against a list of rows that each name their episode; "R" is a scenario of user-demand.md."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstructs.errors import SpecError
from rlstructs.replay.rows.spec import Spec
from rlstructs.replay.rows.store import Storage
from rlstructs.replay.torchrl.slice_samplers import MEASURES, Slices


def make_storage(capacity):
    storage = Storage(1, capacity)
    storage.columns.add("episode", Spec(np.dtype(np.int64)))
    storage.track_episodes()
    return storage


def write(storage, episodes, ends):
    """Rows that name their episode, `ends` after the last of it."""
    storage.write({"episode": np.array([episodes])}, done=np.array([ends], bool))


def draw(storage, slices, n, length, seed=0):
    """Which episodes the rows of slices are of, their steps, and which count."""
    view = storage.view()
    rows, mask = slices.draw(view, n, length, np.random.default_rng(seed))
    assert rows.shape == mask.shape == (n, length) and rows.dtype == np.int64
    assert view.has(rows).all()  # R13: not beyond the data
    return storage.gather(["episode"], rows)[0], view.steps(rows), mask


def check(storage, slices, held, length):
    """That slices are those of the rows `held`, the oldest first."""
    counts = Counter(held)
    fit = {name for name, n in counts.items() if n >= length or not slices.strict}
    if not fit:
        with pytest.raises(SpecError, match=f"^nothing to sample: no episode of {length} steps is stored$"):
            draw(storage, slices, 3, length)
        return
    names, steps, mask = draw(storage, slices, 64, length)
    assert (names == names[:, :1]).all()  # R13: of one episode each
    assert (mask.sum(axis=1) == np.minimum(length, [counts[name] for name in names[:, 0]])).all()
    assert (np.diff(steps, axis=1) == mask[:, 1:]).all()  # one after another, and then the last again
    assert fit.issuperset(names[:, 0].tolist())


@pytest.mark.parametrize("per", MEASURES)
@pytest.mark.parametrize("strict", [True, False])
@settings(max_examples=60, deadline=None)
@given(data=st.data(), capacity=st.integers(1, 12))
def test_slices_are_steps_of_one_episode_whatever_was_written(per, strict, data, capacity):
    storage, slices = make_storage(capacity), Slices(per, strict)
    held, episode = [], 0
    for _ in range(data.draw(st.integers(1, 10))):
        ends = data.draw(st.lists(st.booleans(), min_size=1, max_size=15))
        names = []
        for end in ends:
            names.append(episode)
            episode += end
        write(storage, names, ends)
        held = (held + names)[-capacity:]
        if data.draw(st.integers(0, 9)) == 0:
            storage.clear()
            held, episode = [], episode + 1
        elif data.draw(st.booleans()):
            check(storage, slices, held, data.draw(st.integers(1, 5)))


def shares(storage, slices, length, n=20_000):
    """How often each first row was drawn, by step since the oldest."""
    _, steps, _ = draw(storage, slices, n, length)
    found = np.bincount(steps[:, 0] - storage.view().low[0], minlength=len(storage))
    return found / n


EPISODES, ENDS = [0] * 3 + [1] * 30, [False, False, True] + [False] * 29 + [True]


@pytest.mark.parametrize(
    ("per", "strict", "length", "expected"),
    [
        ("window", True, 3, [1 / 29, 0, 0] + [1 / 29] * 28 + [0] * 2),
        ("trajectory", True, 3, [1 / 2, 0, 0] + [1 / 2 / 28] * 28 + [0] * 2),
        ("window", False, 10, [1 / 22, 0, 0] + [1 / 22] * 21 + [0] * 9),
        ("trajectory", False, 10, [1 / 2, 0, 0] + [1 / 2 / 21] * 21 + [0] * 9),
        ("window", True, 10, [0] * 3 + [1 / 21] * 21 + [0] * 9),
        ("window", True, 1, [1 / 33] * 33),
    ],
)
def test_every_window_or_every_trajectory_is_as_likely(per, strict, length, expected):
    storage = make_storage(40)
    write(storage, EPISODES, ENDS)
    found = shares(storage, Slices(per, strict), length)
    assert (found[np.equal(expected, 0)] == 0).all()
    np.testing.assert_allclose(found, expected, atol=0.012)


@pytest.mark.parametrize("per", MEASURES)
def test_what_is_left_of_the_oldest_and_what_there_is_of_the_newest_count_as_far_as_they_go(per):  # R7, R13
    storage = make_storage(6)
    write(storage, [0] * 4 + [1] * 2 + [2] * 3, [0, 0, 0, 1, 0, 1, 0, 0, 0])  # of 0 one row is left, 2 goes on
    found = shares(storage, Slices(per), 2)
    np.testing.assert_allclose(found, {"window": [0, 1 / 3, 0, 1 / 3, 1 / 3, 0],
                                       "trajectory": [0, 1 / 2, 0, 1 / 4, 1 / 4, 0]}[per], atol=0.015)  # fmt: skip


def test_one_episode_that_goes_on_for_ever_is_cut_at_the_head():  # R7
    storage, slices = make_storage(6), Slices()
    for n in (1, 4, 3, 20):
        write(storage, [0] * n, [False] * n)
        if len(storage) >= 3:
            _, steps, _ = draw(storage, slices, 200, 3)
            low = storage.view().low[0]
            assert set((steps[:, 0] - low).tolist()) == set(range(len(storage) - 2))


def test_a_changed_length_weighs_anew():
    storage, slices = make_storage(40), Slices()
    write(storage, EPISODES, ENDS)
    for length in (3, 10, 3, 1, 30):
        assert (shares(storage, slices, length) == shares(storage, Slices(), length)).all()


def test_a_draw_looks_at_new_rows_only(monkeypatch):
    storage, slices = make_storage(1000), Slices()
    looked_at = []
    plain = storage.episodes.begin
    monkeypatch.setattr(storage.episodes, "begin", lambda rows: looked_at.append(rows.size) or plain(rows))
    for n in (900, 1, 0, 400, 7):
        write(storage, [0] * n, [False] * n) if n else None
        draw(storage, slices, 5, 3)
        draw(storage, slices, 5, 3)
    assert looked_at == [900, 1, 400, 7]


def test_what_is_forgotten_is_looked_at_again():
    storage, slices = make_storage(10), Slices()
    write(storage, [0] * 6, [False] * 6)
    assert (shares(storage, slices, 4) > 0).sum() == 3
    done = np.zeros((1, 10), bool)
    done[0, 2] = True
    storage.rebuild_episodes(done)
    slices.forget()
    assert (shares(storage, slices, 3) > 0).tolist() == [True, False, False, True, False, False]


def test_a_measure_that_there_is_not_is_refused():
    with pytest.raises(SpecError, match=r"^per must be one of \('window', 'trajectory'\), got 'episode'$"):
        Slices("episode")
