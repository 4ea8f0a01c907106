"""Opens files, and parses JSON, that may have been made to do harm.

Only regular files are opened. A named pipe or a device could keep a reader waiting for ever, or never end, and opening
one may change it.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

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
