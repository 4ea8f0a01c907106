"""`SharedVectorEnv(on_env_failure="restart")`, by itself and under a batcher."""

from __future__ import annotations

import logging

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from helpers import rollout, through_file

from rlstructs import GymVectorEnv, NormalizeReward, RandomAgent, RL_Batcher, SharedVectorEnv, SpecError
from rlstructs.testing import Fault, FaultyEnv, Ledger

N, T = 4, 4
MODES = list(AutoresetMode)


class Maker:
    """Makes one environment, life after life."""

    def __init__(self, k, faults, length=6):
        self.k, self.faults, self.length, self.n_lives = k, faults, length, 0

    def __call__(self):
        self.n_lives += 1
        return FaultyEnv(self.faults, env_index=self.k, generation=4096 * (self.n_lives - 1), length=self.length)


def once(count, env_index, at="step", **arguments):
    return Fault("raise", at=at, count=count, env_index=env_index, generations=[0], **arguments)


def vector(*faults, n=N, first=0, **arguments):
    return SharedVectorEnv([Maker(first + k, faults) for k in range(n)], **{"on_env_failure": "restart", **arguments})


def places(observations):
    """Life, episode and step of each environment."""
    return [(int(row[1]) // 4096, *map(int, row[2:4])) for row in observations]


@pytest.mark.parametrize("n_workers", [0, 2])
@pytest.mark.parametrize("mode", MODES)
def test_an_episode_is_truncated_where_its_environment_fails_and_the_others_go_on(mode, n_workers):
    with vector(once(3, 1, error=KeyError("lost")), n_workers=n_workers, autoreset_mode=mode) as envs:
        envs.reset(seed=0)
        for _ in range(2):
            seen = envs.step(np.zeros(N, int))[0]
        seen, rewards, terminated, truncated, infos = envs.step(np.zeros(N, int))
        others = [0, 2, 3]
        assert [places(seen)[k] for k in others] == [(0, 0, 3)] * 3
        assert rewards.tolist() == [3, 0, 3, 3] and not terminated.any()
        assert truncated.tolist() == [False, True, False, False]
        assert infos["env_failure"][1] == "KeyError: 'lost'" and infos["_env_failure"].tolist() == truncated.tolist()
        if mode is AutoresetMode.SAME_STEP:
            assert places(infos["final_obs"][1:2]) == [(0, 0, 2)] and places(seen)[1] == (1, 0, 0)
            assert infos["final_info"]["env_failure"][1] == "KeyError: 'lost'"
        else:
            assert places(seen)[1] == (0, 0, 2)
        if mode is AutoresetMode.DISABLED:
            seen, infos = envs.reset(options={"reset_mask": truncated})
            assert places(seen) == [(0, 0, 3), (1, 0, 0), (0, 0, 3), (0, 0, 3)]
        seen, _, terminated, truncated, infos = envs.step(np.zeros(N, int))
        assert places(seen)[1] == ((1, 0, 0) if mode is AutoresetMode.NEXT_STEP else (1, 0, 1))
        assert not truncated.any() and "env_failure" not in infos
        assert [places(seen)[k] for k in others] == [(0, 0, 4)] * 3
        assert envs.env_restarts.tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("n_workers", [0, 2])
def test_the_first_observation_of_a_life_is_shown_whichever_step_failed(n_workers):
    faults = once(1, 1), once(2, 2), once(3, 3)  # in the first step, and in steps just after another failure
    with vector(*faults, n_workers=n_workers, autoreset_mode=AutoresetMode.SAME_STEP) as envs:
        envs.reset(seed=0)
        for k in (1, 2, 3):
            seen, _, _, truncated, _ = envs.step(np.zeros(N, int))
            assert places(seen)[k] == (1, 0, 0) and np.flatnonzero(truncated).tolist() == [k]


@pytest.mark.parametrize("n_workers", [0, 2])
@pytest.mark.parametrize("mode", MODES)
def test_an_environment_that_fails_in_a_reset_is_reset_anew(mode, n_workers):
    faults = once(1, 0, "reset"), once(2, 2, "reset")
    with vector(*faults, n_workers=n_workers, autoreset_mode=mode) as envs:
        seen, infos = envs.reset(seed=0)
        assert places(seen) == [(1, 0, 0), *[(0, 0, 0)] * 3]
        assert infos["env_failure"][0] == "RuntimeError: a deliberate fault"
        for _ in range(6):
            seen, _, terminated, truncated, infos = envs.step(np.zeros(N, int))
        assert terminated.all() and not truncated.any()
        if mode is AutoresetMode.DISABLED:
            seen, infos = envs.reset(options={"reset_mask": terminated})
        elif mode is AutoresetMode.NEXT_STEP:
            seen, rewards, terminated, truncated, infos = envs.step(np.zeros(N, int))
            assert not rewards.any() and not terminated.any() and not truncated.any()
        assert places(seen) == [(1, 1, 0), (0, 1, 0), (1, 0, 0), (0, 1, 0)]
        assert infos["_env_failure"].tolist() == [False, False, True, False]


@pytest.mark.parametrize("n_workers", [0, 2])
def test_environments_that_are_sent_alone_fail_alone(n_workers):
    with vector(once(2, 1), once(2, 3), n_workers=n_workers, n_groups=2) as envs:
        envs.reset(seed=0)
        for ids in ([0, 1], [2, 3], [1], [0], [2, 3]):
            envs.send(np.zeros(len(ids), int), ids)
            seen, _, _, truncated, infos = envs.recv()
            found = dict(zip(ids, zip(places(seen), truncated.tolist(), strict=True), strict=True))
            if ids == [1]:
                assert found == {1: ((0, 0, 1), True)} and infos["env_failure"].tolist() == [
                    "RuntimeError: a deliberate fault"
                ]
        assert found == {2: ((0, 0, 2), False), 3: ((0, 0, 1), True)}
        assert envs.env_restarts.tolist() == [0, 1, 0, 1]


class Noisy(gymnasium.Env):
    """Shows numbers of its stream in a Dict with a text, and fails in its second step."""

    observation_space = gymnasium.spaces.Dict(
        {"at": gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float64), "word": gymnasium.spaces.Text(8)}
    )
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._show(), {}

    def _show(self):
        return {"at": self.np_random.normal(size=1), "word": f"w{self.t}"}

    def step(self, action):
        self.t += 1
        if self.t == 2:
            raise RuntimeError("lost")
        return self._show(), 1.0, False, False, {}


def noise(n_workers, seed, n_lives=3):
    numbers = []
    with SharedVectorEnv([Noisy] * 2, n_workers, autoreset_mode="SameStep", on_env_failure="restart") as envs:
        seen, _ = envs.reset(seed=seed)
        numbers.append(seen["at"])
        for _ in range(2 * n_lives):
            seen, *_, infos = envs.step(np.zeros(2, int))
            numbers.append(seen["at"])
            if "final_obs" in infos:
                assert [each["word"] for each in infos["final_obs"]] == ["w1", "w1"]
                assert [each["at"] for each in infos["final_obs"]] == numbers[-2].tolist()
    return np.concatenate(numbers).ravel()


def test_each_life_has_a_stream_of_its_own_which_follows_from_the_seed():
    first, again, other = noise(0, 5), noise(2, 5), noise(0, 77)
    np.testing.assert_array_equal(first, again)
    assert len(set(first.tolist() + other.tolist())) == 2 * len(first)


@pytest.mark.parametrize("n_workers", [0, 2])
def test_too_many_failures_are_an_error(n_workers, caplog):
    with vector(Fault("raise", count=2, env_index=1), n_workers=n_workers, max_env_restarts=1) as envs:
        envs.reset(seed=0)
        with caplog.at_level(logging.WARNING, "rlstructs"):
            for _ in range(4):
                envs.step(np.zeros(N, int))
        assert "environment 1 (FaultyEnv) failed in step 2 of its episode, and is made anew" in caplog.text
        with pytest.raises(RuntimeError, match="a deliberate fault") as caught:
            envs.step(np.zeros(N, int))
        assert caught.value.__notes__[0] == "raised by environment 1 (FaultyEnv) in step"
    fault = Fault("raise", at="reset", env_index=1, count=None)
    with vector(fault, n_workers=n_workers) as envs, pytest.raises(RuntimeError, match="a deliberate fault"):
        envs.reset(seed=0)


def test_a_function_that_gives_its_environment_again_is_an_error():
    envs = [FaultyEnv([once(2, 0)], env_index=k) for k in range(2)]
    made = SharedVectorEnv([lambda k=k: envs[k] for k in range(2)], 0, on_env_failure="restart")
    made.reset(seed=0)
    made.step(np.zeros(2, int))
    with pytest.raises(SpecError, match=r"env_fns\[0\] gave an environment again"):
        made.step(np.zeros(2, int))
    made.close()


@pytest.mark.parametrize(("name", "value"), [("on_env_failure", "ignore"), ("max_env_restarts", -1)])
def test_wrong_arguments_are_named(name, value):
    with pytest.raises(SpecError, match=f"{name} must be .*got {value!r}"):
        vector(**{name: value})


def batcher_of(*faults, n_processes=0, wrap=lambda env: env, mode="NextStep", inner=None, **arguments):
    inner = {"n_workers": 0, "on_env_failure": "raise", **(inner or {})}

    def create_env(seed):
        first = getattr(seed, "worker_index", 0) * N
        return wrap(GymVectorEnv(vector(*faults, first=first, autoreset_mode=mode, **inner), seed))

    return RL_Batcher(
        T, lambda: RandomAgent(FaultyEnv.action_space), {}, create_env, {}, n_processes, 0,
        **{"on_env_failure": "restart", **arguments},
    )  # fmt: skip


INNER = {"alone": {}, "workers": {"n_workers": 2}, "groups": {"n_groups": 2}, "both": {"n_workers": 2, "n_groups": 2}}
CASES = [
    (mode, inner) for mode in MODES for inner in INNER if mode is not AutoresetMode.DISABLED or "n_groups" not in
    INNER[inner]
]  # fmt: skip


@pytest.mark.parametrize(("mode", "inner"), CASES)
def test_under_a_batcher_a_row_ends_with_its_last_good_step_and_begins_anew_with_the_next_rollout(mode, inner):
    faults = once(2, 1), once(6, 2), once(9, 0)
    with batcher_of(*faults, mode=mode, inner=INNER[inner], on_worker_failure="raise") as batcher:
        batcher.reset()
        ledger, rows = Ledger(), []
        for _ in range(6):
            trajectories, n_running = rollout(batcher)
            ledger.add(trajectories)
            rows.append(trajectories.lengths.tolist())
            assert n_running == N
        assert batcher.stats()["env_restarts"] == [1, 1, 1, 0]
        assert [row[1] for row in rows[:2]] == [1, 4] and rows[1][2] == 1
        assert (rows[0][0], *rows[0][2:]) == (4, 4, 4)
        ended = batcher.episodes()
        assert set(ended["length"].tolist()) == {6} and ended["terminated"].all()


@pytest.mark.parametrize(("mode", "inner"), CASES)
def test_under_a_batcher_an_environment_that_fails_in_a_reset_costs_no_step(mode, inner):
    with batcher_of(once(2, 1, "reset"), mode=mode, inner=INNER[inner]) as batcher:
        batcher.reset()
        ledger, lengths = Ledger(), []
        for _ in range(4):
            trajectories, _ = rollout(batcher)
            ledger.add(trajectories)
            lengths.append(trajectories.lengths.tolist())
        assert lengths[1][1] == (4 if mode is AutoresetMode.DISABLED else 2)
        assert batcher.stats()["env_restarts"] == [0, 1, 0, 0]
        assert set(batcher.episodes()["length"].tolist()) == {6}


def test_what_the_vector_environment_was_told_holds_under_a_batcher_that_was_told_nothing():
    with batcher_of(once(2, 1), inner={"on_env_failure": "restart"}, on_env_failure="raise") as batcher:
        batcher.reset()
        trajectories, _ = rollout(batcher)
        assert trajectories.lengths.tolist() == [4, 1, 4, 4]
        assert not trajectories.trajectories["_observation/truncated"].any()


@pytest.mark.parametrize("inner", ["alone", "groups"])
def test_an_exact_state_goes_on_through_failures(inner):
    fault = Fault("raise", count=7, env_index=1)
    both = [batcher_of(fault, inner=INNER[inner], wrap=NormalizeReward) for _ in range(2)]
    with both[0] as batcher, both[1] as other:
        batcher.reset()
        for _ in range(3):
            rollout(batcher)
        other.load_state_dict(through_file(batcher.state_dict(exact=True)))
        for _ in range(5):
            (expected, _), (found, _) = rollout(batcher), rollout(other)
            assert found.lengths.tolist() == expected.lengths.tolist()
            for name, tensor in expected.trajectories.items():
                assert torch.equal(found.trajectories[name], tensor), name
        assert other.stats()["env_restarts"] == batcher.stats()["env_restarts"] != [0, 1, 0, 0]


def test_a_vector_environment_that_does_not_tell_which_one_failed_is_refused():
    def create_env(seed):
        return GymVectorEnv(gymnasium.vector.SyncVectorEnv([FaultyEnv] * 2), seed)

    with pytest.raises(SpecError, match="a SyncVectorEnv does not tell which of its environments has failed"):
        RL_Batcher(4, lambda: RandomAgent(FaultyEnv.action_space), {}, create_env, {}, 0, on_env_failure="restart")
