"""`EnvLives`: makes environments that fail anew, within limits, and counts that.

One mechanism for the lists of environments of `GymEnv` and of a `SharedVectorEnv`. A step costs one addition for all
environments of a list.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from rlstructs.checks import check_count
from rlstructs.envs.stepping import find_env_name
from rlstructs.errors import SpecError

logger = logging.getLogger("rlstructs")

#: The values of `on_env_failure`.
RAISE, RESTART = POLICIES = ("raise", "restart")
# How often in a row an environment may fail without a step in between before the first error is raised.
MAX_ATTEMPTS = 3
# Seconds that an environment that has failed may take to close.
CLOSE_SECONDS = 3.0


def check_policy(on_env_failure: Any, max_env_restarts: Any) -> None:
    """Raises SpecError or TypeError unless these arguments of a batcher or vector environment are right."""
    if on_env_failure not in POLICIES:
        raise SpecError(f"on_env_failure must be one of {POLICIES}, got {on_env_failure!r}")
    if max_env_restarts is not None:
        check_count("max_env_restarts", max_env_restarts, 0)


class LivesRule(NamedTuple):
    """The rule by which environments that fail are made anew.

    Attributes:
        make: makes environment k for its n-th new life, from 1 on, given k, n and `seed`.
        limit: how often each environment may be made anew; None for any number.
        first: the index of the first environment among all, for the log.
        seed: of the worker, unless there was a rule before.
    """

    make: Callable[[int, int, Any], Any]
    limit: int | None = None
    first: int = 0
    seed: Any = None


class RestartPolicy(NamedTuple):
    """The rule for environments of a `SharedVectorEnv` that fail.

    Attributes:
        is_on: whether they are made anew.
        limit: how often each; None for any number.
        first: the index of environment 0 in a larger whole, for the log.
        holds: whether they then wait for a reset; otherwise their episode is truncated.
    """

    is_on: bool = False
    limit: int | None = None
    first: int = 0
    holds: bool = False


class EnvLives:
    """The lives of each environment of a list: how often it was made anew, and what its present life has done.

    Args:
        n_envs: the number of environments.

    Attributes:
        n_steps: how often all of them were stepped together; whoever steps them counts it up first.
        counts: how often each environment was made anew.
    """

    def __init__(self, n_envs: int) -> None:
        self.n_steps, self.counts = 0, [0] * n_envs
        self._rule: LivesRule | None = None  # None to raise errors
        self._seed: Any = None
        # Of each environment: how often it was stepped alone; the number of its steps when its episode began; the
        # episodes of its present life; and the failures in a row without a step, the first of which is kept.
        self._n_alone, self._began, self._n_episodes = [0] * n_envs, [0] * n_envs, [0] * n_envs
        self._failures: dict[int, list[Exception]] = {}
        self._n_taken = [0] * n_envs

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_rule": None, "_failures": {}}

    def set_rule(self, rule: LivesRule | None) -> None:
        """Sets how environments that fail are made anew; None to raise errors."""
        self._rule = rule
        if rule is not None and self._seed is None:
            self._seed = rule.seed

    def begin_episode(self, k: int) -> None:
        """Notes that environment k was reset."""
        self._began[k] = self.n_steps + self._n_alone[k]
        self._n_episodes[k] += 1

    def count_one(self, k: int) -> None:
        """Notes that environment k alone is stepped."""
        self._n_alone[k] += 1

    def name_step(self, k: int) -> str:
        """The step that environment k is in."""
        return f"step {self._count_steps(k)} of its episode"

    def _count_steps(self, k: int) -> int:
        return self.n_steps + self._n_alone[k] - self._began[k]

    def replace(self, k: int, env: Any, error: Exception, in_reset: bool) -> Any:
        """Closes environment k, which has failed, and makes it anew.

        Args:
            k: its index in the list.
            env: it.
            error: what it raised.
            in_reset: whether its reset has raised, not a step.

        Returns:
            The new environment, not yet reset.

        Raises:
            Exception: `error`, if environments are not made anew, if it says that a result or an argument is wrong, or
                if the limit is reached; or the first one, if the environment has failed too often in a row.
        """
        rule = self._rule
        if rule is None or isinstance(error, SpecError):
            raise error
        has_begun = self._n_episodes[k] > 0
        if self._n_episodes[k] > 1 or (has_begun and (in_reset or self._count_steps(k) > 1)):
            self._failures.pop(k, None)  # this life has made a step
        place = "reset" if in_reset else self.name_step(k)
        while True:
            failures = self._failures.setdefault(k, [])
            failures.append(error)
            if rule.limit is not None and self.counts[k] >= rule.limit:
                raise error
            if len(failures) > MAX_ATTEMPTS:
                raise failures[0]
            self.counts[k] += 1
            self._n_episodes[k] = 0
            logger.warning(
                "environment %d (%s) failed in %s, and is made anew: %s: %s",
                rule.first + k,
                find_env_name(env),
                place,
                type(error).__name__,
                error,
                exc_info=error,
            )
            if place != "its constructor":
                close_in_time(env, rule.first + k)
            try:
                return rule.make(k, self.counts[k], self._seed)
            except SpecError:
                raise
            except Exception as failure:
                error, place = failure, "its constructor"

    def take_counts(self) -> dict[int, int]:
        """Counts restarts since the last call, by index; environments that had none are left out."""
        new = {k: n - taken for k, (n, taken) in enumerate(zip(self.counts, self._n_taken, strict=True)) if n > taken}
        self._n_taken = list(self.counts)
        return new


def close_in_time(env: Any, index: int) -> None:
    """Closes an environment that has failed; leaves it to itself if that takes too long, ignores what it raises."""

    def close() -> None:
        try:
            env.close()
        except Exception:
            logger.debug("environment %d raised while it was closed", index, exc_info=True)

    thread = threading.Thread(target=close, name=f"rlstructs-close-{index}", daemon=True)
    thread.start()
    thread.join(CLOSE_SECONDS)
    if thread.is_alive():
        logger.warning("environment %d has failed, and does not close within %g s: it is left", index, CLOSE_SECONDS)
