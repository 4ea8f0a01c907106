"""The buffers of `rlstructs.replay` for tianshou's `Collector`.

For several environments it asks whether a buffer is an instance of its own classes. These are the last bases here, so
that every method is the one of `rlstructs.replay`.
"""

from __future__ import annotations

from tianshou.data import CachedReplayBuffer as TianshouCachedReplayBuffer
from tianshou.data import ReplayBufferManager

from rlstructs import replay
from rlstructs.workers.public_names import set_module


@set_module("rlstructs.integrations.tianshou")
class VectorReplayBuffer(replay.VectorReplayBuffer, ReplayBufferManager):  # type: ignore[misc]
    """`rlstructs.replay.VectorReplayBuffer`, which tianshou's `Collector` and algorithms take."""


@set_module("rlstructs.integrations.tianshou")
class PrioritizedVectorReplayBuffer(replay.PrioritizedVectorReplayBuffer, ReplayBufferManager):  # type: ignore[misc]
    """`rlstructs.replay.PrioritizedVectorReplayBuffer`, which tianshou's `Collector` and algorithms take."""


@set_module("rlstructs.integrations.tianshou")
class HERVectorReplayBuffer(replay.HERVectorReplayBuffer, ReplayBufferManager):  # type: ignore[misc]
    """`rlstructs.replay.HERVectorReplayBuffer`, which tianshou's `Collector` and algorithms take."""


@set_module("rlstructs.integrations.tianshou")
class CachedReplayBuffer(replay.CachedReplayBuffer, TianshouCachedReplayBuffer):  # type: ignore[misc]
    """`rlstructs.replay.CachedReplayBuffer`, which tianshou's `Collector` and algorithms take."""
