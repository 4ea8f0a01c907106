"""Log records of a worker, on their way to the handlers of the process that started it.

    worker                                  parent
    ------                                  ------
    logger.warning(...)  ──── a pipe ───>   logging.getLogger(name).handle(record)

A worker never waits for a parent that does not read: what the pipe has no room for stays in the worker until it has, up
to a limit. What is in the pipe outlives the worker, however that ends. Records go through it in chunks that the kernel
writes whole or not at all, so that all workers of a pool, and what their environments fork, have one pipe, and no lock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import struct
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator
from typing import Any

from workers import pickling
from workers.descriptors import Descriptor
from workers.settings.log_settings import kind, loggers

# Before each chunk: of which process it is, how many bytes follow, and whether they are the last of a record.
HEAD = struct.Struct("!IH?")
# What the kernel writes into a pipe as a whole or not at all.
CHUNK = min(select.PIPE_BUF, 4096) - HEAD.size
# Bytes that are read at once: all that a pipe holds.
PIPE = 1 << 16
# Bytes of records that a worker keeps until there is room for them; those that come then are dropped, and counted.
MOST = 1 << 20
# Reads at once: others may go on writing.
READS = 64

logger = logging.getLogger("workers")

# Of a worker: where its records go, which handlers its parent has itself, and which are those of `init_worker`.
_sender: Sender | None = None
_handled_by_parent: set[tuple[str, str]] = set()
_own: list[logging.Handler] = []
_NOTHING = logging.NullHandler()
_basic_config = logging.basicConfig


class Sender(logging.Handler):
    """The worker's end of the pipe; as a handler, whose lock is there again in a forked copy of the process."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        os.set_blocking(fd, False)
        self._fd, self._pid = fd, os.getpid()
        self._waiting: deque[bytes] = deque()
        self._n_dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Sends a record, or as much of it as there is room for."""
        try:
            if self._pid != os.getpid():  # in a copy: what waited is the other's to send
                self._waiting.clear()
                self._pid, self._n_dropped = os.getpid(), 0
            self._write()
            if len(self._waiting) * CHUNK > MOST:
                self._n_dropped += 1
                return
            self._tell_dropped()
            self._add(record)
            self._write()
        except Exception:
            self.handleError(record)

    def finish(self, timeout: float = 0.0) -> None:
        """Sends what waits for room, as long as there is some, or comes to be within so many seconds."""
        with self.lock or contextlib.nullcontext():
            deadline, poll = time.monotonic() + timeout, select.poll()
            poll.register(self._fd, select.POLLOUT)
            self._write()
            self._tell_dropped()
            while self._waiting and poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                self._write()

    @property
    def waits(self) -> bool:
        """Whether something is to be sent yet."""
        return bool(self._waiting or self._n_dropped)

    def _tell_dropped(self) -> None:
        if self._n_dropped:
            words = f"{self._n_dropped} log records were dropped: they came faster than they were read"
            self._n_dropped = 0
            self._add(logging.LogRecord(logger.name, logging.WARNING, __file__, 0, words, (), None))

    def _add(self, record: logging.LogRecord) -> None:
        data = pickling.dumps(_plain(record))
        if len(data) > MOST:
            self._n_dropped += 1
            return
        for at in range(0, len(data), CHUNK):
            part = data[at : at + CHUNK]
            self._waiting.append(HEAD.pack(self._pid, len(part), at + CHUNK >= len(data)) + part)

    def _write(self) -> None:
        try:
            while self._waiting:
                os.write(self._fd, self._waiting[0])
                self._waiting.popleft()
        except BlockingIOError:
            return
        except OSError:  # nobody reads any more, or an environment has closed it
            self._waiting.clear()


def _plain(record: logging.LogRecord) -> dict[str, Any]:
    """A record's attributes, with the text of what cannot travel: arguments, tracebacks and objects of their own."""
    attributes = dict(vars(record))
    attributes["msg"], attributes["args"] = record.getMessage(), None
    if record.exc_info and not record.exc_text:
        attributes["exc_text"] = logging.Formatter().formatException(record.exc_info)
    attributes["exc_info"] = None
    for name, value in attributes.items():
        if not isinstance(value, (str, int, float, bool, type(None))):
            try:
                pickling.dumps(value)
            except Exception:
                attributes[name] = repr(value)
    return attributes


def send_records(fd: int) -> None:
    """Has all that is logged in this process, which is a worker, sent to its parent, and handled there."""
    global _sender
    for each in loggers():  # of what was forked: the parent handles what they would, and filters it
        each.handlers.clear()
        each.filters.clear()
    _own.clear()
    _handled_by_parent.clear()
    _sender = Sender(fd)
    _keep_root_handler()
    logging.Logger.callHandlers = _call_handlers  # type: ignore[method-assign]


def leave_to_parent(handlers: set[tuple[str, str]]) -> None:
    """Says which handlers the parent has: modules that add the like here, as they load, add them a second time."""
    _handled_by_parent.update(handlers)


@contextlib.contextmanager
def handlers_are_own() -> Iterator[None]:
    """Around what the user runs in the worker: handlers that it adds are there for this worker's records, too."""
    before = [handler for each in loggers() for handler in each.handlers]
    basic_config, logging.basicConfig = logging.basicConfig, _configure
    try:
        yield
    finally:
        logging.basicConfig = basic_config
    _own.extend(handler for each in loggers() for handler in each.handlers if handler not in before)
    _keep_root_handler()


def _configure(**arguments: Any) -> None:
    """In place of `basicConfig`, which does nothing where the root has a handler: adds one that is not the parent's."""
    if not arguments.keys() & {"filename", "stream", "handlers"}:
        if "level" in arguments:
            logging.root.setLevel(arguments["level"])
        return
    logging.root.removeHandler(_NOTHING)
    try:
        _basic_config(**arguments)
    finally:
        _keep_root_handler()


def _keep_root_handler() -> None:
    """Without one `logging.warning` and its like, and `basicConfig` of a module, would add one that prints here."""
    if not logging.root.handlers:
        logging.root.addHandler(_NOTHING)


def send_rest(timeout: float = 0.0) -> None:
    """Sends what the pipe had no room for, waiting so many seconds at most until there is."""
    if _sender is not None and _sender.waits:
        _sender.finish(timeout)


def _call_handlers(self: logging.Logger, record: logging.LogRecord) -> None:
    """In place of `Logger.callHandlers`, in workers."""
    if _sender is not None:
        _sender.handle(record)
    at: logging.Logger | None = self
    while at is not None:
        for handler in at.handlers:
            is_twin = handler not in _own and (at.name, kind(handler)) in _handled_by_parent
            if record.levelno >= handler.level and not is_twin:
                handler.handle(record)
        at = at.parent if at.propagate else None


class LogPipe:
    """The pipe of a pool's workers, as the parent has it: the end that it reads, and the one that workers get."""

    def __init__(self) -> None:
        reader, writer = os.pipe()
        self._reader, self.writer = Descriptor(reader), Descriptor(writer)
        os.set_blocking(reader, False)
        self._rest = b""
        self._parts: dict[int, bytearray] = {}  # of records, by process
        self._records: deque[logging.LogRecord] = deque()

    def fileno(self) -> int:
        return self._reader.fileno()

    def read(self) -> int | None:
        """Reads what has come, and never waits; how many bytes, None for nothing."""
        try:
            data = os.read(self._reader.fileno(), PIPE)
        except (BlockingIOError, ValueError):  # or it is closed
            return None
        self._rest += data
        while len(self._rest) >= HEAD.size:
            pid, length, is_last = HEAD.unpack_from(self._rest)
            if len(self._rest) < HEAD.size + length:
                break
            part, self._rest = self._rest[HEAD.size : HEAD.size + length], self._rest[HEAD.size + length :]
            self._parts.setdefault(pid, bytearray()).extend(part)
            if is_last:
                self._records.append(_record(self._parts.pop(pid)))
        return len(data)

    def read_all(self) -> None:
        """Reads all that workers which have ended have written."""
        for _ in range(READS):
            if not self.read():
                return

    def deliver(self) -> None:
        """Hands records to the handlers of this process."""
        while self._records:
            try:
                record = self._records.popleft()
            except IndexError:  # another thread has had it
                return
            try:
                logging.getLogger(record.name).handle(record)
            except Exception:  # of a filter, or of a handler that lets it through: not the batcher's to raise
                if logging.raiseExceptions and sys.stderr:
                    traceback.print_exc()

    def close(self) -> None:
        """Closes both ends. Idempotent."""
        self._reader.close()
        self.writer.close()


def _record(data: bytearray) -> logging.LogRecord:
    try:
        return logging.makeLogRecord(pickling.loads(data))
    except Exception as error:
        words = f"a log record of a worker cannot be unpickled: {error!r}"
        return logging.LogRecord(logger.name, logging.WARNING, __file__, 0, words, (), None)
