"""CleanRL's scripts give the same transitions and weights over our vector environment and buffer as over theirs."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from cleanrl_scripts import dqn, ppo, sac
from gymnasium.vector import SyncVectorEnv
from stable_baselines3.common import buffers

from rlstructs import SharedVectorEnv
from rlstructs.integrations import sb3

pytestmark = pytest.mark.usefixtures("small_training")


def assert_same(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype and np.array_equal(one, other)


@pytest.mark.parametrize("script", [dqn, sac], ids=["dqn", "sac"])
def test_a_training_from_replay_has_the_same_transitions_and_weights(script):
    assert_same(script(SharedVectorEnv, sb3.ReplayBuffer), script(SyncVectorEnv, buffers.ReplayBuffer))


def test_ppo_has_the_same_transitions_and_weights():
    assert_same(ppo(partial(SharedVectorEnv, n_workers=2)), ppo(SyncVectorEnv))
