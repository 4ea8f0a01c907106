"""Files of memories: `.pt`, `.npz` and `.csv`, ours and skrl's.

Ours as text are a .csv of the valid rows, and a .json of everything else.

Files that skrl's own memories wrote are named tensors without a cursor. A .csv holds the valid rows only. The other
formats hold all rows; skrl fills the unwritten rows of float tensors with NaN, so the rows up to the last one with
another number are valid. A full memory does not say which of its rows is the oldest: the first row of the file is taken
as the oldest.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
import zlib
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from rlstructs.checks import clean_text
from rlstructs.errors import FileError, OutOfMemoryError, SpecError
from rlstructs.files import layout
from rlstructs.files.archives import Archive, checksum
from rlstructs.files.opening import is_of_system, name_damage, open_file, parse_json, read_at, read_bytes, size_of
from rlstructs.memories.restoring import (
    BOOKKEEPING,
    KIND,
    RING_NAME,
    RowsReader,
    StoredTensors,
    check_complete,
    check_sizes,
    check_tensors,
    find_dtype,
    refill,
)
from rlstructs.memories.tensors import Tensors
from rlstructs.replay.draw.view import View
from rlstructs.replay.intake.arrays import to_bits
from rlstructs.replay.keep import saving
from rlstructs.replay.keep.checks import check_counters
from rlstructs.replay.rows.spec import Spec

FORMATS = ("pt", "npz", "csv")
# The most characters of a number; a complex number of 128 bits needs 50.
LONGEST_NUMBER = 100
# How many numbers are held as text at a time.
CELLS_AT_ONCE = 1 << 14
# Keys of the .json: the checksum of the .json without this entry, and that of the .csv.
CHECKSUM, ROWS_CHECKSUM = "crc32", "rows_crc32"
# Key and value of the .json that say that rows are in the order of flat indexes, as in skrl's files.
ORDER, STORED = "order", "stored"
WHOLE = re.compile(r"[+-]?\d+")
# The most characters of the first line of a .csv, which names the columns.
LONGEST_HEADER = 1 << 20


def check_format(name: Any) -> str:
    """Returns `name` if it is a file format.

    Raises:
        SpecError: it is not one.
    """
    if name not in FORMATS:
        raise SpecError(f"the format must be one of {FORMATS}, got {name!r}")
    return str(name)


def choose_file(memory: StoredTensors, given: str | Path, format: str | None) -> tuple[Path, str]:  # noqa: A002
    """Returns the path and format of the file to save.

    In a folder it is a new file.

    Raises:
        SpecError: the format is unknown, or differs from the file's ending.
    """
    path = Path(given)
    ending = path.suffix[1:]
    if path.is_dir() or ending not in (*FORMATS, "h5", "hdf5"):
        format = check_format("pt" if format is None else format)  # noqa: A001
        now = datetime.now().strftime("%y-%m-%d_%H-%M-%S-%f")
        return path / "memories" / f"{now}_memory_{hex(id(memory))}.{format}", format
    if check_format(ending if format is None else format) != ending:
        raise SpecError(f"{path}: the name ends in .{ending}, the format should be {format!r}; leave one of them out")
    return path, ending


def save(memory: StoredTensors, path: Path, format: str) -> Path:  # noqa: A002
    """Writes a memory to a file and returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if format == "csv":
        _save_csv(memory, path)
    else:
        saving.save(memory, path)
    return path


def load(memory: StoredTensors, path: Path) -> None:
    """Restores a memory from a file; changes nothing if the file does not fit."""
    if path.suffix == ".csv":
        _load_csv(memory, path)
        return
    if path.suffix[1:] not in FORMATS:
        raise FileError(f"{path}: the name must end in one of .{', .'.join(FORMATS)}")
    with layout.open_reader(path, foreign=True) as (reader, header):
        if not header:
            _load_skrl(memory, path, cast("Archive", reader))
            return
        reader.verify()
        saving.restorer(memory, path, reader, header)()


def _load_csv(memory: StoredTensors, path: Path) -> None:
    """Restores a memory from a .csv of ours or skrl's.

    Ours have a .json beside them.
    """
    with open_file(path):  # raises unless it is a regular file
        beside = path.with_suffix(".json")
    if beside.exists():
        _load_own_csv(memory, path)
        return
    try:
        _load_skrl_csv(memory, path)
    except OutOfMemoryError:
        raise
    except Exception as error:  # parsers may raise anything for arbitrary text
        if is_of_system(error):
            raise
        alone = f"without it this is not a file of skrl's either: {clean_text(error)}"
        raise FileNotFoundError(f"{beside}: no such file; {alone}") from error


def _save_csv(memory: StoredTensors, path: Path) -> None:
    """Writes the valid rows to a .csv, everything else to a .json.

    Both files have the same name.
    """
    tensors, names = memory._tensors, sorted(memory._tensors.dtypes)
    arrays, _, saved = saving.contents(memory)
    rows = _list_rows(tensors.storage.view())
    more = {name: arrays[name].tolist() for name in BOOKKEEPING if name in arrays}
    format_of = {"format": layout.FORMAT, "version": layout.VERSION, "class": KIND}
    with layout.replace_file(path) as temporary, layout.replace_file(path.with_suffix(".json")) as beside:
        with open(temporary, "x", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(_column_names({name: tensors.spec_of(name) for name in names}))
            for start in range(0, rows.size, 4096):
                some = rows[start : start + 4096]
                lists = [tensors.read_numbers(name, some).reshape(some.size, -1).tolist() for name in names]
                writer.writerows(itertools.chain.from_iterable(row) for row in zip(*lists, strict=True))
        own = {**format_of, **saved, ORDER: STORED}
        state = {**own, "more": more, ROWS_CHECKSUM: _checksum_of_lines(temporary)}
        with open(beside, "x", encoding="utf-8") as file:
            file.write(json.dumps(state | {CHECKSUM: _checksum_of(state)}))


def _list_rows(view: View) -> np.ndarray:
    """Lists the valid rows by flat index, as skrl writes them."""
    return np.sort(view.every_row())


def _checksum_of_lines(path: Path) -> int:
    """Computes the checksum of a text file without its last line break.

    Editors change the last line break.
    """
    with open_file(path) as file:
        nbytes = size_of(file)
        last = read_at(file, max(0, nbytes - 2), min(2, nbytes))
        return checksum(file, 0, nbytes - len(last) + len(last.rstrip(b"\r\n")))


def _checksum_of(state: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(state).encode())


def _verify(path: Path, state: Mapping[str, Any]) -> None:
    """Raises ValueError or KeyError if one of the two files was changed."""
    if state[CHECKSUM] != _checksum_of({key: value for key, value in state.items() if key != CHECKSUM}):
        raise ValueError("the checksum of the .json beside it is wrong")
    if state[ROWS_CHECKSUM] != _checksum_of_lines(path):
        raise ValueError("its checksum is wrong")


def _column_names(specs: Mapping[str, Spec]) -> list[str]:
    return [f"{name}.{'.'.join(map(str, at))}" for name, spec in specs.items() for at in np.ndindex(spec.shape)]


def _load_own_csv(memory: StoredTensors, path: Path) -> None:
    """Restores a memory from a .csv and its .json.

    Nothing changes if they do not fit.
    """
    beside = path.with_suffix(".json")
    with open_file(path) as file, open_file(beside):
        nbytes = size_of(file)
    with name_damage(f"{path}: not a file of {layout.FORMAT}, or a damaged one"):
        state = parse_json(read_bytes(beside))
        if not isinstance(state, dict) or state.get("format") != layout.FORMAT or state.get("class") != KIND:
            raise ValueError("the .json beside it is not one of ours")
        if state.get("version") != layout.VERSION:
            raise ValueError(f"version {clean_text(state.get('version'))}, this program reads version {layout.VERSION}")
        _verify(path, state)
        given = state["more"]
        more = {name: _parse_bookkeeping(given[name], dtype) for name, dtype in BOOKKEEPING.items() if name in given}
        tensors, (memory_size, num_envs) = memory._tensors, memory._tensors.lead
        check_sizes(tensors, path, state)
        specs = check_tensors(tensors, path, state["tensors"])
        view = View(check_counters(more[RING_NAME], num_envs, memory_size), tensors.storage.columns)
        rows = _list_rows(view) if state.get(ORDER) == STORED else view.by_step()  # older files are by time
        values = _read_tensors(path, nbytes, {name: specs[name] for name in sorted(specs)}, len(rows))
        header = {"class": KIND, "arrays": [*specs, *more], "state": state}
        restore = saving.restorer(memory, path, RowsReader(tensors, specs, rows, values, more), header)
    restore()


def _parse_bookkeeping(values: Any, dtype: Any) -> np.ndarray:
    """Converts numbers from JSON to an array.

    Raises:
        ValueError: the dtype cannot hold them exactly.
    """
    array = np.array(values)
    if array.size and array.dtype.kind != np.dtype(dtype).kind:
        raise ValueError(f"its bookkeeping has {array.dtype} where {np.dtype(dtype)} is needed")
    if array.dtype.kind == "i" and not ((array >= np.iinfo(dtype).min) & (array <= np.iinfo(dtype).max)).all():
        raise ValueError(f"its bookkeeping has numbers that do not fit {np.dtype(dtype)}")
    return array.astype(dtype)


def _read_tensors(path: Path, nbytes: int, specs: Mapping[str, Spec], n_rows: int) -> dict[str, np.ndarray]:
    """Reads the file's tensors, each `(n_rows, *shape)`.

    Sizes are compared with the size of the file first.
    """
    sizes = {name: math.prod(spec.shape) for name, spec in specs.items()}
    n = 0
    for name, size in sizes.items():  # checked before anything as large as the file claims is allocated
        n += size
        if n > nbytes:
            raise ValueError(f"its first line does not name the columns of {name!r}")
    if (n_rows + 1) * n > nbytes:
        raise ValueError(f"it has fewer than the {n_rows} rows of {n} numbers that it should have")
    with open_file(path) as raw, io.TextIOWrapper(io.BufferedReader(raw), encoding="utf-8", newline="") as file:  # type: ignore[type-var]
        _check_names(file, specs)
        n_found, _, tensors = _read_rows(file, sizes, n_rows, lambda name, _: specs[name])
    if n_found < n_rows:
        raise ValueError(f"it has {n_found} rows, expected {n_rows}")
    return tensors


def _check_names(file: IO[str], specs: Mapping[str, Spec]) -> None:
    """Raises ValueError unless the first line names the columns of these tensors."""
    needed = io.StringIO()
    csv.writer(needed).writerow(_column_names(specs))
    text = needed.getvalue().removesuffix("\r\n")
    found, end = file.read(len(text)), file.read(1)
    if end == "\r":
        end = file.read(1)
    if found != text or end not in ("\n", ""):
        raise ValueError(f"its first line does not name the columns of {list(specs)}")


def _read_rows(
    file: IO[str], sizes: Mapping[str, int], most: int, find_spec: Callable[[str, list[str]], Spec]
) -> tuple[int, dict[str, Spec], dict[str, np.ndarray]]:
    """Reads the tensors from a file's remaining lines, some lines at a time.

    Args:
        file: the file, at its second line.
        sizes: name -> numbers per row, in the order of the columns.
        most: the most rows that there may be.
        find_spec: returns the spec of a tensor, given its name and the cells of its first row.

    Returns:
        The number of rows; name -> spec, and name -> `(n, *shape)`, both empty without rows.

    Raises:
        ValueError: there are more rows, or a line does not hold these numbers.
    """
    n, n_rows = sum(sizes.values()), 0
    at_once, longest = max(1, CELLS_AT_ONCE // max(n, 1)), n * (LONGEST_NUMBER + 1) + 2
    specs: dict[str, Spec] = {}
    parts: dict[str, list[np.ndarray]] = {name: [] for name in sizes}
    every_line = iter(lambda: file.readline(longest), "")
    while lines := [_read_cells(line, n) for line in itertools.islice(every_line, at_once)]:
        n_rows += len(lines)
        if n_rows > most:
            raise ValueError(f"it has more than the {most} rows that there is room for")
        at = 0
        for name, size in sizes.items():
            cells = [line[at : at + size] for line in lines]
            spec = specs[name] = specs.get(name) or find_spec(name, cells[0])
            parts[name].append(_parse(name, cells, spec).reshape(len(lines), *spec.shape))
            at += size
    return n_rows, specs, {name: np.concatenate(parts[name]) for name in specs}


def _read_cells(line: str, n: int) -> list[str]:
    """Splits a line into n texts."""
    cells = line.rstrip("\r\n").split(",") if n else []
    # numpy pads all strings of an array to the longest one: with one of a megabyte they would take terabytes.
    if len(cells) != n or max(map(len, cells), default=0) > LONGEST_NUMBER:
        raise ValueError(f"it has a line that is not of {n} numbers: {line[:LONGEST_NUMBER]!r}")
    return cells


def _parse(name: str, cells: list[list[str]], spec: Spec) -> np.ndarray:
    """Converts the cells of some lines to numbers of a column, `(lines, cells)`.

    Raises:
        ValueError: a text is no such number.
    """
    if spec.is_bfloat16:
        return to_bits(name, np.array(cells, np.float32))
    if spec.dtype.kind == "b":
        if wrong := {cell for line in cells for cell in line} - {"True", "False"}:
            raise ValueError(f"{name!r} holds {sorted(wrong)[0]!r}, expected True or False")
        return np.array([[cell == "True" for cell in line] for line in cells], bool)
    if spec.dtype.kind == "c":
        return np.array([[complex(cell) for cell in line] for line in cells], spec.dtype)
    return np.array(cells, dtype=str).astype(spec.dtype)


def _load_skrl(memory: StoredTensors, path: Path, archive: Archive) -> None:
    """Restores a memory from a `.pt` or `.npz` file of plain tensors.

    The file has no header of ours.

    Raises:
        FileError, OutOfMemoryError: it does not fit; nothing changes.
    """
    with name_damage(f"{path}: not a file of tensors, or a damaged one"):
        archive.verify()
        specs = check_tensors(memory._tensors, path, _list_tensors(memory._tensors, path, archive))
        refill(memory, path, specs, archive)
    _set_valid_rows(memory, _count_rows(memory._tensors, specs))


def _list_tensors(tensors: Tensors, path: Path, archive: Archive) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Lists the tensors in an archive: name -> dtype's name, shape of a row."""
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
    """Counts the rows up to the last written one, by flat index.

    A row is written unless all its floats are NaN.
    """
    n = tensors.storage.columns.n_rows
    floats = [name for name, spec in specs.items() if spec.dtype.kind == "f" or spec.is_bfloat16]
    if not floats:
        return n
    written = np.zeros(n, bool)
    for name in floats:
        values = tensors.read_numbers(name, np.arange(n))
        written |= ~np.isnan(values).all(axis=tuple(range(1, values.ndim)))
    return int(np.flatnonzero(written).max(initial=-1)) + 1


def _set_valid_rows(memory: StoredTensors, n_rows: int) -> None:
    """Makes the first rows by flat index the valid ones."""
    memory_size, num_envs = memory._tensors.lead
    row, env = divmod(n_rows, num_envs)
    memory._tensors.set_cursor(is_full=row == memory_size, row=row % memory_size, env=env)


def _load_skrl_csv(memory: StoredTensors, path: Path) -> None:
    """Restores a memory from a `.csv` of valid rows, by flat index.

    Raises:
        ValueError, FileError, OutOfMemoryError: the file is no such file or does not fit; nothing changes.
    """
    with open_file(path) as raw, io.TextIOWrapper(io.BufferedReader(raw), encoding="utf-8", newline="") as file:  # type: ignore[type-var]
        tensors, sizes = memory._tensors, _read_sizes(file)
        check_complete(tensors, path, sizes)
        most, find_spec = tensors.storage.columns.n_rows, partial(_choose_spec, tensors)
        n_rows, specs, found = _read_rows(file, sizes, most, find_spec)
    if not n_rows:  # it does not say what its tensors hold: those that there are stay, and none is created
        specs = {name: _choose_spec(tensors, name, [""] * n) for name, n in sizes.items() if name in tensors.dtypes}
    refill(memory, path, specs, RowsReader(tensors, specs, np.arange(n_rows), found, {}))
    _set_valid_rows(memory, n_rows)


def _read_sizes(file: IO[str]) -> dict[str, int]:
    """Reads the numbers per row of each tensor from the first line.

    For example `a.0,a.1,b.0` gives 2 for `a` and 1 for `b`.
    """
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
    """Returns the spec of a tensor.

    A new one gets its dtype from its first row.
    """
    if name in tensors.dtypes:
        known = tensors.spec_of(name)
        if math.prod(known.shape) != len(cells):
            raise ValueError(f"tensor {name!r} has {len(cells)} numbers per row, in this memory rows {known.shape}")
        return known
    dtype = "bool" if set(cells) <= {"True", "False"} else "int64" if all(map(WHOLE.fullmatch, cells)) else None
    named = tensors.convert_dtype(name, None) if dtype is None else find_dtype(tensors, name, dtype)
    return tensors.make_spec(named, (len(cells),))
