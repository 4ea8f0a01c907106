"""The global random streams of workers of a `SharedVectorEnv`, and `init_worker`, which runs first in every worker."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import Count

from rlstructs import GymEnv, RandomAgent, RL_Batcher, SharedVectorEnv, SpecError, WorkerCrashed
from rlstructs.testing import Fault, FaultyEnv, create_faulty_envs

IS_FORK = "TEST_FORK" in os.environ  # of conftest.py, which workers need not import


class Draws(Count):
    """Has a number of each global stream."""

    def __init__(self):
        super().__init__(3)
        self.drawn = random.random(), float(np.random.rand()), float(torch.rand(1))


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def drawn(n_workers=2, n_envs=4, **arguments):
    """What each environment has drawn; each worker has two."""
    with SharedVectorEnv([Draws] * n_envs, n_workers, **arguments) as envs:
        return envs.get_attr("drawn")


def test_streams_of_workers_follow_from_the_trainers_each_from_its_own(start_method):
    seed_all(0)
    found = drawn(start_method=start_method)
    for numbers in zip(*found, strict=True):  # no two workers draw the same
        assert len(set(numbers)) == len(found)
    seed_all(0)
    np.random.seed(5)
    others = drawn(start_method=start_method)
    for k in range(3):
        assert all((one[k] == two[k]) == (k != 1) for one, two in zip(found, others, strict=True))


def test_streams_do_not_depend_on_the_start_method(start_method):
    seed_all(0)
    found = drawn(2, 2, seed=11, start_method=start_method)
    seed_all(1)  # of a seed of the constructor's they follow alone
    assert drawn(2, 2, seed=11, start_method="fork" if IS_FORK else "forkserver") == found
    assert found == (  # under every start method
        (0.05837882735415845, 0.48380203594779403, 0.2633146643638611),
        (0.9664767535237944, 0.2324768423953394, 0.9713598489761353),
    )


@pytest.mark.parametrize("n_workers", [0, 2])
def test_the_trainers_streams_are_left_as_they_are(n_workers, start_method):
    seed_all(0)
    random.gauss(0, 1), np.random.randn(), torch.randn(1)
    before = states()
    with SharedVectorEnv([lambda: Count(3)] * 2, n_workers, start_method=start_method) as envs:
        envs.reset()
        envs.step([0, 0])
    assert states() == before


@pytest.mark.parametrize(("seed", "kind"), [(-1, SpecError), ("0", TypeError), (1.5, TypeError), (True, TypeError)])
def test_a_seed_that_is_none_is_refused(seed, kind):
    with pytest.raises(kind, match="seed must be"):
        SharedVectorEnv([Draws], 0, seed=seed)


# --- init_worker ---------------------------------------------------------------------------------


def create_counts(n_envs, seed):
    assert os.environ["INITIALISED"] == str(seed)  # before environments are made
    return GymEnv([Count(3) for _ in range(n_envs)], seed)


def initialise(index):
    os.environ["INITIALISED"] = str(index)


def make_batcher(init_worker, n_workers, start_method=None, **arguments):
    create_agent = lambda: RandomAgent(spaces.Discrete(2))  # noqa: E731
    return RL_Batcher(
        2, create_agent, {}, create_counts, {"n_envs": 1}, n_workers, list(range(max(1, n_workers))),
        start_method=start_method, init_worker=init_worker, **arguments,
    )  # fmt: skip


class Initialised(Count):
    """Knows how its worker was initialised."""

    def __init__(self):
        super().__init__(3)
        self.index = int(os.environ["INITIALISED"])


def make_vector(init_worker, n_workers, start_method=None):
    return SharedVectorEnv([Initialised] * 2, n_workers, start_method=start_method, init_worker=init_worker)


SURFACES = {"RL_Batcher": make_batcher, "SharedVectorEnv": make_vector}


@pytest.fixture
def environment(monkeypatch):
    monkeypatch.setenv("INITIALISED", "none")


@pytest.mark.parametrize("n_workers", [0, 2])
@pytest.mark.parametrize("make", SURFACES.values(), ids=SURFACES)
def test_init_worker_runs_first_in_each_worker(make, n_workers, start_method, environment):
    with make(initialise, n_workers, start_method) as made:
        made.reset()
        if isinstance(made, SharedVectorEnv):
            assert made.get_attr("index") == ((0, 1) if n_workers else (0, 0))
    assert os.environ["INITIALISED"] == ("none" if n_workers else "0")


@pytest.mark.parametrize("n_workers", [0, 2])
@pytest.mark.parametrize("make", SURFACES.values(), ids=SURFACES)
def test_what_init_worker_raises_is_raised(make, n_workers, start_method):
    def init_worker(index):
        raise ZeroDivisionError("no licence")

    with pytest.raises(ZeroDivisionError, match="no licence") as caught:
        make(init_worker, n_workers, start_method)
    if n_workers:
        assert caught.value.__notes__[0] in [f"raised in worker {index} during 'build'" for index in range(2)]


@pytest.mark.parametrize("make", SURFACES.values(), ids=SURFACES)
def test_a_worker_that_dies_in_init_worker_is_a_crash(make, start_method):
    with pytest.raises(WorkerCrashed, match="exit code 3"):
        make(lambda index: os._exit(3), 2, start_method)


@pytest.mark.parametrize("make", SURFACES.values(), ids=SURFACES)
def test_an_init_worker_that_cannot_be_sent_or_called_is_named(make):
    generator = (i for i in range(3))
    with pytest.raises(TypeError, match="init_worker cannot be sent to a worker: cannot pickle 'generator'"):
        make(lambda index: next(generator), 1)
    with pytest.raises(TypeError, match="init_worker must be a function, which is called with a worker's index, got 3"):
        make(3, 1)


def test_init_worker_runs_in_workers_that_take_anothers_place_too(start_method, tmp_path):
    def init_worker(index):
        (tmp_path / f"{index}-{os.getpid()}").touch()

    with RL_Batcher(
        4, lambda: RandomAgent(FaultyEnv.action_space), {}, create_faulty_envs,
        {"n_envs": 2, "faults": [Fault("kill", at="step", count=2, worker=1, generations=[0])]}, 2, 0,
        on_worker_failure="restart", start_method=start_method, init_worker=init_worker,
    ) as batcher:  # fmt: skip
        batcher.reset()
        batcher.execute()
        batcher.get()
        assert batcher.stats()["restarts"] == 1
    assert sorted(file.name[0] for file in tmp_path.iterdir()) == ["0", "1", "1"]


def test_what_init_worker_draws_changes_no_rollout(start_method):
    def rollout(init_worker):
        create_agent = lambda: RandomAgent(spaces.Discrete(5))  # noqa: E731
        with RL_Batcher(
            3, create_agent, {}, lambda seed: GymEnv([Draws()], seed), {}, 2, 0, start_method=start_method,
            init_worker=init_worker,
        ) as batcher:  # fmt: skip
            batcher.reset()
            batcher.execute()
            return batcher.get()[0]

    assert rollout(None) == rollout(lambda index: (torch.rand(3), np.random.rand(), random.random()))


def test_the_number_of_threads_that_init_worker_sets_stays(start_method, environment):
    class Threads(Count):
        def __init__(self):
            super().__init__(3)
            self.n_threads = torch.get_num_threads()

    for init_worker, n_threads in ((None, 1), (lambda index: torch.set_num_threads(2), 2)):
        arguments = {"start_method": start_method, "init_worker": init_worker}
        with SharedVectorEnv([Threads] * 2, 2, **arguments) as envs:
            assert envs.get_attr("n_threads") == (n_threads,) * 2
