"""The sum tree against numpy, and priorities that follow what is written."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstructs.errors import SpecError
from rlstructs.replay.draw.priorities import Priorities
from rlstructs.replay.draw.sum_tree import SumTree
from rlstructs.replay.rows.spec import Spec
from rlstructs.replay.rows.store import Storage

SIZES = [1, 2, 3, 5, 6, 7, 1000, 1_000_000]


def update(prioritised, storage, rows, priorities):
    """Priorities of some rows, as a memory gives them."""
    prioritised.update(storage.view(), rows, priorities)


@pytest.fixture(params=SIZES)
def n_leaves(request):
    return request.param


def whole_numbers(n, seed=0):
    """Values whose sums are exact, a third of them zero, at least one not."""
    rng = np.random.default_rng(seed)
    values = rng.integers(1, 1000, n) * (rng.random(n) > 1 / 3)
    values[rng.integers(n)] = 7
    return values.astype(np.float64)


def filled(values):
    tree = SumTree(len(values))
    tree.fill(values)
    return tree


class Fractions:
    """A generator that returns these numbers."""

    def __init__(self, numbers):
        self.numbers = numbers

    def random(self, out):
        out[:] = self.numbers


def drawn(tree, fractions):
    """Leaves at these fractions of equal shares of the total."""
    return tree.draw(len(fractions), Fractions(fractions))


def searched(values, fractions):
    """The leaves that numpy finds."""
    masses = (np.arange(len(fractions)) + fractions) * (values.sum() / max(len(fractions), 1))
    return np.searchsorted(np.cumsum(values), masses, side="right")


def test_draw_finds_the_leaf_in_which_a_mass_lies(n_leaves):
    values = whole_numbers(n_leaves)
    tree, fractions = filled(values), np.random.default_rng(1).random(5000)
    assert (tree.total, tree.n_leaves) == (values.sum(), n_leaves)
    leaves = drawn(tree, fractions)
    assert leaves.dtype == np.int64
    np.testing.assert_array_equal(leaves, searched(values, fractions))


@pytest.mark.parametrize("fraction", [0.0, 1 - 2.0**-20])
def test_a_mass_on_a_boundary_lies_in_the_next_leaf_that_is_not_zero(n_leaves, fraction):
    values = np.minimum(whole_numbers(n_leaves), 3.0)
    fractions = np.full(int(values.sum()), fraction)  # shares of 1: on every whole number, or a little below it
    np.testing.assert_array_equal(drawn(filled(values), fractions), searched(values, fractions))


def test_fill_and_updates_make_the_same_tree(n_leaves):
    values = whole_numbers(n_leaves)
    tree, rng = SumTree(n_leaves), np.random.default_rng(2)
    tree.update(rng.integers(n_leaves, size=300), rng.random(300))
    order = rng.permutation(n_leaves)
    for part in np.array_split(order, min(n_leaves, 7)):
        tree.update(part, values[part])
    np.testing.assert_array_equal(tree.values, values)
    np.testing.assert_array_equal(tree.sums, filled(values).sums)
    np.testing.assert_array_equal(tree.minima, filled(values).minima)


ZEROS = {
    "first": [0, 0, 3, 1], "last": [3, 1, 0, 0, 0], "every other": [0, 1, 0, 1, 0, 1, 0], "all but one": [0] * 8 + [5],
    "all but the first": [5] + [0] * 8, "a whole half": [0, 0, 0, 0, 1, 2], "next to the padding": [1, 2, 3, 4, 0],
}  # fmt: skip


@pytest.mark.parametrize("scale", [1.0, 0.1, 1e-300, 1e300], ids=str)
@pytest.mark.parametrize("values", ZEROS.values(), ids=ZEROS)
def test_a_leaf_of_value_zero_is_never_drawn(values, scale):
    values = np.array(values) * scale
    tree = filled(values)
    for fraction in [0.0, 1.0, np.nextafter(1, 0), *np.cumsum(values) / tree.total]:
        for n in (1, 2, 3, 5, 9, 64):
            assert (values[drawn(tree, np.full(n, fraction))] > 0).all()


def test_no_zero_is_drawn_where_sums_are_rounded():
    rng = np.random.default_rng(3)
    values = rng.random(999) ** 8 * (rng.random(999) > 0.5) * 10.0 ** rng.integers(-9, 9, 999)
    tree = filled(values)
    assert (values[tree.draw(20_000, rng)] > 0).all()
    for fraction in np.cumsum(values) / tree.total:
        assert (values[drawn(tree, [fraction])] > 0).all()


def test_a_tree_of_zeros_draws_leaves_that_are_there(n_leaves):
    tree = SumTree(n_leaves)
    assert (tree.total, tree.minimum) == (0.0, np.inf)
    leaves = drawn(tree, np.zeros(5))
    assert ((leaves >= 0) & (leaves < n_leaves)).all()


def test_draws_are_in_proportion():
    values = np.array([1.0, 0.0, 2.0, 3.0, 4.0])
    tree, rng = filled(values), np.random.default_rng(0)
    counts = np.bincount([tree.draw(1, rng)[0] for _ in range(20_000)], minlength=5)
    expected = values * 2000
    assert counts[1] == 0
    assert ((counts - expected)[expected > 0] ** 2 / expected[expected > 0]).sum() < 16.3  # 3 degrees, p = 0.001


def test_a_million_updates_leave_the_root_the_sum_of_the_leaves():
    tree, rng = SumTree(1000), np.random.default_rng(4)
    for _ in range(1000):
        tree.update(rng.integers(1000, size=1000), rng.random(1000) * 10.0 ** rng.integers(-6, 6))
    np.testing.assert_allclose(tree.total, tree.values.sum(), rtol=1000 * np.finfo(float).eps)
    np.testing.assert_array_equal(tree.sums, filled(tree.values).sums)
    assert tree.minimum == tree.values.min()
    tree.update(np.arange(1000), np.zeros(1000))
    assert not tree.sums.any()  # no residue


def test_of_equal_leaves_the_last_counts(n_leaves):
    tree = SumTree(n_leaves)
    last = n_leaves - 1
    tree.update(np.array([last, 0, last, last]), np.array([5.0, 1.0, 0.0, 3.0]))
    assert tree.total == (3.0 if n_leaves == 1 else 4.0)
    assert tree.minimum == (3.0 if n_leaves == 1 else 1.0)
    assert tree.values[last] == 3.0


def test_the_minimum_is_the_smallest_value_above_zero():
    tree, minima = SumTree(5), []
    for leaf, value in [(2, 4.0), (0, 3.0), (4, 9.0), (0, 0.0), (2, 10.0), (4, 0.0), (2, 0.0)]:
        tree.update(np.array([leaf]), np.array([value]))
        minima.append(tree.minimum)
    assert minima == [4.0, 3.0, 3.0, 4.0, 9.0, 10.0, np.inf]
    tree.fill(np.array([0.0, 2.0, 0.0, 5.0, 0.0]))
    assert tree.minimum == 2.0


@pytest.mark.parametrize("n", [0, 1, 256, 257, 1000])
def test_batches_may_be_of_any_size_and_grow(n):
    values = whole_numbers(700)
    tree, fractions = SumTree(700), np.random.default_rng(5).random(n)
    tree.update(np.arange(3), values[:3])
    tree.update(np.resize(np.arange(700), n), values[np.resize(np.arange(700), n)])
    written = np.zeros(700)
    written[: max(3, min(n, 700))] = values[: max(3, min(n, 700))]
    np.testing.assert_array_equal(tree.values, written)
    tree.fill(values)
    drawn(tree, np.zeros(2))
    np.testing.assert_array_equal(drawn(tree, fractions), searched(values, fractions))


def test_what_was_drawn_is_private():
    tree = filled(np.ones(4))
    first = drawn(tree, [0.25, 0.25])
    drawn(tree, [0.75, 0.75])
    assert first.tolist() == [0, 2]


def test_update_leaves_its_arguments_alone():
    leaves, values = np.array([3, 2, 3]), np.array([1.0, 2.0, 3.0])
    SumTree(4).update(leaves, values)
    assert (leaves.tolist(), values.tolist()) == ([3, 2, 3], [1, 2, 3])


def pickled(tree):
    return pickle.loads(pickle.dumps(tree))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled], ids=["copy", "pickle"])
def test_a_copy_draws_the_same_and_stands_alone(n_leaves, duplicate):
    values = whole_numbers(n_leaves)
    tree = filled(values)
    fractions = np.random.default_rng(6).random(50)
    leaves = drawn(tree, fractions).tolist()
    twin = duplicate(tree)
    assert drawn(twin, fractions).tolist() == leaves
    twin.update(np.arange(n_leaves), np.zeros(n_leaves))
    twin.update(np.array([n_leaves - 1]), np.array([2.0]))
    assert set(drawn(twin, np.zeros(3)).tolist()) == {n_leaves - 1}
    assert (drawn(tree, fractions).tolist(), tree.total) == (leaves, values.sum())


@pytest.mark.parametrize("n", [0, -1])
def test_a_tree_needs_a_leaf(n):
    with pytest.raises(SpecError, match=f"^a sum tree needs at least 1 leaf, got {n}$"):
        SumTree(n)


def test_nbytes_is_known_before_they_are_taken(n_leaves):
    tree = SumTree(n_leaves)
    assert SumTree.nbytes_of(n_leaves) == tree.sums.nbytes + tree.minima.nbytes
    assert SumTree.nbytes_of(n_leaves) <= 32 * n_leaves + 1024


# Priorities of a store's rows


def make_storage(n_lanes=2, capacity=4, order="lane"):
    storage = Storage(n_lanes, capacity, order=order)
    storage.columns.add("x", Spec(np.dtype(np.float32)))
    return storage


def write(storage, lengths):
    values = np.zeros((len(lengths), max(lengths)), np.float32)
    storage.write({"x": values}, lengths=np.array(lengths))


def leaves(storage, prioritised):
    """The tree's values by lane and slot, once it has followed the store."""
    prioritised.follow(storage.view())
    n_lanes, capacity = storage.columns.n_lanes, storage.columns.capacity
    rows = storage.columns.rows(np.arange(n_lanes)[:, None], np.arange(capacity))
    return prioritised.tree.values[rows].tolist()


@pytest.fixture(params=["lane", "slot"])
def order(request):
    return request.param


def test_new_rows_get_the_largest_priority_ever_given(order):
    storage, prioritised = make_storage(order=order), Priorities(8, 2, 0.5)
    write(storage, [2, 3])
    assert leaves(storage, prioritised) == [[1, 1, 0, 0], [1, 1, 1, 0]]
    rows = storage.columns.rows(np.array([0, 1]), np.array([0, 2]))
    update(prioritised, storage, rows, np.array([16.0, 0.25]))
    assert leaves(storage, prioritised) == [[4, 1, 0, 0], [1, 1, 0.5, 0]]
    update(prioritised, storage, rows[:1], np.array([0.0]))
    write(storage, [1, 4])
    assert leaves(storage, prioritised) == [[0, 1, 4, 0], [4, 4, 4, 4]]


@pytest.mark.parametrize("length", [1, 2, 4])
def test_every_new_row_gets_a_priority_whatever_windows_are_drawn(order, length):
    storage, prioritised = make_storage(order=order), Priorities(8, 2, 1.0)
    for lengths in ([3, 3], [1, 1], [0, 2]):
        write(storage, lengths)
        prioritised.follow(storage.view(length))
    assert leaves(storage, prioritised) == [[1] * 4] * 2


@pytest.mark.parametrize("n_rows", [(1, 3), (4, 4), (4, 3), (8, 4), (5, 6)], ids=str)
@pytest.mark.parametrize("followed", [True, False])
def test_cleared_rows_have_no_priority(order, n_rows, followed):
    storage, prioritised = make_storage(order=order), Priorities(8, 2, 1.0)
    write(storage, list(n_rows))
    prioritised.follow(storage.view())
    storage.clear()
    if followed:
        assert leaves(storage, prioritised) == [[0] * 4] * 2
        with pytest.raises(SpecError, match="^nothing to sample: no row has a priority above zero$"):
            prioritised.draw(1, np.random.default_rng(0))
    write(storage, [1, 2])
    assert leaves(storage, prioritised) == [[1, 0, 0, 0], [1, 1, 0, 0]]


def test_priorities_of_a_row_that_is_being_overwritten_are_dropped(order):
    storage, prioritised = make_storage(order=order), Priorities(8, 2, 1.0)
    write(storage, [4, 2])
    storage.ring.reserve(slice(0, 1), 1)
    rows = storage.columns.rows(np.array([0, 0, 1]), np.array([0, 1, 3]))
    update(prioritised, storage, rows[:2], np.array([5.0, 7.0]))
    assert leaves(storage, prioritised) == [[0, 7, 1, 1], [1, 1, 0, 0]]
    with pytest.raises(SpecError, match=f"^index {rows[2]} holds no row$"):
        update(prioritised, storage, rows, np.ones(3))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_priorities_follow_the_rows_over_wraps_and_clears(data):
    """Against a list of each lane's rows; the tree looks only now and then."""
    n_lanes, capacity = data.draw(st.integers(1, 3), "lanes"), data.draw(st.integers(1, 4), "capacity")
    storage = make_storage(n_lanes, capacity, data.draw(st.sampled_from(["lane", "slot"]), "order"))
    prioritised = Priorities(n_lanes * capacity, n_lanes, alpha=2.0)
    rows, largest = {}, 1.0  # (lane, slot) -> priority, None for one that the tree has not seen
    for _ in range(data.draw(st.integers(1, 10), "operations")):
        operation = data.draw(st.sampled_from(["write", "write", "write", "clear", "follow", "update"]), "operation")
        if operation == "write":
            lengths = data.draw(st.lists(st.integers(0, 2 * capacity), min_size=n_lanes, max_size=n_lanes))
            for lane, n in enumerate(lengths):
                rows |= {(lane, (storage.ring.head[lane] + t) % capacity): None for t in range(n)}
            write(storage, lengths)
        elif operation == "clear":
            storage.clear()
            rows = {}
        elif operation == "follow" or not rows:
            prioritised.follow(storage.view())
            rows = {at: largest if priority is None else priority for at, priority in rows.items()}
        else:
            rows = {at: largest if priority is None else priority for at, priority in rows.items()}
            chosen = data.draw(st.lists(st.tuples(st.sampled_from(sorted(rows)), st.integers(0, 9)), min_size=1))
            ids = storage.columns.rows(*np.array([at for at, _ in chosen]).T)
            update(prioritised, storage, ids, np.array([float(priority) for _, priority in chosen]))
            rows |= {at: float(priority) for at, priority in chosen}
            largest = max(largest, *(float(priority) for _, priority in chosen))
    expected = np.zeros((n_lanes, capacity))
    for (lane, slot), priority in rows.items():
        expected[lane, slot] = (largest if priority is None else priority) ** 2
    assert leaves(storage, prioritised) == expected.tolist()
    assert prioritised.tree.total == expected.sum()


def test_priorities_of_rows_overwritten_since_they_were_drawn_are_dropped(order):
    storage, prioritised = make_storage(order=order), Priorities(8, 2, 1.0)
    write(storage, [4, 4])
    view = storage.view()
    prioritised.follow(view)
    rows = storage.columns.rows(np.array([0, 0, 1]), np.array([0, 1, 0]))
    prioritised.drawn.remember(view, rows)
    write(storage, [1, 0])
    update(prioritised, storage, rows, np.array([50.0, 3.0, 2.0]))
    assert leaves(storage, prioritised) == [[1, 3, 1, 1], [2, 1, 1, 1]]
    assert prioritised.max_priority == 3.0
    storage.clear()
    update(prioritised, storage, rows, np.array([9.0, 9.0, 9.0]))
    assert leaves(storage, prioritised) == [[0] * 4] * 2


BAD = {
    "negative": ([0, 1], [1.0, -1.0], "^priorities must be finite and at least 0, got -1"),
    "nan": ([0, 1], [np.nan, 1.0], "^priorities must be finite and at least 0, got nan"),
    "infinite": ([0, 1], [np.inf, 1.0], "^priorities must be finite and at least 0, got inf"),
    "too few": ([0, 1], [1.0], "^priorities: 1 came for 2 indexes"),
    "never written": ([0, 3], [1.0, 2.0], "^index 3 holds no row"),
}


@pytest.mark.parametrize("rows, priorities, message", BAD.values(), ids=BAD)
def test_bad_priorities_are_refused_and_change_nothing(rows, priorities, message):
    storage, prioritised = make_storage(), Priorities(8, 2, 1.0)
    write(storage, [2, 1])
    before = leaves(storage, prioritised)
    with pytest.raises(SpecError, match=message):
        update(prioritised, storage, np.array(rows), np.array(priorities))
    assert (leaves(storage, prioritised), prioritised.max_priority) == (before, 1.0)


@pytest.mark.parametrize("alpha, shares", [(0.0, [1, 1, 1, 1]), (1.0, [0, 1, 3, 4]), (0.5, [0, 1, 3**0.5, 2])], ids=str)
def test_draw_and_choose_are_in_proportion_to_priorities(alpha, shares):
    storage, prioritised = make_storage(1), Priorities(4, 1, alpha)
    write(storage, [4])
    update(prioritised, storage, np.arange(4), np.array([0.0, 1.0, 3.0, 4.0]))
    rng = np.random.default_rng(0)
    shares = np.array(shares) / sum(shares)
    for drawn in (prioritised.draw(50_000, rng), prioritised.choose(np.arange(4), 50_000, rng)):
        counts = np.bincount(drawn, minlength=4)
        np.testing.assert_allclose(counts / 50_000, shares, atol=0.01)
        assert not counts[shares == 0].any()


def test_draw_takes_one_from_each_equal_part_of_the_total():
    storage, prioritised = make_storage(), Priorities(8, 2, 1.0)
    write(storage, [4, 4])
    prioritised.follow(storage.view())
    assert sorted(prioritised.draw(8, np.random.default_rng(0)).tolist()) == list(range(8))


def test_choose_refuses_rows_without_a_priority():
    storage, prioritised = make_storage(), Priorities(8, 2, 1.0)
    write(storage, [4, 4])
    update(prioritised, storage, np.array([0, 1]), np.zeros(2))
    rng = np.random.default_rng(0)
    assert set(prioritised.choose(np.array([0, 5, 1]), 50, rng).tolist()) == {5}
    for rows in ([0, 1], []):
        with pytest.raises(SpecError, match="^nothing to sample: no row has a priority above zero$"):
            prioritised.choose(np.array(rows, np.int64), 1, rng)


def test_a_restored_one_is_the_same_and_refuses_what_does_not_fit():
    storage, prioritised = make_storage(), Priorities(8, 2, 1.0)
    write(storage, [3, 2])
    update(prioritised, storage, np.array([0, 4]), np.array([5.0, 0.5]))
    arrays = prioritised.arrays()
    restored = Priorities(8, 2, 1.0).restored(arrays, prioritised.state())
    write(storage, [1, 4])
    assert leaves(storage, restored) == leaves(storage, prioritised) == [[5, 1, 1, 5], [5, 5, 5, 5]]
    assert Priorities(8, 2, 1.0).restored({}, {}).tree.total == 0
    for name, array in arrays.items():
        with pytest.raises(ValueError, match="other shapes"):
            Priorities(8, 2, 1.0).restored({**arrays, name: array[1:]}, prioritised.state())
    for wrong in (-1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="not finite and at least 0"):
            Priorities(8, 2, 1.0).restored(arrays, {"max_priority": wrong})
        with pytest.raises(ValueError, match="not finite and at least 0"):
            Priorities(8, 2, 1.0).restored({**arrays, "__leaves__": np.full(8, wrong)}, prioritised.state())
