"""The exact state of an engine, with which another one goes on as if this one had never stopped.

Rollouts under way are finished first. Then workers reply with the states of their jobs, and the trainer adds what it
knows: of rollouts that were not handed out the replies, and what lies in the slots.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from rlstructs.batcher.engine import Engine
from rlstructs.batcher.metrics import Meter
from rlstructs.batcher.supervisor import MAX_ATTEMPTS, Supervisor
from rlstructs.batcher.worker_record import RolloutOrder, WorkerRecord
from rlstructs.episodes import EpisodeTracker
from rlstructs.moments import Moments
from rlstructs.shared.weights import Parcel
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.workers.errors import is_gone
from rlstructs.workers.futures import Future, gather_values


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
    """What the trainer's process knows.

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
