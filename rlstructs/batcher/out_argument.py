"""The argument `out` of `get`: memory of the caller that a rollout is copied to."""

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
        out: the argument.
        info, steps: for each key, the dtype and the shape, without rows and timesteps, that will be written.
        lead: the most rows and the most timesteps that will be written.

    Raises:
        TypeError: `out` is no `Trajectories`.
        SpecError: its keys, dtypes or shapes differ, it is too small, not on the CPU, or cannot be written to.
    """
    if not isinstance(out, Trajectories):
        raise TypeError(f"get: out must be a Trajectories, got {type(out).__name__}")
    _check("lengths", out.lengths, ((), torch.int64), lead[:1])
    places: dict[int, str] = {}
    for tensors, specs, axes in ((out.info, info, lead[:1]), (out.trajectories, steps, lead)):
        check_same_keys("get: out", specs, tensors.keys())
        for key, spec in specs.items():
            _check(key, tensors[key], spec, axes)
            other = places.setdefault(tensors[key].data_ptr(), key) if tensors[key].numel() else key
            if other != key:
                raise SpecError(f"get: out {key!r} and {other!r} share memory")


def _check(key: str, tensor: torch.Tensor, spec: TensorSpec, lead: tuple[int, ...]) -> None:
    """Raises SpecError unless a tensor has room for `lead` rows and timesteps of values of this spec."""
    (shape, dtype), n = spec, len(lead)
    is_large = tensor.ndim == n + len(shape) and all(tensor.shape[axis] >= lead[axis] for axis in range(n))
    if not is_large or tuple(tensor.shape[n:]) != tuple(shape) or tensor.dtype != dtype or tensor.device.type != "cpu":
        needed = f"{(*lead, *shape)} {str(dtype).removeprefix('torch.')}"
        raise SpecError(f"get: out {key!r} is {show(tensor)} on {tensor.device}, expected {needed} or more on cpu")
    if tensor.requires_grad or tensor.is_inference():
        raise SpecError(f"get: out {key!r} must neither require a gradient nor be made in inference mode")
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    if tensor.numel() and any(stride == 0 and size > 1 for stride, size in steps):
        raise SpecError(f"get: out {key!r} is expanded: several of its elements share memory")


def copy(trajectories: Trajectories, out: Trajectories) -> Trajectories:
    """Copies a rollout to `out`, which was checked; returns it there."""
    there = cut(out, trajectories.n_elems(), trajectories.trajectories.n_timesteps())
    for key, tensor in trajectories.info.items():
        there.info[key].copy_(tensor)
    for key, tensor in trajectories.trajectories.items():
        there.trajectories[key].copy_(tensor)
    there.lengths.copy_(trajectories.lengths)
    return there


def cut(out: Trajectories, n_rows: int, n_timesteps: int) -> Trajectories:
    """Views of the first rows and timesteps."""
    steps = {key: tensor[:n_rows, :n_timesteps] for key, tensor in out.trajectories.items()}
    first = out.trajectories.first_steps
    return Trajectories.trusted(
        DictTensor.trusted({key: tensor[:n_rows] for key, tensor in out.info.items()}),
        TemporalDictTensor.trusted(steps, out.lengths[:n_rows], None if first is None else first[:n_rows]),
    )
