"""Replay buffers over one store, with the interfaces of rlberry, tianshou and torchrl.

    from rlstructs.replay import DictTensorReplayBuffer

    buffer = DictTensorReplayBuffer(batch_size=32)
    buffer.add_trajectories(trajectories)
    batch = buffer.sample()
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlstructs.replay.array_dict import ArrayDict, Batch
    from rlstructs.replay.buffers.buffer_samplers import RandomSampler, SamplerWithoutReplacement
    from rlstructs.replay.buffers.cached import CachedReplayBuffer
    from rlstructs.replay.buffers.chunks import ChunkBatch, ChunkReplayBuffer
    from rlstructs.replay.buffers.dict_tensor_buffer import (
        DictTensorPrioritizedReplayBuffer,
        DictTensorReplayBuffer,
        TensorDictPrioritizedReplayBuffer,
        TensorDictReplayBuffer,
    )
    from rlstructs.replay.buffers.episode_rows import MalformedBufferError
    from rlstructs.replay.buffers.hindsight import HERReplayBuffer, HERVectorReplayBuffer
    from rlstructs.replay.buffers.prioritized import PrioritizedReplayBuffer, PrioritizedVectorReplayBuffer
    from rlstructs.replay.buffers.prioritized_sampler import PrioritizedSampler
    from rlstructs.replay.buffers.replay_buffer import ReplayBuffer
    from rlstructs.replay.buffers.slice_samplers import (
        PrioritizedSliceSampler,
        SliceSampler,
        SliceSamplerWithoutReplacement,
    )
    from rlstructs.replay.buffers.storages import (
        LazyMemmapStorage,
        LazyTensorStorage,
        ListStorage,
        MemmapStorage,
        TensorStorage,
    )
    from rlstructs.replay.buffers.transforms import Compose, Transform
    from rlstructs.replay.buffers.vector import VectorReplayBuffer
    from rlstructs.replay.buffers.writers import (
        ImmutableDatasetWriter,
        ImmutableWriter,
        MaxValueWriter,
        RoundRobinWriter,
        TensorDictMaxValueWriter,
        TensorDictRoundRobinWriter,
    )

_EXPORTS = {
    "ArrayDict": "array_dict",
    "Batch": "array_dict",
    "CachedReplayBuffer": "buffers.cached",
    "ChunkBatch": "buffers.chunks",
    "ChunkReplayBuffer": "buffers.chunks",
    "Compose": "buffers.transforms",
    "DictTensorPrioritizedReplayBuffer": "buffers.dict_tensor_buffer",
    "DictTensorReplayBuffer": "buffers.dict_tensor_buffer",
    "HERReplayBuffer": "buffers.hindsight",
    "HERVectorReplayBuffer": "buffers.hindsight",
    "ImmutableDatasetWriter": "buffers.writers",
    "ImmutableWriter": "buffers.writers",
    "LazyMemmapStorage": "buffers.storages",
    "LazyTensorStorage": "buffers.storages",
    "ListStorage": "buffers.storages",
    "MalformedBufferError": "buffers.episode_rows",
    "MaxValueWriter": "buffers.writers",
    "MemmapStorage": "buffers.storages",
    "PrioritizedReplayBuffer": "buffers.prioritized",
    "PrioritizedSampler": "buffers.prioritized_sampler",
    "PrioritizedSliceSampler": "buffers.slice_samplers",
    "PrioritizedVectorReplayBuffer": "buffers.prioritized",
    "RandomSampler": "buffers.buffer_samplers",
    "ReplayBuffer": "buffers.replay_buffer",
    "RoundRobinWriter": "buffers.writers",
    "SamplerWithoutReplacement": "buffers.buffer_samplers",
    "SliceSampler": "buffers.slice_samplers",
    "SliceSamplerWithoutReplacement": "buffers.slice_samplers",
    "TensorDictMaxValueWriter": "buffers.writers",
    "TensorDictPrioritizedReplayBuffer": "buffers.dict_tensor_buffer",
    "TensorDictReplayBuffer": "buffers.dict_tensor_buffer",
    "TensorDictRoundRobinWriter": "buffers.writers",
    "TensorStorage": "buffers.storages",
    "Transform": "buffers.transforms",
    "VectorReplayBuffer": "buffers.vector",
}

__all__ = [
    "ArrayDict",
    "Batch",
    "CachedReplayBuffer",
    "ChunkBatch",
    "ChunkReplayBuffer",
    "Compose",
    "DictTensorPrioritizedReplayBuffer",
    "DictTensorReplayBuffer",
    "HERReplayBuffer",
    "HERVectorReplayBuffer",
    "ImmutableDatasetWriter",
    "ImmutableWriter",
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "ListStorage",
    "MalformedBufferError",
    "MaxValueWriter",
    "MemmapStorage",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "PrioritizedVectorReplayBuffer",
    "RandomSampler",
    "ReplayBuffer",
    "RoundRobinWriter",
    "SamplerWithoutReplacement",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorStorage",
    "Transform",
    "VectorReplayBuffer",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
