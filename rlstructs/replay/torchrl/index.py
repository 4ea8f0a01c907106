"""How rows of a `DictTensorReplayBuffer` are read and changed by index."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from rlstructs.errors import MissingKeyError, SpecError
from rlstructs.replay.columns import Spec
from rlstructs.replay.given import as_rows, flat_items
from rlstructs.replay.sampling import check_rows
from rlstructs.replay.torchrl.batches import rows_of, with_axis
from rlstructs.replay.torchrl.part import joined
from rlstructs.replay.torchrl.rows import DictTensorRows
from rlstructs.replay.torchrl.samplers import INDEX
from rlstructs.replay.values import host_array
from rlstructs.structures.dict_tensor import DictTensor

S = TypeVar("S", bound="DictTensorIndex")


class DictTensorIndex(DictTensorRows):
    """What is read and changed by index; see `DictTensorReplayBuffer`."""

    def __getitem__(self, index: Any) -> Any:
        """Rows, or columns, as private copies, through the transforms.

        Args:
            index: an int, a row id; below 0 it counts from the highest one back. A list or array of row ids. A slice
                of all rows, or a bool mask over them, in the order of their ids. A name, or a tuple of the names it is
                made of, for all rows of that column in this order; the name of several that are nested gives them all.

        Returns:
            Every column; of rows that came as a `TensorDict` their `index` too, as in a sample.

        Raises:
            IndexError, MissingKeyError: there is no such row or column.
        """
        if isinstance(index, (str, tuple)):
            return self._column(index)
        with self._lock:
            rows = self._rows_at(index)
            ids = np.atleast_1d(rows)
            arrays = dict(zip(self._specs, self._storage.gather(list(self._specs), ids), strict=True))
            if self._axes is not None and self.framework == "torch":  # torchrl's buffer keeps it with the columns
                arrays[INDEX] = ids.copy()
            batch = self._to_form(self._hand_over(arrays), max(rows.ndim, 1))
        batch = self._transform(batch)
        return batch if rows.ndim else _first(batch)

    def _column(self, given: Any) -> Any:
        key = joined(given)
        nested = [name for name in self._specs if name.startswith(f"{key}/")]
        if not len(self._transform) and key not in self._specs and not nested:
            raise MissingKeyError(f"no {key!r} in this buffer, there are {sorted(self._specs)}")
        names = list(self._specs) if len(self._transform) else [key] if key in self._specs else nested
        with self._lock:
            rows = self._by_id(np.arange(len(self)))
            arrays = dict(zip(names, self._storage.gather(names, rows), strict=True))
            batch = self._to_form(self._hand_over(arrays))
        batch = self._transform(batch)
        if isinstance(batch, DictTensor) and key not in batch:
            inside = batch.truncate_key(f"{key}/")
            return batch[key] if inside.empty() else inside  # the one or the other raises
        return batch[key if isinstance(batch, (DictTensor, dict)) else tuple(key.split("/"))]  # a tensordict is nested

    def __setitem__(self, index: Any, values: Any) -> None:
        """Changes rows in place; priorities, and which rows there are, stay.

        Args:
            index: as of `[]`.
            values: a mapping of some columns to values for these rows; of a single column only its values. What a
                sample holds beside its columns is left out, so that it may be written back as it is; and of slices
                the marks of their ends (`done`, `truncated`, `is_init`). Samples of n steps or stacks are not what is
                stored: give columns without their `index`. A mapping for all rows that are there may have new columns.

        Raises:
            IndexError, SpecError, MissingKeyError, StateError: something does not fit; nothing has changed.
        """
        if isinstance(index, (str, tuple)):
            self._set(slice(None), {joined(index): values})
        else:
            self._set(index, values, with_new=True)

    def _set(self, index: Any, values: Any, with_new: bool = False) -> None:
        """Changes rows in place; `with_new`, those of columns that are not there yet too, if these are all rows."""
        with self._lock:
            self._writer.refuse()
            rows = self._rows_at(index)
            given = flat_items(values, "[]")
            beside = self._beside_names()
            if INDEX in given:  # of a sample: no column is called so
                if not self._reading.is_plain:
                    text = "samples of n steps or stacks are not what is stored: give columns without index"
                    raise SpecError(f"[]: {text}")
                beside |= self._sampler.marks(given, self._specs)
            flat = {name: value for name, value in given.items() if name not in beside} or given
            if not rows.ndim:
                rows, flat = rows[None], {name: with_axis(name, value) for name, value in flat.items()}
            if rows.ndim > 1:
                raise IndexError(f"an index to write to must have one axis, got shape {rows.shape}")
            inverted = self._invert_rows(rows_of(flat, "[]"), "[]")
            if inverted is None or not rows.size:
                return
            new = inverted.values.keys() - self._specs.keys() - beside if with_new else ()
            self._put(rows, inverted.values, new if new and np.unique(rows).size == len(self) else ())

    def set_(self: S, key: Any, value: Any) -> S:
        """Changes a column in all rows, in the order of their ids; raises as `[]` does. Returns the buffer."""
        self._set(slice(None), {joined(key): value})
        return self

    def set_at_(self: S, key: Any, value: Any, index: Any) -> S:
        """Changes a column in some rows; `index` and errors as of `[]`. Returns the buffer."""
        self._set(index, {joined(key): value})
        return self

    def update_(self: S, values: Any, clone: bool = False, *, keys_to_update: Sequence[Any] | None = None) -> S:
        """Changes columns in all rows, in the order of their ids; raises as `[]` does.

        Args:
            values: a mapping of names to `(len(self), ...)`.
            clone: changes nothing, as values are always copied.
            keys_to_update: which of them; None for all.

        Returns:
            The buffer.
        """
        flat = flat_items(values, "update_")
        keys = list(flat) if keys_to_update is None else [joined(key) for key in keys_to_update]
        if absent := sorted(set(keys) - set(flat)):
            raise MissingKeyError(f"update_: no {absent} among the values, there are {sorted(flat)}")
        self._set(slice(None), {key: flat[key] for key in keys})
        return self

    def read_all_in_order(self, end: int | None = None) -> Any:
        """All rows, or the first `end` of them, in the order of their ids: `[:end]`."""
        return self[:end]

    def write_all(self, data: Any, end: int | None = None) -> None:
        """Changes the first rows, as many as `data` has or `end`; if these are all, there may be new columns.

        Raises:
            IndexError, SpecError, MissingKeyError, StateError: as of `[]`.
        """
        self[: rows_of(data, "write_all").n if end is None else end] = data

    def _put(self, rows: np.ndarray, values: Mapping[str, Any], new: Collection[str]) -> None:
        """Changes rows, and makes the columns that are new."""
        storage, block, made = self._storage, {}, {}
        for name, value in values.items():
            given, spec = as_rows(name, value, self._specs.get(name))
            if name not in new:
                block[name] = storage.columns.check(name, given, rows.shape)
                continue
            if given.shape[:1] != rows.shape:
                raise SpecError(f"{name!r} has shape {given.shape}, needed are {rows.size} rows")
            block[name], made[name] = given, Spec(spec.dtype, given.shape[1:], 0, spec.is_bfloat16)
        if made:
            self._intake.add_columns(made)
            block |= {name: storage.columns.check(name, block[name], rows.shape) for name in made}
            self._quick = None
            self._knows_episodes |= bool(self._end_keys(made) or self._id_keys(made))
        _, last = np.unique(rows[::-1], return_index=True)  # of equal ones the last counts
        last = rows.size - 1 - last
        # Looking at every row takes long where there are many.
        marks = self._ends_and_changes() if self._end_keys(block) or self._id_keys(block) else None
        for name, checked in block.items():
            storage.put(name, rows[last], checked[last])
        if marks is not None:
            self._recompute_episodes(*marks)
        self._writer.changed()

    def _rows_at(self, index: Any) -> np.ndarray:
        """Row ids, int64; without an axis for a single one."""
        n = len(self)
        if isinstance(index, slice):
            return self._by_id(np.arange(n)[index])
        at = host_array("index", index) if not isinstance(index, list) or index else np.zeros(0, np.int64)
        if at.dtype.kind == "b" and at.ndim:
            if at.shape != (n,):
                raise IndexError(f"a mask must have a value for each of the {n} rows, got shape {at.shape}")
            return self._by_id(np.flatnonzero(at))
        if at.dtype.kind not in "iu":
            raise IndexError(f"an index must be row ids, a slice, a bool mask or a name, got {index!r}")
        if at.ndim == 0 and at < 0:
            if at < -n:
                raise IndexError(f"index {int(at)} is out of range for {n} rows")
            return self._by_id(n + at.astype(np.int64))
        return check_rows(self._storage, at)

    def _by_id(self, numbers: np.ndarray) -> np.ndarray:
        """The row ids of rows by number in the order of ids; as long as no write was cut short they are the same."""
        span = self._span()
        first = int(span.low[0]) % span.columns.capacity
        if not first or span.total == span.columns.capacity:
            return numbers
        return np.asarray(np.sort(span.every_row())[numbers])


def _first(batch: Any) -> Any:
    """The row of a batch of one; of warp, which has no single numbers, those stay arrays of one."""
    if isinstance(batch, DictTensor):
        return batch.index(0)
    if not isinstance(batch, dict):
        return batch[0]
    return type(batch)({name: _without_axis(value) for name, value in batch.items()})


def _without_axis(value: Any) -> Any:
    if type(value).__module__.partition(".")[0] == "warp":
        return value.reshape(value.shape[1:]) if value.ndim > 1 else value
    return value[0]
