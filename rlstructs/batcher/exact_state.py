"""The exact state of an engine, with which another one goes on as if this one had never stopped.

Rollouts under way are finished first. Then workers reply with the states of their jobs, and the trainer adds what it
knows: of rollouts that were not handed out the replies, and what lies in the slots.

The exact part of a batcher's state dict.

It holds dicts, lists, tensors, numbers and texts:

    phase                   of the batcher
    settings                what must be the same in the batcher that loads it: n_timesteps, run_ahead, and either
                            `workers`, a 1 for each, or `nodes`, the number of workers of each
    environments            for each: its worker, its name, and the method that brings it back
    trainer                 a pickled `TrainerState`
    jobs                    the states of the jobs, pickled
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from rlstructs.batcher.engine import Engine
from rlstructs.batcher.lifecycle import Phase
from rlstructs.batcher.metrics import Meter
from rlstructs.batcher.supervisor import MAX_ATTEMPTS, Supervisor
from rlstructs.batcher.worker_record import RolloutOrder, WorkerRecord
from rlstructs.envs.snapshots.pickler import Pickled, dumps, loads
from rlstructs.episodes import EpisodeTracker
from rlstructs.errors import SpecError
from rlstructs.moments import Moments
from rlstructs.shared.weights import Parcel
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.workers.errors import is_gone
from rlstructs.workers.messages import Future, gather_values


class OrderState(NamedTuple):
    """An order of a rollout that is not handed out.

    Attributes:
        number, is_lost, is_cut: see `RolloutOrder`.
        reply: of the worker; None for a lost rollout.
        content: what the transport keeps of it.
    """

    number: int
    is_lost: bool
    is_cut: bool
    reply: Any
    content: Any


class TrainerState(NamedTuple):
    """The state of the trainer's process.

    Attributes:
        records: for each worker the fields of its record, but for its orders, and the seconds since it began.
        orders: for each worker, the orders of rollouts that are not handed out.
        statistics: the moments that environments normalise by.
        infos, running: of the transport.
        episodes, meter: those of the engine.
        version, version_before: the number of updates, and of those that workers do not count.
        update: the last one; None if there was none.
        fed_from: by worker, the number of its first rollout that a memory gets; None if none is fed.
    """

    records: list[dict[str, Any]]
    orders: list[list[OrderState]]
    statistics: dict[str, Moments]
    infos: dict[str, DictTensor]
    running: list[list[int] | None]
    episodes: EpisodeTracker
    meter: Meter
    version: int
    version_before: int
    update: Parcel | None
    fed_from: Sequence[int] | None


class EngineState(NamedTuple):
    """The state of an engine.

    Attributes:
        trainer: what its own process knows.
        jobs: the states of its workers' jobs.
    """

    trainer: TrainerState
    jobs: list[Any]


def take_engine_state(engine: Engine, best: bool) -> EngineState | Exception:
    """Takes the state of an engine, which goes on as if nothing had happened; rollouts under way are finished.

    Args:
        engine: the engine.
        best: whether new episodes begin where environments cannot be brought back.

    Returns:
        The state; or what a job raised because it has none, and then the engine can go on.

    Raises:
        Exception: a worker is gone or late, or a rollout has failed.
    """
    jobs = _ask_states(engine.supervisor, best)
    if isinstance(jobs, Exception):
        return jobs
    engine.begin_successors()
    return EngineState(_take_trainer_state(engine, jobs), jobs)


def load_engine_state(engine: Engine, state: EngineState) -> None:
    """Brings an engine to a state: the last update, the jobs, then what its own process knows.

    Args:
        engine: the engine; its rollouts are finished, and dropped.
        state: what `take_engine_state` of an engine with the same workers returned.
    """
    supervisor, trainer = engine.supervisor, state.trainer
    supervisor.finish_rollouts()
    for record in supervisor.records:
        record.clear()
    if trainer.update is not None:  # successors get it, too
        packed = engine.outbox.pack(trainer.update)
        supervisor.pool.settle(supervisor.update(packed, partial(engine.outbox.record_sent, packed)))
    if trainer.infos:
        engine.transport.set_infos(trainer.infos)
    requests = [
        supervisor.pool.ask("load_state", job, engine.settings.seed_of(worker, record["stream"]), only=[worker])[0]
        for worker, (job, record) in enumerate(zip(state.jobs, trainer.records, strict=True))
    ]
    supervisor.pool.settle(requests)
    gather_values(requests)  # raises what failed
    _load_trainer_state(engine, trainer)
    supervisor.expect_state(trainer.update is not None, was_reset=any(job.methods for job in state.jobs))
    engine.begin_successors()


def _finish_rollouts(supervisor: Supervisor) -> None:
    """Waits until every rollout that was ordered is done or lost.

    Raises:
        Exception: what a worker raised, or that it is gone, unless workers are replaced.
    """
    supervisor.finish_rollouts()
    if not supervisor.can_replace:
        gather_values(supervisor.list_rollouts())  # raises what failed


def _ask_states(supervisor: Supervisor, best: bool) -> list[Any] | Exception:
    """Finishes rollouts, and asks every job for its state.

    Returns:
        The states, by worker; or what a job raised because it has none, and then the batcher can go on.

    Raises:
        Exception: a worker is gone or late, or a rollout has failed.
    """
    everyone = list(range(supervisor.pool.n_workers))
    for _ in range(MAX_ATTEMPTS):
        _finish_rollouts(supervisor)
        states, failures = supervisor.call_some("take_state", (best,), everyone)
        if not failures:
            return [states[index] for index in everyone]
        _, error = min(failures.items())
        raised = [each for each in failures.values() if not is_gone(each)]
        if raised:
            assert isinstance(raised[0], Exception)
            return raised[0]
        if not supervisor.can_replace:
            raise error
        supervisor.replace_failed(failures)
    raise error


def _take_trainer_state(engine: Engine, jobs: list[Any]) -> TrainerState:
    """Takes what the engine's own process knows, when no rollout is under way."""
    transport, records = engine.transport, engine.supervisor.records
    return TrainerState(
        [_describe_record(record, job.begins_episodes) for record, job in zip(records, jobs, strict=True)],
        [
            [_describe_order(order, transport.read_rollout(worker, order.number)) for order in record.orders]
            for worker, record in enumerate(records)
        ],
        engine.supervisor.statistics,
        transport.infos,
        transport.running,
        transport.episodes,
        engine.meter,
        engine.policy_version,
        engine.version_before,
        engine.outbox.read_last() or jobs[0].last_update,
        engine.fed_from,
    )


def _describe_record(record: WorkerRecord, begins_episodes: bool) -> dict[str, Any]:
    """The fields of a record that `WorkerRecord` takes; `since` counts from now."""
    fields = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    fields |= {"orders": None, "since": time.monotonic() - record.since}
    if begins_episodes:  # like a successor's, they begin after what was not handed out, with other seeds
        fields |= {"stream": record.stream + 1, "first_number": record.n_ordered}
    return fields


def _describe_order(order: RolloutOrder, content: Any) -> OrderState:
    reply = None if order.is_lost else order.request.value
    return OrderState(order.number, order.is_lost, order.is_cut, reply, content)


def _load_trainer_state(engine: Engine, state: TrainerState) -> None:
    supervisor, transport = engine.supervisor, engine.transport
    version_before = state.version - engine.outbox.version
    behind = version_before - state.version_before
    for worker, (fields, orders) in enumerate(zip(state.records, state.orders, strict=True)):
        made = deque(_make_order(worker, order, behind) for order in orders)
        fields = {**fields, "orders": made, "since": time.monotonic() - fields["since"]}
        supervisor.records[worker] = type(supervisor.records[worker])(**fields)
        transport.cut(worker, 0)  # what was cut before had other numbers
        for order in orders:
            transport.write_rollout(worker, order.number, order.content)
    transport.running, transport.episodes = state.running, state.episodes
    supervisor.set_statistics(state.statistics)
    engine.resume(state.meter, version_before, state.fed_from)


def _make_order(worker: int, state: OrderState, behind: int) -> RolloutOrder:
    """Makes an order that is done or lost; workers count `behind` updates less than those of the state."""
    reply = None if state.is_lost else state.reply._replace(version=state.reply.version - behind)
    return RolloutOrder(state.number, Future(worker, "rollout", True, reply), state.is_lost, state.is_cut)


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
    if not isinstance(state, dict) or state.keys() != KEYS or not isinstance(state["settings"], dict):
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
        phase = PHASES[state["phase"]]
    except Exception as error:
        raise SpecError(f"load_state_dict: the exact part cannot be read: {type(error).__name__}: {error}") from error
    return EngineState(trainer, jobs), phase


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
