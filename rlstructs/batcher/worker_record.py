"""What the supervisor knows of one worker, and the rollouts of it that are not handed out yet."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from rlstructs.rollout.progress import Clock
from workers.futures import Future


@dataclass(eq=False)
class RolloutOrder:
    """A rollout that one worker was asked for.

    Attributes:
        number: how many were ordered of it before.
        asked: what became of it.
        is_lost: whether it was, with the worker.
        is_cut: whether the worker was told to end it early.
    """

    number: int
    asked: Future
    is_lost: bool = False
    is_cut: bool = False

    @property
    def is_there(self) -> bool:
        """Whether it has been run."""
        return self.asked.is_over and self.asked.error is None


@dataclass
class WorkerRecord:
    """What is known of one worker and of those before it in its place.

    Attributes:
        stream: which part of its streams of seeds it has; that of the first one ever is 0.
        n_restarts: how many were before it.
        n_lost: rollouts that were lost with them.
        orders: rollouts that were ordered and not handed out, the oldest first.
        n_ordered: how many rollouts were ordered in all.
        runs: whether an environment ran after the last rollout that was handed out.
        anew: number of the first rollout of the one that is there now, until all before it are handed out.
        since: when it began, in the time of `time.monotonic`.
        clock: what it said last of its time.
    """

    stream: int = 0
    n_restarts: int = 0
    n_lost: int = 0
    orders: deque[RolloutOrder] = field(default_factory=deque)
    n_ordered: int = 0
    runs: bool = True
    anew: int | None = None
    since: float = field(default_factory=time.monotonic)
    clock: Clock = field(default_factory=Clock)

    def begin_anew(self) -> None:
        """Another worker is in its place."""
        self.stream, self.n_restarts = self.stream + 1, self.n_restarts + 1
        self.since, self.clock = time.monotonic(), Clock()
        left = (order.number for order in self.orders if not (order.is_lost or order.is_there))
        self.anew = next(left, self.n_ordered)

    def hand_out(self) -> bool:
        """The oldest rollout is handed out; whether the next one is the first of another worker."""
        order = self.orders.popleft()
        self.runs = order.is_lost or order.asked.value.running != []
        if not order.is_lost and (self.anew is None or order.number >= self.anew):
            self.tell_time(order.asked.value.clock)
        return self.is_anew()

    def tell_time(self, told: Any) -> None:
        """What came with a rollout that is handed out: the fields of a `Clock`."""
        self.clock = Clock(*told)

    def is_anew(self) -> bool:
        """Whether everything of those before is handed out; says so once."""
        following = self.orders[0].number if self.orders else self.n_ordered
        if self.anew is None or following < self.anew:
            return False
        self.anew, self.runs = None, True
        return True

    def lose(self) -> None:
        """The worker is gone, and with it the rollout that it was running."""
        runs = self.runs
        for order in self.orders:
            if order.is_lost or order.number == self.anew:
                runs = True
            if order.is_lost:
                continue
            if not order.is_there:
                order.is_lost = True
                self.n_lost += runs  # or nothing was lost
                return
            runs = order.asked.value.running != []

    def state(self) -> dict[str, Any]:
        """What `Supervisor.renew` needs of it."""
        return {
            "stream": self.stream,
            "restarts": self.n_restarts,
            "lost_rollouts": self.n_lost,
            "seconds": time.monotonic() - self.since,
            **vars(self.clock),
        }


def times(elapsed: float, clock: Clock) -> dict[str, Any]:
    """What `RL_Batcher.stats` says of a worker's time, so many seconds after it began."""
    return {
        "steps": clock.steps,
        "steps_per_second": clock.steps / elapsed,
        "environment_seconds": clock.environment,
        "agent_seconds": clock.agent,
        "waiting_seconds": max(0.0, elapsed - clock.busy),
    }
