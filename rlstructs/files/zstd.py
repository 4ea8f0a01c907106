"""The codec, and the large columns of a file, packed by it.

Next observations are packed as what differs from the observations after them.

A packed column is an array of bytes: pieces, each compressed on its own. The header has the column's dtype and shape,
the bytes of each piece, and which column it follows. Next observations are nearly all the observations of the following
steps: what is compressed is the difference of their bits, zeros nearly everywhere.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from rlstructs.checks import MOST_AXES, clean_text, is_size
from rlstructs.workers.errors import OutOfMemoryError
from rlstructs.workers.limits import available_bytes

# zstd's default level.
DEFAULT_LEVEL = 3
EXTRA = "compression needs zstd: pip install zstandard"
# Columns of these dtypes are packed where the entries of their first axis have so many bytes.
DTYPES, LARGE = ("uint8", "bool"), 512
# Bytes of a piece, before it is compressed.
PIECE = 1 << 20
NEXT, NOW = "_observation/", "observation/"


class _OwnCodecs(threading.local):
    """The codecs of a thread.

    Two threads must not use one of zstd's at once.
    """

    def __init__(self) -> None:
        self.by_level: dict[int, Any] = {}


_CODECS = _OwnCodecs()


def codec_of(level: int = DEFAULT_LEVEL) -> Any:
    """Returns a codec with `compress`, `decompress`, `size_of` and `error`, for this thread alone.

    `size_of` returns how many bytes a compressed row says that it holds.

    Raises:
        ImportError: there is no zstd.
    """
    codec = _CODECS.by_level.get(level)
    if codec is None:
        codec = _CODECS.by_level[level] = _make_codec(level)
    return codec


def _make_codec(level: int) -> Any:
    try:
        import zstandard
    except ImportError:
        return _make_own_codec(level)
    return SimpleNamespace(
        compress=zstandard.ZstdCompressor(level=level, write_checksum=True).compress,
        decompress=zstandard.ZstdDecompressor().decompress,
        size_of=zstandard.frame_content_size,
        error=zstandard.ZstdError,
    )


def _make_own_codec(level: int) -> Any:
    """Makes a codec of Python's own zstd, which Python 3.14 has."""
    try:
        from compression import zstd
    except ImportError as error:
        raise ImportError(EXTRA) from error
    options = {
        zstd.CompressionParameter.compression_level: level,
        zstd.CompressionParameter.checksum_flag: 1,
    }
    return SimpleNamespace(
        compress=lambda data: zstd.compress(data, options=options),
        decompress=lambda data, n_bytes: zstd.decompress(data),
        size_of=lambda data: zstd.get_frame_info(data).decompressed_size,
        error=zstd.ZstdError,
    )


def pack(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Packs the large columns of bytes among C-contiguous arrays (B, ...).

    Returns all arrays, and for the header what `unpack` needs to know of those that were packed.
    """
    found, packed = dict(arrays), dict[str, Any]()
    for name, array in arrays.items():
        if array.ndim < 2 or array.dtype.name not in DTYPES or not array.size or array[0].nbytes < LARGE:
            continue
        source = _source_of(name, arrays)
        pieces = [codec_of().compress(piece) for piece in _pieces(array, None if source is None else arrays[source])]
        found[name] = np.frombuffer(b"".join(pieces), np.uint8)
        sizes = [len(piece) for piece in pieces]
        packed[name] = {"dtype": array.dtype.name, "shape": list(array.shape), "sizes": sizes, "follows": source}
    return found, packed


def _source_of(name: str, arrays: Mapping[str, np.ndarray]) -> str | None:
    """Returns the column of which this one has the next observations.

    It has the same dtype and shape.
    """
    before, is_next, rest = name.rpartition(NEXT)
    source = f"{before}{NOW}{rest}"
    if not is_next or (before and not before.endswith("/")) or source not in arrays:
        return None
    mine, its = arrays[name], arrays[source]
    return source if (mine.dtype, mine.shape) == (its.dtype, its.shape) else None


def _pieces(array: np.ndarray, source: np.ndarray | None) -> Iterator[memoryview]:
    """Yields the bytes of each entry (T, ...), in pieces."""
    for at in range(len(array)):
        rows = array[at].view(np.uint8)
        if source is not None:
            rows = rows.copy()
            rows[:-1] ^= source[at, 1:].view(np.uint8)
        data = memoryview(rows).cast("B")
        yield from (data[start : start + PIECE] for start in range(0, len(data), PIECE))


def unpack(arrays: Mapping[str, np.ndarray], packed: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns the arrays of a file, those unpacked that are packed.

    Args:
        arrays: as the file has them.
        packed: the result of `pack` for the header, as the file has it.

    Raises:
        ValueError, KeyError, TypeError: something is damaged.
        OutOfMemoryError: there is too little memory for what a column says that it holds.
    """
    found = dict(arrays)
    for name, about in sorted(packed.items(), key=lambda item: item[1]["follows"] is not None):
        found[name] = array = _unpack(name, arrays[name], about)
        if about["follows"] is not None:
            source = found[about["follows"]]
            if (source.dtype, source.shape) != (array.dtype, array.shape):
                raise ValueError(f"array {name!r} follows {about['follows']!r}, which is {source.dtype} {source.shape}")
            array.view(np.uint8)[:, :-1] ^= source.view(np.uint8)[:, 1:]
    return found


def _unpack(name: str, data: np.ndarray, about: Mapping[str, Any]) -> np.ndarray:
    dtype, shape, sizes = about["dtype"], about["shape"], about["sizes"]
    if dtype not in DTYPES or not 2 <= len(shape) <= MOST_AXES or not all(map(is_size, [*shape, *sizes])):
        raise ValueError(f"array {name!r} is packed as {clean_text(dtype)} {clean_text(shape)}")
    n_bytes, codec = math.prod(shape[1:]), codec_of()
    if data.shape != (sum(sizes),) or len(sizes) != shape[0] * -(-n_bytes // PIECE):
        raise ValueError(f"array {name!r} is packed as {data.shape} bytes in {len(sizes)} pieces")
    pieces = [data.data[end - n : end] for n, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
    lengths = shape[0] * [min(PIECE, n_bytes - start) for start in range(0, n_bytes, PIECE)]
    try:
        if [codec.size_of(piece) for piece in pieces] != lengths:
            raise ValueError(f"the pieces of array {name!r} hold other numbers of bytes")
        if (available := available_bytes()) is not None and sum(lengths) > available:
            text = f"{sum(lengths):,} bytes are needed for array {name!r}, {available:,} are available"
            raise OutOfMemoryError(text)
        found = np.empty(sum(lengths), np.uint8)
        for piece, n, end in zip(pieces, lengths, itertools.accumulate(lengths), strict=True):
            found[end - n : end] = np.frombuffer(codec.decompress(piece, n), np.uint8)
    except codec.error as error:
        raise ValueError(f"array {name!r} is packed, and does not unpack: {error}") from error
    if dtype == "bool" and found.max(initial=0) > 1:
        raise ValueError(f"{name}: it holds bools that are neither true nor false")
    return np.asarray(found.view(dtype).reshape(shape))
