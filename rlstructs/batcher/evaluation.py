"""Plays the episodes of an evaluation in the workers, beside the training.

A successor plays the episodes of its worker again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlstructs.batcher.supervisor import MAX_ATTEMPTS, Supervisor
from rlstructs.checks import warn_caller
from rlstructs.errors import SpecError
from rlstructs.rollout.evaluation import Standing, quotas
from rlstructs.shared.layout import Layout
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.workers.errors import is_gone

# The fewest timesteps that an environment waits before others play its episodes: some environments always wait a step.
LEAST_WAIT = 100
# After so many timesteps in which no wanted episode ended, none is expected any more.
MOST_QUIET = 1_000_000
# The most environments that a warning names.
N_NAMED = 8


def play(
    supervisor: Supervisor, blocks: Sequence[range], plan: EpisodePlan, *arguments: Any
) -> dict[str, np.ndarray] | Exception:
    """Plays episodes in environments of their own.

    Returns all that ended, or what an agent or environment raised.

    Args:
        supervisor, blocks: see `Rounds`.
        plan: how many episodes each environment plays.
        arguments: see `Rounds`.
    """
    rounds = Rounds(supervisor, blocks, *arguments)
    try:
        while plan.revise(rounds.standing):
            if (error := rounds.play(plan.wanted)) is not None:
                return error
        return rounds.end()
    except BaseException as error:
        if not isinstance(error, Exception):  # an interrupt: the evaluation ends after what is under way
            supervisor.ask_without_waiting("end_evaluation")
        raise


class EpisodePlan:
    """The number of episodes that each environment plays: shared equally if possible.

    An environment that waits, for example for an agent that never joins, cannot play. When only such environments have
    episodes left, the others get these.

    Args:
        n_episodes: in all.
        layout: of rollouts, each of which is a round.
        max_steps: the most timesteps; None for no end.

    Attributes:
        wanted: int64 (N,), how many episodes each environment has to play.

    Raises:
        SpecError: environments do not say how long and how good their episodes are.
    """

    def __init__(self, n_episodes: int, layout: Layout, max_steps: int | None) -> None:
        for key in ("reward", "done"):
            spec = layout.observation.get(key)
            if spec is None or spec[0] != ():
                raise SpecError(f"evaluate: the environment gives no {key!r} of shape (B, T)")
        n_envs = layout.n_slots
        self._n_episodes, self._n_timesteps, self.max_steps = n_episodes, layout.n_timesteps, max_steps
        self.wanted = quotas(n_episodes, n_envs)
        self._is_out = np.zeros(n_envs, bool)  # those whose episodes were given to others
        self._n_played, self._n_quiet = 0, 0

    def revise(self, standing: Standing) -> bool:
        """Gives episodes to others where environments cannot play them.

        Returns whether episodes are left that some environment can play.
        """
        owes = standing.ended < self.wanted
        if not owes.any():
            return False
        n_played = int(np.minimum(standing.ended, self.wanted).sum())
        self._n_quiet = self._n_quiet + self._n_timesteps if n_played == self._n_played else 0
        self._n_played = n_played
        is_quiet = self._n_quiet > MOST_QUIET
        least = LEAST_WAIT if self.max_steps is None else min(LEAST_WAIT, self.max_steps // 2)
        waits = standing.waited >= np.maximum(least, standing.steps / 2)
        if not is_quiet and not waits[owes].all():
            return self.max_steps is None or bool((standing.steps[owes] < self.max_steps).any())
        self._is_out |= owes
        self._n_quiet = 0
        able = ~self._is_out & ~waits
        if is_quiet:
            able &= standing.ended > 0
        n_left = int((self.wanted - standing.ended)[owes].sum())
        self.wanted[owes] = standing.ended[owes]
        if not able.any():
            return False
        for _ in range(n_left):
            self.wanted[np.argmin(np.where(able, self.wanted, np.iinfo(np.int64).max))] += 1
        return True

    def take(self, found: dict[str, np.ndarray]) -> DictTensor:
        """Takes the wanted episodes of those that ended, sorted by environment.

        Warns of those that are missing.
        """
        rows = found["env_index"]
        is_wanted = np.arange(rows.size) - np.searchsorted(rows, rows) < self.wanted[rows]
        episodes = DictTensor.from_numpy({name: column[is_wanted] for name, column in found.items()})
        if episodes.n_elems() < self._n_episodes:
            warn_caller(self.describe_missing(rows[is_wanted]))
        return episodes

    def describe_missing(self, env_index: np.ndarray) -> str:
        """Describes the missing episodes.

        `env_index`, int64 (K,), are the environments of the episodes that were played.
        """
        n_envs = self.wanted.size
        wanted, found = quotas(self._n_episodes, n_envs), np.bincount(env_index, minlength=n_envs)
        behind = np.flatnonzero(found < wanted)
        named = ", ".join(f"{env} ({found[env]} of {wanted[env]})" for env in behind[:N_NAMED].tolist())
        more = f" and {behind.size - N_NAMED} more" if behind.size > N_NAMED else ""
        limit = "" if self.max_steps is None else f" within max_steps={self.max_steps}"
        return (
            f"evaluate: {env_index.size} of {self._n_episodes} episodes ended{limit}, no more are expected; missing "
            f"are those of environment {named}{more}"
        )


class Rounds:
    """The rounds of an evaluation; in each, workers play one rollout.

    A successor begins its worker's episodes anew, unless the worker has failed so often that it always would.

    Args:
        supervisor: of the workers, or nodes, that play the episodes.
        blocks: for each of them, the global indexes of its environments.
        arguments: of `RolloutJob.begin_evaluation`, without the statistics.

    Attributes:
        standing: how far each environment is.

    Raises:
        WorkerError: a worker is gone or late; in `play` and `end` too.
    """

    def __init__(self, supervisor: Supervisor, blocks: Sequence[range], *arguments: Any) -> None:
        self._supervisor, self._arguments, self._blocks = supervisor, arguments, blocks
        self._supervisor.finish_rollouts()
        n_elems = blocks[-1].stop
        self.standing = Standing(*(np.zeros(n_elems, np.int64) for _ in Standing._fields))
        everyone = range(len(self._blocks))
        self._new = list(everyone)
        self._wanted = np.zeros(n_elems, np.int64)
        self._n_rounds, self._n_deaths = dict.fromkeys(everyone, 0), dict.fromkeys(everyone, 0)
        self._first: dict[int, BaseException] = {}

    def play(self, wanted: np.ndarray) -> Exception | None:
        """Plays a round in the workers whose environments still have episodes to play.

        `wanted` is int64 (N,), the number of episodes of each environment.

        Returns:
            What a job raised; then the evaluation has ended, and the training can go on.
        """
        self._wanted, owes = wanted, self.standing.ended < wanted
        return self._play([worker for worker, block in enumerate(self._blocks) if owes[block.start : block.stop].any()])

    def end(self) -> dict[str, np.ndarray] | Exception:
        """Ends the evaluation.

        Returns:
            The columns of the episodes that ended, sorted by `env_index`; or what a job raised.
        """
        found: dict[int, dict[str, np.ndarray]] = {}
        while left := [worker for worker in range(len(self._blocks)) if worker not in found]:
            while self._new:  # those that had nothing to play yet, and successors
                if (error := self._play([])) is not None:
                    return error
            episodes, failures = self._supervisor.call_some("end_evaluation", (), left)
            found |= episodes
            n_rounds = {worker: self._n_rounds[worker] for worker in failures}
            if (error := self._replace(failures)) is not None:
                return error
            for number in range(max(n_rounds.values(), default=0)):
                if (error := self._play([worker for worker, n in n_rounds.items() if number < n])) is not None:
                    return error
        for worker, block in enumerate(self._blocks):
            found[worker]["env_index"] += block.start
        return {name: np.concatenate([found[worker][name] for worker in sorted(found)]) for name in found[0]}

    def _play(self, workers: list[int]) -> Exception | None:
        """Plays a round in these workers."""
        statistics = self._supervisor.statistics
        _, failures = self._supervisor.call_some("begin_evaluation", (*self._arguments, statistics), self._new)
        self._new = []
        if not failures:
            found, failures = self._supervisor.call_some("evaluate", (self._wanted,), workers)
            for worker, own in found.items():
                self._n_rounds[worker] += 1
                self._set_standing(worker, own)
        return self._replace(failures)

    def _set_standing(self, worker: int, own: Sequence[Any]) -> None:
        for column, values in zip(self.standing, own, strict=True):
            column[self._blocks[worker].start : self._blocks[worker].stop] = values

    def _replace(self, failures: dict[int, BaseException]) -> Exception | None:
        """Replaces workers that are gone; returns what a job raised if none is.

        In that case the evaluation has ended.
        """
        raised = [error for _, error in sorted(failures.items()) if not is_gone(error)]
        if raised and len(raised) == len(failures):
            assert isinstance(raised[0], Exception)
            self._supervisor.call_some("end_evaluation", (), list(range(len(self._blocks))))
            return raised[0]
        for worker, error in failures.items():
            self._first.setdefault(worker, error)
            self._n_deaths[worker] += 1
            if not self._supervisor.can_replace or self._n_deaths[worker] == MAX_ATTEMPTS:
                raise self._first[worker]
            self._n_rounds[worker] = 0
            self._set_standing(worker, (0, 0, 0))
        self._supervisor.replace_failed(failures)
        self._new = sorted(failures)
        return None
