"""torch's dtypes, devices and tensors.

Some dtypes torch cannot pickle. Their carriers are dtypes that hold their bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlstructs.errors import SpecError

SUPPORTED = "bool, integers of 8 to 64 bits, floats of 8 to 64 bits and complex numbers"


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, without `torch.`."""
    return str(dtype).removeprefix("torch.")


def _existing(*names: str) -> list[torch.dtype]:
    """The dtypes with these names that the installed torch has."""
    found = (getattr(torch, name, None) for name in names)
    return [dtype for dtype in found if isinstance(dtype, torch.dtype)]


# Floats of one byte.
FLOAT8 = _existing("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
QUANTISED = frozenset(_existing("qint8", "quint8", "qint32", "quint4x2", "quint2x4"))
# Dtypes that torch defines without supporting all of copying, comparing and indexing.
UNSUPPORTED = QUANTISED | frozenset(
    _existing(
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
        "bits8",
        "bits16",
        "bits1x8",
        "bits2x4",
        "bits4x2",
        "float4_e2m1fn_x2",
    )
)
# Unsigned dtypes, which torch cannot write to by index -> signed dtypes of the same size.
SIGNED = dict(zip(_existing("uint16", "uint32", "uint64"), (torch.int16, torch.int32, torch.int64), strict=True))
# Dtypes that torch cannot pickle -> dtypes of the same size that hold their bits.
CARRIERS = {**SIGNED, **dict.fromkeys(FLOAT8, torch.uint8), torch.complex32: torch.int32}


def dtype_error(owner: str, key: str, dtype: torch.dtype) -> SpecError:
    """The error for a tensor of an `UNSUPPORTED` dtype."""
    why = "which is quantised; dequantize it first"
    if dtype not in QUANTISED:
        why = "whose values torch cannot copy; convert it first"
    return SpecError(f"{owner}: {key!r} is {dtype_name(dtype)}, {why}. Supported are {SUPPORTED}")


def to_picklable(tensor: torch.Tensor) -> Any:
    """Returns a tensor, or its bits and dtype if torch cannot pickle it."""
    carrier = CARRIERS.get(tensor.dtype)
    return tensor if carrier is None else (tensor.view(carrier), tensor.dtype)


def from_picklable(leaf: Any) -> torch.Tensor:
    """Returns the tensor that `to_picklable` was given."""
    if not isinstance(leaf, tuple):
        tensor: torch.Tensor = leaf
        return tensor
    numbers, dtype = leaf
    return numbers.view(dtype)  # type: ignore[no-any-return]


def as_device(device: torch.device | str) -> torch.device:
    """Returns a device with its index, as tensors have it.

    "cuda" becomes the current cuda device.

    Raises:
        TypeError: it is neither a device nor a name.
        RuntimeError: torch has no device of this name.
    """
    try:
        device = torch.device(device)
    except TypeError as error:
        raise TypeError(f"a device must be a torch.device or its name, got {device!r}") from error
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def find_device(device: torch.device | str) -> torch.device:
    """Converts to a device; raises RuntimeError for a CUDA device that this machine lacks."""
    found = as_device(device)
    if found.type == "cuda" and (found.index or 0) >= (n_devices := torch.cuda.device_count()):
        raise RuntimeError(f"device: torch {torch.__version__} finds {n_devices} CUDA devices, got {str(device)!r}")
    return found


class Torch:
    """torch as a `Framework`."""

    library = "torch"
    has_live_arrays = True

    def dtype(self, dtype: Any) -> torch.dtype:
        if dtype is None or dtype is float:
            return torch.get_default_dtype()
        if isinstance(dtype, torch.dtype):
            return dtype
        if dtype == "bfloat16":
            return torch.bfloat16
        try:
            return torch.from_numpy(np.empty(0, dtype)).dtype
        except TypeError as error:
            raise SpecError(f"dtype must be one of torch's, got {dtype!r}") from error

    def host_dtype(self, dtype: torch.dtype) -> np.dtype | None:
        if dtype in UNSUPPORTED:
            raise SpecError(f"dtype {dtype} is not supported; supported are {SUPPORTED} except floats of 8 bits")
        try:
            return None if dtype is torch.bfloat16 else torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
        except TypeError as error:
            raise SpecError(f"dtype {dtype} is not supported: numpy has no such dtype") from error

    def dtype_from_name(self, name: str) -> torch.dtype:
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise SpecError(f"torch has no dtype {name!r}")
        return dtype

    def dtype_name(self, dtype: torch.dtype) -> str:
        return dtype_name(dtype)

    def device(self, device: Any) -> torch.device:
        if device is None:
            device = "cuda:0" if torch.cuda.is_available() else "cpu"
        try:
            return as_device(device)
        except RuntimeError as error:
            raise SpecError(f"device: torch has no {device!r}: {error}") from error

    def device_name(self, device: torch.device) -> str:
        return str(device)

    def device_of_rows(self, device: torch.device) -> torch.device | None:
        return device if device.type == "cuda" else None

    def to_torch(self, value: Any) -> Any:
        return value

    def hand_over(self, arrays: list[Any], dtypes: list[torch.dtype], device: torch.device) -> list[torch.Tensor]:
        if arrays and type(arrays[0]) is torch.Tensor:
            return [self.live_array(tensor, dtype, "") for tensor, dtype in zip(arrays, dtypes, strict=True)]
        tensors = [torch.from_numpy(array) for array in arrays]
        if torch.bfloat16 in dtypes:
            tensors = [t.view(d) if d is torch.bfloat16 else t for t, d in zip(tensors, dtypes, strict=True)]
        return tensors if device.type == "cpu" else [tensor.to(device) for tensor in tensors]

    def live_array(
        self, array: Any, dtype: torch.dtype, name: str, shared: tuple[Any, int] | None = None
    ) -> torch.Tensor:
        tensor = array if isinstance(array, torch.Tensor) else torch.from_numpy(array)
        tensor = tensor if tensor.dtype is dtype else tensor.view(dtype)
        if shared is None:
            return tensor
        # `is_shared`, and sent to processes without a copy.
        first = shared[1] // tensor.element_size()
        return torch.empty(0, dtype=dtype, device="cpu").set_(shared[0], first, tensor.shape, tensor.stride())

    def as_indexes(self, rows: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(rows)

    def draw_seed(self) -> int:
        return int(torch.randint(2**63 - 1, (), device="cpu"))
