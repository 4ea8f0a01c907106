"""Plays the episodes of an evaluation in the workers, beside the training; a successor plays its worker's anew."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from rlstructs.batcher.arguments import seeds_of, warn_of_overlap
from rlstructs.batcher.engine import Engine
from rlstructs.batcher.lifecycle import Lifecycle
from rlstructs.batcher.supervisor import MAX_ATTEMPTS, Supervisor
from rlstructs.errors import SpecError
from rlstructs.rollout.evaluation import quotas
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.workers.errors import is_gone


def evaluate(
    engine: Engine, life: Lifecycle, n_episodes: int, seed: int | Sequence[int], agent_info: DictTensor | None
) -> DictTensor:
    """Does what `RL_Batcher.evaluate` does, with arguments that were checked."""
    _check_keys(engine)
    seeds = seeds_of(seed, len(engine.settings.seeds), "seed")
    warn_of_overlap(seeds, engine.n_envs, 4)
    with life.note_failures("evaluate", engine.is_halfway):
        found = _play(engine, n_episodes, seeds, agent_info)
    if isinstance(found, Exception):
        raise found
    return found


def _check_keys(engine: Engine) -> None:
    """Raises SpecError unless environments say how long and how good their episodes are."""
    for key in ("reward", "done"):
        spec = engine.transport.layout.observation.get(key)
        if spec is None or spec[0] != ():
            raise SpecError(f"evaluate: the environment gives no {key!r} of shape (B, T)")


def _play(
    engine: Engine, n_episodes: int, seeds: Sequence[int], agent_info: DictTensor | None
) -> DictTensor | Exception:
    """Plays episodes in environments of their own, without a pause.

    Args:
        engine: its workers play them.
        n_episodes: how many in all.
        seeds: one for each worker.
        agent_info: N rows for the agents; None for those in force.

    Returns:
        The episodes, one row each, as `RL_Batcher.evaluate` returns them; or what an agent or environment raised.
    """
    infos = engine.transport.infos | ({} if agent_info is None else {"agent_info": agent_info.clone()})
    episodes = _finish(run_evaluation(engine.supervisor, quotas(n_episodes, engine.n_elems), seeds, infos))
    engine.begin_successors()
    if isinstance(episodes, Exception):
        return episodes
    for block, columns in zip(engine.transport.blocks, episodes, strict=True):
        columns["env_index"] += block.start
    return DictTensor.cat([DictTensor.from_numpy(columns) for columns in episodes])


def _finish(rounds: Generator[None, None, list[dict[str, Any]] | Exception]) -> list[dict[str, Any]] | Exception:
    """Runs a generator to its end, and returns what it returns."""
    while True:
        try:
            next(rounds)
        except StopIteration as end:
            found: list[dict[str, Any]] | Exception = end.value
            return found


def run_evaluation(
    supervisor: Supervisor, *arguments: Any
) -> Generator[None, None, list[dict[str, Any]] | Exception]:
    """Plays the episodes of an evaluation, with a pause after each rollout.

    A successor begins its worker's episodes anew, unless the worker has failed so often that it always would.

    Args:
        supervisor: its workers play the episodes.
        arguments: of `RolloutJob.begin_evaluation`, without the statistics.

    Yields:
        None after each rollout, as long as some episodes have not ended.

    Returns:
        What `RolloutJob.end_evaluation` returned, by worker; or the first exception of a job, and then the training can
        go on.

    Raises:
        WorkerError: a worker is gone or late.
    """
    supervisor.settle()
    found: dict[int, dict[str, Any]] = {}
    everyone = range(supervisor.pool.n_workers)
    n_deaths, first, new = dict.fromkeys(everyone, 0), dict[int, BaseException](), list(everyone)
    try:
        while left := [index for index in everyone if index not in found]:
            episodes, failures = _run_round(supervisor, arguments, new, left)
            found |= episodes
            raised = [error for _, error in sorted(failures.items()) if not is_gone(error)]
            if raised and len(raised) == len(failures):
                assert isinstance(raised[0], Exception)
                supervisor.call_some("end_evaluation", (), left)
                return raised[0]
            for index, error in failures.items():
                first.setdefault(index, error)
                n_deaths[index] += 1
                if not supervisor.can_replace or n_deaths[index] == MAX_ATTEMPTS:
                    raise first[index]
            supervisor.replace_failed(failures)
            new = sorted(failures)
            yield
    except BaseException as error:
        if not isinstance(error, Exception):  # an interrupt: the evaluation ends after what is under way
            supervisor.ask_without_waiting("end_evaluation")
        raise
    return [found[index] for index in everyone]


def _run_round(
    supervisor: Supervisor, arguments: tuple[Any, ...], new: list[int], left: list[int]
) -> tuple[dict[int, dict[str, Any]], dict[int, BaseException]]:
    """Plays one rollout of an evaluation.

    Args:
        new: the workers that have not begun the evaluation.
        left: the workers whose episodes have not ended.

    Returns:
        The episodes by worker, empty until all have ended; and the failures by worker.
    """
    _, failures = supervisor.call_some("begin_evaluation", (*arguments, supervisor.statistics), new)
    if failures:
        return {}, failures
    has_ended, failures = supervisor.call_some("evaluate", (), left)
    if failures or not all(has_ended.values()):
        return {}, failures
    return supervisor.call_some("end_evaluation", (), left)
