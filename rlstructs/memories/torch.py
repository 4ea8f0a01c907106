"""Replay memories for torch, with the interface of skrl's.

    memory = RandomMemory(memory_size=1000, num_envs=8)
    memory.create_tensor("observations", size=4)
    memory.add_samples(observations=torch.zeros(8, 4))
    [[observations]] = memory.sample(["observations"], batch_size=32)
"""

from __future__ import annotations

from rlstructs.frameworks.torch import Torch
from rlstructs.memories import base, sampling

__all__ = ["Memory", "PrioritizedMemory", "RandomMemory"]


class Memory(base.Memory):
    __doc__ = base.Memory.__doc__

    framework = Torch()


class RandomMemory(sampling.RandomMemory, Memory):
    __doc__ = sampling.RandomMemory.__doc__


class PrioritizedMemory(sampling.PrioritizedMemory, Memory):
    __doc__ = sampling.PrioritizedMemory.__doc__
