"""`ChunkReplayBuffer`: rlberry's replay buffer, what its bugs and those of comparable ones must not do here.

"R7" is a scenario of user-demand.md; "bug R7" one of those that rlberry has (skrl-rlberry.md, section 8).
Seeds are fixed: frequencies are the same each time.
"""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import threading
import types
import weakref

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import warp as wp

from rlstructs import DictTensor, FileError, MissingKeyError, SpecError, StateError, TemporalDictTensor, Trajectories
from rlstructs.replay import ArrayDict, ChunkReplayBuffer
from rlstructs.replay.draw.drawn_rows import N_DRAWS

inf, nan = float("inf"), float("nan")
FRAMEWORKS = ["numpy", "torch", "jax", "warp"]
MODES = ["uniform", "prioritized"]


def made(size, n=0, ends=(), *, prioritized=True, **settings):
    """A buffer in which `x` counts the appended rows, episodes ending after the rows in `ends`."""
    settings = {"alpha": 1.0, "beta": 1.0} | settings
    buffer = ChunkReplayBuffer(size, 0, enable_prioritized=prioritized, **settings)
    buffer.setup_entry("x", np.int64)
    count(buffer, range(n), ends)
    return buffer


def count(buffer, numbers, ends=()):
    for t in numbers:
        buffer.append({"x": t})
        if t in ends:
            buffer.end_episode()


def chunks(buffer, n, length, mode="uniform"):
    """The drawn chunks as tuples of `x`, and what the info says."""
    batch = buffer.sample(n, length, mode)
    return [tuple(chunk) for chunk in batch.data["x"].tolist()], batch.info


def frequencies(buffer, length, mode, n_draws=150, batch_size=40):
    found = {}
    for _ in range(n_draws):
        for chunk in chunks(buffer, batch_size, length, mode)[0]:
            found[chunk] = found.get(chunk, 0) + 1
    return found


def assert_in_proportion(found, shares):
    """Pearson's test: drawn counts are what these shares let expect, and nothing else was drawn."""
    assert found.keys() == shares.keys()
    total, whole = sum(found.values()), sum(shares.values())
    expected = {at: share / whole * total for at, share in shares.items()}
    statistic = sum((found[at] - expected[at]) ** 2 / expected[at] for at in found)
    freedom = len(found) - 1
    assert statistic <= freedom + 4 * np.sqrt(2 * freedom), (found, expected)


def set_priorities(buffer, priorities):
    """Of rows 0, 1, ... on."""
    buffer.update_priorities(np.arange(len(priorities))[:, None], np.asarray(priorities, float)[:, None])


def update_drawn(buffer, priorities):
    """Of rows that a draw holds which is made for it; what is said of an index is said of the row it held then."""
    rows = buffer.sample(200, 1)[1]["indices"]
    rows = rows[np.isin(rows, list(priorities))][:, None]
    buffer.update_priorities(rows, np.vectorize(priorities.get)(rows))


def weights_by_row(buffer, n=400):
    """Row -> the weight with which it is drawn."""
    batch = buffer.sample(n, 1, "prioritized")
    return dict(zip(batch.info["indices"][:, 0].tolist(), batch.info["weights"].tolist(), strict=True))


# What rlberry's own tests promise (skrl-rlberry.md, section 9)


@pytest.mark.parametrize("size", [128, 500])
@pytest.mark.parametrize("mode", MODES)
def test_samples_are_rows_of_the_data_with_their_dtypes(size, mode):
    buffer = ChunkReplayBuffer(size, np.random.default_rng(456), max_episode_steps=200, enable_prioritized=True)
    dtypes = {"observations": np.float32, "actions": np.uint32, "rewards": np.float32, "dones": bool}
    for tag, dtype in dtypes.items():
        buffer.setup_entry(tag, dtype)
    rng = np.random.default_rng(123)
    for t in range(2 * size + 3):
        buffer.append({
            "observations": rng.random(2), "actions": rng.integers(4), "rewards": float(t), "dones": t % 200 == 199,
        })  # fmt: skip
        if t % 200 == 199:
            buffer.end_episode()
        assert len(buffer) == min(t + 1, size)
    assert buffer.tags == list(dtypes) and buffer.dtypes == dtypes and buffer.max_episode_steps == 200
    for _ in range(10):
        batch = buffer.sample(batch_size=128, chunk_size=256, sampling_mode=mode)
        if size < 256:
            assert batch is None
            continue
        data, info = batch
        assert type(data) is ArrayDict and list(data) == list(dtypes)
        for tag, dtype in dtypes.items():
            assert data[tag].shape[:2] == (128, 256) and data[tag].dtype == dtype
            np.testing.assert_array_equal(np.array(buffer.data[tag], dtype=dtype)[info["indices"]], data[tag])
        assert info["indices"].dtype == np.int64 and info["indices"].min() >= 0  # bugs R3, R13
        assert info["weights"].dtype == np.float32 and info["weights"].shape == (128,)
        assert (info["weights"] > 0).all() and (info["weights"] <= 1).all()


def test_priorities_given_to_many_rows_are_kept_zero_included():
    buffer = made(500, 700, alpha=0.5)
    rows = np.random.default_rng(0).choice(500, size=(32, 10), replace=False)
    new = np.arange(320).reshape(32, 10)
    buffer.update_priorities(rows, new)
    expected = np.ones(500)
    expected[rows] = new**0.5
    smallest = expected[expected > 0].min()
    for row, weight in weights_by_row(buffer, 20_000).items():
        assert weight == pytest.approx(smallest / expected[row], rel=1e-5)
    assert rows[0, 0] not in weights_by_row(buffer, 20_000)


@pytest.mark.parametrize("mode", MODES)
def test_chunks_never_go_across_the_write_head(mode):  # R7
    buffer = made(50, 60)
    for t in range(60, 400):
        buffer.append({"x": t})
        found, info = chunks(buffer, 16, 20, mode)
        for chunk in found:
            assert chunk == tuple(range(chunk[0], chunk[0] + 20)) and t - 50 < chunk[0] and chunk[-1] <= t
        assert (np.array(found) % 50 == info["indices"]).all()
        buffer.update_priorities(info["indices"], np.random.default_rng(t).random((16, 20)) + 0.01)


# Conformance vectors (skrl-rlberry.md, section 13): capacity 5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("n", "length", "expected"),
    [
        (7, 2, [(2, 3), (3, 4), (4, 5), (5, 6)]),  # bug R4: (5, 6) half of the time, (2, 3) never
        (7, 1, [(2,), (3,), (4,), (5,), (6,)]),  # R20, bug R1: (3,) never
        (5, 5, [(0, 1, 2, 3, 4)]),  # bug R6: None
        (5, 4, [(0, 1, 2, 3), (1, 2, 3, 4)]),
        (2, 1, [(0,), (1,)]),
        (1, 1, [(0,)]),  # R20
    ],
)
def test_every_window_is_as_likely_as_any_other_with_equal_priorities(n, length, expected, mode):
    buffer = made(5, n)
    assert_in_proportion(frequencies(buffer, length, mode), dict.fromkeys(expected, 1))
    found, info = chunks(buffer, 20, length, mode)
    assert (np.array(found) % 5 == info["indices"]).all()
    assert info["weights"].tolist() == [1] * 20


@pytest.mark.parametrize("mode", MODES)
def test_none_comes_only_when_fewer_rows_than_a_chunk_are_stored(mode):
    buffer = made(5)
    assert buffer.sample(3, 1, mode) is None
    count(buffer, range(3))
    assert buffer.sample(3, 4, mode) is None and buffer.sample(3, 6, mode) is None
    assert buffer.sample(3, 3, mode) is not None


def test_seven_rows_in_five_slots():
    assert made(5, 7).data["x"].tolist() == [5, 6, 2, 3, 4]


@pytest.mark.parametrize("exponents", [{"alpha": 0.0}, {"beta": 0.0}])
def test_an_exponent_of_zero_gives_weights_of_one(exponents):
    buffer = made(6, 6, **exponents)
    set_priorities(buffer, [1, 2, 3, 4, 5, 6])
    assert set(weights_by_row(buffer).values()) == {1.0}


def test_with_both_exponents_one_the_weight_is_the_inverse_priority():  # R23
    buffer = made(6, 6)
    set_priorities(buffer, [1, 2, 3, 4, 5, 6])
    assert weights_by_row(buffer) == {row: pytest.approx(1 / (row + 1)) for row in range(6)}


def test_a_new_row_has_the_largest_priority_ever_given():  # R21, R22
    buffer = made(4, 2, alpha=0.5)
    set_priorities(buffer, [3, 5])
    count(buffer, [2])
    leaves = {0: 3**0.5, 1: 5**0.5, 2: 5**0.5}
    assert weights_by_row(buffer) == {row: pytest.approx(3**0.5 / leaf) for row, leaf in leaves.items()}
    buffer.update_priorities([[1, 2]], [[2.5, 2.5]])
    count(buffer, [3])
    assert weights_by_row(buffer)[3] == pytest.approx((2.5 / 5) ** 0.5)


# Draws in proportion to priorities


@pytest.mark.parametrize("n", [6, 8, 13])
@pytest.mark.parametrize("length", [1, 3])
def test_the_last_rows_of_chunks_are_drawn_in_proportion(n, length):  # bugs R2, R4
    buffer, held = made(8, n), range(max(0, n - 8), n)
    priorities = dict(zip(held, np.random.default_rng(n).uniform(0.2, 4, len(held)).tolist(), strict=True))
    buffer.update_priorities([[t % 8 for t in held]], [list(priorities.values())])
    fit = {tuple(range(t - length + 1, t + 1)): priorities[t] for t in held if t - length + 1 in held}
    # Batches of ten: most are completed by a second draw, which must not favour any row.
    assert_in_proportion(frequencies(buffer, length, "prioritized", 400, 10), fit)
    found, info = chunks(buffer, 50, length, "prioritized")
    expected = [min(priorities.values()) / priorities[chunk[-1]] for chunk in found]
    np.testing.assert_allclose(info["weights"], expected, rtol=1e-5)


def test_a_row_with_a_huge_priority_ends_its_chunk():  # bug R2: the one before it was replayed
    buffer = made(8, 8)
    buffer.update_priorities([[3]], [[1e9]])
    assert set(chunks(buffer, 100, 2, "prioritized")[0]) == {(2, 3)}


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 7, 8, 513])
def test_with_equal_priorities_a_batch_of_all_holds_each_row_once(size):  # R18, R20
    buffer = made(size)
    for n in (1, size, size + 2):
        count(buffer, range(n))
        found, _ = chunks(buffer, len(buffer), 1, "prioritized")
        assert len(set(found)) == len(buffer)
        buffer.clear()


def test_rows_of_priority_zero_are_never_drawn():  # R19, bug R12
    buffer = made(6, 6)
    buffer.update_priorities([[0, 5, 2]], [[0, 0, 0.0]])
    assert weights_by_row(buffer) == {1: 1, 3: 1, 4: 1}
    buffer.update_priorities([[1, 3, 4]], [[0, 0, 0.0]])
    with pytest.raises(SpecError, match="^nothing to sample: no row has a priority above zero$"):
        buffer.sample(2, 1, "prioritized")
    assert len(chunks(buffer, 3, 2)[0]) == 3
    count(buffer, [6])
    assert set(chunks(buffer, 20, 1, "prioritized")[0]) == {(6,)}


def test_priorities_only_where_no_chunk_ends_give_an_error():  # R25
    buffer = made(6, 8)
    buffer.update_priorities([[2, 3, 4, 5, 0, 1]], [[1, 1, 0, 0, 0, 0]])
    with pytest.raises(SpecError, match="^nothing to sample"):
        buffer.sample(3, 3, "prioritized")
    assert set(chunks(buffer, 20, 1, "prioritized")[0]) == {(2,), (3,)}


def test_the_last_of_equal_indices_counts():  # R24
    buffer = made(4, 4)
    buffer.update_priorities([[2, 1], [2, 2]], [[5, 3], [9, 7]])
    assert weights_by_row(buffer) == {row: pytest.approx(1 / p) for row, p in {0: 1, 1: 3, 2: 7, 3: 1}.items()}
    total = dict.fromkeys([(0,), (3,)], 1) | {(1,): 3, (2,): 7}
    assert_in_proportion(frequencies(buffer, 1, "prioritized"), total)


def test_a_thousand_updates_leave_no_residue():  # R21
    buffer, rng = made(100, 100), np.random.default_rng(0)
    for _ in range(1000):
        buffer.update_priorities(rng.integers(100, size=(5, 10)), rng.uniform(0, 1e6, (5, 10)))
    set_priorities(buffer, np.where(np.arange(100) == 37, 1e-9, 0))
    assert set(chunks(buffer, 500, 1, "prioritized")[0]) == {(37,)}


@pytest.mark.parametrize("of", ["list", "float32", "int32", "torch", "bfloat16", "jax", "warp"])
def test_priorities_may_come_from_any_library(of):
    buffer = made(4, 4)
    indices, priorities = np.array([[0, 1], [2, 3]]), np.array([[1, 2], [4, 8]])
    buffer.update_priorities(*{
        "list": (indices.tolist(), priorities.tolist()),
        "float32": (indices.astype(np.uint8), priorities.astype(np.float32)),
        "int32": (indices.astype(np.int32), priorities),
        "torch": (torch.tensor(indices), torch.tensor(priorities) * torch.ones(1, requires_grad=True)),
        "bfloat16": (torch.tensor(indices), torch.tensor(priorities, dtype=torch.bfloat16)),
        "jax": (jnp.array(indices), jnp.array(priorities)),
        "warp": (wp.array(indices, device="cpu"), wp.array(priorities.astype(np.float32), device="cpu")),
    }[of])  # fmt: skip
    assert weights_by_row(buffer) == {row: pytest.approx(1 / 2**row) for row in range(4)}


def test_beta_may_be_set_anew():
    buffer = made(2, 2, beta=0.0)
    set_priorities(buffer, [1, 4])
    for beta in (0.5, 1):
        buffer.beta = beta
        assert weights_by_row(buffer)[1] == pytest.approx(0.25**beta)
    with pytest.raises(SpecError, match="^beta must be a number of at least 0, got -1$"):
        buffer.beta = -1
    assert buffer.beta == 1 and buffer.alpha == 1


# Priorities that come late


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n_more", [0, 1, 4, 5, 12, 100])
def test_priorities_may_come_after_any_number_of_wraps(mode, n_more):  # bug R3
    buffer = made(5, 5)
    found, info = chunks(buffer, 30, 2, mode)
    count(buffer, range(5, 5 + n_more))
    buffer.update_priorities(info["indices"], np.full((30, 2), 4.0))
    left = {t for chunk in found for t in chunk if t >= n_more}
    held = range(n_more, 5 + n_more)
    smallest = 1.0 if set(held) - left else 4.0
    expected = {t % 5: pytest.approx(smallest / (4 if t in left else 1)) for t in held}
    assert weights_by_row(buffer) == expected


def test_priorities_of_an_older_batch_never_reach_the_rows_of_a_newer_one():
    buffer = made(4, 4)
    older = chunks(buffer, 8, 1, "prioritized")[1]["indices"]
    count(buffer, range(4, 7))
    newer = chunks(buffer, 9, 1, "prioritized")[1]["indices"]  # of the same slots
    assert set(older.ravel().tolist()) == set(newer.ravel().tolist()) == {0, 1, 2, 3}
    buffer.update_priorities(older, np.full(older.shape, 50.0))
    assert weights_by_row(buffer) == {0: 1, 1: 1, 2: 1, 3: pytest.approx(0.02)}
    buffer.update_priorities(newer, np.full(newer.shape, 2.0))
    assert set(weights_by_row(buffer).values()) == {1.0}
    count(buffer, [7])  # with the largest priority, which the dropped ones do not count for
    assert weights_by_row(buffer)[3] == pytest.approx(2 / 50)


def test_priorities_that_are_dropped_do_not_count_for_new_rows():
    buffer = made(3, 3)
    _, info = chunks(buffer, 6, 1)
    count(buffer, range(3, 6))
    buffer.update_priorities(info["indices"], np.full((6, 1), 50.0))
    update_drawn(buffer, {2: 0.25})
    count(buffer, [6, 7])
    assert weights_by_row(buffer) == {0: 0.25, 1: 0.25, 2: 1}


def test_priorities_of_some_rows_of_older_batches_are_dropped_as_well():
    buffer = made(20, 20)
    batches = [chunks(buffer, 20, 1, "prioritized")[1]["indices"] for _ in range(3)]
    for _ in range(N_DRAWS - 3):
        chunks(buffer, 1, 1)
    count(buffer, range(20, 30))
    some = np.concatenate([batches[0][:3], batches[1]])
    buffer.update_priorities(some, np.full(some.shape, 4.0))
    assert weights_by_row(buffer) == {row: 1 if row < 10 else pytest.approx(0.25) for row in range(20)}


def test_a_row_that_was_overwritten_before_the_last_draw_keeps_its_priority():
    buffer = made(50, 50)
    first = chunks(buffer, 50, 1, "prioritized")[1]["indices"]
    count(buffer, range(50, 60))
    last = chunks(buffer, 1, 1)[1]["indices"]
    buffer.update_priorities(first[first[:, 0] != last[0, 0]], np.full((49, 1), 4.0))
    overwritten = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9} | {int(last[0, 0])}
    assert weights_by_row(buffer, 2000) == {row: 1 if row in overwritten else 0.25 for row in range(50)}


def test_rows_that_were_never_drawn_can_be_given_priorities():
    buffer = made(4, 6)
    buffer.update_priorities([[0, 1, 2, 3]], [[1, 2, 4, 8]])
    assert weights_by_row(buffer) == {row: pytest.approx(1 / 2**row) for row in range(4)}


def test_the_indices_of_a_batch_may_be_written_to():
    buffer = made(4, 4)
    _, info = chunks(buffer, 4, 1, "prioritized")
    kept = info["indices"].copy()
    info["indices"][:] = 3
    count(buffer, range(4, 6))
    buffer.update_priorities(kept, np.full((4, 1), 4.0))
    assert weights_by_row(buffer) == {0: 1, 1: 1, 2: 0.25, 3: 0.25}


@pytest.mark.parametrize("n", [2, 3, 5])
def test_after_a_clear_it_is_as_new(n):  # R29, bug R5
    buffer = made(5, 7, ends=[4])
    set_priorities(buffer, [1, 9, 0, 4, 2])
    _, info = chunks(buffer, 30, 2)
    buffer.clear()
    assert len(buffer) == 0 and buffer.data["x"].shape == (0,) and buffer.sample(2, 1, "prioritized") is None
    buffer.update_priorities(info["indices"], np.full((30, 2), 100.0))
    count(buffer, range(20, 20 + n))
    assert buffer.data["x"].tolist() == list(range(20, 20 + n))
    buffer.update_priorities(info["indices"], np.full((30, 2), 100.0))
    assert weights_by_row(buffer) == dict.fromkeys(range(n), 1)
    update_drawn(buffer, {0: 0.5})
    count(buffer, [9])  # the largest is 1 again, not 9
    assert weights_by_row(buffer)[n % 5] == (0.5 if n < 5 else 1)
    buffer.clear()
    count(buffer, range(n))
    batch = buffer.sample(20, n)
    assert batch.info["is_first"].tolist() == [[True] + [False] * (n - 1)] * 20
    assert buffer.tags == ["x"]


# Episodes


EPISODES = {0: 0, 1: 0, 2: 0, 3: 1, 4: 2, 5: 2, 6: 2, 7: 2, 8: 3, 9: 3, 10: 3, 11: 3, 12: 3}
ENDS = [2, 3, 7]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", ["cross", "mask", "never"])
@pytest.mark.parametrize("size", [10, 13, 20])
def test_chunks_treat_the_ends_of_episodes_as_they_are_told(policy, size, mode):  # R13, bug R7
    buffer, length = made(size, 13, ENDS, episode_ends=policy), 3
    first = max(0, 13 - size)
    windows = [tuple(range(t, t + length)) for t in range(first, 11)]
    if policy == "never":
        windows = [window for window in windows if len({EPISODES[t] for t in window}) == 1]
    assert_in_proportion(frequencies(buffer, length, mode), dict.fromkeys(windows, 1))
    found, info = chunks(buffer, 60, length, mode)
    own = 0 if mode == "uniform" else -1
    for chunk, mask, is_first in zip(found, info["mask"].tolist(), info["is_first"].tolist(), strict=True):
        inside = [policy != "mask" or EPISODES[t] == EPISODES[chunk[own]] for t in chunk]
        assert mask == inside
        begins = [EPISODES[t] != EPISODES.get(t - 1, -1) for t in chunk]
        assert is_first == [a and b for a, b in zip(inside, begins, strict=True)]


@pytest.mark.parametrize("mode", MODES)
def test_never_says_so_when_no_episode_is_long_enough(mode):
    buffer = made(20, 13, ENDS, episode_ends="never")
    assert set(chunks(buffer, 30, 5, mode)[0]) == {(8, 9, 10, 11, 12)}
    with pytest.raises(SpecError, match="^nothing to sample: no window of 6 rows within one episode is stored$"):
        buffer.sample(4, 6, mode)
    assert buffer.sample(4, 14, mode) is None


def test_one_rare_chunk_within_an_episode_is_found_whatever_its_priority():  # R25
    buffer = made(1000, episode_ends="never")
    for t in range(1000):
        buffer.append({"x": t})
        if t != 500:
            buffer.end_episode()
    buffer.update_priorities([[501]], [[1e-6]])
    for mode in MODES:
        assert set(chunks(buffer, 30, 2, mode)[0]) == {(500, 501)}


@pytest.mark.parametrize("tag", ["terminated", "truncated", "done", "dones"])
@pytest.mark.parametrize("dtype", [bool, np.float32, np.uint8])
def test_a_tag_that_means_an_end_ends_the_episode(tag, dtype):
    buffer = made(20, prioritized=False, episode_ends="never")
    buffer.setup_entry(tag, dtype)
    for t in range(13):
        buffer.append({"x": t, tag: t in ENDS})
        if t in ENDS:  # as rlberry's agents do; it ends nothing more
            buffer.end_episode()
            buffer.end_episode()
    found = set(chunks(buffer, 300, 3)[0])
    assert found == {(0, 1, 2), (4, 5, 6), (5, 6, 7), (8, 9, 10), (9, 10, 11), (10, 11, 12)}
    assert buffer.sample(1, 3).data[tag].dtype == dtype


def test_terminated_and_truncated_stay_apart():  # R3
    buffer = made(4, episode_ends="mask")
    for tag in ("terminated", "truncated"):
        buffer.setup_entry(tag, bool)
    for t, (terminated, truncated) in enumerate([(0, 0), (1, 1), (0, 1), (0, 0)]):
        buffer.append({"x": t, "terminated": bool(terminated), "truncated": bool(truncated)})
    data, info = buffer.sample(5, 4)
    assert data["terminated"].tolist() == [[False, True, False, False]] * 5
    assert data["truncated"].tolist() == [[False, True, True, False]] * 5
    assert info["mask"].tolist() == [[True, True, False, False]] * 5


@pytest.mark.parametrize("n_lanes", [1, 2])
def test_an_episode_ends_when_it_has_as_many_steps_as_it_may(n_lanes):  # bug R7
    buffer = ChunkReplayBuffer(20 * n_lanes, 0, max_episode_steps=3, n_lanes=n_lanes)
    buffer.setup_entry("x", np.int64)
    for t in range(20):  # an agent that is fitted again resets its environment, and ends no episode
        if t in (4, 9, 11, 14):
            buffer.end_episode()
        buffer.append({"x": t if n_lanes == 1 else [t, t]})
    starts = {tuple(row) for row in buffer.sample(20, 20).info["is_first"].nonzero()[1].reshape(20, -1).tolist()}
    assert starts == {(0, 3, 4, 7, 9, 11, 14, 17)} and buffer.max_episode_steps == 3
    for _ in range(2):
        buffer.append({"x": 20}, lane=n_lanes - 1)
    buffer.append({"x": 21 if n_lanes == 1 else [21, 21]})
    buffer.append({"x": 22 if n_lanes == 1 else [22, 22]})
    data, info = buffer.sample(200, 2)
    pairs = zip(data["x"].tolist(), info["is_first"].tolist(), strict=True)
    found = {tuple(x): tuple(is_first) for x, is_first in pairs}
    assert found[20, 21] == (False, False) and found[21, 22] in [(False, True), (True, False)]


@pytest.mark.parametrize("limit", [None, np.inf, float("inf")])
def test_episodes_without_a_limit_may_get_as_long_as_they_like(limit):  # rlberry's agents give infinity
    buffer = made(5, 1000, max_episode_steps=limit)
    assert buffer.max_episode_steps is None and buffer.data["x"].tolist() == [995, 996, 997, 998, 999]


def test_an_episode_longer_than_the_buffer_keeps_its_newest_rows():  # R17
    buffer = made(5, 1000, episode_ends="never", max_episode_steps=2000)
    for mode in MODES:
        batch = buffer.sample(6, 5, mode)
        assert batch.data["x"].tolist() == [[995, 996, 997, 998, 999]] * 6
        assert not batch.info["is_first"].any() and batch.info["mask"].all()
    buffer.end_episode()
    count(buffer, [0])
    with pytest.raises(SpecError, match="within one episode"):
        buffer.sample(6, 5)
    assert buffer.sample(6, 4).data["x"][0].tolist() == [996, 997, 998, 999]


# Several environments


def lanes_buffer(n_lanes=3, total=30, **settings):
    buffer = ChunkReplayBuffer(total, 0, n_lanes=n_lanes, enable_prioritized=True, alpha=1.0, beta=1.0, **settings)
    buffer.setup_entry("x", np.int64)
    buffer.setup_entry("lane", np.int8)
    return buffer


@pytest.mark.parametrize("mode", MODES)
def test_lanes_have_rows_and_episodes_of_their_own(mode):  # R14, bug R14
    buffer, n = lanes_buffer(episode_ends="never"), [0, 0, 0]
    rng = np.random.default_rng(0)
    for _ in range(60):
        if rng.random() < 0.4:
            buffer.append({"x": np.array(n), "lane": np.arange(3, dtype=np.int8)})
            n = [k + 1 for k in n]
        else:
            lane = int(rng.integers(3))
            buffer.append({"x": n[lane], "lane": lane}, lane=lane)
            n[lane] += 1
            if n[lane] % 4 == 0:
                buffer.end_episode(lane)
        assert len(buffer) == sum(min(k, 10) for k in n)
    assert buffer.max_replay_size == buffer._max_replay_size == 30 and buffer.n_lanes == 3
    data, info = buffer.sample(200, 3, mode)
    assert (data["lane"] == data["lane"][:, :1]).all() and set(data["lane"].ravel().tolist()) == {0, 1, 2}
    assert (np.diff(data["x"], axis=1) == 1).all()
    assert (info["indices"] == data["lane"] * 10 + data["x"] % 10).all()


def test_windows_of_all_lanes_are_equally_likely():
    buffer = lanes_buffer()
    for lane, n in enumerate([12, 3, 1]):
        for t in range(n):
            buffer.append({"x": 100 * lane + t, "lane": lane}, lane=lane)
    expected = [(t, t + 1, t + 2) for t in range(2, 10)] + [(100, 101, 102)]
    for mode in MODES:
        assert_in_proportion(frequencies(buffer, 3, mode), dict.fromkeys(expected, 1))
    assert buffer.sample(1, 11) is None and buffer.sample(1, 10) is not None


def test_the_size_is_the_total_of_all_lanes():  # R26
    assert ChunkReplayBuffer(10, 0, n_lanes=4)._storage.columns.n_rows == 12
    assert repr(ChunkReplayBuffer(10, 0, n_lanes=4)) == "ChunkReplayBuffer(0 of 12 rows in 4 lanes: no tags)"


def test_ending_every_episode_at_once():
    buffer = lanes_buffer(2, 20, episode_ends="never")
    for t in range(6):
        buffer.append({"x": np.full(2, t), "lane": np.arange(2)})
        if t == 2:
            buffer.end_episode()
    assert set(chunks(buffer, 60, 3)[0]) == {(0, 1, 2), (3, 4, 5)}


# What is stored


def test_rows_are_copies():  # R1, R12, bug R8
    buffer = made(4, prioritized=False)
    buffer.setup_entry("frame", np.float32)
    frame = np.zeros(3, np.float32)
    row = {"x": 0, "frame": frame}
    for t in range(3):
        frame[:] = t
        row["x"] = t
        buffer.append(row)
    frame[:] = -1
    assert row.keys() == {"x", "frame"} and row["frame"] is frame
    assert buffer.data["frame"].tolist() == [[0, 0, 0], [1, 1, 1], [2, 2, 2]]
    data = buffer.sample(4, 3).data
    data["frame"][:], buffer.data["frame"][:] = -2, -3
    assert buffer.data["frame"][0].tolist() == [0, 0, 0]


def test_no_view_of_what_was_appended_is_kept():  # R34
    class Big(np.ndarray):
        pass

    buffer = made(4, prioritized=False)
    buffer.setup_entry("frame", np.uint8)
    for t in range(2):
        big = np.zeros((100, 50), np.uint8).view(Big)
        gone = weakref.ref(big)
        buffer.append({"x": t, "frame": big[3]})
        del big
        gc.collect()
        assert gone() is None


NUMBERS = {
    "python float into float32": (np.float32, 0.1, np.float32(0.1)),
    "python int into float32": (np.float32, 3, np.float32(3)),
    "float64 into float32": (np.float32, np.array([0.1, inf, -inf]), np.array([0.1, inf, -inf], np.float32)),
    "numpy scalar": (np.float32, np.float64(nan), np.float32(nan)),
    "bool into float": (np.float32, True, np.float32(1)),
    "int64 into uint8": (np.uint8, np.array([0, 255]), np.array([0, 255], np.uint8)),
    "python int into uint8": (np.uint8, 255, np.uint8(255)),
    "largest int64": (np.int64, 2**63 - 1, np.int64(2**63 - 1)),
    "uint64 into float32": (np.float32, np.uint64(2**24), np.float32(2**24)),
    "0 into bool": (bool, 0, np.bool_(False)),
    "1.0 into uint32": (np.uint32, 1.0, np.uint32(1)),  # as in the example of rlberry's buffer
    "whole floats into int64": (np.int64, np.array([-3.0, 2.0**53]), np.array([-3, 2**53])),
    "whole float16 into uint8": (np.uint8, np.float16(255), np.uint8(255)),
    "1.0 into bool": (bool, torch.tensor(1.0), np.bool_(True)),
    "float16": (np.float16, 65504.0, np.float16(65504)),
    "complex": (np.complex64, 1 + 2j, np.complex64(1 + 2j)),
    "list": (np.int16, [[1, 2], [3, 4]], np.array([[1, 2], [3, 4]], np.int16)),
    "torch": (np.float32, torch.tensor([1.5, 2.5]), np.array([1.5, 2.5], np.float32)),
    "torch dtype": (torch.uint8, torch.tensor(7), np.uint8(7)),
    "jax": (np.float32, jnp.array([1.5, 2.5]), np.array([1.5, 2.5], np.float32)),
    "big endian": (">i4", np.array([1, 2], ">i4"), np.array([1, 2], np.int32)),
    "empty": (np.float32, np.zeros((0, 3)), np.zeros((0, 3), np.float32)),
}


@pytest.mark.parametrize(("dtype", "value", "expected"), NUMBERS.values(), ids=NUMBERS)
def test_numbers_come_back_in_the_dtype_of_their_tag(dtype, value, expected):  # R31, bug R9
    buffer = made(4, prioritized=False)
    buffer.setup_entry("n", dtype)
    for t in range(3):  # the first makes the column, the second may know it
        buffer.append({"x": t, "n": value})
    for found in (buffer.sample(2, 3).data["n"][1, 2], buffer.data["n"][1]):
        assert found.dtype == expected.dtype and found.shape == np.shape(expected)
        np.testing.assert_array_equal(found, expected)


LOST = {
    "300 into uint8": (np.uint8, 0, 300),
    "-1 into uint8": (np.uint8, 0, -1),
    "array into uint8": (np.uint8, [0, 0], np.array([300, 0])),
    "float into uint8": (np.uint8, 0, 1.7),
    "300.0 into uint8": (np.uint8, 0, 300.0),
    "-1.0 into uint32": (np.uint32, 0, -1.0),
    "2.0 into bool": (bool, 0, 2.0),
    "2.0**63 into int64": (np.int64, 0, 2.0**63),
    "NaN into int64": (np.int64, 0, nan),
    "infinity into int64": (np.int64, 0, inf),
    "1e300 into float32": (np.float32, 0.0, 1e300),
    "array of 1e300": (np.float32, [0.0], np.array([1e300])),
    "2**24 + 1 into float32": (np.float32, 0, 2**24 + 1),
    "2 into bool": (bool, 0, 2),
    "2**63 into int64": (np.int64, 0, 2**63),
    "float into bool": (bool, 0, 0.5),
    "complex into float": (np.float32, 0.0, 1j),
    "text": (np.float32, 0.0, "1"),
    "None": (np.float32, 0.0, None),
    "ragged": (np.float32, [0.0, 0.0], [[1.0], 2.0]),
    "nested": (np.float32, 0.0, {"a": 1.0}),
    "another shape": (np.float32, [0.0, 0.0], [0.0, 0.0, 0.0]),
    "one number for a row": (np.float32, [0.0], 0.0),  # R32
    "a row for one number": (np.float32, 0.0, [0.0]),
}


@pytest.mark.parametrize(("dtype", "fine", "value"), LOST.values(), ids=LOST)
@pytest.mark.parametrize("n", [0, 2])
def test_values_that_do_not_fit_change_nothing(dtype, fine, value, n):  # bugs R9, R10
    buffer = made(4, prioritized=False)
    buffer.setup_entry("n", dtype)
    for t in range(n):
        buffer.append({"x": t, "n": fine})
    is_row = isinstance(fine, list) and not isinstance(value, np.ndarray)
    if n or not (is_row or isinstance(value, list)):  # the first row says what the shape is
        with pytest.raises(SpecError, match="'n'"):
            buffer.append({"x": 9, "n": value})
    assert len(buffer) == n and buffer.data["x"].tolist() == list(range(n))
    buffer.append({"x": n, "n": fine})
    assert buffer.data["x"].tolist() == list(range(n + 1))


def test_bfloat16_is_stored_as_such():
    buffer = ChunkReplayBuffer(4, 0, framework="torch")
    buffer.setup_entry("h", torch.bfloat16)
    for value in (torch.tensor([1.5], dtype=torch.bfloat16), [2.0], np.array([3.0])):
        buffer.append({"h": value})
    assert buffer.dtypes == {"h": torch.bfloat16}
    assert buffer.sample(1, 3).data["h"].equal(torch.tensor([[[1.5], [2.0], [3.0]]], dtype=torch.bfloat16))
    assert buffer.data["h"].tolist() == [[1.5], [2.0], [3.0]]


def test_rows_that_come_quickly_and_others_are_the_same():
    rng, quick, general = np.random.default_rng(0), *(frames_buffer() for _ in range(2))
    for t in range(300):
        row = {
            "observations": np.full(300, t % 4, np.uint8),
            "next_observations": np.full(300, (t + 1) % 4 if rng.random() < 0.7 else 9, np.uint8),
            "rewards": rng.choice([0.5, np.float64(1.5)]),
            "dones": rng.choice([False, False, False, np.bool_(True)]),
        }
        quick.append(row)
        general.append(types.MappingProxyType(row))
        if rng.random() < 0.1:
            quick.end_episode(), general.end_episode()
        if rng.random() < 0.02:
            quick.clear(), general.clear()
        for tag in row:
            np.testing.assert_array_equal(quick.data[tag], general.data[tag])
        assert_same_stream(quick, general, 1)
    assert quick.nbytes == general.nbytes


def frames_buffer(**settings):
    buffer = ChunkReplayBuffer(20, 0, enable_prioritized=True, episode_ends="mask", **settings)
    for tag, dtype in {"observations": np.uint8, "next_observations": np.uint8,
                       "rewards": np.float32, "dones": bool}.items():  # fmt: skip
        buffer.setup_entry(tag, dtype)
    return buffer


def assert_same_stream(first, second, n=5, length=2):
    for _ in range(n):
        for mode in MODES:
            a, b = (buffer.sample(6, length, mode) for buffer in (first, second))
            if a is None:
                assert b is None
                continue
            for found, expected in ((a.data, b.data), (a.info, b.info)):
                assert set(found) == set(expected)
                for name in found:
                    np.testing.assert_array_equal(found[name], expected[name])
            new = np.random.default_rng(n).random((6, length)) + 0.1
            first.update_priorities(a.info["indices"], new)
            second.update_priorities(b.info["indices"], new)


def test_a_frame_is_stored_once():
    n, size = 2000, 84 * 84
    buffer = ChunkReplayBuffer(n, 0)
    for tag in ("observations", "next_observations"):
        buffer.setup_entry(tag, np.uint8)
    frames = np.random.default_rng(0).integers(0, 256, (n + 1, 84, 84), np.uint8)
    for t in range(n):
        buffer.append({"observations": frames[t], "next_observations": frames[t + 1]})
    assert buffer.nbytes < 1.02 * n * size
    data, info = buffer.sample(3, 5)
    np.testing.assert_array_equal(data["next_observations"], frames[info["indices"] + 1])
    np.testing.assert_array_equal(buffer.data["next_observations"][-1], frames[n])


def test_nbytes_are_those_of_dtypes_and_bookkeeping():
    buffer, plain = made(1000), made(1000, prioritized=False)
    for each in (buffer, plain):
        each.setup_entry("a", np.float16)
        each.append({"x": 0, "a": [0, 0, 0]})
    assert 1000 * (8 + 6) <= plain.nbytes < 1000 * (8 + 6 + 8) + 100
    assert 8 * 1000 <= buffer.nbytes - plain.nbytes < 20 * 1000


# n-step and stacks


def steps_buffer(**settings):
    """Episodes of 3 steps, 8 steps; what is observed counts on."""
    buffer = ChunkReplayBuffer(16, 0, enable_prioritized=True, **settings)
    for tag, dtype in {"observations": float, "next_observations": float, "rewards": np.float32, "actions": int,
                       "terminated": bool, "truncated": bool}.items():  # fmt: skip
        buffer.setup_entry(tag, dtype)
    for t in range(8):
        buffer.append({
            "observations": t, "next_observations": t + 1, "rewards": 1.0, "actions": t,
            "terminated": t == 2, "truncated": t == 5,
        })  # fmt: skip
    return buffer


@pytest.mark.parametrize("mode", MODES)
def test_n_step_stops_at_the_end_of_an_episode_and_at_the_newest_row(mode):  # R8, R9
    buffer = steps_buffer(n_step=2, gamma=0.5)
    data, info = buffer.sample(2, 8, mode)
    assert data["rewards"].tolist() == [[1.5, 1.5, 1, 1.5, 1.5, 1, 1.5, 1]] * 2
    assert data["discount"].tolist() == [[0.25, 0.25, 0.5, 0.25, 0.25, 0.5, 0.25, 0.5]] * 2
    assert data["observations"][0].tolist() == data["actions"][0].tolist() == list(range(8))
    assert data["next_observations"].tolist() == [[2, 3, 3, 5, 6, 6, 8, 8]] * 2
    assert data["terminated"][0].tolist() == [False, True, True, False, False, False, False, False]
    assert data["truncated"][0].tolist() == [False, False, False, False, True, True, False, False]
    assert info["indices"].tolist() == [list(range(8))] * 2
    assert buffer.data["rewards"].tolist() == [1] * 8
    buffer.update_priorities(info["indices"], np.ones((2, 8)))


@pytest.mark.parametrize("mode", MODES)
def test_a_stack_holds_its_own_episode_only(mode):  # R10, R16
    data = steps_buffer(stack_num=3).sample(2, 8, mode).data
    assert data["observations"].shape == (2, 8, 3)
    assert data["observations"][1].tolist() == [
        [0, 0, 0], [0, 0, 1], [0, 1, 2], [3, 3, 3], [3, 3, 4], [3, 4, 5], [6, 6, 6], [6, 6, 7],
    ]  # fmt: skip
    assert data["next_observations"][1, 2].tolist() == [1, 2, 3]
    assert data["actions"].shape == (2, 8)


def test_only_the_tags_that_are_asked_for_are_stacked():
    data = steps_buffer(stack_num=2, stack_keys=["actions"]).sample(1, 8).data
    assert data["observations"].shape == (1, 8) and data["actions"][0, :2].tolist() == [[0, 0], [0, 1]]
    with pytest.raises(MissingKeyError, match=r"^stack_keys: no \['image'\] among the tags"):
        steps_buffer(stack_num=2, stack_keys=["image"]).sample(1, 2)


def test_stacks_in_a_wrapped_ring_never_reach_across_the_head():
    buffer = ChunkReplayBuffer(6, 0, stack_num=3)
    buffer.setup_entry("observations", int)
    for t in range(9):
        buffer.append({"observations": t})
    data = buffer.sample(1, 6).data
    assert data["observations"][0, :3].tolist() == [[3, 3, 3], [3, 3, 4], [3, 4, 5]]


# Frameworks


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("mode", MODES)
def test_samples_are_what_the_framework_has(framework, mode):
    buffer, plain = (frames_buffer(framework=name) for name in (framework, "numpy"))
    for t in range(12):
        for each in (buffer, plain):
            each.append({"observations": np.full(4, t), "next_observations": np.full(4, t + 1),
                         "rewards": t / 2, "dones": t == 5})  # fmt: skip
    found, expected = buffer.sample(5, 3, mode), plain.sample(5, 3, mode)
    kind = {"numpy": np.ndarray, "torch": torch.Tensor, "jax": jnp.ndarray, "warp": wp.array}[framework]
    assert type(found.data) is type(found.info) is (DictTensor if framework == "torch" else ArrayDict)
    for a, b in ((found.data, expected.data), (found.info, expected.info)):
        assert set(a.keys()) == set(b.keys())
        for name in b:
            assert isinstance(a[name], kind)
            host = a[name].numpy() if framework in ("torch", "warp") else np.asarray(a[name])
            np.testing.assert_array_equal(host, b[name])
    indices = found.info["indices"]
    buffer.update_priorities(indices, found.data["rewards"])
    zeros = np.zeros(4, int)
    buffer.append({"observations": zeros, "next_observations": zeros, "rewards": 0, "dones": False})
    buffer.update_priorities(indices, found.data["rewards"])


def test_a_framework_that_there_is_not_is_refused():
    with pytest.raises(SpecError, match="^framework must be one of .*, got 'tf'$"):
        ChunkReplayBuffer(4, 0, framework="tf")
    with pytest.raises(SpecError, match="^device must be None or the CPU for numpy, got 'cuda'$"):
        ChunkReplayBuffer(4, 0, device="cuda")


# Generators, copies, files


def test_the_same_seed_gives_the_same_stream():
    first, second = made(20, 33), made(20, 33)
    assert_same_stream(first, second)
    generator = np.random.default_rng(5)
    third = ChunkReplayBuffer(20, generator)
    third.setup_entry("x", np.int64)
    count(third, range(20))
    before = generator.bit_generator.state["state"]["state"]
    third.sample(4, 2)
    assert generator.bit_generator.state["state"]["state"] != before


def in_use(**settings):
    """A buffer in the middle of things: wrapped, an open episode, priorities, a batch that has none yet."""
    buffer = frames_buffer(**settings)
    for t in range(33):
        buffer.append({"observations": np.full(300, t % 5), "next_observations": np.full(300, (t + 1) % 5),
                       "rewards": t, "dones": t in (3, 22)})  # fmt: skip
        if t == 30:
            batch = buffer.sample(6, 3, "prioritized")
            buffer.update_priorities(batch.info["indices"], np.arange(18.0).reshape(6, 3))
            batch = buffer.sample(7, 3, "prioritized")
    return buffer, batch.info["indices"]


def more(buffer, indices):
    """A stale update, rows, the end of an episode."""
    buffer.update_priorities(indices, np.full(indices.shape, 3.0))
    for t in range(3):
        buffer.append({"observations": np.full(300, t), "next_observations": np.full(300, t + 1),
                       "rewards": t, "dones": False})  # fmt: skip
    buffer.end_episode()


@pytest.mark.parametrize("how", ["pickle", "deepcopy", "npz", "pt", "h5"])
def test_a_copy_gives_the_stream_of_the_original(how, tmp_path):  # R30, bug R16
    buffer, indices = in_use(stack_num=2)
    if how in ("pickle", "deepcopy"):
        twin = pickle.loads(pickle.dumps(buffer)) if how == "pickle" else copy.deepcopy(buffer)
    else:
        twin = frames_buffer(stack_num=2)
        twin._rng.random(5)
        buffer.save(tmp_path / f"x.{how}")
        twin.load(tmp_path / f"x.{how}")
    assert len(twin) == len(buffer) == 20 and repr(twin) == repr(buffer) and twin.nbytes == buffer.nbytes
    assert_same_stream(buffer, twin)
    for each in (buffer, twin):
        more(each, indices)
    assert_same_stream(buffer, twin, 5, 4)
    more(buffer, indices)
    assert buffer.data["rewards"].tolist() != twin.data["rewards"].tolist()


@pytest.mark.parametrize("n", [0, 3])
def test_a_file_sets_the_tags_up(n, tmp_path):
    buffer = made(5, n, [1])
    if not n:
        buffer.setup_entry("y", torch.bfloat16)
    buffer.save(tmp_path / "x.npz")
    other = ChunkReplayBuffer(5, 9, enable_prioritized=True, alpha=1.0, beta=1.0)
    other.load(tmp_path / "x.npz")
    assert other.dtypes == buffer.dtypes and other.tags == buffer.tags
    assert_same_stream(buffer, other)
    row = {"x": 7} | ({} if n else {"y": 1.5})
    for each in (buffer, other):
        each.append(row)
        each.append(row)
    assert_same_stream(buffer, other)


def test_a_buffer_loaded_by_another_process_goes_on_as_this_one(tmp_path):  # R30
    buffer = made(20, 33, [25])
    set_priorities(buffer, np.arange(1.0, 21))
    buffer.save(tmp_path / "x.npz")
    program = f"""
from rlstructs.replay import ChunkReplayBuffer
buffer = ChunkReplayBuffer(20, 1, enable_prioritized=True, alpha=1.0, beta=1.0)
buffer.load({str(tmp_path / "x.npz")!r})
for mode in ("uniform", "prioritized"):
    batch = buffer.sample(6, 3, mode)
    print(batch.data["x"].tolist(), batch.info["weights"].tolist(), batch.info["is_first"].tolist())
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    batches = [buffer.sample(6, 3, mode) for mode in MODES]
    expected = [f"{b.data['x'].tolist()} {b.info['weights'].tolist()} {b.info['is_first'].tolist()}" for b in batches]
    assert found.stdout.splitlines() == expected


def test_files_that_do_not_fit_change_nothing(tmp_path):
    path = tmp_path / "x.npz"
    made(5, 7).save(path)
    other_tag = ChunkReplayBuffer(5, 0)
    other_tag.setup_entry("y", np.int64)
    other_dtype = ChunkReplayBuffer(5, 0)
    other_dtype.setup_entry("x", np.int32)
    for buffer, message in [
        (made(6, 2), "holds 1 lanes of 5 rows, this buffer has 1 of 6"),
        (ChunkReplayBuffer(10, 0, n_lanes=2), "holds 1 lanes of 5 rows"),
        (other_tag, "has the tags"),
        (other_dtype, "has the tags"),
        (made(5, 2, alpha=0.5), "its priorities are to the power of 1.0, here alpha is 0.5"),
    ]:
        before = buffer.tags, len(buffer), buffer._rng.bit_generator.state
        with pytest.raises(FileError, match=message):
            buffer.load(path)
        assert (buffer.tags, len(buffer), buffer._rng.bit_generator.state) == before
    damaged = path.read_bytes()
    (tmp_path / "y.npz").write_bytes(damaged[:300] + bytes([damaged[300] ^ 1]) + damaged[301:])
    (tmp_path / "z.npz").write_bytes(damaged[: len(damaged) // 2])
    for name in ("y.npz", "z.npz"):
        with pytest.raises(FileError):
            made(5).load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        made(5).load(tmp_path / "none.npz")


def test_a_file_without_priorities_gives_all_rows_the_same(tmp_path):
    made(5, 7, prioritized=False).save(tmp_path / "x.npz")
    buffer = made(5, 3)
    set_priorities(buffer, [1, 2, 3])
    buffer.load(tmp_path / "x.npz")
    assert buffer.data["x"].tolist() == [5, 6, 2, 3, 4]
    assert weights_by_row(buffer) == dict.fromkeys(range(5), 1)
    plain = made(5, prioritized=False)
    buffer.save(tmp_path / "y.npz")
    plain.load(tmp_path / "y.npz")
    assert len(plain) == 5


def test_repr_names_the_tags_and_never_shows_rows():
    buffer = made(1000, 600)
    buffer.clear()
    buffer.setup_entry("image", np.uint8)
    assert repr(buffer) == "ChunkReplayBuffer(0 of 1000 rows: x int64, image uint8)"
    assert len(repr(made(1000, 600).data)) < 100


# Trajectories


def trajectories(n_envs=3, lengths=(2, 4, 3), n_timesteps=4, done=(), first=(), start=0):
    """Frames `[env, t]`; `done` and `first` are (env, t)."""
    t = torch.arange(start, start + n_timesteps)
    frame = torch.stack([torch.arange(n_envs)[:, None].expand(n_envs, n_timesteps), t.expand(n_envs, n_timesteps)], 2)
    marks = {}
    for name, places in (("done", done), ("first", first)):
        marks[name] = torch.zeros(n_envs, n_timesteps, dtype=torch.bool)
        for place in places:
            marks[name][place] = True
    steps = {
        "observation/frame": frame.float(), "_observation/frame": frame.float() + 0.5,
        "action/action": t.expand(n_envs, n_timesteps).clone(), "_observation/reward": -frame[..., 1].float(),
        "_observation/terminated": marks["done"], "_observation/truncated": torch.zeros_like(marks["done"]),
        "_observation/done": marks["done"], "observation/initial_state": marks["first"],
    }  # fmt: skip
    info = DictTensor({"env_index": torch.arange(n_envs)})
    return Trajectories(info, TemporalDictTensor(steps, torch.tensor(lengths)))


def test_trajectories_set_the_tags_up_with_their_dtypes():
    buffer = ChunkReplayBuffer(30, 0, n_lanes=3)
    buffer.add_trajectories(trajectories())
    assert buffer.dtypes == {
        "observations": np.float32, "next_observations": np.float32, "actions": np.int64, "rewards": np.float32,
        "terminated": bool, "truncated": bool,
    }  # fmt: skip
    assert buffer.data["observations"][:, 0].tolist() == [0, 0, 1, 1, 1, 1, 2, 2, 2]
    assert buffer.data["observations"][:, 1].tolist() == [0, 1, 0, 1, 2, 3, 0, 1, 2]
    assert buffer.data["next_observations"][5].tolist() == [1.5, 3.5]
    assert buffer.data["rewards"].tolist() == [0, -1, 0, -1, -2, -3, 0, -1, -2]
    row = {tag: buffer.data[tag][0] for tag in buffer.tags}
    buffer.append({tag: np.stack([value] * 3) for tag, value in row.items()})
    assert len(buffer) == 12


@pytest.mark.parametrize("n_lanes", [1, 3])
def test_trajectories_fill_the_tags_that_are_set_up(n_lanes):
    buffer = ChunkReplayBuffer(30, 0, n_lanes=n_lanes, episode_ends="never")
    for tag, dtype in {"rewards": np.float64, "actions": np.uint8, "dones": np.float32}.items():
        buffer.setup_entry(tag, dtype)
    buffer.add_trajectories(trajectories(done=[(1, 1)]))
    assert buffer.dtypes == {"rewards": np.float64, "actions": np.uint8, "dones": np.float32}
    assert buffer.data["actions"].tolist() == [0, 1, 0, 1, 2, 3, 0, 1, 2]
    assert buffer.data["dones"].tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 0]
    found = {tuple(chunk) for chunk in buffer.sample(200, 2).info["indices"].tolist()}
    stride = 10 if n_lanes == 3 else None
    starts = [0, stride or 2, 2 * stride if stride else 6]
    assert found == {(starts[0], starts[0] + 1), (starts[1], starts[1] + 1), (starts[1] + 2, starts[1] + 3),
                     (starts[2], starts[2] + 1), (starts[2] + 1, starts[2] + 2)}  # fmt: skip


def test_episodes_go_on_from_one_batch_of_trajectories_to_the_next():  # R6
    buffer = ChunkReplayBuffer(60, 0, n_lanes=3, episode_ends="never")
    buffer.add_trajectories(trajectories(lengths=(4, 4, 4)))
    buffer.add_trajectories(trajectories(lengths=(4, 4, 4), start=4, first=[(1, 0)], done=[(2, 1)]))
    whole = {tuple(chunk[:, 0].tolist()) for chunk in buffer.sample(300, 6).data["observations"]}
    assert whole == {(0,) * 6, (2,) * 6}
    shorter = {tuple(times) for times in buffer.sample(300, 4).data["observations"][:, :, 1].tolist()}
    assert (2, 3, 4, 5) in shorter


def test_the_final_observation_of_a_truncated_episode_is_the_true_one():  # R2
    batch = trajectories(lengths=(4, 4, 4))
    batch.trajectories["_observation/truncated"][0, 1] = True
    batch.trajectories["_observation/frame"][0, 1] = 99
    buffer = ChunkReplayBuffer(30, 0, n_lanes=3)
    buffer.add_trajectories(batch)
    data = buffer.data
    assert data["next_observations"][1].tolist() == [99, 99] and data["observations"][2].tolist() == [0, 2]
    assert data["truncated"][1] and not data["terminated"][1]


def test_tags_may_be_named_after_any_keys_of_trajectories():
    buffer = ChunkReplayBuffer(30, 0, episode_ends="never", enable_prioritized=True)
    buffer.add_trajectories(trajectories(done=[(1, 1)]), {"o": "observation/frame", "done": "_observation/done"})
    assert buffer.tags == ["o", "done"]
    own = ChunkReplayBuffer(30, 0)
    own.setup_entry("action/action", np.int64)
    own.add_trajectories(trajectories())
    assert own.data["action/action"].tolist() == [0, 1, 0, 1, 2, 3, 0, 1, 2]


@pytest.mark.parametrize("n_lanes", [1, 3])
def test_trajectories_that_do_not_fit_change_nothing(n_lanes):
    def fresh(**settings):
        return ChunkReplayBuffer(30, 0, n_lanes=n_lanes, **settings)

    buffer = fresh()
    with pytest.raises(MissingKeyError, match=r"no \['absent'\] in the trajectories"):
        buffer.add_trajectories(trajectories(), {"x": "absent"})
    with pytest.raises(TypeError, match="needs Trajectories"):
        buffer.add_trajectories([1])
    assert buffer.tags == [] and len(buffer) == 0
    buffer.setup_entry("actions", np.uint8)
    wide = trajectories()
    wide.trajectories["action/action"][1, 2] = 256
    with pytest.raises(SpecError, match="^'actions' holds int64 values that do not fit uint8$"):
        buffer.add_trajectories(wide)
    with pytest.raises(MissingKeyError, match=r"^tag\(s\) \['actions'\] are missing, got \['a'\]$"):
        buffer.add_trajectories(trajectories(), {"a": "action/action"})
    with pytest.raises(SpecError, match=r"^unknown tag\(s\) \['b'\]"):
        buffer.add_trajectories(trajectories(), {"actions": "action/action", "b": "action/action"})
    limited = fresh(max_episode_steps=3)
    with pytest.raises(SpecError, match=r"an episode of lane . would have 4 steps, max_episode_steps is 3"):
        limited.add_trajectories(trajectories())
    assert len(buffer) == len(limited) == 0 and limited.tags == []
    limited.add_trajectories(trajectories(done=[(1, 1)]))
    assert len(limited) == 9
    if n_lanes > 1:
        with pytest.raises(SpecError, match="an episode of lane 2 would have 5 steps"):
            limited.add_trajectories(trajectories(lengths=(1, 1, 2)))
        assert len(limited) == 9
        with pytest.raises(SpecError, match=r"env_index 3 is not in \[0, 3\)"):
            limited.add_trajectories(trajectories(4, (1, 1, 1, 1)))


def test_no_valid_step_changes_nothing():
    buffer = ChunkReplayBuffer(30, 0)
    buffer.add_trajectories(trajectories(lengths=(0, 0, 0)))
    assert len(buffer) == 0 and buffer.tags == []


# Bad input


BAD_SETTINGS = {
    "size 0": ({"max_replay_size": 0}, "^max_replay_size must be at least 1, got 0$"),
    "size -1": ({"max_replay_size": -1}, "^max_replay_size must be at least 1, got -1$"),
    "size 1.5": ({"max_replay_size": 1.5}, "^max_replay_size must be an int, got 1.5$"),
    "size True": ({"max_replay_size": True}, "^max_replay_size must be an int, got True$"),
    "no rng": ({"rng": None}, "^rng must be a Generator or an int, got None$"),
    "rng": ({"rng": "0"}, "^a seed must be a Generator or an int of at least 0, got '0'$"),
    "negative seed": ({"rng": -1}, "^a seed must be"),
    "no steps": ({"max_episode_steps": 0}, "^max_episode_steps must be at least 1, got 0$"),
    "minus infinity": ({"max_episode_steps": -np.inf}, "^max_episode_steps must be an int, got -inf$"),
    "half a step": ({"max_episode_steps": 0.5}, "^max_episode_steps must be an int, got 0.5$"),
    "alpha": ({"alpha": -0.5}, "^alpha must be a number of at least 0, got -0.5$"),
    "beta": ({"beta": nan}, "^beta must be a number of at least 0, got nan$"),
    "lanes": ({"n_lanes": 0}, "^n_lanes must be at least 1, got 0$"),
    "ends": ({"episode_ends": "cut"}, "^episode_ends must be one of .*, got 'cut'$"),
    "n_step": ({"n_step": 0}, "^n_step must be at least 1, got 0$"),
    "gamma": ({"gamma": 1.5}, r"^gamma must be in \[0, 1\], got 1.5$"),
    "stack_num": ({"stack_num": 0}, "^stack_num must be at least 1, got 0$"),
    "stack_keys": ({"stack_keys": "observations"}, "^stack_keys must be several tags, got the string 'observations'$"),
}


@pytest.mark.parametrize(("settings", "message"), BAD_SETTINGS.values(), ids=BAD_SETTINGS)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises((SpecError, TypeError), match=message):
        ChunkReplayBuffer(**({"max_replay_size": 4, "rng": 0} | settings))


def test_the_random_generator_must_be_given():
    with pytest.raises(TypeError, match="rng"):
        ChunkReplayBuffer(4)


@pytest.mark.parametrize("dtype", [None, str, object, "nonsense", "datetime64[s]", [("a", int)], np.longdouble])
def test_a_dtype_that_holds_no_numbers_is_refused(dtype):
    buffer = ChunkReplayBuffer(4, 0)
    with pytest.raises(SpecError, match="^'x' must have a dtype of numbers, got "):
        buffer.setup_entry("x", dtype)
    assert buffer.tags == []


def test_tags_that_make_no_sense_are_refused():
    buffer = made(4)
    with pytest.raises(ValueError, match="^setup_entry: 'x' is there already$"):
        buffer.setup_entry("x", np.float32)
    for tag in ("", 3, None):
        with pytest.raises(SpecError, match="^setup_entry: a tag must be a string, got "):
            buffer.setup_entry(tag, np.float32)
    with pytest.raises(SpecError, match="^setup_entry: 'discount' is what"):
        made(4, n_step=2).setup_entry("discount", np.float32)
    buffer.append({"x": 1})
    with pytest.raises(StateError, match="^setup_entry: 'y' comes too late, there are rows; call clear first$"):
        buffer.setup_entry("y", np.float32)  # bug R15: rows were misaligned
    assert buffer.tags == ["x"]
    buffer.clear()
    buffer.setup_entry("dones", bool)
    for t in range(3):
        buffer.append({"x": t, "dones": t == 1})
    assert buffer.sample(2, 3).info["is_first"].tolist() == [[True, False, True]] * 2


def test_rows_that_are_none_are_refused():  # bug R10
    buffer = made(4)
    buffer.setup_entry("y", np.float32)
    for n in range(3):
        with pytest.raises(MissingKeyError, match=r"^tag\(s\) \['y'\] are missing, got \['x'\]$"):
            buffer.append({"x": 1})
        with pytest.raises(SpecError, match=r"^unknown tag\(s\) \['z'\], this buffer has \['x', 'y'\]$"):
            buffer.append({"x": 1, "y": 1, "z": 1})
        with pytest.raises(SpecError, match=r"^unknown tag\(s\) \['3'\]"):
            buffer.append({"x": 1, "y": 1, 3: 1})
        with pytest.raises(TypeError, match="^append: needs a mapping of tags to values, got list$"):
            buffer.append([1, 2])
        assert len(buffer) == n
        buffer.append({"x": 1, "y": 2})
    with pytest.raises(StateError, match="^append: there is no tag yet; call setup_entry first$"):
        ChunkReplayBuffer(4, 0).append({"x": 1})


def test_lanes_that_there_are_not_are_refused():
    buffer = lanes_buffer(2)
    for call in (lambda lane: buffer.append({"x": 1, "lane": 0}, lane=lane), lambda lane: buffer.end_episode(lane)):
        for lane in (-1, 2):
            with pytest.raises(SpecError, match=rf"^lane {lane} is not in \[0, 2\)$"):
                call(lane)
        for lane in (0.0, True, "0"):
            with pytest.raises(TypeError, match="^lane must be an int, got "):
                call(lane)
    for x, lanes in ((1, [0, 1]), ([1, 2, 3], [0, 1, 2]), ([1, 2], [0])):
        with pytest.raises(SpecError, match="^(append: '(x|lane)' has shape|'lane' has shape)"):
            buffer.append({"x": x, "lane": lanes})
    assert len(buffer) == 0
    buffer.append({"x": [1, 2], "lane": [0, 1]})
    with pytest.raises(SpecError, match=r"^append: 'x' has shape \(\), expected \(2,\)$"):
        buffer.append({"x": 1, "lane": [0, 1]})
    assert len(buffer) == 2


def test_samples_that_cannot_be_are_refused_in_rlberrys_order():
    plain, buffer = made(4, prioritized=False), made(4)
    for each in (plain, buffer):
        for chunk in (0, -1):
            with pytest.raises(SpecError, match=f"^chunk_size must be at least 1, got {chunk}$"):
                each.sample(1, chunk, "nonsense")
        with pytest.raises(ValueError, match=r"^sampling_mode must be one of .*, got 'nonsense'$"):
            each.sample(1, 1, "nonsense")
        with pytest.raises(TypeError, match="^chunk_size must be an int, got 1.5$"):
            each.sample(1, 1.5)
        with pytest.raises(SpecError, match="^batch_size must be at least 1, got 0$"):
            each.sample(0, 1)
    with pytest.raises(RuntimeError, match="^sample: there are no priorities; construct the buffer with"):
        plain.sample(1, 100, "prioritized")
    assert plain.sample(1, 1) is None and buffer.sample(1, 1, "prioritized") is None


BAD_PRIORITIES = {
    "nan": ([[0, 1]], [[1.0, nan]], SpecError, "^priorities must be finite and at least 0, got nan$"),
    "infinite": ([[0, 1]], [[inf, 1.0]], SpecError, "^priorities must be finite and at least 0, got inf$"),
    "negative": ([[0, 1]], [[1.0, -0.5]], SpecError, "^priorities must be finite and at least 0, got -0.5$"),
    "too large": ([[0]], [[1e300]], SpecError, "^priorities must be finite"),  # 1e300 ** 2 is no number
    "shapes": ([[0, 1]], [[1.0]], SpecError, r"must have one shape \(B, T\), got \(1, 2\) and \(1, 1\)$"),
    "transposed": ([[0, 1]], [[1.0], [1.0]], SpecError, r"got \(1, 2\) and \(2, 1\)$"),
    "flat": ([0, 1], [1.0, 1.0], SpecError, r"must have one shape \(B, T\), got \(2,\) and \(2,\)$"),
    "negative index": ([[-1, 0]], [[1.0, 1.0]], IndexError, r"^index -1 is not in \[0, 4\)$"),
    "large index": ([[0, 4]], [[1.0, 1.0]], IndexError, r"^index 4 is not in \[0, 4\)$"),
    "no row": ([[0, 3]], [[9.0, 9.0]], SpecError, "^index 3 holds no row$"),
    "float index": ([[0.0]], [[1.0]], SpecError, "^index must hold integers, got float64$"),
    "text": ([[0]], [["1"]], SpecError, "^priorities must hold numbers, got <U1$"),
    "complex": ([[0]], [[1j]], SpecError, "^priorities must hold numbers, got complex128$"),
}


@pytest.mark.parametrize(("indices", "new", "error", "message"), BAD_PRIORITIES.values(), ids=BAD_PRIORITIES)
def test_priorities_that_make_no_sense_change_nothing(indices, new, error, message):  # bug R12
    buffer, twin = (made(4, 3, alpha=2.0) for _ in range(2))
    for each in (buffer, twin):
        each.update_priorities([[1]], [[3.0]])
    with pytest.raises(error, match=message):
        buffer.update_priorities(indices, new)
    for each in (buffer, twin):
        each.append({"x": 3})
        each.update_priorities(np.zeros((0, 2), int), np.zeros((0, 2)))
    assert_same_stream(buffer, twin)


def test_priorities_of_a_buffer_without_any_are_refused():
    with pytest.raises(StateError, match="^update_priorities: there are none; construct the buffer with"):
        made(4, 3, prioritized=False).update_priorities([[0]], [[1.0]])


def test_a_tag_that_there_is_not_has_no_data():
    with pytest.raises(KeyError, match=r"no tag 'y' in this buffer, there are \['x'\]"):
        made(4, 3).data["y"]
    assert list(made(4).data) == ["x"] and made(4).data["x"].dtype == np.int64 and len(made(4).data) == 1


# Threads


def test_no_chunk_that_is_read_while_another_thread_appends_is_torn():
    buffer = ChunkReplayBuffer(64, 0, enable_prioritized=True)
    for tag in ("observations", "next_observations", "t"):
        buffer.setup_entry(tag, np.int64)
    done = threading.Event()

    def write():
        t = 0
        while not done.is_set():
            buffer.append({"observations": np.full(40, t), "next_observations": np.full(40, t + 1), "t": t})
            t += 1
            if t % 7 == 0:
                buffer.end_episode()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        n = 0
        while n < 400:
            batch = buffer.sample(8, 4, MODES[n % 2])
            if batch is None:
                continue
            t = batch.data["t"]
            assert (np.diff(t, axis=1) == 1).all() and (t % 64 == batch.info["indices"]).all()
            assert (batch.data["observations"] == t[..., None]).all()
            assert (batch.data["next_observations"] == t[..., None] + 1).all()
            buffer.update_priorities(batch.info["indices"], np.ones((8, 4)))
            n += 1
    finally:
        done.set()
        thread.join()


def test_a_buffer_whose_tags_came_with_trajectories_loads_its_own_file(tmp_path):
    steps = {key: torch.ones(1, 4) for key in ("observation/frame", "_observation/reward")}
    batch = Trajectories(DictTensor({"env_index": torch.tensor([0])}), TemporalDictTensor(steps, torch.tensor([4])))
    buffer = ChunkReplayBuffer(10, 0)
    buffer.add_trajectories(batch, {"x": "observation/frame", "r": "_observation/reward"})
    buffer.save(tmp_path / "b.npz")
    buffer.load(tmp_path / "b.npz")
    assert len(buffer) == 4 and buffer.sample(2, 2).data["x"].tolist() == [[1, 1]] * 2


def test_data_that_is_changed_in_place_is_a_copy():
    buffer = ChunkReplayBuffer(4, 0)
    buffer.setup_entry("x", np.float32)
    for number in range(4):
        buffer.append({"x": float(number)})
    found = buffer.data["x"]
    found -= found.mean()
    assert found.tolist() == [-1.5, -0.5, 0.5, 1.5] and buffer.data["x"].tolist() == [0, 1, 2, 3]
    assert np.add(found, 1, out=found) is found and found[0] == -0.5
