"""How a `RayReplay` is kept: a folder with a file for each shard, and one that names them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlstructs.checks import clean_text
from rlstructs.distributed.shard import FORMAT
from rlstructs.errors import FileError
from rlstructs.files import json_text
from rlstructs.files.layout import replace_file
from rlstructs.files.opening import read_bytes
from rlstructs.replay.claims import generator_in

HEADER = "replay.json"
NAME = re.compile(rf"shard-\d+-[0-9a-f]{{8}}\.{FORMAT}")


def write(folder: Path, memory: Mapping[str, Any], generator: Mapping[str, Any], shards: Iterable[np.ndarray]) -> None:
    """Writes a folder, the file that names the others last; those that the one before it has named go after that.

    Args:
        folder: is made if there is none.
        memory: what another one must be like to take it.
        generator: the state of the trainer's.
        shards: the bytes of each.
    """
    run, names, before = secrets.token_hex(4), list[str](), list[str]()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for shard, data in enumerate(shards):
            names.append(f"shard-{shard}-{run}.{FORMAT}")
            with (folder / names[-1]).open("xb") as file:
                data.tofile(file)
                os.fsync(file.fileno())
        header = json.dumps({"memory": memory, "generator": generator, "shards": names})
        with replace_file(folder / HEADER) as new, new.open("x") as text:
            json.dump({"checksum": zlib.crc32(header.encode()), "header": header}, text)
            text.flush()
            os.fsync(text.fileno())
            before = _named(folder)
    except BaseException:  # before the header was there, or after
        _remove(folder, {*names, *before} - {*_named(folder)})
        raise
    _remove(folder, before)


def read(folder: Path, memory: Mapping[str, Any], n_shards: int) -> tuple[np.random.Generator, list[Path]]:
    """The trainer's generator, and the files of the shards.

    Raises:
        FileError: the folder is damaged, or of a memory that is not like this.
        FileNotFoundError: there is none.
    """
    path = folder / HEADER
    try:
        header = _header(read_bytes(path))
        found, names, generator = header["memory"], header["shards"], generator_in(header["generator"])
        if not isinstance(found, dict):
            raise ValueError("it does not say of what memory it is")
        if found == memory and len(names) != n_shards:
            raise ValueError(f"it names the files {names}")
    except (FileNotFoundError, FileError):
        raise
    except Exception as error:  # whatever it holds
        raise FileError(f"{path}: damaged: {clean_text(error)}") from error
    if found != memory:
        differ = {key: value for key, value in memory.items() if found.get(key) != value}
        other = clean_text(repr(found))
        raise FileError(f"{path}: of another memory, {other}; make this one, whose {differ} differ, like that")
    return generator, [folder / name for name in names]


@contextlib.contextmanager
def shard_bytes(file: Path) -> Iterator[np.ndarray]:
    """The bytes of a shard's file; who reads them elsewhere is told here that they are damaged.

    Raises:
        FileNotFoundError: there is no such file.
        FileError: it is none, or what the block raises of what is in it.
    """
    data = np.frombuffer(read_bytes(file), np.uint8)
    try:
        yield data
    except FileError as error:  # of a file with another name
        name, _, text = str(error).partition(": ")
        raise FileError(f"{file}, there {Path(name).name}: {text}") from error


def _header(text: bytes) -> dict[str, Any]:
    """What a header says.

    Raises:
        ValueError, KeyError, TypeError: it is damaged.
    """
    outer = json_text.parse(text)
    if zlib.crc32(outer["header"].encode()) != outer["checksum"]:
        raise ValueError("its checksum is another")
    header: dict[str, Any] = json_text.parse(outer["header"])
    names = header["shards"]
    if not isinstance(names, list) or not all(type(name) is str and NAME.fullmatch(name) for name in names):
        raise ValueError(f"it names the files {names}")
    if len(set(names)) != len(names):
        raise ValueError(f"it names a file twice: {names}")
    return header


def _named(folder: Path) -> list[str]:
    """The files that the header names; none if there is no header, or it is not one of ours."""
    try:
        names: list[str] = _header(read_bytes(folder / HEADER))["shards"]
        return names
    except (FileNotFoundError, AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return []


def _remove(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        (folder / name).unlink(missing_ok=True)
