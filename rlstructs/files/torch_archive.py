"""Writes `.pt` files for `torch.load`, without a second copy in memory.

`torch.save` keeps every tensor in memory until it has written all of them, and writes the whole storage of a view.
The format: a zip archive of `data.pkl`, a pickle in which a tensor names its storage by a key, a member `data/<key>`
for each storage, and the members `byteorder` and `version`.
"""

from __future__ import annotations

import io
import math
import pickle
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from rlstructs.files.pickled import BITS

FOLDER, VERSION = "archive", b"3\n"
# Storages begin at a multiple of this, so that they can be mapped into memory. The padding is in a field of the header
# of a member, which torch calls FB; zipfile adds a field of 20 bytes for large members.
ALIGNMENT, FIELD, HEADER_BYTES, LARGE_FIELD_BYTES = 64, b"FB", 30, 20
# Bytes that are written at a time: while they are copied, summed up and written, they stay in a core's cache.
AT_ONCE = 1 << 18


@dataclass(frozen=True)
class _Stored:
    """A tensor in C order, whose bytes lie in the member of this key.

    Attributes:
        key: of the member.
        dtype, shape: of the tensor.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Storage:
    """The storage of a tensor, in the terms of torch's files."""

    kind: type
    key: str
    n: int


class _Pickler(pickle.Pickler):
    """Pickles tensors as torch does, but for their storages."""

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        return ("storage", value.kind, value.key, "cpu", value.n) if isinstance(value, _Storage) else None

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, _Stored):
            return NotImplemented
        # torch pickles older dtypes in one way and newer ones in another.
        empty = torch.empty(0, dtype=value.dtype, device="cpu")
        rebuild, (storage, offset, _, _, *rest) = empty.__reduce_ex__(2)  # type: ignore[no-untyped-call]
        n, strides = math.prod(value.shape), torch.empty(value.shape, device="meta").stride()
        if isinstance(storage, torch.UntypedStorage):
            stored = _Storage(torch.UntypedStorage, value.key, n * empty.element_size())
        else:
            stored = _Storage(getattr(torch, _name_storage(empty)), value.key, n)
        return rebuild, (stored, offset, value.shape, strides, *rest)


class Writable(Protocol):
    """A file, or anything else that takes bytes."""

    def write(self, data: Any, /) -> int:
        """Writes all of the bytes; returns their number."""


def write_pt(path: Path, arrays: Mapping[str, np.ndarray], dtypes: Mapping[str, str]) -> None:
    """Writes a dict of tensors to a new file.

    Args:
        path: of the file.
        arrays: by name; arrays, views, or objects that numpy turns into arrays.
        dtypes: the torch dtypes that numpy lacks, by the name of the array that holds their bits.
    """
    stored = {
        name: _Stored(str(key), _torch_dtype(array.dtype, dtypes.get(name)), tuple(array.shape))
        for key, (name, array) in enumerate(arrays.items())
    }
    pickled = io.BytesIO()
    _Pickler(pickled, protocol=2).dump(stored)
    with zipfile.ZipFile(path, "x", zipfile.ZIP_STORED, allowZip64=True) as archive:
        archive.writestr(f"{FOLDER}/data.pkl", pickled.getvalue())
        archive.writestr(f"{FOLDER}/byteorder", sys.byteorder)
        for name, array in arrays.items():
            with archive.open(_aligned(archive, f"{FOLDER}/data/{stored[name].key}"), "w", force_zip64=True) as member:
                write_bytes(member, array)
        archive.writestr(f"{FOLDER}/version", VERSION)


def _aligned(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    """Describes the next member, whose bytes begin at a multiple of `ALIGNMENT`."""
    member = zipfile.ZipInfo(name)
    offset = archive.start_dir + HEADER_BYTES + len(name) + 4 + LARGE_FIELD_BYTES
    padding = -offset % ALIGNMENT
    member.extra = FIELD + padding.to_bytes(2, "little") + b"Z" * padding
    return member


def write_bytes(member: Writable, array: Any) -> None:
    """Writes the bytes of an array in C order."""
    for piece in _pieces(as_values(array)):
        member.write(np.ascontiguousarray(piece).view(np.uint8).data)


def as_values(array: Any) -> Any:
    """Returns an array.

    One that is made on demand, piece by piece, stays as it is.
    """
    return array if getattr(array, "is_made_in_pieces", False) else np.asarray(array)


def _pieces(values: np.ndarray) -> Iterator[np.ndarray]:
    """Yields flat pieces `(n,)` of an array, in C order.

    Each has up to `AT_ONCE` bytes, or one item; or as many as an object that says so gives at a time.
    """
    if hasattr(values, "pieces"):
        yield from values.pieces()
        return
    if values.flags.c_contiguous:
        values = values.reshape(-1)
    if values.nbytes <= AT_ONCE or values.size == 1:
        yield values.reshape(-1)
        return
    n = max(1, AT_ONCE * len(values) // values.nbytes)
    for start in range(0, len(values), n):
        part = values[start : start + n]
        yield from _pieces(part[0] if n == 1 and part.ndim > 1 else part)


def _torch_dtype(dtype: np.dtype, bits: str | None) -> torch.dtype:
    if bits in BITS:
        found: torch.dtype = getattr(torch, bits)
        return found
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _name_storage(tensor: torch.Tensor) -> str:
    """Returns torch's name for a tensor's storage class, such as `FloatStorage`."""
    return str(tensor.type()).removeprefix("torch.").replace("Tensor", "Storage")
