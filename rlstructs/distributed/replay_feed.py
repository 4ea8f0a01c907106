"""What `RL_Batcher.feed` needs of a `RayReplay`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ReplayFeed:
    """What `RL_Batcher.feed` needs of a `RayReplay`, whose rows are in no process that could be written to.

    Args:
        names: name in the memory -> key of the trajectories.
    """

    names: Mapping[str, str]
    storage: None = None

    def choose_names(self, keys: Collection[str]) -> dict[str, str]:
        """Those that the memory was made with."""
        return dict(self.names)
