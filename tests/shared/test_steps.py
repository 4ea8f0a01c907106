"""Slots hold the same, whether a rollout writes to them or first beside them; steps that were none are left out."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch
from helpers import Count, Counting
from hypothesis import given
from hypothesis import strategies as st

from rlstructs import DictTensor, GymEnv, GymEnvInf, RL_Batcher
from rlstructs.shared import slots
from rlstructs.shared.layout import Layout, Rows
from rlstructs.shared.slots import Slots
from rlstructs.structures.arrays import find_true

NOTHING = DictTensor()
OBSERVATION = {"frame": ((2,), torch.float32), "reward": ((), torch.float32), "none": ((0,), torch.float32)}
ACTION = {"action": ((), torch.int64), "logits": ((3,), torch.bfloat16), "none": ((0,), torch.float32)}


def written(n, n_timesteps, idle, resets, is_staged):
    """What is read of slots in which row b at t shows 100 * t + b."""
    layout = Layout(n, n_timesteps, OBSERVATION, ACTION, {})
    found = Slots(layout, mmap.mmap(-1, layout.reserved_nbytes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots, "STAGED_ENVS", 1 if is_staged else 1000)
        steps = found.begin(None, NOTHING)
    assert steps.is_staged is is_staged

    def shown(t, rows):
        numbers = np.float32(100 * t) + rows.astype(np.float32)
        frames = np.stack([numbers, -numbers], 1)
        return Rows.of(layout.packing(), {"frame": frames, "reward": numbers, "none": np.zeros((len(rows), 0))})

    everyone = np.arange(n)
    steps.write_observation(0, None, shown(0, everyone))
    for t in range(n_timesteps):
        number = torch.arange(n) + 100 * t
        logits = number[:, None].expand(-1, 3).bfloat16()
        steps.write_action(t, None, DictTensor({"action": number, "logits": logits, "none": torch.zeros(n, 0)}))
        steps.write_observation(t + 1, None, shown(t + 1, everyone))
        if reset := sorted(row for at, row in resets if at == t):
            rows = np.array(reset)
            found.write_reset(t, rows, shown(t + 1, rows), shown(t + 1.5, rows))
    found.lengths[:] = n_timesteps
    by_time = [(t, np.array(sorted(row for at, row in idle if at == t))) for t in range(n_timesteps)]
    found.end([(t, rows) for t, rows in by_time if rows.size])
    return found.read(None, n_timesteps), found.lengths.tolist()


@pytest.mark.parametrize("shape", [(3, 5), (1, 7), (7, 1), (0, 4), (4, 0)])
def test_what_is_true_in_a_mask_is_what_numpy_says(shape):
    mask = np.random.default_rng(0).random((shape[0], shape[1] + 2)) < 0.4
    for each in (mask, mask[:, 1:-1], mask.T, np.zeros(shape, bool)):
        for found, expected in zip(find_true(each), np.nonzero(each), strict=True):
            assert found.dtype == expected.dtype and found.tolist() == expected.tolist()


@given(st.data(), st.integers(1, 4), st.integers(1, 7))
def test_steps_that_were_none_are_left_out_wherever_they_are_written(data, n, n_timesteps):
    places = st.tuples(st.integers(0, n_timesteps - 1), st.integers(0, n - 1))
    idle = data.draw(st.sets(places), "idle")
    resets = data.draw(st.sets(places), "resets") - idle - {(t - 1, row) for t, row in idle}
    for is_staged in (False, True):
        found, lengths = written(n, n_timesteps, idle, resets, is_staged)
        for row in range(n):
            kept = [t for t in range(n_timesteps) if (t, row) not in idle]
            assert lengths[row] == len(kept)
            seen = [100 * (t + 0.5 if (t - 1, row) in resets else t) + row for t in kept]
            padding = [0] * (n_timesteps - len(kept))
            assert found["observation/reward"][row].tolist() == seen + padding
            assert found["observation/frame"][row, :, 1].tolist() == [-x for x in seen] + padding
            assert found["_observation/reward"][row].tolist() == [100 * (t + 1) + row for t in kept] + padding
            assert found["action/action"][row].tolist() == [100 * t + row for t in kept] + padding
            logits = torch.tensor([100 * t + row for t in kept] + padding).bfloat16()
            assert found["action/logits"][row, :, 2].tolist() == logits.tolist()


@pytest.mark.parametrize("env_class", [GymEnv, GymEnvInf])
def test_a_rollout_is_the_same_beside_the_slots(env_class, monkeypatch):
    def create_env(seed):
        return env_class([Count(length) for length in (3, 9, 5)], seed)

    def rollouts():
        with RL_Batcher(4, Counting, {}, create_env, {}, 0, 3) as batcher:
            batcher.reset()
            found = []
            for _ in range(4):
                batcher.execute()
                trajectories, n_running = batcher.get()
                found.append(trajectories)
                if not n_running:
                    break
            return found

    wanted = rollouts()
    monkeypatch.setattr(slots, "STAGED_ENVS", 1)
    assert rollouts() == wanted
