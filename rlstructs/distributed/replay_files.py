"""The folder of a saved `RayReplay`: a header, and a file for each shard."""

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
from rlstructs.files.layout import replace_file
from rlstructs.files.opening import name_damage, parse_json, read_bytes
from rlstructs.replay.keep.checks import generator_in

HEADER = "replay.json"
NAME = re.compile(rf"shard-\d+-[0-9a-f]{{8}}\.{FORMAT}")


def write(folder: Path, memory: Mapping[str, Any], generator: Mapping[str, Any], shards: Iterable[np.ndarray]) -> None:
    """Writes the shards' files, then the header, then deletes the old files.

    The old files are those that the old header named.

    Args:
        folder: the folder, which is made if there is none.
        memory: the settings that a memory must have to read the folder.
        generator: the state of the trainer's random generator.
        shards: the bytes of each shard's file.

    Raises:
        OSError: the folder cannot be written to.
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
            before = _list_named(folder)
    except BaseException:  # the present header may be the old one or the new one
        _remove(folder, {*names, *before} - {*_list_named(folder)})
        raise
    _remove(folder, before)


def read(folder: Path, memory: Mapping[str, Any], n_shards: int) -> tuple[np.random.Generator, list[Path]]:
    """Reads a header; returns the trainer's generator and the shards' paths.

    Args:
        folder: the folder.
        memory: the settings of the memory that reads it.
        n_shards: its number of shards.

    Raises:
        FileError: the header is damaged, or of a memory with other settings.
        FileNotFoundError: there is no header.
    """
    path = folder / HEADER
    with name_damage(f"{path}: damaged"):
        header = _parse_header(read_bytes(path))
        found, names, generator = header["memory"], header["shards"], generator_in(header["generator"])
        if not isinstance(found, dict):
            raise ValueError("it does not say which memory it is of")
        if found == memory and len(names) != n_shards:
            raise ValueError(f"it names {len(names)} files for {n_shards} shards")
    if found != memory:
        differ = {key: value for key, value in memory.items() if found.get(key) != value}
        other = clean_text(repr(found))
        raise FileError(f"{path}: of another memory, {other}; this one differs in {differ}: give it the same settings")
    return generator, [folder / name for name in names]


@contextlib.contextmanager
def open_shard(file: Path) -> Iterator[np.ndarray]:
    """Yields the bytes of a shard's file; makes FileErrors name this file.

    Raises:
        FileNotFoundError: there is no such file.
        FileError: this is not a regular file, or the block raised a FileError.
    """
    data = np.frombuffer(read_bytes(file), np.uint8)
    try:
        yield data
    except FileError as error:  # it names the copy that a shard has read
        _, _, text = str(error).partition(": ")
        raise FileError(f"{file}: {text}") from error


def _parse_header(text: bytes) -> dict[str, Any]:
    """Parses a header.

    Raises:
        ValueError, KeyError, TypeError: the header is damaged.
    """
    outer = parse_json(text)
    if zlib.crc32(outer["header"].encode()) != outer["checksum"]:
        raise ValueError("its checksum is wrong")
    header: dict[str, Any] = parse_json(outer["header"])
    names = header["shards"]
    if not isinstance(names, list) or not all(type(name) is str and NAME.fullmatch(name) for name in names):
        raise ValueError(f"it names files that are not of shards: {names}")
    if len(set(names)) != len(names):
        raise ValueError(f"it names a file twice: {names}")
    return header


def _list_named(folder: Path) -> list[str]:
    """Returns the names of files in the present header.

    [] if there is no header, or it is damaged.
    """
    try:
        names: list[str] = _parse_header(read_bytes(folder / HEADER))["shards"]
        return names
    except (FileNotFoundError, AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return []


def _remove(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        (folder / name).unlink(missing_ok=True)
