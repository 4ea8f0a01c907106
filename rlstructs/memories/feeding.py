"""Lets workers write to a memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NoReturn

from rlstructs.memories.intake import Intake, convert_steps, write_steps
from rlstructs.memories.tensors import Tensors
from rlstructs.replay.intake.trajectories import POLICY_VERSION, Steps, take_trajectories
from rlstructs.replay.rows.store import Storage
from rlstructs.structures.trajectories import Trajectories


class LaneWriter:
    """Appends steps to the store of a memory whose tensors all exist, in any process and without its framework.

    Args:
        storage: the store.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def add_trajectories(self, trajectories: Trajectories, names: Mapping[str, str]) -> None:
        """Adds trajectories, for `Memory.add_trajectories`."""
        steps, columns = _take(trajectories, names, self.storage), self.storage.columns
        write_steps(convert_steps(steps, columns, columns.specs), steps, self.storage, self.storage.write)


class MemoryFeed:
    """Prepares the tensors of a memory for writers in other processes.

    Args:
        tensors: the tensors.
        exports: whether the memory saves what it is given, which writers in other processes would not.
    """

    def __init__(self, tensors: Tensors, exports: bool) -> None:
        self._tensors, self.is_for_one_process = tensors, exports

    @property
    def storage(self) -> Storage:
        """The store, with every tensor that was created."""
        return self._tensors.allocate()

    @property
    def writer(self) -> LaneWriter:
        """Returns the writer."""
        return LaneWriter(self.storage)

    @property
    def takes_any_environment(self) -> bool:
        """False: an environment has rows of its own."""
        return False

    def choose_names(self, keys: Collection[str]) -> dict[str, str]:
        """The tensors of `Memory.add_trajectories` and the policy version, and the keys that they get."""
        return {**self._tensors.find_names(keys), POLICY_VERSION: POLICY_VERSION}

    def define_columns(self, example: Trajectories, names: Mapping[str, str]) -> None:
        """Creates missing tensors for trajectories like these, of which it adds none.

        Raises:
            MissingKeyError, SpecError: a tensor does not fit.
        """
        steps = _take(example, names, self._tensors.storage)
        Intake(self._tensors).add_steps(steps.at(slice(0, 0)), _refuse)


def _take(trajectories: Trajectories, names: Mapping[str, str], storage: Storage) -> Steps:
    return take_trajectories(trajectories, names, storage.columns.n_lanes, limit="the memory's num_envs")


def _refuse(*_: object, **__: object) -> NoReturn:
    raise AssertionError("no steps were given")
