"""The trainer's handle of one node of a Ray cluster."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from rlstructs.distributed.actor import BUILD, Columns
from rlstructs.errors import WorkerError
from rlstructs.workers.messages import Future


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
