"""Changes of files that get past checksums: numbers, names and tables are changed, and the file is written again.

Each takes a file of one kind and a generator of random numbers, and changes the file in place.
"""

from __future__ import annotations

import contextlib
import json
import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlstructs.files import archives, layout
from rlstructs.files.hdf5 import write_h5
from rlstructs.replay.rows import on_disk

Rng = random.Random

NUMBERS = [
    0,
    -1,
    1,
    2,
    3,
    5,
    7,
    64,
    255,
    2**16,
    2**31 - 1,
    2**31,
    2**32,
    2**53,
    2**62,
    2**63 - 1,
    2**63,
    2**64,
    10**19,
    10**30,
    10**39,
    -(2**63),
    0.5,
    -0.5,
    1e-320,
    1e300,
    1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
]
OTHERS = [
    "",
    "x",
    "é\x1b[2J",
    "float32",
    "float8_e5m2",
    "object",
    "int64",
    "PCG64",
    "MT19937",
    "jax",
    "\ud800",
    None,
    True,
    False,
    [],
    {},
    [[]],
    [0],
    [-1],
    [2**40],
    [1, 2, 3],
    {"": 1},
    {"x": {}},
]
RAW_JSON = [
    "1" * 5000,
    "[" * 3000 + "]" * 3000,
    '{"a":' * 2000 + "1" + "}" * 2000,
    "1e400",
    "-1e400",
    "NaN",
    "0." + "3" * 300,
    '{"x": 1, "x": 2}',
    "[" + "{}," * 3000 + "{}]",
    '"' + "x" * 3000 + '"',
]


# --- JSON ---------------------------------------------------------------------------------------------


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every entry of what JSON has: what it is in, and its key."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield tree, key
        yield from places(tree[key])


def change_json(tree: Any, rng: Rng) -> str:
    """Changes a few entries of what JSON has, and writes it."""
    marks: list[str] = []
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        found = list(places(tree))
        if not found:
            break
        where, key = rng.choice(found)
        act = rng.random()
        if act < 0.45:
            where[key] = nearby(where[key], rng)
        elif act < 0.65:
            where[key] = rng.choice(OTHERS)
        elif act < 0.75:
            where[key] = (
                rng.choice(found)[0][rng.choice(list(found))[1]] if rng.random() < 0.01 else _copied(found, rng)
            )
        elif act < 0.85:
            del where[key]
        elif act < 0.9 and isinstance(where, dict):
            where[rng.choice(["x", "", "é", *map(str, where)])] = where.pop(key)
        else:
            marks.append(rng.choice(RAW_JSON))
            where[key] = f"@{len(marks) - 1}@"
    text = json.dumps(tree)
    for number, raw in enumerate(marks):
        text = text.replace(f'"@{number}@"', raw)
    return text


def _copied(found: list[tuple[Any, Any]], rng: Rng) -> Any:
    where, key = rng.choice(found)
    return json.loads(json.dumps(where[key]))


def nearby(value: Any, rng: Rng) -> Any:
    """Another number than this one."""
    if type(value) in (int, float) and rng.random() < 0.5:
        return value + rng.choice([-2, -1, 1, 2])
    return rng.choice(NUMBERS)


# --- arrays -------------------------------------------------------------------------------------------


def change_array(array: np.ndarray, rng: Rng) -> np.ndarray:
    """Another array: of other numbers, shape or dtype."""
    act = rng.random()
    if act < 0.65 and array.size:
        array = np.array(array)
        flat = array.reshape(-1)
        for _ in range(rng.choice([1, 1, 3])):
            at = rng.randrange(flat.size)
            if array.dtype == bool:
                flat.view(np.uint8)[at] = rng.choice([0, 1, 2, 255])
                continue
            with np.errstate(all="ignore"):
                number = nearby(flat[at].item() if array.dtype.kind != "c" else 0, rng)
                low, high = (
                    (np.iinfo(array.dtype).min, np.iinfo(array.dtype).max) if array.dtype.kind in "iu" else (0, 0)
                )
                flat[at] = number if low == high else min(max(int(np.nan_to_num(number)), low), high)
        return array
    if act < 0.75:
        with np.errstate(all="ignore"):
            return array.astype(rng.choice(["int64", "int32", "float64", "bool", "uint8", "complex64", "float16"]))
    if act < 0.85:
        return np.ascontiguousarray(array.reshape(-1)[: rng.randrange(array.size + 1)])
    if act < 0.93:
        return (
            np.array(array)[None]
            if rng.random() < 0.5
            else np.zeros((*array.shape, rng.choice([0, 1, 2])), array.dtype)
        )
    return np.full(array.shape, nearby(0, rng) if array.dtype.kind in "fc" else rng.choice([0, 1]), array.dtype)


def change_held(header: dict[str, Any], arrays: dict[str, np.ndarray], rng: Rng) -> str:
    """Changes arrays, and what the header says of them, or something else of the header; returns that."""
    act = rng.random()
    if act < 0.5 and arrays:
        name = rng.choice(list(arrays))
        if rng.random() < 0.1:
            del arrays[name]
            if rng.random() < 0.7:
                header["arrays"].pop(name, None)
        else:
            arrays[name] = change_array(arrays[name], rng)
            if rng.random() < 0.9 and header["arrays"].get(name, {}).get("dtype") != "bfloat16":
                header["arrays"][name] = {"dtype": arrays[name].dtype.name, "shape": list(arrays[name].shape)}
        return json.dumps(header) if act < 0.4 else change_json(header, rng)
    if act < 0.9 and "state" in header:
        changed = dict(header)
        state = changed.pop("state")
        return json.dumps(changed)[:-1] + ', "state": ' + change_json(state, rng) + "}"
    return change_json(header, rng)


# --- archives -----------------------------------------------------------------------------------------


def read(path: Path, suffix: str, compressed: bool = False) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The header and the arrays of a file that is whole."""
    with layout.open_reader(path, suffix, compressed) as (reader, header):
        arrays = {}
        for name in header["arrays"]:
            dtype, shape = reader.spec_of(name)
            arrays[name] = np.empty(shape, dtype)
            reader.read_into(name, arrays[name])
        return json.loads(reader.text), arrays


def write(path: Path, suffix: str, text: str, arrays: dict[str, np.ndarray], compression: str | None = None) -> None:
    """Writes a file as the library does, of whatever header."""
    path.unlink()
    dtypes = {name: array.dtype.name for name, array in arrays.items()}
    text = text.encode("utf-8", "replace").decode()
    if suffix == ".h5":
        write_h5(path, text, arrays, dtypes, compression)
    else:
        archives.WRITERS[suffix](path, text, arrays, dtypes)


def change_content(suffix: str, compression: str | None = None) -> Callable[[Path, Rng], None]:
    """Changes headers and arrays, with checksums that are right."""

    def change(path: Path, rng: Rng) -> None:
        header, arrays = read(path, suffix, compression is not None)
        write(path, suffix, change_held(header, arrays, rng), arrays, compression)

    return change


def change_bytes(path: Path, rng: Rng) -> None:
    """Changes, cuts or repeats bytes."""
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 2, 8])):
        at = rng.randrange(len(data))
        data[at] = data[at] ^ (1 << rng.randrange(8)) if rng.random() < 0.5 else rng.choice([0, 1, 127, 128, 255])
    act, at = rng.random(), rng.randrange(len(data))
    if act < 0.1:
        del data[at:]
    elif act < 0.2:
        data[at:at] = data[at : at + rng.randrange(200)]
    elif act < 0.3:
        data[at : at + rng.choice([2, 4, 8])] = rng.choice([b"\xff", b"\0"]) * rng.choice([2, 4, 8])
    path.write_bytes(data)


# --- text ---------------------------------------------------------------------------------------------


def change_csv(path: Path, rng: Rng) -> None:
    """Changes cells or lines of a .csv, with checksums that are right."""
    lines = path.read_text().splitlines()
    at = rng.randrange(len(lines))
    cells = lines[at].split(",")
    act = rng.random()
    if act < 0.6:
        cells[rng.randrange(len(cells))] = rng.choice(
            [*map(str, NUMBERS), "", "x", "1" * 5000, '"', "True", "1_0", "0x1", "\0", "é"]
        )
        lines[at] = ",".join(cells)
    elif act < 0.7:
        del lines[at]
    elif act < 0.8:
        lines.insert(at, lines[at])
    elif act < 0.9:
        lines[at] += "," * rng.choice([1, 5000])
    else:
        lines = ["".join(lines) * rng.choice([1, 20])]
    path.write_bytes("\r\n".join(lines).encode())
    beside = path.with_suffix(".json")
    state = json.loads(beside.read_text())
    state["rows_crc32"] = zlib.crc32(path.read_bytes().rstrip(b"\r\n"))
    _sign(beside, json.dumps({key: value for key, value in state.items() if key != "crc32"}))


def change_beside(path: Path, rng: Rng) -> None:
    """Changes the .json beside a .csv, with a checksum that is right."""
    state = json.loads(path.read_text())
    del state["crc32"]
    _sign(path, change_json(state, rng))


def _sign(path: Path, text: str) -> None:
    try:
        state = json.loads(text)
        text = json.dumps(state | {"crc32": zlib.crc32(json.dumps(state).encode())})
    except (ValueError, RecursionError, TypeError):
        pass  # what is no JSON of Python's needs no checksum
    path.write_bytes(text.encode("utf-8", "replace"))


def change_folder(path: Path, rng: Rng) -> None:
    """Changes the file of a `RayReplay` that names the others, with a checksum that is right."""
    header = change_json(json.loads(json.loads(path.read_text())["header"]), rng)
    checksum = zlib.crc32(header.encode("utf-8", "replace"))
    path.write_text(json.dumps({"checksum": checksum, "header": header.encode("utf-8", "replace").decode()}))


def change_manifest(path: Path, rng: Rng) -> None:
    """Changes the manifest of a folder of rows, with a checksum that is right."""
    text = change_json(json.loads(path.read_text()), rng)
    with contextlib.suppress(ValueError, RecursionError):
        tree = json.loads(text)
        text = json.dumps({**tree, on_disk.CHECKSUM: on_disk.checksum_of(tree)})
    path.write_text(text)


def change_rows(path: Path, rng: Rng) -> None:
    """Changes numbers of a file of rows, or exchanges it for another one of the folder."""
    if rng.random() < 0.2:
        path.write_bytes(rng.choice(sorted(path.parent.glob("*.bin"))).read_bytes())
        return
    data = path.read_bytes()
    width = rng.choice([each for each in (8, 4, 1) if len(data) >= each])
    numbers = np.frombuffer(data[: len(data) // width * width], f"i{width}").copy()
    for _ in range(rng.choice([1, 1, 3])):
        at, limits = rng.randrange(numbers.size), np.iinfo(numbers.dtype)
        numbers[at] = min(max(int(np.nan_to_num(nearby(int(numbers[at]), rng))), limits.min), limits.max)
    path.write_bytes(numbers.tobytes() + data[numbers.nbytes :])


def change_state(path: Path, rng: Rng) -> None:
    """Changes a state that a program reads itself."""
    held = torch.load(path, weights_only=True)
    arrays = {
        name: tensor.view(torch.int16).numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()
        for name, tensor in held["arrays"].items()
    }
    if rng.random() < 0.5:
        name = rng.choice(list(arrays))
        held["arrays"][name] = torch.from_numpy(change_array(arrays[name], rng))
    else:
        text = change_json(held["state"], rng)
        try:
            held["state"] = json.loads(text)
        except (ValueError, RecursionError):
            held["state"] = text
    torch.save(held, path)
