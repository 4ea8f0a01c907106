"""A worker's private pipe pair: whole messages, pollable, end of file when the other side is gone."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import struct
import time
from multiprocessing.connection import Connection, Pipe
from typing import Any

from workers import messages

# Bytes that go into the pipe of a side that has read all so far without waiting for it.
AT_ONCE = 16384
# Bytes that are read at once: as many are allocated each time, and mostly few come; and of what is known to be long.
SMALL, LARGE = 1 << 13, 1 << 20
# Before every message, how long it is.
LENGTH = struct.Struct("!Q")
# Milliseconds: the longest wait that poll takes.
LONGEST = 2**31 - 1


def milliseconds(deadline: float | None) -> float | None:
    """From now to a deadline in the time of `time.monotonic`, as poll wants it; None for no deadline."""
    return None if deadline is None else min(max(0.0, (deadline - time.monotonic()) * 1000), LONGEST)


class Channel:
    """One end of a pair. Picklable while a process starts."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._fd = connection, connection.fileno()
        self._rest = b""  # has been read and not used yet
        self._readable: select.poll | None = None

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        ours, theirs = Pipe(duplex=True)
        return cls(ours), cls(theirs)

    def __getstate__(self) -> Connection:
        return self._connection

    def __setstate__(self, connection: Connection) -> None:
        Channel.__init__(self, connection)

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: Any) -> None:
        """Sends one message.

        Raises:
            EOFError: the other side is gone.
        """
        self.send_bytes(messages.dumps(message))

    def send_bytes(self, data: bytes, deadline: float | None = None) -> None:
        """Sends a message that is pickled already.

        Args:
            data: the message.
            deadline: when to give up on a side that does not read, in the time of `time.monotonic`.

        Raises:
            EOFError: the other side is gone.
            TimeoutError: it does not read; half of the message may be on its way.
        """
        header = LENGTH.pack(len(data))
        try:
            if len(data) <= AT_ONCE:
                self._write(header + data)
            elif deadline is None:
                self._write(header)
                self._write(data)
            else:
                self._write_until(deadline, header, data)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise EOFError("the other side of the channel is gone") from error

    def _write(self, data: bytes) -> None:
        written = os.write(self._fd, data)
        while written < len(data):
            written += os.write(self._fd, memoryview(data)[written:])

    def _write_until(self, deadline: float, *parts: bytes) -> None:
        fd = self.fileno()
        poll = select.poll()
        poll.register(fd, select.POLLOUT)
        os.set_blocking(fd, False)
        try:
            for data in parts:
                part = memoryview(data)
                while part:
                    if not poll.poll(milliseconds(deadline)):
                        raise TimeoutError("the other side of the channel does not read")
                    with contextlib.suppress(BlockingIOError):
                        part = part[os.write(fd, part) :]
        finally:
            os.set_blocking(fd, True)

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
        # Whatever has come is read at once: a small message costs one call, and so do several.
        data = self._rest or self._read(SMALL)
        while len(data) < LENGTH.size:
            data += self._read(SMALL)
        end = LENGTH.size + LENGTH.unpack_from(data)[0]
        if len(data) < end:
            data = self._read_up_to(end, data)
        self._rest = data[end:]
        if data.startswith(messages.RAW, LENGTH.size):
            return data[LENGTH.size + len(messages.RAW) : end]
        try:
            return messages.loads(data[LENGTH.size : end])
        except EOFError as error:  # what a message raises must not look like its end
            raise pickle.UnpicklingError(f"a message cannot be unpickled: {error!r}") from error

    def _read(self, most: int) -> bytes:
        try:
            data = os.read(self._fd, most)
        except OSError as error:  # a reset
            raise EOFError("the other side of the channel is gone") from error
        if not data:  # between two messages, or in the middle of one
            raise EOFError("the other side of the channel is gone")
        return data

    def _read_up_to(self, end: int, data: bytes) -> bytes:
        parts, n = [data], len(data)
        while n < end:
            parts.append(self._read(min(end - n, LARGE)))
            n += len(parts[-1])
        return b"".join(parts)

    def has_read(self) -> bool:
        """Whether a message has been read that `receive` did not give yet: polling does not tell of it."""
        rest = self._rest
        return len(rest) >= LENGTH.size and len(rest) >= LENGTH.size + LENGTH.unpack_from(rest)[0]

    def has_message(self) -> bool:
        """Whether `receive` would return (or raise) at once."""
        if self.has_read():
            return True
        if self._readable is None:  # the connection's own makes another each time
            self._readable = select.poll()
            self._readable.register(self.fileno(), select.POLLIN)
        return bool(self._readable.poll(0))

    def close(self) -> None:
        self._connection.close()
        self._fd = -1  # the number may be another's by now
