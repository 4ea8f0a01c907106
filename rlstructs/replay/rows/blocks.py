"""Checks and splits blocks of rows; knows which lanes are in step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rlstructs.errors import SpecError
from rlstructs.replay.rows.lanes import ALL, Ring, RowIds


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


class InStep:
    """The lanes of a ring that are in step, as they nearly always are.

    Plain numbers stand for arrays of counters. Both writers of one row per lane use it, the one of skrl's memories to
    say which row is next, too.

    Args:
        ring: the counters.

    Attributes:
        head: of all lanes; None if they differ.
        n_ahead: the first `n_ahead` lanes have one more row than `head` says.

    Example:
        >>> from rlstructs.replay.rows.lanes import N_COUNTERS
        >>> step = InStep(ring := Ring(np.zeros((N_COUNTERS, 3), np.int64), capacity=4))
        >>> step.next_lanes(2), step.find_block(slice(0, 2), 1, RowIds(3, 4, "slot"))
        (slice(0, 2, None), slice(0, 2, 1))
        >>> ring.publish(slice(0, 2), 1)
        >>> step.advance(slice(0, 2), 1, is_block=True)
        >>> step.head, step.n_ahead, step.next_lanes(2)
        (0, 2, None)
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._base = int(ring.base[0]) if (ring.base == ring.base[0]).all() else None
        self._find()

    def _find(self) -> None:
        heads = self._ring.head
        low = int(heads.min())
        n = int((heads != low).sum())
        is_known = bool((heads[:n] == low + 1).all())
        self.head: int | None = low if is_known else None
        self.n_ahead = n if is_known else 0

    def next_lanes(self, n: int) -> slice | np.ndarray | None:
        """Returns the first `n` lanes without the row that others have.

        None if there are fewer.
        """
        if self.head is not None:
            end = self.n_ahead + n
            return slice(self.n_ahead, end) if end <= self._ring.n_lanes else None
        behind = np.flatnonzero(self._ring.head == self._ring.head.min())
        return behind[:n] if n <= behind.size else None

    def count_least(self) -> int:
        """Counts the rows of the lane with the fewest.

        All rows since the last clear count, overwritten ones too.
        """
        if self.head is not None and self._base is not None:
            return self.head - self._base
        return int((self._ring.head - self._ring.base).min())

    def find_block(self, lanes: slice | np.ndarray, n_timesteps: int, ids: RowIds) -> slice | None:
        """Returns the ids of the next rows as a slice, if possible.

        These are the next rows of the lanes, or of the only lane. None if no slice has them.

        Args:
            lanes: a slice has bounds, or is of all lanes.
            n_timesteps: rows of each; more than one only if there is one lane.
            ids: the row ids of the store.
        """
        if self.head is None or not isinstance(lanes, slice) or (lanes.start or 0) != self.n_ahead:
            return None
        slot = self.head % ids.capacity
        if n_timesteps > 1:
            return slice(slot, slot + n_timesteps) if slot + n_timesteps <= ids.capacity else None
        last = (ids.n_lanes if lanes.stop is None else lanes.stop) - 1
        first, end = (slot * ids.slot_stride + lane * ids.lane_stride for lane in (self.n_ahead, last))
        return slice(first, end + 1, ids.lane_stride)

    def advance(self, lanes: slice | np.ndarray, n_timesteps: int, is_block: bool) -> None:
        """Follows the heads of lanes after they have risen.

        `is_block` says whether `find_block` found their rows.
        """
        head = self.head
        if isinstance(lanes, slice) and lanes == ALL and (head is None or not is_block):
            self.head = None if head is None else head + n_timesteps  # they keep their distances
        elif head is None or not isinstance(lanes, slice) or not is_block:
            self._find()
        elif lanes.stop is None or lanes.stop == self._ring.n_lanes:
            self.head, self.n_ahead = head + n_timesteps, 0
        else:
            self.n_ahead = lanes.stop
