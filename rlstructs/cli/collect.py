"""`rlstructs collect`: runs rollouts of a gymnasium environment, and keeps trajectories and episodes."""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
from tqdm import tqdm

from rlstructs.batcher.batcher import RL_Batcher
from rlstructs.cli.makers import NamedAgent
from rlstructs.envs.gym_env import GymEnvInf
from rlstructs.envs.gym_threads import GymEnvThreads
from rlstructs.errors import OutOfMemoryError
from rlstructs.rollout.makers import Makers
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.trajectories import RolloutFolder, Trajectories
from rlstructs.workers.interrupts import defer_interrupt
from rlstructs.workers.limits import available_bytes


@dataclass(frozen=True)
class Settings:
    """The arguments of `rlstructs collect`.

    Attributes:
        env_id: id in gymnasium's registry.
        agent: name of the agent for `find_agent`.
        n_workers: worker processes; 0 for none.
        n_envs: environments of each worker.
        n_timesteps: steps of each environment in a rollout.
        n_rollouts: number of rollouts.
        seed: seed of all random streams.
        ray: address of the Ray cluster to run workers on; None for this machine.
        n_nodes: as for `RayBatcher`.
        action_mask: `mask` of `RandomAgent`, for the agent `random` alone.
        trace: the file of a timeline; None for none.
        threads: whether each environment is stepped in a thread of its own.
    """

    env_id: str
    agent: str
    n_workers: int
    n_envs: int
    n_timesteps: int
    n_rollouts: int
    seed: int
    ray: str | None = None
    n_nodes: int | None = None
    action_mask: str | None = None
    trace: Path | None = None
    threads: bool = False

    @property
    def n_steps(self) -> int:
        """Environment steps of all rollouts together."""
        return self.n_rollouts * self.n_timesteps * self.n_envs * max(1, self.n_workers)


@dataclass(frozen=True)
class Totals:
    """Sums over rollouts; `seconds` is their duration."""

    n_steps: int = 0
    n_episodes: int = 0
    returns: float = 0.0
    lengths: int = 0
    seconds: float = 0.0

    @property
    def mean_return(self) -> float:
        """Mean return of the episodes that ended; 0 without any."""
        return self.returns / max(1, self.n_episodes)

    @property
    def mean_length(self) -> float:
        """Mean length of the episodes that ended; 0 without any."""
        return self.lengths / max(1, self.n_episodes)

    def plus(self, trajectories: Trajectories, episodes: DictTensor, seconds: float) -> Totals:
        """Returns the sums with one more rollout and its episodes.

        `seconds` counts from the first rollout.
        """
        return Totals(
            self.n_steps + int(trajectories.lengths.sum()),
            self.n_episodes + episodes.n_elems(),
            self.returns + float(episodes["return"].sum()),
            self.lengths + int(episodes["length"].sum()),
            seconds,
        )


@dataclass
class Collected:
    """Counts of the rollouts that were collected so far.

    Attributes:
        rollouts: for each rollout its trajectories (None if they are not kept), the episodes that ended in it, and
            the sums so far. It grows by one append, so that Ctrl-C cannot leave it half written.
        stopped_by: the exception that ended the collection early; None if there was none.
    """

    rollouts: list[tuple[Trajectories | None, DictTensor, Totals]] = field(default_factory=list)
    stopped_by: BaseException | None = None

    @property
    def totals(self) -> Totals:
        """The sums over all rollouts."""
        return self.rollouts[-1][2] if self.rollouts else Totals()

    def trajectories(self) -> Trajectories:
        """All trajectories that were kept, in the order of time."""
        return Trajectories.cat(rollout for rollout, _, _ in self.rollouts if rollout is not None)

    def episodes(self) -> DictTensor:
        """All episodes that ended; for each environment in the order of time."""
        return DictTensor.cat(episodes for _, episodes, _ in self.rollouts)


def collect(settings: Settings, keep: bool) -> Collected:
    """Runs the rollouts, with a progress bar on stderr.

    Args:
        settings: what to collect.
        keep: whether to keep trajectories, or only episodes.

    Returns:
        What was collected; after Ctrl-C or an error `stopped_by` holds the exception.
    """
    collected = Collected()
    for _ in run_rollouts(settings, collected, keep):
        pass
    return collected


def run_rollouts(settings: Settings, collected: Collected, keep: bool = False) -> Iterator[Trajectories]:
    """Collects and yields rollouts; delays Ctrl-C until the next one is requested.

    Args:
        settings, keep: see `collect`.
        collected: what was collected so far; it grows.
    """
    try:
        with make_batcher(settings) as batcher:
            if keep:
                _check_memory(settings, batcher)
            with batcher.trace(settings.trace):
                yield from _run(batcher, settings, collected, keep)
    except (KeyboardInterrupt, Exception) as error:
        collected.stopped_by = error


def write_rollouts(
    rollouts: Iterator[Trajectories],
    settings: Settings,
    folder: Path | None,
    dataset_id: str | None,
    compress: bool = False,
) -> None:
    """Runs all rollouts, and writes each one as it comes.

    To a folder, which may be compressed, to a dataset of Minari, to both or to neither.
    """
    with contextlib.nullcontext() if folder is None else RolloutFolder(folder, compress) as opened:
        stream = rollouts if opened is None else _add_to(opened, rollouts)
        if dataset_id is None:
            for _ in stream:
                pass
        else:
            _write_dataset(dataset_id, stream, settings)


def _add_to(folder: RolloutFolder, rollouts: Iterator[Trajectories]) -> Iterator[Trajectories]:
    for rollout in rollouts:
        folder.add(rollout)
        yield rollout


def _write_dataset(dataset_id: str, rollouts: Iterator[Trajectories], settings: Settings) -> None:
    from rlstructs.integrations.minari import to_minari

    about = f"{settings.agent} agent, seed {settings.seed}, by rlstructs collect"
    with warnings.catch_warnings():
        # Minari asks for an author and so on, which no option gives.
        warnings.filterwarnings("ignore", category=UserWarning, module="minari")
        to_minari(dataset_id, rollouts, settings.env_id, algorithm_name=settings.agent, description=about)


def _run(batcher: RL_Batcher, settings: Settings, collected: Collected, keep: bool) -> Iterator[Trajectories]:
    with tqdm(total=settings.n_steps, desc=settings.env_id, unit=" steps", unit_scale=True, file=sys.stderr) as bar:
        batcher.reset()
        start = time.perf_counter()
        batcher.execute()
        for left in reversed(range(settings.n_rollouts)):
            trajectories, _ = batcher.get()
            if left:
                batcher.execute()  # workers run the next rollout meanwhile
            episodes = batcher.episodes()
            totals = collected.totals.plus(trajectories, episodes, time.perf_counter() - start)
            with defer_interrupt():  # a rollout that was counted is also yielded and written
                collected.rollouts.append((trajectories if keep else None, episodes, totals))
                shown = {"episodes": f"{totals.n_episodes:,}", "mean_return": f"{totals.mean_return:,.2f}"}
                bar.set_postfix(shown if totals.n_episodes else {"episodes": "0"}, refresh=False)
                bar.update(totals.n_steps - bar.n)
                yield trajectories


def make_batcher(settings: Settings) -> RL_Batcher:
    """Makes the batcher that runs the rollouts."""
    agent = NamedAgent(settings.agent, settings.action_mask)
    kind = GymEnvThreads if settings.threads else GymEnvInf
    maker = Makers(partial(gymnasium.make, settings.env_id), agent, settings.n_envs, kind=kind)
    arguments: dict[str, Any] = {
        "n_timesteps": settings.n_timesteps,
        "create_agent": maker.create_agent,
        "agent_args": {},
        "create_env": maker.create_env,
        "env_args": {},
        "n_processes": settings.n_workers,
        "seeds": settings.seed,
    }
    if settings.ray is None:
        return RL_Batcher(**arguments)
    from rlstructs.distributed import RayBatcher

    return RayBatcher(**arguments, n_nodes=settings.n_nodes, address=settings.ray)


def _check_memory(settings: Settings, batcher: RL_Batcher) -> None:
    # Trajectories hold each observation twice, under `observation/` and `_observation/`; slots hold it once.
    nbytes = settings.n_rollouts * 2 * batcher.nbytes
    available = available_bytes()
    if available is not None and 2 * nbytes > available:
        raise OutOfMemoryError(
            f"--out: {settings.n_steps:,} steps are up to {nbytes / 1e9:,.1f} GB, and twice that is needed while they "
            f"are put together; {available / 1e9:,.1f} GB are available; use fewer --steps"
        )
