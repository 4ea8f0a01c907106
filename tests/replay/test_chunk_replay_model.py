"""Random operations on a `ChunkReplayBuffer` and on plain lists: there is never a difference."""

from __future__ import annotations

import copy
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlstructs import DictTensor, SpecError, TemporalDictTensor, Trajectories
from rlstructs.replay import ChunkReplayBuffer
from rlstructs.replay.draw.drawn_rows import N_DRAWS
from rlstructs.replay.rows.episodes import Episodes
from rlstructs.replay.rows.lanes import N_COUNTERS, Ring

SETTINGS = settings(
    max_examples=120, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck), database=None,
    phases=[Phase.generate, Phase.shrink],
)  # fmt: skip
WIDE = 70  # numbers of float32: enough for a next observation to be stored once


class Lane:
    """All rows of an environment since the last clear: (number, episode, time in it, whether it is an end, what
    it leads to)."""

    def __init__(self):
        self.rows, self.n_open, self.n_episodes = [], 0, 0

    def add(self, number, end, following):
        self.n_episodes += self.n_open == 0
        self.rows.append((number, self.n_episodes, self.n_open, end, following))
        self.n_open = 0 if end else self.n_open + 1

    def close(self):
        self.n_open = 0


class ChunkMachine(RuleBasedStateMachine):
    """A place is (clear, lane, step): rows before a clear are never those after it."""

    @initialize(data=st.data(), capacity=st.integers(1, 6), n_lanes=st.sampled_from([1, 1, 2, 3]))
    def start(self, data, capacity, n_lanes):
        self.capacity, self.n_lanes = capacity, n_lanes
        self.ends = data.draw(st.sampled_from(["cross", "mask", "never"]))
        self.limit = data.draw(st.sampled_from([None, None, 1, 3]))
        self.alpha = data.draw(st.sampled_from([1.0, 0.5]))
        self.buffer = self.made()
        for tag, dtype in {"observations": np.float32, "next_observations": np.float32, "n": np.int64,
                           "done": bool}.items():  # fmt: skip
            self.buffer.setup_entry(tag, dtype)
        self.count, self.clears = 0, 0
        self.lanes = [Lane() for _ in range(n_lanes)]
        self.priorities, self.largest = {}, 1.0
        self.draws = []  # newest first: (indices, places), or a dict of them out of a file

    def made(self):
        return ChunkReplayBuffer(
            self.capacity * self.n_lanes, 0, self.limit, True, self.alpha, 1.0, n_lanes=self.n_lanes,
            episode_ends=self.ends,
        )  # fmt: skip

    # The model

    def new_row(self, end, is_odd=False):
        """A row; what it leads to is what comes next in its lane, unless it is odd."""
        self.count += 1
        return {
            "observations": np.full(WIDE, self.count % 3, np.float32),
            "next_observations": np.full(WIDE, 9 if is_odd else (self.count + 1) % 3, np.float32),
            "n": self.count,
            "done": end,
        }

    def appended(self, lane, number, end, following):
        place = self.clears, lane, len(self.lanes[lane].rows)
        self.lanes[lane].add(number, end, following)
        self.priorities[place] = self.largest
        self.priorities.pop((self.clears, lane, place[2] - self.capacity), None)

    def held(self, lane):
        n = len(self.lanes[lane].rows)
        return range(max(0, n - self.capacity), n)

    def places(self):
        """By row id."""
        found = [(self.index(lane, step), (self.clears, lane, step))
                 for lane in range(self.n_lanes) for step in self.held(lane)]  # fmt: skip
        return dict(sorted(found))

    def index(self, lane, step):
        return lane * self.capacity + step % self.capacity

    def row(self, place):
        return self.lanes[place[1]].rows[place[2]]

    def windows(self, length, is_within):
        """The places of every chunk that may be drawn."""
        found = set()
        for lane in range(self.n_lanes):
            for step in self.held(lane):
                window = tuple((self.clears, lane, step + k) for k in range(length))
                if step + length <= len(self.lanes[lane].rows) and (
                    not is_within or len({self.row(place)[1] for place in window}) == 1
                ):
                    found.add(window)
        return found

    def meaning(self, indices):
        """What these indices mean to the buffer, a place or None for each."""
        recent = self.draws[:N_DRAWS]
        for drawn, places in recent:
            if drawn == indices:
                return places
        maps = [places if drawn is None else dict(zip(drawn, places, strict=True)) for drawn, places in recent]
        return [next((places[i] for places in maps if i in places), None) for i in indices]

    # Adding

    def is_too_long(self, lane):
        return self.limit is not None and self.lanes[lane].n_open >= self.limit

    def end_longest(self, lanes):
        for lane in filter(self.is_too_long, lanes):
            self.lanes[lane].close()

    @rule(data=st.data(), end=st.booleans(), is_odd=st.booleans(), is_quick=st.booleans())
    def append(self, data, end, is_odd, is_quick):
        lane = data.draw(st.integers(0, self.n_lanes - 1))
        row = self.new_row(end, is_odd)
        if not is_quick:
            row = {tag: torch.as_tensor(value) for tag, value in row.items()}
        self.buffer.append(row, lane if self.n_lanes > 1 or data.draw(st.booleans()) else None)
        self.appended(lane, self.count, end, float(row["next_observations"][0]))
        self.end_longest([lane])

    @precondition(lambda self: self.n_lanes > 1)
    @rule(ends=st.lists(st.booleans(), min_size=3, max_size=3))
    def append_a_row_to_each(self, ends):
        rows = [self.new_row(end) for end in ends[: self.n_lanes]]
        block = {tag: np.array([row[tag] for row in rows]) for tag in rows[0]}
        self.buffer.append(block)
        for lane, row in enumerate(rows):
            self.appended(lane, row["n"], row["done"], float(row["next_observations"][0]))
        self.end_longest(range(self.n_lanes))

    @rule(data=st.data(), is_every=st.booleans())
    def end_episode(self, data, is_every):
        lane = data.draw(st.integers(0, self.n_lanes - 1))
        self.buffer.end_episode(None if is_every else lane)
        for closed in self.lanes if is_every else [self.lanes[lane]]:
            closed.close()

    @rule(data=st.data(), n_timesteps=st.integers(1, 9))
    def add_trajectories(self, data, n_timesteps):
        lanes = data.draw(st.lists(st.integers(0, self.n_lanes - 1), min_size=1, max_size=3))
        lengths = [data.draw(st.integers(0, n_timesteps)) for _ in lanes]
        ends, starts = (np.array(data.draw(st.lists(st.booleans(), min_size=len(lanes) * n_timesteps,
                                                    max_size=len(lanes) * n_timesteps))).reshape(-1, n_timesteps)
                        for _ in range(2))  # fmt: skip
        before = self.count, copy.deepcopy(self.lanes), dict(self.priorities)
        n = np.zeros(ends.shape, np.int64)
        is_long = False
        for at, (lane, length) in enumerate(zip(lanes, lengths, strict=True)):
            for t in range(length):
                if starts[at, t] or (t == 0 and self.n_lanes == 1):
                    self.lanes[lane].close()
                is_long |= self.is_too_long(lane)
                self.count += 1
                n[at, t] = self.count
                self.appended(lane, self.count, bool(ends[at, t]), self.count % 3 + 5)
        observations = np.repeat((n % 3)[..., None], WIDE, axis=2).astype(np.float32)
        steps = {
            "o": torch.from_numpy(observations), "o2": torch.from_numpy(observations + 5), "n": torch.from_numpy(n),
            "e": torch.from_numpy(ends), "observation/initial_state": torch.from_numpy(starts),
        }  # fmt: skip
        batch = Trajectories(
            DictTensor({"env_index": torch.tensor(lanes)}), TemporalDictTensor(steps, torch.tensor(lengths))
        )
        names = {"observations": "o", "next_observations": "o2", "n": "n", "done": "e"}
        if is_long:
            self.count, self.lanes, self.priorities = before
            with pytest.raises(SpecError, match="^add_trajectories: an episode of lane"):
                self.buffer.add_trajectories(batch, names)
            return
        self.buffer.add_trajectories(batch, names)

    @rule()
    def append_what_does_not_fit(self):
        row = self.new_row(False)
        lane = 0 if self.n_lanes > 1 else None
        for lane_row in lane_rows(row):
            with pytest.raises((SpecError, TypeError)):
                self.buffer.append(lane_row, lane)

    @rule()
    def clear(self):
        self.buffer.clear()
        self.lanes = [Lane() for _ in range(self.n_lanes)]
        self.priorities, self.largest = {}, 1.0
        self.clears += 1

    # Copies

    @rule(how=st.sampled_from(["npz", "pt", "h5", "pickle", "deepcopy"]))
    def copied(self, how):
        saved = self.buffer
        if how == "pickle":
            self.buffer = pickle.loads(pickle.dumps(saved))
        elif how == "deepcopy":
            self.buffer = copy.deepcopy(saved)
        else:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, f"x.{how}")
                saved.save(path)
                self.buffer = self.made()
                self.buffer.load(path)
            known = [places if drawn is None else dict(zip(drawn, places, strict=True))
                     for drawn, places in reversed(self.draws[:N_DRAWS])]  # fmt: skip
            self.draws = [(None, {i: place for places in known for i, place in places.items()})] if known else []
        assert saved._rng.bit_generator.state == self.buffer._rng.bit_generator.state

    # Sampling

    @rule(n=st.integers(1, 6), length=st.integers(1, 4), mode=st.sampled_from(["uniform", "prioritized"]))
    def sample(self, n, length, mode):
        if not self.windows(length, False):
            assert self.buffer.sample(n, length, mode) is None
            return
        allowed = self.windows(length, self.ends == "never")
        is_prioritized = mode == "prioritized"
        if is_prioritized:
            allowed = {window for window in allowed if self.priorities[window[-1]] > 0}
        if not allowed:
            with pytest.raises(SpecError, match="^nothing to sample"):
                self.buffer.sample(n, length, mode)
            return
        data, info = self.buffer.sample(n, length, mode)
        where = self.places()
        chunks = [tuple(where[index] for index in row) for row in info["indices"].tolist()]
        assert allowed.issuperset(chunks)
        self.draws.insert(0, (info["indices"].ravel().tolist(), [place for chunk in chunks for place in chunk]))
        rows = [[self.row(place) for place in chunk] for chunk in chunks]
        assert data["n"].tolist() == [[row[0] for row in chunk] for chunk in rows]
        assert data["done"].tolist() == [[row[3] for row in chunk] for chunk in rows]
        assert (data["observations"] == (data["n"] % 3)[..., None]).all()
        assert (data["next_observations"] == np.array([[row[4] for row in chunk] for chunk in rows])[..., None]).all()
        own = [chunk[-1 if is_prioritized else 0][1] for chunk in rows]
        mask = [[self.ends != "mask" or row[1] == episode for row in chunk]
                for chunk, episode in zip(rows, own, strict=True)]  # fmt: skip
        assert info["mask"].tolist() == mask
        begins = np.array([[row[2] == 0 for row in chunk] for chunk in rows])
        assert (info["is_first"] == (begins & mask)).all()
        weights = np.ones(n)
        if is_prioritized:
            smallest = min(p for p in self.priorities.values() if p > 0)
            weights = [(smallest / self.priorities[chunk[-1]]) ** self.alpha for chunk in chunks]
        np.testing.assert_allclose(info["weights"], weights, rtol=1e-5)

    def update(self, indices, data):
        """Gives them priorities; those of rows that are not what was drawn come to nothing."""
        new = [data.draw(st.sampled_from([0.0, 0.25, 1.0, 2.0, self.largest + 1])) for _ in indices]
        meaning, where = self.meaning(indices), self.places()
        self.buffer.update_priorities(np.array([indices]), np.array([new]))
        kept = [(where[i], p) for i, place, p in zip(indices, meaning, new, strict=True)
                if i in where and place in (None, where[i])]  # fmt: skip
        self.priorities |= dict(kept)
        self.largest = max([self.largest, *(p for _, p in kept)])

    @precondition(lambda self: self.draws and self.draws[0][0] is not None)
    @rule(data=st.data())
    def update_the_last_batch(self, data):
        self.update(self.draws[0][0], data)

    @precondition(lambda self: any(drawn for drawn, _ in self.draws[:N_DRAWS]))
    @rule(data=st.data())
    def update_an_older_batch(self, data):
        drawn = data.draw(st.sampled_from([drawn for drawn, _ in self.draws[:N_DRAWS] if drawn]))
        self.update(drawn, data)

    @precondition(lambda self: any(drawn for drawn, _ in self.draws[:N_DRAWS]))
    @rule(data=st.data())
    def update_part_of_an_older_batch(self, data):
        drawn = data.draw(st.sampled_from([drawn for drawn, _ in self.draws[:N_DRAWS] if drawn]))
        self.update(data.draw(st.lists(st.sampled_from(drawn), min_size=1, max_size=4)), data)

    @precondition(lambda self: self.places())
    @rule(data=st.data())
    def update_some_rows(self, data):
        self.update(data.draw(st.lists(st.sampled_from(sorted(self.places())), min_size=1, max_size=8)), data)

    @invariant()
    def nothing_differs(self):
        if not hasattr(self, "buffer"):
            return
        rows = [self.row(place) for place in self.places().values()]
        assert len(self.buffer) == len(rows)
        assert self.buffer.data["n"].tolist() == [row[0] for row in rows]
        assert self.buffer.data["done"].tolist() == [row[3] for row in rows]
        following = self.buffer.data["next_observations"].tolist()
        assert [set(frame) for frame in following] == [{row[4]} for row in rows]


def lane_rows(row):
    """What is no row."""
    yield {**row, "n": 1.5}
    yield {**row, "observations": "frame"}
    yield {**row, "more": 1}
    yield {tag: value for tag, value in row.items() if tag != "n"}
    yield list(row)


@pytest.mark.slow
def test_a_buffer_holds_what_plain_lists_hold():
    case = ChunkMachine.TestCase
    case.settings = SETTINGS
    case("runTest").debug()


@settings(max_examples=200, deadline=None)
@given(data=st.data(), n_lanes=st.integers(1, 3), n_timesteps=st.integers(0, 5))
def test_the_longest_episode_is_known_before_rows_are_written(data, n_lanes, n_timesteps):
    ring = Ring(np.zeros((N_COUNTERS, n_lanes), np.int64), 8)
    episodes = Episodes(ring, "lane")
    open_before = [data.draw(st.integers(0, 3)) for _ in range(n_lanes)]
    for lane, n in enumerate(open_before):
        one = slice(lane, lane + 1)
        episodes.write(one, np.zeros((1, n), bool))
        ring.reserve(one, n)
        ring.publish(one, n)
    lanes = np.array(data.draw(st.lists(st.integers(0, n_lanes - 1), max_size=4)), np.int64)
    done, starts = (data.draw(st.lists(st.booleans(), min_size=lanes.size * n_timesteps,
                                       max_size=lanes.size * n_timesteps)) for _ in range(2))  # fmt: skip
    done, starts = (np.array(marks, bool).reshape(lanes.size, n_timesteps) for marks in (done, starts))
    lengths = np.array([data.draw(st.integers(0, n_timesteps)) for _ in lanes], np.int64)
    expected, n_open = [], list(open_before)
    for at, lane in enumerate(lanes):
        longest = 0
        for t in range(lengths[at]):
            n_open[lane] = 1 if starts[at, t] else n_open[lane] + 1
            longest = max(longest, n_open[lane])
            if done[at, t]:
                n_open[lane] = 0
        expected.append(longest)
    assert episodes.longest(lanes, done, starts, lengths).tolist() == expected
