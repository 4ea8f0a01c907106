"""The checked arguments of `rlstructs.returns`: without gradients, and 0 in masked steps."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

import torch

from rlstructs.errors import SpecError
from rlstructs.structures.tree import show

# A number, or a tensor () or (B, T).
Weight = float | torch.Tensor


@dataclass(frozen=True)
class Steps:
    """Rewards and what follows them, in contiguous tensors (B, T).

    `goes_on` and `mask` are bool, the others of one floating point dtype; `gamma` may also be a number or a tensor ().
    `next_values` is 0 after a step that terminated. `goes_on` is True where step t + 1 of the row continues the episode
    of step t; `carry` is gamma there and 0 elsewhere.
    """

    rewards: torch.Tensor
    next_values: torch.Tensor
    gamma: Weight
    goes_on: torch.Tensor
    carry: torch.Tensor
    mask: torch.Tensor | None

    @classmethod
    def of(
        cls,
        rewards: torch.Tensor,
        next_values: torch.Tensor,
        terminated: torch.Tensor,
        truncated: torch.Tensor,
        gamma: Weight,
        mask: torch.Tensor | None,
    ) -> Steps:
        """Checks the arguments that all functions have in common.

        Raises:
            TypeError, SpecError: one is wrong; the message names it.
        """
        rewards = _check_floats("rewards", rewards, None)
        next_values = _check_floats("next_values", next_values, rewards)
        dtype = torch.promote_types(rewards.dtype, next_values.dtype)
        terminated = _check_flags("terminated", terminated, rewards)
        truncated = _check_flags("truncated", truncated, rewards)
        goes_on, bootstraps = ~(terminated | truncated), ~terminated
        goes_on[:, -1:] = False
        if mask is not None:
            mask = _check_flags("mask", mask, rewards)
            goes_on &= mask
            goes_on[:, :-1] &= mask[:, 1:]
            bootstraps &= mask
        rewards, next_values = _zero_outside(rewards.to(dtype), mask), _zero_outside(next_values.to(dtype), bootstraps)
        gamma = _check_weight("gamma", gamma, rewards, mask)
        return cls(rewards, next_values, gamma, goes_on, goes_on.to(dtype) * gamma, mask)

    def floats(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Checks a further argument (B, T), and sets it to 0 outside the mask."""
        return _zero_outside(_check_floats(name, tensor, self.rewards).to(self.rewards.dtype), self.mask)

    def weight(self, name: str, value: Weight) -> Weight:
        """Checks a further argument that is a number in [0, 1] or a tensor."""
        return _check_weight(name, value, self.rewards, self.mask)

    def up_to_cuts(self) -> torch.Tensor:
        """(B, T): r_t, plus gamma V(s_{t+1}) where `goes_on` is False; V may be NaN elsewhere."""
        return self.rewards + torch.where(self.goes_on, 0, self.gamma * self.next_values)

    def backup(self, following: torch.Tensor) -> torch.Tensor:
        """(B, T): r_t + gamma x_{t+1}, where x is `following`, or V(s_{t+1}) where `goes_on` is False."""
        backed_up = self.up_to_cuts()
        backed_up[:, :-1] += self.carry[:, :-1] * following[:, 1:]
        return backed_up


def _zero_outside(tensor: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    # Not a product, because masked values may be NaN.
    return tensor if mask is None else torch.where(mask, tensor, 0)


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


def _check_weight(name: str, value: Weight, rewards: torch.Tensor, mask: torch.Tensor | None) -> Weight:
    if isinstance(value, torch.Tensor):
        if value.ndim == 0:
            return value.detach().to(rewards.device, rewards.dtype)
        return _zero_outside(_check_floats(name, value, rewards).to(rewards.dtype), mask)
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number or a tensor, got {value!r}")
    if not 0 <= value <= 1:
        raise SpecError(f"{name} must lie in [0, 1], got {value}")
    return float(value)
