"""`RayBatcher`: the batcher's interface over a cluster that Ray runs.

    trainer                                       node n: an actor of Ray
    -------                                       -----------------------
    RayBatcher()  ── factories, by value ──────>  starts an engine for a block of the workers
    reset()       ── infos, in the object store >  resets its environments
    execute()     ── one call for each node ───>  runs a rollout in its workers
    get()         <── columns, object store ────  the content of its slots
    copies them into one batch
    update()      ── object store, once ───────>  updates its agents

A node answers requests in the order in which they came. Actors are not detached: they end with the trainer, and worker
processes end with their actor.

`PartsLease`: a rollout that stays in the object store until it is released.

    with batcher.lease() as (parts, n_running):
        for part in parts:
            frames = part["observation/frame"]  # numpy, read-only
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns
from typing import Any, Literal, cast, overload

import torch

from rlstructs.agent import RL_Agent
from rlstructs.batcher.arguments import RAISE, RESTART, RunSettings
from rlstructs.batcher.batcher import RL_Batcher
from rlstructs.batcher.engine import Engine
from rlstructs.batcher.lease import BaseLease
from rlstructs.batcher.start import find_contents
from rlstructs.checks import check_count, other_words
from rlstructs.distributed import cluster
from rlstructs.distributed.node_job import NodeSettings
from rlstructs.distributed.pool import NodePool
from rlstructs.distributed.supervisor import NodeSupervisor
from rlstructs.distributed.transport import Broadcast, NodePartsBatch, NodeTransport, Part
from rlstructs.envs.vec_env import VecEnv
from rlstructs.errors import SpecError
from rlstructs.rollout.job_specs import JobSettings
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.trajectories import Trajectories
from rlstructs.trace.board import Board, Excerpt
from rlstructs.worker_setup import read_libraries, read_registry
from rlstructs.workers import pickling
from rlstructs.workers.pickling import explain_pickle_error
from rlstructs.workers.public_names import set_module
from rlstructs.workers.script import PickledWithScript
from rlstructs.workers.settings import SETTINGS, read_settings


@set_module("rlstructs")
class RayBatcher(RL_Batcher):
    """`RL_Batcher` with its workers on the nodes of a Ray cluster.

    The arguments and methods are those of `RL_Batcher`, and so are the batches: with the same seeds, processes and
    environments, their order and content do not depend on where the processes run, bit for bit (on machines with the
    same arithmetic).

    Trajectories come through Ray's object store; `get` copies them once. `rlstructs`, and what factories import, has to
    be installed on every machine. Environment variables and the working directory are those of Ray's processes, not
    this program's: `ray.init(runtime_env=)` sets them.

    Args:
        n_timesteps, create_agent, agent_args, create_env, env_args, seeds: see `RL_Batcher`.
        agent_info, env_info, agent_seeds, device, start_method, debug, init_worker: see `RL_Batcher`.
        n_processes: W, the number of worker processes in all, at least 1.
        timeout: seconds within which workers must answer; None for no limit. A node has twice that and 5 s, so that it
            can replace workers itself, and a minute more until Ray has placed it. Without a limit, a node that dies is
            noticed as soon as Ray notices, and a warning comes each minute while a node finds no free machine.
        on_worker_failure: "raise" raises what happened; "restart" has a node replace its own workers, and replaces a
            node that dies on the rest of the cluster. A rollout that was lost has lengths of 0.
        max_restarts: how many workers may be replaced in all; a node counts as all of its workers. Each node counts
            only its own.
        on_env_failure, max_env_restarts: see `RL_Batcher`.
        run_ahead: see `RL_Batcher`; that many more rollouts are in the object store.
        n_nodes: how many actors share the processes, in contiguous blocks; if they do not divide evenly, the first ones
            have one more. None for one on each machine of the cluster that has `resources`, at most W.
        resources: what Ray reserves for each actor, such as `{"CPU": 8, "simulator": 1}`; None for Ray's default, which
            needs one CPU to place an actor and reserves none.
        placement: Ray's scheduling strategy for the actors; None to spread them evenly.
        address: the address of a cluster, for `ray.init`, if the program has not called it; None for the one that Ray
            finds, or starts on this machine. `close` does not end the connection.

    Raises:
        ImportError: Ray is not installed.
        SpecError, TypeError: an argument has a wrong value or type, or no machine of the cluster has `resources`.
        OutOfMemoryError: an object store is too small for the rollouts.
        WorkerError: a node or a worker could not start.
        Exception: what `create_env` or `create_agent` raised in a worker.
    """

    @other_words(n_workers="n_processes", seed="seeds")
    def __init__(
        self, n_timesteps: int, create_agent: Callable[..., RL_Agent], agent_args: Mapping[str, Any],
        create_env: Callable[..., VecEnv], env_args: Mapping[str, Any], n_processes: int,
        seeds: int | Sequence[int] | None = None, agent_info: DictTensor | None = None,
        env_info: DictTensor | None = None, agent_seeds: Sequence[int] | None = None,
        device: torch.device | str = "cpu", *, start_method: str | None = None, timeout: float | None = None,
        on_worker_failure: str = RAISE, max_restarts: int | None = None, on_env_failure: str = RAISE,
        max_env_restarts: int | None = None, run_ahead: int = 0,
        debug: bool | None = None, init_worker: Callable[[int], object] | None = None,
        n_nodes: int | None = None, resources: Mapping[str, float] | None = None, placement: Any = None,
        address: str | None = None,
    ) -> None:  # fmt: skip
        cluster.import_ray()
        check_count("n_processes", n_processes, 1)
        if n_nodes is not None and check_count("n_nodes", n_nodes, 1) > n_processes:
            raise SpecError(f"n_nodes is {n_nodes}, which is more than n_processes, {n_processes}")
        self._n_nodes, self._placement, self._address = n_nodes, cluster.Placement(resources, placement), address
        super().__init__(
            n_timesteps,
            create_agent,
            agent_args,
            create_env,
            env_args,
            n_processes,
            seeds,
            agent_info,
            env_info,
            agent_seeds,
            device,
            start_method=start_method,
            timeout=timeout,
            on_worker_failure=on_worker_failure,
            max_restarts=max_restarts,
            on_env_failure=on_env_failure,
            max_env_restarts=max_env_restarts,
            run_ahead=run_ahead,
            debug=debug,
            init_worker=init_worker,
        )

    @overload  # type: ignore[override]
    def get(
        self,
        blocking: Literal[True] = True,
        out: Trajectories | None = None,
        *,
        min_nodes: int | None = None,
        preempt: float | None = None,
        min_workers: None = None,
    ) -> tuple[Trajectories, int]: ...

    @overload
    def get(
        self,
        blocking: bool,
        out: Trajectories | None = None,
        *,
        min_nodes: int | None = None,
        preempt: float | None = None,
        min_workers: None = None,
    ) -> tuple[Trajectories, int] | tuple[None, None]: ...

    def get(
        self,
        blocking: bool = True,
        out: Trajectories | None = None,
        *,
        min_nodes: int | None = None,
        preempt: float | None = None,
        min_workers: None = None,
    ) -> tuple[Trajectories, int] | tuple[None, None]:
        """Returns the rollout that `execute` started, in memory of its own; see `RL_Batcher.get`.

        Args:
            blocking: see `RL_Batcher.get`.
            out: see `RL_Batcher.get`; with `on_worker_failure="restart"` it needs a row for every environment, because
                those that had ended run again if their node replaces their worker.
            min_nodes: return the rollouts of that many nodes or more as soon as they are done, without waiting for the
                others: first come, first served. The others' rollouts come with the `get` after the next `execute`,
                which starts one in those that are done.
            preempt: see `RL_Batcher.get`; a fraction of the nodes.
            min_workers: not allowed: give `min_nodes`.

        Returns:
            See `RL_Batcher.get`.

        Raises:
            SpecError: an argument does not fit; the rollout can still be fetched.
            StateError, WorkerError, Exception: see `RL_Batcher.get`.
        """
        if min_workers is not None:
            raise SpecError("get: min_workers is for RL_Batcher; a RayBatcher waits for nodes: give min_nodes")
        return super().get(blocking, out, min_workers=min_nodes, preempt=preempt)

    def lease(self) -> PartsLease:  # type: ignore[override]
        """Lends the rollout in the object store: `get` without a copy.

        Returns:
            A `PartsLease` for a `with` block. It unpacks into a list of `Part`, one for each node, whose numpy arrays
            are read-only, and the number of environments that still run. `execute` and `reset` are allowed again after
            its release. Arrays that are kept longer keep their memory in the object store.

        Raises:
            StateError, WorkerError, Exception: see `get`.
        """
        return self._delivery.lease(
            lambda batch, _, *rest: PartsLease(list(cast(NodePartsBatch, batch).node_parts), *rest)
        )

    def stats(self) -> dict[str, Any]:
        """Returns what each worker is doing and has done, by its node's last reply.

        Returns:
            What `RL_Batcher.stats` returns, and the `node` of each worker. `nodes`: for each a dict of `node` (its
            index), `node_id` and `address` (Ray's, of the machine), `pid` (of the actor), `state` ("idle", "busy" or
            "gone") and `workers` (their indexes). `arena_bytes`: the object store that rollouts take.
        """
        return {**super().stats(), "nodes": [node.describe() for node in self._nodes.nodes]}

    def _start_engine(self, settings: JobSettings, run: RunSettings) -> Engine:
        cluster.connect(self._address)
        sizes = split_processes(run.n_processes, self._n_nodes or self._placement.n_machines())
        self._nodes, engine = start_ray_engine(settings, run, self._debug, sizes, self._placement)
        return engine


def split_processes(n_processes: int, n_nodes: int) -> list[int]:
    """Returns the number of processes of each node, as equal as possible.

    The first nodes may have one more.

    Example:
        >>> split_processes(7, 3), split_processes(2, 4)
        ([3, 2, 2], [1, 1])
    """
    n_nodes = min(n_nodes, n_processes)
    return [n_processes // n_nodes + (node < n_processes % n_nodes) for node in range(n_nodes)]


@set_module("rlstructs")
class PartsLease(BaseLease):
    """A rollout without a copy; `RayBatcher.lease` makes it.

    Use it in a `with` block, or `release` it. Arrays that are kept longer do not change, but keep their memory in the
    object store.

    Attributes:
        n_running: the number of environments that still run.
    """

    released = "the lease has been released; `get` gives what may be kept"

    @property
    def parts(self) -> list[Part]:
        """One `Part` per node, in the order of the nodes.

        Raises:
            StateError: the lease has been released.
        """
        parts: list[Part] = self.content
        return parts


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
        board = Board.make(0, n_timesteps=run.n_timesteps, run_ahead=run.run_ahead, is_inline=False)
        supervisor = NodeSupervisor(pool, policy, run.max_restarts, run.run_ahead, board)
        contents = find_contents(supervisor, settings, run.n_timesteps)
        cores = {node.node_id: n_cores for node, n_cores in zip(pool.nodes, pool.call("count_cores"), strict=True)}
        board.write_facts(n_workers=sum(sizes), n_envs=contents.n_envs, n_cores=sum(cores.values()))
        board.read_others = lambda: [node.report["cells"] for node in pool.nodes]
        board.nodes = [NodeRecording(pool, index) for index in range(len(sizes))]
        board.begin_account()

        def send_infos(infos: Mapping[str, DictTensor]) -> None:
            data = pickling.dumps(infos)
            pool.check_connection()
            supervisor.send_infos(cluster.share(data, len(data)))

        transport = NodeTransport(
            contents, supervisor.records, n_rollouts, send_infos, pool.cut, debug, policy == RESTART
        )
        check = StoreCheck(pool, transport, n_rollouts)
        check.check()
        return pool, Engine(settings, supervisor, transport, Broadcast(check.check_update))
    except BaseException:
        with contextlib.suppress(Exception):
            pool.close()
        raise


# Calls that tell the clock of a node as a recording begins, and the seconds that one call may take.
N_CLOCK_CALLS, PATIENCE = 8, 1.0


class NodeRecording:
    """Records the lanes of a node and its workers; see `Recording`.

    The node reads its clock during a call, which tells by how much it is ahead to within the time that the call takes.
    Each call does, so that clocks which drift apart are followed.

    Args:
        pool: the nodes.
        index: of the node.

    Attributes:
        workers: see `Recording`.
    """

    def __init__(self, pool: NodePool, index: int) -> None:
        self.workers = pool.nodes[index].workers
        self._pool, self._index = pool, index
        self._actor: Any = None
        self._ahead: int | None = None

    def take(self, goes_on: bool = True) -> tuple[int, list[Excerpt]]:
        if self._actor is not self._pool.nodes[self._index].actor:  # at first, and when the node was replaced
            self._actor, self._ahead = self._pool.nodes[self._index].actor, None
        n_calls = N_CLOCK_CALLS if self._ahead is None else 0
        answers = all(self._call("read_clock") is not None for _ in range(n_calls))
        excerpts = self._call("record", goes_on) if answers else None
        return self._ahead or 0, excerpts or []

    def _call(self, method: str, *args: Any) -> Any:
        """Calls a method that returns the node's clock and a value.

        Returns the value, or None if none comes.
        """
        sent = perf_counter_ns()
        reference = self._pool.ask_aside(self._index, method, *args)
        try:
            clock, value = reference.future().result(PATIENCE)
        except Exception:  # the node is gone, or busy: what a reply holds that comes later counts as lost
            return None
        least, most = clock - perf_counter_ns(), clock - sent
        self._ahead = (least + most) // 2 if self._ahead is None else min(max(self._ahead, least), most)
        return value


def _pickle_settings(settings: JobSettings, run: RunSettings, debug: bool) -> bytes:
    """Pickles the settings that the nodes' engines are made from."""
    try:
        sent = NodeSettings(settings, run, debug, read_registry(), read_settings(SETTINGS), read_libraries())
        return pickling.dumps(PickledWithScript(sent))
    except Exception as error:
        if why := explain_pickle_error({"init_worker": run.init_worker} | settings.objects()):
            raise TypeError(why) from error
        raise


class StoreCheck:
    """Checks that object stores can hold the rollouts and the updates.

    The updates: those that nodes have not taken yet, and the next one.

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
        """Raises OutOfMemoryError if there is no room for updates of this size.

        Raises WorkerError without a connection.
        """
        self._pool.check_connection()
        if n_bytes > max(cluster.INLINE, self._update_nbytes):
            before, self._update_nbytes = self._update_nbytes, n_bytes
            try:
                self.check()
            except BaseException:
                self._update_nbytes = before
                raise
