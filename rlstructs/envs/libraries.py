"""Which library's arrays a vector environment gives, and so takes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch

from rlstructs.envs.values import native
from rlstructs.structures.interop import fitting_jax

# Makes of the key of an action and an array, which is nobody else's, what an environment takes.
Wanted = Callable[[str, np.ndarray], Any]


def same(key: str, array: np.ndarray) -> np.ndarray:
    """The array itself."""
    return array


def wanted_by(observations: Iterable[Any]) -> Wanted:
    """What makes actions of the kind of these: tensors of torch or arrays of jax on their device, or numpy's arrays."""
    for found in observations:
        if isinstance(found, torch.Tensor):
            return partial(_tensor, found.device)
        if is_of_jax(found):
            devices = list(found.devices())
            return partial(_jax_array, devices[0] if len(devices) == 1 else None)
    return same


def is_of_jax(value: Any) -> bool:
    """Whether it is an array of jax, which is not imported for this."""
    return isinstance(value, getattr(sys.modules.get("jax"), "Array", ()))


def _tensor(device: torch.device, key: str, array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.astype(native(array.dtype), copy=False)).to(device)


def _jax_array(device: Any, key: str, array: np.ndarray) -> Any:
    import jax

    fitting = fitting_jax(key, array.astype(native(array.dtype), copy=False))
    return jax.device_put(jax.numpy.array(fitting), device)
