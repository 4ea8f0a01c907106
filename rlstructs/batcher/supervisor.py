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
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rlstructs.batcher.arguments import RunSettings
from rlstructs.batcher.worker_record import Member, Order
from rlstructs.checks import check_count
from rlstructs.errors import SpecError
from rlstructs.moments import Moments, merged
from rlstructs.rollout.job import JobFactory
from rlstructs.rollout.job_settings import JobSettings
from rlstructs.rollout.progress import Clock
from rlstructs.seeding import PrivateStreams, seed_worker_streams
from rlstructs.shared.slot_buffers import Generations
from rlstructs.worker_setup.setup import WorkerSetup
from workers import InlinePool, SharedArena, WorkerError, WorkerPool
from workers.errors import is_gone
from workers.interrupts import defer_first_interrupt, defer_interrupt
from workers.messages import Asked
from workers.pickle_errors import explain_pickle_error

logger = logging.getLogger("rlstructs")

PRELOAD = ("torch", "gymnasium", "rlstructs.rollout.job", "rlstructs.envs.gym_env")
RAISE, RESTART = POLICIES = ("raise", "restart")
# A successor that does not come up so often in a row never will.
MAX_ATTEMPTS = 3
NOTHING: Mapping[int, Any] = {}


class Crew:
    """Workers that run rollouts.

    A subclass may have something else in the place of single workers, each a `Member`.

    Args:
        pool: the workers, built.
        policy: "raise" or "restart".
        max_restarts: how many failures may be mended in all; None for any number.
        run_ahead: how many rollouts may be ordered before the oldest is handed out, and that one not counted.
    """

    #: What a member is called, and what is known of one.
    noun, member = "worker", Member

    def __init__(
        self, pool: WorkerPool | InlinePool, policy: str, max_restarts: int | None, run_ahead: int = 0
    ) -> None:
        self.pool = pool
        self.members = [self.member() for _ in range(pool.n_workers)]
        self._max_restarts, self._run_ahead = max_restarts, run_ahead
        # A job in this process cannot be replaced: what it raises is raised.
        self._mends = policy == RESTART and not isinstance(pool, InlinePool)
        self._replaced: set[int] = set()
        self._failed: dict[int, BaseException] = {}  # those who are yet to be replaced
        #: What all environments have gathered together, by name; replaced, never changed.
        self.statistics: dict[str, Moments] = {}
        # What a successor is told, in this order, before it is one of the crew.
        self._orders: dict[str, tuple[Any, ...]] = {"describe": ()}
        self._n_envs: int | None = None
        # What all were asked last, beside rollouts: who is interrupted while it is waited for leaves it under way.
        self._called: list[Asked] = []
        #: Whether some workers may have been told of what others were not.
        self.is_halfway = False

    @property
    def n_workers(self) -> list[int]:
        """How many workers each member is."""
        return [1] * len(self.members)

    @property
    def n_restarts(self) -> int:
        """How many workers were replaced."""
        return sum(member.n_restarts for member in self.members)

    def close(self) -> None:
        """Ends every worker. Where workers are mended, what they have raised before is lost with their rollouts."""
        if self._mends:
            self.pool.close(with_earlier=False)  # type: ignore[call-arg] # no `InlinePool`
        else:
            self.pool.close()

    def describe(self) -> list[Any]:
        """What the jobs say of themselves: how many environments they have, and, the first, the specs."""
        answers = self.pool.call("describe")
        self._n_envs = answers[0][0]
        return answers

    def attach(self, generations: Generations) -> None:
        """Gives every worker its slots."""
        self._orders["attach"] = (generations,)
        self.pool.call("attach", generations)

    def update(self, packed: Any, sent: Callable[[list[Asked]], None]) -> list[Asked]:
        """Updates every agent: at once, or, with a run-ahead, behind the rollouts that were ordered before.

        Args:
            packed: the update.
            sent: called with what was asked, as soon as all were.
        """
        if not self._run_ahead:
            return self._call("update", packed, sent=sent)
        self.mend_gone()
        with self._asking():
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
        return [
            {
                "stream": member.stream,
                "restarts": member.n_restarts,
                "lost_rollouts": member.n_lost,
                "seconds": time.monotonic() - member.since,
                **vars(member.clock),
            }
            for member in self.members
        ]

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
            self.members[index] = Member(
                stream=kept["stream"] + 1,
                n_restarts=kept["restarts"],
                n_lost=kept["lost_rollouts"],
                n_ordered=self.members[index].n_ordered,
                since=time.monotonic() - kept["seconds"],
                clock=Clock(*(kept[name] for name in names)),
            )
        self._orders.pop("reset", None)
        clocks = [member.clock.fields() for member in self.members]
        self._call("renew", seeds, agent_seeds, clocks, is_lasting=False)

    def evaluate(self, *arguments: Any) -> list[dict[str, Any]] | Exception:
        """What `evaluating` returns at its end."""
        rounds = self.evaluating(*arguments)
        while True:
            try:
                next(rounds)
            except StopIteration as end:
                found: list[dict[str, Any]] | Exception = end.value
                return found

    def evaluating(self, *arguments: Any) -> Generator[None, None, list[dict[str, Any]] | Exception]:
        """What `RolloutJob.end_evaluation` gives, by worker index, after an evaluation that these arguments begin.

        A successor begins its worker's part anew, unless its worker has failed so often that it always would.

        Yields:
            Between the rollouts, as long as there are episodes that have not ended.

        Returns:
            What the first one raised, if one did; nothing has happened to the workers then.

        Raises:
            WorkerError: a worker is gone or late.
        """
        self.settle()
        found: dict[int, dict[str, Any]] = {}
        everyone = range(self.pool.n_workers)
        n_deaths, first, new = dict.fromkeys(everyone, 0), dict[int, BaseException](), list(everyone)
        try:
            while left := [index for index in everyone if index not in found]:
                failures = self._asked("begin_evaluation", (*arguments, self.statistics), new)[1]
                if not failures:
                    ended, failures = self._asked("evaluate", (), left)
                    if not failures and all(ended.values()):
                        episodes, failures = self._asked("end_evaluation", (), left)
                        found |= episodes
                raised = [error for _, error in sorted(failures.items()) if not is_gone(error)]
                if raised and len(raised) == len(failures):
                    assert isinstance(raised[0], Exception)
                    self._asked("end_evaluation", (), left)
                    return raised[0]
                for index, error in failures.items():
                    first.setdefault(index, error)
                    n_deaths[index] += 1
                    if not self._mends or n_deaths[index] == MAX_ATTEMPTS:
                        raise first[index]
                self._mend(failures)
                new = sorted(failures)
                yield
        except BaseException as error:
            if not isinstance(error, Exception):  # nobody wants the rest: it ends behind what is under way
                with self._asking():
                    self._called = self.pool.ask("end_evaluation")
            raise
        return [found[index] for index in everyone]

    def reset(self) -> None:
        """Resets every environment; rollouts that were not handed out are dropped."""
        self.settle()
        for member in self.members:
            member.orders.clear()
            member.runs, member.anew = True, None
        self._call("reset", self.statistics)

    def settle(self) -> None:
        """Waits until no rollout is under way, nor anything that was interrupted."""
        self.pool.settle(self._called + [order.asked for member in self.members for order in member.orders])
        self._called = []

    def begin(self, prepare: Callable[[int, int], None]) -> None:
        """Orders as many rollouts as may be ordered.

        Args:
            prepare: called with the index of a worker and the number of a rollout before that is ordered.
        """
        for _ in range(self._run_ahead + 1):
            numbers: dict[int, list[int]] = {}
            for index, member in enumerate(self.members):
                if len(member.orders) <= self._run_ahead:
                    prepare(index, member.n_ordered)
                    numbers.setdefault(member.n_ordered, []).append(index)
                    member.n_ordered += 1
            for number, indexes in numbers.items():
                with self._asking():
                    asked = self.pool.ask("rollout", number, self.statistics, only=indexes)
                    for each in asked:
                        self.members[each.index].orders.append(Order(number, each))
                self._raise_gone(asked)

    def is_ready(self, n: int | None = None) -> bool:
        """Whether `collect` would not have to wait for rollouts."""
        heads, n = self._heads(n)
        return self.pool.is_settled(heads, n, fails_fast=not self._mends)

    def collect(self, n: int | None = None, cut: Callable[[int, int], None] | None = None) -> dict[int, Order]:
        """The oldest rollouts that are there, or were lost, by worker index.

        May be interrupted and called again; `forget` says that they are handed out.

        Args:
            n: how many are waited for; None for all.
            cut: called with the index of each worker that is late, once `n` are there, and with the number of the
                rollout after the one that is to end, and is then waited for.
        """
        heads, n = self._heads(n)
        self.pool.settle(heads, n, fails_fast=not self._mends)
        if not self._mends:
            _raise_first(heads)
        if cut is not None:
            self.cut_late(cut)
            return self.collect()
        failures = {asked.index: asked.error for asked in heads if asked.error is not None}
        if self._mends:
            self._mend(self.pool.check() | failures)
        heads_now = {index: member.orders[0] for index, member in enumerate(self.members)}
        return {index: order for index, order in heads_now.items() if order.is_lost or order.is_there}

    def cut_late(self, cut: Callable[[int, int], None]) -> None:
        """Has those who are late end their oldest rollout after the step that they are in; `cut` as of `collect`."""
        for index, member in enumerate(self.members):
            order = member.orders[0]
            if not (order.asked.is_over or order.is_cut):
                cut(index, order.number + 1)
                order.is_cut = True

    def _heads(self, n: int | None) -> tuple[list[Asked], int | None]:
        """What was asked first of those who run something, or of all (n is None), and of how many it is awaited."""
        members = [member for member in self.members if n is None or member.runs]
        asked = [member.orders[0].asked for member in members if not member.orders[0].is_lost]
        return asked, None if n is None else n - (len(members) - len(asked))

    def forget(self, orders: Mapping[int, Order] = NOTHING) -> set[int]:
        """Takes away what was handed out; the workers whose next rollout is the first of a successor."""
        anew = {index for index in orders if self.members[index].hand_out()}
        return anew | {index for index, member in enumerate(self.members) if member.is_anew()}

    def take_replaced(self) -> set[int]:
        """The workers that were replaced since the last call."""
        replaced, self._replaced = self._replaced, set()
        return replaced

    def gathered(self, orders: Mapping[int, Order]) -> list[dict[str, Moments]]:
        """What each worker gathered in these rollouts, in the order of the workers."""
        return [order.asked.value[3] for _, order in sorted(orders.items()) if not order.is_lost]

    def learn(self, orders: Mapping[int, Order]) -> None:
        """Adds what rollouts gathered to the statistics, once, in the order of the workers."""
        self.know(merged(self.statistics, self.gathered(orders)))

    def stats(self) -> list[dict[str, Any]]:
        """For each worker what `RL_Batcher.stats` says of it."""
        return [
            {
                "worker": index,
                "pid": pid,
                "state": state,
                "restarts": member.n_restarts,
                "lost_rollouts": member.n_lost,
                **times(time.monotonic() - member.since, member.clock),
            }
            for index, (pid, state, member) in enumerate(
                zip(self.pool.pids, self.pool.states, self.members, strict=True)
            )
        ]

    def _asked(
        self, method: str, arguments: tuple[Any, ...], only: list[int]
    ) -> tuple[dict[int, Any], dict[int, BaseException]]:
        """What some workers reply, and what became of those that did not."""
        asked: list[Asked] = []
        if only:
            with self._asking():
                asked = self.pool.ask(method, *arguments, only=only)
        self.pool.settle(asked)
        return (
            {each.index: each.value for each in asked if each.error is None},
            {each.index: each.error for each in asked if each.error is not None},
        )

    def _raise_gone(self, asked: list[Asked]) -> None:
        """Raises at once if a worker that is not to be replaced is gone; what a job raises comes with its rollout."""
        if not self._mends:
            _raise_first([each for each in asked if isinstance(each.error, WorkerError)])

    def _remember(self, method: str, arguments: tuple[Any, ...]) -> None:
        """Has successors asked the same from now on."""
        self._orders.pop(method, None)
        self._orders[method] = arguments

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Puts off Ctrl-C until all workers are told; not for a job in this process, which may take long."""
        if isinstance(self.pool, InlinePool):
            yield
            return
        with defer_first_interrupt():
            self.is_halfway = True
            yield
            self.is_halfway = False

    def _call(
        self, method: str, *arguments: Any, is_lasting: bool = True, sent: Callable[[list[Asked]], None] | None = None
    ) -> list[Asked]:
        """Asks all workers, and, if that is lasting, successors from now on.

        Args:
            sent: if given, is called with what was asked, as soon as all were; and replies are waited for until all
                are there, whatever is interrupted.
        """
        self.mend_gone()  # first: who takes the place of one of these is asked below
        with contextlib.nullcontext() if sent is None else defer_first_interrupt():
            with self._asking():
                if self._mends and is_lasting:
                    self._remember(method, arguments)
                self._called = asked = self.pool.ask(method, *arguments)
                if sent is not None:
                    sent(asked)
            self.pool.settle(asked, fails_fast=not self._mends)
        if not self._mends:
            _raise_first(asked)
        self._mend({each.index: each.error for each in asked if each.error is not None})
        return asked

    def mend_gone(self) -> None:
        """Puts successors in the place of workers that are gone, if they are to have any."""
        if self._mends:
            self._mend(self.pool.check())

    def _mend(self, failures: dict[int, BaseException]) -> None:
        """Puts successors in the place of workers that failed, and of those of an earlier call that was interrupted.

        Raises:
            Exception: the first failure, when there were too many, or that of a successor which never comes up.
        """
        for index, error in failures.items():
            if index not in self._failed:
                with defer_interrupt():
                    self._failed[index] = error
                    self.members[index].lose()
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
        """How many workers these members are."""
        return sum(self.n_workers[index] for index in indexes)

    def _succession(self, index: int) -> tuple[Any, ...]:
        """What the job of a successor is made with."""
        return (self.members[index].stream,)

    def _replace(self, indexes: list[int]) -> dict[int, BaseException]:
        """Starts a successor for each of these; those that did not come up, and why."""
        members = [self.members[index] for index in indexes]
        counts = [(member.stream, member.n_restarts) for member in members]
        try:
            return self._begin_successors(indexes)
        except BaseException as error:
            if not isinstance(error, Exception):  # interrupted: others take their place, with the same seeds
                for member, count in zip(members, counts, strict=True):
                    member.stream, member.n_restarts = count
            raise

    def _begin_successors(self, indexes: list[int]) -> dict[int, BaseException]:
        pool = self.pool
        assert not isinstance(pool, InlinePool)
        with defer_interrupt():
            for index in indexes:
                self.members[index].begin_anew()
            self._replaced |= set(indexes)
        asked = pool.restart({index: self._succession(index) for index in indexes})
        pool.settle(asked)
        failures = {each.index: each.error for each in asked if each.error is not None}
        for method, arguments in self._orders.items():
            replies, more = self._asked(method, arguments, [index for index in indexes if index not in failures])
            failures |= more
            if method == "describe":
                failures |= {
                    index: SpecError(f"create_env: {self.noun} {index} has {n} environments now, it had {self._n_envs}")
                    for index, (n, _) in replies.items() if n != self._n_envs
                }  # fmt: skip
        for index in indexes:
            for order in self.members[index].orders if index not in failures else ():
                if not (order.is_lost or order.is_there):
                    [order.asked] = pool.ask("rollout", order.number, self.statistics, only=[index])
        return failures


def started(
    settings: JobSettings, run: RunSettings, shared: tuple[SharedArena, SharedArena]
) -> WorkerPool | InlinePool:
    """Workers with their jobs built; with no processes the job runs in this one.

    Raises:
        TypeError: what the user gave cannot be sent to a worker.
    """
    try:
        if run.n_processes == 0:
            factory = JobFactory(settings.by_value())
            return InlinePool(factory, shared=shared, around=PrivateStreams(), init_worker=run.init_worker)
        return WorkerPool(
            run.n_processes,
            JobFactory(settings),
            shared=shared,
            start_method=run.start_method,
            timeout=run.timeout,
            preload=PRELOAD,
            setup=WorkerSetup(partial(seed_worker_streams, settings.seeds, settings.agent_seeds)),
            init_worker=run.init_worker,
            name="rlstructs-worker",
        )
    except Exception as error:
        objects = {"init_worker": run.init_worker if run.n_processes else None} | settings.objects()
        if why := explain_pickle_error(objects):
            raise TypeError(why) from error
        raise


def _raise_first(asked: list[Asked]) -> None:
    for each in asked:
        if each.error is not None:
            raise each.error


def check_policy(policy: str, max_restarts: int | None) -> None:
    """Raises SpecError or TypeError unless these say what is to become of workers that fail."""
    if policy not in POLICIES:
        raise SpecError(f"on_worker_failure must be one of {POLICIES}, got {policy!r}")
    if max_restarts is not None:
        check_count("max_restarts", max_restarts, 0)


def times(elapsed: float, clock: Clock) -> dict[str, Any]:
    """What `RL_Batcher.stats` says of a worker's time, so many seconds after it began."""
    return {
        "steps": clock.steps,
        "steps_per_second": clock.steps / elapsed,
        "environment_seconds": clock.environment,
        "agent_seconds": clock.agent,
        "waiting_seconds": max(0.0, elapsed - clock.busy),
    }
