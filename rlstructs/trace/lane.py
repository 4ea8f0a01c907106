"""A lane: how long one process spends in each phase.

It is in memory that the process shares.

A process is in one phase at a time, so that the seconds of a lane add up. Each change of phase adds to a sum; while
a timeline is recorded it also appends a word of 8 bytes to a ring. Nobody waits for anybody: what a reader does not
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
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from rlstructs.workers.arena import Descriptor

if TYPE_CHECKING:
    import numpy as np

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
TIMED = (SLOWEST, SLOWEST_NS, TIMED_NS, N_TIMED)
# The words of a ring, int64. The lowest six bits say which phase begins, or which of these notes is made; above them
# stands when, by `perf_counter_ns`, which they can hold for four years after the start of the machine. The value of a
# note stands in the next word, above the bits of VALUE.
BEGIN, END, NOTE_VERSION, NOTE_STEPS, NOTE_CPU, NOTE_DELAY, ORDERED, DELIVERED, REPLACED, VALUE = range(32, 42)
N_WORDS = 60 * 2**10  # a quarter of a second at 240,000 a second; with one worker less than a megabyte in all
# Environments are timed one by one in these first steps, and then in every so many: a prime, as episodes often have
# round lengths.
FIRST_STEPS, TIMED_STEPS = range(2, 8), 61
# Nanoseconds between two looks at the processor's time, which cost as much as a short rollout's step.
LOOK_NS = 20_000_000

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
        ring: int64 (N_WORDS,); None without a ring.
        is_traced: int64 (1,), when the recording of events began, by `perf_counter_ns`; 0 without one.
        phase: the phase to begin with.

    Attributes:
        enter: ends the present phase, begins another one, and returns the one before.
        note: appends a note to the ring: a kind and a value, or for a rollout the index of its record and its number;
            does nothing unless events are recorded.
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
        self._wanted, self._marked = is_traced, (0, False)
        self.cells[PID] = os.getpid()
        self.thread = threading.get_ident()
        self._mark(phase, perf_counter_ns())
        self._step_ns: dict[int, deque[int]] = {}
        self._schedule: Descriptor | None = None
        self._looked, self._cpu, self._delay = 0, 0, 0
        self.look()

    def _mark(self, phase: int, since: int) -> None:
        """Makes `enter` and `note`, given the present phase and when it began."""
        is_traced, is_profiled = self._marked
        marks = _make_marks(self.cells, self._ring if is_traced else None, phase, since)
        self.enter, self.note, self._position = marks
        if is_profiled:
            self.enter = _name_phases(self.enter)

    def detach(self) -> None:
        """Goes on in memory of its own, so that nothing holds the shared memory."""
        self.cells, self._ring, self._wanted, self._marked = list(self.cells), None, (0,), (0, False)
        self._mark(*self._position())

    def look(self) -> None:
        """Begins or ends the recording of events, as the trainer wants it.

        Also the names that a profiler of torch shows.
        """
        wanted = self._wanted[0], _is_profiled()
        if wanted != self._marked:
            self._marked = wanted
            self._mark(*self._position())

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
        """Adds up processor time, and the time spent waiting for a processor.

        Also finds the slowest step.

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
        """Returns the nanoseconds that this thread was ready but did not run.

        0 where the system does not tell.
        """
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
    """Whether environments are timed one by one in this step.

    It is the n-th in which they are stepped together.
    """
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
) -> tuple[Callable[[int], int], Callable[..., None], Callable[[], tuple[int, int]]]:
    """Makes `enter` and `note` of a lane.

    Also a function that returns the present phase and when it began.

    They are closures because `enter` is called several times a step.
    """

    def enter(following: int) -> int:
        nonlocal phase, since
        now = perf_counter_ns()
        cells[phase] += now - since
        before, phase, since = phase, following, now
        return before

    def ignore(kind: int, value: int, number: int = 0) -> None:
        pass

    def position() -> tuple[int, int]:
        return phase, since

    if ring is None:
        return enter, ignore, position
    words, n = ring, cells[HEAD]

    def enter_and_record(following: int) -> int:
        nonlocal phase, since, n
        now = perf_counter_ns()
        cells[phase] += now - since
        before, phase, since = phase, following, now
        words[n % N_WORDS] = now << 6 | following
        n += 1
        cells[HEAD] = n  # last: a reader takes what is below it
        return before

    def note(kind: int, value: int, number: int = 0) -> None:
        nonlocal n
        words[n % N_WORDS] = perf_counter_ns() << 6 | kind
        words[(n + 1) % N_WORDS] = (value | number << 16) << 6 | VALUE
        n += 2
        cells[HEAD] = n

    words[n % N_WORDS] = since << 6 | phase
    n += 1
    cells[HEAD] = n
    return enter_and_record, note, position


def _is_profiled() -> bool:
    """Whether a profiler of torch is active in this process."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.autograd._profiler_enabled()


def _name_phases(enter: Callable[[int], int]) -> Callable[[int], int]:
    """Has a profiler of torch show the phases of an `enter`.

    Those between calls are left out.
    """
    torch = sys.modules["torch"]
    shown: contextlib.AbstractContextManager[Any] | None = None

    def enter_and_name(following: int) -> int:
        nonlocal shown
        if shown is not None:
            shown.__exit__(None, None, None)
        shown = None
        if following not in (LEARN, ORDERLESS):
            shown = torch.profiler.record_function(f"rlstructs: {NAMES[following]}")
            shown.__enter__()
        return enter(following)

    return enter_and_name


def unpack(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns what stands above the kinds of words, and the kinds."""
    return words >> 6, words & 63


def unpack_place(value: int) -> tuple[int, int]:
    """Returns the index and the number that `note` was called with."""
    return value & 0xFFFF, value >> 16


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
                return method(self, *args, **kwargs)
            finally:
                lane.enter(phase_before)
                current = before

        return cast(F, call)

    return decorate


def within(phase: int) -> Callable[[F], F]:
    """Makes a function a phase of the lane that is in use.

    That is the lane of what runs at present in this thread, if there is one.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            lane = current
            if lane is None or lane.thread != threading.get_ident():
                return function(*args, **kwargs)
            before = lane.enter(phase)
            try:
                return function(*args, **kwargs)
            finally:
                lane.enter(before)

        return cast(F, call)

    return decorate
