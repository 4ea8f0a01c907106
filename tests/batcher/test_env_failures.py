"""`on_env_failure="restart"`: an environment that fails costs its own row, and nothing else."""

from __future__ import annotations

import logging
import threading

import gymnasium
import numpy as np
import pytest
import torch
from helpers import Counting, rollout, through_file

from rlstructs import (
    DeviceEnv,
    DictTensor,
    GymEnv,
    GymEnvInf,
    NormalizeObservation,
    NormalizeReward,
    RandomAgent,
    RL_Batcher,
    SpecError,
)
from rlstructs.envs import env_list
from rlstructs.memories.torch import RandomMemory
from rlstructs.testing import Fault, FaultyEnv, Ledger, create_faulty_envs

T = 4


def faulty(*faults, n_processes=0, n_envs=3, create_env=create_faulty_envs, agent=None, **arguments):
    """A batcher of `FaultyEnv`s that are made anew where they fail."""
    own = {name: arguments.pop(name) for name in ("length", "autoreset") if name in arguments}
    return RL_Batcher(
        T, agent or (lambda: RandomAgent(FaultyEnv.action_space)), {}, create_env,
        {"n_envs": n_envs, "faults": faults, **own}, n_processes, 0, **{"on_env_failure": "restart", **arguments},
    )  # fmt: skip


def lengths_of(batcher, n, ledger=None):
    """Lengths of n rollouts, which are verified."""
    found, ledger = [], ledger or Ledger()
    for _ in range(n):
        trajectories, n_running = rollout(batcher)
        assert n_running == batcher.n_elems()
        ledger.add(trajectories)
        found.append(trajectories.lengths.tolist())
        steps = trajectories.trajectories
        for row, length in enumerate(found[-1]):  # a row that was cut says of no step that it ended anything
            if 0 < length < T:
                flags = [steps[f"_observation/{flag}"][row, length - 1] for flag in ("done", "terminated", "truncated")]
                assert not any(flags)
    return found


@pytest.mark.parametrize("run_ahead", [0, 2])
@pytest.mark.parametrize("n_processes", [0, 2])
def test_an_environment_that_fails_costs_its_own_row_alone(n_processes, run_ahead):
    fault = Fault("raise", count=6, env_index=1, generations=[0])
    with faulty(fault, n_processes=n_processes, run_ahead=run_ahead) as batcher:
        batcher.reset()
        n, ledger = batcher.n_elems(), Ledger()
        rows = lengths_of(batcher, 5, ledger)
        assert rows == [[T] * n, [T, 1, *[T] * (n - 2)], *[[T] * n] * 3]
        assert batcher.stats()["env_restarts"] == [0, 1, *[0] * (n - 2)] and batcher.stats()["restarts"] == 0
        metrics = batcher.metrics()
        assert {name: value for name, value in metrics.items() if "env_restarts" in name} == {
            "rollout/env_restarts": 1.0, "rollout/env_restarts/1": 1.0,
        }  # fmt: skip
        # The episode that was cut is none.
        assert batcher.episodes()["length"].tolist() == [10] * (2 * n - 1)
        assert ledger.n_transitions == sum(map(sum, rows)) == metrics["rollout/steps"]


def once(count, env_index=None, at="step"):
    return Fault("raise", at=at, count=count, env_index=env_index, generations=[0])


# Faults of environments whose episodes have 6 steps, lengths of rollouts, and how often environments were made anew.
CASES = {
    "the very first step": ([once(1, 1)], [[4, 0, 4], [4, 4, 4]], [0, 1, 0]),
    "the last step of a rollout": ([once(4, 1)], [[4, 3, 4], [4, 4, 4]], [0, 1, 0]),
    "several at once": ([once(3, 0), once(3, 2)], [[2, 4, 2], [4, 4, 4]], [1, 0, 1]),
    "all at once": ([once(2)], [[1, 1, 1], [4, 4, 4]], [1, 1, 1]),
    "all in the first step": ([once(1)], [[0, 0, 0], [4, 4, 4]], [1, 1, 1]),
    "the first reset": ([once(1, 2, "reset")], [[4, 4, 4], [4, 4, 4]], [0, 0, 1]),
    "a reset at an episode's end": ([once(2, 0, "reset")], [[4, 4, 4], [2, 4, 4], [4, 4, 4]], [1, 0, 0]),
    "again and again": ([Fault("raise", count=2, env_index=0)], [[1, 4, 4]] * 3, [3, 0, 0]),
    "the closing too": ([once(2, 0), once(1, 0, "close")], [[1, 4, 4], [4, 4, 4]], [1, 0, 0]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_row_ends_at_the_last_good_step_wherever_its_environment_fails(case):
    faults, expected, restarts = CASES[case]
    with faulty(*faults, length=6) as batcher:
        batcher.reset()
        found, ledger = [], Ledger()
        for _ in expected:
            trajectories, _ = rollout(batcher)
            ledger.add(trajectories)
            found.append(trajectories.lengths.tolist())
        assert found == expected and batcher.stats()["env_restarts"] == restarts


def test_an_environment_that_plays_one_episode_ends_for_good_and_one_that_failed_begins_another():
    fault = Fault("raise", count=3, env_index=1, generations=[0])
    with faulty(fault, autoreset=False, length=6) as batcher:
        batcher.reset()
        found = [rollout(batcher) for _ in range(3)]
        assert [trajectories.lengths.tolist() for trajectories, _ in found] == [[4, 2, 4], [2, 4, 2], [2]]
        assert [n for _, n in found] == [3, 1, 0]
        assert found[2][0].info["env_index"].tolist() == [1]


def test_an_environment_that_waits_for_the_next_rollout_may_fail_too():
    def create_env(n_envs, seed, faults):
        return GymEnvInf(create_faulty_envs(n_envs, seed, faults, length=6)._envs, seed, defer_resets=True)

    fault = Fault("raise", count=3, env_index=1, generations=[0])
    with faulty(fault, create_env=create_env) as batcher:
        batcher.reset()
        ledger, found = Ledger(), []
        for _ in range(3):
            trajectories, n_running = rollout(batcher)
            ledger.add(trajectories)
            found.append((trajectories.lengths.tolist(), n_running))
        assert found == [([4, 2, 4], 3), ([2, 4, 2], 3), ([4, 2, 4], 3)]


def test_an_environment_that_does_not_close_is_left_and_the_others_go_on(monkeypatch, caplog):
    monkeypatch.setattr(env_list, "CLOSE_SECONDS", 0.0)
    released = threading.Event()

    class Stuck(FaultyEnv):
        def close(self):
            if not self.generation:
                released.wait(60)

    def create_env(n_envs, seed, faults):
        return GymEnvInf([Stuck(faults, env_index=k, generation=4096 * seed.life) for k in range(n_envs)], seed)

    batcher = faulty(Fault("raise", count=2, env_index=0, generations=[0]), create_env=create_env, n_envs=1)
    batcher.reset()
    assert lengths_of(batcher, 2) == [[1], [4]]
    released.set()
    batcher.close()
    assert "environment 0 has failed, and does not close within 0 s: it is left" in caplog.text


def test_a_constructor_that_fails_at_the_restart_counts_as_a_further_failure():
    faults = [Fault("raise", count=2, env_index=0, generations=[0]), Fault("raise", at="init", generations=[4096])]
    with faulty(*faults, n_envs=1) as batcher:
        batcher.reset()
        assert lengths_of(batcher, 2) == [[1], [4]]
        assert batcher.stats()["env_restarts"] == [2]
    with faulty(*faults, n_envs=1, max_env_restarts=1) as batcher:
        batcher.reset()
        batcher.execute()
        with pytest.raises(RuntimeError, match="a deliberate fault"):
            batcher.get()


@pytest.mark.parametrize("at", ["init", "reset", "step"])
def test_an_environment_that_never_comes_to_a_step_again_is_an_error(at):
    first = Fault("raise", count=3, env_index=0, generations=[0], error=KeyError("the first"))
    lives = [4096 * life for life in range(1, 9)]
    with faulty(first, Fault("raise", at=at, generations=lives), n_envs=1) as batcher:
        batcher.reset()
        with pytest.raises(KeyError, match="the first"):
            for _ in range(9):
                rollout(batcher)


@pytest.mark.parametrize("limit", [0, 2])
def test_max_env_restarts_bounds_each_environment(limit):
    faults = [Fault("raise", count=2, env_index=0, error=ZeroDivisionError("no speed"))]
    with faulty(*faults, Fault("raise", count=2, env_index=1, generations=[0]), max_env_restarts=limit) as batcher:
        batcher.reset()
        with pytest.raises(ZeroDivisionError, match="no speed") as caught:
            lengths_of(batcher, 5)
        assert "raised by environment 0 (FaultyEnv) in step" in caught.value.__notes__
        assert batcher.stats()["env_restarts"] == [limit, min(limit, 1), 0]


def test_an_environment_that_fails_too_often_costs_its_worker_where_workers_are_replaced():
    fault = Fault("raise", count=2, env_index=0, generations=[0, 4096])
    with faulty(fault, n_processes=2, max_env_restarts=1, on_worker_failure="restart") as batcher:
        batcher.reset()
        assert lengths_of(batcher, 1) == [[1, *[4] * 5]]
        trajectories, _ = rollout(batcher)
        assert trajectories.lengths.tolist() == [0, 0, 0, 4, 4, 4]
        assert batcher.stats()["env_restarts"] == [1, *[0] * 5] and batcher.stats()["restarts"] == 1
        assert rollout(batcher)[0].lengths.tolist() == [4] * 6  # its generation is 1


def test_the_log_says_which_environment_failed_in_which_step_and_where(caplog):
    fault = Fault("raise", count=6, env_index=4, generations=[0], error=ZeroDivisionError("no speed"))
    with caplog.at_level(logging.WARNING, "rlstructs"), faulty(fault, n_processes=2) as batcher:
        batcher.reset()
        lengths_of(batcher, 3)
    [record] = [each for each in caplog.records if "made anew" in each.getMessage()]
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "environment 4 (FaultyEnv) failed in step 6 of its episode, and is made anew: ZeroDivisionError: no speed"
    )
    assert "Traceback" in caplog.text and "in _step_envs" in caplog.text


def test_the_log_of_a_replaced_worker_has_the_traceback_the_environment_and_the_step(caplog):
    fault = Fault("raise", count=6, worker=1, env_index=4, generations=[0], error=ZeroDivisionError("no speed"))
    settings = {"on_env_failure": "raise", "on_worker_failure": "restart"}
    with caplog.at_level(logging.WARNING, "rlstructs"), faulty(fault, n_processes=2, **settings) as batcher:
        batcher.reset()
        for _ in range(3):
            rollout(batcher)
    [record] = [each for each in caplog.records if "is replaced" in each.getMessage()]
    assert record.levelno == logging.WARNING and record.exc_info
    assert record.getMessage() == "worker 1 is replaced: ZeroDivisionError('no speed'), step 6 of its episode"
    assert "in _step_envs" in caplog.text and "raised by environment 1 (FaultyEnv) in step" in caplog.text


class Noisy(gymnasium.Env):
    """Shows a number of its stream, and fails in its third step."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(3)
    made = 0

    def __init__(self):
        type(self).made += 1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.np_random.normal(size=1), {}

    def step(self, action):
        self.t += 1
        if self.t == 3:
            raise RuntimeError("lost")
        return self.np_random.normal(size=1), 1.0, False, False, {}


def noise(n_workers, seed=0, n=3, **arguments):
    with RL_Batcher.make(
        Noisy, n_envs=2, n_workers=n_workers, n_timesteps=T, seed=seed, on_env_failure="restart", **arguments
    ) as batcher:
        batcher.reset()
        return [rollout(batcher)[0].trajectories["observation/frame"][:, :2, 0] for _ in range(n)]


@pytest.mark.parametrize("arguments", [{}, {"episode_seeds": True}])
def test_each_life_has_a_stream_of_its_own_which_follows_from_the_seed(arguments):
    first, again, other = noise(0, **arguments), noise(2, **arguments), noise(0, seed=1, **arguments)
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    numbers = torch.cat([*first, *other]).flatten()
    assert len(numbers.unique()) == len(numbers)


def test_make_makes_only_the_environment_that_failed():
    Noisy.made = 0
    noise(0, n=3)
    assert Noisy.made == 2 + 2 * 3


def test_create_env_is_asked_for_an_environment_and_the_others_are_closed():
    closed, made = [], []

    class Recorded(FaultyEnv):
        def close(self):
            super().close()
            closed.append((self.env_index, self.generation))

    def create_env(n_envs, seed, faults):
        generation = 4096 * seed.life
        made.append(generation)
        return GymEnvInf([Recorded(faults, env_index=k, generation=generation) for k in range(n_envs)], seed)

    with faulty(Fault("raise", count=2, env_index=1, generations=[0]), create_env=create_env) as batcher:
        batcher.reset()
        assert lengths_of(batcher, 2) == [[4, 1, 4], [4, 4, 4]]
        assert closed == [(1, 0), (0, 4096), (2, 4096)] and made == [0, 4096]
    assert sorted(closed[3:]) == [(0, 0), (1, 4096), (2, 0)]


def test_a_function_that_gives_the_same_environment_again_is_an_error():
    envs = [FaultyEnv([Fault("raise", count=2)], env_index=k) for k in range(2)]
    with faulty(create_env=lambda n_envs, seed, faults: GymEnvInf(envs, seed), n_envs=2) as batcher:
        batcher.reset()
        batcher.execute()
        with pytest.raises(SpecError, match="environment 0: it was to be made anew, but its function gave an env"):
            batcher.get()


class Flaky(gymnasium.Env):
    """A walk that fails now and then, by its own stream."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, share=0.05):
        self.share = share

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = self.np_random.normal(size=2).astype(np.float32)
        return self.at, {}

    def step(self, action):
        if self.np_random.random() < self.share:
            raise RuntimeError("lost")
        self.at = (self.at + action - 1 + self.np_random.normal(size=2)).astype(np.float32)
        return self.at, float(self.at[0]), bool(self.np_random.random() < 0.1), False, {}


def flaky(n_workers=0, seed=3, wrap=lambda env: env, **arguments):
    def create_env(seed):
        return wrap(GymEnvInf([Flaky() for _ in range(3)], seed))

    agent = arguments.pop("agent", lambda: RandomAgent(Flaky.action_space))
    return RL_Batcher(8, agent, {}, create_env, {}, n_workers, seed, on_env_failure="restart", **arguments)


@pytest.mark.parametrize("n_workers", [0, 2])
def test_a_fed_memory_has_the_rows_that_add_trajectories_would_store_and_no_window_crosses_a_cut(n_workers):
    memory, other = (RandomMemory(memory_size=256, num_envs=3 * max(1, n_workers)) for _ in range(2))
    with flaky(n_workers, memory=memory) as batcher:
        batcher.reset()
        for _ in range(12):
            other.add_trajectories(rollout(batcher)[0])
        assert sum(batcher.stats()["env_restarts"]) > 5
        names = ["observations", "next_observations", "terminated", "truncated"]
        stored = [each.sample_all(names)[0] for each in (memory, other)]
        assert all(torch.equal(*pair) for pair in zip(*stored, strict=True))


def test_statistics_are_those_of_good_steps_alone():
    def wrap(env):
        return NormalizeReward(NormalizeObservation(env, clip=None))

    with flaky(0, wrap=wrap) as batcher, flaky(0) as plain:
        seen = []
        for each in (batcher, plain):
            each.reset()
        for _ in range(9):
            rollout(batcher)
            steps = rollout(plain)[0]
            valid = steps.mask(torch.bool)
            before, after = (steps.trajectories[f"{side}observation/frame"][valid].double() for side in ("", "_"))
            starts = steps.trajectories["observation/initial_state"][valid]
            seen += [before[starts], after]
        assert batcher.stats()["env_restarts"] == plain.stats()["env_restarts"] and sum(plain.stats()["env_restarts"])
        moments, rows = batcher.statistics()["observation/frame"], torch.cat(seen)
        # First observations of the next rollout were counted already.
        n_ahead = moments.count - len(rows)
        assert 0 <= n_ahead <= 3
        if not n_ahead:
            np.testing.assert_allclose(moments.mean, rows.mean(0), rtol=1e-6)
        assert batcher.statistics()["return"].count == sum(len(each) for each in seen[1::2])


def test_an_agent_begins_the_new_episode_with_its_initial_state():
    fault = Fault("raise", count=3, env_index=1, generations=[0])
    with faulty(fault, agent=Counting) as batcher:
        batcher.reset()
        counts = [rollout(batcher)[0] for _ in range(3)]
    found = [each.trajectories["action/n"][1, : each.lengths[1]].tolist() for each in counts]
    assert found == [[0, 1], [0, 1, 2, 3], [4, 5, 6, 7]]
    assert [each.trajectories["action/n"][0].tolist() for each in counts][1] == [4, 5, 6, 7]


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("n_before", [0, 5])
def test_an_exact_state_goes_on_through_failures(n_before, run_ahead):
    with flaky(2, run_ahead=run_ahead) as batcher, flaky(2, run_ahead=run_ahead) as other:
        batcher.reset()
        for _ in range(n_before):
            rollout(batcher)
        state = through_file(batcher.state_dict(exact=True))
        expected = [rollout(batcher)[0] for _ in range(8)]
        other.load_state_dict(state)
        for each in expected:
            found, _ = rollout(other)
            assert found.lengths.tolist() == each.lengths.tolist()
            for name, tensor in each.trajectories.items():
                assert torch.equal(found.trajectories[name], tensor), name
        assert other.stats()["env_restarts"] == batcher.stats()["env_restarts"]
        assert sum(len(set(each.lengths.tolist())) > 1 for each in expected) > 2


def test_a_plain_state_counts_restarts_and_one_without_counts_is_taken_too():
    with flaky(2) as batcher, flaky(2) as other:
        batcher.reset()
        for _ in range(6):
            rollout(batcher)
        state = batcher.state_dict()
        other.load_state_dict(state)
        assert other.stats()["env_restarts"] == batcher.stats()["env_restarts"] != [0] * 6
        for worker in state["workers"]:
            del worker["env_restarts"]
        other.load_state_dict(state)
        assert other.stats()["env_restarts"] == [0] * 6


def test_an_evaluation_plays_its_episodes_to_their_ends():
    with flaky(2) as batcher:
        batcher.reset()
        found = batcher.evaluate(30, seed=1)
        assert torch.bincount(found["env_index"]).tolist() == [5] * 6 and found["terminated"].all()
        assert torch.equal(found["return"], batcher.evaluate(30, seed=1)["return"])
        assert batcher.stats()["env_restarts"] == [0] * 6


class Plain:
    """A wrapper of a program's own, which has no more than the protocol asks for."""

    def __init__(self, env):
        self.n_envs, self.reset, self.step, self.close = env.n_envs, env.reset, env.step, env.close


@pytest.mark.parametrize(("name", "wrap"), [("DeviceEnv", lambda env: DeviceEnv(env, "cpu", "cpu")), ("Plain", Plain)])
def test_environments_that_cannot_be_told_apart_are_refused(name, wrap):
    with pytest.raises(SpecError, match=f"on_env_failure=.restart.: a {name} does not tell which of its environments"):
        flaky(0, wrap=wrap)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"on_env_failure": "ignore"}, SpecError, r"on_env_failure must be one of \('raise', .*, got 'ignore'"),
        ({"max_env_restarts": -1}, SpecError, "max_env_restarts must be at least 0, got -1"),
        ({"max_env_restarts": 1.5}, TypeError, r"max_env_restarts must be an int, got 1\.5"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        faulty(**arguments)


def test_a_result_that_is_wrong_is_an_error_and_no_failure_of_the_environment():
    class Wrong(FaultyEnv):
        def step(self, action):
            return 0, 1.0

    def create_env(n_envs, seed, faults):
        return GymEnv([Wrong() for _ in range(n_envs)], seed)

    with faulty(create_env=create_env) as batcher:
        batcher.reset()
        batcher.execute()
        with pytest.raises(SpecError, match="step must give 5 values"):
            batcher.get()


def test_without_a_batcher_environments_raise():
    env = create_faulty_envs(1, 0, [Fault("raise", count=1)])
    env.reset()
    with pytest.raises(RuntimeError, match="a deliberate fault"):
        env.step(DictTensor({"action": torch.zeros(1, dtype=torch.int64)}))
