"""Workers that go on while the trainer learns: the same rollouts in the same order, of weights that are not too old."""

from __future__ import annotations

import os
import select
import signal

import gymnasium
import numpy as np
import pytest
import torch
from helpers import Count, Counting, count_batcher, create_gym, rollout
from processes import LIMIT, wait_until

from rlstructs import DictTensor, GymEnv, GymEnvInf, RandomAgent, RL_Agent, RL_Batcher, SpecError, StateError
from rlstructs.structures.arrays import find_true as find_in_arrays
from rlstructs.testing import Fault, Ledger, create_faulty_envs

N_WEIGHTS = 300_000


class Versioned(RL_Agent):
    """Acts with the least and the greatest of its weights, and keeps what it is given."""

    def __init__(self, n_kept=1):
        self.kept = [{"a": torch.zeros(1), "b": torch.zeros(1)}] * n_kept

    def initial_state(self, agent_info, B):
        return DictTensor()

    def __call__(self, state, observation, agent_info, history=None):
        n = observation.n_elems()
        first, latest = self.kept[0], self.kept[-1]
        output = {"action": torch.zeros(n, dtype=torch.int64), "oldest": torch.full((n,), float(first["a"].max()))}
        both = torch.cat([latest["a"], latest["b"]])
        output |= {"low": torch.full((n,), float(both.min())), "high": torch.full((n,), float(both.max()))}
        return DictTensor(output), state

    def update(self, info):
        self.kept = [*self.kept[1:], info]


def versioned(run_ahead, n_processes=2, n_kept=1, **arguments):
    return RL_Batcher(
        4, Versioned, {"n_kept": n_kept}, lambda seed: GymEnvInf([Count(7)], seed), {}, n_processes,
        0, run_ahead=run_ahead, **arguments,
    )  # fmt: skip


def weights_of(version):
    return {"a": torch.full((N_WEIGHTS,), float(version)), "b": torch.full((N_WEIGHTS,), float(version))}


def frames(trajectories):
    return trajectories.trajectories["observation/frame"]


@pytest.mark.parametrize("run_ahead", [0, 1, 3])
@pytest.mark.parametrize("n_processes", [0, 2])
def test_weights_are_of_one_update_and_never_older_than_they_may_be(n_processes, run_ahead):
    with versioned(run_ahead, n_processes) as batcher:
        batcher.reset()
        for n_rollouts in range(12):
            trajectories, _ = rollout(batcher)
            version = max(0, n_rollouts - run_ahead)
            assert (trajectories.info["policy_version"] == version).all() and batcher.policy_version == n_rollouts
            steps = trajectories.trajectories
            assert (steps["action/low"] == version).all() and (steps["action/high"] == version).all()
            weights = weights_of(n_rollouts + 1)
            batcher.update(weights)
            weights["a"].fill_(-1)  # which is the trainer's own business


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_an_agent_may_keep_what_it_was_given(run_ahead):
    """A region that somebody still has tensors of is not written again."""
    with versioned(run_ahead, n_kept=5) as batcher:
        batcher.reset()
        for n_rollouts in range(15):
            trajectories, _ = rollout(batcher)
            version = trajectories.info["policy_version"][:, None]
            assert (trajectories.trajectories["action/oldest"] == (version - 4).clamp(min=0)).all()
            batcher.update(weights_of(n_rollouts + 1))


class Spoiling(Versioned):
    """Changes what it is given."""

    def update(self, info):
        info["a"] += 100.0
        super().update(info)


def test_what_an_agent_writes_to_its_weights_no_other_sees():
    with RL_Batcher(4, Spoiling, {}, lambda seed: GymEnvInf([Count(7)], seed), {}, 2, 0) as batcher:
        batcher.reset()
        for version in range(1, 6):
            batcher.update(weights_of(version))
            steps = rollout(batcher)[0].trajectories
            assert (steps["action/low"] == version).all() and (steps["action/high"] == version + 100).all()


def batches(run_ahead, n_processes, n_rollouts=6):
    found = []
    with RL_Batcher(
        16, RandomAgent, {"action_space": gymnasium.spaces.Discrete(2)}, create_gym,
        {"env_id": "CartPole-v1", "n_envs": 4}, n_processes, 5, agent_seeds=list(range(max(1, n_processes))),
        run_ahead=run_ahead,
    ) as batcher:  # fmt: skip
        batcher.reset()
        for _ in range(n_rollouts):
            found.append(rollout(batcher)[0])
    return found


@pytest.mark.parametrize("n_processes", [0, 2])
def test_rollouts_and_their_order_do_not_depend_on_it(n_processes):
    for one, other in zip(batches(0, n_processes), batches(2, n_processes), strict=True):
        assert one.trajectories == other.trajectories and one.info == other.info


def test_infos_take_effect_with_the_rollout_that_is_ordered():
    info = {"agent_info": DictTensor({"k": torch.zeros(1, dtype=torch.int64)})}
    with count_batcher([[99], [99]], 2, autoreset=True, run_ahead=2, **info) as batcher:
        batcher.reset(agent_info=DictTensor({"k": torch.tensor([1, 2])}))
        given = []
        for n in range(8):
            batcher.execute(DictTensor({"k": torch.tensor([10 * n, 10 * n + 1])}) if n % 3 == 1 else None)
            given.append(batcher.get()[0].info["agent_info/k"].tolist())
        first, second, third = [1, 2], [10, 11], [40, 41]
        assert given == [first, first, first, second, second, second, third, third]


def test_workers_write_the_next_rollouts_while_one_is_leased():
    with count_batcher([[99], [99]], 4, autoreset=True, run_ahead=2) as batcher:
        batcher.reset()
        for n in range(6):
            batcher.execute()
            with batcher.lease() as (trajectories, _):
                batcher._engine.settle()  # all that may be begun is over
                assert [state["state"] for state in batcher.stats()["workers"]] == ["idle", "idle"]
                assert all(trajectories.trajectories.lengths == 4) and frames(trajectories)[0, 0, 1] == 4 * n
                batcher.update(float(n))


def test_a_reset_drops_what_was_begun():
    with count_batcher([[99], [99]], 4, autoreset=True, run_ahead=2) as batcher:
        for episode in range(3):
            batcher.reset()
            for n in range(2):
                trajectories, _ = rollout(batcher)
                assert frames(trajectories)[:, :, 0].unique().tolist() == [episode]
                assert frames(trajectories)[0, :, 1].tolist() == [4 * n + k for k in range(4)]
        assert batcher.episodes().n_elems() == 0


def test_environments_that_end_are_left_out_until_none_is_left():
    with count_batcher([[3], [10]], 4, run_ahead=2) as batcher:
        batcher.reset()
        seen = [(rollout(batcher)) for _ in range(3)]
        assert [trajectories.lengths.tolist() for trajectories, _ in seen] == [[3, 4], [4], [2]]
        assert [n_running for _, n_running in seen] == [1, 1, 0]
        with pytest.raises(StateError, match="every environment has ended"):
            batcher.execute()
        batcher.reset()
        assert rollout(batcher)[0].lengths.tolist() == [3, 4]


def test_an_evaluation_comes_behind_what_was_begun_and_changes_nothing():
    def run(evaluates):
        found = []
        with count_batcher([[5], [9]], 4, autoreset=True, run_ahead=1) as batcher:
            batcher.reset()
            for n in range(4):
                found.append(frames(rollout(batcher)[0]).tolist())
                batcher.update(float(n))
                if evaluates:
                    assert batcher.evaluate(4, [0, 100])["length"].tolist() == [5, 5, 9, 9]
        return found

    assert run(True) == run(False)


class FailingUpdate(Counting):
    def update(self, info):
        raise KeyError("lost in update")


@pytest.mark.parametrize("n_processes", [0, 2])
def test_what_an_update_raises_comes_with_the_rollout_behind_it(n_processes):
    with RL_Batcher(
        4, FailingUpdate, {}, lambda seed: GymEnvInf([Count(9)], seed), {}, n_processes, 0,
        run_ahead=1,
    ) as batcher:  # fmt: skip
        batcher.reset()
        rollout(batcher)
        with pytest.raises(KeyError, match="lost in update"):
            batcher.update(1.0)
            rollout(batcher)
            rollout(batcher)
        with pytest.raises(StateError):
            batcher.execute()


@pytest.mark.parametrize("how", ["kill", "raise", "exit"])
def test_of_a_worker_that_fails_one_rollout_is_lost_and_the_others_are_run_again(how):
    faults = [Fault(how, at="step", count=10, worker=1, generations=[0, 1])]
    ledger = Ledger()
    with RL_Batcher(
        4, Counting, {}, create_faulty_envs, {"n_envs": 2, "faults": faults}, 2, 0, run_ahead=2,
        on_worker_failure="restart",
    ) as batcher:  # fmt: skip
        batcher.reset()
        lengths = []
        for n in range(10):
            trajectories, _ = rollout(batcher)
            ledger.add(trajectories)
            lengths.append(trajectories.lengths.tolist())
            batcher.update(float(n))
        stats = batcher.stats()
    assert all(each[:2] == [4, 4] and each[2:] in ([4, 4], [0, 0]) for each in lengths)
    assert (stats["restarts"], stats["lost_rollouts"]) == (2, 2) and sum(each[2] == 0 for each in lengths) == 2


class Gated(Count):
    """Its third step waits for a file, in the worker of seed 1."""

    def __init__(self, seed, file, length=10**6):
        super().__init__(length)
        self.file = file if seed == 1 else None

    def step(self, action):
        while self.file and self.steps == 2 and not os.path.exists(self.file):
            os.sched_yield()
        return super().step(action)


def gated(file, run_ahead=0, length=10**6):
    def create_env(seed):
        return GymEnvInf([Gated(seed, str(file), length)], seed)

    return RL_Batcher(10, Counting, {}, create_env, {}, 3, [0, 1, 2], run_ahead=run_ahead)


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_those_who_are_through_are_handed_out_first(tmp_path, run_ahead):
    with gated(tmp_path / "go", run_ahead) as batcher:
        batcher.reset()
        for n in range(4):
            batcher.execute()
            trajectories, n_running = batcher.get(min_workers=2)
            assert trajectories.info["env_index"].tolist() == [0, 2] and n_running == 3
            assert frames(trajectories)[:, 0, 1].tolist() == [10 * n, 10 * n]
        (tmp_path / "go").touch()
        batcher.execute()
        trajectories, _ = batcher.get()
        assert frames(trajectories)[:, :, 1].tolist() == [[first + k for k in range(10)] for first in (40, 0, 40)]


@pytest.mark.parametrize("take", ["get", "wait"])
def test_nothing_is_read_of_a_worker_that_still_writes(tmp_path, monkeypatch, take):
    """Not even which of its steps ended an episode: numpy finds wild indexes in flags that change meanwhile."""
    found = []

    def find_true(mask):
        found.append(len(mask))
        return find_in_arrays(mask)

    monkeypatch.setattr("rlstructs.shared.reading.find_true", find_true)
    with gated(tmp_path / "go", length=7) as batcher:
        batcher.reset()
        batcher.execute()
        if take == "wait":
            assert batcher.wait(min_workers=2) == (20, 3)
            assert batcher.episodes()["length"].tolist() == [7, 7]
        else:
            assert batcher.get(min_workers=2)[0].trajectories["_observation/done"].sum() == 2
        assert set(found) == {2}
        (tmp_path / "go").touch()


def test_stragglers_are_cut_short_and_go_on_from_there(tmp_path):
    with gated(tmp_path / "go") as batcher:
        batcher.reset()
        batcher.execute()
        cut = batcher._engine._transport.cut

        def open_the_gate(*arguments):  # when the others are through: it then ends its third step
            cut(*arguments)
            (tmp_path / "go").touch()

        batcher._engine._transport.cut = open_the_gate
        trajectories, _ = batcher.get(preempt=0.6)
        batcher._engine._transport.cut = cut
        lengths = trajectories.lengths.tolist()
        assert lengths[0] == lengths[2] == 10 and 1 <= lengths[1] <= 3
        trajectories, _ = rollout(batcher)
        assert trajectories.lengths.tolist() == [10] * 3
        assert frames(trajectories)[:, 0, 1].tolist() == [10, lengths[1], 10]


def test_a_get_that_does_not_wait_cuts_stragglers_short_and_comes_back_for_them(tmp_path):
    with gated(tmp_path / "go") as batcher:
        batcher.reset()
        batcher.execute()
        wait_until(lambda: batcher._engine.is_ready(2))
        for _ in range(3):
            assert batcher.get(blocking=False, preempt=0.6) == (None, None)
        (tmp_path / "go").touch()
        found = None
        while found is None:
            found, _ = batcher.get(blocking=False, preempt=0.6)
        lengths = found.lengths.tolist()
        assert lengths[0] == lengths[2] == 10 and 1 <= lengths[1] <= 3


def test_what_get_is_asked_for_is_checked_and_the_rollout_is_still_there():
    with count_batcher([[9], [9]], 4) as batcher:
        batcher.reset()
        batcher.execute()
        for wrong in ({"min_workers": 0}, {"min_workers": 3}, {"preempt": 0.0}, {"preempt": 1.5}):
            with pytest.raises(SpecError, match=next(iter(wrong))):
                batcher.get(**wrong)
        with pytest.raises(SpecError, match="give one of the two"):
            batcher.get(min_workers=1, preempt=0.5)
        with pytest.raises(TypeError, match="preempt must be a fraction"):
            batcher.get(preempt="half")
        assert batcher.get()[0].lengths.tolist() == [4, 4]


@pytest.mark.parametrize(("wrong", "kind"), [(-1, SpecError), (1.5, TypeError), (True, TypeError)])
def test_a_run_ahead_that_is_none_is_refused(wrong, kind):
    with pytest.raises(kind, match="run_ahead"):
        count_batcher([[9]], 4, run_ahead=wrong)


def test_its_slots_count_as_memory():
    sizes = []
    for run_ahead in (0, 1, 2):
        with count_batcher([[9]], 4, run_ahead=run_ahead) as batcher:
            sizes.append(batcher.nbytes)
    assert np.diff(sizes).tolist() == [sizes[0]] * 2


def kill(pid):
    """SIGKILL, and waits until it has worked."""
    with open(f"/proc/{pid}/stat"):  # it is there
        pidfd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert select.select([pidfd], [], [], LIMIT)[0]
    os.close(pidfd)


def test_what_a_worker_did_before_its_end_is_handed_out_as_its_own():
    """Its successor's rollouts come behind it, with episodes and environments anew."""
    with RL_Batcher(
        4, Counting, {}, lambda seed: GymEnv([Count(3), Count(30)], seed), {}, 1, 0, run_ahead=2,
        on_worker_failure="restart",
    ) as batcher:  # fmt: skip
        batcher.reset()
        seen = [rollout(batcher)]
        batcher._engine.settle()
        kill(batcher._engine.pool.pids[0])
        seen += [rollout(batcher) for _ in range(4)]
        assert [trajectories.lengths.tolist() for trajectories, _ in seen] == [[3, 4], [4], [4], [3, 4], [4]]
        assert [n_running for _, n_running in seen] == [1, 1, 2, 1, 1]
        assert [int(frames(trajectories)[-1, 0, 1]) for trajectories, _ in seen] == [0, 4, 8, 0, 4]
        assert batcher.episodes()["length"].tolist() == [3, 3]
        stats = batcher.stats()
        assert (stats["restarts"], stats["lost_rollouts"], stats["workers"][0]["steps"]) == (1, 0, 11)


def test_every_rollout_that_is_lost_is_counted_once():
    with RL_Batcher(
        4, Counting, {}, lambda seed: GymEnvInf([Count(99)], seed), {}, 1, 0, run_ahead=2, on_worker_failure="restart"
    ) as batcher:
        batcher.reset()
        lengths = [rollout(batcher)[0].lengths.tolist()]
        for _ in range(2):
            batcher._engine.settle()
            kill(batcher._engine.pool.pids[0])
            batcher.update(0.0)
        lengths += [rollout(batcher)[0].lengths.tolist() for _ in range(5)]
        assert lengths.count([0]) == batcher.stats()["lost_rollouts"]


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("how", [{"min_workers": 1}, {"preempt": 0.5}])
def test_workers_in_which_nothing_runs_are_not_waited_for_and_hurry_nobody(how, run_ahead):
    with count_batcher([[2], [40]], 8, run_ahead=run_ahead) as batcher:
        batcher.reset()
        steps = torch.zeros(2, dtype=torch.int64)
        while True:
            batcher.execute()
            trajectories, n_running = batcher.get(**how)
            assert trajectories.lengths.numel() > 0
            if (steps[0] == 2) and n_running:  # the first one has ended, and is not half of them any more
                assert trajectories.lengths.tolist() == [8] or int(steps[1]) + int(trajectories.lengths[0]) == 40
            steps[trajectories.info["env_index"]] += trajectories.lengths
            if not n_running:
                break
        assert steps.tolist() == [2, 40]


def test_an_evaluation_does_not_use_an_agent_whose_update_failed():
    with RL_Batcher(4, FailingUpdate, {}, lambda seed: GymEnvInf([Count(3)], seed), {}, 1, 0, run_ahead=1) as batcher:
        batcher.reset()
        batcher.update(1.0)
        with pytest.raises(KeyError, match="lost in update"):
            batcher.evaluate(2, 0)
