"""Takes transitions into a buffer, and counts the returns and lengths of their episodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from rlstructs.errors import SpecError, StateError
from rlstructs.replay.draw.reading import DISCOUNT
from rlstructs.replay.intake.arrays import as_rows, host_array, is_mapping, plain_items
from rlstructs.replay.intake.infos import OBJECTS, Plan, has_empty, held_values, info_objects, plan_columns
from rlstructs.replay.intake.intake import FILL, LOG, Intake
from rlstructs.replay.intake.roles import is_info
from rlstructs.replay.intake.trajectories import Steps
from rlstructs.replay.keep.checks import MOST, Claims, check_aligned
from rlstructs.replay.leave.array_dict import ArrayDict
from rlstructs.replay.rows.blocks import as_slice, rounds
from rlstructs.replay.rows.objects import OBJECT
from rlstructs.replay.rows.spec import Spec, widened
from rlstructs.replay.rows.step_writer import StepWriter
from rlstructs.replay.rows.store import ALL
from rlstructs.replay.tianshou import transitions
from rlstructs.replay.tianshou.options import Options
from rlstructs.replay.tianshou.running import Added, Running
from rlstructs.replay.tianshou.table import Table
from rlstructs.replay.tianshou.transitions import DONE, FLAGS, OBS, OBS_NEXT, REQUIRED, REW, top
from rlstructs.workers.public_names import set_module


@set_module("rlstructs.replay")
class MalformedBufferError(StateError):
    """Raised when an episode is longer than the rows reserved for it."""


class TransitionIntake(Intake):
    """Writes transitions to the columns of a buffer.

    Columns of infos change their dtype if an info needs it; others keep theirs.

    Args:
        table: the rows of the buffer.
        owner: class of the buffer, for the log.
        options: its settings.

    Attributes:
        ignored: keys that are not stored.
        beside: computed keys of a batch, which rows do not have.
        check_shapes: raises if observations of these shapes do not fit, name -> shape of a row; None for no check.
        running: the running episodes.
    """

    def __init__(self, table: Table, owner: str, options: Options) -> None:
        super().__init__(table.storage, owner, options.new_keys, options.missing_keys)
        self.table, self.options, self.takes_any_environment = table, options, not table.is_stacked
        self.ignored = frozenset([DONE, OBS_NEXT] if options.ignore_obs_next else [DONE])
        self.beside = {DISCOUNT} if options.n_step > 1 else set()
        self.check_shapes: Callable[[Mapping[str, tuple[int, ...]]], None] | None = None
        self.running = Running(self.storage)
        self._step_writer = StepWriter(self.storage, FLAGS)
        self._every_lane = np.arange(table.n_lanes).tobytes()

    # One row per lane

    def add(self, batch: Any, buffer_ids: Any = None) -> Added:
        """Appends one transition to each of some lanes; see `ReplayBuffer.add`."""
        with self.storage.lock:  # a file has returns and lengths either with all of these rows or with none
            added = self.add_quickly(batch, buffer_ids)
            return self._add_converted(batch, buffer_ids) if added is None else added

    def _find_lanes(self, buffer_ids: Any) -> Any:
        """Finds the lanes of these ids, int64 (n,).

        None for all in order, False if `_choose_lanes` has to find them.
        """
        if buffer_ids is None:
            return None
        if type(buffer_ids) is np.ndarray:
            if buffer_ids.dtype == np.int64 and buffer_ids.tobytes() == self._every_lane:
                return None
            buffer_ids = buffer_ids.tolist()
        # Types first: other objects may define == in their own way, or raise.
        if type(buffer_ids) is not list or not all(type(lane) is int for lane in buffer_ids):
            return False
        n = len(buffer_ids)
        if n == self.table.n_lanes and buffer_ids == list(range(n)):
            return None
        is_plain = self.table.is_stacked and 0 < n == len(set(buffer_ids))
        is_plain = is_plain and min(buffer_ids) >= 0 and max(buffer_ids) < self.table.n_lanes
        return np.array(buffer_ids) if is_plain else False

    def add_quickly(self, batch: Any, buffer_ids: Any) -> Added | None:
        """Adds one row to each of some lanes by a plan.

        If that is impossible, it changes nothing and returns None.
        """
        lanes = self._find_lanes(buffer_ids)
        if lanes is False or not self.table.lane_size or not is_mapping(batch):
            return None
        # The length of an `ArrayDict` is that of its rows.
        flat: Mapping[str, Any] | None = batch._arrays() if type(batch) is ArrayDict else plain_items(batch)
        if flat is None:
            return None
        if (kept := _kept_names(tuple(flat), self.ignored)) is not None:
            flat = {name: flat[name] for name in kept}
        some, is_row = ALL if lanes is None else lanes, buffer_ids is None and not self.table.is_stacked
        if self.options.save_only_last_obs and (flat := _take_last(flat, not is_row)) is None:
            return None
        heads, writer = self.storage.ring.head[some], self._step_writer
        if lanes is None:
            heads = heads.copy()
        fills = len(flat) < len(self.specs) and self._may_lack(batch, flat)
        convert = self._convert_one if is_row else self._convert_value
        if not self.has_room(some, heads) or not writer.write(flat, lanes, convert, is_row=is_row, fills=fills):
            return None
        rewards, done = as_float64(flat[REW]), writer.done  # not as the column has rounded them
        rewards = rewards[None] if is_row else rewards
        if rewards.shape == (1,) and not self.table.is_stacked:
            return self.running.add_one(heads.item(), rewards.item(), done is not None)
        self.running.shape(rewards.shape[1:])
        return self.settle(self.running.add(some, heads, rewards, done), some, done)

    def _may_lack(self, batch: Any, flat: Mapping[str, Any]) -> bool:
        """Whether rows with these names may omit the other columns.

        False for an empty info, which may be one that has changed.
        """
        specs = self.specs
        if self.options.missing_keys != FILL or not flat.keys() <= specs.keys():
            return False
        if any(top(name) in REQUIRED for name in specs if name not in flat):
            return False
        infos = [key for key in batch.keys() if is_info(key)]  # noqa: SIM118 - not every batch iterates over its keys
        # An info whose column holds objects may itself be an empty one.
        return not any(has_empty({key: batch[key]} if key in specs else batch[key]) for key in infos)

    def _convert_one(self, name: str, value: Any, spec: Spec) -> Any:
        if spec.is_object:
            return info_objects(name, value, 0) if is_info(name) else None
        return self._convert_value(name, value, spec)

    def _convert_value(self, name: str, value: Any, spec: Spec) -> Any:
        if spec.is_object:
            return info_objects(name, value, 1) if is_info(name) else None
        if not is_info(name):
            return as_rows(name, transitions.as_column(name, value, 1), spec)[0]
        # Columns of infos widen where a value would change.
        rows, found = as_rows(name, transitions.as_column(name, value, 1), None)
        is_same = (found.dtype, found.is_bfloat16) == (spec.dtype, spec.is_bfloat16)
        fits = is_same or not (found.is_bfloat16 or spec.is_bfloat16)
        # numpy takes None for float64 where it compares dtypes.
        wide = None if is_same or not fits else widened(rows[:0], rows, spec.dtype)
        return rows if is_same or (wide is not None and wide == spec.dtype) else None

    def _add_converted(self, batch: Any, buffer_ids: Any) -> Added:
        self.require_room()
        lanes, n_axes = self._choose_lanes(buffer_ids)
        rows = self.as_transitions(batch, "add", n_axes)
        transitions.check_required(rows)
        for name, values in rows.items():
            if len(values) != len(lanes):
                raise SpecError(f"{name!r} has {len(values)} rows, expected one for each of {len(lanes)} lanes")
        if not lanes.size:  # empty lists do not say what they hold
            return np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64)
        done = transitions.ends_of(rows)
        self.check_room(lanes, done)
        block = self.convert({name: values[:, None] for name, values in rows.items()}, self.unknown, self.missing)
        return self.write_rows(block, lanes, as_float64(rows[REW]), done)

    def require_room(self) -> None:
        """Raises StateError if the buffer is a placeholder."""
        if not self.table.lane_size:
            raise StateError("a buffer of size 0 takes no rows")

    def _choose_lanes(self, buffer_ids: Any) -> tuple[np.ndarray, int]:
        """Chooses the lanes, int64 (n,).

        Also returns the number of axes that a batch has for them.
        """
        is_stacked, n_lanes = self.table.is_stacked, self.table.n_lanes
        if buffer_ids is None:
            return np.arange(n_lanes), int(is_stacked)
        ids = host_array("buffer_ids", buffer_ids)
        if not is_stacked and (ids.shape != (1,) or ids.dtype.kind not in "iu" or ids[0] != 0):
            raise SpecError(f"buffer_ids must be None or [0] for a buffer of one lane, got {buffer_ids!r}")
        if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
            raise SpecError(f"buffer_ids must be a list of ints, got {buffer_ids!r}")
        lanes = ids.astype(np.int64)
        if (wrong := lanes[(lanes < 0) | (lanes >= n_lanes)]).size:
            raise IndexError(f"buffer_ids: {wrong[0]} is not in [0, {n_lanes})")
        return lanes, 1

    def has_room(self, lanes: Any, heads: np.ndarray) -> bool:
        """Whether there is surely room for one more row per episode.

        `heads` are the heads of these lanes.
        """
        return True

    def check_room(self, lanes: np.ndarray, done: np.ndarray) -> None:
        """Checks the room for one more row of each lane's episode.

        Raises MalformedBufferError if a lane has none.
        """

    def write_rows(self, block: Mapping[str, Any], lanes: np.ndarray, rewards: np.ndarray, done: np.ndarray) -> Added:
        """Writes converted rows `(n, 1, ...)`; a repeated lane gets them in order."""
        self.running.shape(rewards.shape[1:])
        counts = np.empty((3, len(lanes)), np.int64)
        added = counts[0], np.empty(rewards.shape), counts[1], counts[2]
        for part in self.split(lanes):
            heads = self.storage.ring.head[lanes[part]]
            rows = {name: values[part] for name, values in block.items()}
            self.storage.write(rows, as_slice(lanes[part]), done=done[part][:, None])
            found = self.running.add(lanes[part], heads, rewards[part], done[part])
            for whole, own in zip(added, self.settle(found, lanes[part], done[part]), strict=True):
                whole[part] = own
        return added

    def split(self, lanes: np.ndarray) -> Iterable[Any]:
        """Yields parts of a batch, each without a repeated lane."""
        return rounds(lanes)

    def settle(self, added: Added, lanes: slice | np.ndarray, done: np.ndarray | None) -> Added:
        """Returns the result of `add` after rows were written.

        They were written to these lanes; for `done` see `Running.add`.
        """
        return added

    # Columns

    def as_transitions(self, batch: Any, owner: str, n_axes: int) -> dict[str, Any]:
        """Converts to transitions by the buffer's settings."""
        return transitions.as_transitions(batch, owner, self.ignored, n_axes, self.options.save_only_last_obs)

    def convert(self, rows: Mapping[str, Any], unknown: str, missing: str) -> dict[str, Any]:
        if self.check_shapes is not None:
            self.check_shapes({name: tuple(values.shape[2:]) for name, values in rows.items()})
        plan = self.plan_columns(rows, 2)
        self.check_names(plan)
        transitions.check_required(plan.rows)
        return self.fit(plan.rows, unknown, missing, plan)

    def as_rows(self, name: str, value: Any, known: Spec | None) -> tuple[Any, Spec]:
        if is_info(name) and isinstance(value, np.ndarray) and value.dtype == OBJECT:
            return value, OBJECTS
        return super().as_rows(name, value, known)

    def plan_columns(self, rows: Mapping[str, Any], n_lead: int) -> Plan:
        """Plans how columns of infos change for rows (n, ...), or (n, T, ...)."""
        return plan_columns(rows, self.storage.columns.specs, self.read_held, n_lead)

    def read_held(self, name: str) -> np.ndarray:
        """Returns the numbers in the valid rows of a column."""
        return held_values(self.storage, name, self.specs[name])

    def adopt(self, plan: Plan) -> None:
        super().adopt(plan)
        self._warn_of_objects([*plan.changed, *plan.folded])

    def add_columns(self, made: dict[str, Spec]) -> None:
        super().add_columns(made)
        self._warn_of_objects(made)

    def _warn_of_objects(self, names: Iterable[str]) -> None:
        objects = sorted(name for name in names if self.specs[name].is_object)
        if objects and self.options.framework == "torch":
            LOG.warning(
                "%s: %s hold objects, which batches of torch leave out: read them with `get`, or let `framework` be "
                "'numpy'",
                self.owner,
                objects,
            )

    def check_names(self, plan: Plan) -> None:
        """Raises SpecError if columns of these names cannot be added."""
        rows = plan.rows
        if rows.keys() <= self.storage.columns.specs.keys():
            return
        transitions.check_names([*plan.specs(self.specs), *rows])
        if taken := sorted(self.beside & {top(name) for name in rows}):
            raise SpecError(f"{taken[0]!r} is what a batch of this buffer holds beside its keys; give it another name")

    def list_end_columns(self, names: Iterable[str]) -> list[str]:
        return [name for name in FLAGS if name in names]

    # Trajectories

    def trajectory_names(self, keys: Collection[str]) -> dict[str, str]:
        return transitions.trajectory_names(keys, self.options.ignore_obs_next)

    def prepare_columns(self, values: dict[str, Any]) -> dict[str, Any]:
        kept = {name: each for name, each in values.items() if top(name) not in self.ignored}
        return transitions.as_columns(kept, 2, self.options.save_only_last_obs)

    def check_steps(self, steps: Steps) -> None:
        self.require_room()

    def write_steps(self, block: Mapping[str, Any], steps: Steps) -> None:
        running, ring, lanes, lengths = self.running, self.storage.ring, steps.lanes, steps.lengths
        before = ring.head - running.begins
        super().write_steps(block, steps)
        running.find_begins()
        n_new = np.bincount(lanes, lengths, self.table.n_lanes)
        goes_on = (n_new == 0) | (ring.head - running.begins == before + n_new)
        if steps.starts is not None:
            _, first = np.unique(lanes, return_index=True)  # the first trajectory of each lane
            goes_on[lanes[first]] &= ~steps.starts[first, 0]
        running.add_many(np.repeat(lanes, lengths), as_float64(steps.values[REW])[steps.valid()], goes_on)

    # All rows

    def fill(self, rows: Mapping[str, Any]) -> None:
        """Writes rows (maxsize, ...) to an empty buffer.

        The first row of each lane is its oldest.
        """
        lead = self.table.n_lanes, self.table.lane_size
        block = {name: values.reshape(*lead, *values.shape[1:]) for name, values in rows.items()}
        self.write(block, unknown="grow", missing="fill")
        self.recount()

    def recount(self) -> None:
        """Computes returns and lengths again, after rows have changed."""
        rows = self.table.own_rows()
        self.running.find_begins()
        self.running.clear()
        if REW not in self.specs or not rows.total:
            return
        every = rows.newer(self.running.begins)  # rows of episodes that are over do not count
        rewards = transitions.raw_numbers(self.storage.gather([REW], every)[0], self.specs[REW])
        lanes = self.storage.columns.lanes(every)
        self.running.add_many(lanes, as_float64(rewards), np.zeros(self.table.n_lanes, bool))

    def reset(self, keep_statistics: bool) -> None:
        """Drops every row; see `ReplayBuffer.reset`."""
        self.storage.clear()
        self.running.find_begins()
        if not keep_statistics:
            self.running.clear()

    # Files

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the returns and lengths of running episodes, for a file."""
        if not self.storage.is_private:  # other processes may have written
            self.recount()
        return self.running.arrays()

    def keeps_objects(self, name: str) -> bool:
        return is_info(name)

    def check_columns(self, specs: Mapping[str, Spec]) -> None:
        transitions.check_specs(specs, self.beside)
        if self.check_shapes is not None:
            self.check_shapes({name: spec.shape for name, spec in specs.items()})

    def restorer(self, arrays: Mapping[str, np.ndarray], claims: Claims) -> Callable[[], None]:
        """Checks a result of `Running.arrays`; returns a function that restores it.

        Raises:
            ValueError, KeyError: it does not fit.
        """
        check_aligned(claims.ring)
        running, returns, lengths = self.running, arrays["returns"], arrays["lengths"]
        shapes = returns.shape[:1] == lengths.shape == running.lengths.shape
        shapes &= REW not in claims.specs or returns.shape[1:] in ((), claims.specs[REW].shape)
        shapes &= returns.dtype == np.float64 and lengths.dtype == np.int64
        if not shapes or not ((lengths >= 0) & (lengths <= MOST)).all():
            raise ValueError("its returns and lengths of episodes have wrong shapes, dtypes or values")

        def restore() -> None:
            running.returns, running.lengths = returns, lengths
            running.find_begins()
            self.table.stand_in = None

        return restore


@lru_cache
def _kept_names(names: tuple[str, ...], ignored: frozenset[str]) -> tuple[str, ...] | None:
    """Returns the names that are stored; None for all of them."""
    kept = tuple(name for name in names if top(name) not in ignored)
    return None if len(kept) == len(names) else kept


def _take_last(flat: Mapping[str, Any], n_axes: int) -> dict[str, Any] | None:
    """Takes the last of each stack of observations.

    None if one of them is not a stack.
    """
    rows = dict(flat)
    for name, value in flat.items():
        if top(name) in (OBS, OBS_NEXT):
            if type(value) is not np.ndarray or value.ndim <= n_axes or not value.shape[n_axes]:
                return None
            rows[name] = value[:, -1] if n_axes else value[-1]
    return rows


def as_float64(rewards: Any) -> np.ndarray:
    """Converts rewards of any library."""
    return np.asarray(host_array(REW, rewards), np.float64)
