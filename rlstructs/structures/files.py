"""One layout for every file: named arrays and one JSON header.

The header, stored under `__header__`, holds the format's name and version, the class, and each array's
dtype and shape. `.npz` and `.h5` carry the same names; `.pt` loads with `weights_only=True`. Reading
executes nothing, and sizes are compared with the file's own before memory is taken: compressed files,
which can hold more than they are, are refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlstructs.errors import FileError
from rlstructs.structures.interop import host_array

FORMAT, VERSION = "rlstructs", 1
HEADER = "__header__"
# numpy has no bfloat16: its bits are stored as integers.
BITS = {"bfloat16": (torch.bfloat16, torch.int16)}


def save(path: str | Path, kind: str, tree: Mapping[str, Any]) -> None:
    """Writes a tree of tensors to `path`, whole or not at all."""
    path = Path(path)
    write = _by_ending(path, _WRITERS)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in _flat(tree)}
    _check_names(path, list(tensors))
    arrays = {name: {"dtype": _dtype(t), "shape": list(t.shape)} for name, t in tensors.items()}
    header = json.dumps({"format": FORMAT, "version": VERSION, "class": kind, "arrays": arrays})
    with _replacing(path) as temporary:
        write(temporary, header, tensors)


def load(path: str | Path, kind: str | None = None) -> dict[str, Any]:
    """Reads the tree that `save` wrote.

    Args:
        path: the file.
        kind: the class that it must hold; None for any.
    """
    path = Path(path)
    tensors, header = _read(path)
    if kind is not None and header["class"] != kind:
        raise FileError(f"{path}: holds a {header['class']}, not a {kind}")
    try:
        return _tree({name: tensors[name] for name in header["arrays"]}, header["class"])
    except ValueError as error:
        raise FileError(f"{path}: damaged: {error}") from error


def read_header(path: str | Path) -> dict[str, Any]:
    """What a file says of itself: `class`, `version` and `arrays` with their dtypes and shapes."""
    return _read(Path(path))[1]


def _read(path: Path) -> tuple[Mapping[str, Any], dict[str, Any]]:
    read = _by_ending(path, _READERS)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        tensors, text = read(path)
        header = _checked(json.loads(text))
        for name, spec in header["arrays"].items():
            _check_array(name, tensors[name], spec)
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # three parsers, and whatever bytes
        raise FileError(f"{path}: not a file of {FORMAT}, or a damaged one: {error}") from error
    return tensors, header


def _check_array(name: str, tensor: Any, spec: Any) -> None:
    # What a .pt file could hold beside: parameters, sparse or expanded tensors, tensors on `meta`.
    if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise ValueError(f"{name!r} is no plain tensor")
    if tensor.requires_grad or not tensor.is_contiguous():
        raise ValueError(f"{name!r} is no plain tensor")
    found = {"dtype": _dtype(tensor), "shape": list(tensor.shape)}
    if found != spec:
        raise ValueError(f"array {name!r} is {found}, the header says {spec}")


def _checked(header: Any) -> dict[str, Any]:
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError("its header is not ours")
    if header.get("version") != VERSION:
        raise ValueError(f"version {header.get('version')!r}, this program reads version {VERSION}")
    if not isinstance(header.get("class"), str) or not isinstance(header.get("arrays"), dict):
        raise ValueError("its header is incomplete")
    return header


def _by_ending(path: Path, table: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    if path.suffix not in table:
        raise FileError(f"{path}: the name must end in one of {', '.join(table)}")
    return table[path.suffix]


def _check_names(path: Path, names: list[str]) -> None:
    groups = {name[:end] for name in names for end, letter in enumerate(name) if letter == "/"}
    for name in names:
        # HDF5 takes a/b for b in the group a, and has no empty names.
        unfit = path.suffix == ".h5" and (name in groups or not {"", "."}.isdisjoint(name.split("/")))
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


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`, renamed to it once all is written."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {path.parent}")
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.{threading.get_ident()}{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    except RuntimeError as error:  # what torch and HDF5 make of a full disk
        raise OSError(f"{path}: cannot be written: {error}") from error
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def _to_array(name: str, tensor: torch.Tensor) -> np.ndarray:
    _, bits = BITS.get(_dtype(tensor), (None, None))
    return host_array(name, tensor if bits is None else tensor.view(bits))


def _to_tensor(array: np.ndarray, spec: Mapping[str, Any]) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    dtype, _ = BITS.get(spec["dtype"], (None, None))
    return tensor if dtype is None else tensor.view(dtype)


def _write_npz(path: Path, header: str, tensors: Mapping[str, torch.Tensor]) -> None:
    arrays = {name: _to_array(name, tensor) for name, tensor in tensors.items()}
    arrays[HEADER] = np.frombuffer(header.encode(), np.uint8)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _read_npz(path: Path) -> tuple[dict[str, torch.Tensor], str]:
    with zipfile.ZipFile(path) as archive:
        infos = {info.filename.removesuffix(".npy"): info for info in _stored(archive, path)}
        header = _read_member(archive, infos[HEADER]).tobytes().decode()
        specs = _checked(json.loads(header))["arrays"]
        return {name: _to_tensor(_read_member(archive, infos[name]), spec) for name, spec in specs.items()}, header


def _stored(archive: zipfile.ZipFile, path: Path) -> list[zipfile.ZipInfo]:
    infos = archive.infolist()
    if any(info.compress_type != zipfile.ZIP_STORED for info in infos):
        raise ValueError("it is compressed")
    if sum(info.file_size for info in infos) > path.stat().st_size:
        raise ValueError("it says that it holds more than it is")
    return infos


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    member: Any
    with archive.open(info) as member:
        version = np.lib.format.read_magic(member)
        if version != (1, 0):
            raise ValueError(f"{info.filename}: array format {version}")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(member)
        count = int(np.prod(shape, dtype=object))
        if fortran or dtype.kind not in "biufc" or dtype.itemsize * count > info.file_size:
            raise ValueError(f"{info.filename}: {dtype}{shape} is not what the file holds")
        array = np.empty(shape, dtype)
        data = memoryview(array.reshape(-1).view(np.uint8).data) if array.size else memoryview(b"")
        done = 0
        while done < len(data):
            read = member.readinto(data[done:])
            if not read:
                raise ValueError(f"{info.filename}: it ends too early")
            done += read
        return array


def _write_h5(path: Path, header: str, tensors: Mapping[str, torch.Tensor]) -> None:
    with _h5py().File(path, "w") as file:
        for name, tensor in tensors.items():
            file.create_dataset(name, data=_to_array(name, tensor))
        file.create_dataset(HEADER, data=np.frombuffer(header.encode(), np.uint8))


def _read_h5(path: Path) -> tuple[dict[str, torch.Tensor], str]:
    with _h5py().File(path, "r") as file:
        header = _read_dataset(file, HEADER).tobytes().decode()
        specs = _checked(json.loads(header))["arrays"]
        return {name: _to_tensor(_read_dataset(file, name), spec) for name, spec in specs.items()}, header


def _read_dataset(file: Any, name: str) -> np.ndarray:
    dataset = file[name]
    if dataset.external or dataset.is_virtual or dataset.file.filename != file.filename:
        raise ValueError(f"{name!r} lies in another file")
    if dataset.dtype.kind not in "biufc" or dataset.nbytes > dataset.id.get_storage_size():
        raise ValueError(f"{name!r}: {dataset.dtype}{dataset.shape} is not what the file holds")
    return np.asarray(dataset[()])


def _h5py() -> Any:
    try:
        import h5py
    except ImportError as error:
        raise ImportError("h5py is needed for .h5 files: pip install 'rlstructs[hdf5]'") from error
    return h5py


def _write_pt(path: Path, header: str, tensors: Mapping[str, torch.Tensor]) -> None:
    own: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        # torch writes all that a view is a view of, and what two tensors share only once.
        if storage.nbytes() != tensor.nbytes or storage.data_ptr() in seen:
            tensor = tensor.clone()
        own[name] = tensor
        seen.add(tensor.untyped_storage().data_ptr())
    torch.save({HEADER: header, **own}, path)


def _read_pt(path: Path) -> tuple[dict[str, torch.Tensor], str]:
    with zipfile.ZipFile(path) as archive:
        _stored(archive, path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # its text tells how to load without safety
        raise ValueError("it holds more than tensors") from error
    if not isinstance(content, dict) or HEADER not in content:
        raise ValueError("its header is not ours")
    return content, content[HEADER]


_WRITERS = {".npz": _write_npz, ".pt": _write_pt, ".h5": _write_h5}
_READERS = {".npz": _read_npz, ".pt": _read_pt, ".h5": _read_h5}
