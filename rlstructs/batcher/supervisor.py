"""`Supervisor`: sends requests to the workers of a batcher, and replaces workers that fail.

With "raise" the first failure is raised at once. With "restart" a worker that died, raised or was late is replaced: its
successor is built from the same factories with the next seeds of its streams, gets the slots and the last update, and
resets its environments. The rollouts of the other workers are kept.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rlstructs.batcher.arguments import RESTART, count_awaited
from rlstructs.batcher.worker_record import Records, RolloutOrder, WorkerRecord
from rlstructs.envs.stepping import find_step
from rlstructs.errors import SpecError
from rlstructs.exact.job import JobState
from rlstructs.moments import Moments, merge_parts
from rlstructs.rollout.job_specs import JobDescription
from rlstructs.shared.slots import SlotBuffers, Slots
from rlstructs.trace.board import Board
from rlstructs.trace.lane import DELIVERED, ORDERED, REPLACED, RESTARTS, VERSION, WAIT, during
from rlstructs.trace.lane import RESTART as RESTARTING
from rlstructs.workers import WorkerError
from rlstructs.workers.errors import is_gone
from rlstructs.workers.interrupts import defer_first_interrupt, defer_interrupt
from rlstructs.workers.messages import Future, find_failures, gather_values
from rlstructs.workers.pool import Pool

logger = logging.getLogger("rlstructs")

# The error is raised if so many successors of a worker, one after another, fail to start.
MAX_ATTEMPTS = 3


class Supervisor:
    """Supervises workers that run rollouts; a subclass supervises nodes instead.

    Args:
        pool: the workers, with their jobs built.
        policy: "raise" or "restart".
        max_restarts: how many workers may be replaced in all; None for any number.
        run_ahead: how many rollouts may be ordered in addition to the oldest one that is not handed out.
        board: the lanes of this process and of the workers.
    """

    #: The word for a worker in messages, and the classes of its record and of its job's exact state.
    noun, record_class = "worker", WorkerRecord
    job_state_class: Any = JobState

    def __init__(self, pool: Pool, policy: str, max_restarts: int | None, run_ahead: int, board: Board) -> None:
        self.pool, self.board, self._lane = pool, board, board.lane
        self.records = Records(self.record_class() for _ in range(pool.n_workers))
        self._max_restarts, self.run_ahead = max_restarts, run_ahead
        #: Whether workers that fail are replaced; a job in this process cannot be.
        self.can_replace = policy == RESTART and pool.can_restart
        self._replaced: set[int] = set()
        self._failures: dict[int, BaseException] = {}  # of workers that are yet to be replaced
        #: Called with the workers that have ended, before their successors are asked for anything.
        self.on_restart: Callable[[list[int]], None] = lambda indexes: None
        #: The moments that environments normalise by, by name. The dict is replaced, never modified.
        self.statistics: dict[str, Moments] = {}
        # The requests, by method, that a successor gets in this order before it takes part.
        self._lasting: dict[str, tuple[Any, ...]] = {"describe": ()}
        self._n_envs: int | None = None
        # The last requests to all workers, except rollouts. They go on if an interrupt ends the wait for them.
        self._last_requests: list[Future] = []
        #: Whether an interrupt may have left a request sent to some workers only.
        self.is_halfway = False

    @property
    def record_sizes(self) -> list[int]:
        """The number of workers that each record stands for."""
        return [1] * len(self.records)

    @property
    def n_restarts(self) -> int:
        """The number of workers that were replaced."""
        return sum(record.n_restarts for record in self.records)

    def close(self) -> None:
        """Ends every worker; raises earlier errors of jobs only if workers are not replaced."""
        self._lasting.clear()  # they may hold slots, and with them the memory
        self.pool.close(with_earlier=not self.can_replace)

    def describe_jobs(self) -> list[JobDescription]:
        """Asks each job for its number of environments, the first for its specs."""
        found: list[JobDescription] = self.pool.call("describe")
        self._n_envs = found[0].n_envs
        for record in self.records:
            record.env_restarts = [0] * found[0].n_envs
        return found

    def attach(self, slot_buffers: SlotBuffers, own: list[Slots] | None = None) -> None:
        """Gives every worker its slots.

        `own` are those of the transport, which a job in this process writes to.
        """
        self._lasting["attach"] = arguments = slot_buffers, own
        self.pool.call("attach", *arguments)

    def feed(self, packed: bytes) -> None:
        """Gives every worker a memory to write to."""
        self._call("feed", packed)

    def can_attach(self, packed: bytes) -> bool:
        """Whether every worker can open shared memory of this process."""
        requests = self._call("can_attach", packed, is_lasting=False)
        return all(each.value for each in requests if each.error is None)

    def update(self, packed: Any, record_sent: Callable[[list[Future]], None]) -> list[Future]:
        """Updates every agent, with a run-ahead after the rollouts ordered before.

        Without one, at once.

        Args:
            packed: the update.
            record_sent: called with the requests as soon as all workers are asked.
        """
        self._lane.cells[VERSION] += 1
        if not self.run_ahead:
            return self._call("update", packed, record_sent=record_sent)
        self.replace_gone()
        with self.defer_interrupts():
            self._add_lasting("update", (packed,))
            requests = self.pool.ask("update", packed)
            record_sent(requests)
        self._raise_gone(requests)
        return requests

    def set_statistics(self, statistics: dict[str, Moments]) -> None:
        """Sets the moments that all environments normalise by from the next request.

        Environments of successors included.
        """
        self.statistics = statistics
        if "reset" in self._lasting:
            self._lasting["reset"] = (statistics,)

    def get_states(self) -> list[dict[str, Any]]:
        """Returns what `renew` needs, by worker."""
        return self.records.get_states()

    def renew(self, states: list[dict[str, Any]], seeds: Sequence[int], agent_seeds: Sequence[int] | None) -> None:
        """Makes every worker replace its environments.

        Drops rollouts that were not handed out.

        Args:
            states: by worker, what `get_states` returned; the counters continue from it.
            seeds, agent_seeds: as in `JobSettings`.
        """
        self.settle()
        self.records[:] = [
            WorkerRecord.restore(state, record.n_ordered) for state, record in zip(states, self.records, strict=True)
        ]
        self._lasting.pop("reset", None)
        clocks = [record.clock.fields() for record in self.records]
        self._call("renew", seeds, agent_seeds, clocks, is_lasting=False)

    def reset(self) -> None:
        """Resets every environment, and drops rollouts that were not handed out."""
        self.settle()
        self.records.clear_orders()
        self._call("reset", self.statistics)

    def settle(self) -> None:
        """Waits until no request is under way: no rollout, and nothing that was interrupted."""
        self.pool.settle(self._last_requests + [order.request for record in self.records for order in record.orders])
        self._last_requests = []

    def finish_rollouts(self) -> None:
        """Waits until no request is under way, and replaces workers that failed.

        A job that has failed in a rollout ahead answers no other request. Without replacements it stays as it is.
        """
        self.settle()
        while self.can_replace:
            requests = self.records.list_rollouts()
            self.pool.settle(requests)
            if not (failures := self.pool.check() | find_failures(requests)):
                return
            self.replace_failed(failures)

    def order(self, write_agent_info: Callable[[int, int], None]) -> None:
        """Orders rollouts until as many as are allowed are under way.

        Args:
            write_agent_info: called before each rollout is ordered, with the worker's index and the rollout's number.
        """
        for _ in range(self.run_ahead + 1):
            numbers: dict[int, list[int]] = {}
            for index, record in enumerate(self.records):
                if len(record.orders) <= self.run_ahead:
                    write_agent_info(index, record.n_ordered)
                    self._lane.note(ORDERED, index, record.n_ordered)
                    numbers.setdefault(record.n_ordered, []).append(index)
                    record.n_ordered += 1
            for number, indexes in numbers.items():
                with self.defer_interrupts():
                    requests = self.pool.ask("rollout", number, self.statistics, only=indexes)
                    for request in requests:
                        self.records[request.index].orders.append(RolloutOrder(number, request))
                self._raise_gone(requests)

    def is_ready(self, n: int | None = None, cut: Callable[[int, int], None] | None = None) -> bool:
        """Whether `wait` would return at once.

        Cuts late rollouts as soon as `wait` would begin to.
        """
        requests, n = self.records.find_oldest(n)
        is_ready = self.pool.is_settled(requests, n, fails_fast=not self.can_replace)
        if not is_ready or cut is None:
            return is_ready
        self.cut_late(cut)
        return self.is_ready()

    def count_awaited(self, at_least: int | None, preempt: float | None) -> int | None:
        """Counts the workers that `get` waits for, given one of its arguments.

        Raises if that argument is wrong.
        """
        n_running = sum(record.is_running for record in self.records)
        return count_awaited(at_least, preempt, self.noun, self.pool.n_workers, n_running)

    @during(WAIT)
    def wait(self, n: int | None = None, cut: Callable[[int, int], None] | None = None) -> dict[int, RolloutOrder]:
        """Waits for the oldest rollouts; returns the finished and lost ones by worker.

        It may be interrupted and called again: rollouts are kept until `hand_out` removes them.

        Args:
            n: the number of workers to wait for; None for all.
            cut: if given, ends the rollouts of the other workers early, and waits for them too; see `cut_late`.
        """
        requests, n = self.records.find_oldest(n)
        self.pool.settle(requests, n, fails_fast=not self.can_replace)
        if not self.can_replace:
            gather_values(requests)  # raises what failed
        if cut is not None:
            self.cut_late(cut)
            return self.wait()
        if self.can_replace:
            self.replace_failed(self.pool.check() | find_failures(requests))
        return self.records.list_done()

    def cut_late(self, cut: Callable[[int, int], None]) -> None:
        """Makes late workers end their oldest rollout after their current step.

        Args:
            cut: called with the index of each late worker and the number of the rollout after the one to end.
        """
        for index, record in enumerate(self.records):
            order = record.orders[0]
            if not (order.request.is_over or order.is_cut):
                cut(index, order.number + 1)
                order.is_cut = True

    def hand_out(self, orders: Mapping[int, RolloutOrder]) -> bool:
        """Removes rollouts that are handed out, and adds what they gathered to the statistics.

        Returns:
            Whether the first rollout of a successor is still to be handed out.
        """
        for worker, order in orders.items():
            self._lane.note(DELIVERED, worker, order.number)
        if self.statistics:
            self.set_statistics(merge_parts(self.statistics, self.list_statistics(orders)))
        return self.records.hand_out(orders)

    def list_statistics(self, orders: Mapping[int, RolloutOrder]) -> list[dict[str, Moments]]:
        """Lists the moments that each worker gathered in these rollouts, by worker order."""
        return [order.request.value.statistics for _, order in sorted(orders.items()) if not order.is_lost]

    def take_replaced(self) -> set[int]:
        """Returns the workers that were replaced since the last call."""
        replaced, self._replaced = self._replaced, set()
        return replaced

    def stats(self) -> list[dict[str, Any]]:
        """The entries of `RL_Batcher.stats` for each worker."""
        workers = enumerate(zip(self.records, self.pool.pids, self.pool.states, strict=True))
        return [{"worker": k, "pid": pid, "state": state, **own.describe()} for k, (own, pid, state) in workers]

    def take_states(self, best: bool) -> list[Any] | Exception:
        """Finishes rollouts, and asks every job for its exact state.

        Args:
            best: whether new episodes begin where environments cannot be brought back.

        Returns:
            The states, by worker; or what a job raised because it has none, and then the batcher can go on.

        Raises:
            Exception: a worker is gone or late, or a rollout has failed.
        """
        everyone = list(range(self.pool.n_workers))
        for _ in range(MAX_ATTEMPTS):
            self.finish_rollouts()
            if not self.can_replace:
                gather_values(self.records.list_rollouts())  # raises what failed
            states, failures = self.call_some("apply", (self.job_state_class.take, best), everyone)
            if not failures:
                return [states[index] for index in everyone]
            _, error = min(failures.items())
            raised = [each for each in failures.values() if not is_gone(each)]
            if raised:
                assert isinstance(raised[0], Exception)
                return raised[0]
            if not self.can_replace:
                raise error
            self.replace_failed(failures)
        raise error

    def load_states(self, jobs: Sequence[Any], seeds: Sequence[int], was_updated: bool) -> None:
        """Brings every job to its exact state; successors then begin as those workers did.

        Args:
            jobs: what `take_states` returned.
            seeds: of new environments, where these are needed.
            was_updated: whether there was an update; otherwise successors get no earlier one.
        """
        load, pairs = self.job_state_class.load, enumerate(zip(jobs, seeds, strict=True))
        requests = [self.pool.ask("apply", load, *each, only=[worker])[0] for worker, each in pairs]
        self.pool.settle(requests)
        gather_values(requests)  # raises what failed
        if not was_updated:
            self._lasting.pop("update", None)
        if self.can_replace and any(job.methods for job in jobs):  # they were reset
            self._add_lasting("reset", (self.statistics,))

    def call_some(
        self, method: str, arguments: tuple[Any, ...], only: list[int]
    ) -> tuple[dict[int, Any], dict[int, BaseException]]:
        """Calls a method of some jobs; returns values and failures by worker index."""
        requests: list[Future] = []
        if only:
            with self.defer_interrupts():
                requests = self.pool.ask(method, *arguments, only=only)
        self.pool.settle(requests)
        return {each.index: each.value for each in requests if each.error is None}, find_failures(requests)

    def ask_without_waiting(self, method: str) -> None:
        """Asks every job to call a method after its earlier requests.

        `settle` waits for the replies.
        """
        with self.defer_interrupts():
            self._last_requests = self.pool.ask(method)

    @contextlib.contextmanager
    def defer_interrupts(self) -> Iterator[None]:
        """Defers Ctrl-C until all workers are asked.

        Not for a job in this process, which may take long.
        """
        if not self.pool.can_restart:
            yield
            return
        with defer_first_interrupt():
            self.is_halfway = True
            yield
            self.is_halfway = False

    def _raise_gone(self, requests: list[Future]) -> None:
        """Raises if a worker is gone and will not be replaced.

        An error of a job comes with its next rollout.
        """
        if not self.can_replace:
            gather_values([each for each in requests if isinstance(each.error, WorkerError)])

    def _add_lasting(self, method: str, arguments: tuple[Any, ...]) -> None:
        """Adds a request that successors get too, after the other lasting ones."""
        self._lasting.pop(method, None)
        self._lasting[method] = arguments

    def _call(
        self,
        method: str,
        *arguments: Any,
        is_lasting: bool = True,
        record_sent: Callable[[list[Future]], None] | None = None,
    ) -> list[Future]:
        """Calls a method of every job, and waits.

        Args:
            is_lasting: whether successors get the request too.
            record_sent: called with the requests as soon as all workers are asked. If it is given, an interrupt is put
                off until all have replied.
        """
        self.replace_gone()  # first, so that successors are not asked twice
        with contextlib.nullcontext() if record_sent is None else defer_first_interrupt():
            with self.defer_interrupts():
                if self.can_replace and is_lasting:
                    self._add_lasting(method, arguments)
                self._last_requests = requests = self.pool.ask(method, *arguments)
                if record_sent is not None:
                    record_sent(requests)
            self.pool.settle(requests, fails_fast=not self.can_replace)
        if not self.can_replace:
            gather_values(requests)  # raises what failed
        self.replace_failed(find_failures(requests))
        return requests

    def replace_gone(self) -> None:
        """Replaces workers that are gone, if workers are replaced at all."""
        if self.can_replace:
            self.replace_failed(self.pool.check())

    def replace_failed(self, failures: dict[int, BaseException]) -> None:
        """Replaces workers that failed, and those that an interrupted call did not get to.

        Args:
            failures: the failures by worker index.

        Raises:
            Exception: a failure, if more than `max_restarts` workers would be replaced; or the failure of a worker's
                first successor, if `MAX_ATTEMPTS` successors failed.
        """
        for index, error in failures.items():
            if index not in self._failures:
                with defer_interrupt():
                    self._failures[index] = error
                    self.records[index].lose()
        failures = dict(self._failures)
        first: dict[int, BaseException] = {}  # by worker, the failure of its first successor
        n_attempts = dict.fromkeys(failures, 0)
        while failures:
            _, error = min(failures.items())
            n_replaced = self.n_restarts + sum(self.record_sizes[index] for index in failures)
            if self._max_restarts is not None and n_replaced > self._max_restarts:
                raise error
            for index, why in sorted(failures.items()):
                if n_attempts[index]:
                    first.setdefault(index, why)
                if n_attempts[index] == MAX_ATTEMPTS:
                    raise first[index]
                n_attempts[index] += 1
            for index, why in failures.items():
                step = f", {step}" if (step := find_step(why)) else ""
                logger.warning("%s %d is replaced: %r%s", self.noun, index, why, step, exc_info=why)
            failures = self._replace(sorted(failures))
        self._failures = {}

    def _make_successor_arguments(self, index: int) -> tuple[Any, ...]:
        """Makes the arguments that a successor's job is built with."""
        return (self.records[index].stream,)

    @during(RESTARTING)
    def _replace(self, indexes: list[int]) -> dict[int, BaseException]:
        """Starts a successor for each of these workers; returns the failures by worker."""
        before = [(record := self.records[index], record.stream, record.n_restarts) for index in indexes]
        try:
            return self._start_successors(indexes)
        except BaseException as error:
            if not isinstance(error, Exception):  # interrupted: the next call starts successors with the same seeds
                for record, stream, n_restarts in before:
                    record.stream, record.n_restarts = stream, n_restarts
            raise

    def _start_successors(self, indexes: list[int]) -> dict[int, BaseException]:
        with defer_interrupt():
            for index in indexes:
                self.records[index].begin_successor()
                self._lane.note(REPLACED, index)
            self._lane.cells[RESTARTS] += len(indexes)
            self._replaced |= set(indexes)
        self.pool.settle(requests := self.pool.restart({k: self._make_successor_arguments(k) for k in indexes}))
        self.on_restart(indexes)
        failures = find_failures(requests)
        for method, arguments in self._lasting.items():
            replies, more = self.call_some(method, arguments, [index for index in indexes if index not in failures])
            failures |= more
            if method == "describe":
                failures |= {
                    index: SpecError(
                        f"create_env: {self.noun} {index} has {found.n_envs} environments now, it had {self._n_envs}"
                    )
                    for index, found in replies.items()
                    if found.n_envs != self._n_envs
                }
        for index in indexes:
            for order in self.records[index].orders if index not in failures else ():
                if not (order.is_lost or order.is_done):
                    [order.request] = self.pool.ask("rollout", order.number, self.statistics, only=[index])
        return failures
