"""The supervisor's record of one worker, with its rollouts not yet handed out."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rlstructs.rollout.progress import Clock
from rlstructs.workers.messages import Future

R = TypeVar("R", bound="WorkerRecord")

# The fields of a clock, which a record's state holds too.
CLOCK_FIELDS = tuple(each.name for each in dataclasses.fields(Clock))


@dataclass(eq=False)
class RolloutOrder:
    """An order of one rollout from one worker.

    Attributes:
        number: how many rollouts were ordered from the worker before this one.
        request: the request, and its outcome.
        is_lost: whether the rollout was lost with the worker.
        is_cut: whether the worker was told to end it early.
    """

    number: int
    request: Future
    is_lost: bool = False
    is_cut: bool = False

    def take_exact(self) -> tuple[int, bool, bool, Any]:
        """Returns the state for `of_exact`, of an order that is done or lost."""
        return self.number, self.is_lost, self.is_cut, None if self.is_lost else self.request.value

    @classmethod
    def of_exact(cls, worker: int, behind: int, state: tuple[int, bool, bool, Any]) -> RolloutOrder:
        """Makes an order that is done or lost.

        Its worker now counts `behind` updates less.
        """
        number, is_lost, is_cut, reply = state
        reply = None if is_lost else reply._replace(version=reply.version - behind)
        return cls(number, Future(worker, "rollout", True, reply), is_lost, is_cut)

    @property
    def is_done(self) -> bool:
        """Whether the worker has replied that the rollout is over."""
        return self.request.is_over and self.request.error is None


@dataclass
class WorkerRecord:
    """The record of one worker, and of those that it replaced.

    Attributes:
        stream: the index of its seeds: 0 at first, one more after each replacement and each restored state.
        n_restarts: how many workers were replaced in this place.
        n_lost: how many rollouts were lost with them.
        env_restarts: how often each environment was made anew in rollouts that were handed out.
        orders: rollouts that were ordered and not handed out, the oldest first.
        n_ordered: how many rollouts were ordered in all.
        running: the environments that ran after the last rollout that was handed out, counted from the worker's first;
            None for all of them.
        first_number: the number of a successor's first rollout, until all earlier ones are handed out; otherwise None.
        since: when the worker began, by `time.monotonic`, in seconds.
        clock: its clock, as of its last rollout that was handed out.
    """

    stream: int = 0
    n_restarts: int = 0
    n_lost: int = 0
    env_restarts: list[int] = field(default_factory=list)
    orders: deque[RolloutOrder] = field(default_factory=deque)
    n_ordered: int = 0
    running: list[int] | None = None
    first_number: int | None = None
    since: float = field(default_factory=time.monotonic)
    clock: Clock = field(default_factory=Clock)

    @classmethod
    def restore(cls, state: Mapping[str, Any], n_ordered: int) -> WorkerRecord:
        """Makes the record of a worker that continues from a state.

        It takes the next seeds of the worker's streams.
        """
        return cls(
            stream=state["stream"] + 1,
            n_restarts=state["restarts"],
            n_lost=state["lost_rollouts"],
            env_restarts=list(state["env_restarts"]),
            n_ordered=n_ordered,
            since=time.monotonic() - state["seconds"],
            clock=Clock(*(state[name] for name in CLOCK_FIELDS)),
        )

    def get_state(self) -> dict[str, Any]:
        """Returns what `restore` needs."""
        return {
            "stream": self.stream,
            "restarts": self.n_restarts,
            "lost_rollouts": self.n_lost,
            "env_restarts": list(self.env_restarts),
            "seconds": time.monotonic() - self.since,
            **vars(self.clock),
        }

    def take_exact(self, begins_episodes: bool) -> dict[str, Any]:
        """Returns the state for `of_exact`.

        Args:
            begins_episodes: whether the worker begins new episodes: like a successor's, they come after what was not
                handed out, with other seeds.
        """
        fields = {**vars(self), "orders": [order.take_exact() for order in self.orders]}
        fields["since"] = time.monotonic() - self.since
        return fields | ({"stream": self.stream + 1, "first_number": self.n_ordered} if begins_episodes else {})

    @classmethod
    def of_exact(cls: type[R], worker: int, behind: int, state: Mapping[str, Any]) -> R:
        """Makes the record of a worker that continues from an exact state.

        See `RolloutOrder.of_exact`.
        """
        orders = deque(RolloutOrder.of_exact(worker, behind, order) for order in state["orders"])
        return cls(**{**state, "orders": orders, "since": time.monotonic() - state["since"]})

    def describe(self) -> dict[str, Any]:
        """The worker's entries of `RL_Batcher.stats`."""
        counters = {"restarts": self.n_restarts, "lost_rollouts": self.n_lost, "env_restarts": list(self.env_restarts)}
        return counters | describe_times(time.monotonic() - self.since, self.clock)

    def clear(self) -> None:
        """Drops the orders: a reset follows, after which every environment runs."""
        self.orders.clear()
        self.running, self.first_number = None, None

    @property
    def is_running(self) -> bool:
        """Whether any environment runs."""
        return self.running != []

    def begin_successor(self) -> None:
        """Notes that a successor takes the worker's place."""
        self.stream, self.n_restarts = self.stream + 1, self.n_restarts + 1
        self.since, self.clock = time.monotonic(), Clock()
        left = (order.number for order in self.orders if not (order.is_lost or order.is_done))
        self.first_number = next(left, self.n_ordered)

    def hand_out(self) -> None:
        """Removes the oldest rollout, which is handed out."""
        order = self.orders.popleft()
        self.running = None if order.is_lost else order.request.value.running
        if not order.is_lost:
            self.add_env_restarts(order.request.value)
        if not order.is_lost and (self.first_number is None or order.number >= self.first_number):
            self.set_clock(order.request.value.clock)

    def add_env_restarts(self, reply: Any) -> None:
        """Counts the environments that were made anew before a reply."""
        for k, n in (reply.env_restarts or {}).items():
            self.env_restarts[k] += n

    def set_clock(self, clock: Any) -> None:
        """Stores the clock that came with a rollout, given by its fields."""
        self.clock = Clock(*clock)

    def pass_to_successor(self) -> bool:
        """Returns True once, when the next rollout to hand out is a successor's first."""
        following = self.orders[0].number if self.orders else self.n_ordered
        if self.first_number is None or following < self.first_number:
            return False
        self.first_number, self.running = None, None
        return True

    def lose(self) -> None:
        """Marks the rollout that was running as lost, because the worker is gone."""
        is_running = self.is_running
        for order in self.orders:
            if order.is_lost or order.number == self.first_number:
                is_running = True
            if order.is_lost:
                continue
            if not order.is_done:
                order.is_lost = True
                self.n_lost += is_running  # without running environments nothing was lost
                return
            is_running = order.request.value.running != []


class Records(list[Any]):  # of WorkerRecord, or a subclass
    """The records of all workers: which rollouts are under way, and which environments run."""

    def clear_orders(self) -> None:
        """Drops all orders: a reset or a load follows."""
        for record in self:
            record.clear()

    def get_states(self) -> list[dict[str, Any]]:
        """Returns the states for `WorkerRecord.restore`, by worker."""
        return [record.get_state() for record in self]

    def take_exact(self, jobs: Sequence[Any]) -> list[dict[str, Any]]:
        """Returns the states for `load_exact`; `jobs` are the exact states of the workers' jobs."""
        return [record.take_exact(job.begins_episodes) for record, job in zip(self, jobs, strict=True)]

    def load_exact(self, states: Sequence[Mapping[str, Any]], behind: int) -> None:
        """Continues from an exact state, whose jobs are loaded.

        Workers count `behind` updates less than then.
        """
        self[:] = [type(self[worker]).of_exact(worker, behind, state) for worker, state in enumerate(states)]

    def list_rollouts(self) -> list[Future]:
        """Lists the requests of all rollouts that were ordered, and not lost."""
        return [order.request for record in self for order in record.orders if not order.is_lost]

    def find_oldest(self, n: int | None) -> tuple[list[Future], int | None]:
        """Finds the oldest requests, and how many of them to wait for.

        With `n`, only those of running workers.
        """
        records = [record for record in self if n is None or record.is_running]
        requests = [record.orders[0].request for record in records if not record.orders[0].is_lost]
        return requests, None if n is None else n - (len(records) - len(requests))

    def list_done(self) -> dict[int, RolloutOrder]:
        """Lists the oldest rollouts that are done or lost, by worker index."""
        oldest = {index: record.orders[0] for index, record in enumerate(self)}
        return {index: order for index, order in oldest.items() if order.is_lost or order.is_done}

    def hand_out(self, orders: Mapping[int, RolloutOrder]) -> bool:
        """Removes the oldest rollouts of these workers.

        Returns whether a successor's first one is still to come.
        """
        for index in orders:
            self[index].hand_out()
        return any(record.first_number is not None for record in self)

    def take_successors(self) -> set[int]:
        """Returns, once each, the workers whose next rollout is a successor's first."""
        return {index for index, record in enumerate(self) if record.pass_to_successor()}


def describe_times(elapsed: float, clock: Clock) -> dict[str, Any]:
    """Returns the shares of a worker's `elapsed` seconds, as `RL_Batcher.stats` names them."""
    return {
        "steps": clock.steps,
        "steps_per_second": clock.steps / elapsed,
        "environment_seconds": clock.environment,
        "agent_seconds": clock.agent,
        "waiting_seconds": max(0.0, elapsed - clock.busy),
    }
