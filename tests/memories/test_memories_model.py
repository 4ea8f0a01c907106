"""Random operations on a memory of each library and on plain lists: there is never a difference."""

from __future__ import annotations

import tempfile

import numpy as np
import pytest
import torch
from frameworks import EVERY_KIND, ON_HOST, array, flat, host, make
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlstructs import DictTensor, TemporalDictTensor, Trajectories
from rlstructs.errors import SpecError

TENSORS = {"observations": ("float32", 2), "n": ("uint8", 1), "terminated": ("bool", 1)}
NAMES = list(TENSORS)
SETTINGS = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), database=None,
    phases=[Phase.generate, Phase.shrink],
)  # fmt: skip


class MemoryMachine(RuleBasedStateMachine):
    """`lanes[e]` are all rows of environment e since the last reset: (observations, n, terminated)."""

    kind: str

    @initialize(memory_size=st.integers(1, 5), num_envs=st.sampled_from([1, 1, 2, 3]), replacement=st.booleans())
    def start(self, memory_size, num_envs, replacement):
        self.size, self.num_envs, self.replacement = memory_size, num_envs, replacement
        self.folder = tempfile.TemporaryDirectory()
        self.memory = self.made()
        self.count = 0
        self.lanes = [[] for _ in range(num_envs)]

    def made(self):
        return make(self.kind, self.size, self.num_envs, TENSORS, replacement=self.replacement)

    def teardown(self):
        if hasattr(self, "folder"):
            self.folder.cleanup()

    # The model

    def new_row(self, end):
        self.count += 1
        return (float(self.count), -float(self.count)), self.count % 256, end

    def behind(self):
        """The environments that have the fewest rows."""
        counts = [len(lane) for lane in self.lanes]
        return [at for at, n in enumerate(counts) if n == min(counts)]

    def held(self, lane):
        """The steps of an environment that are there."""
        return range(max(0, len(self.lanes[lane]) - self.size), len(self.lanes[lane]))

    def index(self, lane, step):
        return step % self.size * self.num_envs + lane

    def places(self):
        """By time and then by environment."""
        return sorted((step, lane) for lane in range(self.num_envs) for step in self.held(lane))

    def by_index(self):
        return {self.index(lane, step): (lane, step) for step, lane in self.places()}

    def starts(self, length, within):
        """The places from which so many rows are there, of one episode if `within`."""
        return {
            (lane, step)
            for lane in range(self.num_envs)
            for step in self.held(lane)
            if step + length <= len(self.lanes[lane])
            and not (within and any(row[2] for row in self.lanes[lane][step : step + length - 1]))
        }

    def check(self, tensors, places):
        """That these tensors hold the rows at these places."""
        rows = [self.lanes[lane][step] for lane, step in places]
        observations, n, terminated = tensors
        assert host(observations).shape == (len(rows), 2)
        assert host(observations).tolist() == [list(row[0]) for row in rows]
        assert flat(n) == [row[1] for row in rows]
        assert flat(terminated) == [row[2] for row in rows]

    # Adding

    def add(self, rows, shape):
        observations, n, terminated = zip(*rows, strict=True)
        self.memory.add_samples(
            observations=array(self.kind, np.reshape(observations, (*shape, 2)), "float32"),
            n=array(self.kind, np.reshape(n, (*shape, 1)), "uint8"),
            terminated=array(self.kind, np.reshape(terminated, (*shape, 1))),
        )

    @rule(ends=st.lists(st.booleans(), min_size=3, max_size=3))
    def add_a_row_of_each(self, ends):
        rows = [self.new_row(end) for end in ends[: self.num_envs]]
        self.add(rows, (self.num_envs,))
        for lane, row in zip(self.lanes, rows, strict=True):
            lane.append(row)

    @rule(data=st.data(), ends=st.lists(st.booleans(), min_size=3, max_size=3))
    def add_some(self, data, ends):
        behind = self.behind()
        n = data.draw(st.integers(1, len(behind)))
        rows = [self.new_row(end) for end in ends[:n]]
        self.add(rows, (n,))
        # As many as there are environments are a row of each, wherever they stand.
        for lane, row in zip(range(self.num_envs) if n == self.num_envs else behind, rows, strict=False):
            self.lanes[lane].append(row)

    @rule(end=st.booleans())
    def add_one(self, end):
        row = self.new_row(end)
        self.add([row], ())
        self.lanes[self.behind()[0]].append(row)

    @precondition(lambda self: self.num_envs == 1)
    @rule(ends=st.lists(st.booleans(), min_size=1, max_size=17))
    def add_many(self, ends):
        rows = [self.new_row(end) for end in ends]
        self.add(rows, (len(rows),))
        self.lanes[0] += rows

    @rule(ends=st.lists(st.booleans(), min_size=3, max_size=3))
    def add_a_row_without_all_tensors(self, ends):
        rows = [self.new_row(False) for _ in range(self.num_envs)]
        self.memory.add_samples(observations=array(self.kind, [row[0] for row in rows], "float32"), unknown=None)
        for lane, (observations, _, _) in zip(self.lanes, rows, strict=True):
            lane.append((observations, 0, False))

    @rule(data=st.data(), n_timesteps=st.integers(1, 12))
    def add_trajectories(self, data, n_timesteps):
        lanes = data.draw(st.lists(st.integers(0, self.num_envs - 1), max_size=4))
        lengths = [data.draw(st.integers(0, n_timesteps)) for _ in lanes]
        observations = np.zeros((len(lanes), n_timesteps, 2), np.float32)
        n = np.zeros((len(lanes), n_timesteps), np.uint8)
        terminated = np.zeros((len(lanes), n_timesteps), bool)
        for at, (lane, length) in enumerate(zip(lanes, lengths, strict=True)):
            for t in range(length):
                row = self.new_row(data.draw(st.booleans()))
                observations[at, t], n[at, t], terminated[at, t] = row
                self.lanes[lane].append(row)
        steps = {"o": torch.from_numpy(observations), "n": torch.from_numpy(n), "e": torch.from_numpy(terminated)}
        batch = Trajectories(
            DictTensor({"env_index": torch.tensor(lanes, dtype=torch.int64)}),
            TemporalDictTensor(steps, torch.tensor(lengths, dtype=torch.int64)),
        )
        self.memory.add_trajectories(batch, {"observations": "o", "n": "n", "terminated": "e"})

    @rule()
    def add_what_does_not_fit(self):
        for shape in ((self.num_envs, 3), (self.num_envs, 2, 2)):
            with pytest.raises(SpecError, match="^add_samples: 'observations' has shape"):
                self.memory.add_samples(observations=np.ones(shape, np.float32))
        self.memory.strict = True
        with pytest.raises(SpecError, match="would lose its values"):
            self.memory.add_samples(
                observations=np.ones((self.num_envs, 2), np.float32), n=np.full((self.num_envs, 1), 0.5, np.float32)
            )
        self.memory.strict = False

    # Else

    @rule()
    def reset(self):
        self.memory.reset()
        self.lanes = [[] for _ in range(self.num_envs)]

    @precondition(lambda self: self.kind in ON_HOST)
    @rule()
    def share_memory(self):
        self.memory.share_memory()

    @rule(form=st.sampled_from(["pt", "npz", "csv"]))
    def save_and_load(self, form):
        path = self.memory.save(self.folder.name, format=form)
        saved, self.memory = self.memory, self.made()
        self.memory.load(path)
        if len(saved):
            drawn = [[flat(t) for t in memory.sample(NAMES, batch_size=1)[0]] for memory in (saved, self.memory)]
            assert drawn[0] == drawn[1]

    @rule(batch_size=st.integers(1, 8), length=st.integers(1, 3), within=st.booleans(), mini_batches=st.integers(1, 3))
    def sample(self, batch_size, length, within, mini_batches):
        allowed = self.starts(length, within)
        arguments = {
            "batch_size": batch_size, "sequence_length": length, "mini_batches": mini_batches,
            "episode_ends": "never" if within else "cross",
        }  # fmt: skip
        if not allowed:
            with pytest.raises(SpecError, match="^nothing to sample"):
                self.memory.sample(NAMES, **arguments)
            return
        parts = self.memory.sample(NAMES, **arguments)
        assert len(parts) == mini_batches
        where = self.by_index()
        places = [where[index] for index in np.asarray(self.memory.get_sampling_indexes()).tolist()]
        starts = places[::length]
        assert allowed.issuperset(starts)
        assert places == [(lane, step + t) for lane, step in starts for t in range(length)]
        assert len(starts) == (batch_size if self.replacement else min(batch_size, len(allowed)))
        assert self.replacement or len(set(starts)) == len(starts)
        for part in parts:
            n = len(host(part[0]))
            assert n % length == 0
            self.check(part, places[:n])
            del places[:n]
        assert not places

    @rule(data=st.data(), mini_batches=st.integers(1, 3))
    def sample_by_index(self, data, mini_batches):
        where = self.by_index()
        indexes = data.draw(st.lists(st.sampled_from(sorted(where)), max_size=6)) if where else []
        parts = self.memory.sample_by_index(NAMES, indexes=indexes, mini_batches=mini_batches)
        for part, own in zip(parts, np.array_split(np.array(indexes, int), mini_batches), strict=True):
            self.check(part, [where[index] for index in own.tolist()])

    @rule(length=st.integers(2, 3), mini_batches=st.integers(1, 4))
    def sample_all_sequences(self, length, mini_batches):
        held = [[(lane, step) for step in self.held(lane)] for lane in range(self.num_envs)]
        units = [steps[at : at + length] for steps in held for at in range(0, len(steps), length)]
        parts = self.memory.sample_all(NAMES, mini_batches=mini_batches, sequence_length=length)
        for part, own in zip(parts, np.array_split(np.arange(len(units)), mini_batches), strict=True):
            self.check(part, [place for at in own for place in units[at]])

    @rule(mini_batches=st.integers(2, 4))
    def sample_all_in_parts(self, mini_batches):
        places = [(lane, step) for step, lane in self.places()]
        parts = self.memory.sample_all(NAMES, mini_batches=mini_batches)
        for part, own in zip(parts, np.array_split(np.arange(len(places)), mini_batches), strict=True):
            self.check(part, [places[at] for at in own])

    @invariant()
    def nothing_differs(self):
        if not hasattr(self, "memory"):
            return
        memory, counts = self.memory, [len(lane) for lane in self.lanes]
        low, high = min(counts), max(counts)
        assert len(memory) == sum(min(n, self.size) for n in counts)
        assert memory.filled is (low >= self.size)
        assert memory.memory_index == (low if high - low <= 1 else high) % self.size
        assert memory.env_index == (sum(n > low for n in counts) if high - low == 1 else 0)
        [part] = memory.sample_all(NAMES)
        self.check(part, [(lane, step) for step, lane in self.places()])


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_memory_holds_what_plain_lists_hold(kind):
    machine = type("Machine", (MemoryMachine,), {"kind": kind})
    case = machine.TestCase
    case.settings = SETTINGS
    case("runTest").debug()
