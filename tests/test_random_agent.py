"""`RandomAgent`: what it draws lies in the space, covers it, and comes from torch's global stream."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from gymnasium import spaces
from test_spaces import INTEGERS, REFUSED, every_space, whole_range

from rlstructs import DictTensor, RandomAgent, SpecError
from rlstructs.envs.action_reader import ActionReader
from rlstructs.envs.spaces import list_leaves


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(5)
        yield


def draws(space, n):
    observation = DictTensor({"reward": torch.zeros(n)})
    output, state = RandomAgent(space)(DictTensor(), observation, DictTensor())
    assert state.empty()
    return output


@every_space
def test_actions_lie_in_their_space(space):
    output = draws(space, 300)
    actions, _ = ActionReader(space).read(output, 300)
    assert all(space.contains(action) for action in actions)
    for leaf in list_leaves(space, "action"):
        tensor = output[ActionReader.key(leaf)]
        assert tensor.numpy().dtype == leaf.dtype and tensor.shape == (300, *leaf.shape)
        assert np.isfinite(tensor.numpy()).all()


@pytest.mark.parametrize(
    ("space", "values"),
    [
        (spaces.Discrete(5), range(5)),
        (spaces.Discrete(3, start=-7), range(-7, -4)),
        (spaces.MultiBinary(2), range(2)),
        (spaces.MultiDiscrete([3, 3]), range(3)),
        (spaces.MultiDiscrete([3, 3], start=[4, 4]), range(4, 7)),
        (spaces.Box(0, 1, (2,), np.bool_), range(2)),
        (spaces.Box(-1, 2, (2,), np.int8), range(-1, 3)),
        (spaces.Box(0, 255, (2,), np.uint8), range(256)),
        (spaces.Box(2**62 + 1, 2**62 + 3, (2,), np.int64), range(2**62 + 1, 2**62 + 4)),
        (spaces.Box(2**64 - 3, 2**64 - 1, (2,), np.uint64), range(2**64 - 3, 2**64)),
    ],
    ids=str,
)
def test_whole_numbers_are_uniform_over_all_values_of_the_space(space, values):
    drawn = draws(space, 6000)["action"].numpy().reshape(6000, -1)
    for column in drawn.T:
        found, counts = np.unique(column, return_counts=True)
        assert found.tolist() == list(values)
        mean = 6000 / len(values)
        assert np.abs(counts - mean).max() < 5 * np.sqrt(mean)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_every_bit_of_a_full_range_is_random(dtype):
    drawn = draws(whole_range(np.dtype(dtype)), 4000)["action"].numpy()
    bits = np.unpackbits(drawn.view(np.uint8), axis=1)
    assert np.abs(bits.mean(0) - 0.5).max() < 5 * 0.5 / np.sqrt(4000)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-(2**62), 2**62, (4,), np.int64),
        spaces.Box(-(2**62) - 9, 2**62 + 9, (4,), np.int64),
        spaces.Box(5, 2**63 + 9, (4,), np.uint64),
        spaces.Discrete(2**40, start=-3),
        spaces.MultiDiscrete([2**62, 2**40], start=[2**62, -(2**39)]),
        spaces.Box(np.array([0, -(2**63)]), np.array([3, 2**63 - 1]), dtype=np.int64),
    ],
    ids=str,
)
def test_wide_ranges_are_covered_evenly(space):
    (leaf,) = list_leaves(space, "action")
    drawn = draws(space, 3000)["action"].numpy().reshape(3000, -1).astype(object)
    if isinstance(space, spaces.Box):
        low, high = space.low, space.high
    else:
        low = np.asarray(space.start)
        high = low.astype(object) + (space.n if isinstance(space, spaces.Discrete) else space.nvec.astype(object)) - 1
    low, high = (np.asarray(bound).astype(object).reshape(-1) for bound in (low, high))
    assert leaf.space is space and (drawn >= low).all() and (drawn <= high).all()
    for quarter in range(4):
        share = ((drawn - low) * 4 // (high - low + 1) == quarter).mean(0)
        assert np.abs(share.astype(float) - 0.25).max() < 5 * 0.5 / np.sqrt(3000)


@pytest.mark.parametrize(
    ("dtype", "low", "high", "least", "most"),
    [
        (np.float32, -3, 5, -2.9, 4.9),
        (np.float16, -3, 5, -2.9, 4.9),
        (np.float32, 2, np.inf, 2.1, 6),
        (np.float16, 60000, np.inf, 60064, 60000),
        (np.float64, -np.inf, -2, -6, -2.1),
        (np.float32, -np.inf, np.inf, -2.5, 2.5),
        (np.float64, 0.1, 0.1 + 2e-8, 0.1 + 1e-8, 0.1 + 1e-8),  # few float32 lie between them
        (np.float64, -1e308, 1e308, -1e38, 1e38),
        (np.float32, np.finfo(np.float32).min, np.finfo(np.float32).max, -3e38, 3e38),
    ],
)
def test_floats_reach_from_bound_to_bound(dtype, low, high, least, most):
    space = spaces.Box(low, high, (2,), dtype)
    drawn = draws(space, 2000)["action"].double()
    assert drawn.isfinite().all() and (drawn >= low).all() and (drawn <= high).all()
    assert drawn.min() <= least and drawn.max() >= most


def test_the_global_stream_of_torch_decides():
    space = spaces.Dict(a=spaces.Box(-np.inf, 1, (2,)), b=spaces.MultiDiscrete([2**62, 3]), c=spaces.Discrete(9))
    found = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        found.append(draws(space, 8))
    assert found[0] == found[2] != found[1]


def test_it_has_no_state_and_says_once_that_it_ignores_updates(caplog):
    agent = RandomAgent(spaces.Discrete(2))
    assert agent.initial_state(DictTensor(), 3).empty()
    for weights in (None, {"weights": 1}, {"weights": 2}):
        agent.update(weights)
    assert [record.getMessage() for record in caplog.records] == [
        "update: a RandomAgent does not learn; give the batcher the agent or network that does"
    ]
    agent.seed(1)
    agent.close()


@pytest.mark.parametrize("space", REFUSED.values(), ids=REFUSED.keys())
def test_spaces_that_are_not_supported_are_refused(space):
    with pytest.raises(SpecError, match=re.escape(str(space))):
        RandomAgent(spaces.Tuple([space]))
