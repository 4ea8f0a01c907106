"""Memories as parts of a checkpoint: folders of arrays.

Long arrays are cut into files that checkpoints share.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlstructs.checkpoints.parts import Entry, Part, Restore
from rlstructs.distributed.replay import RayReplay
from rlstructs.errors import FileError
from rlstructs.files import segments
from rlstructs.files.archives import file_checksum
from rlstructs.files.opening import name_damage
from rlstructs.files.segments import Content, Cut
from rlstructs.replay.draw.priorities import TREE_LEAVES
from rlstructs.replay.keep.restoring import EPISODES, INNER, LENGTHS, MORE, PACKED, ROWS
from rlstructs.replay.keep.saving import contents, restorer, used_slots
from rlstructs.replay.keep.stored import Stored
from rlstructs.replay.rows.store import Storage

# By how much compressed rows are usually smaller, which decides how many are in a file.
USUAL_RATIO = 32


class MemoryPart(Part):
    """A memory of `rlstructs.memories`, or a buffer of `rlstructs.replay`.

    Args:
        label: of the part.
        memory: the memory.
    """

    turn = 3

    def __init__(self, label: str, memory: Stored) -> None:
        super().__init__(label)
        self._memory = memory
        self._marks: Marks = {}  # of the newest checkpoint
        self._next: Marks = {}  # of the one that is being written

    @property
    def _folder(self) -> str:
        return self.label.replace("/", ".")

    def save(self, folder: Path, before: Path | None, known: Entry) -> Entry:
        earlier = None if before is None else before / self._folder
        with self._memory._hold_locks():
            self._next = marks_of(self._memory)
            content = cut_contents(self._memory, self._marks)
            checksums = segments.write(folder / self._folder, content, earlier, known.get("checksums", {}))
        return {"folder": self._folder, "class": type(self._memory).__name__, "checksums": checksums}

    def plan(self, folder: Path, entry: Entry, held: ExitStack) -> Restore:
        path = folder / self._folder
        self._memory._storage.counters.check_writable()
        _check_files(path, entry)
        reader, header = held.enter_context(segments.open_folder(path))
        with name_damage(f"{path}: damaged, or of another memory"):
            reader.verify()
            with self._memory._hold_locks():
                restore = restorer(self._memory, path, reader, header)

        def restore_and_mark() -> None:
            with self._memory._hold_locks():
                restore()
                self._next = marks_of(self._memory)

        return restore_and_mark

    def note(self) -> None:
        self._marks = self._next


class RayReplayPart(Part):
    """A `RayReplay`, whose shards send their files.

    Args:
        label: of the part.
        memory: the memory.
    """

    turn = 2  # a shard may be gone

    def __init__(self, label: str, memory: RayReplay) -> None:
        super().__init__(label)
        self._memory = memory

    @property
    def _folder(self) -> str:
        return self.label.replace("/", ".")

    def save(self, folder: Path, before: Path | None, known: Entry) -> Entry:
        path = folder / self._folder
        self._memory.save(path)
        checksums = {file.name: file_checksum(file) for file in path.iterdir()}
        return {"folder": self._folder, "class": type(self._memory).__name__, "checksums": checksums}

    def plan(self, folder: Path, entry: Entry, held: ExitStack) -> Restore:
        path = folder / self._folder
        _check_files(path, entry)
        return self._memory._plan_load(path, held)


def _check_files(folder: Path, entry: Entry) -> None:
    """Raises FileError or FileNotFoundError unless files match the listed checksums.

    A manifest without checksums passes.
    """
    listed = entry.get("checksums", {})
    if type(listed) is not dict:
        raise FileError(f"{folder}: damaged: its manifest does not list its files")
    for name, wanted in listed.items():
        path = folder / Path(name).name  # nowhere else, whatever a manifest says
        with name_damage(f"{path}: damaged"):
            found = file_checksum(path)
        if found != wanted:
            raise FileError(f"{path}: damaged: its checksum is not that of this checkpoint")


def make_memory_part(label: str, memory: Any) -> MemoryPart | RayReplayPart:
    """Makes the part for a memory.

    Raises:
        TypeError: it is no memory of rlstructs.
    """
    if isinstance(memory, Stored):
        return MemoryPart(label, memory)
    if isinstance(memory, RayReplay):
        return RayReplayPart(label, memory)
    raise TypeError(
        f"{label} must be a memory of rlstructs.memories, a buffer of rlstructs.replay or a RayReplay, "
        f"got a {type(memory).__name__}"
    )


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
