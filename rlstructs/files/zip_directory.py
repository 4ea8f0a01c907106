"""The directory of a zip archive, as numpy, torch and Python's zipfile write it; anything else is refused.

Python's zipfile takes archives that begin anywhere in a file, members that lie in one another, names that come twice
and directories of any length. Here every byte belongs to one member at most, and there are no more members than bytes
for them.
"""

from __future__ import annotations

import struct
from typing import BinaryIO, NamedTuple

from rlstructs.files.opening import read_at

# Of the record at the end, of the two in front of it in large archives, of an entry, and of what is before a member.
END, END_64, LOCATOR_64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL")
ENTRY, LOCAL = struct.Struct("<4s6H3L5H2L"), struct.Struct("<4s5H3L2H")
# What says that a number stands in a longer field.
FULL_16, FULL = 0xFFFF, 0xFFFFFFFF
ENCRYPTED, UTF8 = 0x1, 0x800
# Bytes of a file for each member at least; and how many members there may be in any case.
PER_MEMBER, ANY_NUMBER = 128, 64


class Entry(NamedTuple):
    """A member of an archive.

    Attributes:
        name: as the archive has it.
        checksum: the CRC-32 of its bytes.
        nbytes: how many.
        header: where what is before them begins.
        end: where the next member begins, or the directory.
    """

    name: str
    checksum: int
    nbytes: int
    header: int
    end: int


def read_directory(file: BinaryIO, size: int) -> list[Entry]:
    """The members of an archive, in the order in which they lie in it.

    Args:
        file: the archive.
        size: its bytes.

    Raises:
        ValueError: it is none, compressed, or not as it should be.
    """
    start, nbytes, n = _find(file, size)
    if n > ANY_NUMBER + size // PER_MEMBER:
        raise ValueError(f"it says that it has {n:,} members, for which it is too small")
    data, at, found = read_at(file, start, nbytes), 0, list[Entry]()
    for _ in range(n):
        entry, at = _entry(data, at)
        found.append(entry)
    if at != nbytes or len({entry.name for entry in found}) != n:
        raise ValueError("its directory has a name twice, or more in it than members")
    found.sort(key=lambda entry: entry.header)
    ends = [*(entry.header for entry in found[1:]), start]
    for entry, end in zip(found, ends, strict=True):
        if entry.header + LOCAL.size + entry.nbytes > end:
            raise ValueError("it says that it holds more than it is")
    return [entry._replace(end=end) for entry, end in zip(found, ends, strict=True)]


def data_offset(file: BinaryIO, entry: Entry) -> int:
    """Where the bytes of a member begin: behind a header, a name and more, whose lengths that holds."""
    if entry.header + LOCAL.size > entry.end:
        raise ValueError(f"{entry.name}: it has no header")
    signature, _, flags, method, *_, n_name, n_extra = LOCAL.unpack(read_at(file, entry.header, LOCAL.size))
    if signature != b"PK\3\4" or flags & ENCRYPTED or method:
        raise ValueError(f"{entry.name}: it has no header")
    offset: int = entry.header + LOCAL.size + n_name + n_extra
    if offset + entry.nbytes > entry.end:
        raise ValueError(f"{entry.name}: it says that it holds more than it is")
    return offset


def _find(file: BinaryIO, size: int) -> tuple[int, int, int]:
    """Where the directory begins, its bytes, and how many members it names."""
    if size < END.size:
        raise ValueError("it is no archive")
    end = size - END.size
    signature, disk, first, here, n, nbytes, start, comment = END.unpack(read_at(file, end, END.size))
    if signature != b"PK\5\6" or comment or disk or first or here != n:
        raise ValueError("it is no archive, or does not end where one does")
    if end >= LOCATOR_64.size + END_64.size:
        signature, _, at, _ = LOCATOR_64.unpack(read_at(file, end - LOCATOR_64.size, LOCATOR_64.size))
        if signature == b"PK\6\7":
            end -= LOCATOR_64.size + END_64.size
            signature, _, _, _, disk, first, here, *wide = END_64.unpack(read_at(file, end, END_64.size))
            narrow = (n, FULL_16), (nbytes, FULL), (start, FULL)
            if signature != b"PK\6\6" or at != end or disk or first or here != wide[0]:
                raise ValueError("its directory is not where it says")
            if any(known not in (full, value) for (known, full), value in zip(narrow, wide, strict=True)):
                raise ValueError("it says two things of its directory")
            n, nbytes, start = wide
    if start + nbytes != end:
        raise ValueError("its directory is not where it says")
    return start, nbytes, n


def _entry(data: bytes, at: int) -> tuple[Entry, int]:
    """The entry there, and where the next one is."""
    if at + ENTRY.size > len(data):
        raise ValueError("its directory ends too early")
    (signature, _, _, flags, method, _, _, checksum, packed, nbytes, n_name, n_extra, n_comment, disk, _, _,
     header) = ENTRY.unpack_from(data, at)  # fmt: skip
    stop = at + ENTRY.size + n_name + n_extra + n_comment
    if signature != b"PK\1\2" or stop > len(data):
        raise ValueError("its directory is damaged")
    behind = at + ENTRY.size + n_name
    name = data[at + ENTRY.size : behind].decode("utf-8" if flags & UTF8 else "cp437")
    if method:
        raise ValueError("it is compressed")
    if FULL in (packed, nbytes, header):
        nbytes, packed, header = _wide(data[behind : behind + n_extra], [nbytes, packed, header])
    if packed != nbytes or flags & ENCRYPTED or disk:
        raise ValueError(f"{name}: it is compressed, encrypted or elsewhere")
    return Entry(name, checksum, nbytes, header, 0), stop


def _wide(extra: bytes, numbers: list[int]) -> list[int]:
    """Numbers of an entry, those that do not fit there from its extra field."""
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
