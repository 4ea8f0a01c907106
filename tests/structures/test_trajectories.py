"""`Trajectories`: conformance vector CV33 and what lies around it."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

from rlstructs import DictTensor, MissingKeyError, SpecError, TemporalDictTensor, Trajectories


def make(n_elems=3, n_timesteps=4, start=0):
    y = torch.arange(start, start + n_elems * n_timesteps).view(n_elems, n_timesteps)
    lengths = torch.tensor([2, 4, 1])[:n_elems].clamp(max=n_timesteps)
    info = DictTensor({"env_index": torch.arange(start, start + n_elems)})
    return Trajectories(info, TemporalDictTensor({"action/y": y}, lengths))


@pytest.fixture
def t():
    return make()


def rows(trajectories):
    return trajectories.info["env_index"].tolist()


def test_info_may_be_empty_and_parts_are_kept():  # CV33
    m = make().trajectories
    bare = Trajectories(DictTensor(), m)
    assert (bare.trajectories is m, bare.n_elems(), bare.info.empty()) == (True, 3, True)
    assert bare.index([1]).lengths.tolist() == [4]
    assert Trajectories.cat([bare, bare]).n_elems() == 6


@pytest.mark.parametrize(
    ("info", "steps", "error", "message"),
    [
        (DictTensor({"x": torch.zeros(2)}), make().trajectories, SpecError, "info has 2 rows, trajectories has 3$"),
        (make().info.to("meta"), make().trajectories, SpecError, "info is on meta, trajectories is on cpu$"),
        ({}, make().trajectories, TypeError, "got dict and TemporalDictTensor$"),
        (DictTensor(), DictTensor(), TypeError, "got DictTensor and DictTensor$"),
    ],
    ids=["rows", "device", "dict", "no time"],
)
def test_construction_says_what_is_wrong(info, steps, error, message):  # CV33
    with pytest.raises(error, match=f"^Trajectories: .*{message}"):
        Trajectories(info, steps)


def test_it_reads_through_to_its_parts(t):
    assert (len(t), t.n_elems(), t.lengths.tolist(), t.device()) == (3, 3, [2, 4, 1], torch.device("cpu"))
    assert t.mask().tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
    assert t.mask(torch.bool).dtype == torch.bool
    assert [(name, part is getattr(t, name)) for name, part in t.items()] == [("info", True), ("trajectories", True)]
    assert [id(part) for part in t.values()] == [id(t.info), id(t.trajectories)]
    [name, *_] = t.trajectories.keys()
    assert t[name] is t.trajectories[name]
    with pytest.raises(MissingKeyError, match="nothing"):
        t["nothing"]
    with pytest.raises(TypeError, match="not iterable"):
        list(t)


def test_repr_shows_both_parts_with_a_line_for_each_key(t):
    assert repr(t) == (
        "Trajectories(\n"
        "  info=DictTensor(n_elems=3, device=cpu,\n"
        "    env_index=(3,) int64),\n"
        "  trajectories=TemporalDictTensor(n_elems=3, n_timesteps=4, lengths=1..4, device=cpu,\n"
        "    action/y=(3, 4) int64))"
    )
    t.trajectories.set("action/z", torch.zeros(3, 4, 2))
    assert repr(t).endswith("    action/y=(3, 4) int64,\n    action/z=(3, 4, 2) float32))")


def test_cat_joins_both_parts_and_pads_with_zeros():  # CV33
    whole = Trajectories.cat([make(), make(2, 2, start=100)])
    assert (whole.n_elems(), rows(whole), whole.lengths.tolist()) == (5, [0, 1, 2, 100, 101], [2, 4, 1, 2, 2])
    assert whole.trajectories["action/y"][3:].tolist() == [[100, 101, 0, 0], [102, 103, 0, 0]]
    assert whole.slice(0, 3) == make()
    assert Trajectories.cat(make() for _ in range(2)).n_elems() == 6
    assert Trajectories.cat([]).n_elems() == 0
    with pytest.raises(TypeError, match=r"^Trajectories\.cat: item 0 is a DictTensor"):
        Trajectories.cat([make().info])


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (1, [1]), (-1, [2]), (np.int64(1), [1]), (torch.tensor(1), [1]), ([2, 0], [2, 0]), ([], []),
        (torch.tensor([True, False, True]), [0, 2]), (slice(1, None), [1, 2]),
    ],
    ids=str,
)  # fmt: skip
def test_index_takes_the_same_rows_of_both_parts(t, index, expected):
    part = t.index(index)
    assert (rows(part), part.lengths.tolist()) == (expected, [[2, 4, 1][row] for row in expected])
    assert part.trajectories["action/y"].tolist() == t.trajectories["action/y"][expected].tolist()


@pytest.mark.parametrize("index", [3, -4, [3], None, True], ids=str)
def test_index_refuses_what_is_no_row(t, index):
    with pytest.raises(IndexError):
        t.index(index)


def test_slice_gives_views(t):
    part = t.slice(1, 3)
    assert (rows(part), rows(t.slice(1)), t.slice(0, 0).n_elems()) == ([1, 2], [1], 0)
    part.trajectories["action/y"].fill_(-1)
    part.info["env_index"].fill_(-1)
    assert (t.trajectories["action/y"][1:].unique().tolist(), rows(t)) == ([-1], [0, -1, -1])


def test_shorten_cuts_what_is_padding_in_every_row(t):
    short = t.index([0, 2]).shorten()
    assert (short.trajectories.n_timesteps(), rows(short), short.lengths.tolist()) == (2, [0, 2], [2, 1])


def test_sample_draws_different_rows_and_follows_its_generator():
    t = make()
    drawn = [rows(t.sample(2, torch.Generator().manual_seed(seed))) for seed in range(50)]
    assert drawn == [rows(t.sample(2, torch.Generator().manual_seed(seed))) for seed in range(50)]
    assert {tuple(pair) for pair in drawn} == {(i, j) for i in range(3) for j in range(3) if i != j}
    assert (sorted(rows(t.sample(3))), t.sample(0).n_elems()) == ([0, 1, 2], 0)
    sampled = t.sample(3)
    sampled.trajectories["action/y"].zero_()
    assert t == make()


@pytest.mark.parametrize("n", [4, -1])
def test_sample_refuses_more_than_there_are(t, n):
    with pytest.raises(SpecError, match=rf"^Trajectories\.sample: n must lie in \[0, 3\], got {n}$"):
        t.sample(n)


def test_equality_is_of_content_without_padding(t):
    other = make()
    other.trajectories["action/y"][0, 2] = 99
    assert t == other
    other.info["env_index"][0] = 99
    assert t != other
    assert t != Trajectories(DictTensor(), t.trajectories)
    assert t != t.trajectories


@pytest.mark.parametrize(
    "copied", [lambda t: pickle.loads(pickle.dumps(t)), copy.deepcopy, Trajectories.clone],
    ids=["pickle", "deepcopy", "clone"],
)  # fmt: skip
def test_a_copy_is_equal_and_private(t, copied):
    made = copied(t)
    assert made == t
    made.trajectories["action/y"].zero_()
    made.info["env_index"].zero_()
    made.lengths.zero_()
    assert t == make()


def test_to_shares_both_parts_or_moves_both(t):
    for device in ("cpu", torch.device("cpu")):
        same = t.to(device, non_blocking=True)
        shared = (same.info["env_index"] is t.info["env_index"], same.lengths is t.lengths)
        assert (same is t, shared) == (False, (True, True))
    moved = t.to("meta")
    assert (moved.device().type, moved.info.device().type) == ("meta", "meta")


def test_share_memory_includes_both_parts(t):
    assert t.share_memory_() is t
    shared = (t.info["env_index"], t.trajectories["action/y"], t.lengths)
    assert all(tensor.is_shared() for tensor in shared)


def test_the_keys_of_the_steps_are_in_trajectories():
    steps = TemporalDictTensor({"a": torch.zeros(2, 3)}, torch.full((2,), 3))
    trajectories = Trajectories(DictTensor({"env_index": torch.arange(2)}), steps)
    assert "a" in trajectories and "env_index" not in trajectories and 3 not in trajectories
