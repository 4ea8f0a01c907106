"""Memories in files: `.pt` and `.npz` hold everything; `.csv` the valid rows, and a `.json` beside it the rest."""

from __future__ import annotations

import csv
import itertools
import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlstructs.errors import FileError, SpecError
from rlstructs.memories.formats import FORMATS, checked_format
from rlstructs.memories.framework import spec_of
from rlstructs.replay.columns import Spec
from rlstructs.replay.episodes import EPISODE
from rlstructs.replay.prioritised import DRAWN, LEAVES, SYNCED
from rlstructs.replay.ring import N_COUNTERS, Ring
from rlstructs.replay.samplers import Span
from rlstructs.replay.values import from_bits, to_bits
from rlstructs.structures import files
from rlstructs.structures.containers import Reader, checksum

if TYPE_CHECKING:
    from rlstructs.memories.base import Memory

KIND = "Memory"
RING = "__ring__"
EPISODES = "__episodes__"
# Characters: complex numbers of 128 bits have 50.
LONGEST_NUMBER = 100
# In the .json beside a .csv: of itself without this entry, and of the .csv.
CHECKSUM, ROWS_CHECKSUM = "crc32", "rows_crc32"


def target(memory: Memory, given: str | Path, format: str | None) -> tuple[Path, str]:  # noqa: A002
    """Which file a memory is saved to, and in which format: a file that is named, or one in a directory.

    Raises:
        SpecError: there is no such format, or the file's name ends in another one.
    """
    path = Path(given)
    ending = path.suffix[1:]
    if path.is_dir() or ending not in (*FORMATS, "h5", "hdf5"):
        format = checked_format("pt" if format is None else format)  # noqa: A001
        now = datetime.now().strftime("%y-%m-%d_%H-%M-%S-%f")
        return path / "memories" / f"{now}_memory_{hex(id(memory))}.{format}", format
    if checked_format(ending if format is None else format) != ending:
        raise SpecError(f"{path}: the name ends in .{ending}, the format should be {format!r}; leave one of them out")
    return path, ending


def save(memory: Memory, path: Path, format: str) -> Path:  # noqa: A002
    """Writes a memory; returns the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if format == "csv":
        _save_csv(memory, path)
    else:
        dtypes = {name: "bfloat16" for name in memory._dtypes if memory._spec(name).is_bfloat16}
        files.write(path, KIND, {**_tensors(memory), **_bookkeeping(memory)}, dtypes, memory._state())
    return path


def load(memory: Memory, path: Path) -> None:
    """Restores a memory; changes nothing if the file does not fit."""
    if path.suffix == ".csv":
        _load_csv(memory, path)
        return
    if path.suffix[1:] not in FORMATS:
        raise FileError(f"{path}: the name must end in one of .{', .'.join(FORMATS)}")
    with files.reading(path) as (reader, header):
        if header["class"] != KIND:
            raise FileError(f"{path}: holds a {header['class']}, not a {KIND}")
        state = header["state"]
        more = {name: _array(reader, name) for name in header["arrays"] if name not in state["tensors"]}
        restore = _checked(memory, path, state, more)
        for name in state["tensors"]:
            dtype, shape = reader.found(name)
            spec = memory._spec(name) if name in memory._dtypes else _spec(memory, state, name)
            if dtype != spec.dtype or shape != (memory.memory_size, memory.num_envs, *spec.shape):
                raise ValueError(f"tensor {name!r} is {dtype} {shape}, its header says otherwise")
        reader.verify()
        _make_missing(memory, path, state)
        columns = memory._store().columns
        for name in state["tensors"]:
            columns.read_into(name, partial(reader.read_into, name))
        restore()


def _tensors(memory: Memory) -> dict[str, Any]:
    lead = (memory.memory_size, memory.num_envs)
    columns, names = memory._store().columns, memory.get_tensor_names()  # in the order in which skrl's files have them
    return {name: columns.to_file(name, (*lead, *columns.specs[name].shape)) for name in names}


def _bookkeeping(memory: Memory) -> dict[str, np.ndarray]:
    storage = memory._storage
    arrays = {RING: storage.ring.counters.copy(), **memory._more_arrays()}
    if storage.episodes is not None:
        arrays[EPISODES] = storage.episodes.columns.flat[EPISODE]
    return arrays


def _array(reader: Reader, name: str) -> np.ndarray:
    dtype, shape = reader.found(name)
    array = np.empty(shape, dtype)
    reader.read_into(name, array)
    return array


def _checked(memory: Memory, path: Path, state: Any, more: Mapping[str, np.ndarray]) -> Any:
    """What restores all but the tensors.

    Raises:
        FileError, ValueError, KeyError, TypeError: they do not fit.
    """
    sizes = state["memory_size"], state["num_envs"]
    if sizes != (memory.memory_size, memory.num_envs):
        raise FileError(
            f"{path}: holds memory_size {sizes[0]} and num_envs {sizes[1]}, "
            f"this memory has {memory.memory_size} and {memory.num_envs}"
        )
    if missing := sorted(set(memory._dtypes) - set(state["tensors"])):
        raise FileError(f"{path}: has no tensor(s) {missing}, it has {sorted(state['tensors'])}")
    for name in state["tensors"]:
        if name in memory._dtypes and (spec := memory._spec(name)) != (theirs := _spec(memory, state, name)):
            raise FileError(
                f"{path}: tensor {name!r} is {theirs.dtype} {theirs.shape}, in this memory {spec.dtype} {spec.shape}"
            )
    ring = _checked_ring(memory, more[RING])
    n_rows = memory.memory_size * memory.num_envs
    episodes = _sized(more[EPISODES], np.int32, (n_rows, 2)) if EPISODES in more else None
    generator = np.random.default_rng(0)
    generator.bit_generator.state = state["rng"]
    restore_more = memory._checked_more(more, state)

    def restore() -> None:
        storage = memory._store()
        storage.version += 1
        storage.ring.counters[...] = ring
        if episodes is not None:
            storage.track_episodes().columns.flat[EPISODE][...] = episodes
        memory._rng = generator
        restore_more()

    return restore


def _checked_ring(memory: Memory, ring: np.ndarray) -> np.ndarray:
    base, reserved, head = _sized(ring, np.int64, (N_COUNTERS, memory.num_envs))
    if not ((base >= 0) & (base <= head) & (head <= reserved)).all():
        raise ValueError("its counters make no sense")
    return ring


def _sized(array: np.ndarray, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    if array.dtype != dtype or array.shape != shape:
        raise ValueError(f"its bookkeeping is {array.dtype} {array.shape}, needed is {np.dtype(dtype)} {shape}")
    return array


def _spec(memory: Memory, state: Mapping[str, Any], name: str) -> Spec:
    dtype, shape = state["tensors"][name]
    return spec_of(memory.framework, memory.framework.named(dtype), tuple(int(n) for n in shape))


def _make_missing(memory: Memory, path: Path, state: Mapping[str, Any]) -> None:
    missing = [name for name in state["tensors"] if name not in memory._dtypes]
    memory._check_room(str(path), [_spec(memory, state, name) for name in missing])  # of all, before the first is made
    for name in missing:
        dtype, shape = state["tensors"][name]
        memory._add(name, memory.framework.named(dtype), tuple(shape))


def _save_csv(memory: Memory, path: Path) -> None:
    rows, columns = memory._store().span().by_step(), memory._storage.columns
    names = memory.get_tensor_names()
    header = [column for name in names for column in _column_names(name, memory._spec(name))]
    more = {name: array.tolist() for name, array in _bookkeeping(memory).items()}
    format_of = {"format": files.FORMAT, "version": files.VERSION, "class": KIND}
    with files.replacing(path) as temporary, files.replacing(path.with_suffix(".json")) as beside:
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
    """Of a text file, whatever ends its last line."""
    with open(path, "rb") as file:
        nbytes = file.seek(0, os.SEEK_END)
        file.seek(max(0, nbytes - 2))
        last = file.read()
        return checksum(file, 0, nbytes - len(last) + len(last.rstrip(b"\r\n")))


def _checksum_of(state: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(state).encode())


def _verify_csv(path: Path, state: Mapping[str, Any]) -> None:
    """Raises ValueError or KeyError if either file is not as it was written."""
    if state[CHECKSUM] != _checksum_of({key: value for key, value in state.items() if key != CHECKSUM}):
        raise ValueError("the checksum of the .json beside it is wrong")
    if state[ROWS_CHECKSUM] != _checksum_of_lines(path):
        raise ValueError("its checksum is wrong")


def _column_names(name: str, spec: Spec) -> list[str]:
    return [f"{name}.{'.'.join(map(str, at))}" for at in np.ndindex(spec.shape)]


def _load_csv(memory: Memory, path: Path) -> None:
    beside = path.with_suffix(".json")
    for needed in (path, beside):
        if not needed.exists():
            raise FileNotFoundError(f"{needed}: no such file")
    try:
        state = json.loads(beside.read_text())
        if not isinstance(state, dict) or state.get("format") != files.FORMAT or state.get("class") != KIND:
            raise ValueError("the .json beside it is not one of ours")
        if state.get("version") != files.VERSION:
            raise ValueError(f"version {state.get('version')!r}, this program reads version {files.VERSION}")
        more = {name: np.array(values, _BOOKKEEPING_DTYPES.get(name)) for name, values in state["more"].items()}
        restore = _checked(memory, path, state, more)
        _verify_csv(path, state)
        tensors = dict(_read_columns(memory, path, state))
        lane_rows = _rows_of(memory, more[RING])
        if any(len(values) != len(lane_rows) for values in tensors.values()):
            raise ValueError(f"it has not the {len(lane_rows)} rows that it should have")
    except FileError:
        raise
    except Exception as error:  # whatever text
        raise FileError(f"{path}: not a file of {files.FORMAT}, or a damaged one: {error}") from error
    _make_missing(memory, path, state)
    columns = memory._store().columns
    for name, values in tensors.items():
        spec = columns.specs[name]
        columns.put_rows(name, slice(None), columns.value(name, spec.unwritten))
        columns.put_rows(name, lane_rows, columns.converted(name, values, spec))
    restore()


_BOOKKEEPING_DTYPES = {RING: np.int64, EPISODES: np.int32, SYNCED: np.int64, DRAWN: np.int64, LEAVES: np.float64}


def _rows_of(memory: Memory, ring: np.ndarray) -> np.ndarray:
    return Span(Ring(ring, memory.memory_size), memory._storage.columns).by_step()


def _read_columns(memory: Memory, path: Path, state: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    with open(path, newline="", encoding="utf-8") as file:
        lines = list(csv.reader(file))
    header, body = lines[0], lines[1:]
    # numpy makes all strings of an array as long as the longest: one of a megabyte would take terabytes.
    if (longest := max(map(len, itertools.chain.from_iterable(body)), default=0)) > LONGEST_NUMBER:
        raise ValueError(f"it has a number of {longest} characters")
    at = 0
    for name in sorted(state["tensors"]):
        spec = _spec(memory, state, name)
        n = math.prod(spec.shape)
        # Names are made only if there may be so many: what the .json says may be anything.
        if at + n > len(header) or header[at : at + n] != _column_names(name, spec):
            raise ValueError(f"its first line does not name the columns of {name!r}")
        cells = [line[at : at + n] for line in body]
        yield name, _parsed(name, cells, spec).reshape(len(body), *spec.shape)
        at += n
    if at != len(header):
        raise ValueError(f"it has {len(header)} columns, needed are {at}")


def _parsed(name: str, cells: list[list[str]], spec: Any) -> np.ndarray:
    if spec.is_bfloat16:
        return to_bits(name, np.array(cells, np.float32))
    if spec.dtype.kind == "b":
        if wrong := {cell for line in cells for cell in line} - {"True", "False"}:
            raise ValueError(f"{name!r} holds {sorted(wrong)[0]!r}, needed is True or False")
        return np.array([[cell == "True" for cell in line] for line in cells], bool)
    if spec.dtype.kind == "c":
        return np.array([[complex(cell) for cell in line] for line in cells], spec.dtype)
    return np.array(cells, dtype=str).astype(spec.dtype) if cells else np.empty(0, spec.dtype)
