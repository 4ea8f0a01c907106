"""Every surface with priorities draws, weighs, updates and saves alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from frameworks import EVERY_KIND, array, host, make

from rlstructs.distributed.shard import Shard, ShardSettings, columns_of
from rlstructs.errors import SpecError
from rlstructs.replay import (
    ChunkReplayBuffer,
    DictTensorPrioritizedReplayBuffer,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedVectorReplayBuffer,
)
from rlstructs.replay.intake.trajectories import Steps

CAPACITY, ALPHA, BETA = 8, 0.6, 0.4


@dataclass(frozen=True)
class Surface:
    """A memory of one lane with `CAPACITY` rows, each a number in the column `name`.

    Attributes:
        name: of the column.
        make: makes one.
        add: adds a row.
        draw: draws a number of rows; returns their ids and weights, which are over the largest of the memory.
        set: sets the priorities of row ids.
        parts: its store, and its priorities.
    """

    name: str
    make: Callable[[], Any]
    add: Callable[[Any, float], Any]
    draw: Callable[[Any, int], tuple[Any, Any]]
    set: Callable[[Any, Any, Any], None]
    parts: Callable[[Any], tuple[Any, Any]] = lambda made: (made._storage, made._priorities)

    def filled(self, n):
        made = self.make()
        for number in range(n):
            self.add(made, float(number))
        return made

    def leaves(self, made):
        """The priorities of all rows to the power of alpha."""
        storage, priorities = self.parts(made)
        priorities.follow(storage.view())
        return priorities.tree.values[:CAPACITY].copy()


def _memory(kind):
    def draw(made, n):
        made.sample(["x"], batch_size=n)
        return host(made.get_sampling_indexes()), host(made.get_sampling_weights())

    return Surface(
        "x", lambda: make(kind, CAPACITY, 1, ["x"], cls="PrioritizedMemory", alpha=ALPHA, beta=BETA),
        lambda made, number: made.add_samples(x=array(kind, [[number]])), draw,
        lambda made, rows, values: made.update_priorities(rows, values),
    )  # fmt: skip


def _tianshou(make_buffer, stacked):
    def add(made, number):
        row = {"obs": number, "act": 0, "rew": 0.0, "terminated": False, "truncated": False}
        made.add({key: [value] for key, value in row.items()} if stacked else row)

    def draw(made, n):
        batch, rows = made.sample(n)
        return rows, batch.weight

    return Surface(
        "obs", make_buffer, add, draw, lambda made, rows, values: made.update_weight(rows, values),
        lambda made: (made._storage, made._reader.priorities),
    )  # fmt: skip


def _chunks():
    def make_buffer():
        buffer = ChunkReplayBuffer(CAPACITY, 0, enable_prioritized=True, alpha=ALPHA, beta=BETA)
        buffer.setup_entry("x", np.float64)
        return buffer

    def draw(made, n):
        info = made.sample(n, 1, "prioritized").info
        return info["indices"][:, 0], info["weights"]

    return Surface(
        "x", make_buffer, lambda made, number: made.append({"x": number}), draw,
        lambda made, rows, values: made.update_priorities(np.asarray(rows)[:, None], np.asarray(values)[:, None]),
    )  # fmt: skip


def _torchrl():
    def draw(made, n):
        batch = made.sample(n)
        return batch["index"].numpy(), batch["priority_weight"].numpy()

    return Surface(
        "x",
        lambda: DictTensorPrioritizedReplayBuffer(
            storage=ListStorage(CAPACITY), alpha=ALPHA, beta=BETA, eps=0.0, generator=0
        ),
        lambda made, number: made.add({"x": number}), draw,
        lambda made, rows, values: made.update_priority(rows, values),
        lambda made: (made._storage, made.sampler._priorities),
    )  # fmt: skip


def _shard():
    settings = {"sequence_length": 1, "n_step": 1, "gamma": 0.9, "episode_ends": "cross"}

    def add(made, number):
        steps = Steps({"x": np.full((1, 1), number)}, 1, np.ones(1, np.int64), np.zeros(1, np.int64))
        made.extend({"x": torch.float64}, 1.0, columns_of(steps))

    def draw(made, n):
        made._memory.beta = BETA
        return made.sample(["x"], n, settings).columns["/index"], made._memory.get_sampling_weights().numpy()

    def set_priorities(made, rows, values):
        made.update_priorities({"index": np.asarray(rows), "priority": np.asarray(values)})

    return Surface(
        "x", lambda: Shard(ShardSettings(CAPACITY, ALPHA, {"x": "x"}), 1, 0), add, draw, set_priorities,
        lambda made: (made._memory._storage, made._memory._priorities),
    )  # fmt: skip


PER = {"alpha": ALPHA, "beta": BETA, "weight_norm": False}
BUFFERS = {
    "PrioritizedReplayBuffer": _tianshou(lambda: PrioritizedReplayBuffer(CAPACITY, **PER), False),
    "PrioritizedVectorReplayBuffer": _tianshou(lambda: PrioritizedVectorReplayBuffer(CAPACITY, 1, **PER), True),
    "ChunkReplayBuffer": _chunks(),
    "DictTensorPrioritizedReplayBuffer": _torchrl(),
}
CHECKED = [
    *(pytest.param(_memory(*(kind.values if hasattr(kind, "values") else [kind])), marks=getattr(kind, "marks", ()),
                   id=f"memory of {getattr(kind, 'values', [kind])[0]}") for kind in EVERY_KIND),
    *(pytest.param(surface, id=name) for name, surface in BUFFERS.items()),
]  # fmt: skip
EVERY = [*CHECKED, pytest.param(_shard(), id="Shard")]


@pytest.mark.parametrize("surface", EVERY)
def test_draws_and_weights_are_those_of_the_priorities(surface):
    made, given = surface.filled(4), np.array([1.0, 2.0, 3.0, 6.0])
    surface.draw(made, 1)
    surface.set(made, np.arange(4), given)
    np.testing.assert_allclose(surface.leaves(made)[:4], given**ALPHA, rtol=1e-5)
    rows, weights = surface.draw(made, 3000)
    shares = given**ALPHA / (given**ALPHA).sum()
    np.testing.assert_allclose(np.bincount(rows, minlength=4) / 3000, shares, atol=0.002)  # one from each 3000th
    np.testing.assert_allclose(weights, given[rows] ** -(ALPHA * BETA), rtol=1e-5)
    assert weights.dtype == np.float32


@pytest.mark.parametrize("surface", EVERY)
def test_a_new_row_has_the_largest_priority_and_a_repeated_row_its_last(surface):
    made = surface.filled(3)
    assert surface.leaves(made)[:3].tolist() == [1, 1, 1]
    surface.draw(made, 1)
    surface.set(made, np.array([0, 1, 0]), np.array([9.0, 5.0, 0.5]))
    surface.add(made, 3.0)
    np.testing.assert_allclose(surface.leaves(made)[:4], np.array([0.5, 5, 1, 9]) ** ALPHA, rtol=1e-5)


@pytest.mark.parametrize("surface", EVERY)
def test_priorities_of_rows_that_are_overwritten_come_too_late(surface):
    made = surface.filled(CAPACITY)
    rows, _ = surface.draw(made, 50)
    for number in range(3):  # the rows 0, 1 and 2
        surface.add(made, 100.0 + number)
    surface.set(made, rows, np.full(50, 3.0))
    assert set(rows.tolist()) == set(range(CAPACITY))
    np.testing.assert_allclose(surface.leaves(made), [1] * 3 + [3**ALPHA] * 5, rtol=1e-5)


@pytest.mark.parametrize("surface", EVERY)
def test_what_a_batch_brings_may_be_written_to(surface):
    made = surface.filled(CAPACITY)
    rows, _ = surface.draw(made, 50)
    kept = rows.copy()
    if rows.flags.writeable:  # what jax gives is not
        rows[:] = 0
    surface.add(made, 100.0)
    surface.set(made, kept, np.full(50, 3.0))
    np.testing.assert_allclose(surface.leaves(made), [1] + [3**ALPHA] * 7, rtol=1e-5)


BAD = {
    "not a number": ([0, 1], [1.0, np.nan], SpecError, "^priorities must be finite and at least 0, got nan$"),
    "infinite": ([0, 1], [1.0, np.inf], SpecError, "^priorities must be finite and at least 0, got inf$"),
    "text": ([0], ["a"], SpecError, "^priorities must hold numbers, got <U1$"),
    "complex": ([0], [1j], SpecError, "^priorities must hold numbers, got complex128$"),
    "beyond the memory": ([0, CAPACITY], [1.0, 1.0], IndexError, r"^index 8 is not in \[0, 8\)$"),
    "never written": ([0, 3], [1.0, 1.0], SpecError, "^index 3 holds no row$"),
    "no integers": ([0.0], [1.0], SpecError, "^index must hold integers, got float64$"),
    "bools": ([True], [1.0], SpecError, "^index must hold integers, got bool$"),
}


@pytest.mark.parametrize(("rows", "values", "error", "message"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("surface", CHECKED)
def test_what_does_not_fit_is_named_alike_and_changes_nothing(surface, rows, values, error, message):
    made = surface.filled(3)
    surface.draw(made, 2)
    before = surface.leaves(made).tolist()
    with pytest.raises(error, match=message):
        surface.set(made, np.array(rows), np.array(values))
    assert surface.leaves(made).tolist() == before


@pytest.mark.parametrize("surface", CHECKED)
def test_a_file_brings_priorities_draws_and_the_largest(surface, tmp_path):
    made = surface.filled(CAPACITY)
    rows, _ = surface.draw(made, 30)
    surface.set(made, np.arange(CAPACITY), np.arange(1.0, 1 + CAPACITY))
    made.save(tmp_path / "x.npz")
    loaded = surface.filled(1)
    loaded.load(tmp_path / "x.npz")
    for each in (made, loaded):
        surface.add(each, 100.0)  # the row 0, of the largest priority
        surface.set(each, rows, np.full(30, 2.0))
    assert surface.leaves(loaded).tolist() == surface.leaves(made).tolist()
    np.testing.assert_allclose(surface.leaves(made), [8**ALPHA] + [2**ALPHA] * 7, rtol=1e-5)
    for one, other in zip(surface.draw(made, 20), surface.draw(loaded, 20), strict=True):
        assert one.tolist() == other.tolist()
