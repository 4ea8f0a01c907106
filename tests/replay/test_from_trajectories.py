"""Every surface takes trajectories in alike: their valid steps, lanes, ends and starts, or nothing of a batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from surfaces import CAPACITY, EVERY_SURFACE, N_LANES

from rlstructs import DictTensor, TemporalDictTensor, Trajectories
from rlstructs.errors import MissingKeyError, SpecError

pytestmark = pytest.mark.parametrize("surface", EVERY_SURFACE)


def steps(lengths, lanes, first=0, done=(), starts=(), n_timesteps=4, **changes):
    """Trajectories whose frames and actions count from `first`; `done` and `starts` are places (b, t)."""
    numbers = torch.arange(first, first + len(lengths) * n_timesteps).reshape(len(lengths), n_timesteps)
    marks = {name: torch.zeros(numbers.shape, dtype=torch.bool) for name in ("done", "starts", "never")}
    for name, places in (("done", done), ("starts", starts)):
        for place in places:
            marks[name][place] = True
    tensors = {
        "observation/frame": numbers.float(), "_observation/frame": numbers + 0.5, "action/action": numbers,
        "_observation/reward": numbers.float(), "_observation/terminated": marks["done"],
        "_observation/truncated": marks["never"], "observation/initial_state": marks["starts"], **changes,
    }  # fmt: skip
    info = DictTensor({"env_index": torch.tensor(lanes)})
    return Trajectories(info, TemporalDictTensor(tensors, torch.tensor(lengths)))


def told(batch):
    """Where a step begins or ends an episode, (b, t)."""
    marks = batch.trajectories
    return marks["observation/initial_state"], marks["_observation/terminated"] | marks["_observation/truncated"]


def model(surface, made, batches):
    """The episodes of frames that there should be, each a list; `CachedReplayBuffer` drops those that are cut short."""
    episodes, running = [], {}
    drops = hasattr(made, "main_buffer")
    for batch in batches:
        starts, done = told(batch)
        for b, length in enumerate(batch.lengths.tolist()):
            lane = 0 if surface.is_one else int(batch.info["env_index"][b])
            for t in range(length):
                if starts[b, t] or (surface.is_one and t == 0):
                    episode = running.pop(lane, [])
                    if episode and drops:
                        episodes.remove(episode)
                if lane not in running:
                    running[lane] = []
                    episodes.append(running[lane])
                running[lane].append(float(batch.trajectories["observation/frame"][b, t]))
                if done[b, t]:
                    del running[lane]
    return sorted(episodes)


def test_valid_steps_come_in_by_lane_and_episode(surface):
    made = surface.make()
    batches = [
        steps([4, 2, 3], [2, 0, 1], done=[(0, 1), (2, 2)]),
        steps([1, 0, 4], [0, 1, 2], 100, starts=[(2, 0)]),
        steps([2, 2], [1, 1], 200, done=[(1, 0)]),  # a lane twice: one follows the other
    ]
    for batch in batches:
        made.add_trajectories(batch, surface.names)
    assert surface.episodes(made, surface.frame) == model(surface, made, batches)
    assert surface.episodes(made, surface.action) == surface.episodes(made, surface.frame)


def test_padding_need_not_fit_a_column(surface):
    made = surface.make()
    narrow = steps([4, 4, 4], [0, 1, 2])
    narrow.trajectories.set("action/action", narrow.trajectories["action/action"].int())
    made.add_trajectories(narrow, surface.names)
    wide = steps([4, 1, 2], [0, 1, 2], 100)
    padding = wide.trajectories.mask(torch.bool).logical_not()
    assert padding.any()
    wide.trajectories["action/action"][padding] = torch.iinfo(torch.int64).min
    wide.trajectories["_observation/reward"][padding] = torch.nan
    made.add_trajectories(wide, surface.names)
    assert surface.episodes(made, surface.action) == model(surface, made, [narrow, wide])


def test_an_end_with_more_axes_ends_an_episode(surface):
    batch = steps([4, 4, 4], [0, 1, 2])
    ends = torch.zeros(3, 4, 1)
    ends[1, 2] = 1
    batch.trajectories.set("_observation/done", ends)
    made = surface.make()
    made.add_trajectories(batch, surface.names)
    lengths = sorted(len(episode) for episode in surface.episodes(made, surface.frame))
    assert lengths == [1, 3, 4, 4]


def test_a_batch_longer_than_the_memory_leaves_its_last_steps(surface):
    batch = steps([2 * CAPACITY + 3], [1], n_timesteps=2 * CAPACITY + 3, done=[(0, 5), (0, 20), (0, 30)])
    made = surface.make()
    made.add_trajectories(batch, surface.names)
    found = [frame for episode in surface.episodes(made, surface.frame) for frame in episode]
    assert found[-CAPACITY:] == list(range(CAPACITY + 3, 2 * CAPACITY + 3))


def test_a_batch_without_a_step_changes_nothing(surface):
    made = surface.make()
    made.add_trajectories(steps([0, 0], [0, 1]), surface.names)
    assert surface.episodes(made, surface.frame) == []


def test_what_does_not_fit_is_named_and_changes_nothing(surface):
    made, good = surface.make(), steps([4, 2, 3], [2, 0, 1])
    made.add_trajectories(good, surface.names)
    before = surface.episodes(made, surface.frame)
    with pytest.raises(TypeError, match="^add_trajectories: needs Trajectories, got TemporalDictTensor$"):
        made.add_trajectories(good.trajectories, surface.names)
    absent = {**surface.names, "a": "no/key", "b": "another"}
    with pytest.raises(MissingKeyError, match=r"^add_trajectories: no \['another', 'no/key'\] in the trajectories,"):
        made.add_trajectories(good, absent)
    if not surface.is_one:
        with pytest.raises(SpecError, match=rf"^add_trajectories: env_index {N_LANES} is not in \[0, {N_LANES}\), the"):
            made.add_trajectories(steps([1, 1], [0, N_LANES]), surface.names)
        with pytest.raises(MissingKeyError, match="^add_trajectories: no 'env_index' in the trajectories' info"):
            made.add_trajectories(Trajectories(DictTensor(), good.trajectories), surface.names)
    wide = steps([1, 4], [0, 1])
    wide.trajectories.set("action/action", torch.full((2, 4), 0.5))
    with pytest.raises(SpecError, match=f"{surface.action!r}"):
        made.add_trajectories(wide, surface.names)
    assert surface.episodes(made, surface.frame) == before


@pytest.mark.parametrize("name", ["bool", "uint8", "uint16", "int16", "float16", "bfloat16", "float64"])
def test_ragged_steps_of_every_dtype_come_in(surface, name):
    batch = steps([3, 1, 4], [0, 1, 2])
    batch.trajectories.set("action/action", torch.ones(3, 4).to(getattr(torch, name)))
    made = surface.make()
    made.add_trajectories(batch, surface.names)
    assert sum(map(len, surface.episodes(made, surface.action))) == 8
    assert np.unique(np.concatenate(surface.episodes(made, surface.action))).size == 1
