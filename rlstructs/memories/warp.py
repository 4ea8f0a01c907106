"""Replay memories for warp, with the interface of skrl's; batches are warp arrays.

The rows lie in host memory, or, for a device that torch has too, on that, as torch's tensors: what a kernel
writes to a tensor of `get_tensor_by_name` is in samples after `wp.synchronize_device`.

    memory = RandomMemory(memory_size=1000, num_envs=8)
    memory.create_tensor("observations", size=4)
    memory.add_samples(observations=wp.zeros((8, 4)))
    [[observations]] = memory.sample(["observations"], batch_size=32)
"""

from __future__ import annotations

from rlstructs.frameworks.warp import Warp
from rlstructs.memories import memory, prioritized, sampling

__all__ = ["Memory", "PrioritizedMemory", "RandomMemory"]


class Memory(memory.Memory):
    __doc__ = memory.Memory.__doc__

    framework = Warp()


class RandomMemory(sampling.RandomMemory, Memory):
    __doc__ = sampling.RandomMemory.__doc__


class PrioritizedMemory(prioritized.PrioritizedMemory, Memory):
    __doc__ = prioritized.PrioritizedMemory.__doc__
