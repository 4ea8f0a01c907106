"""What `RL_Batcher.rollouts` does, in terms of `reset`, `execute` and `get`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from rlstructs.batcher.lifecycle import Lifecycle, Phase
from rlstructs.checks import check_count
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.trajectories import Trajectories


class Rollouts(Protocol):
    """Runs rollouts: an `RL_Batcher`."""

    def reset(self, agent_info: DictTensor = ..., env_info: DictTensor = ...) -> None: ...

    def execute(self) -> None: ...

    def get(self) -> tuple[Trajectories, int]: ...


def run_rollouts(
    batcher: Rollouts, life: Lifecycle, find_infos: Callable[[], Mapping[str, DictTensor]], n_steps: int | None
) -> Iterator[Trajectories]:
    """Yields rollouts; see `RL_Batcher.rollouts`.

    Args:
        batcher: runs them.
        life: its lifecycle.
        find_infos: returns the infos in force, by the names of the arguments of `reset`; none before the first one.
        n_steps: see `RL_Batcher.rollouts`.
    """
    left = None if n_steps is None else check_count("n_steps", n_steps)
    while left is None or left > 0:
        if life.phase in (Phase.NEW, Phase.ENDED, Phase.INTERRUPTED):
            batcher.reset(**find_infos())
        if life.phase is not Phase.RUNNING:
            batcher.execute()
        trajectories, _ = batcher.get()
        if left is not None:
            left -= int(trajectories.lengths.sum())
        yield trajectories
