"""`NodeState`: what a node replies when it is asked for its exact state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rlstructs.batcher.exact_state import EngineState
from rlstructs.envs.snapshots.pickler import Pickled, dumps, loads
from rlstructs.rollout.job_reply import JobState
from rlstructs.shared.weights import Parcel
from rlstructs.structures.dict_tensor import DictTensor


class OwnState(NamedTuple):
    """What a node knows beside its engine.

    Attributes:
        infos: `agent_info` and `env_info`, as they were last set.
        agent_info: what the next rollout begins with; None for the one in force.
        all_ended: whether every environment has ended.
        new_episodes: environments whose episodes began anew, which the trainer was not told yet.
    """

    infos: dict[str, DictTensor]
    agent_info: DictTensor | None
    all_ended: bool
    new_episodes: set[int]


class NodeState(NamedTuple):
    """The state of a node's job; has what `JobState` has.

    Attributes:
        engine: the state of its engine.
        own: what it knows beside.
    """

    engine: EngineState
    own: OwnState

    @property
    def begins_episodes(self) -> bool:
        """False: where new episodes begin in its workers, the node itself sees to it."""
        return False

    @property
    def names(self) -> list[str]:
        """See `JobState`."""
        return [name for job in self.engine.jobs for name in job.names]

    @property
    def methods(self) -> list[str]:
        """See `JobState`."""
        return [method for job in self.engine.jobs for method in job.methods]

    @property
    def why(self) -> str:
        """See `JobState`."""
        return next((job.why for job in self.engine.jobs if job.why), "")

    @property
    def last_update(self) -> Parcel | None:
        """See `JobState`."""
        return self.engine.trainer.update

    def as_dict(self) -> dict[str, Any]:
        """The same as a dict of lists and tensors, without the last update, which the trainer keeps."""
        trainer = self.engine.trainer._replace(update=None)
        return {"workers": [job.as_dict() for job in self.engine.jobs], **dumps((trainer, self.own)).as_tensors()}

    @classmethod
    def of_dict(cls, state: Mapping[str, Any]) -> NodeState:
        """The state of what `as_dict` returned."""
        trainer, own = loads(Pickled.of_tensors(state))
        return cls(EngineState(trainer, [JobState.of_dict(job) for job in state["workers"]]), own)
