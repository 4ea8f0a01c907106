"""Runs jobs in worker processes that share memory; a job is any object that a factory builds.

This package is not specific to reinforcement learning. It imports only the standard library and cloudpickle.

Example:
    >>> from workers import WorkerPool
    >>> class Counter:
    ...     def __init__(self, index):
    ...         self.total = 10 * index
    ...     def add(self, n):
    ...         self.total += n
    ...         return self.total
    >>> with WorkerPool(2, Counter) as pool:
    ...     pool.call("add", 1)
    [1, 11]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workers.public_names import export_lazily

if TYPE_CHECKING:
    from workers.arena import SharedArena
    from workers.errors import OutOfMemoryError, RemoteTraceback, WorkerCrashed, WorkerError, WorkerTimeout
    from workers.inline import InlinePool
    from workers.pool import WorkerPool

# rlstructs looks for this name, to tell this package from a user's own `workers.py`.
__rlstructs_workers__ = True

_EXPORTS = {
    "InlinePool": "inline",
    "OutOfMemoryError": "errors",
    "RemoteTraceback": "errors",
    "SharedArena": "arena",
    "WorkerCrashed": "errors",
    "WorkerError": "errors",
    "WorkerPool": "pool",
    "WorkerTimeout": "errors",
}

__all__ = [
    "InlinePool",
    "OutOfMemoryError",
    "RemoteTraceback",
    "SharedArena",
    "WorkerCrashed",
    "WorkerError",
    "WorkerPool",
    "WorkerTimeout",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = export_lazily(__name__, _EXPORTS)
