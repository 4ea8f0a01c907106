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
# Milliseconds: the longest wait that poll takes.
LONGEST = 2**31 - 1


def milliseconds(deadline: float | None) -> float | None:
    """From now to a deadline in the time of `time.monotonic`, as poll wants it; None for no deadline."""
    return None if deadline is None else min(max(0.0, (deadline - time.monotonic()) * 1000), LONGEST)


class Channel:
    """One end of a pair. Picklable while a process starts."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._readable: select.poll | None = None

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        ours, theirs = Pipe(duplex=True)
        return cls(ours), cls(theirs)

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
        try:
            if deadline is None or len(data) <= AT_ONCE:
                self._connection.send_bytes(data)
            else:
                self._send_until(deadline, data)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise EOFError("the other side of the channel is gone") from error

    def _send_until(self, deadline: float, data: bytes) -> None:
        # As multiprocessing frames messages: a length, and a longer one where that is too small.
        header = struct.pack("!i", len(data)) if len(data) <= 0x7FFFFFFF else struct.pack("!iQ", -1, len(data))
        fd = self.fileno()
        poll = select.poll()
        poll.register(fd, select.POLLOUT)
        os.set_blocking(fd, False)
        try:
            for part in (memoryview(header), memoryview(data)):
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
        try:
            data = self._connection.recv_bytes()
        except OSError as error:  # a reset, or a message cut off in its middle
            raise EOFError("the other side of the channel is gone") from error
        if data.startswith(messages.RAW):
            return data[1:]
        try:
            return messages.loads(data)
        except EOFError as error:  # what a message raises must not look like its end
            raise pickle.UnpicklingError(f"a message cannot be unpickled: {error!r}") from error

    def has_message(self) -> bool:
        """Whether `receive` would return (or raise) at once."""
        if self._readable is None:  # the connection's own makes another each time
            self._readable = select.poll()
            self._readable.register(self.fileno(), select.POLLIN)
        return bool(self._readable.poll(0))

    def close(self) -> None:
        self._connection.close()
