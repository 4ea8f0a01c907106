"""How a `RayReplay` is kept: a folder with a file for each shard, and one that names them."""

from __future__ import annotations

import json
import secrets
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlstructs.distributed.shard import FORMAT
from rlstructs.errors import FileError

HEADER = "replay.json"


def write(folder: Path, memory: Mapping[str, Any], generator: Mapping[str, Any], shards: Iterable[np.ndarray]) -> None:
    """Writes a folder, the file that names the others last; what an earlier call has left goes after that.

    Args:
        folder: is made if there is none.
        memory: what another one must be like to take it.
        generator: the state of the trainer's.
        shards: the bytes of each.
    """
    run, names = secrets.token_hex(4), list[str]()
    new = folder / f"{HEADER}.{run}"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for shard, data in enumerate(shards):
            names.append(f"shard-{shard}-{run}.{FORMAT}")
            with (folder / names[-1]).open("xb") as file:
                data.tofile(file)
        header = json.dumps({"memory": memory, "generator": generator, "shards": names})
        with new.open("x") as text:
            json.dump({"checksum": zlib.crc32(header.encode()), "header": header}, text)
        new.rename(folder / HEADER)
    except BaseException:
        for path in (new, *(folder / name for name in names)):
            path.unlink(missing_ok=True)
        raise
    for path in folder.glob(f"shard-*.{FORMAT}"):
        if path.name not in names:
            path.unlink()


def read(folder: Path, memory: Mapping[str, Any], n_shards: int) -> tuple[np.random.Generator, list[Path]]:
    """The trainer's generator, and the files of the shards.

    Raises:
        FileError: the folder is damaged, or of a memory that is not like this.
        FileNotFoundError: there is none.
    """
    path = folder / HEADER
    text = path.read_text(errors="replace")
    try:
        outer = json.loads(text)
        if zlib.crc32(outer["header"].encode()) != outer["checksum"]:
            raise ValueError("its checksum is another")
        header = json.loads(outer["header"])
        found, names, generator = header["memory"], header["shards"], np.random.default_rng()
        generator.bit_generator.state = header["generator"]
        if found == memory and (len(names) != n_shards or any(Path(name).name != name for name in names)):
            raise ValueError(f"it names the files {names}")
    except Exception as error:  # whatever it holds
        raise FileError(f"{path}: damaged: {error}") from error
    if found != memory:
        raise FileError(f"{path}: of another memory: {found}, this one is {dict(memory)}")
    return generator, [folder / name for name in names]
