"""Counts what is worth logging, and notices agents that draw alike.

Both look at the rollouts that are handed out.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import torch

from rlstructs.checks import warn_caller
from rlstructs.structures.trajectories import Trajectories


class Meter:
    """Counts the steps handed out, and the time the trainer waits for them.

    Attributes:
        n_steps: steps of all environments together that were handed out so far.
    """

    def __init__(self) -> None:
        self.n_steps = 0
        # Since the last `take`: steps; the sum over them of updates missed; seconds waited.
        self._n_new, self._behind, self._waited = 0, 0, 0.0
        self._since = perf_counter()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_since": perf_counter() - self._since}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _since=perf_counter() - state["_since"])

    def time(self, function: Callable[..., T], *args: Any) -> T:
        """Calls a function in which the trainer waits for rollouts, and counts that time."""
        began = perf_counter()
        try:
            return function(*args)
        finally:
            self._waited += perf_counter() - began

    def add(self, trajectories: Trajectories, version: int) -> None:
        """Counts the steps of a rollout that is handed out.

        `version` is the number of updates so far.
        """
        sizes = trajectories.trajectories.lengths.numpy()
        n = int(sizes.sum())
        self.n_steps += n
        self._n_new += n
        self._behind += version * n - int(trajectories.info._tensors["policy_version"].numpy() @ sizes)

    def take(self) -> dict[str, float]:
        """Returns the metrics of rollouts, and begins to count anew."""
        now = perf_counter()
        seconds = max(now - self._since, 1e-9)
        metrics = {
            "rollout/steps": float(self.n_steps),
            "rollout/steps_per_second": self._n_new / seconds,
            "rollout/waiting_share": min(1.0, self._waited / seconds),
        }
        if self._n_new:
            metrics["rollout/staleness"] = self._behind / self._n_new
        self._n_new, self._behind, self._waited, self._since = 0, 0, 0.0, now
        return metrics


def name_restarts(n_workers: int, n_envs: list[int]) -> dict[str, float]:
    """The metrics of restarts: of workers, and of each environment."""
    return {
        "rollout/restarts": float(n_workers),
        "rollout/env_restarts": float(sum(n_envs)),
        **{f"rollout/env_restarts/{env}": float(n) for env, n in enumerate(n_envs) if n},
    }


T = TypeVar("T")

# Steps of a worker that are compared. Of 128 independent draws, 5 standard deviations are 0.22.
N_STEPS = 128
# Rollouts after which nothing more is compared, however short they were.
N_ROLLOUTS = 20
# With a larger share of actions equal to earlier or neighbouring ones, actions are not random, or nearly constant.
MOST_REGULAR = 0.75
# The share of equal actions of two workers must exceed that share by this fraction of the distance to 1.
EXCESS = 0.7
LAGS = range(1, 9)


class EqualActions:
    """Warns once if workers seem to draw the same random numbers.

    It warns if, in the first rollouts, two workers take equal actions although they observe different things. The
    actions have to look as if they were drawn: a worker's must differ from those some steps before, and from those of
    its other environments; with one environment, they must not follow from the action before. Greedy policies, constant
    actions and scripts are therefore left alone.

    Args:
        n_envs: E, the number of environments of a worker.
        n_workers: W.
    """

    def __init__(self, n_envs: int, n_workers: int) -> None:
        self._n_envs, self._n_workers = n_envs, n_workers
        self._n_rollouts = 0
        # Of each environment: its actions, float64 (t, K), and a sum of each observation, float64 (t, 1).
        self._actions = [torch.zeros(0, 0, device="cpu")] * (n_envs * n_workers)
        self._seen = list(self._actions)
        self.is_over = n_workers < 2

    def add(self, trajectories: Trajectories) -> None:
        """Adds a rollout; warns if enough steps are equal.

        Sets `is_over` once it has seen enough steps or rollouts.
        """
        if self.is_over:
            return
        self._n_rollouts += 1
        steps, rows = trajectories.trajectories._tensors, trajectories.info._tensors["env_index"].tolist()
        n = [min(length, N_STEPS) for length in trajectories.trajectories.lengths.tolist()]
        most = max(n, default=0)
        # By their keys: of a lease, other tensors are copied only if somebody asks for them.
        keys = list(steps)
        actions = [steps[key] for key in keys if key.split("/")[:2] == ["action", "action"]]
        seen = [steps[key] for key in keys if key.startswith("observation/") and "last_action" not in key]
        if not actions or not seen or not most:
            self.is_over = self._n_rollouts >= N_ROLLOUTS
            return
        flat = torch.cat([_flatten(t[:, :most]).double() for t in actions], 2)
        sums = torch.stack([_flatten(t[:, :most]).sum(2, dtype=torch.float64) for t in seen], 2)
        for place, (row, length) in enumerate(zip(rows, n, strict=True)):
            for kept, new in ((self._actions, flat), (self._seen, sums)):
                kept[row] = torch.cat([kept[row].reshape(-1, new.shape[2]), new[place, :length].cpu()])[:N_STEPS]
        if sum(len(kept) for kept in self._actions[: self._n_envs]) >= N_STEPS or self._n_rollouts >= N_ROLLOUTS:
            self.is_over = True
            self._compare()

    def _compare(self) -> None:
        own = self._actions[: self._n_envs]
        regular = [_share((kept[lag:], kept[:-lag]) for kept in own) for lag in LAGS]
        beside = _share((own[0], other) for other in own[1:]) if len(own) > 1 else _predictable_share(own[0])
        base = max(*regular, beside)
        if base > MOST_REGULAR:
            return
        for worker in range(1, self._n_workers):
            pairs = list(self._differing(worker))
            n = sum(len(one) for one, _ in pairs)
            if n >= N_STEPS // 2 and (share := _share(pairs)) >= base + EXCESS * (1 - base):
                warn_caller(
                    f"the agents of workers draw the same random numbers: of {n} actions of workers 0 and {worker}, "
                    f"{share:.0%} are equal, although their observations differ. Is a random generator seeded where "
                    "agents are made, as by torch.manual_seed(0) in create_agent? Make networks once, in the trainer, "
                    "and give them to create_agent as arguments"
                )
                return

    def _differing(self, worker: int) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Yields the actions of each environment of worker 0 and its counterpart.

        Only steps in which the two environments observe different things; (t, K) each.
        """
        for env in range(self._n_envs):
            other = worker * self._n_envs + env
            n = min(len(self._actions[env]), len(self._actions[other]))
            seen, others = self._seen[env][:n], self._seen[other][:n]
            differs = ((seen != others) & ~(seen.isnan() & others.isnan())).any(1) if n else slice(0, 0)
            yield self._actions[env][:n][differs], self._actions[other][:n][differs]


def _flatten(steps: torch.Tensor) -> torch.Tensor:
    """Returns steps (B, T, ...) as (B, T, K)."""
    return steps.flatten(2) if steps.ndim > 2 else steps[..., None]


def _share(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Returns the share of steps with equal actions; 0 without steps."""
    equal = [(one[: len(other)] == other[: len(one)]).all(1) for one, other in pairs]
    n = sum(map(len, equal))
    return sum(int(each.sum()) for each in equal) / n if n else 0.0


def _predictable_share(actions: torch.Tensor) -> float:
    """Returns the share of actions that the previous action predicts.

    The prediction is the most frequent successor of that action.
    """
    kinds = np.unique(actions.numpy(), axis=0, return_inverse=True)[1].reshape(-1).tolist()
    successors: dict[int, Counter[int]] = {}
    for one, following in itertools.pairwise(kinds):
        successors.setdefault(one, Counter())[following] += 1
    return sum(max(counts.values()) for counts in successors.values()) / max(1, len(kinds) - 1)
