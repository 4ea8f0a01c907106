"""What is asked of Ray itself: to be there, machines to run on, and how large their object stores are."""

from __future__ import annotations

import copy
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlstructs.errors import OutOfMemoryError, SpecError

# Bytes: a reply that is smaller is sent as it is, and does not go through the object store, which takes 4 ms on two
# busy cores. Ray's own limit, a tenth of this, is that of the process which sends, so actors are told.
INLINE = 2**20
# Bytes: what is smaller is sent with each request, which Ray takes up to twice as much of.
SMALL = 50 * 1024
# Share of an object store above which Ray begins to write what is in it to a disk.
USABLE = 0.8
# Seconds that a machine has to answer.
CONNECTING = 1.0
# The resources that Ray has options of their own for.
OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}


def ray(what: str = "RayBatcher") -> Any:
    """The module, connected to a cluster or not.

    Args:
        what: needs it.

    Raises:
        ImportError: it is not installed; says what to install.
    """
    try:
        import ray
        from ray import init  # noqa: F401  a folder called ray, such as Ray's own in /tmp, is a module too
    except ImportError as error:
        raise ImportError(f"{what} needs ray: pip install 'rlstructs[ray]'") from error
    return ray


def connect(address: str | None) -> None:
    """Connects to a cluster, or starts one, if there is no connection yet."""
    if not ray().is_initialized():
        ray().init(address=address, log_to_driver=True)


def shared(value: Any, n_bytes: int) -> Any:
    """What to send for a value of so many bytes, as it is now: a reference, if it is better in the object store."""
    return copy.deepcopy(value) if n_bytes < SMALL else ray().put(value)


@dataclass(frozen=True)
class Machine:
    """One of the cluster.

    Attributes:
        node_id: as Ray names it.
        address, port: where Ray listens on it.
        resources: how much of each it has in all.
    """

    node_id: str
    address: str
    port: int
    resources: Mapping[str, float]

    @property
    def store_nbytes(self) -> int:
        """Size of its object store."""
        return int(self.resources.get("object_store_memory", 0))

    def answers(self) -> bool:
        """Whether it does; one that is dead is among those of the cluster until Ray notices, for a minute or more."""
        try:
            socket.create_connection((self.address, self.port), CONNECTING).close()
        except OSError:
            return False
        return True


def this_machine() -> str:
    """`node_id` of the one that this process is on."""
    node_id: str = ray().get_runtime_context().get_node_id()
    return node_id


def machines() -> dict[str, Machine]:
    """Those that are alive, by `node_id`."""
    found = (Machine(node["NodeID"], node["NodeManagerAddress"], node["NodeManagerPort"], node["Resources"])
             for node in ray().nodes() if node["Alive"])  # fmt: skip
    return {machine.node_id: machine for machine in found}


def free() -> dict[str, dict[str, float]]:
    """What of each resource nobody has reserved, by `node_id`; it is known some moments after it has changed."""
    from ray._private.state import available_resources_per_node  # Ray's public functions give the sum of all

    found: dict[str, dict[str, float]] = available_resources_per_node()
    return found


def is_death(error: Exception) -> bool:
    """Whether what Ray says in place of a reply is that the actor is gone, and not that the reply is."""
    from ray import exceptions

    gone = (exceptions.RayActorError, exceptions.NodeDiedError, exceptions.ActorUnschedulableError,
            exceptions.ActorPlacementGroupRemoved, exceptions.RuntimeEnvSetupError)  # fmt: skip
    return isinstance(error, gone) and not isinstance(error, exceptions.ActorUnavailableError)


def is_full(error: Exception) -> bool:
    """Whether Ray says that there is no place to keep a reply."""
    from ray import exceptions

    return isinstance(error, (exceptions.ObjectStoreFullError, exceptions.OutOfDiskError))


@dataclass(frozen=True)
class Placement:
    """Where actors run.

    Attributes:
        resources: what each reserves, by Ray's names; None for Ray's default, which reserves nothing.
        strategy: Ray's scheduling strategy; None to spread them over the machines that have what they reserve.
    """

    resources: Mapping[str, float] | None = None
    strategy: Any = None

    def check(self) -> None:
        """Raises SpecError if no machine has what an actor reserves, all of it being free."""
        if self.strategy is None and not self._fitting():
            raise SpecError(f"resources: no machine of the cluster has {self}; all together have "
                            f"{ray().cluster_resources()}")  # fmt: skip

    def choose(self, taken: list[str]) -> Machine | None:
        """The machine with the fewest actors, of those where one can run at once; None to leave it to Ray.

        Args:
            taken: on which machines those run that there are.
        """
        if self.strategy is not None:
            return None
        unreserved = free()
        with_room = (machine for machine in self._fitting()
                     if self._has_room(machine, unreserved.get(machine.node_id, {}), taken))  # fmt: skip
        fitting = sorted(with_room, key=lambda machine: taken.count(machine.node_id))
        return next((machine for machine in fitting if machine.answers()), None)

    def n_machines(self) -> int:
        """How many have what an actor reserves; 1 if none has."""
        return len(self._fitting()) or 1

    @property
    def _needed(self) -> Mapping[str, float]:
        return self.resources or {"CPU": 1}  # Ray asks for that much to place an actor

    def _has_room(self, machine: Machine, unreserved: Mapping[str, float], taken: list[str]) -> bool:
        """Whether an actor can run there; what those that were just made reserve is not known to Ray yet."""
        n, reserved = taken.count(machine.node_id), self.resources or {}
        return all(
            min(unreserved.get(name, 0), machine.resources[name] - n * reserved.get(name, 0)) >= amount
            for name, amount in self._needed.items()
        )

    def _fitting(self) -> list[Machine]:
        fitting = (machine for machine in machines().values()
                   if all(machine.resources.get(name, 0) >= n for name, n in self._needed.items()))  # fmt: skip
        return sorted(fitting, key=lambda machine: machine.node_id)

    def options(self, machine: Machine | None) -> dict[str, Any]:
        """Ray's options for an actor that is to run on a machine, if it can, or wherever it can first."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        resources = {"CPU": 0.0, **self.resources} if self.resources else {}  # with others Ray would reserve a CPU too
        options: dict[str, Any] = {name: resources.pop(key) for key, name in OPTIONS.items() if key in resources}
        strategy = self.strategy or "SPREAD"
        if machine is not None:
            strategy = NodeAffinitySchedulingStrategy(machine.node_id, soft=True)
        return {**options, "scheduling_strategy": strategy, "resources": resources, "max_restarts": 0,
                "max_task_retries": 0, "runtime_env": {"env_vars": {"RAY_max_direct_call_object_size": str(INLINE)}},
                }  # fmt: skip

    def __str__(self) -> str:
        return str(dict(self._needed))


def check_store(what: str, needs: Mapping[str, int]) -> None:
    """Raises OutOfMemoryError unless object stores can hold what they have to.

    Args:
        what: it is.
        needs: bytes by `node_id`.
    """
    found = machines()
    for node_id, nbytes in needs.items():
        machine = found.get(node_id)
        if machine is not None and nbytes > USABLE * machine.store_nbytes:
            raise OutOfMemoryError(
                f"{what} take {nbytes:,} bytes of the object store of {machine.address} (node {node_id[:8]} of Ray), "
                f"which has {machine.store_nbytes:,}, and writes what is above {USABLE:.0%} of it to a disk: start Ray "
                "there with a larger object_store_memory, "
                "or take fewer environments, timesteps or nodes, or less run_ahead"
            )
