"""The samplers of `DictTensorReplayBuffer`.

"R" is a scenario of user-demand.md, "B" a section of tianshou-torchrl.md. Seeds are fixed: frequencies are the same
each time.
"""

from __future__ import annotations

import copy
import gc
import itertools
import pickle

import numpy as np
import pytest
import torch
from replay_storages import DeviceStorage

from rlstructs import MissingKeyError, SpecError, StateError, TemporalDictTensor
from rlstructs.replay import (
    DictTensorPrioritizedReplayBuffer,
    DictTensorReplayBuffer,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)

inf, nan = float("inf"), float("nan")


def made(sampler=None, max_size=10, **settings):
    return DictTensorReplayBuffer(storage=ListStorage(max_size), sampler=sampler, **{"generator": 0, **settings})


def numbers(start, n):
    return {"x": torch.arange(start, start + n)}


def one_pass(buffer):
    return [batch["x"].tolist() for batch in buffer]


# Without replacement


@pytest.mark.parametrize("prefetch", [None, 3])
@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [4, 4, 2]), (True, [4, 4])])
def test_a_pass_holds_every_row_once(prefetch, drop_last, sizes):  # B5.12, B6 test_replay_buffer_iter, test_multi_loops
    buffer = made(SamplerWithoutReplacement(drop_last=drop_last), batch_size=4, prefetch=prefetch)
    buffer.extend(numbers(0, 10))
    passes = [one_pass(buffer) for _ in range(4)]
    for batches in passes:
        assert [len(batch) for batch in batches] == sizes
        served = [x for batch in batches for x in batch]
        assert len(set(served)) == sum(sizes) and set(served) <= set(range(10))
    assert passes[0] != passes[1]


def test_samples_go_on_from_pass_to_pass_and_the_last_one_is_short():  # B3
    buffer = made(SamplerWithoutReplacement(), batch_size=4)
    buffer.extend(numbers(0, 10))
    sizes, ran_out = zip(*((buffer.sample().n_elems(), buffer.sampler.ran_out) for _ in range(6)), strict=True)
    assert sizes == (4, 4, 2, 4, 4, 2) and ran_out == (False, False, True) * 2


def test_without_shuffling_rows_come_in_order():
    buffer = made(SamplerWithoutReplacement(shuffle=False), batch_size=3, max_size=5)
    buffer.extend(numbers(0, 7))
    assert one_pass(buffer) == one_pass(buffer) == [[2, 3, 4], [5, 6]]


def test_whether_rows_come_twice_can_be_said_where_it_is_known():  # as torchrl's samplers take it
    assert SamplerWithoutReplacement(replacement=False).shuffle and PrioritizedSampler(replacement=True).fields
    slices = SliceSampler(slice_len=2, replacement=False)
    assert type(slices) is type(SliceSamplerWithoutReplacement(slice_len=2, replacement=False))
    for make, is_not in (
        (SamplerWithoutReplacement, True), (PrioritizedSampler, False),
        (lambda **how: SliceSamplerWithoutReplacement(slice_len=2, **how), True),
        (lambda **how: PrioritizedSliceSampler(slice_len=2, **how), False),
    ):  # fmt: skip
        with pytest.raises(SpecError, match=f"replacement must be {not is_not}, got {is_not}"):
            make(replacement=is_not)


@pytest.mark.parametrize("prefetch", [None, 2])
def test_next_gives_what_an_iteration_does_and_none_at_its_end(prefetch):  # B4
    buffer, twin = (made(SamplerWithoutReplacement(), batch_size=4, prefetch=prefetch) for _ in range(2))
    for each in (buffer, twin):
        each.extend(numbers(0, 10))
    for _ in range(2):
        for batch in twin:
            assert buffer.next() == batch
        assert buffer.next() is None
    assert len(copy.deepcopy(buffer).next()) == 4
    drawn = made(batch_size=3)
    drawn.extend(numbers(0, 5))
    assert [len(drawn.next()) for _ in range(5)] == [3] * 5
    with pytest.raises(StateError, match="^batch_size not specified"):
        made().next()


def test_a_loop_that_was_left_early_is_followed_by_a_whole_one():  # B4, C1
    buffer = made(SamplerWithoutReplacement(), batch_size=4)
    buffer.extend(numbers(0, 10))
    for _ in buffer:
        break
    assert sorted(x for batch in one_pass(buffer) for x in batch) == list(range(10))


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_row_that_was_overwritten_before_its_turn_is_not_served(drop_last):  # C1, B5.12
    buffer = made(SamplerWithoutReplacement(drop_last=drop_last), batch_size=3, max_size=9)
    buffer.extend(numbers(0, 9))
    served = []
    for n, batch in enumerate(buffer):
        assert not set(batch["x"].tolist()) & set(served)
        served += batch["x"].tolist()
        if n == 0:
            buffer.extend(numbers(100, 4))  # 0 to 3 are gone, and these wait
    assert set(served[3:]) <= {4, 5, 6, 7, 8} and max(served) < 9
    assert drop_last or {4, 5, 6, 7, 8} <= set(served)
    following = [x for batch in one_pass(buffer) for x in batch]
    assert set(following) == {4, 5, 6, 7, 8, 100, 101, 102, 103}


def test_a_pass_ends_when_all_that_was_left_is_gone():
    buffer = made(SamplerWithoutReplacement(), batch_size=3, max_size=6)
    buffer.extend(numbers(0, 6))
    stream = iter(buffer)
    next(stream)
    buffer.extend(numbers(10, 6))
    assert list(stream) == []
    assert sorted(x for batch in one_pass(buffer) for x in batch) == list(range(10, 16))


def test_a_batch_of_more_than_there_is():  # B3
    buffer = made(SamplerWithoutReplacement(), batch_size=20)
    buffer.extend(numbers(0, 10))
    assert [sorted(batch) for batch in one_pass(buffer)] == [list(range(10))]
    strict = made(SamplerWithoutReplacement(drop_last=True), batch_size=20)
    strict.extend(numbers(0, 10))
    with pytest.raises(ValueError, match="^batch_size is 20, there are 10 rows, and drop_last drops smaller batches$"):
        strict.sample()
    with pytest.raises(ValueError, match="^drop_last needs the batch_size of the buffer"):  # B6 test_batch_errors
        made(SamplerWithoutReplacement(drop_last=True))


def test_an_emptied_buffer_begins_a_pass():
    buffer = made(SamplerWithoutReplacement(), batch_size=4)
    buffer.extend(numbers(0, 10))
    buffer.sample()
    buffer.empty()
    buffer.extend(numbers(20, 4))
    assert sorted(buffer.sample()["x"].tolist()) == [20, 21, 22, 23] and buffer.sampler.ran_out


# Priorities


def prioritised(n_rows=0, max_size=10, **settings):
    settings = {"alpha": 0.7, "beta": 0.5, **settings}
    buffer = DictTensorPrioritizedReplayBuffer(storage=ListStorage(max_size), **{"generator": 0, **settings})
    buffer.extend(numbers(0, n_rows))
    return buffer


def leaves(buffer):
    """What every row counts, by row id; those that were written since the last draw, too."""
    buffer.sampler._of().follow(buffer._storage.view())
    return buffer.sampler._of().tree.values[: len(buffer)]


def counts(buffer, n_draws=100, batch_size=200):
    return sum(np.bincount(buffer.sample(batch_size)["index"], minlength=len(buffer)) for _ in range(n_draws))


def assert_in_proportion(found, shares):
    """Pearson's test; what has no share was never drawn."""
    expected = np.asarray(shares) / np.sum(shares) * found.sum()
    assert (found[expected == 0] == 0).all()
    some = expected > 0
    statistic, freedom = ((found - expected)[some] ** 2 / expected[some]).sum(), some.sum() - 1
    assert statistic <= freedom + 4 * np.sqrt(2 * freedom), (found.tolist(), expected.tolist())


@pytest.mark.parametrize("max_size", [1, 5, 8, 2000])  # R18
@pytest.mark.parametrize(("alpha", "beta", "eps"), [(0, 1, 1e-8), (0.6, 0.4, 1e-8), (1.0, 1.0, 0.5), (2.0, 0.0, 0.0)])
def test_draws_and_weights_are_those_of_a_plain_reference(max_size, alpha, beta, eps):  # R20, R22, R23
    n = min(max_size, 12)
    buffer = prioritised(n + 3, max_size, alpha=alpha, beta=beta, eps=eps)
    n = len(buffer)
    priorities = np.random.default_rng(n).uniform(0.1, 5, n)
    buffer.update_priority(torch.arange(n), torch.from_numpy(priorities))
    powers = (priorities + eps) ** alpha
    assert_in_proportion(counts(buffer), powers)
    batch = buffer.sample(200)
    chances = powers / powers.sum()
    plain = (n * chances) ** -beta
    np.testing.assert_allclose(batch["priority_weight"], (plain / plain.max())[batch["index"]], rtol=1e-5)
    assert batch["priority_weight"].dtype == torch.float32 and batch["priority_weight"].shape == (200,)


def test_weights_are_relative_to_the_buffer_not_the_batch():  # C1
    buffer = prioritised(4, alpha=1.0, beta=1.0, eps=0.0)
    buffer.update_priority(torch.arange(4), torch.tensor([1.0, 4.0, 4.0, 4.0]))
    batch = buffer.sample(400)
    assert set(batch["priority_weight"][batch["index"] > 0].tolist()) == {0.25}
    assert set(batch["priority_weight"][batch["index"] == 0].tolist()) == {1.0}


def test_a_new_row_has_the_largest_priority_so_far():  # R21, R22; B6 "new item == current max (transformed once)"
    buffer = prioritised(2, alpha=0.5, eps=0.0)
    np.testing.assert_allclose(leaves(buffer), [1, 1])
    buffer.update_priority([0, 1], [0.25, 4.0])
    assert buffer.sampler.max_priority == 4.0
    buffer.add({"x": 2})
    np.testing.assert_allclose(leaves(buffer), [0.5, 2, 2])
    buffer.update_priority([1, 2], [2.25, 2.25])  # the largest one stays what it was
    buffer.extend(numbers(3, 2))
    np.testing.assert_allclose(leaves(buffer), [0.5, 1.5, 1.5, 2, 2])


def test_a_new_row_may_have_the_largest_priority_of_those_that_are_there():  # torchrl's max_priority_within_buffer
    sampler = PrioritizedSampler(3, 0.5, 0.5, 0.0, dtype=torch.float32, max_priority_within_buffer=True)
    buffer = made(sampler, max_size=3)
    buffer.extend(numbers(0, 3))
    buffer.update_priority([0, 1, 2], [16.0, 4.0, 1.0])
    assert sampler.max_priority == 16
    buffer.add({"x": 3})  # in the place of the largest
    np.testing.assert_allclose(leaves(buffer), [2, 2, 1])
    assert sampler.max_priority == 4
    buffer.update_priority([0, 1], 0.25)
    assert sampler.max_priority == 1
    buffer.extend(numbers(4, 3))  # nobody is left
    np.testing.assert_allclose(leaves(buffer), [1, 1, 1])
    buffer.update_priority([0, 1, 2], 0.25)
    assert sampler.max_priority == 0.25
    twin = made(PrioritizedSampler(3, 0.5, 0.5, 0.0, max_priority_within_buffer=True), max_size=3)
    twin.load_state_dict(buffer.state_dict())
    for each in (buffer, twin, copy.deepcopy(buffer)):
        each.update_priority(0, 0.0625)
        each.add({"x": 7})
        np.testing.assert_allclose(leaves(each), [0.25, 0.5, 0.5])
        each.empty()
        assert each.sampler.max_priority == 1


@pytest.mark.parametrize("eps", [0.0, 0.1])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_largest_priorities_of_those_that_are_there_are_those_of_a_plain_list(alpha, eps):
    rng, known = np.random.default_rng(0), [0.0] * 7
    sampler = PrioritizedSampler(7, alpha, 0.5, eps, max_priority_within_buffer=True)
    buffer = made(sampler, max_size=7)
    for _ in range(200):
        if rng.random() < 0.5:
            rows = [int(row) for row in buffer.extend(numbers(0, int(rng.integers(1, 4))))]
            largest = max((p for row, p in enumerate(known) if row not in rows), default=0.0) or 1.0
            given = [largest] * len(rows)
        elif len(buffer):
            rows = rng.choice(len(buffer), int(rng.integers(1, len(buffer) + 1)), replace=False).tolist()
            given = rng.choice([0.5, 1.0, 2.0, 5.0], len(rows)).tolist()
            buffer.update_priority(rows, given)
        else:
            continue
        for row, priority in zip(rows, given, strict=True):
            known[row] = priority
        np.testing.assert_allclose(leaves(buffer), [(p + eps) ** alpha for p in known[: len(buffer)]])
        if alpha:
            assert sampler.max_priority == pytest.approx(max(known))


def test_of_equal_ids_only_the_last_is_a_priority_that_is_there():
    buffer = made(PrioritizedSampler(max_priority_within_buffer=True), 10)
    buffer.extend({"x": torch.arange(4)})
    buffer.update_priority([0, 1, 2, 3, 1], [3.0, 9.0, 2.0, 1.0, 0.5])
    assert buffer.sampler.max_priority == pytest.approx(3)


def test_a_strong_update_dominates():  # B6 test_prioritized
    buffer = prioritised(10)
    buffer.update_priority(torch.arange(10), 1e-6)
    buffer.update_priority(3, 1e6)
    assert (buffer.sample(100)["x"] == 3).float().mean() > 0.98


def test_of_equal_ids_the_last_counts_and_negative_ones_do_not():  # R24
    buffer = prioritised(4, alpha=1.0, eps=0.0)
    buffer.update_priority([2, 2, -1, 0, 2], [5.0, 9.0, 100.0, 3.0, 7.0])
    np.testing.assert_allclose(leaves(buffer), [3, 1, 7, 1])
    assert buffer.sampler._of().tree.total == pytest.approx(12)


def test_priorities_of_several_numbers_are_reduced():
    values = torch.tensor([[1.0, 5.0, 3.0], [2.0, 2.0, 8.0]])
    reductions = {"max": [5, 8], "min": [1, 2], "mean": [3, 4], "median": [3, 2], "sum": [9, 12]}
    for reduction, expected in reductions.items():
        buffer = prioritised(2, alpha=1.0, eps=0.0, reduction=reduction)
        buffer.update_priority([0, 1], values)
        np.testing.assert_allclose(leaves(buffer), expected)
    even = prioritised(1, alpha=1.0, eps=0.0, reduction="median")
    even.update_priority([0], torch.tensor([[4.0, 1.0, 2.0, 9.0]]))
    np.testing.assert_allclose(leaves(even), [2])  # as torch.median
    with pytest.raises(SpecError, match="^reduction must be one of"):
        prioritised(reduction="product")


BAD_PRIORITIES = {
    "negative": ([0, 1], [1.0, -1.0], SpecError, "^priorities must be finite and at least 0, got -1.0$"),
    "a little negative": ([0], [-1e-12], SpecError, "^priorities must be finite and at least 0"),
    "NaN": ([0, 1], [nan, 1.0], SpecError, "^priorities must be finite and at least 0, got nan$"),
    "infinite": ([0], [inf], SpecError, "^priorities must be finite and at least 0, got inf$"),
    "too large": ([0], [1e305], SpecError, "^priorities must be finite"),
    "too few": ([0, 1, 2], [1.0, 1.0], SpecError, "^priorities: 2 came for 3 indexes$"),
    "no integers": ([0.5], [1.0], SpecError, "^index must hold integers, got float64$"),
    "beyond the buffer": ([10], [1.0], IndexError, r"^index 10 is not in \[0, 10\)$"),
    "never written": ([7], [1.0], SpecError, "^index 7 holds no row$"),
}


@pytest.mark.parametrize("case", BAD_PRIORITIES)
def test_priorities_that_cannot_be_change_nothing(case):  # B5.7
    index, priorities, error, message = BAD_PRIORITIES[case]
    buffer = prioritised(4, alpha=0.9)
    before = leaves(buffer).copy()
    with pytest.raises(error, match=message):
        buffer.update_priority(index, priorities)
    assert (leaves(buffer) == before).all() and buffer.sampler.max_priority == pytest.approx(1)


@pytest.mark.parametrize("of", [torch.tensor, np.array, np.float32])
def test_exponents_may_be_tensors(of):  # as torchrl's schedulers set them
    buffer = prioritised(2, alpha=of(0.5), beta=of(1.0), eps=0.0)
    buffer.update_priority([0, 1], [4.0, 1.0])
    np.testing.assert_allclose(leaves(buffer), [2, 1])
    buffer.sampler.beta = of(0.25)
    buffer.sampler.alpha = of(1.0)
    assert (buffer.sampler.alpha, buffer.sampler.beta) == (1.0, 0.25) and type(buffer.sampler.beta) is float
    np.testing.assert_allclose(leaves(buffer), [4, 1])


@pytest.mark.parametrize("settings", [
    {"alpha": -1}, {"beta": -0.1}, {"eps": -1}, {"alpha": nan}, {"beta": "x"},
    {"alpha": torch.tensor(-1.0)}, {"beta": torch.ones(1)},
])  # fmt: skip
def test_exponents_that_cannot_be_are_refused(settings):
    with pytest.raises(SpecError, match=f"^{next(iter(settings))} must be a number of at least 0"):
        prioritised(**settings)


def test_a_row_that_was_overwritten_does_not_get_the_priority_of_what_it_held():
    buffer = prioritised(6, 6, alpha=1.0, eps=0.0)
    batch = buffer.sample(50)
    buffer.extend(numbers(6, 3))  # over 0, 1 and 2
    buffer.update_priority(batch["index"], torch.full((50,), 0.5))
    np.testing.assert_allclose(leaves(buffer), [1, 1, 1, 0.5, 0.5, 0.5])
    part = batch["index"][batch["index"] < 2]
    buffer.update_priority(part, 0.25)
    np.testing.assert_allclose(leaves(buffer)[:3], 1)
    buffer.update_priority([0], 7.0)  # drawn as what is gone
    assert leaves(buffer)[0] == 1
    fresh = buffer.sample(50)
    buffer.update_priority(fresh["index"], 2.0)
    np.testing.assert_allclose(leaves(buffer), 2)


def test_what_was_just_written_gets_the_priority_that_is_meant_for_it():
    buffer = prioritised(4, 4, alpha=1.0, eps=0.0)
    buffer.sample(100)
    ids = buffer.extend(numbers(4, 2))  # ids that were drawn just now, as other rows
    buffer.update_priority(ids, [3.0, 5.0])
    np.testing.assert_allclose(leaves(buffer), [3, 5, 1, 1])
    buffer.extend(numbers(6, 4))
    buffer.update_priority(ids, [9.0, 9.0])  # too late
    np.testing.assert_allclose(leaves(buffer), 5)
    buffer.sample(100)
    buffer.update_priority(buffer.add({name: value[0] for name, value in numbers(10, 1).items()}), 7.0)
    assert sorted(leaves(buffer)) == [5, 5, 5, 7]
    buffer.sample(100)
    buffer.update_priority(buffer.extend(numbers(11, 2)).tolist(), [8.0, 9.0])
    assert sorted(leaves(buffer))[2:] == [8, 9]
    many = buffer.extend(numbers(0, 7))
    buffer.update_priority(many, torch.arange(7.0))
    np.testing.assert_allclose(leaves(buffer)[many[3:]], [3, 4, 5, 6])
    buffer.empty()
    buffer.extend(numbers(0, 4))
    buffer.update_priority(many, 9.0)
    np.testing.assert_allclose(leaves(buffer), 1)


def test_emptying_forgets_priorities_and_the_largest_of_them():  # R29
    buffer = prioritised(6, alpha=1.0, beta=1.0, eps=0.0)
    batch = buffer.sample(3)
    buffer.update_priority(batch["index"], 50.0)
    buffer.empty()
    assert buffer.sampler.max_priority == 1
    buffer.extend(numbers(0, 2))
    buffer.update_priority(batch["index"], 70.0)  # of rows that are gone
    np.testing.assert_allclose(leaves(buffer), [1, 1])
    assert set(buffer.sample(100)["x"].tolist()) == {0, 1} and set(buffer.sample(9)["priority_weight"].tolist()) == {1}


def test_priorities_that_come_with_rows_are_theirs():  # B4 extend(update_priority), R22
    rows = {"x": torch.arange(3), "td_error": torch.tensor([4.0, 0.0, 9.0])}
    buffer = prioritised(alpha=0.5, eps=0.0)
    buffer.extend(rows)
    np.testing.assert_allclose(leaves(buffer), [2, 0, 3])
    assert buffer.add({"x": 3, "td_error": 16.0}) == 3
    np.testing.assert_allclose(leaves(buffer), [2, 0, 3, 4])
    buffer.sample(50)
    for _ in range(3):  # over rows that were drawn
        buffer.extend(rows)
    np.testing.assert_allclose(leaves(buffer), buffer[np.arange(10)]["td_error"].sqrt())
    assert buffer["td_error"].tolist() == [4, 0, 9, 16] + [4, 0, 9] * 2
    buffer.extend(rows, update_priority=False)
    assert leaves(buffer).max() == 4
    before = buffer[:], leaves(buffer).copy()
    with pytest.raises(SpecError, match="^priorities must be finite"):
        buffer.extend({"x": torch.arange(2), "td_error": torch.tensor([1.0, nan])})
    assert buffer[:] == before[0] and (leaves(buffer) == before[1]).all()
    with pytest.raises(MissingKeyError, match="^no 'td_error' to update priorities with, got"):
        buffer.extend(numbers(0, 2), update_priority=True)
    nested = prioritised(alpha=1.0, eps=0.0, priority_key=("next", "error"))
    nested.extend({"x": torch.arange(2), "next": {"error": torch.tensor([[1.0, 5.0], [2.0, 3.0]])}})
    np.testing.assert_allclose(leaves(nested), [5, 3])


@pytest.mark.parametrize("kind", [PrioritizedSampler, PrioritizedSliceSampler])
def test_a_sampler_takes_priorities_for_its_buffer(kind):  # as torchrl's does
    sampler = kind(5, 1.0, 1.0, 0.0, **({} if kind is PrioritizedSampler else {"slice_len": 1}))
    with pytest.raises(StateError, match=f"^update_priority: this {kind.__name__} belongs to no buffer yet"):
        sampler.update_priority([0], [1.0])
    buffer = made(sampler, 5)
    index = buffer.extend({**numbers(0, 3), "done": torch.ones(3)})
    sampler.update_priority(index, torch.tensor([1.0, 2.0, 3.0]), storage=buffer.storage)
    assert leaves(buffer).tolist() == [1, 2, 3]


def test_the_column_of_priorities_can_be_asked_for_and_changed():
    buffer = prioritised(0, alpha=1.0, eps=0.0, priority_key=("a", "p"))
    assert buffer.priority_key == "a/p"
    for _ in range(3):
        buffer.add({"a": {"p": 2.0}, "q": 5.0})
    buffer.priority_key = "q"
    buffer.add({"a": {"p": 2.0}, "q": 5.0})
    assert buffer.priority_key == "q" and leaves(buffer).tolist() == [2, 2, 2, 5]
    batch = buffer.sample(20)
    batch.set(buffer.priority_key, torch.ones(20))
    buffer.update_tensordict_priority(batch)
    assert set(leaves(buffer)[batch["index"].unique()].tolist()) == {1}


def test_a_first_bad_priority_makes_no_columns():
    buffer = prioritised()
    with pytest.raises(SpecError, match="^priorities must be finite"):
        buffer.extend({"y": torch.arange(2), "td_error": torch.tensor([1.0, -1.0])})
    assert buffer.extend(numbers(0, 2)).tolist() == [0, 1]


@pytest.mark.parametrize("name", ["update_tensordict_priority", "update_dict_tensor_priority"])
def test_a_batch_brings_its_priorities(name):  # B6 test_rb_trajectories
    buffer = prioritised(6, alpha=1.0, eps=0.0)
    batch = buffer.sample(100)
    batch.set("td_error", batch["x"] * 2.0)
    getattr(buffer, name)(batch)
    np.testing.assert_allclose(leaves(buffer), [0, 2, 4, 6, 8, 10])
    getattr(buffer, name)({"index": [1, 2], "td_error": [[1.0, 7.0], [3.0, 2.0]]})  # B5: (B, T)
    np.testing.assert_allclose(leaves(buffer)[1:3], [7, 3])
    for lacking in ("index", "td_error"):  # B5.7: not "as large as can be"
        wrong = {key: batch[key] for key in batch if key != lacking}
        with pytest.raises(MissingKeyError, match=rf"no \['{lacking}'\] in the batch, there are"):
            getattr(buffer, name)(wrong)
    np.testing.assert_allclose(leaves(buffer)[1:3], [7, 3])


def test_priorities_of_slices_are_of_their_first_steps():  # B4: what is reshaped to slices
    buffer = prioritised(6, alpha=1.0, eps=0.0)
    priorities = torch.tensor([[[1.0], [7.0]], [[3.0], [2.0]]])
    buffer.update_tensordict_priority({"index": torch.tensor([[0, 1], [4, 5]]), "td_error": priorities})
    np.testing.assert_allclose(leaves(buffer), [7, 1, 1, 1, 3, 1])
    buffer.update_priority(torch.tensor([[0, 1], [4, 5]]), torch.tensor([[2.0, 3.0], [4.0, 5.0]]))
    np.testing.assert_allclose(leaves(buffer), [2, 3, 1, 1, 4, 5])


def test_slices_begin_anew_for_recurrent_networks():  # B3: is_init
    steps = {"is_init": torch.arange(12)[:, None] == 0, "x": torch.arange(12), "done": torch.arange(12) == 11}
    buffer = made(SliceSampler(slice_len=3), 12)
    buffer.extend(steps)
    assert buffer.sample(6)["is_init"].tolist() == [[True], [False], [False]] * 2
    assert buffer["is_init"].sum() == 1
    short = made(SliceSampler(slice_len=5, strict_length=False, init_key=("a", "first")), 12)
    short.extend({"x": torch.arange(4), "done": torch.tensor([0, 1, 0, 1]), "a": {"first": torch.zeros(4)}})
    assert short.sample(10)["a/first"].tolist() == [1, 0, 1, 0]
    none = made(SliceSampler(slice_len=3, init_key=None), 12)
    none.extend({**steps, "is_init": torch.zeros(12, dtype=bool)})
    assert not none.sample(9)["is_init"].any()


def test_a_buffer_without_priorities_says_so_once():  # B4
    buffer = made(RandomSampler)
    buffer.extend({"x": torch.arange(3), "td_error": torch.ones(3)})  # no warning
    with pytest.warns(UserWarning, match="^update_priority: a RandomSampler has no priorities$"):
        buffer.update_priority([0], [1.0])
    buffer.update_priority([0], [1.0])
    buffer.update_tensordict_priority(buffer.sample(2))


def test_alpha_and_beta_may_change():  # B6
    buffer = prioritised(3, alpha=0.5, beta=1.0, eps=0.0)
    buffer.update_priority([0, 1, 2], [1.0, 4.0, 16.0])
    buffer.sampler.alpha = 1.0
    np.testing.assert_allclose(leaves(buffer), [1, 4, 16])
    buffer.sampler.beta = 0.5
    batch = buffer.sample(100)
    np.testing.assert_allclose(batch["priority_weight"], np.array([1, 0.5, 0.25])[batch["index"]], rtol=1e-6)
    buffer.sampler.alpha = 0.0
    np.testing.assert_allclose(leaves(buffer), 1)
    with pytest.warns(UserWarning, match="^alpha was 0: what priorities the rows had is not known, all of them get 1$"):
        buffer.sampler.alpha = 0.5
    np.testing.assert_allclose(leaves(buffer), 1)
    assert buffer.sampler.max_priority == 16
    with pytest.raises(SpecError, match="^alpha must be a number of at least 0"):
        buffer.sampler.alpha = -1
    with pytest.raises(SpecError, match="^beta must be a number of at least 0"):
        buffer.sampler.beta = nan
    for value in (True, np.True_, torch.tensor(True)):
        with pytest.raises(SpecError, match="^beta must be a number of at least 0, got True"):
            buffer.sampler.beta = value
    assert (buffer.sampler.alpha, buffer.sampler.beta) == (0.5, 0.5)


def test_a_sampler_must_have_room_for_the_storage():
    assert made(PrioritizedSampler(10, 0.5, 0.5)).sampler.max_capacity == 10
    with pytest.raises(SpecError, match="^max_capacity is 9, the storage has room for 10 rows$"):
        made(PrioritizedSampler(9, 0.5, 0.5))


def test_priorities_grow_with_the_storage():
    buffer = prioritised(0, 5000, alpha=1.0, eps=0.0)
    for start in range(0, 6000, 1000):
        ids = buffer.extend(numbers(start, 1000))
        buffer.update_priority(ids, torch.arange(start, start + 1000.0))
        buffer.sample(5)
    expected = np.concatenate([np.arange(5000, 6000), np.arange(1000, 5000)])
    np.testing.assert_allclose(leaves(buffer), expected)


def test_a_sampler_can_be_exchanged():  # B5.5
    buffer = made(RandomSampler, 6, batch_size=4)
    buffer.extend(numbers(0, 9))
    buffer.set_sampler(PrioritizedSampler(alpha=1.0, beta=1.0))
    assert set(buffer.sample()["x"].tolist()) <= set(range(3, 9))
    buffer.update_priority([0], 3.0)
    assert leaves(buffer)[0] == pytest.approx(3)
    buffer.set_sampler(SamplerWithoutReplacement)
    assert sorted(x for batch in one_pass(buffer) for x in batch) == list(range(3, 9))
    with pytest.raises(TypeError, match="^sampler must be a Sampler"):
        buffer.set_sampler(3)
    with pytest.raises(SpecError, match="^max_capacity is 5"):
        buffer.set_sampler(PrioritizedSampler(5, 0.5, 0.5))
    assert isinstance(buffer.sampler, SamplerWithoutReplacement)
    stored = made(RandomSampler)
    stored.extend({"priority_weight": torch.zeros(3)})
    with pytest.raises(SpecError, match=r"^key\(s\) \['priority_weight'\] are stored, and this sampler has"):
        stored.set_sampler(PrioritizedSampler)


@pytest.mark.parametrize(
    "make",
    [lambda: SliceSampler(slice_len=3), SamplerWithoutReplacement, PrioritizedSampler],
    ids=["slices", "without replacement", "prioritised"],
)
def test_a_sampler_that_another_buffer_had_knows_nothing_of_its_rows(make):
    used = make()
    first = made(used, 20, batch_size=6)
    first.extend(episodes([10, 10]))
    first.sample()
    del first
    gc.collect()
    buffer, twin = made(used, 40, batch_size=6), made(make(), 40, batch_size=6)
    for each in (buffer, twin):
        each.extend(episodes([5] * 6))
    for _ in range(20):
        assert buffer.sample() == twin.sample()


def test_what_was_drawn_keeps_the_sampler_that_drew_it():
    class Exchanged(RandomSampler):
        def drawn(self, picked):  # as another thread may, before the rows are handed out
            buffer.set_sampler(SliceSampler(slice_len=2))

    buffer = made(Exchanged(), 20, batch_size=4)
    buffer.extend(episodes([5, 5]))
    batch, info = buffer.sample(return_info=True)
    assert list(info) == ["index"] and not batch["next/truncated"].any()
    assert buffer.sample()["next/truncated"].tolist() == [False, True] * 2


def test_a_loop_goes_on_with_a_sampler_that_is_exchanged():
    buffer = made(RandomSampler(), 20, batch_size=4)
    buffer.extend(episodes([5, 5]))
    loop = iter(buffer)
    next(loop)
    buffer.set_sampler(SliceSampler(slice_len=2))
    assert next(loop)["next/truncated"].tolist() == [False, True] * 2


# Slices


def episodes(lengths, start=0, name="next"):
    """Episodes of these lengths; `x` counts on, `e` says of which one a row is; they end by `terminated`."""
    n = sum(lengths)
    e = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)) + 100 * start
    ends = torch.zeros(n, dtype=torch.bool)
    ends[torch.tensor(lengths).cumsum(0) - 1] = True
    zeros = torch.zeros(n, dtype=torch.bool)
    return {"x": torch.arange(n) + start, "e": e, name: {"terminated": ends, "truncated": zeros, "done": ends.clone()}}


def some(rows, part):
    """Some of the rows."""
    return {key: some(value, part) if isinstance(value, dict) else value[part] for key, value in rows.items()}


def slices_of(batch, length):
    """The batch with an axis for slices: name -> (n_slices, length, ...)."""
    return {key: value.unflatten(0, (-1, length)) for key, value in batch.items()}


@pytest.mark.parametrize("sampler", [SliceSampler, PrioritizedSliceSampler])
@pytest.mark.parametrize("size", [{"num_slices": 8}, {"slice_len": 4}], ids=str)
@pytest.mark.parametrize("max_size", [40, 23, 200])
def test_slices_are_steps_of_one_episode(sampler, size, max_size):  # R13, R15, B6 test_slice_sampler
    buffer = made(sampler(**size), max_size, batch_size=32)
    buffer.extend(episodes([5, 9, 3, 12]))
    buffer.extend(episodes([4, 7], 29))
    firsts = set()
    for _ in range(40):
        batch = buffer.sample()
        assert (batch["index"].dtype, batch["index"].shape) == (torch.int64, (32,))  # B5.13
        assert buffer[batch["index"]]["x"].equal(batch["x"])
        each = slices_of(batch, 4)
        assert (each["e"] == each["e"][:, :1]).all() and (each["x"].diff(dim=1) == 1).all()
        firsts |= set(each["x"][:, 0].tolist())
        last = torch.tensor([[False] * 3 + [True]] * 8)
        assert each["next/truncated"].equal(last)
        assert each["next/done"].equal(last | each["next/terminated"])
    every, low = buffer[buffer["x"].argsort()], max(0, 40 - max_size)  # the oldest first
    fit = {x for x, e in zip(every["x"].tolist(), every["e"].tolist(), strict=True)
           if (every["e"][x - low : x - low + 4] == e).sum() == 4}  # fmt: skip
    assert firsts == fit
    assert not every["next/truncated"].any()  # the store does not know


def test_marks_go_where_the_data_has_its_ends():
    for name, key in (("next", "next/truncated"), ("_observation", "_observation/truncated")):
        buffer = made(SliceSampler(slice_len=2), 20)
        buffer.extend(episodes([6], name=name))
        assert buffer.sample(4)[key].tolist() == [False, True] * 2
    flat = made(SliceSampler(slice_len=2), 20)
    flat.extend({"x": torch.arange(6), "done": torch.zeros(6, 1)})
    batch, info = flat.sample(4, return_info=True)
    assert batch["truncated"].tolist() == info["truncated"].tolist() == [[False], [True]] * 2
    assert batch["done"].tolist() == [[0], [1]] * 2 and batch["done"].dtype == torch.float32
    half = made(SliceSampler(slice_len=2), 20)
    half.extend({"x": torch.arange(6), "done": torch.zeros(6).bfloat16()})
    assert half.sample(4)["done"].tolist() == [0, 1] * 2
    own = made(SliceSampler(slice_len=2, truncated_key=("a", "cut")), 20)
    own.extend({"x": torch.arange(6), "done": torch.zeros(6)})
    assert own.sample(4)["a/cut"].tolist() == [False, True] * 2
    none = made(SliceSampler(slice_len=2, truncated_key=None), 20)
    none.extend(episodes([6]))
    assert not none.sample(4)["next/truncated"].any()


@pytest.mark.parametrize("as_tensordict", [False, True])
def test_where_no_column_says_what_has_ended_slices_say_it_themselves(as_tensordict):
    rows = {"x": torch.arange(8), "episode": torch.arange(8) // 4}
    for key, parent in (("auto", "next"), (("a", "truncated"), "a")):
        buffer = made(SliceSampler(slice_len=4, truncated_key=key), 20)
        buffer.extend(pytest.importorskip("tensordict").TensorDict(rows, [8]) if as_tensordict else rows)
        batch, info = buffer.sample(8, return_info=True)
        for name, last in (("truncated", True), ("done", True), ("terminated", False)):
            marks = batch[parent, name] if as_tensordict else batch[f"{parent}/{name}"]
            assert marks.shape == ((8, 1) if as_tensordict else (8,)) and f"{parent}/{name}" in info
            assert marks.dtype == torch.bool and marks.reshape(-1).tolist() == [False, False, False, last] * 2
    own = made(SliceSampler(slice_len=4, truncated_key=("a", "cut")), 20)
    own.extend({**rows, "a": {"done": torch.full((8,), 7)}})
    assert own.sample(8)["a/done"].tolist() == [7] * 8


@pytest.mark.parametrize("parent", ["next/agents/", "some/"])
@pytest.mark.parametrize("kind", [SliceSampler, PrioritizedSliceSampler, SliceSamplerWithoutReplacement])
def test_what_is_done_is_marked_beside_the_keys_that_were_named(kind, parent):
    done = (torch.arange(8) == 7)[:, None].expand(8, 2)
    keys = {"end_key": tuple(f"{parent}done".split("/")), "truncated_key": tuple(f"{parent}truncated".split("/"))}
    buffer = made(kind(slice_len=4, **keys), 20)
    buffer.extend({"x": torch.arange(8), f"{parent}done": done})
    for _ in range(10):
        batch, info = buffer.sample(4, return_info=True)
        last, ended = torch.arange(4) == 3, batch["x"] == 7
        for name, marks in (("truncated", last), ("done", last), ("terminated", ended)):
            assert batch[f"{parent}{name}"].equal(marks[:, None].expand(4, 2))
        assert {f"{parent}truncated", f"{parent}terminated"} < info.keys()
    changed = {**batch, "x": batch["x"] + 100}
    buffer[batch["index"]] = changed
    assert buffer[f"{parent}done"].equal(done) and (buffer["x"] >= 100).sum() == 4


def test_an_end_key_that_says_done_is_marked_wherever_it_is():
    buffer = made(SliceSampler(slice_len=4, end_key=("next", "agents", "done")), 20)
    buffer.extend({"x": torch.arange(8), "next/agents/done": torch.zeros(8, 1)})
    batch = buffer.sample(4)
    for name in ("next/agents/done", "next/done", "next/truncated"):
        assert batch[name].reshape(-1).tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("framework", ["torch", "numpy"])
@pytest.mark.parametrize("parent", ["next/", ""])
@pytest.mark.parametrize("stored", ["done", "terminated", "truncated", "done truncated", "terminated truncated",
                                    "done terminated"])  # fmt: skip
def test_slices_have_all_three_ends_whichever_are_stored(stored, parent, framework):
    t = torch.arange(8)[:, None]  # the first episode terminates, the second is cut off
    ends = {"done": t % 4 == 3, "terminated": t == 3, "truncated": t == 7}
    names = stored.split()
    buffer = made(SliceSampler(slice_len=2, traj_key="e"), 20, framework=framework)
    rows = {"x": t[:, 0], "e": t[:, 0] // 4} | {f"{parent}{name}": ends[name].float() for name in names}
    buffer.extend(rows)
    seen = set()
    for _ in range(30):
        batch = buffer.sample(2)
        x = int(batch["x"][1])
        seen.add(x)
        # What is only done has terminated; of what is only cut off nothing says so.
        terminated = x in {"done": (3, 7), "truncated": ()}.get(stored, (3,))
        for name, last in (("truncated", True), ("done", True), ("terminated", terminated)):
            found = torch.as_tensor(np.asarray(batch[f"{parent}{name}"])).reshape(-1)
            assert found.tolist() == [False, last] and batch[f"{parent}{name}"].shape == (2, 1), (name, x)
    assert seen == {1, 2, 3, 5, 6, 7}


def test_no_rows_have_no_priorities_of_several_numbers_either():
    buffer = DictTensorPrioritizedReplayBuffer(alpha=1.0, beta=1.0, eps=0.0, reduction="median")
    buffer.extend(numbers(0, 3))
    buffer.update_priority(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 2, 3))
    assert buffer.sampler.max_priority == 1


@pytest.mark.parametrize("as_tensordict", [False, True])
def test_what_is_known_of_slices_is_found_by_tuples_too(as_tensordict):
    rows = {"x": torch.arange(8), "episode": torch.arange(8) // 4}
    buffer = made(SliceSampler(slice_len=4), 20)
    buffer.extend(pytest.importorskip("tensordict").TensorDict(rows, [8]) if as_tensordict else rows)
    _, info = buffer.sample(4, return_info=True)
    assert info["next", "truncated"] is info["next/truncated"] is info.get(("next", "truncated"))
    assert ("next", "done") in info and ("next", "other") not in info and info.get(("a", "b"), 3) == 3
    assert info["index"].tolist() == info[("index",)].tolist() and type(pickle.loads(pickle.dumps(info))) is type(info)
    with pytest.raises(KeyError):
        info["next", "other"]


def test_a_slice_may_come_back_as_rows():
    buffer = made(SliceSampler(slice_len=2), 20)
    buffer.extend({"x": torch.arange(4), "next/done": torch.arange(4) == 3})
    batch = buffer.sample(2)
    assert {"next/terminated", "next/truncated"} < set(batch.keys())
    buffer.extend(batch)
    assert buffer["x"].tolist()[4:] == batch["x"].tolist() and buffer["next/done"].tolist()[4:] == [False, True]


@pytest.mark.parametrize("first", [True, False])
def test_what_was_done_before_a_step_is_neither_an_end_nor_marked(first):  # torchrl's collectors give both
    before = {name: torch.arange(6)[:, None] == 2 for name in ("done", "terminated", "truncated")}
    rows = episodes([5, 1])
    buffer = made(SliceSampler(slice_len=5), 20)
    buffer.extend({**before, **rows} if first else {**rows, **before})
    batch = buffer.sample(10)
    last = [False, False, False, False, True] * 2
    assert batch["x"].tolist() == [0, 1, 2, 3, 4] * 2
    for name in ("done", "terminated", "truncated"):
        assert batch[name][:, 0].tolist() == [False, False, True, False, False] * 2
        assert batch[f"next/{name}"].tolist() == last
    steps = made(n_step=3, gamma=1.0, batch_size=200)
    steps.extend({**before, "next": {**rows["next"], "reward": torch.ones(6)}})
    batch = steps.sample()
    found = dict(zip(batch["index"].tolist(), batch["next/reward"].tolist(), strict=True))
    assert found == {0: 3.0, 1: 3.0, 2: 3.0, 3: 2.0, 4: 1.0, 5: 1.0}


@pytest.mark.parametrize("sampler", [SliceSampler, PrioritizedSliceSampler])
def test_shorter_episodes_are_shorter_slices_if_that_is_allowed(sampler):  # R13, B6 strictlength
    buffer = made(sampler(slice_len=4, strict_length=False), 20)
    buffer.extend(episodes([2, 1, 3]))
    sizes = set()
    for _ in range(30):
        batch = buffer.sample(8)
        assert batch.n_elems() <= 8
        cuts = [-1, *np.flatnonzero(batch["next/truncated"])]
        assert cuts[-1] == batch.n_elems() - 1 and len(cuts) == 3
        for first, last in itertools.pairwise(cuts):
            part = slice(first + 1, last + 1)
            assert len(set(batch["e"][part].tolist())) == 1 and (batch["x"][part].diff() == 1).all()
            sizes.add(last - first)
    assert sizes == {1, 2, 3}
    strict = made(sampler(slice_len=4), 20)
    strict.extend(episodes([2, 1, 3]))
    with pytest.raises(SpecError, match="^nothing to sample: no episode of 4 steps is stored$"):
        strict.sample(8)
    strict.extend(episodes([4], 6))
    assert strict.sample(8)["x"].tolist() == [6, 7, 8, 9] * 2


@pytest.mark.parametrize("sampler", [SliceSampler, PrioritizedSliceSampler])
@pytest.mark.parametrize("max_size", [20, 11])
def test_only_shorter_episodes_are_shorter_slices(sampler, max_size):  # torchrl's test_slice_sampler_prioritized
    buffer = made(sampler(slice_len=4, strict_length=False, pad_output=True), max_size)
    buffer.extend(episodes([2, 6, 3, 4]))  # the second begins with 4 where there is less room
    found = set()
    for _ in range(50):
        each = slices_of(buffer.sample(40), 4)
        found |= {tuple(x[mask].tolist()) for x, mask in zip(each["x"], each["mask"], strict=True)}
    whole = {(8, 9, 10), (11, 12, 13, 14), (4, 5, 6, 7)}
    assert found == whole | ({(0, 1), (2, 3, 4, 5), (3, 4, 5, 6)} if max_size == 20 else set())
    part = made(sampler(slice_len=4, strict_length=False), 9)
    part.extend(episodes([8, 4]))  # of the first the last 5 are left, and then 2
    part.extend(episodes([3], 12))
    assert {tuple(part.sample(4)["x"].tolist()) for _ in range(50)} == {(6, 7), (8, 9, 10, 11), (12, 13, 14)}


@pytest.mark.parametrize("sampler", [SliceSampler, PrioritizedSliceSampler, SliceSamplerWithoutReplacement])
def test_shorter_slices_are_padded_with_a_mask(sampler):  # B6 mask_*, pad_output_*
    buffer = made(sampler(slice_len=4, strict_length=False, pad_output=True), 20)
    buffer.extend(episodes([2, 3, 6]))
    for _ in range(20):
        each = slices_of(buffer.sample(40), 4)
        mask = each["mask"]
        assert mask.dtype == torch.bool and mask[:, 0].all() and (mask.int().diff(dim=1) <= 0).all()
        assert (each["e"] == each["e"][:, :1]).all()
        assert (each["x"].diff(dim=1) == mask[:, 1:].int()).all()  # then the last step again
        n = mask.sum(dim=1)
        assert each["next/truncated"].equal(torch.arange(4) == n[:, None] - 1)
    with pytest.raises(SpecError, match="^pad_output needs strict_length=False"):
        sampler(slice_len=4, pad_output=True)
    with pytest.raises(SpecError, match=r"^key\(s\) \['mask'\] cannot be stored"):
        rows = {"mask": torch.ones(4), "done": torch.ones(4)}
        made(sampler(slice_len=4, strict_length=False, pad_output=True)).extend(rows)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_slices_of_rows_on_a_device_are_the_same(strict, framework):
    def stream(storage):
        sampler = SliceSampler(slice_len=3, strict_length=strict)
        buffer = DictTensorReplayBuffer(storage=storage(20), sampler=sampler, generator=0, framework=framework)
        buffer.extend(episodes([2, 5, 3, 9]))
        return [{key: value.tolist() for key, value in buffer.sample(12).items()} for _ in range(5)]

    assert stream(ListStorage) == stream(DeviceStorage)


def test_steps_of_slices_are_put_together_and_stacked_too():
    rows = {"obs": torch.arange(6.0), "reward": torch.ones(6), "done": torch.arange(6) == 3}
    buffer = made(SliceSampler(slice_len=2), n_step=2, gamma=0.5, stack_num=2)
    buffer.extend(rows)
    batch = buffer.sample(40)
    expected = {0: [0, 0], 1: [0, 1], 2: [1, 2], 3: [2, 3], 4: [4, 4], 5: [4, 5]}
    assert all(obs == expected[at] for at, obs in zip(batch["index"].tolist(), batch["obs"].tolist(), strict=True))
    last = (batch["index"] == 3) | (batch["index"] == 5)
    assert batch["reward"].tolist() == torch.where(last, 1.0, 1.5).tolist()
    assert batch["discount"].tolist() == torch.where(last, 0.5, 0.25).tolist()


def test_the_number_of_steps_must_be_one_of_whole_slices():  # B3
    buffer = made(SliceSampler(num_slices=3), 20)
    buffer.extend(episodes([9]))
    with pytest.raises(SpecError, match="^batch_size counts steps: 8 cannot be divided by num_slices, 3$"):
        buffer.sample(8)
    with pytest.raises(SpecError, match="^batch_size counts steps: 9 cannot be divided by slice_len, 2$"):
        made(SliceSampler(slice_len=2), 20).sample(9)
    assert buffer.sample(9)["x"].unflatten(0, (3, 3)).diff(dim=1).eq(1).all()
    for wrong in ({}, {"num_slices": 2, "slice_len": 2}):
        with pytest.raises(TypeError, match="^a SliceSampler needs num_slices or slice_len, and not both$"):
            SliceSampler(**wrong)
    with pytest.raises(SpecError, match="^slice_len must be at least 1"):
        SliceSampler(slice_len=0)
    with pytest.raises(SpecError, match="^per must be one of"):
        SliceSampler(slice_len=2, per="episode")
    with pytest.raises(TypeError, match="^per: priorities say where slices begin$"):
        PrioritizedSliceSampler(slice_len=2, per="window")
    with pytest.raises(TypeError, match="^per: every trajectory gives one slice$"):
        SliceSamplerWithoutReplacement(slice_len=2, per="trajectory")


@pytest.mark.parametrize(("per", "share"), [("window", 2 / 30), ("trajectory", 1 / 2)])
def test_slices_are_drawn_per_trajectory_unless_told_otherwise(per, share):  # C1, B5.13
    buffer = made(SliceSampler(slice_len=2, per=per), 40)
    buffer.extend(episodes([3, 29]))
    batch = buffer.sample(20_000)
    assert (batch["e"] == 0).float().mean() == pytest.approx(share, abs=0.01)
    assert SliceSampler(slice_len=2).per == "trajectory"


def test_slices_need_to_know_where_episodes_end():  # B5.13
    buffer = made(SliceSampler(slice_len=2))
    with pytest.raises(RuntimeError, match="^Cannot sample from an empty storage.$"):
        buffer.sample(4)
    buffer.extend(numbers(0, 6))
    with pytest.raises(SpecError, match="^nothing says where episodes end: no terminated, truncated or done, and no "):
        buffer.sample(4)
    known = made(SliceSampler(slice_len=2))
    known.extend(TemporalDictTensor({"x": torch.arange(6).view(2, 3)}))
    assert all(first % 3 < 2 for first in known.sample(40)["x"][::2].tolist())


IDS = [3, 3, 0, 1, 1, 1, 2, 2, 2, 3]


@pytest.mark.parametrize("key", ["id", ("collector", "traj_ids"), "episode"])
@pytest.mark.parametrize("parts", [[10], [1] * 10, [2, 3, 5]], ids=str)
@pytest.mark.parametrize("kind", ["list", "device"])
def test_another_trajectory_id_begins_an_episode(key, parts, kind):  # R13, R14
    sampler = SliceSampler(slice_len=2, traj_key=key if key == "id" else None)
    storage = (ListStorage if kind == "list" else DeviceStorage)(12)
    buffer = DictTensorReplayBuffer(storage=storage, sampler=sampler, generator=0)
    name = key if isinstance(key, str) else "/".join(key)
    at = 0
    for n in parts:
        buffer.extend({"x": torch.arange(at, at + n), name: torch.tensor(IDS[at : at + n])})
        at += n
    firsts = set(buffer.sample(400)["x"][::2].tolist())
    assert firsts == {0, 3, 4, 6, 7}  # 9, of worker 3 too, does not follow 8, and 0 does not follow 9
    buffer.extend({"x": torch.arange(10, 14), name: torch.tensor([3, 3, 0, 0])})
    assert set(buffer.sample(400)["x"][::2].tolist()) == {3, 4, 6, 7, 9, 10, 12}


def test_ids_of_rows_added_one_by_one_count_too():
    buffer = made(SliceSampler(slice_len=2, traj_key="id"), 12)
    for at, name in enumerate(IDS):
        buffer.add({"x": at, "id": name})
    assert set(buffer.sample(400)["x"][::2].tolist()) == {0, 3, 4, 6, 7}
    buffer[3] = {"id": 0}
    assert set(buffer.sample(400)["x"][::2].tolist()) == {0, 2, 4, 6, 7}


def test_a_column_more_may_end_episodes():
    stop = torch.tensor([0, 0, 1, 0, 0, 0], dtype=torch.bool)
    done = torch.tensor([0, 0, 0, 0, 1, 0], dtype=torch.bool)
    buffer = made(SliceSampler(slice_len=2, end_key=("next", "stop")))
    buffer.extend({"x": torch.arange(6), "next": {"stop": stop, "done": done}})
    assert set(buffer.sample(200)["x"][::2].tolist()) == {0, 1, 3}
    for argument in ("end_key", "traj_key"):
        other = made(SliceSampler(slice_len=2, **{argument: "y"}))
        with pytest.raises(MissingKeyError, match=f"^no 'y', the {argument} of the sampler; there are"):
            other.extend(numbers(0, 3))
        assert len(other) == 0


def test_a_sampler_that_comes_later_finds_the_ends_of_its_keys():
    buffer = made(RandomSampler, 12)
    buffer.extend({"x": torch.arange(10), "id": torch.tensor(IDS)})
    with pytest.raises(MissingKeyError, match="^no 'y', the traj_key of the sampler"):
        buffer.set_sampler(SliceSampler(slice_len=2, traj_key="y"))
    buffer.set_sampler(SliceSampler(slice_len=2, traj_key="id"))
    assert set(buffer.sample(400)["x"][::2].tolist()) == {0, 3, 4, 6, 7}


def test_slices_follow_ends_that_are_changed():
    buffer = made(SliceSampler(slice_len=3), 20)
    buffer.extend(episodes([3, 3]))
    assert set(buffer.sample(120)["x"][::3].tolist()) == {0, 3}
    buffer[2] = {"next/done": False, "next/terminated": False}
    assert set(buffer.sample(300)["x"][::3].tolist()) == {0, 1, 2, 3}


# Slices without replacement


@pytest.mark.parametrize("prefetch", [None, 3])
@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [2, 2, 1]), (True, [2, 2])])
@pytest.mark.parametrize("size", [{"num_slices": 2}, {"slice_len": 3}], ids=str)
def test_a_pass_holds_a_slice_of_every_episode_once(size, drop_last, sizes, prefetch):  # B3, B6 test_slice_sampler
    sampler = SliceSamplerWithoutReplacement(drop_last=drop_last, **size)
    buffer = made(sampler, 40, batch_size=6, prefetch=prefetch)
    buffer.extend(episodes([5, 2, 3, 9, 4, 3]))
    orders, firsts = set(), set()
    for _ in range(30):
        passed = [slices_of(batch, 3) for batch in buffer]
        assert [len(each["e"]) for each in passed] == sizes
        each = {key: torch.cat([part[key] for part in passed]) for key in passed[0]}
        assert (each["e"] == each["e"][:, :1]).all() and (each["x"].diff(dim=1) == 1).all()
        assert each["next/truncated"].equal(torch.tensor([[False, False, True]] * sum(sizes)))
        order = tuple(each["e"][:, 0].tolist())
        assert len(set(order)) == len(order) and set(order) <= {0, 2, 3, 4, 5}
        orders.add(order)
        firsts |= set(each["x"][:, 0].tolist())
    assert len(orders) > 10
    assert firsts == {0, 1, 2, 7, *range(10, 17), 19, 20, 23}  # every window


def test_samplers_may_be_asked_for_by_whether_they_draw_with_replacement():  # torchrl 0.14
    assert type(RandomSampler(replacement=True)) is RandomSampler
    plain = RandomSampler(replacement=False, drop_last=True)
    assert type(plain) is SamplerWithoutReplacement and plain.drop_last
    assert type(SliceSampler(replacement=True, slice_len=2)) is SliceSampler
    slices = SliceSampler(replacement=False, slice_len=2, shuffle=False)
    assert type(slices) is SliceSamplerWithoutReplacement and not slices.shuffle
    buffer = made(slices, batch_size=4)
    buffer.extend(episodes([2, 2, 2]))
    assert [batch["x"].tolist() for batch in buffer] == [[0, 1, 2, 3], [4, 5]]
    assert [batch["x"].tolist() for batch in copy.deepcopy(buffer)] == [[0, 1, 2, 3], [4, 5]]
    with pytest.raises(SpecError, match="^PrioritizedSliceSampler: replacement must be True"):
        PrioritizedSliceSampler(slice_len=2, replacement=False)
    with pytest.raises(TypeError, match="drop_last"):
        RandomSampler(drop_last=True)


def test_slices_go_on_from_pass_to_pass():
    buffer = made(SliceSamplerWithoutReplacement(slice_len=2, shuffle=False, strict_length=False), 40)
    buffer.extend(episodes([2, 1, 2]))
    assert [buffer.sample(4)["x"].tolist() for _ in range(3)] == [[0, 1, 2], [3, 4], [0, 1, 2]]
    assert not buffer.sampler.ran_out
    assert buffer.sample(4)["x"].tolist() == [3, 4] and buffer.sampler.ran_out
    buffer.sample(2)
    other = made(SliceSamplerWithoutReplacement(num_slices=2), 40)
    other.extend(episodes([2, 3, 4]))
    other.sample(4)
    assert slices_of(other.sample(6), 3)["e"][:, 0].sort().values.tolist() == [1, 2]  # a pass is of one length


def test_of_the_episode_that_goes_on_there_is_a_slice_too():
    buffer = made(SliceSamplerWithoutReplacement(slice_len=3, shuffle=False), 40, batch_size=3)
    buffer.extend(episodes([3]))
    buffer.extend(some(episodes([4], 3), slice(3)))
    stream = iter(buffer)
    assert next(stream)["x"].tolist() == [0, 1, 2]
    buffer.extend(some(episodes([4], 3), slice(3, 4)))  # the pass is over what was there
    assert [batch["x"].tolist() for batch in stream] == [[3, 4, 5]]
    assert {first for batch in [*buffer, *buffer, *buffer, *buffer] for first in batch["x"][:1].tolist()} == {0, 3, 4}


@pytest.mark.parametrize("strict", [True, False])
def test_what_is_left_of_an_episode_before_its_turn_is_served(strict):
    buffer = made(SliceSamplerWithoutReplacement(slice_len=2, shuffle=False, strict_length=strict), 12, batch_size=2)
    buffer.extend(episodes([2, 2, 5, 3]))
    stream = iter(buffer)
    assert next(stream)["x"].tolist() == [0, 1]
    buffer.extend(episodes([7], 12))  # 0 to 6 are gone
    assert next(stream)["x"].tolist() == [7, 8]
    assert sorted(e for batch in buffer for e in batch["e"][:1].tolist()) == [2, 3, 1200]


def test_batches_of_more_slices_than_there_are():
    buffer = made(SliceSamplerWithoutReplacement(slice_len=2), 40, batch_size=20)
    buffer.extend(episodes([4, 1, 2]))
    assert [sorted(batch["e"].tolist()) for batch in buffer] == [[0, 0, 2, 2]]
    strict = made(SliceSamplerWithoutReplacement(slice_len=2, drop_last=True), 40, batch_size=6)
    strict.extend(episodes([4, 1, 2]))
    with pytest.raises(SpecError, match="^a batch is of 3 slices, there are 2 episodes of 2 steps, and"):
        strict.sample()
    with pytest.raises(SpecError, match="^nothing to sample: no episode of 5 steps is stored$"):
        buffer.set_sampler(SliceSamplerWithoutReplacement(slice_len=5))
        buffer.sample()


# Slices and priorities


def test_slices_know_the_largest_priority_of_those_that_are_there():
    sampler = PrioritizedSliceSampler(4, 1.0, 1.0, 0.0, slice_len=2, traj_key="id", max_priority_within_buffer=True)
    buffer = made(sampler, max_size=4)
    buffer.extend({"x": torch.arange(4), "id": torch.zeros(4)})
    buffer.update_priority([0, 1, 2, 3], [8.0, 2.0, 1.0, 1.0])
    buffer.add({"x": 4, "id": 0.0})
    assert leaves(buffer).tolist() == [2, 2, 1, 1]


def test_priorities_say_where_slices_begin_and_weigh_every_step():  # B3, C1
    buffer = made(PrioritizedSliceSampler(alpha=1.0, beta=1.0, eps=0.0, slice_len=3), 20)
    buffer.extend(episodes([5, 4]))
    priorities = torch.tensor([4.0, 2, 1, 50, 50, 3, 1, 50, 50])
    buffer.update_priority(torch.arange(9), priorities)
    batch = buffer.sample(3 * 3000)
    each = slices_of(batch, 3)
    found = np.bincount(each["x"][:, 0], minlength=9)
    assert_in_proportion(found, [4, 2, 1, 0, 0, 3, 1, 0, 0])
    first = priorities[each["x"][:, 0]]
    torch.testing.assert_close(each["priority_weight"], (1 / first)[:, None].expand(-1, 3))


@pytest.mark.parametrize("sampler", [SliceSampler, PrioritizedSliceSampler, SliceSamplerWithoutReplacement])
def test_nothing_is_cached_whatever_is_asked_for(sampler):  # most examples of torchrl ask for it
    drawn = []
    for cache_values in (False, True):
        buffer = made(sampler(slice_len=3, traj_key="id", cache_values=cache_values), max_size=30, batch_size=30)
        for at in range(4):
            buffer.extend({"x": torch.arange(9) + 9 * at, "id": torch.full((9,), at)})
            drawn.append((cache_values, buffer.sample()["x"].tolist()))
    assert [x for is_cached, x in drawn if is_cached] == [x for is_cached, x in drawn if not is_cached]
    assert set(drawn[-1][1]) <= set(range(6, 36)) and max(drawn[-1][1]) > 27


def test_slices_of_one_step_are_rows():  # B5.8
    buffer = made(PrioritizedSliceSampler(alpha=1.0, beta=0.0, slice_len=1), 20)
    buffer.extend(episodes([2, 2]))
    assert set(buffer.sample(100)["x"].tolist()) == {0, 1, 2, 3} and buffer.sample(3)["next/truncated"].all()


def test_a_sample_that_fails_leaves_the_priorities(monkeypatch):  # B5.8
    buffer = made(PrioritizedSliceSampler(alpha=1.0, eps=0.0, slice_len=4), 20)
    buffer.extend(episodes([2, 3]))
    buffer.update_priority(torch.arange(5), torch.arange(1.0, 6.0))
    with pytest.raises(SpecError, match="^nothing to sample"):
        buffer.sample(8)
    np.testing.assert_allclose(leaves(buffer), [1, 2, 3, 4, 5])


def test_priorities_of_steps_go_to_their_rows_but_not_those_of_padding():
    buffer = made(PrioritizedSliceSampler(alpha=1.0, eps=0.0, slice_len=4, strict_length=False, pad_output=True), 20)
    buffer.extend(episodes([2, 3]))
    batch = buffer.sample(80)
    batch.set("td_error", torch.where(batch["mask"], batch["x"] + 2.0, 1000.0))
    buffer.update_tensordict_priority(batch)
    np.testing.assert_allclose(leaves(buffer), [2, 3, 4, 5, 6])
    assert buffer.sampler.max_priority == 6


@pytest.mark.parametrize("reduction", ["max", "mean", "min"])
def test_padding_has_no_part_in_the_priority_of_a_slice(reduction):
    sampler = PrioritizedSliceSampler(
        alpha=1.0, eps=0.0, slice_len=4, strict_length=False, pad_output=True, reduction=reduction
    )
    buffer = made(sampler, 20)
    buffer.extend(episodes([2, 3]))
    batch = buffer.sample(80)
    batch.set("td_error", torch.where(batch["mask"], batch["x"] + 2.0, 1000.0 if reduction == "max" else 0.0))
    buffer.update_tensordict_priority({key: batch[key].view(20, 4) for key in ("index", "mask", "td_error")})
    # Slices begin with rows 0 and 2, or with others that have enough of their episode after them.
    wanted = {"max": [3, 6], "mean": [2.5, 5], "min": [2, 4]}[reduction]
    assert leaves(buffer)[[0, 2]].tolist() == wanted and buffer.sampler.max_priority <= 6


@pytest.mark.parametrize("truncated", [True, False])
def test_a_slice_that_was_changed_is_written_back_without_the_marks_of_its_end(truncated):
    buffer = made(SliceSampler(slice_len=3), 20)
    end = torch.arange(12) == 11
    buffer.extend({"x": torch.arange(12.0), "done": end, "is_init": torch.zeros(12, dtype=torch.bool)}
                  | ({"truncated": end} if truncated else {}))  # fmt: skip
    batch = buffer.sample(6)
    batch.set("x", batch["x"] + 100)
    buffer[batch["index"]] = batch
    assert buffer["done"].equal(end) and not buffer["is_init"].any()
    assert (buffer["x"] >= 100).nonzero().ravel().tolist() == batch["index"].unique().tolist()
    assert buffer.sample(600)["index"].view(-1, 3).diff().unique().tolist() == [1]


def test_a_sample_of_n_steps_cannot_be_written_back():
    buffer = made(n_step=2, gamma=1.0)
    buffer.extend({"x": torch.arange(4.0), "reward": torch.ones(4), "done": torch.arange(4) == 3})
    batch = buffer.sample(8)
    with pytest.raises(SpecError, match="^.*samples of n steps or stacks are not what is stored: give columns without"):
        buffer[batch["index"]] = batch
    assert buffer["reward"].tolist() == [1] * 4
    buffer[batch["index"]] = {"x": batch["x"] + 1}
    assert buffer["x"].sum() > 6


def test_a_sample_leaves_its_weights_behind_when_it_goes_to_another_buffer():
    prioritised = DictTensorPrioritizedReplayBuffer(alpha=1.0, beta=1.0, generator=0)
    prioritised.extend(numbers(0, 6))
    empty, filled = made(), made()
    filled.extend(numbers(0, 1))
    for buffer in (empty, filled):
        batch = prioritised.sample(4)
        buffer.extend(batch)
        assert list(buffer[:].keys()) == ["x"] and buffer["x"][-4:].equal(batch["x"])
