"""The three kinds of file that named arrays are kept in: `.npz`, `.pt` and `.h5`.

Each is written from arrays and one text, the header, and read without executing anything: a reader finds
where the bytes of each array lie, and copies them into memory that is there already. Compressed files,
which can hold more than they are, are refused; but HDF5's, where they are asked for and claim what they can hold.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import torch

from rlstructs.errors import SpecError

HEADER = "__header__"
# numpy has no bfloat16: its bits are stored as integers.
BITS = {"bfloat16": "int16"}
# What HDF5 compresses with, and how many times smaller that can make anything: zlib's own limit.
COMPRESSIONS, MOST_COMPRESSED = ("gzip", "lzf"), 1032
# Bytes read at a time.
CHUNK = 1 << 20


class Reader(Protocol):
    """An open file.

    Attributes:
        text: its header.
    """

    text: str

    def found(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        """The dtype and shape of an array, as the file has it.

        Raises:
            KeyError, ValueError: there is no such array, or no plain one.
        """

    def verify(self) -> None:
        """Raises ValueError if the bytes are not those that were written, where the file can tell."""

    def read_into(self, name: str, array: np.ndarray) -> None:
        """Fills an array of that dtype and shape, in C order."""


@dataclass(frozen=True)
class _Member:
    """An array in an archive: where its bytes lie and what they are."""

    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int
    info: zipfile.ZipInfo

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _Archive:
    """What `.npz` and `.pt` have in common: a zip archive of uncompressed members."""

    def __init__(self, path: Path, file: BinaryIO, zipped: zipfile.ZipFile) -> None:
        self._file, self._zipped = file, zipped
        self._infos = {info.filename: info for info in zipped.infolist()}
        if any(info.compress_type != zipfile.ZIP_STORED for info in self._infos.values()):
            raise ValueError("it is compressed")
        if sum(info.file_size for info in self._infos.values()) > path.stat().st_size:
            raise ValueError("it says that it holds more than it is")
        self._members: dict[str, _Member] = {}

    def found(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        member = self._members[name]
        return member.dtype, member.shape

    def verify(self) -> None:
        buffer = bytearray(CHUNK)
        for member in self._members.values():
            checksum, left = 0, member.info.file_size
            self._file.seek(_data_offset(self._file, member.info))
            while left:
                n = self._file.readinto(memoryview(buffer)[: min(left, CHUNK)])  # type: ignore[attr-defined]
                if not n:
                    raise ValueError(f"{member.info.filename}: it ends too early")
                checksum, left = zlib.crc32(memoryview(buffer)[:n], checksum), left - n
            if checksum != member.info.CRC:
                raise ValueError(f"{member.info.filename}: its checksum is wrong")

    def read_into(self, name: str, array: np.ndarray) -> None:
        member = self._members[name]
        self._file.seek(member.offset)
        data = memoryview(array.reshape(-1).view(np.uint8).data) if array.size else memoryview(b"")
        done = 0
        while done < len(data):
            n = self._file.readinto(data[done : done + 64 * CHUNK])  # type: ignore[attr-defined]
            if not n:
                raise ValueError(f"{member.info.filename}: it ends too early")
            done += n


def _data_offset(file: BinaryIO, info: zipfile.ZipInfo) -> int:
    """Where a member's bytes begin: behind a header of 30 bytes, a name and more, whose lengths it holds."""
    file.seek(info.header_offset)
    header = file.read(30)
    if len(header) != 30 or header[:4] != b"PK\3\4":
        raise ValueError(f"{info.filename}: it has no header")
    return info.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")


class _Npz(_Archive):
    def __init__(self, path: Path, file: BinaryIO, zipped: zipfile.ZipFile) -> None:
        super().__init__(path, file, zipped)
        for name, info in self._infos.items():
            self._members[name.removesuffix(".npy")] = self._member(info)
        text = np.empty(self.found(HEADER)[1], np.uint8)
        self.read_into(HEADER, text)
        self.text = text.tobytes().decode()

    def _member(self, info: zipfile.ZipInfo) -> _Member:
        self._file.seek(_data_offset(self._file, info))
        version = np.lib.format.read_magic(self._file)
        if version != (1, 0):
            raise ValueError(f"{info.filename}: array format {version}")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(self._file)
        member = _Member(dtype, shape, self._file.tell(), info)
        if fortran or dtype.kind not in "biufc" or member.nbytes > info.file_size:
            raise ValueError(f"{info.filename}: {dtype}{shape} is not what the file holds")
        return member


class _Pt(_Archive):
    def __init__(self, path: Path, file: BinaryIO, zipped: zipfile.ZipFile) -> None:
        super().__init__(path, file, zipped)
        pickled = [name for name in self._infos if name.endswith("/data.pkl")]
        if len(pickled) != 1:
            raise ValueError("it is no archive of tensors")
        content = _Unpickler(io.BytesIO(zipped.read(pickled[0]))).load()
        if not isinstance(content, dict) or not isinstance(content.get(HEADER), str):
            raise ValueError("its header is not ours")
        self.text = content[HEADER]
        folder = pickled[0].removesuffix("data.pkl")
        for name, value in content.items():
            if isinstance(value, _Stored):
                info = self._infos[f"{folder}data/{value.key}"]
                member = _Member(value.dtype, value.shape, _data_offset(file, info), info)
                if member.nbytes != info.file_size:
                    raise ValueError(f"{name!r}: {value.dtype}{value.shape} is not what the file holds")
                self._members[name] = member
            elif name != HEADER:
                raise ValueError(f"{name!r} is no plain tensor")


@dataclass(frozen=True)
class _Stored:
    """A tensor as a .pt file names it."""

    key: str
    dtype: np.dtype
    shape: tuple[int, ...]


class _Unpickler(pickle.Unpickler):
    """Reads what `torch.save` makes of a dictionary of tensors, and nothing else: no class of it is ever called."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name.endswith("Storage"):
            return name  # the dtype of a tensor of the old kind
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return name
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return name
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if (module, name) in (("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor_v3")):
            return _stored
        raise ValueError(f"it holds more than tensors: {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        kind, storage_type, key, _, _ = pid
        if kind != "storage" or not isinstance(storage_type, str):
            raise ValueError("it holds more than tensors")
        return storage_type, key


def _stored(storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, *more: Any) -> _Stored:
    storage_type, key = storage
    name = more[0] if more else _DTYPES_OF_STORAGES[storage_type]
    shape = tuple(size)
    # torch gives axes of length 0 and 1 whatever stride.
    plain = all(n <= 1 or s == math.prod(shape[i + 1 :]) for i, (n, s) in enumerate(zip(shape, stride, strict=True)))
    if requires_grad or hooks or offset != 0 or not (plain or 0 in shape):
        raise ValueError("it holds a tensor that is not plain")
    return _Stored(key, np.dtype(BITS.get(name, name)), shape)


_DTYPES_OF_STORAGES = {
    "BoolStorage": "bool", "ByteStorage": "uint8", "CharStorage": "int8", "ShortStorage": "int16",
    "IntStorage": "int32", "LongStorage": "int64", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "FloatStorage": "float32", "DoubleStorage": "float64", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}  # fmt: skip


class _Hdf5:
    def __init__(self, file: Any, compressed: bool) -> None:
        self._file, self._compressed = file, compressed
        text = np.empty(self.found(HEADER)[1], np.uint8)
        self.read_into(HEADER, text)
        self.text = text.tobytes().decode()

    def found(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        dataset = self._file[name]
        if dataset.external or dataset.is_virtual or dataset.file.filename != self._file.filename:
            raise ValueError(f"{name!r} lies in another file")
        packed = self._compressed and dataset.compression in COMPRESSIONS
        held = dataset.id.get_storage_size() * (MOST_COMPRESSED if packed else 1)
        if dataset.dtype.kind not in "biufc" or dataset.nbytes > held:
            raise ValueError(f"{name!r}: {dataset.dtype}{dataset.shape} is not what the file holds")
        return dataset.dtype, dataset.shape

    def verify(self) -> None:
        pass  # plain datasets have no checksums

    def read_into(self, name: str, array: np.ndarray) -> None:
        if array.size:
            self._file[name].read_direct(array.reshape(self._file[name].shape))


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


@contextmanager
def _open_npz(path: Path) -> Iterator[Reader]:
    with open(path, "rb") as file, zipfile.ZipFile(file) as zipped:
        yield _Npz(path, file, zipped)


@contextmanager
def _open_pt(path: Path) -> Iterator[Reader]:
    with open(path, "rb") as file, zipfile.ZipFile(file) as zipped:
        yield _Pt(path, file, zipped)


@contextmanager
def _open_h5(path: Path, compressed: bool = False) -> Iterator[Reader]:
    with h5py().File(path, "r") as file:
        yield _Hdf5(file, compressed)


def _write_npz(path: Path, header: str, arrays: Mapping[str, np.ndarray], dtypes: Mapping[str, str]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, array in [*arrays.items(), (HEADER, np.frombuffer(header.encode(), np.uint8))]:
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)


def _write_pt(path: Path, header: str, arrays: Mapping[str, np.ndarray], dtypes: Mapping[str, str]) -> None:
    # numpy's own copies would be needed if torch wrote what a view is a view of, or shared memory only once.
    torch.save({HEADER: header, **{name: _own(array, dtypes[name]) for name, array in arrays.items()}}, path)


def _own(array: np.ndarray, dtype: str) -> torch.Tensor:
    tensor = torch.from_numpy(np.asarray(array))
    return tensor.view(getattr(torch, dtype)) if dtype in BITS else tensor


def _write_h5(
    path: Path,
    header: str,
    arrays: Mapping[str, np.ndarray],
    dtypes: Mapping[str, str],
    compression: str | None = None,
) -> None:
    if compression not in (None, *COMPRESSIONS):
        raise SpecError(f"compression must be None or one of {COMPRESSIONS}, got {compression!r}")
    with h5py().File(path, "w") as file:
        for name, array in arrays.items():
            values = np.asarray(array)
            file.create_dataset(name, data=values, compression=compression if values.size else None)
        file.create_dataset(HEADER, data=np.frombuffer(header.encode(), np.uint8))


WRITERS = {".npz": _write_npz, ".pt": _write_pt, ".h5": _write_h5}
READERS = {".npz": _open_npz, ".pt": _open_pt, ".h5": _open_h5}
