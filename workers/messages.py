"""What crosses a pipe: requests one way, replies the other. The only place where their names exist.

Everything is pickled by cloudpickle: lambdas, closures, and classes of a script arrive by value,
so a worker never has to import the program's main module. The exception are bytes that a job reads and
writes itself, for what is asked so often that pickling would be most of the work.
"""

from __future__ import annotations

import enum
import importlib
import os
import struct
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

# Begins a message that is bytes of the job's own; a pickled one begins with b"\x80".
RAW = b"\0"
# Before every message, and before each of the bytes objects of a `Post`, how long it is.
MESSAGE_LENGTH, LENGTH = struct.Struct("!Q"), struct.Struct("!I")
# Bytes that go into the pipe of a side that has read all so far without waiting for it.
AT_ONCE = 16384
# The classes that cloudpickle has made in this process, or sent, by the ids that it gives them.
_classes = importlib.import_module("cloudpickle.cloudpickle")._DYNAMIC_CLASS_TRACKER_BY_ID
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
