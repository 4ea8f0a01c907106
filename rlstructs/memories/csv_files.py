"""Files of memories as text: a .csv of the valid rows, and a .json of everything else."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from rlstructs.checks import clean_text
from rlstructs.files import json_text, layout
from rlstructs.files.archives import checksum
from rlstructs.files.opening import name_damage, open_file, read_at, read_bytes, size_of
from rlstructs.memories.restoring import BOOKKEEPING, KIND, RING_NAME, RowsReader, check_sizes, check_tensors
from rlstructs.replay.draw.view import View
from rlstructs.replay.intake.arrays import to_bits
from rlstructs.replay.keep import saving
from rlstructs.replay.keep.checks import check_counters
from rlstructs.replay.rows.columns import Spec

if TYPE_CHECKING:
    from rlstructs.memories.memory import Memory

# The most characters of a number; a complex number of 128 bits needs 50.
LONGEST_NUMBER = 100
# How many numbers are held as text at a time.
CELLS_AT_ONCE = 1 << 14
# Keys of the .json: the checksum of the .json without this entry, and that of the .csv.
CHECKSUM, ROWS_CHECKSUM = "crc32", "rows_crc32"
# Key and value of the .json that say that rows are in the order of flat indexes, as in skrl's files.
ORDER, STORED = "order", "stored"


def save(memory: Memory, path: Path) -> None:
    """Writes the valid rows to a .csv, and everything else to a .json of the same name."""
    tensors, names = memory._tensors, memory.get_tensor_names()
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
    """The valid rows by flat index, as skrl writes them."""
    return np.sort(view.every_row())


def _checksum_of_lines(path: Path) -> int:
    """The checksum of a text file without its last line break, which editors change."""
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


def load(memory: Memory, path: Path) -> None:
    """Restores a memory from a .csv and its .json; changes nothing if they do not fit."""
    beside = path.with_suffix(".json")
    with open_file(path) as file, open_file(beside):
        nbytes = size_of(file)
    with name_damage(f"{path}: not a file of {layout.FORMAT}, or a damaged one"):
        state = json_text.parse(read_bytes(beside))
        if not isinstance(state, dict) or state.get("format") != layout.FORMAT or state.get("class") != KIND:
            raise ValueError("the .json beside it is not one of ours")
        if state.get("version") != layout.VERSION:
            raise ValueError(f"version {clean_text(state.get('version'))}, this program reads version {layout.VERSION}")
        _verify(path, state)
        given = state["more"]
        more = {name: _parse_bookkeeping(given[name], dtype) for name, dtype in BOOKKEEPING.items() if name in given}
        tensors, num_envs, memory_size = memory._tensors, memory.num_envs, memory.memory_size
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
    """Compares sizes with that of the file, and reads its tensors, each `(n_rows, *shape)`."""
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
        n_found, _, tensors = read_rows(file, sizes, n_rows, lambda name, _: specs[name])
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


def read_rows(
    file: IO[str], sizes: Mapping[str, int], most: int, find_spec: Callable[[str, list[str]], Spec]
) -> tuple[int, dict[str, Spec], dict[str, np.ndarray]]:
    """Reads the tensors from the remaining lines of a file, some lines at a time.

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
