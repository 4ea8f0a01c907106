"""Checks the arguments of the functions of this package."""

from __future__ import annotations

from numbers import Real
from typing import Any, NamedTuple

import torch

from rlstructs.errors import SpecError
from rlstructs.structures.tree import show

# A number, or a tensor () or (B, T).
Weight = float | torch.Tensor


class Given(NamedTuple):
    """The arguments common to all functions, checked.

    They are contiguous tensors (B, T) without gradients.

    `terminated`, `truncated` and `mask` are bool, the others of one floating point dtype; `gamma` may also be a number
    or a tensor (). Masked steps keep their given values. Packed steps (N,) are one row, in which the last step of each
    segment is truncated: what ends with a row has the same results.
    """

    rewards: torch.Tensor
    next_values: torch.Tensor
    terminated: torch.Tensor
    truncated: torch.Tensor
    mask: torch.Tensor | None
    gamma: Weight
    is_packed: bool = False

    @classmethod
    def of(
        cls,
        rewards: torch.Tensor,
        next_values: torch.Tensor,
        terminated: torch.Tensor,
        truncated: torch.Tensor,
        gamma: Weight,
        mask: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> Given:
        """Checks them; with `cu_seqlens` they are packed.

        Raises:
            TypeError, SpecError: one is wrong; the message names it.
        """
        is_packed = cu_seqlens is not None
        if is_packed:
            rewards, next_values = _as_row("rewards", rewards), _as_row("next_values", next_values)
            terminated, truncated = _as_row("terminated", terminated), _as_row("truncated", truncated)
            gamma, mask = _as_row("gamma", gamma), _as_row("mask", mask)
        rewards = _check_floats("rewards", rewards, None)
        next_values = _check_floats("next_values", next_values, rewards)
        dtype = torch.promote_types(rewards.dtype, next_values.dtype)
        terminated = _check_flags("terminated", terminated, rewards)
        truncated = _check_flags("truncated", truncated, rewards)
        if mask is not None:
            mask = _check_flags("mask", mask, rewards)
        rewards = rewards.to(dtype)
        gamma = _check_weight("gamma", gamma, rewards)
        if cu_seqlens is not None:
            truncated = _cut_segments(truncated, cu_seqlens)
        return cls(rewards, next_values.to(dtype), terminated, truncated, mask, gamma, is_packed)

    def shape(self, result: torch.Tensor) -> torch.Tensor:
        """A result (B, T) in the shape of what was given."""
        return result[0] if self.is_packed else result

    def floats(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Checks a further argument (B, T)."""
        tensor = _as_row(name, tensor) if self.is_packed else tensor
        return _check_floats(name, tensor, self.rewards).to(self.rewards.dtype)

    def weight(self, name: str, value: Weight) -> Weight:
        """Checks a further argument that is a number in [0, 1] or a tensor."""
        return _check_weight(name, _as_row(name, value) if self.is_packed else value, self.rewards)


def _check_floats(name: str, tensor: torch.Tensor, rewards: torch.Tensor | None) -> torch.Tensor:
    tensor = _check_argument(name, tensor, rewards)
    if not tensor.is_floating_point():
        raise SpecError(f"{name} must have a floating point dtype, got {show(tensor)}")
    return tensor.detach()


def _check_flags(name: str, tensor: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    tensor = _check_argument(name, tensor, rewards)
    return tensor if tensor.dtype == torch.bool else tensor != 0


def _check_argument(name: str, tensor: torch.Tensor, rewards: torch.Tensor | None) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        got = type(tensor).__name__
        advice = "`**transitions(batch)` takes rewards, ends and mask from a batch"
        raise TypeError(f"{name} must be a tensor (B, T), got {got}; {advice}")
    if tensor.ndim != 2:
        raise SpecError(f"{name} must have shape (B, T), got {show(tensor)}")
    if rewards is not None and tensor.shape != rewards.shape:
        raise SpecError(f"{name} must have shape {tuple(rewards.shape)}, like rewards, got {show(tensor)}")
    if rewards is not None and tensor.device != rewards.device:
        raise SpecError(f"{name} is on {tensor.device}, expected {rewards.device}, like rewards")
    return tensor.contiguous()


def _check_weight(name: str, value: Weight, rewards: torch.Tensor) -> Weight:
    if isinstance(value, torch.Tensor):
        if value.ndim == 0:
            return value.detach().to(rewards.device, rewards.dtype)
        return _check_floats(name, value, rewards).to(rewards.dtype)
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number or a tensor, got {value!r}")
    if not 0 <= value <= 1:
        raise SpecError(f"{name} must lie in [0, 1], got {value}")
    return float(value)


def _as_row(name: str, value: Any) -> Any:
    """Views packed steps (N,) as one row (1, N).

    Returns numbers, and tensors without axes, unchanged.
    """
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return value
    if value.ndim != 1:
        raise SpecError(f"{name} must have shape (N,) with cu_seqlens, got {show(value)}")
    return value[None]


def _cut_segments(truncated: torch.Tensor, cu_seqlens: Any) -> torch.Tensor:
    """Copies `truncated` (1, N), and sets it at the end of each segment."""
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = show(cu_seqlens) if isinstance(cu_seqlens, torch.Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens must be an int32 tensor (S + 1,), got {got}")
    if cu_seqlens.ndim != 1 or not len(cu_seqlens) or cu_seqlens.device != truncated.device:
        raise SpecError(
            f"cu_seqlens must have shape (S + 1,) on {truncated.device}, got {show(cu_seqlens)} on {cu_seqlens.device}"
        )
    cut, n = truncated.clone(), truncated.shape[1]
    # Elsewhere it would wait for a GPU.
    is_readable = cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling()
    if is_readable and (int(cu_seqlens[0]) or int(cu_seqlens[-1]) != n or bool((cu_seqlens.diff() < 0).any())):
        raise SpecError(f"cu_seqlens must rise from 0 to {n}, got {cu_seqlens.tolist()[:10]}")
    if n:
        # The end of an empty segment in front, 0, is the end of the row, which is one, too.
        cut[:, cu_seqlens.long() - 1] = True
    return cut
