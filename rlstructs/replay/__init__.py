"""Replay buffers over one store, with the interfaces of rlberry, tianshou and torchrl.

from rlstructs.replay import DictTensorReplayBuffer

buffer = DictTensorReplayBuffer(batch_size=32)
buffer.add_trajectories(trajectories)
batch = buffer.sample()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlstructs.workers.public_names import export_lazily

if TYPE_CHECKING:
    from rlstructs.replay.leave.array_dict import ArrayDict, Batch
    from rlstructs.replay.rlberry.chunks import ChunkBatch, ChunkReplayBuffer
    from rlstructs.replay.rows.spec import Compression
    from rlstructs.replay.tianshou.cached import CachedReplayBuffer
    from rlstructs.replay.tianshou.hindsight import HERReplayBuffer, HERVectorReplayBuffer
    from rlstructs.replay.tianshou.intake import MalformedBufferError
    from rlstructs.replay.tianshou.prioritized import PrioritizedReplayBuffer, PrioritizedVectorReplayBuffer
    from rlstructs.replay.tianshou.replay_buffer import ReplayBuffer
    from rlstructs.replay.tianshou.vector import VectorReplayBuffer
    from rlstructs.replay.torchrl.buffer import (
        DictTensorPrioritizedReplayBuffer,
        DictTensorReplayBuffer,
        TensorDictPrioritizedReplayBuffer,
        TensorDictReplayBuffer,
    )
    from rlstructs.replay.torchrl.prioritized_sampler import PrioritizedSampler
    from rlstructs.replay.torchrl.samplers import RandomSampler, SamplerWithoutReplacement
    from rlstructs.replay.torchrl.slice_samplers import (
        PrioritizedSliceSampler,
        SliceSampler,
        SliceSamplerWithoutReplacement,
    )
    from rlstructs.replay.torchrl.storages import (
        CompressedListStorage,
        LazyMemmapStorage,
        LazyTensorStorage,
        ListStorage,
        MemmapStorage,
        TensorStorage,
    )
    from rlstructs.replay.torchrl.transforms import Compose, Transform
    from rlstructs.replay.torchrl.writers import (
        ImmutableDatasetWriter,
        ImmutableWriter,
        MaxValueWriter,
        RoundRobinWriter,
        TensorDictMaxValueWriter,
        TensorDictRoundRobinWriter,
    )

_EXPORTS = {
    "ArrayDict": "leave.array_dict",
    "Batch": "leave.array_dict",
    "CachedReplayBuffer": "tianshou.cached",
    "ChunkBatch": "rlberry.chunks",
    "ChunkReplayBuffer": "rlberry.chunks",
    "CompressedListStorage": "torchrl.storages",
    "Compression": "rows.spec",
    "Compose": "torchrl.transforms",
    "DictTensorPrioritizedReplayBuffer": "torchrl.buffer",
    "DictTensorReplayBuffer": "torchrl.buffer",
    "HERReplayBuffer": "tianshou.hindsight",
    "HERVectorReplayBuffer": "tianshou.hindsight",
    "ImmutableDatasetWriter": "torchrl.writers",
    "ImmutableWriter": "torchrl.writers",
    "LazyMemmapStorage": "torchrl.storages",
    "LazyTensorStorage": "torchrl.storages",
    "ListStorage": "torchrl.storages",
    "MalformedBufferError": "tianshou.intake",
    "MaxValueWriter": "torchrl.writers",
    "MemmapStorage": "torchrl.storages",
    "PrioritizedReplayBuffer": "tianshou.prioritized",
    "PrioritizedSampler": "torchrl.prioritized_sampler",
    "PrioritizedSliceSampler": "torchrl.slice_samplers",
    "PrioritizedVectorReplayBuffer": "tianshou.prioritized",
    "RandomSampler": "torchrl.samplers",
    "ReplayBuffer": "tianshou.replay_buffer",
    "RoundRobinWriter": "torchrl.writers",
    "SamplerWithoutReplacement": "torchrl.samplers",
    "SliceSampler": "torchrl.slice_samplers",
    "SliceSamplerWithoutReplacement": "torchrl.slice_samplers",
    "TensorDictMaxValueWriter": "torchrl.writers",
    "TensorDictPrioritizedReplayBuffer": "torchrl.buffer",
    "TensorDictReplayBuffer": "torchrl.buffer",
    "TensorDictRoundRobinWriter": "torchrl.writers",
    "TensorStorage": "torchrl.storages",
    "Transform": "torchrl.transforms",
    "VectorReplayBuffer": "tianshou.vector",
}

__all__ = [
    "ArrayDict",
    "Batch",
    "CachedReplayBuffer",
    "ChunkBatch",
    "ChunkReplayBuffer",
    "Compose",
    "CompressedListStorage",
    "Compression",
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

if not TYPE_CHECKING:
    __getattr__, __dir__ = export_lazily(__name__, _EXPORTS)
