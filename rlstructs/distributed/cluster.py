"""The connection to Ray, its machines and their object stores, and actors on them.

    trainer                                          actor
    -------                                          -----
    call(Call("build", settings))  ───────────────>  makes the job
    call(Call("rollout", ...))  ──────────────────>  calls this method of it
       <── NodeResult and columns, or NodeFailure ─

Requests and replies are bytes because Ray has its own pickling: classes of the script would come back as other ones,
and exceptions as Ray's; none reaches Ray. Arrays stay outside of the bytes: they go through the object store without
another copy.
"""

from __future__ import annotations

import contextlib
import copy
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent import futures
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from rlstructs.errors import OutOfMemoryError, SpecError
from rlstructs.workers import pickling
from rlstructs.workers.errors import RemoteTraceback, WorkerError
from rlstructs.workers.failures import RAISED, Failure
from rlstructs.workers.imports import uncollected_imports
from rlstructs.workers.messages import Call, Future

# In bytes. A smaller reply is sent directly, because the object store takes 4 ms on two busy cores. Ray's own limit is
# a tenth of this. The sender applies the limit, so actors are started with this one.
INLINE = 2**20
# In bytes. A smaller value is sent with each request; Ray allows up to twice as much.
SMALL = 50 * 1024
# The share of an object store above which Ray begins to write objects to a disk.
USABLE = 0.8
# Seconds within which a machine must accept a connection.
CONNECTING = 1.0
# Ray's options for resources that are not named in `resources`.
OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
BUILD = "build"
# The concurrency group of calls that do not wait for others.
ASIDE = "aside"

Columns = dict[str, np.ndarray]


def import_ray(what: str = "RayBatcher") -> Any:
    """Imports Ray and returns the module.

    It may not be connected to a cluster yet.

    Args:
        what: the name of the class that needs Ray, for the message.

    Raises:
        ImportError: Ray is not installed; the message says what to install.
    """
    try:
        import ray
        from ray import init  # noqa: F401  fails for a folder called ray, such as Ray's own in /tmp
    except ImportError as error:
        raise ImportError(f"{what} needs ray: pip install ray") from error
    return ray


def connect(address: str | None) -> None:
    """Connects to a cluster, or starts one, unless there is a connection already."""
    if not import_ray().is_initialized():
        import_ray().init(address=address, log_to_driver=True)


def read_connection() -> str | None:
    """Identifies this process's connection to Ray; None without one. Another `ray.init` makes another one."""
    ray = import_ray()
    return str(ray.get_runtime_context().get_worker_id()) if ray.is_initialized() else None


def share(value: Any, n_bytes: int) -> Any:
    """Returns what to send for a value of `n_bytes`.

    A copy if it is small, otherwise a reference to the object store.
    """
    return copy.deepcopy(value) if n_bytes < SMALL else import_ray().put(value)


@dataclass(frozen=True)
class Machine:
    """A machine of the cluster.

    Attributes:
        node_id: Ray's id of it.
        address, port: where Ray listens on it.
        resources: how much it has of each resource, reserved or not.
    """

    node_id: str
    address: str
    port: int
    resources: Mapping[str, float]

    @property
    def store_nbytes(self) -> int:
        """The size of its object store, in bytes."""
        return int(self.resources.get("object_store_memory", 0))

    def is_reachable(self) -> bool:
        """Whether the machine accepts a connection.

        Ray may list a dead machine for a minute or more.
        """
        try:
            socket.create_connection((self.address, self.port), CONNECTING).close()
        except OSError:
            return False
        return True


def this_machine() -> str:
    """The `node_id` of the machine that this process runs on."""
    node_id: str = import_ray().get_runtime_context().get_node_id()
    return node_id


def list_machines() -> dict[str, Machine]:
    """Lists the machines that Ray thinks are alive, by `node_id`."""
    found = (
        Machine(node["NodeID"], node["NodeManagerAddress"], node["NodeManagerPort"], node["Resources"])
        for node in import_ray().nodes()
        if node["Alive"]
    )
    return {machine.node_id: machine for machine in found}


def list_free_resources() -> dict[str, dict[str, float]]:
    """Returns the unreserved amount of each resource, by `node_id`.

    Ray's numbers may be some moments old.
    """
    from ray._private.state import available_resources_per_node  # Ray's public functions only give sums

    found: dict[str, dict[str, float]] = available_resources_per_node()
    return found


def is_death(error: Exception) -> bool:
    """Whether Ray's error says that the actor is gone.

    Otherwise only a reply may be lost.
    """
    from ray import exceptions

    gone = (
        exceptions.RayActorError,
        exceptions.NodeDiedError,
        exceptions.ActorUnschedulableError,
        exceptions.ActorPlacementGroupRemoved,
        exceptions.RuntimeEnvSetupError,
    )
    return isinstance(error, gone) and not isinstance(error, exceptions.ActorUnavailableError)


def is_full(error: Exception) -> bool:
    """Whether Ray's error says that there is no room for a reply."""
    from ray import exceptions

    return isinstance(error, (exceptions.ObjectStoreFullError, exceptions.OutOfDiskError))


@dataclass(frozen=True)
class Placement:
    """The rules by which actors are placed on machines.

    Attributes:
        resources: what each actor reserves, by Ray's names; None for Ray's default, which reserves nothing.
        strategy: Ray's scheduling strategy; None to spread actors over the machines that have what they reserve.
    """

    resources: Mapping[str, float] | None = None
    strategy: Any = None

    def check(self) -> None:
        """Raises SpecError if no machine is large enough for an actor.

        Even with nothing else on it.
        """
        if self.strategy is None and not self._list_fitting():
            raise SpecError(
                f"resources: no machine of the cluster has {self}; all together have {import_ray().cluster_resources()}"
            )

    def choose(self, taken: list[str]) -> Machine | None:
        """Chooses the machine with room for an actor and the fewest actors.

        None leaves the choice to Ray.

        Args:
            taken: the `node_id` of each present actor's machine.
        """
        if self.strategy is not None:
            return None
        unreserved = list_free_resources()
        with_room = (
            machine
            for machine in self._list_fitting()
            if self._has_room(machine, unreserved.get(machine.node_id, {}), taken)
        )
        fitting = sorted(with_room, key=lambda machine: taken.count(machine.node_id))
        return next((machine for machine in fitting if machine.is_reachable()), None)

    def n_machines(self) -> int:
        """The number of machines that have room for an actor; at least 1."""
        return len(self._list_fitting()) or 1

    @property
    def _needed(self) -> Mapping[str, float]:
        return self.resources or {"CPU": 1}  # Ray asks for that much to place an actor

    def _has_room(self, machine: Machine, unreserved: Mapping[str, float], taken: list[str]) -> bool:
        """Whether a machine has room for another actor.

        Ray may not know yet what the newest actors reserve.
        """
        n, reserved = taken.count(machine.node_id), self.resources or {}
        return all(
            min(unreserved.get(name, 0), machine.resources[name] - n * reserved.get(name, 0)) >= amount
            for name, amount in self._needed.items()
        )

    def _list_fitting(self) -> list[Machine]:
        """Lists the machines that have what an actor reserves."""
        fitting = (
            machine
            for machine in list_machines().values()
            if all(machine.resources.get(name, 0) >= n for name, n in self._needed.items())
        )
        return sorted(fitting, key=lambda machine: machine.node_id)

    def make_options(self, machine: Machine | None) -> dict[str, Any]:
        """Makes Ray's options for an actor on a machine; None for any machine.

        The machine is a preference: Ray may choose another one.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        resources = {"CPU": 0.0, **self.resources} if self.resources else {}  # otherwise Ray reserves a CPU too
        options: dict[str, Any] = {name: resources.pop(key) for key, name in OPTIONS.items() if key in resources}
        strategy = self.strategy or "SPREAD"
        if machine is not None:
            strategy = NodeAffinitySchedulingStrategy(machine.node_id, soft=True)
        return {
            **options,
            "scheduling_strategy": strategy,
            "resources": resources,
            "max_restarts": 0,
            "max_task_retries": 0,
            "runtime_env": {"env_vars": {"RAY_max_direct_call_object_size": str(INLINE)}},
        }

    def __str__(self) -> str:
        return str(dict(self._needed))


def check_store(what: str, needs: Mapping[str, int]) -> None:
    """Raises OutOfMemoryError unless object stores are large enough.

    Args:
        what: the name of what they hold, a plural, for the message.
        needs: how many bytes each must hold, by `node_id`.
    """
    found = list_machines()
    for node_id, nbytes in needs.items():
        machine = found.get(node_id)
        if machine is not None and nbytes > USABLE * machine.store_nbytes:
            raise OutOfMemoryError(
                f"{what} take {nbytes:,} bytes of the object store of {machine.address} (node {node_id[:8]} of Ray), "
                f"which has {machine.store_nbytes:,}; Ray writes what is above {USABLE:.0%} of it to a disk: start Ray "
                "there with a larger object_store_memory, "
                "or take fewer environments, timesteps or nodes, or less run_ahead"
            )


class NodeResult(NamedTuple):
    """The reply to a call that returned.

    Attributes:
        value: what the method returned, without its columns.
        report: the report of the job.
    """

    value: Any
    report: dict[str, Any]


class NodeFailure(NamedTuple):
    """The reply to a call that raised.

    Attributes:
        worker_index: the worker in which the exception was raised, counted over all nodes.
        failure: the exception.
    """

    worker_index: int
    failure: Failure


class Place(NamedTuple):
    """The place of an actor: Ray's id of its machine, and its process id."""

    node_id: str
    pid: int


class NodeActor:
    """An actor with one job.

    The job is what the `build` method of its settings returns; its `report` comes with every reply.

    Args:
        first_worker: index of its first worker, counted over all nodes.
    """

    def __init__(self, first_worker: int) -> None:
        self._first_worker = first_worker
        self._job: Any = None

    def call(self, request: bytes, *shared: Any) -> tuple[bytes, Columns]:
        """Calls a method of the job, or builds the job.

        Args:
            request: a pickled `Call`.
            shared: more arguments, from the object store.

        Returns:
            A pickled `NodeResult` or `NodeFailure`, and the columns of the value.
        """
        columns: Columns = {}
        reply: NodeResult | NodeFailure
        try:
            call: Call = pickling.loads(request)
            if call.method == BUILD:
                value: Any = self._build(*shared, *call.args)
            else:
                value = getattr(self._job, call.method)(*call.args, *shared)
            if _has_columns(value):
                columns, value = value.columns, value._replace(columns={})
            reply = NodeResult(value, self._job.report())
        except Exception as error:
            reply = self._make_failure(error)
        return pickling.dumps(reply), columns

    def call_aside(self, method: str, *args: Any) -> Any:
        """Calls a method of the job in another thread than `call`.

        Returns None while there is no job.
        """
        return None if self._job is None else getattr(self._job, method)(*args)

    def _build(self, settings: bytes, path: list[str], *args: Any) -> Place:
        """Builds the job; returns where that is."""
        _set_import_path(path)
        with uncollected_imports():
            made = pickling.loads(settings)
        self._job = made.build(*args)
        return Place(this_machine(), os.getpid())

    def _make_failure(self, error: Exception) -> NodeFailure:
        """Makes the reply for an exception.

        If a worker of this node raised it, the reply has the worker's index and traceback.
        """
        cause = error.__cause__
        if not isinstance(cause, RemoteTraceback):
            index = error.worker_index if isinstance(error, WorkerError) else None
            return NodeFailure(self._first_worker + (index or 0), Failure.of(error))
        # A worker of this node raised it: the trainer should see the worker's traceback, not the node's.
        notes = getattr(error, "__notes__", [])
        if notes and notes[-1].startswith(RAISED):
            notes.pop()
        return NodeFailure(self._first_worker + cause.worker_index, Failure.of(error)._replace(text=cause.text))


def _has_columns(value: Any) -> bool:
    """Whether a reply is a NamedTuple with a field `columns`.

    These arrays go through the object store.
    """
    return isinstance(value, tuple) and "columns" in getattr(value, "_fields", ())


def _set_import_path(path: list[str]) -> None:
    """Adds the trainer's folders to the import path, if they exist here.

    They come before the actor's own folders if both run the same Python, and after them otherwise.
    """
    is_same = os.path.dirname(os.__file__) in path
    first, then = (path, sys.path) if is_same else (sys.path, path)
    here = [folder for folder in first if folder in sys.path or os.path.exists(folder)]
    sys.path[:] = here + [folder for folder in then if folder not in here]


class Bell:
    """Wakes waiting threads when a reply has come, or never will.

    Ray's own threads ring it. They must not wait for a lock that is held while Ray is called, so it has none.
    """

    def __init__(self) -> None:
        self._listeners: list[SimpleQueue[None]] = []

    def ring(self, _: Any = None) -> None:
        """Wakes everyone who listens."""
        for listener in tuple(self._listeners):
            listener.put(None)

    @contextlib.contextmanager
    def listen(self) -> Iterator[SimpleQueue[None]]:
        """Yields a queue that gets an entry for each ring from now on."""
        listener: SimpleQueue[None] = SimpleQueue()
        self._listeners.append(listener)
        try:
            yield listener
        finally:
            self._listeners.remove(listener)


@dataclass(eq=False)
class Request:
    """A request to a node.

    Attributes:
        reference: Ray's reference to the reply.
        reply: holds the reply once it is on this machine, where Ray brings it as soon as there is one.
        asked: the request and the future that its reply resolves.
        limit: seconds that the node has; None for no limit.
    """

    reference: Any
    reply: futures.Future[tuple[bytes, Columns]]
    asked: Future
    limit: float | None


@dataclass
class Node:
    """One actor and its open requests.

    Attributes:
        index: the index of the node.
        workers: the indexes of its workers, counted over all nodes.
        actor: Ray's handle of the actor.
        noun: its name in messages.
        node_id, address, pid: where it runs, once that is known.
        requests: the requests without a reply, the oldest first.
        since: when the wait for the oldest one began, in the time of `time.monotonic`.
        report: the last report of its job.
        placing_since: when it was started, or when the last warning came that it is not placed and built yet.
        error: why it is gone; None while it is not.
        is_late: whether it has missed a deadline, and has not replied since.
        has_answered: whether the awaited reply existed on the node's machine at its deadline, and is in transit.
    """

    index: int
    workers: range
    actor: Any
    noun: str = "node"
    node_id: str = ""
    address: str = ""
    pid: int = 0
    requests: deque[Request] = field(default_factory=deque)
    since: float = field(default_factory=time.monotonic)
    report: dict[str, Any] = field(default_factory=dict)
    placing_since: float = field(default_factory=time.monotonic)
    error: WorkerError | None = None
    is_late: bool = False
    has_answered: bool = False

    def describe(self) -> dict[str, Any]:
        """Its row in `RayBatcher.stats`."""
        return {
            "node": self.index,
            "node_id": self.node_id,
            "address": self.address,
            "pid": self.pid,
            "state": self.state,
            "workers": list(self.workers),
        }

    def is_overdue(self) -> bool:
        """Whether the time for its next reply is over."""
        limit = self.requests[0].limit if self.requests else None
        return limit is not None and time.monotonic() >= self.since + limit

    def is_built(self) -> bool:
        """Whether its job is built, or it is gone."""
        return not self.requests or self.requests[0].asked.label != BUILD

    @property
    def state(self) -> str:
        """ "idle", "busy" or "gone"."""
        if self.error is not None:
            return "gone"
        return "busy" if self.requests else "idle"

    def __str__(self) -> str:
        return f"{self.noun} {self.index}" + (f" ({self.address})" if self.address else "")


def wait_for_ring(rings: SimpleQueue[None], seconds: float) -> None:
    """Waits for the next ring, for `seconds` at most."""
    with contextlib.suppress(Empty):
        rings.get(timeout=seconds)
