"""Between torch tensors and numpy arrays that share their memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rlstructs.errors import SpecError
from rlstructs.structures.dict_tensor import DictTensor


def type_name(dtype: torch.dtype) -> str:
    """A dtype as it is written in messages."""
    return str(dtype).removeprefix("torch.")


def raw_of(tensor: torch.Tensor) -> np.ndarray:
    """The same memory as a numpy array: torch cannot index every dtype, and numpy has not every dtype."""
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.int16)
    return as_array(tensor)


def tensor_of(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """The same memory as a tensor of the dtype of which `raw_of` gave the array."""
    found = torch.from_numpy(array)
    return found if found.dtype is dtype else found.view(dtype)


def tensors_of(arrays: Mapping[str, np.ndarray], specs: Mapping[str, TensorSpec]) -> dict[str, torch.Tensor]:
    """The same memory as tensors of the dtypes of their specs, by name; see `tensor_of`."""
    return {name: tensor_of(array, specs[name][1]) for name, array in arrays.items()}


def put(column: torch.Tensor, index: Any, values: torch.Tensor) -> None:
    """`column[index] = values`."""
    raw_of(column)[index] = raw_of(values)


Spec = tuple[tuple[int, ...], np.dtype[Any]]  # row shape, dtype
TensorSpec = tuple[tuple[int, ...], torch.dtype]


def where_true(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row and column, int64 (K,), of what is True in a mask (B, T), row by row: `numpy.nonzero`.

    That takes twelve times as long for two axes as for one, once there are a hundred thousand entries.
    """
    flat = np.flatnonzero(mask)
    rows = flat // max(1, mask.shape[1])
    return rows, flat - rows * mask.shape[1]


def put_where(array: np.ndarray, rows: np.ndarray, times: np.ndarray, values: np.ndarray) -> None:
    """`array[rows, times] = values`, for an array (B, T, ...) and values (K, ...)."""
    if array.flags.c_contiguous:  # one index takes numpy a third of the time that two take
        array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])[rows * array.shape[1] + times] = values
    else:
        array[rows, times] = values


def specs_of(tensors: DictTensor) -> dict[str, TensorSpec]:
    """Row shape and dtype of each key."""
    return {key: (tuple(tensor.shape[1:]), tensor.dtype) for key, tensor in tensors.items()}


def numpy_specs(specs: Mapping[str, TensorSpec]) -> dict[str, Spec]:
    """The same with numpy's dtypes.

    Raises:
        SpecError: numpy has not such a dtype.
    """
    converted = {}
    for key, (shape, dtype) in specs.items():
        try:
            converted[key] = shape, torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
        except TypeError as error:
            raise SpecError(f"observation: {key!r} is {dtype}, which numpy has not") from error
    return converted


def raw_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """numpy's dtype for such a tensor's memory: that of int16 for bfloat16, which numpy has not.

    Raises:
        TypeError: numpy has none.
    """
    return torch.empty(0, dtype=torch.int16 if dtype is torch.bfloat16 else dtype, device="cpu").numpy().dtype


def check_dtype(what: str, key: str, dtype: torch.dtype) -> None:
    """Raises SpecError unless values of this dtype can lie in shared memory."""
    try:
        raw_dtype(dtype)
    except TypeError as error:
        raise SpecError(f"{what}: {key!r} is {dtype}, which cannot be recorded; convert it first") from error


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """A tensor as an array, a view where it is on the CPU."""
    try:
        return tensor.numpy()
    except (RuntimeError, TypeError):  # it has a gradient, or is elsewhere: rarer, and each call has its price
        return tensor.detach().cpu().resolve_conj().resolve_neg().numpy()
