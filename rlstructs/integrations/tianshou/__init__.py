"""tianshou: its `BaseVectorEnv` over worker processes of several environments each, and its replay buffers.

from tianshou.data import Collector
from rlstructs.integrations.tianshou import VectorReplayBuffer, WorkerVectorEnv

envs = WorkerVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 16, n_workers=4)
collector = Collector(policy, envs, VectorReplayBuffer(20_000, 16))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlstructs.workers.public_names import export_lazily

if TYPE_CHECKING:
    from rlstructs.integrations.tianshou.buffers import (
        CachedReplayBuffer,
        HERVectorReplayBuffer,
        PrioritizedVectorReplayBuffer,
        VectorReplayBuffer,
    )
    from rlstructs.integrations.tianshou.vector_env import WorkerVectorEnv

_EXPORTS = {
    "CachedReplayBuffer": "buffers",
    "HERVectorReplayBuffer": "buffers",
    "PrioritizedVectorReplayBuffer": "buffers",
    "VectorReplayBuffer": "buffers",
    "WorkerVectorEnv": "vector_env",
}

__all__ = [
    "CachedReplayBuffer",
    "HERVectorReplayBuffer",
    "PrioritizedVectorReplayBuffer",
    "VectorReplayBuffer",
    "WorkerVectorEnv",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = export_lazily(__name__, _EXPORTS)
