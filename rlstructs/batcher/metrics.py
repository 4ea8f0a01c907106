"""`Meter`: counts, a few numbers for each rollout, what `RL_Batcher.metrics` returns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import torch

from rlstructs.structures.arrays import as_array


class Meter:
    """Counts the steps that are handed out, and the time that the trainer waits for them.

    Attributes:
        n_steps: steps of all environments together that were handed out so far.
    """

    def __init__(self) -> None:
        self.n_steps = 0
        # Since the last `take`: the steps, how many updates their agents lacked, summed, and the seconds of waiting.
        self._n_new, self._behind, self._waited = 0, 0, 0.0
        self._since = perf_counter()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_since": perf_counter() - self._since}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _since=perf_counter() - state["_since"])

    @contextlib.contextmanager
    def wait(self) -> Iterator[None]:
        """Counts the time inside as time that the trainer waits for rollouts."""
        began = perf_counter()
        try:
            yield
        finally:
            self._waited += perf_counter() - began

    def add(self, lengths: torch.Tensor, versions: torch.Tensor, version: int) -> None:
        """Counts the steps of a rollout that is handed out.

        Args:
            lengths: int64 (B,), the number of steps in each row.
            versions: int64 (B,), the number of updates that the agent of each row had had.
            version: the number of updates so far.
        """
        sizes = as_array(lengths)
        n = int(sizes.sum())
        self.n_steps += n
        self._n_new += n
        self._behind += version * n - int(as_array(versions) @ sizes)

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
