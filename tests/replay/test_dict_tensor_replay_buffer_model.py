"""Random operations on `DictTensorReplayBuffer` and on plain lists: there is never a difference."""

from __future__ import annotations

import copy
import itertools
import tempfile
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from replay_storages import DeviceStorage

from rlstructs import SpecError, TemporalDictTensor
from rlstructs.replay import (
    DictTensorReplayBuffer,
    ListStorage,
    MemmapStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorStorage,
)
from rlstructs.replay.torchrl import storages

pytestmark = pytest.mark.slow
SETTINGS = settings(
    max_examples=40, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck), database=None,
    phases=[Phase.generate, Phase.shrink],
)  # fmt: skip
WIDE = 80  # float32: more bytes than from which on a next observation is stored once
ALPHA, EPS = 0.5, 0.125


@dataclass
class Row:
    """What a row holds, whether an episode begins with it, and its priority."""

    number: int
    obs: float
    following: float
    end: bool
    begins: bool
    priority: float = 1.0


class BufferMachine(RuleBasedStateMachine):
    """`rows` are all since the buffer was emptied, of which the last `size` are there."""

    make_sampler = None

    @initialize(
        size=st.integers(1, 9), kind=st.sampled_from([ListStorage, TensorStorage, MemmapStorage, DeviceStorage]),
        prefetch=st.sampled_from([None, None, 1, 3]), few_rows=st.sampled_from([1, 2, 1024]),
    )  # fmt: skip
    def start(self, size, kind, prefetch, few_rows):
        self.old, storages.FEW_ROWS = storages.FEW_ROWS, few_rows
        self.size, self.kind, self.prefetch = size, kind, prefetch
        self.folder = tempfile.TemporaryDirectory()
        self.buffer = self.made()
        self.rows, self.count = [], 0
        self.draws = []  # (row ids, numbers), the latest first
        self.written = [], []  # those of the last write
        self.largest = 1.0

    def made(self):
        return DictTensorReplayBuffer(
            storage=self.kind(self.size), sampler=type(self).make_sampler, batch_size=4, prefetch=self.prefetch,
            generator=3,
        )  # fmt: skip

    def teardown(self):
        if hasattr(self, "folder"):
            self.buffer.close()
            self.folder.cleanup()
            storages.FEW_ROWS = self.old

    # The model

    def held(self):
        """Row id -> row, the oldest first."""
        n = len(self.rows)
        return {at % self.size: self.rows[at] for at in range(max(0, n - self.size), n)}

    def new_row(self, end, begins=False):
        self.count += 1
        before = self.rows[-1] if self.rows else None
        obs = before.following if before and not before.end and self.count % 4 else float(self.count)
        row = Row(self.count, obs, self.count + 0.5, end, begins or before is None or before.end, self.largest)
        self.rows.append(row)
        return row

    def columns(self, rows):
        wide = lambda values: torch.tensor(values, dtype=torch.float32).view(-1, 1).repeat(1, WIDE)  # noqa: E731
        return {
            "n": torch.tensor([row.number for row in rows]), "obs": wide([row.obs for row in rows]),
            "next": {"obs": wide([row.following for row in rows]),
                     "done": torch.tensor([row.end for row in rows], dtype=torch.bool)},
        }  # fmt: skip

    def check(self, batch, rows):
        assert batch["n"].tolist() == [row.number for row in rows]
        assert batch["obs"][:, 0].tolist() == [row.obs for row in rows]
        assert batch["next/obs"][:, -1].tolist() == [row.following for row in rows]

    def wrote(self, rows):
        """The row ids of these, which are the last ones, -1 of those that are gone."""
        last = range(len(self.rows) - len(rows), len(self.rows))
        ids = [at % self.size if at >= len(self.rows) - self.size else -1 for at in last]
        if rows:
            self.written = ids, [row.number for row in rows]
        return ids

    # Writing

    @rule(end=st.booleans())
    def add(self, end):
        rows = [self.new_row(end)]
        row = self.columns(rows)
        item = {"n": row["n"][0], "obs": row["obs"][0], "next": {k: v[0] for k, v in row["next"].items()}}
        assert [self.buffer.add(item)] == self.wrote(rows)

    @rule(ends=st.lists(st.booleans(), max_size=14))
    def extend(self, ends):
        rows = [self.new_row(end) for end in ends]
        assert self.buffer.extend(self.columns(rows)).tolist() == self.wrote(rows)

    @rule(lengths=st.lists(st.integers(0, 4), min_size=1, max_size=3), ends=st.lists(st.booleans(), min_size=12))
    def extend_trajectories(self, lengths, ends):
        T = max(lengths)
        rows, padded = [], []
        for b, length in enumerate(lengths):
            rows += [self.new_row(ends[4 * b + t], begins=t == 0) for t in range(length)]
            padded += rows[len(rows) - length :] + [Row(-1, -1, -1, True, True)] * (T - length)
        flat = {key: value for name, value in self.columns(padded).items()
                for key, value in (({f"{name}/{k}": v for k, v in value.items()} if isinstance(value, dict)
                                    else {name: value}).items())}  # fmt: skip
        steps = TemporalDictTensor(
            {key: value.unflatten(0, (len(lengths), T)) for key, value in flat.items()}, torch.tensor(lengths)
        )
        assert self.buffer.extend(steps).tolist() == self.wrote(rows)

    @rule()
    def extend_what_does_not_fit(self):
        if self.rows:
            for rows in ({"n": torch.arange(2)}, {**self.columns(self.rows[-1:]), "x": torch.zeros(1)}):
                with pytest.raises(SpecError):
                    self.buffer.extend(rows)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), end=st.booleans())
    def change(self, data, end):
        held = self.held()
        row_id = data.draw(st.sampled_from(sorted(held)))
        row, order = held[row_id], list(held.values())
        self.buffer[row_id] = {"obs": np.full(WIDE, -row.number, np.float32), "next/done": end}
        row.obs = float(-row.number)
        after = order.index(row) + 1
        if after < len(order):
            # An episode that began because this one ended does so no more; one that began anyway does.
            order[after].begins = end or (order[after].begins and not row.end)
        row.end = end

    @precondition(lambda self: len(self.rows) > 15)
    @rule()
    def empty(self):
        self.buffer.empty()
        self.rows, self.largest = [], 1.0

    # Keeping

    @rule(way=st.sampled_from(["npz", "dumps", "state_dict", "deepcopy"]))
    def restore(self, way):
        saved = self.buffer
        self.buffer = copy.deepcopy(saved) if way == "deepcopy" else self.made()
        if way == "npz":
            saved.save(f"{self.folder.name}/x.npz")
            self.buffer.load(f"{self.folder.name}/x.npz")
        elif way == "dumps":
            saved.dumps(f"{self.folder.name}/y")
            self.buffer.loads(f"{self.folder.name}/y")
        elif way == "state_dict":
            self.buffer.load_state_dict(saved.state_dict())
        saved.close()
        self.written = [], []

    # Reading

    @invariant()
    def holds_what_the_lists_hold(self):
        if not hasattr(self, "buffer"):
            return
        held = self.held()
        assert len(self.buffer) == len(held) and self.buffer.write_count == len(self.rows)
        if not self.rows:
            return
        by_id = [held[row_id] for row_id in sorted(held)]
        self.check(self.buffer[:], by_id)
        assert self.buffer["next/done"].tolist() == [row.end for row in by_id]
        times = []
        for row in held.values():
            times.append(0 if row.begins or not times else times[-1] + 1)
        found = self.buffer._storage.episodes.times(np.array(list(held)))
        # How far the oldest episode had come is known until its ends are changed.
        first = next((at for at, t in enumerate(times) if t == 0 and at), len(times))
        assert found[first:].tolist() == times[first:] and (np.diff(found[:first]) == 1).all()

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def read(self, data):
        held = self.held()
        ids = data.draw(st.lists(st.sampled_from(sorted(held)), max_size=5))
        self.check(self.buffer[ids], [held[row_id] for row_id in ids])
        low, high = sorted(data.draw(st.tuples(*[st.integers(-10, 10)] * 2)))
        self.check(self.buffer[low:high], [held[row_id] for row_id in sorted(held)][low:high])

    def sampled(self, batch):
        """The rows of a batch, by its index."""
        held = self.held()
        rows = [held[row_id] for row_id in batch["index"].tolist()]
        self.check(batch, rows)
        self.draws = [(batch["index"].tolist(), batch["n"].tolist()), *self.draws][:32]
        return rows

    @rule()
    def sample(self):
        if not self.rows:
            with pytest.raises(RuntimeError, match="^Cannot sample from an empty storage.$"):
                self.buffer.sample()
            return
        assert len(self.sampled(self.buffer.sample())) == 4


class RandomMachine(BufferMachine):
    make_sampler = RandomSampler


class PassMachine(BufferMachine):
    make_sampler = SamplerWithoutReplacement
    waiting = None  # numbers that this pass has not served yet

    def left(self):
        return [row.number for row in self.held().values() if self.waiting is None or row.number in self.waiting]

    @rule()
    def sample(self):
        if not self.rows:
            return super().sample()
        if not self.left():
            self.waiting = None
        self.serve(self.buffer.sample())
        assert self.buffer.sampler.ran_out == (not self.left())

    def serve(self, batch):
        left = self.left()
        numbers = [row.number for row in self.sampled(batch)]
        assert len(set(numbers)) == len(numbers) == min(4, len(left)) and set(numbers) <= set(left)
        self.waiting = set(left) - set(numbers)

    @precondition(lambda self: len(self.rows) > 15)
    @rule()
    def empty(self):
        super().empty()
        self.waiting = None

    @precondition(lambda self: self.rows)
    @rule(n=st.integers(1, 3))
    def iterate(self, n):
        self.waiting = None
        for _, batch in zip(range(n), self.buffer, strict=False):
            self.serve(batch)
        assert n < 3 or len(self.left()) <= max(0, len(self.held()) - 12)


class PrioritisedMachine(BufferMachine):
    make_sampler = lambda: PrioritizedSampler(alpha=ALPHA, beta=1.0, eps=EPS)  # noqa: E731

    @rule()
    def sample(self):
        if not self.rows:
            return super().sample()
        batch = self.buffer.sample()
        rows = self.sampled(batch)
        leaves = np.array([(row.priority + EPS) ** ALPHA for row in self.held().values()])
        own = np.array([(row.priority + EPS) ** ALPHA for row in rows])
        np.testing.assert_allclose(batch["priority_weight"], leaves.min() / own, rtol=1e-5)

    @precondition(lambda self: self.draws)
    @rule(data=st.data(), priorities=st.lists(st.integers(0, 9), min_size=16, max_size=16))
    def update(self, data, priorities):
        ids, numbers = data.draw(st.sampled_from(self.draws))
        # The same ids may have been drawn again since: then they mean that. Those of the last write mean that.
        numbers = self.written[1] if ids == self.written[0] else next(n for i, n in self.draws if i == ids)
        self.buffer.update_priority(ids, [float(p) for p in priorities[: len(ids)]])
        held, given = self.held(), {}
        for row_id, number, priority in zip(ids, numbers, priorities, strict=False):
            if row_id in held and held[row_id].number == number:
                held[row_id].priority = float(priority)
                given[row_id] = priority
                self.largest = max(self.largest, float(priority))

    @precondition(lambda self: self.rows)
    @rule(priority=st.integers(0, 9))
    def update_what_was_written(self, priority):
        row = self.new_row(False)
        ids = self.buffer.extend(self.columns([row]))
        assert ids.tolist() == self.wrote([row])
        self.buffer.update_priority(ids, float(priority))
        row.priority = float(priority)
        self.largest = max(self.largest, row.priority)

    @invariant()
    def priorities_are_those_of_the_lists(self):
        if not hasattr(self, "buffer") or not self.rows:
            return
        buffer = self.buffer
        buffer.sampler._of().follow(buffer._storage.view())
        found = buffer.sampler._of().tree.values
        expected = np.zeros(found.size)
        for row_id, row in self.held().items():
            expected[row_id] = (row.priority + EPS) ** ALPHA
        np.testing.assert_allclose(found, expected, rtol=1e-12)


class SliceMachine(BufferMachine):
    make_sampler = lambda: SliceSampler(slice_len=2)  # noqa: E731

    def pairs(self):
        """Numbers of rows that follow one another in an episode."""
        held = list(self.held().values())
        return {(a.number, b.number) for a, b in itertools.pairwise(held) if not b.begins}

    @rule()
    def sample(self):
        if not self.rows:
            return super().sample()
        pairs = self.pairs()
        if not pairs:
            with pytest.raises(SpecError, match="^nothing to sample: no episode of 2 steps is stored$"):
                self.buffer.sample()
            return
        batch = self.buffer.sample()
        numbers = [row.number for row in self.sampled(batch)]
        assert {tuple(numbers[:2]), tuple(numbers[2:])} <= pairs
        assert batch["next/truncated"].tolist() == [False, True] * 2


class PrioritisedSliceMachine(SliceMachine):
    make_sampler = lambda: PrioritizedSliceSampler(slice_len=2)  # noqa: E731


class SlicePassMachine(SliceMachine):
    make_sampler = lambda: SliceSamplerWithoutReplacement(slice_len=2)  # noqa: E731
    waiting = None  # of each episode that this pass has not served yet: its pairs of numbers

    def left(self):
        """Of each episode of which a slice is left: its pairs."""
        held = list(self.held().values())
        if self.waiting is None:
            self.waiting = [set()]
            for a, b in itertools.pairwise(held):
                self.waiting += [set()] if b.begins else []
                self.waiting[-1] |= set() if b.begins else {(a.number, b.number)}
        oldest = held[0].number
        present = [{pair for pair in pairs if pair[0] >= oldest} for pairs in self.waiting]
        return [pairs for pairs in present if pairs]

    @rule()
    def sample(self):
        if not self.rows or not self.pairs():
            return super().sample()
        if self.buffer.sampler._order is None or not self.left():  # what changes ends begins a pass, too
            self.waiting = None
        self.waiting = self.left()
        n_left = len(self.waiting)
        numbers = [row.number for row in self.sampled(self.buffer.sample())]
        for pair in zip(numbers[::2], numbers[1::2], strict=True):
            self.waiting.remove(next(pairs for pairs in self.waiting if pair in pairs))
        assert len(self.waiting) == max(n_left - 2, 0)
        assert self.buffer.sampler.ran_out == (not self.waiting)


for machine in (
    RandomMachine, PassMachine, PrioritisedMachine, SliceMachine, PrioritisedSliceMachine, SlicePassMachine,
):  # fmt: skip
    machine.TestCase.settings = SETTINGS
    globals()[f"Test{machine.__name__}"] = machine.TestCase
