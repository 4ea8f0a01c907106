"""How transitions are read: with `obs_next` and `done`, which need not be stored."""

from __future__ import annotations

from functools import lru_cache

from rlstructs.replay.reading import ANCHOR, LAST, NEXT, SUM, Source, Sources
from rlstructs.replay.tianshou.transitions import DONE, FLAGS, OBS_NEXT, REW, STACKED, stored_as, top


@lru_cache
def sources_of(names: tuple[str, ...], columns: tuple[str, ...], stacked: tuple[str, ...] | None = STACKED) -> Sources:
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
    return Sources(sources)
