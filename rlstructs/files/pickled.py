"""A safe interpreter for the pickle in a `.pt` file.

It makes only numbers, text and plain tensors. It knows the instructions that `torch.save` needs for a dictionary of
tensors, in protocol 2. Classes are looked up by name in a table: nothing is imported, and nothing that a file names is
called. Time and memory stay proportional to the length of the pickle, because only text can be a key, tuples are short
and nested at most once, and the memo is filled in order.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from rlstructs.checks import DTYPES, MOST_AXES, is_size
from rlstructs.frameworks.torch import FLOAT8

# The integers that store the bits of dtypes that numpy lacks.
BITS = {
    "bfloat16": "int16",
    "complex32": "int32",
    **{str(dtype).removeprefix("torch."): "uint8" for dtype in FLOAT8},
}
# The numbers in a pickle, by their forms.
NUMBERS = {form: struct.Struct(form) for form in ("<B", "<H", "<I", "<i", ">d")}
# The most values on the stack; `torch.save` writes the entries of a dictionary in batches of a thousand.
MOST_WAITING = 10_000

DTYPES_OF_STORAGES = {
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}


class StoredTensor(NamedTuple):
    """A tensor in a `.pt` file: storage key, dtype and shape.

    The key names its bytes. The class is a tuple, so that no instruction of a pickle can change it.
    """

    key: str
    dtype: np.dtype
    shape: tuple[int, ...]


class Storage(NamedTuple):
    """Bytes in a file: the name of torch's class for them, and their key."""

    kind: str
    key: str


class _Mark:
    """A value that stands for one object of torch or Python."""

    __slots__ = ()


class _NestedTuple(tuple[Any, ...]):
    """A tuple that contains tuples."""

    __slots__ = ()


REBUILD, NO_HOOKS, OTHER = _Mark(), _Mark(), _Mark()
ORDERED_DICT = _Mark()
GLOBALS: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): REBUILD,
    ("torch._utils", "_rebuild_tensor_v3"): REBUILD,
    ("collections", "OrderedDict"): ORDERED_DICT,
    ("torch.storage", "UntypedStorage"): "UntypedStorage",
    **{("torch", name): name for name in (*DTYPES_OF_STORAGES, *DTYPES, *BITS)},
}


def read_tensor(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, *more: Any
) -> StoredTensor:
    """Makes a `StoredTensor` from the arguments of torch's `_rebuild_tensor_v2` or `_v3`.

    Raises:
        ValueError: they do not describe a plain tensor: contiguous, at offset 0, without gradient and hooks.
    """
    if type(storage) is not Storage or type(size) is not tuple or type(stride) is not tuple:
        raise ValueError("it holds a tensor that is not plain")
    name = more[0] if more else DTYPES_OF_STORAGES.get(storage.kind)
    dtype = DTYPES.get(BITS.get(name, name)) if type(name) is str else None
    if dtype is None or not all(map(is_size, (*size, *stride))) or not len(size) == len(stride) <= MOST_AXES:
        raise ValueError("it holds a tensor that is not plain")
    # torch gives axes of length 0 and 1 any stride.
    plain = all(n <= 1 or s == math.prod(size[i + 1 :]) for i, (n, s) in enumerate(zip(size, stride, strict=True)))
    if requires_grad is not False or hooks is not NO_HOOKS or offset != 0 or not (plain or 0 in size):
        raise ValueError("it holds a tensor that is not plain")
    return StoredTensor(storage.key, dtype, size)


class Unpickler:
    """Reads the pickle of a dictionary.

    Args:
        data: the pickle.
    """

    #: What each instruction does.
    steps: ClassVar[Mapping[bytes, Callable[[Any], None]]]
    #: The most values on the stack, and the most marks between them.
    most_waiting: ClassVar[int] = MOST_WAITING
    most_marks: ClassVar[int] = MOST_AXES

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []
        self._content: dict[str, Any] | None = None

    def load(self) -> Any:
        """Returns the pickled object; for a file of `torch.save`, a dictionary.

        Its keys are text. Its values are text, numbers or `StoredTensor`s; a `_Mark` stands for anything else.

        Raises:
            ValueError, TypeError: this is not what `torch.save` writes for a dictionary of tensors.
        """
        data, steps = self._data, self.steps
        while (code := data[self._at : self._at + 1]) != b".":
            self._at += 1
            step = steps.get(code)
            if step is None:
                if not code:
                    raise ValueError("its pickle ends too early")
                raise ValueError(f"it holds more than tensors: instruction {code!r}")
            step(self)
            if len(self._stack) > self.most_waiting:
                raise ValueError("its pickle is nested too deeply")
        return self._pop()

    def _take(self, n: int) -> bytes:
        end = self._at + n
        if end > len(self._data):
            raise ValueError("its pickle ends too early")
        taken, self._at = self._data[self._at : end], end
        return taken

    def _take_number(self, form: str) -> Any:
        kind, at = NUMBERS[form], self._at
        self._at = at + kind.size
        if self._at > len(self._data):
            raise ValueError("its pickle ends too early")
        return kind.unpack_from(self._data, at)[0]

    def _take_line(self) -> str:
        end = self._data.find(b"\n", self._at, self._at + 200)
        if end < 0:
            raise ValueError("a name in its pickle has no end")
        line = self._data[self._at : end].decode()
        self._at = end + 1
        return line

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _check_top(self) -> None:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise ValueError("its pickle reads from an empty stack")

    def _pop(self) -> Any:
        self._check_top()
        return self._stack.pop()

    def _pop_to_mark(self) -> list[Any]:
        if not self._marks:
            raise ValueError("its pickle reads from an empty stack")
        at = self._marks.pop()
        taken = self._stack[at:]
        del self._stack[at:]
        return taken

    # Instructions

    def _protocol(self) -> None:
        if self._take(1) != b"\2":
            raise ValueError("its pickle is not of protocol 2")

    def _mark(self) -> None:
        if len(self._marks) > self.most_marks:
            raise ValueError("its pickle is nested too deeply")
        self._marks.append(len(self._stack))

    def _global(self) -> None:
        name = self._take_line(), self._take_line()
        if name not in GLOBALS:
            raise ValueError(f"it holds more than tensors: {'.'.join(name)}")
        self._push(GLOBALS[name])

    def _text(self) -> None:
        self._push(self._take(self._take_number("<I")).decode())

    def _long(self) -> None:
        n = self._take_number("<B")
        if n > 9:  # more than 64 bits and a sign
            raise ValueError(f"it holds an integer of {n} bytes")
        self._push(int.from_bytes(self._take(n), "little", signed=True))

    def _tuple(self, values: list[Any]) -> None:
        kinds = {*map(type, values)}
        if len(values) > MOST_AXES or _NestedTuple in kinds:
            raise ValueError("it holds a tuple that is not a shape")
        self._push((_NestedTuple if tuple in kinds else tuple)(values))

    def _tuple_of(self, n: int) -> None:
        self._tuple([self._pop() for _ in range(n)][::-1])

    def _dict(self) -> None:
        if self._content is not None:  # a dictionary inside the content
            self._push(OTHER)
            return
        self._content = {}
        self._push(self._content)

    def _put(self, form: str) -> None:
        if self._take_number(form) != len(self._memo):
            raise ValueError("its pickle fills its memo out of order")
        self._check_top()
        self._memo.append(self._stack[-1])

    def _get(self, form: str) -> None:
        at = self._take_number(form)
        if at >= len(self._memo):
            raise ValueError("its pickle reads a memo that it has not written")
        self._push(self._memo[at])

    def _persistent(self) -> None:
        pid = self._pop()
        if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage" or not type(pid[1]) is type(pid[2]) is str:
            raise ValueError("it holds more than tensors")
        self._push(Storage(pid[1], pid[2]))

    def _reduce(self) -> None:
        arguments, function = self._pop(), self._pop()
        if function is ORDERED_DICT and arguments == ():
            self._push(NO_HOOKS)
        elif function is REBUILD and isinstance(arguments, tuple):
            self._push(read_tensor(*arguments))
        else:
            raise ValueError("it holds more than tensors")

    def _set(self, pairs: list[Any]) -> None:
        target = self._pop()
        if target is self._content is not None:
            for key, value in zip(pairs[::2], pairs[1::2], strict=True):
                if type(key) is not str or key in self._content:
                    raise ValueError("it holds a key that is not text, or a key twice")
                self._content[key] = value
        elif target is not OTHER:
            raise ValueError("it holds more than tensors")
        self._push(target)

    def _set_one(self) -> None:
        value, key = self._pop(), self._pop()
        self._set([key, value])

    def _append(self, values: Callable[[Unpickler], Any]) -> None:
        values(self)
        if self._pop() is not OTHER:
            raise ValueError("it holds more than tensors")
        self._push(OTHER)


Unpickler.steps = {
    b"\x80": Unpickler._protocol,
    b"c": Unpickler._global,
    b"X": Unpickler._text,
    b"K": lambda u: u._push(u._take_number("<B")),
    b"M": lambda u: u._push(u._take_number("<H")),
    b"J": lambda u: u._push(u._take_number("<i")),
    b"G": lambda u: u._push(u._take_number(">d")),
    b"\x8a": Unpickler._long,
    b"\x88": lambda u: u._push(True),
    b"\x89": lambda u: u._push(False),
    b"N": lambda u: u._push(None),
    b"(": Unpickler._mark,
    b")": lambda u: u._push(()),
    b"\x85": lambda u: u._tuple_of(1),
    b"\x86": lambda u: u._tuple_of(2),
    b"\x87": lambda u: u._tuple_of(3),
    b"t": lambda u: u._tuple(u._pop_to_mark()),
    b"}": Unpickler._dict,
    b"]": lambda u: u._push(OTHER),
    b"a": lambda u: u._append(Unpickler._pop),
    b"e": lambda u: u._append(Unpickler._pop_to_mark),
    b"s": Unpickler._set_one,
    b"u": lambda u: u._set(u._pop_to_mark()),
    b"q": lambda u: u._put("<B"),
    b"r": lambda u: u._put("<I"),
    b"h": lambda u: u._get("<B"),
    b"j": lambda u: u._get("<I"),
    b"Q": Unpickler._persistent,
    b"R": Unpickler._reduce,
}
