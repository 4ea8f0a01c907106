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
from rlstructs.distributed.transport import NodeTransport
from rlstructs.rollout.job_settings import JobSettings
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.worker_setup import registry
from rlstructs.worker_setup.library_settings import read_libraries
from rlstructs.workers import pickling
from rlstructs.workers.pickle_errors import explain_pickle_error
from rlstructs.workers.script_pickling import PickledWithScript
from rlstructs.workers.settings.process_settings import SETTINGS, read_settings


def start_ray_engine(
    settings: JobSettings, run: RunSettings, debug: bool, sizes: Sequence[int], placement: cluster.Placement
) -> tuple[NodePool, Engine]:
    """Starts nodes, and the engine that runs rollouts on them.

    Args:
        settings, run, debug: see `start_engine`.
        sizes: the number of workers of each node.
        placement: where nodes run.

    Raises:
        Exception: what the constructor of `RayBatcher` raises.
    """
    ends = itertools.accumulate(sizes)
    job_arguments = [(slice(end - size, end),) for size, end in zip(sizes, ends, strict=True)]
    pool = NodePool(_pickle_settings(settings, run, debug), job_arguments, sizes, placement, run.timeout)
    try:
        policy, n_rollouts = run.on_worker_failure, run.run_ahead + 1
        supervisor = NodeSupervisor(pool, policy, run.max_restarts, run.run_ahead)
        layout, blocks, n_envs, hint = find_contents(supervisor, settings, run.n_timesteps)

        def send_infos(infos: Mapping[str, DictTensor]) -> None:
            data = pickling.dumps(infos)
            pool.check_connection()
            supervisor.send_infos(cluster.share(data, len(data)))

        transport = NodeTransport(layout, blocks, n_rollouts, send_infos, pool.cut, debug, policy == RESTART)
        check = StoreCheck(pool, transport, n_rollouts)
        check.check()
        engine = Engine(settings, supervisor, transport, Broadcast(check.check_update), n_envs)
        engine.hint = hint
        return pool, engine
    except BaseException:
        with contextlib.suppress(Exception):
            pool.close()
        raise


def _pickle_settings(settings: JobSettings, run: RunSettings, debug: bool) -> bytes:
    """Pickles the settings that the nodes' engines are made from."""
    try:
        sent = NodeSettings(settings, run, debug, registry.read_registry(), read_settings(SETTINGS), read_libraries())
        return pickling.dumps(PickledWithScript(sent))
    except Exception as error:
        if why := explain_pickle_error({"init_worker": run.init_worker} | settings.objects()):
            raise TypeError(why) from error
        raise


class StoreCheck:
    """Checks that object stores can hold the rollouts, the updates that nodes have not taken yet, and the next one.

    Args:
        pool: the nodes.
        transport: the transport of their rollouts.
        n_rollouts: the most rollouts of one node that are under way.
    """

    def __init__(self, pool: NodePool, transport: NodeTransport, n_rollouts: int) -> None:
        self._pool, self._transport, self._n_rollouts = pool, transport, n_rollouts
        self._update_nbytes = 0  # of the largest update so far

    def check(self) -> None:
        """Raises OutOfMemoryError if an object store is too small."""
        here, layout = cluster.this_machine(), self._transport.layout
        needs: Counter[str] = Counter()
        for node, block in zip(self._pool.nodes, self._transport.blocks, strict=True):
            n_bytes = dataclasses.replace(layout, n_slots=len(block)).nbytes * self._n_rollouts
            needs.update(dict.fromkeys({here, node.node_id}, n_bytes if n_bytes > cluster.INLINE else 0))
        for node_id in needs:
            needs[node_id] += (self._n_rollouts + 1) * self._update_nbytes
        cluster.check_store("rollouts and updates", needs)

    def check_update(self, n_bytes: int) -> None:
        """Raises OutOfMemoryError if there is no room for updates of this size, WorkerError without a connection."""
        self._pool.check_connection()
        if n_bytes > max(cluster.INLINE, self._update_nbytes):
            before, self._update_nbytes = self._update_nbytes, n_bytes
            try:
                self.check()
            except BaseException:
                self._update_nbytes = before
                raise
