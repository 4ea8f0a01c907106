"""Reads and writes `.h5` files; needs the extra `hdf5`.

Checksums cover the whole file. HDF5 keeps those of its own tables, in the format of its version 1.10, and of compressed
chunks; an array in one piece has its checksum as an attribute. Compressed files are read only if the caller allows it,
and only if no array claims more bytes than its compressed ones can hold.

Finds datasets in HDF5 files that may have been made to do harm.

Links in a file may lead into other files, to named pipes, or in circles; datasets may lie in other files; types may be
nested as deeply as the file is long. So a link is checked before its target is opened, and only types of plain numbers
are decoded.
"""

from __future__ import annotations

import io
import itertools
import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rlstructs.checks import DTYPES, MOST_AXES, is_size
from rlstructs.errors import SpecError
from rlstructs.files.archives import HEADER, Checked, NewFile, Reader, check_bools, checksum, read_slots
from rlstructs.files.opening import open_file, read_into, size_of
from rlstructs.files.torch_archive import as_values, write_bytes

# Compressions that HDF5 always has, and the most by which they shrink data, which is zlib's limit.
COMPRESSIONS, MOST_COMPRESSED = ("gzip", "lzf"), 1032
# Numbers of HDF5's filters. Only these are read, because libhdf5 would load any other as a plugin from the disk.
GZIP, FLETCHER32, LZF = 1, 3, 32000
PACKED = ([GZIP, FLETCHER32], [LZF, FLETCHER32], [GZIP], [LZF])
# The attribute of an array that holds its checksum.
CHECKSUM = "crc32"
# Bytes of a chunk of a 1 MB array; their growth for an array ten times as large; the least and the most. MARGIN: how
# many times as large the chunks of a file may be. They are limited because libhdf5 unpacks whole chunks.
CHUNK, GROWTH, LEAST, MOST, MARGIN = 1 << 14, 2.0, 1 << 13, 1 << 20, 1.5
# Bytes by which compression and the checksum may lengthen a small chunk.
LONGER = 64


@contextmanager
def open_h5(path: Path, compressed: bool = False) -> Iterator[Reader]:
    """Opens a file for reading.

    Args:
        path: the file.
        compressed: whether it may be compressed.
    """
    module = import_h5py()
    with open_file(path) as raw, module.File(ReadFile(raw), "r") as file:
        yield _Hdf5(file, raw, compressed)


def write_h5(
    path: Path,
    header: str,
    arrays: Mapping[str, np.ndarray],
    dtypes: Mapping[str, str],
    compression: str | None = None,
) -> None:
    """Writes a file; `compression` is "gzip" or "lzf"."""
    if compression not in (None, *COMPRESSIONS):
        raise SpecError(f"compression must be None or one of {COMPRESSIONS}, got {compression!r}")
    with closing(NewFile(path)) as new, import_h5py().File(new, "w", libver=("v110", "v110")) as file:
        for name, array in [*arrays.items(), (HEADER, np.frombuffer(header.encode(), np.uint8))]:
            values = as_values(array)
            if compression is not None and values.size and values.ndim and name != HEADER:
                chunks = chunk_shape(values.shape, values.itemsize)
                file.create_dataset(name, data=values, chunks=chunks, compression=compression, fletcher32=True)
            else:
                _write_plain(file, new, name, values)
            if new.error is not None:
                return  # what follows would not be written either


def _write_plain(file: Any, new: NewFile, name: str, values: np.ndarray) -> None:
    """Writes an array in one piece, and its checksum.

    The bytes bypass libhdf5, which would take longer.
    """
    from h5py import h5d, h5p

    plist = h5p.create(h5p.DATASET_CREATE)
    plist.set_alloc_time(h5d.ALLOC_TIME_EARLY)  # so that there is a place for them
    plist.set_fill_time(h5d.FILL_TIME_NEVER)
    dataset = file.create_dataset(name, values.shape, values.dtype, dcpl=plist)
    offset = dataset.id.get_offset()
    if offset is None:  # a single number, or none at all
        dataset[...] = values
    else:
        new.seek(offset)
    member = Checked(None if offset is None else new)
    write_bytes(member, values)
    dataset.attrs[CHECKSUM] = np.uint32(member.checksum)


def chunk_nbytes(nbytes: int) -> float:
    """Returns the approximate size of a chunk, in bytes, for an array of `nbytes`.

    PyTables and h5py choose similar sizes.
    """
    return float(min(max(CHUNK * GROWTH ** math.log10(nbytes / MOST), LEAST), MOST))


def chunk_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Returns the shape of the chunks for a non-empty array."""
    chunk, wanted = list(shape), chunk_nbytes(math.prod(shape) * itemsize)
    for axis in itertools.cycle(range(len(shape))):
        if math.prod(chunk) * itemsize <= wanted or math.prod(chunk) == 1:
            break
        chunk[axis] = -(-chunk[axis] // 2)
    return tuple(chunk)


def import_h5py() -> Any:
    """Imports h5py.

    Raises:
        ImportError: it is not installed; the message says how to install it.
    """
    try:
        import h5py
    except ImportError as error:
        raise ImportError("h5py is needed for .h5 files: pip install h5py") from error
    return h5py


class _Hdf5:
    def __init__(self, file: Any, raw: BinaryIO, compressed: bool) -> None:
        self._file, self._raw, self._compressed = file, raw, compressed
        self._nbytes_left = size_of(raw)  # not claimed by any array yet
        self._datasets: dict[str, Any] = {}
        self._offsets: dict[str, int | None] = {}
        self._specs: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
        text = np.empty(self.spec_of(HEADER)[1], np.uint8)
        self._verify(HEADER)
        self.read_into(HEADER, text)
        self.text = text.tobytes().decode()

    def spec_of(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        if name in self._specs:
            return self._specs[name]
        dataset = find_dataset(self._file, name)
        chunks = chunk_of(dataset, name)  # first, because the space of a virtual dataset opens other files
        dtype, shape = spec_of(dataset, name)
        nbytes, filters = math.prod(shape) * dtype.itemsize, filters_of(dataset)
        packed = self._compressed and filters in PACKED
        stored = dataset.id.get_storage_size()
        self._nbytes_left -= stored
        most = stored * (MOST_COMPRESSED if packed else 1)
        if stored < 0 or nbytes > most or self._nbytes_left < 0:
            raise ValueError(f"{name!r}: {dtype}{shape} is not what the file holds")
        if filters and not packed:
            raise ValueError(f"{name!r} is compressed")
        if chunks is not None:
            nbytes_of_chunk = math.prod(chunks) * dtype.itemsize
            if not nbytes or any(n > of for n, of in zip(chunks, shape, strict=True)):
                raise ValueError(f"{name!r}: has chunks of {chunks}, which are larger than it")
            if packed and nbytes_of_chunk > MARGIN * chunk_nbytes(nbytes):
                raise ValueError(f"{name!r}: has chunks of {nbytes_of_chunk:,} bytes, which rlstructs never writes")
        # None if it has no bytes, or does not have them in one piece.
        offset = self._offsets[name] = None if chunks is not None else dataset.id.get_offset()
        if offset is not None and offset + nbytes > size_of(self._raw):
            raise ValueError(f"{name!r}: its bytes are not in the file")
        self._datasets[name], self._specs[name] = dataset, (dtype, shape)
        return dtype, shape

    def verify(self) -> None:
        for name in self._datasets:
            self._verify(name)

    def _verify(self, name: str) -> None:
        dataset, (dtype, shape) = self._datasets[name], self._specs[name]
        nbytes = math.prod(shape) * dtype.itemsize
        if dataset.chunks is not None:
            self._verify_chunks(name, math.prod(dataset.chunks) * dtype.itemsize)
            return
        offset = self._offsets[name]
        written = read_checksum(dataset, CHECKSUM)
        if written is not None and checksum(self._raw, offset or 0, nbytes if offset is not None else 0) != written:
            raise ValueError(f"{name!r}: its checksum is wrong")
        if dtype == np.bool_ and offset is not None:
            check_bools(self._raw, name, offset, nbytes)
        elif dtype == np.bool_:
            _check_bools(name, dataset[()])

    def _verify_chunks(self, name: str, nbytes: int) -> None:
        dataset, filters = self._datasets[name], filters_of(self._datasets[name])
        for place in dataset.iter_chunks():
            if filters:
                mask, data = dataset.id.read_direct_chunk(tuple(part.start for part in place))
                _check_chunk(name, data, mask, filters, nbytes)
            part = dataset[place]  # libhdf5 compares its checksum
            if part.dtype == np.bool_:
                _check_bools(name, part)

    def read_into(self, name: str, array: np.ndarray, first: int = 0) -> None:
        shape, offset = self._specs[name][1], self._offsets[name]
        if array.size and offset is not None:
            read_into(self._raw, offset + first * array.itemsize, array.reshape(-1).view(np.uint8).data)
        elif array.size and array.size == math.prod(shape):
            self._datasets[name].read_direct(array.reshape(shape))
        elif array.size:
            row = math.prod(shape[1:])
            start, skipped = divmod(first, row)
            rows = self._datasets[name][start : -(-(first + array.size) // row)]
            array[...] = rows.reshape(-1)[skipped : skipped + array.size].reshape(array.shape)

    def read_slots(self, name: str, array: np.ndarray, start: int) -> None:
        if self._offsets[name] is not None:
            read_slots(self, name, array, start)
        elif array.size:
            self._datasets[name].read_direct(array, np.s_[:, start : start + array.shape[1]])


def _check_chunk(name: str, data: bytes, mask: int, filters: list[int], nbytes: int) -> None:
    """Raises ValueError unless stored bytes unpack to a chunk of `nbytes` bytes."""
    fits = len(data) <= nbytes + nbytes // 256 + LONGER
    if fits and filters[0] == GZIP and not mask & 1:
        unpacking = zlib.decompressobj()
        fits = len(unpacking.decompress(data, nbytes + 1)) == nbytes and unpacking.eof
    if not fits:
        raise ValueError(f"{name!r}: has a chunk that is not of {nbytes:,} bytes")


def _check_bools(name: str, values: Any) -> None:
    """Raises ValueError unless bools in an array are 0 or 1."""
    if np.asarray(values).view(np.uint8).max(initial=0) > 1:
        raise ValueError(f"{name}: it holds bools that are neither true nor false")


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
            raise OSError("its tables refer to each other in a circle")
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
    """Returns the shape of a dataset's chunks; None if it lies in one piece.

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
    """Returns the dtype and shape of a dataset.

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
    """Returns the numbers of a dataset's filters."""
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
        raise ValueError(f"{dataset.name!r}: its checksum is not a number of 32 bits")
    value = np.zeros((), np.uint32)
    found.read(value)
    return int(value)
