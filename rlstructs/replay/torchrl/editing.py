"""Reads and changes rows of a `DictTensorReplayBuffer` by index.

Its public methods say how.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from rlstructs.errors import MissingKeyError, SpecError
from rlstructs.replay.intake.arrays import flat_items, host_array, row_ids
from rlstructs.replay.intake.intake import FILL, GROW
from rlstructs.replay.rows.store import Storage
from rlstructs.replay.torchrl.assembly import Assembly
from rlstructs.replay.torchrl.given_rows import GivenRows, take_rows
from rlstructs.replay.torchrl.part import join_key
from rlstructs.replay.torchrl.rows_in import RowIntake
from rlstructs.replay.torchrl.samplers import INDEX
from rlstructs.replay.torchrl.transforms import Compose
from rlstructs.structures.dict_tensor import DictTensor


def read(parts: Assembly, index: Any, transform: Compose) -> Any:
    """Returns rows or a column, transformed; see `DictTensorReplayBuffer.__getitem__`."""
    if isinstance(index, (str, tuple)):
        return _read_column(parts, join_key(index), transform)
    with parts.lock:
        rows = _find_rows(parts.store, index)
        ids = np.atleast_1d(rows)
        arrays = _gather(parts.store, list(parts.specs), ids)
        is_torch = parts.export.framework == "torch"
        if parts.axes is not None and is_torch:  # torchrl's buffer has it as a column
            arrays[INDEX] = ids.copy()
        if not rows.ndim and (parts.axes is not None or is_torch) and not len(transform):
            return parts.hand_over({name: array[0, ...] for name, array in arrays.items()}, 0)
        batch = parts.hand_over(arrays, max(rows.ndim, 1))
    batch = transform(batch) if len(transform) else batch
    return batch if rows.ndim else _take_first(batch)


def _read_column(parts: Assembly, key: str, transform: Compose) -> Any:
    nested = [name for name in parts.specs if name.startswith(f"{key}/")]
    if not len(transform) and key not in parts.specs and not nested:
        raise MissingKeyError(f"no {key!r} in this buffer, there are {sorted(parts.specs)}")
    names = list(parts.specs) if len(transform) else [key] if key in parts.specs else nested
    with parts.lock:
        batch = parts.hand_over(_gather(parts.store, names, _find_rows(parts.store, slice(None))))
    batch = transform(batch)
    if isinstance(batch, DictTensor) and key not in batch:
        inside = batch.truncate_key(f"{key}/")
        return batch[key] if inside.empty() else inside  # if neither is there, this raises
    return batch[key if isinstance(batch, (DictTensor, dict)) else tuple(key.split("/"))]  # a tensordict is nested


def _gather(store: Storage, names: list[str], rows: np.ndarray) -> dict[str, Any]:
    return dict(zip(names, store.gather(names, rows), strict=True))


def change(intake: RowIntake, index: Any, values: Any) -> None:
    """Changes rows or a column; see `DictTensorReplayBuffer.__setitem__`."""
    if isinstance(index, (str, tuple)):
        change_columns(intake, slice(None), {join_key(index): values})
    else:
        change_columns(intake, index, values, with_new=True)


def change_all(intake: RowIntake, values: Any, keys: Collection[Any] | None) -> None:
    """Changes some columns in all rows; see `DictTensorReplayBuffer.update_`."""
    flat = flat_items(values, "update_")
    names = list(flat) if keys is None else [join_key(key) for key in keys]
    if absent := sorted(set(names) - set(flat)):
        raise MissingKeyError(f"update_: no {absent} among the values, there are {sorted(flat)}")
    change_columns(intake, slice(None), {name: flat[name] for name in names})


def change_columns(intake: RowIntake, index: Any, values: Any, with_new: bool = False) -> None:
    """Changes columns in some rows.

    If `with_new` and these are all rows, there may be new columns.
    """
    parts = intake.parts
    with parts.lock:
        parts.writer.refuse()
        rows = _find_rows(parts.store, index)
        given = flat_items(values, "[]")
        reserved = parts.reserved_names()
        if INDEX in given:  # a sample: no column has this name
            if not parts.reading.is_plain:
                text = "samples of n steps or stacks are not what is stored: give columns without index"
                raise SpecError(f"[]: {text}")
            reserved |= parts.sampler.marks(given, parts.specs)
        flat = {name: value for name, value in given.items() if name not in reserved} or given
        if rows.ndim > 1:
            raise IndexError(f"an index to write to must have one axis, got shape {rows.shape}")
        taken = take_rows(flat, "[]") if rows.ndim else GivenRows.from_row(values, flat)
        rows, inverted = np.atleast_1d(rows), intake.invert(taken, "[]")
        if inverted is None or not rows.size:
            return
        new = inverted.values.keys() - parts.specs.keys()
        if new and not (with_new and new.isdisjoint(reserved) and np.unique(rows).size == len(parts.store)):
            raise MissingKeyError(f"no {min(new)!r} in this store, there are {sorted(parts.specs)}")
        if inverted.n != rows.size:
            raise SpecError(f"[]: {inverted.n} rows of values came for {rows.size} rows")
        _put(intake, rows, inverted.values, new)


def _put(intake: RowIntake, rows: np.ndarray, values: Mapping[str, Any], new: Collection[str]) -> None:
    """Changes rows, and creates the columns in `new`."""
    parts, marks = intake.parts, intake.parts.marks
    block = intake.convert(values, GROW, FILL)
    if new:
        parts.quick = None
        marks.are_known |= marks.are_in(new)
    block = {name: column[0] for name, column in block.items()}
    if rows.size > 1:
        _, last = np.unique(rows[::-1], return_index=True)  # if a row id is repeated, the last counts
        last = rows.size - 1 - last
        rows, block = rows[last], {name: column[last] for name, column in block.items()}
    # This looks at every row, which takes long if there are many: only if episodes may change.
    before = marks.read() if marks.are_changed(block, rows) else None
    parts.store.put(block, rows)
    if before is not None:
        marks.recompute(*before)
    parts.writer.changed()


def _find_rows(store: Storage, index: Any) -> np.ndarray:
    """Converts an index to row ids, int64.

    An int gives an array without an axis.
    """
    n = len(store)
    if isinstance(index, slice):
        return _sort_by_id(store, np.arange(*index.indices(n)))
    if type(index) is int and 0 <= index < store.columns.n_rows and store.view().has(index):  # type: ignore[arg-type]
        return np.array(index)
    at = host_array("index", index) if not isinstance(index, list) or index else np.zeros(0, np.int64)
    if at.dtype.kind == "b" and at.ndim:
        if at.shape != (n,):
            raise IndexError(f"a mask must have a value for each of the {n} rows, got shape {at.shape}")
        return _sort_by_id(store, np.flatnonzero(at))
    if at.dtype.kind not in "iu":
        raise IndexError(f"an index must be row ids, a slice, a bool mask or a name, got {index!r}")
    if at.ndim == 0 and at < 0:
        if at < -n:
            raise IndexError(f"index {int(at)} is out of range for {n} rows")
        return _sort_by_id(store, n + at.astype(np.int64))
    rows = row_ids(at, store.columns.n_rows)
    held = store.view().has(rows)
    if not held.all():
        raise IndexError(f"index {rows[~held][0]} holds no row")
    return rows


def _sort_by_id(store: Storage, numbers: np.ndarray) -> np.ndarray:
    """Returns the row ids of row numbers, counted by row id."""
    view = store.view()
    first = int(view.low[0]) % view.columns.capacity
    if not first or view.total == view.columns.capacity:
        return numbers  # always, unless a write was cut short
    return np.asarray(np.sort(view.every_row())[numbers])


def _take_first(batch: Any) -> Any:
    """Takes the row of a batch of one.

    In warp, which has no scalars, numbers stay arrays of one.
    """
    if isinstance(batch, DictTensor):
        return batch.index(0)
    if not isinstance(batch, dict):
        return batch[0]
    return type(batch)({name: _drop_axis(value) for name, value in dict.items(batch)})


def _drop_axis(value: Any) -> Any:
    if type(value).__module__.partition(".")[0] == "warp":
        return value.reshape(value.shape[1:]) if value.ndim > 1 else value
    return value[0]
