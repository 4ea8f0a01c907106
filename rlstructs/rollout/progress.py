"""Where a rollout stopped, and what its time went to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rlstructs.moments import Moments
from rlstructs.shared.packing import Rows
from rlstructs.structures.dict_tensor import DictTensor


@dataclass
class Clock:
    """What a worker's time went to, since it began.

    Attributes:
        steps: of single environments.
        environment, agent: seconds in each.
        busy: seconds in rollouts.
    """

    steps: int = 0
    environment: float = 0.0
    agent: float = 0.0
    busy: float = 0.0

    def fields(self) -> tuple[int, float, float, float]:
        """What makes an equal one, cheaper to send than the object."""
        return self.steps, self.environment, self.agent, self.busy


class RolloutReply(NamedTuple):
    """What a worker replies when its rollout is over.

    Attributes:
        running: the environments that still run, counted from the worker's first; None for all of them.
        clock: the fields of its `Clock`.
        version: number of updates that the agent had had.
        statistics: the moments that environments gathered since the last rollout, by name.
    """

    running: list[int] | None
    clock: tuple[int, float, float, float]
    version: int
    statistics: dict[str, Moments]


@dataclass
class Progress:
    """Where a rollout stopped, and the next one goes on.

    Attributes:
        observation: what the agent sees next, a row for each environment that runs.
        running: int64, the environments that run; all of them are 0..E-1.
        state: the agent's, None before its first step since a reset.
    """

    observation: Rows
    running: np.ndarray
    state: DictTensor | None = None
