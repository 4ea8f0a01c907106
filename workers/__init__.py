"""Runs jobs in worker processes that share memory.

A job is any object that a factory builds.

This package is not specific to reinforcement learning. It imports only the standard library and cloudpickle. Its folder
lies beside that of `rlstructs`, and is linked into it.

Example:
    >>> from rlstructs.workers import WorkerPool
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

from rlstructs.workers.public_names import export_lazily

if TYPE_CHECKING:
    from rlstructs.workers.arena import SharedArena
    from rlstructs.workers.errors import OutOfMemoryError, RemoteTraceback, WorkerCrashed, WorkerError, WorkerTimeout
    from rlstructs.workers.pool import InlinePool, WorkerPool

_EXPORTS = {
    "InlinePool": "pool",
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

if __name__ == "workers":
    # Found through a clone's folder on `sys.path`: the name belongs to whatever else on the path is called so.
    import importlib.machinery
    import importlib.util
    import os
    import sys

    others = [folder for folder in sys.path if not os.path.exists(os.path.join(folder, "rlstructs", "workers"))]
    spec = importlib.machinery.PathFinder.find_spec(__name__, others)
    if spec is None:
        raise ModuleNotFoundError("No module named 'workers'; that of rlstructs is 'rlstructs.workers'", name=__name__)
    sys.modules[__name__] = importlib.util.module_from_spec(spec)
    if spec.loader is not None:
        spec.loader.exec_module(sys.modules[__name__])
elif not TYPE_CHECKING:
    __getattr__, __dir__ = export_lazily(__name__, _EXPORTS)
