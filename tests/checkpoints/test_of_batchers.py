"""A batcher in a checkpoint: it is saved between rollouts, and nothing is restored unless it fits."""

from __future__ import annotations

import os
import signal

import gymnasium
import numpy as np
import pytest
import torch

from rlstructs import Checkpoint, FileError, GymEnvInf, RandomAgent, RL_Batcher, StateError
from rlstructs.memories.torch import RandomMemory
from rlstructs.replay import VectorReplayBuffer
from rlstructs.workers import WorkerError


def made(n_timesteps=8, run_ahead=0):
    return RL_Batcher.make("CartPole-v1", n_envs=2, n_workers=0, n_timesteps=n_timesteps, seed=7, run_ahead=run_ahead)


def network(value):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, value)
    return model


def rows_of(n_envs):
    memory = RandomMemory(memory_size=20, num_envs=n_envs, device="cpu", seed=0)
    memory.create_tensor("terminated", 1, torch.bool)
    return memory


@pytest.fixture
def saved(tmp_path):
    """A folder with a checkpoint of a batcher, and of a model whose weight is 1."""
    with made() as batcher:
        batcher.reset()
        checkpoint = Checkpoint(tmp_path, batcher=batcher, model=network(1.0), rng=False)
        checkpoint.save(3)
        checkpoint.close()
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"n_timesteps": 9}, "n_timesteps is 8 in the exact state, in this batcher it is 9"),
     ({"run_ahead": 1}, "run_ahead is 0 in the exact state, in this batcher it is 1")],
)  # fmt: skip
def test_a_batcher_that_does_not_fit_is_named_and_nothing_is_restored(saved, arguments, words):
    model = network(2.0)
    with made(**arguments) as other:
        checkpoint = Checkpoint(saved, batcher=other, model=model, rng=False)
        with pytest.raises(FileError, match=rf"batcher\.pt: does not fit: .*{words}"):
            checkpoint.restore()
    assert model.weight.item() == 2.0


def test_nothing_is_restored_while_a_rollout_is_under_way(saved):
    model = network(2.0)
    with made() as batcher:
        batcher.reset()
        batcher.execute()
        checkpoint = Checkpoint(saved, batcher=batcher, model=model, rng=False)
        with pytest.raises(StateError, match="a rollout is under way, call get or wait first"):
            checkpoint.restore()
        assert model.weight.item() == 2.0
        batcher.get()
        assert checkpoint.restore() == 3 and model.weight.item() == 1.0


def test_nothing_is_restored_while_workers_write_to_a_memory(tmp_path):
    memories = {"a": (one := rows_of(2)), "b": (fed := rows_of(2))}
    with made() as batcher:
        batcher.feed(fed)
        batcher.reset()
        checkpoint = Checkpoint(tmp_path, memory=memories, rng=False)
        checkpoint.save(3)
        one.add_samples(terminated=torch.ones(2, 1, dtype=torch.bool))
        batcher.execute()
        with pytest.raises(StateError, match="workers write to this memory"):
            checkpoint.restore()
        assert len(one) == 2
        batcher.get()
        assert checkpoint.restore() == 3 and len(one) == len(fed) == 0


@pytest.mark.parametrize("exact", [True, False])
def test_nothing_is_saved_while_a_rollout_is_under_way_or_leased(exact, tmp_path):
    with made() as batcher:
        checkpoint = Checkpoint(tmp_path, batcher=batcher, exact=exact)
        batcher.reset()
        batcher.execute()
        with pytest.raises(StateError, match="save: a rollout is under way, call get or wait first"):
            checkpoint.save(1)
        with batcher.lease(), pytest.raises(StateError, match="save: a rollout is leased, release it first"):
            checkpoint.save(1)
        batcher.execute()
        batcher.lease()  # nobody holds it
        checkpoint.save(2)
        assert checkpoint.steps == [2]


class Fragile(gymnasium.Env):
    """Counts; is not brought back to a state while the file `flag` says how it fails."""

    observation_space, action_space = gymnasium.spaces.Box(0, np.inf, (1,)), gymnasium.spaces.Discrete(2)

    def __init__(self, flag):
        self.flag, self.n = flag, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.n = 0
        return self.show(), {}

    def step(self, action):
        self.n += 1
        return self.show(), float(self.n), self.n == 7, False, {}

    def show(self):
        return np.full(1, self.n, np.float32)

    def get_state(self):
        return self.n

    def set_state(self, state):
        if self.flag.exists():
            if self.flag.read_text() == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("this state is not for me")
        self.n = state


class FragileAgent(RandomAgent):
    """Is not brought back to a state while the file `flag` says so."""

    def __init__(self, flag):
        super().__init__(gymnasium.spaces.Discrete(2))
        self.flag = flag

    def get_state(self):
        return 3

    def set_state(self, state):
        if self.flag.exists() and self.flag.read_text() == "agent":
            raise ValueError("this state is not for me")


def create_fragile(n_envs, seed, flag):
    return GymEnvInf([Fragile(flag) for _ in range(n_envs)], seed)


def fragile(flag, n_workers=1, run_ahead=0, kind=RL_Batcher, **others):
    agent = FragileAgent if flag.name == "agent" else lambda flag: RandomAgent(gymnasium.spaces.Discrete(2))
    return kind(
        4, agent, {"flag": flag}, create_fragile, {"n_envs": 2, "flag": flag}, n_processes=n_workers, seeds=0,
        run_ahead=run_ahead, **others,
    )  # fmt: skip


def filled(n_envs):
    """A memory, and two buffers, that a batcher may feed."""
    memory = RandomMemory(memory_size=30, num_envs=n_envs, device="cpu", seed=0)
    return {"a": memory, "b": VectorReplayBuffer(30 * n_envs, n_envs), "c": VectorReplayBuffer(60, n_envs)}


def observed(memories):
    """All observations, in order."""
    memory, *buffers = memories.values()
    found = [memory.sample_all(["observations"])[0][0].numpy().tolist()] if len(memory) else [[]]
    return found + [each.obs[each.sample_indices(0)].tolist() if len(each) else [] for each in buffers]


def train_once(batcher, memories, is_fed):
    batcher.execute()
    trajectories = None
    if is_fed:
        batcher.wait()
    else:
        trajectories, _ = batcher.get()
    for name, memory in memories.items():
        if not (is_fed and name == is_fed) and trajectories is not None:
            memory.add_trajectories(trajectories)


def check_refused_restore(tmp_path, how, is_fed, n_workers, run_ahead, **others):
    """A restore that fails in the batcher changes nothing else, and a later one gives what was saved."""
    flag = tmp_path / ("agent" if how == "agent" else "flag")
    model, extra = network(1.0), {"n": 1, "held": np.ones(2)}
    n_envs = 2 * max(1, n_workers)

    def make(batcher, model, extra, memories):
        if is_fed:
            batcher.feed(memories[is_fed])
        return Checkpoint(tmp_path / "runs", batcher=batcher, memory=memories, model=model,
                          optimizer=torch.optim.Adam(model.parameters()), extra=extra)  # fmt: skip

    with fragile(flag, n_workers, run_ahead, **others) as batcher:
        checkpoint = make(batcher, model, extra, saved := filled(n_envs))
        batcher.reset()
        for _ in range(3):
            train_once(batcher, saved, is_fed)
        checkpoint.save(3)
        saved_rows = observed(saved)
        checkpoint.close()
        train_once(batcher, saved, is_fed)
        wanted = observed(saved)
    assert any(saved_rows) and wanted != saved_rows
    held, memories, other = np.zeros(2), filled(n_envs), network(2.0)
    own = {"n": 0, "held": held}
    with fragile(flag, n_workers, run_ahead, **others) as batcher:
        checkpoint = make(batcher, other, own, memories)
        batcher.reset()
        train_once(batcher, memories, is_fed)
        batcher.reset()  # a memory must not be fed while it is restored
        before = observed(memories), torch.get_rng_state().tolist()
        flag.write_text(how)
        with pytest.raises((FileError, WorkerError)):
            checkpoint.restore()
        assert (observed(memories), torch.get_rng_state().tolist()) == before and any(before[0])
        assert other.weight.item() == 2.0 and own["n"] == 0 and held.tolist() == [0, 0]
        with pytest.raises(StateError, match="close the batcher"):
            batcher.execute()
    flag.unlink()
    with fragile(flag, n_workers, run_ahead, **others) as batcher:
        checkpoint = make(batcher, other, own, memories)
        assert checkpoint.restore() == 3 and observed(memories) == saved_rows and own["held"] is held
        train_once(batcher, memories, is_fed)
        assert observed(memories) == wanted and other.weight.item() == 1.0


@pytest.mark.parametrize("is_fed", [None, "a", "b"])
@pytest.mark.parametrize(
    ("how", "n_workers", "run_ahead"),
    [("environment", 0, 0), ("environment", 2, 1), ("killed", 1, 0), ("killed", 2, 1), ("agent", 1, 1)],
)
def test_a_restore_that_fails_in_the_batcher_changes_nothing_else(how, n_workers, run_ahead, is_fed, tmp_path):
    check_refused_restore(tmp_path, how, is_fed, n_workers, run_ahead)
