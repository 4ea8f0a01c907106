"""What one actor runs: an engine for a block of the workers, asked as a worker is asked."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np

from rlstructs.batcher.arguments import RunSettings
from rlstructs.batcher.batch import Batch
from rlstructs.batcher.engine import start_engine
from rlstructs.batcher.evaluation import run_evaluation
from rlstructs.batcher.transport import SlotTransport
from rlstructs.distributed.actor import Columns
from rlstructs.distributed.parts import columns_of
from rlstructs.envs.vec_env import NO_INFO
from rlstructs.moments import Moments
from rlstructs.rollout.job import FailureGuard
from rlstructs.rollout.job_settings import JobSettings
from rlstructs.rollout.probe import JobDescription, Specs
from rlstructs.shared.slots import STATE, Slots
from rlstructs.shared.weights import Parcel
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.worker_setup import registry
from rlstructs.worker_setup.library_settings import write_libraries
from rlstructs.worker_setup.registry import Registered
from workers import pickling
from workers.settings.process_settings import SETTINGS, write_settings


@dataclass(frozen=True)
class NodeSettings:
    """What nodes need to make their batchers; this is what is pickled.

    Attributes:
        job, run: of all workers.
        debug: as of `RL_Batcher`.
        registered: environment ids that the trainer's process has registered with gymnasium.
        process, libraries: what the trainer's process has set; the workers of nodes take it over from them.
    """

    job: JobSettings
    run: RunSettings
    debug: bool
    registered: Registered
    process: dict[str, bytes]
    libraries: dict[str, dict[str, bytes]]

    def of(self, workers: slice) -> NodeSettings:
        """For some workers alone."""
        agent_seeds = self.job.agent_seeds
        job = dataclasses.replace(
            self.job, seeds=self.job.seeds[workers], agent_seeds=None if agent_seeds is None else agent_seeds[workers]
        )
        n_processes, init_worker = workers.stop - workers.start, self.run.init_worker
        if init_worker is not None:
            init_worker = partial(_init_worker, init_worker, workers.start)
        run = dataclasses.replace(self.run, n_processes=n_processes, run_ahead=0, init_worker=init_worker)
        return dataclasses.replace(self, job=job, run=run)

    def build(self, workers: slice, states: Sequence[dict[str, Any]] | None = None) -> NodeJob:
        """As of `NodeJob`."""
        return NodeJob(self.of(workers), workers, states)


@dataclass(frozen=True)
class Ran:
    """Which environments of a node a rollout is of, and which began new episodes; counted from the node's first.

    Attributes:
        before, after: those that began anew before it and at its end: their episodes had no end.
        rows: those that it is of, ascending; None for all of them.
    """

    before: list[int]
    after: list[int]
    rows: list[int] | None


class NodeReply(NamedTuple):
    """What a node replies when its rollout is over: as `RolloutReply`, and more.

    Attributes:
        running: as there, of the node.
        clock: what `Supervisor.state` gives on its workers.
        version: as there.
        statistics: the moments that each worker gathered, by name.
        ran: what became of the rollout.
        columns: what its slots hold; arrays that go through the object store.
    """

    running: list[int] | None
    clock: list[dict[str, Any]]
    version: int
    statistics: list[dict[str, Moments]]
    ran: Ran
    columns: Columns


class NodeJob:
    """Runs an engine for a block of the workers: answers a `NodeSupervisor` as `RolloutJob` answers a `Supervisor`.

    Args:
        settings: how to start the engine.
        workers: which these are, of all.
        states: for each worker what `Supervisor.state` gave on the one before it; None if there was none.
    """

    def __init__(
        self, settings: NodeSettings, workers: slice, states: Sequence[dict[str, Any]] | None = None
    ) -> None:
        self._workers = workers
        write_settings(SETTINGS, settings.process)
        write_libraries(settings.libraries)
        registry.register(settings.registered)
        # Environments that began new episodes which the trainer does not know of.
        self._new: set[int] = set()
        self._engine = start_engine(settings.job, settings.run, settings.debug, self._note_new_episodes)
        if states is not None:
            self._engine.renew(states)
        self.error: BaseException | None = None
        self._infos: dict[str, DictTensor] = {"agent_info": NO_INFO, "env_info": NO_INFO}
        self._agent_info: DictTensor | None = None  # for the next rollout
        self._version = 0
        # The last rollout, which is read until the next one begins.
        self._last: Batch | None = None
        self._all_ended = False
        self._evaluation: Generator[None, None, Any] | None = None
        self._episodes: list[dict[str, Any]] = []
        # The state of the workers as the rollout that is being replied to gives it; it is pickled once.
        self._state: list[dict[str, Any]] | None = None

    def describe(self) -> JobDescription:
        """Counts the environments of a worker, and says what rollouts hold."""
        layout, statistics = self._engine.transport.layout, self._engine.supervisor.statistics
        state = {key.removeprefix(STATE): spec for key, spec in layout.info.items() if key.startswith(STATE)}
        return JobDescription(
            self._engine.n_envs, Specs(dict(layout.observation), dict(layout.action), state, statistics)
        )

    def report(self) -> dict[str, Any]:
        """What is known of its workers: `pids`, and `state` as `Supervisor.state` gives it."""
        state, self._state = self._state or self._engine.supervisor.state(), None
        return {"pids": self._engine.pool.pids, "state": state}

    def inform(self, data: bytes) -> None:
        """Takes `agent_info` and `env_info` of all environments, pickled; each N rows, or empty."""
        with FailureGuard(self):
            mine = self._rows()
            self._infos = {name: _part(info, mine) for name, info in pickling.loads(data).items()}
            self._agent_info = self._infos["agent_info"]

    def reset(self, statistics: dict[str, Moments]) -> None:
        """Starts an episode in every environment."""
        with FailureGuard(self):
            self._engine.supervisor.know(statistics)
            self._engine.settle()
            self._engine.reset(self._infos)
            self._agent_info, self._all_ended = None, False

    def rollout(self, number: int, statistics: dict[str, Moments]) -> NodeReply:
        """Runs one rollout.

        Args:
            number: how many the trainer ordered before.
            statistics: that environments go by.

        Returns:
            What became of it, and what the slots hold: views that are good until the next rollout.
        """
        with FailureGuard(self):
            if self._last is not None:
                self._last.release()
            engine, slots = self._engine, self._slots()
            if self._all_ended:
                ran = Ran(self._take_new(), [], [])
                return self._reply([], [], ran, columns_of(slots, np.zeros(0, np.int64), 0))
            # Not all that the trainer ordered were run: some came when all had ended.
            for record in engine.supervisor.records:
                record.n_ordered = number
            engine.supervisor.know(statistics)
            engine.mend()
            engine.begin(self._agent_info)
            self._agent_info, before = None, self._take_new()
            orders = engine.collect()
            batch = self._last = engine.batch(orders)
            rows, n_elems = engine.transport.running(), engine.n_elems
            columns, gathered = columns_of(slots, rows, batch.n_timesteps), engine.supervisor.gathered(orders)
            n_running = engine.advance(orders)
            self._all_ended = not n_running
            running = None if n_running == n_elems else engine.transport.running().tolist()
            ran = Ran(before, self._take_new(), None if rows.size == n_elems else rows.tolist())
            return self._reply(running, gathered, ran, columns)

    def cut(self, number: int) -> None:
        """Ends rollouts below this number after the step that they are in; called while another thread runs one."""
        with contextlib.suppress(IndexError, TypeError):  # closed meanwhile
            for worker in range(len(self._engine.transport.blocks)):
                self._engine.transport.cut(worker, number)

    def update(self, packed: tuple[int, Parcel]) -> None:
        """Updates every agent; of how many updates this one is the last, and what it is."""
        with FailureGuard(self):
            self._version, parcel = packed
            self._engine.update(self._engine.outbox.pack(parcel))

    def renew(self, workers: Sequence[dict[str, Any]]) -> None:
        """Makes environments anew; of all workers what `Supervisor.state` gave."""
        with FailureGuard(self):
            self._engine.renew(list(workers)[self._workers])
            self._all_ended = False

    def begin_evaluation(
        self,
        wanted: np.ndarray,
        seeds: Sequence[int],
        infos: Mapping[str, DictTensor],
        statistics: dict[str, Moments],
    ) -> None:
        """Begins an evaluation; the arguments are those of `RolloutJob`, for all environments and workers."""
        if self.error is not None:
            raise self.error
        self.end_evaluation()
        mine, supervisor = self._rows(), self._engine.supervisor
        own = {name: _part(info, mine) for name, info in infos.items()}
        supervisor.know(statistics)
        self._evaluation = run_evaluation(supervisor, wanted[mine], list(seeds)[self._workers], own)

    def evaluate(self) -> bool:
        """Goes on with it; whether all episodes have ended."""
        if self._evaluation is None:  # through before other nodes
            return True
        try:
            next(self._evaluation)
            return False
        except StopIteration as end:
            self._evaluation = None
            if isinstance(end.value, Exception):
                raise end.value from end.value.__cause__
            self._episodes = end.value
            return True

    def end_evaluation(self) -> dict[str, Any] | None:
        """Its episodes, `env_index` counted from this node's first; None if there are none."""
        if self._evaluation is not None:
            self._evaluation.close()
        self._evaluation, parts = None, self._episodes
        self._episodes = []
        for worker, part in enumerate(parts):
            part["env_index"] += worker * self._engine.n_envs
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else None

    def close(self) -> None:
        """Closes agents and environments, and ends the workers."""
        self._last = None
        try:
            self._engine.close()
        except Exception:
            if self.error is None:  # otherwise the first failure has been reported
                raise
        finally:
            self._engine.free()

    def _slots(self) -> Slots:
        return cast(SlotTransport, self._engine.transport).slots[0]

    def _reply(
        self, running: list[int] | None, statistics: list[dict[str, Moments]], ran: Ran, columns: Columns
    ) -> NodeReply:
        self._state = self._engine.supervisor.state()
        return NodeReply(running, self._state, self._version, statistics, ran, columns)

    def _note_new_episodes(self, workers: Collection[int]) -> None:
        self._new |= {row for worker in workers for row in self._engine.transport.blocks[worker]}

    def _take_new(self) -> list[int]:
        new, self._new = sorted(self._new), set()
        return new

    def _rows(self) -> slice:
        n_envs, workers = self._engine.n_envs, self._workers
        return slice(workers.start * n_envs, workers.stop * n_envs)


def _init_worker(init_worker: Callable[[int], object], first: int, index: int) -> None:
    """Calls it with the index of a node's worker, of all."""
    init_worker(first + index)


def _part(info: DictTensor, rows: slice) -> DictTensor:
    return info if info.empty() else info.slice(rows.start, rows.stop).clone()
