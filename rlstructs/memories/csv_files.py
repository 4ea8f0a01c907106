"""Files of memories in text: a .csv with the valid rows, and a .json beside it with everything else."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from rlstructs.checks import clean_text
from rlstructs.errors import FileError, OutOfMemoryError
from rlstructs.files import json_text, layout
from rlstructs.files.archives import checksum
from rlstructs.files.opening import open_file, read_at, read_bytes, size_of
from rlstructs.memories.restoring import EPISODES, KIND, RING, make_missing, plan_restore
from rlstructs.replay.columns import Spec
from rlstructs.replay.priorities import DRAWN_ROWS, FOLLOWED_STEPS, TREE_LEAVES
from rlstructs.replay.ring import Ring
from rlstructs.replay.span import Span
from rlstructs.replay.values import from_bits, to_bits

if TYPE_CHECKING:
    from rlstructs.memories.memory import Memory

# The most characters of a number; a complex number of 128 bits needs 50.
LONGEST_NUMBER = 100
# Numbers that are held as text at a time.
CELLS_AT_ONCE = 1 << 14
# Keys of the .json: the checksum of the .json without this entry, and that of the .csv.
CHECKSUM, ROWS_CHECKSUM = "crc32", "rows_crc32"


def save(memory: Memory, path: Path, bookkeeping: Mapping[str, np.ndarray]) -> None:
    """Writes the valid rows of a memory to a .csv, and everything else to a .json beside it."""
    rows, columns = memory._store().span().by_step(), memory._storage.columns
    names = memory.get_tensor_names()
    header = [column for name in names for column in _column_names(name, memory._spec(name))]
    more = {name: array.tolist() for name, array in bookkeeping.items()}
    format_of = {"format": layout.FORMAT, "version": layout.VERSION, "class": KIND}
    with layout.replace_file(path) as temporary, layout.replace_file(path.with_suffix(".json")) as beside:
        with open(temporary, "x", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(header)
            for start in range(0, rows.size, 4096):
                some = rows[start : start + 4096]
                gathered = zip(names, columns.gather(names, some), strict=True)
                arrays = [columns.host(name, array) for name, array in gathered]
                lists = [
                    (from_bits(array) if columns.specs[name].is_bfloat16 else array).reshape(some.size, -1).tolist()
                    for name, array in zip(names, arrays, strict=True)
                ]
                writer.writerows(itertools.chain.from_iterable(row) for row in zip(*lists, strict=True))
        state = {**format_of, **memory._state(), "more": more, ROWS_CHECKSUM: _checksum_of_lines(temporary)}
        with open(beside, "x", encoding="utf-8") as file:
            file.write(json.dumps(state | {CHECKSUM: _checksum_of(state)}))


def _checksum_of_lines(path: Path) -> int:
    """The checksum of a text file without the end of its last line, which editors change."""
    with open_file(path) as file:
        nbytes = size_of(file)
        last = read_at(file, max(0, nbytes - 2), min(2, nbytes))
        return checksum(file, 0, nbytes - len(last) + len(last.rstrip(b"\r\n")))


def _checksum_of(state: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(state).encode())


def _verify(path: Path, state: Mapping[str, Any]) -> None:
    """Raises ValueError or KeyError if one of the two files has changed since it was written."""
    if state[CHECKSUM] != _checksum_of({key: value for key, value in state.items() if key != CHECKSUM}):
        raise ValueError("the checksum of the .json beside it is wrong")
    if state[ROWS_CHECKSUM] != _checksum_of_lines(path):
        raise ValueError("its checksum is wrong")


def _column_names(name: str, spec: Spec) -> list[str]:
    return [f"{name}.{'.'.join(map(str, at))}" for at in np.ndindex(spec.shape)]


def load(memory: Memory, path: Path) -> None:
    """Restores a memory from a .csv and the .json beside it; changes nothing if they do not fit."""
    beside = path.with_suffix(".json")
    with open_file(path) as file, open_file(beside):
        nbytes = size_of(file)
    try:
        state = json_text.parse(read_bytes(beside))
        if not isinstance(state, dict) or state.get("format") != layout.FORMAT or state.get("class") != KIND:
            raise ValueError("the .json beside it is not one of ours")
        if state.get("version") != layout.VERSION:
            raise ValueError(f"version {clean_text(state.get('version'))}, this program reads version {layout.VERSION}")
        _verify(path, state)
        given = state["more"]
        more = {name: _parse_bookkeeping(given[name], dtype) for name, dtype in DTYPES.items() if name in given}
        specs, restore = plan_restore(memory, path, state, more)
        lane_rows = Span(Ring(more[RING], memory.memory_size), memory._storage.columns).by_step()
        tensors = _read_rows(path, nbytes, specs, len(lane_rows))
    except (FileError, OutOfMemoryError):
        raise
    except Exception as error:  # parsers may raise anything for arbitrary text
        raise FileError(f"{path}: not a file of {layout.FORMAT}, or a damaged one: {clean_text(error)}") from error
    make_missing(memory, path, state, specs)
    columns = memory._store().columns
    for name, values in tensors.items():
        spec = columns.specs[name]
        columns.put_rows(name, slice(None), columns.value(name, spec.unwritten))
        columns.put_rows(name, lane_rows, columns.converted(name, values, spec))
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


DTYPES = {RING: np.int64, EPISODES: np.int32, FOLLOWED_STEPS: np.int64, DRAWN_ROWS: np.int64, TREE_LEAVES: np.float64}


def _read_rows(path: Path, nbytes: int, specs: Mapping[str, Spec], n_rows: int) -> dict[str, np.ndarray]:
    """Reads the tensors of a file, each `(n_rows, *shape)`, some lines at a time."""
    sizes = {name: math.prod(specs[name].shape) for name in sorted(specs)}
    n = 0
    for name, size in sizes.items():  # checked before anything as large as the file claims is allocated
        n += size
        if n > nbytes:
            raise ValueError(f"its first line does not name the columns of {name!r}")
    if (n_rows + 1) * n > nbytes:
        raise ValueError(f"it has fewer than the {n_rows} rows of {n} numbers that it should have")
    made = {name: np.empty((n_rows, *spec.shape), spec.dtype) for name, spec in specs.items()}
    with open_file(path) as raw, io.TextIOWrapper(io.BufferedReader(raw), encoding="utf-8", newline="") as file:  # type: ignore[type-var]
        _check_names(file, specs)
        at_once, longest = max(1, CELLS_AT_ONCE // max(n, 1)), _longest_line(n)
        for start in range(0, n_rows, at_once):
            stop, at = min(start + at_once, n_rows), 0
            lines = [_read_cells(file.readline(longest), n) for _ in range(start, stop)]
            for name, size in sizes.items():
                cells = [line[at : at + size] for line in lines]
                made[name][start:stop] = parse(name, cells, specs[name]).reshape(stop - start, *specs[name].shape)
                at += size
        if file.read(1):
            raise ValueError(f"it has more than the {n_rows} rows that it should have")
    return made


def _check_names(file: IO[str], specs: Mapping[str, Spec]) -> None:
    """Raises ValueError unless the first line names the columns of these tensors."""
    needed = io.StringIO()
    csv.writer(needed).writerow([column for name in sorted(specs) for column in _column_names(name, specs[name])])
    text = needed.getvalue().removesuffix("\r\n")
    found, end = file.read(len(text)), file.read(1)
    if end == "\r":
        end = file.read(1)
    if found != text or end not in ("\n", ""):
        raise ValueError(f"its first line does not name the columns of {sorted(specs)}")


def read_lines(file: IO[str], n: int, most: int) -> list[list[str]]:
    """Reads the next lines of a file, up to `most`, and splits each into n texts; none at the end."""
    lines = itertools.islice(iter(lambda: file.readline(_longest_line(n)), ""), most)
    return [_read_cells(line, n) for line in lines]


def _longest_line(n: int) -> int:
    return n * (LONGEST_NUMBER + 1) + 2


def _read_cells(line: str, n: int) -> list[str]:
    """Splits a line into n texts."""
    cells = line.rstrip("\r\n").split(",") if n else []
    # numpy pads all strings of an array to the longest one: with one of a megabyte they would take terabytes.
    if len(cells) != n or max(map(len, cells), default=0) > LONGEST_NUMBER:
        raise ValueError(f"it has a line that is not of {n} numbers: {line[:LONGEST_NUMBER]!r}")
    return cells


def parse(name: str, cells: list[list[str]], spec: Any) -> np.ndarray:
    """The numbers of some lines as a column of this spec has them, `(lines, cells)`.

    Raises:
        ValueError: a text is no such number.
    """
    if spec.is_bfloat16:
        return to_bits(name, np.array(cells, np.float32))
    if spec.dtype.kind == "b":
        if wrong := {cell for line in cells for cell in line} - {"True", "False"}:
            raise ValueError(f"{name!r} holds {sorted(wrong)[0]!r}, needed is True or False")
        return np.array([[cell == "True" for cell in line] for line in cells], bool)
    if spec.dtype.kind == "c":
        return np.array([[complex(cell) for cell in line] for line in cells], spec.dtype)
    return np.array(cells, dtype=str).astype(spec.dtype) if cells else np.empty(0, spec.dtype)
