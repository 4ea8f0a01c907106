"""Reads the directories of zip archives by numpy, torch or Python's zipfile.

Any other archive is refused. Python's zipfile also reads archives that begin anywhere in a file, members that overlap,
repeated names and directories of any length. Here each byte belongs to at most one member, and the size of the file
limits the number of members.
"""

from __future__ import annotations

import struct
from typing import BinaryIO, NamedTuple

from rlstructs.files.opening import read_at, read_pieces

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
