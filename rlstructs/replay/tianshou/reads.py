"""How tianshou's buffers are read: by index, by neighbourhood in episodes, and by drawing."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from rlstructs.errors import EmptyBufferError, MissingKeyError, SpecError
from rlstructs.replay.array_dict import ArrayDict
from rlstructs.replay.drawing import Selection, draw_fitting
from rlstructs.replay.reading import Reading, Source, read_sources
from rlstructs.replay.snapshot import AnySnapshot, Snapshot
from rlstructs.replay.tianshou.reading import sources_of
from rlstructs.replay.tianshou.transitions import ADDED_EMPTY, OBS_NEXT, RESERVED, REW, top
from rlstructs.replay.tianshou.whole_columns import WholeColumns
from rlstructs.replay.values import host_array

Fields = dict[str, np.ndarray]
# What a batch has of a transition even if it was never stored.
MAY_BE_EMPTY = (*ADDED_EMPTY, OBS_NEXT)
WANTED = "row with so many others before it in its episode"


class Pick(NamedTuple):
    """What was drawn: among which rows, which of them, int64 (n,), and what else is known of each."""

    rows: AnySnapshot
    at: np.ndarray
    fields: Fields


class TransitionDict(ArrayDict):
    """An `ArrayDict` with tianshou's keys.

    `info`, `policy` and `obs_next` are there until they are taken out, empty if they were never stored. `keys` are
    those at the top; iterating gives the names of all arrays, nested ones joined with `/`.

    Example:
        >>> batch = TransitionDict({"obs/x": 1})
        >>> batch.obs.x, batch.info, "info" in batch, list(batch.keys()), list(batch)
        (1, ArrayDict(), True, ['obs', 'obs_next', 'info', 'policy'], ['obs/x'])
    """

    def __missing__(self, name: str) -> Any:
        return self._nested(name) if name in self._given_empty() else super().__missing__(name)

    def __contains__(self, name: object) -> bool:
        return name in self._given_empty() or super().__contains__(name)

    def __delitem__(self, name: str) -> None:
        given = self._given_empty()
        if name not in given or dict.__contains__(self, name) or self._inside(name):
            super().__delitem__(name)
        vars(self)["_given"] = tuple(each for each in given if each != name)

    def _given_empty(self) -> tuple[str, ...]:
        """The names that are there even if nothing is."""
        given: tuple[str, ...] = vars(self).get("_given", MAY_BE_EMPTY)
        return given

    def _like(self, items: Any) -> Any:
        made = super()._like(items)
        vars(made).update(vars(self))
        return made

    def keys(self) -> Any:
        """The names at the top, in tianshou's order."""
        names = dict.fromkeys([*map(top, self), *self._given_empty()])
        return dict.fromkeys([*(name for name in RESERVED if name in names), *names]).keys()


class EpisodeReads(WholeColumns):
    """Transitions that can be read; see `ReplayBuffer`."""

    # By index

    def __getitem__(self, index: Any) -> Any:
        """Rows as a batch, private copies; observations, infos and policies in stacks of `stack_num`.

        Args:
            index: a row id, an array of any shape of them or a list, a mask over all row ids, or a slice of the
                rows in order: lane by lane, from the oldest to the newest. Negative ids count from the end.

        Raises:
            SpecError, IndexError: it is none of these, or no such row is there.
        """
        return self._of_one_layout(self._indexed, index)

    def _indexed(self, index: Any) -> Any:
        at = self._rows_at(index)
        arrays = self._read_at(self._look().sources, at, Reading(stack_num=self.stack_num))
        return self._hand_over(arrays | self._beside(at))

    def __iter__(self) -> Iterator[Any]:
        """Each row that is there, in the order of row ids."""
        # Without it indexes would be counted up to the first that holds no row: those of one lane.
        return (self[row] for row in np.sort(self._rows().every_row()))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Itself, as one object: numpy would take it for a sequence otherwise."""
        whole = np.empty((), object)
        whole[()] = self
        return whole

    def get(self, index: Any, key: str, default_value: Any = None, stack_num: int | None = None) -> Any:
        """One key of some rows, private copies.

        Args:
            index: as of indexing.
            key: an array's name, or that of what is nested.
            default_value: what is returned if there is no such key; None for an error.
            stack_num: each row comes with those before it in its episode, so many on a new axis behind those of
                `index`; the first of the episode stands for those that are not there. None for the buffer's own.

        Raises:
            MissingKeyError: there is no such key; of `info` and `policy` what was never stored is empty.
            SpecError, IndexError: no such row is there.
        """
        reading = Reading(stack_num=self.stack_num if stack_num is None else stack_num)
        return self._of_one_layout(self._got, (index, key, default_value, reading))

    def _got(self, given: tuple[Any, str, Any, Reading]) -> Any:
        index, key, default_value, reading = given
        names = [name for name in self._names() if name == key or name.startswith(f"{key}/")]
        if not names:
            if default_value is not None:
                return default_value
            if key in ADDED_EMPTY:
                self._rows_at(index)  # raises
                return self._export({}, {})
            raise MissingKeyError(f"no {key!r} in this buffer, there are {self._names()}")
        arrays = self._read_at(sources_of(names, self._specs, None), self._rows_at(index), reading)
        if names == [key]:
            return self._export.one(key, arrays[key], self._known_specs[key])
        start = len(key) + 1
        inside = {name[start:]: array for name, array in arrays.items()}
        return self._export.with_objects(inside, {name[start:]: self._known_specs[name] for name in names})

    def _read_at(self, sources: Mapping[str, Source], at: np.ndarray, reading: Reading) -> dict[str, Any]:
        """As `read_sources`, with what stands in for the rewards."""
        arrays = read_sources(self._rows(), self._specs, sources, at, reading)
        if REW in arrays and self._stand_in is not None:
            if sources[REW].is_stacked and reading.stack_num > 1:
                at = self._rows().frames(at.reshape(-1), reading.stack_num).reshape(*at.shape, reading.stack_num)
            arrays[REW] = np.asarray(self._stand_in[at])
        return arrays

    def _rows_at(self, index: Any) -> np.ndarray:
        """The rows that an index means, int64 of any shape."""
        rows = self._rows()
        if isinstance(index, slice):
            return rows.numbered(np.arange(rows.total)[index])
        given = host_array("index", index)
        end = self._index_end(rows)
        if given.dtype == bool:
            if given.shape not in ((end,), (self.maxsize,)):
                raise IndexError(f"a mask must have a bool for each of {self.maxsize} rows, got shape {given.shape}")
            given = np.flatnonzero(given)
        elif given.dtype.kind not in "iu" and given.size:
            raise SpecError(f"index must hold integers, got {given.dtype}")
        at = given.astype(np.int64, copy=False)
        # As unsigned numbers those below 0 are large.
        if not at.size or np.maximum.reduce(at.view(np.uint64), axis=None) < end:
            outside = None if rows.total == self.maxsize else ~rows.has(at)
        else:
            if given.dtype.kind == "i":  # of unsigned numbers those below 0 are too large
                at = np.where(at < 0, at + end, at)
            outside = (at < 0) | (at >= end)
            if not outside.any():
                outside = ~rows.has(at)
        if outside is not None and outside.any():
            raise IndexError(f"index {given[outside].flat[0]} holds no row; {len(self)} of {self.maxsize} are there")
        return at

    def _index_end(self, rows: AnySnapshot) -> int:
        """Behind the last row id; from it negative ones count. A writer that was interrupted leaves a gap."""
        return rows.total if rows.total in (0, self.maxsize) or rows.newest()[0] == rows.total - 1 else self.maxsize

    # By neighbourhood

    def prev(self, index: Any) -> Any:
        """The row before each in its episode, or the row itself where an episode or the buffer begins.

        Args:
            index: row ids, as of indexing.

        Returns:
            int64 of the same shape.
        """
        at = self._rows_at(index)
        return self._rows().prev(at.reshape(-1)).reshape(at.shape)[()]

    def next(self, index: Any) -> Any:
        """The row after each in its episode, or the row itself where that ends, or at the newest row; as `prev`."""
        at = self._rows_at(index)
        return self._rows().next(at.reshape(-1)).reshape(at.shape)[()]

    def unfinished_index(self) -> np.ndarray:
        """The newest rows of the episodes that go on, int64, at most one for each lane."""
        return self._rows().unfinished()

    def get_buffer_indices(self, start: int, stop: int) -> np.ndarray:
        """The rows from `start` to before `stop` in one lane, around its end if `stop` comes first, int64.

        `start == stop` is empty, unless one episode fills the lane and begins, or what is left of it, at `start`.

        Raises:
            SpecError: they are not of one lane.
        """
        edges = self.subbuffer_edges
        start, stop = operator.index(start), operator.index(stop)
        lane = int(np.searchsorted(edges, start, side="right")) - 1
        low, high = (int(edge) for edge in edges[lane : lane + 2]) if 0 <= start < edges[-1] else (0, -1)
        if not low <= stop <= high:
            raise SpecError(f"rows {start} to {stop} are not in one of the lanes that lie between {edges.tolist()}")
        if start < stop:
            return np.arange(start, stop)
        around = np.concatenate([np.arange(start, high), np.arange(low, stop)])
        return around if start > stop or self._is_one_episode(around) else around[:0]

    def _is_one_episode(self, at: np.ndarray) -> bool:
        """Whether each of these rows comes after the one before it."""
        rows = self._rows()
        return bool(rows.has(at).all() and (rows.next(at[:-1]) == at[1:]).all())

    # Drawing

    def sample(self, batch_size: int | None) -> tuple[Any, np.ndarray]:
        """Draws rows and reads them, as indexing does.

        With an `n_step` above 1, `rew` is the discounted sum of so many rewards, what comes after a step comes from
        the last of them, and `discount` is gamma to the number of steps. A subclass may draw in a way of its own by a
        `sample_indices`, and read in one by a `__getitem__`.

        Args:
            batch_size: as of `sample_indices`.

        Returns:
            A batch, private copies, and its row ids, int64 (n,).

        Raises:
            EmptyBufferError: `batch_size` is above 0, and nothing is stored.
            SpecError: no row has enough others before it, or a subclass reads in a way of its own what is not as
                indexing gives it.
        """
        found: tuple[Any, np.ndarray] = self._of_one_layout(self._sampled, batch_size)
        return found

    def _sampled(self, batch_size: int | None) -> tuple[Any, np.ndarray]:
        own = type(self)
        reads_itself = own.__getitem__ is not EpisodeReads.__getitem__
        if not reads_itself and own.sample_indices is EpisodeReads.sample_indices:
            selector = self._selector(checked_size(batch_size))
        else:
            index = self.sample_indices(batch_size)
            if reads_itself or np.ndim(index) != 1:
                if not self._is_as_indexed:
                    raise SpecError(f"sample: {own.__name__} reads by index, which gives no n-step sums or goals")
                return self[index], index
            selector = self._selector_of(index)
        frames, fields, arrays = self._drawn(*selector)
        at = frames[:, -1].copy()
        return self._hand_over(arrays | self._beside(at, fields)), at

    @property
    def _is_as_indexed(self) -> bool:
        """Whether a sample holds what indexing gives."""
        return self._reading.n_step == 1

    def sample_indices(self, batch_size: int | None) -> np.ndarray:
        """Draws rows; of those only that have `stack_num - 1` others before them in their episode, if `sample_avail`.

        Args:
            batch_size: how many, uniformly and with replacement; None for every row once, in random order; 0 for
                every row in order, lane by lane and from the oldest on; below 0 for none.

        Returns:
            Row ids, int64 (n,).

        Raises:
            EmptyBufferError: `batch_size` is above 0, and nothing is stored.
            SpecError: no row has enough others before it.
        """
        size = checked_size(batch_size)
        if size == 0:  # a look, and no draw
            return self._candidates(self._rows())
        n, pick = self._selector(size)
        return pick(n).at.copy()

    def _selector(self, size: int | None) -> tuple[int, Callable[[int], Pick]]:
        """How many rows are to be drawn, and what draws so many."""
        rows = self._rows()
        if size is not None and size > 0:
            if not rows.total:
                raise EmptyBufferError("Cannot sample from an empty storage.")
            return size, self._pick
        at = self._candidates(rows) if size in (0, None) else np.zeros(0, np.int64)
        waiting = [self._rng.permutation(at) if size is None else at]

        def pick(count: int) -> Pick:
            # What is drawn again was overwritten meanwhile: then there is no order any more.
            return self._picked(rows, waiting.pop(), {}) if waiting else self._pick(count)

        return at.size, pick

    def _selector_of(self, index: Any) -> tuple[int, Callable[[int], Pick]]:
        """As `_selector`, of the rows (n,) that a subclass has drawn."""
        waiting = [self._rows_at(index)]

        def pick(count: int) -> Pick:
            at = waiting.pop() if waiting else self._rows_at(self.sample_indices(count))
            return self._picked(self._rows(), at, {})

        return waiting[0].size, pick

    def _candidates(self, rows: AnySnapshot) -> np.ndarray:
        """The rows that may be drawn, in order."""
        at, fits = rows.every_row(), self._fits(rows)
        return at if fits is None else at[fits(at)]

    def _pick(self, n: int) -> Pick:
        rows = self._rows()
        return self._picked(rows, *self._anchors(rows, n))

    def _picked(self, rows: AnySnapshot, at: np.ndarray, fields: Fields) -> Pick:
        """What was drawn from these rows."""
        return Pick(rows, at, fields)

    def _frames(self, rows: AnySnapshot, at: np.ndarray) -> np.ndarray:
        """Of which rows the stacks of some are, (n, stack_num)."""
        n = self._reading.stack_num
        return at[:, None] if n == 1 else rows.frames(at, n)

    def _anchors(self, rows: AnySnapshot, n: int) -> tuple[np.ndarray, Fields]:
        """`n` rows, and what else is known of each."""

        def draw(count: int) -> np.ndarray:
            return rows.numbered(self._rng.integers(rows.total, size=count))

        fits = self._fits(rows)
        return draw(n) if fits is None else draw_fitting(draw, fits, n, self._rng.choice, rows, WANTED), {}

    def _fits(self, rows: AnySnapshot) -> Callable[[np.ndarray], np.ndarray] | None:
        """Which rows may be drawn; None for all."""
        before = self._reading.stack_num - 1
        return (lambda at: rows.depths(at) >= before) if self.sample_avail and before else None

    def _drawn(self, n: int, pick: Callable[[int], Pick]) -> tuple[np.ndarray, Fields, dict[str, Any]]:
        """Draws and reads; draws again what a writer in another thread overwrites meanwhile.

        Returns:
            The rows of the stacks, (n, stack_num), what else is known of each, and name -> array (n, ...).
        """
        names: list[str] = []

        def select(count: int) -> Selection:
            rows, at, fields = pick(count)
            assert isinstance(rows, Snapshot)
            # From the earliest row on that is read: it tells whether a sample was overwritten meanwhile.
            return Selection(self._frames(rows, at), rows.span, fields)

        def look(picked: Selection) -> list[Any]:
            arrays = self._read(Snapshot(self._storage, picked.span), picked.rows)
            names[:] = arrays
            return list(arrays.values())

        picked, arrays = self._storage.sample(n, select, look)
        return picked.rows, picked.fields, dict(zip(names, arrays, strict=True))

    def _read(self, rows: AnySnapshot, frames: np.ndarray) -> dict[str, Any]:
        """What a sample holds of rows whose stacks are these."""
        stacks = frames if self._reading.stack_num > 1 else None
        return read_sources(rows, self._specs, self._look().sources, frames[:, -1], self._reading, stacks)

    def _beside(self, at: np.ndarray, fields: Fields | None = None) -> dict[str, Any]:
        """What a batch of these rows holds beside what is stored; `fields` is what was known as they were drawn."""
        return {}

    def _hand_over(self, arrays: Mapping[str, Any]) -> Any:
        export = self._export.with_objects if self._storage.columns.has_objects else self._export
        known = self._known
        batch = export(arrays, self._known_specs if known is None else known.specs)
        return TransitionDict.trusted(batch) if type(batch) is ArrayDict else batch


def checked_size(batch_size: Any) -> int | None:
    if batch_size is None:
        return None
    if isinstance(batch_size, (bool, np.bool_)) or not hasattr(batch_size, "__index__"):
        raise TypeError(f"batch_size must be an int or None, got {batch_size!r}")
    return operator.index(batch_size)
