"""One shard of a `RayReplay`, in this process: what its rows sum up to, and which priorities come too late."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstructs.distributed.shard import ROW, Shard, ShardSettings, columns_of
from rlstructs.replay.intake.trajectories import Steps

N_ENVS, ALPHA = 2, 0.7
NAMES = {"obs": "observation/frame", "terminated": "_observation/terminated"}
KINDS = [(2, False), (3, True), (4, False), (4, True)]
SAMPLE = {"sequence_length": 1, "n_step": 1, "gamma": 0.9, "episode_ends": "cross"}


class Model:
    """Rows as a list for each environment, oldest first: a number that no other row has, and whether its episode ends.

    Attributes:
        priorities: by number.
    """

    def __init__(self, memory_size):
        self.size, self.lanes, self.n = memory_size, [[] for _ in range(N_ENVS)], 0
        self.priorities, self.largest = {}, 1.0

    def extend(self, shard, data):
        n_timesteps = data.draw(st.integers(1, self.size))
        lengths = data.draw(st.lists(st.integers(0, n_timesteps), min_size=N_ENVS, max_size=N_ENVS))
        n = N_ENVS * n_timesteps
        ends = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n))).reshape(N_ENVS, n_timesteps)
        frames = torch.arange(self.n, self.n + ends.size).reshape(N_ENVS, n_timesteps)
        self.n += ends.size
        for lane, length in enumerate(lengths):
            new = [(int(frame), bool(end)) for frame, end in zip(frames[lane, :length], ends[lane], strict=False)]
            self.lanes[lane] = (self.lanes[lane] + new)[-self.size :]
            self.priorities |= {frame: self.largest for frame, _ in new}
        values, lanes = {"obs": frames.numpy(), "terminated": ends}, np.arange(N_ENVS)
        steps = Steps(values, n_timesteps, np.array(lengths), lanes, ends)
        shard.extend({"obs": torch.int64, "terminated": torch.bool}, 1.0, columns_of(steps))

    def update(self, frames, priorities):
        present = {frame for lane in self.lanes for frame, _ in lane}
        for frame, priority in zip(frames, priorities, strict=True):
            if frame in present:
                self.priorities[frame] = priority
                self.largest = max(self.largest, priority)

    def mass(self, length, is_whole):
        found = 0.0
        for lane in self.lanes:
            for at in range(len(lane) - length + 1):
                if not (is_whole and any(end for _, end in lane[at : at + length - 1])):
                    found += self.priorities[lane[at][0]] ** ALPHA
        return found


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_it_sums_up_what_can_be_drawn_and_drops_priorities_of_what_is_gone(data):
    model = Model(data.draw(st.integers(4, 9)))
    shard = Shard(ShardSettings(model.size, ALPHA, NAMES), N_ENVS, 0)
    for kind in KINDS:
        shard.add_kind(kind)
    drawn = []
    for _ in range(data.draw(st.integers(1, 12))):
        model.extend(shard, data)
        if not any(model.lanes):
            continue
        columns = shard.sample(["obs"], 4, SAMPLE).columns
        drawn.append((columns["/index"], columns["obs"].reshape(-1).tolist()))
        index, frames = data.draw(st.sampled_from(drawn))  # however long ago
        priorities = data.draw(st.lists(st.floats(0.1, 3.0), min_size=4, max_size=4))
        shard.update_priorities({"index": index, "priority": np.array(priorities)})
        model.update(frames, priorities)
        sums = shard.report()["sums"]
        assert sums == pytest.approx({kind: model.mass(*kind) for kind in [ROW, *KINDS]})
    if drawn:
        with pytest.raises(IndexError, match="an index is not from a sample"):
            shard.update_priorities({"index": drawn[-1][0] + 100 * model.size * N_ENVS, "priority": np.ones(4)})
