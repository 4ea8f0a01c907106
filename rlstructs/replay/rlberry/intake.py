"""Converts rows of rlberry's buffer before they are written.

A row has a value for each tag, with the tag's dtype.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from rlstructs.errors import MissingKeyError, SpecError, StateError
from rlstructs.replay.draw.view import View
from rlstructs.replay.intake.arrays import as_rows, as_whole, from_bits, host_array, is_mapping, spec_of
from rlstructs.replay.intake.intake import GROW, Intake
from rlstructs.replay.intake.roles import ends_among
from rlstructs.replay.intake.trajectories import NAMES, STATES, Steps, key_of
from rlstructs.replay.keep.checks import Claims, dtype_called
from rlstructs.replay.leave.export import GatheredColumn
from rlstructs.replay.rows.spec import Spec, cast
from rlstructs.replay.rows.step_writer import StepWriter
from rlstructs.replay.rows.store import ALL, Storage
from rlstructs.structures.trajectories import Trajectories

# Further tags of trajectories. Where the program has set up no tag, `NAMES` is set up, without these.
MORE_NAMES = {"done": "_observation/done", "dones": "_observation/done"}


class TaggedIntake(Intake):
    """Writes rows that hold a value for each tag.

    Args:
        storage, owner: see `Intake`.
        max_episode_steps: the longest episode; None for no limit.

    Attributes:
        tags: tag -> spec of a single value.
    """

    def __init__(self, storage: Storage, owner: str, max_episode_steps: int | None) -> None:
        super().__init__(storage, owner)
        self.max_episode_steps = max_episode_steps
        self.tags: dict[str, Spec] = {}
        self._step_writer: StepWriter | None = None  # once there are rows

    def set_tags(self, tags: dict[str, Spec]) -> None:
        """Replaces the tags."""
        self.tags, self._step_writer = tags, None

    def choose_lanes(self, lane: Any) -> slice:
        """Returns the lanes for an argument `lane`.

        Raises:
            TypeError, SpecError: it is neither None nor the number of a lane.
        """
        if lane is None:
            return ALL
        if isinstance(lane, (bool, np.bool_)) or not isinstance(lane, (int, np.integer)):
            raise TypeError(f"lane must be an int, got {lane!r}")
        n_lanes = self.storage.columns.n_lanes
        if not 0 <= lane < n_lanes:
            raise SpecError(f"lane {lane} is not in [0, {n_lanes})")
        return slice(int(lane), int(lane) + 1)

    def append(self, data: Mapping[str, Any], lane: int | None) -> None:
        """Writes a row; see `ChunkReplayBuffer.append`."""
        lanes = ALL if lane is None else self.choose_lanes(lane)
        n_lanes, writer = self.storage.columns.n_lanes, self._step_writer
        has_lanes = lane is None and n_lanes > 1
        is_plain = type(data) is dict and (has_lanes or n_lanes == 1)
        convert, is_row = self._convert_value, not has_lanes
        if writer is None or not is_plain or writer.write(data, None, convert, is_row=is_row) is None:
            self._append_converted(data, lanes, (n_lanes,) if has_lanes else ())
            if writer is None:
                writer = self._step_writer = StepWriter(self.storage, ends_among(self.specs))
        if self.max_episode_steps is not None:
            # An error would stop rlberry's agents: they reset the environment at each `fit`, and end no episode then.
            writer.end_episodes(lanes, self.max_episode_steps)

    def _convert_value(self, name: str, value: Any, spec: Spec) -> Any:
        return self.as_rows(name, value, spec)[0]

    def _append_converted(self, data: Mapping[str, Any], lanes: slice, lead: tuple[int, ...]) -> None:
        if not self.tags:
            raise StateError("append: there is no tag yet; call setup_entry first")
        if not is_mapping(data):
            raise TypeError(f"append: needs a mapping of tags to values, got {type(data).__name__}")
        rows = {}
        for tag in data.keys():  # noqa: SIM118 - not every mapping iterates over its keys
            values = host_array(tag, data[tag])
            row = self.specs[tag].shape if tag in self.specs else values.shape[len(lead) :]
            if values.shape != (*lead, *row):
                raise SpecError(f"append: {tag!r} has shape {values.shape}, expected {(*lead, *row)}")
            rows[tag] = values[:, None] if lead else values[None, None]
        self.write(rows, lanes)

    def end_episodes(self, lanes: slice) -> None:
        """Ends the unfinished episodes of these lanes."""
        (self.storage if self._step_writer is None else self._step_writer).end_episodes(lanes)

    def convert(self, rows: Mapping[str, Any], unknown: str, missing: str) -> dict[str, Any]:
        if self.tags and (lacking := sorted(self.tags.keys() - rows.keys())):
            raise MissingKeyError(f"tag(s) {lacking} are missing, got {sorted(map(str, rows))}")
        if self.tags and (more := sorted(map(str, rows.keys() - self.tags.keys()))):
            raise SpecError(f"unknown tag(s) {more}, this buffer has {sorted(self.tags)}")
        return super().convert(rows, GROW, missing)  # a tag gets its column with the first row

    def as_rows(self, name: str, value: Any, known: Spec | None) -> tuple[Any, Spec]:
        if name not in self.tags:  # of trajectories, where no tag is set up
            return super().as_rows(name, value, known)
        spec = self.tags[name]
        rows, _ = as_rows(name, value, spec)
        return rows if rows.dtype == spec.dtype else cast(name, as_whole(rows, spec), spec.dtype), spec

    # Trajectories

    def add_trajectories(self, trajectories: Trajectories, names: Mapping[str, str] | None = None) -> None:
        super().add_trajectories(trajectories, names)
        self._adopt_columns()

    def _adopt_columns(self) -> None:
        """Makes the columns tags, if there are none."""
        if not self.tags:
            self.set_tags({tag: Spec(spec.dtype, is_bfloat16=spec.is_bfloat16) for tag, spec in self.specs.items()})

    def choose_names(self, keys: Collection[str]) -> dict[str, str]:
        return self.trajectory_names(keys) if self.tags else super().choose_names(keys)

    def define_columns(self, example: Trajectories, names: Mapping[str, str]) -> None:
        super().define_columns(example, names)
        self._adopt_columns()

    def trajectory_names(self, keys: Collection[str]) -> dict[str, str]:
        known = NAMES | STATES | MORE_NAMES
        return {tag: key_of(tag, known) for tag in self.tags} if self.tags else dict(NAMES)

    def check_steps(self, steps: Steps) -> None:
        if self.max_episode_steps is None:
            return
        longest = self.find_longest(steps)
        if longest.max(initial=0) > self.max_episode_steps:
            raise SpecError(
                f"add_trajectories: an episode of lane {steps.lanes[longest.argmax()]} would have {longest.max()} "
                f"steps, max_episode_steps is {self.max_episode_steps}"
            )

    # Files

    def state(self) -> dict[str, Any]:
        """Returns the tags, for the header of a file."""
        return {"tags": {tag: dtype_name(spec) for tag, spec in self.tags.items()}}

    def tags_in(self, state: Mapping[str, Any], claims: Claims) -> dict[str, Spec]:
        """Reads the tags of a file.

        Raises:
            ValueError, KeyError: they do not fit.
        """
        tags = {tag: spec_of(tag, _check_dtype_name(tag, name)) for tag, name in state["tags"].items()}
        if self.tags and tags != self.tags:
            raise ValueError(f"it has the tags {state['tags']}, this buffer {self.state()['tags']}")
        columns = {tag: spec_of(tag, dtype_name(spec)) for tag, spec in claims.specs.items()}
        if columns and columns != tags:
            raise ValueError(f"it has the tags {list(tags)}, and other columns: {list(columns)}")
        return tags


class StoredRows(Mapping[str, GatheredColumn]):
    """Tag -> rows of a store, which are read where they are indexed."""

    def __init__(self, intake: TaggedIntake) -> None:
        self._intake = intake

    def __getitem__(self, tag: str) -> GatheredColumn:
        tags, storage = self._intake.tags, self._intake.storage
        spec = storage.columns.specs.get(tag, tags.get(tag))
        if tag not in tags or spec is None:
            raise MissingKeyError(f"no tag {tag!r} in this buffer, there are {sorted(tags)}")
        dtype = np.dtype(np.float32) if spec.is_bfloat16 else spec.dtype
        return GatheredColumn((len(storage), *spec.shape), dtype, partial(self._gather, tag))

    def _gather(self, tag: str, numbers: np.ndarray) -> np.ndarray:
        """Copies the rows with these numbers, counted by lane and slot."""
        storage = self._intake.storage
        spec = storage.columns.specs.get(tag)
        if spec is None:  # no row has come yet
            return np.zeros(numbers.shape, self._intake.tags[tag].dtype)

        def read(view: View, some: np.ndarray) -> list[Any]:
            return storage.gather([tag], view.by_slot(some))

        [rows] = storage.read_at(numbers, read, lambda view, some: view.by_slot(some))
        return from_bits(rows) if spec.is_bfloat16 else rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._intake.tags)

    def __len__(self) -> int:
        return len(self._intake.tags)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)}, {len(self._intake.storage)} rows)"


def _check_dtype_name(tag: str, name: Any) -> str:
    return "bfloat16" if name == "bfloat16" else dtype_called(tag, name).name


def dtype_name(spec: Spec) -> str:
    """Returns the name of a dtype, in files and for users."""
    return "bfloat16" if spec.is_bfloat16 else spec.dtype.name
