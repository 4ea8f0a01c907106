"""Converts actions to the array library of a vector environment: numpy, torch or jax."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch

from rlstructs.envs.array_values import native_dtype
from rlstructs.structures.interop import fit_to_jax

# Takes the key of an action and its array, which nobody else uses; returns what an environment takes.
Conversion = Callable[[str, np.ndarray], Any]


def keep_numpy(key: str, array: np.ndarray) -> np.ndarray:
    """Returns the array itself."""
    return array


def choose_conversion(observations: Iterable[Any]) -> Conversion:
    """Chooses the conversion to the library and device of these observations."""
    for found in observations:
        if isinstance(found, torch.Tensor):
            return partial(_to_tensor, found.device)
        if is_jax_array(found):
            devices = list(found.devices())
            return partial(_to_jax, devices[0] if len(devices) == 1 else None)
    return keep_numpy


def is_jax_array(value: Any) -> bool:
    """Whether a value is a jax array; does not import jax."""
    return isinstance(value, getattr(sys.modules.get("jax"), "Array", ()))


def _to_tensor(device: torch.device, key: str, array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.astype(native_dtype(array.dtype), copy=False)).to(device)


def _to_jax(device: Any, key: str, array: np.ndarray) -> Any:
    import jax

    fitting = fit_to_jax(key, array.astype(native_dtype(array.dtype), copy=False))
    return jax.device_put(jax.numpy.array(fitting), device)
