"""A training over Ray goes on from its checkpoint: workers and rows are in other processes."""

from __future__ import annotations

import gymnasium
import pytest
import torch
from clusters import ray_cluster

from rlstructs import Checkpoint, GymEnvInf, RandomAgent, RayBatcher, RayReplay

pytest.importorskip("ray", reason="ray is not installed: pip install ray")


def train(folder, n_rollouts):
    """The sums of the frames that are drawn after each rollout."""
    progress = {"drawn": []}
    with RayBatcher(
        8, lambda: RandomAgent(gymnasium.spaces.Discrete(2)), {},
        lambda n_envs, seed: GymEnvInf([gymnasium.make("CartPole-v1") for _ in range(n_envs)], seed), {"n_envs": 2},
        n_processes=2, seeds=0, run_ahead=1, n_nodes=2,
    ) as batcher, RayReplay(20, batcher.n_elems(), n_shards=2, alpha=0.6, seed=0) as memory:  # fmt: skip
        checkpoint = Checkpoint(folder, batcher=batcher, memory=memory, extra=progress)
        if checkpoint.restore() is None:
            batcher.reset()
        while len(progress["drawn"]) < n_rollouts:
            batcher.execute()
            memory.extend(batcher.get()[0])
            batch = memory.sample(16, n_step=2)
            memory.update_priorities(batch["index"], 1 + torch.arange(16))
            progress["drawn"].append(batch["observations"].double().sum().item())
            checkpoint.save(len(progress["drawn"]))
        checkpoint.close()
    return progress["drawn"]


@pytest.mark.slow
def test_a_training_over_ray_goes_on_from_its_checkpoint(tmp_path):
    with ray_cluster(2):
        wanted = train(None, 5)
        train(tmp_path, 3)
        assert train(tmp_path, 5) == wanted
