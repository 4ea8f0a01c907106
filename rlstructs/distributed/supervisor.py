"""`NodeSupervisor`: sends requests to the nodes of a batcher, and replaces nodes that fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

from rlstructs.batcher.supervisor import Supervisor
from rlstructs.batcher.worker_record import CLOCK_FIELDS, RolloutOrder, WorkerRecord, describe_times
from rlstructs.distributed.node_job import NodeState
from rlstructs.distributed.pool import NodePool
from rlstructs.moments import Moments
from rlstructs.rollout.progress import Clock
from rlstructs.trace.board import Board
from rlstructs.workers.messages import Future

# The counters of failures in the state of a worker, and the fields of a new clock.
RESTARTS, LOST, ENV_RESTARTS = "restarts", "lost_rollouts", "env_restarts"
NEW_CLOCK = dataclasses.asdict(Clock())


@dataclass(eq=False)
class NodeRecord(WorkerRecord):
    """The record of one node, and of those that it replaced.

    Attributes:
        states: the states of its workers after its last rollout that was handed out; None if there was none.
        n_lost_in_states: how many of its lost rollouts are in the states of its workers.
    """

    states: list[dict[str, Any]] | None = None
    n_lost_in_states: int = 0

    def set_clock(self, clock: Any) -> None:
        self.states = clock

    def add_env_restarts(self, reply: Any) -> None:
        """Does nothing: the node counts, in the states of its workers."""

    def begin_successor(self) -> None:
        super().begin_successor()
        self.states = None

    def lose(self) -> None:
        """Marks the rollout that was running as lost.

        If only a reply was lost, replies of later rollouts may have come. They continue from the lost steps, so these
        rollouts are run again.
        """
        known = {order.number for order in self.orders if order.is_lost}
        super().lose()
        for lost in [order.number for order in self.orders if order.is_lost and order.number not in known]:
            self.discard_replies(lost + 1)

    def discard_replies(self, number: int) -> None:
        """Discards the replies of rollouts from this number on: a successor runs them."""
        for order in self.orders:
            if order.number >= number and order.is_done:
                order.request = Future(order.request.index, order.request.label)

    def with_handed_out_clocks(self, states: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the present states with the clocks of the last handed-out rollouts.

        A node that runs ahead is already further.
        """
        then = self.states or [{RESTARTS: None}] * len(states)
        return [
            {**now, **({name: before[name] for name in NEW_CLOCK} if before[RESTARTS] == now[RESTARTS] else NEW_CLOCK)}
            for now, before in zip(states, then, strict=True)
        ]


class NodeSupervisor(Supervisor):
    """Supervises nodes that run rollouts, each with workers of its own.

    A node replaces its own workers. All workers of a node that is gone have successors on another node, which continue
    with the next seeds of their streams.
    """

    noun, record_class, job_state_class = "node", NodeRecord, NodeState

    def __init__(self, pool: NodePool, policy: str, max_restarts: int | None, run_ahead: int, board: Board) -> None:
        super().__init__(pool, policy, max_restarts, run_ahead, board)
        self._nodes = pool
        # Requests whose reply nobody has waited for, each with the number of the node's first rollout after it.
        self._unconfirmed: list[tuple[Future, int]] = []

    @property
    def record_sizes(self) -> list[int]:
        """The number of workers of each node."""
        return [len(node.workers) for node in self._nodes.nodes]

    @property
    def n_restarts(self) -> int:
        """The number of workers that were replaced, by their nodes or with them."""
        return sum(state[RESTARTS] for state in self.get_states())

    def send_infos(self, infos: Any) -> None:
        """Puts `agent_info` and `env_info` into force for later requests.

        They are pickled, or a reference of Ray to the pickle.
        """
        with self.defer_interrupts():
            self._lasting["set_infos"] = (infos,)  # keeps its first place: before the reset
            requests = self.pool.ask("set_infos", infos)
        self._add_unconfirmed(requests)

    def update(self, packed: Any, record_sent: Callable[[list[Future]], None]) -> list[Future]:
        requests = super().update(packed, record_sent)
        self._add_unconfirmed(requests)
        return requests

    def wait(self, n: int | None = None, cut: Callable[[int, int], None] | None = None) -> dict[int, RolloutOrder]:
        while True:
            orders = super().wait(n, cut)
            failures = self._check_unconfirmed()
            if not failures:
                return orders
            self.replace_failed(failures)

    def list_statistics(self, orders: Mapping[int, RolloutOrder]) -> list[dict[str, Moments]]:
        """Lists the moments that each worker gathered, in the order of the workers."""
        return list(chain.from_iterable(cast(list[list[dict[str, Moments]]], super().list_statistics(orders))))

    def get_states(self) -> list[dict[str, Any]]:
        """Returns the arguments of `renew`, by worker, from its node's last reply."""
        both = zip(self._nodes.nodes, cast(list[NodeRecord], self.records), strict=True)
        return [state for node, record in both for state in record.with_handed_out_clocks(node.report["states"])]

    def renew(self, states: list[dict[str, Any]], seeds: Sequence[int], agent_seeds: Sequence[int] | None) -> None:
        """Makes every worker replace its environments; nodes derive the seeds themselves."""
        self.settle()
        self.records[:] = [NodeRecord(n_ordered=record.n_ordered) for record in self.records]
        self._lasting.pop("reset", None)
        for node in self._nodes.nodes:  # if it turns out to be dead, its successor continues the same streams
            node.report["states"] = states[node.workers.start : node.workers.stop]
        self._call("renew", states, is_lasting=False)
        for node, record in zip(self._nodes.nodes, cast(list[NodeRecord], self.records), strict=True):
            record.states = node.report["states"]

    def stats(self) -> list[dict[str, Any]]:
        """Returns the entries of `RL_Batcher.stats` for each worker, with its node.

        They come from the node's last reply.
        """
        return [
            {
                "worker": index,
                "node": node.index,
                "pid": pid,
                "state": node.state,
                **{name: state[name] for name in (RESTARTS, LOST, ENV_RESTARTS)},
                **describe_times(state["seconds"], Clock(*(state[name] for name in CLOCK_FIELDS))),
            }
            for node in self._nodes.nodes
            for index, pid, state in zip(node.workers, node.report["pids"], node.report["states"], strict=True)
        ]

    def _add_unconfirmed(self, requests: list[Future]) -> None:
        """Keeps requests whose reply nobody waits for.

        Raises if a node is gone and will not be replaced.
        """
        self._unconfirmed += [(each, self.records[each.index].n_ordered) for each in requests if not each.is_over]
        self._raise_gone(requests)

    def _check_unconfirmed(self) -> dict[int, BaseException]:
        """Finds nodes that missed a request before their next rollouts.

        Returns Ray's errors, by node. An exception of the job is not found here: it comes with the rollout itself.

        Raises:
            Exception: the error of the first request, if nodes are not replaced.
        """
        self._unconfirmed = [each for each in self._unconfirmed if not each[0].is_over or each[0].error]
        failures: dict[int, BaseException] = {}
        for request, number in self._unconfirmed:
            record = cast(NodeRecord, self.records[request.index])
            if request.error is not None and record.orders[0].number >= number:
                if not self.can_replace:
                    raise request.error
                failures.setdefault(request.index, request.error)
                record.discard_replies(number)
        return failures

    def _replace(self, indexes: list[int]) -> dict[int, BaseException]:
        nodes, records = self._nodes.nodes, cast(list[NodeRecord], self.records)
        n_lost = [record.n_lost_in_states for record in records]
        states = [nodes[index].report["states"] for index in indexes]
        try:
            return super()._replace(indexes)
        except BaseException as error:
            if not isinstance(error, Exception):  # interrupted: the next call replaces them
                for record, n in zip(records, n_lost, strict=True):
                    record.n_lost_in_states = n
                for index, state in zip(indexes, states, strict=True):
                    nodes[index].report["states"] = state
            raise

    def _make_successor_arguments(self, index: int) -> tuple[Any, ...]:
        """Returns the states from which the workers of a successor continue.

        Each has one more restart.
        """
        self._unconfirmed = [(each, number) for each, number in self._unconfirmed if each.index != index]
        record = cast(NodeRecord, self.records[index])
        n_lost, record.n_lost_in_states = record.n_lost - record.n_lost_in_states, record.n_lost
        report = self._nodes.nodes[index].report
        states = [
            {**state, **NEW_CLOCK, RESTARTS: state[RESTARTS] + 1, LOST: state[LOST] + n_lost}
            for state in report["states"]
        ]
        report["states"] = states  # for the successor's successor, if the successor never replies
        return (states,)
