"""The messages of a pipe: requests one way, replies the other.

cloudpickle pickles them all: lambdas, closures and classes of a script arrive by value, so a worker never imports the
program's main module. The one exception is a `Post`, whose bytes the job itself reads and writes: it is for requests
so frequent that pickling would be most of the work.
"""

from __future__ import annotations

import enum
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

# The first byte of a message that the job itself reads or writes; a pickled message begins with b"\x80".
RAW = b"\0"
# The length that precedes every message, and the one that precedes each bytes object of a `Post`.
MESSAGE_LENGTH, LENGTH = struct.Struct("!Q"), struct.Struct("!I")
# Bytes that fit into an empty pipe without waiting for the other side to read.
AT_ONCE = 16384


class State(enum.Enum):
    """The state of a worker, as its parent knows it."""

    IDLE = "idle"
    BUSY = "busy"
    GONE = "gone"


@dataclass(frozen=True)
class Build:
    """The first request: apply the settings, call `setup(index)` and `init_worker(index)`, then build the job.

    The job is what `factory(index, *shared, *args)` returns. `script` (a `main_module.Script`) becomes `__main__`; a
    forked worker, which has the main module already, gets None.
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
    def from_this_process(
        cls,
        settings: dict[str, bytes],
        setup: bytes,
        init_worker: bytes | None,
        factory: bytes,
        script: Any = None,
    ) -> Build:
        """Makes a request with this process's environment variables and working directory."""
        try:
            directory = os.getcwd()
        except FileNotFoundError:  # the directory was deleted
            directory = None
        return cls(settings, setup, init_worker, factory, dict(os.environ), directory, script)


@dataclass(frozen=True)
class Call:
    """A request to call a method of the job."""

    method: str
    args: tuple[Any, ...]
    n_replies: ClassVar[int] = 1

    @property
    def label(self) -> str:
        return self.method


class Post(NamedTuple):
    """A request to call the job's `answer` with each of several bytes objects.

    Each call returns the bytes of one reply.

    Only `message` is sent. The same post may be sent any number of times.

    Attributes:
        label: its name in error messages.
        n_replies: the number of bytes objects, and so of replies.
        message: the bytes objects one after another, each after its length; framed by `frame`.
    """

    label: str
    n_replies: int
    message: list[bytes]

    @classmethod
    def of(cls, label: str, *data: bytes) -> Post:
        return cls(label, len(data), frame(RAW + b"".join([LENGTH.pack(len(part)) + part for part in data])))


@dataclass(frozen=True)
class Close:
    """A request to close the job, reply, and end."""

    label: ClassVar[str] = "close"
    n_replies: ClassVar[int] = 1


class Result(NamedTuple):
    """The reply of a call that returned."""

    value: Any


def split_post(message: bytes) -> list[bytes]:
    """Splits the message of a `Post`, without its first byte, into its bytes objects."""
    data, at = [], 0
    while at < len(message):
        [length] = LENGTH.unpack_from(message, at)
        at += LENGTH.size + length
        data.append(message[at - length : at])
    return data


def frame(data: bytes) -> list[bytes]:
    """Puts the length before a message.

    In one piece, or in two if copying the message would cost too much.
    """
    length = MESSAGE_LENGTH.pack(len(data))
    return [length + data] if len(data) <= AT_ONCE else [length, data]


@dataclass(eq=False)
class Future:
    """The reply to a request, which may not have come yet.

    Attributes:
        index: the worker's index.
        label: the request's label.
        is_over: whether the reply has come, or never will.
        value: the job's reply.
        error: the reason why there is no value. Until `is_over`, it may be a `WorkerTimeout`, which a later reply
            replaces.
    """

    index: int
    label: str
    is_over: bool = False
    value: Any = None
    error: BaseException | None = None

    def end(self, value: Any = None, error: BaseException | None = None) -> None:
        """Keeps the reply, or the reason why there is none."""
        self.value, self.error, self.is_over = value, error, True


def gather_values(futures: Sequence[Future]) -> list[Any]:
    """Returns the values of settled futures, or raises the first worker's failure."""
    values = [each.value for each in futures if each.error is None]
    if len(values) == len(futures):
        return values
    # Failed requests come before late ones.
    first = min((each for each in futures if each.error is not None), key=lambda each: (not each.is_over, each.index))
    assert first.error is not None
    raise first.error


def find_failures(futures: Sequence[Future]) -> dict[int, BaseException]:
    """The errors of futures that failed, by worker index."""
    return {future.index: future.error for future in futures if future.error is not None}
