"""Checks and splits the blocks of rows that a store is given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rlstructs.errors import SpecError


def lead_of(
    block: Mapping[str, Any],
    n_lanes: int,
    lanes: slice | np.ndarray,
    lengths: np.ndarray | None,
    done: np.ndarray | None,
    starts: np.ndarray | None,
) -> tuple[int, int]:
    """Returns the axes (n, T) of a block after checking the arguments of `Storage.write`.

    Raises:
        SpecError: an argument does not fit the others.
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
        raise SpecError(f"{name!r} has shape {tuple(values.shape)}, expected ({n}, T, ...), a row for each lane")
    lead = (len(values), values.shape[1])
    for name, marks in (("done", done), ("starts", starts)):
        if marks is not None and marks.shape != lead:
            raise SpecError(f"{name} has shape {marks.shape}, expected {lead}")
    if lengths is not None and (lengths.shape != lead[:1] or ((lengths < 0) | (lengths > lead[1])).any()):
        raise SpecError(f"lengths are {lengths.tolist()}, expected {lead[0]} in [0, {lead[1]}]")
    return lead


def rounds(lanes: np.ndarray) -> Iterator[Any]:
    """Yields indexes of rows that can be written together, in order.

    No lane occurs twice in one of them.
    """
    if (lanes[1:] > lanes[:-1]).all() or np.unique(lanes).size == lanes.size:
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
    """Converts consecutive lanes to a slice; returns others unchanged.

    With a slice a block is written in one copy.
    """
    first = int(lanes[0])
    return slice(first, first + lanes.size) if (lanes[1:] - lanes[:-1] == 1).all() else lanes
