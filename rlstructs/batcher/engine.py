"""`Engine`: starts workers and runs rollouts in them, behind `RL_Batcher`."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from rlstructs.batcher.arguments import RunSettings, count_awaited
from rlstructs.batcher.feed import Fed, call_weakly
from rlstructs.batcher.metrics import Meter
from rlstructs.batcher.supervisor import Supervisor
from rlstructs.batcher.transport import Batch, SlotTransport, Transport
from rlstructs.batcher.worker_record import RolloutOrder
from rlstructs.errors import SpecError
from rlstructs.moments import Moments
from rlstructs.rollout.job import JobFactory
from rlstructs.rollout.job_settings import JobSettings
from rlstructs.seeding import PrivateStreams, seed_worker_streams, seeds_argument
from rlstructs.shared import weights
from rlstructs.shared.layout import Layout
from rlstructs.shared.slots import SlotBuffers
from rlstructs.shared.weights import Parcel
from rlstructs.structures.arrays import specs_of
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.trajectories import Trajectories
from rlstructs.worker_setup.setup import WorkerSetup
from rlstructs.workers import InlinePool, SharedArena, WorkerPool
from rlstructs.workers.arena import pack
from rlstructs.workers.interrupts import defer_interrupt
from rlstructs.workers.messages import Future
from rlstructs.workers.pickle_errors import explain_pickle_error
from rlstructs.workers.pool import Pool


class Outbox(Protocol):
    """Sends updates from the trainer to the workers.

    Attributes:
        version: the number of updates so far.
    """

    version: int

    def pack(self, info: Any) -> Any:
        """Puts an update where workers can read it; returns what to send to them."""

    def record_sent(self, packed: Any, requests: list[Future]) -> None:
        """Records that workers were sent this update."""

    def read_last(self) -> Parcel | None:
        """The last update, copied; None if there was none, or if whoever passes it on has it."""

    def forget(self, workers: Collection[int]) -> None:
        """Forgets requests to workers that were replaced; their successors have only got the last update."""


class Contents(NamedTuple):
    """The columns and the environments of rollouts.

    Attributes:
        layout: the columns of all environments.
        blocks: for each worker, or node, the global indexes of its environments.
        n_envs: E, the number of environments of one worker.
        hint: what the user is warned of, if anything.
    """

    layout: Layout
    blocks: list[range]
    n_envs: int
    hint: str | None = None


class Engine:
    """Runs rollouts in workers.

    Args:
        settings: the settings that jobs were built from.
        supervisor: asks the workers.
        transport: brings their rollouts.
        outbox: brings updates to them.
        n_envs: E, the number of environments of one worker.
        arenas: shared memory, which `free` closes.
        on_new_episodes: called with the workers whose environments begin new episodes, by a reset, restart or load.

    Attributes:
        version_before: the number of updates before the first one that the outbox counts.
        meter: counts what is handed out.
        hint: what the user is warned of, if anything.
    """

    hint: str | None = None

    def __init__(
        self,
        settings: JobSettings,
        supervisor: Supervisor,
        transport: Transport,
        outbox: Outbox,
        n_envs: int,
        arenas: Sequence[SharedArena] = (),
        on_new_episodes: Callable[[Collection[int]], None] = lambda workers: None,
    ) -> None:
        self.settings, self.supervisor, self.transport, self.outbox = settings, supervisor, transport, outbox
        self.n_envs, self.arenas, self._on_new_episodes = n_envs, arenas, on_new_episodes
        self.version_before = 0
        self.meter = Meter()
        # The memory that is fed. Keeping it keeps the shared memory open, which successors of workers open too.
        self._fed: Fed | None = None
        # Of a loaded state until a memory is fed: by worker, the number of the first rollout that this memory gets.
        self._waiting_from: Sequence[int] | None = None
        supervisor.on_restart = call_weakly(self._note_restart)

    @property
    def pool(self) -> Pool:
        """The workers."""
        return self.supervisor.pool

    @property
    def n_elems(self) -> int:
        """N, the number of environments of all workers."""
        return self.n_envs * len(self.settings.seeds)

    @property
    def policy_version(self) -> int:
        """The number of updates so far."""
        return self.version_before + self.outbox.version

    def is_halfway(self) -> bool:
        """Whether an interrupt may have come after only some workers were asked."""
        return self.supervisor.is_halfway

    def reset(self, infos: Mapping[str, DictTensor]) -> None:
        """Starts an episode in every environment; `infos` are `agent_info` and `env_info`."""
        self.transport.set_infos(infos)
        self.supervisor.reset()
        self._drop_fed()
        self._begin_episodes(range(self.pool.n_workers))

    def begin_rollouts(self, agent_info: DictTensor | None) -> None:
        """Starts rollouts until as many as are allowed are under way; None keeps the `agent_info` in force."""
        if agent_info is not None:
            self.transport.set_agent_info(agent_info)
        self._waiting_from = None
        if self._fed is not None:
            self._fed.begin_rollouts()
        with self.meter.wait():  # with no processes the rollouts run here
            self.supervisor.begin_rollouts(self.transport.write_agent_info)
        self.begin_successors()

    def count_awaited(self, at_least: int | None, preempt: float | None) -> int | None:
        """The number of workers that `get` waits for; None for all. Raises if an argument of `get` is wrong."""
        if at_least is None and preempt is None:
            return None
        n_running = self.transport.n_running_workers()
        return count_awaited(at_least, preempt, self.supervisor.noun, self.pool.n_workers, n_running)

    def is_ready(self, n: int | None, cuts: bool) -> bool:
        """Whether `collect` would return at once; with `cuts`, late workers are told to end once `n` are done."""
        if not self.supervisor.is_ready(n):
            return False
        if cuts:
            self.supervisor.cut_late(self.transport.cut)
        return not cuts or self.supervisor.is_ready()

    def collect(self, n: int | None = None, cuts: bool = False) -> tuple[dict[int, RolloutOrder], Batch]:
        """Waits for the oldest rollouts; returns their orders, by worker, and what they have written.

        Args:
            n: the number of workers to wait for; None for all.
            cuts: whether the other workers then end their rollouts early, and are waited for too.
        """
        with self.meter.wait():
            orders = self.supervisor.collect(n, self.transport.cut if cuts else None)
        return orders, self.transport.make_batch(orders, self.version_before, self.policy_version)

    def end_rollouts(
        self, orders: Mapping[int, RolloutOrder], batch: Batch, trajectories: Trajectories | None = None
    ) -> int:
        """Moves on to the rollouts after these; returns the number of environments that still run.

        Args:
            orders, batch: what `collect` returned.
            trajectories: the rollouts, whose steps and episodes are counted; None to count none.
        """
        if self._fed is not None:  # first, because a memory may refuse them
            self._fed.end_rollouts(orders, batch)
        if trajectories is not None:
            self.meter.add(trajectories.lengths, trajectories.info["policy_version"], self.policy_version)
        self.transport.end_rollouts(orders, trajectories)
        self.supervisor.end_rollouts(orders)
        if self.supervisor.has_successors:
            self.begin_successors()
        return self.transport.n_running()

    def update(self, packed: Any) -> None:
        """Sends every agent an update that the outbox has packed."""
        self.supervisor.update(packed, partial(self.outbox.record_sent, packed))
        self.begin_successors()

    def feed(self, fed: Fed | None) -> None:
        """Has the steps of later rollouts written to a memory, or to none."""
        self._feed_workers(fed)
        self.write_waiting()

    def write_waiting(self) -> None:
        """Writes rollouts of a loaded state, which wait to be handed out, to the memory that is fed."""
        if self._fed is not None and self._waiting_from is not None:
            self._fed.resume(self._waiting_from, self.version_before)
            self._waiting_from = None

    def _feed_workers(self, fed: Fed | None) -> None:
        first_numbers = [record.n_ordered for record in self.supervisor.records]
        feed = None if fed is None else fed.feed
        if feed is not None or (self._fed is not None and self._fed.feed is not None):
            self.supervisor.feed(
                pack(
                    feed and dataclasses.replace(feed, first_numbers=first_numbers, version_before=self.version_before)
                )
            )
        self._drop_fed()
        self._fed = fed
        if fed is not None:
            fed.first_numbers = first_numbers

    def _drop_fed(self) -> None:
        """Takes back what workers have written of rollouts that will not be handed out with the memory."""
        if self._fed is not None:
            self._fed.drop()

    def _note_restart(self, workers: Collection[int]) -> None:
        if self._fed is not None:
            self._fed.restart(workers)

    def renew(self, states: Sequence[dict[str, Any]]) -> None:
        """Has workers make new environments with the next seeds of their streams.

        Args:
            states: by worker, what `Supervisor.get_states` returned.
        """
        settings = self.settings
        for worker, state in enumerate(states):
            settings = settings.with_new_streams(worker, state["stream"] + 1)
        self.supervisor.renew(list(states), settings.seeds, settings.agent_seeds)

    def load(self, state: Mapping[str, Any], statistics: dict[str, Moments]) -> None:
        """Continues from what `RL_Batcher.state_dict` returned, with new environments."""
        self.renew(state["workers"])
        self._begin_episodes(range(self.pool.n_workers))
        self.supervisor.set_statistics(statistics)
        self.transport.episodes.put(state["episodes"], state["dropped_episodes"])
        self.meter.n_steps = state.get("steps", 0)
        self.resume(self.meter, state["weights_version"] - self.outbox.version)

    def resume(self, meter: Meter, version_before: int, fed_from: Sequence[int] | None = None) -> None:
        """Goes on to count from a state; `write_waiting` is to follow, once the memory that is fed has its own.

        Args:
            meter: counts what is handed out.
            version_before: the number of updates that the outbox leaves out.
            fed_from: by worker, the number of its first rollout that a memory gets; None for none of those that wait.
        """
        self.meter, self.version_before, self._waiting_from = meter, version_before, fed_from
        self._feed_workers(self._fed)

    @property
    def fed_from(self) -> Sequence[int] | None:
        """By worker, the number of its first rollout that the memory gets; None if none is fed."""
        return None if self._fed is None else self._fed.first_numbers

    def stats(self) -> dict[str, Any]:
        """Returns the result of `RL_Batcher.stats`."""
        workers = self.supervisor.stats()
        return {
            "workers": workers,
            "restarts": self.supervisor.n_restarts,
            "lost_rollouts": sum(worker["lost_rollouts"] for worker in workers),
            "env_restarts": [n for worker in workers for n in worker["env_restarts"]],
            "dropped_episodes": self.transport.episodes.n_dropped,
            "arena_bytes": self.transport.nbytes,
            "seeds": seeds_argument(self.settings.seeds),
        }

    @property
    def n_steps(self) -> int:
        """The number of steps handed out, of all environments together."""
        return self.meter.n_steps

    def metrics(self) -> dict[str, float]:
        """Returns the result of `RL_Batcher.metrics`."""
        restarts = [n for worker in self.supervisor.stats() for n in worker["env_restarts"]]
        return {
            **self.transport.episodes.take_means(),
            **self.meter.take(),
            "rollout/restarts": float(self.supervisor.n_restarts),
            "rollout/env_restarts": float(sum(restarts)),
            **{f"rollout/env_restarts/{env}": float(n) for env, n in enumerate(restarts) if n},
        }

    def close(self) -> None:
        """Ends every worker; raises what one of them raised as it was closed."""
        self.transport.cut_all()  # nobody will ask for the rollouts that are under way
        try:
            self.supervisor.close()
        finally:
            self._drop_fed()

    def free(self) -> None:
        """Releases the memory."""
        self.transport.close()
        self._fed = None
        for arena in self.arenas:
            arena.close()

    def begin_successors(self) -> None:
        """Begins new episodes in successors of workers whose rollouts are all handed out."""
        with defer_interrupt():  # the supervisor names each of them once
            self._begin_episodes(self.supervisor.take_successors())

    def _begin_episodes(self, workers: Collection[int]) -> None:
        """Prepares for new episodes in the next rollouts of these workers."""
        if replaced := self.supervisor.take_replaced():
            self.outbox.forget(replaced)
        if workers:
            self.transport.begin_episodes(workers)
            self._on_new_episodes(workers)


def start_engine(
    settings: JobSettings,
    run: RunSettings,
    debug: bool,
    on_new_episodes: Callable[[Collection[int]], None] = lambda workers: None,
) -> Engine:
    """Starts an engine whose workers are processes of this machine, or, with no processes, one job in this one.

    Raises:
        Exception: what the constructor of `RL_Batcher` raises.
    """
    arenas = SharedArena(), SharedArena()
    slots_arena, weights_arena = arenas
    pool = start_pool(settings, run, arenas)
    try:
        supervisor = Supervisor(pool, run.on_worker_failure, run.max_restarts, run.run_ahead)
        layout, blocks, n_envs, hint = find_contents(supervisor, settings, run.n_timesteps)
        slot_buffers = SlotBuffers(layout, run.run_ahead + 1, len(blocks))
        slots_arena.resize(slot_buffers.reserved_nbytes, expected=slot_buffers.nbytes)
        transport = SlotTransport(slot_buffers, slots_arena.map(), blocks, debug)
        supervisor.attach(slot_buffers)
        own = run.n_processes == 0
        outbox = weights.LocalOutbox() if own else weights.Outbox(weights_arena, run.run_ahead + 1, pool.settle)
        engine = Engine(settings, supervisor, transport, outbox, n_envs, arenas, on_new_episodes)
        engine.hint = hint
        return engine
    except BaseException:
        with contextlib.suppress(Exception):
            pool.close()
        raise


def find_contents(supervisor: Supervisor, settings: JobSettings, n_timesteps: int) -> Contents:
    """Asks workers what rollouts hold, and sets the supervisor's statistics.

    Raises:
        SpecError: workers differ.
    """
    found = supervisor.describe_jobs()
    n_envs, specs = found[0]
    assert specs is not None
    noun, sizes = supervisor.noun, supervisor.record_sizes
    for index, own in enumerate(found):
        if own.n_envs != n_envs:
            raise SpecError(f"create_env: {noun} {index} has {own.n_envs} environments, {noun} 0 has {n_envs}")
    for index, own in enumerate(found):
        if own.specs is not None:  # each node finds its own
            own.specs.check_like(specs, f"{noun} {index}")
    supervisor.set_statistics(specs.statistics)
    info = {f"agent_state/{key}": spec for key, spec in specs.state.items()}
    for name, example in (("agent_info", settings.agent_info), ("env_info", settings.env_info)):
        info.update({f"{name}/{key}": spec for key, spec in specs_of(example).items()})
    ends = itertools.accumulate(size * n_envs for size in sizes)
    blocks = [range(end - size * n_envs, end) for size, end in zip(sizes, ends, strict=True)]
    n_elems = n_envs * sum(sizes)
    return Contents(Layout(n_elems, n_timesteps, specs.observation, specs.action, info), blocks, n_envs, specs.hint)


# The modules that the fork server imports before it forks workers.
PRELOAD = ("torch", "gymnasium", "rlstructs.rollout.job", "rlstructs.envs.gym_env")


def start_pool(settings: JobSettings, run: RunSettings, shared: tuple[SharedArena, SharedArena]) -> Pool:
    """Starts workers and builds their jobs; with no processes, builds one job in this one.

    Raises:
        TypeError: an object of the user cannot be sent to a worker; the message names it.
        WorkerError: a worker could not start.
        Exception: what building a job raised.
    """
    try:
        if run.n_processes == 0:
            factory = JobFactory(settings.with_copied_arguments())
            return InlinePool(factory, shared=shared, around=PrivateStreams(), init_worker=run.init_worker)
        return WorkerPool(
            run.n_processes,
            JobFactory(settings),
            shared=shared,
            start_method=run.start_method,
            timeout=run.timeout,
            preload=PRELOAD,
            setup=WorkerSetup(partial(seed_worker_streams, settings.seeds, settings.agent_seeds)),
            init_worker=run.init_worker,
            name="rlstructs-worker",
        )
    except Exception as error:
        objects = {"init_worker": run.init_worker if run.n_processes else None} | settings.objects()
        if why := explain_pickle_error(objects):
            raise TypeError(why) from error
        raise
