"""Records: small columns side by side in memory.

A draw reads a row of all of them in one place. A column alone in memory costs a draw a cache miss for each row; a
record costs one or two for all of its columns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from rlstructs.replay.rows.backing import Block
from rlstructs.replay.rows.spec import Spec

# Columns with rows of so many bytes have memory of their own: a draw of one of them reads only its own bytes.
# Linked columns, whose rows are at least as long, are never in a record.
LARGE = 256
# The most bytes of a record, and the most padding in it, as a share of its columns.
MOST, MOST_PADDING = 1024, 0.1
# Bytes from which on records pay. Smaller columns stay in a core's caches, where a draw from separate columns is twice
# as quick; and they are often read as a whole, for which separate columns are best.
LEAST_RECORDS = 1 << 25
# The same for stores of so many lanes whose rows for one step lie together: their writes lose what draws gain.
MANY_LANES = 1024
# The most records that are taken at once, so that they are still in a core's cache when columns are cut from them.
AT_ONCE = 2048
# The longest numbers in a record, in bytes: others, of 16 bytes, torch cannot view at every multiple of 8.
LONGEST = 8


def group_columns(specs: Mapping[str, Spec]) -> list[dict[str, Spec]]:
    """Finds groups of two or more columns to store together.

    Longer numbers come first in a group, so that all are aligned.
    """
    small = [name for name, spec in specs.items() if _is_small(spec)]
    small.sort(key=lambda name: -specs[name].dtype.itemsize)
    groups = []
    while small:
        n = _count_fitting([specs[name] for name in small])
        groups.append({name: specs[name] for name in small[:n]})
        small = small[n:]
    return [group for group in groups if len(group) > 1]


def _count_fitting(specs: Sequence[Spec]) -> int:
    """Counts the columns, from the first on, that fit one record.

    They must not waste too much memory.
    """
    best, n_bytes, longest = 1, 0, specs[0].dtype.itemsize
    for n, spec in enumerate(specs, 1):
        n_bytes += spec.nbytes
        if n_bytes > MOST:
            break
        if -n_bytes % longest <= MOST_PADDING * n_bytes:
            best = n
    return best


def _is_small(spec: Spec) -> bool:
    return not spec.is_object and 0 < spec.nbytes < LARGE and spec.dtype.itemsize <= LONGEST


def row_dtype(spec: Spec) -> np.dtype:
    """Returns the dtype of a row as one item.

    It is the dtype of its number, or of a piece of memory.
    """
    return spec.dtype if spec.nbytes == spec.dtype.itemsize else np.dtype((np.void, spec.nbytes))


def width_of(specs: Collection[Spec]) -> int:
    """Returns the bytes of a record of these columns.

    They are filled up so that the numbers of all rows are aligned.
    """
    longest = max(spec.dtype.itemsize for spec in specs)
    return -(-sum(spec.nbytes for spec in specs) // longest) * longest


class Record:
    """The memory of some columns.

    Args:
        specs: name -> spec, a group of `group_columns`.
        n_rows: number of rows.
        allocate: allocates so many zeroed bytes.

    Attributes:
        offsets: name -> bytes before a column in a row.
        width: bytes per row.
        block: the memory.
    """

    def __init__(self, specs: Mapping[str, Spec], n_rows: int, allocate: Callable[[int], Block]) -> None:
        self.specs, self.n_rows, self.width = dict(specs), n_rows, width_of(specs.values())
        ends = np.cumsum([spec.nbytes for spec in specs.values()]).tolist()
        self.offsets = dict(zip(specs, [0, *ends[:-1]], strict=True))
        self.block = allocate(self.width * n_rows)
        self._map()

    def _map(self) -> None:
        self._bytes = self.block.bytes()
        self._whole = self._bytes.view(np.dtype((np.void, self.width)))
        # Records that `gather` may write to; a thread that uses one removes it meanwhile.
        self._spare: list[_Taken] = []

    def bytes(self) -> np.ndarray:
        """Returns the memory itself, uint8 (n_rows * width,)."""
        return self._bytes

    def rows_of(self, name: str) -> np.ndarray:
        """Views a column, `(n_rows, *shape)`, never contiguous.

        numpy's `take` would copy all of it.
        """
        spec = self.specs[name]
        strides = (self.width, *np.empty(spec.shape, spec.dtype).strides)
        return np.ndarray((self.n_rows, *spec.shape), spec.dtype, self._bytes, self.offsets[name], strides)

    def items_of(self, name: str) -> np.ndarray:
        """Views a column, `(n_rows,)`, as one item per row.

        An item is a number, or a piece of memory; numpy indexes them quickly.
        """
        return self._items_in(self._bytes, self.n_rows, name)

    def _items_in(self, memory: np.ndarray, n: int, name: str) -> np.ndarray:
        return np.ndarray((n,), row_dtype(self.specs[name]), memory, self.offsets[name], (self.width,))

    def gather(self, names: Sequence[str], rows: np.ndarray) -> list[np.ndarray]:
        """Copies rows (n,) of some columns, `(n,)` each.

        They have the dtypes of `items_of`.
        """
        n = rows.size
        try:
            spare = self._spare.pop()
        except IndexError:
            spare = None
        if spare is None or spare.n < min(n, AT_ONCE):
            spare = _Taken(self, min(max(n, 256), AT_ONCE))
        whole, items = spare.whole, spare.items
        if n <= spare.n:
            if n < spare.n:  # seldom: a program draws batches of one size
                whole, items = whole[:n], {name: items[name][:n] for name in names}
            self._whole.take(rows, mode="clip", out=whole)
            found = [items[name].copy() for name in names]
        else:
            found = [np.empty(n, items[name].dtype) for name in names]
            for start in range(0, n, spare.n):
                some = rows[start : start + spare.n]
                self._whole.take(some, mode="clip", out=whole[: some.size])
                for name, values in zip(names, found, strict=True):
                    values[start : start + some.size] = items[name][: some.size]
        self._spare.append(spare)
        return found

    def moved(self, allocate: Callable[[int], Block]) -> Record:
        """Copies the record to other memory."""
        copy = Record(self.specs, self.n_rows, allocate)
        copy._bytes[...] = self._bytes
        return copy

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_bytes", "_whole", "_spare")}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._map()


class _Taken:
    """Private memory for records, and views of their columns.

    Making these takes longer than copying records.

    Args:
        record: whose columns.
        n: number of rows.
    """

    def __init__(self, record: Record, n: int) -> None:
        self.n, memory = n, np.empty(n * record.width, np.uint8)
        self.whole = memory.view(np.dtype((np.void, record.width)))
        self.items = {name: record._items_in(memory, n, name) for name in record.specs}


class Gathering:
    """The plan to gather some columns.

    It is kept, because it depends on their names alone.

    Args:
        names: of the columns.
        flat: name -> (n_rows, *shape).
        records: name -> record of the columns that are in one.
    """

    def __init__(self, names: tuple[str, ...], flat: Mapping[str, np.ndarray], records: Mapping[str, Record]) -> None:
        self._n = len(names)
        self._own = [(at, flat[name]) for at, name in enumerate(names) if name not in records]
        # The record; the place in the result and the row's dtype of each column; and the column if it is the only one.
        self._records: list[tuple[Record, list[str], list[tuple[int, np.dtype]], np.ndarray | None]] = []
        for record in {id(records[name]): records[name] for name in names if name in records}.values():
            inside = [(at, name) for at, name in enumerate(names) if records.get(name) is record]
            alone = record.items_of(inside[0][1]) if len(inside) == 1 else None
            wanted = [(at, np.dtype((record.specs[name].dtype, record.specs[name].shape))) for at, name in inside]
            self._records.append((record, [name for _, name in inside], wanted, alone))

    def __call__(self, rows: np.ndarray) -> list[Any]:
        """Copies rows, `(*rows.shape, *shape)` each, contiguous."""
        if not rows.ndim:
            return [values[0] for values in self(rows.reshape(1))]
        # mode="clip" skips numpy's check of the indices; row ids are in range.
        found: list[Any] = [None] * self._n
        for at, values in self._own:
            found[at] = values.take(rows, axis=0, mode="clip")
        lead, index = rows.shape, rows if rows.ndim == 1 else rows.reshape(-1)
        for record, names, wanted, alone in self._records:
            gathered = record.gather(names, index) if alone is None else [alone[index]]
            for (at, dtype), values in zip(wanted, gathered, strict=True):
                rows_of = values.view(dtype)
                found[at] = rows_of if len(lead) == 1 else rows_of.reshape(lead + rows_of.shape[1:])
        return found


def as_items(value: Any, dtype: np.dtype) -> np.ndarray | None:
    """Views rows (n, ...) as n items; None if that is impossible.

    An item is a number, or a piece of memory; numpy stores these far more quickly.
    """
    if type(value) is not np.ndarray or not (value.ndim and value.flags.c_contiguous and dtype.itemsize):
        return None
    items = value.reshape(-1)
    return items.view(dtype) if dtype.kind == "V" else items
