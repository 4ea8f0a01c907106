"""Processes and shared bytes: run any job object, built from a factory, in N processes.

Knows nothing of reinforcement learning, and imports the standard library and cloudpickle only.

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

from workers.arena import OutOfMemoryError, SharedArena
from workers.errors import RemoteTraceback, WorkerCrashed, WorkerError, WorkerTimeout
from workers.pool import InlinePool, WorkerPool

# rlstructs looks for this mark to tell this package from a user's own `workers.py`.
__rlstructs_workers__ = True

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
