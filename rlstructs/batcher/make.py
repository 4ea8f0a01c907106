"""Turns the arguments of `RL_Batcher.make` into those of the constructor."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from rlstructs.agent import RL_Agent
from rlstructs.checks import check_count
from rlstructs.envs.gym_env import GymEnvInf
from rlstructs.envs.gym_envs import env_factory
from rlstructs.errors import SpecError
from rlstructs.rollout.makers import Makers
from rlstructs.shared.module_state import copy_plain
from rlstructs.workers.limits import n_cores

# Arguments of the constructor that `make` sets, and from which of its own.
SET = {"create_env": "env", "create_agent": "agent", "agent_args": "agent", "n_processes": "n_workers", "seeds": "seed"}


def constructor_arguments(
    cls: type,
    env: Any,
    agent: Any,
    n_envs: int,
    n_workers: int | None,
    env_args: Mapping[str, Any] | None,
    device: Any,
    episode_seeds: bool,
    clip_actions: bool,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """The arguments of the constructor of `cls` that follow from those of its `make`.

    Raises:
        SpecError, TypeError: one of them is wrong; the message names it.
    """
    _check_names(cls, settings)
    n_workers = _count_workers(check_count("n_envs", n_envs), n_workers)
    if isinstance(agent, torch.nn.Module) and not isinstance(agent, RL_Agent):
        agent = copy_plain(agent)  # a wrapped or parametrised module cannot be sent to a worker
    elif agent is not None and not callable(agent):
        raise TypeError(f"agent must be an RL_Agent, a torch.nn.Module or a function, got {type(agent).__name__}")
    kind = partial(GymEnvInf, episode_seeds=True) if episode_seeds else GymEnvInf
    makers = Makers(env_factory(env, env_args), agent, n_envs // max(1, n_workers), device, kind, clip_actions)
    return {
        "create_agent": makers.create_agent,
        "agent_args": {},
        "create_env": makers.create_env,
        "env_args": {},
        "n_processes": n_workers,
        "device": device,
    }


def _check_names(cls: Any, settings: Mapping[str, Any]) -> None:
    """Raises TypeError for an argument that neither `make` nor the constructor has, or that `make` sets itself."""
    own, more = (list(inspect.signature(each).parameters) for each in (cls.make, cls))
    for name in settings:
        if name in SET:
            raise TypeError(f"{cls.__name__}.make() has {SET[name]}= in the place of {name}=")
        if name not in more:
            close = difflib.get_close_matches(name, {*own, *more} - {*SET, "settings"}, 1)
            hint = f". Did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{cls.__name__}.make() got an unexpected keyword argument {name!r}{hint}")


def _count_workers(n_envs: int, n_workers: int | None) -> int:
    """The given number of workers, or the largest that divides `n_envs` and leaves each worker a core."""
    if n_workers is None:
        return next(n for n in range(min(n_cores(), n_envs), 0, -1) if n_envs % n == 0)
    check_count("n_workers", n_workers, 0)
    if n_workers and n_envs % n_workers:
        raise SpecError(f"n_envs must be a multiple of n_workers, got {n_envs} environments for {n_workers} workers")
    return n_workers
