"""A worker's private pipe pair: whole messages, pollable, end of file when the other side is gone."""

from __future__ import annotations

import os
import pickle
import select
import socket
import time
from collections.abc import Callable
from typing import Any

from workers import messages, pickling
from workers.messages import MESSAGE_LENGTH as LENGTH

# Bytes that are read at once: as many are allocated each time, and mostly few come; and of what is known to be long.
SMALL, LARGE = 1 << 13, 1 << 20
# As numbers: flags of an enumeration are joined by Python code, anew for every message. Where there is no MSG_NOSIGNAL,
# a program that has SIGPIPE end it ends with its first worker.
DONT_WAIT = int(socket.MSG_DONTWAIT)
SEND_AT_ONCE = DONT_WAIT | int(getattr(socket, "MSG_NOSIGNAL", 0))
# Seconds from one look to the next: where the processor was given up between them, and it takes longer than this,
# another process has had it.
YIELDED = 5e-6
# Milliseconds: the longest wait that poll takes.
LONGEST = 2**31 - 1


def deadline_in(seconds: float | None) -> float | None:
    """The time of `time.monotonic` so many seconds from now, None for no deadline; of numpy's numbers, too."""
    return None if seconds is None else time.monotonic() + float(seconds)  # a float32 would make it one


def milliseconds(deadline: float | None) -> float | None:
    """From now to a deadline in the time of `time.monotonic`, as poll wants it; None for no deadline."""
    return None if deadline is None else min(max(0.0, (deadline - time.monotonic()) * 1000), LONGEST)


class Channel:
    """One end of a pair. Picklable while a process starts."""

    def __init__(self, end: socket.socket) -> None:
        end.settimeout(None)  # whatever the program has made the default
        self._socket = end
        self._readable = select.poll()
        self._readable.register(end.fileno(), select.POLLIN)
        self._rest: bytes | bytearray = b""  # has been read and not used yet

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
        self.send_framed(messages.framed(pickling.dumps(message)))

    def send_framed(
        self, parts: list[bytes], deadline: float | None = None, sentinel: Callable[[], int] | None = None
    ) -> None:
        """Sends a message that is pickled already.

        Args:
            parts: what `messages.framed` made of it.
            deadline: when to give up on a side that does not read, in the time of `time.monotonic`.
            sentinel: gives a descriptor that becomes readable when the other side ends. Its end of the pipe may
                live on in a program that it started.

        Raises:
            EOFError: the other side is gone.
            TimeoutError: it does not read; half of the message may be on its way.
        """
        try:
            for part in parts:
                if (sent := self._send(part)) < len(part):
                    self._send_until(memoryview(part)[sent:], deadline, sentinel and sentinel())
        except (BrokenPipeError, ConnectionResetError) as error:
            raise EOFError("the other side of the channel is gone") from error

    def _send(self, part: bytes | memoryview) -> int:
        """Sends what goes into the pipe at once; how much that was."""
        try:
            return self._socket.send(part, SEND_AT_ONCE)
        except BlockingIOError:
            return 0

    def _send_until(self, part: memoryview, deadline: float | None, sentinel: int | None) -> None:
        poll = select.poll()
        # What the other side writes meanwhile is read: it may have to be through with that before it reads.
        poll.register(self.fileno(), select.POLLOUT | select.POLLIN)
        if sentinel is not None:
            poll.register(sentinel, select.POLLIN)
        while part:
            events = poll.poll(milliseconds(deadline))
            if not events:
                raise TimeoutError("the other side of the channel does not read")
            if any(fd == sentinel for fd, _ in events):
                raise EOFError("the other side of the channel is gone")
            self.arrive()
            part = part[self._send(part) :]

    def can_send(self) -> bool:
        """Whether a small message would go through at once."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLOUT)
        return bool(poll.poll(0))

    def receive(self) -> Any:
        """Waits for one message; bytes where they are the job's own.

        Raises:
            EOFError: the other side is gone.
        """
        while (end := self._end()) > len(self._rest):
            # Not by recv, which would also wake, for nothing, each time that the other side has read what was sent.
            self._readable.poll()
            self.arrive()
        rest, self._rest = self._rest, bytes(self._rest[end:])
        if rest.startswith(messages.RAW, LENGTH.size):
            return bytes(rest[LENGTH.size + len(messages.RAW) : end])
        try:
            return pickling.loads(rest[LENGTH.size : end])
        except EOFError as error:  # what a message raises must not look like its end
            raise pickle.UnpicklingError(f"a message cannot be unpickled: {error!r}") from error

    def arrive(self) -> bool:
        """Reads what has come, a whole message or not, and never waits; whether anything had.

        Raises:
            EOFError: the other side is gone.
        """
        # Whatever has come is read at once: a small message costs one call, and so do several.
        missing = self._end() - len(self._rest)
        try:
            data = self._socket.recv(SMALL if missing <= SMALL else min(missing, LARGE), DONT_WAIT)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            data = b""
        if not data:  # between two messages, or in the middle of one
            raise EOFError("the other side of the channel is gone")
        if not self._rest:
            self._rest = data
        elif isinstance(self._rest, bytearray):
            self._rest += data
        else:
            self._rest = bytearray(self._rest + data)
        return True

    def linger(self, seconds: float) -> None:
        """Looks for something to arrive for so long at most, and no longer once another process wants the processor.

        Raises:
            EOFError: the other side is gone.
        """
        now = time.perf_counter()
        end = now + seconds
        while not (self.has_read() or (self._readable.poll(0) and self.arrive())) and now < end:
            os.sched_yield()
            before, now = now, time.perf_counter()
            if now - before > YIELDED:
                return

    def has_read(self) -> bool:
        """Whether a whole message has been read that `receive` did not give yet: polling does not tell of it."""
        return len(self._rest) >= self._end()

    def close(self) -> None:
        self._socket.close()

    def _end(self) -> int:
        """Where the oldest message ends, or its length if even that is not known yet."""
        rest = self._rest
        return LENGTH.size + (LENGTH.unpack_from(rest)[0] if len(rest) >= LENGTH.size else 0)
