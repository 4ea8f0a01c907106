"""Blocks of rows that are given to a store: checked, split and written."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

import numpy as np

from rlstructs.errors import SpecError
from rlstructs.replay.columns import Columns


def lead_of(
    block: Mapping[str, Any],
    n_lanes: int,
    lanes: slice | np.ndarray,
    lengths: np.ndarray | None,
    done: np.ndarray | None,
    starts: np.ndarray | None,
) -> tuple[int, int]:
    """The axes (n, T) of a block; arguments as of `Storage.write`.

    Raises:
        SpecError: it does not fit the lanes, or the rest does not fit it.
    """
    if isinstance(lanes, slice):
        n = len(range(n_lanes)[lanes])
    else:
        try:
            every = np.arange(n_lanes)[lanes].tolist()
        except IndexError as error:
            raise SpecError(f"lanes {lanes} are not those of a store with {n_lanes}") from error
        n = len(every)
        if len(set(every)) < n:
            raise SpecError(f"lanes {every} hold one twice")
    values: Any
    name, values = next(iter(block.items()), ("block", np.zeros(0)))
    if values.ndim < 2 or len(values) != n:
        raise SpecError(f"{name!r} has shape {tuple(values.shape)}, needed is ({n}, T, ...), a row for each lane")
    lead = (len(values), values.shape[1])
    for name, marks in (("done", done), ("starts", starts)):
        if marks is not None and marks.shape != lead:
            raise SpecError(f"{name} has shape {marks.shape}, needed is {lead}")
    if lengths is not None and (lengths.shape != lead[:1] or ((lengths < 0) | (lengths > lead[1])).any()):
        raise SpecError(f"lengths are {lengths.tolist()}, needed are {lead[0]} in [0, {lead[1]}]")
    return lead


def put_slots(
    columns: Columns, skipped: Container[str], block: Mapping[str, Any], lanes: Any, slot: int, n_timesteps: int
) -> None:
    """Writes a block (n, T, ...) to T slots of lanes from `slot` on; columns that it lacks become unwritten."""
    before_end = columns.capacity - slot
    parts: list[tuple[Any, Any]] = [(slice(slot, slot + n_timesteps), slice(0, before_end))]
    if n_timesteps == 1:
        parts = [(slot, 0)]
    elif n_timesteps > before_end:
        parts.append((slice(0, n_timesteps - before_end), slice(before_end, None)))
    for name, spec in columns.specs.items():
        if name in skipped:
            continue
        values = block.get(name)
        nothing = columns.value(name, spec.unwritten) if values is None else None
        for slots, times in parts:
            columns.put_cells(name, lanes, slots, nothing if values is None else values[:, times])


def put_rows(
    columns: Columns, skipped: Container[str], block: Mapping[str, Any], rows: np.ndarray, valid: np.ndarray | None
) -> None:
    """Writes a block (n, T, ...), or what is `valid` of it, to rows (n, T) by their ids; else as `put_slots`."""
    rows = rows if valid is None else rows[valid]
    for name, spec in columns.specs.items():
        if name in skipped:
            continue
        if name not in block:
            columns.put_rows(name, rows, columns.value(name, spec.unwritten))
        else:
            columns.put_rows(name, rows, block[name] if valid is None else block[name][valid])


def rounds(lanes: np.ndarray) -> Iterator[Any]:
    """Which rows to write together, so that none of them are of one lane; in order."""
    if np.unique(lanes).size == lanes.size:
        if lanes.size:
            yield slice(None)
        return
    seen: dict[int, int] = {}
    turn = np.empty(lanes.size, np.int64)
    for at, lane in enumerate(lanes.tolist()):
        turn[at] = seen[lane] = seen.get(lane, -1) + 1
    for number in range(turn.max() + 1):
        yield np.flatnonzero(turn == number)


def as_slice(lanes: np.ndarray) -> Any:
    """Lanes that follow one another as a slice: then a block is one copy."""
    first = int(lanes[0])
    return slice(first, first + lanes.size) if (np.diff(lanes) == 1).all() else lanes
