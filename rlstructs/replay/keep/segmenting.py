"""Splits a buffer's arrays into files of rows that checkpoints share."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from rlstructs.files.segments import Content, Cut
from rlstructs.replay.draw.priorities import TREE_LEAVES
from rlstructs.replay.keep.restoring import EPISODES, INNER, LENGTHS, MORE, PACKED, ROWS
from rlstructs.replay.keep.saving import contents, restorer, used_slots
from rlstructs.replay.keep.stored import Stored
from rlstructs.replay.rows.store import Storage

# By how much compressed rows are usually smaller, which decides how many are in a file.
USUAL_RATIO = 32

__all__ = ["cut_contents", "marks_of", "restorer"]


def cut_contents(buffer: Stored, since: Marks) -> Content:
    """Returns the contents of a buffer whose locks are held.

    Args:
        buffer: the buffer.
        since: the result of `marks_of` for the earlier checkpoint; {} if there is none.
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
        for column, spec in columns.specs.items():
            for kind, row_bytes in ((LENGTHS, None), (PACKED, max(1, spec.nbytes // USUAL_RATIO))):
                if (name := form.name(prefix + kind + column)) in arrays:
                    shape = n_slots, columns.n_lanes
                    cuts[name] = Cut(form.group("rows", number), shape, 0, capacity, row_bytes)
        # The program may write to live tensors at any time.
        found = None if storage.clock.is_exposed else find_changed(storage, since.get(prefix))
        if found is not None:
            changed[form.group("rows", number)] = found
    return Content(form.kind(buffer), arrays, dtypes, state, cuts, changed)


def marks_of(buffer: Stored) -> Marks:
    """Records the state of a buffer, for the next checkpoint's `cut_contents`."""
    return {prefix: Mark.of(each._storage) for prefix, each in _list_buffers(buffer)}


def _list_buffers(buffer: Stored, prefix: str = "") -> Iterator[tuple[str, Stored]]:
    """Yields a buffer and its inner ones, each with a prefix.

    The names of its arrays begin with the prefix.
    """
    yield prefix, buffer
    for key, inner in buffer._inner().items():
        yield from _list_buffers(inner, f"{prefix}{INNER}{key}/")


class Mark(NamedTuple):
    """The state of a store at a checkpoint.

    Attributes:
        storage: the store.
        rewrites: see `Instant`.
        head: the end of the rows of each lane, int64 (n_lanes,).
    """

    storage: weakref.ref[Storage]
    rewrites: int
    head: np.ndarray

    @classmethod
    def of(cls, storage: Storage) -> Mark:
        """Records the present state of a store, before its rows are saved.

        Rows that are written meanwhile count as changed.
        """
        return cls(weakref.ref(storage), storage.clock.rewrites, storage.ring.head.copy())


# By a name for each store.
Marks = Mapping[str, Mark]


def find_changed(storage: Storage, since: Mark | None) -> np.ndarray | None:
    """Marks slots whose rows may have changed since, bool (capacity,).

    A slot counts if the row of any lane may have changed. None if that is unknown.
    """
    if since is None or since.storage() is not storage or since.rewrites != storage.clock.rewrites:
        return None
    ring, changed = storage.ring, np.zeros(storage.ring.capacity, bool)
    # From the head on: a killed writer may have left half of a row after it.
    counts = (ring.reserved - since.head).clip(0, ring.capacity)
    for first, n in {*zip((since.head % ring.capacity).tolist(), counts.tolist(), strict=True)}:
        changed[first : first + n] = True
        changed[: max(0, first + n - ring.capacity)] = True
    return changed
