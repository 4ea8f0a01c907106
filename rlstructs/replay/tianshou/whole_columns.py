"""Whole columns of tianshou's buffers, which are their attributes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from rlstructs.errors import StateError
from rlstructs.replay.array_dict import ArrayDict
from rlstructs.replay.store import MAX_REDRAWS
from rlstructs.replay.tianshou.foreign import hint_of
from rlstructs.replay.tianshou.lazy_column import LazyColumn, read_only
from rlstructs.replay.tianshou.rows import EpisodeRows
from rlstructs.replay.tianshou.transitions import ADDED_EMPTY, DONE, FLAGS, RESERVED, REW
from rlstructs.replay.values import from_bits


class WholeColumns(EpisodeRows):
    """Transitions whose columns can be read as a whole; see `ReplayBuffer`."""

    def __getattr__(self, name: str) -> Any:
        """A whole column, `(maxsize, ...)`, as a read-only array of numpy; what is nested as a dict of them.

        Of `info` and `policy` what was never stored is an empty dict.
        Rows that are not there hold zeros, or what they once held. It may or may not follow what is written later:
        copy what is kept. One that does not lie in memory as it is, as next observations that are stored once, is a
        `LazyColumn`: only the rows that are indexed are gathered. If its rows are small it is joined to an array.
        """
        if "_storage" in vars(self) and not name.startswith("_"):
            return self._of_one_layout(self._attribute, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _attribute(self, name: str) -> Any:
        if name == DONE and self._specs:
            return read_only(np.asarray(self._column(FLAGS[0])) | np.asarray(self._column(FLAGS[1])))
        if name in self._specs:
            return self._shown(name)
        if inside := [key for key in self._specs if key.startswith(f"{name}/")]:
            return ArrayDict.trusted({key[len(name) + 1 :]: self._column(key) for key in inside})
        if name in ADDED_EMPTY:
            return ArrayDict()
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint_of(name)}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in RESERVED:  # it would hide the column
            raise AttributeError(f"{name!r} is a column of this buffer; use set_array_at_key or set_batch")
        super().__setattr__(name, value)

    def _shown(self, name: str) -> np.ndarray | LazyColumn:
        """A column, or what stands in for it."""
        if name != REW or self._stand_in is None:
            return self._column(name)
        return read_only(from_bits(self._stand_in) if self._specs[REW].is_bfloat16 else self._stand_in.view())

    def _column(self, name: str) -> np.ndarray | LazyColumn:
        """A column, `(maxsize, ...)`; where it is stored as it is a view."""
        if name in self._storage.columns.links:
            return self._gathered(name)
        whole = self._storage.columns.flat[name]
        whole = from_bits(whole) if self._specs[name].is_bfloat16 else whole
        return read_only(whole[: self._n_lanes * self._lane_size].view())

    def _gathered(self, name: str) -> LazyColumn:
        """A column that does not lie in memory as it is, (maxsize, ...)."""
        none = self._values_at(name, np.zeros(0, np.int64))
        return LazyColumn((self.maxsize, *none.shape[1:]), none.dtype, functools.partial(self._values_at, name))

    def _values_at(self, name: str, at: np.ndarray) -> np.ndarray:
        """What a column holds at row ids (n,), whether rows are there or not."""
        if name in self._storage.columns.links:
            rows, spec = self._own_rows(), self._specs[name]
            values, there = np.zeros((at.size, *spec.shape), spec.dtype), rows.has(at)
            [values[there]] = rows.gather([name], at[there])
        else:
            values = self._storage.columns.flat[name][at]
        return from_bits(values) if self._specs[name].is_bfloat16 else values

    def _of_one_layout(self, look: Callable[[Any], Any], given: Any, redraws: int = MAX_REDRAWS) -> Any:
        """What `look` finds, or finds again if another thread gave columns other dtypes meanwhile."""
        columns = self._storage.columns
        layout = columns.layout
        try:
            found = look(given)
            if layout == columns.layout and not layout & 1:
                return found
        except Exception:  # columns may have gone
            if layout == columns.layout and not layout & 1:
                raise
        if not redraws:
            raise StateError("columns change faster than they are read")
        return self._of_one_layout(look, given, redraws - 1)
