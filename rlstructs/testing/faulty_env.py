"""`FaultyEnv`: an environment that counts its steps and fails where a `Fault` says."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, TypeVar

import gymnasium
import numpy as np
from gymnasium import spaces

from rlstructs.envs.gym_env import GymEnv, GymEnvInf
from rlstructs.errors import SpecError
from rlstructs.workers.public_names import set_module

# Indexes of the numbers in an observation.
ENV_INDEX, GENERATION, EPISODE, AT, CHECKSUM = range(5)
N_FIELDS = 5
# The generation is the worker's restart number, plus this number for each time that the environment was made anew.
LIFE = 4096
N_ACTIONS = 5

Numbers = TypeVar("Numbers", int, np.ndarray)

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


def checksum_of(env_index: Numbers, generation: Numbers, episode: Numbers, step: Numbers, action: Numbers) -> Numbers:
    """The last number of an observation, below 2**24, so that float32 holds it exactly.

    Args:
        env_index, generation, episode, step: of the observation.
        action: the one before the observation, plus 1; 0 after a reset.
    """
    total = env_index * 0  # 0 of the same type: int, or int64 array
    for part in (env_index, generation, episode, step, action):
        total = (total * 1_103_515_245 + part + 12_345) % 2_147_483_647
    return total % (1 << 24)


@set_module("rlstructs.testing")
class FaultyEnv(gymnasium.Env):  # type: ignore[misc]
    """Counts its steps, and fails where its faults say so.

    An observation is float32 (5,): `[index of the environment, generation, episode, step, checksum]`,
    where the checksum is `checksum_of` the others and the action. Step s of an episode gives reward s; the last step is
    `length`. From this `verify` and `Ledger` can tell whether a transition has really happened.

    Args:
        faults: what goes wrong.
        worker: index of the worker it runs in.
        generation: restart number of that worker, how many were in its place before; and 4096 for each time that this
            environment was made anew.
        env_index: its index among all environments.
        length: of each episode, in steps.
        truncates: whether episodes are truncated at their end, not terminated.

    Example:
        >>> env = FaultyEnv([Fault("raise", at="step", count=2, error=KeyError("lost"))], env_index=7)
        >>> env.reset()[0][:4].tolist()
        [7.0, 0.0, 0.0, 0.0]
        >>> env.step(0)[1]
        1.0
        >>> env.step(0)
        Traceback (most recent call last):
        KeyError: 'lost'
    """

    action_space = spaces.Discrete(N_ACTIONS)
    observation_space = spaces.Box(0, 1 << 24, (N_FIELDS,), np.float32)
    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def __init__(
        self,
        faults: Sequence[Fault] = (),
        *,
        worker: int = 0,
        generation: int = 0,
        env_index: int = 0,
        length: int = 10,
        truncates: bool = False,
    ) -> None:
        where = {"worker": worker, "env_index": env_index, "generation": generation}
        self.faults = [fault for fault in faults if fault.concerns(**where)]
        self.generation, self.env_index = generation, env_index
        self.length, self.truncates = length, truncates
        self.episode, self.steps = -1, 0
        self.damage = Damage()
        self._counts = {INIT: 0, RESET: 0, STEP: 0, CLOSE: 0}
        try:
            self._strike(INIT)
        except BaseException:
            self.damage.end()  # nobody can call `close`
            raise

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Starts the next episode; ignores the seed, because nothing is random."""
        self.episode, self.steps = self.episode + 1, 0
        return self._spoil(self._observation(0), self._strike(RESET)), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Counts one more step."""
        self.steps += 1
        faults = self._strike(STEP)
        ended = self.steps >= self.length
        observation = self._spoil(self._observation(int(action) + 1), faults)
        reward = float("nan") if "nan" in faults else float(self.steps)
        return observation, reward, ended and not self.truncates, ended and self.truncates, {}

    def close(self) -> None:
        """Ends the processes that faults have started."""
        try:
            self._strike(CLOSE)
        finally:
            self.damage.end()

    def _strike(self, at: str) -> list[str]:
        """Carries out the faults of this call; returns their kinds."""
        self._counts[at] += 1
        struck = [fault for fault in self.faults if fault.strikes(at, self._counts[at])]
        for fault in struck:
            self.damage.do(fault)
        return [fault.kind for fault in struck]

    def _observation(self, action: int) -> np.ndarray:
        fields = self.env_index, self.generation, self.episode, self.steps
        return np.array([*fields, checksum_of(*fields, action)], np.float32)

    @staticmethod
    def _spoil(observation: np.ndarray, faults: list[str]) -> np.ndarray:
        if "nan" in faults:
            observation = np.full_like(observation, np.nan)
        return np.append(observation, np.float32(0)) if "shape" in faults else observation


def create_faulty_envs(
    n_envs: int,
    seed: int,
    faults: Sequence[Fault] = (),
    *,
    length: int = 10,
    truncates: bool = False,
    autoreset: bool = True,
) -> GymEnv:
    """Makes the environments of one worker; a `create_env` for `RL_Batcher`.

    Args:
        n_envs: how many.
        seed: the seed that a batcher with one int as `seeds` gives to a worker; it says which worker this is. Any
            other int means worker 0.
        faults: as for `FaultyEnv`.
        length: of each episode, in steps.
        truncates: whether episodes are truncated at their end.
        autoreset: whether to make a `GymEnvInf`; otherwise a `GymEnv`.

    Example:
        >>> from rlstructs import RandomAgent, RL_Batcher
        >>> arguments = {"n_envs": 2, "faults": [Fault("raise", at="step", count=3, worker=1, error=OSError("gone"))]}
        >>> with RL_Batcher(
        ...     n_timesteps=4, create_agent=lambda: RandomAgent(FaultyEnv.action_space), agent_args={},
        ...     create_env=create_faulty_envs, env_args=arguments, n_processes=2, seeds=0,
        ... ) as batcher:
        ...     batcher.reset()
        ...     batcher.execute()
        ...     batcher.get()
        Traceback (most recent call last):
        OSError: gone
        raised by environment 0 (FaultyEnv) in step
        raised in worker 1 during 'rollout'
    """
    worker, generation = getattr(seed, "worker_index", 0), getattr(seed, "restart_number", 0)
    generation += LIFE * getattr(seed, "life", 0)
    envs: list[gymnasium.Env] = []
    try:
        for k in range(n_envs):
            env_index = worker * n_envs + k
            envs.append(
                FaultyEnv(
                    faults,
                    worker=worker,
                    generation=generation,
                    env_index=env_index,
                    length=length,
                    truncates=truncates,
                )
            )
    except BaseException:
        for env in envs:  # they may have children
            env.close()
        raise
    return (GymEnvInf if autoreset else GymEnv)(envs, seed)
