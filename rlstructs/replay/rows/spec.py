"""`Spec`: the dtype and shape of a column; `Compression`: which columns are compressed.

Also dtypes that hold values of a column and new ones, and casts that lose no value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlstructs.checks import check_size
from rlstructs.debug import is_on, poison
from rlstructs.errors import SpecError
from rlstructs.files.zstd import DEFAULT_LEVEL, codec_of
from rlstructs.replay.rows.objects import OBJECT
from rlstructs.workers.public_names import set_module

# numpy's kinds of numbers; those of a higher rank hold those of a lower one.
RANKS = {"b": 0, "u": 1, "i": 1, "f": 2, "c": 3}
# The bits of NaN in bfloat16, which numpy lacks: such columns hold int16.
BFLOAT16_NAN = 0x7FC0
# Bytes of a row from which on a column of uint8 or bool is compressed unless the program names columns, from which on
# any column can be, and up to which.
LARGE, LEAST, MOST = 512, 64, (1 << 23) - 1


@dataclass(frozen=True)
class Spec:
    """The type of a column's rows.

    Attributes:
        dtype: numpy's; object for rows that are Python objects, whose shape is ().
        shape: of one row.
        fill: the value of rows that are written without this column; None for the default, see `unwritten`.
        is_bfloat16: whether the rows, int16, are the bits of bfloat16.
    """

    dtype: np.dtype
    shape: tuple[int, ...] = ()
    fill: Any = None
    is_bfloat16: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_object(self) -> bool:
        """Whether rows are Python objects."""
        return bool(self.dtype == OBJECT)

    @property
    def unwritten(self) -> Any:
        """The value of unwritten rows.

        It is `fill`, or NaN for floats and zero for others; in debug mode poison.
        """
        if self.fill is not None or self.is_object:
            return self.fill
        return self.poison if is_on() or self.is_bfloat16 or self.dtype.kind in "fc" else 0

    @property
    def poison(self) -> Any:
        """The value of rows that must not be read."""
        if self.is_object:
            return None
        return BFLOAT16_NAN if self.is_bfloat16 else poison(self.dtype)


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


def widened(old: np.ndarray, new: np.ndarray, dtype: np.dtype) -> np.dtype | None:
    """Returns a dtype that holds old and new values.

    None if no dtype of numbers does.

    Args:
        old: the values of a column.
        new: the values to write.
        dtype: of the column.

    Example:
        >>> widened(np.array([3]), np.array([0.5]), np.dtype(np.int64))
        dtype('float64')
    """
    return next((wide for wide in _candidates(dtype, new.dtype) if is_exact(old, wide) and is_exact(new, wide)), None)


def _candidates(dtype: np.dtype, new: np.dtype) -> Iterator[np.dtype]:
    """Yields dtypes to try: the old one, then others, the narrowest first."""
    here, there = RANKS[dtype.kind], RANKS[new.kind]
    if there < here or (there == here and (here < 2 or new.itemsize <= dtype.itemsize)):
        yield dtype
    both = np.promote_types(dtype, new)
    if not is_too_wide(both) and not (here == there == 1 and both.kind == "f"):
        yield both
    if max(here, there) <= 1:
        yield from (np.dtype(np.int64), np.dtype(np.uint64))
    yield np.dtype(np.float64 if max(here, there) <= 2 else np.complex128)


def is_too_wide(dtype: np.dtype) -> bool:
    """Whether a dtype is longer than those of other libraries, such as float128."""
    return bool(dtype.itemsize > (16 if dtype.kind == "c" else 8))


def is_exact(values: np.ndarray, dtype: np.dtype) -> bool:
    """Whether a dtype of the same or a higher rank holds these numbers exactly."""
    kind = values.dtype.kind
    if not values.size or kind == "b" or values.dtype == dtype:
        return True
    if kind in "iu":
        low, high = int(values.min()), int(values.max())
        if dtype.kind in "iu":
            return bool(np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max)
        whole = 2 ** (np.finfo(dtype).nmant + 1)
        return bool(-whole <= low and high <= whole and high <= np.finfo(dtype).max and low >= np.finfo(dtype).min)
    if kind == "f" and dtype.kind == "c":
        dtype = np.empty(0, dtype).real.dtype
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.array_equal(values.astype(dtype).astype(values.dtype), values, equal_nan=True))


def cast(name: str, values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Converts values to another dtype; only the precision of floats may be lost.

    Raises:
        SpecError: values would change in other ways.
    """
    whole = "biu"
    if np.can_cast(values.dtype, dtype, "safe"):
        return values.astype(dtype)
    if not (values.dtype.kind in whole and dtype.kind in whole) and not np.can_cast(values.dtype, dtype, "same_kind"):
        raise SpecError(f"{name!r} is {values.dtype}, which would lose its values as {dtype}; convert it first")
    with np.errstate(over="ignore", invalid="ignore"):
        converted = values.astype(dtype)
        if values.dtype.kind == dtype.kind == "f" and np.isfinite(converted).all():
            return converted
        real = converted if values.dtype.kind == "c" else converted.real
        back = real.astype(values.dtype)  # numpy would compare an int with a float as floats
    if values.dtype.kind in whole:
        fit = np.array_equal(back, values) and (dtype.kind not in whole or np.array_equal(converted, values))
    else:
        fit = np.array_equal(np.isfinite(converted), np.isfinite(values))
    if not fit:
        raise SpecError(f"{name!r} holds {values.dtype} values that do not fit {dtype}")
    return converted
