"""What `RL_Batcher.feed` needs of a `RayReplay`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rlstructs.replay.from_trajectories import Names


@dataclass(frozen=True)
class ReplayFeed:
    """What `RL_Batcher.feed` needs of a `RayReplay`, whose rows are in no process that could be written to.

    Args:
        names: as of `take_trajectories`.
    """

    names: Names
    storage: None = None

    def choose_names(self, keys: Collection[str]) -> dict[str, str]:
        """Those that the memory was made with, or those of `extend` where it was made with none."""
        return dict(self.names(keys) if callable(self.names) else self.names)
