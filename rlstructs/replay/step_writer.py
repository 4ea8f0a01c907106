"""Writes one row to every lane quickly, as nearly every write does.

`StepWriter` does what `Storage.write` does if nothing has to be converted: every column is given in its own dtype and
shape, the lanes are in step, and no other process has the store, so that the order in which others see stores does not
matter. It remembers what `Storage.write` finds out at each call.
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
        ends: columns that end an episode where they are true, if the store has them.
    """

    def __init__(self, storage: Storage, ends: Iterable[str]) -> None:
        self._storage = storage
        self._every_end = tuple(ends)
        self._version, self._head = -1, 0  # the store's when `_prepare` was called, and after each write
        # Name, shape and dtype of each column, and whether it ends episodes; empty if nothing can be written.
        self._wanted: list[tuple[str, tuple[int, ...], np.dtype, bool]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"storage": self._storage, "ends": self._every_end}  # the rest follows from them

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def forget(self) -> None:
        """Forgets what it knows of the store, to which another writes from now on."""
        self._version = -1

    def write(self, tensors: Mapping[str, Any], is_row: bool = False) -> Mapping[str, Any] | None:
        """Appends a row to every lane and returns its arrays; returns None if `Storage.write` has to do it.

        Args:
            tensors: name -> `(n_lanes, ...)`, arrays of numpy or torch.
            is_row: whether these are plain numbers and arrays without an axis for lanes, of a store with one lane.
        """
        storage = self._storage
        if self._version != storage.version and (is_row or _are_arrays(tensors)):
            self._prepare()
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
                except (RuntimeError, TypeError):  # it has a gradient or is on another device
                    return None
            # A pickled dtype is equal, but another object.
            if (value.dtype is not dtype and value.dtype != dtype) or value.shape != shape:
                return None
            if is_end and value.tobytes() != self._no_end:
                ended = True
            values.append(value)
        with storage.lock:
            if self._version != storage.version:
                return None
            self._version = -1  # until all is done, in case of Ctrl-C
            slot, following = self._head % self._capacity, self._head + 1
            self._reserved.fill(following)
            for rows, value in zip(self._rows, values):  # noqa: B905 - linked columns, the last, have none
                rows[slot] = value
            if self._linked:
                storage.columns.write_links({name: values[at][:, None] for name, at in self._linked}, ALL, 1)
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

    def _prepare(self) -> None:
        """Finds out what is needed to write to the store as it is now."""
        storage, columns = self._storage, self._storage.columns
        with storage.lock:
            storage.hand_over_to(self)
            self._version = storage.version
            ring, n, self._capacity = storage.ring, columns.n_lanes, columns.capacity
            self._ends = [name for name in self._every_end if name in columns.specs]
            usable = (
                columns.on_host
                and storage.is_private
                and bool((ring.counters == ring.counters[:, :1]).all())
                and bool((ring.reserved == ring.head).all())
                and all(columns.specs[name].dtype == END and columns.specs[name].nbytes == 1 for name in self._ends)
                and not any(spec.is_bfloat16 or spec.is_object for spec in columns.specs.values())
            )
            names = [*columns.flat, *columns.links] if usable else []
            self._one_row = OneRow({name: columns.specs[name] for name in names})
            self._wanted = [
                (name, (n, *spec.shape), np.dtype(spec.dtype.str), name in self._ends)
                for name, spec in ((name, columns.specs[name]) for name in names)
            ]
            # The linked columns and their sources, and where their values are among all.
            linked = {*columns.links, *(link.source for link in columns.links.values())}
            self._linked: list[tuple[str, int]] = [(name, at) for at, name in enumerate(names) if name in linked]
            self._rows = [columns.cells[name].swapaxes(0, 1) for name in columns.flat if usable]
            self._reserved, self._heads = ring.reserved, ring.head
            self._head = int(ring.head[0])
            self._has_episodes: bool = storage.episodes is not None
            self._no_end: bytes = bytes(n)
            if usable and storage.episodes is not None:
                # Pairs of time and length, of int32 and as one int64 each.
                self._episodes = storage.episodes.columns.cells[EPISODE].swapaxes(0, 1)
                self._pairs: ndarray = self._episodes.view(np.int64)[..., 0]
                self._open = np.zeros((n, 2), np.int32)  # those of the next rows
                self._open[:, TIME] = storage.episodes.open_lengths(ALL, self._head)
                self._open_pairs: ndarray = self._open.view(np.int64)[:, 0]
                one = np.zeros_like(self._open)
                one[:, TIME] = 1
                self._one_step: ndarray = one.view(np.int64)[:, 0]


def _are_arrays(tensors: Mapping[str, Any]) -> bool:
    return all(type(value) in (ndarray, Tensor) for value in tensors.values())


class OneRow:
    """Converts plain numbers and arrays to arrays with one row, if it is obvious that they fit.

    A column of infos, which may be widened, takes a number only if its dtype holds it exactly.

    Args:
        specs: of the columns.

    Example:
        >>> one_row = OneRow({"x": Spec(np.dtype(np.uint8))})
        >>> one_row({"x": 255}), one_row({"x": 256})
        ({'x': array([255], dtype=uint8)}, None)
    """

    def __init__(self, specs: Mapping[str, Spec]) -> None:
        # numpy's own dtype objects, which are compared by identity.
        self._known = {name: (np.dtype(spec.dtype.str), _limits(spec, is_info(name))) for name, spec in specs.items()}

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns name -> `(1, ...)`; None if it is not obvious that all values fit."""
        rows = {}
        for name, value in row.items():
            if name not in self._known:
                return None
            try:
                array = _convert(value, *self._known[name])
            except (TypeError, IndexError):  # it is a list, or no number
                return None
            if array is None:
                return None
            rows[name] = array
        return rows


def _convert(value: Any, dtype: np.dtype, limits: Mapping[type, tuple[Any, Any]]) -> Any:
    # First, because it is nearly always so, and the check for a tensor is slow.
    kind: Any = type(value)
    if issubclass(kind, (np.ndarray, np.generic)) and value.dtype is dtype:
        return value[None]
    if isinstance(value, torch.Tensor):
        return value[None]
    if isinstance(value, np.ndarray):
        between = limits.get(PYTHON.get(value.dtype.kind, object))
        fits = between and value.size and between[0] <= value.min().item() and value.max().item() <= between[1]
        return value.astype(dtype)[None] if fits else None
    if isinstance(value, np.generic):
        value = value.item()
    between = limits.get(type(value))
    fits = between and between[0] <= value <= between[1]  # not true of NaN
    return np.array([value], dtype) if fits else None


def _limits(spec: Spec, exactly: bool) -> dict[type, tuple[Any, Any]]:
    """Python type -> the range of its numbers that a column holds; with `exactly`, without rounding floats."""
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
