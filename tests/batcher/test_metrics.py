"""`RL_Batcher.metrics`: what is worth logging, as a count of what was handed out says."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest
import torch
from helpers import count_batcher, rollout

from rlstructs import ClosedError, RL_Batcher, SpecError
from rlstructs.memories.torch import RandomMemory

TABLE = [[3, 4], [2, 99]]


@pytest.mark.parametrize(("lends", "run_ahead"), [(False, 0), (True, 1)], ids=["get", "lease ahead"])
def test_metrics_agree_with_what_was_handed_out(lends, run_ahead):
    with count_batcher(TABLE, 5, autoreset=True, run_ahead=run_ahead) as batcher:
        batcher.reset()
        n_steps = 0
        for n_rollouts in (1, 3):
            behind, n_new = 0, 0
            for _ in range(n_rollouts):
                batcher.execute()
                with batcher.lease() if lends else contextlib.nullcontext(batcher.get()) as (trajectories, _):
                    lengths = trajectories.lengths
                    n_new += int(lengths.sum())
                    behind += int(((batcher.policy_version - trajectories.info["policy_version"]) * lengths).sum())
                batcher.update(0.5)
            metrics, episodes = batcher.metrics(), batcher.episodes()
            n_steps += n_new
            assert all(type(value) is float for value in metrics.values())
            assert metrics["episode/count"] == episodes.n_elems() > 0
            assert metrics["episode/return"] == pytest.approx(episodes["return"].mean().item())
            assert metrics["episode/length"] == pytest.approx(episodes["length"].double().mean().item())
            assert metrics["rollout/steps"] == n_steps and metrics["rollout/steps_per_second"] > 0
            assert metrics["rollout/staleness"] == behind / n_new
            assert 0 < metrics["rollout/waiting_share"] <= 1 and metrics["rollout/restarts"] == 0
        assert (behind > 0) == (run_ahead > 0)


def test_rollouts_that_workers_write_to_a_memory_count_too():
    with count_batcher([[3, 4]], 5, autoreset=True, n_processes=0) as batcher:
        batcher.feed(RandomMemory(memory_size=20, num_envs=batcher.n_elems(), device="cpu"))
        batcher.reset()
        batcher.execute()
        n_steps, _ = batcher.wait()
        batcher.update(0.5)
        metrics = batcher.metrics()
        assert metrics["rollout/steps"] == n_steps > 0 and metrics["rollout/staleness"] == 0
        assert metrics["episode/count"] == batcher.episodes().n_elems() > 0


def test_episodes_that_were_taken_before_count_all_the_same():
    with count_batcher([[3, 4]], 5, autoreset=True, n_processes=0) as batcher:
        batcher.reset()
        rollout(batcher)
        n = batcher.episodes().n_elems()
        assert batcher.metrics()["episode/count"] == n > 0 == batcher.episodes().n_elems()


def test_means_of_nothing_are_missing():
    with count_batcher([[99]], 5, n_processes=0) as batcher:
        batcher.reset()
        for n_steps in (0.0, 5.0):
            metrics = batcher.metrics()
            assert metrics["episode/count"] == 0 and metrics["rollout/steps"] == n_steps
            assert not {"episode/return", "episode/length"} & set(metrics)
            assert ("rollout/staleness" in metrics) == (n_steps > 0)
            rollout(batcher)


def test_without_processes_the_time_in_which_rollouts_run_counts_as_waiting():
    with count_batcher([[3, 4]], 5, autoreset=True, n_processes=0) as batcher:
        batcher.reset()
        batcher.execute()
        assert batcher.metrics()["rollout/waiting_share"] > 0


def test_a_lost_rollout_has_no_steps_and_its_worker_a_restart():
    settings = {"n_envs": 2, "n_workers": 2, "n_timesteps": 5, "seed": 0, "on_worker_failure": "restart"}
    with RL_Batcher.make("CartPole-v1", **settings) as batcher:
        batcher.reset()
        rollout(batcher)
        os.kill(batcher.stats()["workers"][0]["pid"], signal.SIGKILL)
        n_steps = sum(int(rollout(batcher)[0].lengths.sum()) for _ in range(2))
        metrics = batcher.metrics()
        assert metrics["rollout/restarts"] == 1 and metrics["rollout/steps"] == 10 + n_steps


def test_steps_go_on_from_a_state_and_from_0_where_an_older_one_has_none():
    with RL_Batcher.make("CartPole-v1", n_envs=2, n_workers=0, n_timesteps=5, seed=0) as batcher:
        batcher.reset()
        rollout(batcher)
        state = batcher.state_dict()
        rollout(batcher)
        batcher.load_state_dict(state)
        batcher.reset()
        rollout(batcher)
        assert batcher.metrics()["rollout/steps"] == 2 * 5 * 2
        del state["steps"]
        batcher.load_state_dict(state)
        assert batcher.metrics()["rollout/steps"] == 0
        with pytest.raises(SpecError, match=r"^load_state_dict: state\['steps'\] must be a int, got Tensor$"):
            batcher.load_state_dict({**state, "steps": torch.tensor(3)})
    with pytest.raises(ClosedError, match="^metrics: the batcher is closed$"):
        batcher.metrics()
