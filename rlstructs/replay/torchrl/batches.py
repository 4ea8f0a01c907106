"""Makes the batches of a `DictTensorReplayBuffer`.

They are made one by one, in passes, as packs, and ahead of time (`rlstructs/replay/draw/ahead.py`). Slices get marks
where they begin and end.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from rlstructs.checks import check_count
from rlstructs.errors import EmptyBufferError, MissingKeyError, SpecError, StateError
from rlstructs.replay.draw.ahead import Batch, Batches, Place, Prefetch, early_basis
from rlstructs.replay.draw.packed import ANCHOR, PackedWindows, in_library
from rlstructs.replay.draw.plan import Fields, Selection
from rlstructs.replay.draw.view import View
from rlstructs.replay.intake.arrays import encoded, host_array, is_mapping
from rlstructs.replay.intake.roles import ends_among
from rlstructs.replay.leave.array_dict import ArrayDict
from rlstructs.replay.rows.spec import Spec
from rlstructs.replay.torchrl.assembly import Assembly
from rlstructs.replay.torchrl.given_rows import has, is_tensordict, put, restore_form
from rlstructs.replay.torchrl.part import join_key
from rlstructs.replay.torchrl.samplers import INDEX, WEIGHT, Sampler
from rlstructs.replay.torchrl.slice_samplers import AUTO, DONE, INSIDE, SliceSampler, parent_of
from rlstructs.structures.dict_tensor import DictTensor

TRUNCATED, TERMINATED = "truncated", "terminated"


class Sampling:
    """Makes batches.

    Args:
        parts: of the buffer.
        collate_fn: applied to a batch before all transforms; None for nothing.
        pin_memory: whether batches are in page-locked memory.
        depth: number of batches that are made ahead.
    """

    def __init__(self, parts: Assembly, collate_fn: Callable[[Any], Any] | None, pin_memory: bool, depth: int) -> None:
        self._parts, self._collate_fn, self._pin_memory = parts, collate_fn, pin_memory
        self.ahead = Prefetch(depth)
        self._in_pass = False  # of `next`

    def size(self, given: int | None) -> int:
        """Returns the size of a batch, if this one is asked for.

        Raises:
            StateError: there is none.
        """
        own = self._parts.batch_size
        if given is not None:
            return check_count("batch_size", given, 0)
        if own is None:
            raise StateError("batch_size not specified: give one to the constructor or to sample")
        return own

    def make(self, n: int, with_info: bool = True, in_pass: bool = False) -> Made | None:
        """Makes a batch of n rows; also returns facts about them.

        None at the end of a pass, if `in_pass`.
        """
        parts = self._parts
        with parts.lock:
            request = self._request(n, with_info)
            if in_pass and not parts.sampler.remains(parts.store, request[0]):
                return None
            draws, batch = Draws(parts, request, self._collate_fn, self._pin_memory), None
            if self.ahead.depth:
                batch = self.ahead.take(draws)
            else:
                picked = draws.draw()
                draws.sampler.drawn(picked)
                arrays = draws.read(picked)
        made: Made = draws.finish(picked, arrays) if batch is None else batch.result()
        return made

    def batches(self, n: int, prefetch: int) -> Batches:
        """Makes batches of n rows ahead.

        The draws are early ones, unless the sampler goes through passes.
        """

        def make_draws() -> Draws:
            with self._parts.lock:
                request = self._request(n, with_info=True)
                return Draws(self._parts, request, self._collate_fn, self._pin_memory, is_early=True)

        return Batches(make_draws, lambda batch: batch.result()[0], prefetch)

    def sample(self, n: int, with_info: bool, packed: bool, windows: Mapping[str, Any]) -> Made:
        """Makes a batch of n rows, or a pack of windows.

        The windows begin with these rows; see `draw_pack`.
        """
        if not packed:
            if windows:
                raise SpecError(f"sample: {sorted(windows)} are for packs: set packed=True")
            made = self.make(n, with_info)
            assert made is not None
            return made
        if self._collate_fn is not None or len(self._parts.transform):
            raise SpecError("sample: collate_fn and transforms take batches, and cannot change packs")
        with self._parts.lock:
            draws = Draws(self._parts, self._request(n, with_info=False, needs_episodes=True), None, False)
            return draw_pack(self._parts, draws.request, draws.draw, **windows)

    def begin_pass(self) -> None:
        """Begins a pass over the rows."""
        with self._parts.lock:
            self._parts.sampler.begin_pass()

    def next(self) -> Any:
        n = self.size(None)
        if not self._in_pass:
            self.begin_pass()
        made = self.make(n, in_pass=True)
        self._in_pass = made is not None
        return None if made is None else made[0]

    def is_possible(self, batch_size: int | None) -> bool:
        """Whether a batch of this size could be made now; draws nothing."""
        n = self.size(batch_size)
        with self._parts.lock, contextlib.suppress(ValueError, RuntimeError):
            draws = Draws(self._parts, self._request(n, with_info=False), None, False)
            before = draws.place()
            try:
                draws.draw()
                return True
            finally:
                draws.go_to(before)
        return False

    def _request(self, n: int, with_info: bool, needs_episodes: bool = False) -> Request:
        """Describes the draw for a batch of n rows.

        For some draws it must be known where episodes end.
        """
        parts = self._parts
        request = (*(parts.sampler.plan(n) if n else (0, 1)), with_info)
        if not parts.store.view().total:
            raise EmptyBufferError("Cannot sample from an empty storage.")
        specs = parts.store.columns.specs
        if absent := sorted(set(parts.reading.stack_keys or ()) - specs.keys()):
            raise MissingKeyError(f"stack_keys: no {absent} in this buffer, there are {sorted(specs)}")
        needs_episodes |= parts.sampler.needs_episodes or not parts.reading.is_plain
        if needs_episodes and not parts.marks.are_known:
            keys = "no terminated, truncated or done, and no end_key or traj_key"
            raise SpecError(f"nothing says where episodes end: {keys}")
        return request

    def close(self) -> None:
        """Ends the threads that make batches ahead; from now on none are made."""
        with self._parts.lock:
            wait = self.ahead.close()
        wait()


# Number of draws, number of rows of each, and whether the batch has facts about its rows as columns.
Request = tuple[int, int, bool]
# A batch, and facts about its rows.
Made = tuple[Any, dict[str, Any]]


class Draws:
    """Draws rows and makes batches of them.

    Only `finish` may be called without the lock. It keeps the present sampler, columns and transforms of the buffer:
    another thread may exchange them before a batch is finished.

    Args:
        parts: of the buffer.
        request: the number of draws, and so on; see `Request`.
        collate_fn: applied to a batch before all transforms; None for nothing.
        pin_memory: whether batches are in page-locked memory.
        is_early: whether batches that are made ahead may be of earlier rows and priorities.
    """

    def __init__(
        self,
        parts: Assembly,
        request: Request,
        collate_fn: Callable[[Any], Any] | None,
        pin_memory: bool,
        is_early: bool = False,
    ) -> None:
        self.lock, self._store, self._reading = parts.lock, parts.store, parts.reading
        self._stream, self._rng = parts.stream, parts.stream.generator
        self.request, self._collate_fn, self._pin_memory = request, collate_fn, pin_memory
        self.sampler, self._transform, self.n_transforms = parts.sampler, parts.transform, len(parts.transform.parts)
        self._specs, self._axes, self._export = parts.store.columns.specs, parts.axes, parts.export
        # Whether each draw is one row of a batch.
        self._is_flat = type(parts.sampler).flat is Sampler.flat
        self.is_early = is_early and self.sampler.position() is None

    def basis(self) -> Any:
        rows = early_basis(self._store, self._stream) if self.is_early else self._store.now()
        return None if rows is None else (self.request, self.sampler, self.n_transforms, rows)

    def settle(self, batch: Batch) -> Batch:
        if self.is_early and self._store.find_overwritten(batch.picked) is not None:
            batch.drop()
            batch = Batch(self, self.draw())
        self.sampler.drawn(batch.picked)
        batch.read()  # while the lock is held
        return batch

    def place(self) -> Place:
        """Returns the place in the stream of draws."""
        return Place(self._rng.bit_generator.state, self.sampler.position())

    def go_to(self, place: Place) -> None:
        """Continues the stream of draws at a place."""
        self._rng.bit_generator.state = place.generator
        self.sampler.go_to(place.position)

    def draw(self) -> Selection:
        """Draws the rows of a batch."""
        if not self.request[0]:
            rows = np.zeros((0, 1), np.int64)
            fields = {INSIDE: np.zeros((0, 1), bool), WEIGHT: np.zeros(0, np.float32)}
            return Selection(rows, self._store.view(), fields)
        return self.sampler.draw(self._store, *self.request[:2], self._rng)

    def read(self, picked: Selection) -> dict[str, Any]:
        """Reads the columns of drawn rows, private memory.

        Name -> `(n, length, ...)`, or `(n, ...)` of single rows.
        """
        rows = picked.rows[:, 0] if self._is_flat else picked.rows
        return self._reading.read(self._store, picked.view, list(self._specs), rows)

    def finish(self, picked: Selection, arrays: dict[str, Any]) -> Made:
        """Finishes a batch; also returns facts about its rows.

        Several threads may call this at once.
        """
        with_info, sampler, specs, axes = self.request[2], self.sampler, self._specs, self._axes
        values = arrays
        if not self._is_flat:
            values = {name: sampler.flat(picked, array) for name, array in arrays.items()}
        n_axes = 1 if axes is None else axes[""]
        if n_axes > 1:  # a stack comes behind all axes of the batch
            values = {k: _move_stack(v, n_axes) if self._reading.stacks(k) else v for k, v in values.items()}
        known: dict[str, Any] = dict(sampler.info(picked))
        if isinstance(sampler, SliceSampler):
            known |= _mark_slices(values, picked, sampler, specs, () if axes is None else (1,))
        if with_info and self._collate_fn is None:
            batch = self._export(values | known, specs)
            info = Known((name, batch[name]) for name in known)
            batch = batch if axes is None else restore_form(batch, axes)
        else:
            info = Known(self._export(known, specs).items())
            batch = self._export(values, specs)
            batch = batch if axes is None else restore_form(batch, axes)
            if self._collate_fn is not None:
                batch = self._collate_fn(batch)
                if not is_mapping(batch):
                    raise TypeError(f"collate_fn must return a batch with keys, got {type(batch).__name__}")
                batch = _add_columns(batch, info if with_info else {})
        if self.n_transforms:
            batch = self._transform(batch)
            if with_info:  # a transform may have dropped columns
                contains = has if is_tensordict(batch) else operator.contains
                batch = _add_columns(batch, {name: value for name, value in info.items() if not contains(batch, name)})
        return (batch.pin_memory() if self._pin_memory else batch), info


class Known(dict[str, Any]):
    """Facts about rows, by name; ("next", "truncated") stands for `next/truncated`, as in a tensordict."""

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(_join_names(key))

    def __contains__(self, key: object) -> bool:
        return super().__contains__(_join_names(key))

    def get(self, key: Any, default: Any = None) -> Any:
        """Returns the value of a name, or the default."""
        return super().get(_join_names(key), default)


def _join_names(key: Any) -> Any:
    """Converts a key of torchrl to the name of a column.

    Anything that is not such a key is returned unchanged, as a dict would take it.
    """
    is_path = isinstance(key, tuple) and key and all(isinstance(each, str) for each in key)
    return join_key(key) if is_path else key


def _move_stack(array: Any, axis: int) -> Any:
    """Moves axis 1 of an array to this place."""
    return array.movedim(1, axis) if isinstance(array, torch.Tensor) else np.moveaxis(array, 1, axis)


def _add_columns(batch: Any, info: dict[str, Any]) -> Any:
    """Adds columns to a batch, unless a transform has changed its number of rows."""
    if not info or len(batch) != len(next(iter(info.values()))):
        return batch
    if isinstance(batch, DictTensor):
        return DictTensor({**dict(batch.items()), **info})
    if is_tensordict(batch):  # which stays one
        for name, value in info.items():
            put(batch, name, value)
        return batch
    return ArrayDict({**{key: batch[key] for key in batch.keys()}, **info})  # noqa: SIM118


def draw_pack(
    parts: Assembly,
    request: tuple[int, int, bool],
    draw_rows: Callable[[], Selection],
    slice_len: int | None = None,
    context: int = 0,
    max_steps: int | None = None,
    states: Mapping[str, str] | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Draws a pack of the windows that begin with drawn rows.

    The lock is held.

    Args:
        parts: of the buffer.
        request: the number of draws, and rows of each.
        draw_rows: makes the draws.
        slice_len: the length of windows where the sampler draws single rows.
        context, max_steps, states: see `PackedWindows`.

    Returns:
        The pack, with weights in its `info`; and the drawn rows and weights of its windows.
    """
    sampler, store, specs = parts.sampler, parts.store, parts.store.columns.specs
    windows = PackedWindows.of(_window_length(sampler, request[1], slice_len), context, max_steps, states)

    def weigh(picked: Selection) -> Fields:
        return {WEIGHT: picked.fields[WEIGHT]} if WEIGHT in sampler.fields else {}

    def select(_: int) -> Selection:
        drawn = draw_rows()
        picked = windows.around(drawn.view, drawn.rows[:, 0], weigh(drawn))
        sampler.drawn(picked)
        return picked

    def read(view: View, rows: np.ndarray) -> dict[str, Any]:
        return parts.reading.read(store, view, list(specs), rows)

    chosen, pack = windows.draw(None, request[0], select, read, specs, weigh)
    info = parts.export({INDEX: chosen.fields[ANCHOR]} | weigh(chosen), {})
    return in_library(pack, parts.export.framework, parts.export.device), dict(info.items())


def _window_length(sampler: Sampler, own: int, slice_len: int | None) -> int:
    """Returns the length of windows.

    It is that of the sampler's slices, or the one that is given for single rows.
    """
    name = type(sampler).__name__
    if isinstance(sampler, SliceSampler):
        if slice_len is not None:
            raise SpecError(f"sample: the {name} says how long slices are; leave slice_len out")
        return own
    if slice_len is None:
        raise SpecError(f"sample: a {name} draws single rows; slice_len must say how long windows are")
    return check_count("slice_len", slice_len)


def _mark_slices(
    values: dict[str, Any], picked: Selection, sampler: SliceSampler, specs: Mapping[str, Spec], beside: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """Marks the first and last rows of slices, with the sampler's keys.

    The last ones are marked as truncated and done. Programs that use ends ask for `terminated`, `truncated` and `done`:
    ends without a column are added.

    Args:
        values: the columns, name -> `(n, ...)`, changed in place.
        picked: the drawn slices.
        sampler: drew them.
        specs: of the columns.
        beside: further axes of an added end, if no end is stored.

    Returns:
        The ends without a column, name -> `(n, ...)`.
    """
    if sampler.init_key in values:
        _mark(values, sampler.init_key, sampler.firsts(picked), specs)
    if sampler.truncated_key is None:
        return {}
    lasts, ends = sampler.lasts(picked), ends_among(values)
    truncations = [name for name in ends if name.rpartition("/")[2] == TRUNCATED]
    parent = parent_of((truncations or ends or ["next/"])[0])
    key = f"{parent}{TRUNCATED}" if sampler.truncated_key == AUTO else sampler.truncated_key
    prefix = parent_of(key)
    own = [f"{prefix}{last}" for last in DONE]
    dones = [name for name in (*own, *(f"{parent}{last}" for last in DONE)) if name in values]
    if sampler.end_key in values and sampler.end_key.rpartition("/")[2] in DONE:
        dones.append(sampler.end_key)
    made = {}
    if not ({key, f"{prefix}{TERMINATED}"} <= values.keys() and any(name in values for name in own)):
        made = _make_absent(values, lasts, key, ends, beside)
    for name in dict.fromkeys((key, *dones) if key in values else dones):
        _mark(values, name, lasts, specs)
    return made


def _make_absent(
    values: Mapping[str, Any], lasts: np.ndarray, key: str, ends: list[str], beside: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """Makes the ends beside `key` that have no column.

    The last rows of slices are marked in them.
    """
    prefix = parent_of(key)
    dones = [name for last in DONE if (name := f"{prefix}{last}") in values]
    terminated = f"{prefix}{TERMINATED}"
    stored = [name for name in (key, *dones, terminated) if name in values]
    like = (stored or ends)[:1]
    shape = (len(lasts), *(np.shape(values[like[0]])[1:] if like else beside))
    known = {name: _truth(name, values[name], shape) for name in stored}
    marks, nowhere = _spread(lasts, shape), np.zeros(shape, bool)
    cut, over = known.get(key, nowhere), known.get(terminated)
    if over is None:  # an episode that is done and not truncated has terminated
        over = known[dones[0]] & ~cut if dones else nowhere
    made = {terminated: over, key: marks}
    if not dones:
        made = {f"{prefix}{DONE[0]}": marks | cut | over} | made
    return {name: np.array(array) for name, array in made.items() if name not in values}


def _truth(name: str, values: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Marks values of a column that are not zero, bool of this shape."""
    marks = host_array(name, values) != 0
    return marks if marks.shape == shape else _spread(marks.any(axis=tuple(range(1, marks.ndim))), shape)


def _spread(rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Broadcasts values of rows, `(n,)`, over the further axes of a shape."""
    return np.broadcast_to(rows.reshape(-1, *(1,) * (len(shape) - 1)), shape)


def _mark(values: dict[str, Any], name: str, rows: np.ndarray, specs: Mapping[str, Spec]) -> None:
    """Makes a column true in some rows, bool (n,), where it is zero."""
    at = torch.from_numpy(rows) if isinstance(values[name], torch.Tensor) else rows
    one = encoded(name, np.ones(()), specs[name]).item()
    if specs[name].dtype.kind == "b":
        values[name][at] = one
        return
    marked = values[name][at]  # it may hold other numbers than 0 and 1
    marked[marked == 0] = one
    values[name][at] = marked
