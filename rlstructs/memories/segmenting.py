"""The contents of a memory for a checkpoint, cut by rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlstructs.files.segments import Content, Cut
from rlstructs.memories.files import contents, restorer
from rlstructs.memories.restoring import EPISODES, KIND
from rlstructs.replay.changes import Mark, Marks, find_changed
from rlstructs.replay.counters import EXPOSED
from rlstructs.replay.priorities import TREE_LEAVES

if TYPE_CHECKING:
    from rlstructs.memories.memory import Memory

__all__ = ["cut_contents", "marks_of", "restorer"]


def cut_contents(memory: Memory, since: Marks) -> Content:
    """The contents, while the locks of the memory are held.

    Args:
        memory: the memory.
        since: what `marks_of` returned for the earlier checkpoint; {} if there is none.
    """
    arrays, dtypes, state = contents(memory)
    tensors, cuts = memory._tensors, {}
    for name, array in arrays.items():
        group = "rows" if name in tensors.dtypes else {EPISODES: "episodes", TREE_LEAVES: "priorities"}.get(name)
        if group is not None:
            shape = (*tensors.lead, *array.shape[2 if group == "rows" else 1 :])
            cuts[name] = Cut(group, shape, 0, memory.memory_size)
    # The program may write to tensors that it has without telling.
    exposed = memory._storage.counters.notes[EXPOSED]
    changed = None if exposed else find_changed(memory._storage, since.get("rows"))
    return Content(KIND, arrays, dtypes, state, cuts, {} if changed is None else {"rows": changed})


def marks_of(memory: Memory) -> Marks:
    """The state of a memory now, for the next checkpoint's `cut_contents`."""
    return {"rows": Mark.of(memory._storage)}
