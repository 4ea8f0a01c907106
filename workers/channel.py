"""A worker's private pipe pair: whole messages, pollable, end of file when the other side is gone."""

from __future__ import annotations

from multiprocessing.connection import Connection, Pipe
from typing import Any

from workers import messages


class Channel:
    """One end of a pair. Picklable while a process starts."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

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

    def send_bytes(self, data: bytes) -> None:
        """Sends a message that is pickled already."""
        try:
            self._connection.send_bytes(data)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise EOFError("the other side of the channel is gone") from error

    def receive(self) -> Any:
        """Waits for one message.

        Raises:
            EOFError: the other side is gone.
        """
        try:
            data = self._connection.recv_bytes()
        except OSError as error:  # a reset, or a message cut off in its middle
            raise EOFError("the other side of the channel is gone") from error
        return messages.loads(data)

    def has_message(self) -> bool:
        """Whether `receive` would return (or raise) at once."""
        return self._connection.poll(0)

    def close(self) -> None:
        self._connection.close()
