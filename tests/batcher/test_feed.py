"""Workers that write to a memory: the rows that `get` and `add_trajectories` would have brought, in the same places."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import Count, Counting, count_batcher
from processes import wait_until_gone
from surfaces import CAPACITY, EVERY_SURFACE

from rlstructs import GymEnvInf, RandomAgent, RL_Batcher, SpecError, StateError
from rlstructs.errors import MissingKeyError
from rlstructs.memories.torch import PrioritizedMemory, RandomMemory
from rlstructs.replay import (
    CachedReplayBuffer,
    ChunkReplayBuffer,
    DictTensorReplayBuffer,
    ReplayBuffer,
    VectorReplayBuffer,
)
from rlstructs.replay.rows.lanes import HEAD, Ring
from rlstructs.rollout.feeding import Feed
from rlstructs.testing import Fault, FaultyEnv, create_faulty_envs
from rlstructs.testing.faulty_env import checksum_of
from rlstructs.workers import arena

T = 6
LENGTHS = [[3], [5]]  # of the episodes of two workers' environments


@pytest.fixture(scope="module")
def counts():
    """A batcher of two workers, which feeds one memory after another."""
    with count_batcher(LENGTHS, T, autoreset=True) as batcher:
        yield batcher


@pytest.fixture(scope="module")
def counts_here():
    """One worker in this process, with two environments."""
    with count_batcher([[3, 5]], T, autoreset=True, n_processes=0) as batcher:
        yield batcher


def memory_of(n=2, size=CAPACITY, cls=RandomMemory, **settings):
    return cls(memory_size=size, num_envs=n, device="cpu", seed=0, **settings)


def contents(storage):
    """The counters, the rows of every column and the episodes of a store."""
    columns, rows = storage.columns, np.sort(storage.view().every_row())
    found = dict(zip(sorted(columns.specs), columns.gather(sorted(columns.specs), rows), strict=True))
    found |= {"rows": rows, "heads": storage.ring.head.copy(), "times": storage.episodes.times(rows)}
    return found | {"ends": storage.episodes.end(rows), "remaining": storage.episodes.remaining(rows)}


def assert_equal(one, other, without=()):
    assert one.keys() - without == other.keys() - without
    for name in one.keys() - without:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


@pytest.mark.parametrize("surface", EVERY_SURFACE)
def test_a_memory_holds_what_add_trajectories_would_have_added(surface, counts, counts_here):
    fed, other = surface.make(), surface.make()
    batcher = counts_here if surface.is_one else counts
    if not hasattr(fed, "make_feed"):
        pytest.skip("it is a part of a RayReplay, which is fed as a whole")
    batcher.feed(fed, surface.names)
    batcher.reset()
    for _ in range(5):  # the rings wrap
        batcher.execute()
        other.add_trajectories(batcher.get()[0], surface.names)
        for store, theirs in zip(surface.stores(fed), surface.stores(other), strict=True):
            assert_equal(contents(store), contents(theirs))


@pytest.mark.parametrize(
    "make", [lambda: ReplayBuffer(100), lambda: DictTensorReplayBuffer(generator=0),
             lambda: CachedReplayBuffer(ReplayBuffer(100), 2, 9), lambda: memory_of(export=True)],
    ids=["ReplayBuffer", "DictTensorReplayBuffer", "CachedReplayBuffer", "a memory that exports"],
)  # fmt: skip
def test_where_workers_cannot_write_the_trainer_adds_what_it_hands_out(make, counts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where memories export
    fed, other = make(), make()
    counts.feed(fed)
    counts.reset()
    for version in range(3):
        counts.execute()
        if version:
            assert counts.wait() == (2 * T, 2)
        else:
            other.add_trajectories(counts.get()[0])
            assert_equal(contents(fed._storage), contents(other._storage), {"policy_version"})
    stores = [fed._storage, *([fed.main_buffer._storage] if isinstance(fed, CachedReplayBuffer) else [])]
    found = np.concatenate([store.gather(["policy_version"], store.view().every_row())[0] for store in stores])
    assert len(fed) == 3 * 2 * T and (found == counts.policy_version).all()


def run(n_rollouts, make=memory_of, table=LENGTHS, **settings):
    """A fed memory, and one to which the same rollouts were added."""
    fed, other = make(), make()
    with count_batcher(table, T, autoreset=True, memory=fed, **settings) as batcher:
        batcher.reset()
        for _ in range(n_rollouts):
            batcher.execute()
            other.add_trajectories(batcher.get()[0])
            batcher.update(float(batcher.policy_version))
    return fed, other


def hide_processes(index):
    """Has this process see no other one in /proc, as with hidepid, or outside Linux."""
    open_file, own = os.open, f"/proc/{os.getpid()}/"

    def refuse(path, *args, **settings):
        if str(path).startswith("/proc/") and not str(path).startswith(own):
            raise PermissionError(13, "Permission denied")
        return open_file(path, *args, **settings)

    os.open = refuse


@pytest.mark.parametrize("make", [memory_of, lambda: VectorReplayBuffer(40, 2)], ids=["memory", "buffer"])
@pytest.mark.parametrize("run_ahead", [0, 1])
def test_where_processes_are_hidden_from_each_other_the_trainer_adds_what_it_hands_out(make, run_ahead):
    fed, other = run(5, make, init_worker=hide_processes, run_ahead=run_ahead)
    assert_equal(contents(fed.make_feed().storage), contents(other.make_feed().storage), {"policy_version"})
    assert len(fed) == len(other) > 2 * T


def test_a_worker_in_this_process_writes_to_a_memory_without_a_look_at_processes(monkeypatch):
    def refuse(path, *args, **settings):
        raise PermissionError(13, "Permission denied")

    with count_batcher(LENGTHS[:1], T, autoreset=True, n_processes=0) as batcher:
        monkeypatch.setattr(arena, "os", SimpleNamespace(**{**vars(os), "open": refuse}))
        batcher.feed(memory := memory_of(1))
        batcher.reset()
        batcher.execute()
        assert batcher.wait() == (T, 1) and len(memory) == T


def test_a_run_ahead_changes_no_row_and_each_row_says_of_which_update_it_is():
    fed, other = run(4, lambda: memory_of(size=100), run_ahead=2)
    one, two = contents(fed._storage), contents(other._storage)
    assert_equal(one, two, {"policy_version"})
    assert one["policy_version"].reshape(-1, 2).tolist() == [[max(0, t // T - 2)] * 2 for t in range(4 * T)]


def draw(memory):
    drawn = memory.sample(["observations", "rewards", "policy_version"], 16)[0]
    return [*(np.asarray(each) for each in drawn), np.asarray(memory.get_sampling_indexes())]


@pytest.mark.parametrize("run_ahead", [0, 2])
@pytest.mark.parametrize("cls", [RandomMemory, PrioritizedMemory])
def test_what_is_drawn_does_not_depend_on_how_far_workers_are(cls, run_ahead):
    """In one run all workers are done with what they may do before each draw, in the other they have just begun."""
    drawn, held = [], []
    for waits in (False, True):
        memory = memory_of(size=(run_ahead + 3) * T, cls=cls)
        with count_batcher(LENGTHS, T, autoreset=True, memory=memory, run_ahead=run_ahead) as batcher:
            batcher.reset()
            for version in range(2 * (run_ahead + 3)):
                for call in (batcher.execute, batcher.wait):
                    call()
                    if waits:
                        batcher._engine.settle()
                    if len(memory):
                        drawn.append(draw(memory))
                        held.append(len(memory))
                    if len(memory) and cls is PrioritizedMemory:
                        memory.update_priorities(drawn[-1][-1], drawn[-1][0][:, 0] + 0.5)
                batcher.update(float(version))
    half = len(drawn) // 2
    assert held[:half] == held[half:] and held[half - 2 : half] == [2 * 2 * T, 2 * 3 * T]
    for one, other in zip(drawn[:half], drawn[half:], strict=True):
        for mine, theirs in zip(one, other, strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("drop", ["reset", "reset after a kill", "feed", "close"])
def test_what_was_not_handed_out_is_not_in_the_memory_and_later_rollouts_follow(drop):
    fed, other = memory_of(size=5 * T), memory_of(size=5 * T)
    is_reset = drop.startswith("reset")
    with count_batcher(LENGTHS, T, autoreset=True, memory=fed, run_ahead=1, on_worker_failure="restart") as batcher:
        batcher.reset()
        for n_rollouts in (5, 2) if is_reset else (4,):
            for _ in range(n_rollouts):
                batcher.execute()
                other.add_trajectories(batcher.get()[0])
            if is_reset:
                batcher.execute()
                if drop != "reset":
                    while not all(fed._storage.counters.shared[HEAD] >= (n_rollouts + 1) * T):
                        os.sched_yield()
                    pid = batcher.stats()["workers"][0]["pid"]
                    os.kill(pid, signal.SIGKILL)
                    wait_until_gone([pid])
                batcher.reset()
        if drop == "feed":
            batcher.feed(None)
            batcher.execute()
            batcher.wait()
    one, two = contents(fed._storage), contents(other._storage)
    n = len(two["rows"]) - 2 * T * 2  # what a dropped rollout has overwritten is not there: here of up to two
    assert one["heads"].tolist() == two["heads"].tolist() and len(one["rows"]) >= n
    kept = np.isin(two["rows"], one["rows"])
    for name in one.keys() - {"heads", "policy_version"}:
        np.testing.assert_array_equal(one[name], two[name][kept], err_msg=name)


def test_a_batcher_that_feeds_none_again_hands_out_alone_and_the_memory_is_the_program_s(counts):
    memory = memory_of(size=100)
    counts.feed(memory)
    counts.reset()
    counts.execute()
    with pytest.raises(StateError, match="workers write to this memory: wait for their rollouts"):
        memory.reset()
    counts.wait()
    counts.feed(None)
    counts.execute()
    trajectories, _ = counts.get()
    assert len(memory) == 2 * T
    memory.add_trajectories(trajectories, {"observations": "observation/frame"})
    assert len(memory) == 4 * T
    with count_batcher([[3, 5]], T, autoreset=True, n_processes=0, memory=memory):
        pass


def test_a_memory_is_saved_while_workers_run_ahead(tmp_path):
    """The file holds what was handed out, but for the rows that the rollout under way may overwrite."""
    fed, handed_out = memory_of(size=100), memory_of(size=100)
    with (
        count_batcher([[3, 5]], T, autoreset=True, run_ahead=1, memory=fed) as batcher,
        count_batcher([[3, 5]], T, autoreset=True, run_ahead=1) as other,
    ):
        for each in (batcher, other):
            each.reset()
        for n_rollouts in range(1, 30):
            for each in (batcher, other):
                each.execute()
            batcher.wait()
            handed_out.add_trajectories(other.get()[0])
            back = memory_of(size=100)
            back.load(fed.save(tmp_path / "memory.npz"))
            found, expected = contents(back._storage), contents(handed_out._storage)
            assert len(back) == len(fed) == 2 * min(T * n_rollouts, 100 - T)
            kept = np.isin(expected["rows"], found["rows"])
            assert kept.sum() == len(back) and found["heads"].tolist() == expected["heads"].tolist()
            # An end that comes after the newest row limits no draw, and may be known already.
            for name in expected.keys() & found.keys() - {"heads", "policy_version", "remaining"}:
                np.testing.assert_array_equal(found[name], expected[name][kept], err_msg=name)


def test_another_thread_saves_a_memory_only_when_no_rollout_is_under_way(counts, tmp_path):
    memory = memory_of(size=100)
    counts.feed(memory)
    counts.reset()
    counts.execute()
    with ThreadPoolExecutor(1) as threads:
        with pytest.raises(StateError, match="only the thread that uses their batcher can save or copy it"):
            threads.submit(memory.save, tmp_path / "memory.npz").result()
        assert not list(tmp_path.iterdir())
        counts.wait()
        threads.submit(memory.save, tmp_path / "memory.npz").result()
    back = memory_of(size=100)
    back.load(tmp_path / "memory.npz")
    assert len(back) == len(memory) == 2 * T


def test_who_drops_a_batcher_has_its_memory_back():
    fed = memory_of(size=100)
    batcher = count_batcher([[3, 5]], T, autoreset=True, memory=fed)
    batcher.reset()
    batcher.execute()
    batcher.wait()
    batcher.execute()
    pids = [worker["pid"] for worker in batcher.stats()["workers"]]
    batcher._engine.settle()  # workers have written what is not handed out
    del batcher
    wait_until_gone(pids)
    assert len(fed) == 2 * T
    with count_batcher([[3, 5]], T, autoreset=True, memory=fed) as again:
        again.reset()
        for n_rollouts in (2, 3):
            again.execute()
            again.wait()
            assert len(fed) == 2 * T * n_rollouts
    fed.reset()
    assert len(fed) == 0


@pytest.mark.parametrize("change", ["load", "set"])
def test_what_would_overwrite_rows_that_workers_write_is_refused_before_it_does(counts, change, tmp_path):
    memory = memory_of(size=100)
    counts.feed(memory)
    counts.reset()
    counts.execute()
    counts.wait()
    path = memory.save(tmp_path / "memory.npz")
    counts.execute()
    before = memory.sample_all(["observations", "terminated"])[0]
    with pytest.raises(StateError, match="^workers write to this memory: wait for their rollouts"):
        memory.load(path) if change == "load" else memory.set_tensor_by_name("terminated", torch.ones(100, 2, 1) > 0)
    assert all(map(torch.equal, before, memory.sample_all(["observations", "terminated"])[0]))
    counts.wait()


def kill_after_writing(where, n_rollouts):
    """Kills this worker when it has written rollout `n_rollouts`, but not said so; or when it is about to say so."""
    method = (Feed, "write") if where == "written" else (Ring, "publish")
    original, calls = getattr(*method), []

    def call(*arguments):
        calls.append(None)
        if where == "written":
            original(*arguments)
        if len(calls) == n_rollouts:
            os.kill(os.getpid(), signal.SIGKILL)
        if where != "written":
            original(*arguments)

    setattr(*method, call)


def create_dying(n_envs, where, n_rollouts, seed):
    if seed.worker_index == 1 and not seed.restart_number:
        kill_after_writing(where, n_rollouts)
    return GymEnvInf([Count(5) for _ in range(n_envs)], seed)


@pytest.mark.parametrize("where", ["written", "half written"])
@pytest.mark.parametrize("run_ahead", [0, 1])
def test_a_rollout_that_was_lost_after_it_was_written_is_not_in_the_memory(where, run_ahead):
    fed, other = memory_of(4, 100), memory_of(4, 100)
    with RL_Batcher(
        T, Counting, {}, create_dying, {"n_envs": 2, "where": where, "n_rollouts": 3}, 2, 0,
        on_worker_failure="restart", run_ahead=run_ahead, memory=fed,
    ) as batcher:  # fmt: skip
        batcher.reset()
        for _ in range(6):
            batcher.execute()
            other.add_trajectories(batcher.get()[0])
            assert len(other) == len(fed)
        assert batcher.stats()["lost_rollouts"] == 1
    assert fed._storage.ring.head.tolist() == [6 * T, 6 * T, 5 * T, 5 * T]
    assert_equal(contents(fed._storage), contents(other._storage), {"policy_version"})


def test_wait_tells_steps_and_environments_that_run_and_episodes_come_as_with_get():
    """Environments that do not start anew, so that fewer and fewer run."""
    table = [[3, 9], [4, 9]]
    with count_batcher(table, T, memory=memory_of(4)) as batcher, count_batcher(table, T) as other:
        for each in (batcher, other):
            each.reset()
            each.execute()
        while (found := batcher.wait(blocking=False)) == (None, None):
            pass
        assert found == (3 + 4 + 2 * T, 2) and other.get()[1] == 2
        with pytest.raises(StateError, match="wait: no rollout is under way, call execute first"):
            batcher.wait()
        for each in (batcher, other):
            each.execute()
        assert batcher.wait() == (2 * 3, 0) and other.get()[1] == 0
        assert batcher.episodes() == other.episodes()


def test_environments_that_have_ended_add_nothing():
    fed, other = memory_of(size=100), memory_of(size=100)
    with count_batcher([[3], [20]], T, memory=fed) as batcher:
        batcher.reset()
        for _ in range(4):
            batcher.execute()
            other.add_trajectories(batcher.get()[0])
            assert len(fed) == len(other)
    assert len(fed) == 3 + 20
    assert_equal(contents(fed._storage), contents(other._storage), {"policy_version"})


def test_wait_takes_first_come_first_served_and_ends_late_rollouts_early():
    with count_batcher(LENGTHS, T, autoreset=True, memory=(memory := memory_of())) as batcher:
        batcher.reset()
        n_steps = 0
        for settings in ({"min_workers": 1}, {}, {"preempt": 0.5}, {}):
            batcher.execute()
            n_steps += batcher.wait(**settings)[0]
        batcher._engine.settle()
        assert memory._storage.ring.head.sum() == n_steps


def test_a_killed_worker_loses_its_unfinished_rollout_alone_and_its_successor_goes_on_in_its_lanes():
    fault = Fault("kill", count=9, worker=1, generations=[0])
    fed, other = (memory_of(4, 40) for _ in range(2))
    with RL_Batcher(
        4, RandomAgent, {"action_space": FaultyEnv.action_space}, create_faulty_envs, {"n_envs": 2, "faults": [fault]},
        2, 0, on_worker_failure="restart", memory=fed,
    ) as batcher:  # fmt: skip
        batcher.reset()
        for _ in range(6):
            batcher.execute()
            other.add_trajectories(batcher.get()[0])
        assert batcher.stats()["lost_rollouts"] == 1
        assert fed._storage.ring.head.tolist() == [24, 24, 20, 20]
        assert_equal(contents(fed._storage), contents(other._storage), {"policy_version"})


def test_rows_that_a_writer_had_only_announced_are_not_drawn_and_the_next_one_writes_in_their_places(counts):
    counts.feed(memory := memory_of(cls=PrioritizedMemory))
    counts.reset()
    for _ in range(4):
        counts.execute()
        counts.wait()
    ring = memory._storage.ring
    ring.reserve(slice(1, 2), T)  # as one that was killed leaves it
    assert len(memory) == 2 * CAPACITY - T
    memory.sample(["rewards"], 256)
    rows = memory.get_sampling_indexes().numpy()
    assert (memory._storage.view().steps(rows) >= ring.oldest()[rows % 2]).all()
    counts.execute()
    counts.wait()
    assert len(memory) == 2 * CAPACITY and (ring.reserved == ring.head).all()
    rewards = memory.get_tensor_by_name("rewards")[:, 1, 0]
    steps = np.arange(5 * T - CAPACITY, 5 * T)
    assert rewards[steps % CAPACITY].tolist() == (steps % 5 + 1).tolist()


class Fast(Count):
    """Shows which step it is, and a checksum."""

    def _observation(self):
        return np.array([self.steps, checksum_of(0, 0, self.episode, self.steps, 0)], np.float32)


@pytest.mark.parametrize(
    "make", [lambda: memory_of(size=72), lambda: memory_of(size=72, cls=PrioritizedMemory),
             lambda: VectorReplayBuffer(144, 2)],
    ids=["RandomMemory", "PrioritizedMemory", "VectorReplayBuffer"],
)  # fmt: skip
def test_no_row_is_torn_that_is_drawn_while_workers_write(make):
    """The rings are hardly larger than what is under way, so that workers always overwrite what was just drawn."""
    with RL_Batcher(
        16, Counting, {}, lambda seed: GymEnvInf([Fast(10_000)], seed), {}, 2, 0, run_ahead=3,
        memory=(memory := make()),
    ) as batcher:  # fmt: skip
        batcher.reset()
        n_drawn = 0
        for _ in range(20):
            batcher.execute()
            while batcher.wait(blocking=False) == (None, None):
                n_drawn += check_draw(memory) if len(memory) > 8 else 0
        assert n_drawn


def check_draw(memory):
    """Draws rows, each of which has to be whole; returns how many there are."""
    if isinstance(memory, VectorReplayBuffer):
        batch = memory.sample(32)[0]
        rows = [batch[name] for name in ("obs", "obs_next", "rew")]
    else:
        [rows] = memory.sample(["observations", "next_observations", "rewards"], 32)
    before, after, rewards = (np.asarray(each).astype(np.int64) for each in rows)
    assert (before[:, 0] + 1 == after[:, 0]).all() and (rewards.reshape(-1) == after[:, 0]).all()
    steps, found = np.concatenate([before, after]).T
    zeros = np.zeros_like(steps)
    assert (found == checksum_of(zeros, zeros, zeros, steps, zeros)).all()
    return len(before)


def test_new_rows_have_the_largest_priority_once_the_trainer_draws(counts):
    counts.feed(memory := memory_of(cls=PrioritizedMemory, alpha=1.0))
    counts.reset()
    counts.execute()
    counts.wait()
    memory.sample(["rewards"], 64)
    memory.update_priorities(np.arange(2 * T), np.full(2 * T, 1e-9))
    counts.execute()
    counts.wait()
    memory.sample(["rewards"], 256)
    assert (memory.get_sampling_indexes().numpy() >= 2 * T).all()


def test_a_debug_batcher_feeds_no_poison():
    fed, other = run(3, table=[[3, 5]], debug=True, n_processes=0)
    assert_equal(contents(fed._storage), contents(other._storage), {"policy_version"})
    assert not torch.isnan(fed.sample_all(["observations"])[0][0]).any()


def test_a_batcher_that_continues_from_a_state_counts_updates_on_in_the_rows():
    memory = memory_of(size=100)
    for is_first in (True, False):
        with RL_Batcher(
            T, Counting, {}, lambda seed: GymEnvInf([Count(4), Count(4)], seed), {}, 0, 0, memory=memory
        ) as batcher:
            if is_first:
                for version in range(3):
                    batcher.update(float(version))
                state = batcher.state_dict()
                continue
            batcher.load_state_dict(state)
            batcher.reset()
            for version in range(2):
                batcher.execute()
                batcher.wait()
                batcher.update(float(version))
    versions = memory.get_tensor_by_name("policy_version")[: 2 * T, :, 0]
    assert versions.tolist() == [[3, 3]] * T + [[4, 4]] * T


def test_a_buffer_that_has_columns_gets_no_version_and_one_whose_names_are_given_what_they_say(counts):
    chunks = ChunkReplayBuffer(2 * CAPACITY, 0, n_lanes=2)
    for tag in ("observations", "rewards"):
        chunks.setup_entry(tag, np.float32)
    counts.feed(chunks)
    assert chunks.tags == ["observations", "rewards"]
    buffer = VectorReplayBuffer(2 * CAPACITY, 2)
    counts.feed(buffer)
    assert "policy_version" in buffer._specs and buffer._specs.keys() >= {"obs", "obs_next", "rew"}
    memory = memory_of()
    counts.feed(memory, {"seen": "observation/frame", "n": "action/n", "age": "policy_version"})
    assert memory.get_tensor_names() == ["age", "n", "seen"]
    counts.reset()
    counts.execute()
    counts.wait()
    assert memory.get_tensor_by_name("n")[:T, 0, 0].tolist() == [0, 1, 2, 0, 1, 2]
    assert len(chunks) == len(buffer) == 0  # the last one that it was told to feed


def test_a_saved_buffer_has_the_returns_of_the_episodes_that_go_on(counts, tmp_path):
    fed, other = (VectorReplayBuffer(2 * CAPACITY, 2) for _ in range(2))
    counts.feed(fed)
    counts.reset()
    counts.execute()
    other.add_trajectories(counts.get()[0])
    fed.save(tmp_path / "fed.npz")
    back = VectorReplayBuffer(2 * CAPACITY, 2)
    back.load(tmp_path / "fed.npz")
    running = back._intake.running
    assert running.returns.tolist() == other._intake.running.returns.tolist() and running.lengths.tolist() == [0, 1]


class Unlike:
    """No memory."""


@pytest.mark.parametrize(
    "make, names, error, message",
    [
        (Unlike, None, TypeError, "needs a memory of rlstructs.memories or rlstructs.replay, got Unlike"),
        (lambda: memory_of(1), None, SpecError, "the memory has 1 lanes, expected 2, one for each environment"),
        (lambda: memory_of(size=T - 1), None, SpecError, "a lane of the memory has 5 rows, and a rollout up to 6"),
        (lambda: CachedReplayBuffer(ReplayBuffer(9), 1, 9), None, SpecError, "has 1 lanes, expected 2"),
        (memory_of, {}, SpecError, "names is empty"),
        (memory_of, {"seen": "observation/picture"}, MissingKeyError, r"no \['observation/picture'\]"),
        (lambda: with_tensor("rewards", 3), None, SpecError, r"'rewards' has rows of shape \(\)"),
    ],
)  # fmt: skip
def test_a_memory_that_workers_cannot_write_to_is_refused_before_a_row_is_written(counts, make, names, error, message):
    memory = make()
    with pytest.raises(error, match=message):
        counts.feed(memory, names)
    assert memory.__class__ is Unlike or len(memory) == 0


def with_tensor(name, size):
    memory = memory_of()
    memory.create_tensor(name, size, torch.float32)
    return memory


def test_one_batcher_at_a_time_feeds_a_memory_and_not_in_the_middle_of_a_rollout(counts):
    memory = memory_of()
    with count_batcher([[3, 5]], T, autoreset=True, n_processes=0, memory=memory) as other:
        with pytest.raises(StateError, match="another batcher feeds this memory: close it first"):
            counts.feed(memory)
        other.feed(memory_of())
    counts.feed(memory)
    counts.reset()
    counts.execute()
    with pytest.raises(StateError, match="feed: a rollout is under way, call get or wait first"):
        counts.feed(memory)
    counts.wait()
    assert len(memory) == 2 * T
