"""Files that skrl's own memories wrote: named tensors, and nothing of the cursor.

Which rows are valid follows from them. A .csv has only those. The others have all rows, of which skrl fills those that
were never written with NaN where they are floats: valid are all up to the last one with another number. Of a memory
that was full it is not known which row is the oldest: the first one in the file is taken for it.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from rlstructs.checks import clean_text
from rlstructs.errors import FileError, OutOfMemoryError
from rlstructs.files.archives import READERS, Archive
from rlstructs.files.opening import open_file
from rlstructs.memories import csv_files
from rlstructs.memories.names import check_name
from rlstructs.memories.restoring import dtype_of
from rlstructs.memories.tensors import spec_of
from rlstructs.replay.columns import Spec
from rlstructs.replay.values import from_bits

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
            specs = _specs_in(memory, path, archive)
        except (FileError, OutOfMemoryError):
            raise
        except Exception as error:  # whatever it holds
            raise FileError(f"{path}: not a file of tensors, or a damaged one: {clean_text(error)}") from error
        columns = _begin(memory, path, specs)
        for name in specs:
            columns.read_into(name, partial(archive.read_into, name))
    _end(memory, _count_rows(memory, specs))


def _specs_in(memory: Memory, path: Path, archive: Archive) -> dict[str, Spec]:
    """The specs of the tensors in an archive, which fit those that there are."""
    specs, sizes = {}, (memory.memory_size, memory.num_envs)
    for name in archive.names():
        dtype, shape = archive.spec_of(name)
        if shape[:2] != sizes:
            raise FileError(f"{path}: tensor {name!r} has shape {shape}, this memory has {sizes} rows and environments")
        check_name(name)
        known = memory._spec(name) if name in memory._dtypes else None
        own = spec_of(memory.framework, dtype_of(memory, name, dtype.name), shape[2:]) if known is None else known
        if (own.dtype, own.shape) != (dtype, shape[2:]):
            raise FileError(f"{path}: tensor {name!r} is {dtype} {shape[2:]}, in this memory {own.dtype} {own.shape}")
        specs[name] = own
    _check_names(memory, path, specs)
    if not specs:
        raise ValueError("it holds no tensor")
    return specs


def _check_names(memory: Memory, path: Path, found: Mapping[str, Any]) -> None:
    if missing := sorted(set(memory._dtypes) - set(found)):
        raise FileError(clean_text(f"{path}: has no tensor(s) {missing}, it has {sorted(found)}"))


def _begin(memory: Memory, path: Path, specs: Mapping[str, Spec]) -> Any:
    """Makes the tensors that a memory lacks, drops its rows, and gives its columns to be written to."""
    missing = [name for name in specs if name not in memory._dtypes]
    memory._check_room(str(path), [specs[name] for name in missing])
    for name in missing:
        dtype = "bfloat16" if specs[name].is_bfloat16 else specs[name].dtype.name
        memory._plan_tensor(name, dtype_of(memory, name, dtype), specs[name].shape)
    columns = memory._store().columns
    memory.reset()
    return columns


def _count_rows(memory: Memory, specs: Mapping[str, Spec]) -> int:
    """How many rows by flat index are valid: up to the last one that is not NaN in all floats."""
    columns, n = memory._storage.columns, memory.memory_size * memory.num_envs
    floats = [name for name, spec in specs.items() if spec.dtype.kind == "f" or spec.is_bfloat16]
    if not floats:
        return n
    written = np.zeros(n, bool)
    for name in floats:
        values = columns.host(name, columns.gather([name], np.arange(n))[0])
        values = from_bits(values) if specs[name].is_bfloat16 else values
        written |= ~np.isnan(values).all(axis=tuple(range(1, values.ndim)))
    return int(np.flatnonzero(written).max(initial=-1)) + 1


def _end(memory: Memory, n_rows: int) -> None:
    """Takes the first rows by flat index for those that are there."""
    row, env = divmod(n_rows, memory.num_envs)
    is_full = row == memory.memory_size
    memory._set_cursor(is_full, 0 if is_full else row, env)


def load_csv(memory: Memory, path: Path) -> None:
    """Restores a memory from a `.csv` file, which has the valid rows in the order of flat indexes.

    Raises:
        ValueError, FileError, OutOfMemoryError: it is none, or does not fit; nothing changes.
    """
    with open_file(path) as raw, io.TextIOWrapper(io.BufferedReader(raw), encoding="utf-8", newline="") as file:  # type: ignore[type-var]
        sizes = _read_names(file)
        _check_names(memory, path, sizes)
        specs, tensors = _read_rows(memory, file, sizes)
    columns = _begin(memory, path, specs)
    n_rows = len(next(iter(tensors.values())))
    for name, values in tensors.items():
        columns.put_rows(name, np.arange(n_rows), columns.converted(name, values, specs[name]))
    _end(memory, n_rows)


def _read_names(file: IO[str]) -> dict[str, int]:
    """Name -> numbers per row of each tensor, from the first line: `a.0,a.1,b.0`."""
    line = file.readline(LONGEST_HEADER)
    sizes: dict[str, int] = {}
    for column in next(csv.reader([line]), []):
        name, _, number = column.rpartition(".")
        if number != str(sizes.get(name, 0)) or (name in sizes and name != next(reversed(sizes))):
            raise ValueError(f"its first line does not name columns of tensors: {clean_text(repr(column))}")
        check_name(name)
        sizes[name] = sizes.get(name, 0) + 1
    if not sizes or not line.endswith("\n"):
        raise ValueError("its first line does not name columns of tensors")
    return sizes


def _read_rows(memory: Memory, file: IO[str], sizes: Mapping[str, int]) -> tuple[dict[str, Spec], dict[str, Any]]:
    """The specs and rows of the tensors, `(n, *shape)`, from all lines but the first."""
    n, most = sum(sizes.values()), memory.memory_size * memory.num_envs
    specs: dict[str, Spec] = {}
    parts: dict[str, list[np.ndarray]] = {name: [] for name in sizes}
    at_once, n_rows = max(1, csv_files.CELLS_AT_ONCE // n), 0
    while lines := csv_files.read_lines(file, n, at_once):
        n_rows += len(lines)
        if n_rows > most:
            raise ValueError(f"it has more than the {most} rows that there is room for")
        at = 0
        for name, size in sizes.items():
            cells = [line[at : at + size] for line in lines]
            spec = specs.setdefault(name, _spec(memory, name, cells[0]))
            parts[name].append(csv_files.parse(name, cells, spec).reshape(len(lines), *spec.shape))
            at += size
    if not n_rows:
        raise ValueError("it has no rows, and so does not say what its tensors hold")
    return specs, {name: np.concatenate(arrays) for name, arrays in parts.items()}


def _spec(memory: Memory, name: str, cells: list[str]) -> Spec:
    """The spec of a tensor of this name, or of a new one by the first row of its numbers."""
    if name in memory._dtypes:
        known = memory._spec(name)
        if int(np.prod(known.shape, dtype=int)) != len(cells):
            raise ValueError(f"tensor {name!r} has {len(cells)} numbers per row, in this memory rows {known.shape}")
        return known
    if set(cells) <= {"True", "False"}:
        dtype = dtype_of(memory, name, "bool")
    elif all(map(WHOLE.fullmatch, cells)):
        dtype = dtype_of(memory, name, "int64")
    else:
        dtype = memory.framework.dtype(None)
    return spec_of(memory.framework, dtype, (len(cells),))
