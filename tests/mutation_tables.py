"""Changes of what lies around the numbers of a file: archives, pickles and the objects of HDF5; see `mutations`."""

from __future__ import annotations

import itertools
import json
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from mutations import (
    Rng,
    change_beside,
    change_bytes,
    change_content,
    change_csv,
    change_folder,
    change_manifest,
    change_rows,
    change_state,
    read,
)

from rlstructs.files.archives import HEADER


def change_directory(path: Path, rng: Rng) -> None:
    """Changes numbers in the tables of a zip archive, or members of it."""
    with zipfile.ZipFile(path) as archive:
        members = [(info, archive.read(info)) for info in archive.infolist()]
    act = rng.random()
    if act < 0.5:
        data = bytearray(path.read_bytes())
        starts = [
            at
            for at in range(len(data) - 4)
            if data[at : at + 4] in (b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7")
        ]
        for _ in range(rng.choice([1, 2, 4])):
            at = rng.choice(starts) + rng.randrange(4, 46, 2)
            number = rng.choice([0, 1, 8, 0x800, 0xFFFF, rng.randrange(1 << 16)])
            data[at : at + 2] = struct.pack("<H", number)
        path.write_bytes(data)
        return
    path.unlink()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if act < 0.6 else zipfile.ZIP_STORED) as archive:
        for number, (info, content) in enumerate(members):
            name = info.filename
            if rng.random() < 0.1:
                name = rng.choice([members[0][0].filename, "../x", "/x", "", "x" * 3000, name + "\0y"])
            if rng.random() < 0.1:
                content = (
                    _changed_npy(content, rng) if name.endswith(".npy") else content[: rng.randrange(len(content) + 1)]
                )
            if rng.random() > 0.03 * number / len(members):
                archive.writestr(name, content)


def _changed_npy(content: bytes, rng: Rng) -> bytes:
    """An array with another header in front of it."""
    descr = rng.choice(
        ["'<f4'", "'|O'", "'>i8'", "[('a', '<f4'), ('b', '|O')]", "'<U9'", "'|V8'", "'<f16'", "'" + "(" * 99]
    )
    order = rng.choice(["False", "True", "0"])
    shape = rng.choice(
        ["(3,)", "()", "(-1,)", f"({2**63},)", f"({2**40}, 0)", "(" * 500 + ")" * 500, "(1,)*99", "-" * 900 + "1"]
    )
    text = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}".encode()
    return content[:8] + struct.pack("<H", len(text) + 1) + text + b"\n" + content[128:]


def change_pickle(path: Path, rng: Rng) -> None:
    """Changes instructions of the pickle in a .pt file."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    [key] = [name for name in members if name.endswith("data.pkl")]
    data = members[key]
    steps = [at for _, _, at in pickletools.genops(data)] + [len(data)]
    parts = [data[a:b] for a, b in itertools.pairwise(steps)]
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = rng.randrange(len(parts))
        act = rng.random()
        if act < 0.3:
            parts[at] = rng.choice(PICKLED)
        elif act < 0.5:
            parts.insert(at, rng.choice(PICKLED))
        elif act < 0.7:
            parts[at : at + 1] = []
        elif act < 0.85:
            parts[at] = rng.choice(parts)
        else:
            parts[at:at] = parts[at : at + rng.randrange(1, 9)]
        parts = parts or [b"."]
    members[key] = b"".join(parts)
    path.unlink()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


PICKLED = [
    b"K\x00",
    b"K\x05",
    b"J\xff\xff\xff\xff",
    b"\x8a\x09" + b"\xff" * 8 + b"\x7f",
    b"\x8a\xff" + b"\x7f" * 255,
    b"(",
    b")",
    b"t",
    b"\x85",
    b"\x86",
    b"\x87",
    b"}",
    b"]",
    b"a",
    b"e",
    b"s",
    b"u",
    b"N",
    b"\x88",
    b"\x89",
    b"R",
    b"Q",
    b"b",
    b"o",
    b"0",
    b"2",
    b"q\x00",
    b"h\x00",
    b"r\xff\xff\xff\x7f",
    b"j\x05\0\0\0",
    b"cos\nsystem\n",
    b"ctorch.onnx\nexport\n",
    b"ctorch\nload\n",
    b"ctorch\nfloat32\n",
    b"ctorch\nFloatStorage\n",
    b"ctorch._utils\n_rebuild_parameter\n",
    b"X\x01\0\0\0x",
    b"X\xff\xff\xff\x7f",
    b"\x95" + b"\xff" * 8,
    b"\x96" + b"\xff" * 8,
    b"G\x7f\xf8\0\0\0\0\0\0",
    b".",
    b"I10\n",
    b"L1" + b"0" * 3000 + b"L\n",
]


# --- HDF5 ---------------------------------------------------------------------------------------------


def change_tables(compressed: bool) -> Callable[[Path, Rng], None]:
    """Writes an HDF5 file in the oldest format, whose tables have no checksums, and changes bytes of it."""

    def change(path: Path, rng: Rng) -> None:
        header, arrays = read(path, ".h5", compressed)
        path.unlink()
        with h5py.File(path, "w", libver="earliest") as file:
            for name, array in {**arrays, HEADER: np.frombuffer(json.dumps(header).encode(), np.uint8)}.items():
                packed = (
                    {"compression": rng.choice(["gzip", "lzf"])} if compressed and array.size and array.ndim else {}
                )
                file.create_dataset(name, data=array, **packed)
        change_bytes(path, rng)

    return change


def change_objects(compressed: bool) -> Callable[[Path, Rng], None]:
    """Puts something else in the place of a dataset of an HDF5 file."""

    def change(path: Path, rng: Rng) -> None:
        with h5py.File(path, "r+") as file:
            names: list[str] = []
            file.visititems(lambda name, each: names.append(name) if isinstance(each, h5py.Dataset) else None)
            name = rng.choice(names)
            values, kind = file[name][()], rng.randrange(len(OBJECTS))
            if rng.random() < 0.2:
                name = name.split("/")[0]
            del file[name]
            OBJECTS[kind](file, name, values, path.parent)

    return change


def _virtual(file: Any, name: str, values: Any, folder: Path) -> None:
    layout = h5py.VirtualLayout((4,), np.float32, maxshape=(None,))
    layout[: h5py.h5s.UNLIMITED :] = h5py.VirtualSource(folder / "pipe", "x", (4,), maxshape=(None,))[
        : h5py.h5s.UNLIMITED :
    ]
    file.create_virtual_dataset(name, layout)


def _bomb(file: Any, name: str, values: Any, folder: Path) -> None:
    dataset = file.create_dataset(name, (64,), np.uint8, chunks=(64,), maxshape=(None,), compression="gzip")
    dataset.id.write_direct_chunk((0,), zlib.compress(bytes(1 << 24)))


def _large_chunk(file: Any, name: str, values: Any, folder: Path) -> None:
    dataset = file.create_dataset(name, (4,), np.uint8, chunks=(1 << 30,), maxshape=(None,), compression="gzip")
    dataset.id.write_direct_chunk((0,), zlib.compress(bytes(1 << 20)))


OBJECTS: list[Callable[[Any, str, Any, Path], Any]] = [
    lambda file, name, values, folder: file.__setitem__(name, h5py.ExternalLink(str(folder / "pipe"), "x")),
    lambda file, name, values, folder: file.__setitem__(name, h5py.ExternalLink(str(folder / "other.h5"), "/")),
    lambda file, name, values, folder: file.__setitem__(name, h5py.SoftLink(f"/{name}")),
    lambda file, name, values, folder: file.__setitem__(name, h5py.SoftLink("/")),
    lambda file, name, values, folder: file.__setitem__(name, file["/"]),
    lambda file, name, values, folder: file.create_dataset(
        name, 3, np.float32, external=[(str(folder / "pipe"), 0, 12)]
    ),
    lambda file, name, values, folder: file.__setitem__(name, np.dtype("f4")),
    lambda file, name, values, folder: file.create_dataset(name, (3,), h5py.ref_dtype),
    lambda file, name, values, folder: file.create_dataset(name, (3,), h5py.regionref_dtype),
    lambda file, name, values, folder: file.create_dataset(name, (3,), h5py.string_dtype()),
    lambda file, name, values, folder: file.create_dataset(name, (3,), np.dtype([("a", "f4", 99), ("b", "i8")])),
    lambda file, name, values, folder: file.create_dataset(name, data=h5py.Empty("f4")),
    lambda file, name, values, folder: file.create_dataset(name, (1 << 40,), np.uint8, chunks=(1 << 16,)),
    lambda file, name, values, folder: file.create_dataset(name, data=values).attrs.create("crc32", np.zeros(8000)),
    lambda file, name, values, folder: (
        file.create_dataset(name, data=values, maxshape=(None,) * np.ndim(values)) if np.ndim(values) else None
    ),
    lambda file, name, values, folder: (
        file.create_dataset(name, data=values, shuffle=True) if np.ndim(values) and values.size else None
    ),
    _virtual,
    _bomb,
    _large_chunk,
]


def changes_of(path: Path, suffix: str) -> list[Callable[[Path, Rng], None]]:
    """The changes that a file of a subject of this kind can be given."""
    if suffix == ".rows":
        return [change_manifest if path.suffix == ".json" else change_rows] * 3 + [change_bytes]
    if path.suffix == ".json":
        return [change_folder if suffix == ".folder" else change_beside] * 3 + [change_bytes]
    if suffix == ".state":
        return [change_state] * 4 + [change_bytes]
    if suffix == ".csv":
        return [change_csv] * 3 + [change_bytes]
    if suffix in (".h5", ".gzip", ".lzf"):
        compression = None if suffix == ".h5" else suffix[1:]
        packed = compression is not None
        return [change_content(".h5", compression)] * 6 + [change_bytes, change_tables(packed), change_objects(packed)]
    kind = path.suffix
    more = [change_pickle] * 3 if kind == ".pt" else []
    return [change_content(kind)] * 6 + [change_bytes, change_directory, *more]
