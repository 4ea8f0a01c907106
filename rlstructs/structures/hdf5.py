"""`.h5`, the third kind of file that named arrays are kept in; needs the extra `hdf5`.

What is read is what was written: HDF5 itself has checksums for its tables, in the format of its version 1.10,
and for the chunks of what is compressed; arrays that lie in one piece get one as an attribute. Compressed files
are read where they are asked for, if they claim no more than they can hold.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rlstructs.errors import SpecError
from rlstructs.structures.containers import HEADER, NewFile, Reader, checksum

# What HDF5 compresses with, and how many times smaller that can make anything: zlib's own limit.
COMPRESSIONS, MOST_COMPRESSED = ("gzip", "lzf"), 1032
# Filters of HDF5: gzip, its checksum, lzf. Any other might be a plugin, which libhdf5 would load from the disk.
FILTERS = {1, 3, 32000}
# The attribute of an array that holds its checksum.
CHECKSUM = "crc32"


@contextmanager
def open_h5(path: Path, compressed: bool = False) -> Iterator[Reader]:
    """Opens a file to read.

    Args:
        path: the file.
        compressed: whether it may be.
    """
    with h5py().File(path, "r") as file, open(path, "rb") as raw:
        yield _Hdf5(file, raw, path.stat().st_size, compressed)


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
    with closing(NewFile(path)) as new, h5py().File(new, "w", libver=("v110", "v110")) as file:
        for name, array in [*arrays.items(), (HEADER, np.frombuffer(header.encode(), np.uint8))]:
            values = np.asarray(array, order="C")
            if compression is not None and values.size and name != HEADER:
                file.create_dataset(name, data=values, compression=compression, fletcher32=True)
            else:
                dataset = file.create_dataset(name, data=values)
                dataset.attrs[CHECKSUM] = np.uint32(zlib.crc32(values.data))
            if new.error is not None:
                return  # what follows would not be written either


def h5py() -> Any:
    """The module h5py.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import h5py
    except ImportError as error:
        raise ImportError("h5py is needed for .h5 files: pip install 'rlstructs[hdf5]'") from error
    return h5py


class _Hdf5:
    def __init__(self, file: Any, raw: BinaryIO, nbytes: int, compressed: bool) -> None:
        self._file, self._raw, self._compressed = file, raw, compressed
        self._nbytes_left = nbytes  # that no array has said are its own
        self._datasets: dict[str, Any] = {}
        text = np.empty(self.found(HEADER)[1], np.uint8)
        self._verify(HEADER)
        self.read_into(HEADER, text)
        self.text = text.tobytes().decode()

    def found(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        if name in self._datasets:
            return self._datasets[name].dtype, self._datasets[name].shape
        dataset = self._file[name]
        if dataset.external or dataset.is_virtual or dataset.file.filename != self._file.filename:
            raise ValueError(f"{name!r} lies in another file")
        packed = self._compressed and dataset.compression in COMPRESSIONS
        stored = dataset.id.get_storage_size()
        self._nbytes_left -= stored
        held = stored * (MOST_COMPRESSED if packed else 1)
        if dataset.dtype.kind not in "biufc" or dataset.nbytes > held or self._nbytes_left < 0:
            raise ValueError(f"{name!r}: {dataset.dtype}{dataset.shape} is not what the file holds")
        if not _filters(dataset) <= (FILTERS if packed else set()):
            raise ValueError(f"{name!r} is compressed")
        self._datasets[name] = dataset
        return dataset.dtype, dataset.shape

    def verify(self) -> None:
        for name in self._datasets:
            self._verify(name)

    def _verify(self, name: str) -> None:
        dataset = self._datasets[name]
        if dataset.chunks is not None:
            for chunk in dataset.iter_chunks():
                dataset[chunk]  # libhdf5 compares its checksum
        elif (written := _checksum_in(dataset)) is not None:
            offset = dataset.id.get_offset()  # None if it has no bytes
            if checksum(self._raw, offset or 0, dataset.nbytes if offset is not None else 0) != written:
                raise ValueError(f"{name!r}: its checksum is wrong")

    def read_into(self, name: str, array: np.ndarray) -> None:
        if array.size:
            self._file[name].read_direct(array.reshape(self._file[name].shape))


def _filters(dataset: Any) -> set[int]:
    pipeline = dataset.id.get_create_plist()
    return {pipeline.get_filter(n)[0] for n in range(pipeline.get_nfilters())}


def _checksum_in(dataset: Any) -> int | None:
    """What was written beside an array; None for files that have no checksums."""
    if CHECKSUM not in dataset.attrs:
        return None
    attribute = dataset.attrs.get_id(CHECKSUM)
    if attribute.shape != () or attribute.dtype != np.uint32:  # before memory is taken for it
        raise ValueError(f"{dataset.name!r}: its checksum is {attribute.dtype}{attribute.shape}")
    return int(dataset.attrs[CHECKSUM])
