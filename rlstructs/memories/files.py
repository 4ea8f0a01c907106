"""Files of memories: `.pt` and `.npz`; `csv_files` has the third format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from rlstructs.checks import clean_text
from rlstructs.errors import FileError, OutOfMemoryError, SpecError
from rlstructs.files import layout
from rlstructs.files.archives import Archive, Reader
from rlstructs.files.opening import is_of_system, open_file
from rlstructs.memories import csv_files, skrl_files
from rlstructs.memories.restoring import (
    BOOKKEEPING,
    EPISODES,
    KIND,
    RING,
    check_shapes,
    plan_restore,
    read_tensors,
)
from rlstructs.replay.episodes import EPISODE

if TYPE_CHECKING:
    from rlstructs.memories.memory import Memory

FORMATS = ("pt", "npz", "csv")


def check_format(name: Any) -> str:
    """Returns `name` if it is a file format.

    Raises:
        SpecError: it is not one.
    """
    if name not in FORMATS:
        raise SpecError(f"the format must be one of {FORMATS}, got {name!r}")
    return str(name)


def choose_file(memory: Memory, given: str | Path, format: str | None) -> tuple[Path, str]:  # noqa: A002
    """Returns the path and format of the file to save; in a folder it is a new one.

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


def save(memory: Memory, path: Path, format: str) -> Path:  # noqa: A002
    """Writes a memory to a file and returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if format == "csv":
        csv_files.save(memory, path, _collect_bookkeeping(memory))
    else:
        layout.write(path, KIND, *contents(memory))
    return path


def contents(memory: Memory) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
    """The contents of a file: arrays, some of them views; dtypes that numpy lacks; and the rest as JSON."""
    dtypes = {name: "bfloat16" for name in memory._tensors.dtypes if memory._tensors.spec_of(name).is_bfloat16}
    return {**_collect_tensors(memory), **_collect_bookkeeping(memory)}, dtypes, memory._state()


def load(memory: Memory, path: Path) -> None:
    """Restores a memory from a file; changes nothing if the file does not fit."""
    if path.suffix == ".csv":
        _load_csv(memory, path)
        return
    if path.suffix[1:] not in FORMATS:
        raise FileError(f"{path}: the name must end in one of .{', .'.join(FORMATS)}")
    with layout.open_reader(path, foreign=True) as (reader, header):
        if not header:
            skrl_files.load(memory, path, cast("Archive", reader))
            return
        reader.verify()
        restorer(memory, path, reader, header)()


def restorer(memory: Memory, path: Path, reader: Reader, header: Mapping[str, Any]) -> Callable[[], None]:
    """Checks what `contents` gave, and returns a function that restores a memory from it.

    Raises:
        FileError, ValueError, KeyError, TypeError: it does not fit; nothing changes.
    """
    layout.check_class(path, header, KIND)
    more = {name: _read_array(reader, name) for name in BOOKKEEPING if name in header["arrays"]}
    specs, restore_rest = plan_restore(memory, path, header["state"], more)
    check_shapes(memory, specs, reader)

    def restore() -> None:
        read_tensors(memory, path, specs, reader)
        restore_rest()

    return restore


def _load_csv(memory: Memory, path: Path) -> None:
    """Restores a memory from a .csv: one of ours if it has a .json, otherwise one of skrl's."""
    with open_file(path):  # raises unless it is a regular file
        beside = path.with_suffix(".json")
    if beside.exists():
        csv_files.load(memory, path)
        return
    try:
        skrl_files.load_csv(memory, path)
    except OutOfMemoryError:
        raise
    except Exception as error:  # parsers may raise anything for arbitrary text
        if is_of_system(error):
            raise
        alone = f"without it this is no file of skrl's either: {clean_text(error)}"
        raise FileNotFoundError(f"{beside}: no such file; {alone}") from error


def _collect_tensors(memory: Memory) -> dict[str, Any]:
    columns, lead = memory._tensors.allocate().columns, memory._tensors.lead
    # Sorted by name, as in skrl's files.
    return {name: columns.to_file(name, (*lead, *columns.specs[name].shape)) for name in memory.get_tensor_names()}


def _collect_bookkeeping(memory: Memory) -> dict[str, np.ndarray]:
    storage = memory._tensors.allocate()
    storage.counters.settle()  # a file is read twice as it is written, and both have to give the same
    arrays = {RING: storage.ring.counters.copy(), **memory._more_arrays()}
    if storage.episodes is not None:
        arrays[EPISODES] = storage.episodes.columns.flat[EPISODE]
    return arrays


def _read_array(reader: Reader, name: str) -> np.ndarray:
    dtype, shape = reader.spec_of(name)
    array = np.empty(shape, dtype)
    reader.read_into(name, array)
    return array
