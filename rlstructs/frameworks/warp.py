"""warp's dtypes, devices and arrays."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch
import warp as wp

from rlstructs.errors import SpecError
from rlstructs.frameworks.framework import copy_tensor
from rlstructs.frameworks.start_warp import WARP_DTYPES, WARP_MAX_AXES, start_warp

# The warp dtypes for Python's types; None is the default dtype.
PYTHON_DTYPES = {float: wp.float32, int: wp.int32, bool: wp.bool, None: wp.float32}
BFLOAT16 = getattr(wp, "bfloat16", "no bfloat16 in this version")


class Warp:
    """warp as a `Framework`."""

    library = "warp"
    has_live_arrays = True

    def dtype(self, dtype: Any) -> Any:
        if dtype is None or (isinstance(dtype, type) and dtype in PYTHON_DTYPES):
            return PYTHON_DTYPES[dtype]
        if _name_of(dtype) == "bfloat16":
            if isinstance(BFLOAT16, str):
                raise SpecError(
                    "dtype bfloat16 is not supported: this version of warp lacks it, 1.13 and later have it"
                )
            return BFLOAT16
        for convert in (_check_scalar, _from_numpy):
            with contextlib.suppress(TypeError, KeyError):
                return convert(dtype)
        raise SpecError(f"dtype must be one of the scalar types of warp or numpy ({WARP_DTYPES}), got {dtype!r}")

    def host_dtype(self, dtype: Any) -> np.dtype | None:
        return None if dtype is BFLOAT16 else np.dtype(wp.dtype_to_numpy(dtype))

    def dtype_from_name(self, name: str) -> Any:
        return self.dtype(BFLOAT16 if name == "bfloat16" else np.dtype(name))

    def dtype_name(self, dtype: Any) -> str:
        return "bfloat16" if dtype is BFLOAT16 else np.dtype(wp.dtype_to_numpy(dtype)).name

    def device(self, device: Any) -> Any:
        start_warp()
        try:
            return wp.get_device(device)
        except (ValueError, RuntimeError, TypeError) as error:
            raise SpecError(f"device: warp has no {device!r}: {error}") from error

    def device_name(self, device: Any) -> str:
        return str(device.alias)

    def device_of_rows(self, device: Any) -> torch.device | None:
        on_gpu = device.is_cuda and torch.cuda.is_available()
        return torch.device("cuda", device.ordinal) if on_gpu else None

    def to_torch(self, value: Any) -> Any:
        if not (isinstance(value, wp.array) and value.device.is_cuda and torch.cuda.is_available()):
            return value
        torch_stream = wp.stream_from_torch(torch.cuda.current_stream(value.device.ordinal))
        torch_stream.wait_stream(wp.get_stream(value.device))  # warp may still write to it
        return copy_tensor(wp.to_torch(value, requires_grad=False))

    def hand_over(self, arrays: list[Any], dtypes: list[Any], device: Any) -> list[wp.array]:
        # Each warp array keeps alive the array or tensor whose memory it uses.
        if arrays and isinstance(arrays[0], torch.Tensor):
            return [self.live_array(tensor, dtype, "a batch") for tensor, dtype in zip(arrays, dtypes, strict=True)]
        host = [self.live_array(array, dtype, "a batch") for array, dtype in zip(arrays, dtypes, strict=True)]
        return host if device.is_cpu else [array.to(device) for array in host]

    def live_array(self, array: Any, dtype: Any, name: str, shared: tuple[Any, int] | None = None) -> wp.array:
        if array.ndim > WARP_MAX_AXES:
            raise SpecError(f"{name} has {array.ndim} axes, warp arrays have at most {WARP_MAX_AXES}")
        if isinstance(array, torch.Tensor):
            return _from_tensor(array, dtype)
        if dtype is BFLOAT16:
            array = array.view(np.uint16)
        return wp.array(array, dtype=dtype, copy=False, device="cpu")

    def as_indexes(self, rows: np.ndarray) -> np.ndarray:
        return rows

    def draw_seed(self) -> int:
        return int(np.random.randint(2**63 - 1, dtype=np.int64))


def _name_of(dtype: Any) -> str:
    """The name of a dtype of any library."""
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", getattr(dtype, "__name__", dtype))
    return str(name).removeprefix("torch.")


def _check_scalar(dtype: Any) -> Any:
    wp.dtype_to_numpy(dtype)  # raises unless it is one of warp's
    return dtype


def _from_numpy(dtype: Any) -> Any:
    return wp.dtype_from_numpy(np.dtype(dtype))


def _from_tensor(tensor: torch.Tensor, dtype: Any) -> wp.array:
    """Makes a warp array over the memory of a tensor."""
    if tensor.device.type == "cuda":
        stream = wp.get_stream(wp.device_from_torch(tensor.device))
        stream.wait_stream(wp.stream_from_torch(torch.cuda.current_stream(tensor.device)))  # as torch may still write
        tensor.record_stream(wp.stream_to_torch(stream))  # otherwise torch could reuse its memory too early
    return wp.from_torch(tensor.view(torch.bfloat16) if dtype is BFLOAT16 else tensor, dtype=dtype)
