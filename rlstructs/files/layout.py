"""One layout for every file: named arrays and one JSON header.

The header, stored under `__header__`, holds the name and version of the format, the class, and the dtype and shape of
each array. `.npz` and `.h5` use the same names; torch loads `.pt` with `weights_only=True`. Reading executes nothing
from a file, opens no other one, and compares sizes with the size of the file before it allocates memory: so compressed
files, which can hold more than their own size, are refused, but for arrays that the header says are packed (`zstd`).
Checksums detect damage. SECURITY.md says what is promised.
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

from rlstructs.checks import LONGEST_NAME, clean_text
from rlstructs.errors import FileError
from rlstructs.files import archives
from rlstructs.files.archives import BITS, HEADER, Reader
from rlstructs.files.hdf5 import open_h5, write_h5
from rlstructs.files.opening import is_of_system, parse_json
from rlstructs.files.zstd import pack, unpack
from rlstructs.frameworks.torch import dtype_name

FORMAT, VERSION = "rlstructs", 1
WRITERS: Mapping[str, Callable[..., None]] = {**archives.WRITERS, ".h5": write_h5}
READERS: Mapping[str, Callable[..., Any]] = {**archives.READERS, ".h5": open_h5}


def save(path: str | Path, kind: str, tree: Mapping[str, Any], compress: bool = False) -> None:
    """Writes a tree of tensors to `path`, completely or not at all.

    `compress` packs large columns of bytes.
    """
    arrays, dtypes, packed = {}, {}, None
    for name, tensor in _flatten(tree):
        host = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
        dtypes[name] = dtype_name(host.dtype)
        bits = BITS.get(dtypes[name])
        arrays[name] = (host if bits is None else host.view(getattr(torch, bits))).numpy()
    if compress:
        arrays, packed = pack(arrays)
        dtypes = {name: dtype for name, dtype in dtypes.items() if name not in packed}
    write(path, kind, arrays, dtypes, packed=packed)


def write(
    path: str | Path,
    kind: str,
    arrays: Mapping[str, np.ndarray],
    dtypes: Mapping[str, str] | None = None,
    state: Mapping[str, Any] | None = None,
    suffix: str | None = None,
    compression: str | None = None,
    packed: Mapping[str, Any] | None = None,
) -> None:
    """Writes named arrays to `path`, completely or not at all.

    Args:
        path: the file; its ending decides the format.
        kind: the class that the arrays belong to.
        arrays: C-contiguous, each with memory of its own, or objects that numpy turns into such arrays.
        dtypes: the dtypes that numpy lacks, by the name of the array that holds their bits.
        state: anything else to store, as JSON.
        suffix: the format, if it is not the ending of the path.
        compression: "gzip" or "lzf", only for HDF5.
        packed: what `pack` says of arrays.

    Raises:
        FileError: the ending is unknown, or the format cannot hold a name.
        SpecError: the compression is unknown.
        OSError: the file cannot be written.
    """
    path = Path(path)
    write_file = _find_by_ending(path, WRITERS, suffix)
    if compression is not None:
        write_file = partial(write_file, compression=compression)
    _check_names(path, list(arrays))
    dtypes = {name: array.dtype.name for name, array in arrays.items()} | dict(dtypes or {})
    specs = {name: {"dtype": dtypes[name], "shape": list(array.shape)} for name, array in arrays.items()}
    header = {"format": FORMAT, "version": VERSION, "class": kind, "arrays": specs}
    if state is not None:
        header["state"] = dict(state)
    if packed:
        header["packed"] = dict(packed)
    with replace_file(path) as temporary:
        write_file(temporary, json.dumps(header), arrays, dtypes)


def load(path: str | Path, kind: str | None = None) -> dict[str, Any]:
    """Reads a tree that `save` wrote.

    Args:
        path: the file.
        kind: the class that it has to hold; None for any.

    Raises:
        FileNotFoundError, FileError: see `open_reader`; also if it holds another class.
    """
    with open_reader(path) as (reader, header):
        if kind is not None:
            check_class(path, header, kind)
        reader.verify()
        arrays = unpack({name: _read(reader, name) for name in header["arrays"]}, header.get("packed", {}))
        tensors = {name: _tensor(array, header["arrays"][name]["dtype"]) for name, array in arrays.items()}
    try:
        return _build_tree(tensors, header["class"])
    except ValueError as error:
        raise FileError(f"{path}: damaged: {clean_text(error)}") from error


def check_class(path: Any, header: Mapping[str, Any], kind: str) -> None:
    """Raises FileError unless a header says that the file holds this class."""
    if header["class"] != kind:
        raise FileError(f"{path}: holds a {clean_text(header['class'], LONGEST_NAME)}, not a {kind}")


def read_header(path: str | Path) -> dict[str, Any]:
    """Reads the header of a file.

    It has `class`, `version` and `arrays` with their dtypes and shapes, unpacked.
    """
    with open_reader(path) as (_, header):
        return {**header, "arrays": header["arrays"] | header.get("packed", {})}


@contextlib.contextmanager
def open_reader(
    path: str | Path, suffix: str | None = None, compressed: bool = False, foreign: bool = False
) -> Iterator[tuple[Reader, dict[str, Any]]]:
    """Opens a file; yields its reader and its header.

    The header is compared with the arrays first.

    Args:
        path: the file.
        suffix: the format, if it is not the ending of the path.
        compressed: whether an HDF5 file may be compressed.
        foreign: whether it may be an archive of another program, which has no header: then the header is {}.

    Raises:
        FileNotFoundError: there is no such file.
        FileError: the file is not one of rlstructs, damaged or of another version; or the block raised an error.
    """
    path = Path(path)
    open_container = _find_by_ending(path, READERS, suffix)
    if compressed and (suffix or ending_of(path)) == ".h5":
        open_container = partial(open_container, compressed=True)
    is_open = False
    try:
        with open_container(path) as reader:
            header = {} if foreign and not reader.text else _read_header(reader)
            is_open = True
            yield reader, header
    except (ImportError, FileError):
        raise
    except Exception as error:  # three parsers may raise anything for arbitrary bytes
        is_honest = is_open and isinstance(error, MemoryError)  # while opening, it means that the file claims too much
        if is_honest or is_of_system(error):
            raise
        raise FileError(f"{path}: not a file of {FORMAT}, or a damaged one: {clean_text(error)}") from error


def _read_header(reader: Reader) -> dict[str, Any]:
    if not reader.text:
        raise ValueError("it has no header of rlstructs")
    header = _check_header(parse_json(reader.text))
    for name, spec in header["arrays"].items():
        dtype, shape = reader.spec_of(name)
        claimed = spec["dtype"] if type(spec) is dict else None
        is_bits = type(claimed) is str and BITS.get(claimed) == dtype.name
        found = {"dtype": claimed if is_bits else dtype.name, "shape": list(shape)}
        if found != spec or not all(type(n) is int for n in spec["shape"]):
            raise ValueError(f"array {name!r} is {found}, the header says {spec}")
    return header


def _read(reader: Reader, name: str) -> np.ndarray:
    dtype, shape = reader.spec_of(name)
    array = np.empty(shape, dtype)
    reader.read_into(name, array)
    return array


def _tensor(array: np.ndarray, dtype: str) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.view(getattr(torch, dtype)) if dtype in BITS else tensor


def _check_header(header: Any) -> dict[str, Any]:
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError("it has no header of rlstructs")
    if header.get("version") != VERSION:
        raise ValueError(f"version {clean_text(header.get('version'))}, this program reads version {VERSION}")
    if not isinstance(header.get("class"), str) or not isinstance(header.get("arrays"), dict):
        raise ValueError("its header is incomplete")
    return header


def _find_by_ending(
    path: Path, table: Mapping[str, Callable[..., Any]], suffix: str | None = None
) -> Callable[..., Any]:
    ending = ending_of(path) if suffix is None else suffix
    if ending not in table:
        raise FileError(f"{path}: the name must end in one of {', '.join(table)}")
    return table[ending]


def ending_of(path: Path) -> str:
    """Returns the ending of a path; `.h5` for `.hdf5`."""
    return {".hdf5": ".h5"}.get(path.suffix, path.suffix)


def _check_names(path: Path, names: list[str]) -> None:
    groups = {name[:end] for name in names for end, letter in enumerate(name) if letter == "/"}
    for name in names:
        # HDF5 reads a/b as b in the group a, and has no empty names.
        unfit = ending_of(path) == ".h5" and (name in groups or not {"", "."}.isdisjoint(name.split("/")))
        if name == HEADER or "\0" in name or unfit:
            raise FileError(f"{path}: a {path.suffix} file cannot hold the name {name!r} beside the others")


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for name, leaf in tree.items():
        if isinstance(leaf, Mapping):
            yield from _flatten(leaf, f"{prefix}{name}/")
        else:
            yield prefix + name, leaf


def _build_tree(flat: Mapping[str, torch.Tensor], kind: str) -> dict[str, Any]:
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
    """Returns an unused path beside `path`, with the same ending.

    No other process or thread chooses it.
    """
    stem, mark = path.stem, f".{os.getpid()}.{threading.get_ident()}"
    room = _longest_name(path.parent) - len(os.fsencode(f".{mark}{path.suffix}"))
    if len(os.fsencode(stem)) > room:  # another name may begin with what is left of it
        mark = f".{zlib.crc32(os.fsencode(stem)):08x}{mark}"
        stem = os.fsencode(stem)[: max(0, room - 9)].decode(errors="ignore")
    temporary = path.with_name(f".{stem}{mark}{path.suffix}")
    temporary.unlink(missing_ok=True)  # left by a killed process with the same number
    return temporary


def _longest_name(folder: Path) -> int:
    """Returns the most bytes that a file name may have in this folder."""
    try:
        return os.pathconf(folder, "PC_NAME_MAX")
    except (AttributeError, OSError, ValueError):  # the folder is missing, or the system cannot say
        return 255


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path, and renames it to `path` after the block.

    After an error the temporary file is removed.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {path.parent}")
    temporary = temporary_name(path)
    try:
        yield temporary
        os.replace(temporary, path)
    except RuntimeError as error:  # torch and HDF5 raise it when the disk is full
        raise OSError(f"{path}: cannot be written: {error}") from error
    except OSError as error:
        error.filename = str(path)  # not the temporary one
        del error.filename2
        raise
    finally:
        temporary.unlink(missing_ok=True)
