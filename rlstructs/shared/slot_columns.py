"""The content of slots as arrays: only the rows and timesteps that were written."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlstructs.shared.slots import Slots
from rlstructs.structures.arrays import find_true, raw_of

SEEN, ACTION, FINAL = "observation/", "action/", "_observation/"


def columns_of(slots: Slots, rows: np.ndarray, n_timesteps: int) -> dict[str, np.ndarray]:
    """Returns the content of slots, by column.

    It has these rows and the first timesteps; views where this is all of a column. Columns that are only valid where an
    environment was reset have only these entries, in the order of `find_true`.
    """
    index = slice(None) if rows.size == slots.n else rows
    reset = raw_of(slots.column("reset"))[index, :n_timesteps]
    at, times = find_true(reset)
    columns = {}
    for field in slots.layout.fields:
        column = raw_of(slots.column(field.name))
        if field.sparse:
            columns[field.name] = column[at if isinstance(index, slice) else rows[at], times]
            continue
        if field.name.startswith((SEEN, ACTION)) or field.name == "reset":
            column = column[:, : n_timesteps + field.name.startswith(SEEN)]
        columns[field.name] = np.ascontiguousarray(column[index])
    return columns


def write_columns(slots: Slots, rows: np.ndarray, columns: Mapping[str, np.ndarray]) -> None:
    """Writes the result of `columns_of` to these rows.

    It must have as many rows, from slots of the same layout.
    """
    at, times = find_true(columns["reset"])
    slots.empty(rows)
    for field in slots.layout.fields:
        column, found = raw_of(slots.column(field.name)), columns[field.name]
        if field.sparse:
            column[rows[at], times] = found
        elif field.name.startswith((SEEN, ACTION)) or field.name == "reset":
            column[rows, : found.shape[1]] = found
        else:
            column[rows] = found
