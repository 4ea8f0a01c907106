"""Reads files, JSON and zip archives that may have been made to do harm.

Only regular files are opened. A named pipe or a device could keep a reader waiting for ever, or never end, and opening
one may change it.

Zip archives are those that numpy, torch or Python's zipfile writes; any other one is refused. Python's zipfile also
reads archives that begin anywhere in a file, members that overlap, repeated names and directories of any length. Here
each byte belongs to at most one member, and the size of the file limits the number of members.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from rlstructs.checks import clean_text
from rlstructs.errors import FileError, OutOfMemoryError

# With the flags that this system has.
FLAGS = os.O_RDONLY
for _name in ("O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY", "O_BINARY"):
    FLAGS |= getattr(os, _name, 0)

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_file(path: str | Path) -> BinaryIO:
    """Opens a regular file for reading, without a buffer.

    Raises:
        FileNotFoundError: there is no such file.
        FileError: it is a folder, a named pipe, a socket or a device.
        OSError: it cannot be read.
    """
    try:
        _check_regular(path, os.stat(path).st_mode)  # first, because opening some devices has effects
        # The object owns the descriptor from the start: whatever interrupts this, only one of the two closes it.
        file: BinaryIO = open(path, "rb", buffering=0, opener=_open_unblocked)  # noqa: SIM115, it is returned
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file") from None
    except FileError:
        raise
    except ValueError as error:  # a name with a null character
        raise FileError(f"{path}: no file has such a name: {error}") from error
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG):
            raise FileError(f"{path}: cannot be opened: {error.strerror}") from error
        raise
    try:
        _check_regular(path, os.fstat(file.fileno()).st_mode)
    except BaseException:
        file.close()
        raise
    return file


def _open_unblocked(path: str, _: int) -> int:
    # Without blocking, in case a named pipe has taken its place meanwhile.
    return os.open(path, FLAGS)


@contextlib.contextmanager
def name_damage(text: str) -> Iterator[None]:
    """Turns a parser's errors for arbitrary bytes into a FileError.

    Its message begins with `text`. Errors of the system, such as EMFILE and EIO, are raised unchanged.
    """
    try:
        yield
    except (FileError, ImportError, OutOfMemoryError):
        raise
    except Exception as error:
        if is_of_system(error):
            raise
        raise FileError(f"{text}: {clean_text(error)}") from error


def is_of_system(error: BaseException) -> bool:
    """Whether an error comes from the system, whatever the file's bytes are."""
    # Bytes of a file can lead a parser to an offset that there cannot be.
    from_bytes = (None, errno.EINVAL, errno.EOVERFLOW)
    is_missing = isinstance(error, FileNotFoundError)
    return is_missing or (isinstance(error, OSError) and error.errno not in from_bytes)


def size_of(file: BinaryIO) -> int:
    """Returns the size of an open file in bytes."""
    return len(file.getbuffer()) if isinstance(file, io.BytesIO) else os.fstat(file.fileno()).st_size


def read_bytes(path: str | Path) -> bytes:
    """Reads a whole regular file; raises what `open_file` does."""
    with open_file(path) as file:
        return read_at(file, 0, size_of(file))


def read_at(file: BinaryIO, offset: int, nbytes: int) -> bytes:
    """Reads `nbytes` bytes from `offset` on; raises ValueError if there are fewer."""
    data = bytearray(nbytes)
    read_into(file, offset, memoryview(data))
    return bytes(data)


def read_pieces(file: BinaryIO, pieces: Iterable[tuple[int, int]]) -> list[bytes]:
    """Calls `read_at` for each offset and number of bytes."""
    return [read_at(file, offset, nbytes) for offset, nbytes in pieces]


def read_into(file: BinaryIO, offset: int, data: memoryview) -> None:
    """Fills a buffer with the bytes from `offset` on.

    Raises ValueError if there are fewer.
    """
    file.seek(offset)
    done = 0
    while done < len(data):
        n = file.readinto(data[done : done + (1 << 26)])  # type: ignore[attr-defined]
        if not n:
            raise ValueError("it ends too early")
        done += n


def _check_regular(path: str | Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise FileError(f"{path}: is {kind}, expected a regular file")


# The most characters of an integer and of another number. The state of a random generator has integers of 39 digits.
LONGEST_INTEGER, LONGEST_NUMBER = 40, 40
# A text may have 2000 lists and objects, plus one per 6 of its characters, and 2000 quotes, plus one per 3.
PER_CONTAINER, PER_QUOTE, ALWAYS_ALLOWED = 6, 3, 2000


def parse_json(text: str | bytes) -> Any:
    """Parses a JSON text, which may have been made to do harm.

    Python's own parser accepts very long numbers, repeated names and NaN, and turns a text of brackets into objects of
    thirty times its size. Here all of these are errors.

    Raises:
        ValueError: it is not JSON as rlstructs writes it.
        RecursionError: it is nested too deeply.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")  # json.loads would guess the encoding of bytes
    for signs, least in (("[{", PER_CONTAINER), ('"', PER_QUOTE)):
        if sum(map(text.count, signs)) > ALWAYS_ALLOWED + len(text) // least:
            raise ValueError("its text consists mostly of brackets or quotes")
    return json.loads(
        text,
        object_pairs_hook=_make_object,
        parse_int=_parse_integer,
        parse_float=_parse_number,
        parse_constant=_parse_constant,
    )


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("its text has an object with a repeated name")
    for name in found:
        name.encode()  # raises for half of a surrogate pair
    return found


def _parse_integer(digits: str) -> int:
    if len(digits) > LONGEST_INTEGER:
        raise ValueError(f"its text has an integer of {len(digits):,} characters")
    return int(digits)


def _parse_number(digits: str) -> float:
    number = float(digits) if len(digits) <= LONGEST_NUMBER else math.inf
    if not math.isfinite(number):
        raise ValueError(f"its text has the number {digits[:LONGEST_NUMBER]}, which is too long or not finite")
    return number


def _parse_constant(name: str) -> float:
    if name == "Infinity":  # the value of a setting without a limit
        return math.inf
    raise ValueError(f"its text has {name} as a number")


# The record at the end, the two in front of it in large archives, a directory entry, and the header of a member.
END, END_64, LOCATOR_64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL")
ENTRY, LOCAL = struct.Struct("<4s6H3L5H2L"), struct.Struct("<4s5H3L2H")
# Values that say that the number is in a longer field.
FULL_16, FULL = 0xFFFF, 0xFFFFFFFF
ENCRYPTED, UTF8 = 0x1, 0x800
# A file has at most one member per 128 bytes; 64 are always allowed.
PER_MEMBER, ANY_NUMBER = 128, 64


class Entry(NamedTuple):
    """A member of an archive.

    Attributes:
        name: its name.
        checksum: the CRC-32 of its bytes.
        nbytes: the number of its bytes.
        header: where its header begins in the file.
        start: where its bytes begin.
    """

    name: str
    checksum: int
    nbytes: int
    header: int
    start: int


def read_directory(file: BinaryIO, size: int) -> list[Entry]:
    """Reads the members of an archive, in the order of their places.

    Args:
        file: the archive.
        size: its size in bytes.

    Raises:
        ValueError: it is not an archive, is compressed, or is damaged.
    """
    start, nbytes, n = _find_directory(file, size)
    if n > ANY_NUMBER + size // PER_MEMBER:
        raise ValueError(f"it says that it has {n:,} members, for which it is too small")
    data, at, found = read_at(file, start, nbytes), 0, list[Entry]()
    for _ in range(n):
        entry, at = _read_entry(data, at)
        found.append(entry)
    if at != nbytes or len({entry.name for entry in found}) != n:
        raise ValueError("its directory has a name twice, or more in it than members")
    found.sort(key=lambda entry: entry.header)
    ends = [*(entry.header for entry in found[1:]), start]
    for entry, end in zip(found, ends, strict=True):
        if entry.header + LOCAL.size + entry.nbytes > end:
            raise ValueError("it claims more bytes than it has")
    headers = read_pieces(file, [(entry.header, LOCAL.size) for entry in found])
    return [_find_start(*each) for each in zip(found, headers, ends, strict=True)]


def _find_start(entry: Entry, header: bytes, end: int) -> Entry:
    """Adds the start of a member's bytes to its entry.

    They follow the member's header, whose length varies. Raises ValueError if they reach beyond `end`.
    """
    signature, _, flags, method, *_, n_name, n_extra = LOCAL.unpack(header)
    if signature != b"PK\3\4" or flags & ENCRYPTED or method:
        raise ValueError(f"{entry.name}: it has no header")
    start: int = entry.header + LOCAL.size + n_name + n_extra
    if start + entry.nbytes > end:
        raise ValueError(f"{entry.name}: it claims more bytes than it has")
    return entry._replace(start=start)


def _find_directory(file: BinaryIO, size: int) -> tuple[int, int, int]:
    """Finds the directory; returns its start, size in bytes, and number of entries."""
    if size < END.size:
        raise ValueError("it is not an archive")
    end = size - END.size
    signature, disk, first, here, n, nbytes, start, comment = END.unpack(read_at(file, end, END.size))
    if signature != b"PK\5\6" or comment or disk or first or here != n:
        raise ValueError("it is not an archive, or does not end like one")
    if end >= LOCATOR_64.size + END_64.size:
        signature, _, at, _ = LOCATOR_64.unpack(read_at(file, end - LOCATOR_64.size, LOCATOR_64.size))
        if signature == b"PK\6\7":
            end -= LOCATOR_64.size + END_64.size
            signature, _, _, _, disk, first, here, *wide = END_64.unpack(read_at(file, end, END_64.size))
            narrow = (n, FULL_16), (nbytes, FULL), (start, FULL)
            if signature != b"PK\6\6" or at != end or disk or first or here != wide[0]:
                raise ValueError("its directory is not where it says")
            if any(known not in (full, value) for (known, full), value in zip(narrow, wide, strict=True)):
                raise ValueError("its directory contradicts itself")
            n, nbytes, start = wide
    if start + nbytes != end:
        raise ValueError("its directory is not where it says")
    return start, nbytes, n


def _read_entry(data: bytes, at: int) -> tuple[Entry, int]:
    """Reads the entry at `at`; returns it and where the next one begins."""
    if at + ENTRY.size > len(data):
        raise ValueError("its directory ends too early")
    (signature, _, _, flags, method, _, _, checksum, packed, nbytes, n_name, n_extra, n_comment, disk, _, _, header) = (
        ENTRY.unpack_from(data, at)
    )
    stop = at + ENTRY.size + n_name + n_extra + n_comment
    if signature != b"PK\1\2" or stop > len(data):
        raise ValueError("its directory is damaged")
    behind = at + ENTRY.size + n_name
    name = data[at + ENTRY.size : behind].decode("utf-8" if flags & UTF8 else "cp437")
    if method:
        raise ValueError("it is compressed")
    if FULL in (packed, nbytes, header):
        nbytes, packed, header = _read_wide(data[behind : behind + n_extra], [nbytes, packed, header])
    if packed != nbytes or flags & ENCRYPTED or disk:
        raise ValueError(f"{name}: it is compressed, encrypted or elsewhere")
    return Entry(name, checksum, nbytes, header, 0), stop


def _read_wide(extra: bytes, numbers: list[int]) -> list[int]:
    """Replaces numbers that exceed 32 bits by those in the extra field."""
    at = 0
    while at + 4 <= len(extra):
        kind, n = struct.unpack_from("<2H", extra, at)
        if kind == 1 and at + 4 + n <= len(extra):
            n_missing = numbers.count(FULL)
            if n < 8 * n_missing:
                break
            found = iter(struct.unpack_from(f"<{n_missing}Q", extra, at + 4))
            return [next(found) if number == FULL else number for number in numbers]
        at += 4 + n
    raise ValueError("its directory is damaged")
