"""The actor that Ray runs, and the trainer's handle of it.

Requests are bytes, replies bytes and arrays.

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

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from rlstructs.workers import pickling
from rlstructs.workers.errors import RemoteTraceback, WorkerError
from rlstructs.workers.failures import RAISED, Failure
from rlstructs.workers.imports import uncollected_imports
from rlstructs.workers.messages import Call, Future

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

    def call_aside(self, method: str, *args: Any) -> Any:
        """Calls a method of the job in another thread than `call`.

        Returns None while there is no job.
        """
        return None if self._job is None else getattr(self._job, method)(*args)

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


class Bell:
    """Wakes waiting threads when a reply has come, or never will.

    Ray's own threads ring it. They must not wait for a lock that is held while Ray is called, so it has none.
    """

    def __init__(self) -> None:
        self._listeners: list[SimpleQueue[None]] = []

    def ring(self, _: Any = None) -> None:
        """Wakes everyone who listens."""
        for listener in tuple(self._listeners):
            listener.put(None)

    @contextlib.contextmanager
    def listen(self) -> Iterator[SimpleQueue[None]]:
        """Yields a queue that gets an entry for each ring from now on."""
        listener: SimpleQueue[None] = SimpleQueue()
        self._listeners.append(listener)
        try:
            yield listener
        finally:
            self._listeners.remove(listener)


@dataclass(eq=False)
class Request:
    """A request to a node.

    Attributes:
        reference: Ray's reference to the reply.
        reply: holds the reply once it is on this machine, where Ray brings it as soon as there is one.
        asked: the request and the future that its reply resolves.
        limit: seconds that the node has; None for no limit.
    """

    reference: Any
    reply: futures.Future[tuple[bytes, Columns]]
    asked: Future
    limit: float | None


@dataclass
class Node:
    """One actor and its open requests.

    Attributes:
        index: the index of the node.
        workers: the indexes of its workers, counted over all nodes.
        actor: Ray's handle of the actor.
        noun: its name in messages.
        node_id, address, pid: where it runs, once that is known.
        requests: the requests without a reply, the oldest first.
        since: when the wait for the oldest one began, in the time of `time.monotonic`.
        report: the last report of its job.
        placing_since: when it was started, or when the last warning came that it is not placed and built yet.
        error: why it is gone; None while it is not.
        is_late: whether it has missed a deadline, and has not replied since.
        has_answered: whether the awaited reply existed on the node's machine at its deadline, and is in transit.
    """

    index: int
    workers: range
    actor: Any
    noun: str = "node"
    node_id: str = ""
    address: str = ""
    pid: int = 0
    requests: deque[Request] = field(default_factory=deque)
    since: float = field(default_factory=time.monotonic)
    report: dict[str, Any] = field(default_factory=dict)
    placing_since: float = field(default_factory=time.monotonic)
    error: WorkerError | None = None
    is_late: bool = False
    has_answered: bool = False

    def describe(self) -> dict[str, Any]:
        """Its row in `RayBatcher.stats`."""
        return {
            "node": self.index,
            "node_id": self.node_id,
            "address": self.address,
            "pid": self.pid,
            "state": self.state,
            "workers": list(self.workers),
        }

    def is_overdue(self) -> bool:
        """Whether the time for its next reply is over."""
        limit = self.requests[0].limit if self.requests else None
        return limit is not None and time.monotonic() >= self.since + limit

    def is_built(self) -> bool:
        """Whether its job is built, or it is gone."""
        return not self.requests or self.requests[0].asked.label != BUILD

    @property
    def state(self) -> str:
        """ "idle", "busy" or "gone"."""
        if self.error is not None:
            return "gone"
        return "busy" if self.requests else "idle"

    def __str__(self) -> str:
        return f"{self.noun} {self.index}" + (f" ({self.address})" if self.address else "")


def wait_for_ring(rings: SimpleQueue[None], seconds: float) -> None:
    """Waits for the next ring, for `seconds` at most."""
    with contextlib.suppress(Empty):
        rings.get(timeout=seconds)
