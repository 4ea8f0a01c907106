"""The nodes of a batcher, and what becomes of those that fail: a `Supervisor` of nodes in place of workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

from rlstructs.batcher.supervisor import Supervisor
from rlstructs.batcher.worker_record import RolloutOrder, WorkerRecord, times
from rlstructs.distributed.pool import NodePool
from rlstructs.moments import Moments
from rlstructs.rollout.progress import Clock
from workers.futures import Future

# The counters of failures in what `Supervisor.state` gives for a worker, and what a new clock shows.
RESTARTS, LOST = "restarts", "lost_rollouts"
BEGUN = dataclasses.asdict(Clock())


@dataclass(eq=False)
class NodeRecord(WorkerRecord):
    """A node.

    Attributes:
        told: what `Supervisor.state` gave on it after the last rollout that was handed out; None if there was none.
    """

    told: list[dict[str, Any]] | None = None

    def tell_time(self, told: Any) -> None:
        self.told = told

    def begin_anew(self) -> None:
        super().begin_anew()
        self.told = None

    def lose(self) -> None:
        """Marks what was running as lost.

        Where only a reply is lost, later ones may have come; they continue from steps that nobody has, and are run
        again.
        """
        known = {order.number for order in self.orders if order.is_lost}
        super().lose()
        for lost in [order.number for order in self.orders if order.is_lost and order.number not in known]:
            self.drop(lost + 1)

    def drop(self, number: int) -> None:
        """Rollouts from this number on have not been run."""
        for order in self.orders:
            if order.number >= number and order.is_there:
                order.asked = Future(order.asked.index, order.asked.label)

    def timed(self, now: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What is known now, with the clocks of what was handed out: a node that runs ahead is further."""
        then = self.told or [{RESTARTS: None}] * len(now)
        return [
            {**worker, **({name: before[name] for name in BEGUN} if before[RESTARTS] == worker[RESTARTS] else BEGUN)}
            for worker, before in zip(now, then, strict=True)
        ]


class NodeSupervisor(Supervisor):
    """Nodes that run rollouts, each with workers of its own.

    A node mends by itself what happens to its workers. One that is gone takes all of them with it: each has a
    successor, on another node, which goes on with the next seed of its stream.
    """

    noun, record_class = "node", NodeRecord

    def __init__(self, pool: NodePool, policy: str, max_restarts: int | None, run_ahead: int) -> None:
        super().__init__(pool, policy, max_restarts, run_ahead)
        self._nodes = pool
        # How many of the rollouts that were lost with a node its workers' counters know.
        self._n_told = [0] * pool.n_workers
        # What nodes were told without waiting for a reply, and which rollouts of theirs are behind it.
        self._unheard: list[tuple[Future, int]] = []

    @property
    def n_workers(self) -> list[int]:
        """How many workers each node has."""
        return [len(node.workers) for node in self._nodes.nodes]

    @property
    def n_restarts(self) -> int:
        """How many workers were replaced, by their nodes or with them."""
        return sum(worker[RESTARTS] for worker in self.state())

    def inform(self, infos: Any) -> None:
        """Has nodes take `agent_info` and `env_info`, pickled, or a reference of that, for what comes behind."""
        with self.asking():
            self._orders["inform"] = (infos,)  # where it stands first: before the reset
            asked = self.pool.ask("inform", infos)
        self._hear_of(asked)

    def update(self, packed: Any, sent: Callable[[list[Future]], None]) -> list[Future]:
        asked = super().update(packed, sent)
        self._hear_of(asked)
        return asked

    def collect(self, n: int | None = None, cut: Callable[[int, int], None] | None = None) -> dict[int, RolloutOrder]:
        while True:
            orders = super().collect(n, cut)
            failures = self._unheard_of()
            if not failures:
                return orders
            self.mend(failures)

    def gathered(self, orders: Mapping[int, RolloutOrder]) -> list[dict[str, Moments]]:
        """What each worker gathered, in the order of the workers."""
        return list(chain.from_iterable(cast(list[list[dict[str, Moments]]], super().gathered(orders))))

    def state(self) -> list[dict[str, Any]]:
        """Of each worker what `renew` needs, as its node said last."""
        both = zip(self._nodes.nodes, cast(list[NodeRecord], self.records), strict=True)
        return [worker for node, record in both for worker in record.timed(node.report["state"])]

    def renew(self, state: list[dict[str, Any]], seeds: Sequence[int], agent_seeds: Sequence[int] | None) -> None:
        """Has every worker make new environments, with the next seeds of its stream; nodes find them by themselves."""
        self.settle()
        self.records = [NodeRecord(n_ordered=record.n_ordered) for record in self.records]
        self._n_told = [0] * len(self.records)
        self._orders.pop("reset", None)
        for node in self._nodes.nodes:  # one that is found dead has a successor of the same streams
            node.report["state"] = state[node.workers.start : node.workers.stop]
        self._call("renew", state, is_lasting=False)
        for node, record in zip(self._nodes.nodes, cast(list[NodeRecord], self.records), strict=True):
            record.told = node.report["state"]

    def stats(self) -> list[dict[str, Any]]:
        """For each worker what `RL_Batcher.stats` says of it, and its node; as of the node's last reply."""
        return [
            {
                "worker": index,
                "node": node.index,
                "pid": pid,
                "state": node.state,
                **{name: worker[name] for name in (RESTARTS, LOST)},
                **times(worker["seconds"], Clock(*(worker[name] for name in BEGUN))),
            }
            for node in self._nodes.nodes
            for index, pid, worker in zip(node.workers, node.report["pids"], node.report["state"], strict=True)
        ]

    def _hear_of(self, asked: list[Future]) -> None:
        """Notes what nodes were told; raises at once if one is gone that is not to be replaced."""
        self._unheard += [(each, self.records[each.index].n_ordered) for each in asked if not each.is_over]
        self._raise_gone(asked)

    def _unheard_of(self) -> dict[int, BaseException]:
        """Which nodes have run the rollouts that come next without what they were told before, and why.

        What a job raises comes with the rollout itself: this is what Ray has not brought.

        Raises:
            Exception: that, of the first one, if nodes are not to be replaced.
        """
        self._unheard = [told for told in self._unheard if not told[0].is_over or told[0].error]
        failures: dict[int, BaseException] = {}
        for asked, number in self._unheard:
            record = cast(NodeRecord, self.records[asked.index])
            if asked.error is not None and record.orders[0].number >= number:
                if not self.mends:
                    raise asked.error
                failures.setdefault(asked.index, asked.error)
                record.drop(number)
        return failures

    def _replace(self, indexes: list[int]) -> dict[int, BaseException]:
        nodes, n_told = self._nodes.nodes, list(self._n_told)
        states = [nodes[index].report["state"] for index in indexes]
        try:
            return super()._replace(indexes)
        except BaseException as error:
            if not isinstance(error, Exception):  # interrupted: others will take their place
                self._n_told = n_told
                for index, state in zip(indexes, states, strict=True):
                    nodes[index].report["state"] = state
            raise

    def _succession(self, index: int) -> tuple[Any, ...]:
        """What the workers of a node that is gone have been through; each has one more restart."""
        self._unheard = [(each, number) for each, number in self._unheard if each.index != index]
        n_lost = self.records[index].n_lost - self._n_told[index]
        self._n_told[index] = self.records[index].n_lost
        report = self._nodes.nodes[index].report
        workers = [
            {**worker, **BEGUN, RESTARTS: worker[RESTARTS] + 1, LOST: worker[LOST] + n_lost}
            for worker in report["state"]
        ]
        report["state"] = workers  # for the successor's successor, if that never says anything
        return (workers,)
