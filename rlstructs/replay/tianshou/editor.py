"""Changes the rows of a buffer in other ways than by adding transitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from rlstructs.errors import SpecError
from rlstructs.replay.draw.reading import Gather, read_sources
from rlstructs.replay.draw.view import AnyView
from rlstructs.replay.intake.arrays import as_rows, from_bits, host_array, is_mapping
from rlstructs.replay.intake.infos import info_items
from rlstructs.replay.intake.roles import is_info
from rlstructs.replay.leave.array_dict import ArrayDict
from rlstructs.replay.rows.lanes import REWRITES
from rlstructs.replay.rows.spec import Spec
from rlstructs.replay.tianshou import transitions
from rlstructs.replay.tianshou.intake import TransitionIntake
from rlstructs.replay.tianshou.options import reading_of
from rlstructs.replay.tianshou.table import Table
from rlstructs.replay.tianshou.transitions import DONE, FLAGS, OBS_NEXT, RESERVED, REW, as_column, sources_of, top

# Rows that are looked at together, so that little memory is needed.
AT_ONCE = 1 << 16


class Editor:
    """Changes rows.

    Args:
        table: the rows of the buffer.
        intake: its intake.
    """

    def __init__(self, table: Table, intake: TransitionIntake) -> None:
        self.table, self.intake = table, intake

    def append(self, other: Editor) -> np.ndarray:
        """Appends every row of another buffer; see `ReplayBuffer.update`."""
        table, intake, storage = self.table, self.intake, self.table.storage
        with other.table.storage.lock:
            rows = other.table.rows()
            if not rows.total or not table.lane_size:
                return np.zeros(0, np.int64)
            if other is self:
                raise SpecError("update: a buffer cannot be appended to itself")
            at = rows.every_row()
            starts = rows.prev(at) == at
            block, is_unfinished = self._rows_of_other(other.table, at), at[-1] in rows.unfinished()
        head, n, capacity = int(storage.ring.head[0]), at.size, storage.columns.capacity
        intake.write(block, starts=starts[None], unknown=intake.unknown, missing=intake.missing)
        if not is_unfinished:
            storage.end_episodes()
        running, theirs = intake.running, other.intake.running
        running.find_begins()
        running.shape(theirs.returns.shape[1:])
        running.clear()
        lanes = np.flatnonzero(other.table.own_rows().counts())
        if lanes.size:  # the last of them was the last to be copied
            running.returns[0], running.lengths[0] = theirs.returns[lanes[-1]], theirs.lengths[lanes[-1]]
        placed = storage.columns.at_steps(0, head + np.arange(n))
        placed[: max(n - capacity, 0)] = -1 - table.maxsize  # -1 is the newest row
        return placed

    def _rows_of_other(self, other: Table, at: np.ndarray) -> dict[str, Any]:
        """Converts rows of another buffer to rows of this one, (1, n, ...)."""
        keeps_next = any(top(name) == OBS_NEXT for name in self.table.columns)
        names = [name for name in other.specs if name in other.columns or keeps_next]
        names = [name for name in names if top(name) not in self.intake.ignored]
        sources = sources_of(tuple(names), tuple(other.columns))
        arrays = read_sources(other.rows(), other.gather, other.columns, sources, at, reading_of())
        return {name: transitions.raw_numbers(arrays[name], other.specs[name])[None] for name in names}

    # Columns

    def set_batch(self, batch: Any) -> None:
        """Replaces columns; see `ReplayBuffer.set_batch`."""
        self.intake.require_room()
        rows = self._whole_columns(batch, "set_batch")
        if unknown := sorted({top(name) for name in rows} - set(RESERVED)):
            raise SpecError(f"set_batch: unknown key(s) {unknown}, a transition has {list(RESERVED)}")
        if self.table.rows().total:
            self.replace(rows, np.arange(self.table.maxsize))
        else:
            self.intake.fill(rows)

    def set_columns(self, columns: Any) -> None:
        """Replaces all columns; see `ReplayBuffer._meta`."""
        given = self._whole_columns(columns, "_meta")
        if lacking := [name for name in self.table.columns if name not in given]:
            raise SpecError(f"_meta: {lacking[0]!r} is a column, which cannot be taken away")
        # Columns that stay the same are left alone: frames that are stored once would be stored again.
        changed = {name: values for name, values in given.items() if not self._holds(name, values)}
        self.replace(changed, np.arange(self.table.maxsize))

    def _whole_columns(self, batch: Any, owner: str) -> dict[str, Any]:
        rows = transitions.as_transitions(batch, owner, self.intake.ignored, 1, False)
        if wrong := [name for name, values in rows.items() if len(values) != self.table.maxsize]:
            raise SpecError(f"{owner}: {wrong[0]!r} has {len(rows[wrong[0]])} rows, expected {self.table.maxsize}")
        return rows

    def _holds(self, name: str, values: Any) -> bool:
        """Whether a column holds these values."""
        table = self.table
        if name not in table.columns or values.shape != (column := table.column(name)).shape:
            return False
        if table.columns[name].is_object:
            return bool(all(one is other for one, other in zip(values, column, strict=True)))
        parts = (slice(start, start + AT_ONCE) for start in range(0, table.maxsize, AT_ONCE))
        return all(np.array_equal(host_array(name, values[part]), column[part], equal_nan=True) for part in parts)

    def set_stand_in(self, name: str, value: Any) -> bool:
        """Takes values in place of the rewards of several agents.

        Only values of another shape are taken; returns whether they were.
        """
        table, spec = self.table, self.table.columns.get(name)
        if name != REW or spec is None or not spec.shape:
            return False
        values = as_column(name, value, 1)
        if len(values) != table.maxsize or values.shape[1:] == spec.shape:
            return False
        table.stand_in = table.storage.columns.converted(name, as_rows(name, values, spec)[0], spec).copy()
        return True

    def set_array(self, seq: Any, key: str, index: Any, default_value: Any) -> None:
        """Sets a column or some rows of it; see `ReplayBuffer.set_array_at_key`."""
        if not isinstance(key, str):
            raise TypeError(f"key must be a string, got {key!r}")
        if key == DONE or top(key) in self.intake.ignored:
            why = "set terminated or truncated" if key == DONE else "this buffer ignores it"
            raise SpecError(f"{key!r} is not stored: {why}")
        if any(name.startswith(f"{key}/") for name in self.table.columns):
            raise SpecError(f"{key!r} is nested; name one of its arrays")
        rows = info_items(key, seq, 1, "set_array_at_key") if is_info(key) else {key: as_column(key, seq, 1)}
        at = np.arange(self.table.maxsize) if index is None else self.table.locate(index).reshape(-1)
        for values in rows.values():
            if len(values) != len(at):
                raise SpecError(f"{key!r}: {len(values)} rows came for {len(at)}")
        self.replace(rows, at, default_value, some=index is not None)

    def replace(self, rows: Mapping[str, Any], at: np.ndarray, default: Any = None, some: bool = False) -> None:
        """Puts values into columns, new ones too.

        `some` says that there are other rows, which get the default in new columns.
        """
        intake, specs = self.intake, self.table.columns
        if all(name in specs and name not in FLAGS and not is_info(name) for name in rows):  # only values change
            self._put_all(intake.place(rows, specs, 1)[0], at)
            return
        plan = intake.plan_columns(rows, 1)
        intake.check_names(plan)
        specs = plan.specs(self.table.columns)
        placed, made = intake.place(plan.rows, specs, 1)
        fills = {name: self._default(name, spec, default) for name, spec in made.items()} if some else {}
        if made:
            transitions.check_required({**specs, **made})  # or rows could never be added
        intake.adopt(plan)
        if made:
            intake.add_columns(made)
        rebuild = None if rows.keys().isdisjoint(FLAGS) else self.prepare_rebuild()
        for name, value in fills.items():
            self.fill(name, value)
        self._put_all(placed, at)
        if rebuild is not None:
            rebuild()

    def _put_all(self, placed: Mapping[str, Any], at: np.ndarray) -> None:
        for name, values in placed.items():
            self.put(name, at, values)
        if REW in placed:
            self.table.stand_in = None

    def put(self, name: str, at: np.ndarray, values: Any) -> None:
        """Sets rows of a column."""
        if name in self.table.storage.columns.links:  # in empty rows it has no bytes of its own
            held = self.table.own_rows().has(at)
            at, values = at[held], values[held]
        self.table.storage.put({name: values}, at)

    def _default(self, name: str, spec: Spec, default: Any) -> Any:
        """Returns the value of a new column in the other rows."""
        if spec.is_object:
            return default
        if default is None and not (spec.dtype.kind in "fc" or spec.is_bfloat16):
            raise SpecError(f"{name!r} is {spec.dtype}, which has no NaN: default_value is needed")
        value, _ = as_rows(name, np.asarray(np.nan if default is None else default), spec)
        if value.shape:
            raise SpecError(f"default_value must be a number, got {default!r}")
        return self.table.storage.columns.converted(name, value, spec)

    def fill(self, name: str, value: Any) -> None:
        """Sets all rows of a column to one value."""
        storage = self.table.storage
        with storage.lock, storage.clock.counting(REWRITES):
            storage.columns.put_rows(name, slice(None), value)

    def prepare_rebuild(self) -> Callable[[], None]:
        """Returns a function that finds episodes again after flags have changed.

        Episodes that were cut without a flag stay cut.
        """
        storage = self.table.storage
        cells, lead = storage.columns.cells, (self.table.n_lanes, -1)
        cut = storage.track_episodes().end().reshape(lead) & ~(cells[FLAGS[0]] | cells[FLAGS[1]])

        def rebuild() -> None:
            storage.rebuild_episodes(cells[FLAGS[0]] | cells[FLAGS[1]] | cut)
            self.intake.recount()

        return rebuild

    # NaN

    def find_nulls(self) -> dict[str, np.ndarray]:
        """Marks NaN in the rows: name -> bool (n, *shape), in order."""
        with self.table.storage.lock:
            rows = self.table.rows()
            others = {name: np.zeros((rows.total, *spec.shape), bool) for name, spec in self.table.columns.items()}
            return {**others, **dict(self._nulls(rows, self.table.gather))}

    def has_nulls(self) -> bool:
        """Whether a row holds NaN."""
        with self.table.storage.lock:
            return any(null.any() for _, null in self._nulls(self.table.rows(), self.table.gather))

    def _nulls(self, rows: AnyView, gather: Gather) -> Iterator[tuple[str, np.ndarray]]:
        """Yields each column of floats, and marks of its NaN.

        The marks are bool (n, *shape), of its rows in order.
        """
        at = rows.every_row()
        for name, spec in self.table.columns.items():
            if spec.dtype.kind not in "fc" and not spec.is_bfloat16:
                continue
            null = np.zeros((at.size, *spec.shape), bool)
            for start in range(0, at.size, AT_ONCE):
                part = slice(start, start + AT_ONCE)
                [values] = gather([name], at[part])
                null[part] = np.isnan(from_bits(values) if spec.is_bfloat16 else values)
            yield name, null

    def drop_nulls(self) -> np.ndarray | None:
        """Drops the rows that hold NaN; see `ReplayBuffer.dropnull`.

        Returns:
            The former row ids of the other rows, in order, int64; None if there are no rows to drop.
        """
        rows, storage, n_lanes = self.table.own_rows(), self.table.storage, self.table.n_lanes
        at = rows.every_row()
        keep = np.ones(at.size, bool)
        for _, null in self._nulls(rows, storage.gather):
            keep &= ~null.any(axis=tuple(range(1, null.ndim)))
        if keep.all():
            return None
        kept, columns = at[keep], storage.columns
        # A row begins an episode if it did, or if the one before it is gone.
        starts = ((rows.prev(at) == at) | ~np.append(True, keep[:-1]))[keep]
        counts = np.bincount(columns.lanes(kept), minlength=n_lanes)
        valid = np.arange(counts.max(initial=0)) < counts[:, None]
        names = list(columns.specs)
        block = {name: _padded(valid, values) for name, values in zip(names, storage.gather(names, kept), strict=True)}
        open_lanes = columns.lanes(np.intersect1d(rows.unfinished(), kept))
        storage.clear()
        storage.write(block, lengths=counts, done=transitions.ends_of(block), starts=_padded(valid, starts))
        storage.end_episodes(np.setdiff1d(np.arange(n_lanes), open_lanes))
        self.intake.recount()
        return kept


def _padded(valid: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Keeps values (n, ...) where `valid` (lanes, T) is true; zeros elsewhere."""
    block = np.zeros((*valid.shape, *values.shape[1:]), values.dtype)
    block[valid] = values
    return block


class StoredColumns(ArrayDict):
    """The columns of a buffer by name, read-only arrays.

    A value that is set under a name is stored. But if each reward has several values, for several agents, rewards of
    another shape, as for one agent, only stand in for them: in `rew` and in rows that are read by index, until rewards
    that fit are set. Samples, files and added rows use the stored ones.
    """

    __slots__ = ("_editor", "_set_column")

    def __init__(self, editor: Editor, set_column: Callable[[Any, str], None]) -> None:
        dict.__init__(self, {name: editor.table.show(name) for name in editor.table.columns})
        object.__setattr__(self, "_editor", editor)
        object.__setattr__(self, "_set_column", set_column)

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        """The columns, for programs that make others of them: `Batch(**buffer._meta.__dict__, returns=returns)`."""
        return self.to_dict()

    def _set(self, name: str, value: Any) -> None:
        if is_mapping(value):
            if name != REW:  # programs put an empty batch there before they put others' rewards
                raise SpecError(f"_meta: {name!r} is a column, which cannot be taken away")
        elif not self._editor.set_stand_in(name, value):
            self._set_column(value, name)
        super()._set(name, self._editor.table.show(name))

    def _like(self, items: Any) -> Any:
        return ArrayDict.trusted(items)

    def __reduce__(self) -> Any:
        return ArrayDict, (dict(self),)
