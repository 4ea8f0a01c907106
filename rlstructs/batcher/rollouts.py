"""What `RL_Batcher.rollouts` does, in terms of `reset`, `execute` and `get`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from rlstructs.batcher.lifecycle import Lifecycle, Phase
from rlstructs.checks import check_count
from rlstructs.structures.trajectories import Trajectories


class Rollouts(Protocol):
    """Runs rollouts: an `RL_Batcher`."""

    def reset(self) -> None: ...

    def execute(self) -> None: ...

    def get(self) -> tuple[Trajectories, int]: ...


def run_rollouts(batcher: Rollouts, life: Lifecycle, n_steps: int | None) -> Iterator[Trajectories]:
    """Yields rollouts; see `RL_Batcher.rollouts`."""
    left = None if n_steps is None else check_count("n_steps", n_steps)
    while left is None or left > 0:
        if life.phase in (Phase.NEW, Phase.ENDED, Phase.INTERRUPTED):
            batcher.reset()
        if life.phase is not Phase.RUNNING:
            batcher.execute()
        trajectories, _ = batcher.get()
        if left is not None:
            left -= int(trajectories.lengths.sum())
        yield trajectories
