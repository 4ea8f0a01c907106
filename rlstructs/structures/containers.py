"""Files that are archives: `.npz` and `.pt`; `hdf5.py` has the third kind.

Each is written from arrays and one text, the header, and read without executing anything: a reader finds
where the bytes of each array lie, and copies them into memory that is there already. Compressed archives,
which can hold more than they are, are refused. Each member has a checksum.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np
import torch

from rlstructs.structures.dtypes import FLOAT8

HEADER = "__header__"
# numpy has no such dtypes: their bits are stored as integers.
BITS = {
    "bfloat16": "int16",
    "complex32": "int32",
    **{str(dtype).removeprefix("torch."): "uint8" for dtype in FLOAT8},
}
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
        for member in self._members.values():
            self._verify(member.info)

    def _verify(self, info: zipfile.ZipInfo) -> None:
        if checksum(self._file, _data_offset(self._file, info), info.file_size) != info.CRC:
            raise ValueError(f"{info.filename}: its checksum is wrong")

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


def checksum(file: BinaryIO, offset: int, nbytes: int) -> int:
    """The CRC-32 of bytes in a file.

    Raises:
        ValueError: it has not so many.
    """
    buffer, found = memoryview(bytearray(CHUNK)), 0
    file.seek(offset)
    while nbytes:
        n = file.readinto(buffer[: min(nbytes, CHUNK)])  # type: ignore[attr-defined]
        if not n:
            raise ValueError("it ends too early")
        found, nbytes = zlib.crc32(buffer[:n], found), nbytes - n
    return found


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
        self._verify(self._members[HEADER].info)
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
        folder, unused = pickled[0].removesuffix("data.pkl"), dict(self._infos)
        for name, value in content.items():
            if isinstance(value, _Stored):
                info = unused.pop(f"{folder}data/{value.key}")  # shared bytes would take memory several times
                member = _Member(value.dtype, value.shape, _data_offset(file, info), info)
                if value.dtype.kind not in "biufc" or member.nbytes != info.file_size:
                    raise ValueError(f"{name!r}: {value.dtype}{value.shape} is not what the file holds")
                self._members[name] = member
            elif name != HEADER:
                raise ValueError(f"{name!r} is no plain tensor")


class _Stored(NamedTuple):
    """A tensor as a .pt file names it. A tuple: a pickle can change no attribute of it."""

    key: str
    dtype: np.dtype
    shape: tuple[int, ...]


class _Unpickler(pickle._Unpickler):  # in Python: the one in C takes memory for any number of objects that it is told
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
            return _REBUILD
        raise ValueError(f"it holds more than tensors: {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        kind, storage_type, key, _, _ = pid
        if kind != "storage" or not isinstance(storage_type, str):
            raise ValueError("it holds more than tensors")
        return storage_type, key


class _Rebuild:
    """What a pickle may call. An object without attributes: a pickle could set those of a function."""

    __slots__ = ()

    def __call__(self, *arguments: Any) -> _Stored:
        return _stored(*arguments)


_REBUILD = _Rebuild()


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


@contextmanager
def _open_npz(path: Path) -> Iterator[Reader]:
    with open(path, "rb") as file, zipfile.ZipFile(file) as zipped:
        yield _Npz(path, file, zipped)


@contextmanager
def _open_pt(path: Path) -> Iterator[Reader]:
    with open(path, "rb") as file, zipfile.ZipFile(file) as zipped:
        yield _Pt(path, file, zipped)


class NewFile:
    """A file that a library writes, which does not learn that a write failed: `close` raises the error.

    After a write that failed libhdf5 2.0 ends the whole process when it exits (a segmentation fault: the file
    stays among those to be closed), and torch says "unexpected pos 960 vs 854" of a full disk.

    Attributes:
        error: why the first write failed.
    """

    def __init__(self, path: Path) -> None:
        self._file = io.FileIO(path, "x+")  # never through a link that lies there
        self.error: OSError | None = None

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def read(self, n: int = -1) -> bytes:  # by which h5py knows a file
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
        data[done:] = bytes(len(data) - done)  # what could not be written
        return len(data)

    def truncate(self, nbytes: int) -> int:
        try:
            return self._file.truncate(nbytes)
        except OSError as error:
            self.error = self.error or error
            return nbytes

    def flush(self) -> None:
        """Nothing: there is no buffer."""

    def close(self) -> None:
        self._file.close()
        if self.error is not None:
            raise self.error


def _write_npz(path: Path, header: str, arrays: Mapping[str, np.ndarray], dtypes: Mapping[str, str]) -> None:
    with zipfile.ZipFile(path, "x", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, array in [*arrays.items(), (HEADER, np.frombuffer(header.encode(), np.uint8))]:
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)


def _write_pt(path: Path, header: str, arrays: Mapping[str, np.ndarray], dtypes: Mapping[str, str]) -> None:
    # numpy's own copies would be needed if torch wrote what a view is a view of, or shared memory only once.
    tensors = {name: _own(array, dtypes[name]) for name, array in arrays.items()}
    with closing(NewFile(path)) as new, _checksums():
        torch.save({**tensors, HEADER: header}, new)  # type: ignore[arg-type]  # it calls no more than write


@contextmanager
def _checksums() -> Iterator[None]:
    """Has torch compute checksums, also where the program has switched that off (it can since torch 2.6)."""
    settings = torch.serialization
    if getattr(settings, "get_crc32_options", lambda: True)():
        yield
        return
    settings.set_crc32_options(True)
    try:
        yield
    finally:
        settings.set_crc32_options(False)


def _own(array: np.ndarray, dtype: str) -> torch.Tensor:
    tensor = torch.from_numpy(np.asarray(array))
    return tensor.view(getattr(torch, dtype)) if dtype in BITS else tensor


WRITERS = {".npz": _write_npz, ".pt": _write_pt}
READERS = {".npz": _open_npz, ".pt": _open_pt}
