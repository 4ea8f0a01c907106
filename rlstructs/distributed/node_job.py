"""What one actor runs: an `RL_Batcher` for a block of the workers, asked as a worker is asked."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np

from rlstructs.batcher.arguments import RunSettings
from rlstructs.batcher.batch import Batch
from rlstructs.batcher.batcher import NO_INFO, RL_Batcher
from rlstructs.batcher.lifecycle import Phase
from rlstructs.batcher.transport import SlotBooks
from rlstructs.distributed.actor import Columns, WithColumns
from rlstructs.distributed.parts import columns_of
from rlstructs.moments import Moments
from rlstructs.rollout.job import Once
from rlstructs.rollout.job_settings import JobSettings
from rlstructs.rollout.probe import Specs
from rlstructs.shared.slots import STATE
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
    """What became of one rollout of a node; environments are counted from its first.

    Attributes:
        running: which environments still run, None for all of them.
        gathered: what each worker gathered.
        before, after: which environments began anew, before it and at its end: their episodes had no end.
        rows: which environments it is of, ascending; None for all of them.
    """

    running: list[int] | None
    gathered: list[dict[str, Moments]]
    before: list[int]
    after: list[int]
    rows: list[int] | None


class NodeBatcher(RL_Batcher):
    """The batcher of one node: it hands out what its slots hold, and leaves it to the trainer to add it up."""

    # The last rollout, which is looked at until the next one begins.
    _last: Batch | None = None
    # Environments that began anew, with successors of their workers, and nobody was told.
    _anew: frozenset[int] = frozenset()

    @classmethod
    def of(cls, settings: NodeSettings) -> NodeBatcher:
        """Its workers run when this returns."""
        job, run = settings.job, settings.run
        return cls(
            run.n_timesteps, job.create_agent, job.agent_args, job.create_env, job.env_args, run.n_processes, job.seeds,
            job.agent_info if len(job.agent_info.keys()) else None, job.env_info if len(job.env_info.keys()) else None,
            job.agent_seeds, job.device or "cpu", start_method=run.start_method, timeout=run.timeout,
            on_worker_failure=run.on_worker_failure, max_restarts=run.max_restarts, debug=settings.debug,
            init_worker=run.init_worker,
        )  # fmt: skip

    def describe(self) -> tuple[int, Specs]:
        """How many environments a worker has, and what rollouts hold."""
        layout = self._books.layout
        state = {key.removeprefix(STATE): spec for key, spec in layout.info.items() if key.startswith(STATE)}
        return self._n_envs, Specs(dict(layout.observation), dict(layout.action), state, self._crew.statistics)

    def rollout(
        self, number: int, statistics: dict[str, Moments], agent_info: DictTensor
    ) -> tuple[Ran, Columns]:
        """Runs one rollout.

        Args:
            number: how many the trainer ordered before.
            statistics: that environments go by.
            agent_info: as of `execute`.

        Returns:
            What became of it, and what the slots hold, views that are good until the next rollout.
        """
        if self._last is not None:
            self._last.release()
        books = cast(SlotBooks, self._books)
        if self._life.phase is Phase.ENDED:
            return Ran([], [], self._take_anew(), [], []), columns_of(books.slots[0], np.zeros(0, np.int64), 0)
        for member in self._crew.members:  # not all that the trainer ordered were run: some came after the end
            member.n_ordered = number
        self._crew.know(statistics)
        self.execute(agent_info)
        before = self._take_anew()
        with self._life.failing():
            orders = self._crew.collect()
            batch = self._last = self._batch(orders)
        rows = books.running()
        columns = columns_of(books.slots[0], rows, batch.n_timesteps)
        gathered = self._crew.gathered(orders)
        n_running = self._advance(orders)
        self._life.phase = Phase.READY if n_running else Phase.ENDED
        running = None if n_running == self.n_elems() else books.running().tolist()
        ran = None if rows.size == self.n_elems() else rows.tolist()
        return Ran(running, gathered, before, self._take_anew(), ran), columns

    def cut(self, number: int) -> None:
        """Ends rollouts below this number after the step that they are in; called while another thread runs one."""
        with contextlib.suppress(IndexError, TypeError):  # closed meanwhile
            for worker in range(len(self._books.blocks)):
                self._books.cut(worker, number)

    def _begin_anew(self, replaced: Iterable[int]) -> None:
        replaced = list(replaced)
        super()._begin_anew(replaced)
        self._anew |= {row for worker in replaced for row in self._books.blocks[worker]}

    def _take_anew(self) -> list[int]:
        anew, self._anew = sorted(self._anew), frozenset()
        return anew

    def _free(self) -> None:
        self._last = None
        super()._free()


class NodeJob:
    """Answers what `NodeCrew` asks of a node, as `RolloutJob` answers a `Crew`.

    Args:
        settings: how to make the batcher.
        workers: which these are, of all.
        states: of each worker what `Crew.state` said of the one before it; None if there was none.
    """

    def __init__(
        self, settings: NodeSettings, workers: slice, states: Sequence[dict[str, Any]] | None = None
    ) -> None:
        self._workers = workers
        write_settings(SETTINGS, settings.process)
        write_libraries(settings.libraries)
        registry.register(settings.registered)
        # The trainer's process says so, of all workers.
        warnings.filterwarnings("ignore", "seeds: environments of processes")
        self._batcher = NodeBatcher.of(settings)
        if states is not None:
            self._batcher._renew(list(states))
        self.error: BaseException | None = None
        self._infos: dict[str, DictTensor] = {}
        self._agent_info = NO_INFO  # for the next rollout
        self._version = 0
        self._evaluation: Generator[None, None, Any] | None = None
        self._episodes: list[dict[str, Any]] = []
        # What the rollout that is being replied to says of its workers; it is pickled once.
        self._told: list[dict[str, Any]] | None = None

    def describe(self) -> tuple[int, Specs]:
        """As of `NodeBatcher`."""
        return self._batcher.describe()

    def report(self) -> dict[str, Any]:
        """What is known of its workers: `pids`, and `state` as of `Crew`."""
        crew = self._batcher._crew
        told, self._told = self._told or crew.state(), None
        return {"pids": crew.pool.pids, "state": told}

    def inform(self, data: bytes) -> None:
        """Takes `agent_info` and `env_info` of all environments, pickled; each N rows, or empty."""
        with Once(self):
            mine = self._rows()
            self._infos = {name: _part(info, mine) for name, info in pickling.loads(data).items()}
            self._agent_info = self._infos["agent_info"]

    def reset(self, statistics: dict[str, Moments]) -> None:
        """Starts an episode in every environment."""
        with Once(self):
            self._batcher._crew.know(statistics)
            self._batcher.reset(**self._infos)
            self._agent_info = NO_INFO

    def rollout(self, number: int, statistics: dict[str, Moments]) -> WithColumns:
        """Runs one.

        Returns:
            What `RolloutJob.rollout` returns, in place of a clock what `Crew.state` gives, and what became of it; and
            what the slots hold.
        """
        with Once(self):
            ran, columns = self._batcher.rollout(number, statistics, self._agent_info)
            self._agent_info = NO_INFO
            self._told = self._batcher._crew.state()
            return WithColumns((ran.running, self._told, self._version, ran.gathered, ran), columns)

    def cut(self, number: int) -> None:
        """As of `NodeBatcher`."""
        self._batcher.cut(number)

    def update(self, packed: tuple[int, Parcel]) -> None:
        """Updates every agent; of how many updates this one is the last, and what it is."""
        with Once(self):
            self._version, parcel = packed
            self._batcher.update(parcel)

    def renew(self, workers: Sequence[dict[str, Any]]) -> None:
        """Makes environments anew; of all workers what `Crew.state` gave."""
        with Once(self):
            self._batcher._renew(list(workers)[self._workers])
            self._batcher._life.phase = Phase.NEW

    def begin_evaluation(
        self,
        wanted: np.ndarray,
        seeds: Sequence[int],
        infos: Mapping[str, DictTensor],
        statistics: dict[str, Moments],
    ) -> None:
        """As of `RolloutJob`: of all environments and workers."""
        if self.error is not None:
            raise self.error
        self.end_evaluation()
        mine, crew = self._rows(), self._batcher._crew
        own = {name: _part(info, mine) for name, info in infos.items()}
        crew.know(statistics)
        self._evaluation = crew.evaluating(wanted[mine], list(seeds)[self._workers], own)

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
            part["env_index"] += worker * self._batcher._n_envs
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else None

    def close(self) -> None:
        """Closes agents and environments, and ends the workers."""
        self._batcher.close()

    def _rows(self) -> slice:
        n_envs, workers = self._batcher._n_envs, self._workers
        return slice(workers.start * n_envs, workers.stop * n_envs)


def _init_worker(init_worker: Callable[[int], object], first: int, index: int) -> None:
    """Calls it with the index of a node's worker, of all."""
    init_worker(first + index)


def _part(info: DictTensor, rows: slice) -> DictTensor:
    return info if info.empty() else info.slice(rows.start, rows.stop).clone()
