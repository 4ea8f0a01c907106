"""Files that skrl's own memories wrote: named tensors, and nothing of the cursor.

Which rows are valid follows from them. A .csv has only those. The others have all rows, of which skrl fills those that
were never written with NaN where they are floats: valid are all up to the last one with another number. Of a memory
that was full it is not known which row is the oldest: the first one in the file is taken for it.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from rlstructs.checks import clean_text
from rlstructs.errors import FileError, OutOfMemoryError
from rlstructs.files.archives import READERS, Archive
from rlstructs.files.opening import open_file
from rlstructs.memories import csv_files
from rlstructs.memories.restoring import check_complete, check_tensors, dtype_of, fill, put
from rlstructs.memories.tensors import Tensors
from rlstructs.replay.columns import Spec

if TYPE_CHECKING:
    from rlstructs.memories.memory import Memory

WHOLE = re.compile(r"[+-]?\d+")
# Characters of the first line of a .csv: the names of its columns.
LONGEST_HEADER = 1 << 20


def is_one(path: Path) -> bool:
    """Whether a `.pt` or `.npz` file holds plain tensors without a header of ours."""
    try:
        with READERS[path.suffix](path) as archive:
            return not archive.text
    except Exception:  # whatever it holds: who reads it as one of ours says what is wrong
        return False


def load(memory: Memory, path: Path) -> None:
    """Restores a memory from a `.pt` or `.npz` file.

    Raises:
        FileError, OutOfMemoryError: it does not fit; nothing changes.
    """
    with READERS[path.suffix](path) as archive:
        try:
            archive.verify()
            specs = check_tensors(memory._tensors, path, _tensors_in(memory._tensors, path, archive))
            fill(memory, path, specs, archive)
        except (FileError, OutOfMemoryError):
            raise
        except Exception as error:  # whatever it holds
            raise FileError(f"{path}: not a file of tensors, or a damaged one: {clean_text(error)}") from error
    _end(memory, _count_rows(memory._tensors, specs))


def _tensors_in(tensors: Tensors, path: Path, archive: Archive) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> name of the dtype, and shape of a row, of the tensors in an archive."""
    found = {}
    for name in archive.names():
        dtype, shape = archive.spec_of(name)
        if shape[:2] != tensors.lead:
            have = f"{tensors.lead} rows and environments"
            raise FileError(f"{path}: tensor {name!r} has shape {shape}, this memory has {have}")
        is_bfloat16 = name in tensors.dtypes and tensors.spec(name).is_bfloat16  # the archive has its bits
        found[name] = "bfloat16" if is_bfloat16 and dtype == np.int16 else dtype.name, shape[2:]
    if not found and not tensors.dtypes:
        raise ValueError("it holds no tensor")
    return found


def _count_rows(tensors: Tensors, specs: Mapping[str, Spec]) -> int:
    """Counts the valid rows by flat index: up to the last one that is not NaN in all floats."""
    n = tensors.storage.columns.n_rows
    floats = [name for name, spec in specs.items() if spec.dtype.kind == "f" or spec.is_bfloat16]
    if not floats:
        return n
    written = np.zeros(n, bool)
    for name in floats:
        values = tensors.numbers_at(name, np.arange(n))
        written |= ~np.isnan(values).all(axis=tuple(range(1, values.ndim)))
    return int(np.flatnonzero(written).max(initial=-1)) + 1


def _end(memory: Memory, n_rows: int) -> None:
    """Makes the first rows by flat index the valid ones."""
    row, env = divmod(n_rows, memory.num_envs)
    is_full = row == memory.memory_size
    memory._tensors.set_cursor(is_full=is_full, row=0 if is_full else row, env=env)


def load_csv(memory: Memory, path: Path) -> None:
    """Restores a memory from a `.csv` file, which has the valid rows in the order of flat indexes.

    Raises:
        ValueError, FileError, OutOfMemoryError: it is none, or does not fit; nothing changes.
    """
    with open_file(path) as raw, io.TextIOWrapper(io.BufferedReader(raw), encoding="utf-8", newline="") as file:  # type: ignore[type-var]
        tensors, sizes = memory._tensors, _read_names(file)
        check_complete(tensors, path, sizes)
        specs: dict[str, Spec] = {}

        def find_spec(name: str, cells: list[str]) -> Spec:
            if name not in specs:
                specs[name] = _choose_spec(tensors, name, cells)
            return specs[name]

        n_rows, found = csv_files.read_rows(file, sizes, tensors.storage.columns.n_rows, find_spec)
    if not n_rows:
        raise ValueError("it has no rows, and so does not say what its tensors hold")
    put(memory, path, specs, np.arange(n_rows), found)
    _end(memory, n_rows)


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
    """The spec of a tensor of this name, or of a new one by the first row of its numbers."""
    if name in tensors.dtypes:
        known = tensors.spec(name)
        if math.prod(known.shape) != len(cells):
            raise ValueError(f"tensor {name!r} has {len(cells)} numbers per row, in this memory rows {known.shape}")
        return known
    dtype = "bool" if set(cells) <= {"True", "False"} else "int64" if all(map(WHOLE.fullmatch, cells)) else None
    named = tensors.dtype(name, None) if dtype is None else dtype_of(tensors, name, dtype)
    return tensors.new_spec(named, (len(cells),))
