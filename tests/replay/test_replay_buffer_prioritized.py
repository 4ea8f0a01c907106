"""`PrioritizedReplayBuffer` and its kind for several environments, held against plain numpy.

"A" is a section of spec/tianshou-torchrl.md, "R" a scenario of spec/user-demand.md. Seeds are fixed.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from replay_rows import draws, fill, row, rows

from rlstructs import SpecError, StateError
from rlstructs.replay import ChunkReplayBuffer, PrioritizedReplayBuffer, PrioritizedVectorReplayBuffer

EPSILON = np.finfo(np.float32).eps
nan, inf = float("nan"), float("inf")


def made(n=6, size=8, alpha=0.5, beta=0.5, **arguments):
    return fill(PrioritizedReplayBuffer(size, alpha, beta, **arguments), n)


def assert_in_proportion(found, shares):
    """Pearson's test; what has no share was never drawn."""
    expected = np.asarray(shares, float) / np.sum(shares) * found.sum()
    assert (found[expected == 0] == 0).all()
    some = expected > 0
    statistic = ((found - expected)[some] ** 2 / expected[some]).sum()
    assert statistic < some.sum() + 4 * np.sqrt(2 * some.sum()), (found.tolist(), expected.tolist())


def test_priorities_and_weights():  # A22 test_prioritized_replaybuffer
    single = PrioritizedReplayBuffer(9, 0.5, 0.5)
    several = PrioritizedVectorReplayBuffer(9, buffer_num=3, alpha=0.5, beta=0.5)
    for t in range(12):
        single.add(row(t, t % 4 == 3, info={"key": t}))
        several.add(rows([t] * 3, [t % 4 == 3] * 3))
        for buffer in (single, several):
            batch, index = buffer.sample(len(buffer) // 2 or -1)
            assert len(index) == len(batch.weight) == len(buffer) // 2
        assert len(single) == min(9, t + 1) and len(several) == min(9, 3 * t + 3)
    assert single.info.key.shape == (9,)
    batch, index = single.sample(4)
    single.update_weight(index, -batch.weight / 2)
    np.testing.assert_allclose(single.weight[index], (np.abs(-batch.weight / 2) + EPSILON) ** 0.5)
    assert several[np.arange(9)].weight.tolist() == [1] * 9
    batch, index = several.sample(4)
    several.update_weight(index, batch.weight * 0)
    weight = several[np.arange(9)].weight
    selected = np.isin(np.arange(9), index)
    assert len(set(weight[selected])) == len(set(weight[~selected])) == 1
    assert weight[~selected][0] < weight[selected][0] == 1


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("weight_norm", [True, False])
@pytest.mark.parametrize("n_rows", [1, 5, 11])
def test_draws_and_weights_are_those_of_a_plain_reference(lanes, weight_norm, n_rows):  # R20, R22, R23, A21.6
    if lanes == 1:
        buffer = fill(PrioritizedReplayBuffer(7, 0.6, 0.7, weight_norm=weight_norm), n_rows)
    else:
        buffer = PrioritizedVectorReplayBuffer(14, 2, 0.6, 0.7, weight_norm=weight_norm)
        for t in range(n_rows):
            buffer.add(rows([t, t]))
            buffer.add(rows([t]), [1])
    valid = buffer.sample_indices(0)
    priorities = np.random.default_rng(n_rows).uniform(0.1, 5, valid.size)
    buffer.update_weight(valid, priorities * np.where(valid % 2, 1, -1))
    powers = np.zeros(buffer.maxsize)
    powers[valid] = (priorities + EPSILON) ** 0.6
    np.testing.assert_allclose(buffer.weight, powers)
    found = np.zeros(buffer.maxsize, int)
    for _ in range(60):
        batch, index = buffer.sample(100)
        found += np.bincount(index, minlength=buffer.maxsize)
        plain = (valid.size * powers[index] / powers.sum()) ** -0.7
        largest = plain.max() if weight_norm else ((valid.size * powers[valid] / powers.sum()) ** -0.7).max()
        np.testing.assert_allclose(batch.weight, plain / largest, rtol=1e-5)
        assert batch.weight.dtype == np.float32
    assert_in_proportion(found, powers)
    np.testing.assert_allclose(buffer.get_weight(valid), (powers[valid] / powers[valid].min()) ** -0.7)
    assert np.shape(buffer.get_weight(int(valid[0]))) == ()


def test_a_batch_that_is_indexed_has_weights_too():
    buffer = made(4, alpha=1.0, beta=1.0)
    buffer.update_weight([0, 1, 2, 3], [1, 2, 4, 8])
    np.testing.assert_allclose(buffer[[1, 3]].weight, [1, 0.25], rtol=1e-6)
    np.testing.assert_allclose(buffer[:].weight, [1, 0.5, 0.25, 0.125], rtol=1e-6)
    np.testing.assert_allclose(buffer.sample(0)[0].weight, [1, 0.5, 0.25, 0.125], rtol=1e-6)
    assert buffer[2].weight == 1 and buffer[[]].weight.shape == (0,)
    raw = made(4, alpha=1.0, beta=1.0, weight_norm=False)
    raw.update_weight([0, 1, 2, 3], [1, 2, 4, 8])
    np.testing.assert_allclose(raw[[1, 3]].weight, [0.5, 0.125], rtol=1e-6)


def test_the_largest_priority_ever_is_that_of_new_rows():  # A16
    buffer = made(2, alpha=1.0)
    buffer.update_weight([0, 1], [3.0, 5.0])
    buffer.update_weight([1], [0.5])
    fill(buffer, 1, start=2)
    np.testing.assert_allclose(buffer.weight[:3], [3, 0.5, 5], rtol=1e-6)


def test_a_weight_does_not_remember_a_small_priority_that_is_gone():  # A21.6
    buffer = made(4, alpha=1.0, beta=1.0, weight_norm=False)
    buffer.update_weight([0], [1e-6])
    buffer.update_weight([0], [1.0])
    np.testing.assert_allclose(buffer.sample(20)[0].weight, 1, rtol=1e-6)


def test_beta_may_be_set_for_several_environments_too():  # A21.5
    buffer = PrioritizedVectorReplayBuffer(8, 2, alpha=1.0, beta=0.0)
    buffer.add(rows([1, 2]))
    buffer.update_weight([0, 4], [1.0, 4.0])
    assert buffer[[0, 4]].weight.tolist() == [1, 1]
    buffer.set_beta(0.5)
    np.testing.assert_allclose(buffer[[0, 4]].weight, [1, 0.5], rtol=1e-6)
    assert buffer.beta == 0.5 and buffer.alpha == 1
    with pytest.raises(SpecError, match="^beta must be a number of at least 0, got -1$"):
        buffer.set_beta(-1)
    assert buffer.beta == 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alpha": 0}, "^alpha must be above 0; a ReplayBuffer draws uniformly$"),
        ({"alpha": -0.5}, "^alpha must be a number of at least 0, got -0.5$"),
        ({"beta": nan}, "^beta must be a number of at least 0, got nan$"),
        ({"beta": "x"}, "^beta must be a number of at least 0, got 'x'$"),
    ],
)
def test_wrong_exponents_are_errors(arguments, message):
    with pytest.raises(SpecError, match=message):
        made(**arguments)


@pytest.mark.parametrize(
    ("index", "weight", "error", "message"),
    [
        ([0, 1], [1.0, nan], SpecError, "^priorities must be finite and at least 0, got nan$"),
        ([0, 1], [1.0, -inf], SpecError, "^priorities must be finite and at least 0, got inf$"),
        ([0, 1], [1.0], SpecError, "^priorities: 1 came for 2 indexes$"),
        ([0, 1], ["a", "b"], SpecError, "^priorities must hold numbers, got <U1$"),
        ([0.5], [1.0], SpecError, "^index must hold integers, got float64$"),
        ([0, 8], [1.0, 2.0], IndexError, r"^index 8 is not in \[0, 8\)$"),
        ([-7], [1.0], IndexError, r"^index -1 is not in \[0, 8\)$"),
        ([0, 6], [1.0, 2.0], SpecError, "^index 6 holds no row$"),
    ],
)
def test_wrong_priorities_change_nothing(index, weight, error, message):
    buffer = made()
    before = buffer.weight.tolist()
    with pytest.raises(error, match=message):
        buffer.update_weight(index, weight)
    assert buffer.weight.tolist() == before


def test_priorities_of_any_library_and_shape():
    buffer = made(4, alpha=1.0)
    weight = torch.tensor([[1.0], [-2.0]], requires_grad=True)
    buffer.update_weight(torch.tensor([[0], [1]]), weight)
    buffer.update_weight([-1], np.float32(7))
    buffer.update_weight([2, 2], [5, 3])  # A16: the last counts
    np.testing.assert_allclose(buffer.weight[:4], [1, 2, 3, 7], rtol=1e-6)


def test_a_priority_for_a_row_that_was_overwritten_is_dropped():  # C1
    buffer = made(8, alpha=1.0)
    _, index = buffer.sample(None)
    fill(buffer, 3, start=8)
    buffer.update_weight(index, np.full(8, 5.0))
    assert buffer.weight[:3].tolist() == [1, 1, 1]
    np.testing.assert_allclose(buffer.weight[3:], 5, rtol=1e-6)
    _, index = buffer.sample(4)
    buffer.reset()
    fill(buffer, 8)
    buffer.update_weight(index, np.full(4, 50.0))
    assert buffer.weight.tolist() == [1] * 8


def test_a_draw_of_nothing_is_no_draw():
    buffer = made(8, alpha=1.0)
    buffer.sample(None)
    for _ in range(40):
        buffer.sample(-1)
    buffer.add(row(8))
    buffer.update_weight([0, 1], [5.0, 5.0])  # the first of them is another row now
    np.testing.assert_allclose(buffer.weight, [1, 5] + [1] * 6, rtol=1e-6)


def test_rows_that_were_added_since_the_last_draw_may_be_given_priorities():  # as of the TD error that came with them
    buffer = made(8, alpha=1.0)
    assert buffer.maxsize == 8
    buffer.sample(64)  # every row, once at least
    buffer.update_weight(buffer.add(row(8))[0], [5.0])
    np.testing.assert_allclose(buffer.weight, [5] + [1] * 7, rtol=1e-6)
    fill(buffer, 2, start=9)
    buffer.update_weight([2, 1], [3.0, 2.0])
    np.testing.assert_allclose(buffer.weight, [5, 2, 3] + [1] * 5, rtol=1e-6)
    buffer.sample(64)
    fill(buffer, 5, start=11)
    buffer.update_weight(np.arange(8), np.arange(8.0))  # all, the overwritten ones too
    np.testing.assert_allclose(buffer.weight, np.arange(8), atol=1e-6)
    _, drawn = buffer.sample(3)
    fill(buffer, 8, start=16)
    buffer.update_weight(drawn, [50.0] * 3)  # of a draw they are what was drawn, though all of them are new
    assert (buffer.weight <= 7.1).all()


def test_rows_that_were_added_to_several_environments_may_be_given_priorities():
    buffer = PrioritizedVectorReplayBuffer(8, 2, alpha=1.0, beta=1.0)
    for t in range(4):
        buffer.add(rows([t, t]))
    buffer.sample(64)
    buffer.update_weight(buffer.add(rows([4, 4]))[0], [5.0, 6.0])
    np.testing.assert_allclose(buffer.weight, [5, 1, 1, 1, 6, 1, 1, 1], rtol=1e-6)


def test_a_reset_clears_priorities():  # A21.3, R29
    buffer = made(8)
    buffer.update_weight(np.arange(8), np.full(8, 9.0))
    buffer.reset()
    assert buffer.weight.tolist() == [0] * 8
    with pytest.raises(StateError, match=r"^Cannot sample from an empty storage\.$"):
        buffer.sample(3)
    fill(buffer, 1)
    assert buffer.weight.tolist() == [1] + [0] * 7
    assert buffer.sample_indices(50).tolist() == [0] * 50


def test_rows_that_were_never_written_are_never_drawn():  # A21.7, R19
    buffer = made(5, size=64)
    buffer.update_weight(np.arange(5), np.zeros(5))
    assert set(buffer.sample_indices(2000).tolist()) == {0, 1, 2, 3, 4}


def test_a_seed_gives_the_same_draws():  # A21.4
    def twice(seed):
        buffer = made(8, random_seed=seed)
        buffer.update_weight(np.arange(8), np.arange(8.0))
        return draws(buffer)

    assert twice(3) == twice(3) != twice(4)


def test_only_rows_with_enough_before_them_are_drawn_in_proportion():
    buffer = PrioritizedReplayBuffer(9, 1.0, 0.4, stack_num=3, sample_avail=True)
    fill(buffer, 9, ends=[3])
    buffer.update_weight(np.arange(9), np.arange(1.0, 10.0))
    shares = np.where(np.isin(np.arange(9), [2, 3, 6, 7, 8]), np.arange(1, 10), 0)
    assert_in_proportion(np.bincount(buffer.sample_indices(4000), minlength=9), shares)
    assert buffer.sample_indices(0).tolist() == [2, 3, 6, 7, 8]
    fill(buffer, 9, ends=range(9))
    with pytest.raises(SpecError, match="^nothing to sample: no row with so many others before it in its episode"):
        buffer.sample(1)


def test_rows_keep_their_priorities_when_others_are_dropped():
    buffer = PrioritizedReplayBuffer(6, 1.0, 0.4)
    for t in range(8):
        buffer.add(row(t, x=nan if t in (3, 6) else 1.0))
    buffer.update_weight([2, 3, 4, 5, 0, 1], [2, 3, 4, 5, 6, 7])
    buffer.dropnull()
    assert buffer[:].obs.tolist() == [2, 4, 5, 7]
    np.testing.assert_allclose(buffer.weight, [2, 4, 5, 7, 0, 0], rtol=1e-6)


def test_rows_that_came_since_the_last_draw_keep_their_priorities_too():
    buffer = fill(PrioritizedReplayBuffer(4, 1.0, 0.4), 1, x=nan)
    buffer.add(row(1, x=1.0))
    buffer.dropnull()
    assert buffer.weight.tolist() == [1, 0, 0, 0] and buffer.sample(3)[0].obs.tolist() == [1, 1, 1]
    for t in range(2, 5):
        buffer.add(row(t, x=1.0))
    buffer.update_weight(np.arange(4), [5, 6, 7, 8])
    buffer.add(row(5, x=1.0))  # where one had 5, and gets the largest there was
    buffer.add(row(6, x=nan))
    buffer.dropnull()
    assert buffer[:].obs.tolist() == [3, 4, 5]
    np.testing.assert_allclose(buffer.weight, [7, 8, 8, 0], rtol=1e-6)


def test_the_bytes_of_the_priorities_count():
    assert made(2).nbytes > fill(PrioritizedReplayBuffer.__mro__[1](8), 2).nbytes + 8 * 8


def test_n_step_sums_have_weights_of_their_first_rows():
    buffer = PrioritizedReplayBuffer(4, 1.0, 1.0, n_step=2, gamma=1.0)
    fill(buffer, 4)
    buffer.update_weight(np.arange(4), [1, 2, 4, 8])
    batch, _ = buffer.sample(0)
    assert batch.rew.tolist() == [1, 3, 5, 3]
    np.testing.assert_allclose(batch.weight, [1, 0.5, 0.25, 0.125], rtol=1e-6)


def test_a_file_brings_its_exponents_with_it(tmp_path):
    saved, loaded = made(alpha=0.5, beta=0.4), PrioritizedReplayBuffer(8, alpha=1.0, beta=1.0)
    saved.update_weight(np.arange(6), np.full(6, 4.0))
    saved.save(tmp_path / "p.npz")
    loaded.load(tmp_path / "p.npz")
    loaded.update_weight([0], [4.0])  # the priority that it has
    assert (loaded.alpha, loaded.beta) == (0.5, 0.4)
    np.testing.assert_allclose(loaded.weight[:6], 2.0, rtol=1e-6)


@pytest.fixture
def hasty_threads():
    """Threads take turns after every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("n_writes", [0, 3000])
@pytest.mark.parametrize("kind", ["single", "vector", "chunks"])
def test_threads_draw_and_set_priorities_beside_a_writer(kind, n_writes, hasty_threads):
    n_rows, n_readers = 64, 3
    if kind == "chunks":
        buffer = ChunkReplayBuffer(n_rows, 0, enable_prioritized=True)
        buffer.setup_entry("t", np.int64)
    else:
        buffer = made(0, n_rows) if kind == "single" else PrioritizedVectorReplayBuffer(n_rows, 2, 0.5, 0.5)

    def write(start, n):
        for t in range(start, start + n):
            if kind == "chunks":
                buffer.append({"t": t})
            else:
                buffer.add(row(t) if kind == "single" else rows([t, t]))

    def read(seed):
        rng = np.random.default_rng(seed)
        for _ in range(500):
            if kind == "chunks":
                batch = buffer.sample(16, 1, "prioritized")
                index, weights = batch.info["indices"], batch.info["weights"]
                assert (batch.data["t"] % n_rows == index).all()
                buffer.update_priorities(index, rng.random(index.shape))
            else:
                batch, index = buffer.sample(16)
                weights, n = batch.weight, n_rows if kind == "single" else n_rows // 2
                assert (batch.obs % n == index % n).all()
                buffer.update_weight(index, rng.random(16))
            assert ((weights > 0) & (weights < np.inf)).all()

    write(0, n_rows)
    with ThreadPoolExecutor(n_readers + 1) as pool:
        tasks = [pool.submit(write, n_rows, n_writes), *(pool.submit(read, seed) for seed in range(n_readers))]
        for task in tasks:
            task.result()
