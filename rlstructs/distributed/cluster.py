"""Queries to Ray: its connection, its machines, and their object stores."""

from __future__ import annotations

import copy
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlstructs.errors import OutOfMemoryError, SpecError

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
