"""The quick way to write one row to every lane, which is what nearly every write is.

It does what `Storage.write` does, when nothing is to be converted or left out: every column comes with its
own dtype and shape, all lanes are in step, and no other process writes. What `Storage.write` finds out each
time is then known from the last time. Everything else is left to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from rlstructs.replay.columns import Spec
from rlstructs.replay.episodes import EPISODE, LENGTH, TIME
from rlstructs.replay.given import PYTHON
from rlstructs.replay.roles import is_info
from rlstructs.replay.store import ALL, Storage

END = np.dtype(bool)
add = np.add  # looking up names is part of what a write costs


class StepWriter:
    """Writes to a store.

    Args:
        storage: the store.
        ends: columns whose truth ends an episode, if there are such.
    """

    def __init__(self, storage: Storage, ends: Iterable[str]) -> None:
        self._storage = storage
        self._every_end = tuple(ends)
        self._ends: list[str] = []
        self._one_row = OneRow({})
        self._version = -1
        # Name, shape and dtype of each column, and whether it is one of `ends`; none if there is nothing to be done.
        self._wanted: list[tuple[str, tuple[int, ...], np.dtype, bool]] = []
        self._rows: list[np.ndarray] = []
        self._head = self._capacity = 0
        self._reserved = self._heads = self._episodes = self._open = np.zeros(0, np.int64)
        self._pairs = self._open_pairs = self._one_step = self._open  # pairs of int32 as one int64 each
        self._no_end = b""
        self._has_episodes = False

    def __getstate__(self) -> dict[str, Any]:
        return {"storage": self._storage, "ends": self._every_end}  # the rest are views of its bytes

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def write(self, tensors: Mapping[str, Any], is_row: bool = False) -> Mapping[str, Any] | None:
        """Appends a row to every lane and returns its arrays; None if nothing has changed and `Storage.write` is to.

        Args:
            tensors: name -> `(n_lanes, ...)`, arrays of numpy or torch.
            is_row: whether they are plain numbers and arrays without an axis for lanes, of which there is one.
        """
        storage = self._storage
        if self._version != storage.version:
            self._look()
        if is_row:
            tensors = self._one_row(tensors) or {}
        if len(tensors) != len(self._wanted) or not tensors:
            return None
        values, ended = [], False
        for name, shape, dtype, is_end in self._wanted:
            value = tensors.get(name)
            if type(value) is not ndarray:
                if type(value) is not Tensor:
                    return None
                try:
                    value = value.numpy()
                except (RuntimeError, TypeError):  # it has a gradient, or is on another device
                    return None
            # What was pickled has an equal dtype, which is not the same object.
            if (value.dtype is not dtype and value.dtype != dtype) or value.shape != shape:
                return None
            if is_end and value.tobytes() != self._no_end:
                ended = True
            values.append(value)
        with storage.lock:
            if self._version != storage.version:
                return None
            self._version = -1  # until all is done: Ctrl-C may come between
            slot, following = self._head % self._capacity, self._head + 1
            self._reserved.fill(following)
            for rows, value in zip(self._rows, values):  # noqa: B905 - linked columns, the last, have none
                rows[slot] = value
            if len(values) > len(self._rows):
                block = {wanted[0]: value[:, None] for wanted, value in zip(self._wanted, values, strict=True)}
                storage.columns.write_links(block, ALL, 1)
            if self._has_episodes:
                open_pairs = self._open_pairs
                self._pairs[slot] = open_pairs
                add(open_pairs, self._one_step, open_pairs)
                if ended:
                    self._end(slot, tensors)
            self._heads.fill(following)
            self._head = following
            self._version = storage.version
        return tensors

    def _end(self, slot: int, tensors: Mapping[str, Any]) -> None:
        episodes = self._storage.episodes
        assert episodes is not None
        done = np.logical_or.reduce([np.asarray(tensors[name]).reshape(-1) for name in self._ends])
        for lane in np.flatnonzero(done).tolist():
            total = int(self._open[lane, TIME])
            self._episodes[slot, lane, LENGTH] = total
            episodes.set_length(lane, total - 1, total, 1)
            self._open[lane, TIME] = 0

    def _look(self) -> None:
        """Finds out anew what is known from the last time."""
        storage, columns = self._storage, self._storage.columns
        with storage.lock:
            self._version = storage.version
            counters = storage.ring.counters
            self._ends = [name for name in self._every_end if name in columns.specs]
            usable = (
                columns.on_host
                and storage.is_private
                and bool((counters == counters[:, :1]).all())
                and int(counters[1, 0]) == int(counters[2, 0])
                and all(columns.specs[name].dtype == END and columns.specs[name].nbytes == 1 for name in self._ends)
                and not any(spec.is_bfloat16 or spec.is_object for spec in columns.specs.values())
            )
            n, self._capacity = columns.n_lanes, columns.capacity
            names = [*columns.flat, *columns.links] if usable else []
            specs = {name: columns.specs[name] for name in names}
            self._one_row = OneRow(specs)
            self._wanted = [
                (name, (n, *spec.shape), np.dtype(spec.dtype.str), name in self._ends) for name, spec in specs.items()
            ]
            self._rows = [columns.cells[name].swapaxes(0, 1) for name in columns.flat if usable]
            self._reserved, self._heads = storage.ring.reserved, storage.ring.head
            self._head = int(counters[2, 0])
            self._has_episodes = usable and storage.episodes is not None
            if usable and storage.episodes is not None:
                pairs = storage.episodes.columns.cells[EPISODE]
                self._episodes = pairs.swapaxes(0, 1)
                self._pairs = pairs.view(np.int64)[..., 0].swapaxes(0, 1)
                self._open = np.zeros((n, 2), np.int32)  # what the next rows get: their times, and no length yet
                self._open[:, TIME] = storage.episodes.open_lengths(slice(None), self._head)
                one = np.zeros_like(self._open)
                one[:, TIME] = 1
                self._open_pairs, self._one_step = self._open.view(np.int64)[:, 0], one.view(np.int64)[:, 0]
                self._no_end = bytes(n)


class OneRow:
    """Makes arrays with one row of plain numbers and arrays, where a glance shows that they fit.

    A column of infos, which may widen, takes a number only if its dtype holds it exactly.

    Args:
        specs: of the columns.

    Example:
        >>> one_row = OneRow({"x": Spec(np.dtype(np.uint8))})
        >>> one_row({"x": 255}), one_row({"x": 256})
        ({'x': array([255], dtype=uint8)}, None)
    """

    def __init__(self, specs: Mapping[str, Spec]) -> None:
        # Of numpy's own objects: a dtype that was pickled is equal to one, but not the same.
        self._known = {name: (np.dtype(spec.dtype.str), _limits(spec, is_info(name))) for name, spec in specs.items()}

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """name -> `(1, ...)`; None if it takes more than a glance."""
        rows = {}
        for name, value in row.items():
            if name not in self._known:
                return None
            try:
                array = _at_a_glance(value, *self._known[name])
            except (TypeError, IndexError):  # there are lists in it, or no numbers
                return None
            if array is None:
                return None
            rows[name] = array
        return rows


def _at_a_glance(value: Any, dtype: np.dtype, limits: Mapping[type, tuple[Any, Any]]) -> Any:
    # As nearly always; asking whether it is a tensor takes longer than all else.
    kind: Any = type(value)
    if issubclass(kind, (np.ndarray, np.generic)) and value.dtype is dtype:
        return value[None]
    if isinstance(value, torch.Tensor):
        return value[None]
    if isinstance(value, np.ndarray):
        if value.dtype is dtype:
            return value[None]
        between = limits.get(PYTHON.get(value.dtype.kind, object))
        fits = between and value.size and between[0] <= value.min().item() and value.max().item() <= between[1]
        return value.astype(dtype)[None] if fits else None
    if isinstance(value, np.generic):
        value = value.item()
    between = limits.get(type(value))
    fits = between and between[0] <= value <= between[1]  # not true of NaN
    return np.array([value], dtype) if fits else None


def _limits(spec: Spec, exactly: bool) -> dict[type, tuple[Any, Any]]:
    """Python's type -> between what its numbers certainly keep their value, and if `exactly` floats their precision."""
    kind, dtype = spec.dtype.kind, spec.dtype
    if kind == "c" or spec.is_bfloat16 or spec.is_object:
        return {}
    bits = {bool: (0, 1)}
    if kind == "b":
        return bits | {int: (0, 1)}
    if kind in "iu":
        return bits | {int: (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))}
    whole, largest = 2 ** (np.finfo(dtype).nmant + 1), float(np.finfo(dtype).max)
    limits: dict[type, tuple[Any, Any]] = {bool: (0, 1), int: (-whole, whole)}
    return limits if exactly and dtype.itemsize < 8 else {**limits, float: (-largest, largest)}
