"""Random operations on tianshou's buffers and on plain lists: there is never a difference."""

from __future__ import annotations

import copy
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_replay_buffer_vector import trajectories

from rlstructs.replay import PrioritizedReplayBuffer, PrioritizedVectorReplayBuffer, ReplayBuffer, VectorReplayBuffer

SETTINGS = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck), database=None,
    report_multiple_bugs=False,
    phases=[Phase.generate, Phase.shrink],
)  # fmt: skip
GAMMA, EPSILON = 0.5, float(np.finfo(np.float32).eps)
WIDE = 70  # numbers of an observation whose next one is stored once
booleans = st.lists(st.booleans(), min_size=3, max_size=3)


class Row:
    """A transition: its number, whether it ends its episode, and whether it begins one whatever came before."""

    def __init__(self, number, done, begins, after):
        self.number, self.done, self.begins, self.after = number, done, begins, after
        self.priority = None


class Lane:
    """All rows of a lane since it was cleared, and the running return and length of its episode."""

    def __init__(self, capacity):
        self.rows, self.capacity = [], capacity
        self.ep_return, self.ep_len, self.cut = 0.0, 0, False

    def held(self):
        return range(max(0, len(self.rows) - self.capacity), len(self.rows))

    def append(self, number, done, begins, after):
        follows = bool(self.rows) and not self.rows[-1].done and not self.cut
        if begins:
            self.ep_return, self.ep_len = 0.0, 0
        self.cut = False
        self.rows.append(Row(number, done, begins or not follows, after))
        self.ep_return, self.ep_len = self.ep_return + number, self.ep_len + 1
        found = self.ep_return, self.ep_len
        if done:
            self.ep_return, self.ep_len = 0.0, 0
        return found if done else (0.0, 0)

    def first(self, step):
        """The oldest row that is there of the episode of a row."""
        while step > self.held()[0] and not self.rows[step].begins:
            step -= 1
        return step

    def prev(self, step):
        return step if step == self.held()[0] or self.rows[step].begins else step - 1

    def next(self, step):
        return step if step == len(self.rows) - 1 or self.rows[step + 1].begins else step + 1

    def goes_on(self):
        return bool(self.rows) and not self.rows[-1].done and not self.cut

    def recount(self):
        """Return and length as what is there tells them."""
        self.ep_return, self.ep_len = 0.0, 0
        if self.goes_on():
            step = len(self.rows) - 1
            while not self.rows[step].begins:
                step -= 1
            self.ep_len = len(self.rows) - step
            self.ep_return = float(sum(row.number for row in self.rows[max(step, self.held()[0]) :]))


class BufferMachine(RuleBasedStateMachine):
    """The lanes of a buffer, and the lists that they should be."""

    prioritized: bool

    @initialize(
        capacity=st.integers(1, 5), n=st.sampled_from([0, 1, 2, 3]), n_step=st.integers(1, 3), wide=st.booleans(),
        next_is=st.sampled_from(["given", "ignored", "never"]),
    )  # fmt: skip
    def start(self, capacity, n, n_step, wide, next_is):
        self.capacity, self.n, self.vector, self.n_step = capacity, max(n, 1), n > 0, n_step
        self.wide, self.next_is = wide, next_is
        self.shape = (WIDE,) if wide else ()
        self.folder = tempfile.TemporaryDirectory()
        self.lanes = [Lane(capacity) for _ in range(self.n)]
        self.count, self.max_priority, self.drawn = 0, 1.0, None
        self.buffer = self.made()

    def made(self):
        arguments = {"n_step": self.n_step, "gamma": GAMMA, "ignore_obs_next": self.next_is == "ignored"}
        if self.prioritized:
            arguments |= {"alpha": 0.5, "beta": 1.0, "weight_norm": False}
        if self.vector:
            cls = PrioritizedVectorReplayBuffer if self.prioritized else VectorReplayBuffer
            return cls(self.capacity * self.n, self.n, **arguments)
        return (PrioritizedReplayBuffer if self.prioritized else ReplayBuffer)(self.capacity, **arguments)

    def teardown(self):
        if hasattr(self, "folder"):
            self.folder.cleanup()

    # Helpers

    def id(self, lane, step):
        return lane * self.capacity + step % self.capacity

    def places(self):
        return [(at, step) for at, lane in enumerate(self.lanes) for step in lane.held()]

    def by_id(self):
        return {self.id(at, step): (at, step) for at, step in self.places()}

    def numbers(self, values):
        """Numbers as observations."""
        values = np.asarray(values, np.float32)
        return np.repeat(values[..., None], WIDE, axis=-1) if self.wide else values

    def number_of(self, observations):
        observations = np.asarray(observations)
        if not self.wide:
            return observations.tolist()
        assert (observations == observations[..., :1]).all()
        return observations[..., 0].tolist()

    def rows(self, ids, ends):
        """New transitions; what follows one is often, and often is not, what the next one begins with."""
        self.count += len(ids)
        number = np.arange(self.count - len(ids), self.count) % 97
        after = (number + np.where(np.asarray(ends, int), 5, len(ids))) % 97
        batch = {"obs": self.numbers(number), "act": number, "rew": number * 1.0, "terminated": np.asarray(ends, bool),
                 "truncated": np.zeros(len(ids), bool), "x": np.zeros(len(ids))}  # fmt: skip
        if self.next_is != "never":
            batch["obs_next"] = self.numbers(after)
        return batch, number.tolist(), after.tolist()

    # Operations

    @rule(data=st.data(), form=st.sampled_from(["arrays", "lists", "torch", "done"]))
    def add(self, data, form):
        ids = list(range(self.n))
        if self.vector and data.draw(st.booleans()):
            ids = data.draw(st.lists(st.integers(0, self.n - 1), max_size=4))
        ends = data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
        batch, number, after = self.rows(ids, ends)
        given = {"arrays": lambda x: x, "lists": lambda x: x.astype(np.float64).tolist() if x.dtype == np.float32
                 else x.tolist(), "torch": torch.as_tensor, "done": lambda x: x}  # fmt: skip
        batch = {name: given[form](values) for name, values in batch.items()}
        if form == "done":
            batch["done"] = np.ones(len(ids))
        if self.vector:
            added = self.buffer.add(batch, None if ids == list(range(self.n)) and form != "done" else ids)
        else:
            added = self.buffer.add({name: values[0] for name, values in batch.items()})
        for i, at in enumerate(ids):
            lane = self.lanes[at]
            expected = lane.append(number[i], ends[i], False, after[i])
            self.take(lane)
            assert (added[1][i], added[2][i]) == expected
            assert added[0][i] == self.id(at, len(lane.rows) - 1)
            assert added[3][i] == self.id(at, lane.first(len(lane.rows) - 1))
        assert [part.shape for part in added] == [(len(ids),)] * 4

    def take(self, lane):
        lane.rows[-1].priority = self.max_priority

    @rule(data=st.data(), n_timesteps=st.integers(1, 8))
    def add_trajectories(self, data, n_timesteps):
        order = data.draw(st.permutations(range(self.n)))
        lengths = [data.draw(st.integers(0, n_timesteps)) for _ in order]
        ends = np.array([data.draw(st.lists(st.booleans(), min_size=n_timesteps, max_size=n_timesteps)) for _ in order])
        starts = np.array([[data.draw(st.integers(0, 4)) == 0 for _ in range(n_timesteps)] for _ in order])
        self.count += ends.size
        number = np.arange(self.count - ends.size, self.count).reshape(ends.shape) % 97
        obs, after = torch.as_tensor(self.numbers(number)), torch.as_tensor(self.numbers((number + 1) % 97))
        more = {"observation/frame": obs, "_observation/frame": after, "action/action": torch.as_tensor(number),
                "_observation/reward": torch.as_tensor(number).double(), "action/x": torch.zeros(ends.shape).double(),
                "observation/initial_state": torch.as_tensor(starts)}  # fmt: skip
        names = {"obs": "observation/frame", "act": "action/action", "rew": "_observation/reward", "x": "action/x",
                 "terminated": "_observation/truncated", "truncated": "_observation/terminated"}  # fmt: skip
        if self.next_is == "given":
            names["obs_next"] = "_observation/frame"
        if self.next_is == "never" or data.draw(st.booleans()):
            names.pop("obs_next", None)
        if self.next_is == "given" and "obs_next" not in names and not self.buffer._specs:
            return
        batch = trajectories(number, ends, lengths, order, **more)
        self.buffer.add_trajectories(batch, names)
        for i, at in enumerate(order):
            for t in range(lengths[i]):
                lane = self.lanes[at]
                begins = bool(starts[i, t]) or (not self.vector and t == 0)
                follows = (int(number[i, t]) + 1) % 97 if "obs_next" in names else 0
                lane.append(int(number[i, t]), bool(ends[i, t]), begins, follows)
                self.take(lane)

    @rule(keep=st.booleans())
    def reset(self, keep):
        self.buffer.reset(keep)
        for at, old in enumerate(self.lanes):
            self.lanes[at] = new = Lane(self.capacity)
            if keep:
                new.ep_return, new.ep_len = old.ep_return, old.ep_len
        self.max_priority, self.drawn = 1.0, None

    @rule(suffix=st.sampled_from(["hdf5", ".npz", "pickle", "copy"]))
    def restart(self, suffix):
        path, expected = Path(self.folder.name) / f"x{suffix}", self.buffer._rng.bit_generator.state
        stack_num = self.buffer.stack_num
        if suffix == "pickle":
            self.buffer = pickle.loads(pickle.dumps(self.buffer))
        elif suffix == "copy":
            self.buffer = copy.deepcopy(self.buffer)
        elif suffix == "hdf5":
            self.buffer.save_hdf5(path)
            self.buffer = type(self.buffer).load_hdf5(path)
        else:
            self.buffer.save(path)
            self.buffer = self.made()
            self.buffer.load(path)
            self.buffer.stack_num = stack_num
        assert self.buffer._rng.bit_generator.state == expected and self.buffer.stack_num == stack_num

    @rule(stack_num=st.integers(1, 4))
    def stack(self, stack_num):
        self.buffer.stack_num = stack_num

    @precondition(lambda self: self.places())
    @rule(data=st.data())
    def end_some(self, data):
        chosen = data.draw(st.lists(st.sampled_from(self.places()), unique=True, max_size=3))
        flags = data.draw(st.lists(st.booleans(), min_size=len(chosen), max_size=len(chosen)))
        self.buffer.set_array_at_key(flags, "terminated", index=[self.id(*place) for place in chosen])
        truncated = self.buffer.truncated.copy()
        for lane in self.lanes:  # what was cut by something else than its flags stays so, unless they take its place
            for step in lane.held():
                row = lane.rows[step]
                last = step == len(lane.rows) - 1
                row.was_cut = not row.done and (lane.cut if last else lane.rows[step + 1].begins)
                lane.cut = row.was_cut if last else lane.cut
        for place, flag in zip(chosen, flags, strict=True):
            self.lanes[place[0]].rows[place[1]].done = flag or bool(truncated[self.id(*place)])
        for lane in self.lanes:
            for step in lane.held():
                before = lane.rows[step - 1] if step > lane.held()[0] else None
                lane.rows[step].begins = before is None or before.done or before.was_cut
            lane.recount()
        del lane

    @precondition(lambda self: self.places())
    @rule(data=st.data())
    def drop_some(self, data):
        chosen = data.draw(st.lists(st.sampled_from(self.places()), unique=True, min_size=1, max_size=4))
        self.buffer.set_array_at_key(np.full(len(chosen), np.nan), "x", index=[self.id(*place) for place in chosen])
        self.buffer.dropnull()
        for at, old in enumerate(self.lanes):
            self.lanes[at] = new = Lane(self.capacity)
            gap = True
            for step in old.held():
                row = old.rows[step]
                if (at, step) in chosen:
                    gap = True
                    continue
                row.begins = row.begins or gap
                new.rows.append(row)
                gap = False
            new.cut = old.cut or (gap and bool(new.rows) and not new.rows[-1].done)
            new.recount()
        self.drawn = None

    @precondition(lambda self: not self.vector)
    @rule(data=st.data(), size=st.integers(1, 4), n=st.integers(0, 6))
    def update(self, data, size, n):
        other = VectorReplayBuffer(size, 1, ignore_obs_next=self.next_is == "ignored")
        model = Lane(size)
        for _ in range(n):
            end = data.draw(st.booleans())
            batch, [number], [after] = self.rows([0], [end])
            other.add(batch)
            model.append(number, end, False, after)
        placed = self.buffer.update(other)
        [lane], at = self.lanes, []
        for step in model.held() if n else []:
            row = model.rows[step]
            lane.append(row.number, row.done, model.first(step) == step, row.after)
            self.take(lane)
            at.append(len(lane.rows) - 1)
        assert placed.tolist() == [self.id(0, step) if step in lane.held() else -1 - self.buffer.maxsize for step in at]
        if n:
            lane.ep_return, lane.ep_len = model.ep_return, model.ep_len

    # Looks

    @precondition(lambda self: self.places())
    @rule(n=st.sampled_from([0, None, 1, 7]))
    def sample(self, n):
        batch, index = self.buffer.sample(n)
        assert len(index) == (n or len(self.places()))
        by_id = self.by_id()
        self.drawn = index, [self.lanes[by_id[i][0]].rows[by_id[i][1]] for i in index.tolist()]
        self.check(batch, index.tolist(), self.n_step)

    @precondition(lambda self: self.places())
    @rule(data=st.data())
    def index(self, data):
        index = data.draw(st.lists(st.sampled_from(sorted(self.by_id())), max_size=4))
        self.check(self.buffer[index], index, 1)

    def check(self, batch, index, n_step):
        """That a batch holds these rows."""
        by_id, k = self.by_id(), self.buffer.stack_num
        expected = {"obs": [], "obs_next": [], "rew": [], "done": [], "act": []}
        for at, step in (by_id[i] for i in index):
            lane, walk = self.lanes[at], [step]
            while len(walk) < n_step and lane.next(walk[-1]) != walk[-1]:
                walk.append(lane.next(walk[-1]))
            after, stored = walk[-1], "obs_next" in self.buffer._specs
            expected["obs"].append([lane.rows[s].number for s in self.stacked(lane, step, k)])
            frames = self.stacked(lane, after if stored else lane.next(after), k)
            expected["obs_next"].append([lane.rows[s].after if stored else lane.rows[s].number for s in frames])
            expected["rew"].append(sum(GAMMA**i * lane.rows[s].number for i, s in enumerate(walk)))
            expected["done"].append(lane.rows[after].done)
            expected["act"].append(lane.rows[step].number)
        for name in ("obs", "obs_next"):
            found = self.number_of(batch[name])
            assert found == (expected[name] if k > 1 else [frames[0] for frames in expected[name]])
        for name in ("rew", "done", "act"):
            assert batch[name].tolist() == expected[name]

    def stacked(self, lane, step, k):
        steps = [step]
        while len(steps) < k:
            steps.insert(0, lane.prev(steps[0]))
        return steps

    @precondition(lambda self: self.prioritized and self.drawn is not None)
    @rule(data=st.data())
    def prioritise(self, data):
        index, rows = self.drawn
        weight = data.draw(st.lists(st.floats(-9, 9), min_size=len(index), max_size=len(index)))
        self.buffer.update_weight(index, weight)
        held = {id(self.lanes[at].rows[step]) for at, step in self.places()}
        for row, value in zip(rows, weight, strict=True):
            if id(row) in held:
                row.priority = abs(value) + EPSILON
                self.max_priority = max(self.max_priority, row.priority)

    @invariant()
    def is_what_the_lists_say(self):
        if not hasattr(self, "buffer"):
            return
        buffer, places = self.buffer, self.places()
        ids = [self.id(*place) for place in places]
        assert len(buffer) == len(ids)
        assert buffer.sample_indices(0).tolist() == ids
        assert buffer.prev(ids).tolist() == [self.id(at, self.lanes[at].prev(step)) for at, step in places]
        assert buffer.next(ids).tolist() == [self.id(at, self.lanes[at].next(step)) for at, step in places]
        assert buffer.unfinished_index().tolist() == [
            self.id(at, len(lane.rows) - 1) for at, lane in enumerate(self.lanes) if lane.goes_on()
        ]  # fmt: skip
        assert buffer._intake.running.lengths.tolist() == [lane.ep_len for lane in self.lanes]
        np.testing.assert_allclose(buffer._intake.running.returns, [lane.ep_return for lane in self.lanes])
        if places:
            assert buffer.done[ids].tolist() == [self.lanes[at].rows[step].done for at, step in places]
        if self.prioritized:
            expected = np.zeros(buffer.maxsize)
            expected[ids] = [self.lanes[at].rows[step].priority ** 0.5 for at, step in places]
            np.testing.assert_allclose(buffer.weight, expected)


@pytest.mark.parametrize("prioritized", [False, True])
def test_a_buffer_does_what_plain_lists_do(prioritized):
    machine = type("Machine", (BufferMachine,), {"prioritized": prioritized})
    test = machine.TestCase
    test.settings = SETTINGS
    test("runTest").runTest()
