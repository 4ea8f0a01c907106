"""Records: small columns side by side, so that a draw reads a row in one place.

A column alone in memory costs a draw a cache miss for each row; a record costs one or two for all of its columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from rlstructs.replay.backing import Block
    from rlstructs.replay.columns import Spec

# Columns with rows of so many bytes have memory of their own: a draw of one of them reads what it needs and no more.
# Linked columns, whose rows are at least as long, are never in a record.
LARGE = 256
# The most bytes of a record.
MOST = 1024
# Rows of a record begin at multiples of this, and so do numbers of 8 bytes in it.
WORD = np.dtype(np.uint64)


def group_columns(specs: Mapping[str, Spec]) -> list[dict[str, Spec]]:
    """Finds out which columns to store together: two or more, longer numbers first, so that all are aligned."""
    small = [name for name, spec in specs.items() if _is_small(spec)]
    groups: list[dict[str, Spec]] = []
    n_bytes = MOST
    for name in sorted(small, key=lambda each: -specs[each].dtype.itemsize):
        if n_bytes + specs[name].nbytes > MOST:
            groups.append({})
            n_bytes = 0
        groups[-1][name] = specs[name]
        n_bytes += specs[name].nbytes
    return [group for group in groups if len(group) > 1]


def _is_small(spec: Spec) -> bool:
    return not spec.is_object and 0 < spec.nbytes < LARGE and spec.dtype.itemsize <= WORD.itemsize


def width_of(specs: Iterable[Spec]) -> int:
    """Bytes of a record of these columns."""
    return -(-sum(spec.nbytes for spec in specs) // WORD.itemsize) * WORD.itemsize


class Cut(NamedTuple):
    """Where the values of a column are in a record.

    Attributes:
        at: the first one, in multiples of its dtype's size.
        spec: of the column.
    """

    at: int
    spec: Spec

    @property
    def numbers(self) -> int | slice:
        """An index of the last axis of records that are viewed in this dtype."""
        return slice(self.at, self.at + self.spec.nbytes // self.spec.dtype.itemsize) if self.spec.shape else self.at


class Record:
    """The memory of some columns.

    Args:
        specs: name -> spec, as of `group_columns`.
        n_rows: number of rows.
        allocate: allocates so many zeroed bytes.

    Attributes:
        cuts: name -> where a column is.
        width: bytes per row.
        block: the memory.
    """

    def __init__(self, specs: Mapping[str, Spec], n_rows: int, allocate: Callable[[int], Block]) -> None:
        self.cuts: dict[str, Cut] = {}
        self.n_rows, self.width, offset = n_rows, width_of(specs.values()), 0
        for name, spec in specs.items():
            self.cuts[name] = Cut(offset // spec.dtype.itemsize, spec)
            offset += spec.nbytes
        self.block = allocate(self.width * n_rows)
        self._map()

    def _map(self) -> None:
        self._bytes = self.block.bytes()
        self.words: np.ndarray = self._bytes.view(WORD).reshape(self.n_rows, -1)

    def bytes(self) -> np.ndarray:
        """uint8 (n_rows * width,), the memory itself."""
        return self._bytes

    def offset(self, name: str) -> int:
        """Bytes before a column's first row."""
        at, spec = self.cuts[name]
        return at * spec.dtype.itemsize

    def rows_of(self, name: str) -> np.ndarray:
        """A view of a column, `(n_rows, *shape)`, never contiguous: numpy's `take` would copy all of it."""
        spec = self.cuts[name].spec
        strides = np.empty(spec.shape, spec.dtype).strides
        return np.ndarray(
            (self.n_rows, *spec.shape), spec.dtype, self._bytes, self.offset(name), (self.width, *strides)
        )

    def flat_values(self, name: str) -> tuple[np.ndarray, int, int]:
        """For a column of one number per row: the memory as an array (n,) of its dtype, its first row and step."""
        at, spec = self.cuts[name]
        return self._bytes.view(spec.dtype), at, self.width // spec.dtype.itemsize

    def moved(self, allocate: Callable[[int], Block]) -> Record:
        """A copy in other memory."""
        copy = Record({name: cut.spec for name, cut in self.cuts.items()}, self.n_rows, allocate)
        copy._bytes[...] = self._bytes
        return copy

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_bytes", "words")}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._map()


class Gathering:
    """How to gather some columns; kept, because it depends on their names alone.

    Args:
        names: of the columns.
        flat: name -> (n_rows, *shape).
        records: name -> record of the columns that are in one.
    """

    def __init__(self, names: tuple[str, ...], flat: Mapping[str, np.ndarray], records: Mapping[str, Record]) -> None:
        self._n = len(names)
        self._own = [(at, flat[name]) for at, name in enumerate(names) if name not in records]
        self._single: list[tuple[int, tuple[np.ndarray, int, int], tuple[int, ...]]] = []
        self._records: list[tuple[np.ndarray, list[tuple[Any, Any]]]] = []
        inside: dict[int, list[int]] = {}
        for at, name in enumerate(names):
            if name in records:
                inside.setdefault(id(records[name]), []).append(at)
        for positions in inside.values():
            self._add(records[names[positions[0]]], [(at, names[at]) for at in positions])

    def _add(self, record: Record, wanted: list[tuple[int, str]]) -> None:
        [(at, name), *others] = wanted
        spec = record.cuts[name].spec
        if not others and spec.nbytes == spec.dtype.itemsize:
            self._single.append((at, record.flat_values(name), spec.shape))
            return
        by_dtype: dict[np.dtype, list[Any]] = {}
        for at, name in wanted:
            cut = record.cuts[name]
            shape = cut.spec.shape if len(cut.spec.shape) > 1 else None
            by_dtype.setdefault(cut.spec.dtype, []).append((at, (..., cut.numbers), shape))
        self._records.append((record.words, list(by_dtype.items())))

    def __call__(self, rows: np.ndarray) -> list[Any]:
        """Copies of rows, `(*rows.shape, *shape)` each, contiguous."""
        if not rows.ndim:
            return [values[0] for values in self(rows.reshape(1))]
        # mode="clip" skips numpy's check of the indices; row ids are in range.
        found: list[Any] = [None] * self._n
        for at, values in self._own:
            found[at] = values.take(rows, axis=0, mode="clip")
        for at, (numbers, first, step), shape in self._single:
            found[at] = numbers.take(rows * step + first, mode="clip").reshape(*rows.shape, *shape)
        for words, dtypes in self._records:
            taken = words.take(rows, axis=0, mode="clip")
            for dtype, cuts in dtypes:
                view = taken.view(dtype)
                for at, index, shape in cuts:
                    values = view[index].copy()
                    found[at] = values if shape is None else values.reshape(*rows.shape, *shape)
        return found


class OnDemand:
    """A view that becomes a contiguous copy whenever numpy asks for an array.

    Args:
        view: the view.
    """

    def __init__(self, view: np.ndarray) -> None:
        self._view, self.dtype, self.shape = view, view.dtype, view.shape

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._view, dtype, order="C")
