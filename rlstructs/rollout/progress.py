"""Where the rollouts of a worker stopped, and how it spent its time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rlstructs.envs.row_env import NO_ROWS
from rlstructs.moments import Moments
from rlstructs.shared.layout import Rows
from rlstructs.structures.dict_tensor import DictTensor


@dataclass
class Clock:
    """The times that a worker has spent since its start.

    Attributes:
        steps: number of steps of single environments.
        environment, agent: seconds in each.
        busy: seconds in rollouts.
    """

    steps: int = 0
    environment: float = 0.0
    agent: float = 0.0
    busy: float = 0.0

    def fields(self) -> tuple[int, float, float, float]:
        """The arguments for an equal clock; they are cheaper to send than the object."""
        return self.steps, self.environment, self.agent, self.busy


class RolloutReply(NamedTuple):
    """A worker's reply when its rollout is over.

    Attributes:
        running: the environments that still run, counted from the worker's first; None for all of them.
        clock: the fields of its `Clock`.
        version: number of updates that the agent had received.
        statistics: the moments that environments gathered since the previous rollout, by name.
        cut: the environments whose rollout ended because they failed, counted from the worker's first.
        env_restarts: how often environments were made anew since the previous rollout, by the same index.
    """

    running: list[int] | None
    clock: tuple[int, float, float, float]
    version: int
    statistics: dict[str, Moments]
    cut: list[int] | None = None
    env_restarts: dict[int, int] | None = None


class Chosen(NamedTuple):
    """Steps that are under way.

    Attributes:
        rows: int64 (K,), their environments, ascending.
        output: what the agent gave for them, K rows.
        state: the agent's state after that, K rows.
        versions: int64 (K,), the number of updates that the agent had received, as `WorkerProgress.n_updates`.
    """

    rows: np.ndarray
    output: DictTensor
    state: DictTensor
    versions: np.ndarray


@dataclass
class Progress:
    """The position at which a rollout stopped and the next one continues.

    Attributes:
        observation: the agent's next observation, a row for each environment that runs.
        running: int64, the environments that run; 0..E-1 if all do.
        state: state of the agent; None before its first step after a reset.
        begins: int64, which of these rows begin with the agent's initial state, whatever `state` has there.
        chosen: the steps under way, of environments that are each stepped on their own; `observation` and `state` are
            those before these steps.
    """

    observation: Rows
    running: np.ndarray
    state: DictTensor | None = None
    begins: np.ndarray = field(default_factory=lambda: NO_ROWS)
    chosen: Chosen | None = None

    def join(self, which: np.ndarray, first: Rows) -> Progress:
        """Adds environments in which episodes begin.

        Args:
            which: int64, those environments, which do not run yet.
            first: their first observations.

        Returns:
            The progress of all of them; the agent begins the new episodes with its initial state.
        """
        running = np.concatenate([self.running, which])
        place, state = np.argsort(running), self.state
        assert state is not None
        if not state.empty():
            none = {key: tensor.new_zeros(which.size, *tensor.shape[1:]) for key, tensor in state.items()}
            state = DictTensor.cat([state, DictTensor.trusted(none)]).index(place)
        begins = np.concatenate([self.begins, np.arange(self.running.size, running.size)])
        observation = self.observation.join(first).take(place)
        return Progress(observation, running[place], state, np.flatnonzero(np.isin(place, begins)), self.chosen)


@dataclass
class WorkerProgress:
    """How far a worker is: where its rollouts stopped, and what they took.

    Attributes:
        next_steps: int64 (E,), the number of each environment's next step; see `TemporalDictTensor.first_steps`.
        groups: where the last rollout stopped, for each group of environments that are stepped together, one where
            there are no groups; empty before a reset.
        clock: how the worker has spent its time.
        n_updates: the number of updates of the agent; the count of a process begins anew, and this one goes on.
    """

    next_steps: np.ndarray
    groups: list[Progress] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)
    n_updates: int = 0

    @classmethod
    def of_new(cls, n: int) -> WorkerProgress:
        """Makes the progress of n environments before their first reset.

        No other environment's count of steps comes to theirs: counts begin anew in each process, seeded or not, so that
        two batchers never seem to go on with each other's steps.
        """
        return cls((np.frombuffer(os.urandom(8 * n), np.uint64) >> 4).astype(np.int64))

    def begin_episodes(self, observation: Rows, rows: Sequence[range]) -> None:
        """Continues with the first observation of all environments; `rows` are those of each group."""
        self.next_steps += 1  # the skipped number shows that the next steps do not continue the last ones
        self.groups = [Progress(observation.take(np.array(own)), np.arange(len(own))) for own in rows]

    def revive(self, which: np.ndarray, first: Rows, rows: Sequence[range]) -> None:
        """Continues with the first observations of environments that did not run.

        `rows` are those of each group.
        """
        for at, own in enumerate(rows):
            inside = np.flatnonzero((which >= own.start) & (which < own.stop))
            self.groups[at] = self.groups[at].join(which[inside] - own.start, first.take(inside))

    def running(self, rows: Sequence[range]) -> np.ndarray:
        """The environments that run, int64, counted from the worker's first."""
        return np.concatenate([own.start + each.running for own, each in zip(rows, self.groups, strict=True)])

    def go_on(self, other: WorkerProgress) -> None:
        """Continues where another worker was.

        One without groups begins new episodes, in this worker's own count.
        """
        self.groups, self.clock, self.n_updates = other.groups, other.clock, other.n_updates
        if other.groups:
            self.next_steps = other.next_steps
