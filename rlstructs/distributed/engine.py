"""Starts an `Engine` whose workers run on the nodes of a Ray cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

from rlstructs.batcher.arguments import RESTART, RunSettings
from rlstructs.batcher.engine import Engine, find_contents
from rlstructs.distributed import cluster
from rlstructs.distributed.broadcast import Broadcast
from rlstructs.distributed.node_job import NodeSettings
from rlstructs.distributed.pool import NodePool
from rlstructs.distributed.supervisor import NodeSupervisor
from rlstructs.distributed.transport import PartTransport
from rlstructs.rollout.job_settings import JobSettings
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.worker_setup import registry
from rlstructs.worker_setup.library_settings import read_libraries
from workers import pickling
from workers.pickle_errors import explain_pickle_error
from workers.script_pickling import PickledWithScript
from workers.settings.process_settings import SETTINGS, read_settings


def start_ray_engine(
    settings: JobSettings, run: RunSettings, debug: bool, sizes: Sequence[int], placement: cluster.Placement
) -> tuple[NodePool, Engine]:
    """Starts nodes, and the engine that runs rollouts on them.

    Args:
        settings, run, debug: as for `start_engine`.
        sizes: for each node how many workers it has.
        placement: where nodes run.
    """
    ends = itertools.accumulate(sizes)
    workers = [(slice(end - size, end),) for size, end in zip(sizes, ends, strict=True)]
    pool = NodePool(_pickle_settings(settings, run, debug), workers, sizes, placement, run.timeout)
    try:
        policy, n_rollouts = run.on_worker_failure, run.run_ahead + 1
        supervisor = NodeSupervisor(pool, policy, run.max_restarts, run.run_ahead)
        layout, blocks, n_envs = find_contents(supervisor, settings, run.n_timesteps)

        def inform(infos: Mapping[str, DictTensor]) -> None:
            data = pickling.dumps(infos)
            supervisor.inform(cluster.shared(data, len(data)))

        transport = PartTransport(layout, blocks, n_rollouts, inform, pool.cut, debug, policy == RESTART)
        check = StoreCheck(pool, transport, n_rollouts)
        check()
        return pool, Engine(settings, supervisor, transport, Broadcast(check.check_update), n_envs)
    except BaseException:
        with contextlib.suppress(Exception):
            pool.close()
        raise


def _pickle_settings(settings: JobSettings, run: RunSettings, debug: bool) -> bytes:
    """Pickles what the nodes' engines are made of."""
    try:
        sent = NodeSettings(settings, run, debug, registry.read_registry(), read_settings(SETTINGS), read_libraries())
        return pickling.dumps(PickledWithScript(sent))
    except Exception as error:
        if why := explain_pickle_error({"init_worker": run.init_worker} | settings.objects()):
            raise TypeError(why) from error
        raise


class StoreCheck:
    """Whether object stores can hold the rollouts, the updates that are on their way to nodes, and the next one.

    Args:
        pool: the nodes.
        transport: of what they write.
        n_rollouts: how many of each there may be at once.
    """

    def __init__(self, pool: NodePool, transport: PartTransport, n_rollouts: int) -> None:
        self._pool, self._transport, self._n_rollouts = pool, transport, n_rollouts
        self._n_bytes_of_update = 0  # of the largest so far

    def __call__(self) -> None:
        """Raises OutOfMemoryError unless they can."""
        here, layout = cluster.this_machine(), self._transport.layout
        needs: Counter[str] = Counter()
        for node, block in zip(self._pool.nodes, self._transport.blocks, strict=True):
            n_bytes = dataclasses.replace(layout, n_slots=len(block)).nbytes * self._n_rollouts
            needs.update(dict.fromkeys({here, node.node_id}, n_bytes if n_bytes > cluster.INLINE else 0))
        for node_id in needs:
            needs[node_id] += (self._n_rollouts + 1) * self._n_bytes_of_update
        cluster.check_store("rollouts and updates", needs)

    def check_update(self, n_bytes: int) -> None:
        """Raises OutOfMemoryError unless there is room for an update of this size too."""
        if n_bytes > max(cluster.INLINE, self._n_bytes_of_update):
            before, self._n_bytes_of_update = self._n_bytes_of_update, n_bytes
            try:
                self()
            except BaseException:
                self._n_bytes_of_update = before
                raise
