"""The contents of a buffer for a checkpoint, cut by rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlstructs.files.segments import Content, Cut
from rlstructs.replay.changes import Mark, Marks, find_changed
from rlstructs.replay.counters import EXPOSED
from rlstructs.replay.priorities import TREE_LEAVES
from rlstructs.replay.restoring import EPISODES, INNER, MORE, ROWS
from rlstructs.replay.saving import contents, restorer, used_slots

if TYPE_CHECKING:
    from rlstructs.replay.buffer import Stored

__all__ = ["cut_contents", "marks_of", "restorer"]


def cut_contents(buffer: Stored, since: Marks) -> Content:
    """The contents, while the locks of the buffer are held.

    Args:
        buffer: the buffer.
        since: what `marks_of` returned for the earlier checkpoint; {} if there is none.
    """
    arrays, dtypes, state = contents(buffer)
    form, cuts, changed = buffer._form, dict[str, Cut](), {}
    for number, (prefix, each) in enumerate(_list_buffers(buffer)):
        storage, n_slots = each._storage, used_slots(each)
        columns, capacity = storage.columns, storage.columns.capacity
        lead = columns.lead(n_slots)
        parts = {EPISODES: ("episodes", (*lead, 2)), MORE + TREE_LEAVES: ("priorities", columns.lead(capacity))}
        parts |= {ROWS + name: ("rows", (*lead, *spec.shape)) for name, spec in columns.specs.items()}
        for role, (group, shape) in parts.items():
            if (name := form.name(prefix + role)) in arrays:
                cuts[name] = Cut(form.group(group, number), shape, columns.slot_axis, capacity)
        # The program may write to live tensors without telling.
        found = None if storage.counters.notes[EXPOSED] else find_changed(storage, since.get(prefix))
        if found is not None:
            changed[form.group("rows", number)] = found
    return Content(form.kind(buffer), arrays, dtypes, state, cuts, changed)


def marks_of(buffer: Stored) -> Marks:
    """The state of a buffer now, for the next checkpoint's `cut_contents`."""
    return {prefix: Mark.of(each._storage) for prefix, each in _list_buffers(buffer)}


def _list_buffers(buffer: Stored, prefix: str = "") -> Iterator[tuple[str, Stored]]:
    """A buffer and those in it, with what the names of their arrays begin with."""
    yield prefix, buffer
    for key, inner in buffer._inner().items():
        yield from _list_buffers(inner, f"{prefix}{INNER}{key}/")
