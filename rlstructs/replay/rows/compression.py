"""Says which columns are compressed, and checks rows that files have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlstructs.checks import check_size
from rlstructs.errors import SpecError
from rlstructs.files.zstd import DEFAULT_LEVEL, codec_of
from rlstructs.replay.rows.spec import Spec
from rlstructs.workers.public_names import set_module

# Bytes of a row from which on a column of uint8 or bool is compressed unless the program names columns, from which on
# any column can be, and up to which.
LARGE, LEAST, MOST = 512, 64, (1 << 23) - 1


@set_module("rlstructs.replay")
class Compression:
    """Says which columns are compressed, and how many bytes they may take.

    It is given to any memory or buffer as `compression`, where a plain setting will do without a limit.

    Args:
        setting: "zstd", "zstd:LEVEL" with a level from 1, quick, to 22, small, or column -> one of these or None;
            unless they are named, columns of uint8 and bool with rows of 512 bytes or more are compressed. None for
            none.
        max_bytes: that the compressed rows of a column take at most, in equal parts for each environment; None for no
            limit. Where they are used up, the oldest rows of the environment leave, as if the memory were smaller.

    Raises:
        TypeError, SpecError: an argument is another.
        ImportError: there is no zstd.

    Example:
        >>> Compression("zstd:1", max_bytes=4_000_000_000)
        Compression('zstd:1', max_bytes=4000000000)
    """

    def __init__(self, setting: str | Mapping[str, str | None] | None = "zstd", max_bytes: int | None = None) -> None:
        self._setting = dict(setting) if isinstance(setting, Mapping) else setting
        self.max_bytes = None if max_bytes is None else check_size("max_bytes", max_bytes)
        if isinstance(setting, Mapping):
            self._levels = {name: None if each is None else _level(each) for name, each in setting.items()}
            self._level = None
        else:
            self._levels, self._level = {}, None if setting is None else _level(setting)
        if setting is not None:
            codec_of(DEFAULT_LEVEL)  # raises if there is no zstd

    @classmethod
    def of(cls, setting: Setting) -> Compression:
        """Returns the compression for a program's setting, or for a result of `to_json`."""
        if isinstance(setting, Compression):
            return setting
        return cls(*setting) if isinstance(setting, list) else cls(setting)

    def to_json(self) -> Any:
        """Returns the setting in types of JSON, for `of`."""
        return self._setting if self.max_bytes is None else [self._setting, self.max_bytes]

    def __repr__(self) -> str:
        limit = "" if self.max_bytes is None else f", max_bytes={self.max_bytes}"
        return f"Compression({self._setting!r}{limit})"

    def level_of(self, name: str, spec: Spec) -> int | None:
        """Returns zstd's level for a column; None if it is not compressed.

        Raises:
            SpecError: the program names a column that cannot be compressed.
        """
        fits = not spec.is_object and LEAST <= spec.nbytes <= MOST
        if self._level is not None:
            return self._level if fits and spec.nbytes >= LARGE and spec.dtype.name in ("uint8", "bool") else None
        level = self._levels.get(name)
        if level is not None and not fits:
            rows = "objects" if spec.is_object else f"{spec.nbytes:,} bytes"
            raise SpecError(f"compression of {name!r}: its rows are {rows}, expected {LEAST} to {MOST:,} bytes")
        return level


# What a program says of compression.
Setting = str | Mapping[str, str | None] | Compression | None


def _level(setting: Any) -> int:
    method, _, level = setting.partition(":") if isinstance(setting, str) else ("", "", "")
    number = level.removeprefix("-")
    if method != "zstd" or (":" in setting and not (number.isdecimal() and -100 <= int(level) <= 22)):
        raise SpecError(
            f"compression must be None, 'zstd', 'zstd:LEVEL' or a mapping of columns to these, got {setting!r}"
        )
    return int(level) if level else DEFAULT_LEVEL


def check_row(name: str, row: int, data: bytes, spec: Spec, decodes: bool = True) -> bytes:
    """Returns the bytes of a row from its compressed ones.

    These come from a file.

    Args:
        name: of the column.
        row: its id.
        data: the compressed bytes, or as many as the row has.
        spec: of the column.
        decodes: whether to decode them; if not, only what they say of themselves is checked, and they are returned.

    Raises:
        ValueError: they are damaged.
    """
    codec = codec_of(DEFAULT_LEVEL)
    try:
        if len(data) == spec.nbytes:
            found = data
        elif codec.size_of(data) != spec.nbytes:
            raise ValueError(f"they hold {codec.size_of(data):,} bytes, expected {spec.nbytes:,}")
        else:
            found = codec.decompress(data, spec.nbytes) if decodes else data
        if spec.dtype == bool and max(found) > 1:
            raise ValueError("they hold bools that are neither true nor false")
    except (codec.error, ValueError) as error:
        raise ValueError(f"the compressed bytes of row {row} of {name!r} are damaged: {error}") from error
    return bytes(found)
