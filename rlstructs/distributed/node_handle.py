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
from workers.futures import Future


class Bell:
    """Wakes those who wait when something has come, or never will.

    Ray's own threads ring it: they must not wait for what is held while Ray is asked, so there is no lock in it.
    """

    def __init__(self) -> None:
        self._listeners: list[SimpleQueue[None]] = []

    def ring(self, _: Any = None) -> None:
        """Something has happened."""
        for listener in tuple(self._listeners):
            listener.put(None)

    @contextlib.contextmanager
    def heard(self) -> Iterator[SimpleQueue[None]]:
        """A queue that has something to get for each ring from now on."""
        listener: SimpleQueue[None] = SimpleQueue()
        self._listeners.append(listener)
        try:
            yield listener
        finally:
            self._listeners.remove(listener)


@dataclass(eq=False)
class Request:
    """What a node was asked.

    Attributes:
        reference: Ray's, of the reply.
        reply: has it once it is on this machine; Ray begins to bring it as soon as it is there.
        asked: what became of it.
        limit: seconds that the node has, None for no limit.
    """

    reference: Any
    reply: futures.Future[tuple[bytes, Columns]]
    asked: Future
    limit: float | None


@dataclass
class Node:
    """One actor and what it was asked.

    Attributes:
        index: of the node.
        workers: its workers, of all.
        actor: Ray's handle of it.
        node_id, address, pid: where it runs, once that is known.
        asked: what it has not replied to, the oldest first.
        since: since when the oldest is waited for, in the time of `time.monotonic`.
        report: what it said last of its workers.
        noun: what it is called.
        error: why it is gone.
        waited: since when, or since which warning, it is to be placed and built, in the time of `time.monotonic`.
        is_late: whether it has outrun a deadline, and has not replied since.
        has_answered: whether the reply that is waited for was there, on its machine, when the time for it was over.
    """

    index: int
    workers: range
    actor: Any
    noun: str = "node"
    node_id: str = ""
    address: str = ""
    pid: int = 0
    asked: deque[Request] = field(default_factory=deque)
    since: float = field(default_factory=time.monotonic)
    report: dict[str, Any] = field(default_factory=dict)
    error: WorkerError | None = None
    waited: float = field(default_factory=time.monotonic)
    is_late: bool = False
    has_answered: bool = False

    def is_overdue(self) -> bool:
        """Whether its next reply is later than it may be."""
        limit = self.asked[0].limit if self.asked else None
        return limit is not None and time.monotonic() >= self.since + limit

    def is_built(self) -> bool:
        """Whether it has its job, or is gone."""
        return not self.asked or self.asked[0].asked.label != BUILD

    @property
    def state(self) -> str:
        """"idle", "busy" or "gone"."""
        if self.error is not None:
            return "gone"
        return "busy" if self.asked else "idle"

    def __str__(self) -> str:
        return f"{self.noun} {self.index}" + (f" ({self.address})" if self.address else "")


def _await(rings: SimpleQueue[None], seconds: float) -> None:
    """Until the next ring, for so long at most."""
    with contextlib.suppress(Empty):
        rings.get(timeout=seconds)
