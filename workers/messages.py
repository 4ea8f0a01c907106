"""What crosses a pipe: requests one way, replies the other. The only place where their names exist.

Everything is pickled by cloudpickle: lambdas, closures, and classes of a script arrive by value,
so a worker never has to import the program's main module. The exception are bytes that a job reads and
writes itself, for what is asked so often that pickling would be most of the work.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import io
import os
import pickle
import re
import struct
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import cloudpickle

from workers.errors import RemoteTraceback, WorkerError

# Begins a message that is bytes of the job's own; a pickled one begins with b"\x80".
RAW = b"\0"
# Before every message, and before each of the bytes objects of a `Post`, how long it is.
MESSAGE_LENGTH, LENGTH = struct.Struct("!Q"), struct.Struct("!I")
# Bytes that go into the pipe of a side that has read all so far without waiting for it.
AT_ONCE = 16384
# The classes that cloudpickle has made in this process, or sent, by the ids that it gives them.
_classes = importlib.import_module("cloudpickle.cloudpickle")._DYNAMIC_CLASS_TRACKER_BY_ID
# Begins the note on an exception that says where it comes from.
RAISED = "raised in worker "


class State(enum.Enum):
    """Where a worker is, as its parent knows it."""

    IDLE = "idle"
    BUSY = "busy"
    GONE = "gone"


@dataclass(frozen=True)
class Build:
    """The first request: take over what is set, call `setup(index)` and `init_worker(index)`, then become the job
    that `factory(index, *shared, *args)` returns.

    `script` is what `__main__` is to be (`main_module.Script`); None where it is what it has to be.
    """

    settings: dict[str, bytes]
    setup: bytes
    init_worker: bytes | None
    factory: bytes
    environ: dict[str, str]
    directory: str | None
    script: Any = None
    args: tuple[Any, ...] = ()
    label: ClassVar[str] = "build"
    n_replies: ClassVar[int] = 1

    @classmethod
    def here(
        cls,
        settings: dict[str, bytes],
        setup: bytes,
        init_worker: bytes | None,
        factory: bytes,
        script: Any = None,
    ) -> Build:
        """With the environment variables and the working directory as they are now."""
        try:
            directory = os.getcwd()
        except FileNotFoundError:  # deleted under this process
            directory = None
        return cls(settings, setup, init_worker, factory, dict(os.environ), directory, script)


@dataclass(frozen=True)
class Call:
    """Call a method of the job."""

    method: str
    args: tuple[Any, ...]
    n_replies: ClassVar[int] = 1

    @property
    def label(self) -> str:
        return self.method


class Post(NamedTuple):
    """Call the job's `answer` with each of some bytes; what that returns is a reply, bytes too.

    Not sent itself, but its message. The same one may be sent any number of times.

    Attributes:
        label: what errors call it.
        n_replies: how many bytes objects it holds.
        message: those, one behind another, each with its length before it; as `framed` gives it.
    """

    label: str
    n_replies: int
    message: list[bytes]

    @classmethod
    def of(cls, label: str, *data: bytes) -> Post:
        return cls(label, len(data), framed(RAW + b"".join([LENGTH.pack(len(part)) + part for part in data])))


@dataclass(frozen=True)
class Close:
    """Close the job, reply, and end."""

    label: ClassVar[str] = "close"
    n_replies: ClassVar[int] = 1


@dataclass(eq=False)
class Asked:
    """What was asked of a worker, and what became of it.

    Attributes:
        index: of the worker.
        label: of the request.
        is_kept: whether the reply is to be found here.
        is_over: whether there is one, or never will be.
        value: what the job replied.
        error: why there is no value.
    """

    index: int
    label: str
    is_kept: bool = True
    is_over: bool = False
    value: Any = None
    error: BaseException | None = None

    def end(self, value: Any = None, error: BaseException | None = None) -> None:
        """Keeps what became of it."""
        self.value, self.error, self.is_over = value, error, True


class Result(NamedTuple):
    """The reply when all went well."""

    value: Any


class Failure(NamedTuple):
    """The reply when the job raised: the exception, pickled apart so that it may fail alone."""

    exception: bytes | None
    summary: str
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return cls(_pickled(error), _summary(error), text)

    def to_exception(self, worker_index: int, request: str) -> BaseException:
        """The exception to raise in the parent: the original class where it can be had."""
        where = f"{RAISED}{worker_index} during {request!r}"
        error = _unpickled(self.exception)
        if error is None:
            error = WorkerError(f"{self.summary} ({where})", worker_index)
        else:
            add_note(error, where)
            if isinstance(error, ModuleNotFoundError) and error.name in sys.modules:
                module = f"sys.modules[{error.name!r}]"
                add_note(error, f"it is loaded here: cloudpickle.register_pickle_by_value({module}) sends all of it")
        error.__cause__ = RemoteTraceback(self.text, worker_index)
        return error


def add_note(error: BaseException, note: str) -> None:
    """Adds a line to what is shown of an exception."""
    # The exceptions' own add_note is CPython 3.11; the attribute is all there is to it.
    try:
        error.__notes__ = [*getattr(error, "__notes__", ()), note]
    except Exception:  # slots, or a __setattr__ that refuses: the cause still names the worker
        return


def apart(message: bytes) -> list[bytes]:
    """What the message of a `Post` holds, which comes without its first byte."""
    data, at = [], 0
    while at < len(message):
        [length] = LENGTH.unpack_from(message, at)
        at += LENGTH.size + length
        data.append(message[at - length : at])
    return data


def framed(data: bytes) -> list[bytes]:
    """A message as it goes through a pipe: in one piece, or in two where it is too long to be copied."""
    length = MESSAGE_LENGTH.pack(len(data))
    return [length + data] if len(data) <= AT_ONCE else [length, data]


def dumps(obj: Any) -> bytes:
    """Pickles by cloudpickle."""
    return cloudpickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)  # type: ignore[no-any-return]


def loads(data: bytes | bytearray | memoryview) -> Any:
    """Unpickles, leaving classes that this process already has as they are."""
    return Unpickler(io.BytesIO(data)).load()


class Unpickler(pickle.Unpickler):
    """Leaves classes that this process already has as they are."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._made: list[Any] = []  # classes that are made here, and yet to be filled

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if module.startswith("cloudpickle"):
            if name in ("_make_skeleton_class", "_make_skeleton_enum"):
                return partial(self._make_class, found)
            if name == "_class_setstate":
                return partial(self._fill_class, found)
        return found

    def _make_class(self, make: Callable[..., Any], *arguments: Any) -> Any:
        is_here = arguments[-2] in _classes
        made = make(*arguments)
        if not is_here:
            self._made.append(made)
        return made

    def _fill_class(self, set_state: Callable[..., Any], cls: Any, state: Any) -> Any:
        # A class of the script comes back with every exception of it. cloudpickle finds the class that
        # is here already, but would then overwrite its methods with copies that see other globals.
        names = set(state[0]) - {"__module__", "__doc__"}
        is_made_here = any(cls is made for made in self._made)
        return cls if names and names <= set(vars(cls)) and not is_made_here else set_state(cls, state)


# Where an object lies, in its repr.
ADDRESS = re.compile(r"\b0x[0-9a-f]+")


def _pickled(error: BaseException) -> bytes | None:
    # SystemExit and KeyboardInterrupt would end the parent, quietly: they come as a WorkerError.
    if not isinstance(error, Exception):
        return None
    # Pickle calls the class with what the constructor has made of its arguments: a message made of a
    # message, often. Then it is put together without the constructor.
    for sent in (_Group(error),) if _is_group(error) else (error, _Parts(error)):
        with contextlib.suppress(BaseException):  # SystemExit too, of a __reduce__ or a constructor
            data = dumps(sent)
            if ADDRESS.sub("", _summary(loads(data))) == ADDRESS.sub("", _summary(error)):
                return data
    return None


class _Parts:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        error = self._error
        return _put_together, (type(error), error.args, dict(vars(error)))


def _put_together(cls: type[Exception], args: tuple[Any, ...], attributes: dict[str, Any]) -> Exception:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


def _is_group(error: BaseException) -> bool:
    """Whether it is an ExceptionGroup, Python's (3.11) or that of the package `exceptiongroup`."""
    return any(base.__name__ == "BaseExceptionGroup" for base in type(error).__mro__)


class _Group:
    """An ExceptionGroup whose members travel as each would alone; one that cannot is a WorkerError."""

    def __init__(self, error: Any) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        error = self._error
        members = [_pickled(member) or dumps(WorkerError(_summary(member))) for member in error.exceptions]
        return _put_group_together, (type(error), error.message, members, dict(vars(error)))


def _put_group_together(cls: Any, message: str, members: list[bytes], attributes: dict[str, Any]) -> Any:
    [base] = [base for base in cls.__mro__ if base.__name__ == "BaseExceptionGroup"]
    group = base.__new__(cls, message, [loads(member) for member in members])
    group.__dict__.update(attributes)
    return group


def _summary(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(type(error), error)).strip()


def _unpickled(data: bytes | None) -> BaseException | None:
    try:
        error = None if data is None else loads(data)
    except (Exception, SystemExit):
        return None
    return error if isinstance(error, Exception) else None

