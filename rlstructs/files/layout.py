"""One layout for every file: named arrays and one JSON header.

The header, stored under `__header__`, holds the format's name and version, the class, and each array's
dtype and shape. `.npz` and `.h5` carry the same names; `.pt` loads with `weights_only=True`. Reading
executes nothing, opens no other file, and sizes are compared with the file's own before memory is taken: compressed
files, which can hold more than they are, are refused. Checksums tell what was damaged. SECURITY.md says what holds.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlstructs.checks import reason, shown
from rlstructs.errors import FileError
from rlstructs.files import archives, json_text
from rlstructs.files.archives import BITS, HEADER, Reader
from rlstructs.files.hdf5 import open_h5, write_h5
from rlstructs.frameworks.torch import host_array

FORMAT, VERSION = "rlstructs", 1
WRITERS: Mapping[str, Callable[..., None]] = {**archives.WRITERS, ".h5": write_h5}
READERS: Mapping[str, Callable[..., Any]] = {**archives.READERS, ".h5": open_h5}


def save(path: str | Path, kind: str, tree: Mapping[str, Any]) -> None:
    """Writes a tree of tensors to `path`, whole or not at all."""
    arrays, dtypes, seen = {}, {}, set()
    for name, tensor in _flat(tree):
        host = tensor.detach().cpu().contiguous()
        storage = host.untyped_storage()
        # A .pt file would hold all that a view is a view of, and what two tensors share only once.
        if storage.nbytes() != host.nbytes or storage.data_ptr() in seen:
            host = host.clone()
        seen.add(host.untyped_storage().data_ptr())
        dtypes[name] = str(host.dtype).removeprefix("torch.")
        bits = BITS.get(dtypes[name])
        arrays[name] = host_array(name, host if bits is None else host.view(getattr(torch, bits)))
    write(path, kind, arrays, dtypes)


def write(
    path: str | Path,
    kind: str,
    arrays: Mapping[str, np.ndarray],
    dtypes: Mapping[str, str] | None = None,
    state: Mapping[str, Any] | None = None,
    suffix: str | None = None,
    compression: str | None = None,
) -> None:
    """Writes named arrays to `path`, whole or not at all.

    Args:
        path: the file; its ending says which kind.
        kind: the class that they belong to.
        arrays: C-contiguous, each with memory of its own, or what becomes such an array when numpy asks for it.
        dtypes: what they are, where numpy has no name for it.
        state: what else belongs to them, as JSON has it.
        suffix: which kind of file, if not what the name ends in.
        compression: "gzip" or "lzf", of HDF5 only.
    """
    path = Path(path)
    write_file = _by_ending(path, WRITERS, suffix)
    if compression is not None:
        write_file = partial(write_file, compression=compression)
    _check_names(path, list(arrays))
    dtypes = {name: array.dtype.name for name, array in arrays.items()} | dict(dtypes or {})
    specs = {name: {"dtype": dtypes[name], "shape": list(array.shape)} for name, array in arrays.items()}
    header = {"format": FORMAT, "version": VERSION, "class": kind, "arrays": specs}
    if state is not None:
        header["state"] = dict(state)
    with replacing(path) as temporary:
        write_file(temporary, json.dumps(header), arrays, dtypes)


def load(path: str | Path, kind: str | None = None) -> dict[str, Any]:
    """Reads the tree that `save` wrote.

    Args:
        path: the file.
        kind: the class that it must hold; None for any.
    """
    with reading(path) as (reader, header):
        if kind is not None:
            check_class(path, header, kind)
        reader.verify()
        tensors = {name: _tensor(reader, name, spec) for name, spec in header["arrays"].items()}
    try:
        return _tree(tensors, header["class"])
    except ValueError as error:
        raise FileError(f"{path}: damaged: {reason(error)}") from error


def check_class(path: Any, header: Mapping[str, Any], kind: str) -> None:
    """Raises FileError unless a file says that it holds a thing of this class."""
    if header["class"] != kind:
        raise FileError(f"{path}: holds a {shown(header['class'])}, not a {kind}")


def read_header(path: str | Path) -> dict[str, Any]:
    """What a file says of itself: `class`, `version` and `arrays` with their dtypes and shapes."""
    with reading(path) as (_, header):
        return header


@contextlib.contextmanager
def reading(
    path: str | Path, suffix: str | None = None, compressed: bool = False
) -> Iterator[tuple[Reader, dict[str, Any]]]:
    """An open file and its header, which says the truth of the arrays in it.

    Args:
        path: the file.
        suffix: which kind of file, if not what the name ends in.
        compressed: whether an HDF5 file may be.

    Raises:
        FileNotFoundError: there is none.
        FileError: it is not one of ours, damaged or of another version; also what the block raises.
    """
    path = Path(path)
    open_container = _by_ending(path, READERS, suffix)
    if compressed and (suffix or ending_of(path)) == ".h5":
        open_container = partial(open_container, compressed=True)
    is_open = False
    try:
        with open_container(path) as reader:
            header = _checked_header(reader)
            is_open = True
            yield reader, header
    except (ImportError, FileError, FileNotFoundError):
        raise
    except Exception as error:  # three parsers, and whatever bytes
        if is_open and isinstance(error, MemoryError):  # before, it is the file that asks for so much
            raise
        raise FileError(f"{path}: not a file of {FORMAT}, or a damaged one: {reason(error)}") from error


def _checked_header(reader: Reader) -> dict[str, Any]:
    if not reader.text:
        raise ValueError("its header is not ours")
    header = _checked(json_text.parse(reader.text))
    for name, spec in header["arrays"].items():
        dtype, shape = reader.found(name)
        said = spec["dtype"] if type(spec) is dict else None
        is_bits = type(said) is str and BITS.get(said) == dtype.name
        found = {"dtype": said if is_bits else dtype.name, "shape": list(shape)}
        if found != spec or not all(type(n) is int for n in spec["shape"]):
            raise ValueError(f"array {name!r} is {found}, the header says {spec}")
    return header


def _tensor(reader: Reader, name: str, spec: Mapping[str, Any]) -> torch.Tensor:
    dtype, shape = reader.found(name)
    array = np.empty(shape, dtype)
    reader.read_into(name, array)
    tensor = torch.from_numpy(array)
    return tensor.view(getattr(torch, spec["dtype"])) if spec["dtype"] in BITS else tensor


def _checked(header: Any) -> dict[str, Any]:
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError("its header is not ours")
    if header.get("version") != VERSION:
        raise ValueError(f"version {reason(header.get('version'))}, this program reads version {VERSION}")
    if not isinstance(header.get("class"), str) or not isinstance(header.get("arrays"), dict):
        raise ValueError("its header is incomplete")
    return header


def _by_ending(path: Path, table: Mapping[str, Callable[..., Any]], suffix: str | None = None) -> Callable[..., Any]:
    ending = ending_of(path) if suffix is None else suffix
    if ending not in table:
        raise FileError(f"{path}: the name must end in one of {', '.join(table)}")
    return table[ending]


def ending_of(path: Path) -> str:
    """What a name ends in, of two names for one kind of file the one that is known here."""
    return {".hdf5": ".h5"}.get(path.suffix, path.suffix)


def _check_names(path: Path, names: list[str]) -> None:
    groups = {name[:end] for name in names for end, letter in enumerate(name) if letter == "/"}
    for name in names:
        # HDF5 takes a/b for b in the group a, and has no empty names.
        unfit = ending_of(path) == ".h5" and (name in groups or not {"", "."}.isdisjoint(name.split("/")))
        if name == HEADER or "\0" in name or unfit:
            raise FileError(f"{path}: a {path.suffix} file cannot hold the name {name!r} beside the others")


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for name, leaf in tree.items():
        if isinstance(leaf, Mapping):
            yield from _flat(leaf, f"{prefix}{name}/")
        else:
            yield prefix + name, leaf


def _tree(flat: Mapping[str, torch.Tensor], kind: str) -> dict[str, Any]:
    lengths = {"TemporalDictTensor": "lengths", "Trajectories": "trajectories/lengths"}.get(kind)
    if lengths is not None and lengths not in flat:
        raise ValueError("it has no lengths")
    if kind != "Trajectories":
        return dict(flat)
    tree: dict[str, Any] = {"info": {}, "trajectories": {}}
    for name, tensor in flat.items():
        part, _, key = name.partition("/")
        if part not in tree:
            raise ValueError(f"array {name!r} belongs to neither info nor trajectories")
        tree[part][key] = tensor
    return tree


def temporary_name(path: Path) -> Path:
    """A name beside `path`, with its ending, that nobody else uses; nothing is there."""
    stem, mark = path.stem, f".{os.getpid()}.{threading.get_ident()}"
    room = _longest_name(path.parent) - len(os.fsencode(f".{mark}{path.suffix}"))
    if len(os.fsencode(stem)) > room:  # what is left of it may be that of another name
        mark = f".{zlib.crc32(os.fsencode(stem)):08x}{mark}"
        stem = os.fsencode(stem)[: max(0, room - 9)].decode(errors="ignore")
    temporary = path.with_name(f".{stem}{mark}{path.suffix}")
    temporary.unlink(missing_ok=True)  # of a process that was killed, and had the same number
    return temporary


def _longest_name(folder: Path) -> int:
    """The most bytes of a file's name in a folder."""
    try:
        return os.pathconf(folder, "PC_NAME_MAX")
    except (AttributeError, OSError, ValueError):  # there is no such folder, or the system does not say
        return 255


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`, renamed to it once all is written."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {path.parent}")
    temporary = temporary_name(path)
    try:
        yield temporary
        os.replace(temporary, path)
    except RuntimeError as error:  # what torch and HDF5 make of a full disk
        raise OSError(f"{path}: cannot be written: {error}") from error
    except OSError as error:
        error.filename, error.filename2 = str(path), None  # not the temporary name
        raise
    finally:
        temporary.unlink(missing_ok=True)
