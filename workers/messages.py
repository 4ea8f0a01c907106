"""The messages of a pipe, requests and replies, and the pipe itself.

cloudpickle pickles them all: lambdas, closures and classes of a script arrive by value, so a worker never imports the
program's main module. The one exception is a `Post`, whose bytes the job itself reads and writes: it is for requests
so frequent that pickling would be most of the work.

The pipe carries whole messages and can be polled. It raises EOFError once the other side is gone.
"""

from __future__ import annotations

import enum
import os
import pickle
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from rlstructs.workers import pickling

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


# The most bytes that one call reads, and the bytes that it allocates: LARGE for a message that is known to be long,
# SMALL for all others, because most are short.
SMALL, LARGE = 1 << 13, 1 << 20
# Plain numbers: joining members of an enumeration would run Python code for every message. On a system without
# MSG_NOSIGNAL, a program that does not ignore SIGPIPE would end with its first worker.
DONT_WAIT = int(socket.MSG_DONTWAIT)
SEND_AT_ONCE = DONT_WAIT | int(getattr(socket, "MSG_NOSIGNAL", 0))
# Seconds that `sched_yield` takes if no other process wants the core; it takes longer if one gets it.
YIELD_TIME = 5e-6
# The longest wait, in milliseconds, that poll accepts.
MAX_MILLISECONDS = 2**31 - 1


def deadline_in(seconds: float | None) -> float | None:
    """Returns what `time.monotonic` will return in this many seconds; None for no deadline."""
    return None if seconds is None else time.monotonic() + float(seconds)  # a numpy.float32 would round the sum


def milliseconds_until(deadline: float | None) -> float | None:
    """Returns the milliseconds until a deadline, for poll.

    The deadline is a time of `time.monotonic`; None for no deadline.
    """
    return None if deadline is None else min(max(0.0, (deadline - time.monotonic()) * 1000), MAX_MILLISECONDS)


class Channel:
    """One end of a pipe. It can be pickled while a process starts."""

    def __init__(self, end: socket.socket) -> None:
        end.settimeout(None)  # the program may have set another default
        self._socket = end
        self._readable = select.poll()
        self._readable.register(end.fileno(), select.POLLIN)
        self.unread: bytes | bytearray = b""  # read, but not returned by `receive` yet
        self._unsent: list[memoryview] = []  # the rest of a message whose beginning the other side has

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        ours, theirs = socket.socketpair()
        return cls(ours), cls(theirs)

    def __getstate__(self) -> socket.socket:
        return self._socket

    def __setstate__(self, end: socket.socket) -> None:
        Channel.__init__(self, end)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        """Sends one message.

        Raises:
            EOFError: the other side is gone.
        """
        self.send_framed(frame(pickling.dumps(message)))

    def send_framed(
        self, parts: list[bytes], deadline: float | None = None, sentinel: Callable[[], int] | None = None
    ) -> None:
        """Sends a message that is pickled already.

        Args:
            parts: the message, framed by `frame`.
            deadline: when to give up on a side that does not read, in the time of `time.monotonic`.
            sentinel: returns a descriptor that becomes readable when the other side ends: a program that it started
                may keep its end of the pipe open.

        Raises:
            EOFError: the other side is gone.
            TimeoutError: it does not read. If it has got a part of the message, it needs the rest next: `send_rest`.
        """
        try:
            for at, part in enumerate(parts):
                if (n_sent := self._try_to_send(part)) < len(part):
                    self._unsent = [memoryview(each) for each in (part, *parts[at + 1 :])]
                    self._unsent[0] = self._unsent[0][n_sent:]
                    self._send_unsent(deadline, sentinel, may_drop=not at + n_sent)
                    return
        except (BrokenPipeError, ConnectionResetError) as error:
            raise EOFError("the other side of the channel is gone") from error

    def send_rest(self, deadline: float | None = None, sentinel: Callable[[], int] | None = None) -> None:
        """Sends the rest of a message that was begun, if any.

        See `send_framed`.
        """
        try:
            self._send_unsent(deadline, sentinel)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise EOFError("the other side of the channel is gone") from error

    @property
    def is_in_message(self) -> bool:
        """Whether the other side has received only a part of a message."""
        return bool(self._unsent)

    def _try_to_send(self, part: bytes | memoryview) -> int:
        """Sends as much as fits into the pipe, and returns the number of bytes."""
        try:
            return self._socket.send(part, SEND_AT_ONCE)
        except BlockingIOError:
            return 0

    def _send_unsent(self, deadline: float | None, sentinel: Callable[[], int] | None, may_drop: bool = False) -> None:
        """Sends the unsent bytes.

        With `may_drop`, drops them if none could be sent.
        """
        poll, watched = select.poll(), None if sentinel is None else sentinel()
        # Reads meanwhile: the other side may have to finish writing before it reads.
        poll.register(self.fileno(), select.POLLOUT | select.POLLIN)
        if watched is not None:
            poll.register(watched, select.POLLIN)
        try:
            while self._unsent:
                events = poll.poll(milliseconds_until(deadline))
                if not events:
                    raise TimeoutError("the other side of the channel does not read")
                if any(fd == watched for fd, _ in events):
                    raise EOFError("the other side of the channel is gone")
                self.read_available()
                n_sent = self._try_to_send(self._unsent[0])
                may_drop = may_drop and not n_sent
                self._unsent[0] = self._unsent[0][n_sent:]
                if not self._unsent[0]:
                    del self._unsent[0]
        except BaseException:
            if may_drop:
                self._unsent = []
            raise

    def can_send(self) -> bool:
        """Whether a small message could be sent without waiting."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLOUT)
        return bool(poll.poll(0))

    def receive(self) -> Any:
        """Waits for one message and returns its object.

        A message that is not pickled gives its bytes.

        Raises:
            EOFError: the other side is gone.
        """
        while not self.has_message():
            # `recv` would also wake up, for nothing, each time the other side reads.
            self._readable.poll()
            self.read_available()
        return self._take_message()

    def take_messages(self) -> list[Any]:
        """Returns the whole messages that were read, without waiting.

        An error stands for one that cannot be unpickled.
        """
        taken: list[Any] = []
        while self.has_message():
            try:
                taken.append(self._take_message())
            except Exception as error:
                taken.append(error)
        return taken

    def _take_message(self) -> Any:
        end = self._find_message_end()
        data, self.unread = self.unread, bytes(self.unread[end:])
        if data.startswith(RAW, MESSAGE_LENGTH.size):
            return bytes(data[MESSAGE_LENGTH.size + len(RAW) : end])
        try:
            return pickling.loads(data[MESSAGE_LENGTH.size : end])
        except EOFError as error:  # this would look like the end of the pipe
            raise pickle.UnpicklingError(f"a message cannot be unpickled: {error!r}") from error

    def read_messages(self) -> list[Any] | None:
        """Reads what has arrived, without waiting.

        Returns what `take_messages` does, or None if there was nothing.

        Raises:
            EOFError: the other side is gone.
        """
        return self.take_messages() if self.read_available() else None

    def read_available(self) -> bool:
        """Reads the bytes that have arrived, without waiting.

        They need not be a whole message. False if there were none.

        Raises:
            EOFError: the other side is gone.
        """
        # One call reads several small messages.
        n_missing = self._find_message_end() - len(self.unread)
        try:
            data = self._socket.recv(SMALL if n_missing <= SMALL else min(n_missing, LARGE), DONT_WAIT)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            data = b""
        if not data:  # the pipe ended, perhaps in the middle of a message
            raise EOFError("the other side of the channel is gone")
        if not self.unread:
            self.unread = data
        elif isinstance(self.unread, bytearray):
            self.unread += data
        else:
            self.unread = bytearray(self.unread + data)
        return True

    def spin(self, seconds: float) -> None:
        """Polls without sleeping until something arrives or the time is up.

        It also ends when another process wants the core.

        Raises:
            EOFError: the other side is gone.
        """
        now = time.perf_counter()
        end = now + seconds
        while not (self.has_message() or (self._readable.poll(0) and self.read_available())) and now < end:
            os.sched_yield()
            before, now = now, time.perf_counter()
            if now - before > YIELD_TIME:
                return

    def has_message(self) -> bool:
        """Whether `receive` would return at once.

        Polling the pipe does not show messages that were read already.
        """
        return len(self.unread) >= self._find_message_end()

    def close(self) -> None:
        self._socket.close()

    def _find_message_end(self) -> int:
        """Returns where the oldest message ends in the buffer.

        Until its length has arrived, where the length ends.
        """
        buffer = self.unread
        return MESSAGE_LENGTH.size + (
            MESSAGE_LENGTH.unpack_from(buffer)[0] if len(buffer) >= MESSAGE_LENGTH.size else 0
        )
