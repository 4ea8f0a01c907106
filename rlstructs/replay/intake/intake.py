"""Takes rows into a store.

It makes columns, converts rows for them, and finds where episodes end.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rlstructs.errors import MissingKeyError, SpecError
from rlstructs.replay.intake.arrays import as_rows, find_marks, ready_arrays, spec_of
from rlstructs.replay.intake.infos import Plan, adopt, require_bytes
from rlstructs.replay.intake.roles import ends_among, source_of
from rlstructs.replay.intake.trajectories import POLICY_VERSION, Steps, add_version, take_trajectories
from rlstructs.replay.rows.linked import SMALLEST
from rlstructs.replay.rows.spec import Spec
from rlstructs.replay.rows.store import ALL, Storage
from rlstructs.structures.trajectories import Trajectories

LOG = logging.getLogger("rlstructs")
ERROR, GROW, FILL = "error", "grow", "fill"


class Intake:
    """Writes rows to a store whose columns the first rows define.

    Args:
        storage: the store, which tracks episodes.
        owner: class of the buffer, for the log.
        unknown, missing: how trajectories with unknown or missing keys are treated; see `write`.
    """

    # Whether only the process that has made the store can write to it.
    is_for_one_process = False
    # What the number of lanes is, for messages.
    lane_limit = "the lanes of this buffer"

    def __init__(self, storage: Storage, owner: str, unknown: str = ERROR, missing: str = ERROR) -> None:
        self.storage, self.owner, self.unknown, self.missing = storage, owner, unknown, missing
        # Whether trajectories of all environments are appended to one lane.
        self.takes_any_environment = storage.columns.n_lanes == 1

    @property
    def specs(self) -> dict[str, Spec]:
        """The specs of the columns, by name."""
        return self.storage.columns.specs

    def write(
        self,
        rows: Mapping[str, Any],
        lanes: slice | np.ndarray = ALL,
        *,
        lengths: np.ndarray | None = None,
        done: np.ndarray | None = None,
        starts: np.ndarray | None = None,
        unknown: str = ERROR,
        missing: str = ERROR,
    ) -> None:
        """Appends T rows to each of n lanes.

        Args:
            rows: name -> (n, T, *shape), of any library.
            lanes: the n lanes, no two the same.
            lengths: int64 (n,), how many of the T rows are valid; None for all.
            done: bool (n, T), where episodes end; None to read it from columns such as `terminated`.
            starts: bool (n, T), where episodes start even if the one before has not ended.
            unknown: "error" to refuse names without a column, "grow" to add columns.
            missing: "error" to refuse rows that lack a column, "fill" to fill it with zeros.

        Raises:
            SpecError: an argument does not fit; nothing changes.
        """
        block = self.convert(rows, unknown, missing)
        done = self.find_ends(block) if done is None else done
        self.storage.write(block, lanes, lengths=lengths, done=done, starts=starts)

    def convert(self, rows: Mapping[str, Any], unknown: str, missing: str) -> dict[str, Any]:
        """Converts rows for the columns, and adds missing columns."""
        return self.fit(rows, unknown, missing)

    def fit(self, rows: Mapping[str, Any], unknown: str, missing: str, plan: Plan | None = None) -> dict[str, Any]:
        """Converts, and carries out a plan once everything is known to fit."""
        specs = self.specs if plan is None else plan.specs(self.specs)
        if specs and missing == ERROR and (lacking := sorted(specs.keys() - rows.keys())):
            raise MissingKeyError(f"key(s) {lacking} are missing, got {sorted(rows)}")
        if specs and unknown == ERROR and (more := sorted(rows.keys() - specs.keys())):
            raise SpecError(f"unknown key(s) {more}, this buffer has {sorted(specs)}")
        block, made = self.place(rows, specs, 2)
        if plan is not None and (plan.changed or plan.folded):
            self.adopt(plan)
        if made:
            self.add_columns(made)
        return block

    def place(
        self, rows: Mapping[str, Any], specs: Mapping[str, Spec], n_lead: int
    ) -> tuple[dict[str, Any], dict[str, Spec]]:
        """Converts rows for columns of these specs; changes nothing.

        Args:
            rows: name -> values, all with the same `n_lead` leading axes.
            specs: of the columns, those of other names excepted.
            n_lead: 1 for rows (n, ...), 2 for (n, T, ...).

        Returns:
            Name -> values, and name -> spec of a new column.
        """
        columns, block, made = self.storage.columns, {}, {}
        ready = ready_arrays(rows, specs) if columns.on_host else {}
        lead: tuple[int, ...] | None = None
        for name, value in rows.items():
            known = specs.get(name)
            if name in ready:
                array = ready[name]
            else:
                array, spec = self.as_rows(name, value, known)
            shape = tuple(array.shape)
            lead = shape[:n_lead] if lead is None else lead
            if len(shape) < n_lead or shape[:n_lead] != lead:
                raise SpecError(f"{name!r} has shape {shape}, others have {lead} rows")
            if known is None:
                made[name] = spec if spec.is_object else replace(spec, shape=shape[n_lead:], fill=0)
            elif name not in ready or shape[n_lead:] != known.shape:
                array = columns.fitted(name, array, lead, known)
            block[name] = array
        return block, made

    def as_rows(self, name: str, value: Any, known: Spec | None) -> tuple[Any, Spec]:
        """Converts to rows; a tensor for a store on a device stays on it."""
        columns = self.storage.columns
        if not columns.on_host and isinstance(value, torch.Tensor):
            spec = spec_of(name, value.dtype) if known is None else known
            own = columns.own(value, spec)
            if own is not None:
                return own, spec
        return as_rows(name, value, known)

    def adopt(self, plan: Plan) -> None:
        """Carries out a plan."""
        adopt(self.storage, plan)

    def add_columns(self, made: dict[str, Spec]) -> None:
        """Adds columns.

        Raises:
            OutOfMemoryError: there is no room; nothing changes.
        """
        linked = {name: source_of(name) or "" for name in made if self.can_link(name, made)}
        require_bytes(self.storage.columns, {name: spec for name, spec in made.items() if name not in linked}, made)
        if len(self.storage):
            LOG.info("%s: new columns %s, zero in the rows before", self.owner, sorted(made))
        self.storage.add_columns(made, linked)

    def can_link(self, name: str, made: Mapping[str, Spec]) -> bool:
        """Whether a new column will be linked: stored in the next rows of another."""
        source, storage = source_of(name), self.storage
        if source is None or made.get(source) != made[name] or made[name].nbytes < SMALLEST:
            return False
        if self.can_link(source, made):  # it has no rows of its own
            return False
        return bool(storage.columns.on_host and storage.is_private and not len(storage))

    def find_ends(self, block: Mapping[str, Any]) -> np.ndarray | None:
        """Marks rows that end episodes, bool (n, T); None if no column says so."""
        return find_marks({name: block[name] for name in self.list_end_columns(block)})

    def list_end_columns(self, names: Iterable[str]) -> list[str]:
        """Lists the columns that mark the end of an episode.

        An episode ends where they are true.
        """
        return ends_among(names)

    # Trajectories

    def add_trajectories(self, trajectories: Trajectories, names: Mapping[str, str] | None = None) -> None:
        """Appends the valid steps of a batch; see `Buffer.add_trajectories`."""
        steps = self.prepare(self.take(trajectories, names))
        if steps.lengths.any():
            self.write_steps(self.convert(steps.values, self.unknown, self.missing), steps)
            steps.record(self.storage)

    def take(self, trajectories: Trajectories, names: Mapping[str, str] | None) -> Steps:
        """Finds the steps of a batch."""
        n_lanes = None if self.takes_any_environment else self.storage.columns.n_lanes
        chosen = self.default_names if names is None else names
        return take_trajectories(trajectories, chosen, n_lanes, limit=self.lane_limit)

    def prepare(self, steps: Steps) -> Steps:
        """Checks steps, and finds out where their episodes begin and end."""
        values = self.prepare_columns(steps.for_columns(self.find_specs(steps.values)))
        steps = replace(steps, values=values).with_ends(self.find_ends(values))
        steps = steps.after(self.storage)
        self.check_steps(steps)
        return steps

    def find_specs(self, values: Mapping[str, Any]) -> dict[str, Spec]:
        """Finds the specs of the columns.

        Also returns the new specs of columns whose dtype will change for values of trajectories.
        """
        return self.specs

    def default_names(self, keys: Collection[str]) -> dict[str, str]:
        """Chooses a key of trajectories for each column, if a program names none.

        The policy version is among them if it has a column.
        """
        names = self.trajectory_names([key for key in keys if key != POLICY_VERSION])
        return add_version(names, keys, self.specs)

    def trajectory_names(self, keys: Collection[str]) -> dict[str, str]:
        """Chooses a key of the trajectories for each column."""
        return {key: key for key in keys}

    def prepare_columns(self, values: dict[str, Any]) -> dict[str, Any]:
        """Converts values (B, T, ...) of trajectories to rows of columns."""
        return values

    def check_steps(self, steps: Steps) -> None:
        """Raises if the buffer refuses these steps."""

    def write_steps(self, block: Mapping[str, Any], steps: Steps) -> None:
        """Appends steps; `block` holds their values, converted for the columns."""
        steps.write(block, self.storage.write)

    def find_longest(self, steps: Steps) -> np.ndarray:
        """Finds the longest episode that each trajectory would be part of.

        Returns its length in steps, int64 (B,).
        """
        done = np.zeros(steps.valid().shape, bool) if steps.done is None else steps.done
        return self.storage.track_episodes().longest(steps.lanes, done, steps.starts, steps.lengths)

    # Writers in other processes

    @property
    def writer(self) -> Intake:
        """The writer for another process: this object, once it has columns."""
        return self

    def choose_names(self, keys: Collection[str]) -> dict[str, str]:
        """Chooses a key for each column that other processes write.

        The policy version is among them, unless the columns exist without it.
        """
        return self.default_names(keys) | ({} if self.specs else {POLICY_VERSION: POLICY_VERSION})

    def define_columns(self, example: Trajectories, names: Mapping[str, str]) -> None:
        """Adds the columns for trajectories like these; writes no steps.

        The trajectories have a valid step.

        Raises:
            MissingKeyError, SpecError: a column does not fit.
        """
        self.convert(self.prepare(self.take(example, names)).values, self.unknown, self.missing)

    # Files

    def keeps_objects(self, name: str) -> bool:
        """Whether a column of this name may hold objects and change its dtype."""
        return False

    def check_columns(self, specs: Mapping[str, Spec]) -> None:
        """Raises ValueError if the buffer cannot have these columns, one or more."""
