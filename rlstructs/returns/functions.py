"""The public functions of this package; each checks its arguments.

Then a kernel or torch computes the results.
"""

from __future__ import annotations

from numbers import Real
from typing import TYPE_CHECKING, TypedDict

import torch

from rlstructs.checks import check_count
from rlstructs.errors import SpecError
from rlstructs.returns.compute import compute
from rlstructs.returns.inputs import Given, Weight
from rlstructs.structures.packed import PackedTrajectories
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
from rlstructs.structures.trajectories import Trajectories
from rlstructs.workers.public_names import set_module

if TYPE_CHECKING:
    from typing_extensions import NotRequired


@set_module("rlstructs.returns")
class Transitions(TypedDict):
    """Arguments that the functions of this module take from a batch.

    They are (B, T) each; those of a pack are (N,), with `cu_seqlens`.
    """

    rewards: torch.Tensor
    terminated: torch.Tensor
    truncated: torch.Tensor
    mask: torch.Tensor
    cu_seqlens: NotRequired[torch.Tensor]


def transitions(trajectories: Trajectories | TemporalDictTensor | PackedTrajectories) -> Transitions:
    """Returns rewards, ends and mask of a batch, as arguments of these functions.

    Args:
        trajectories: with `_observation/reward`, `_observation/terminated` and `_observation/truncated`, as the
            batcher gives them, or a pack of such.

    Returns:
        `rewards`, `terminated`, `truncated`, (B, T), shared with the batch, and `mask`, bool (B, T). For a pack (N,),
        and its `cu_seqlens`.

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
    if not isinstance(steps, (TemporalDictTensor, PackedTrajectories)):
        wanted = "Trajectories, a TemporalDictTensor or PackedTrajectories"
        raise TypeError(f"transitions: needs {wanted}, got {type(steps).__name__}")
    found = Transitions(
        rewards=steps["_observation/reward"],
        terminated=steps["_observation/terminated"],
        truncated=steps["_observation/truncated"],
        mask=steps.mask(torch.bool),
    )
    if isinstance(steps, PackedTrajectories):
        found["cu_seqlens"] = steps.cu_seqlens
    return found


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    next_values: torch.Tensor,
    terminated: torch.Tensor,
    truncated: torch.Tensor,
    gamma: Weight,
    lambda_: Weight,
    mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimates, and targets for the values.

    Equation (16) of Schulman et al., "High-dimensional continuous control using generalized advantage estimation"
    (2016): A_t = delta_t + gamma lambda A_{t+1}, with delta_t = r_t + gamma V(s_{t+1}) - V(s_t).

    Args: see `rlstructs.returns`.

    Returns:
        Advantages (B, T), and targets (B, T), which are advantages + values.

    Example:
        >>> no = torch.zeros(1, 2, dtype=torch.bool)
        >>> values, next_values = torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 4.0]])
        >>> gae(torch.ones(1, 2), values, next_values, terminated=no, truncated=no, gamma=0.5, lambda_=1.0)
        (tensor([[1.5000, 1.0000]]), tensor([[2.5000, 3.0000]]))
    """
    given = Given.of(rewards, next_values, terminated, truncated, gamma, mask, cu_seqlens)
    values, lambda_ = given.floats("values", values), given.weight("lambda_", lambda_)
    advantages, targets = compute("gae", given, (values,), (lambda_,))
    return advantages, targets


def discounted_returns(
    rewards: torch.Tensor,
    next_values: torch.Tensor,
    terminated: torch.Tensor,
    truncated: torch.Tensor,
    gamma: Weight,
    mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the discounted sums of rewards to the end of the episode.

    A sum also ends with its row. V at the end is added.

    Equation (3.9) of Sutton and Barto, "Reinforcement learning: an introduction" (2nd edition, 2018):
    G_t = r_t + gamma G_{t+1}.

    Args: see `rlstructs.returns`; `next_values` counts only where an episode was cut.

    Returns:
        (B, T).
    """
    given = Given.of(rewards, next_values, terminated, truncated, gamma, mask, cu_seqlens)
    [returns] = compute("discounted_returns", given)
    return returns


def lambda_returns(
    rewards: torch.Tensor,
    next_values: torch.Tensor,
    terminated: torch.Tensor,
    truncated: torch.Tensor,
    gamma: Weight,
    lambda_: Weight,
    mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Averages of n-step returns over all n, weighted by lambda^n: the targets of TD(lambda).

    Equation (12.18) of Sutton and Barto (2018): G_t = r_t + gamma ((1 - lambda) V(s_{t+1}) + lambda G_{t+1}).

    Args: see `rlstructs.returns`.

    Returns:
        (B, T).
    """
    given = Given.of(rewards, next_values, terminated, truncated, gamma, mask, cu_seqlens)
    lambda_ = given.weight("lambda_", lambda_)
    [returns] = compute("lambda_returns", given, weights=(lambda_,))
    return returns


def n_step_returns(
    rewards: torch.Tensor,
    next_values: torch.Tensor,
    terminated: torch.Tensor,
    truncated: torch.Tensor,
    gamma: Weight,
    n: int,
    mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the discounted sums of the next n rewards, plus V after them.

    A cut leaves fewer than n rewards.

    Equation (7.1) of Sutton and Barto (2018): G_t = r_t + gamma r_{t+1} + ... + gamma^n V(s_{t+n}).

    Args: see `rlstructs.returns`, and
        n: at least 1. The time grows with n, up to T; for whole episodes use `discounted_returns`.

    Returns:
        (B, T).
    """
    check_count("n", n)
    given = Given.of(rewards, next_values, terminated, truncated, gamma, mask, cu_seqlens)
    n = min(n, given.rewards.shape[1])
    [returns] = compute("n_step_returns", given, numbers=(n,))
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
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """V-trace: advantages and value targets for a policy, from steps of another policy.

    Equation (1) of Espeholt et al., "IMPALA: scalable distributed deep-RL with importance weighted actor-learner
    architectures" (2018), in the recursive form of its remark 1:
    v_t = V(s_t) + delta_t + gamma c_t (v_{t+1} - V(s_{t+1})), with delta_t = rho_t (r_t + gamma V(s_{t+1}) - V(s_t)).
    In its difference to v_{t+1}, V(s_{t+1}) is `values` of step t + 1; where no further step follows it is 0.
    Advantages are those of its section 4.2: rho_t (r_t + gamma v_{t+1} - V(s_t)).

    Args: see `rlstructs.returns`, and
        target_log_probs: (B, T), log pi(a_t | s_t) of the policy that learns.
        behaviour_log_probs: (B, T), log mu(a_t | s_t) of the policy that acted.
        rho_clip: upper limit of rho_t = pi / mu, above 0, `math.inf` for none; decides which policy V belongs to.
        c_clip: upper limit of c_t; decides how fast V converges. The paper assumes that it is at most `rho_clip`.

    Returns:
        Advantages (B, T), and targets (B, T), which are the paper's v.
    """
    given = Given.of(rewards, next_values, terminated, truncated, gamma, mask, cu_seqlens)
    values = given.floats("values", values)
    learned = given.floats("target_log_probs", target_log_probs)
    acted = given.floats("behaviour_log_probs", behaviour_log_probs)
    clips = _clip("rho_clip", rho_clip), _clip("c_clip", c_clip)
    # On a CPU torch computes several exponentials at once, a kernel one; on a GPU they would be launches more.
    ratios = None if values.is_cuda else (learned - acted).exp_()
    advantages, targets = compute("vtrace", given, (values, ratios, learned, acted), numbers=clips)
    return advantages, targets


def _clip(name: str, value: float) -> float:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not value > 0:
        raise SpecError(f"{name} must be above 0, got {value}")
    return float(value)
