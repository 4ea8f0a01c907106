"""Draws packs for a `DictTensorReplayBuffer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rlstructs.checks import check_count
from rlstructs.errors import SpecError
from rlstructs.replay.draw.packed import ANCHOR, PackedWindows, in_library
from rlstructs.replay.draw.plan import Fields, Selection
from rlstructs.replay.draw.view import View
from rlstructs.replay.torchrl.assembly import Assembly
from rlstructs.replay.torchrl.samplers import INDEX, WEIGHT, Sampler
from rlstructs.replay.torchrl.slice_samplers import SliceSampler


def draw(
    parts: Assembly,
    request: tuple[int, int, bool],
    draw_rows: Callable[[], Selection],
    slice_len: int | None = None,
    context: int = 0,
    max_steps: int | None = None,
    states: Mapping[str, str] | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Draws a pack of the windows that begin with drawn rows.

    The lock is held.

    Args:
        parts: of the buffer.
        request: the number of draws, and rows of each.
        draw_rows: makes the draws.
        slice_len: the length of windows where the sampler draws single rows.
        context, max_steps, states: see `PackedWindows`.

    Returns:
        The pack, with weights in its `info`; and the drawn rows and weights of its windows.
    """
    sampler, store, specs = parts.sampler, parts.store, parts.store.columns.specs
    windows = PackedWindows.of(_length(sampler, request[1], slice_len), context, max_steps, states)

    def weigh(picked: Selection) -> Fields:
        return {WEIGHT: picked.fields[WEIGHT]} if WEIGHT in sampler.fields else {}

    def select(_: int) -> Selection:
        drawn = draw_rows()
        picked = windows.around(drawn.view, drawn.rows[:, 0], weigh(drawn))
        sampler.drawn(picked)
        return picked

    def read(view: View, rows: np.ndarray) -> dict[str, Any]:
        return parts.reading.read(store, view, list(specs), rows)

    chosen, pack = windows.draw(None, request[0], select, read, specs, weigh)
    info = parts.export({INDEX: chosen.fields[ANCHOR]} | weigh(chosen), {})
    return in_library(pack, parts.export.framework, parts.export.device), dict(info.items())


def _length(sampler: Sampler, own: int, slice_len: int | None) -> int:
    """Returns the length of windows.

    It is that of the sampler's slices, or the one that is given for single rows.
    """
    name = type(sampler).__name__
    if isinstance(sampler, SliceSampler):
        if slice_len is not None:
            raise SpecError(f"sample: the {name} says how long slices are; leave slice_len out")
        return own
    if slice_len is None:
        raise SpecError(f"sample: a {name} draws single rows; slice_len must say how long windows are")
    return check_count("slice_len", slice_len)
