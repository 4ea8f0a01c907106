"""Reads and writes `.h5` files; needs the extra `hdf5`.

Checksums cover the whole file: HDF5 itself keeps those of its tables, in the format of its version 1.10, and of
compressed chunks; arrays that lie in one piece have one as an attribute. Compressed files are read only if the caller
allows it, and only if no array claims more bytes than its compressed ones can hold. `hdf5_objects` finds the arrays.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rlstructs.errors import SpecError
from rlstructs.files.archives import HEADER, Checked, NewFile, Reader, check_bools, checksum, read_slots
from rlstructs.files.hdf5_objects import ReadFile, chunk_of, filters_of, find_dataset, read_checksum, spec_of
from rlstructs.files.opening import open_file, read_into, size_of
from rlstructs.files.torch_archive import write_bytes

# Compressions that HDF5 always has, and the most by which they shrink data, which is zlib's limit.
COMPRESSIONS, MOST_COMPRESSED = ("gzip", "lzf"), 1032
# Numbers of HDF5's filters. Only these are read, because libhdf5 would load any other as a plugin from the disk.
GZIP, FLETCHER32, LZF = 1, 3, 32000
PACKED = ([GZIP, FLETCHER32], [LZF, FLETCHER32], [GZIP], [LZF])
# The attribute of an array that holds its checksum.
CHECKSUM = "crc32"
# Bytes of a chunk of a 1 MB array; their growth for an array ten times as large; the least and the most. MARGIN: how
# many times larger a chunk may be that is read. It is limited because libhdf5 unpacks whole chunks.
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
            values = np.asarray(array)
            if compression is not None and values.size and values.ndim and name != HEADER:
                chunks = chunk_shape(values.shape, values.itemsize)
                file.create_dataset(name, data=values, chunks=chunks, compression=compression, fletcher32=True)
            else:
                _write_plain(file, new, name, values)
            if new.error is not None:
                return  # what follows would not be written either


def _write_plain(file: Any, new: NewFile, name: str, values: np.ndarray) -> None:
    """Writes an array in one piece, and its checksum; its bytes do not pass through libhdf5, which takes longer."""
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
    """The approximate bytes of a chunk for an array of `nbytes`; PyTables and h5py choose alike."""
    return float(min(max(CHUNK * GROWTH ** math.log10(nbytes / MOST), LEAST), MOST))


def chunk_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The shape of the chunks for a non-empty array."""
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
