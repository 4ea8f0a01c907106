"""How tianshou's buffers are changed, but by adding rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from rlstructs.errors import SpecError
from rlstructs.replay.array_dict import ArrayDict
from rlstructs.replay.buffer import FILL, GROW
from rlstructs.replay.columns import Spec
from rlstructs.replay.given import as_rows, is_mapping
from rlstructs.replay.infos import info_items
from rlstructs.replay.reading import Reading, read_sources
from rlstructs.replay.roles import is_info
from rlstructs.replay.snapshot import AnySnapshot
from rlstructs.replay.tianshou import transitions
from rlstructs.replay.tianshou.reading import sources_of
from rlstructs.replay.tianshou.reads import EpisodeReads
from rlstructs.replay.tianshou.transitions import DONE, FLAGS, OBS_NEXT, RESERVED, REW, top
from rlstructs.replay.values import from_bits, host_array

# Rows that are looked at together, so that little memory is needed.
AT_ONCE = 1 << 16


class _Stored(ArrayDict):
    """The columns of a buffer by name, read-only arrays; what is put under a name is put there."""

    __slots__ = ("_buffer",)

    def __init__(self, buffer: EpisodeEdits) -> None:
        dict.__init__(self, {name: buffer._shown(name) for name in buffer._specs})
        object.__setattr__(self, "_buffer", buffer)

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        """The columns, for programs that make others of them: `Batch(**buffer._meta.__dict__, returns=returns)`."""
        return self.to_dict()

    def _set(self, name: str, value: Any) -> None:
        if not is_mapping(value):
            self._buffer._set_column(name, value)
        elif name != REW:  # an empty batch, which programs put there before they put others' rewards
            raise SpecError(f"_meta: {name!r} is a column, which cannot be taken away")
        super()._set(name, self._buffer._shown(name))

    def _like(self, items: Any) -> Any:
        return ArrayDict.trusted(items)

    def __reduce__(self) -> Any:
        return ArrayDict, (dict(self),)


class EpisodeEdits(EpisodeReads):
    """Transitions that can be changed; see `ReplayBuffer`."""

    @property
    def _meta(self) -> ArrayDict:
        """The columns as tianshou calls them, for programs that change them so.

        What is put under a name is stored, and so are other columns that are put in the place of all of these, which
        have to be among them. But where rewards have several values each, for several agents, those of another shape,
        as one agent has, only stand in for them, in `rew` and in what is read by index, until some that fit are put
        there. Samples, files and what is added are of what is stored.
        """
        return _Stored(self)

    @_meta.setter
    def _meta(self, columns: Any) -> None:
        given = transitions.as_transitions(columns, "_meta", self._ignored, 1, False)
        if lacking := [name for name in self._specs if name not in given]:
            raise SpecError(f"_meta: {lacking[0]!r} is a column, which cannot be taken away")
        if wrong := [name for name, values in given.items() if len(values) != self.maxsize]:
            raise SpecError(f"_meta: {wrong[0]!r} has {len(given[wrong[0]])} rows, needed are {self.maxsize}")
        # What is as it was is left: frames that are stored once would be stored again.
        changed = {name: values for name, values in given.items() if not self._holds(name, values)}
        self._replace(changed, np.arange(self.maxsize))

    def _holds(self, name: str, values: Any) -> bool:
        """Whether these are what a column holds."""
        if name not in self._specs or values.shape != (column := self._column(name)).shape:
            return False
        if self._specs[name].is_object:
            return bool(all(one is other for one, other in zip(values, column, strict=True)))
        parts = (slice(start, start + AT_ONCE) for start in range(0, self.maxsize, AT_ONCE))
        return all(np.array_equal(host_array(name, values[part]), column[part], equal_nan=True) for part in parts)

    def _set_column(self, name: str, value: Any) -> None:
        """Sets a column, or what stands in for the rewards of several agents."""
        spec = self._specs.get(name)
        if name == REW and spec is not None and spec.shape:
            values = transitions.as_column(name, value, 1)
            if len(values) == self.maxsize and values.shape[1:] != spec.shape:
                self._stand_in = self._storage.columns.converted(name, as_rows(name, values, spec)[0], spec).copy()
                return
        self.set_array_at_key(value, name)

    def update(self, buffer: EpisodeReads) -> np.ndarray:
        """Appends every row of another buffer, in order; its episodes stay what they are.

        Returns:
            Where they lie, int64 (n,); for those without room an id below 0 that indexing refuses.

        Raises:
            TypeError, SpecError: it is no such buffer, this one with rows in it, or its rows do not fit; nothing has
                changed.
        """
        if not isinstance(buffer, EpisodeReads):
            raise TypeError(f"update: needs a ReplayBuffer, got {type(buffer).__name__}")
        rows = buffer._rows()
        if not rows.total or not self._lane_size:
            return np.zeros(0, np.int64)
        if buffer is self:
            raise SpecError("update: a buffer cannot be appended to itself")
        at = rows.every_row()
        block = self._rows_of_other(buffer, at)
        head, n, capacity = int(self._storage.ring.head[0]), at.size, self._storage.columns.capacity
        starts = rows.prev(at) == at
        self._write(block, starts=starts[None], unknown=self._unknown, missing=self._missing)
        if at[-1] not in rows.unfinished():
            self._storage.end_episodes()
        self._find_begins()
        lanes = np.flatnonzero(buffer._own_rows().span.counts())
        self._running.shape(buffer._running.returns.shape[1:])
        self._running.clear()
        if lanes.size:  # the last of them was the last to be copied
            self._running.returns[0] = buffer._running.returns[lanes[-1]]
            self._running.lengths[0] = buffer._running.lengths[lanes[-1]]
        placed = self._storage.columns.at_steps(0, head + np.arange(n))
        placed[: max(n - capacity, 0)] = -1 - self.maxsize  # -1 is the newest row
        return placed

    def _rows_of_other(self, other: EpisodeReads, at: np.ndarray) -> dict[str, Any]:
        """What another buffer's rows hold, as rows of this one, (1, n, ...)."""
        keeps_next = any(top(name) == OBS_NEXT for name in self._specs)
        names = [
            name
            for name in other._names()
            if top(name) not in self._ignored and (name in other._specs or keeps_next)
        ]
        arrays = read_sources(other._rows(), other._specs, sources_of(names, other._specs), at, Reading())
        return {name: transitions.raw_numbers(arrays[name], other._known_specs[name])[None] for name in names}

    def set_batch(self, batch: Any) -> None:
        """Replaces columns, by copies.

        In an empty buffer every row is there then, the first one of each lane its oldest. In others the rows stay
        that are there, and columns that are not given keep what they hold.

        Args:
            batch: some of the keys that `add` knows, `(maxsize, ...)` each.

        Raises:
            SpecError: something does not fit; nothing has changed.
        """
        self._require_room()
        rows = transitions.as_transitions(batch, "set_batch", self._ignored, 1, False)
        if unknown := sorted({top(name) for name in rows} - set(RESERVED)):
            raise SpecError(f"set_batch: unknown key(s) {unknown}, a transition has {list(RESERVED)}")
        if wrong := [name for name, values in rows.items() if len(values) != self.maxsize]:
            raise SpecError(f"set_batch: {wrong[0]!r} has {len(rows[wrong[0]])} rows, needed are {self.maxsize}")
        if len(self):
            self._replace(rows, np.arange(self.maxsize))
            return
        lead = self._n_lanes, self._lane_size
        block = {name: values.reshape(*lead, *values.shape[1:]) for name, values in rows.items()}
        self._write(block, unknown=GROW, missing=FILL)
        self._recount()

    def set_array_at_key(self, seq: Any, key: str, index: Any = None, default_value: Any = None) -> None:
        """Sets a column, or some rows of it.

        Args:
            seq: (n, ...).
            key: of an array, which is made if there is none.
            index: n rows, as of indexing; None for all of the `maxsize` that there is room for.
            default_value: what the other rows of a new column hold; None for NaN, which only floats have.

        Raises:
            MissingKeyError: there was no row yet, so that it is not known what rows hold.
            TypeError, SpecError, IndexError: something does not fit; nothing has changed.
        """
        if not isinstance(key, str):
            raise TypeError(f"key must be a string, got {key!r}")
        if key == DONE or top(key) in self._ignored:
            why = "set terminated or truncated" if key == DONE else "this buffer ignores it"
            raise SpecError(f"{key!r} is not stored: {why}")
        if any(name.startswith(f"{key}/") for name in self._specs):
            raise SpecError(f"{key!r} is nested; name one of its arrays")
        if is_info(key):
            rows = info_items(key, seq, 1, "set_array_at_key")
        else:
            rows = {key: transitions.as_column(key, seq, 1)}
        at = np.arange(self.maxsize) if index is None else self._rows_at(index).reshape(-1)
        for values in rows.values():
            if len(values) != len(at):
                raise SpecError(f"{key!r}: {len(values)} rows came for {len(at)}")
        self._replace(rows, at, default_value, some=index is not None)

    def _replace(self, rows: Mapping[str, Any], at: np.ndarray, default: Any = None, some: bool = False) -> None:
        """Puts values into columns, new ones too; `some` says that there are other rows."""
        plan = self._planned(rows, 1)
        self._check_names(plan)
        placed, made, fills, specs = {}, {}, {}, plan.specs(self._specs)
        for name, values in plan.rows.items():
            placed[name], spec = self._as_rows(name, values, specs.get(name))
            if name in specs:
                placed[name] = self._storage.columns.fitted(name, placed[name], at.shape, specs[name])
                continue
            made[name] = spec if spec.is_object else Spec(
                spec.dtype, tuple(placed[name].shape[1:]), 0, spec.is_bfloat16
            )  # fmt: skip
            if some:
                fills[name] = self._default(name, made[name], default)
        if made:
            transitions.check_required({**specs, **made})  # or rows could never be added
        self._adopt(plan)
        if made:
            self._make(made)
        rebuild = None if rows.keys().isdisjoint(FLAGS) else self._rebuilder()
        for name, fill in fills.items():
            self._fill(name, fill)
        for name, values in placed.items():
            self._put(name, at, values)
        if REW in placed:
            self._stand_in = None
        if rebuild is not None:
            rebuild()

    def _put(self, name: str, at: np.ndarray, values: Any) -> None:
        if name in self._storage.columns.links:  # what it holds in rows that are not there is the next rows' affair
            held = self._own_rows().has(at)
            at, values = at[held], values[held]
        self._storage.put(name, at, values)

    def _default(self, name: str, spec: Spec, default: Any) -> Any:
        """What a new column of this spec holds where it is not given."""
        if spec.is_object:
            return default
        if default is None and not (spec.dtype.kind in "fc" or spec.is_bfloat16):
            raise SpecError(f"{name!r} is {spec.dtype}, which has no NaN: default_value is needed")
        value, _ = as_rows(name, np.asarray(np.nan if default is None else default), spec)
        if value.shape:
            raise SpecError(f"default_value must be a number, got {default!r}")
        return self._storage.columns.converted(name, value, spec)

    def _fill(self, name: str, value: Any) -> None:
        self._storage.columns.put_rows(name, slice(None), value)

    def _rebuilder(self) -> Callable[[], None]:
        """What works the episodes out again once flags have changed; those that were cut without one stay so."""
        cells, episodes = self._storage.columns.cells, self._storage.episodes
        assert episodes is not None
        cut = episodes.end().reshape(self._n_lanes, -1) & ~(cells[FLAGS[0]] | cells[FLAGS[1]])

        def rebuild() -> None:
            self._storage.rebuild_episodes(cells[FLAGS[0]] | cells[FLAGS[1]] | cut)
            self._recount()

        return rebuild

    # Gaps

    def isnull(self) -> Any:
        """Where rows are NaN: a batch of bools, of all rows in order."""
        rows = self._rows()
        found = dict(self._nulls(rows))
        others = {name: np.zeros((rows.total, *spec.shape), bool) for name, spec in self._specs.items()}
        return self._export({**others, **found}, {})

    def hasnull(self) -> bool:
        """Whether a row holds NaN."""
        return any(null.any() for _, null in self._nulls(self._rows()))

    def _nulls(self, rows: AnySnapshot) -> Iterator[tuple[str, np.ndarray]]:
        """Name of each column of floats, and where its rows, in order, are NaN: bool (n, *shape)."""
        at = rows.every_row()
        for name, spec in self._specs.items():
            if spec.dtype.kind not in "fc" and not spec.is_bfloat16:
                continue
            null = np.zeros((at.size, *spec.shape), bool)
            for start in range(0, at.size, AT_ONCE):
                part = slice(start, start + AT_ONCE)
                [values] = rows.gather([name], at[part])
                null[part] = np.isnan(from_bits(values) if spec.is_bfloat16 else values)
            yield name, null

    def dropnull(self) -> None:
        """Drops the rows that hold NaN; what was before and what was after one are episodes of their own."""
        rows, storage = self._own_rows(), self._storage
        at = rows.every_row()
        keep = np.ones(at.size, bool)
        for _, null in self._nulls(rows):
            keep &= ~null.any(axis=tuple(range(1, null.ndim)))
        if keep.all():
            return
        kept, columns, n_lanes = at[keep], storage.columns, self._n_lanes
        # A row begins an episode if it did, or if the one before it is gone.
        starts = ((rows.prev(at) == at) | ~np.append(True, keep[:-1]))[keep]
        counts = np.bincount(columns.lanes(kept), minlength=n_lanes)
        valid = np.arange(counts.max(initial=0)) < counts[:, None]
        names = list(self._specs)
        block = {name: _padded(valid, values) for name, values in zip(names, rows.gather(names, kept), strict=True)}
        open_lanes = columns.lanes(np.intersect1d(rows.unfinished(), kept))
        storage.clear()
        storage.write(block, lengths=counts, done=transitions.ends_of(block), starts=_padded(valid, starts))
        storage.end_episodes(np.setdiff1d(np.arange(n_lanes), open_lanes))
        self._recount()
        self._were_kept(kept)

    def _were_kept(self, rows: np.ndarray) -> None:
        """Called when all but these rows were dropped, in their order, and have new ids."""


def _padded(valid: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Values (n, ...) where `valid` (lanes, T) says so, zeros elsewhere."""
    block = np.zeros((*valid.shape, *values.shape[1:]), values.dtype)
    block[valid] = values
    return block
