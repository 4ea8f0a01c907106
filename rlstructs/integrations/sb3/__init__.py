"""Stable-Baselines3: its `VecEnv` over worker processes of several environments each, and its replay buffers.

from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from rlstructs.integrations.sb3 import SharedVecEnv

model = PPO("MlpPolicy", make_vec_env("CartPole-v1", 16, vec_env_cls=SharedVecEnv))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlstructs.workers.public_names import export_lazily

if TYPE_CHECKING:
    from rlstructs.integrations.sb3.replay_buffer import (
        DictReplayBuffer,
        NStepReplayBuffer,
        PrioritizedDictReplayBuffer,
        PrioritizedReplayBuffer,
        PrioritizedReplayBufferSamples,
        ReplayBuffer,
    )
    from rlstructs.integrations.sb3.vec_env import SharedVecEnv

_EXPORTS = {
    "DictReplayBuffer": "replay_buffer",
    "NStepReplayBuffer": "replay_buffer",
    "PrioritizedDictReplayBuffer": "replay_buffer",
    "PrioritizedReplayBuffer": "replay_buffer",
    "PrioritizedReplayBufferSamples": "replay_buffer",
    "ReplayBuffer": "replay_buffer",
    "SharedVecEnv": "vec_env",
}

__all__ = [
    "DictReplayBuffer",
    "NStepReplayBuffer",
    "PrioritizedDictReplayBuffer",
    "PrioritizedReplayBuffer",
    "PrioritizedReplayBufferSamples",
    "ReplayBuffer",
    "SharedVecEnv",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = export_lazily(__name__, _EXPORTS)
