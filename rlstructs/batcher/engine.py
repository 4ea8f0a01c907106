"""`Engine` runs rollouts in workers; `Delivery` hands each out once.

`RL_Batcher` hides both. A rollout is copied or leased.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from rlstructs.batcher import arguments
from rlstructs.batcher.evaluation import EpisodePlan, play
from rlstructs.batcher.exact_state import EngineState, TrainerState
from rlstructs.batcher.feed import Feeding
from rlstructs.batcher.lease import BaseLease
from rlstructs.batcher.lifecycle import Lifecycle, Phase
from rlstructs.batcher.metrics import EqualActions, Meter, name_restarts
from rlstructs.batcher.supervisor import Supervisor
from rlstructs.batcher.transport import Batch, Outbox, Transport
from rlstructs.batcher.worker_record import RolloutOrder
from rlstructs.episodes import EpisodeTracker
from rlstructs.errors import StateError
from rlstructs.moments import Moments
from rlstructs.rollout.job_specs import JobSettings
from rlstructs.seeding import seeds_argument
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.trajectories import Trajectories
from rlstructs.workers import SharedArena
from rlstructs.workers.interrupts import defer_interrupt, forget_last_interrupt
from rlstructs.workers.messages import Future

L = TypeVar("L", bound=BaseLease)
GiveBack = Callable[[], None]


class Engine:
    """Runs rollouts in workers.

    Args:
        settings: the settings that jobs were built from.
        supervisor: asks the workers; nobody else is to use it, nor the following two.
        transport: brings their rollouts.
        outbox: brings updates to them.
        arenas: shared memory, which `free` closes.

    Attributes:
        pool: the workers.
        board: the lanes of this process and of the workers.
        layout: the columns of rollouts.
        n_envs, n_elems: E, the number of environments of one worker; N, of all.
        nbytes: bytes of the memory that rollouts are written to.
        run_ahead: how many rollouts may be ordered in addition to the oldest one.
        noun, job_state_class: the word for a worker, and the class of its job's exact state.
        hint: what the user is warned of, if anything.
        version_before: the number of updates before the first one that the outbox counts.
        meter: counts what is handed out.
    """

    def __init__(
        self, settings: JobSettings, supervisor: Supervisor, transport: Transport, outbox: Outbox, *arenas: SharedArena
    ) -> None:
        self._supervisor, self._transport, self._outbox = supervisor, transport, outbox
        self._feeding = Feeding(supervisor, transport)
        self.settings, self.arenas, self.pool, self.board = settings, arenas, supervisor.pool, supervisor.board
        self.layout, _, self.n_envs, self.hint = transport.contents
        self.noun, self.job_state_class = supervisor.noun, supervisor.job_state_class
        self.n_elems, self.nbytes, self.run_ahead = self.layout.n_slots, transport.nbytes, supervisor.run_ahead
        self.version_before, self.meter = 0, Meter()

    @property
    def policy_version(self) -> int:
        """The number of updates so far."""
        return self.version_before + self._outbox.version

    @property
    def infos(self) -> dict[str, DictTensor]:
        """`agent_info` and `env_info` in force; empty before the first reset."""
        return self._transport.infos

    @property
    def statistics(self) -> dict[str, Moments]:
        """The moments that environments normalise by, by name."""
        return self._supervisor.statistics

    @property
    def episodes(self) -> EpisodeTracker:
        """The episodes that ended in rollouts that were handed out."""
        return self._transport.episodes

    def is_halfway(self) -> bool:
        """Whether an interrupt may have come after only some workers were asked."""
        return self._supervisor.is_halfway

    def settle(self) -> None:
        """Waits until no request is under way: no rollout, and nothing that was interrupted."""
        self._supervisor.settle()

    def reset(self, infos: Mapping[str, DictTensor]) -> None:
        """Starts an episode in every environment; `infos` are `agent_info` and `env_info`."""
        self._transport.set_infos(infos)
        self._supervisor.reset()
        self._feeding.drop()
        self._begin_episodes(range(self.pool.n_workers))

    def replace_gone(self) -> None:
        """Replaces workers that are gone, if workers are replaced at all."""
        self._supervisor.replace_gone()

    def begin_rollouts(self, agent_info: DictTensor | None) -> None:
        """Starts rollouts until the allowed number is under way.

        None keeps the `agent_info` in force.
        """
        if agent_info is not None:
            self._transport.set_agent_info(agent_info)
        self._feeding.hide()
        # With no processes the rollouts run here.
        self.meter.time(self._supervisor.order, self._transport.write_agent_info)
        self.begin_successors()

    def count_awaited(self, at_least: int | None, preempt: float | None) -> int | None:
        """Returns the number of workers that `get` waits for; None for all.

        Raises if an argument of `get` is wrong.
        """
        if at_least is None and preempt is None:
            return None
        return self._supervisor.count_awaited(at_least, preempt)

    def check_out(self, out: Trajectories, n_rows: int | None = None) -> None:
        """Raises unless a rollout of `n_rows` rows fits into `out`.

        None stands for as many as the next one may have.
        """
        self._transport.check_out(out, n_rows)

    def is_ready(self, n: int | None = None, cuts: bool = False) -> bool:
        """Whether `collect` would return at once.

        With `cuts`, tells late workers to end their rollouts once `n` workers are done.
        """
        return self._supervisor.is_ready(n, self._transport.cut if cuts else None)

    def collect(self, n: int | None = None, cuts: bool = False) -> tuple[dict[int, RolloutOrder], Batch]:
        """Waits for the oldest rollouts; returns their orders and their batch.

        The orders are by worker.

        Args:
            n: the number of workers to wait for; None for all.
            cuts: whether the other workers then end their rollouts early, and are waited for too.
        """
        orders = self.meter.time(self._supervisor.wait, n, self._transport.cut if cuts else None)
        return orders, self._transport.make_batch(orders, self.version_before, self.policy_version)

    def end_rollouts(
        self, orders: Mapping[int, RolloutOrder], batch: Batch, trajectories: Trajectories | None = None
    ) -> int:
        """Moves on to the next rollouts; returns the number of running environments.

        Args:
            orders, batch: what `collect` returned.
            trajectories: the rollouts, whose steps and episodes are counted; None to count none.
        """
        if self._feeding.fed is not None:  # first, because a memory may refuse them
            self._feeding.fed.show(orders, batch)
        if trajectories is not None:
            self.meter.add(trajectories, self.policy_version)
            self._transport.add_episodes(orders, trajectories)
        if self._supervisor.hand_out(orders):
            self.begin_successors()
        return self._transport.n_running()

    def pack(self, info: Any) -> Any:
        """Puts an update where workers can read it; returns what `update` takes."""
        return self._outbox.pack(info)

    def update(self, packed: Any) -> list[Future]:
        """Sends every agent an update that was packed; returns the requests."""
        requests = self._supervisor.update(packed, partial(self._outbox.record_sent, packed))
        self.begin_successors()
        return requests

    def feed(self, memory: Any, names: Mapping[str, str] | None, life: Lifecycle) -> None:
        """Feeds the steps of later rollouts to a memory, or to none.

        See `Feeding.prepare`.
        """
        fed = self._feeding.prepare(memory, names, life)
        with life.note_failures("feed", self.is_halfway):
            self._feeding.feed(fed, self.version_before)
            self.write_waiting()

    def write_waiting(self) -> None:
        """Writes a loaded state's rollouts to the memory that is fed.

        They are rollouts that were finished and not yet handed out.
        """
        self._feeding.write_waiting(self.version_before)

    def play(self, plan: EpisodePlan, seeds: Sequence[int], agent_info: DictTensor | None) -> Any:
        """Plays an evaluation's episodes; returns them, or what an agent or environment raised."""
        infos = self.infos | ({} if agent_info is None else {"agent_info": agent_info.clone()})
        found = play(self._supervisor, self._transport.blocks, plan, seeds, plan.max_steps, infos)
        self.begin_successors()
        return found

    def get_states(self) -> list[dict[str, Any]]:
        """By worker, what `renew` needs."""
        return self._supervisor.get_states()

    def renew(self, states: Sequence[dict[str, Any]]) -> None:
        """Has workers make new environments with the next seeds of their streams; see `get_states`."""
        settings = self.settings
        for worker, state in enumerate(states):
            settings = settings.with_new_streams(worker, state["stream"] + 1)
        self._supervisor.renew(list(states), settings.seeds, settings.agent_seeds)

    def load(self, state: Mapping[str, Any], statistics: dict[str, Moments]) -> None:
        """Continues from what `RL_Batcher.state_dict` returned, with new environments; `write_waiting` follows."""
        self.renew(state["workers"])
        self._begin_episodes(range(self.pool.n_workers))
        self._supervisor.set_statistics(statistics)
        self.episodes.put(state["episodes"], state["dropped_episodes"])
        self.meter.n_steps = state.get("steps", 0)
        self.version_before = state["weights_version"] - self._outbox.version
        self._feeding.resume(None, self.version_before)

    @property
    def exact_settings(self) -> dict[str, Any]:
        """The settings that an engine must share to load an exact state."""
        supervisor = self._supervisor
        settings = {"n_timesteps": self.layout.n_timesteps, "run_ahead": supervisor.run_ahead}
        return {**settings, f"{supervisor.noun}s": supervisor.record_sizes}

    def take_exact(self, best: bool) -> EngineState | Exception:
        """Takes the exact state, once the rollouts under way are finished.

        The engine then goes on as if nothing had happened.

        Args:
            best: whether new episodes begin where environments cannot be brought back.

        Returns:
            The state; or what a job raised because it has none, and then the engine can go on.

        Raises:
            Exception: a worker is gone or late, or a rollout has failed.
        """
        jobs = self._supervisor.take_states(best)
        if isinstance(jobs, Exception):
            return jobs
        self.begin_successors()
        records, transport = self._supervisor.records.take_exact(jobs), self._transport.take_exact()
        known = records, self.statistics, transport, self.meter, self.policy_version, self.version_before
        update = self._outbox.read_last() or jobs[0].last_update
        return EngineState(TrainerState(*known, update, self._feeding.first_numbers), jobs)

    def load_exact(self, state: EngineState) -> None:
        """Continues from the result of `take_exact`.

        First comes the last update, then the jobs, then what this process knows.

        Rollouts under way are finished, and dropped; `write_waiting` follows.
        """
        supervisor, trainer = self._supervisor, state.trainer
        supervisor.finish_rollouts()
        supervisor.records.clear_orders()
        if trainer.update is not None:  # successors get it, too
            packed = self.pack(trainer.update)
            self.pool.settle(supervisor.update(packed, partial(self._outbox.record_sent, packed)))
        if trainer.transport.infos:
            self._transport.set_infos(trainer.transport.infos)
        seeds = [self.settings.seed_of(worker, record["stream"]) for worker, record in enumerate(trainer.records)]
        supervisor.load_states(state.jobs, seeds, trainer.was_updated)
        self.version_before = trainer.version - self._outbox.version
        supervisor.records.load_exact(trainer.records, self.version_before - trainer.version_before)
        supervisor.set_statistics(trainer.statistics)
        self._transport.load_exact(trainer.transport)
        self.meter = trainer.meter
        self._feeding.resume(trainer.fed_from, self.version_before)
        self.begin_successors()

    def stats(self) -> dict[str, Any]:
        """Returns the result of `RL_Batcher.stats`."""
        workers = self._supervisor.stats()
        return {
            "workers": workers,
            "restarts": self._supervisor.n_restarts,
            "lost_rollouts": sum(worker["lost_rollouts"] for worker in workers),
            "env_restarts": [n for worker in workers for n in worker["env_restarts"]],
            "dropped_episodes": self.episodes.n_dropped,
            "arena_bytes": self.nbytes,
            "seeds": seeds_argument(self.settings.seeds),
        }

    def metrics(self) -> dict[str, float]:
        """Returns the result of `RL_Batcher.metrics`."""
        restarts = [n for worker in self._supervisor.stats() for n in worker["env_restarts"]]
        return {
            **self.episodes.take_means(),
            **self.meter.take(),
            **name_restarts(self._supervisor.n_restarts, restarts),
        }

    def close(self) -> None:
        """Ends every worker; raises what one of them raised as it was closed."""
        self._transport.cut_all()  # nobody will ask for the rollouts that are under way
        try:
            self._supervisor.close()
        finally:
            self._feeding.drop()

    def free(self) -> None:
        """Releases the memory."""
        self._transport.close()
        self._feeding.forget()
        self.board.close()
        for arena in self.arenas:
            arena.close()

    def begin_successors(self) -> None:
        """Begins new episodes in successors of workers whose rollouts are all handed out."""
        with defer_interrupt():  # the supervisor names each of them once
            self._begin_episodes(self._supervisor.records.take_successors())

    def _begin_episodes(self, workers: Collection[int]) -> None:
        """Prepares for new episodes in the next rollouts of these workers."""
        if replaced := self._supervisor.take_replaced():
            self._outbox.forget(replaced)
        self._transport.begin_episodes(workers)


class Delivery:
    """Hands rollouts out, by `RL_Batcher.get`, `wait` and `lease`.

    Args:
        engine: runs the rollouts.
        life: the lifecycle of the batcher.
        device: the device that trajectories are copied to.
    """

    def __init__(self, engine: Engine, life: Lifecycle, device: torch.device) -> None:
        self._engine, self._life, self._device = engine, life, device
        self._equal_actions = EqualActions(engine.n_envs, engine.n_elems // engine.n_envs)
        # What an interrupted `get` was about to return; the next one returns it.
        self._kept: tuple[Trajectories, int] | None = None
        self._out: Trajectories | None = None  # the `out` that it lies in
        # The lease that is not released, its batch, and how many environments run.
        self._leased: tuple[weakref.ref[Any], Batch, int] | None = None

    def get(
        self, blocking: bool, out: Trajectories | None, at_least: int | None, preempt: float | None
    ) -> tuple[Trajectories, int] | tuple[None, None]:
        """Copies the oldest rollouts; the arguments are those of `RL_Batcher.get`."""
        self._life.check("get", Phase.RUNNING)
        if self._kept is not None:
            return self._finish(self._move_kept(*self._kept, out), self._kept[1])
        if out is not None:
            self._engine.check_out(out)
        found = self._collect(blocking, at_least, preempt, lambda batch: batch.read(out))
        if found is None:
            return None, None
        orders, batch, trajectories = found
        self._equal_actions.add(trajectories)
        with defer_interrupt():  # otherwise the next `get` would hand out the same rollout
            n_running = self._engine.end_rollouts(orders, batch, trajectories)
            batch.release()
            self._kept, self._out = (trajectories, n_running), out
        return self._finish(trajectories, n_running)

    def _collect(
        self, blocking: bool, at_least: int | None, preempt: float | None, read: Callable[[Batch], Trajectories]
    ) -> tuple[dict[int, RolloutOrder], Batch, Trajectories] | None:
        """Waits for the oldest rollouts, as `get` does, and reads them.

        None if they have not arrived, and may be missing.
        """
        n, cuts = self._engine.count_awaited(at_least, preempt), preempt is not None
        with self._life.note_failures():
            if not blocking and not self._engine.is_ready(n, cuts):
                return None
            orders, batch = self._engine.collect(n, cuts)
            return orders, batch, read(batch)

    def _move_kept(self, trajectories: Trajectories, n_running: int, out: Trajectories | None) -> Trajectories:
        """Copies the result of an interrupted `get` to where the next one wants it."""
        if out is self._out:
            return trajectories
        if out is None:
            trajectories = trajectories.clone()
        else:
            self._engine.check_out(out, trajectories.n_elems())
            trajectories = arguments.copy(trajectories, out)
        with defer_interrupt():
            self._kept, self._out = (trajectories, n_running), out
        return trajectories

    def wait(self, blocking: bool, at_least: int | None, preempt: float | None) -> tuple[int, int] | tuple[None, None]:
        """Ends the oldest rollouts without reading their rows; the arguments are those of `RL_Batcher.wait`."""
        self._life.check("wait", Phase.RUNNING)
        if self._kept is not None:  # of an interrupted `get`
            trajectories, n_running = self._finish(*self._kept)
            return int(trajectories.lengths.sum()), n_running
        found = self._collect(blocking, at_least, preempt, lambda batch: batch.lend_episodes())
        if found is None:
            return None, None
        orders, batch, trajectories = found
        if not self._equal_actions.is_over:
            self._equal_actions.add(batch.lend())
        with defer_interrupt():
            n_running = self._engine.end_rollouts(orders, batch, trajectories)
            batch.release()
            self._set_phase_after(n_running)
        return int(trajectories.lengths.sum()), n_running

    def _finish(self, trajectories: Trajectories, n_running: int) -> tuple[Trajectories, int]:
        """Moves the trajectories to the device, and ends the phase of this rollout."""
        found, out = trajectories if self._device.type == "cpu" else trajectories.to(self._device), self._out
        try:
            with defer_interrupt():
                self._kept = self._out = None
                self._set_phase_after(n_running)
        except BaseException as error:
            if not isinstance(error, Exception):  # an interrupt that was put off: the caller has not got them
                self._kept, self._out, self._life.phase = (trajectories, n_running), out, Phase.RUNNING
            raise
        return found, n_running

    def _set_phase_after(self, n_running: int) -> None:
        self._life.phase = Phase.READY if n_running else Phase.ENDED

    def lease(self, make: Callable[[Batch, Trajectories, int, GiveBack], L]) -> L:
        """Lends the oldest rollouts.

        Args:
            make: makes the lease from a batch, its trajectories, the number of environments that still run, and the
                function that gives the batch back.
        """
        self._life.check("lease", Phase.RUNNING)
        self.check_handed_out("lease")
        with self._life.note_failures():
            orders, batch = self._engine.collect()
            trajectories = batch.lend()
        self._equal_actions.add(trajectories)
        with defer_interrupt():  # until the lease can be released, by its holder or by `drop_lease`
            n_running = self._engine.end_rollouts(orders, batch, trajectories)
            lease = make(batch, trajectories, n_running, lambda: self._take_back(batch, n_running))
            self._leased, self._life.phase = (weakref.ref(lease), batch, n_running), Phase.LEASED
        return lease

    def drop_lease(self) -> None:
        """Ends a lease that no longer exists, and that nobody can release any more."""
        if self._life.phase is Phase.LEASED and self._life.is_ours and self._leased is not None:
            forget_last_interrupt()  # its traceback may hold the lease
            if self._leased is not None and self._leased[0]() is None:
                self._take_back(*self._leased[1:])

    def _take_back(self, batch: Batch, n_running: int) -> None:
        """Ends a lease, unless the batcher was closed, or has failed, meanwhile."""
        if self._life.is_ours and self._life.phase is Phase.LEASED:
            batch.release()
            self._leased = None
            self._set_phase_after(n_running)

    def check_handed_out(self, call: str) -> None:
        """Raises StateError if an interrupted `get` has left a rollout to the next one."""
        if self._kept is not None:
            raise StateError(f"{call}: an interrupted get has copied the rollout: get it")

    def find_phase(self) -> Phase:
        """The phase after the release of what is leased; otherwise the present one."""
        if self._life.phase is not Phase.LEASED or self._leased is None:
            return self._life.phase
        return Phase.READY if self._leased[2] else Phase.ENDED

    def forget(self) -> None:
        """Drops the result that an interrupted `get` was about to return."""
        self._kept = self._out = None

    def close(self) -> None:
        """Drops the rollout that is leased."""
        self._leased = None
