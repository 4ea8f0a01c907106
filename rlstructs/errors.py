"""The exceptions of rlstructs, and those of its workers.

RLError                     what the library refuses, but for wrong types (TypeError) and indexes (IndexError)
    SpecError               a tensor, argument or space is not what is needed (also a ValueError)
        MissingKeyError     a key is not there (also a KeyError)
    StateError              a call that this state does not allow (also a RuntimeError)
        ClosedError         a call after `close`
    FileError               a file is not ours, damaged, or of another version (also a ValueError)
WorkerError                 a worker process failed (a RuntimeError)
    WorkerCrashed           it is gone
    WorkerTimeout           it did not reply in time (also a TimeoutError, Python's and multiprocessing's)
OutOfMemoryError            more memory was asked for than there is (a MemoryError)

What a user's own environment or agent raises in a worker arrives as its own class, with a
`RemoteTraceback` as its cause.
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
    """Base of what rlstructs itself raises."""


class SpecError(RLError, ValueError):
    """A tensor, an argument or a space is not what is needed; the message names it."""


class MissingKeyError(SpecError, KeyError):
    """A key is not there; the message names it and those that are."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0]) if self.args else ""


class StateError(RLError, RuntimeError):
    """A call that the present state does not allow; the message names the call that is needed."""


class ClosedError(StateError):
    """A call after `close`."""


class FileError(RLError, ValueError):
    """A file is not ours, damaged, or of another version."""
