"""Memories as parts of a checkpoint: folders of arrays.

Long arrays are cut into files that checkpoints share.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rlstructs.checkpoints.parts import Entry, Part, Restore
from rlstructs.distributed.replay import RayReplay
from rlstructs.errors import FileError
from rlstructs.files import segments
from rlstructs.files.archives import file_checksum
from rlstructs.files.opening import name_damage
from rlstructs.replay.keep import segmenting
from rlstructs.replay.keep.segmenting import Marks
from rlstructs.replay.keep.stored import Stored


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
            self._next = segmenting.marks_of(self._memory)
            content = segmenting.cut_contents(self._memory, self._marks)
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
                restore = segmenting.restorer(self._memory, path, reader, header)

        def restore_and_mark() -> None:
            with self._memory._hold_locks():
                restore()
                self._next = segmenting.marks_of(self._memory)

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
