"""`RowEnv`: the interface through which rollouts step environments of every class.

Its rows are in numpy arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from rlstructs.envs.env_list import LivesRule
from rlstructs.envs.stepping import SingleEnv
from rlstructs.errors import SpecError, StateError
from rlstructs.moments import Moments
from rlstructs.shared.layout import Rows, Target
from rlstructs.structures.dict_tensor import DictTensor

NO_ROWS = np.zeros(0, np.int64)


class Step(NamedTuple):
    """One step of E' running environments; its rows stay valid until the next step.

    Attributes:
        after: E' rows, the result of the step in each environment, final observations included.
        reset: int64 (R,), which of the E' environments were reset in the same step.
        fresh: R rows, their first observations, which the agent sees next; None when R is 0.
        kept: int64, which of the E' environments still run; None for all.
        idle: int64, which of the E' environments only started an episode, or wait for one, so that their step is no
            transition.
        failed: int64, which of the E' environments have failed in the step, so that it is no transition; none of them
            is among `kept`.
    """

    after: Rows
    reset: np.ndarray
    fresh: Rows | None
    kept: np.ndarray | None
    idle: np.ndarray = NO_ROWS
    failed: np.ndarray = NO_ROWS


class Pace(NamedTuple):
    """When environments that are stepped on their own are served.

    It says when the agent is called for them, and when a rollout ends.

    Attributes:
        min_ready: how many of them have to be ready before the agent is called.
        max_wait: the seconds after the first one is ready in which that has to be; None for any number.
        deadline: the seconds after which a rollout ends; None to end it with the last environment's T steps.
    """

    min_ready: int = 1
    max_wait: float | None = None
    deadline: float | None = None


class CompiledSteps(NamedTuple):
    """T steps of all E environments, and of the agent, by one compiled call.

    Attributes:
        steps: `observation/k`, `action/k`, `_observation/k` -> (E, T, ...), final observations included; nobody else
            writes to them.
        observation: what the agent sees next, E rows.
        state: the agent's next state, E rows.
    """

    steps: Mapping[str, torch.Tensor]
    observation: Rows
    state: DictTensor


class CompiledRollout(Protocol):
    """Makes T steps of an agent, and of environments that always run."""

    def __call__(self, n_timesteps: int, observation: Rows, state: DictTensor, agent_info: DictTensor) -> CompiledSteps:
        """Runs T steps.

        Args:
            n_timesteps: T.
            observation: what the agent sees first, E rows.
            state: of the agent, E rows.
            agent_info: E rows, or empty.
        """
        ...


class SharedStatistics(Protocol):
    """Statistics of environments that all workers share; see `VecEnv`."""

    def take_statistics(self) -> dict[str, Moments]:
        """Takes the statistics gathered since the last call, by name."""
        ...

    def load_statistics(self, statistics: Mapping[str, Moments], frozen: bool) -> None:
        """Uses the statistics of all workers from now on; if frozen, gathers nothing."""
        ...


class RowEnv(Protocol):
    """The interface of E environments for rollouts; `row_env` makes one of a `VecEnv`.

    `RowDefaults` implements `writes_rows` and all below it, for environments that can do no more than a `VecEnv`.
    """

    def n_envs(self) -> int:
        """Number of environments, E."""
        ...

    def close(self) -> None:
        """Closes the environments."""
        ...

    def reset_rows(self, env_info: DictTensor) -> Rows:
        """Resets, and returns the observations of all as rows that nobody else uses."""
        ...

    def step_rows(self, action: DictTensor, target: Target | None = None) -> Step:
        """Steps all environments.

        Args:
            action: a row for each running environment.
            target: E rows to write to; None for rows of the environment's own. Used only with `writes_rows`.
        """
        ...

    @property
    def writes_rows(self) -> bool:
        """Whether `step_rows` writes to the target that it is given."""
        ...

    @property
    def may_idle(self) -> bool:
        """Whether some environment may be idle in the next step, see `Step`.

        It may change with every step.
        """
        ...

    @property
    def absent_rows(self) -> np.ndarray:
        """Rows of the last observation that show nothing, int64.

        Their environments wait for an episode.

        The last observation is that of `reset_rows` or `revive_rows`, or `after` of a step.
        """
        ...

    @property
    def defers_resets(self) -> bool:
        """Whether environments that end are reset only when the next rollout begins."""
        ...

    def revive_rows(self, which: np.ndarray | None = None) -> tuple[np.ndarray, Rows]:
        """Starts an episode in environments that do not run, so that they do.

        Args:
            which: those of `failed_rows`; or None for all that have ended, which needs `defers_resets`.

        Returns:
            Indexes of the environments that were reset, int64 (R,), ascending, and their first observations as rows
            that nobody else uses.
        """
        ...

    @property
    def failed_rows(self) -> np.ndarray:
        """The environments that have failed, int64, ascending.

        They are made anew, and do not run until `revive_rows`.
        """
        ...

    def set_lives(self, rule: LivesRule | None) -> None:
        """Sets the rule by which failed environments are replaced; None to raise errors.

        Raises:
            SpecError: it cannot tell which of its environments has failed, or cannot make one of them anew.
        """
        ...

    def take_restarts(self) -> dict[int, int]:
        """Returns the number of restarts since the last call, by index.

        Environments that had none are left out.
        """
        ...

    def example(self) -> Rows | None:
        """Returns first observations like those of `reset_rows`, without a reset.

        None if that is impossible.
        """
        ...

    def row_groups(self) -> Sequence[SplitEnv]:
        """Returns the groups of environments that can be stepped separately, in order.

        Empty if all are stepped together.
        """
        ...

    @property
    def pace(self) -> Pace | None:
        """How environments that are stepped on their own are served.

        Then it is a `WaitingEnv`. None for environments that are stepped together.
        """
        ...

    def compiled_rollout(self, agent: Any) -> CompiledRollout | None:
        """Returns the function that makes whole rollouts with this agent in one call.

        None if agent and environments are called step by step.
        """
        ...

    @property
    def replaces_late(self) -> bool:
        """Whether environments that do not return in time are replaced.

        It does not matter what becomes of those that fail.
        """
        ...

    def shared_statistics(self) -> SharedStatistics | None:
        """The statistics that all workers share; None if the environments keep none."""
        ...

    def single_envs(self) -> Sequence[SingleEnv]:
        """Returns the environments that an exact state restores one by one.

        Everything around them is pickled.

        Each has the same number of rows, in order.
        """
        ...


class SplitEnv(RowEnv, Protocol):
    """A group of environments that step while the agent acts on other groups.

    All of them always run.
    """

    def send_rows(self, action: DictTensor) -> None:
        """Starts a step of the group, without waiting for it."""
        ...

    def recv_rows(self, target: Target | None) -> Step:
        """Waits for the step, and writes its rows to the target.

        Without a target, to rows of the group's own.
        """
        ...


class WaitingEnv(RowEnv, Protocol):
    """Environments that are each stepped on their own."""

    def start_rows(self, which: np.ndarray, action: DictTensor) -> None:
        """Starts a step of some environments, without waiting for it.

        Args:
            which: int64 (K,), ascending; none of them is in a step.
            action: a row for each of them.
        """
        ...

    def collect_rows(self, until: float | None, is_over: Callable[[], bool] | None) -> tuple[np.ndarray, Step]:
        """Waits for as many environments as the pace says.

        Returns them, int64 (K,), ascending, and their steps.

        K may be 0 if the wait ended early.

        Args:
            until: the time of `time.monotonic` at which to stop waiting; None for no such time.
            is_over: called at times; the wait ends if it returns True. None to wait in any case.
        """
        ...

    @property
    def under_way(self) -> np.ndarray:
        """The environments whose step was started and not collected, int64, ascending."""
        ...


class RowDefaults:
    """Default members of a `RowEnv` that can do no more than a `VecEnv`.

    They are not in the Protocol itself, because users' subclasses of our environments would inherit its metaclass.
    """

    writes_rows = False
    replaces_late: bool = False
    pace: Pace | None = None

    @property
    def may_idle(self) -> bool:
        return False

    @property
    def absent_rows(self) -> np.ndarray:
        return NO_ROWS

    @property
    def defers_resets(self) -> bool:
        return False

    def revive_rows(self, which: np.ndarray | None = None) -> tuple[np.ndarray, Rows]:
        raise StateError(f"{type(self).__name__} defers no resets")

    @property
    def failed_rows(self) -> np.ndarray:
        return NO_ROWS

    def set_lives(self, rule: LivesRule | None) -> None:
        if rule is not None:
            refuse_lives(self)

    def take_restarts(self) -> dict[int, int]:
        return {}

    def example(self) -> Rows | None:
        return None

    def row_groups(self) -> Sequence[SplitEnv]:
        return ()

    def compiled_rollout(self, agent: Any) -> CompiledRollout | None:
        return None

    def shared_statistics(self) -> SharedStatistics | None:
        return None

    def single_envs(self) -> Sequence[SingleEnv]:
        return (SingleEnv(self),)


def refuse_lives(env: Any) -> None:
    """Raises SpecError: environments of this object cannot be replaced one by one."""
    raise SpecError(
        f'on_env_failure="restart": a {type(env).__name__} does not tell which of its environments has failed; needed '
        "is a GymEnv, a GymEnvInf or a GymVectorEnv of a SharedVectorEnv, maybe in NormalizeObservation or "
        'NormalizeReward; on_worker_failure="restart" replaces all environments of a worker'
    )


Pair = tuple[DictTensor, torch.Tensor]


def step_pairs(step: Step, running: torch.Tensor) -> tuple[Pair, Pair]:
    """The two pairs that `VecEnv.step` returns for a step of the environments `running`."""
    after = step.after.tensors()
    following, kept = DictTensor.trusted(after._tensors), running  # another object: a wrapper may `set` keys
    if step.fresh is not None:
        seen = Rows.of(step.after.packing, step.after.arrays())
        arrays = seen.arrays()
        for key, fresh in step.fresh.arrays().items():
            arrays[key][step.reset] = fresh
        following = seen.tensors()
    if step.kept is not None:
        rows = torch.from_numpy(step.kept)
        following, kept = following.index(rows), running[rows]
    return (after, running), (following, kept)


def take_statistics(env: RowEnv) -> dict[str, Moments]:
    """Takes the statistics gathered by environments since the last call.

    Empty if they keep none.
    """
    kept = env.shared_statistics()
    return {} if kept is None else kept.take_statistics()


def load_statistics(env: RowEnv, statistics: Mapping[str, Moments], frozen: bool = False) -> None:
    """Gives these statistics to environments that keep any."""
    kept = env.shared_statistics()
    if statistics and kept is not None:
        kept.load_statistics(statistics, frozen)


def check_running(running: np.ndarray | None) -> np.ndarray:
    """Returns the environments that run; raises StateError if there are none.

    `running` is None before a reset.
    """
    if running is None:
        raise StateError("step: call reset first")
    if not running.size:
        raise StateError("step: every environment has ended, call reset")
    return running


def split_options(env_info: DictTensor, n_envs: int) -> list[dict[str, Any] | None]:
    """Turns rows of options into a dict for each environment."""
    if not isinstance(env_info, DictTensor):
        raise TypeError(f"env_info must be a DictTensor, got {type(env_info).__name__}")
    if env_info.empty():
        return [None] * n_envs
    if env_info.n_elems() != n_envs:
        raise SpecError(f"env_info: has {env_info.n_elems()} rows, expected {n_envs}")
    columns = {key: tensor.tolist() for key, tensor in env_info.items()}
    return [{key: values[k] for key, values in columns.items()} for k in range(n_envs)]
