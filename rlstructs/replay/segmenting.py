"""The contents of a buffer for a checkpoint, cut by rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlstructs.files.segments import Content, Cut
from rlstructs.replay.changes import Mark, Marks, find_changed
from rlstructs.replay.priorities import TREE_LEAVES
from rlstructs.replay.restoring import EPISODES, INNER, MORE, ROWS
from rlstructs.replay.saving import contents, restorer

if TYPE_CHECKING:
    from rlstructs.replay.buffer import Buffer

__all__ = ["cut_contents", "marks_of", "restorer"]


def cut_contents(buffer: Buffer, since: Marks) -> Content:
    """The contents, while the locks of the buffer are held.

    Args:
        buffer: the buffer.
        since: what `marks_of` returned for the earlier checkpoint; {} if there is none.
    """
    arrays, dtypes, state = contents(buffer)
    cuts, changed = dict[str, Cut](), {}
    for number, (prefix, each) in enumerate(_list_buffers(buffer)):
        columns, capacity = each._storage.columns, each._storage.columns.capacity
        for name, array in arrays.items():
            inside = name[len(prefix) :] if name.startswith(prefix) else ""
            if inside.startswith(ROWS):
                cuts[name] = Cut(f"rows{number}", array.shape, 1, capacity)
            elif inside == EPISODES:
                cuts[name] = Cut(f"episodes{number}", array.shape, 1, capacity)
            elif inside == MORE + TREE_LEAVES:
                cuts[name] = Cut(f"priorities{number}", (columns.n_lanes, capacity), 1, capacity)
        found = find_changed(each._storage, since.get(prefix))
        if found is not None:
            changed[f"rows{number}"] = found
    return Content(type(buffer).__name__, arrays, dtypes, state, cuts, changed)


def marks_of(buffer: Buffer) -> Marks:
    """The state of a buffer now, for the next checkpoint's `cut_contents`."""
    return {prefix: Mark.of(each._storage) for prefix, each in _list_buffers(buffer)}


def _list_buffers(buffer: Buffer, prefix: str = "") -> Iterator[tuple[str, Buffer]]:
    """A buffer and those in it, with what the names of their arrays begin with."""
    yield prefix, buffer
    for key, inner in buffer._inner().items():
        yield from _list_buffers(inner, f"{prefix}{INNER}{key}/")
