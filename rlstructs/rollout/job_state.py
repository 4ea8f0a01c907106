"""The exact state of a worker's job: environments in their episodes, agent, random streams, progress, clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from rlstructs.copying import copy_arguments
from rlstructs.envs.snapshots.env_state import choose_methods, name_env
from rlstructs.envs.snapshots.methods import NEW_EPISODE, CopyError, NewEnvs, make_tokens
from rlstructs.envs.snapshots.pickler import Pickled, dumps, loads
from rlstructs.envs.snapshots.verification import Trial
from rlstructs.errors import SpecError
from rlstructs.rollout.job_reply import JobState
from rlstructs.rollout.progress import Clock, Progress
from rlstructs.seeding import read_streams, restore_streams
from rlstructs.structures.dict_tensor import DictTensor

if TYPE_CHECKING:
    from rlstructs.envs.row_env import RowEnv
    from rlstructs.rollout.job import RolloutJob

AGENT = "agent"


@dataclass
class Content:
    """The state of a job.

    Attributes:
        env: the environments; None where new ones are made.
        agent: the agent; or `AGENT` and what its `get_state` returned.
        progress: of the job; empty before a reset, or where new episodes begin.
        clock: of the job.
        streams: of the process.
        next_steps: of the job.
    """

    env: RowEnv | None
    agent: Any
    progress: list[Progress]
    clock: Clock
    streams: tuple[Any, ...]
    next_steps: np.ndarray | None = None


def take_job_state(job: RolloutJob, best: bool) -> JobState:
    """Takes the state of a job, and leaves the job as it is.

    Args:
        job: the job, between two requests.
        best: whether new episodes begin where environments cannot be brought back.

    Raises:
        SpecError: an environment cannot be brought back, or the agent cannot be pickled.
    """
    streams, was_known = read_streams(), job.methods is not None
    try:
        return _take(job, best, streams)
    except (SpecError, CopyError):
        if not was_known:
            raise
        job.methods = None  # what an environment holds now cannot be pickled any more
        return _take(job, best, streams)
    finally:
        restore_streams(streams)


def _take(job: RolloutJob, best: bool, streams: tuple[Any, ...]) -> JobState:
    singles = job.env.single_envs()
    methods, why = _choose_methods(job, best)
    if not methods or NEW_EPISODE in methods:
        env, progress, tokens = None, [], {}
    else:
        env, progress, tokens = job.env, job.progress, make_tokens(singles, methods)
    content = Content(env, _find_agent_state(job.agent), progress, job.clock, streams, job.next_steps)
    return JobState([name_env(single.env) for single in singles], methods, _pickle(content, tokens), why)


def _choose_methods(job: RolloutJob, best: bool) -> tuple[list[str], str]:
    """Chooses how each environment is brought back, once for the same environments.

    Returns:
        The methods, empty before a reset; and why new episodes begin, if they do.
    """
    if not job.progress:
        return [], ""
    if job.methods is None:
        trial = Trial(partial(_make_env, job, job.settings.seeds[job.index]), job.running, _get_action(job))
        try:
            job.methods = choose_methods(job.env, trial)
        except SpecError as error:
            if not best:
                raise
            return [NEW_EPISODE] * len(job.env.single_envs()), str(error)
    return job.methods, ""


def _make_env(job: RolloutJob, seed: int) -> RowEnv:
    """Makes environments like those of the job."""
    return job.make_env(seed, copy_arguments(job.settings.env_args))


def _get_action(job: RolloutJob) -> DictTensor | None:
    """The first action of the last rollout in the first slots; zeros before it."""
    slots = job.slots[0]
    keys = slots.layout.action
    return DictTensor({key: slots.column(f"action/{key}")[:, 0].clone() for key in keys}) if keys else None


def _find_agent_state(agent: Any) -> Any:
    """Replaces an agent for pickling: (AGENT, state) if it has `get_state` and `set_state`, otherwise itself."""
    own = all(callable(getattr(agent, name, None)) for name in ("get_state", "set_state"))
    return (AGENT, agent.get_state()) if own else agent


def _pickle(content: Content, tokens: Mapping[int, Any]) -> Pickled:
    try:
        return dumps(content, tokens)
    except Exception as error:
        try:
            dumps(content.agent)
        except Exception as own:
            name = type(content.agent).__name__
            raise SpecError(
                f"agent: {name} cannot be pickled: {type(own).__name__}: {own}; keep out of it what cannot be pickled, "
                f"or define {name}.get_state(), and {name}.set_state(state) for a new agent"
            ) from own
        raise SpecError(f"environment: cannot be pickled: {type(error).__name__}: {error}") from error


def load_job_state(job: RolloutJob, state: JobState, seed: int) -> None:
    """Brings a job to a state; what it had before is closed.

    Args:
        job: the job, with its slots.
        state: what `take_job_state` of a job with the same settings returned.
        seed: of new environments, where these are needed.
    """
    make_env, before = partial(_make_env, job, seed), job.env
    new = NewEnvs(make_env, None if job.progress else before)
    content: Content = loads(state.pickled, new.resolve)
    if content.env is None or job.progress:
        before.close()
    if content.env is None:
        content.env = make_env()
    else:
        new.close_unused()
    _set_agent(job, content.agent)
    job.set_env(content.env)
    job.progress, job.clock = content.progress, content.clock
    if content.progress and content.next_steps is not None:  # otherwise new episodes begin, in this job's own count
        job.next_steps = content.next_steps
    if state.begins_episodes:
        job.begin_episodes()
    restore_streams(content.streams)


def _set_agent(job: RolloutJob, agent: Any) -> None:
    own: Any = job.agent
    if isinstance(agent, tuple) and agent and agent[0] == AGENT:
        own.set_state(agent[1])
    else:
        own.close()
        job.agent = agent
