"""The memory of a store: ordinary, shared by processes, or in files."""

from __future__ import annotations

import mmap
import os
import re
import shutil
import sys
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rlstructs.errors import OutOfMemoryError, SpecError
from rlstructs.replay.rows.objects import ObjectBlock
from rlstructs.replay.rows.spec import Spec
from rlstructs.workers.arena import SharedArena
from rlstructs.workers.limits import available_bytes

__all__ = ["Backing", "Block", "Heap", "Shared", "available_bytes"]

# Linux's MAP_NORESERVE, which Python does not name: sparse memory may be larger than the machine's.
NO_RESERVE = 0x4000 if sys.platform == "linux" else 0


class Backing(Protocol):
    """Allocates zeroed bytes.

    Attributes:
        has_records: whether columns may lie side by side in a block.
    """

    has_records: bool

    def allocate(self, name: str, nbytes: int, sparse: bool = False) -> Block:
        """Allocates `nbytes` zeros.

        In a sparse block most bytes are never touched, and take no memory.
        """

    def rows(self, name: str, spec: Spec, n_rows: int, sparse: bool = False) -> Block:
        """Allocates the rows of a column."""
        return ObjectBlock(n_rows) if spec.is_object else self.allocate(name, spec.nbytes * n_rows, sparse)

    def allocate_slices(self, name: str, nbytes: int) -> Block:
        """Allocates zeros that are read and written by slices.

        Most of them are never touched.
        """
        return self.allocate(name, nbytes, sparse=True)

    def available_bytes(self) -> int | None:
        """Returns how many more bytes there is room for; None if unknown."""
        return available_bytes()


class Block(Protocol):
    """Some bytes, which are pickled by value or by reference."""

    def bytes(self) -> np.ndarray:
        """Returns the memory itself, uint8 (nbytes,)."""


class HeapBlock:
    """Ordinary memory; pickled by value."""

    def __init__(self, nbytes: int) -> None:
        try:
            self._bytes = np.zeros(nbytes, np.uint8)
        except MemoryError as error:
            raise OutOfMemoryError(f"{nbytes:,} bytes are needed, more than are available: {error}") from error

    def bytes(self) -> np.ndarray:
        return self._bytes


class SparseBlock:
    """Ordinary memory; only touched pages take memory and are pickled."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = _small_pages(nbytes)

    def bytes(self) -> np.ndarray:
        return self._bytes

    def __getstate__(self) -> dict[str, Any]:
        whole = self._bytes.size // mmap.PAGESIZE
        pages = self._bytes[: whole * mmap.PAGESIZE].reshape(whole, mmap.PAGESIZE)
        at = np.flatnonzero(pages.any(axis=1))
        return {"nbytes": self._bytes.size, "at": at, "pages": pages[at], "rest": self._bytes[pages.size :].copy()}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self._bytes = _small_pages(state["nbytes"])
        whole = self._bytes.size // mmap.PAGESIZE * mmap.PAGESIZE
        self._bytes[:whole].reshape(-1, mmap.PAGESIZE)[state["at"]] = state["pages"]
        if state["rest"].any():
            self._bytes[whole:] = state["rest"]


def _small_pages(nbytes: int) -> np.ndarray:
    # Private: Python's default would have a forked process write to the memory of its parent.
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, max(nbytes, 1), **flags)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a huge page would take 2 MB per written row
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.uint8, nbytes)


class SharedBlock:
    """Anonymous shared memory; a process that is started with it sees the same bytes."""

    # torch's storage of the bytes.
    _storage: Any = None

    def __init__(self, nbytes: int, sparse: bool = False) -> None:
        self._nbytes = nbytes
        self._arena = SharedArena()
        self._arena.resize(max(nbytes, 1), expected=0 if sparse else None)

    def bytes(self) -> np.ndarray:
        return np.frombuffer(self._arena.map(), np.uint8, self._nbytes)

    def storage(self) -> Any:
        """Returns torch's storage of the same bytes.

        Its tensors are `is_shared`, and are sent to processes without a copy.
        """
        if self._storage is None:
            import torch  # only needed here

            # torch uses it to map what another process has sent; its stubs lack it.
            kind: Any = torch.UntypedStorage
            self._storage = kind._new_shared_fd_cpu(self._arena.fileno(), self._arena.nbytes)
        return self._storage

    def __getstate__(self) -> dict[str, Any]:
        return {"_nbytes": self._nbytes, "_arena": self._arena}


class Heap(Backing):
    """Ordinary memory."""

    has_records = True

    def allocate(self, name: str, nbytes: int, sparse: bool = False) -> Block:
        return SparseBlock(nbytes) if sparse else HeapBlock(nbytes)


class Shared(Backing):
    """Memory that a store shares with the processes that are started with it."""

    has_records = True

    def allocate(self, name: str, nbytes: int, sparse: bool = False) -> Block:
        return SharedBlock(nbytes, sparse)


class Folder(Backing):
    """Files in a folder, which is created with the first file.

    A pickle holds copies, for a temporary folder.

    Args:
        path: the folder; None for a temporary one, which is removed with this object.
        overwrite: whether the files of an earlier `Folder` may be overwritten.

    Raises:
        SpecError: the folder is not empty.
    """

    has_records = False  # a file for each column

    def __init__(self, path: Path | None = None, overwrite: bool = False) -> None:
        self._n, self._overwrite = 0, overwrite
        if path is None:
            self.path = Path(tempfile.mkdtemp(prefix="rlstructs-"))
            weakref.finalize(self, _remove, self.path, os.getpid())
            return
        self.path = path
        if path.exists():  # rather than with the first row
            self._ours()

    def made(self) -> Path:
        """Creates the folder, empties it before the first file, and returns its path.

        Raises:
            SpecError: other files were put into it meanwhile.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if not self._n:
            for file in self._ours():
                file.unlink()
        return self.path

    def available_bytes(self) -> int | None:
        return shutil.disk_usage(self.made()).free

    def _ours(self) -> list[Path]:
        """Lists files that may be overwritten; raises SpecError for others."""
        found = sorted(self.path.iterdir())
        ours = [file for file in found if self._overwrite and re.fullmatch(r"\d{4}\.bin", file.name)]
        if others := [file.name for file in found if file not in ours]:
            raise SpecError(f"{self.path}: this folder is not empty, it holds {others[:3]}")
        return ours

    def allocate(self, name: str, nbytes: int, sparse: bool = False) -> Block:
        """Creates a file of `nbytes` zeros; only touched pages take space."""
        self.made()
        self._n += 1  # not the name, which may hold any character
        return FolderBlock(self, self.path / f"{self._n:04d}.bin", nbytes)

    def __getstate__(self) -> dict[str, Any]:
        return {"_n": self._n}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__()  # type: ignore[misc] # a new temporary folder
        vars(self).update(state)


class FolderBlock:
    """A file mapped into memory; pickled by value."""

    def __init__(self, folder: Folder, path: Path, nbytes: int) -> None:
        self._folder, self._path, self._nbytes = folder, path, nbytes
        with open(path, "xb") as file:
            file.truncate(max(nbytes, 1))

    def bytes(self) -> np.ndarray:
        return np.memmap(self._path, np.uint8, "r+", shape=(max(self._nbytes, 1),))[: self._nbytes]

    def remove(self) -> None:
        """Removes the file; mapped memory stays valid."""
        self._path.unlink(missing_ok=True)

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self._folder, "name": self._path.name, "bytes": np.array(self.bytes())}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__init__(state["folder"], state["folder"].path / state["name"], state["bytes"].size)  # type: ignore[misc]
        self.bytes()[...] = state["bytes"]


def _remove(path: Path, made_by: int) -> None:
    if os.getpid() == made_by:  # not in a forked process
        shutil.rmtree(path, ignore_errors=True)
