"""Sends objects in shared memory to workers that run already, which open it by its descriptor in this process.

Descriptors themselves travel only to a process that starts. Linux shows them to other processes of the same user in
`/proc`, for as long as this process keeps them open.
"""

from __future__ import annotations

import io
import os
import pickle
from typing import Any

import cloudpickle

from rlstructs.workers import pickling
from rlstructs.workers.arena import SharedArena
from rlstructs.workers.descriptors import Descriptor
from rlstructs.workers.errors import WorkerError


def pack(thing: Any) -> bytes:
    """Pickles an object; its `SharedArena`s are named, and have to stay open here until all have attached it."""
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(thing)
    return file.getvalue()


def attach(data: bytes) -> Any:
    """Unpickles what `pack` of another process, or of this one, returned; it lies in the same memory.

    Raises:
        WorkerError: the memory cannot be opened.
    """
    return _Unpickler(io.BytesIO(data)).load()


def can_attach(data: bytes) -> bool:
    """Whether `attach` can open the memory; not outside Linux, nor where /proc hides processes (hidepid)."""
    try:
        attach(data)
    except WorkerError:
        return False
    return True


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle has no types
    def persistent_id(self, thing: Any) -> Any:
        return (os.getpid(), thing.fileno()) if isinstance(thing, SharedArena) else None


class _Unpickler(pickling.Unpickler):
    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._arenas: dict[tuple[int, int], SharedArena] = {}

    def persistent_load(self, place: tuple[int, int]) -> SharedArena:
        if place not in self._arenas:
            self._arenas[place] = SharedArena.of(_open(*place))
        return self._arenas[place]


def _open(pid: int, fd: int) -> Descriptor:
    if pid == os.getpid():
        return Descriptor(os.dup(fd))
    path = f"/proc/{pid}/fd/{fd}"
    try:
        return Descriptor(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        raise WorkerError(f"{path}, shared memory of the trainer, cannot be opened: {error.strerror}") from error
