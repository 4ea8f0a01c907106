"""The actor that Ray runs: requests are bytes, replies bytes and arrays.

No exception reaches Ray.

    trainer                                          actor
    -------                                          -----
    call(Call("build", settings))  ───────────────>  makes the job
    call(Call("rollout", ...))  ──────────────────>  calls this method of it
       <── NodeResult and columns, or NodeFailure ─

Requests and replies are bytes because Ray has its own pickling: classes of the script would come back as other ones,
and exceptions as Ray's. Arrays stay outside of the bytes: they go through the object store without another copy.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NamedTuple

import numpy as np

from rlstructs.workers import pickling
from rlstructs.workers.errors import RemoteTraceback, WorkerError
from rlstructs.workers.failures import RAISED, Failure
from rlstructs.workers.imports import uncollected_imports
from rlstructs.workers.messages import Call

BUILD = "build"
# The concurrency group of calls that do not wait for others.
ASIDE = "aside"

Columns = dict[str, np.ndarray]


class NodeResult(NamedTuple):
    """The reply to a call that returned.

    Attributes:
        value: what the method returned, without its columns.
        report: the report of the job.
    """

    value: Any
    report: dict[str, Any]


class NodeFailure(NamedTuple):
    """The reply to a call that raised.

    Attributes:
        worker_index: the worker in which the exception was raised, counted over all nodes.
        failure: the exception.
    """

    worker_index: int
    failure: Failure


class Place(NamedTuple):
    """The place of an actor: Ray's id of its machine, and its process id."""

    node_id: str
    pid: int


class NodeActor:
    """An actor with one job.

    The job is what the `build` method of its settings returns; its `report` comes with every reply.

    Args:
        first_worker: index of its first worker, counted over all nodes.
    """

    def __init__(self, first_worker: int) -> None:
        self._first_worker = first_worker
        self._job: Any = None

    def call(self, request: bytes, *shared: Any) -> tuple[bytes, Columns]:
        """Calls a method of the job, or builds the job.

        Args:
            request: a pickled `Call`.
            shared: more arguments, from the object store.

        Returns:
            A pickled `NodeResult` or `NodeFailure`, and the columns of the value.
        """
        columns: Columns = {}
        reply: NodeResult | NodeFailure
        try:
            call: Call = pickling.loads(request)
            if call.method == BUILD:
                value: Any = self._build(*shared, *call.args)
            else:
                value = getattr(self._job, call.method)(*call.args, *shared)
            if _has_columns(value):
                columns, value = value.columns, value._replace(columns={})
            reply = NodeResult(value, self._job.report())
        except Exception as error:
            reply = self._make_failure(error)
        return pickling.dumps(reply), columns

    def cut(self, number: int) -> None:
        """Makes the job end its rollouts below this number.

        Runs in another thread than `call`.
        """
        if self._job is not None:
            self._job.cut(number)

    def _build(self, settings: bytes, path: list[str], *args: Any) -> Place:
        """Builds the job; returns where that is."""
        import ray

        _set_import_path(path)
        with uncollected_imports():
            made = pickling.loads(settings)
        self._job = made.build(*args)
        return Place(ray.get_runtime_context().get_node_id(), os.getpid())

    def _make_failure(self, error: Exception) -> NodeFailure:
        """Makes the reply for an exception.

        If a worker of this node raised it, the reply has the worker's index and traceback.
        """
        cause = error.__cause__
        if not isinstance(cause, RemoteTraceback):
            index = error.worker_index if isinstance(error, WorkerError) else None
            return NodeFailure(self._first_worker + (index or 0), Failure.of(error))
        # A worker of this node raised it: the trainer should see the worker's traceback, not the node's.
        notes = getattr(error, "__notes__", [])
        if notes and notes[-1].startswith(RAISED):
            notes.pop()
        return NodeFailure(self._first_worker + cause.worker_index, Failure.of(error)._replace(text=cause.text))


def _has_columns(value: Any) -> bool:
    """Whether a reply is a NamedTuple with a field `columns`.

    These arrays go through the object store.
    """
    return isinstance(value, tuple) and "columns" in getattr(value, "_fields", ())


def _set_import_path(path: list[str]) -> None:
    """Adds the trainer's folders to the import path, if they exist here.

    They come before the actor's own folders if both run the same Python, and after them otherwise.
    """
    is_same = os.path.dirname(os.__file__) in path
    first, then = (path, sys.path) if is_same else (sys.path, path)
    here = [folder for folder in first if folder in sys.path or os.path.exists(folder)]
    sys.path[:] = here + [folder for folder in then if folder not in here]
