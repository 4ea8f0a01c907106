"""What `RayBatcher.update` sends: into the object store once, from where every node takes it, if it is not small."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from rlstructs.distributed import cluster
from rlstructs.shared.weights import Parcel
from workers.messages import Asked


class Broadcast:
    """Behind the interface of `Outbox`.

    Args:
        check: called with the bytes of an update before it is sent; raises if there is no place for it.

    Attributes:
        version: how many updates there were.
    """

    def __init__(self, check: Callable[[int], None]) -> None:
        self._check, self.version = check, 0

    def pack(self, info: Any) -> Any:
        """What to send for any object: Ray's reference of it, if it is not small.

        Raises:
            OutOfMemoryError: that is too small.
            Exception: `info` cannot be pickled.
        """
        parcel = Parcel.of(info)
        n_bytes = parcel.nbytes + len(parcel.pickled)
        self._check(n_bytes)
        return cluster.shared((self.version + 1, parcel.as_bytes()), n_bytes)

    def record_sent(self, packed: Any, asked: list[Asked]) -> None:
        """It is an update: nodes were told of it."""
        self.version += 1

    def forget(self, workers: Collection[int]) -> None:
        """Nothing: Ray knows who still needs which update."""
