"""Reads and writes `.npz` and `.pt` files, which are zip archives.

HDF5 is in `hdf5.py`. A file is written from arrays and one text, the header. It is read without executing anything from
it: a reader finds where the bytes of each array lie, and copies them into memory that the caller has allocated.
Compressed archives are refused, because they can unpack to far more than their own size. Each member has a checksum.
"""

from __future__ import annotations

import io
import math
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, Protocol, cast

import numpy as np

from rlstructs.checks import DTYPES, MOST_AXES, MOST_NUMBERS
from rlstructs.files.opening import Entry, open_file, read_at, read_directory, read_into, read_pieces, size_of
from rlstructs.files.pickled import BITS, StoredTensor, Unpickler
from rlstructs.files.torch_archive import Writable, as_values, write_bytes, write_pt

__all__ = [
    "BITS",
    "HEADER",
    "READERS",
    "WRITERS",
    "Archive",
    "Checked",
    "NewFile",
    "Reader",
    "checksum",
    "file_checksum",
    "npz_checksum",
]

HEADER = "__header__"
# Bytes that are read and summed up at a time, few enough for a core's cache.
CHUNK = 1 << 18


class Reader(Protocol):
    """An open file.

    Attributes:
        text: the header; "" if there is none, as in files of other programs.
    """

    text: str

    def spec_of(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        """Returns the dtype and shape of an array in the file.

        Raises:
            KeyError, ValueError: there is no such array, or it does not hold plain numbers.
        """

    def verify(self) -> None:
        """Raises ValueError if a checksum in the file is wrong."""

    def read_into(self, name: str, array: np.ndarray, first: int = 0) -> None:
        """Reads numbers of an array, in C order, from number `first` on.

        Args:
            name: of the array in the file.
            array: is filled; of the same dtype, in C order.
            first: how many numbers to leave out.
        """

    def read_slots(self, name: str, array: np.ndarray, start: int) -> None:
        """Reads slots of every lane of an array `(n_lanes, n_slots, ...)` in the file.

        Args:
            name: of the array in the file.
            array: (n_lanes, n, ...), is filled; of the same dtype, in C order.
            start: the first of the n slots.
        """


class Archive(Reader, Protocol):
    """An open `.npz` or `.pt` file."""

    def names(self) -> list[str]:
        """Returns the names of all arrays, in the order of the file."""

    def checksum_of(self, name: str) -> int:
        """Returns the checksum of an array, as the file states it.

        Raises KeyError if there is no such array.
        """


@dataclass(frozen=True)
class _Member:
    """An array in an archive.

    Attributes:
        dtype, shape: of the array.
        offset: where its bytes begin in the file.
        entry: the member's entry in the directory of the archive.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int
    entry: Entry

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _Archive:
    """A zip archive of uncompressed members, the base class of the readers."""

    text: str

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._entries = {entry.name: entry for entry in read_directory(file, size_of(file))}
        self._members: dict[str, _Member] = {}

    def names(self) -> list[str]:
        return list(self._members)

    def checksum_of(self, name: str) -> int:
        return self._members[name].entry.checksum

    def spec_of(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        member = self._members[name]
        return member.dtype, member.shape

    def verify(self) -> None:
        for member in self._members.values():
            self._verify(member)
            if member.dtype == np.bool_:
                check_bools(self._file, member.entry.name, member.offset, member.nbytes)

    def _verify(self, member: _Member) -> None:
        entry = member.entry
        if checksum(self._file, entry.start, entry.nbytes) != entry.checksum:
            raise ValueError(f"{entry.name}: its checksum is wrong")

    def _read_header(self) -> str:
        """Reads the text of the header; "" if there is none."""
        if HEADER not in self._members:
            return ""
        dtype, shape = self.spec_of(HEADER)
        if dtype != np.uint8:
            raise ValueError("it has no header of rlstructs")
        self._verify(self._members[HEADER])
        text = np.empty(shape, np.uint8)
        self.read_into(HEADER, text)
        return text.tobytes().decode()

    def read_into(self, name: str, array: np.ndarray, first: int = 0) -> None:
        if array.size:
            offset = self._members[name].offset + first * array.itemsize
            read_into(self._file, offset, array.reshape(-1).view(np.uint8).data)

    def read_slots(self, name: str, array: np.ndarray, start: int) -> None:
        read_slots(self, name, array, start)


def read_slots(reader: Reader, name: str, array: np.ndarray, start: int) -> None:
    """Reads slots, one lane after another."""
    n_slots, row = reader.spec_of(name)[1][1], math.prod(array.shape[2:])
    if array.shape[1] == n_slots:
        reader.read_into(name, array)
        return
    for lane, rows in enumerate(array):
        reader.read_into(name, rows, (lane * n_slots + start) * row)


def checksum(file: BinaryIO, offset: int, nbytes: int) -> int:
    """Computes the CRC-32 of some bytes of a file.

    Raises:
        ValueError: the file ends before them.
    """
    value = 0
    for chunk in _read_chunks(file, offset, nbytes):
        value = zlib.crc32(chunk, value)
    return value


def check_bools(file: BinaryIO, name: str, offset: int, nbytes: int) -> None:
    """Raises ValueError unless all bytes are 0 or 1.

    numpy computes wrongly with other bools.
    """
    for chunk in _read_chunks(file, offset, nbytes):
        if int(np.frombuffer(chunk, np.uint8).max()) > 1:
            raise ValueError(f"{name}: it holds bools that are neither true nor false")


def _read_chunks(file: BinaryIO, offset: int, nbytes: int) -> Iterator[memoryview]:
    """Yields bytes of a file in chunks.

    Each chunk overwrites the memory of the last one.
    """
    buffer = memoryview(bytearray(min(CHUNK, nbytes)))
    file.seek(offset)
    while nbytes:
        n = file.readinto(buffer[: min(nbytes, CHUNK)])  # type: ignore[attr-defined]
        if not n:
            raise ValueError("it ends too early")
        yield buffer[:n]
        nbytes -= n


class _Npz(_Archive):
    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        entries = self._entries.values()
        fronts = read_pieces(file, [(entry.start, min(entry.nbytes, USUAL_NPY)) for entry in entries])
        for entry, front in zip(entries, fronts, strict=True):
            name = entry.name.removesuffix(".npy")
            if name in self._members:
                raise ValueError(f"it holds {name!r} twice")
            dtype, shape, n = read_npy_header(file, entry, front)
            self._members[name] = member = _Member(dtype, shape, entry.start + n, entry)
            if n + member.nbytes != entry.nbytes:
                raise ValueError(f"{entry.name}: {dtype}{shape} is not what the file holds")
        self.text = self._read_header()


class _Pt(_Archive):
    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        pickled = [name for name in self._entries if name.endswith("/data.pkl")]
        if len(pickled) != 1:
            raise ValueError("it is not an archive of tensors")
        entry = self._entries[pickled[0]]
        content = Unpickler(read_at(file, entry.start, entry.nbytes)).load()
        if checksum(file, entry.start, entry.nbytes) != entry.checksum:
            raise ValueError(f"{entry.name}: its checksum is wrong")
        if type(content) is not dict:
            raise ValueError("it is not an archive of tensors")
        header = content.get(HEADER)
        folder, unused = pickled[0].removesuffix("data.pkl"), dict(self._entries)
        for name, value in content.items():
            if isinstance(value, StoredTensor):
                # Each entry is used only once: tensors that shared bytes would need memory for each of them.
                entry = unused.pop(f"{folder}data/{value.key}")
                member = _Member(value.dtype, value.shape, entry.start, entry)
                if value.dtype.kind not in "biufc" or member.nbytes != entry.nbytes:
                    raise ValueError(f"{name!r}: {value.dtype}{value.shape} is not what the file holds")
                self._members[name] = member
            elif name != HEADER or type(value) is not str:
                raise ValueError(f"{name!r} is not a plain tensor")
        self.text = header if type(header) is str else self._read_header()  # older versions wrote a str


# The header in front of an array in version 1 of numpy's format.
NPY = re.compile(
    rb"\{'descr': '([<>|=]?[a-z]\d{1,2})', 'fortran_order': (True|False), "
    rb"'shape': \(((?:\d{1,19}, )*(?:\d{1,19},?)?)\), \} *\n"
)
# The most bytes of this header; with 32 axes it has at most a quarter of that.
LONGEST_NPY = 4096
# The bytes of nearly every one, with what stands before it.
USUAL_NPY = 128


def read_npy_header(file: BinaryIO, entry: Entry, front: bytes) -> tuple[np.dtype, tuple[int, ...], int]:
    """Reads the header of an array in numpy's format.

    Returns the dtype, the shape, and the number of bytes in front of the array's numbers.

    Args:
        file: the archive.
        entry: the member.
        front: its first bytes.

    Raises:
        ValueError: the member is not an array of plain numbers in C order.
    """
    if entry.nbytes < 10:
        raise ValueError(f"{entry.name}: it is not an array")
    n = int.from_bytes(front[8:10], "little")
    if front[:8] != b"\x93NUMPY\1\0" or n > LONGEST_NPY or 10 + n > entry.nbytes:
        raise ValueError(f"{entry.name}: it is not an array in version 1 of numpy's format")
    text = front[10 : 10 + n] if 10 + n <= len(front) else read_at(file, entry.start + 10, n)
    match = NPY.fullmatch(text)
    if match is None:
        raise ValueError(f"{entry.name}: {text[:200]!r} is not an array of plain numbers")
    dtype = _DTYPES_OF_CODES.get(match[1].decode())
    shape = tuple(int(length) for length in match[3].split(b",") if length.strip())
    if dtype is None or match[2] != b"False" or len(shape) > MOST_AXES or max(shape, default=0) > MOST_NUMBERS:
        raise ValueError(f"{entry.name}: {text.strip()[:200]!r} is not an array of plain numbers")
    return dtype, shape, 10 + n


_DTYPES_OF_CODES = {dtype.str: dtype for dtype in DTYPES.values()}


@contextmanager
def _open_npz(path: Path) -> Iterator[Archive]:
    with open_file(path) as file:
        yield _Npz(file)


@contextmanager
def _open_pt(path: Path) -> Iterator[Archive]:
    with open_file(path) as file:
        yield _Pt(file)


class NewFile:
    """A new file that reports write errors only when it is closed.

    `close` raises the first error. libhdf5 2.0 handles a failed write badly: it keeps the file open and crashes the
    process at its exit.

    Attributes:
        error: the error of the first write that failed; None if there was none.
    """

    def __init__(self, path: Path) -> None:
        self._file = io.FileIO(path, "x+")  # "x" fails if there is a file or link
        self.error: OSError | None = None

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def read(self, n: int = -1) -> bytes:  # h5py recognises a file object by this method
        return self._file.read(n)

    def write(self, data: memoryview) -> int:
        done = 0
        while done < len(data) and self.error is None:
            try:
                done += self._file.write(data[done:])
            except OSError as error:
                self.error = error
        return len(data)

    def readinto(self, data: memoryview) -> int:
        done = 0
        while n := self._file.readinto(data[done:]):
            done += n
        data[done:] = bytes(len(data) - done)  # zeros in place of bytes that could not be written
        return len(data)

    def truncate(self, nbytes: int) -> int:
        try:
            return self._file.truncate(nbytes)
        except OSError as error:
            self.error = self.error or error
            return nbytes

    def flush(self) -> None:
        """Does nothing, because there is no buffer."""

    def close(self) -> None:
        self._file.close()
        if self.error is not None:
            raise self.error


def _write_npz(path: Path, header: str, arrays: Mapping[str, np.ndarray], dtypes: Mapping[str, str]) -> None:
    with zipfile.ZipFile(path, "x", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, array in [*arrays.items(), (HEADER, np.frombuffer(header.encode(), np.uint8))]:
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                _write_npy(member, array)


def _write_npy(member: Writable, array: Any) -> None:
    values = as_values(array)
    header = {"descr": np.lib.format.dtype_to_descr(values.dtype), "fortran_order": False, "shape": values.shape}
    np.lib.format.write_array_header_1_0(cast("IO[bytes]", member), header)
    write_bytes(member, values)


def file_checksum(path: Path) -> int:
    """Returns the checksum of a file.

    For an `.npz` file it is computed from the directory alone, without reading the arrays.

    Raises:
        FileNotFoundError, FileError, OSError: see `open_file`.
        ValueError: an `.npz` file is damaged.
    """
    with open_file(path) as file:
        if path.suffix != ".npz":
            return checksum(file, 0, size_of(file))
        entries = read_directory(file, size_of(file))
        return zlib.crc32(repr([(entry.name, entry.nbytes, entry.checksum) for entry in entries]).encode())


def npz_checksum(array: Any) -> int:
    """Returns the checksum that an array would have in an `.npz` file.

    See `Archive.checksum_of`.
    """
    member = Checked()
    _write_npy(member, array)
    return member.checksum


class Checked:
    """A writer that computes the checksum of what is written.

    It passes the bytes on to a file, if there is one.
    """

    def __init__(self, file: Writable | None = None) -> None:
        self.checksum, self._file = 0, file

    def write(self, data: Any) -> int:
        self.checksum = zlib.crc32(data, self.checksum)
        return len(data) if self._file is None else self._file.write(data)


def _write_pt(path: Path, header: str, arrays: Mapping[str, np.ndarray], dtypes: Mapping[str, str]) -> None:
    write_pt(path, {**arrays, HEADER: np.frombuffer(header.encode(), np.uint8)}, dtypes)


WRITERS = {".npz": _write_npz, ".pt": _write_pt}
READERS = {".npz": _open_npz, ".pt": _open_pt}
