"""The workers of a batcher, and what becomes of those that fail.

With "raise" the first failure is raised at once. With "restart" a worker that died, raised or was late is
replaced: its successor is built from the same factories with the next seed of its stream, gets the slots and
the last update, and resets its environments. The others' work is kept.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlstructs.checks import check_count
from rlstructs.envs import registry
from rlstructs.errors import SpecError
from rlstructs.job import JobFactory
from rlstructs.moments import Moments, merged
from rlstructs.rollout import Clock
from rlstructs.seeding import PrivateStreams
from rlstructs.settings import JobSettings
from rlstructs.slots import Layout
from workers import InlinePool, SharedArena, WorkerError, WorkerPool

logger = logging.getLogger("rlstructs")

PRELOAD = ("torch", "gymnasium", "rlstructs.job", "rlstructs.envs.gym_env")
RAISE, RESTART = POLICIES = ("raise", "restart")
# A successor that does not come up so often in a row never will.
MAX_ATTEMPTS = 3


@dataclass
class Member:
    """What is known of one worker and of those before it in its place.

    Attributes:
        stream: which part of its streams of seeds it has; that of the first one ever is 0.
        n_restarts: how many were before it.
        n_lost: rollouts that were lost with them.
        since: when it began, in the time of `time.monotonic`.
        clock: what it said last of its time.
    """

    stream: int = 0
    n_restarts: int = 0
    n_lost: int = 0
    since: float = field(default_factory=time.monotonic)
    clock: Clock = field(default_factory=Clock)


class Crew:
    """Workers that run rollouts.

    Args:
        pool: the workers, built.
        settings: what their jobs were made of.
        policy: "raise" or "restart".
        max_restarts: how many failures may be mended in all; None for any number.
    """

    def __init__(
        self, pool: WorkerPool | InlinePool, settings: JobSettings, policy: str, max_restarts: int | None
    ) -> None:
        self.pool = pool
        self.members = [Member() for _ in range(pool.n_workers)]
        self._settings, self._max_restarts = settings, max_restarts
        # A job in this process cannot be replaced: what it raises is raised.
        self._mends = policy == RESTART and isinstance(pool, WorkerPool)
        self._replaced: set[int] = set()
        self._running: set[int] = set()
        self._lost: dict[int, BaseException] = {}
        self._outcomes: dict[int, Any] | None = None
        #: What all environments have gathered together, by name; replaced, never changed.
        self.statistics: dict[str, Moments] = {}
        # What a successor is told, in this order, before it is one of the crew.
        self._orders: dict[str, tuple[Any, ...]] = {"describe": ()}
        self._n_envs: int | None = None

    @property
    def n_restarts(self) -> int:
        """How many workers were replaced."""
        return sum(member.n_restarts for member in self.members)

    def describe(self) -> list[Any]:
        """What the jobs say of themselves: how many environments they have, and, the first, the specs."""
        answers = self.pool.call("describe")
        self._n_envs = answers[0][0]
        return answers

    def attach(self, layout: Layout) -> None:
        """Gives every worker its slots."""
        self._orders["attach"] = (layout,)
        self.pool.call("attach", layout)

    def update(self, packed: bytes) -> None:
        """Updates every agent."""
        self._call("update", packed)

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
                **dataclasses.asdict(member.clock),
            }
            for member in self.members
        ]

    def renew(self, state: list[dict[str, Any]]) -> None:
        """Has every worker make new environments, with the next part of its streams; counters go on from `state`."""
        names = [each.name for each in dataclasses.fields(Clock)]
        settings = self._settings
        for index, kept in enumerate(state):
            self.members[index] = Member(
                kept["stream"] + 1,
                kept["restarts"],
                kept["lost_rollouts"],
                time.monotonic() - kept["seconds"],
                Clock(*(kept[name] for name in names)),
            )
            settings = settings.again(index, kept["stream"] + 1)
        self._orders.pop("reset", None)
        clocks = [member.clock.fields() for member in self.members]
        self._call("renew", settings.seeds, settings.agent_seeds, clocks, is_lasting=False)

    def evaluate(self, *arguments: Any) -> list[dict[str, Any]] | Exception:
        """What `RolloutJob.end_evaluation` gives, by worker index, after an evaluation that these arguments begin.

        A successor begins its worker's part anew, unless its worker has failed so often that it always would.

        Returns:
            What the first one raised, if one did; nothing has happened to the workers then.

        Raises:
            WorkerError: a worker is gone or late.
        """
        found: dict[int, dict[str, Any]] = {}
        everyone = range(self.pool.n_workers)
        n_deaths, first, new = dict.fromkeys(everyone, 0), dict[int, BaseException](), list(everyone)
        while left := [index for index in everyone if index not in found]:
            failures = self._asked("begin_evaluation", (*arguments, self.statistics), new)[1]
            if not failures:
                ended, failures = self._asked("evaluate", (), left)
                if not failures and all(ended.values()):
                    episodes, failures = self._asked("end_evaluation", (), left)
                    found |= episodes
            raised = [error for _, error in sorted(failures.items()) if not isinstance(error, WorkerError)]
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
        return [found[index] for index in everyone]

    def reset(self) -> None:
        """Resets every environment."""
        self._call("reset", self.statistics)

    def begin(self, running: set[int]) -> None:
        """Starts a rollout in every worker; the indexes of those in which something runs."""
        self._running = running
        if isinstance(self.pool, WorkerPool) and self._mends:
            self._mend(self.pool.check())
            self.pool.ask("rollout", self.statistics)
        else:
            self.pool.broadcast("rollout", self.statistics)

    def is_ready(self) -> bool:
        """Whether `collect` would not have to wait for rollouts."""
        if self._outcomes is not None:
            return True
        return self.pool.is_settled() if isinstance(self.pool, WorkerPool) and self._mends else self.pool.ready()

    def collect(self) -> list[Any]:
        """What every rollout replied, by worker index; None for one that was lost with its worker.

        May be interrupted and called again; `forget` says that it is over.
        """
        if self._outcomes is None:
            self._outcomes = self._settled()
            for index, outcome in self._outcomes.items():  # before some of them are replaced
                self.members[index].clock = Clock(*outcome[1])
        self._mend(self._lost)
        return [self._outcomes.get(index) for index in range(self.pool.n_workers)]

    def _settled(self) -> dict[int, Any]:
        if not (isinstance(self.pool, WorkerPool) and self._mends):
            return dict(enumerate(self.pool.gather()))
        replies, failures = self.pool.settle()
        self._lost = dict(failures)
        # One that had replied before it died has lost nothing, nor one in which nothing ran.
        for index in (failures.keys() - replies.keys()) & self._running:
            self.members[index].n_lost += 1
        return dict(replies)

    def forget(self) -> set[int]:
        """Ends what `collect` began; the workers that were replaced since the last call."""
        self._outcomes = None
        replaced, self._replaced = self._replaced, set()
        return replaced

    def learn(self, outcomes: list[Any]) -> None:
        """Adds what rollouts gathered to the statistics, once, in the order of the workers."""
        self.know(merged(self.statistics, [outcome[2] for outcome in outcomes if outcome is not None]))

    def stats(self) -> list[dict[str, Any]]:
        """For each worker what `RL_Batcher.stats` says of it."""
        return [
            {
                "worker": index,
                "pid": pid,
                "state": state,
                "restarts": member.n_restarts,
                "lost_rollouts": member.n_lost,
                **_times(member),
            }
            for index, (pid, state, member) in enumerate(
                zip(self.pool.pids, self.pool.states, self.members, strict=True)
            )
        ]

    def _asked(
        self, method: str, arguments: tuple[Any, ...], only: list[int]
    ) -> tuple[dict[int, Any], dict[int, BaseException]]:
        """What some workers reply, and what became of those that did not."""
        pool = self.pool
        if not only:
            return {}, {}
        if not isinstance(pool, WorkerPool):
            try:
                return dict(enumerate(pool.call(method, *arguments))), {}
            except Exception as error:
                return {}, {0: error}
        pool.ask(method, *arguments, only=only)
        replies, failures = pool.settle()
        pool.forget_outcomes()
        return replies, failures

    def _call(self, method: str, *arguments: Any, is_lasting: bool = True) -> None:
        """Asks all workers, and, if that is lasting, has successors asked the same from now on."""
        if not (isinstance(self.pool, WorkerPool) and self._mends):
            self.pool.call(method, *arguments)
            return
        self._mend(self.pool.check())  # first: who takes the place of one of these is asked below
        if is_lasting:
            self._orders.pop(method, None)
            self._orders[method] = arguments
        self.pool.ask(method, *arguments)
        self._mend(dict(self.pool.settle()[1]))

    def _mend(self, failures: dict[int, BaseException]) -> None:
        """Puts successors in the place of workers that failed.

        Raises:
            Exception: the first failure, when there were too many, or that of a successor which never comes up.
        """
        pool = self.pool
        first: dict[int, BaseException] = {}  # what became of the first successor
        n_attempts = dict.fromkeys(range(pool.n_workers), 0)
        while failures and isinstance(pool, WorkerPool):
            _, error = min(failures.items())
            if self._max_restarts is not None and self.n_restarts + len(failures) > self._max_restarts:
                raise error
            for index, why in sorted(failures.items()):
                if n_attempts[index]:
                    first.setdefault(index, why)
                if n_attempts[index] == MAX_ATTEMPTS:
                    raise first[index]
                n_attempts[index] += 1
            for index, why in failures.items():
                logger.warning("worker %d is replaced: %r", index, why)
            failures = self._replace(pool, sorted(failures))
        self._lost = {}
        if isinstance(pool, WorkerPool):
            pool.forget_outcomes()

    def _replace(self, pool: WorkerPool, indexes: list[int]) -> dict[int, BaseException]:
        """Starts a successor for each of these; those that did not come up, and why."""
        factories = {}
        for index in indexes:
            member = self.members[index]
            self.members[index] = Member(member.stream + 1, member.n_restarts + 1, member.n_lost)
            factories[index] = JobFactory(self._settings.again(index, member.stream + 1), is_first=False)
        self._replaced |= set(indexes)
        pool.forget_outcomes()
        pool.restart(factories)
        replies, failures = pool.settle()
        for method, arguments in self._orders.items():
            pool.ask(method, *arguments, only=[index for index in indexes if index not in failures])
            replies, failures = pool.settle()
            if method == "describe":
                failures |= {
                    index: SpecError(f"create_env: worker {index} has {replies[index][0]} environments now, "
                                     f"it had {self._n_envs}")
                    for index in replies.keys() - failures.keys() if replies[index][0] != self._n_envs
                }  # fmt: skip
        return dict(failures)


def started(
    settings: JobSettings,
    n_processes: int,
    shared: tuple[SharedArena, SharedArena],
    start_method: str | None,
    timeout: float | None,
) -> WorkerPool | InlinePool:
    """Workers with their jobs built; with no processes the job runs in this one.

    Raises:
        TypeError: what the user gave cannot be sent to a worker.
    """
    try:
        if n_processes == 0:
            return InlinePool(JobFactory(settings.by_value()), shared=shared, around=PrivateStreams())
        return WorkerPool(
            n_processes,
            JobFactory(settings),
            shared=shared,
            start_method=start_method,
            timeout=timeout,
            preload=PRELOAD,
            setup=partial(registry.register, registry.registered()),
            name="rlstructs-worker",
        )
    except Exception as error:
        if culprit := settings.unpicklable():
            raise TypeError(f"{culprit[0]} cannot be sent to a worker: {culprit[1]}") from error
        raise


def check_policy(policy: str, max_restarts: int | None) -> None:
    """Raises SpecError or TypeError unless these say what is to become of workers that fail."""
    if policy not in POLICIES:
        raise SpecError(f"on_worker_failure must be one of {POLICIES}, got {policy!r}")
    if max_restarts is not None:
        check_count("max_restarts", max_restarts, 0)


def _times(member: Member) -> dict[str, Any]:
    elapsed, clock = time.monotonic() - member.since, member.clock
    return {
        "steps": clock.steps,
        "steps_per_second": clock.steps / elapsed,
        "environment_seconds": clock.environment,
        "agent_seconds": clock.agent,
        "waiting_seconds": max(0.0, elapsed - clock.busy),
    }
