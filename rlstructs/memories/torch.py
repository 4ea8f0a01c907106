"""Replay memories for torch, with the interface of skrl's.

memory = RandomMemory(memory_size=1000, num_envs=8)
memory.create_tensor("observations", size=4)
memory.add_samples(observations=torch.zeros(8, 4))
[[observations]] = memory.sample(["observations"], batch_size=32)
"""

from __future__ import annotations

from rlstructs.frameworks.torch import Torch
from rlstructs.memories import memory, prioritized, sampling

__all__ = ["Memory", "PrioritizedMemory", "RandomMemory"]


class Memory(memory.Memory):
    __doc__ = memory.Memory.__doc__

    framework = Torch()


class RandomMemory(sampling.RandomMemory, Memory):
    __doc__ = sampling.RandomMemory.__doc__


class PrioritizedMemory(prioritized.PrioritizedMemory, Memory):
    __doc__ = prioritized.PrioritizedMemory.__doc__
