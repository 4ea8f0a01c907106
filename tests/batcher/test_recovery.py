"""Workers that fail are replaced: nothing wrong is handed out, nothing of the others is lost, and it is told."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import random
import select
import signal
import tempfile
import threading
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from helpers import Count, Counting, count_batcher, rollout
from processes import LIMIT, Deadline, wait_until, worker_pids

from rlstructs import (
    ClosedError,
    GymEnv,
    GymEnvInf,
    OutOfMemoryError,
    RL_Batcher,
    SpecError,
    WorkerCrashed,
    WorkerTimeout,
)
from rlstructs.seeding import EnvSeed, next_seed
from rlstructs.testing import Fault, create_faulty_envs
from rlstructs.workers.process import WorkerProcess


class Broken(Exception):
    """A user's own exception."""


class Once(Count):
    """Fails in its third step, in the first worker with `index` only; observations hold [seed, step]."""

    def __init__(self, seed, index, how, generations):
        super().__init__(100)
        self.fails = seed.worker_index == index and seed.restart_number < generations
        self.seed, self.how, self.generation = float(seed % 1000), how, seed.restart_number
        if self.fails and how == "constructor" and seed.restart_number:
            raise Broken(f"no licence for worker {seed.restart_number}")

    def _observation(self):
        return np.array([self.seed, self.steps], np.float32)

    def reset(self, **arguments):
        if self.fails and self.how == "reset":
            raise Broken(f"lost in reset of worker {self.generation}")
        return super().reset(**arguments)

    def step(self, action):
        if self.fails and self.steps == 2:
            if self.how in ("kill", "constructor"):
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "raise":
                raise Broken("lost in step")
            if self.how == "exit":
                os._exit(3)
            if self.how == "hang":
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
                while True:
                    signal.pause()
        return super().step(action)


def batcher(how, index=1, generations=1, n_workers=3, **arguments):
    """Workers of two environments; one of them fails."""
    arguments.setdefault("on_worker_failure", "restart")
    return RL_Batcher(
        5, Counting, {}, lambda seed: GymEnvInf([Once(seed, index, how, generations) for _ in range(2)], seed), {},
        n_workers, 7, **arguments,
    )  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _server():
    """The fork server runs already: a first start takes longer than the deadlines here."""
    batcher("never").close()


def fours():
    """Two workers of an environment with episodes of 4 steps, rollouts of 6."""
    return RL_Batcher(6, Counting, {}, lambda seed: GymEnvInf([Count(4)], seed), {}, 2, 0, on_worker_failure="restart")


def kill(pid):
    """SIGKILL, and waits until it has worked."""
    pidfd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(LIMIT * 1000)
    os.close(pidfd)


@pytest.mark.parametrize(
    ("how", "index", "start_method"),
    [
        *itertools.product(["kill", "raise", "exit", "hang"], [0, 1], ["forkserver"]),
        *itertools.product(["kill", "raise", "exit"], [1], ["spawn", "fork"]),
    ],
)
def test_the_others_are_kept_and_the_lost_one_is_counted(how, index, start_method, caplog):
    before = worker_pids()
    with (
        caplog.at_level(logging.WARNING, "rlstructs"),
        batcher(how, index, n_workers=2, start_method=start_method) as made,
    ):
        made.reset()
        if how == "hang":
            notice_a_hang(made)
        trajectories, n_running = rollout(made)
        lost = [2 * index, 2 * index + 1]
        assert n_running == 4 and trajectories.info["env_index"].tolist() == list(range(4))
        assert trajectories.lengths.tolist() == [0 if row in lost else 5 for row in range(4)]
        for _, tensor in trajectories.trajectories.items():
            assert not tensor[lost].any()
        seeds = trajectories.trajectories["observation/frame"][:, 0, 0]
        stats = made.stats()
        assert [worker["restarts"] for worker in stats["workers"]] == [int(w == index) for w in range(2)]
        assert (stats["restarts"], stats["lost_rollouts"]) == (1, 1)
        assert len({worker["pid"] for worker in stats["workers"]}) == 2
        [record] = caplog.records
        assert f"worker {index} is replaced" in record.getMessage()
        following, n_running = rollout(made)
        assert n_running == 4 and following.lengths.tolist() == [5] * 4
        steps = following.trajectories["observation/frame"][:, 0, 1]
        assert steps.tolist() == [0 if row in lost else 5 for row in range(4)]  # they begin anew
        assert following.trajectories["observation/initial_state"][lost, 0].all()
        others = [row for row in range(4) if row not in lost]
        now = following.trajectories["observation/frame"][:, 0, 0]
        assert (now[others] == seeds[others]).all() and not set(now[lost].tolist()) & set(now[others].tolist())
    assert worker_pids() == before


def notice_a_hang(made):
    """The deadline comes after the start, and goes before the successor's: spawned workers import torch for seconds."""
    made._engine.pool.timeout, restart = 2.0, made._engine.pool.restart

    def patient(successors):
        made._engine.pool.timeout = None
        return restart(successors)

    made._engine.pool.restart = patient


@pytest.mark.slow
def test_a_hang_under_spawn_is_mended_too():
    with batcher("hang", n_workers=2, start_method="spawn") as made:
        made.reset()
        notice_a_hang(made)
        trajectories, n_running = rollout(made)
        assert n_running == 4 and trajectories.lengths.tolist() == [5, 5, 0, 0]
        assert rollout(made)[0].lengths.tolist() == [5] * 4


def test_a_successor_is_built_from_what_its_worker_was(tmp_path, monkeypatch):
    """Whatever the trainer does meanwhile with the arguments, its directory and its environment variables."""
    (tmp_path / "length").write_text("4")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLSTRUCTS_LENGTH_FILE", "length")
    settings = {"more": 1}

    def create_env(settings, seed):
        return GymEnvInf([Count(int(Path(os.environ["RLSTRUCTS_LENGTH_FILE"]).read_text()) + settings["more"])], seed)

    with RL_Batcher(6, Counting, {}, create_env, {"settings": settings}, 2, 0, on_worker_failure="restart") as batcher:
        batcher.reset()
        settings["more"], settings["lock"] = 0, threading.Lock()
        monkeypatch.chdir("/")
        monkeypatch.delenv("RLSTRUCTS_LENGTH_FILE")
        kill(batcher._engine.pool.pids[1])
        rollout(batcher)
        trajectories, _ = rollout(batcher)
        assert trajectories.trajectories["observation/frame"][1, :, 1].tolist() == [1, 2, 3, 4, 0, 1]


def test_a_successor_has_the_next_seed_of_its_stream_and_the_last_update():
    with batcher("kill") as made:
        made.update(3.5)
        made.reset()
        rollout(made)
        following, _ = rollout(made)
        assert (following.trajectories["action/given"] == 3.5).all()
        expected = float(EnvSeed(7, 1, 1) % 1000)
        assert following.trajectories["observation/frame"][2, 0, 0] == expected


def test_the_same_failures_give_the_same_trajectories():
    def collected():
        with batcher("raise", generations=2) as made:
            made.reset()
            return [rollout(made)[0] for _ in range(4)]

    assert collected() == collected()


def test_seeds_that_were_listed_go_on_too():
    seeds = [next_seed(5, 0 + n) for n in (1, 2)] + [next_seed(6, 1), 5, 6]
    assert len(set(seeds)) == 5
    assert EnvSeed(7, 1, 1).for_environments(3) != EnvSeed(7, 1).for_environments(3)
    assert next_seed(EnvSeed(7, 1), 2) == EnvSeed(7, 1, 2)


@pytest.mark.parametrize("when", ["idle", "update", "reset", "rollout"])
def test_a_worker_may_die_at_any_time(when):
    with batcher("never", n_workers=2) as made:
        made.reset()
        rollout(made)
        pid = made.stats()["workers"][1]["pid"]
        if when == "rollout":
            made.execute()
        kill(pid)
        if when == "rollout":
            lengths = made.get()[0].lengths.tolist()
            assert lengths in ([5, 5, 0, 0], [5, 5, 5, 5])  # it may have been through
        if when == "update":
            made.update(1.5)
        if when == "reset":
            made.reset()
        trajectories, n_running = rollout(made)
        assert n_running == 4
        if when in ("idle", "update", "reset"):
            assert trajectories.lengths.tolist() == [5] * 4
            assert trajectories.trajectories["observation/initial_state"][2:, 0].all()
        assert made.stats()["restarts"] == 1


class Vast(gymnasium.Env):
    """Spends most of a step on its observation: a million bytes, all of them the number of the step."""

    observation_space = gymnasium.spaces.Box(0, 255, (1 << 20,), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, **arguments):
        super().reset(**arguments)
        self.steps = 0
        return np.zeros(1 << 20, np.uint8), {}

    def step(self, action):
        self.steps += 1
        return np.full(1 << 20, self.steps, np.uint8), 0.0, False, False, {}


def test_a_worker_killed_while_it_writes_loses_its_rollout_alone_and_no_row_is_torn():
    n_timesteps, n_lost, rng = 16, 0, random.Random(0)
    with RL_Batcher(
        n_timesteps, Counting, {}, lambda seed: GymEnvInf([Vast()], seed), {}, 2, 0, on_worker_failure="restart"
    ) as made:
        longest = 0.05  # seconds; shorter when that was too long
        for _ in range(16):
            made.reset()
            made.execute()
            moment = time.monotonic() + rng.uniform(0, longest)
            while time.monotonic() < moment:
                pass
            kill(made.stats()["workers"][0]["pid"])
            trajectories, _ = made.get()
            lengths = trajectories.lengths.tolist()
            assert lengths in ([0, n_timesteps], [n_timesteps, n_timesteps])
            if lengths[0]:
                longest *= 0.8
            n_lost += lengths[0] == 0
            assert made.stats()["lost_rollouts"] == n_lost  # one that had replied before it died is none
            steps = torch.arange(n_timesteps, dtype=torch.uint8)[:, None]
            for key, wanted in (("observation/frame", steps), ("_observation/frame", steps + 1)):
                rows = trajectories.trajectories[key][torch.tensor(lengths) > 0]
                assert (rows == wanted).all()
        assert n_lost > 5


def test_a_reset_that_failed_is_done_by_the_successor():
    with batcher("reset") as made:
        made.reset()
        assert rollout(made)[0].lengths.tolist() == [5] * 6


def test_all_workers_may_fail_at_once():
    with batcher("never", n_workers=2) as made:
        made.reset()
        made.execute()
        for worker in made.stats()["workers"]:
            kill(worker["pid"])
        trajectories, n_running = made.get()
        assert n_running == 4 and set(trajectories.lengths.tolist()) <= {0, 5}
        assert rollout(made)[0].lengths.tolist() == [5] * 4


@pytest.mark.parametrize("how", ["constructor", "reset"])
def test_one_that_never_comes_up_ends_the_batcher_with_the_first_error(how):
    before = worker_pids()
    first = {"constructor": "^no licence for worker 1\n", "reset": "^lost in reset of worker 1\n"}[how]
    with Deadline(10.0), pytest.raises(Broken, match=first), batcher(how, generations=99) as made:
        made.reset()
        rollout(made)
    assert worker_pids() == before


@pytest.mark.parametrize("where", ["init", "reset"])
@pytest.mark.parametrize("updated", [False, True])
def test_a_successor_that_hangs_is_replaced_too(where, updated, monkeypatch):
    faults = [Fault("hang", at=where, worker=0, generations=[1])]
    with RL_Batcher(
        4, Counting, {}, create_faulty_envs, {"n_envs": 2, "faults": faults}, 2, 0, on_worker_failure="restart"
    ) as made:
        made.reset()
        if updated:
            made.update(1.0)
        limits, restart = iter([2.0]), made._engine.pool.restart

        def limited(successors):  # the first one only: another may take its time
            made._engine.pool.timeout = next(limits, None)
            return restart(successors)

        monkeypatch.setattr(made._engine.pool, "restart", limited)
        kill(made.stats()["workers"][0]["pid"])
        assert rollout(made)[0].lengths.tolist() == [4] * 4
        assert [worker["restarts"] for worker in made.stats()["workers"]] == [2, 0]


def test_a_successor_that_ends_between_two_orders_is_replaced_too(tmp_path):
    class Ends(GymEnvInf):
        def n_envs(self):
            if (tmp_path / "ends").exists():
                (tmp_path / "ends").unlink()
                os._exit(3)
            return super().n_envs()

    with RL_Batcher(
        4, Counting, {}, lambda seed: Ends([Count(9)], seed), {}, 2, 0, on_worker_failure="restart"
    ) as made:
        made.reset()
        kill(made.stats()["workers"][0]["pid"])
        (tmp_path / "ends").touch()
        assert rollout(made)[0].lengths.tolist() == [4, 4]


def test_two_workers_may_need_different_numbers_of_successors():
    faults = [
        Fault("exit", at="step", count=2, worker=0, generations=[0]),
        Fault("raise", at="reset", worker=0, generations=[1, 2]),
        Fault("exit", at="reset", worker=1, generations=[0, 1]),
    ]
    with RL_Batcher(
        4, Counting, {}, create_faulty_envs, {"n_envs": 1, "faults": faults}, 2, 0, on_worker_failure="restart"
    ) as made:
        made.reset()
        rollout(made)
        stats = made.stats()
        assert [worker["restarts"] for worker in stats["workers"]] == [3, 2] and stats["restarts"] == 5


@pytest.mark.parametrize("noticed", ["before", "in"])
def test_a_successor_gets_an_order_once(noticed):
    class Counts(Counting):
        def __init__(self):
            super().__init__()
            self.n_updates = 0.0

        def update(self, info):
            if noticed == "in":
                with contextlib.suppress(FileExistsError):  # one of them makes it, and ends
                    os.mkdir(mark)
                    os._exit(3)
            self.n_updates += 1
            self.given = self.n_updates

    with tempfile.TemporaryDirectory() as folder:
        mark = os.path.join(folder, "ended")
        with RL_Batcher(
            3, Counts, {}, lambda seed: GymEnvInf([Count(100)], seed), {}, 2, 0, on_worker_failure="restart"
        ) as made:
            made.reset()
            if noticed == "before":
                kill(made.stats()["workers"][0]["pid"])
            made.update("end")
            trajectories, _ = rollout(made)
            assert set(trajectories.trajectories["action/given"].flatten().tolist()) == {1.0}
            assert made.stats()["restarts"] == 1


def test_an_update_that_fails_is_not_what_successors_get():
    class First(Counting):
        def update(self, info):
            self.given = float(info[0])

    with RL_Batcher(
        3, First, {}, lambda seed: GymEnvInf([Count(100)], seed), {}, 2, 0, on_worker_failure="restart"
    ) as made:
        made.reset()
        made.update([torch.tensor(1.0), torch.tensor(1.0)])
        with pytest.raises(NotImplementedError):
            made.update([torch.tensor(666.0), torch.empty(1, device="meta")])
        kill(made.stats()["workers"][0]["pid"])
        trajectories, _ = rollout(made)
        assert set(trajectories.trajectories["action/given"].flatten().tolist()) == {1.0}


class Leaves(Count):
    """Leaves a file where it is until it is closed."""

    def __init__(self, folder, raises):
        super().__init__(9)
        self.file, self.raises = os.path.join(folder, f"{os.getpid()}-{id(self)}"), raises
        open(self.file, "w").close()

    def step(self, action):
        if self.raises and self.steps == 2:
            raise Broken("in a step")
        return super().step(action)

    def close(self):
        os.remove(self.file)


def test_the_environments_of_a_worker_that_raised_are_closed(tmp_path):
    def create_env(seed):
        return GymEnvInf([Leaves(tmp_path, seed.worker_index == 1)], seed)

    with RL_Batcher(5, Counting, {}, create_env, {}, 2, 0, on_worker_failure="restart") as made:
        made.reset()
        for turn in range(3):
            assert rollout(made)[0].lengths.tolist() == [5, 0]
            assert len(os.listdir(tmp_path)) == 2, turn
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("what", ["agent", "memory"])
def test_a_start_that_fails_closes_its_environments(what, tmp_path):
    def create_agent():
        if what == "agent":
            raise Broken("no agent")
        return Counting()

    with pytest.raises(Broken if what == "agent" else OutOfMemoryError):
        RL_Batcher(
            10**12 if what == "memory" else 5, create_agent, {},
            lambda seed: GymEnvInf([Leaves(tmp_path, False)], seed), {}, 2, 0,
        )  # fmt: skip
    wait_until(lambda: not os.listdir(tmp_path))  # the other worker may still be at it


def test_nothing_is_lost_with_a_worker_in_which_nothing_ran():
    def create_env(seed):
        return GymEnv([Count(2 if seed.worker_index == 0 else 99)], seed)

    with RL_Batcher(3, Counting, {}, create_env, {}, 2, 0, on_worker_failure="restart") as made:
        made.reset()
        assert rollout(made)[1] == 1
        made.execute()
        kill(made.stats()["workers"][0]["pid"])
        trajectories, n_running = made.get()
        assert trajectories.info["env_index"].tolist() == [1] and n_running == 2
        assert made.stats()["lost_rollouts"] == 0 and made.stats()["restarts"] == 1


def test_a_factory_that_fails_at_the_first_start_is_raised_at_once():
    def create_env(seed):
        raise Broken("no display")

    with pytest.raises(Broken, match="no display"):
        RL_Batcher(5, Counting, {}, create_env, {}, 2, 0, on_worker_failure="restart")


def test_no_more_than_max_restarts_are_mended():
    with batcher("raise", generations=99, max_restarts=2) as made:
        made.reset()
        for _ in range(2):
            rollout(made)
        assert made.stats()["restarts"] == 2
        with pytest.raises(Broken, match="lost in step"):
            rollout(made)


def test_max_restarts_0_raises():
    with batcher("kill", max_restarts=0) as made, pytest.raises(WorkerCrashed, match="^worker 1 "):
        made.reset()
        rollout(made)


def test_by_default_failures_are_raised():
    with batcher("hang", on_worker_failure="raise") as made, pytest.raises(WorkerTimeout):
        made.reset()
        made._engine.pool.timeout = 2.0  # not before: a start may take longer
        rollout(made)


def test_episodes_of_a_lost_worker_are_not_continued():
    """Episodes of 4 steps; a worker dies when it is within one: the next of its environments has 4 again."""
    with fours() as made:
        made.reset()
        rollout(made)
        kill(made.stats()["workers"][1]["pid"])
        for _ in range(3):
            rollout(made)
        assert set(made.episodes()["length"].tolist()) == {4}


def test_environments_that_do_not_reset_themselves_run_again():
    with RL_Batcher(
        3, Counting, {}, lambda seed: GymEnv([Count(3), Count(9)], seed), {}, 2, 0, on_worker_failure="restart"
    ) as made:
        made.reset()
        assert rollout(made)[1] == 2
        kill(made.stats()["workers"][0]["pid"])
        trajectories, n_running = rollout(made)
        assert trajectories.info["env_index"].tolist() == [0, 1, 3] and n_running == 2
        while n_running:
            _, n_running = rollout(made)


def test_without_waiting_nothing_comes_until_the_others_are_through():
    with batcher("kill") as made:
        made.reset()
        made.execute()
        deadline = time.monotonic() + LIMIT
        while (found := made.get(blocking=False)) == (None, None):
            assert time.monotonic() < deadline
        assert found[1] == 6


def test_a_worker_whose_environments_have_changed_is_no_successor():
    def create_env(seed):
        return GymEnvInf([Once(seed, 1, "raise", 1) for _ in range(2 + seed.restart_number)], seed)

    with (
        RL_Batcher(5, Counting, {}, create_env, {}, 2, 7, on_worker_failure="restart") as made,
        pytest.raises(SpecError, match="create_env: worker 1 has 3 environments now, it had 2"),
    ):
        made.reset()
        rollout(made)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"on_worker_failure": "ignore"}, SpecError, "on_worker_failure must be one of .*got 'ignore'"),
        ({"max_restarts": -1}, SpecError, "max_restarts must be at least 0, got -1"),
        ({"max_restarts": 1.5}, TypeError, "max_restarts must be an int, got 1.5"),
    ],
)
def test_policies_that_there_are_not_are_refused(arguments, kind, message):
    with pytest.raises(kind, match=message):
        batcher("never", **arguments)


def test_many_failures_leave_nothing_behind():
    gc.collect()  # what earlier tests left to be collected would go meanwhile
    before = worker_pids(), len(os.listdir("/proc/self/fd"))
    with fours() as made:
        made.reset()
        rollout(made)
        held = len(os.listdir("/proc/self/fd"))
        for turn in range(20):
            kill(made.stats()["workers"][turn % 2]["pid"])
            rollout(made)
        assert len(os.listdir("/proc/self/fd")) == held
        assert made.stats()["restarts"] == 20
    assert worker_pids() == before[0]


def arenas():
    """Descriptors of shared memory that this process has."""
    open_fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return [fd for fd in open_fds if os.path.exists(fd) and "rlstructs" in os.readlink(fd)]


@pytest.mark.parametrize("how", ["kill", "exit", "raise", "hang"])
def test_a_batcher_that_mended_failures_frees_its_memory_without_the_garbage_collector(how):
    gc.collect()
    before = arenas()
    gc.disable()
    try:
        with batcher(how, n_workers=2) as made:
            made.reset()
            if how == "hang":
                notice_a_hang(made)
            rollout(made)
            kill(made.stats()["workers"][0]["pid"])  # and one that ends while nothing is asked of it
            rollout(made)
        del made
        assert arenas() == before
    finally:
        gc.enable()


@pytest.mark.parametrize(("n_processes", "dies"), [(0, False), (2, False), (2, True)])
def test_a_batcher_that_is_closed_holds_no_shared_memory(n_processes, dies):
    gc.collect()
    before = arenas()
    gc.disable()
    try:
        made = count_batcher([[3], [3]][: n_processes or 1], 10, autoreset=True, n_processes=n_processes)
        made.reset()
        rollout(made)
        if dies:
            kill(made.stats()["workers"][0]["pid"])
            with pytest.raises(WorkerCrashed):
                rollout(made)
        assert arenas() != before
        made.close()
        assert arenas() == before and made.nbytes > 0
    finally:
        gc.enable()


@pytest.mark.parametrize("n_processes", [0, 2])
def test_stats_say_what_the_workers_did(n_processes):
    with count_batcher([[3], [3]][: n_processes or 1], 10, autoreset=True, n_processes=n_processes) as made:
        made.reset()
        for _ in range(4):
            rollout(made)
        stats = made.stats()
        assert stats["arena_bytes"] == made.nbytes and stats["restarts"] == stats["lost_rollouts"] == 0
        assert stats["dropped_episodes"] == 0
        for index, worker in enumerate(stats["workers"]):
            assert (worker["worker"], worker["state"], worker["steps"]) == (index, "idle", 40)
            assert Path(f"/proc/{worker['pid']}").exists() and worker["steps_per_second"] > 0
            assert worker["environment_seconds"] > 0 < worker["agent_seconds"] and worker["waiting_seconds"] >= 0
        made.execute()
        assert {worker["state"] for worker in made.stats()["workers"]} <= {"busy", "idle"}
        made.get()


def test_interrupts_while_successors_start_lose_nothing(monkeypatch):
    """Ctrl-C between the settled rollouts and the successor: the next `get` goes on."""
    with batcher("kill") as made:
        made.reset()
        made.execute()
        replace, calls = made._engine._supervisor._replace, []

        def interrupted(*arguments):
            calls.append(arguments)
            if len(calls) == 1:
                raise KeyboardInterrupt
            return replace(*arguments)

        monkeypatch.setattr(made._engine._supervisor, "_replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.get()
        trajectories, n_running = made.get()
        assert n_running == 6 and trajectories.lengths.tolist() == [5, 5, 0, 0, 5, 5]
        assert torch.equal(rollout(made)[0].lengths, torch.full((6,), 5))


def test_a_close_while_a_successor_starts_leaves_no_worker(monkeypatch):
    before = worker_pids()
    batcher = count_batcher([[9]], 4, autoreset=True, on_worker_failure="restart")
    batcher.reset()

    def closed_meanwhile(*arguments):
        worker = WorkerProcess(*arguments)
        closing = threading.Thread(target=batcher.close)
        closing.start()
        closing.join(LIMIT)
        return worker

    monkeypatch.setattr("rlstructs.workers.pool.WorkerProcess", closed_meanwhile)
    os.kill(batcher._engine.pool.pids[0], signal.SIGKILL)
    with pytest.raises(ClosedError, match="closed meanwhile"):
        rollout(batcher)
    assert worker_pids() == before
