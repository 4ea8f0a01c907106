"""`Engine`: runs rollouts in workers, behind `RL_Batcher`."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from rlstructs.batcher.arguments import RunSettings, n_awaited
from rlstructs.batcher.batch import Batch
from rlstructs.batcher.evaluation import evaluate
from rlstructs.batcher.start_pool import start_pool
from rlstructs.batcher.supervisor import Supervisor
from rlstructs.batcher.transport import SlotTransport, Transport
from rlstructs.batcher.worker_record import RolloutOrder
from rlstructs.errors import SpecError
from rlstructs.moments import Moments
from rlstructs.rollout.evaluation import quotas
from rlstructs.rollout.job_settings import JobSettings
from rlstructs.shared import weights
from rlstructs.shared.layout import Layout
from rlstructs.shared.slot_buffers import SlotBuffers
from rlstructs.structures.arrays import specs_of
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.trajectories import Trajectories
from workers import SharedArena
from workers.interrupts import defer_interrupt
from workers.messages import Asked
from workers.pool_protocol import Pool


class Outbox(Protocol):
    """The trainer's end of the way that updates take.

    Attributes:
        version: how many updates there were.
    """

    version: int

    def pack(self, info: Any) -> Any:
        """Puts an update where workers can read it, and returns what to send of it."""

    def record_sent(self, packed: Any, asked: list[Asked]) -> None:
        """Notes that workers were told of it."""

    def forget(self, workers: Collection[int]) -> None:
        """Notes that these workers were replaced; their successors know of the last update only."""


class Contents(NamedTuple):
    """What rollouts hold.

    Attributes:
        layout: of all environments.
        blocks: for each worker, or node, the global indexes of its environments.
        n_envs: E, the number of environments of one worker.
    """

    layout: Layout
    blocks: list[range]
    n_envs: int


class Engine:
    """Workers, and what goes between them and the trainer.

    Args:
        settings: what jobs were built from.
        supervisor: of the workers.
        transport: of what rollouts write.
        outbox: of updates.
        n_envs: E, the number of environments of one worker.
        arenas: shared memory to let go of at the end.
        on_new_episodes: called with the workers whose environments begin new episodes, by `reset` or as successors.
    """

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
        # How many updates there were before those that the outbox counts.
        self._version_before = 0

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
        """How many updates there were."""
        return self._version_before + self.outbox.version

    @property
    def is_halfway(self) -> bool:
        """Whether some workers may have been told of what others were not."""
        return self.supervisor.is_halfway

    def settle(self) -> None:
        """Waits until no rollout is under way, nor anything that was interrupted."""
        self.supervisor.settle()

    def reset(self, infos: Mapping[str, DictTensor]) -> None:
        """Starts an episode in every environment; `infos` are `agent_info` and `env_info`."""
        self.transport.put_infos(infos)
        self.supervisor.reset()
        self._begin_anew(range(self.pool.n_workers))

    def mend(self) -> None:
        """Replaces workers that are gone, if they are to be replaced."""
        self.supervisor.mend_gone()

    def begin(self, agent_info: DictTensor | None) -> None:
        """Starts as many rollouts as may be under way; None keeps the `agent_info` in force."""
        if agent_info is not None:
            self.transport.put_agent_info(agent_info)
        self.supervisor.begin(self.transport.prepare)
        self._take_successors()

    def n_awaited(self, at_least: int | None, preempt: float | None) -> int | None:
        """For how many workers a `get` of these arguments waits, None for all; raises where they are wrong."""
        running = self.transport.n_workers_running()
        return n_awaited(at_least, preempt, self.supervisor.noun, self.pool.n_workers, running)

    def is_ready(self, n: int | None, cuts: bool) -> bool:
        """Whether `collect` would not have to wait; with `cuts` late workers are told to end once `n` are through."""
        if not self.supervisor.is_ready(n):
            return False
        if cuts:
            self.supervisor.cut_late(self.transport.cut)
        return not cuts or self.supervisor.is_ready()

    def collect(self, n: int | None = None, cuts: bool = False) -> dict[int, RolloutOrder]:
        """Waits for the oldest rollouts of `n` workers (None: all); with `cuts` the others then end theirs early."""
        return self.supervisor.collect(n, self.transport.cut if cuts else None)

    def batch(self, orders: Mapping[int, RolloutOrder]) -> Batch:
        """Finds what these rollouts have written."""
        return self.transport.batch(orders, self._version_before, self.policy_version)

    def end(self, orders: Mapping[int, RolloutOrder], trajectories: Trajectories) -> int:
        """Records the episodes of what is handed out, and goes on behind it.

        Returns:
            The number of environments that still run.
        """
        self.transport.add(orders, trajectories)
        return self.advance(orders)

    def advance(self, orders: Mapping[int, RolloutOrder]) -> int:
        """Goes on to the rollouts behind these; returns the number of environments that still run."""
        self.transport.end(orders)
        self.supervisor.learn(orders)
        self._begin_anew(self.supervisor.forget(orders))
        return self.transport.n_running()

    def update(self, packed: Any) -> None:
        """Sends every agent an update that the outbox has packed."""
        self.supervisor.update(packed, partial(self.outbox.record_sent, packed))
        self._take_successors()

    def check_evaluation(self) -> None:
        """Raises SpecError unless environments say how long and how good their episodes are."""
        for key in ("reward", "done"):
            spec = self.transport.layout.observation.get(key)
            if spec is None or spec[0] != ():
                raise SpecError(f"evaluate: the environment gives no {key!r} of shape (B, T)")

    def evaluate(
        self, n_episodes: int, seeds: Sequence[int], agent_info: DictTensor | None
    ) -> DictTensor | Exception:
        """Plays episodes in environments of their own.

        Returns:
            A row for each, as `RL_Batcher.evaluate` gives them; or what an agent or environment raised.
        """
        infos = self.transport.infos | ({} if agent_info is None else {"agent_info": agent_info.clone()})
        parts = evaluate(self.supervisor, quotas(n_episodes, self.n_elems), seeds, infos)
        self._take_successors()
        if isinstance(parts, Exception):
            return parts
        for block, part in zip(self.transport.blocks, parts, strict=True):
            part["env_index"] += block.start
        return DictTensor.cat([DictTensor.from_numpy(part) for part in parts])

    def renew(self, workers: Sequence[dict[str, Any]]) -> None:
        """Has workers make environments with the next seeds of their streams.

        Args:
            workers: for each what `Supervisor.state` gave.
        """
        settings = self.settings
        for worker, kept in enumerate(workers):
            settings = settings.with_new_streams(worker, kept["stream"] + 1)
        self.supervisor.renew(list(workers), settings.seeds, settings.agent_seeds)

    def load(self, state: Mapping[str, Any], statistics: dict[str, Moments]) -> None:
        """Goes on from what `RL_Batcher.state_dict` gave, with environments that are made anew."""
        self.renew(state["workers"])
        self._begin_anew(range(self.pool.n_workers))
        self.supervisor.know(statistics)
        self.transport.episodes.put(state["episodes"], state["dropped_episodes"])
        self._version_before = state["weights_version"] - self.outbox.version

    def close(self) -> None:
        """Ends every worker; raises what one of them raised as it was closed."""
        self.transport.cut_all()  # nobody will ask for what is under way
        self.supervisor.close()

    def free(self) -> None:
        """Lets go of the memory."""
        self.transport.close()
        for arena in self.arenas:
            arena.close()

    def _take_successors(self) -> None:
        """Continues with the successors of workers of which everything is handed out."""
        with defer_interrupt():  # the supervisor names them once
            self._begin_anew(self.supervisor.forget())

    def _begin_anew(self, replaced: Iterable[int]) -> None:
        """Expects a reset before the next rollouts of these workers."""
        replaced = list(replaced)
        self.outbox.forget(self.supervisor.take_replaced())
        self.transport.begin_anew(replaced)
        self._on_new_episodes(replaced)


def start_engine(
    settings: JobSettings,
    run: RunSettings,
    debug: bool,
    on_new_episodes: Callable[[Collection[int]], None] = lambda workers: None,
) -> Engine:
    """Starts an engine whose workers are processes of this machine, or, with no processes, one in this one.

    Raises:
        As the constructor of `RL_Batcher`.
    """
    arenas = SharedArena(), SharedArena()
    slots_arena, weights_arena = arenas
    pool = start_pool(settings, run, arenas)
    try:
        supervisor = Supervisor(pool, run.on_worker_failure, run.max_restarts, run.run_ahead)
        layout, blocks, n_envs = find_contents(supervisor, settings, run.n_timesteps)
        slot_buffers = SlotBuffers(layout, run.run_ahead + 1, len(blocks))
        slots_arena.resize(slot_buffers.reserved_nbytes, expected=slot_buffers.nbytes)
        transport = SlotTransport(slot_buffers, slots_arena.map(), blocks, debug)
        supervisor.attach(slot_buffers)
        outbox = weights.Outbox(weights_arena, run.run_ahead + 1, pool.settle)
        return Engine(settings, supervisor, transport, outbox, n_envs, arenas, on_new_episodes)
    except BaseException:
        with contextlib.suppress(Exception):
            pool.close()
        raise


def find_contents(supervisor: Supervisor, settings: JobSettings, n_timesteps: int) -> Contents:
    """Asks workers what rollouts hold, and has the supervisor know what statistics there are.

    Raises:
        SpecError: workers differ.
    """
    found = supervisor.describe()
    n_envs, specs = found[0]
    assert specs is not None
    noun, n_workers = supervisor.noun, supervisor.n_workers
    for index, own in enumerate(found):
        if own.n_envs != n_envs:
            raise SpecError(f"create_env: {noun} {index} has {own.n_envs} environments, {noun} 0 has {n_envs}")
    for index, own in enumerate(found):
        if own.specs is not None:  # each node finds its own
            own.specs.check_like(specs, f"{noun} {index}")
    supervisor.know(specs.statistics)
    info = {f"agent_state/{key}": spec for key, spec in specs.state.items()}
    for name, example in (("agent_info", settings.agent_info), ("env_info", settings.env_info)):
        info.update({f"{name}/{key}": spec for key, spec in specs_of(example).items()})
    ends = itertools.accumulate(n * n_envs for n in n_workers)
    blocks = [range(end - n * n_envs, end) for n, end in zip(n_workers, ends, strict=True)]
    n_elems = n_envs * sum(n_workers)
    return Contents(Layout(n_elems, n_timesteps, specs.observation, specs.action, info), blocks, n_envs)
