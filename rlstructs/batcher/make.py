"""The arguments of the constructor that follow from those of `RL_Batcher.make`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from rlstructs.agent import RL_Agent
from rlstructs.checks import check_count
from rlstructs.envs.gym_env import GymEnvInf
from rlstructs.envs.registry import env_factory
from rlstructs.errors import SpecError
from rlstructs.rollout.makers import Makers
from rlstructs.shared.module_state import copy_plain
from workers.limits import n_cores


def constructor_arguments(
    env: Any, agent: Any, n_envs: int, n_workers: int | None, env_args: Mapping[str, Any] | None, device: Any,
    episode_seeds: bool,
) -> dict[str, Any]:  # fmt: skip
    """The arguments of the constructor that follow from those of `RL_Batcher.make`.

    Raises:
        SpecError, TypeError: one of them is wrong; the message names it.
    """
    n_workers = _count_workers(check_count("n_envs", n_envs), n_workers)
    if isinstance(agent, torch.nn.Module) and not isinstance(agent, RL_Agent):
        agent = copy_plain(agent)  # a wrapped or parametrised module cannot be sent to a worker
    elif agent is not None and not callable(agent):
        raise TypeError(f"agent must be an RL_Agent, a torch.nn.Module or a function, got {type(agent).__name__}")
    kind = partial(GymEnvInf, episode_seeds=True) if episode_seeds else GymEnvInf
    makers = Makers(env_factory(env, env_args), agent, n_envs // max(1, n_workers), device, kind)
    return {
        "create_agent": makers.create_agent,
        "agent_args": {},
        "create_env": makers.create_env,
        "env_args": {},
        "n_processes": n_workers,
        "device": device,
    }


def _count_workers(n_envs: int, n_workers: int | None) -> int:
    """The number of workers: the given one, or the largest that divides the environments and has a core for each."""
    if n_workers is None:
        return next(n for n in range(min(n_cores(), n_envs), 0, -1) if n_envs % n == 0)
    check_count("n_workers", n_workers, 0)
    if n_workers and n_envs % n_workers:
        raise SpecError(f"n_envs must be a multiple of n_workers, got {n_envs} environments for {n_workers} workers")
    return n_workers
