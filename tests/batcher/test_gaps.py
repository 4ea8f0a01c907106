"""Rollouts that a memory was not given: what does not follow begins an episode, and what follows goes on."""

from __future__ import annotations

import os
import pickle
import signal
from collections import Counter

import gymnasium
import numpy as np
import pytest
import torch
from surfaces import EVERY_SURFACE, N_LANES

from rlstructs import (
    Checkpoint,
    DictTensor,
    RL_Batcher,
    TemporalDictTensor,
    Trajectories,
    load_rollouts,
    save_rollouts,
)
from rlstructs.memories.torch import PrioritizedMemory, RandomMemory
from rlstructs.replay import ChunkReplayBuffer, DictTensorReplayBuffer, VectorReplayBuffer
from rlstructs.replay.rows.lanes import HEAD

T = 5


class Blank(gymnasium.Env):
    """Shows the same at each step, and pays the number of the step; its episode has no end."""

    observation_space, action_space = gymnasium.spaces.Box(0, 1, (1,)), gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(1, np.float32), float(self.t), False, False, {}


class Count(Blank):
    """Shows the number of the step, too."""

    observation_space = gymnasium.spaces.Box(0, 1e6, (1,))

    def step(self, action):
        return np.full(1, self.t + 1, np.float32), *super().step(action)[1:]


def make_batcher(env=Blank, n_workers=0, **settings):
    batcher = RL_Batcher.make(env, None, n_envs=N_LANES, n_workers=n_workers, n_timesteps=T, seed=0, **settings)
    batcher.reset()
    return batcher


def memory_of(size=100, cls=RandomMemory):
    return cls(memory_size=size, num_envs=N_LANES, device="cpu", seed=0)


def collect(batcher):
    batcher.execute()
    return batcher.get()[0]


def episodes(store, lane=0, column="rewards"):
    """The numbers in the rows of a lane, in a list for each episode."""
    rows = store.view().by_lane(1)[0]
    rows = rows[store.columns.lanes(rows) == lane]
    found: list[list[int]] = []
    for value, begins in zip(store.gather([column], rows)[0].reshape(-1).tolist(), store.episodes.begin(rows),
                             strict=True):  # fmt: skip
        if begins or not found:
            found.append([])
        found[-1].append(int(value))
    return found


def steps(first, last):
    return list(range(first, last + 1))


def give(batcher, memory, is_given, is_fed, names=None):
    """Collects rollouts, some of which a memory is given."""
    for given in is_given:
        if is_fed:
            batcher.feed(memory if given else None, names)
        trajectories = collect(batcher)
        if given and not is_fed:
            memory.add_trajectories(trajectories, names)


@pytest.fixture(scope="module")
def by_a_worker():
    with make_batcher(n_workers=1) as batcher:
        yield batcher


@pytest.mark.parametrize("is_fed", [False, True], ids=["added", "fed"])
@pytest.mark.parametrize("surface", EVERY_SURFACE)
def test_rows_that_do_not_follow_begin_an_episode_and_others_go_on(surface, is_fed, by_a_worker):
    """What environments show is the same everywhere, and proves nothing."""
    memory = surface.make()
    if is_fed and not hasattr(memory, "make_feed"):
        pytest.skip("it is a part of a RayReplay, which is fed as a whole")
    by_a_worker.feed(None)
    by_a_worker.reset()
    give(by_a_worker, memory, [1, 1, 0, 1, 0, 1], is_fed, surface.names)
    reward = next(name for name, key in surface.names.items() if key == "_observation/reward")
    found = surface.episodes(memory, reward)
    assert all(np.diff(each).tolist() == [1] * (len(each) - 1) for each in found)
    if len(surface.stores(memory)) > 1:  # episodes that are cut short are dropped
        assert found == [steps(26, 30)] * N_LANES
    elif not surface.is_one:
        assert found == [steps(1, 10)] * N_LANES + [steps(16, 20)] * N_LANES + [steps(26, 30)] * N_LANES
    for store in surface.stores(memory):
        for name in [name for name in store.columns.specs if name.rpartition("/")[2] in ("terminated", "truncated")]:
            assert not store.columns.host(name, store.gather([name], store.view().every_row())[0]).any()


def test_sequences_and_n_step_windows_of_memories_stop_at_a_gap():
    memory = memory_of(cls=PrioritizedMemory)
    with make_batcher(Count) as batcher:
        give(batcher, memory, [1, 0, 1, 0, 1], False)
    [[seen]] = memory.sample(["observations"], 200, sequence_length=3, episode_ends="never")
    assert (seen.view(200, 3).diff(dim=1) == 1).all()
    [[seen, following, rewards]] = memory.sample(["observations", "next_observations", "rewards"], 200, n_step=3,
                                                 gamma=1.0)  # fmt: skip
    n = following - seen
    assert n.unique().tolist() == [1, 2, 3] and (rewards == n * seen + n * (n + 1) / 2).all()


def test_stacks_neighbours_and_next_observations_of_tianshou_s_buffers_stop_at_a_gap():
    buffer = VectorReplayBuffer(N_LANES * 20, N_LANES, stack_num=3)
    with make_batcher(Count) as batcher:
        give(batcher, buffer, [1, 0, 1, 1], False)
    at = np.arange(15)
    assert buffer.prev(at).tolist() == [0, 0, 1, 2, 3, 5, *range(5, 14)]
    assert buffer.next(at).tolist() == [1, 2, 3, 4, 4, *range(6, 15), 14]
    stacked = buffer[np.array([4, 5, 6])]
    assert stacked.obs[..., 0].tolist() == [[2, 3, 4], [10, 10, 10], [10, 10, 11]]
    assert stacked.obs_next[:, -1, 0].tolist() == [5, 11, 12]


def test_large_next_observations_stay_what_they_were_at_a_gap():
    """They are stored once: as the observation of the following row."""

    class Wide(Count):
        observation_space = gymnasium.spaces.Box(0, 1e6, (100,))

        def reset(self, *, seed=None, options=None):
            return np.repeat(super().reset(seed=seed)[0], 100), {}

        def step(self, action):
            frame, *rest = super().step(action)
            return np.repeat(frame, 100), *rest

    buffer = VectorReplayBuffer(N_LANES * 20, N_LANES)
    with make_batcher(Wide) as batcher:
        give(batcher, buffer, [1, 0, 1], False)
    assert buffer[np.arange(10)].obs_next[:, 0].tolist() == [*range(1, 6), *range(11, 16)]


def test_chunks_of_rlberry_s_and_slices_of_torchrl_s_buffers_stop_at_a_gap():
    from rlstructs.replay import SliceSampler

    chunks, crossing = (ChunkReplayBuffer(100, 0, n_lanes=N_LANES, episode_ends=ends) for ends in ("never", "cross"))
    slices = DictTensorReplayBuffer(sampler=SliceSampler(slice_len=3, strict_length=False), batch_size=60, generator=0)
    with make_batcher() as batcher:
        for i in range(6):
            trajectories = collect(batcher)
            if i % 2 == 0:
                for buffer in (chunks, crossing, slices):
                    buffer.add_trajectories(trajectories)
    assert (np.diff(chunks.sample(100, 3).data["rewards"], axis=1) == 1).all()
    crossed = crossing.sample(100, 3)
    jumps = np.diff(crossed.data["rewards"], axis=1) != 1
    assert jumps.any() and (crossed.info["is_first"][:, 1:] == jumps).all()
    rewards = slices.sample()["_observation/reward"].reshape(-1, 3)
    assert (rewards.diff(dim=1) == 1).all()


def lent(batcher):
    batcher.execute()
    return batcher.lease()


WAYS = {
    "as they are": lambda rollout, path: [rollout],
    "pickled": lambda rollout, path: [pickle.loads(pickle.dumps(rollout))],
    "cloned": lambda rollout, path: [rollout.clone()],
    "in a file": lambda rollout, path: [(rollout.save(path / "a.npz"), Trajectories.load(path / "a.npz"))[1]],
    "in an .h5": lambda rollout, path: [(rollout.save(path / "a.h5"), Trajectories.load(path / "a.h5"))[1]],
    "in a .pt": lambda rollout, path: [(rollout.save(path / "a.pt"), Trajectories.load(path / "a.pt"))[1]],
    "row by row": lambda rollout, path: [rollout.index(row) for row in range(len(rollout))],
    "row by row in one": lambda rollout, path: [Trajectories.cat([rollout.index(row) for row in (2, 0, 1)])],
    "in pieces": lambda rollout, path: [
        Trajectories(rollout.info, rollout.trajectories.temporal_slice(*each)) for each in ((0, 2), (2, T))
    ],
    "in pieces in one": lambda rollout, path: [Trajectories.cat([
        Trajectories(rollout.info, rollout.trajectories.temporal_slice(*each)) for each in ((0, 2), (2, T))
    ])],
    "some keys": lambda rollout, path: [Trajectories(rollout.info, rollout.trajectories.get(
        [key for key in rollout.trajectories if "last_action" not in key]
    ))],
    "with a key more": lambda rollout, path: [
        Trajectories(rollout.info, rollout.trajectories.set("action/more", rollout["action/action"] * 2))
    ],
    "rebuilt": lambda rollout, path: [Trajectories(rollout.info, TemporalDictTensor(
        dict(rollout.trajectories.items()), rollout.lengths, rollout.trajectories.first_steps
    ))],
    "copied to others": lambda rollout, path: [copied(rollout)],
}  # fmt: skip


def copied(rollout):
    other = rollout.trajectories.clone()
    other.lengths.zero_()
    other.first_steps = None
    other.copy_(rollout.trajectories, [2, 0, 1], [2, 0, 1])
    return Trajectories(rollout.info, other)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_rollouts_say_what_follows_whatever_was_done_to_them(way, tmp_path):
    memory = memory_of()
    with make_batcher() as batcher:
        for given in (1, 1, 0, 1):
            rollout = collect(batcher)
            for each in way(rollout, tmp_path) if given else ():
                memory.add_trajectories(each)
    for lane in range(N_LANES):
        assert episodes(memory._storage, lane) == [steps(1, 10), steps(16, 20)]


@pytest.mark.parametrize(
    "call", ["get", "get(out=)", "get(out= without numbers)", "lease", "get(min_workers=)", "ahead"]
)
def test_rollouts_say_what_follows_however_they_are_handed_out(call):
    memory, out = memory_of(), None
    with make_batcher(n_workers=N_LANES, run_ahead=2 * (call == "ahead")) as batcher:
        for given in (1, 1, 0, 1):
            batcher.execute()
            if call == "lease":
                with batcher.lease() as lease:
                    if given:
                        memory.add_trajectories(lease.trajectories)
                continue
            rollout, _ = batcher.get(**({"out": out} if out else {}), **({"min_workers": 2} if "min" in call else {}))
            if "out" in call:
                out = rollout.clone()
                out.trajectories.first_steps = None if "without" in call else out.trajectories.first_steps
            if given:
                memory.add_trajectories(rollout)
    for lane in range(N_LANES):
        found = episodes(memory._storage, lane)
        assert all(np.diff(each).tolist() == [1] * (len(each) - 1) for each in found)
        assert call == "get(min_workers=)" or found == [steps(1, 10), steps(16, 20)]


def test_memories_in_turns_have_an_episode_for_each_rollout_and_one_that_has_all_goes_on():
    one, other, both = memory_of(), memory_of(), memory_of()
    with make_batcher() as batcher:
        for i in range(4):
            rollout = collect(batcher)
            (one, other)[i % 2].add_trajectories(rollout)
            both.add_trajectories(rollout)
    assert episodes(one._storage) == [steps(1, 5), steps(11, 15)]
    assert episodes(other._storage) == [steps(6, 10), steps(16, 20)]
    assert episodes(both._storage) == [steps(1, 20)]


@pytest.mark.parametrize("is_fed", [False, True], ids=["added", "fed"])
def test_batchers_of_equal_seeds_that_take_turns_do_not_go_on_with_each_other_s_steps(is_fed):
    memory = memory_of()
    with make_batcher() as one, make_batcher() as other:
        for batcher, is_given in ((one, [1]), (other, [0, 1]), (one, [1, 1]), (other, [1])):
            give(batcher, memory, is_given, is_fed)
            one.feed(None)
            other.feed(None)
    assert episodes(memory._storage) == [steps(1, 5), steps(6, 10), steps(6, 15), steps(11, 15)]


class Silent:
    """A vectorised environment that does not say where episodes begin, and shows the same after a reset."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, seed):
        self.t = 0

    def n_envs(self):
        return N_LANES

    def reset(self, env_info=None):
        self.t = 0
        return self._show(False), torch.arange(N_LANES)

    def _show(self, has_reward=True):
        flags = dict.fromkeys(["done", "terminated", "truncated"], torch.zeros(N_LANES, dtype=torch.bool))
        return DictTensor({"frame": torch.zeros(N_LANES, 1), "reward": torch.full((N_LANES,), float(self.t)), **flags})

    def step(self, action):
        self.t += 1
        after = self._show()
        return (after, torch.arange(N_LANES)), (after, torch.arange(N_LANES))

    def close(self):
        pass


@pytest.mark.parametrize("n_workers", [0, 1])
def test_a_reset_begins_an_episode_even_where_environments_do_not_say_so(n_workers):
    memory = memory_of()
    with make_batcher(lambda seed: Silent(seed), n_workers, memory=memory) as batcher:
        for n_rollouts in (2, 1):
            give_all(batcher, n_rollouts)
            batcher.reset()
        give_all(batcher, 1)
    assert episodes(memory._storage) == [steps(1, 10), steps(1, 5), steps(1, 5)]


def give_all(batcher, n_rollouts):
    for _ in range(n_rollouts):
        batcher.execute()
        batcher.wait()


@pytest.mark.parametrize("is_fed", [False, True], ids=["added", "fed"])
def test_a_worker_that_replaced_another_does_not_go_on_with_its_steps(is_fed):
    memory = memory_of()
    settings = {"memory": memory} if is_fed else {}
    with make_batcher(lambda seed: Silent(seed), 1, on_worker_failure="restart", **settings) as batcher:
        for i in range(3):
            batcher.execute()
            rollout, _ = batcher.get()
            if not is_fed:
                memory.add_trajectories(rollout)
            if i == 0:
                os.kill(batcher.stats()["workers"][0]["pid"], signal.SIGKILL)
    assert len(episodes(memory._storage)) == 2 and episodes(memory._storage)[0] == steps(1, 5)


def test_what_a_memory_has_no_room_for_leaves_no_gap_and_a_rollout_left_out_does():
    memory = memory_of(size=7)
    with make_batcher() as batcher:
        give(batcher, memory, [1, 1, 1], False)
        assert episodes(memory._storage) == [steps(9, 15)]
        give(batcher, memory, [0, 1], False)
        assert episodes(memory._storage) == [steps(14, 15), steps(21, 25)]
        one = Trajectories.cat([collect(batcher) for _ in range(2)])  # longer than the memory
        memory.add_trajectories(one)
    assert episodes(memory._storage) == [steps(29, 35)]


def test_rollouts_that_were_taken_back_from_a_memory_go_on_when_they_are_added():
    memory = memory_of()
    with make_batcher(n_workers=1, run_ahead=2) as batcher:
        batcher.feed(memory)
        batcher.execute()
        batcher.wait()
        while not all(memory._storage.counters.shared[HEAD] >= 3 * T):  # the worker is ahead
            os.sched_yield()
        batcher.feed(None)
        assert episodes(memory._storage) == [steps(1, 5)]
        for _ in range(3):
            memory.add_trajectories(collect(batcher))
    assert episodes(memory._storage) == [steps(1, 20)]


MEMORIES = {
    "RandomMemory": lambda: memory_of(),
    "VectorReplayBuffer": lambda: VectorReplayBuffer(100 * N_LANES, N_LANES),
    "ChunkReplayBuffer": lambda: ChunkReplayBuffer(100 * N_LANES, 0, n_lanes=N_LANES),
}
REWARD = {"RandomMemory": "rewards", "VectorReplayBuffer": "rew", "ChunkReplayBuffer": "rewards"}


@pytest.mark.parametrize("is_fed", [False, True], ids=["added", "fed"])
@pytest.mark.parametrize("name", MEMORIES)
def test_a_restored_batcher_goes_on_with_the_episodes_of_the_restored_memory(name, is_fed, tmp_path):
    def open_all():
        memory = MEMORIES[name]()
        batcher = make_batcher(n_workers=1, run_ahead=int(is_fed), **({"memory": memory} if is_fed else {}))
        return memory, batcher, Checkpoint(tmp_path, batcher=batcher, memory=memory)

    def play(batcher, memory, n):
        for _ in range(n):
            rollout = collect(batcher)
            if not is_fed:
                memory.add_trajectories(rollout)

    memory, batcher, checkpoint = open_all()
    with batcher:
        play(batcher, memory, 2)
        checkpoint.save(step=2)
        play(batcher, memory, 2)  # of which nothing is left
        batcher.reset()  # workers that are ahead no longer write to the memory
        checkpoint.restore()
        play(batcher, memory, 1)
        assert episodes(memory._storage, column=REWARD[name]) == [steps(1, 15)]
    memory, batcher, checkpoint = open_all()
    with batcher:
        checkpoint.restore()
        play(batcher, memory, 2)
        assert episodes(memory._storage, column=REWARD[name]) == [steps(1, 20)]


n_made: Counter[int] = Counter()  # by process


class FailsOnce(Blank):
    """Fails in its eighth step if it is one of the first in its process."""

    def __init__(self):
        n_made[os.getpid()] += 1
        self.fails_at = 8 if n_made[os.getpid()] <= N_LANES else None

    def step(self, action):
        if self.t + 1 == self.fails_at:
            raise ValueError("planted")
        return super().step(action)


@pytest.mark.parametrize("name", MEMORIES)
def test_a_gap_that_a_worker_has_left_ahead_is_none_behind_the_rows_shown(name, tmp_path):
    """Its environment failed in a rollout that is not handed out yet: what was handed out goes on after a load."""

    def open_all():
        memory = MEMORIES[name]()
        batcher = make_batcher(FailsOnce, n_workers=1, run_ahead=3, memory=memory, on_env_failure="restart")
        return memory, batcher, Checkpoint(tmp_path, batcher=batcher, memory=memory)

    memory, batcher, checkpoint = open_all()
    with batcher:
        collect(batcher)
        checkpoint.save(step=1)
    memory, batcher, checkpoint = open_all()
    with batcher:
        checkpoint.restore()
        for _ in range(3):
            collect(batcher)
        found = [values for lane in range(N_LANES) for values in episodes(memory._storage, lane, REWARD[name])]
    assert found == [steps(1, 7), steps(1, 10)] * N_LANES


@pytest.mark.parametrize("name", MEMORIES)
def test_a_batcher_that_went_on_while_its_memory_was_in_a_file_leaves_a_gap(name, tmp_path):
    memory, loaded, path = MEMORIES[name](), MEMORIES[name](), tmp_path / "memory.npz"
    with make_batcher() as batcher:
        give(batcher, memory, [1], False)
        path = memory.save(tmp_path) if name == "RandomMemory" else (memory.save(path), path)[1]
        give(batcher, memory, [1], False)
        loaded.load(path)
        give(batcher, loaded, [1, 1], False)
    assert episodes(loaded._storage, column=REWARD[name]) == [steps(1, 5), steps(11, 20)]


def test_a_file_of_a_memory_without_these_numbers_loads_and_what_comes_next_begins_an_episode(tmp_path, monkeypatch):
    memory, loaded = memory_of(), memory_of()
    with make_batcher() as batcher:
        give(batcher, memory, [1], False)
        state = memory._state()
        del state["following"]
        monkeypatch.setattr(RandomMemory, "_state", lambda self: state)
        loaded.load(memory.save(tmp_path))
        give(batcher, loaded, [1, 1], False)
    assert episodes(loaded._storage) == [steps(1, 5), steps(6, 15)]


def by_hand(rollout):
    return Trajectories(rollout.info, TemporalDictTensor(dict(rollout.trajectories.items()), rollout.lengths))


def test_trajectories_made_by_hand_follow_what_is_there():
    memory = memory_of()
    with make_batcher() as batcher:
        for given in (1, 0, 1):
            rollout = collect(batcher)
            if given:
                memory.add_trajectories(by_hand(rollout))
        assert episodes(memory._storage) == [[*steps(1, 5), *steps(11, 15)]]
        memory.add_trajectories(collect(batcher))  # known not to be made by hand: it follows none of these
        memory.add_trajectories(Trajectories.cat([collect(batcher), by_hand(collect(batcher))]))
    assert episodes(memory._storage)[1:] == [steps(16, 30)]


def test_rows_that_a_program_adds_between_rollouts_are_not_forgotten():
    memory = memory_of()
    with make_batcher() as batcher:
        memory.add_trajectories(collect(batcher))
        zeros = {name: torch.zeros(N_LANES, 1) for name in ("observations", "next_observations", "rewards")}
        flags = {name: torch.zeros(N_LANES, 1, dtype=torch.bool) for name in ("terminated", "truncated")}
        memory.add_samples(**zeros, **flags, actions=torch.zeros(N_LANES, 1, dtype=torch.int64))
        memory.add_trajectories(collect(batcher))
    assert episodes(memory._storage) == [[*steps(1, 5), 0], steps(6, 10)]


def test_rollouts_in_a_folder_say_what_follows(tmp_path):
    memory = memory_of()
    with make_batcher() as batcher:
        save_rollouts(tmp_path / "some", (each for i, each in enumerate(batcher.rollouts(20 * N_LANES)) if i != 1))
    for rollouts in load_rollouts(tmp_path / "some"):
        memory.add_trajectories(rollouts)
    assert episodes(memory._storage) == [steps(1, 5), steps(11, 20)]


def test_what_is_said_of_following_is_beside_the_content_of_a_rollout():
    with make_batcher() as one, make_batcher() as other:
        first, second = collect(one), collect(other)
    assert first == second and not torch.equal(first.trajectories.first_steps, second.trajectories.first_steps)
    arrays = first.trajectories.numpy()
    assert "lengths" in arrays and not any("first" in key for key in [*arrays, *first.trajectories, *first.info])
