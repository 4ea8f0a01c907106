"""The counters of a store: those that all processes share, and those by which this one reads while others write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rlstructs.errors import StateError
from rlstructs.replay.backing import Backing
from rlstructs.replay.continuity import N_NUMBERS, Continuity
from rlstructs.replay.ring import HEAD, N_COUNTERS, RESERVED, keep_order

# After the counters of the lanes: how often rows that were there have changed, whether a program has live tensors, and
# how often episodes have changed without new rows.
REWRITES, EXPOSED, EPISODE_CHANGES = range(3)
N_NOTES = 3


class Counters:
    """Three int64 for each lane (see `Ring`), three more (see `Continuity`), and three for the store.

    Args:
        n_lanes: number of lanes.
        backing: where the bytes are stored.

    Attributes:
        shown: the counters that this process reads by while others write, int64 (3, n_lanes); None for the shared ones.
    """

    def __init__(self, n_lanes: int, backing: Backing) -> None:
        self._block = backing.allocate("counters", ((N_COUNTERS + N_NUMBERS) * n_lanes + N_NOTES) * 8)
        self.shown: np.ndarray | None = None
        self._settle: Callable[[], None] | None = None
        self._map()

    def _map(self) -> None:
        # `REWRITES`, `EXPOSED` and `EPISODE_CHANGES`, int64, which all processes share.
        self.notes: np.ndarray = self._block.bytes().view(np.int64)[-N_NOTES:]

    @property
    def shared(self) -> np.ndarray:
        """The counters that all processes share, int64 (3, n_lanes)."""
        return self._of_lanes()[:N_COUNTERS]

    @property
    def continuity(self) -> Continuity:
        """Which steps of their environments the newest rows are, which all processes share."""
        return Continuity(self._of_lanes()[N_COUNTERS:])

    def _of_lanes(self) -> np.ndarray:
        return self._block.bytes().view(np.int64)[:-N_NOTES].reshape(N_COUNTERS + N_NUMBERS, -1)

    def read(self) -> np.ndarray:
        """The counters that this process reads by, int64 (3, n_lanes)."""
        return self.shared if self.shown is None else self.shown

    def show(self, shown: np.ndarray | None, settle: Callable[[], None] | None) -> None:
        """Has this process read by other counters; None ends that. `settle` waits until no other process writes."""
        self.shown, self._settle = shown, settle

    def settle(self) -> None:
        """Waits until no other process writes, if this one reads by counters of its own."""
        if self._settle is not None:
            self._settle()

    def take_back(self) -> None:
        """Drops what other processes have written after what this one shows; they must have ended."""
        assert self.shown is not None
        # The head last: what it goes back over is reserved by then.
        self.shared[RESERVED] = self.shown[RESERVED]
        keep_order()
        self.shared[HEAD] = self.shown[HEAD]
        self.show(None, None)

    def check_writable(self) -> None:
        """Raises StateError while other processes write."""
        if self.shown is not None:
            raise StateError("workers write to this memory: wait for their rollouts, or reset the batcher")

    def copy_to(self, backing: Backing) -> Callable[[], None]:
        """Copies the bytes elsewhere; the returned function moves there."""
        before = self._block.bytes()
        block = backing.allocate("counters", before.nbytes)
        block.bytes()[...] = before

        def move() -> None:
            self._block = block
            self._map()

        return move

    def __getstate__(self) -> dict[str, Any]:
        state = {**vars(self), "shown": None, "_settle": None}
        del state["notes"]
        return state

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._map()
