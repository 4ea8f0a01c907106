"""`NodeJob`: runs an engine for a block of the workers, in an actor.

It answers the trainer's requests.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns
from typing import Any, NamedTuple, TypeVar

import numpy as np

from rlstructs.batcher.arguments import RunSettings
from rlstructs.batcher.engine import Engine
from rlstructs.batcher.evaluation import Rounds
from rlstructs.batcher.exact_state import EngineState
from rlstructs.batcher.start import start_engine
from rlstructs.batcher.transport import SlotTransport
from rlstructs.distributed.cluster import Columns
from rlstructs.envs.vec_env import NO_INFO
from rlstructs.exact.job import JobState
from rlstructs.exact.pickler import Pickled, dumps, loads
from rlstructs.moments import Moments
from rlstructs.rollout.evaluation import Standing
from rlstructs.rollout.job import FailureGuard
from rlstructs.rollout.job_specs import JobDescription, JobSettings, Specs
from rlstructs.shared.slots import STATE, columns_of
from rlstructs.shared.weights import Parcel
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.trace.board import BoardRecording, Excerpt
from rlstructs.trace.lane import EVALUATE, ORDERLESS, READ, RESET, UPDATE, during
from rlstructs.worker_setup import Registered, register_envs, write_libraries
from rlstructs.workers import pickling
from rlstructs.workers.limits import n_cores
from rlstructs.workers.settings import SETTINGS, write_settings

Found = TypeVar("Found")


@dataclass(frozen=True)
class NodeSettings:
    """The settings that nodes make their engines from; picklable.

    Attributes:
        job, run: the settings of all workers.
        debug: see `RL_Batcher`.
        registered: the environments that the trainer's process has registered with gymnasium.
        process, libraries: settings of the trainer's process, which nodes and their workers take over.
    """

    job: JobSettings
    run: RunSettings
    debug: bool
    registered: Registered
    process: dict[str, bytes]
    libraries: dict[str, dict[str, bytes]]

    def for_workers(self, workers: slice) -> NodeSettings:
        """Returns the settings of the node that has these workers."""
        agent_seeds = self.job.agent_seeds
        job = dataclasses.replace(
            self.job,
            seeds=self.job.seeds[workers],
            agent_seeds=None if agent_seeds is None else agent_seeds[workers],
            first_worker=workers.start,
        )
        n_processes, init_worker = workers.stop - workers.start, self.run.init_worker
        if init_worker is not None:
            init_worker = partial(_init_worker, init_worker, workers.start)
        run = dataclasses.replace(self.run, n_processes=n_processes, run_ahead=0, init_worker=init_worker)
        return dataclasses.replace(self, job=job, run=run)

    def build(self, workers: slice, states: Sequence[dict[str, Any]] | None = None) -> NodeJob:
        """Makes the job of the node that has these workers; see `NodeJob`."""
        return NodeJob(self.for_workers(workers), workers, states)


@dataclass(frozen=True)
class NodeRollout:
    """The environments of a node's rollout, counted from the node's first.

    Attributes:
        reset_before, reset_after: those whose episodes began anew before or after the rollout, because of a reset or
            because their worker was replaced.
        rows: those that ran, ascending; None for all of them.
    """

    reset_before: list[int]
    reset_after: list[int]
    rows: list[int] | None


class NodeReply(NamedTuple):
    """A node's reply when its rollout is over.

    Its first four fields are named as in `RolloutReply`.

    Attributes:
        running: the environments that still run, counted from the node's first; None for all of them.
        clock: the states of its workers, as `Supervisor.get_states` returns them.
        version: number of updates that the agents had received.
        statistics: the moments that each worker gathered, by name.
        rollout: the environments of the rollout.
        columns: the contents of the slots: arrays that are sent through the object store.
    """

    running: list[int] | None
    clock: list[dict[str, Any]]
    version: int
    statistics: list[dict[str, Moments]]
    rollout: NodeRollout
    columns: Columns


class NodeEngine(Engine):
    """The engine of a node, which takes its orders from the trainer's.

    Attributes:
        new_episodes: environments whose episodes began anew, which the trainer was not told yet.
        all_ended: whether every environment has ended.
    """

    _transport: SlotTransport

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.new_episodes: set[int] = set()
        self.all_ended = False
        self._release: Callable[[], None] = lambda: None  # of the last rollout, whose slots are read until the next

    def set_statistics(self, statistics: dict[str, Moments]) -> None:
        """Sets the moments that all environments normalise by from the next request."""
        self._supervisor.set_statistics(statistics)

    def run(self, number: int, agent_info: DictTensor | None) -> tuple[NodeRollout, list[int] | None, Any, Columns]:
        """Runs one rollout.

        Args:
            number: the number of rollouts that the trainer ordered before; it may be higher than the number here, as it
                includes rollouts ordered after all environments had ended.
            agent_info: see `begin_rollouts`.

        Returns:
            The rollout, the environments that still run (None for all), the moments that each worker gathered, and the
            columns, which may be views of the slots that are valid until the next rollout.
        """
        self._release()
        slots = self._transport.slots[0]
        if self.all_ended:
            none = columns_of(slots, np.zeros(0, np.int64), 0)
            return NodeRollout(self.take_new_episodes(), [], []), [], [], none
        for record in self._supervisor.records:
            record.n_ordered = number
        self.replace_gone()
        self.begin_rollouts(agent_info)
        before = self.take_new_episodes()
        orders, batch = self.collect()
        self._release = batch.release
        rows = self._transport.running_rows()
        columns, gathered = columns_of(slots, rows, batch.n_timesteps), self._supervisor.list_statistics(orders)
        n_running = self.end_rollouts(orders, batch)
        self.new_episodes |= set(self._transport.failed_rows(orders).tolist())
        self.all_ended = not n_running
        running = None if n_running == self.n_elems else self._transport.running_rows().tolist()
        ran = None if rows.size == self.n_elems else rows.tolist()
        return NodeRollout(before, self.take_new_episodes(), ran), running, gathered, columns

    def cut(self, number: int) -> None:
        """Ends rollouts below this number after their current step.

        It is called while another thread runs one.
        """
        with contextlib.suppress(IndexError, TypeError):  # the engine was closed meanwhile
            for worker in range(self.pool.n_workers):
                self._transport.cut(worker, number)

    def begin_rounds(self, *arguments: Any) -> Rounds:
        """Begins an evaluation."""
        return Rounds(self._supervisor, self._transport.blocks, *arguments)

    def forget_rollout(self) -> None:
        """Leaves the slots of the last rollout alone: a load, or the end, follows."""
        self._release = lambda: None

    def take_new_episodes(self) -> list[int]:
        """Returns the environments that began new episodes since the last call."""
        found, self.new_episodes = sorted(self.new_episodes), set()
        return found

    def _begin_episodes(self, workers: Collection[int]) -> None:
        super()._begin_episodes(workers)
        self.new_episodes |= {row for worker in workers for row in self._transport.blocks[worker]}


class NodeJob:
    """Runs an engine for a block of the workers.

    It answers the requests of a `NodeSupervisor`.

    Args:
        settings: the settings of its engine.
        workers: the indexes of its workers, counted over all nodes.
        states: by worker, the states to continue from, if this node replaces another; otherwise None.
    """

    def __init__(self, settings: NodeSettings, workers: slice, states: Sequence[dict[str, Any]] | None = None) -> None:
        self._workers = workers
        write_settings(SETTINGS, settings.process)
        write_libraries(settings.libraries)
        register_envs(settings.registered)
        self._engine = start_engine(settings.job, settings.run, settings.debug, NodeEngine)
        if states is not None:
            self._engine.renew(states)
        self._lane = self._engine.board.lane
        self._lane.enter(ORDERLESS)
        self._recording: BoardRecording | None = None
        self.error: BaseException | None = None
        self._infos: dict[str, DictTensor] = {"agent_info": NO_INFO, "env_info": NO_INFO}
        self._agent_info: DictTensor | None = None  # for the next rollout
        self._version = 0
        self._evaluation: Rounds | None = None
        # The states in a rollout's reply. Its report holds the same object, which is therefore pickled once.
        self._states: list[dict[str, Any]] | None = None

    def describe(self) -> JobDescription:
        """Returns the number of environments of a worker, and the specs of rollouts."""
        layout, statistics = self._engine.layout, self._engine.statistics
        state = {key.removeprefix(STATE): spec for key, spec in layout.info.items() if key.startswith(STATE)}
        own = dict(layout.observation), dict(layout.action), state, statistics
        return JobDescription(self._engine.n_envs, Specs(*own, has_step_versions=layout.has_step_versions))

    def count_cores(self) -> int:
        """Returns the number of cores of this machine."""
        return n_cores()

    def report(self) -> dict[str, Any]:
        """Reports on its workers: `pids`, `states` as `Supervisor.get_states` returns them, `cells` of their lanes."""
        states, self._states = self._states or self._engine.get_states(), None
        return {"pids": self._engine.pool.pids, "states": states, "cells": self._engine.board.read()[1:]}

    def read_clock(self) -> tuple[int, list[Excerpt]]:
        """Returns the clock of lanes, as `record` does, and nothing else."""
        return perf_counter_ns(), []

    def record(self, goes_on: bool) -> tuple[int, list[Excerpt]]:
        """Records lanes, its own and those of its workers.

        Ends at a call that does not ask it to go on.

        Returns the clock of lanes, and what they have recorded since the last call. Runs in another thread.
        """
        self._recording = recording = self._recording or BoardRecording(self._engine.board)
        _, excerpts = recording.take(goes_on)
        if not goes_on:
            self._recording = None
        return perf_counter_ns(), excerpts

    def set_infos(self, data: bytes) -> None:
        """Sets `agent_info` and `env_info` for later requests.

        `data` pickles a dict of both, N rows each, or empty.
        """
        with FailureGuard(self):
            rows = self._rows()
            self._infos = {name: _take_rows(info, rows) for name, info in pickling.loads(data).items()}
            self._agent_info = self._infos["agent_info"]

    @during(RESET)
    def reset(self, statistics: dict[str, Moments]) -> None:
        """Starts an episode in every environment; `statistics` are those that environments normalise with."""
        with FailureGuard(self):
            self._engine.set_statistics(statistics)
            self._engine.settle()
            self._engine.reset(self._infos)
            self._agent_info, self._engine.all_ended = None, False

    @during(READ)
    def rollout(self, number: int, statistics: dict[str, Moments]) -> NodeReply:
        """Runs one rollout.

        Args:
            number: the number of rollouts that the trainer ordered before.
            statistics: those that environments normalise with.

        Returns:
            The reply; its columns may be views of the slots, which are valid until the next rollout.
        """
        with FailureGuard(self):
            self._engine.set_statistics(statistics)
            rollout, running, gathered, columns = self._engine.run(number, self._agent_info)
            self._agent_info, self._states = None, self._engine.get_states()
            return NodeReply(running, self._states, self._version, gathered, rollout, columns)

    def cut(self, number: int) -> None:
        """Ends rollouts below this number after their current step, from another thread."""
        self._engine.cut(number)

    @during(UPDATE)
    def update(self, packed: tuple[int, Parcel]) -> None:
        """Updates every agent.

        `packed` holds the number of updates, this one included, and the update.
        """
        with FailureGuard(self):
            self._version, parcel = packed
            self._engine.update(self._engine.pack(parcel))

    def renew(self, states: Sequence[dict[str, Any]]) -> None:
        """Makes new environments; `states` are those of all workers, as `Supervisor.get_states` returns them."""
        with FailureGuard(self):
            self._engine.renew(list(states)[self._workers])
            self._engine.all_ended = False

    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function with the job and these arguments.

        The function may bring the job to another state.
        """
        if self.error is not None:
            raise self.error
        return function(self, *args)

    def take_exact(self, best: bool) -> NodeState:
        """Takes the exact state; see `Engine.take_exact`."""
        engine = self._engine
        found = _raise(engine.take_exact(best))
        return NodeState(found, OwnState(self._infos, self._agent_info, engine.all_ended, engine.new_episodes))

    def load_exact(self, state: NodeState) -> None:
        """Continues from what `take_exact` returned."""
        with FailureGuard(self):
            self.end_evaluation()
            engine = self._engine
            engine.forget_rollout()
            self._infos, self._agent_info, engine.all_ended, engine.new_episodes = state.own
            engine.load_exact(state.engine)

    def begin_evaluation(
        self,
        seeds: Sequence[int],
        max_steps: int | None,
        infos: Mapping[str, DictTensor],
        statistics: dict[str, Moments],
    ) -> None:
        """Begins an evaluation; the arguments are those of `RolloutJob.begin_evaluation`, for all nodes."""
        if self.error is not None:
            raise self.error
        self.end_evaluation()
        rows = self._rows()
        own = {name: _take_rows(info, rows) for name, info in infos.items()}
        self._engine.set_statistics(statistics)
        self._evaluation = self._engine.begin_rounds(list(seeds)[self._workers], max_steps, own)

    @during(EVALUATE)
    def evaluate(self, wanted: np.ndarray) -> Standing:
        assert self._evaluation is not None
        _raise(self._evaluation.play(wanted[self._rows()]))
        return self._evaluation.standing

    def end_evaluation(self) -> dict[str, Any] | None:
        """Ends the evaluation; returns its episodes, `env_index` counted from this node's first, or None."""
        evaluation, self._evaluation = self._evaluation, None
        return None if evaluation is None else _raise(evaluation.end())

    def close(self) -> None:
        """Closes agents and environments, and ends the workers."""
        self._engine.forget_rollout()
        try:
            self._engine.close()
        except Exception:
            if self.error is None:  # otherwise the first failure has been reported
                raise
        finally:
            self._engine.free()

    def _rows(self) -> slice:
        """The global indexes of the node's environments."""
        n_envs, workers = self._engine.n_envs, self._workers
        return slice(workers.start * n_envs, workers.stop * n_envs)


def _init_worker(init_worker: Callable[[int], object], first: int, index: int) -> None:
    """Calls `init_worker` with the index of a node's worker, counted over all nodes."""
    init_worker(first + index)


def _raise(found: Found | Exception) -> Found:
    """Raises an exception; returns anything else."""
    if isinstance(found, Exception):
        raise found from found.__cause__
    return found


def _take_rows(info: DictTensor, rows: slice) -> DictTensor:
    """Copies these rows of an info; an empty one stays empty."""
    return info if info.empty() else info.slice(rows.start, rows.stop).clone()


class OwnState(NamedTuple):
    """The state of a node beside its engine.

    Attributes:
        infos: `agent_info` and `env_info`, as they were last set.
        agent_info: the one that the next rollout begins with; None for the one in force.
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
        own: the rest of its state.
    """

    engine: EngineState
    own: OwnState

    @staticmethod
    def take(job: NodeJob, best: bool) -> NodeState:
        """Takes the state of a job, which calls this by its `apply`; see `JobState.take`."""
        return job.take_exact(best)

    @staticmethod
    def load(job: NodeJob, state: NodeState, seed: int) -> None:
        """Brings a job to a state.

        Each worker has a seed of its own, so `seed` is not used.
        """
        job.load_exact(state)

    @property
    def begins_episodes(self) -> bool:
        """False: the node itself handles new episodes of its workers."""
        return False

    @property
    def names(self) -> list[str]:
        return [name for job in self.engine.jobs for name in job.names]

    @property
    def methods(self) -> list[str]:
        return [method for job in self.engine.jobs for method in job.methods]

    @property
    def why(self) -> str:
        return next((job.why for job in self.engine.jobs if job.why), "")

    @property
    def last_update(self) -> Parcel | None:
        return self.engine.trainer.update

    def as_dict(self) -> dict[str, Any]:
        """Converts to a dict of lists and tensors, without the last update.

        The trainer keeps the update.
        """
        trainer = self.engine.trainer.without_update()
        return {"workers": [job.as_dict() for job in self.engine.jobs], **dumps((trainer, self.own)).as_tensors()}

    @classmethod
    def of_dict(cls, state: Mapping[str, Any]) -> NodeState:
        """The state of what `as_dict` returned."""
        trainer, own = loads(Pickled.of_tensors(state))
        return cls(EngineState(trainer, [JobState.of_dict(job) for job in state["workers"]]), own)
