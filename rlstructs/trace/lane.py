"""A lane: how long one process spends in each phase, in memory that it shares.

A process is in one phase at a time, so that the seconds of a lane add up. Each change of phase adds to a sum; while
a timeline is recorded it also appends an event of 16 bytes to a ring. Nobody waits for anybody: what a reader does not
take in time is overwritten.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter_ns, process_time_ns
from typing import Any, Protocol, TypeVar, cast

from rlstructs.workers.arena import Descriptor

#: The phases: of workers, of the trainer, and of a timeline that lacks events.
NAMES = (
    *("wait for an order", "agent", "environment", "reset", "write", "update", "evaluate", "start"),
    *("learn", "wait", "read", "lease", "order", "draw", "save", "restart", "not recorded"),
)
(ORDERLESS, AGENT, ENVIRONMENT, RESET, WRITE, UPDATE, EVALUATE, START,
 LEARN, WAIT, READ, LEASE, ORDER, DRAW, SAVE, RESTART, UNKNOWN) = range(len(NAMES))  # fmt: skip
# The cells of a lane besides the nanoseconds in each phase, int64. The slowest environment counts from the worker's
# first; times of environments are medians of a sample of their steps.
(STEPS, ROLLOUTS, VERSION, CPU, DELAY, SLOWEST, SLOWEST_NS, TIMED_NS, N_TIMED, PID, RESTARTS, EPISODES, HEAD,
 IS_TRACED) = range(len(NAMES), len(NAMES) + 14)  # fmt: skip
N_CELLS = len(NAMES) + 14
# The events of a ring: changes of phase, and the following notes, whose values stand above the lowest byte.
BEGIN, END, NOTE_VERSION, NOTE_STEPS, NOTE_CPU, NOTE_DELAY, ORDERED, DELIVERED, REPLACED = range(32, 41)
N_EVENTS = 30 * 2**10  # a quarter of a second at 120,000 a second; with one worker less than a megabyte in all
# Environments are timed one by one in these first steps, and then in every so many: a prime, as episodes often have
# round lengths.
FIRST_STEPS, TIMED_STEPS = range(2, 8), 61
# Nanoseconds between two looks at the processor's time, which cost as much as a short rollout's step.
LOOK_NS = 20_000_000

NO_CONTEXT = contextlib.nullcontext()

F = TypeVar("F", bound=Callable[..., Any])


class SupportsTimes(Protocol):
    """A clock of a worker: steps, and seconds."""

    steps: int
    environment: float
    agent: float


class Lane:
    """The phases of one process.

    Args:
        cells: int64 (N_CELLS,), the sums; in memory that others read.
        ring: int64 (2 * N_EVENTS,), a time and a kind for each event; None without a ring.
        is_traced: int64 (1,), whether events are wanted.
        phase: the phase to begin with.

    Attributes:
        enter: ends the present phase, begins another one, and returns the one before.
        note: appends a note to the ring, a kind and a value; does nothing unless events are recorded.
    """

    def __init__(
        self,
        cells: memoryview | list[int] | None = None,
        ring: memoryview | None = None,
        is_traced: Sequence[int] = (0,),
        phase: int = ORDERLESS,
    ) -> None:
        self.cells: Any = [0] * N_CELLS if cells is None else cells
        self._ring: memoryview | None = ring
        self._wanted, self._traces = is_traced, 0
        self.cells[PID] = os.getpid()
        self.thread = threading.get_ident()
        self.enter, self.note, self._position = _make_marks(self.cells, None, phase, perf_counter_ns())
        self._step_ns: dict[int, deque[int]] = {}
        self._schedule: Descriptor | None = None
        self._looked, self._cpu, self._delay = 0, 0, 0
        self.look()

    def detach(self) -> None:
        """Goes on in memory of its own, so that nothing holds the shared memory."""
        self.cells, self._ring, self._wanted, self._traces = list(self.cells), None, (0,), 0
        self.enter, self.note, self._position = _make_marks(self.cells, None, *self._position())

    def look(self) -> None:
        """Begins or ends the recording of events, as the trainer wants it."""
        if self._wanted[0] != self._traces:
            self._traces = self._wanted[0]
            ring = self._ring if self._traces else None
            self.enter, self.note, self._position = _make_marks(self.cells, ring, *self._position())

    @contextlib.contextmanager
    def count_rollout(self, number: int, version: int, clock: SupportsTimes) -> Iterator[None]:
        """Notes a rollout, and adds what it took to a clock.

        Args:
            number: of the rollout.
            version: the number of updates that the agent has received.
            clock: what else adds up times.
        """
        if not self._looked:  # from the first rollout on: not how the worker started
            self._looked, self._cpu, self._delay = perf_counter_ns(), process_time_ns(), self._read_delay()
        cells, before = self.cells, self._sums()
        self.note(BEGIN, number)
        self.note(NOTE_VERSION, version)
        yield
        steps, environment, agent = (new - old for new, old in zip(self._sums(), before, strict=True))
        clock.steps += steps
        clock.environment += environment / 1e9
        clock.agent += agent / 1e9
        cells[ROLLOUTS], cells[VERSION] = number + 1, version
        self.measure()
        self.note(NOTE_STEPS, steps)
        self.note(END, number)

    def _sums(self) -> tuple[int, int, int]:
        cells = self.cells
        return cells[STEPS], cells[ENVIRONMENT] + cells[RESET], cells[AGENT]

    def measure(self) -> None:
        """Adds up the processor's time of this process, and the time that it waited for one; finds the slowest step.

        Environments are compared by medians, because one step may take long for many reasons.
        """
        now = perf_counter_ns()
        if now - self._looked < LOOK_NS:
            return
        self._looked = now
        cpu, delay = process_time_ns(), self._read_delay()
        for cell, kind, new in ((CPU, NOTE_CPU, cpu - self._cpu), (DELAY, NOTE_DELAY, delay - self._delay)):
            self.cells[cell] += new
            self.note(kind, new)
        self._cpu, self._delay = cpu, delay
        if self._step_ns:
            medians = {k: sorted(times)[len(times) // 2] for k, times in self._step_ns.items()}
            slowest = max(medians, key=lambda k: medians[k])
            found = slowest, medians[slowest], sum(medians.values()), len(medians)
            self.cells[SLOWEST], self.cells[SLOWEST_NS], self.cells[TIMED_NS], self.cells[N_TIMED] = found

    def _read_delay(self) -> int:
        """Returns the nanoseconds that this thread was ready to run and did not; 0 where the system does not tell."""
        try:
            if self._schedule is None:
                self._schedule = Descriptor(os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC))
            return int(os.pread(self._schedule.fileno(), 64, 0).split()[1])
        except (OSError, IndexError, ValueError):
            return self._delay

    def time_envs(self, envs: Sequence[Any], indexes: Sequence[int]) -> list[TimedEnv]:
        """Wraps environments for one step, whose times are noted."""
        return [TimedEnv(env, k, self) for env, k in zip(envs, indexes, strict=True)]

    def add_step(self, k: int, ns: int) -> None:
        """Notes the time of a step of environment k, counted from the worker's first."""
        self._step_ns.setdefault(k, deque(maxlen=9)).append(ns)


def is_timed(step: int) -> bool:
    """Whether the environments are timed one by one in this step, the n-th in which they are stepped together."""
    return step % TIMED_STEPS == 0 or step in FIRST_STEPS


@dataclass(frozen=True)
class TimedEnv:
    """An environment whose steps are timed."""

    env: Any
    index: int
    lane: Lane

    def step(self, action: Any) -> Any:
        """Steps the environment."""
        began = perf_counter_ns()
        try:
            return self.env.step(action)
        finally:
            self.lane.add_step(self.index, perf_counter_ns() - began)


def _make_marks(
    cells: Any, ring: memoryview | None, phase: int, since: int
) -> tuple[Callable[[int], int], Callable[[int, int], None], Callable[[], tuple[int, int]]]:
    """Makes `enter` and `note` of a lane, and a function that returns the present phase and its begin.

    They are closures because `enter` is called several times a step.
    """

    def enter(following: int) -> int:
        nonlocal phase, since
        now = perf_counter_ns()
        cells[phase] += now - since
        before, phase, since = phase, following, now
        return before

    def ignore(kind: int, value: int) -> None:
        pass

    def position() -> tuple[int, int]:
        return phase, since

    if ring is None:
        return enter, ignore, position
    events, n = ring, cells[HEAD]

    def append(now: int, kind: int) -> None:
        nonlocal n
        at = 2 * (n % N_EVENTS)
        events[at], events[at + 1] = now, kind
        n += 1
        cells[HEAD] = n  # last: a reader takes what is below it

    def enter_and_record(following: int) -> int:
        nonlocal phase, since, n
        now = perf_counter_ns()
        cells[phase] += now - since
        before, phase, since = phase, following, now
        at = 2 * (n % N_EVENTS)
        events[at], events[at + 1] = now, following
        n += 1
        cells[HEAD] = n
        return before

    def note(kind: int, value: int) -> None:
        append(perf_counter_ns(), kind | value << 8)

    append(since, phase)
    return enter_and_record, note, position


def _name_for_profiler(phase: int) -> contextlib.AbstractContextManager[Any]:
    """A context that a profiler of torch shows by the phase's name, if one is active in this process."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.autograd._profiler_enabled():
        return NO_CONTEXT
    named: contextlib.AbstractContextManager[Any] = torch.profiler.record_function(f"rlstructs: {NAMES[phase]}")
    return named


def pack_place(worker: int, number: int) -> int:
    """Returns the value of a note for one worker's rollout."""
    return worker | number << 16


#: The lane of what runs at present; None where nothing is measured.
current: Lane | None = None


def during(phase: int) -> Callable[[F], F]:
    """Makes a method of an object with a `_lane` a phase of that lane."""

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            global current
            lane: Lane = self._lane
            lane.look()
            before, current = current, None if phase == EVALUATE else lane
            phase_before = lane.enter(phase)
            try:
                with _name_for_profiler(phase):
                    return method(self, *args, **kwargs)
            finally:
                lane.enter(phase_before)
                current = before

        return cast(F, call)

    return decorate


def within(phase: int) -> Callable[[F], F]:
    """Makes a function a phase of the lane of what runs at present, if there is one of this thread."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            lane = current
            if lane is None or lane.thread != threading.get_ident():
                return function(*args, **kwargs)
            before = lane.enter(phase)
            try:
                with _name_for_profiler(phase):
                    return function(*args, **kwargs)
            finally:
                lane.enter(before)

        return cast(F, call)

    return decorate
