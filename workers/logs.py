"""Sends a worker's log records to the handlers of the process that started it.

    worker                                  parent
    ------                                  ------
    logger.warning(...)  ──── a pipe ───>   logging.getLogger(name).handle(record)

A worker never waits for a parent that does not read: while the pipe is full, the worker keeps its records, up to a
limit. Records in the pipe outlive the worker. The kernel writes each chunk of a record whole or not at all, so all
workers of a pool, and the processes that their environments fork, share one pipe without a lock.
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

from rlstructs.workers import pickling
from rlstructs.workers.arena import Descriptor

# The header of each chunk: the pid of its process, the number of bytes that follow, whether they end a record.
HEADER = struct.Struct("!IH?")
# Bytes of a record in one chunk: the kernel writes that many, and the header, to a pipe whole or not at all.
CHUNK_BYTES = min(select.PIPE_BUF, 4096) - HEADER.size
# Bytes that one read takes: all that a pipe holds.
PIPE_BYTES = 1 << 16
# Bytes of records that a worker keeps while the pipe is full; it drops and counts later records.
MAX_WAITING_BYTES = 1 << 20
# The most reads of one `read_all`, because other processes may go on writing.
MAX_READS = 64

logger = logging.getLogger("rlstructs.workers")

# In a worker: the handler that sends its records, the handlers that its parent has, and those that `init_worker` added.
_sender: Sender | None = None
_parent_handlers: set[tuple[str, str]] = set()
_own_handlers: list[logging.Handler] = []
_NULL_HANDLER = logging.NullHandler()
_basic_config = logging.basicConfig


class Sender(logging.Handler):
    """The worker's end of the pipe.

    It is a handler, because `logging` renews the locks of handlers in a forked copy.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        os.set_blocking(fd, False)
        self._fd, self._pid = fd, os.getpid()
        self._waiting: deque[bytes] = deque()
        self._n_dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Sends a record, and keeps what the pipe has no room for."""
        try:
            if self._pid != os.getpid():  # in a forked copy: the original sends what was waiting
                self._waiting.clear()
                self._pid, self._n_dropped = os.getpid(), 0
            self._write()
            if len(self._waiting) * CHUNK_BYTES > MAX_WAITING_BYTES:
                self._n_dropped += 1
                return
            self._report_dropped()
            self._add(record)
            self._write()
        except Exception:
            self.handleError(record)

    def finish(self, timeout: float = 0.0) -> None:
        """Sends the records that are waiting.

        Waits up to `timeout` seconds for room in the pipe.
        """
        with self.lock or contextlib.nullcontext():
            deadline, poll = time.monotonic() + timeout, select.poll()
            poll.register(self._fd, select.POLLOUT)
            self._write()
            self._report_dropped()
            while self._waiting and poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                self._write()

    @property
    def has_unsent(self) -> bool:
        """Whether records, or the number of dropped ones, are still to be sent."""
        return bool(self._waiting or self._n_dropped)

    def _report_dropped(self) -> None:
        if self._n_dropped:
            text = f"{self._n_dropped} log records were dropped: they came faster than they were read"
            self._n_dropped = 0
            self._add(logging.LogRecord(logger.name, logging.WARNING, __file__, 0, text, (), None))

    def _add(self, record: logging.LogRecord) -> None:
        data = pickling.dumps(_make_picklable(record))
        if len(data) > MAX_WAITING_BYTES:
            self._n_dropped += 1
            return
        for start in range(0, len(data), CHUNK_BYTES):
            part = data[start : start + CHUNK_BYTES]
            self._waiting.append(HEADER.pack(self._pid, len(part), start + CHUNK_BYTES >= len(data)) + part)

    def _write(self) -> None:
        try:
            while self._waiting:
                os.write(self._fd, self._waiting[0])
                self._waiting.popleft()
        except BlockingIOError:
            return
        except OSError:  # the parent no longer reads, or an environment has closed the pipe
            self._waiting.clear()


def _make_picklable(record: logging.LogRecord) -> dict[str, Any]:
    """Returns a record's attributes; text replaces arguments, tracebacks and objects that cannot be pickled."""
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
    """Makes this worker send its log records to its parent, which handles them."""
    global _sender
    for each in list_loggers():  # handlers and filters that came with a fork: the parent applies its own
        each.handlers.clear()
        each.filters.clear()
    _own_handlers.clear()
    _parent_handlers.clear()
    _sender = Sender(fd)
    _keep_root_handler()
    logging.Logger.callHandlers = _call_handlers  # type: ignore[method-assign]


def leave_to_parent(handlers: set[tuple[str, str]]) -> None:
    """Notes which handlers the parent has.

    If a module adds the same here when it is imported, they do nothing.
    """
    _parent_handlers.update(handlers)


@contextlib.contextmanager
def keep_new_handlers() -> Iterator[None]:
    """Makes handlers added in this block handle records in the worker too.

    User code adds them; otherwise only the parent handles the records.
    """
    before = [handler for each in list_loggers() for handler in each.handlers]
    basic_config, logging.basicConfig = logging.basicConfig, _configure
    try:
        yield
    finally:
        logging.basicConfig = basic_config
    _own_handlers.extend(handler for each in list_loggers() for handler in each.handlers if handler not in before)
    _keep_root_handler()


def _configure(**arguments: Any) -> None:
    """Replaces `basicConfig`; adds only handlers with a target.

    The original does nothing if the root has a handler.
    """
    if not arguments.keys() & {"filename", "stream", "handlers"}:
        if "level" in arguments:
            logging.root.setLevel(arguments["level"])
        return
    logging.root.removeHandler(_NULL_HANDLER)
    try:
        _basic_config(**arguments)
    finally:
        _keep_root_handler()


def _keep_root_handler() -> None:
    """Gives the root a handler.

    Without one, `logging.warning`, for example, would add one that prints in this worker.
    """
    if not logging.root.handlers:
        logging.root.addHandler(_NULL_HANDLER)


def send_rest(timeout: float = 0.0) -> None:
    """Sends records that the pipe had no room for.

    Waits up to `timeout` seconds for the parent to read.
    """
    if _sender is not None and _sender.has_unsent:
        _sender.finish(timeout)


def _call_handlers(self: logging.Logger, record: logging.LogRecord) -> None:
    """Replaces `Logger.callHandlers` in workers."""
    if _sender is not None:
        _sender.handle(record)
    each: logging.Logger | None = self
    while each is not None:
        for handler in each.handlers:
            parent_has_it = handler not in _own_handlers and (each.name, name_class(handler)) in _parent_handlers
            if record.levelno >= handler.level and not parent_has_it:
                handler.handle(record)
        each = each.parent if each.propagate else None


class LogPipe:
    """The parent's side of the pipe: its reading end, and the workers' end.

    Attributes:
        writer: the workers' end.
    """

    def __init__(self) -> None:
        reader, writer = os.pipe()
        self._reader, self.writer = Descriptor(reader), Descriptor(writer)
        os.set_blocking(reader, False)
        self._buffer = b""
        self._unfinished: dict[int, bytearray] = {}  # the first chunks of a record, by pid
        self.records: deque[logging.LogRecord] = deque()

    def fileno(self) -> int:
        return self._reader.fileno()

    def read(self) -> int | None:
        """Reads the bytes that have arrived, without waiting; returns their number.

        None if there were none.
        """
        try:
            data = os.read(self._reader.fileno(), PIPE_BYTES)
        except (BlockingIOError, ValueError):  # ValueError: the pipe is closed
            return None
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            pid, length, is_last = HEADER.unpack_from(self._buffer)
            end = HEADER.size + length
            if len(self._buffer) < end:
                break
            part, self._buffer = self._buffer[HEADER.size : end], self._buffer[end:]
            self._unfinished.setdefault(pid, bytearray()).extend(part)
            if is_last:
                self.records.append(_unpickle_record(self._unfinished.pop(pid)))
        return len(data)

    def read_all(self) -> None:
        """Reads everything that ended workers have written."""
        for _ in range(MAX_READS):
            if not self.read():
                return

    def deliver(self) -> None:
        """Passes the records that were read to the handlers of this process."""
        while self.records:
            try:
                record = self.records.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                logging.getLogger(record.name).handle(record)
            except Exception:  # a filter or handler raised: show it as `logging` does, and go on
                if logging.raiseExceptions and sys.stderr:
                    traceback.print_exc()

    def close(self) -> None:
        """Closes both ends. Idempotent."""
        self._reader.close()
        self.writer.close()


def _unpickle_record(data: bytearray) -> logging.LogRecord:
    try:
        return logging.makeLogRecord(pickling.loads(data))
    except Exception as error:
        text = f"a log record of a worker cannot be unpickled: {error!r}"
        return logging.LogRecord(logger.name, logging.WARNING, __file__, 0, text, (), None)


# By a logger's name: its level, whether it propagates, whether it is disabled.
Levels = dict[str, tuple[int, bool, bool]]
FLAGS = ("raiseExceptions", "logThreads", "logMultiprocessing", "logProcesses")


def list_loggers() -> Iterator[logging.Logger]:
    """Lists the root and every logger that exists."""
    yield logging.root
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            yield logger


def read_levels() -> Levels:
    """Reads the level and flags of every logger."""
    return {logger.name: (logger.level, logger.propagate, logger.disabled) for logger in list_loggers()}


def write_levels(levels: Levels) -> None:
    """Sets the level and flags of these loggers; other loggers do not change."""
    for name, (level, propagates, is_disabled) in levels.items():
        logger = logging.getLogger(name)
        if logger.level != level:
            logger.setLevel(level)
        logger.propagate, logger.disabled = propagates, is_disabled


def read_handler_classes() -> set[tuple[str, str]]:
    """Returns the handlers of all loggers, as pairs of logger and class names."""
    return {(logger.name, name_class(handler)) for logger in list_loggers() for handler in logger.handlers}


def name_class(handler: logging.Handler) -> str:
    """Returns the full name of a handler's class."""
    return f"{type(handler).__module__}.{type(handler).__qualname__}"


def read_log_settings() -> dict[str, Any]:
    """Reads the settings of this process."""
    return {
        "levels": read_levels(),
        "disable": logging.root.manager.disable,
        "names": dict(logging._levelToName),
        "captures_warnings": logging._warnings_showwarning is not None,  # type: ignore[attr-defined]
        **{flag: getattr(logging, flag) for flag in FLAGS},
    }


def write_log_settings(settings: dict[str, Any]) -> None:
    """Applies settings that `read_log_settings` returned in another process."""
    for number, name in settings["names"].items():
        logging.addLevelName(number, name)
    write_levels(settings["levels"])
    logging.disable(settings["disable"])
    logging.captureWarnings(settings["captures_warnings"])
    for flag in FLAGS:
        setattr(logging, flag, settings[flag])
