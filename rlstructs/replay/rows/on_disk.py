"""Rows in the files of a folder, which outlives the program.

    store.json     the manifest: sizes, columns, and the file of each; replaced as a whole
    0001.bin ...   the memory of a block each
    lock           held by the program that has the folder open

Large columns, and the bytes of compressed ones, are read and written by row with `pread` and `pwrite`, so that the
process's memory does not grow with them. Everything else is mapped: counters, episodes, and small columns. What was
stored in a mapped file, or written to any, stays when the program is killed, in the order in which it was done: so the
counters tell which rows are whole.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import re
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlstructs.checks import clean_text
from rlstructs.errors import FileError, SpecError, StateError
from rlstructs.files.opening import parse_json, read_bytes
from rlstructs.replay.rows.backing import Backing, Block
from rlstructs.replay.rows.compressed import CompressedRows
from rlstructs.replay.rows.spec import Spec

# Bytes of a row from which on a column is read and written by row.
LARGE = 256
# Bytes that are written at a time where all rows get one value, and that are copied at a time.
BYTES_AT_ONCE = 1 << 20
MANIFEST, LOCK, CHECKSUM = "store.json", "lock", "checksum"
FILE = re.compile(r"\d{4,9}\.bin")


class Disk(Backing):
    """Files in a folder, which is created if it does not exist.

    One program may have it open.

    A pickle or copy holds copies, for a temporary folder; once it `is_shared`, processes that are started with it use
    the same files.

    Args:
        path: the folder; None for a temporary one, which is removed with this object.

    Attributes:
        held: the manifest that was found; None for a new folder.

    Raises:
        SpecError: there is something else in the folder.
        StateError: another program has it open.
        FileError: the manifest is damaged.
    """

    has_records = True
    is_shared = False

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="rlstructs-") if path is None else path).absolute()
        if path is None:
            weakref.finalize(self, _remove, self.path, os.getpid())
        self.path.mkdir(parents=True, exist_ok=True)
        found = {file.name for file in self.path.iterdir()}
        if MANIFEST not in found and (others := sorted(found - {LOCK, f"{MANIFEST}.tmp"} - set(_files(found)))):
            raise SpecError(f"{self.path}: this folder is not empty and holds no rows, but {others[:3]}")
        self._hold()
        self.held = self._read() if MANIFEST in found else None
        self._written = ""
        self._n = max((int(name.partition(".")[0]) for name in _files(found)), default=0)

    def _hold(self) -> None:
        lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        self._close = weakref.finalize(self, os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._close()
            raise StateError(
                f"{self.path}: a memory has this folder open, in this program or another; to read its rows in other "
                "processes, share that memory with them"
            ) from error

    def _read(self) -> dict[str, Any]:
        try:
            held = parse_json(read_bytes(self.path / MANIFEST))
            if not isinstance(held, dict):
                raise ValueError("expected an object")
            return held
        except (ValueError, RecursionError) as error:
            raise FileError(f"{self.path / MANIFEST}: {clean_text(error)}") from error

    def write(self, manifest: dict[str, Any]) -> None:
        """Writes a manifest, if it is another one.

        Then removes the files that it does not name.
        """
        text = json.dumps(manifest | {CHECKSUM: checksum_of(manifest)}, default=_item)
        if text == self._written:
            return
        temporary = self.path / f"{MANIFEST}.tmp"
        temporary.write_text(text)
        temporary.replace(self.path / MANIFEST)
        self._written, named = text, set(re.findall(FILE, text))
        for name in _files(file.name for file in self.path.iterdir()):
            if name not in named:
                (self.path / name).unlink()

    def available_bytes(self) -> int:
        return shutil.disk_usage(self.path).free

    def allocate(self, name: str, nbytes: int, sparse: bool = False) -> Block:
        return MappedBlock(self, self._create(nbytes, sparse=False), nbytes)

    def rows(self, name: str, spec: Spec, n_rows: int, sparse: bool = False) -> Block:
        if spec.is_object:
            raise SpecError(f"{name!r} holds Python objects, which no file of {self.path} can hold; leave them out")
        if not self.is_large(spec):
            return self.allocate(name, spec.nbytes * n_rows)
        return FileBlock(self, self._create(spec.nbytes * n_rows, sparse), spec, n_rows)

    def allocate_slices(self, name: str, nbytes: int) -> Block:
        return File(self, self._create(nbytes, sparse=True), nbytes)

    @staticmethod
    def is_large(spec: Spec) -> bool:
        """Whether a column is read and written by row."""
        return spec.nbytes >= LARGE

    def _create(self, nbytes: int, sparse: bool) -> str:
        """Creates a file of zeros; returns its name.

        There is room for it on the disk, unless it is sparse.

        A write to a mapped file without room would end the program.

        Raises:
            OSError: there is no room; nothing changes.
        """
        self._n += 1
        name = f"{self._n:04d}.bin"
        with open(self.path / name, "xb") as file:
            try:
                if sparse:
                    file.truncate(max(nbytes, 1))
                else:
                    os.posix_fallocate(file.fileno(), 0, max(nbytes, 1))
            except OSError as error:
                (self.path / name).unlink()
                if error.errno != errno.ENOSPC:
                    raise
                needed = f"{nbytes:,} bytes are needed in {self.path}, {self.available_bytes():,} are free"
                raise OSError(errno.ENOSPC, needed) from error
        return name

    def check(self, name: Any, nbytes: int) -> str:
        """Returns the name of a file in a manifest.

        Raises:
            FileError: there is no such file, or it has another size.
        """
        if not isinstance(name, str) or not FILE.fullmatch(name):
            raise FileError(f"{self.path / MANIFEST}: {name!r} is no name of a file")
        path = self.path / name
        if not path.is_file():
            raise FileError(f"{path}: there is no such file, but the manifest names it")
        if (found := path.stat().st_size) != max(nbytes, 1):
            raise FileError(f"{path}: has {found:,} bytes, expected {max(nbytes, 1):,}")
        return name

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path} if self.is_shared else {}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        if state:
            self.path, self.is_shared, self.held = state["path"], True, None
        else:
            self.__init__()  # type: ignore[misc] # a new temporary folder


class Existing(Backing):
    """Files of a manifest, in place of new ones.

    They come in the order in which those would be made.
    """

    has_records = True

    def __init__(self, disk: Disk, *names: Any) -> None:
        self._disk, self._names = disk, list(names)

    def allocate(self, name: str, nbytes: int, sparse: bool = False) -> Block:
        return MappedBlock(self._disk, self._disk.check(self._names.pop(0), nbytes), nbytes)

    def allocate_slices(self, name: str, nbytes: int) -> Block:
        return File(self._disk, self._disk.check(self._names.pop(0), nbytes), nbytes)


class MappedBlock:
    """A file mapped into memory; pickled by value, unless its folder is shared."""

    def __init__(self, disk: Disk, file: str, nbytes: int) -> None:
        self._disk, self.file, self._nbytes = disk, file, nbytes
        with open(disk.path / file, "r+b") as opened:
            self._bytes = np.frombuffer(mmap.mmap(opened.fileno(), max(nbytes, 1)), np.uint8, nbytes)

    def bytes(self) -> np.ndarray:
        return self._bytes

    def __getstate__(self) -> dict[str, Any]:
        state = {"disk": self._disk, "file": self.file, "nbytes": self._nbytes}
        return state if self._disk.is_shared else {**state, "bytes": self._bytes}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        disk, nbytes = state["disk"], state["nbytes"]
        self.__init__(disk, state["file"] if disk.is_shared else disk._create(nbytes, False), nbytes)  # type: ignore[misc]
        if "bytes" in state:
            self._bytes[...] = state["bytes"]


class File:
    """A file that is read and written by slices.

    It is pickled by value, unless its folder is shared.

    Args:
        disk: the folder.
        file: its name.
        nbytes: its size.
    """

    def __init__(self, disk: Disk, file: str, nbytes: int) -> None:
        self._disk, self.file, self._nbytes = disk, file, nbytes
        self._descriptor = os.open(disk.path / file, os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        self._pid = os.getpid()

    def bytes(self) -> Any:
        """Returns this object, whose slices stand for those of memory."""
        return self

    def __getitem__(self, part: slice) -> Any:
        return os.pread(self._descriptor, part.stop - part.start, part.start)

    def __setitem__(self, part: slice, data: Any) -> None:
        self._check_owner()
        self._write(memoryview(data), part.start)

    def _check_owner(self) -> None:
        if self._pid != os.getpid() and not self._disk.is_shared:
            raise StateError(f"{self._disk.path}: the rows are of the process that forked this one; share the memory")

    def _write(self, data: memoryview, offset: int) -> None:
        while len(data):
            try:
                n = os.pwrite(self._descriptor, data, offset)
            except OSError as error:
                error.filename = str(self._disk.path / self.file)
                raise
            data, offset = data[n:], offset + n

    def _pieces(self) -> Iterator[tuple[int, Any]]:
        """Yields what was written, in pieces, and where each begins."""
        at = 0
        while at < self._nbytes:
            try:
                at = os.lseek(self._descriptor, at, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                return  # nothing follows
            end = min(os.lseek(self._descriptor, at, os.SEEK_HOLE), at + BYTES_AT_ONCE)
            yield at, os.pread(self._descriptor, end - at, at)
            at = end

    def __getstate__(self) -> dict[str, Any]:
        state = {"disk": self._disk, "file": self.file, "nbytes": self._nbytes}
        return state if self._disk.is_shared else {**state, "pieces": list(self._pieces())}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        disk, nbytes = state["disk"], state["nbytes"]
        File.__init__(self, disk, state["file"] if disk.is_shared else disk._create(nbytes, sparse=True), nbytes)
        for at, data in state.get("pieces", ()):
            self._write(memoryview(data), at)


class FileBlock(File):
    """The file of a large column, read and written by row.

    Args:
        disk, file: see `File`.
        spec: of the column.
        n_rows: number of rows.
    """

    def __init__(self, disk: Disk, file: str, spec: Spec, n_rows: int) -> None:
        super().__init__(disk, file, spec.nbytes * n_rows)
        self.spec, self._n_rows, self._width = spec, n_rows, spec.nbytes

    def rows(self) -> CompressedRows:
        """Returns the column, `(n_rows, *shape)`, by row id; it is indexed as an array."""
        n_rows = self._n_rows
        block: Any = self
        return CompressedRows(block, np.arange(n_rows, dtype=np.int32 if n_rows < 1 << 31 else np.int64))

    def bytes(self) -> np.ndarray:
        """Raises TypeError: the column is in no memory."""
        raise TypeError("a column in a file has no bytes in memory")

    def decode(self, rows: np.ndarray) -> np.ndarray:
        """Reads rows by their ids, `(*rows.shape, *shape)`; those that follow one another at once."""
        spec, width, descriptor = self.spec, self._width, self._descriptor
        found = np.empty((*rows.shape, *spec.shape), spec.dtype)
        if not rows.size:
            return found
        data = found.reshape(-1).view(np.uint8).data
        for at, row, n in _runs(rows.reshape(-1)):
            part = data[at * width : (at + n) * width]
            if os.preadv(descriptor, (part,), row * width) < n * width:
                self._read_rest(part, row * width)
        return found

    def _read_rest(self, part: memoryview, offset: int) -> None:
        while len(part):  # the system reads at most 2 GB at once
            if not (n := os.preadv(self._descriptor, [part], offset)):
                raise FileError(f"{self._disk.path / self.file}: ends before byte {offset:,}; it was truncated")
            part, offset = part[n:], offset + n

    def write(self, rows: np.ndarray, values: Any) -> None:
        """Writes rows (n,) by their ids.

        Values are `(n, *shape)`, or one number for all of them.

        Raises:
            OSError: the disk is full.
            StateError: this is a forked process, whose parent has the rows.
        """
        self._check_owner()
        spec, values = self.spec, np.asarray(values, self.spec.dtype)
        if not values.ndim:
            values = np.broadcast_to(values, (rows.size, *spec.shape))
        width = self._width
        at_once = max(1, BYTES_AT_ONCE // width)
        for start in range(0, rows.size, at_once):
            part = np.ascontiguousarray(values[start : start + at_once])
            data = part.reshape(-1).view(np.uint8).data
            for at, row, n in _runs(rows[start : start + at_once]):
                self._write(data[at * width : (at + n) * width], row * width)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "spec": self.spec, "n_rows": self._n_rows}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        super().__setstate__(state)
        self.spec, self._n_rows, self._width = state["spec"], state["n_rows"], state["spec"].nbytes


def _runs(rows: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yields the runs of consecutive row ids.

    Of each: where it begins among these, its first id, and how many it has.
    """
    begins = np.flatnonzero(np.diff(rows) != 1) + 1
    bounds = [0, *begins.tolist(), rows.size]
    for at, row, end in zip(bounds, rows[bounds[:-1]].tolist(), bounds[1:], strict=False):
        if end > at:
            yield at, row, end - at


def checksum_of(manifest: Mapping[str, Any]) -> int:
    """Computes the checksum of a manifest, without the one that it holds."""
    rest = {name: value for name, value in manifest.items() if name != CHECKSUM}
    return zlib.crc32(json.dumps(rest, default=_item).encode())


def _item(number: Any) -> Any:
    return number.item()  # of numpy


def _files(names: Any) -> list[str]:
    return [name for name in names if FILE.fullmatch(name)]


def _remove(path: Path, made_by: int) -> None:
    if os.getpid() == made_by:  # not in a forked process
        with contextlib.suppress(OSError):
            shutil.rmtree(path)
