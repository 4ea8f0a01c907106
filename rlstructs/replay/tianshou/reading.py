"""How transitions are read: with `obs_next` and `done`, which need not be stored."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from rlstructs.replay.reading import ANCHOR, LAST, NEXT, SUM, Source
from rlstructs.replay.tianshou.transitions import DONE, FLAGS, OBS_NEXT, REW, STACKED, stored_as, top


def sources_of(
    names: Iterable[str], columns: Collection[str], stacked: Collection[str] | None = STACKED
) -> dict[str, Source]:
    """How keys of a batch are read.

    Args:
        names: of columns, or of what is made of them.
        columns: the names of all columns.
        stacked: the first parts of the names that are stacked; None for all names.
    """
    sources = {}
    for name in names:
        first, place = top(name), ANCHOR
        if name == REW:
            place = SUM
        elif name in (DONE, *FLAGS) or first == OBS_NEXT:
            place = LAST if name == DONE or name in columns else NEXT
        stored = FLAGS if name == DONE else (stored_as(name, columns),)
        sources[name] = Source(stored, place, stacked is None or first in stacked)
    return sources
