"""A batcher in a checkpoint: it is saved between rollouts, and nothing is restored unless it fits."""

from __future__ import annotations

import pytest
import torch

from rlstructs import Checkpoint, FileError, RL_Batcher, StateError
from rlstructs.memories.torch import RandomMemory


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
