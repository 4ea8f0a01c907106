"""Base class of the replay buffers: a store whose columns come with the first rows, a generator, and an exporter."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlstructs.errors import MissingKeyError, OutOfMemoryError, SpecError
from rlstructs.replay import saving
from rlstructs.replay.backing import Backing
from rlstructs.replay.claims import Claims
from rlstructs.replay.columns import Columns, Spec
from rlstructs.replay.copies import CopiedWhole
from rlstructs.replay.drawing import Selection
from rlstructs.replay.export import Exporter
from rlstructs.replay.from_trajectories import Steps, take_trajectories
from rlstructs.replay.given import as_rows
from rlstructs.replay.info_columns import Plan, adopt
from rlstructs.replay.linked_columns import SMALLEST
from rlstructs.replay.reading import Reading
from rlstructs.replay.roles import ends_among, source_of
from rlstructs.replay.span import Span
from rlstructs.replay.store import ALL, Storage
from rlstructs.replay.values import find_marks, generator_of, row_ids
from rlstructs.structures.trajectories import Trajectories

LOG = logging.getLogger("rlstructs")
ERROR, GROW, FILL = "error", "grow", "fill"


class Buffer(CopiedWhole):
    """Base class: a store with named columns, which the first rows define.

    Args:
        n_lanes: number of rings.
        capacity: rows per lane.
        seed: a generator, an int, or None to draw a seed from torch's global generator.
        framework: library of the samples, "torch", "numpy", "jax" or "warp".
        device: of samples; None for the library's default device.
        reading: how rows are read when they are sampled.
        backing: where the bytes are stored.
        columns: to store the rows in; None for host memory.
    """

    # How trajectories with unknown or missing keys are treated; see `_write`.
    _unknown, _missing = ERROR, ERROR

    def __init__(
        self,
        n_lanes: int,
        capacity: int,
        *,
        seed: np.random.Generator | int | None = None,
        framework: str = "torch",
        device: Any = None,
        reading: Reading | None = None,
        backing: Backing | None = None,
        columns: Columns | None = None,
    ) -> None:
        self._export = Exporter(framework, device)
        self._rng = generator_of(seed)
        self._reading = Reading() if reading is None else reading
        self._storage = Storage(n_lanes, capacity, backing=backing, columns=columns)
        self._storage.track_episodes()

    def __len__(self) -> int:
        """Number of valid rows."""
        return len(self._storage)

    @property
    def framework(self) -> str:
        """Library of the samples."""
        return self._export.framework

    @property
    def nbytes(self) -> int:
        """Bytes of rows and bookkeeping; a frame that is stored once counts once."""
        return self._storage.nbytes

    @property
    def _specs(self) -> dict[str, Spec]:
        return self._storage.columns.specs

    # Writing

    def _write(
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
        block = self._checked(rows, unknown, missing)
        if done is None:
            done = self._done(block)
        self._storage.write(block, lanes, lengths=lengths, done=done, starts=starts)

    def _checked(self, rows: Mapping[str, Any], unknown: str, missing: str) -> dict[str, Any]:
        """Converts rows for the columns, and creates missing columns."""
        return self._fit_rows(rows, unknown, missing, None)

    def _fit_rows(self, rows: Mapping[str, Any], unknown: str, missing: str, plan: Plan | None) -> dict[str, Any]:
        """Does what `_checked` does, and carries out a plan once everything is known to fit."""
        specs = self._specs if plan is None else plan.specs(self._specs)
        if specs and missing == ERROR and (lacking := sorted(specs.keys() - rows.keys())):
            raise MissingKeyError(f"key(s) {lacking} are missing, got {sorted(rows)}")
        if specs and unknown == ERROR and (more := sorted(rows.keys() - specs.keys())):
            raise SpecError(f"unknown key(s) {more}, this buffer has {sorted(specs)}")
        block, made = {}, {}
        lead: tuple[int, ...] | None = None
        for name, value in rows.items():
            block[name], spec = self._as_rows(name, value, specs.get(name))
            shape = tuple(block[name].shape)
            lead = shape[:2] if lead is None else lead
            if len(shape) < 2 or shape[:2] != lead:
                raise SpecError(f"{name!r} has shape {shape}, others have {lead} rows")
            if name in specs:
                block[name] = self._storage.columns.fitted(name, block[name], lead, specs[name])
            else:
                made[name] = spec if spec.is_object else Spec(spec.dtype, shape[2:], 0, spec.is_bfloat16)
        if plan is not None:
            self._adopt(plan)
        if made:
            self._make(made)
        return block

    def _adopt(self, plan: Plan) -> None:
        """Carries out a plan."""
        adopt(self._storage, plan)

    def _as_rows(self, name: str, value: Any, known: Spec | None) -> tuple[Any, Spec]:
        columns = self._storage.columns
        if not columns.on_host and isinstance(value, torch.Tensor):
            _, spec = as_rows(name, value[:0], None)
            own = columns.own(value, spec)
            if own is not None:
                return own, spec
        return as_rows(name, value, known)

    def _make(self, made: dict[str, Spec]) -> None:
        columns = self._storage.columns
        needed = sum(spec.nbytes for name, spec in made.items() if not self._is_linked(name, made)) * columns.n_rows
        available = columns.available_bytes()
        if available is not None and needed > available:
            raise OutOfMemoryError(f"{sorted(made)}: {needed:,} bytes are needed, {available:,} are available")
        if len(self):
            LOG.info("%s: new columns %s, zero in the rows before", type(self).__name__, sorted(made))
        linked = {name: source_of(name) or "" for name in made if self._is_linked(name, made)}
        self._storage.add_columns(made, linked)

    def _is_linked(self, name: str, made: Mapping[str, Spec]) -> bool:
        """Whether a new column will be linked: stored in the next rows of another."""
        source, storage = source_of(name), self._storage
        if source is None or made.get(source) != made[name] or made[name].nbytes < SMALLEST:
            return False
        if self._is_linked(source, made):  # it has no rows of its own
            return False
        return bool(storage.columns.on_host and storage.is_private and not len(storage))

    def _done(self, block: Mapping[str, Any]) -> np.ndarray | None:
        return find_marks({name: block[name] for name in self._find_end_columns(block)})

    def _find_end_columns(self, names: Iterable[str]) -> list[str]:
        """The columns that mark the end of an episode where they are true."""
        return ends_among(names)

    def add_trajectories(self, trajectories: Trajectories, names: Mapping[str, str] | None = None) -> None:
        """Appends the valid steps of a batch of `RL_Batcher.get`.

        The lane of a trajectory is its `env_index`; a buffer of one lane appends one trajectory after another.

        Args:
            trajectories: the batch.
            names: column -> key of the trajectories; None for the usual columns of this buffer.

        Raises:
            TypeError, MissingKeyError, SpecError: an argument does not fit; nothing is added.
        """
        n_lanes = None if self._takes_any_environment else self._storage.columns.n_lanes
        steps = take_trajectories(trajectories, self._trajectory_names if names is None else names, n_lanes)
        values = {name: self._prepare_column(name, steps.for_column(name, self._specs.get(name)))
                  for name in steps.values}  # fmt: skip
        steps = replace(steps, values=values).with_ends(self._done(values))
        self._check_steps(steps)
        if steps.lengths.any():
            self._write_steps(self._checked(values, self._unknown, self._missing), steps)

    @property
    def _takes_any_environment(self) -> bool:
        """Whether trajectories of all environments are appended to one lane."""
        return self._storage.columns.n_lanes == 1

    def _write_steps(self, block: Mapping[str, Any], steps: Steps) -> None:
        """Appends steps, of which `block` holds the values as columns take them."""
        steps.write(block, self._storage.write)

    def _check_steps(self, steps: Steps) -> None:
        """Raises if the buffer refuses these steps."""

    def _find_longest(self, steps: Steps) -> np.ndarray:
        """The length of the longest episode that each trajectory would be part of, int64 (B,)."""
        done = np.zeros(steps.valid().shape, bool) if steps.done is None else steps.done
        return self._storage.track_episodes().longest(steps.lanes, done, steps.starts, steps.lengths)

    def _trajectory_names(self, keys: Collection[str]) -> dict[str, str]:
        """Column -> key of the trajectories."""
        return {key: key for key in keys}

    def _prepare_column(self, name: str, values: Any) -> Any:
        """Converts values (B, T, ...) of trajectories to rows of a column."""
        return values

    # Reading

    def _sample(
        self,
        n: int,
        select: Callable[[int], Selection],
        names: Sequence[str] | None = None,
        reading: Reading | None = None,
    ) -> tuple[Selection, dict[str, Any]]:
        """Draws and reads samples; draws those again that another thread or process overwrites meanwhile.

        Args:
            n: number of samples.
            select: draws a given number of samples; their `rows` (B, L) are read, the earliest first.
            names: of columns; None for all.
            reading: how to read rows; None for the buffer's own setting.

        Returns:
            The selection, and name -> array (B, L, ...).
        """
        names = list(self._specs) if names is None else list(names)
        reading = self._reading if reading is None else reading
        found: list[str] = []

        def read(picked: Selection) -> list[Any]:
            arrays = reading.read(self._storage, picked.span, names, picked.rows)
            found[:] = arrays
            return list(arrays.values())

        def selected(count: int) -> Selection:
            picked = select(count)
            picked.earliest = reading.earliest(self._storage, picked.span, picked.rows[:, 0])
            return picked

        picked, arrays = self._storage.sample(n, selected, read)
        return picked, dict(zip(found, arrays, strict=True))

    def _hand_over(self, arrays: Mapping[str, Any]) -> Any:
        """Converts private arrays to a batch of this buffer's framework."""
        return self._export(arrays, self._specs)

    def _checked_rows(self, indexes: Any) -> np.ndarray:
        """Converts row ids to int64, with the same shape, and checks that these rows are valid.

        Raises:
            SpecError, IndexError: they are not integers, or a row is not valid.
        """
        rows = row_ids(indexes, self._storage.columns.n_rows)
        held = self._storage.span().has(rows)
        if not held.all():
            raise IndexError(f"index {rows[~held][0]} holds no row")
        return rows

    def _span(self, length: int = 1) -> Span:
        return self._storage.span(length)

    # Files and copies

    def _locks(self) -> Sequence[Any]:
        return [each._storage.lock for each in (self, *self._inner().values())]

    def _content(self) -> Any:
        return self._storage._content()

    def save(self, path: str | Path) -> None:
        """Saves rows, counters, episodes, priorities and the random stream to a file, atomically.

        Args:
            path: ends in `.npz`, `.pt` or `.h5` (which needs the extra `hdf5`).
        """
        saving.save(self, Path(path))

    def load(self, path: str | Path) -> None:
        """Restores a file of `save`; the next samples are those that would have followed the save.

        Raises:
            FileNotFoundError: there is no such file.
            FileError: it is damaged, of another version, or of a buffer of another size or class; nothing changes.
        """
        saving.load(self, Path(path))

    def _takes_capacity(self, capacity: int) -> bool:
        """Whether a file with this capacity per lane fits."""
        return capacity == self._storage.columns.capacity

    def _keeps_objects(self, name: str) -> bool:
        """Whether a column of this name may hold objects and change its dtype."""
        return False

    def _state(self) -> dict[str, Any]:
        """Settings and counters for the header of a file, as JSON."""
        return {}

    def _inner(self) -> dict[str, Buffer]:
        """Inner buffers, by name; they are saved in the same file."""
        return {}

    def _more_arrays(self) -> dict[str, np.ndarray]:
        """More arrays for a file, beside rows, counters and episodes."""
        return {}

    # Whether `Storage.alignment` may differ from the capacity.
    _may_be_aligned = False

    def _check_columns(self, specs: Mapping[str, Spec]) -> None:
        """Raises ValueError if the buffer cannot have these columns, one or more."""

    def _restorer(
        self, state: Mapping[str, Any], arrays: Mapping[str, np.ndarray], claims: Claims
    ) -> Callable[[], None]:
        """Checks `_state` and `_more_arrays` of a file and returns a function that restores them.

        Raises:
            ValueError, KeyError, TypeError: they do not fit.
        """
        return lambda: None
