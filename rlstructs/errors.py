"""The exceptions of rlstructs, and those of its workers.

RLError                     base of all errors of the library, except wrong types (TypeError) and indexes (IndexError)
    SpecError               a tensor, an argument or a space is wrong (also a ValueError)
        MissingKeyError     a key is missing (also a KeyError)
    StateError              a call is not allowed in the present state (also a RuntimeError)
        ClosedError         a call came after `close`
        EmptyBufferError    nothing is stored that could be drawn (also a ValueError)
    EnvTimeout              an environment did not return from a call in time (also a TimeoutError)
    FileError               a file is not one of rlstructs, damaged, or of another version (also a ValueError)
WorkerError                 a worker process failed (a RuntimeError)
    WorkerCrashed           it has ended
    WorkerTimeout           it did not reply in time (also a TimeoutError, Python's and multiprocessing's)
OutOfMemoryError            more memory is needed than is available (a MemoryError)

An exception of a user's environment or agent in a worker arrives with its own class, and a `RemoteTraceback` as its
cause.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from rlstructs.workers.public_names import set_module

if TYPE_CHECKING:
    from rlstructs.workers.errors import OutOfMemoryError, RemoteTraceback, WorkerCrashed, WorkerError, WorkerTimeout

# The names that `rlstructs.workers.errors` defines, which loads multiprocessing: imported when one is asked for.
_OF_WORKERS = ("OutOfMemoryError", "RemoteTraceback", "WorkerCrashed", "WorkerError", "WorkerTimeout")

__all__ = [
    "ClosedError",
    "EmptyBufferError",
    "EnvTimeout",
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


@set_module("rlstructs")
class RLError(Exception):
    """Base class of the errors that rlstructs itself raises."""


@set_module("rlstructs")
class SpecError(RLError, ValueError):
    """A tensor, an argument or a space is wrong; the message names it."""


@set_module("rlstructs")
class MissingKeyError(SpecError, KeyError):
    """A key is missing; the message names it and the keys that are there."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0]) if self.args else ""


@set_module("rlstructs")
class StateError(RLError, RuntimeError):
    """A call is not allowed now; the message names the call to make."""


@set_module("rlstructs")
class ClosedError(StateError):
    """A call came after `close`."""


@set_module("rlstructs")
class EmptyBufferError(StateError, ValueError):
    """Nothing is stored that could be drawn."""


@set_module("rlstructs")
class EnvTimeout(RLError, TimeoutError):
    """An environment did not return from a step or a reset within its `step_timeout`."""


@set_module("rlstructs")
class FileError(RLError, ValueError):
    """A file is not one of rlstructs, damaged, or of another version."""


if not TYPE_CHECKING:

    def __getattr__(name):
        if name not in _OF_WORKERS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module("rlstructs.workers.errors"), name)
