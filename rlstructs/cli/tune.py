"""`rlstructs tune`: finds the fastest numbers of workers, environments and timesteps.

`bench tune` is another name of it.

The limit is the speed of bare loops, one process per core, which step the same environments with actions drawn
beforehand and do nothing else. Limit and trial are measured in turns, so that a busy machine slows both. Environments
that wait for most of the time of their bare loop are tried in threads.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium

from rlstructs.cli.collect import Settings, make_batcher
from rlstructs.seeding import WorkerStreams, environment_seeds
from rlstructs.worker_setup import WorkerSetup
from rlstructs.workers import WorkerPool

# The first choice; then other values are tried one by one, with the best choice so far.
N_ENVS, N_TIMESTEPS = 16, 128
OTHER_ENVS, OTHER_TIMESTEPS = (64, 256, 4), (32, 512)
# Environments of each bare loop, and the actions drawn for each.
BARE_ENVS, BARE_ACTIONS = 8, 257
# Alternations of limit and trial, and the share of the time that one trial takes.
N_TURNS, TRIAL_SHARE = 3, 1 / 12
# Environments wait if their bare loops run, or wait for a core, for less than this share of the time, which is so many
# seconds at least.
BUSY_SHARE, SHORTEST = 0.5, 0.2


class Choice(NamedTuple):
    """The numbers to choose; their names are those of `Settings`."""

    n_workers: int
    n_envs: int
    n_timesteps: int
    threads: bool = False


@dataclass(frozen=True)
class Trial:
    """The measurement of a choice.

    Attributes:
        choice: the choice.
        speed, limit: environment steps per second.
        share: speed as a share of the limit, the median over turns.
        verdict: where the time went, as `RL_Batcher.explain` says it.
    """

    choice: Choice
    speed: float
    limit: float
    share: float
    verdict: str


def print_trials(env_id: str, n_cores: int, seconds: float) -> None:
    """Tries choices; prints a table of them, the best, and those left untried.

    Choices are left untried when the time is up; see `tune`.
    """
    print(f"{env_id}, random agent; the limit is bare loops, a process for each core: {n_cores}")
    print(f"{'workers':>7} {'envs':>5} {'timesteps':>9} {'steps/s':>12} {'limit':>12} {'share':>6}", flush=True)
    trials: list[Trial] = []
    untried: list[Choice] = []
    for trial in tune(env_id, n_cores, seconds, untried):
        trials.append(trial)
        workers, envs, timesteps, _ = trial.choice
        speeds = f"{trial.speed:12,.0f} {trial.limit:12,.0f} {trial.share:6.2f}"
        print(f"{workers:7} {envs:5} {timesteps:9} {speeds}", flush=True)
    best = max(trials, key=lambda trial: trial.share)
    print(f"best: {_options(best.choice)}, {best.share:.2f} of the limit")
    if best.choice.threads:
        print("the environments wait for most of the time: RL_Batcher.make(threads=True) has them wait together")
    if untried:
        print(f"not tried, as the time was up: {'; '.join(map(_options, untried))}; --seconds gives more")
    print(best.verdict)


def _options(choice: Choice) -> str:
    threads = " --threads" if choice.threads else ""
    return f"--workers {choice.n_workers} --envs {choice.n_envs} --timesteps {choice.n_timesteps}{threads}"


def tune(env_id: str, n_cores: int, seconds: float, untried: list[Choice]) -> Iterator[Trial]:
    """Tries choices one after another until the time is up, and at least one.

    Args:
        env_id: id in gymnasium's registry.
        n_cores: number of processes that run at once.
        seconds: time after which no trial begins.
        untried: receives the choices for which no time was left.
    """
    end, turn = time.monotonic() + seconds, seconds * TRIAL_SHARE / (2 * N_TURNS)
    with bare_loops(env_id, n_cores) as loops:
        threads = statistics.mean(loops.call("busy_share", max(turn, SHORTEST))) < BUSY_SHARE
        tried: dict[Choice, float] = {}
        for choice in choices(n_cores, tried, threads):
            if tried and time.monotonic() > end:
                untried.append(choice)
                continue
            trial = _run_trial(env_id, choice, lambda seconds: float(sum(loops.call("run", seconds))), turn)
            tried[choice] = trial.share
            yield trial


def choices(n_cores: int, tried: dict[Choice, float], threads: bool = False) -> Iterator[Choice]:
    """The choices to try, which depend on earlier results.

    Args:
        n_cores: number of processes that run at once.
        tried: choice -> how good it was; the caller adds each choice after trying it.
        threads: whether environments run in threads.

    Example:
        >>> tried = {}
        >>> for choice in choices(2, tried):
        ...     tried[choice] = -abs(choice.n_envs - 60) + choice.n_workers
        >>> max(tried, key=tried.get)
        Choice(n_workers=2, n_envs=64, n_timesteps=128, threads=False)
    """
    yield Choice(n_cores, N_ENVS, N_TIMESTEPS, threads)
    fewer = sorted({max(1, n_cores // 2), max(1, n_cores - 1)})
    for name, values in (("n_envs", OTHER_ENVS), ("n_timesteps", OTHER_TIMESTEPS), ("n_workers", fewer)):
        best = max(tried, key=lambda choice: tried[choice])
        for value in values:
            choice = Choice(**{**best._asdict(), name: value})
            if choice not in tried:
                yield choice


def _run_trial(env_id: str, choice: Choice, limit: Callable[[float], float], seconds: float) -> Trial:
    settings = Settings(env_id, "random", *choice[:3], n_rollouts=1, seed=0, threads=choice.threads)
    speeds, limits = [], []
    with make_batcher(settings) as batcher:
        batcher.reset()

        def rollout() -> int:
            batcher.execute()
            batcher.get()
            return settings.n_steps

        rollout()  # the first one allocates memory
        batcher.explain()
        for _ in range(N_TURNS):
            limits.append(limit(seconds))
            speeds.append(measure_speed(rollout, seconds))
        verdict = batcher.explain()
    shares = [speed / bare for speed, bare in zip(speeds, limits, strict=True)]
    return Trial(choice, statistics.median(speeds), statistics.median(limits), statistics.median(shares), verdict)


def measure_speed(step: Callable[[], int], seconds: float) -> float:
    """Returns the steps per second of a function; calls it at least once.

    The function returns its number of steps.
    """
    n_steps, start = 0, time.perf_counter()
    while True:
        n_steps += step()
        if (elapsed := time.perf_counter() - start) >= seconds:
            return n_steps / elapsed


class BareLoop:
    """The job of a worker that only steps environments."""

    def __init__(self, index: int, env_id: str) -> None:
        self._envs = [gymnasium.make(env_id) for _ in range(BARE_ENVS)]
        for env, seed in zip(self._envs, environment_seeds(index * BARE_ENVS, BARE_ENVS), strict=True):
            env.action_space.seed(seed)
            env.reset(seed=seed)
        drawn: list[list[Any]] = [[env.action_space.sample() for env in self._envs] for _ in range(BARE_ACTIONS)]
        self._actions = itertools.cycle(drawn)

    def run(self, seconds: float) -> float:
        """Steps the environments for some seconds; returns environment steps per second."""
        return measure_speed(self._step, seconds)

    def busy_share(self, seconds: float) -> float:
        """Steps the environments for some seconds.

        Returns the share of that time in which this process ran, or waited for a core.
        """
        start, busy = time.perf_counter(), _busy_seconds()
        self.run(seconds)
        return (_busy_seconds() - busy) / (time.perf_counter() - start)

    def close(self) -> None:
        """Closes the environments."""
        for env in self._envs:
            env.close()

    def _step(self) -> int:
        for env, action in zip(self._envs, next(self._actions), strict=True):
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()
        return len(self._envs)


def _busy_seconds() -> float:
    """The seconds that this thread has run, or waited for a core."""
    try:
        delay = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    except OSError:  # the kernel keeps none
        delay = 0
    return time.thread_time() + delay / 1e9


@contextlib.contextmanager
def bare_loops(env_id: str, n: int) -> Iterator[WorkerPool]:
    """Starts n bare loops; yields their pool."""
    setup = WorkerSetup(WorkerStreams.of_seed(0))
    with WorkerPool(n, partial(BareLoop, env_id=env_id), preload=("torch", "gymnasium"), setup=setup) as pool:
        yield pool
