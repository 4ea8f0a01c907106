"""What a batcher hands out, as rows for the lanes of a store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

# Keys of trajectories that say where episodes end and begin.
STEP_ENDS = ("_observation/terminated", "_observation/truncated", "_observation/done")
STEP_START = "observation/initial_state"


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
