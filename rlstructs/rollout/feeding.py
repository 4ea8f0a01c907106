"""`Feed`: a worker's access to a memory that lies in shared memory.

The worker writes the steps of its rollouts to it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from rlstructs.replay.intake.trajectories import POLICY_VERSION
from rlstructs.replay.rows.store import Storage
from rlstructs.shared.layout import FIRST_BEHIND
from rlstructs.shared.reading import step_versions
from rlstructs.shared.slots import Slots
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
from rlstructs.structures.trajectories import Trajectories


class Writer(Protocol):
    """Appends trajectories to a store, in any process that it is sent to."""

    def add_trajectories(self, trajectories: Trajectories, names: Mapping[str, str]) -> None:
        """Appends the valid steps of a batch; `names` are column -> key."""


class FedMemory(Protocol):
    """A memory's description for the workers that write to it, from `make_feed`."""

    @property
    def takes_any_environment(self) -> bool:
        """Whether the trajectories of all environments go to a single lane."""

    @property
    def is_for_one_process(self) -> bool:
        """Whether only the process that made the memory can write to it.

        It writes with `add_trajectories`.
        """

    @property
    def storage(self) -> Storage | None:
        """The store; None if it lies elsewhere."""

    @property
    def writer(self) -> Writer:
        """Returns the writer, once the columns are defined."""

    def choose_names(self, keys: Collection[str]) -> dict[str, str]:
        """Returns the default names: column -> key of the trajectories."""

    def define_columns(self, example: Trajectories, names: Mapping[str, str]) -> None:
        """Adds the columns for trajectories like this one; writes no rows.

        The example has one step.
        """


@dataclass(frozen=True)
class Feed:
    """Writes rollouts to a memory.

    Args:
        writer: writes to its store.
        names: column -> key of the trajectories.
        first_numbers: by worker, the number of its first rollout that is written.
        version_before: the number of updates that the worker's own count leaves out.
    """

    writer: Writer
    names: Mapping[str, str]
    first_numbers: Sequence[int] = ()
    version_before: int = 0

    def write(self, slots: Slots, number: int, version: int) -> None:
        """Writes a worker's rollout from its slots.

        `number` is the rollout's; its agent has had `version` updates.
        """
        n_timesteps = int(slots.lengths.max())
        if not n_timesteps or number < self.first_numbers[slots.first // slots.n]:  # it was ended early, or is older
            return
        info = {
            "env_index": torch.arange(slots.first, slots.first + slots.n, device="cpu"),
            POLICY_VERSION: torch.full((slots.n,), self.version_before + version, dtype=torch.int64, device="cpu"),
        }
        lengths, first_steps = torch.from_numpy(slots.lengths), torch.from_numpy(slots.first_steps)
        loan = slots.lend(None, n_timesteps)
        if slots.layout.has_step_versions:
            behind = slots.column(FIRST_BEHIND)
            loan.copies[POLICY_VERSION] = step_versions(info[POLICY_VERSION], behind, lengths, n_timesteps)
        steps = TemporalDictTensor.trusted(loan, lengths, first_steps)
        self.writer.add_trajectories(Trajectories.trusted(DictTensor.trusted(info), steps), self.names)
