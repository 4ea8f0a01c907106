"""Checks the arguments of the functions of this package."""

from __future__ import annotations

from numbers import Real
from typing import NamedTuple

import torch

from rlstructs.errors import SpecError
from rlstructs.structures.tree import show

# A number, or a tensor () or (B, T).
Weight = float | torch.Tensor


class Given(NamedTuple):
    """The arguments that all functions have in common, checked: contiguous tensors (B, T) without gradients.

    `terminated`, `truncated` and `mask` are bool, the others of one floating point dtype; `gamma` may also be a number
    or a tensor (). Masked steps hold what was given.
    """

    rewards: torch.Tensor
    next_values: torch.Tensor
    terminated: torch.Tensor
    truncated: torch.Tensor
    mask: torch.Tensor | None
    gamma: Weight

    @classmethod
    def of(
        cls,
        rewards: torch.Tensor,
        next_values: torch.Tensor,
        terminated: torch.Tensor,
        truncated: torch.Tensor,
        gamma: Weight,
        mask: torch.Tensor | None,
    ) -> Given:
        """Checks them.

        Raises:
            TypeError, SpecError: one is wrong; the message names it.
        """
        rewards = _check_floats("rewards", rewards, None)
        next_values = _check_floats("next_values", next_values, rewards)
        dtype = torch.promote_types(rewards.dtype, next_values.dtype)
        terminated = _check_flags("terminated", terminated, rewards)
        truncated = _check_flags("truncated", truncated, rewards)
        if mask is not None:
            mask = _check_flags("mask", mask, rewards)
        rewards = rewards.to(dtype)
        gamma = _check_weight("gamma", gamma, rewards)
        return cls(rewards, next_values.to(dtype), terminated, truncated, mask, gamma)

    def floats(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Checks a further argument (B, T)."""
        return _check_floats(name, tensor, self.rewards).to(self.rewards.dtype)

    def weight(self, name: str, value: Weight) -> Weight:
        """Checks a further argument that is a number in [0, 1] or a tensor."""
        return _check_weight(name, value, self.rewards)


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
