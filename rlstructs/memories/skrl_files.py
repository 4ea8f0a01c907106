"""Files that skrl's own memories wrote: named tensors without a cursor.

A .csv holds the valid rows only. The other formats hold all rows; skrl fills the unwritten rows of float tensors with
NaN, so the rows up to the last one with another number are valid. A full memory does not say which of its rows is the
oldest: the first row of the file is taken as the oldest.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from rlstructs.checks import clean_text
from rlstructs.errors import FileError
from rlstructs.files.archives import Archive
from rlstructs.files.opening import name_damage, open_file
from rlstructs.memories import csv_files
from rlstructs.memories.restoring import RowsReader, check_complete, check_tensors, find_dtype, refill
from rlstructs.memories.tensors import Tensors
from rlstructs.replay.rows.columns import Spec

if TYPE_CHECKING:
    from rlstructs.memories.memory import Memory

WHOLE = re.compile(r"[+-]?\d+")
# The most characters of the first line of a .csv, which names the columns.
LONGEST_HEADER = 1 << 20


def load(memory: Memory, path: Path, archive: Archive) -> None:
    """Restores a memory from a `.pt` or `.npz` file of plain tensors, without a header of ours.

    Raises:
        FileError, OutOfMemoryError: it does not fit; nothing changes.
    """
    with name_damage(f"{path}: not a file of tensors, or a damaged one"):
        archive.verify()
        specs = check_tensors(memory._tensors, path, _list_tensors(memory._tensors, path, archive))
        refill(memory, path, specs, archive)
    _set_valid_rows(memory, _count_rows(memory._tensors, specs))


def _list_tensors(tensors: Tensors, path: Path, archive: Archive) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Lists the tensors in an archive: name -> dtype by name, and shape of a row."""
    found = {}
    for name in archive.names():
        dtype, shape = archive.spec_of(name)
        if shape[:2] != tensors.lead:
            have = f"{tensors.lead} rows and environments"
            raise FileError(f"{path}: tensor {name!r} has shape {shape}, this memory has {have}")
        is_bfloat16 = name in tensors.dtypes and tensors.spec_of(name).is_bfloat16  # int16 in the archive
        found[name] = "bfloat16" if is_bfloat16 and dtype == np.int16 else dtype.name, shape[2:]
    if not found and not tensors.dtypes:
        raise ValueError("it holds no tensor")
    return found


def _count_rows(tensors: Tensors, specs: Mapping[str, Spec]) -> int:
    """Counts the rows by flat index up to the last one that is not NaN in all floats."""
    n = tensors.storage.columns.n_rows
    floats = [name for name, spec in specs.items() if spec.dtype.kind == "f" or spec.is_bfloat16]
    if not floats:
        return n
    written = np.zeros(n, bool)
    for name in floats:
        values = tensors.read_numbers(name, np.arange(n))
        written |= ~np.isnan(values).all(axis=tuple(range(1, values.ndim)))
    return int(np.flatnonzero(written).max(initial=-1)) + 1


def _set_valid_rows(memory: Memory, n_rows: int) -> None:
    """Makes the first rows by flat index the valid ones."""
    row, env = divmod(n_rows, memory.num_envs)
    memory._tensors.set_cursor(is_full=row == memory.memory_size, row=row % memory.memory_size, env=env)


def load_csv(memory: Memory, path: Path) -> None:
    """Restores a memory from a `.csv` file of valid rows in the order of flat indexes.

    Raises:
        ValueError, FileError, OutOfMemoryError: the file is no such file or does not fit; nothing changes.
    """
    with open_file(path) as raw, io.TextIOWrapper(io.BufferedReader(raw), encoding="utf-8", newline="") as file:  # type: ignore[type-var]
        tensors, sizes = memory._tensors, _read_names(file)
        check_complete(tensors, path, sizes)
        most, find_spec = tensors.storage.columns.n_rows, partial(_choose_spec, tensors)
        n_rows, specs, found = csv_files.read_rows(file, sizes, most, find_spec)
    if not n_rows:  # it does not say what its tensors hold: those that there are stay, and none is created
        specs = {name: _choose_spec(tensors, name, [""] * n) for name, n in sizes.items() if name in tensors.dtypes}
    refill(memory, path, specs, RowsReader(tensors, specs, np.arange(n_rows), found, {}))
    _set_valid_rows(memory, n_rows)


def _read_names(file: IO[str]) -> dict[str, int]:
    """Name -> numbers per row of each tensor, from the first line: `a.0,a.1,b.0`."""
    line = file.readline(LONGEST_HEADER)
    sizes: dict[str, int] = {}
    for column in next(csv.reader([line]), []):
        name, _, number = column.rpartition(".")
        if number != str(sizes.get(name, 0)) or (name in sizes and name != next(reversed(sizes))):
            raise ValueError(f"its first line does not name columns of tensors: {clean_text(repr(column))}")
        sizes[name] = sizes.get(name, 0) + 1
    if not sizes or not line.endswith("\n"):
        raise ValueError("its first line does not name columns of tensors")
    return sizes


def _choose_spec(tensors: Tensors, name: str, cells: list[str]) -> Spec:
    """Returns the spec of a tensor; a new one gets its dtype from its first row."""
    if name in tensors.dtypes:
        known = tensors.spec_of(name)
        if math.prod(known.shape) != len(cells):
            raise ValueError(f"tensor {name!r} has {len(cells)} numbers per row, in this memory rows {known.shape}")
        return known
    dtype = "bool" if set(cells) <= {"True", "False"} else "int64" if all(map(WHOLE.fullmatch, cells)) else None
    named = tensors.convert_dtype(name, None) if dtype is None else find_dtype(tensors, name, dtype)
    return tensors.make_spec(named, (len(cells),))
