"""Converts between torch tensors and numpy arrays that share their memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import torch

from rlstructs.errors import SpecError
from rlstructs.frameworks.dtypes import dtype_name

Spec = tuple[tuple[int, ...], np.dtype[Any]]  # row shape, dtype
TensorSpec = tuple[tuple[int, ...], torch.dtype]


class _Named(Protocol):
    def items(self) -> Iterable[tuple[str, torch.Tensor]]: ...

    def __contains__(self, name: object, /) -> bool: ...

    def __getitem__(self, name: str, /) -> torch.Tensor: ...


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Returns a tensor as a numpy array, without a copy on the CPU.

    Raises:
        TypeError: numpy lacks its dtype or layout.
    """
    try:
        return tensor.numpy()
    except (RuntimeError, TypeError):  # it has a gradient or is not on the CPU: rare, and all these calls take time
        return tensor.detach().cpu().resolve_conj().resolve_neg().numpy()


def arrays_of(tensors: _Named, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Picks tensors by name, as arrays; see `as_array`.

    Other tensors of a lease are not made.
    """
    return {name: as_array(tensors[name]) for name in names if name in tensors}


def tensor_to_array(name: str, tensor: torch.Tensor) -> np.ndarray:
    """`as_array` with an error that names the tensor.

    Raises:
        SpecError: numpy lacks its dtype or layout.
    """
    try:
        return as_array(tensor)
    except TypeError as error:
        if tensor.layout is not torch.strided:
            what = str(tensor.layout).removeprefix("torch.")
            raise SpecError(f"{name!r} is {what}, which numpy lacks; use to_dense() first") from error
        dtype, wide = dtype_name(tensor.dtype), "complex64" if tensor.dtype.is_complex else "float32"
        raise SpecError(f"{name!r} is {dtype}, which numpy lacks; convert it to {wide} first") from error


def raw_of(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's memory as a numpy array; int16 for bfloat16, which numpy lacks.

    numpy can index arrays of every dtype, torch cannot.
    """
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.int16)
    return as_array(tensor)


def tensor_of(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `raw_of`: an array's memory as a tensor of this dtype."""
    found = torch.from_numpy(array)
    return found if found.dtype is dtype else found.view(dtype)


def tensors_of(arrays: Mapping[str, np.ndarray], specs: Mapping[str, TensorSpec]) -> dict[str, torch.Tensor]:
    """Converts arrays, by name, to tensors of the dtypes of their specs; see `tensor_of`."""
    return {name: tensor_of(array, specs[name][1]) for name, array in arrays.items()}


def put(column: torch.Tensor, index: Any, values: torch.Tensor) -> None:
    """`column[index] = values`, for every dtype."""
    raw_of(column)[index] = raw_of(values)


def find_true(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows and columns of the True entries of a mask (B, T).

    int64 (K,) each, row by row. Like `numpy.nonzero`, which takes twelve times as long for a mask of a hundred thousand
    entries.
    """
    flat = mask.reshape(-1).nonzero()[0]
    if not flat.size:
        return flat, flat
    rows = flat // max(1, mask.shape[1])
    return rows, flat - rows * mask.shape[1]


def put_at(
    arrays: Mapping[str, np.ndarray], rows: np.ndarray, times: np.ndarray, values: Mapping[str, np.ndarray]
) -> None:
    """Sets `arrays[key][rows, times] = values[key]` for every key of `values`.

    Arrays are (B, T, ...), values (K, ...).
    """
    for key, new in values.items():
        array = arrays[key]
        if array.flags.c_contiguous:  # numpy is three times as fast with one index as with two
            array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])[rows * array.shape[1] + times] = new
        else:
            array[rows, times] = new


def specs_of(tensors: _Named) -> dict[str, TensorSpec]:
    """Row shape and dtype of each key."""
    return {key: (tuple(tensor.shape[1:]), tensor.dtype) for key, tensor in tensors.items()}


def numpy_specs(specs: Mapping[str, TensorSpec]) -> dict[str, Spec]:
    """The specs with numpy's dtypes.

    Raises:
        SpecError: numpy lacks a dtype.
    """
    converted = {}
    for key, (shape, dtype) in specs.items():
        try:
            converted[key] = shape, torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
        except TypeError as error:
            raise SpecError(f"observation: {key!r} is {dtype}, which numpy lacks") from error
    return converted


def raw_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """The dtype of the array that `raw_of` gives for a tensor of this dtype.

    Raises:
        TypeError: numpy lacks it.
    """
    return torch.empty(0, dtype=torch.int16 if dtype is torch.bfloat16 else dtype, device="cpu").numpy().dtype


def check_dtype(what: str, key: str, dtype: torch.dtype) -> None:
    """Raises SpecError unless shared memory can hold values of this dtype."""
    try:
        raw_dtype(dtype)
    except TypeError as error:
        raise SpecError(f"{what}: {key!r} is {dtype}, which cannot be recorded; convert it first") from error
