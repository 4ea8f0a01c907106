"""The exact part of a batcher's state dict.

It holds dicts, lists, tensors, numbers and texts:

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
from collections.abc import Iterator
from typing import Any

import torch

from rlstructs.batcher.engine import Engine
from rlstructs.batcher.exact_state import EngineState, TrainerState
from rlstructs.batcher.lifecycle import Phase
from rlstructs.envs.snapshots.pickler import Pickled, dumps, loads
from rlstructs.errors import SpecError

# Phases that a state can have.
PHASES = {phase.name: phase for phase in (Phase.NEW, Phase.READY, Phase.RUNNING, Phase.ENDED)}
KEYS = {"phase", "settings", "environments", "trainer", "jobs"}


def pack(engine: Engine, state: EngineState, phase: Phase) -> dict[str, Any]:
    """Makes the exact part of a state dict; warns where new episodes begin."""
    for worker, job in enumerate(state.jobs):
        if job.why:
            warnings.warn(
                f"state_dict: all environments of {engine.supervisor.noun} {worker} begin new episodes: {job.why}",
                stacklevel=4,
            )
    jobs = [job.as_dict() for job in state.jobs]
    trainer = dumps(state.trainer).as_tensors()
    _share_equal([trainer, *(part for job in jobs for part in job.get("workers", [job]))])
    return {
        "phase": phase.name,
        "settings": _list_settings(engine),
        "environments": [each for worker, job in enumerate(state.jobs) for each in _describe(worker, job)],
        "trainer": trainer,
        "jobs": jobs,
    }


def unpack(engine: Engine, state: Any) -> tuple[EngineState, Phase]:
    """Reads the exact part of a state dict, for an engine; runs code of whoever made it.

    Raises:
        SpecError: it is damaged, or of another batcher; the message says what differs.
    """
    if not isinstance(state, dict) or state.keys() != KEYS or state["phase"] not in PHASES:
        raise SpecError(f"load_state_dict: the exact part must be a dict with {sorted(KEYS)}, as state_dict made it")
    for name, own in _list_settings(engine).items():
        if state["settings"].get(name) != own:
            raise SpecError(
                f"load_state_dict: {name} is {state['settings'].get(name)!r} in the exact state, in this batcher it is "
                f"{own!r}"
            )
    try:
        trainer: TrainerState = loads(Pickled.of_tensors(state["trainer"]))
        jobs = [engine.supervisor.job_state_class.of_dict(job) for job in state["jobs"]]
    except Exception as error:
        raise SpecError(f"load_state_dict: the exact part cannot be read: {type(error).__name__}: {error}") from error
    return EngineState(trainer, jobs), PHASES[state["phase"]]


def _list_settings(engine: Engine) -> dict[str, Any]:
    supervisor, layout = engine.supervisor, engine.transport.layout
    return {
        "n_timesteps": layout.n_timesteps,
        "run_ahead": supervisor.run_ahead,
        f"{supervisor.noun}s": supervisor.record_sizes,
    }


def _describe(worker: int, job: Any) -> Iterator[dict[str, Any]]:
    methods = job.methods or ["not reset"] * len(job.names)
    for name, method in zip(job.names, methods, strict=True):
        yield {"worker": worker, "name": name, "method": method}


def _share_equal(states: list[dict[str, Any]]) -> None:
    """Uses one tensor where workers have equal ones, such as weights, so that a file holds it once."""
    known: dict[tuple[int, bytes], torch.Tensor] = {}
    for state in states:
        state["storages"] = [
            known.setdefault((len(tensor), hashlib.blake2b(tensor.numpy().data).digest()), tensor)
            for tensor in state["storages"]
        ]
