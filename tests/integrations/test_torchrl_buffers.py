"""Replay buffers do what torchrl's do, where the page of differences names none."""

from __future__ import annotations

import copy
import pickle
from collections import Counter

import numpy as np
import pytest
import torch
import torchrl.data
from tensordict import TensorDict

import rlstructs.replay
from rlstructs.errors import EmptyBufferError
from rlstructs.replay import (
    ListStorage,
    MaxValueWriter,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)  # fmt: skip

BOTH = (torchrl.data, rlstructs.replay)
END = ("next", "done")


def episodes(lengths):
    """Rows x = 0, 1, ..., of which some end an episode."""
    x = torch.arange(sum(lengths))
    done = torch.isin(x, torch.tensor(lengths).cumsum(0) - 1)[:, None]
    return TensorDict({"x": x, "next": {"done": done}}, [len(x)])


def filled(data, rows, storage="LazyTensorStorage", size=100, **settings):
    buffer = data.TensorDictReplayBuffer(storage=getattr(data, storage)(size), **settings)
    buffer.extend(rows)
    return buffer


@pytest.mark.parametrize("strict_length", [True, False])
def test_slices_are_as_likely_as_torchrls(strict_length):
    shares = []
    for data in BOTH:
        torch.manual_seed(0)
        sampler = data.SliceSampler(num_slices=20_000, end_key=END, strict_length=strict_length)
        x = filled(data, episodes([1, 3, 8, 5]), sampler=sampler).sample(60_000)["x"]
        counts = Counter(x.tolist())
        shares.append([counts[k] / len(x) for k in range(17)])
    np.testing.assert_allclose(shares[1], shares[0], atol=0.01)
    assert (shares[1][0] > 0) is not strict_length


def plus_100(batch):
    return batch.clone().set("x", batch["x"] + 100)


READS = {
    "slice": lambda storage: storage[:]["x"], "row": lambda storage: storage[2]["x"],
    "last": lambda storage: storage[-1]["x"], "rows": lambda storage: storage[[1, 4]]["x"],
    "mask": lambda storage: storage[torch.arange(6) % 2 == 0]["x"], "get": lambda storage: storage.get(2)["x"],
    "get_rows": lambda storage: storage.get([2, 0])["x"], "column": lambda storage: storage["x"],
    "all": lambda storage: torch.stack([row["x"] for row in storage]), "contains": lambda storage: 2 in storage,
    "lacks": lambda storage: 7 in storage,
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_a_storage_has_rows_as_they_are_stored(name):
    found = []
    for data in BOTH:
        buffer = filled(data, episodes([6]))
        buffer.append_transform(plus_100)
        found.append(READS[name](buffer.storage))
        assert buffer[2]["x"] == 102 and buffer.sample(3)["x"].min() >= 100
    assert found[1] == found[0] if isinstance(found[0], bool) else torch.equal(found[1], found[0])


@pytest.mark.parametrize("arguments", [(), (None,)], ids=["none_given", "none"])
def test_a_list_storage_without_a_size_has_no_limit(arguments):
    sizes = [data.ListStorage(*arguments).max_size for data in BOTH]
    assert sizes[1] == sizes[0]
    buffer = TensorDictReplayBuffer(storage=ListStorage(*arguments), batch_size=4)
    for start in range(0, 5000, 1000):
        buffer.extend({"x": torch.arange(start, start + 1000)})
    assert len(buffer) == 5000 and torch.equal(buffer["x"], torch.arange(5000))
    assert repr(buffer.storage) == "ListStorage(max_size=None)"
    buffer.empty()
    buffer.extend({"x": torch.arange(3000)})
    for twin in (copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))):
        assert torch.equal(twin["x"], torch.arange(3000))
        assert len(twin.extend({"x": torch.arange(2000)})) == 2000 and len(twin) == 5000


@pytest.mark.parametrize("ending", [".npz", ".pt", ""])
def test_files_of_a_storage_without_limit_are_loaded(tmp_path, ending):
    first, second = (TensorDictReplayBuffer(storage=ListStorage(), generator=0) for _ in range(2))
    first.extend({"x": torch.arange(3000)})
    first.save(tmp_path / f"buffer{ending}")
    second.load(tmp_path / f"buffer{ending}")
    third = TensorDictReplayBuffer(storage=ListStorage())
    third.load_state_dict(first.state_dict())
    wanted = first.sample(5)["x"]
    for loaded in (second, third):
        loaded.extend({"x": torch.arange(3000, 5000)})
        assert torch.equal(loaded["x"], torch.arange(5000))
    assert torch.equal(first["x"], torch.arange(3000)) and len(wanted) == 5


@pytest.mark.parametrize("part", ["priorities", "small_priorities", "max_value", "without_replacement"])
def test_parts_go_with_a_storage_without_limit(part):
    parts = {
        "priorities": lambda: {"sampler": PrioritizedSampler(None, 0.7, 0.5)},
        "small_priorities": lambda: {"sampler": PrioritizedSampler(10, 0.7, 0.5)},
        "max_value": lambda: {"writer": MaxValueWriter(rank_key="x")},
        "without_replacement": lambda: {"sampler": SamplerWithoutReplacement()},
    }  # fmt: skip
    buffer = TensorDictReplayBuffer(storage=ListStorage(), **parts[part]())
    buffer.extend({"x": torch.arange(1500.0)})
    buffer.extend({"x": torch.arange(1500.0, 3000.0)})
    assert len(buffer) == 3000 and len(buffer.sample(32)) == 32


SAMPLERS = {
    "random": RandomSampler, "without_replacement": SamplerWithoutReplacement,
    "priorities": lambda: PrioritizedSampler(None, 0.7, 0.5), "slices": lambda: SliceSampler(num_slices=2, end_key=END),
    "padded": lambda: SliceSampler(slice_len=3, end_key=END, strict_length=False, pad_output=True),
    "slices_by_priority": lambda: PrioritizedSliceSampler(None, 0.7, 0.5, slice_len=2, end_key=END),
    "slices_without_replacement": lambda: SliceSamplerWithoutReplacement(slice_len=2, end_key=END),
}  # fmt: skip


def test_a_sample_of_0_rows_is_torchrls():
    theirs, ours = (filled(data, episodes([2, 4])).sample(0) for data in BOTH)
    assert ours.batch_size == theirs.batch_size and set(ours.keys(True, True)) == set(theirs.keys(True, True))
    for key in theirs.keys(True, True):
        assert (ours[key].shape, ours[key].dtype) == (theirs[key].shape, theirs[key].dtype)


@pytest.mark.parametrize("settings", [{}, {"n_step": 2}, {"stack_num": 2}, {"framework": "numpy"}], ids=str)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_sample_of_0_rows_has_the_columns_of_others_and_changes_no_pass(sampler, settings):
    rows = {"obs": torch.arange(6.0), "reward": torch.ones(6), "next": {"done": episodes([2, 4])["next", "done"]}}
    buffers = [TensorDictReplayBuffer(sampler=SAMPLERS[sampler](), generator=0, **settings) for _ in range(2)]
    with pytest.raises(EmptyBufferError):
        buffers[0].sample(0)
    for buffer in buffers:
        buffer.extend(rows)
        buffer.sample(2 if sampler != "padded" else 3)
    empty, info = buffers[0].sample(0, return_info=True)
    drawn = [buffer.sample(2 if sampler != "padded" else 3) for buffer in buffers]
    assert set(empty) == set(drawn[0]) and set(info) <= set(empty) and buffers[0].can_sample(0)
    for key in empty:
        assert empty[key].shape == (0, *drawn[0][key].shape[1:]) and empty[key].dtype == drawn[0][key].dtype
        assert (drawn[0][key] == drawn[1][key]).all()
