"""The faults of a `FaultyEnv`, and their places."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
import warnings
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass

from rlstructs.errors import SpecError
from rlstructs.workers.public_names import set_module

INIT, RESET, STEP, CLOSE = "init", "reset", "step", "close"
PLACES = (INIT, RESET, STEP, CLOSE)
KINDS = ("raise", "hang", "exit", "kill", "allocate", "child", "shape", "nan")
# Kinds that change what a reset or a step returns.
SPOILING = ("shape", "nan")

# Bytes that "allocate" takes at a time.
BLOCK = 16 << 20


def make_fault_error() -> RuntimeError:
    """The exception of a "raise" fault that was given no `error`."""
    return RuntimeError("a deliberate fault")


@set_module("rlstructs.testing")
@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Args:
        kind: what goes wrong:
            "raise" raises `error`;
            "hang" does not return for `seconds`;
            "exit" ends the process by `os._exit(code)`;
            "kill" ends it by SIGKILL;
            "allocate" takes `limit` bytes of memory, block by block, and keeps them;
            "child" starts a process that lives for `seconds`, or until the environment is closed;
            "shape" gives an observation with one number more than the space says;
            "nan" gives NaN as observation and reward.
        at: "init", "reset", "step" or "close".
        count: the number of the call, from 1, counted for each environment over all its episodes; None for every call.
        worker: index of the worker; None for all.
        env_index: index of the environment among those of all workers; None for all.
        generations: restart numbers of the workers: 0 is the first worker, 1 the one that replaces it; None for all.
        error: the exception of "raise"; or a function that makes it in the worker, if it cannot be pickled.
        code: exit code of "exit".
        seconds: how long "hang" and "child" last, at most.
        in_c: "hang" stays in C, so that no signal handler and no other thread runs. On Linux only.
        ignore_sigterm: only SIGKILL ends "hang".
        limit: bytes that "allocate" takes; None for all available memory, which can crash the machine.
        fork: "child" is a fork of the worker, with all its descriptors, instead of a new program.

    Raises:
        SpecError: `kind`, `at` or `count` is none of these values, or `kind` and `at` do not fit together.

    Example:
        >>> faults = [Fault("kill", at="step", count=3, worker=1, generations=[0]), Fault("raise", at="close")]
        >>> [fault.concerns(worker=1, env_index=5, generation=1) for fault in faults]
        [False, True]
    """

    kind: str
    _: KW_ONLY
    at: str = STEP
    count: int | None = 1
    worker: int | None = None
    env_index: int | None = None
    generations: Collection[int] | None = None
    error: BaseException | Callable[[], BaseException] = make_fault_error
    code: int = 3
    seconds: float = 600.0
    in_c: bool = False
    ignore_sigterm: bool = False
    limit: int | None = 1 << 30
    fork: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise SpecError(f"Fault: kind must be one of {KINDS}, got {self.kind!r}")
        if self.at not in PLACES:
            raise SpecError(f"Fault: at must be one of {PLACES}, got {self.at!r}")
        if self.kind in SPOILING and self.at not in (RESET, STEP):
            raise SpecError(f"Fault: {self.kind!r} needs at={RESET!r} or at={STEP!r}, got at={self.at!r}")
        if self.count is not None and self.count < 1:
            raise SpecError(f"Fault: count must be at least 1, got {self.count}")

    def concerns(self, *, worker: int, env_index: int, generation: int) -> bool:
        """Whether the fault can strike in this environment."""
        return (
            self.worker in (None, worker)
            and self.env_index in (None, env_index)
            and (self.generations is None or generation in self.generations)
        )

    def strikes(self, at: str, count: int) -> bool:
        """Whether the fault strikes in this call of an environment that it concerns."""
        return at == self.at and self.count in (None, count)


class Damage:
    """Carries out faults, and keeps their children and memory in a process.

    Attributes:
        children: pids of the processes that "child" faults started.
    """

    def __init__(self) -> None:
        self.children: list[int] = []
        self._held: list[bytearray] = []

    def do(self, fault: Fault) -> None:
        """Carries out a fault, unless its kind only changes an observation."""
        if fault.kind == "raise":
            raise fault.error if isinstance(fault.error, BaseException) else fault.error()
        if fault.kind == "hang":
            _hang(fault)
        elif fault.kind == "exit":
            os._exit(fault.code)
        elif fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "allocate":
            self._allocate(fault.limit)
        elif fault.kind == "child":
            self.children.append(_fork_child(fault.seconds) if fault.fork else _start_child(fault.seconds))

    def end(self) -> None:
        """Ends the children and frees the memory."""
        while self.children:
            pid = self.children.pop()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._held.clear()

    def _allocate(self, limit: int | None) -> None:
        taken = 0
        while limit is None or taken < limit:
            n = BLOCK if limit is None else min(BLOCK, limit - taken)
            self._held.append(bytearray(b"\1") * n)  # written to, because reserved pages cost nothing
            taken += n


def _hang(fault: Fault) -> None:
    if fault.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if fault.in_c:
        _hang_in_c(fault.seconds)
    else:
        end = time.monotonic() + fault.seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(left)


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _hang_in_c(seconds: float) -> None:
    # Waits for a lock that this thread holds already: signals interrupt a sleep, but not this.
    # PyDLL, unlike CDLL, keeps the interpreter's own lock.
    libc = ctypes.PyDLL(None)
    mutex = (ctypes.c_long * 16)()  # zeros are PTHREAD_MUTEX_INITIALIZER
    libc.pthread_mutex_lock(mutex)
    whole, nanoseconds = divmod(time.time_ns() + int(seconds * 1e9), 1_000_000_000)
    libc.pthread_mutex_timedlock(mutex, ctypes.byref(_Time(whole, nanoseconds)))


def _start_child(seconds: float) -> int:
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(["sleep", str(seconds)], stdin=quiet, stdout=quiet, stderr=quiet)
    process.returncode = 0  # `Damage` waits for it; subprocess would warn about a running child
    return process.pid


def _fork_child(seconds: float) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the warning about threads: this child only sleeps
        pid = os.fork()
    if pid == 0:
        try:
            time.sleep(seconds)
        finally:
            os._exit(0)
    return pid
