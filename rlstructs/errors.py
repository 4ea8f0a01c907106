"""The exceptions of rlstructs, and those of its workers.

RLError                     base of all errors of the library, except wrong types (TypeError) and indexes (IndexError)
    SpecError               a tensor, an argument or a space is wrong (also a ValueError)
        MissingKeyError     a key is missing (also a KeyError)
    StateError              the present state does not allow a call (also a RuntimeError)
        ClosedError         a call came after `close`
        EmptyBufferError    nothing is stored that could be drawn (also a ValueError)
    FileError               a file is not ours, damaged, or of another version (also a ValueError)
WorkerError                 a worker process failed (a RuntimeError)
    WorkerCrashed           it has ended
    WorkerTimeout           it did not reply in time (also a TimeoutError, Python's and multiprocessing's)
OutOfMemoryError            more memory is needed than there is (a MemoryError)

An exception of a user's environment or agent in a worker arrives with its own class, and a `RemoteTraceback` as its
cause.
"""

from __future__ import annotations

import workers

if not getattr(workers, "__rlstructs_workers__", False):
    raise ImportError(
        f"rlstructs needs its own package 'workers', but found {getattr(workers, '__file__', workers)!r} "
        "in its place; rename that file or folder"
    )

from workers.errors import OutOfMemoryError, RemoteTraceback, WorkerCrashed, WorkerError, WorkerTimeout

__all__ = [
    "ClosedError",
    "EmptyBufferError",
    "FileError",
    "MissingKeyError",
    "OutOfMemoryError",
    "RLError",
    "RemoteTraceback",
    "SpecError",
    "StateError",
    "WorkerCrashed",
    "WorkerError",
    "WorkerTimeout",
]


class RLError(Exception):
    """Base class of the errors that rlstructs itself raises."""


class SpecError(RLError, ValueError):
    """A tensor, an argument or a space is wrong; the message names it."""


class MissingKeyError(SpecError, KeyError):
    """A key is missing; the message names it and the keys that are there."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0]) if self.args else ""


class StateError(RLError, RuntimeError):
    """The present state does not allow a call; the message names the call that is needed."""


class ClosedError(StateError):
    """A call came after `close`."""


class EmptyBufferError(StateError, ValueError):
    """Nothing is stored that could be drawn."""


class FileError(RLError, ValueError):
    """A file is not ours, damaged, or of another version."""
