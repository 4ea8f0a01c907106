"""Files of memories: `.pt` and `.npz`; `csv_files` has the third format."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rlstructs.checks import clean_text
from rlstructs.errors import FileError, OutOfMemoryError, SpecError
from rlstructs.files import layout
from rlstructs.files.archives import Archive
from rlstructs.files.opening import is_of_system, open_file
from rlstructs.memories import csv_files, skrl_files
from rlstructs.replay.keep import saving

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
        csv_files.save(memory, path)
    else:
        saving.save(memory, path)
    return path


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
        saving.restorer(memory, path, reader, header)()


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
        alone = f"without it this is not a file of skrl's either: {clean_text(error)}"
        raise FileNotFoundError(f"{beside}: no such file; {alone}") from error
