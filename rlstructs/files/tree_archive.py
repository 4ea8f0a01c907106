"""A safe interpreter for `.pt` files of nested dicts, lists and tensors.

`torch.save` writes such files. `torch.load` unpacks compressed archives, reads beyond storages that are shorter than a
pickle says, and makes tensors that are larger than their file. Here nothing is imported or called that a file names,
and time and memory stay in proportion to the length of the file.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO, ClassVar

import torch

from rlstructs.checks import MOST_AXES, is_size
from rlstructs.files.opening import Entry, read_at, read_directory, size_of
from rlstructs.files.pickled import DTYPES_OF_STORAGES, GLOBALS, ORDERED_DICT, REBUILD, Storage, Unpickler

# The deepest nesting of collections.
MOST_NESTED = 100
# How many times the things in a file may be in a tree, and how many times its bytes in tensors: a state dict has the
# weights of a layer that is used twice under two names.
MOST_SHARED, LEAST_SHARED = 256, 1_000_000
# The key of a dict that stands for one array; see `checkpoints/trees.py`.
ARRAY = "__array__"

_DTYPES = {name: getattr(torch, name) for module, name in GLOBALS if module == "torch" and hasattr(torch, name)}
_DTYPES = {name: dtype for name, dtype in _DTYPES.items() if isinstance(dtype, torch.dtype)}


def _make_bytes(text: str = "", encoding: str = "latin1") -> bytes:
    if encoding != "latin1":
        raise ValueError("it holds bytes in another encoding")
    return text.encode("latin1")


# The types of arguments, and what is made of them.
_MAKERS: dict[tuple[str, str], tuple[tuple[type, ...], Callable[..., Any]]] = {
    ("torch", "Size"): ((tuple,), torch.Size),
    ("torch", "device"): ((str, int), torch.device),
    ("__builtin__", "complex"): ((float, float), complex),
    ("__builtin__", "bytes"): ((), bytes),
    ("_codecs", "encode"): ((str, str), _make_bytes),
}


class TreeUnpickler(Unpickler):
    """Reads the pickle of a tree.

    Args:
        data: the pickle.
        make_tensor: called with the storage, offset, size, stride and dtype of each tensor.
    """

    most_waiting: ClassVar[int] = sys.maxsize
    most_marks: ClassVar[int] = 2 * MOST_NESTED

    def __init__(self, data: bytes, make_tensor: Callable[..., Any]) -> None:
        super().__init__(data)
        self._make_tensor = make_tensor

    def _global(self) -> None:
        name = self._take_line(), self._take_line()
        if name in _MAKERS:
            self._push(_MAKERS[name])
        elif name in GLOBALS:
            self._push(_DTYPES.get(name[1], GLOBALS[name]) if name[0] == "torch" else GLOBALS[name])
        else:
            raise ValueError(f"it holds more than tensors: {'.'.join(name)}")

    def _text(self) -> None:
        self._push(self._take(self._take_number("<I")).decode("utf-8", "surrogatepass"))

    def _long(self) -> None:
        self._push(int.from_bytes(self._take(self._take_number("<B")), "little", signed=True))

    def _longer(self) -> None:
        self._push(int.from_bytes(self._take(self._take_number("<I")), "little", signed=True))

    def _tuple(self, values: list[Any]) -> None:
        self._push(tuple(values))

    def _dict(self) -> None:
        self._push({})

    def _list(self) -> None:
        self._push([])

    def _set(self, pairs: list[Any]) -> None:
        target = self._pop()
        if type(target) not in (dict, OrderedDict):
            raise ValueError("it sets a key of something that is not a dict")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if type(key) not in (str, int, float, bool) or key in target:
                raise ValueError("it holds a key that is not a text or number, or a key twice")
            target[key] = value
        self._push(target)

    def _append(self, values: Callable[[Unpickler], Any]) -> None:
        taken = values(self)
        target = self._pop()
        if type(target) is not list:
            raise ValueError("it appends to something that is not a list")
        target += taken if values is Unpickler._pop_to_mark else [taken]
        self._push(target)

    def _reduce(self) -> None:
        arguments, function = self._pop(), self._pop()
        if function is ORDERED_DICT and arguments == ():
            self._push(OrderedDict())
        elif function is REBUILD and type(arguments) is tuple:
            self._push(self._rebuild(*arguments))
        elif type(function) is tuple and function in _MAKERS.values() and type(arguments) is tuple:
            types, make = function
            if len(arguments) > len(types) or any(type(a) is not b for a, b in zip(arguments, types, strict=False)):
                raise ValueError("it holds more than tensors")
            self._push(make(*arguments))
        else:
            raise ValueError("it holds more than tensors")

    def _rebuild(
        self, storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, *more: Any
    ) -> Any:
        """Makes a tensor from the arguments of torch's `_rebuild_tensor_v2` or `_v3`."""
        if type(storage) is not Storage or type(size) is not tuple or type(stride) is not tuple or len(more) > 1:
            raise ValueError("it holds a tensor that is not plain")
        dtype = more[0] if more else _DTYPES.get(DTYPES_OF_STORAGES.get(storage.kind, ""))
        sizes = (offset, *size, *stride)
        if type(dtype) is not torch.dtype or not all(map(is_size, sizes)) or not len(size) == len(stride) <= MOST_AXES:
            raise ValueError("it holds a tensor that is not plain")
        if type(requires_grad) is not bool or type(hooks) is not OrderedDict or hooks:
            raise ValueError("it holds a tensor that is not plain")
        tensor = self._make_tensor(storage, offset, size, stride, dtype)
        return tensor.requires_grad_() if requires_grad and tensor is not None else tensor

    def _build(self) -> None:
        state = self._pop()
        target = self._pop()
        if type(target) is not OrderedDict or type(state) is not dict or state.keys() != {"_metadata"}:
            raise ValueError("it holds more than tensors")
        target._metadata = state["_metadata"]  # type: ignore[attr-defined] # versions of modules, as torch keeps them
        self._push(target)


TreeUnpickler.steps = {
    **Unpickler.steps,
    b"c": TreeUnpickler._global,
    b"X": TreeUnpickler._text,
    b"\x8a": TreeUnpickler._long,
    b"\x8b": TreeUnpickler._longer,
    b"}": TreeUnpickler._dict,
    b"]": TreeUnpickler._list,
    b"R": TreeUnpickler._reduce,
    b"b": TreeUnpickler._build,
}


def read_tree(file: BinaryIO) -> Any:
    """Reads a tree; its tensors are in host memory.

    Raises:
        ValueError, TypeError, RuntimeError: it is not what `torch.save` writes for such a tree, or is damaged.
    """
    size, entries = _find_entries(file)
    made, left = dict[str, torch.UntypedStorage](), [MOST_SHARED * size + LEAST_SHARED]

    def make(storage: Storage, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Any:
        entry, nbytes = entries[f"data/{storage.key}"], math.prod(shape) * dtype.itemsize
        left[0] -= nbytes
        if nbytes > entry.nbytes or left[0] < 0:
            raise ValueError("it holds a tensor that is larger than the bytes in it")
        if storage.key not in made:
            data = torch.frombuffer(_read_entry(file, entry), dtype=torch.uint8) if entry.nbytes else torch.empty(0)
            made[storage.key] = data.untyped_storage()
        return torch.empty(0, dtype=dtype, device="cpu").set_(made[storage.key], offset, shape, stride)

    return _read(file, entries, make)


def read_outline(file: BinaryIO) -> Any:
    """Reads a tree with None in place of each tensor.

    Raises the same errors as `read_tree`.
    """
    return _read(file, _find_entries(file)[1], lambda *_: None)


def _find_entries(file: BinaryIO) -> tuple[int, dict[str, Entry]]:
    """Returns the size of a file, and its entries by name.

    Names begin inside the folder of `data.pkl`.
    """
    size = size_of(file)
    found = {entry.name: entry for entry in read_directory(file, size)}
    pickled = [name for name in found if name.endswith("/data.pkl")]
    if len(pickled) != 1:
        raise ValueError("it is not an archive of torch")
    folder = pickled[0].removesuffix("data.pkl")
    return size, {name.removeprefix(folder): entry for name, entry in found.items() if name.startswith(folder)}


def _read(file: BinaryIO, entries: dict[str, Entry], make_tensor: Callable[..., Any]) -> Any:
    data = bytes(_read_entry(file, entries["data.pkl"]))
    if "byteorder" in entries and bytes(_read_entry(file, entries["byteorder"])) != sys.byteorder.encode():
        raise ValueError("it was written on a machine of another byte order")
    tree = TreeUnpickler(data, make_tensor).load()
    if weigh(tree, {})[1] > MOST_SHARED * len(data) + LEAST_SHARED:
        raise ValueError("it has the same things in too many places")
    return tree


def _read_entry(file: BinaryIO, entry: Entry) -> bytearray:
    data = bytearray(read_at(file, entry.start, entry.nbytes))
    if zlib.crc32(data) != entry.checksum:
        raise ValueError(f"{entry.name}: its checksum is wrong")
    return data


def weigh(tree: Any, known: dict[int, tuple[int, int] | None], depth: int = 0) -> tuple[int, int]:
    """Returns the depth of a tree and its number of nodes.

    A shared node counts at every place.

    Raises:
        ValueError: it is nested too deeply, holds itself, or holds the same array in several places.
    """
    if not isinstance(tree, (dict, list, tuple)):
        return 0, 1
    if id(tree) in known:
        found = known[id(tree)]
        if found is None or (type(tree) is dict and ARRAY in tree and "bytes" in tree):
            raise ValueError("it holds itself, or an array in several places")
        return found
    if depth > MOST_NESTED:
        raise ValueError("its pickle is nested too deeply")
    known[id(tree)] = None
    values: Iterable[Any] = tree.values() if isinstance(tree, dict) else tree
    parts = [weigh(value, known, depth + 1) for value in values]
    height, weight = 1 + max((part[0] for part in parts), default=0), 1 + sum(part[1] for part in parts)
    if height > MOST_NESTED:
        raise ValueError("its pickle is nested too deeply")
    known[id(tree)] = height, weight
    return height, weight
