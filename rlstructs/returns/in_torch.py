"""The functions of this package in operations of torch.

For all devices and dtypes, and for tracing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlstructs.returns.inputs import Given, Weight


@dataclass(frozen=True)
class Steps:
    """Rewards and what follows them, (B, T), 0 in masked steps.

    `goes_on` is bool, the others are of one floating point dtype; `gamma` may also be a number or a tensor ().
    `next_values` is 0 after a step that terminated. `goes_on` is True where step t + 1 of the row continues the episode
    of step t; `carry` is gamma there and 0 elsewhere.
    """

    rewards: torch.Tensor
    next_values: torch.Tensor
    gamma: Weight
    goes_on: torch.Tensor
    carry: torch.Tensor

    @classmethod
    def of(cls, given: Given) -> Steps:
        """Marks the steps after which an episode goes on."""
        goes_on, bootstraps = ~(given.terminated | given.truncated), ~given.terminated
        goes_on[:, -1:] = False
        if given.mask is not None:
            goes_on &= given.mask
            goes_on[:, :-1] &= given.mask[:, 1:]
            bootstraps &= given.mask
        gamma = _weight(given, given.gamma)
        rewards, next_values = _floats(given, given.rewards), torch.where(bootstraps, given.next_values, 0)
        return cls(rewards, next_values, gamma, goes_on, goes_on.to(rewards.dtype) * gamma)

    def up_to_cuts(self) -> torch.Tensor:
        """Returns r_t, plus gamma V(s_{t+1}) where `goes_on` is False, (B, T).

        V may be NaN elsewhere.
        """
        return self.rewards + torch.where(self.goes_on, 0, self.gamma * self.next_values)

    def backup(self, following: torch.Tensor) -> torch.Tensor:
        """Returns r_t + gamma x_{t+1}, (B, T), where x is `following`.

        Where `goes_on` is False, x is V(s_{t+1}).
        """
        backed_up = self.up_to_cuts()
        backed_up[:, :-1] += torch.where(self.goes_on[:, :-1], self.carry[:, :-1] * following[:, 1:], 0)
        return backed_up


def gae(given: Given, values: torch.Tensor, lambda_: Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and targets."""
    steps, values = Steps.of(given), _floats(given, values)
    deltas = steps.rewards + steps.gamma * steps.next_values - values
    advantages = _recurrence_(deltas, steps.carry * _weight(given, lambda_))
    return advantages, advantages + values


def discounted_returns(given: Given) -> torch.Tensor:
    steps = Steps.of(given)
    return _recurrence_(steps.up_to_cuts(), steps.carry)


def lambda_returns(given: Given, lambda_: Weight) -> torch.Tensor:
    steps = Steps.of(given)
    weights = steps.carry * _weight(given, lambda_)
    return _recurrence_(steps.rewards + (steps.gamma - weights) * steps.next_values, weights)


def n_step_returns(given: Given, n: int) -> torch.Tensor:
    steps = Steps.of(given)
    returns = steps.rewards + steps.gamma * steps.next_values
    for _ in range(n - 1):
        returns = steps.backup(returns)
    return returns


def vtrace(
    given: Given, values: torch.Tensor, ratios: torch.Tensor, rho_clip: float, c_clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and targets; `ratios` are pi / mu."""
    steps, values, ratios = Steps.of(given), _floats(given, values), _floats(given, ratios)
    rhos = ratios.clamp(max=rho_clip)
    deltas = rhos * (steps.rewards + steps.gamma * steps.next_values - values)
    targets = _recurrence_(deltas, steps.carry * ratios.clamp(max=c_clip)) + values
    return rhos * (steps.backup(targets) - values), targets


def _floats(given: Given, tensor: torch.Tensor) -> torch.Tensor:
    # Not a product, because masked values may be NaN.
    return tensor if given.mask is None else torch.where(given.mask, tensor, 0)


def _weight(given: Given, value: Weight) -> Weight:
    return _floats(given, value) if isinstance(value, torch.Tensor) and value.ndim else value


def _recurrence_(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Computes x_t = a_t + b_t x_{t+1} in place of `a`, (B, T).

    The last b of a row counts as 0, and where b is 0, x_{t+1} is left out, even if it is NaN: it is another episode.

    It takes log2(T) rounds: x_t, the sum of its first `reach` terms, adds those of x_{t+reach} times the b in between.
    A loop over T takes 2 to 30 times as long (benchmarks/returns.py).
    """
    n_timesteps, reach = a.shape[1], 1
    b = b[:, :-1]
    while reach < n_timesteps:
        a[:, :-reach] += (b * a[:, reach:]).masked_fill(b == 0, 0)
        b = b[:, :-reach] * b[:, reach:]
        reach *= 2
    return a
