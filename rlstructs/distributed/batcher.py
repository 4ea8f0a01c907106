"""`RayBatcher`: the batcher's interface over a cluster that Ray runs.

    trainer                                       node n: an actor of Ray
    -------                                       -----------------------
    RayBatcher()  ── factories, by value ──────>  an RL_Batcher for a block of the workers
    reset()       ── infos, in the object store >  its environments are reset
    execute()     ── one call for each node ───>  execute and get of its batcher
    get()         <── columns, object store ────  what its slots hold
    copies them into one batch
    update()      ── object store, once ───────>  update of its batcher

Nodes answer in the order in which they are asked. Actors are not detached: they end with the trainer, and worker
processes with their actor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast, overload

import torch

from rlstructs.agent import RL_Agent
from rlstructs.batcher.arguments import RAISE, RunSettings
from rlstructs.batcher.batcher import RL_Batcher
from rlstructs.batcher.engine import Engine
from rlstructs.checks import check_count
from rlstructs.distributed import cluster
from rlstructs.distributed.engine import start_ray_engine
from rlstructs.distributed.lease import PartsLease
from rlstructs.distributed.parts import PartsBatch
from rlstructs.envs.vec_env import VecEnv
from rlstructs.errors import SpecError
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.trajectories import Trajectories
from workers.public_names import set_module


@set_module("rlstructs")
class RayBatcher(RL_Batcher):
    """`RL_Batcher` with its workers on the nodes of a Ray cluster.

    The arguments and methods are those of `RL_Batcher`, and so are the batches: with the same seeds, processes and
    environments, their order and content do not depend on where the processes run, bit for bit (on machines whose
    arithmetic is the same).

    Trajectories come through Ray's object store; `get` copies them once. `rlstructs`, and what factories import, has to
    be installed on every machine. Environment variables and the working directory are those of Ray's processes, not
    this program's: `ray.init(runtime_env=)` sets them.

    Args:
        n_timesteps, create_agent, agent_args, create_env, env_args, seeds: as of `RL_Batcher`.
        agent_info, env_info, agent_seeds, device, start_method, debug, init_worker: as of `RL_Batcher`.
        n_processes: W, worker processes in all, at least 1.
        timeout: seconds within which workers must answer. A node gets twice that and 5 s, to mend what it can itself,
            and a minute more to be placed by Ray. None for no limit: a node that dies is noticed all the same, as soon
            as Ray notices, and one that finds no free machine is warned of each minute.
        on_worker_failure: "raise" what happened; or "restart": a node mends by itself what happens to its workers. One
            that dies is replaced on what is left of the cluster; the lengths of what was lost with it are 0.
        max_restarts: how many workers may be replaced in all; a node counts as all of its workers. A node knows of its
            own workers only.
        run_ahead: as of `RL_Batcher`; so many rollouts are in the object store besides.
        n_nodes: how many actors share the processes, in contiguous blocks; the first ones have one more where it does
            not divide. None for one for each machine of the cluster that has `resources`, at most W.
        resources: what Ray reserves for each actor, such as `{"CPU": 8, "simulator": 1}`; None for Ray's default, which
            needs one CPU to place an actor and reserves none.
        placement: a scheduling strategy of Ray for the actors; None to spread them evenly.
        address: of a cluster, for `ray.init`, if the program has not called it; None for where Ray finds one, or else
            starts one on this machine. `close` leaves that to Ray.

    Raises:
        ImportError: Ray is not installed.
        SpecError, TypeError: an argument is not what is needed, or no machine of the cluster has `resources`.
        OutOfMemoryError: an object store is too small for the rollouts.
        WorkerError: a node or a worker did not come up.
        Exception: what `create_env` or `create_agent` raised in a worker.
    """

    _stack_level = 4

    def __init__(
        self,
        n_timesteps: int,
        create_agent: Callable[..., RL_Agent],
        agent_args: Mapping[str, Any],
        create_env: Callable[..., VecEnv],
        env_args: Mapping[str, Any],
        n_processes: int,
        seeds: int | Sequence[int] | None = None,
        agent_info: DictTensor | None = None,
        env_info: DictTensor | None = None,
        agent_seeds: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
        *,
        start_method: str | None = None,
        timeout: float | None = None,
        on_worker_failure: str = RAISE,
        max_restarts: int | None = None,
        run_ahead: int = 0,
        debug: bool | None = None,
        init_worker: Callable[[int], object] | None = None,
        n_nodes: int | None = None,
        resources: Mapping[str, float] | None = None,
        placement: Any = None,
        address: str | None = None,
    ) -> None:
        cluster.ray()
        check_count("n_processes", n_processes, 1)
        if n_nodes is not None and check_count("n_nodes", n_nodes, 1) > n_processes:
            raise SpecError(f"n_nodes is {n_nodes}, which is more than n_processes, {n_processes}")
        self._n_nodes, self._placement, self._address = n_nodes, cluster.Placement(resources, placement), address
        super().__init__(
            n_timesteps, create_agent, agent_args, create_env, env_args, n_processes, seeds, agent_info, env_info,
            agent_seeds, device, start_method=start_method, timeout=timeout, on_worker_failure=on_worker_failure,
            max_restarts=max_restarts, run_ahead=run_ahead, debug=debug, init_worker=init_worker,
        )  # fmt: skip

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
        """The rollout that `execute` started, in memory of its own, as `RL_Batcher.get` gives it.

        Args:
            blocking: as of `RL_Batcher.get`.
            out: as there; with `on_worker_failure="restart"` it needs a row for every environment: those that had ended
                run again with a worker that their node has replaced.
            min_nodes: hand out the environments of so many nodes, or more, as soon as they are through, in place of
                all: first come, first served. The others' rollouts come with the `get` after another `execute`, which
                starts one in those who are through.
            preempt: as of `RL_Batcher.get`, a fraction of the nodes.
            min_workers: not here: give `min_nodes`.

        Returns, Raises: as `RL_Batcher.get`.
        """
        if min_workers is not None:
            raise SpecError("get: min_workers is for RL_Batcher; a RayBatcher waits for nodes: give min_nodes")
        return super().get(blocking, out, min_workers=min_nodes, preempt=preempt)

    def lease(self) -> PartsLease:  # type: ignore[override]
        """The rollout that `execute` started, where it lies in the object store: `get` without a copy.

        Returns:
            A `PartsLease`, for a `with` block: it unpacks into a list of `Part`, one for each node, whose arrays of
            numpy are read-only, and the number of environments that still run. The next `execute` or `reset` comes
            after its release. Object store whose arrays are still looked at then stays taken until they are not.

        Raises:
            StateError, WorkerError, Exception: as `get`.
        """
        return self._hand_out.lease(
            lambda batch, _, *rest: PartsLease(list(cast(PartsBatch, batch).parts), *rest)
        )

    def stats(self) -> dict[str, Any]:
        """What the workers do and have done, as of the last reply of their nodes.

        Returns:
            As `RL_Batcher.stats`; of each worker its `node` too. `nodes`: for each a dict of `node` (its index),
            `node_id` and `address` (of the machine, by Ray), `pid` (of the actor), `state` ("idle", "busy" or "gone")
            and `workers` (their indexes). `arena_bytes`: the object store that rollouts take.
        """
        found = super().stats()
        return {**found, "nodes": [
            {"node": node.index, "node_id": node.node_id, "address": node.address, "pid": node.pid, "state": node.state,
             "workers": list(node.workers)} for node in self._nodes.nodes
        ]}  # fmt: skip

    def _start_engine(self, run: RunSettings) -> Engine:
        cluster.connect(self._address)
        sizes = split(run.n_processes, self._n_nodes or self._placement.n_machines())
        self._nodes, engine = start_ray_engine(self._settings, run, self._debug, sizes, self._placement)
        return engine

    def __enter__(self) -> RayBatcher:
        return self


def split(n_processes: int, n_nodes: int) -> list[int]:
    """How many processes each node has: nearly the same, the first ones one more.

    Example:
        >>> split(7, 3), split(2, 4)
        ([3, 2, 2], [1, 1])
    """
    n_nodes = min(n_nodes, n_processes)
    return [n_processes // n_nodes + (node < n_processes % n_nodes) for node in range(n_nodes)]
