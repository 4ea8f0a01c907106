"""Finds datasets in HDF5 files that may have been made to do harm.

Links in a file may lead into other files, to named pipes, or in circles; datasets may lie in other files; types may be
nested as deeply as the file is long. So a link is checked before its target is opened, and only types of plain numbers
are decoded.
"""

from __future__ import annotations

import io
from typing import Any, BinaryIO

import numpy as np

from rlstructs.checks import DTYPES, MOST_AXES, is_size
from rlstructs.files.opening import size_of

ELSEWHERE = "lies in another file"
# The most reads of a file, a constant and some per byte. libhdf5 needs a few for each array of an intact file.
READS, READS_PER_BYTE = 100_000, 1


class ReadFile:
    """A file for libhdf5 to read: reads are complete, and their number is limited.

    Args:
        file: a file without a buffer.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._n_left = READS + READS_PER_BYTE * size_of(file)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def read(self, n: int = -1) -> bytes:  # h5py tells a file object by this method
        return self._file.read(n)

    def readinto(self, data: memoryview) -> int:
        done, self._n_left = 0, self._n_left - 1
        if self._n_left < 0:
            raise OSError("its tables lead in circles")
        while done < len(data) and (n := self._file.readinto(data[done:])):  # type: ignore[attr-defined]
            done += n
        return done

    def flush(self) -> None:
        """Does nothing, because the file is only read."""


def find_dataset(file: Any, name: str) -> Any:
    """Finds a dataset by its name, without following links.

    Raises:
        KeyError, ValueError: there is no such dataset, or a part of the name is a link.
    """
    from h5py import Dataset, h5d, h5g, h5l, h5o

    here = h5g.open(file.id, b"/")
    *groups, last = name.split("/")
    for part in (*groups, last):
        if not isinstance(here, h5g.GroupID) or "\0" in part:
            raise ValueError(f"{name!r} is not there")
        kind = here.links.get_info(part.encode()).type
        if kind == h5l.TYPE_EXTERNAL:
            raise ValueError(f"{name!r} {ELSEWHERE}")
        if kind != h5l.TYPE_HARD:
            raise ValueError(f"{name!r} is a link to something else")
        here = h5o.open(here, part.encode())
    if not isinstance(here, h5d.DatasetID):
        raise ValueError(f"{name!r} is not an array")
    return Dataset(here)


def chunk_of(dataset: Any, name: str) -> tuple[int, ...] | None:
    """The shape of a dataset's chunks; None if it lies in one piece.

    Raises:
        ValueError: it lies in another file.
    """
    from h5py import h5d

    plist = dataset.id.get_create_plist()
    layout = plist.get_layout()
    if layout not in (h5d.COMPACT, h5d.CONTIGUOUS, h5d.CHUNKED) or plist.get_external_count():
        raise ValueError(f"{name!r} {ELSEWHERE}")
    return tuple(plist.get_chunk()) if layout == h5d.CHUNKED else None


def spec_of(dataset: Any, name: str) -> tuple[np.dtype, tuple[int, ...]]:
    """The dtype and shape of a dataset.

    Raises:
        ValueError: it does not hold plain numbers.
    """
    from h5py import h5s

    space = dataset.id.get_space()
    if space.get_simple_extent_type() not in (h5s.SIMPLE, h5s.SCALAR):
        raise ValueError(f"{name!r} has no shape")
    shape, dtype = tuple(space.shape), _decode_dtype(dataset.id.get_type(), name)
    if len(shape) > MOST_AXES or not all(map(is_size, shape)):
        raise ValueError(f"{name!r} has the shape {shape}, which no array has")
    return dtype, shape


def _decode_dtype(kind: Any, name: str) -> np.dtype:
    """Decodes a type of plain numbers; raises ValueError for others, without decoding them."""
    from h5py import h5t

    of = kind.get_class()
    if of == h5t.ENUM:
        is_plain = kind.get_nmembers() == 2 and kind.get_size() == 1  # a bool
    elif of == h5t.COMPOUND:
        members = range(kind.get_nmembers()) if kind.get_nmembers() == 2 else ()
        is_plain = [kind.get_member_class(n) for n in members] == [h5t.FLOAT] * 2  # a complex number
    else:
        is_plain = of in (h5t.INTEGER, h5t.FLOAT, getattr(h5t, "COMPLEX", h5t.INTEGER))
    dtype = kind.dtype if is_plain else None
    known = None if dtype is None else DTYPES.get(dtype.name)
    if known is None or known != dtype:
        raise ValueError(f"{name!r} is not an array of plain numbers")
    return known


def filters_of(dataset: Any) -> list[int]:
    """The numbers of a dataset's filters."""
    pipeline = dataset.id.get_create_plist()
    return [pipeline.get_filter(n)[0] for n in range(min(pipeline.get_nfilters(), MOST_AXES))]


def read_checksum(dataset: Any, attribute: str) -> int | None:
    """Reads the checksum of an array from an attribute; None for files without checksums."""
    from h5py import h5a, h5s, h5t

    name = attribute.encode()
    if not h5a.exists(dataset.id, name):
        return None
    found = h5a.open(dataset.id, name)
    kind, extent = found.get_type(), found.get_space().get_simple_extent_type()
    if kind.get_class() != h5t.INTEGER or kind.get_size() != 4 or extent != h5s.SCALAR:  # before it is read into memory
        raise ValueError(f"{dataset.name!r}: its checksum is no number of 32 bits")
    value = np.zeros((), np.uint32)
    found.read(value)
    return int(value)
