"""`Broadcast`: sends updates to nodes; a large one goes into the object store, once for all nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from rlstructs.distributed import cluster
from rlstructs.shared.weights import Parcel
from rlstructs.workers.futures import Future


class Broadcast:
    """An `Outbox` whose updates go to nodes.

    Args:
        check_size: called with the size of an update, in bytes, before it is sent; raises if it does not fit.

    Attributes:
        version: the number of updates so far.
    """

    def __init__(self, check_size: Callable[[int], None]) -> None:
        self._check_size, self.version = check_size, 0

    def pack(self, info: Any) -> Any:
        """Returns what to send for an update, or a `Parcel` of one: its bytes, or a reference to the object store.

        Raises:
            OutOfMemoryError: an object store is too small.
            Exception: `info` cannot be pickled.
        """
        parcel = info if isinstance(info, Parcel) else Parcel.of(info)
        n_bytes = parcel.nbytes + len(parcel.pickled)
        self._check_size(n_bytes)
        return cluster.share((self.version + 1, parcel.as_bytes()), n_bytes)

    def record_sent(self, packed: Any, requests: list[Future]) -> None:
        """Counts the update."""
        self.version += 1

    def read_last(self) -> None:
        """None: nodes have the last update."""

    def forget(self, workers: Collection[int]) -> None:
        """Does nothing: Ray knows which node still needs which update."""
