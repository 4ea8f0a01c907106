"""The exact state of an engine: another one continues from it identically.

Rollouts under way are finished first. Then workers reply with the states of their jobs. The trainer adds its own state:
for rollouts that were not handed out, the replies and the contents of the slots.

In a batcher's state dict it is the exact part, of dicts, lists, tensors, numbers and texts:

    phase                   of the batcher
    settings                what must be the same in the batcher that loads it: n_timesteps, run_ahead, and either
                            `workers`, a 1 for each, or `nodes`, the number of workers of each
    environments            for each: its worker, its name, and the method that brings it back
    trainer                 a pickled `TrainerState`
    jobs                    the states of the jobs, pickled
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from rlstructs.batcher.lifecycle import Phase
from rlstructs.batcher.metrics import Meter
from rlstructs.batcher.transport import TransportState
from rlstructs.errors import SpecError
from rlstructs.exact.pickler import Pickled, dumps, loads
from rlstructs.moments import Moments
from rlstructs.shared.weights import Parcel


class TrainerState(NamedTuple):
    """The state of the trainer's process.

    Attributes:
        records: of the workers: their exact states.
        statistics: the moments that environments normalise by.
        transport: its exact state.
        meter: of the engine.
        version, version_before: the number of updates, and the number of those that workers do not count.
        update: the last update; None if there was none.
        fed_from: by worker, the number of its first rollout that a memory gets; None if none is fed.
        has_sent_update: whether `update` was taken out, because the jobs are sent it before this state.
    """

    records: list[dict[str, Any]]
    statistics: dict[str, Moments]
    transport: TransportState
    meter: Meter
    version: int
    version_before: int
    update: Parcel | None
    fed_from: Sequence[int] | None
    has_sent_update: bool = False

    @property
    def was_updated(self) -> bool:
        """Whether there was an update."""
        return self.has_sent_update or self.update is not None

    def without_update(self) -> TrainerState:
        """Takes out the update, which a node's jobs are sent by the trainer."""
        return self._replace(update=None, has_sent_update=self.was_updated)


class EngineState(NamedTuple):
    """The state of an engine.

    Attributes:
        trainer: the state of the trainer's process.
        jobs: the states of its workers' jobs.
    """

    trainer: TrainerState
    jobs: list[Any]


# Phases that a state can have.
PHASES = {phase.name: phase for phase in (Phase.NEW, Phase.READY, Phase.RUNNING, Phase.ENDED)}
KEYS = {"phase", "settings", "environments", "trainer", "jobs"}


def pack(state: EngineState, settings: Mapping[str, Any], noun: str, phase: Phase) -> dict[str, Any]:
    """Makes the exact part of a state dict; warns where new episodes begin.

    Args:
        state: of the engine.
        settings: what must be the same in the batcher that loads it.
        noun: the word for a worker.
        phase: of the batcher.
    """
    for worker, job in enumerate(state.jobs):
        if job.why:
            warnings.warn(
                f"state_dict: all environments of {noun} {worker} begin new episodes: {job.why}",
                stacklevel=4,
            )
    jobs = [job.as_dict() for job in state.jobs]
    trainer = dumps(state.trainer).as_tensors()
    _share_equal([trainer, *(part for job in jobs for part in job.get("workers", [job]))])
    return {
        "phase": phase.name,
        "settings": settings,
        "environments": [each for worker, job in enumerate(state.jobs) for each in _describe(worker, job)],
        "trainer": trainer,
        "jobs": jobs,
    }


def unpack(state: Any, settings: Mapping[str, Any], job_state_class: Any) -> tuple[EngineState, Phase]:
    """Reads the exact part of a state dict; runs code of whoever made it.

    Args:
        state: the part.
        settings: those of the engine that is to go on with it.
        job_state_class: the class of the states of its jobs.

    Raises:
        SpecError: it is damaged, or of another batcher; the message says what differs.
    """
    if not isinstance(state, dict) or state.keys() != KEYS or not isinstance(state["settings"], dict):
        raise SpecError(f"load_state_dict: the exact part must be a dict with {sorted(KEYS)}, as state_dict made it")
    for name, own in settings.items():
        if state["settings"].get(name) != own:
            raise SpecError(
                f"load_state_dict: {name} is {state['settings'].get(name)!r} in the exact state, in this batcher it is "
                f"{own!r}"
            )
    try:
        trainer: TrainerState = loads(Pickled.of_tensors(state["trainer"]))
        jobs = [job_state_class.of_dict(job) for job in state["jobs"]]
        phase = PHASES[state["phase"]]
    except Exception as error:
        raise SpecError(f"load_state_dict: the exact part cannot be read: {type(error).__name__}: {error}") from error
    return EngineState(trainer, jobs), phase


def _describe(worker: int, job: Any) -> Iterator[dict[str, Any]]:
    methods = job.methods or ["not reset"] * len(job.names)
    for name, method in zip(job.names, methods, strict=True):
        yield {"worker": worker, "name": name, "method": method}


def _share_equal(states: list[dict[str, Any]]) -> None:
    """Uses one tensor where workers have equal ones, such as weights.

    A file then holds it once.
    """
    known: dict[tuple[int, bytes], torch.Tensor] = {}
    for state in states:
        state["storages"] = [
            known.setdefault((len(tensor), hashlib.blake2b(tensor.numpy().data).digest()), tensor)
            for tensor in state["storages"]
        ]
