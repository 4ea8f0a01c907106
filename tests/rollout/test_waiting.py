"""Rollouts of environments that are each stepped in a thread of their own."""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import random
import signal
import sys
import threading

import gymnasium
import numpy as np
import pytest
import torch
import waiting_faults
import waits
from helpers import through_file
from processes import wait_until

from rlstructs import (
    DictTensor,
    EnvTimeout,
    GymEnvInf,
    GymEnvThreads,
    NormalizeObservation,
    NormalizeReward,
    RandomAgent,
    RL_Batcher,
    SpecError,
    StateError,
    TemporalDictTensor,
    Trajectories,
    WorkerError,
)
from rlstructs.memories.torch import RandomMemory


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("n_processes", [0, 2])
def test_the_rows_are_what_the_environments_wrote_down(n_processes, run_ahead):
    judge, _ = waits.run(300, n_processes, run_ahead, deadline=0.005)
    assert judge.n_late  # some steps were under way when a rollout ended


def test_rows_have_all_steps_without_a_deadline():
    judge, _ = waits.run(100, 0, n_timesteps=5)
    assert not judge.n_late
    assert all(len(rows) == 5 for found in judge.found.values() for rows in found)


class Failing(gymnasium.Env):
    """Fails in its third step, or in its second reset: it raises, hangs, or exits."""

    observation_space = gymnasium.spaces.Box(0, 100, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, how):
        self.how, self.n, self.n_resets = how, 0, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.n_resets += 1
        if self.how == "hang in reset" and self.n_resets == 2:
            threading.Event().wait()
        return self._show(), {}

    def step(self, action):
        self.n += 1
        if self.n == 3:
            if self.how == "raise":
                raise RuntimeError("told to fail")
            if self.how == "hang":
                threading.Event().wait()
            if self.how == "hang in C":
                ctypes.CDLL(None).pause()
            if self.how == "exit":
                sys.exit(3)
        return self._show(), 1.0, self.n % 3 == 0, False, {}

    def _show(self):
        return np.array([self.n], np.float32)


HANGING = ("hang", "hang in C", "hang in reset")


def create_failing(n_envs, seed, how, **pace):
    first = not getattr(seed, "life", 0)
    return GymEnvThreads([Failing(how if k == 1 and first else "") for k in range(n_envs)], seed, **pace)


def make_failing(how, n_processes, pace, **settings):
    env_args = {"n_envs": 3, "how": how, **pace}
    return RL_Batcher(
        5,
        lambda: RandomAgent(Failing.action_space),
        {},
        create_failing,
        env_args,
        n_processes,
        0,
        timeout=60,
        **settings,
    )


@pytest.mark.parametrize("n_processes", [0, 1])
@pytest.mark.parametrize("how", ["raise", *HANGING])
def test_an_environment_that_fails_ends_the_rollout_with_an_error_that_names_it(how, n_processes):
    wanted, match = (EnvTimeout, "environment 1 .*step_timeout") if how in HANGING else (RuntimeError, "told to fail")
    with make_failing(how, n_processes, {"step_timeout": 0.3}) as batcher:
        batcher.reset()
        with pytest.raises(wanted, match=match) as caught:
            batcher.execute()
            batcher.get()
    call = "reset" if how == "hang in reset" else "step"
    assert any(f"environment 1 (Failing) in {call}" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("n_processes", [0, 1])
@pytest.mark.parametrize("how", ["raise", *HANGING])
def test_an_environment_that_fails_is_made_anew_alone(how, n_processes):
    settings = {"on_env_failure": "restart"} if how == "raise" else {}
    pace = {"step_timeout": 0.3, "on_env_timeout": "restart"} if how in HANGING else {}
    with make_failing(how, n_processes, pace, **settings) as batcher:
        lengths = [trajectories.lengths.tolist() for trajectories in batcher.rollouts(n_steps=25)]
        assert lengths == [[5, 3 if how == "hang in reset" else 2, 5], [5, 5, 5]]
        assert batcher.stats()["env_restarts"] == [0, 1, 0]


def test_an_environment_that_exits_ends_its_worker():
    with make_failing("exit", 1, {}, on_worker_failure="restart", max_restarts=0) as batcher:
        batcher.reset()
        batcher.execute()
        with pytest.raises((WorkerError, SystemExit)):
            batcher.get()


@pytest.mark.parametrize("n_processes", [0, 1])
def test_close_leaves_a_thread_that_hangs(n_processes):
    with make_failing("hang", n_processes, {"deadline": 0.1}) as batcher:
        lengths = sum(trajectories.lengths for trajectories in batcher.rollouts(n_steps=30))
    assert lengths[1] == 2 and lengths.sum() >= 30  # the others went on


def test_close_reaches_environments_whose_step_is_under_way():
    gate, closed = threading.Event(), []

    class Waiting(Failing):
        def step(self, action):
            gate.wait()
            return super().step(action)

        def close(self):
            closed.append(self)

    envs = [Waiting(""), Failing(""), Waiting("")]
    env = GymEnvThreads(envs, 0)
    env.reset()
    env.start_rows(np.arange(3), DictTensor({"action": torch.zeros(3, dtype=torch.int64)}))
    env.close()
    wait_until(lambda: {*closed} == {envs[0], envs[2]})
    gate.set()


def test_what_ends_a_thread_while_its_environment_is_closed_is_raised():
    class Exiting(Failing):
        def close(self):
            raise SystemExit(3)

    env = GymEnvThreads([Failing(""), Exiting("")], 0)
    env.reset()
    with pytest.raises(SystemExit, match="3"):
        env.close()


@pytest.mark.parametrize("is_under_way", [False, True])
def test_a_forked_copy_does_not_wait_for_threads_that_it_has_not(is_under_way):
    gate = threading.Event()

    class Gated(Failing):
        def step(self, action):
            assert not is_under_way or gate.wait(60)
            return super().step(action)

    env, action = GymEnvThreads([Gated(""), Gated("")], 0), DictTensor({"action": torch.zeros(2, dtype=torch.int64)})
    env.reset()
    if is_under_way:
        env.start_rows(np.arange(2), action)
    if not (child := os.fork()):
        signal.alarm(60)
        try:
            if is_under_way:
                with pytest.raises(StateError, match=r"environments \[0, 1\] were in a step when"):
                    env.step(action)
            else:
                env.step(action)
            env.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    gate.set()
    env.step(action)
    env.close()


def test_threads_end_with_their_environments():
    before = threading.active_count()
    env = create_failing(3, 0, "")
    env.reset()
    env.close()
    wait_until(lambda: threading.active_count() == before)
    env = create_failing(3, 0, "")
    env.reset()
    del env
    gc.collect()
    wait_until(lambda: threading.active_count() == before)


FAULTS = [
    pytest.param(kind, marks=[pytest.mark.slow] * (kind == "hold the interpreter")) for kind in waiting_faults.FAULTS
]


@pytest.mark.parametrize("kind", FAULTS)
def test_an_environment_that_fails_leaves_nothing_behind(kind):
    with waits.make_batcher(1):
        pass  # starts what stays
    before = waiting_faults.left()
    waiting_faults.run(kind, random.Random(kind))
    wait_until(lambda: waiting_faults.left() == before)


def collect(batcher, judge, n_rollouts, **how):
    for _ in range(n_rollouts):
        batcher.execute()
        judge.add(batcher.get(**how)[0])
        waits.update(batcher)


@pytest.mark.parametrize("n_processes", [0, 1])
def test_an_exact_state_goes_on_with_the_steps_that_were_under_way(n_processes):
    judge = waits.Judge(None)
    with waits.make_batcher(n_processes, deadline=0.003) as batcher:
        batcher.reset()
        collect(batcher, judge, 6)
        state, other = through_file(batcher.state_dict(exact=True)), copy.deepcopy(judge)
        collect(batcher, judge, 4)
    assert judge.n_late > 0
    n_before = other.n_late
    with waits.make_batcher(n_processes, deadline=0.003) as batcher:
        batcher.load_state_dict(state)
        assert batcher.policy_version == 6
        collect(batcher, other, 6)
        assert len(other.found) == 4 and other.n_late > n_before  # the same environments


def test_steps_that_were_under_way_are_forgotten_by_a_reset():
    with waits.make_batcher(0, deadline=0.003) as batcher:
        for _ in range(3):
            batcher.reset()
            batcher.execute()
            seen = batcher.get()[0].trajectories["observation/initial_state"]
            assert seen[:, 0].any()


@pytest.mark.parametrize("n_processes", [0, 1])
def test_a_memory_that_is_fed_has_the_policy_version_of_each_step(n_processes):
    memory, wanted = RandomMemory(memory_size=200, num_envs=4, device="cpu"), [[] for _ in range(4)]
    with waits.make_batcher(n_processes, deadline=0.005) as batcher:
        batcher.feed(memory)
        batcher.reset()
        for _ in range(8):
            batcher.execute()
            batch = batcher.get()[0]
            for lane, length in enumerate(batch.lengths.tolist()):
                wanted[lane] += batch.trajectories["policy_version"][lane, :length].tolist()
            waits.update(batcher)
        rows = memory._storage.view().every_row()
        lanes = memory._storage.columns.lanes(rows)
        found = np.asarray(memory._storage.gather(["policy_version"], rows)[0])[:, 0]
    assert [found[lanes == lane].tolist() for lane in range(4)] == wanted
    assert max(map(max, filter(None, wanted))) > 1


def test_a_lease_and_memory_of_the_caller_have_the_policy_version_of_each_step():
    judge = waits.Judge(None)
    with waits.make_batcher(1, deadline=0.005) as batcher:
        batcher.reset()
        collect(batcher, judge, 1)
        batcher.execute()
        with batcher.lease() as lease:
            judge.add(lease.trajectories)
            kept = {
                key: torch.zeros(4, 6, *tensor.shape[2:], dtype=tensor.dtype)
                for key, tensor in lease.trajectories.trajectories.items()
            }
            info = lease.trajectories.info.clone()
        out = Trajectories(info, TemporalDictTensor(kept, torch.zeros(4, dtype=torch.int64)))
        waits.update(batcher)
        collect(batcher, judge, 5, out=out)
    assert judge.n_late


def test_rows_are_cut_where_enough_workers_are_done():
    judge = waits.Judge(None)
    with waits.make_batcher(2) as batcher:
        batcher.reset()
        collect(batcher, judge, 5, preempt=0.5)
        assert judge.n_late  # rows ended while steps were under way
        collect(batcher, judge, 5, min_workers=1)


def test_statistics_count_each_step_once():
    def create(n_envs, seed, wraps):
        made = waits.create_env(n_envs, seed, None, 0.001, deadline=0.005)
        return NormalizeObservation(NormalizeReward(made, gamma=0.5), keys=["raw_reward"]) if wraps else made

    with RL_Batcher(6, waits.Teller, {}, create, {"n_envs": 4, "wraps": True}, 1, 0) as batcher:
        batcher.reset()
        batches = []
        for _ in range(8):
            batcher.execute()
            batches.append(batcher.get()[0])
        n_steps = sum(int(batch.lengths.sum()) for batch in batches)
        n_ends = sum(
            int(batch.trajectories["_observation/done"][batch.trajectories.mask().bool()].sum()) for batch in batches
        )
        counts = {name: moments.count for name, moments in batcher.statistics().items()}
    assert counts == {"return": n_steps, "observation/raw_reward": n_steps + n_ends + 4}


def test_an_evaluation_beside_leaves_steps_under_way_alone():
    judge = waits.Judge(None)
    with waits.make_batcher(1, deadline=0.003) as batcher:
        batcher.reset()
        collect(batcher, judge, 3)
        assert batcher.evaluate(5, seed=1).n_elems() == 5
        collect(batcher, judge, 5)


class TestMake:
    def test_makes_environments_in_threads(self):
        with RL_Batcher.make(
            "CartPole-v1", n_envs=4, n_workers=1, n_timesteps=5, seed=0, threads=True, min_ready=2, max_wait=0.1,
            deadline=10.0, step_timeout=20.0, on_env_timeout="restart",
        ) as batcher:  # fmt: skip
            [first] = batcher.rollouts(n_steps=20)
        assert first.lengths.tolist() == [5] * 4 and "policy_version" in first.trajectories

    @pytest.mark.parametrize(
        "arguments, match",
        [
            ({"deadline": 1.0}, "deadline: .* threads=True"),
            ({"threads": True, "min_ready": 5}, "min_ready is 5, there are 2"),
            ({"threads": True, "deadline": 0}, "deadline must be above 0"),
            ({"threads": True, "on_env_timeout": "wait"}, "on_env_timeout must be one of"),
        ],
    )
    def test_refuses_what_does_not_go_together(self, arguments, match):
        with pytest.raises(SpecError, match=match):
            RL_Batcher.make("CartPole-v1", n_envs=2, n_workers=0, **arguments)

    def test_needs_single_environments(self):
        def several(n_envs, seed):
            return GymEnvInf([gymnasium.make("CartPole-v1") for _ in range(n_envs)], seed)

        with pytest.raises(SpecError, match="threads=True: needs .* one gymnasium environment"):
            RL_Batcher.make(several, n_envs=2, n_workers=0, threads=True)


@pytest.mark.parametrize("n_processes", [0, 2])
def test_an_agent_with_a_history_is_refused_by_the_constructor(n_processes):
    class Remembering(waits.Teller):
        def require_history(self):
            return True

    def create(n_envs, seed):
        return waits.create_env(n_envs, seed, None, 0.001)

    with pytest.raises(SpecError, match="history cannot act in .*GymEnvThreads"):
        RL_Batcher(6, Remembering, {}, create, {"n_envs": 2}, n_processes, 0)
