"""The workers of a batcher, and what becomes of those that fail.

With "raise" the first failure is raised at once. With "restart" a worker that died, raised or was late is
replaced: its successor is built from the same factories with the next seed of its stream, gets the slots and
the last update, and resets its environments. The others' work is kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from rlstructs.batcher.arguments import RESTART
from rlstructs.batcher.worker_record import RolloutOrder, WorkerRecord, times
from rlstructs.errors import SpecError
from rlstructs.moments import Moments, merge_parts
from rlstructs.rollout.probe import JobDescription
from rlstructs.rollout.progress import Clock
from rlstructs.shared.slot_buffers import SlotBuffers
from workers import WorkerError
from workers.futures import Future
from workers.interrupts import defer_first_interrupt, defer_interrupt
from workers.pool_protocol import Pool

logger = logging.getLogger("rlstructs")

# A successor that does not come up so often in a row never will.
MAX_ATTEMPTS = 3
NOTHING: Mapping[int, Any] = {}


class Supervisor:
    """Workers that run rollouts.

    A subclass may supervise something else than single workers.

    Args:
        pool: the workers, with their jobs built.
        policy: "raise" or "restart".
        max_restarts: how many failures may be mended in all; None for any number.
        run_ahead: how many rollouts may be ordered before the oldest is handed out, and that one not counted.
    """

    #: What one of them is called in messages, and what holds what is known of one.
    noun, record_class = "worker", WorkerRecord

    def __init__(self, pool: Pool, policy: str, max_restarts: int | None, run_ahead: int = 0) -> None:
        self.pool = pool
        self.records = [self.record_class() for _ in range(pool.n_workers)]
        self._max_restarts, self._run_ahead = max_restarts, run_ahead
        # What a job in this process raises is raised: it cannot be replaced.
        self.mends = policy == RESTART and pool.can_restart
        self._replaced: set[int] = set()
        self._failed: dict[int, BaseException] = {}  # those who are yet to be replaced
        #: What all environments have gathered together, by name; replaced, never changed.
        self.statistics: dict[str, Moments] = {}
        # What a successor is told, in this order, before it takes part.
        self._orders: dict[str, tuple[Any, ...]] = {"describe": ()}
        self._n_envs: int | None = None
        # What all were asked last, beside rollouts: who is interrupted while it is waited for leaves it under way.
        self.called: list[Future] = []
        #: Whether some workers may have been told of what others were not.
        self.is_halfway = False

    @property
    def n_workers(self) -> list[int]:
        """How many workers each record stands for."""
        return [1] * len(self.records)

    @property
    def n_restarts(self) -> int:
        """How many workers were replaced."""
        return sum(record.n_restarts for record in self.records)

    def close(self) -> None:
        """Ends every worker. Where workers are mended, what they have raised before is lost with their rollouts."""
        self.pool.close(with_earlier=not self.mends)

    def describe(self) -> list[JobDescription]:
        """Asks every job for the number of its environments, and the first for its specs."""
        found: list[JobDescription] = self.pool.call("describe")
        self._n_envs = found[0].n_envs
        return found

    def attach(self, slot_buffers: SlotBuffers) -> None:
        """Gives every worker its slots."""
        self._orders["attach"] = (slot_buffers,)
        self.pool.call("attach", slot_buffers)

    def update(self, packed: Any, sent: Callable[[list[Future]], None]) -> list[Future]:
        """Updates every agent: at once, or, with a run-ahead, behind the rollouts that were ordered before.

        Args:
            packed: the update.
            sent: called with what was asked, as soon as all were.
        """
        if not self._run_ahead:
            return self._call("update", packed, sent=sent)
        self.mend_gone()
        with self.asking():
            self._remember("update", (packed,))
            asked = self.pool.ask("update", packed)
            sent(asked)
        self._raise_gone(asked)
        return asked

    def know(self, statistics: dict[str, Moments]) -> None:
        """Has environments go by these from the next request on, and those of successors."""
        self.statistics = statistics
        if "reset" in self._orders:
            self._orders["reset"] = (statistics,)

    def state(self) -> list[dict[str, Any]]:
        """Of each worker what `renew` needs."""
        return [record.state() for record in self.records]

    def renew(
        self, state: list[dict[str, Any]], seeds: Sequence[int], agent_seeds: Sequence[int] | None
    ) -> None:
        """Has every worker make new environments, with these seeds; rollouts that were not handed out are dropped.

        Args:
            state: what `state` gave: where counters go on.
            seeds, agent_seeds: as in `JobSettings`.
        """
        self.settle()
        names = [each.name for each in dataclasses.fields(Clock)]
        for index, kept in enumerate(state):
            self.records[index] = WorkerRecord(
                stream=kept["stream"] + 1,
                n_restarts=kept["restarts"],
                n_lost=kept["lost_rollouts"],
                n_ordered=self.records[index].n_ordered,
                since=time.monotonic() - kept["seconds"],
                clock=Clock(*(kept[name] for name in names)),
            )
        self._orders.pop("reset", None)
        clocks = [record.clock.fields() for record in self.records]
        self._call("renew", seeds, agent_seeds, clocks, is_lasting=False)

    def reset(self) -> None:
        """Resets every environment; rollouts that were not handed out are dropped."""
        self.settle()
        for record in self.records:
            record.orders.clear()
            record.runs, record.anew = True, None
        self._call("reset", self.statistics)

    def settle(self) -> None:
        """Waits until no rollout is under way, nor anything that was interrupted."""
        self.pool.settle(self.called + [order.asked for record in self.records for order in record.orders])
        self.called = []

    def begin(self, prepare: Callable[[int, int], None]) -> None:
        """Orders as many rollouts as may be ordered.

        Args:
            prepare: called with the index of a worker and the number of a rollout before that is ordered.
        """
        for _ in range(self._run_ahead + 1):
            numbers: dict[int, list[int]] = {}
            for index, record in enumerate(self.records):
                if len(record.orders) <= self._run_ahead:
                    prepare(index, record.n_ordered)
                    numbers.setdefault(record.n_ordered, []).append(index)
                    record.n_ordered += 1
            for number, indexes in numbers.items():
                with self.asking():
                    asked = self.pool.ask("rollout", number, self.statistics, only=indexes)
                    for each in asked:
                        self.records[each.index].orders.append(RolloutOrder(number, each))
                self._raise_gone(asked)

    def is_ready(self, n: int | None = None) -> bool:
        """Whether `collect` would not have to wait for rollouts."""
        heads, n = self._heads(n)
        return self.pool.is_settled(heads, n, fails_fast=not self.mends)

    def collect(self, n: int | None = None, cut: Callable[[int, int], None] | None = None) -> dict[int, RolloutOrder]:
        """The oldest rollouts that are there, or were lost, by worker index.

        May be interrupted and called again; `forget` says that they are handed out.

        Args:
            n: how many are waited for; None for all.
            cut: called with the index of each worker that is late, once `n` are there, and with the number of the
                rollout after the one that is to end, and is then waited for.
        """
        heads, n = self._heads(n)
        self.pool.settle(heads, n, fails_fast=not self.mends)
        if not self.mends:
            _raise_first(heads)
        if cut is not None:
            self.cut_late(cut)
            return self.collect()
        failures = {asked.index: asked.error for asked in heads if asked.error is not None}
        if self.mends:
            self.mend(self.pool.check() | failures)
        heads_now = {index: record.orders[0] for index, record in enumerate(self.records)}
        return {index: order for index, order in heads_now.items() if order.is_lost or order.is_there}

    def cut_late(self, cut: Callable[[int, int], None]) -> None:
        """Has those who are late end their oldest rollout after the step that they are in; `cut` as of `collect`."""
        for index, record in enumerate(self.records):
            order = record.orders[0]
            if not (order.asked.is_over or order.is_cut):
                cut(index, order.number + 1)
                order.is_cut = True

    def _heads(self, n: int | None) -> tuple[list[Future], int | None]:
        """What was asked first of those who run something, or of all (n is None), and of how many it is awaited."""
        records = [record for record in self.records if n is None or record.runs]
        asked = [record.orders[0].asked for record in records if not record.orders[0].is_lost]
        return asked, None if n is None else n - (len(records) - len(asked))

    def forget(self, orders: Mapping[int, RolloutOrder] = NOTHING) -> set[int]:
        """Takes away what was handed out; the workers whose next rollout is the first of a successor."""
        anew = {index for index in orders if self.records[index].hand_out()}
        return anew | {index for index, record in enumerate(self.records) if record.is_anew()}

    def take_replaced(self) -> set[int]:
        """The workers that were replaced since the last call."""
        replaced, self._replaced = self._replaced, set()
        return replaced

    def gathered(self, orders: Mapping[int, RolloutOrder]) -> list[dict[str, Moments]]:
        """What each worker gathered in these rollouts, in the order of the workers."""
        return [order.asked.value.statistics for _, order in sorted(orders.items()) if not order.is_lost]

    def learn(self, orders: Mapping[int, RolloutOrder]) -> None:
        """Adds what rollouts gathered to the statistics, once, in the order of the workers."""
        self.know(merge_parts(self.statistics, self.gathered(orders)))

    def stats(self) -> list[dict[str, Any]]:
        """For each worker what `RL_Batcher.stats` says of it."""
        return [
            {
                "worker": index,
                "pid": pid,
                "state": state,
                "restarts": record.n_restarts,
                "lost_rollouts": record.n_lost,
                **times(time.monotonic() - record.since, record.clock),
            }
            for index, (pid, state, record) in enumerate(
                zip(self.pool.pids, self.pool.states, self.records, strict=True)
            )
        ]

    def ask_some(
        self, method: str, arguments: tuple[Any, ...], only: list[int]
    ) -> tuple[dict[int, Any], dict[int, BaseException]]:
        """What some workers reply, and what became of those that did not."""
        asked: list[Future] = []
        if only:
            with self.asking():
                asked = self.pool.ask(method, *arguments, only=only)
        self.pool.settle(asked)
        return (
            {each.index: each.value for each in asked if each.error is None},
            {each.index: each.error for each in asked if each.error is not None},
        )

    def _raise_gone(self, asked: list[Future]) -> None:
        """Raises at once if a worker that is not to be replaced is gone; what a job raises comes with its rollout."""
        if not self.mends:
            _raise_first([each for each in asked if isinstance(each.error, WorkerError)])

    def _remember(self, method: str, arguments: tuple[Any, ...]) -> None:
        """Has successors asked the same from now on."""
        self._orders.pop(method, None)
        self._orders[method] = arguments

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Puts off Ctrl-C until all workers are told; not for a job in this process, which may take long."""
        if not self.pool.can_restart:
            yield
            return
        with defer_first_interrupt():
            self.is_halfway = True
            yield
            self.is_halfway = False

    def _call(
        self, method: str, *arguments: Any, is_lasting: bool = True, sent: Callable[[list[Future]], None] | None = None
    ) -> list[Future]:
        """Asks all workers, and, if that is lasting, successors from now on.

        Args:
            sent: if given, is called with what was asked, as soon as all were; and replies are waited for until all
                are there, whatever is interrupted.
        """
        self.mend_gone()  # first: who takes the place of one of these is asked below
        with contextlib.nullcontext() if sent is None else defer_first_interrupt():
            with self.asking():
                if self.mends and is_lasting:
                    self._remember(method, arguments)
                self.called = asked = self.pool.ask(method, *arguments)
                if sent is not None:
                    sent(asked)
            self.pool.settle(asked, fails_fast=not self.mends)
        if not self.mends:
            _raise_first(asked)
        self.mend({each.index: each.error for each in asked if each.error is not None})
        return asked

    def mend_gone(self) -> None:
        """Puts successors in the place of workers that are gone, if they are to have any."""
        if self.mends:
            self.mend(self.pool.check())

    def mend(self, failures: dict[int, BaseException]) -> None:
        """Puts successors in the place of workers that failed, and of those of an earlier call that was interrupted.

        Raises:
            Exception: the first failure, when there were too many, or that of a successor which never comes up.
        """
        for index, error in failures.items():
            if index not in self._failed:
                with defer_interrupt():
                    self._failed[index] = error
                    self.records[index].lose()
        failures = dict(self._failed)
        first: dict[int, BaseException] = {}  # what became of the first successor
        n_attempts = dict.fromkeys(failures, 0)
        while failures:
            _, error = min(failures.items())
            if self._max_restarts is not None and self.n_restarts + self._count(failures) > self._max_restarts:
                raise error
            for index, why in sorted(failures.items()):
                if n_attempts[index]:
                    first.setdefault(index, why)
                if n_attempts[index] == MAX_ATTEMPTS:
                    raise first[index]
                n_attempts[index] += 1
            for index, why in failures.items():
                logger.warning("%s %d is replaced: %r", self.noun, index, why)
            failures = self._replace(sorted(failures))
        self._failed = {}

    def _count(self, indexes: Collection[int]) -> int:
        """How many workers these records stand for."""
        return sum(self.n_workers[index] for index in indexes)

    def _succession(self, index: int) -> tuple[Any, ...]:
        """What the job of a successor is made with."""
        return (self.records[index].stream,)

    def _replace(self, indexes: list[int]) -> dict[int, BaseException]:
        """Starts a successor for each of these; those that did not come up, and why."""
        records = [self.records[index] for index in indexes]
        counts = [(record.stream, record.n_restarts) for record in records]
        try:
            return self._begin_successors(indexes)
        except BaseException as error:
            if not isinstance(error, Exception):  # interrupted: others take their place, with the same seeds
                for record, count in zip(records, counts, strict=True):
                    record.stream, record.n_restarts = count
            raise

    def _begin_successors(self, indexes: list[int]) -> dict[int, BaseException]:
        pool = self.pool
        with defer_interrupt():
            for index in indexes:
                self.records[index].begin_anew()
            self._replaced |= set(indexes)
        asked = pool.restart({index: self._succession(index) for index in indexes})
        pool.settle(asked)
        failures = {each.index: each.error for each in asked if each.error is not None}
        for method, arguments in self._orders.items():
            replies, more = self.ask_some(method, arguments, [index for index in indexes if index not in failures])
            failures |= more
            if method == "describe":
                failures |= {
                    index: SpecError(f"create_env: {self.noun} {index} has {found.n_envs} environments now, "
                                     f"it had {self._n_envs}")
                    for index, found in replies.items() if found.n_envs != self._n_envs
                }  # fmt: skip
        for index in indexes:
            for order in self.records[index].orders if index not in failures else ():
                if not (order.is_lost or order.is_there):
                    [order.asked] = pool.ask("rollout", order.number, self.statistics, only=[index])
        return failures


def _raise_first(asked: list[Future]) -> None:
    for each in asked:
        if each.error is not None:
            raise each.error
