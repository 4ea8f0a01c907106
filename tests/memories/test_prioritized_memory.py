"""Draws in proportion to priorities, for torch, jax and warp, held against numpy; and that uniform ones are uniform.

"R" is a scenario in which comparable systems went wrong. Seeds are fixed: frequencies are the same each time.
"""

from __future__ import annotations

import numpy as np
import pytest
from frameworks import EVERY_KIND, KINDS, ON_HOST, add, array, flat, host, make

from rlstructs.errors import FileError, SpecError, StateError
from rlstructs.replay.draw.drawn_rows import N_DRAWS

inf, nan = float("inf"), float("nan")


@pytest.fixture(params=EVERY_KIND)
def kind(request):
    return request.param


def prioritized(kind, memory_size, num_envs=1, n_rows=0, ends=False, **settings):
    """A memory in which `t` is the number of the row."""
    tensors = {"t": ("float32", 1)} | ({"terminated": ("bool", 1)} if ends else {})
    memory = make(kind, memory_size, num_envs, tensors, cls="PrioritizedMemory", **settings)
    for t in range(n_rows):
        add_row(memory, kind, t)
    return memory


def add_row(memory, kind, t, **more):
    add(memory, kind, t=np.full((memory.num_envs, 1), float(t)), **more)


def draw(memory, n, **settings):
    """The indexes of a sample, of the first rows where there are sequences, and their weights."""
    memory.sample(["t"], batch_size=n, **settings)
    indexes = np.asarray(memory.get_sampling_indexes()).reshape(n, -1)[:, 0]
    return indexes, host(memory.get_sampling_weights())


def frequencies(memory, n_draws=200, batch_size=100, **settings):
    """How often each index was drawn."""
    n_rows = memory.memory_size * memory.num_envs
    return sum(np.bincount(draw(memory, batch_size, **settings)[0], minlength=n_rows) for _ in range(n_draws))


def assert_in_proportion(found, shares):
    """Pearson's test: drawn counts are what these shares let expect; what has none was never drawn."""
    shares = np.asarray(shares, float)
    expected = shares / shares.sum() * found.sum()
    assert (found[expected == 0] == 0).all()
    some = expected > 0
    freedom = some.sum() - 1
    statistic = ((found - expected)[some] ** 2 / expected[some]).sum()
    assert statistic < freedom + 4 * np.sqrt(2 * freedom), (found.tolist(), expected.tolist())


@pytest.mark.parametrize("n_rows", [1, 4, 7, 12])
@pytest.mark.parametrize("normalize", ["memory", "batch"])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_draws_and_weights_are_those_of_a_plain_reference(kind, n_rows, normalize, alpha):  # R20, R22, R23
    memory = prioritized(kind, 7, 2, n_rows, alpha=alpha, beta=0.7, normalize=normalize)
    n_valid = min(n_rows, 7) * 2
    priorities = np.random.default_rng(n_rows).uniform(0.1, 5, n_valid)
    memory.update_priorities(np.arange(n_valid), priorities)
    powers = priorities**alpha
    shares = np.zeros(14)
    shares[:n_valid] = powers
    found = np.zeros(14, int)
    for _ in range(60):
        indexes, weights = draw(memory, 100)
        found += np.bincount(indexes, minlength=14)
        chances = powers / powers.sum()
        plain = (n_valid * chances) ** -0.7
        largest = plain[indexes].max() if normalize == "batch" else plain.max()
        np.testing.assert_allclose(weights, plain[indexes] / largest, rtol=1e-5)
        assert weights.dtype == np.float32 and weights.shape == (100,)
    assert_in_proportion(found, shares)


@pytest.mark.parametrize("memory_size", [1, 2, 3, 5, 6, 7, 8, 1000])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_with_equal_priorities_a_batch_of_all_holds_each_row_once(kind, memory_size, num_envs):  # R18, R20
    memory = prioritized(kind, memory_size, num_envs)
    add_row(memory, kind, 0)
    for n_rows in (1, memory_size, memory_size + 2):
        while len(memory) < min(n_rows, memory_size) * num_envs:
            add_row(memory, kind, 0)
        indexes, weights = draw(memory, len(memory))
        assert indexes.tolist() == list(range(len(memory)))
        assert weights.tolist() == [1] * len(memory)
        if n_rows == memory_size:
            add_row(memory, kind, 0)


@pytest.mark.parametrize("zeros", [[0], [0, 1, 2], [5], [3, 5], [0, 2, 4], [0, 1, 2, 3, 4]], ids=str)
def test_rows_of_priority_zero_are_never_drawn(kind, zeros):  # R19
    memory = prioritized(kind, 6, n_rows=6)
    memory.update_priorities(zeros, np.zeros(len(zeros)))
    indexes, weights = draw(memory, 1000)
    assert set(indexes.tolist()) == set(range(6)) - set(zeros)
    assert weights.tolist() == [1] * 1000


def test_rows_that_were_never_written_are_never_drawn(kind):  # R19
    memory = prioritized(kind, 512, n_rows=100)
    memory.update_priorities(np.arange(100), np.full(100, 0.1))
    assert max(draw(memory, 5000)[0]) == 99


def test_nothing_is_drawn_if_every_priority_is_zero(kind):
    memory = prioritized(kind, 4, n_rows=3)
    memory.update_priorities([0, 1, 2], [0.0, 0.0, 0.0])
    with pytest.raises(SpecError, match="^nothing to sample: no row has a priority above zero$"):
        draw(memory, 2)
    add_row(memory, kind, 3)
    assert set(draw(memory, 20)[0].tolist()) == {3}


def test_an_empty_memory_gives_no_sample(kind):
    memory = prioritized(kind, 4)
    for _ in range(2):
        with pytest.raises(SpecError, match="^nothing to sample"):
            draw(memory, 2)
        add_row(memory, kind, 0)
        assert set(draw(memory, 5)[0].tolist()) == {0}
        memory.reset()


def test_a_thousand_updates_leave_no_residue(kind):  # R21
    memory = prioritized(kind, 100, n_rows=100, alpha=1.0)
    rng = np.random.default_rng(0)
    for _ in range(1000):
        memory.update_priorities(rng.integers(100, size=50), rng.uniform(0, 1e6, 50))
    memory.update_priorities(np.arange(100), np.where(np.arange(100) == 37, 1e-9, 0))
    assert set(draw(memory, 500)[0].tolist()) == {37}


def test_a_new_row_has_the_largest_priority_ever_given(kind):  # R21
    memory = prioritized(kind, 4, n_rows=2, alpha=0.5, beta=1.0)
    memory.update_priorities([0, 1], [3.0, 5.0])
    add_row(memory, kind, 2)
    indexes, weights = draw(memory, 200)
    np.testing.assert_allclose(weights, np.sqrt(np.array([3, 3, 3]) / [3, 5, 5])[indexes], rtol=1e-6)
    memory.update_priorities([1, 2], [2.5, 2.5])
    for t in range(3, 6):
        add_row(memory, kind, t)  # two of them overwrite
    indexes, weights = draw(memory, 200)
    np.testing.assert_allclose(weights, np.sqrt(2.5 / np.array([5, 5, 2.5, 5]))[indexes], rtol=1e-6)


def test_small_priorities_leave_new_rows_at_one(kind):
    memory = prioritized(kind, 3, n_rows=2, alpha=1.0, beta=1.0)
    memory.update_priorities([0, 1], [0.5, 0.25])
    add_row(memory, kind, 2)
    indexes, weights = draw(memory, 200)
    np.testing.assert_allclose(weights, np.array([0.5, 1, 0.25])[indexes], rtol=1e-6)


def test_with_both_exponents_one_the_weight_is_the_inverse_priority(kind):
    memory = prioritized(kind, 6, n_rows=6, alpha=1.0, beta=1.0)
    memory.update_priorities(np.arange(6), np.arange(1.0, 7.0))
    indexes, weights = draw(memory, 300)
    np.testing.assert_allclose(weights, 1 / (indexes + 1), rtol=1e-6)


@pytest.mark.parametrize("exponent", ["alpha", "beta"])
def test_an_exponent_of_zero_gives_weights_of_one(kind, exponent):
    memory = prioritized(kind, 6, n_rows=6, **{exponent: 0})
    memory.update_priorities(np.arange(6), np.arange(1.0, 7.0))
    indexes, weights = draw(memory, 600)
    assert weights.tolist() == [1] * 600
    counts = np.bincount(indexes)
    assert bool(counts.max() - counts.min() <= 2) is (exponent == "alpha")


@pytest.mark.parametrize("of", ["float32", "float64", "float16", "bfloat16", "list", "column"])
def test_the_last_of_equal_indexes_counts(kind, of):  # R24
    memory = prioritized(kind, 4, n_rows=4, alpha=1.0, beta=1.0)
    indexes, priorities = [2, 1, 2], [5.0, 3.0, 7.0]
    if of == "column":
        indexes, priorities = array(kind, [[i] for i in indexes], "int32"), array(kind, [[p] for p in priorities])
    elif of != "list":
        priorities = array(kind, priorities, of)
    memory.update_priorities(indexes, priorities)
    drawn, weights = draw(memory, 240)
    np.testing.assert_allclose(weights, 1 / np.array([1, 3, 7, 1])[drawn], rtol=1e-6)
    assert_in_proportion(np.bincount(drawn, minlength=4), [1, 3, 7, 1])


@pytest.mark.parametrize(
    ("indexes", "priorities", "error", "message"),
    [
        ([0, 1], [1.0, nan], SpecError, "^priorities must be finite and at least 0, got nan$"),
        ([0, 1], [1.0, inf], SpecError, "^priorities must be finite and at least 0, got inf$"),
        ([0, 1], [1.0, -0.5], SpecError, "^priorities must be finite and at least 0, got -0.5$"),
        ([0, 1], [1.0], SpecError, "^priorities: 1 came for 2 indexes$"),
        ([0], [1.0, 2.0], SpecError, "^priorities: 2 came for 1 indexes$"),
        ([0, 4], [1.0, 1.0], IndexError, r"^index 4 is not in \[0, 4\)$"),
        ([-1, 0], [1.0, 1.0], IndexError, r"^index -1 is not in \[0, 4\)$"),
        ([0.0], [1.0], SpecError, "^index must hold integers, got float64$"),
        ([0, 3], [9.0, 9.0], SpecError, "^index 3 holds no row$"),
        ([0], ["a"], SpecError, "^priorities must hold numbers, got <U1$"),
        ([0], [1 + 1j], SpecError, "^priorities must hold numbers, got complex128$"),
        ([0], [1e300], SpecError, "priorit"),  # 1e300 ** 2 is no number
    ],
)
def test_priorities_that_make_no_sense_change_nothing(kind, indexes, priorities, error, message):
    memory, twin = (prioritized(kind, 4, n_rows=3, alpha=2.0) for _ in range(2))
    for each in (memory, twin):
        each.update_priorities([1], [3.0])
    with pytest.raises(error, match=message):
        memory.update_priorities(indexes, priorities)
    for each in (memory, twin):
        add_row(each, kind, 3)
    for found, expected in zip(draw(memory, 50), draw(twin, 50), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_updates_of_rows_that_were_overwritten_since_are_dropped(kind):
    memory = prioritized(kind, 4, n_rows=4, alpha=1.0, beta=1.0)
    memory.sample(["t"], batch_size=4)  # each row once
    indexes = memory.get_sampling_indexes()
    for t in (4, 5):  # in place of rows 0 and 1
        add_row(memory, kind, t)
    memory.update_priorities(indexes, np.full(4, 100.0))
    drawn, weights = draw(memory, 400)
    np.testing.assert_allclose(weights, np.array([1, 1, 0.01, 0.01])[drawn], rtol=1e-6)
    memory.update_priorities(memory.get_sampling_indexes(), np.full(400, 2.0))
    assert draw(memory, 40)[1].tolist() == [1] * 40


@pytest.mark.parametrize("ending", ["npz", "pt", "csv"])
def test_updates_of_overwritten_rows_are_dropped_after_a_load_too(kind, ending, tmp_path):
    memory = prioritized(kind, 4, n_rows=4, alpha=1.0, beta=1.0)
    memory.sample(["t"], batch_size=2)
    indexes = memory.get_sampling_indexes()
    memory.sample(["t"], batch_size=4)  # the same rows again: it is not these that the priorities are for
    restored = prioritized(kind, 4, n_rows=0, alpha=1.0, beta=1.0)
    restored.load(memory.save(tmp_path, format=ending))
    for t in range(4, 8):
        add_row(restored, kind, t)
    restored.sample(["t"], batch_size=8)  # and those that are there now, too
    restored.update_priorities(indexes, np.full(2, 100.0))
    assert draw(restored, 40)[1].tolist() == [1] * 40


def test_updates_of_rows_drawn_before_a_reset_are_dropped(kind):
    memory = prioritized(kind, 4, n_rows=4, alpha=1.0, beta=1.0)
    memory.sample(["t"], batch_size=4)
    indexes = memory.get_sampling_indexes()
    memory.reset()
    for t in range(2):
        add_row(memory, kind, t)
    memory.update_priorities(indexes, np.full(4, 100.0))
    assert draw(memory, 40)[1].tolist() == [1] * 40


@pytest.mark.parametrize("n_rows", [2, 3, 5])
def test_after_a_reset_it_is_as_new(kind, n_rows):  # R29
    memory = prioritized(kind, 5, n_rows=7, alpha=1.0, beta=1.0)
    memory.update_priorities(np.arange(5), [1.0, 9.0, 0.0, 4.0, 2.0])
    memory.reset()
    for t in range(n_rows):
        add_row(memory, kind, t)
    memory.update_priorities([0], [2.0])
    add_row(memory, kind, 9)
    indexes, weights = draw(memory, 200)
    assert weights.tolist() == np.where(np.isin(indexes, [0, n_rows % 5]), 0.5, 1).tolist()


@pytest.mark.parametrize("of", [float, np.float64])
def test_beta_may_follow_a_schedule(kind, of):
    seen = []

    def beta(n_samples):
        seen.append(n_samples)
        return of(min(1.0, 0.5 * n_samples))

    memory = prioritized(kind, 2, n_rows=2, alpha=1.0, beta=beta)
    memory.update_priorities([0, 1], [1.0, 4.0])
    for exponent in (0, 0.5, 1, 1):
        indexes, weights = draw(memory, 20)
        np.testing.assert_allclose(weights, np.where(indexes == 0, 1, 0.25**exponent), rtol=1e-6)
    assert seen == [0, 1, 2, 3]


def test_a_schedule_that_gives_nonsense_draws_nothing(kind):
    memory, twin = (prioritized(kind, 2, n_rows=2, beta=beta) for beta in (lambda n: -1.0 if n == 0 else 1.0, 1.0))
    with pytest.raises(SpecError, match="^beta must be a number of at least 0, got -1.0$"):
        draw(memory, 2)
    assert memory.get_sampling_indexes() is None
    memory.beta = 1.0
    assert draw(memory, 20)[0].tolist() == draw(twin, 20)[0].tolist()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": -0.1}, "^alpha must be a number of at least 0, got -0.1$"),
        ({"alpha": nan}, "^alpha must be a number of at least 0, got nan$"),
        ({"alpha": "1"}, "^alpha must be a number of at least 0, got '1'$"),
        ({"beta": inf}, "^beta must be a number of at least 0, got inf$"),
        ({"beta": None}, "^beta must be a number of at least 0, got None$"),
        ({"normalize": "all"}, "^normalize must be 'memory' or 'batch', got 'all'$"),
        ({"replacement": False}, "replacement"),
    ],
)
def test_settings_that_make_no_sense_are_refused(kind, settings, message):
    with pytest.raises((SpecError, TypeError), match=message):
        KINDS[kind].PrioritizedMemory(memory_size=2, **settings)


def test_weights_belong_to_the_last_sample(kind):
    memory = prioritized(kind, 4, n_rows=4, alpha=1.0, beta=1.0)
    with pytest.raises(StateError, match="^call sample first$"):
        memory.get_sampling_weights()
    memory.update_priorities([0], [4.0])
    indexes, weights = draw(memory, 30)
    memory.update_priorities(np.arange(4), np.arange(1.0, 5.0))
    add_row(memory, kind, 4)
    memory.sample_all(["t"])
    assert host(memory.get_sampling_weights()).tolist() == weights.tolist()
    assert weights.tolist() == np.where(indexes == 0, 0.25, 1).tolist()


def test_the_same_seed_gives_the_same_draws(kind):
    memory, twin = (prioritized(kind, 50, n_rows=70) for _ in range(2))
    for _ in range(3):
        (indexes, _), (others, _) = draw(memory, 20), draw(twin, 20)
        assert indexes.tolist() == others.tolist()
        for each in (memory, twin):
            each.update_priorities(each.get_sampling_indexes(), np.arange(20.0))


@pytest.mark.parametrize("n_rows", [6, 8, 11])
@pytest.mark.parametrize("length", [2, 4])
def test_the_first_rows_of_sequences_are_drawn_in_proportion(kind, n_rows, length):
    memory = prioritized(kind, 8, n_rows=n_rows, alpha=1.0, beta=1.0)
    held, n_valid = np.arange(max(0, n_rows - 8), n_rows), min(n_rows, 8)
    priorities = np.random.default_rng(n_rows).uniform(0.2, 4, n_valid)
    memory.update_priorities(held % 8, priorities)
    shares = np.zeros(8)
    shares[held[: n_valid - length + 1] % 8] = priorities[: n_valid - length + 1]
    indexes, weights = draw(memory, 100, sequence_length=length)
    by_row = dict(zip((held % 8).tolist(), priorities, strict=True))
    np.testing.assert_allclose(weights, [priorities.min() / by_row[i] for i in indexes.tolist()], rtol=1e-5)
    [[t]] = memory.sample(["t"], batch_size=50, sequence_length=length)
    assert (np.diff(host(t).reshape(50, length), axis=1) == 1).all()
    # Batches of ten: most are completed by a second draw, which must not favour any row.
    assert_in_proportion(frequencies(memory, 500, 10, sequence_length=length), shares)


def test_sequences_within_episodes_are_drawn_in_proportion(kind):
    memory = prioritized(kind, 12, ends=True, alpha=1.0, beta=1.0)
    ends = [2, 3, 7, 11]
    for t in range(12):
        add_row(memory, kind, t, terminated=[[t in ends]])
    priorities = np.random.default_rng(0).uniform(0.5, 3, 12)
    memory.update_priorities(np.arange(12), priorities)
    starts = [0, 1, 4, 5, 6, 8, 9, 10]
    shares = np.zeros(12)
    shares[starts] = priorities[starts]
    found = frequencies(memory, 500, 10, sequence_length=2, episode_ends="never")
    assert_in_proportion(found, shares)


def test_priorities_only_where_no_sequence_begins_give_an_error(kind):  # R25
    memory = prioritized(kind, 6, n_rows=8)
    newest = np.array([6, 7]) % 6
    memory.update_priorities(np.arange(6), np.isin(np.arange(6), newest).astype(float))
    with pytest.raises(SpecError, match="^nothing to sample"):
        draw(memory, 3, sequence_length=3)
    assert set(draw(memory, 20)[0].tolist()) == set(newest.tolist())


def test_one_rare_sequence_is_found_whatever_its_priority(kind):  # R25
    memory = prioritized(kind, 1000, n_rows=0, ends=True)
    ends = np.ones((1000, 1), bool)
    ends[500] = False
    add(memory, kind, t=np.arange(1000.0)[:, None], terminated=ends)
    memory.update_priorities([500], [1e-6])
    assert set(draw(memory, 30, sequence_length=2, episode_ends="never")[0].tolist()) == {500}


def test_all_rows_of_sequences_can_be_given_priorities(kind):
    memory = prioritized(kind, 6, n_rows=6, alpha=1.0, beta=1.0)
    memory.sample(["t"], batch_size=300, sequence_length=3)
    indexes = np.asarray(memory.get_sampling_indexes())
    assert indexes.shape == (900,) and host(memory.get_sampling_weights()).shape == (300,)
    memory.update_priorities(indexes, indexes + 1.0)
    drawn, weights = draw(memory, 60)
    np.testing.assert_allclose(weights, 1 / (drawn + 1), rtol=1e-6)


def test_n_step_samples_have_weights_and_take_priorities(kind):
    memory = prioritized(kind, 6, n_rows=0, ends=True, alpha=1.0, beta=1.0)
    for t in range(8):
        add_row(memory, kind, t, terminated=[[t == 4]])
    indexes, weights = draw(memory, 60, n_step=3)
    assert weights.tolist() == [1] * 60 and set(indexes.tolist()) == set(range(6))
    memory.update_priorities(memory.get_sampling_indexes(), np.asarray(indexes) + 1.0)
    drawn, weights = draw(memory, 60, n_step=3)
    np.testing.assert_allclose(weights, 1 / (drawn + 1), rtol=1e-6)


@pytest.mark.parametrize("kind", ON_HOST)
def test_shared_memory_keeps_priorities(kind):
    memory, twin = (prioritized(kind, 5, 2, 7) for _ in range(2))
    for each in (memory, twin):
        each.update_priorities(np.arange(10), np.arange(10.0))
    memory.share_memory()
    for _ in range(2):
        assert draw(memory, 40)[0].tolist() == draw(twin, 40)[0].tolist()
        for each in (memory, twin):
            add_row(each, kind, 9)


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_leave_what_a_plain_reference_has(kind, seed):
    """Priorities by environment and step in a dictionary; a weight tells the priority of a row. What is
    drawn is remembered for so many draws; of one whole draw, all of it was drawn then."""
    rng, size, lanes = np.random.default_rng(seed), 5, 2
    memory = prioritized(kind, size, lanes, alpha=1.0, beta=1.0)
    heads, table, drawn, n_draws, largest, last = [0, 0], {}, {}, 0, 1.0, None
    for _ in range(120):
        operation = rng.choice(["row", "row", "part", "update", "own", "sample"])
        if operation in ("row", "part"):
            which = range(lanes) if operation == "row" else [int(np.argmin(heads))]
            add(memory, kind, t=np.zeros((len(which), 1)))
            for lane in which:
                table.pop((lane, heads[lane] - size), None)
                table[lane, heads[lane]] = largest
                heads[lane] += 1
        elif table and operation == "sample":
            last, n_draws = draw(memory, 30)[0], n_draws + 1
            for index in last.tolist():
                drawn[index] = place(index, heads, size), n_draws
            own = n_draws, {index: (drawn[index][0], n_draws) for index in last.tolist()}
        elif table and (operation == "update" or last is not None):
            valid = [step % size * lanes + lane for lane, step in table]
            chosen = last if operation == "own" else rng.choice(valid, 4)
            values = rng.uniform(0.1, 3, len(chosen))
            memory.update_priorities(chosen, values)
            known = own[1] if chosen is last and n_draws - own[0] < N_DRAWS else drawn
            kept = [(place(i, heads, size), v) for i, v in zip(chosen.tolist(), values, strict=True)
                    if meant(known, i, n_draws) in (None, place(i, heads, size))]  # fmt: skip
            table |= dict(kept)
            largest = max([largest, *(value for _, value in kept)])
        if table:
            (indexes, weights), n_draws = draw(memory, 60), n_draws + 1
            for index in indexes.tolist():
                drawn[index] = place(index, heads, size), n_draws
            expected = [min(table.values()) / table[place(index, heads, size)] for index in indexes.tolist()]
            np.testing.assert_allclose(weights, expected, rtol=1e-5)
    assert min(heads) > 2 * size


def meant(drawn, index, n_draws):
    """Where an index lay when it was last drawn; None if that is too long ago to be remembered."""
    found, at = drawn.get(index, (None, 0))
    return found if n_draws - at < N_DRAWS else None


def place(index, heads, size):
    row, lane = divmod(index, len(heads))
    return lane, heads[lane] - 1 - (heads[lane] - 1 - row) % size


# Uniform draws


@pytest.mark.parametrize("n_rows", [3, 13])
@pytest.mark.parametrize("n_more", [0, 2], ids=["whole row", "two more"])
@pytest.mark.parametrize("replacement", [True, False], ids=["with", "without"])
def test_uniform_draws_are_uniform_over_a_wrapped_ring(kind, n_rows, n_more, replacement):
    memory = make(kind, 8, 3, ["t"], replacement=replacement)
    for t in range(n_rows):
        add_row(memory, kind, t)
    if n_more:
        add(memory, kind, t=np.full((n_more, 1), float(n_rows)))
    found = sum(drawn_uniformly(memory, 1, 6) for _ in range(600))
    shares = np.zeros(24)
    if n_rows >= 8:
        shares[:] = 1
    else:
        shares[: 3 * n_rows + n_more] = 1
    assert_in_proportion(found, shares)


@pytest.mark.parametrize("n_more", [0, 1])
def test_uniform_sequences_are_uniform_over_a_wrapped_ring(kind, n_more):
    memory = make(kind, 8, 2, ["t"])
    for t in range(13):
        add_row(memory, kind, t)
    if n_more:
        add(memory, kind, t=[[13.0]])
    found = sum(drawn_uniformly(memory, 3, 50) for _ in range(200)).reshape(8, 2)
    shares = np.ones((8, 2))
    for lane, head in enumerate([13 + n_more, 13]):
        shares[[(head - 1) % 8, (head - 2) % 8], lane] = 0
    assert_in_proportion(found.ravel(), shares.ravel())


def drawn_uniformly(memory, length, n):
    [[t]] = memory.sample(["t"], batch_size=n, sequence_length=length)
    assert len(flat(t)) == n * length
    indexes = np.asarray(memory.get_sampling_indexes()).reshape(n, length)[:, 0]
    return np.bincount(indexes, minlength=memory.memory_size * memory.num_envs)


def test_priorities_to_the_power_of_another_alpha_are_refused(kind, tmp_path):
    saved, loaded = (prioritized(kind, 4, n_rows=n, alpha=alpha) for n, alpha in ((4, 0.5), (2, 1.0)))
    with pytest.raises(FileError, match=r"its priorities are to the power of 0\.5, here alpha is 1\.0"):
        loaded.load(saved.save(tmp_path))
    assert len(loaded) == 2
    with pytest.raises(AttributeError):
        loaded.alpha = 0.5
