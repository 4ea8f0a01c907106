"""The exact state of a worker's job.

It holds environments in their episodes, the agent, random streams and progress.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from rlstructs.copying import copy_arguments
from rlstructs.envs.row_env import RowEnv
from rlstructs.errors import SpecError
from rlstructs.exact.methods import NEW_EPISODE, CopyError, NewEnvs, make_tokens, name_env
from rlstructs.exact.pickler import Pickled, dumps, loads
from rlstructs.rollout.job import FailureGuard, RolloutJob
from rlstructs.rollout.progress import WorkerProgress
from rlstructs.seeding import read_streams, restore_streams
from rlstructs.shared.weights import Parcel
from rlstructs.structures.dict_tensor import DictTensor

AGENT = "agent"


class Content(NamedTuple):
    """The content of a job's state.

    Attributes:
        env: the environments; None where new ones are made.
        agent: the agent; or `AGENT` and what its `get_state` returned.
        progress: of the job; without groups before a reset, or where new episodes begin.
        streams: of the process.
    """

    env: RowEnv | None
    agent: Any
    progress: WorkerProgress
    streams: tuple[Any, ...]


class JobState(NamedTuple):
    """The state of a job.

    Attributes:
        names: of each single environment: its id in gymnasium's registry, or its class.
        methods: how each is brought back; see `rlstructs.exact.methods`.
        pickled: a `Content`.
        why: the reason why new episodes begin, if they do.
    """

    names: list[str]
    methods: list[str]
    pickled: Pickled
    why: str = ""

    @staticmethod
    def take(job: RolloutJob, best: bool) -> JobState:
        """Takes the state of a job between two requests, without changing it.

        Args:
            job: the job, which calls this by its `apply`.
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
            job.methods = None  # an environment now holds something that cannot be pickled
            return _take(job, best, streams)
        finally:
            restore_streams(streams)

    @staticmethod
    def load(job: RolloutJob, state: JobState, seed: int) -> None:
        """Brings a job to a state; closes its earlier environments and agent.

        Args:
            job: the job, with its slots, which calls this by its `apply`.
            state: what `take` returned for a job with the same settings.
            seed: of new environments, where these are needed.
        """
        with FailureGuard(job):
            job.end_evaluation()
            _load(job, state, seed)

    @property
    def begins_episodes(self) -> bool:
        """Whether all environments of the worker begin new episodes."""
        return NEW_EPISODE in self.methods

    @property
    def last_update(self) -> Parcel | None:
        """None: the trainer itself keeps the last update."""
        return None

    def as_dict(self) -> dict[str, Any]:
        """Converts to a dict of lists, texts and tensors, which `torch.load(weights_only=True)` reads."""
        return {"names": self.names, "methods": self.methods, "why": self.why, **self.pickled.as_tensors()}

    @classmethod
    def of_dict(cls, state: Mapping[str, Any]) -> JobState:
        """Makes the state of what `as_dict` returned."""
        return cls(list(state["names"]), list(state["methods"]), Pickled.of_tensors(state), state["why"])


def _take(job: RolloutJob, best: bool, streams: tuple[Any, ...]) -> JobState:
    singles = job.env.single_envs()
    methods, why = _choose_methods(job, best)
    env: RowEnv | None = job.env
    progress, tokens = job.progress, dict[int, Any]()
    if not methods or NEW_EPISODE in methods:
        env, progress = None, dataclasses.replace(progress, groups=[])
    else:
        tokens = make_tokens(singles, methods)
    content = Content(env, _find_agent_state(job.agent), progress, streams)
    return JobState([name_env(single.env) for single in singles], methods, _pickle(content, tokens), why)


def _choose_methods(job: RolloutJob, best: bool) -> tuple[list[str], str]:
    """Chooses the method that restores each environment, once for the same environments.

    Returns:
        The methods, empty before a reset; and why new episodes begin, if they do.
    """
    if not job.progress.groups:
        return [], ""
    if job.methods is None:
        from rlstructs.exact.env_state import (
            Trial,
            choose_methods,  # imports gymnasium
        )

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
    """Replaces an agent with `get_state` and `set_state` by (AGENT, state).

    Returns any other agent itself.
    """
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


def _load(job: RolloutJob, state: JobState, seed: int) -> None:
    make_env, before, was_reset = partial(_make_env, job, seed), job.env, bool(job.progress.groups)
    new = NewEnvs(make_env, None if was_reset else before)
    content: Content = loads(state.pickled, new.resolve)
    if content.env is None or was_reset:
        before.close()
    env = content.env or make_env()
    if env is content.env:
        new.close_unused()
    _set_agent(job, content.agent)
    job.set_env(env)
    job.progress.go_on(content.progress)
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
