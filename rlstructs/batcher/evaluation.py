"""Evaluations: episodes that workers play beside the training, restarted where a worker is replaced."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from rlstructs.batcher.supervisor import MAX_ATTEMPTS, Supervisor
from workers.errors import is_gone


def evaluate(supervisor: Supervisor, *arguments: Any) -> list[dict[str, Any]] | Exception:
    """Plays the episodes of an evaluation, without a pause; the arguments are those of `run_evaluation`."""
    rounds = run_evaluation(supervisor, *arguments)
    while True:
        try:
            next(rounds)
        except StopIteration as end:
            found: list[dict[str, Any]] | Exception = end.value
            return found


def run_evaluation(
    supervisor: Supervisor, *arguments: Any
) -> Generator[None, None, list[dict[str, Any]] | Exception]:
    """Plays the episodes of an evaluation.

    A successor begins its worker's part anew, unless its worker has failed so often that it always would.

    Args:
        supervisor: of the workers that play them.
        arguments: those of `RolloutJob.begin_evaluation`, without the statistics.

    Yields:
        Between rollouts, as long as there are episodes that have not ended.

    Returns:
        What `RolloutJob.end_evaluation` gives, by worker; or what the first one raised, and the workers are as they
        were.

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
                supervisor.ask_some("end_evaluation", (), left)
                return raised[0]
            for index, error in failures.items():
                first.setdefault(index, error)
                n_deaths[index] += 1
                if not supervisor.mends or n_deaths[index] == MAX_ATTEMPTS:
                    raise first[index]
            supervisor.mend(failures)
            new = sorted(failures)
            yield
    except BaseException as error:
        if not isinstance(error, Exception):  # nobody wants the rest: it ends behind what is under way
            with supervisor.asking():
                supervisor.called = supervisor.pool.ask("end_evaluation")
        raise
    return [found[index] for index in everyone]


def _run_round(
    supervisor: Supervisor, arguments: tuple[Any, ...], new: list[int], left: list[int]
) -> tuple[dict[int, dict[str, Any]], dict[int, BaseException]]:
    """Plays one rollout of an evaluation.

    Args:
        new: the workers that are yet to begin.
        left: those whose episodes have not ended.

    Returns:
        The episodes by worker, once all have ended; and why workers failed.
    """
    failures = supervisor.ask_some("begin_evaluation", (*arguments, supervisor.statistics), new)[1]
    if failures:
        return {}, failures
    ended, failures = supervisor.ask_some("evaluate", (), left)
    if failures or not all(ended.values()):
        return {}, failures
    return supervisor.ask_some("end_evaluation", (), left)
