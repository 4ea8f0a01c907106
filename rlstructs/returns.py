"""Returns, targets and advantages over `(B, T)`: GAE, discounted, lambda and n-step returns, V-trace.

Every function takes transitions as the batcher records them, rows of T steps with any number of episodes, and returns
a number for each transition. The arguments are

- `rewards`: floating point (B, T), the reward of step t;
- `values`: floating point (B, T), V of the observation before step t;
- `next_values`: floating point (B, T), V of the observation after step t, at the end of an episode the final one;
- `terminated`, `truncated`: bool (B, T), or numbers that are 0 for False: how step t ended its episode, if it did;
- `gamma`, `lambda_`: in [0, 1], a number or a tensor () or (B, T); the weight at t applies to what follows step t;
- `mask`: which steps count, in the form of `terminated`; None for all.

`transitions` takes rewards, ends and mask out of a batch; you add values and weights.

In the equations V(s_{t+1}) is `next_values`, but 0 after a step that terminated. V(s_{t+1}) also replaces the value
that would come from step t + 1 if the row has no such step of the episode: at the end of the episode or of the row, and
before a masked step. Masked steps are ignored, even if they hold NaN; their results are 0.

Results are contiguous, on the device of `rewards`, and of the wider dtype of `rewards` and `next_values`. No gradient
flows through them: it would move targets towards values.

Raises:
    TypeError: an argument is no tensor, or no number. All messages name the argument.
    SpecError: an argument has a wrong shape, device or kind of dtype, or is a number out of range. Values in tensors
        are not checked, because that would wait for a GPU.

Every function is a recurrence x_t = a_t + b_t x_{t+1} with its own a and b; n-step returns take n steps of it.
"""

from __future__ import annotations

from numbers import Real
from typing import TypedDict

import torch

from rlstructs.checks import check_count
from rlstructs.errors import SpecError
from rlstructs.returns_inputs import Steps, Weight
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
from rlstructs.structures.trajectories import Trajectories


class Transitions(TypedDict):
    """Arguments that the functions of this module take from a batch; (B, T) each."""

    rewards: torch.Tensor
    terminated: torch.Tensor
    truncated: torch.Tensor
    mask: torch.Tensor


def transitions(trajectories: Trajectories | TemporalDictTensor) -> Transitions:
    """Rewards, ends and mask of a batch, as arguments of the functions of this module.

    Args:
        trajectories: with `_observation/reward`, `_observation/terminated` and `_observation/truncated`, as the
            batcher gives them.

    Returns:
        `rewards`, `terminated`, `truncated`, (B, T), shared with the batch, and `mask`, bool (B, T).

    Raises:
        TypeError: `trajectories` is no batch.
        MissingKeyError: one of the keys is missing.

    Example:
        >>> following = {"reward": torch.ones(1, 3), "terminated": torch.tensor([[False, True, False]])}
        >>> following["truncated"] = torch.zeros(1, 3, dtype=torch.bool)
        >>> batch = TemporalDictTensor({"_observation": following}, lengths=torch.tensor([2]))
        >>> discounted_returns(**transitions(batch), next_values=torch.zeros(1, 3), gamma=0.5)
        tensor([[1.5000, 1.0000, 0.0000]])
    """
    steps = trajectories.trajectories if isinstance(trajectories, Trajectories) else trajectories
    if not isinstance(steps, TemporalDictTensor):
        raise TypeError(f"transitions: needs Trajectories or a TemporalDictTensor, got {type(steps).__name__}")
    return Transitions(
        rewards=steps["_observation/reward"],
        terminated=steps["_observation/terminated"],
        truncated=steps["_observation/truncated"],
        mask=steps.mask(torch.bool),
    )


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    next_values: torch.Tensor,
    terminated: torch.Tensor,
    truncated: torch.Tensor,
    gamma: Weight,
    lambda_: Weight,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimates, and targets for the values.

    Equation (16) of Schulman et al., "High-dimensional continuous control using generalized advantage estimation"
    (2016): A_t = delta_t + gamma lambda A_{t+1}, with delta_t = r_t + gamma V(s_{t+1}) - V(s_t).

    Args: see the module.

    Returns:
        Advantages (B, T), and targets (B, T), which are advantages + values.

    Example:
        >>> no = torch.zeros(1, 2, dtype=torch.bool)
        >>> values, next_values = torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 4.0]])
        >>> gae(torch.ones(1, 2), values, next_values, terminated=no, truncated=no, gamma=0.5, lambda_=1.0)
        (tensor([[1.5000, 1.0000]]), tensor([[2.5000, 3.0000]]))
    """
    steps = Steps.of(rewards, next_values, terminated, truncated, gamma, mask)
    values = steps.floats("values", values)
    deltas = steps.rewards + steps.gamma * steps.next_values - values
    advantages = _recurrence_(deltas, steps.carry * steps.weight("lambda_", lambda_))
    return advantages, advantages + values


def discounted_returns(
    rewards: torch.Tensor,
    next_values: torch.Tensor,
    terminated: torch.Tensor,
    truncated: torch.Tensor,
    gamma: Weight,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Discounted sums of rewards to the end of the episode, or of the row, plus V there.

    Equation (3.9) of Sutton and Barto, "Reinforcement learning: an introduction" (2nd edition, 2018):
    G_t = r_t + gamma G_{t+1}.

    Args: see the module; `next_values` counts only where an episode was cut.

    Returns:
        (B, T).
    """
    steps = Steps.of(rewards, next_values, terminated, truncated, gamma, mask)
    return _recurrence_(steps.up_to_cuts(), steps.carry)


def lambda_returns(
    rewards: torch.Tensor,
    next_values: torch.Tensor,
    terminated: torch.Tensor,
    truncated: torch.Tensor,
    gamma: Weight,
    lambda_: Weight,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Averages of n-step returns over all n, weighted by lambda^n: the targets of TD(lambda).

    Equation (12.18) of Sutton and Barto (2018): G_t = r_t + gamma ((1 - lambda) V(s_{t+1}) + lambda G_{t+1}).

    Args: see the module.

    Returns:
        (B, T).
    """
    steps = Steps.of(rewards, next_values, terminated, truncated, gamma, mask)
    weights = steps.carry * steps.weight("lambda_", lambda_)
    return _recurrence_(steps.rewards + (steps.gamma - weights) * steps.next_values, weights)


def n_step_returns(
    rewards: torch.Tensor,
    next_values: torch.Tensor,
    terminated: torch.Tensor,
    truncated: torch.Tensor,
    gamma: Weight,
    n: int,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Discounted sums of the next n rewards, or fewer at a cut, plus V after them.

    Equation (7.1) of Sutton and Barto (2018): G_t = r_t + gamma r_{t+1} + ... + gamma^n V(s_{t+n}).

    Args: see the module, and
        n: at least 1. The time grows with n, up to T; for whole episodes use `discounted_returns`.

    Returns:
        (B, T).
    """
    check_count("n", n)
    steps = Steps.of(rewards, next_values, terminated, truncated, gamma, mask)
    returns = steps.rewards + steps.gamma * steps.next_values
    for _ in range(min(n, returns.shape[1]) - 1):
        returns = steps.backup(returns)
    return returns


def vtrace(
    rewards: torch.Tensor,
    values: torch.Tensor,
    next_values: torch.Tensor,
    target_log_probs: torch.Tensor,
    behaviour_log_probs: torch.Tensor,
    terminated: torch.Tensor,
    truncated: torch.Tensor,
    gamma: Weight,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """V-trace: advantages and value targets for a policy, from steps of another policy.

    Equation (1) of Espeholt et al., "IMPALA: scalable distributed deep-RL with importance weighted actor-learner
    architectures" (2018), in the recursive form of its remark 1:
    v_t = V(s_t) + delta_t + gamma c_t (v_{t+1} - V(s_{t+1})), with delta_t = rho_t (r_t + gamma V(s_{t+1}) - V(s_t)).
    In its difference to v_{t+1}, V(s_{t+1}) is `values` of step t + 1; where no further step follows it is 0.
    Advantages are those of its section 4.2: rho_t (r_t + gamma v_{t+1} - V(s_t)).

    Args: see the module, and
        target_log_probs: (B, T), log pi(a_t | s_t) of the policy that learns.
        behaviour_log_probs: (B, T), log mu(a_t | s_t) of the policy that acted.
        rho_clip: upper limit of rho_t = pi / mu, above 0, `math.inf` for none; decides which policy V belongs to.
        c_clip: upper limit of c_t; decides how fast V converges. The paper assumes that it is at most `rho_clip`.

    Returns:
        Advantages (B, T), and targets (B, T), which are the paper's v.
    """
    steps = Steps.of(rewards, next_values, terminated, truncated, gamma, mask)
    values = steps.floats("values", values)
    log_ratios = steps.floats("target_log_probs", target_log_probs)
    ratios = (log_ratios - steps.floats("behaviour_log_probs", behaviour_log_probs)).exp()
    rhos, cs = ratios.clamp(max=_clip("rho_clip", rho_clip)), ratios.clamp(max=_clip("c_clip", c_clip))
    deltas = rhos * (steps.rewards + steps.gamma * steps.next_values - values)
    targets = _recurrence_(deltas, steps.carry * cs) + values
    return rhos * (steps.backup(targets) - values), targets


def _recurrence_(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Computes x_t = a_t + b_t x_{t+1} in place of `a`, (B, T); the last b of a row counts as 0.

    It takes log2(T) rounds: x_t, the sum of its first `reach` terms, adds those of x_{t+reach} times the b in between.
    A loop over T takes 2 to 30 times as long (benchmarks/returns.py).
    """
    n_timesteps, reach = a.shape[1], 1
    b = b[:, :-1]
    while reach < n_timesteps:
        a[:, :-reach] += b * a[:, reach:]
        b = b[:, :-reach] * b[:, reach:]
        reach *= 2
    return a


def _clip(name: str, value: float) -> float:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not value > 0:
        raise SpecError(f"{name} must be above 0, got {value}")
    return float(value)
