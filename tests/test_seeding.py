"""Random streams: derived ones never meet, private ones leave the caller's alone."""

from __future__ import annotations

import contextlib
import copy
import pickle
import random

import gymnasium
import numpy as np
import pytest
import torch
from helpers import Counting, create_gym, rollout

from rlstructs import RandomAgent, RL_Batcher, SpecError, int32_seed
from rlstructs.seeding import (
    EnvSeed,
    PrivateStreams,
    environment_seeds,
    read_streams,
    restore_streams,
    seed_global_streams,
)


def draw():
    """One number of each global stream."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))


@pytest.fixture(autouse=True)
def untouched():
    """These tests seed the global streams of the whole test run."""
    with PrivateStreams()():
        yield


@pytest.mark.parametrize(
    ("seed", "wanted"),
    [
        (7, [7, 8, 9]),
        (np.int32(7), [7, 8, 9]),
        ([5, 5, 0], [5, 5, 0]),
        ((1, 2, 3), [1, 2, 3]),
        (np.array([4, 2, 0]), [4, 2, 0]),
        (EnvSeed(0, 2), EnvSeed(0, 2).for_environments(3)),
    ],
    ids=["int", "numpy", "list", "tuple", "array", "derived"],
)
def test_each_environment_gets_a_seed(seed, wanted):
    found = environment_seeds(seed, 3)
    assert found == wanted and {type(value) for value in found} == {int}


@pytest.mark.parametrize("seed", [-1, [1, 2], [1, 2, 3, 4], [1, -2, 3], []], ids=str)
def test_seeds_that_do_not_fit_are_refused(seed):
    refusal = "^seed: (must not be negative|needs 3 seeds of at least 0, one for each of the environments), got "
    with pytest.raises(SpecError, match=refusal):
        environment_seeds(seed, 3)


@pytest.mark.parametrize("seed", [None, 1.0, [1.0, 2.0, 3.0], "abc"], ids=str)
def test_seeds_that_are_no_ints_are_refused(seed):
    with pytest.raises(TypeError, match="^seed: needs an int, or one for each of 3 environments, got "):
        environment_seeds(seed, 3)


@pytest.mark.parametrize("n_workers", [1, 2, 3, 6])
def test_derived_seeds_depend_on_the_global_index_only(n_workers):
    n_envs = 6 // n_workers
    found = [seed for worker in range(n_workers) for seed in EnvSeed(11, worker).for_environments(n_envs)]
    assert found == EnvSeed(11, 0).for_environments(6)


def test_derived_seeds_do_not_meet():
    seeds = [seed for root in range(4) for seed in EnvSeed(root, 0).for_environments(500)]
    workers = [int(EnvSeed(root, worker)) for root in range(4) for worker in range(100)]
    assert len({*seeds, *workers}) == 2400 and min(seeds) >= 0 and max(seeds) < 2**32


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda seed: pickle.loads(pickle.dumps(seed))])
def test_a_derived_seed_travels(copied):
    seed = EnvSeed(3, 2)
    made = copied(seed)
    assert type(made) is EnvSeed and made == seed and made.for_environments(4) == seed.for_environments(4)


def test_global_streams_depend_on_both_seeds():
    found = {}
    for seeds in [(1, None), (2, None), (1, 0), (1, 1), (2, 1)]:
        seed_global_streams(*seeds)
        found[seeds] = draw()
        draw()
        seed_global_streams(*seeds)
        assert draw() == found[seeds]
    for stream in zip(*found.values(), strict=True):
        assert len(set(stream)) == 5


def test_private_streams_leave_the_callers_as_they_were_and_continue_their_own():
    seed_global_streams(1, None)
    mine = [draw() for _ in range(2)]
    seed_global_streams(2, None)
    private = PrivateStreams()
    theirs = [draw() for _ in range(4)]
    seed_global_streams(1, None)
    assert draw() == mine[0]
    with private():
        assert [draw(), draw()] == theirs[:2]
    assert draw() == mine[1]
    with pytest.raises(ZeroDivisionError), private():
        assert draw() == theirs[2]
        raise ZeroDivisionError
    seed_global_streams(1, None)
    with private():
        assert draw() == theirs[3]
    assert [draw(), draw()] == mine


class CopiedStreams:
    """Does what `PrivateStreams` does, with copies of whole states."""

    def __init__(self):
        self.states = read_streams()

    @contextlib.contextmanager
    def __call__(self):
        before = read_streams()
        restore_streams(self.states)
        yield
        self.states = read_streams()
        restore_streams(before)


DRAWS = [
    random.random, np.random.rand, np.random.normal, lambda: np.random.standard_normal(3).sum(),
    lambda: float(torch.rand(())), lambda: np.random.seed(7), lambda: torch.manual_seed(7) and None,
    lambda: np.random.set_state(np.random.get_state()), lambda: restore_streams(read_streams()),
]  # fmt: skip


def test_private_streams_give_what_copies_of_whole_states_give():
    def play(make, number):
        chosen, drawn = random.Random(number), []
        seed_global_streams(number, None)
        np.random.normal()  # keeps another number for the next call
        streams = [make(), make()]
        for _ in range(15):
            with chosen.choice(streams)():
                drawn += [chosen.choice(DRAWS)() for _ in range(chosen.randrange(4))]
            drawn += [chosen.choice(DRAWS)() for _ in range(chosen.randrange(4))]
        return drawn, np.random.get_state(legacy=False)["has_gauss"]

    for number in range(60):
        assert play(PrivateStreams, number) == play(CopiedStreams, number)


def test_private_streams_run_with_one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with PrivateStreams()():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_seed_for_int32_is_itself_if_it_fits_and_others_do_not_meet():
    assert [int32_seed(seed) for seed in (0, 7, np.int64(5), 2**31 - 1)] == [0, 7, 5, 2**31 - 1]
    large = [2**shift for shift in range(31, 129)] + [2**shift - 1 for shift in range(32, 129)]
    large += [2**31 * number for number in range(3, 1000, 2)] + [-(2**shift) for shift in range(40)]
    found = [int32_seed(seed) for seed in large]
    assert len({*found}) == len(large) and all(0 <= seed < 2**31 for seed in found)
    assert {type(int32_seed(seed)) for seed in (EnvSeed(0, 1), EnvSeed(1, 1), np.uint64(2**63))} == {int}
    with pytest.raises(TypeError):
        int32_seed(1.0)


def random_agent():
    return RandomAgent(gymnasium.spaces.Discrete(2))


@pytest.mark.parametrize("n_processes", [0, 2])
def test_without_seeds_one_is_drawn_and_repeats_the_run(n_processes):
    def play(*seeds):
        settings = 8, random_agent, {}, create_gym, {"env_id": "CartPole-v1", "n_envs": 2}, n_processes, *seeds
        with RL_Batcher(*settings) as batcher:
            batcher.reset()
            return batcher.stats()["seeds"], rollout(batcher)[0], batcher.state_dict()

    states = random.getstate(), np.random.get_state()[1].tolist()
    drawn, trajectories, state = play()
    assert type(drawn) is int and state["seeds"] == drawn
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states  # nobody's global stream
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    others = []
    for _ in range(2):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        others.append(play(None))
    assert len({drawn, others[0][0], others[1][0]}) == 3 and others[0][1] != trajectories
    again = play(drawn)
    assert again[:2] == (drawn, trajectories)


@pytest.mark.parametrize(
    ("given", "told"), [(3, 3), (np.int64(3), 3), ([5, 900], [5, 900]), ((5, 900), [5, 900])], ids=str
)
def test_seeds_that_were_given_are_told(given, told):
    with RL_Batcher(8, Counting, {}, create_gym, {"env_id": "CartPole-v1", "n_envs": 2}, 2, given) as batcher:
        assert batcher.stats()["seeds"] == batcher.state_dict()["seeds"] == told


def test_a_state_of_drawn_seeds_names_them():
    settings = 8, Counting, {}, create_gym, {"env_id": "CartPole-v1", "n_envs": 2}, 0
    with RL_Batcher(*settings) as first, RL_Batcher(*settings) as second:
        state = first.state_dict()
        told = f"make the batcher with seeds={state['seeds']}"
        with pytest.raises(SpecError, match=rf"^load_state_dict: seeds is .*; {told}$"):
            second.load_state_dict(state)
    with RL_Batcher(*settings, state["seeds"]) as third:
        third.load_state_dict(state)
        assert third.stats()["seeds"] == state["seeds"]
        third.load_state_dict({key: value for key, value in state.items() if key != "seeds"})  # an older one
