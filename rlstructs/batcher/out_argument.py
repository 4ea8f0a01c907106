"""Memory that the caller keeps for rollouts, in place of new memory for each."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rlstructs.errors import SpecError
from rlstructs.structures.arrays import TensorSpec
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
from rlstructs.structures.trajectories import Trajectories
from rlstructs.structures.tree import check_same_keys, show

Specs = Mapping[str, TensorSpec]


def check(out: Trajectories, info: Specs, steps: Specs, lead: tuple[int, int]) -> None:
    """Raises unless a rollout can be written to `out`.

    Args:
        out: what the caller gave.
        info, steps: what will be written to its parts: shapes without rows and timesteps, and dtypes.
        lead: how many rows and timesteps that has at most.

    Raises:
        TypeError: it is no `Trajectories`.
        SpecError: its keys, dtypes or shapes are others, it is smaller, not on the CPU, or cannot be written to.
    """
    if not isinstance(out, Trajectories):
        raise TypeError(f"get: out must be a Trajectories, got {type(out).__name__}")
    _check("lengths", out.lengths, ((), torch.int64), lead[:1])
    places: dict[int, str] = {}
    for part, specs, axes in ((out.info, info, lead[:1]), (out.trajectories, steps, lead)):
        check_same_keys("get: out", specs, part.keys())
        for key, spec in specs.items():
            _check(key, part[key], spec, axes)
            other = places.setdefault(part[key].data_ptr(), key) if part[key].numel() else key
            if other != key:
                raise SpecError(f"get: out {key!r} and {other!r} share memory")


def _check(key: str, tensor: torch.Tensor, spec: TensorSpec, lead: tuple[int, ...]) -> None:
    (shape, dtype), n = spec, len(lead)
    is_large = tensor.ndim == n + len(shape) and all(tensor.shape[axis] >= lead[axis] for axis in range(n))
    if not is_large or tuple(tensor.shape[n:]) != tuple(shape) or tensor.dtype != dtype or tensor.device.type != "cpu":
        needed = f"{(*lead, *shape)} {str(dtype).removeprefix('torch.')}"
        raise SpecError(f"get: out {key!r} is {show(tensor)} on {tensor.device}, needed is {needed} or more on cpu")
    if tensor.requires_grad or tensor.is_inference():
        raise SpecError(f"get: out {key!r} must neither require a gradient nor be made in inference mode")
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    if tensor.numel() and any(stride == 0 and size > 1 for stride, size in steps):
        raise SpecError(f"get: out {key!r} is expanded: several of its elements share memory")


def cut(out: Trajectories, n_rows: int, n_timesteps: int) -> Trajectories:
    """The first rows and timesteps, views."""
    steps = {key: tensor[:n_rows, :n_timesteps] for key, tensor in out.trajectories.items()}
    return Trajectories(
        DictTensor.trusted({key: tensor[:n_rows] for key, tensor in out.info.items()}),
        TemporalDictTensor.trusted(steps, out.lengths[:n_rows]),
    )
