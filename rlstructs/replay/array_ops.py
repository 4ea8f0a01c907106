"""What `ArrayDict` does with each of its arrays, of whichever library they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def cat(values: list[Any]) -> Any:
    """Arrays of one library, one behind another."""
    if isinstance(values[0], torch.Tensor):
        return torch.cat(values)
    return _library(values[0]).concatenate(values)


def stack(values: list[Any], axis: int) -> Any:
    """Arrays of one library along a new axis."""
    if isinstance(values[0], torch.Tensor):
        return torch.stack(values, axis)
    return _library(values[0]).stack(values, axis)


def _library(value: Any) -> Any:
    """numpy, or what has its functions for such an array."""
    if type(value).__module__.partition(".")[0] in ("jax", "jaxlib"):
        import jax.numpy

        return jax.numpy
    return np


def tensor(value: Any, dtype: torch.dtype | None, device: torch.device | str | int) -> Any:
    """Numbers as a tensor, which shares numpy's memory where that may be written; anything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype)
    host = np.asarray(value)
    host = host if host.flags.writeable else host.copy()  # jax's, above all
    return torch.as_tensor(host, dtype=dtype, device=device) if host.dtype.kind in "biufc" else value


def array(value: Any) -> Any:
    """A tensor as numpy has it; anything else as it is."""
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value


def array_of(values: Sequence[Any]) -> Any:
    """A list as an array, or as a tensor if it is of tensors; as an array of objects if those have other shapes."""
    try:
        if values and all(isinstance(value, torch.Tensor) for value in values):
            return torch.stack(list(values))
        return np.asarray(values)
    except (ValueError, RuntimeError):
        found = np.empty(len(values), object)
        found[:] = values
        return found


def nulls(value: Any) -> np.ndarray:
    """Where it is NaN or None, bools of its shape."""
    if isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16:
        value = value.float()
    host = np.asarray(array(value))
    if host.dtype == object:
        found: np.ndarray = np.frompyfunc(lambda each: each is None or each != each, 1, 1)(host).astype(bool)
        return found
    return np.isnan(host) if host.dtype.kind in "fc" else np.zeros(host.shape, bool)
