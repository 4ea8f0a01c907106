"""A buffer that is filled row by row, with a value for each tag. Tags are set up with a dtype."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from rlstructs.checks import check_count
from rlstructs.errors import MissingKeyError, SpecError, StateError
from rlstructs.replay.buffer import GROW, Buffer
from rlstructs.replay.claims import Claims, dtype_called
from rlstructs.replay.columns import Spec, cast
from rlstructs.replay.export import Exporter
from rlstructs.replay.from_trajectories import NAMES, Steps, key_of
from rlstructs.replay.given import as_rows, is_mapping, spec_of
from rlstructs.replay.reading import DISCOUNT
from rlstructs.replay.roles import ends_among
from rlstructs.replay.step_writer import StepWriter
from rlstructs.replay.store import ALL, Storage
from rlstructs.replay.values import as_whole, host_array
from rlstructs.structures.trajectories import Trajectories

# Further tags of trajectories, beside `NAMES`, which is set up if no tag is.
MORE_NAMES = {"done": "_observation/done", "dones": "_observation/done"}


class TaggedBuffer(Buffer):
    """A buffer with a column for each tag.

    Args:
        n_lanes, capacity: as of `Buffer`.
        max_episode_steps: an episode ends with so many rows; of trajectories, which say where theirs end, a longer
            one is an error. None or infinity for no limit.
        settings: the others of `Buffer`.
    """

    def __init__(self, n_lanes: int, capacity: int, max_episode_steps: float | None, **settings: Any) -> None:
        super().__init__(n_lanes, capacity, **settings)
        # Infinity is what rlberry's agents give for an environment without a limit.
        has_limit = max_episode_steps is not None and max_episode_steps != math.inf
        self._max_episode_steps = check_count("max_episode_steps", max_episode_steps) if has_limit else None
        self._tags: dict[str, Spec] = {}
        self._step_writer: StepWriter | None = None  # once there are columns

    def __repr__(self) -> str:
        tags = ", ".join(f"{tag} {_dtype_name(spec)}" for tag, spec in self._tags.items())
        columns = self._storage.columns
        lanes = "" if columns.n_lanes == 1 else f" in {columns.n_lanes} lanes"
        return f"{type(self).__name__}({len(self)} of {columns.n_rows} rows{lanes}: {tags or 'no tags'})"

    @property
    def data(self) -> Mapping[str, np.ndarray]:
        """Tag -> the rows that are there, `(len, ...)`, a copy made each time that one is asked for.

        They come by lane and then by slot: with one lane, `data[tag][indices]` is what a sample holds.
        """
        return _StoredRows(self._storage, self._tags)

    @property
    def tags(self) -> list[str]:
        """Tags in the order in which they were set up."""
        return list(self._tags)

    @property
    def dtypes(self) -> dict[str, Any]:
        """Tag -> dtype of numpy, or torch's bfloat16, which numpy has not."""
        return {tag: torch.bfloat16 if spec.is_bfloat16 else spec.dtype for tag, spec in self._tags.items()}

    @property
    def max_episode_steps(self) -> int | None:
        """How long an episode may be; None for no limit."""
        return self._max_episode_steps

    def setup_entry(self, tag: str, dtype: Any) -> None:
        """Adds a tag, of which every row will hold a value. The shape of values is that of the first.

        Args:
            tag: its name.
            dtype: in which values are stored and come back.

        Raises:
            SpecError: the tag is there already, or the dtype is none of numbers.
            StateError: there are rows already, which have no such value.
        """
        if not isinstance(tag, str) or not tag:
            raise SpecError(f"setup_entry: a tag must be a string, got {tag!r}")
        if tag in self._tags:
            raise SpecError(f"setup_entry: {tag!r} is there already")
        if tag == DISCOUNT and self._reading.n_step > 1:
            raise SpecError(f"setup_entry: {tag!r} is what a sample with n_step above 1 holds beside its tags")
        if len(self):
            raise StateError(f"setup_entry: {tag!r} comes too late, there are rows; call clear first")
        self._tags[tag] = spec_of(tag, dtype)
        self._step_writer = None

    def append(self, data: Mapping[str, Any], lane: int | None = None) -> None:
        """Copies a row into the buffer.

        Args:
            data: tag -> value, of any library, one for each tag; no more may be lost than precision of floats, so
                that a tag of whole numbers takes a float of 1.0, and none of 0.5. Where several lanes get a row,
                values are `(n_lanes, ...)`.
            lane: which gets it; None for every lane.

        Raises:
            MissingKeyError, SpecError, TypeError: something does not fit; nothing has changed.
            StateError: there is no tag yet.
        """
        lanes, n_lanes = self._choose_lanes(lane), self._storage.columns.n_lanes
        writer, is_plain = self._step_writer, type(data) is dict and (lane is None or n_lanes == 1)
        if writer is None or not is_plain or writer.write(data, is_row=n_lanes == 1) is None:
            self._append(data, lanes, () if n_lanes == 1 or lane is not None else (n_lanes,))
            if self._step_writer is None:
                self._step_writer = StepWriter(self._storage, ends_among(self._specs))
        if self._max_episode_steps is not None:
            self._end_longest(lanes, self._max_episode_steps)

    def end_episode(self, lane: int | None = None) -> None:
        """Ends the episode that goes on in a lane, if one does; None for every lane."""
        self._storage.end_episodes(self._choose_lanes(lane))

    def add_trajectories(self, trajectories: Trajectories, names: Mapping[str, str] | None = None) -> None:
        """Appends the valid steps of what `RL_Batcher.get` gives.

        The lane of a row is its `env_index`; a buffer of one lane takes one trajectory after another. If no tag
        is set up yet, those of `names` are, with the dtypes of the trajectories.

        Args:
            trajectories: a batch.
            names: tag -> key of the trajectories; None for what rlberry's agents call them (`observations`,
                `next_observations`, `actions`, `rewards`, `terminated`, `truncated`, `dones`), of which those
                that are set up are taken.

        Raises:
            TypeError, MissingKeyError, SpecError: something does not fit; the buffer is as it was.
        """
        super().add_trajectories(trajectories, names)
        if not self._tags:
            self._tags = {name: Spec(spec.dtype, is_bfloat16=spec.is_bfloat16) for name, spec in self._specs.items()}

    def clear(self) -> None:
        """Drops every row and what goes on in episodes; tags and the generator stay."""
        self._storage.clear()

    # Writing

    def _choose_lanes(self, lane: Any) -> slice:
        if lane is None:
            return ALL
        if isinstance(lane, (bool, np.bool_)) or not isinstance(lane, (int, np.integer)):
            raise TypeError(f"lane must be an int, got {lane!r}")
        n_lanes = self._storage.columns.n_lanes
        if not 0 <= lane < n_lanes:
            raise SpecError(f"lane {lane} is not in [0, {n_lanes})")
        return slice(int(lane), int(lane) + 1)

    def _append(self, data: Mapping[str, Any], lanes: slice, lead: tuple[int, ...]) -> None:
        if not self._tags:
            raise StateError("append: there is no tag yet; call setup_entry first")
        if not is_mapping(data):
            raise TypeError(f"append: needs a mapping of tags to values, got {type(data).__name__}")
        rows = {}
        for tag in data.keys():  # noqa: SIM118 - not every mapping iterates over its keys
            values = host_array(tag, data[tag])
            row = self._specs[tag].shape if tag in self._specs else values.shape[len(lead) :]
            if values.shape != (*lead, *row):
                raise SpecError(f"append: {tag!r} has shape {values.shape}, needed is {(*lead, *row)}")
            rows[tag] = values[:, None] if lead else values[None, None]
        self._write(rows, lanes)

    def _checked(self, rows: Mapping[str, Any], unknown: str, missing: str) -> dict[str, Any]:
        if self._tags and (lacking := sorted(self._tags.keys() - rows.keys())):
            raise MissingKeyError(f"tag(s) {lacking} are missing, got {sorted(map(str, rows))}")
        if self._tags and (more := sorted(map(str, rows.keys() - self._tags.keys()))):
            raise SpecError(f"unknown tag(s) {more}, this buffer has {sorted(self._tags)}")
        return super()._checked(rows, GROW, missing)  # a tag gets its column with the first row

    def _as_rows(self, name: str, value: Any, known: Spec | None) -> tuple[Any, Spec]:
        if name not in self._tags:  # of trajectories, where no tag is set up
            return super()._as_rows(name, value, known)
        spec = self._tags[name]
        rows, _ = as_rows(name, value, spec)
        return rows if rows.dtype == spec.dtype else cast(name, as_whole(rows, spec), spec.dtype), spec

    def _end_longest(self, lanes: slice, limit: int) -> None:
        """Ends the episodes of these lanes that have so many steps.

        An error would stop rlberry's agents: they reset the environment at each `fit`, and end no episode then.
        """
        assert self._storage.episodes is not None
        heads = self._storage.ring.head[lanes]
        n_steps = self._storage.episodes.open_lengths(lanes, int(heads[0]) if heads.size == 1 else None)
        if int(n_steps.max()) >= limit:
            self._storage.end_episodes(np.arange(self._storage.columns.n_lanes)[lanes][n_steps >= limit])

    def _check_steps(self, steps: Steps) -> None:
        if self._max_episode_steps is None:
            return
        longest = self._find_longest(steps)
        if longest.max(initial=0) > self._max_episode_steps:
            raise SpecError(
                f"add_trajectories: an episode of lane {steps.lanes[longest.argmax()]} would have {longest.max()} "
                f"steps, max_episode_steps is {self._max_episode_steps}"
            )

    def _trajectory_names(self, keys: Collection[str]) -> dict[str, str]:
        known = NAMES | MORE_NAMES
        return {tag: key_of(tag, known) for tag in self._tags} if self._tags else dict(NAMES)

    # Files and copies

    def _state(self) -> dict[str, Any]:
        return {"tags": {tag: _dtype_name(spec) for tag, spec in self._tags.items()}}

    def _restorer(
        self, state: Mapping[str, Any], arrays: Mapping[str, np.ndarray], claims: Claims
    ) -> Callable[[], None]:
        tags = {tag: spec_of(tag, _check_dtype_name(tag, name)) for tag, name in state["tags"].items()}
        if self._tags and tags != self._tags:
            raise ValueError(f"it has the tags {state['tags']}, this is {self}")
        columns = {tag: spec_of(tag, _dtype_name(spec)) for tag, spec in claims.specs.items()}
        if columns and columns != tags:
            raise ValueError(f"it has the tags {list(tags)}, and other columns: {list(columns)}")

        def restore() -> None:
            self._tags, self._step_writer = tags, None

        return restore


class _StoredRows(Mapping[str, np.ndarray]):
    """Tag -> rows of a store, read on access."""

    def __init__(self, storage: Storage, tags: Mapping[str, Spec]) -> None:
        self._storage, self._tags = storage, tags

    def __getitem__(self, tag: str) -> np.ndarray:
        if tag not in self._tags:
            raise MissingKeyError(f"no tag {tag!r} in this buffer, there are {sorted(self._tags)}")
        specs = self._storage.columns.specs
        if tag not in specs:  # no row has come yet
            return np.zeros(0, self._tags[tag].dtype)
        [rows] = self._storage.gather([tag], np.sort(self._storage.span().every_row()))
        array: np.ndarray = Exporter("numpy").one(tag, rows, specs[tag])
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._tags)

    def __len__(self) -> int:
        return len(self._tags)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self._tags)}, {len(self._storage)} rows)"


def _check_dtype_name(tag: str, name: Any) -> str:
    return "bfloat16" if name == "bfloat16" else dtype_called(tag, name).name


def _dtype_name(spec: Spec) -> str:
    return "bfloat16" if spec.is_bfloat16 else spec.dtype.name
