"""Reads the transitions of a buffer: by index, and by drawing."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from rlstructs.checks import check_count
from rlstructs.errors import EmptyBufferError, MissingKeyError, SpecError
from rlstructs.replay.draw.ahead import Batches, StoreDraws
from rlstructs.replay.draw.packed import ANCHOR, FIRST, PackedWindows, in_library
from rlstructs.replay.draw.plan import Fields, Fits, Picker, Selection, Uniform
from rlstructs.replay.draw.reading import Reading, Sources, read_sources
from rlstructs.replay.draw.view import AnyView, View
from rlstructs.replay.leave.array_dict import ArrayDict
from rlstructs.replay.leave.export import Exporter
from rlstructs.replay.tianshou.options import Options, reading_of
from rlstructs.replay.tianshou.table import Table
from rlstructs.replay.tianshou.transitions import ADDED_EMPTY, REW, TransitionDict, sources_of
from rlstructs.seeding import Stream

EVENLY = Uniform()
WANTED = "row with so many others before it in its episode"


class Pick(NamedTuple):
    """Drawn rows: their view, their ids, and more values of each.

    The ids are int64 (n,).
    """

    rows: AnyView
    at: np.ndarray
    fields: Fields


class Indexed(Protocol):
    """A buffer that chooses rows and reads them by index.

    A user's class may override both methods.
    """

    def sample_indices(self, batch_size: int | None) -> np.ndarray: ...

    def __getitem__(self, index: Any) -> Any: ...


class Reader:
    """Reads transitions.

    Args:
        table: the rows of the buffer.
        options: its settings.
        export: makes batches of arrays.
        stream: draws come from it.
    """

    # Whether a sample may differ from the same rows read by index.
    relabels = False

    def __init__(self, table: Table, options: Options, export: Exporter, stream: Stream) -> None:
        self.table, self.options, self.export, self.stream = table, options, export, stream

    @property
    def picker(self) -> Picker:
        """The picker that draws rows."""
        return EVENLY

    # By index; each method is called by `Table.read_whole`

    def select(self, index: Any) -> Any:
        """Reads rows as a batch; see `ReplayBuffer.__getitem__`."""
        with self.table.storage.lock:
            at = self.table.locate(index)
            arrays = self._read_at(self.table.sources, at, reading_of(stack_num=self.options.stack_num))
        beside = self.compute_beside(at)
        return self._hand_over(arrays | beside if beside else arrays)

    def get(self, index: Any, key: str, default_value: Any, stack_num: int) -> Any:
        """Reads one key of some rows; see `ReplayBuffer.get`."""
        table, specs = self.table, self.table.specs
        if stack_num == 1 and key in table.columns and not table.is_joined and table.storage.is_private:
            with table.storage.lock:
                at = table.locate(index)
                [array] = table.storage.gather((key,), at.reshape(-1))
            array = array.reshape((*at.shape, *array.shape[1:]))
            if key == REW and table.stand_in is not None:
                array = np.asarray(table.stand_in[at])
            return self.export.one(key, array, specs[key])
        names = (key,) if key in specs else tuple(name for name in specs if name.startswith(f"{key}/"))
        if not names:
            if default_value is not None:
                return default_value
            if key in ADDED_EMPTY:
                table.locate(index)  # raises
                return self.export({}, {})
            raise MissingKeyError(f"no {key!r} in this buffer, there are {list(specs)}")
        sources = sources_of(names, tuple(table.columns), None)
        with table.storage.lock:
            arrays = self._read_at(sources, table.locate(index), reading_of(stack_num=stack_num))
        if names == (key,):
            return self.export.one(key, arrays[key], specs[key])
        start = len(key) + 1
        inside = {name[start:]: array for name, array in arrays.items()}
        return self.export.with_objects(inside, {name[start:]: specs[name] for name in names})

    def _read_at(self, sources: Sources, at: np.ndarray, reading: Reading) -> dict[str, Any]:
        """Reads keys; no row is torn by a writer.

        Values that stand in for rewards are read, too.
        """
        table, rows, stand_in = self.table, self.table.rows(), self.table.stand_in
        if table.is_joined or table.storage.is_private:  # one thread alone uses it, or others wait for the lock
            arrays = read_sources(rows, table.gather, table.columns, sources, at, reading)
        else:
            flat = table.storage.read_at(
                at.reshape(-1),
                lambda view, some: read_sources(view, table.gather, table.columns, sources, some, reading),
                reading.earliest,
            )
            arrays = {name: array.reshape((*at.shape, *array.shape[1:])) for name, array in flat.items()}
        if REW in arrays and stand_in is not None:
            if sources[REW].is_stacked and reading.stack_num > 1:
                at = rows.frames(at.reshape(-1), reading.stack_num).reshape(*at.shape, reading.stack_num)
            arrays[REW] = np.asarray(stand_in[at])
        return arrays

    def step(self, index: Any, move: Callable[[AnyView, np.ndarray], np.ndarray]) -> Any:
        """Applies `move` to the rows of an index.

        The result is int64 of the same shape.
        """
        with self.table.storage.lock:
            at = self.table.locate(index)
            return move(self.table.rows(), at.reshape(-1)).reshape(at.shape)[()]

    def list_between(self, start: int, stop: int) -> np.ndarray:
        """Lists the rows between two of a lane; see `ReplayBuffer.get_buffer_indices`."""
        start, stop = operator.index(start), operator.index(stop)
        low, high = self.table.lane_around(start)
        if not low <= stop <= high:
            edges = self.table.edges.tolist()
            raise SpecError(f"rows {start} to {stop} are not in one of the lanes that lie between {edges}")
        if start < stop:
            return np.arange(start, stop)
        around = np.concatenate([np.arange(start, high), np.arange(low, stop)])
        return around if start > stop or self._is_one_episode(around) else around[:0]

    def _is_one_episode(self, at: np.ndarray) -> bool:
        """Whether each of these rows comes after the one before it."""
        with self.table.storage.lock:
            rows = self.table.rows()
            return bool(rows.has(at).all() and (rows.next(at[:-1]) == at[1:]).all())

    # By drawing; the samples are drawn by `Table.read_whole`, too

    def sample(self, batch_size: int | None) -> tuple[Any, np.ndarray]:
        """Draws rows and reads them; see `ReplayBuffer.sample`."""
        return self._draw_batch(*self._selector(checked_size(batch_size)))

    def sample_packed(self, batch_size: int | None, windows: PackedWindows) -> tuple[Any, np.ndarray]:
        """Draws rows and the windows from them on; see `ReplayBuffer.sample`."""
        if self.relabels:
            raise SpecError("sample: a buffer that relabels rows has no packs")
        n, pick = self._selector(checked_size(batch_size))
        table = self.table
        reading = reading_of(stack_num=self.options.stack_num)

        def select(count: int) -> Selection:
            rows, at, fields = pick(count)
            picked = windows.around(rows, at, fields)
            if isinstance(rows, View):
                picked.earliest = reading.earliest(rows, picked.fields[FIRST])
            return picked

        picked, pack = windows.draw(
            None if table.is_joined else table.storage,
            n,
            select,
            lambda rows, at: self.read(rows, self.find_frames(rows, at)),
            table.specs,
            lambda picked: self.compute_beside(picked.fields[ANCHOR], picked.fields),
        )
        return in_library(pack, self.export.framework, self.export.device), picked.fields[ANCHOR]

    def sample_by(self, buffer: Indexed, batch_size: int | None, by_index: bool) -> tuple[Any, np.ndarray]:
        """Lets a user's buffer draw rows, and reads them.

        `by_index` says to read by its own `__getitem__`.
        """
        index = buffer.sample_indices(batch_size)
        if not by_index and np.ndim(index) == 1:
            return self._draw_batch(*self._selector_of(buffer, index))
        if self.relabels or self.options.n_step > 1:
            raise SpecError(f"sample: {type(buffer).__name__} reads by index, which gives no n-step sums or goals")
        return buffer[index], index

    def _draw_batch(self, n: int, pick: Callable[[int], Pick]) -> tuple[Any, np.ndarray]:
        draws = self.draws(n, pick)
        if self.table.is_joined:  # it is for one thread
            picked = draws.draw()
            found: tuple[Any, np.ndarray] = draws.hand_over(picked, draws.read(picked))
        else:
            found = draws.sample()
        return found

    def draws(self, n: int, pick: Callable[[int], Pick]) -> StoreDraws:
        """Describes the draws of `sample`: of n rows, by `pick`."""

        def select(count: int) -> Selection:
            rows, at, fields = pick(count)
            # The earliest row that is read tells whether a sample was overwritten meanwhile.
            frames: Any = rows  # several buffers are for one thread, whose rows stay
            return Selection(self.find_frames(rows, at), frames, fields | self.relabelling(rows, at))

        def hand_over(picked: Selection, arrays: dict[str, Any]) -> tuple[Any, np.ndarray]:
            at = picked.rows[:, -1].copy()
            return self._hand_over(arrays | self.compute_beside(at, picked.fields)), at

        return StoreDraws(self.table.storage, self.stream, n, select, self.read_drawn, hand_over)

    def batches(self, batch_size: int, prefetch: int) -> Batches:
        """Makes batches ahead; see `ReplayBuffer.batches`."""
        if self.table.is_joined:
            raise SpecError("batches: a CachedReplayBuffer is for one thread, and makes nothing ahead; use sample")
        draws = self.draws(check_count("batch_size", batch_size), self.pick)
        return Batches(
            lambda: draws,
            lambda batch: self.table.read_whole(draws.hand_over, batch.picked, batch.arrays),
            prefetch,
        )

    def sample_indices(self, batch_size: int | None) -> np.ndarray:
        """Draws row ids, int64 (n,); see `ReplayBuffer.sample_indices`."""
        size = checked_size(batch_size)
        if size == 0:  # in order: nothing is drawn
            rows = self.table.rows()
            return self.list_candidates(rows, rows.every_row())
        n, pick = self._selector(size)
        return pick(n).at.copy()

    def _selector(self, size: int | None) -> tuple[int, Callable[[int], Pick]]:
        """Returns the number of rows to draw, and a function for draws.

        The function draws a given number of rows.
        """
        rows = self.table.rows()
        if size is not None and size > 0 and rows.total:
            return size, self.pick
        at = self.choose(self.list_candidates(rows, rows.every_row()), size)
        return at.size, self._pick_first(rows, at, self.pick)

    def _selector_of(self, buffer: Indexed, index: np.ndarray) -> tuple[int, Callable[[int], Pick]]:
        """Selects among rows (n,) that a user's buffer has drawn."""
        at = self.table.locate(index)

        def draw_again(count: int) -> Pick:
            return self.remember(Pick(self.table.rows(), self.table.locate(buffer.sample_indices(count)), {}))

        return at.size, self._pick_first(self.table.rows(), at, draw_again)

    def _pick_first(self, rows: AnyView, at: np.ndarray, again: Callable[[int], Pick]) -> Callable[[int], Pick]:
        """Returns a function that picks these rows first.

        It draws those again that were overwritten meanwhile.
        """
        waiting = [at]
        return lambda count: self.remember(Pick(rows, waiting.pop(), {})) if waiting else again(count)

    def choose(self, at: np.ndarray, size: int | None) -> np.ndarray:
        """Chooses among rows (n,) as `ReplayBuffer.sample_indices` does."""
        if size is None:
            return self.stream.generator.permutation(at)
        if size <= 0:
            return at[: at.size if size == 0 else 0]
        if not at.size:
            raise EmptyBufferError("Cannot sample from an empty storage.")
        return self.stream.generator.choice(at, size)

    def list_candidates(self, rows: AnyView, at: np.ndarray) -> np.ndarray:
        """Keeps the rows that may be drawn, in order."""
        fits = self.fits(rows)
        return at if fits is None else at[fits(at)]

    def fits(self, rows: AnyView) -> Fits | None:
        """Returns a function that marks rows to draw from; None for all."""
        before = self.options.stack_num - 1
        return (lambda at: rows.depths(at) >= before) if self.options.sample_avail and before else None

    def pick(self, n: int) -> Pick:
        """Draws `n` rows."""
        rows = self.table.rows()
        return self.remember(Pick(rows, *self.picker.pick(rows, n, self.stream.generator, self.fits(rows), WANTED)))

    def remember(self, pick: Pick) -> Pick:
        """Records a draw, and returns it."""
        return pick

    def find_frames(self, rows: AnyView, at: np.ndarray) -> np.ndarray:
        """Returns the rows of the stacks of some rows, (n, stack_num)."""
        stack_num = self.options.stack_num
        return at[:, None] if stack_num == 1 else rows.frames(at, stack_num)

    def read_drawn(self, picked: Selection) -> dict[str, Any]:
        """Reads drawn rows."""
        return self.read(picked.view, picked.rows)

    def relabelling(self, rows: AnyView, at: np.ndarray) -> Fields:
        """Draws what a buffer that relabels rows needs beside them."""
        return {}

    def read(self, rows: AnyView, frames: np.ndarray) -> dict[str, Any]:
        """Reads a sample of the rows with these stacks."""
        options, table = self.options, self.table
        reading = reading_of(options.n_step, options.gamma, options.stack_num)
        stacks = frames if reading.stack_num > 1 else None
        return read_sources(rows, table.gather, table.columns, table.sources, frames[:, -1], reading, stacks)

    def compute_beside(self, at: np.ndarray, fields: Fields | None = None) -> dict[str, Any]:
        """Computes the keys of a batch that are not stored.

        `fields` has the values of each row from when it was drawn.
        """
        return {}

    def _hand_over(self, arrays: Mapping[str, Any]) -> Any:
        export = self.export.with_objects if self.table.storage.columns.has_objects else self.export
        batch = export(arrays, self.table.specs)
        return TransitionDict.trusted(batch) if type(batch) is ArrayDict else batch


def checked_size(batch_size: Any) -> int | None:
    """Checks that a batch size is an int or None."""
    if batch_size is None:
        return None
    if isinstance(batch_size, (bool, np.bool_)) or not hasattr(batch_size, "__index__"):
        raise TypeError(f"batch_size must be an int or None, got {batch_size!r}")
    return operator.index(batch_size)
