"""Changes the columns of infos when environments return infos of another form.

Columns of numbers widen while no value is lost. Otherwise they become columns of objects. If an info was nested and no
longer is, its columns become one column of dicts. Everything is planned before anything changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlstructs.errors import OutOfMemoryError
from rlstructs.replay.intake.arrays import as_rows, from_bits, host_array
from rlstructs.replay.intake.infos import is_nothing, nested
from rlstructs.replay.intake.roles import is_info
from rlstructs.replay.rows.columns import Columns
from rlstructs.replay.rows.objects import OBJECT, objects_in, objects_of
from rlstructs.replay.rows.spec import Spec, widened
from rlstructs.replay.rows.store import Storage

OBJECTS = Spec(OBJECT)
# Returns the numbers in the valid rows of a column.
Held = Callable[[str], np.ndarray]


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
