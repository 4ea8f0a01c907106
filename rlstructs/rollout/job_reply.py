"""`JobState`: what a worker replies when it is asked for its exact state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rlstructs.envs.snapshots.methods import NEW_EPISODE
from rlstructs.envs.snapshots.pickler import Pickled
from rlstructs.shared.weights import Parcel


class JobState(NamedTuple):
    """The state of a job.

    Attributes:
        names: of each single environment: its id in gymnasium's registry, or its class.
        methods: how each is brought back; see `rlstructs.envs.snapshots.methods`.
        pickled: a `Content` of `job_state`.
        why: why new episodes begin, where they do.
    """

    names: list[str]
    methods: list[str]
    pickled: Pickled
    why: str = ""

    @property
    def begins_episodes(self) -> bool:
        """Whether all environments of the worker begin new episodes."""
        return NEW_EPISODE in self.methods

    @property
    def last_update(self) -> Parcel | None:
        """None: the trainer keeps the last update itself."""
        return None

    def as_dict(self) -> dict[str, Any]:
        """Converts to a dict of lists, texts and tensors, which `torch.load(weights_only=True)` reads."""
        return {"names": self.names, "methods": self.methods, "why": self.why, **self.pickled.as_tensors()}

    @classmethod
    def of_dict(cls, state: Mapping[str, Any]) -> JobState:
        """The state of what `as_dict` returned."""
        return cls(list(state["names"]), list(state["methods"]), Pickled.of_tensors(state), state["why"])
