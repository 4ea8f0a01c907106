"""What a batcher adds while a timeline is recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from rlstructs.errors import StateError
from rlstructs.replay.rows.store import Storage
from rlstructs.trace import lane as lanes
from rlstructs.trace.board import Board
from rlstructs.trace.timeline import Timeline


@contextlib.contextmanager
def record(path: str | Path, board: Board) -> Iterator[Timeline]:
    """Records a timeline of a batcher's lanes, see `RL_Batcher.trace`.

    Draws of memories are a phase of the trainer only now: otherwise not even a question costs them anything.
    """
    if board.is_traced[0]:
        raise StateError("trace: a timeline of this batcher is being written already")
    sample, lane, before = Storage.sample, board.lane, lanes.current
    with Timeline(path, board) as timeline:
        lane.look()
        Storage.sample = lanes.within(lanes.DRAW)(sample)  # type: ignore[method-assign]
        lanes.current = lane
        try:
            yield timeline
        finally:
            lanes.current, Storage.sample = before, sample  # type: ignore[method-assign]
            lane.enter(lanes.LEARN)  # the last event: the present phase ends with the timeline
    lane.look()
