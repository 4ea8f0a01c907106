"""CleanRL's scripts give the same transitions and weights over our vector environment and buffer as over theirs."""

from __future__ import annotations

import inspect
from functools import partial

import cleanrl
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv
from stable_baselines3.common import buffers

from rlstructs import SharedVectorEnv
from rlstructs.integrations import sb3


@pytest.mark.parametrize("script", [cleanrl.ppo, cleanrl.dqn, cleanrl.sac], ids=lambda script: script.__name__)
def test_a_training_is_the_same(script):
    def train(vector_env, replay_buffer):
        has_buffer = "replay_buffer" in inspect.signature(script).parameters
        return script(vector_env, replay_buffer) if has_buffer else script(vector_env)

    wanted = train(SyncVectorEnv, buffers.ReplayBuffer)
    found = train(partial(SharedVectorEnv, n_workers=2 if script is not cleanrl.dqn else 1), sb3.ReplayBuffer)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype and np.array_equal(one, other)
