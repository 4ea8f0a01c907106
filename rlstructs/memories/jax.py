"""Replay memories for jax, with the interface of skrl's. The rows lie in host memory; batches are jax arrays.

    memory = RandomMemory(memory_size=1000, num_envs=8)
    memory.create_tensor("observations", size=4)
    memory.add_samples(observations=jnp.zeros((8, 4)))
    [[observations]] = memory.sample(["observations"], batch_size=32)
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from rlstructs.errors import SpecError
from rlstructs.memories import base, sampling

__all__ = ["Memory", "PrioritizedMemory", "RandomMemory"]


class Jax:
    """jax's dtypes and arrays."""

    def dtype(self, dtype: Any) -> np.dtype:
        try:
            named = np.dtype(np.float32 if dtype is None or dtype is float else dtype)
        except TypeError as error:
            raise SpecError(f"dtype must be one of jax's or numpy's, got {dtype!r}") from error
        canonical: np.dtype = np.dtype(jax.dtypes.canonicalize_dtype(named))  # 64 bits only where jax has them
        return canonical

    def host_dtype(self, dtype: np.dtype) -> np.dtype | None:
        return None if dtype.name == "bfloat16" else dtype

    def named(self, name: str) -> np.dtype:
        return self.dtype(jax.numpy.dtype(name))

    def name_of(self, dtype: np.dtype) -> str:
        return dtype.name

    def device(self, device: Any) -> Any:
        if device is None:
            return jax.devices()[0]
        if isinstance(device, str):
            kind, _, number = device.partition(":")
            return jax.devices({"cuda": "gpu"}.get(kind, kind))[int(number or 0)]
        return device

    def hand_over(self, array: np.ndarray, dtype: np.dtype, device: Any) -> jax.Array:
        return jax.device_put(array if array.dtype == dtype else array.view(dtype), device)

    def live(self, array: np.ndarray, dtype: np.dtype, name: str) -> jax.Array:
        # An own copy: jax takes host memory as it is, and its arrays must not change.
        return jax.device_put(np.array(array).view(dtype))

    def indexes(self, rows: np.ndarray) -> np.ndarray:
        return rows

    def new_seed(self) -> int:
        return int(np.random.randint(2**63 - 1, dtype=np.int64))


class Memory(base.Memory):
    __doc__ = base.Memory.__doc__

    framework = Jax()


class RandomMemory(sampling.RandomMemory, Memory):
    __doc__ = sampling.RandomMemory.__doc__


class PrioritizedMemory(sampling.PrioritizedMemory, Memory):
    __doc__ = sampling.PrioritizedMemory.__doc__
