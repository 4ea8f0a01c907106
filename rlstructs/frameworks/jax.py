"""jax's dtypes, devices and arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from rlstructs.errors import SpecError
from rlstructs.frameworks.framework import copy_tensor

try:
    import jax
except ImportError as error:
    raise ImportError("jax is needed for its memories: pip install jax") from error


# Arguments of a compiled function reach a device several times faster than through `device_put`. Compiling it for new
# shapes takes milliseconds, which pays for shapes that come often.
_pass_through = jax.jit(lambda *arrays: arrays)
# Uses of the same shapes and dtypes before a function is compiled for them, and how many such kinds are counted.
OFTEN, MOST_KINDS = 3, 64


class Jax:
    """jax as a `Framework`."""

    library = "jax"
    has_live_arrays = False

    def __init__(self) -> None:
        self._seen: dict[Any, int] = {}

    def dtype(self, dtype: Any) -> np.dtype:
        try:
            named = np.dtype(np.float32 if dtype is None or dtype is float else dtype)
        except TypeError as error:
            raise SpecError(f"dtype must be one of jax's or numpy's, got {dtype!r}") from error
        canonical: np.dtype = np.dtype(jax.dtypes.canonicalize_dtype(named))  # 64 bits only where jax has them
        return canonical

    def host_dtype(self, dtype: np.dtype) -> np.dtype | None:
        return None if dtype.name == "bfloat16" else dtype

    def dtype_from_name(self, name: str) -> np.dtype:
        return self.dtype(jax.numpy.dtype(name))

    def dtype_name(self, dtype: np.dtype) -> str:
        return dtype.name

    def device(self, device: Any) -> Any:
        if device is None:
            return jax.devices()[0]
        if isinstance(device, str):
            kind, _, number = device.partition(":")
            try:
                return jax.devices({"cuda": "gpu"}.get(kind, kind))[int(number or 0)]
            except (RuntimeError, ValueError, IndexError) as error:
                raise SpecError(f"device: jax has no {device!r}: {error}") from error
        if not isinstance(device, jax.Device):
            raise TypeError(f"device must be one of jax's or its name, got {device!r}")
        return device

    def device_name(self, device: Any) -> str:
        return f"{device.platform}:{device.id}"

    def device_of_rows(self, device: Any) -> torch.device | None:
        on_gpu = device.platform == "gpu" and torch.cuda.is_available()
        return torch.device("cuda", device.local_hardware_id) if on_gpu else None

    def to_torch(self, value: Any) -> Any:
        if not (isinstance(value, jax.Array) and torch.cuda.is_available()):
            return value
        devices = value.devices()
        on_one_gpu = len(devices) == 1 and all(device.platform == "gpu" for device in devices)
        return copy_tensor(from_dlpack(value)) if on_one_gpu else value

    def hand_over(self, arrays: list[Any], dtypes: list[np.dtype], device: Any) -> list[jax.Array]:
        if arrays and isinstance(arrays[0], torch.Tensor):
            return [_from_tensor(tensor, dtype) for tensor, dtype in zip(arrays, dtypes, strict=True)]
        named = [a if a.dtype == dtype else a.view(dtype) for a, dtype in zip(arrays, dtypes, strict=True)]
        kind = (*[a.shape for a in named], *dtypes)
        times = self._seen[kind] = self._seen.get(kind, 0) + 1
        is_default = device == (jax.config.jax_default_device or jax.devices()[0])
        put: list[jax.Array]
        if times > OFTEN and named and is_default:
            put = list(_pass_through(*named))
            return put
        if len(self._seen) > MOST_KINDS:
            self._seen.clear()
        # One call for all arrays, because each call costs time. None for the default device, so that arrays are not
        # committed to it, as those of `_pass_through` are not: jax would compile functions anew for committed ones.
        put = jax.device_put(named, None if is_default else device)
        return put

    def live_array(self, array: Any, dtype: np.dtype, name: str, shared: tuple[Any, int] | None = None) -> jax.Array:
        if isinstance(array, torch.Tensor):
            return _from_tensor(array.clone(), dtype)
        # A copy, because jax aliases host memory, and its arrays must not change.
        [copy] = self.hand_over([np.array(array)], [dtype], jax.config.jax_default_device or jax.devices()[0])
        return copy

    def as_indexes(self, rows: np.ndarray) -> np.ndarray:
        return rows

    def draw_seed(self) -> int:
        return int(np.random.randint(2**63 - 1, dtype=np.int64))


def _from_tensor(tensor: torch.Tensor, dtype: np.dtype) -> jax.Array:
    """Makes a jax array over the memory of a tensor that nobody else holds."""
    named: jax.Array = jax.dlpack.from_dlpack(tensor.contiguous().view(getattr(torch, dtype.name)))
    return named
