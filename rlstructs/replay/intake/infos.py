"""Converts infos of environments to flat names and rows, and plans their columns.

Rows are numbers if possible, otherwise objects. The info of one environment is a mapping. The info of several is a
mapping of arrays with a row for each, or a list or array of mappings. Nested names are joined with `/`. A mapping that
is empty, or has keys that are not strings, is an object.

Columns change when environments return infos of another form. Columns of numbers widen while no value is lost.
Otherwise they become columns of objects. If an info was nested and no longer is, its columns become one column of
dicts. Everything is planned before anything changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from rlstructs.errors import OutOfMemoryError, SpecError
from rlstructs.replay.intake.arrays import are_mappings, as_rows, from_bits, host_array, is_mapping
from rlstructs.replay.intake.roles import is_info
from rlstructs.replay.rows.columns import Columns
from rlstructs.replay.rows.objects import OBJECT, as_object, objects_in, objects_of
from rlstructs.replay.rows.spec import Spec, is_exact, is_too_wide, widened
from rlstructs.replay.rows.store import Storage

# Types of values that are not numbers and need no copy.
TEXTS = (str, bytes, type(None))
NUMBERS = (bool, int, float, complex, np.bool_, np.number)
OBJECTS = Spec(OBJECT)
# Returns the numbers in the valid rows of a column.
Held = Callable[[str], np.ndarray]


class Object(NamedTuple):
    """A value of a row that is not a number."""

    value: Any


# The values of a row by name: numbers without an axis for the row, or objects.
Cells = dict[str, "np.ndarray | torch.Tensor | Object"]


def info_items(name: str, value: Any, n_axes: int, owner: str) -> dict[str, Any]:
    """Converts an info, or a part of it, to rows of columns.

    Args:
        name: of the info.
        value: the info.
        n_axes: number of axes of its arrays in front of the axes of a row: 0 or 1.
        owner: name of the caller, for messages.

    Returns:
        name -> `(n, ...)`, numbers of any library or an array of objects; n is 1 for `n_axes` 0.

    Raises:
        SpecError: an axis of rows is missing, or a name is given twice.
    """
    if n_axes == 0:
        return {key: _column([cell]) for key, cell in _cells(name, value, owner).items()}
    if are_mappings(value):
        return _columns([_cells(name, each, owner) for each in value])
    if value is None or (is_mapping(value) and not value.keys()):
        return {}
    if not _is_nested(value):
        return {name: _rows(name, value, owner)}
    parts = [info_items(f"{name}/{key}", value[key], n_axes, owner) for key in value.keys()]  # noqa: SIM118
    return _join(parts, owner)


def info_objects(name: str, value: np.ndarray, n_axes: int) -> np.ndarray:
    """Converts one info that is not a mapping to objects (n,).

    Args:
        name: of the column.
        value: (n, ...), or for `n_axes` 0 an array of one object, the info.
        n_axes: as of `info_items`.
    """
    if n_axes:
        values = _rows(name, value, name)
    elif type(value[0]) in TEXTS:
        return value
    else:
        values = _column([_cell(name, value[0])])
    return values if values.dtype == object else objects_in(values, 1)


def has_empty(info: Any) -> bool:
    """Whether an info has an empty mapping in it."""
    inside = [info[key] for key in info.keys()] if is_mapping(info) else ()  # noqa: SIM118
    return any(is_mapping(each) and (not each.keys() or has_empty(each)) for each in inside)


def _is_nested(value: Any) -> bool:
    if not is_mapping(value):
        return False
    keys = list(value.keys())  # not every batch iterates over its keys
    return bool(keys) and all(isinstance(key, str) for key in keys)


def _join(parts: Iterable[dict[str, Any]], owner: str) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for inside in parts:
        if twice := joined.keys() & inside.keys():
            raise SpecError(f"{owner}: key {sorted(twice)[0]!r} is given twice")
        joined |= inside
    return joined


def _cells(name: str, value: Any, owner: str) -> Cells:
    """Returns the values of one environment's info, by flat names."""
    if _is_nested(value):
        return _join([_cells(f"{name}/{key}", value[key], owner) for key in value.keys()], owner)  # noqa: SIM118
    if are_mappings(value):  # of several agents
        inside = _columns([_cells(name, each, owner) for each in value])
        if not any(array.dtype == object for array in inside.values()):
            return dict(inside)
    return {name: _cell(name, value)}


def _numbers(name: str, value: Any) -> np.ndarray | torch.Tensor | None:
    """Converts numbers to an array or a tensor.

    None if a column cannot hold them.
    """
    if isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16:
        return value.detach()
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.element_size() == 1:
        value = value.float()  # numpy lacks float8
    if not isinstance(value, NUMBERS) and not hasattr(value, "dtype") and type(value) not in (list, tuple):
        return None
    try:
        found = host_array(name, value)
    except SpecError:
        return None
    if found.dtype.kind not in "biufc" or (type(value) in (list, tuple) and not _holds(found, value)):
        return None
    if is_too_wide(found.dtype):
        narrow = np.dtype(np.complex128 if found.dtype.kind == "c" else np.float64)
        return found.astype(narrow) if is_exact(found, narrow) else None
    return found


def _holds(array: np.ndarray, given: Sequence[Any]) -> bool:
    """Whether ints in a list of floats kept their values."""
    return (
        array.dtype.kind not in "fc"
        or array.ndim > 1
        or array.tolist() == [as_object(each) for each in given]
        or (not any(isinstance(each, (int, np.integer)) and abs(int(each)) > 2**53 for each in given))
    )


def _rows(name: str, value: Any, owner: str) -> Any:
    """Converts the values of several environments, which are not nested, to rows (n, ...)."""
    if is_mapping(value):
        wrong = next(key for key in value.keys() if not isinstance(key, str))  # noqa: SIM118
        raise TypeError(f"{owner}: a key must be a string, got {wrong!r} in {name!r}")
    if isinstance(value, np.ndarray) and value.dtype == object and value.ndim:
        plain = value.ndim == 1 and all(isinstance(each, NUMBERS) for each in value)
        return _column([_cell(name, each) for each in value]) if plain else objects_in(value, 1)
    numbers = _numbers(name, value)
    if numbers is not None and numbers.ndim:
        return numbers
    if type(value) in (list, tuple):
        return _column([_cell(name, each) for each in value])
    if numbers is None and getattr(value, "ndim", None):
        return objects_in(value, 1)
    raise SpecError(f"{name!r} has shape {tuple(np.shape(value))}, expected a first axis of rows")


def _cell(name: str, value: Any) -> np.ndarray | torch.Tensor | Object:
    numbers = _numbers(name, value)
    return Object(value) if numbers is None else numbers


def _columns(rows: Sequence[Cells]) -> dict[str, Any]:
    """Joins the values of several environments by name.

    Values that are nested only in some environments become objects.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    parents = {name for name in names if any(other.startswith(f"{name}/") for other in names)}
    joined = {name for name in parents if not all(is_nothing(row[name]) for row in rows if name in row)}
    columns = {}
    for name in names:
        if name in joined:
            columns[name] = _column([nested(name, row) for row in rows])
        elif name not in parents and not any(name.startswith(f"{each}/") for each in joined):
            columns[name] = _column([row.get(name) for row in rows])
    return columns


def nested(name: str, row: Mapping[str, Any]) -> Any:
    """Joins the values of a row under a name to one object.

    Values nested in the name belong to it. None if there are none.
    """
    if name in row:
        return row[name]
    found: dict[str, Any] = {}
    for key, cell in row.items():
        if key.startswith(f"{name}/"):
            *path, last = key[len(name) + 1 :].split("/")
            at = found
            for each in path:
                at = at.setdefault(each, {})
            at[last] = as_object(cell.value if isinstance(cell, Object) else cell)
    return Object(found) if found else None


def is_nothing(cell: Any) -> bool:
    """Whether a value is None or an empty mapping."""
    value = cell.value if isinstance(cell, Object) else cell
    return value is None or (is_mapping(value) and not list(value.keys()))


def _column(cells: Sequence[Any]) -> Any:
    """Joins values to rows of a column.

    A missing value, None, becomes zero among numbers.
    """
    given = [cell for cell in cells if cell is not None]
    if len(cells) == len(given) == 1 and not isinstance(cells[0], Object):
        return cells[0][None]
    if not any(isinstance(cell, Object) for cell in given):
        arrays = [host_array("info", cell) for cell in given]
        dtype = _dtype_of(arrays)
        if dtype is not None:
            found = np.zeros((len(cells), *arrays[0].shape), dtype)
            found[[at for at, cell in enumerate(cells) if cell is not None]] = np.stack(arrays)
            return found
    return objects_of(cell.value if isinstance(cell, Object) else cell for cell in cells)


def _dtype_of(arrays: Sequence[np.ndarray]) -> np.dtype | None:
    """Finds the dtype of a column for these arrays; None if none fits."""
    if not arrays or any(array.shape != arrays[0].shape for array in arrays):
        return None
    dtype: np.dtype | None = arrays[0].dtype
    for array in arrays[1:]:
        dtype = None if dtype is None else widened(np.zeros(0, dtype), array, dtype)
    return dtype if dtype is not None and all(is_exact(array, dtype) for array in arrays) else None


@dataclass
class Plan:
    """Rows converted for their columns, and the changes of columns before that.

    Attributes:
        rows: name -> values.
        changed: name -> new spec of an existing column.
        folded: name of a new column of dicts -> columns nested under that name, which it replaces.
    """

    rows: dict[str, Any]
    changed: dict[str, Spec] = field(default_factory=dict)
    folded: dict[str, list[str]] = field(default_factory=dict)

    def specs(self, specs: Mapping[str, Spec]) -> dict[str, Spec]:
        """Returns the specs of the columns after the change."""
        if not self.changed and not self.folded:
            return dict(specs)
        gone = {name for below in self.folded.values() for name in below}
        kept = {name: spec for name, spec in specs.items() if name not in gone}
        return {**kept, **self.changed, **dict.fromkeys(self.folded, OBJECTS)}


def plan_columns(rows: Mapping[str, Any], specs: Mapping[str, Spec], held: Held, n_lead: int) -> Plan:
    """Plans the changes that are needed before rows can be written.

    Args:
        rows: name -> (rows, ...).
        specs: of the columns.
        held: returns the values of a column of infos.
        n_lead: number of leading axes of the rows.
    """
    plan = Plan(dict(rows))
    infos = [name for name in rows if is_info(name)]  # nearly always none
    if not infos:
        return plan
    known = [name for name in specs if is_info(name)]
    for name in infos:
        above = [column for column in known if name.startswith(f"{column}/")]
        below = [column for column in known if column.startswith(f"{name}/")]
        if above:
            _gather_above(plan, above[0], n_lead)
        elif below and not _is_empty(plan.rows[name]):
            plan.folded[name] = below
        elif below or (name not in specs and _is_empty(plan.rows[name])):
            del plan.rows[name]
    for name in [name for name in plan.rows if is_info(name)]:
        _plan_one(plan, name, OBJECTS if name in plan.folded else specs.get(name), held, n_lead)
    return plan


def _gather_above(plan: Plan, column: str, n_lead: int) -> None:
    """Replaces infos nested under the name of a column by dicts for that column."""
    inside = {name: values for name, values in plan.rows.items() if name.startswith(f"{column}/")}
    if not inside:  # an earlier one has gathered them
        return
    columns = {name: objects_in(values, n_lead) for name, values in inside.items()}
    lead = next(iter(columns.values())).shape
    each = [nested(column, {name: values[at] for name, values in columns.items()}) for at in np.ndindex(lead)]
    plan.rows = {name: values for name, values in plan.rows.items() if name not in inside}
    plan.rows[column] = objects_of(cell.value for cell in each).reshape(lead)


def _plan_one(plan: Plan, name: str, spec: Spec | None, held: Held, n_lead: int) -> None:
    values = plan.rows[name]
    is_object = isinstance(values, np.ndarray) and values.dtype == OBJECT
    if spec is None or (is_object and spec.is_object):
        return
    if is_object or spec.is_object:
        plan.rows[name] = values if is_object else objects_in(values, n_lead)
        if not spec.is_object:
            plan.changed[name] = OBJECTS
        return
    made = as_rows(name, values[:0], None)[1]
    if tuple(values.shape[n_lead:]) == spec.shape:
        if (made.dtype, made.is_bfloat16) == (spec.dtype, spec.is_bfloat16):
            return
        here = np.dtype(np.float32) if spec.is_bfloat16 else spec.dtype
        given = host_array(name, values)
        dtype = widened(np.zeros(0, here), given, here)
        if dtype is not None and dtype != here:  # reading all stored values is slow: only if it matters
            dtype = widened(held(name), given, here)
        if dtype is not None:
            plan.rows[name] = given.astype(dtype)
            if dtype != spec.dtype or spec.is_bfloat16:
                plan.changed[name] = Spec(dtype, spec.shape, 0)
            return
    plan.rows[name], plan.changed[name] = objects_in(values, n_lead), OBJECTS


def _is_empty(values: Any) -> bool:
    """Whether every row is None or an empty mapping."""
    if not isinstance(values, np.ndarray) or values.dtype != OBJECT:
        return False
    return all(map(is_nothing, values.flat))


def held_values(storage: Storage, name: str, spec: Spec) -> np.ndarray:
    """Returns the valid rows of a column of numbers."""
    [values] = storage.gather([name], storage.view().every_row())
    return from_bits(values) if spec.is_bfloat16 else np.asarray(values)


def adopt(storage: Storage, plan: Plan) -> None:
    """Carries out a plan on the columns of a store.

    Raises:
        OutOfMemoryError: there is no room; nothing changes.
    """
    made = {name: spec for name, spec in plan.changed.items() if name in storage.columns.specs}
    folded = {name: below for name, below in plan.folded.items() if any(key in storage.columns.specs for key in below)}
    if not made and not folded:
        return
    changed = {**made, **dict.fromkeys(folded, OBJECTS)}
    require_bytes(storage.columns, changed, changed)
    with storage.lock:
        rows = storage.view().every_row()
        values = {name: (spec, _convert_column(storage, rows, name, spec)) for name, spec in made.items()}
        for name, below in folded.items():
            values[name] = OBJECTS, _fold_columns(storage, rows, name, below)
        storage.exchange(values, [key for below in folded.values() for key in below])


def require_bytes(columns: Columns, stored: Mapping[str, Spec], names: Iterable[str]) -> None:
    """Checks that there is room for new columns.

    Args:
        columns: of the store.
        stored: spec of each new column that takes bytes.
        names: all new columns, for the message.

    Raises:
        OutOfMemoryError: there is none.
    """
    needed, available = (
        sum(columns.nbytes_of(*each) for each in stored.items()) * columns.n_rows,
        columns.available_bytes(),
    )
    if available is not None and needed > available:
        raise OutOfMemoryError(f"{sorted(names)}: {needed:,} bytes are needed, {available:,} are available")


def _convert_column(storage: Storage, rows: np.ndarray, name: str, spec: Spec) -> np.ndarray:
    """Converts all rows of a column to another spec."""
    columns = storage.columns
    if spec.is_object:
        return _objects_at(columns.n_rows, rows, objects_in(held_values(storage, name, columns.specs[name]), 1))
    whole = columns.flat[name]
    whole = from_bits(whole) if columns.specs[name].is_bfloat16 else whole
    with np.errstate(over="ignore", invalid="ignore"):  # in empty rows
        return whole.astype(spec.dtype)


def _fold_columns(storage: Storage, rows: np.ndarray, name: str, below: list[str]) -> np.ndarray:
    """Builds a column of dicts from the columns that are nested under a name."""
    specs = storage.columns.specs
    inside = {key: objects_in(held_values(storage, key, specs[key]), 1) for key in below if key in specs}
    each = [nested(name, {key: values[at] for key, values in inside.items()}) for at in range(rows.size)]
    return _objects_at(storage.columns.n_rows, rows, objects_of(cell.value for cell in each))


def _objects_at(n_rows: int, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    whole = np.full(n_rows, None, object)
    whole[rows] = values
    return whole
