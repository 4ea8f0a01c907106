"""The settings from which a worker makes its environments and its agent."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rlstructs.agent import RL_Agent
from rlstructs.copying import copy_arguments
from rlstructs.envs.env_list import RAISE
from rlstructs.envs.vec_env import VecEnv
from rlstructs.seeding import next_seed
from rlstructs.structures.dict_tensor import DictTensor


@dataclasses.dataclass(frozen=True)
class JobSettings:
    """The settings from which a worker makes its environments and its agent."""

    create_agent: Callable[..., RL_Agent]
    agent_args: dict[str, Any]
    create_env: Callable[..., VecEnv]
    env_args: dict[str, Any]
    seeds: Sequence[int]
    agent_seeds: Sequence[int] | None
    agent_info: DictTensor
    env_info: DictTensor
    device: torch.device | None
    on_env_failure: str = RAISE
    max_env_restarts: int | None = None
    first_worker: int = 0  # the index of the first of these workers among all

    def with_new_streams(self, worker: int, restart_number: int) -> JobSettings:
        """Returns the settings with new seeds for one worker.

        Its streams start anew for the `restart_number`-th time.
        """
        seeds = list(self.seeds)
        seeds[worker] = next_seed(seeds[worker], restart_number)
        agent_seeds = None if self.agent_seeds is None else list(self.agent_seeds)
        if agent_seeds is not None:
            agent_seeds[worker] = next_seed(agent_seeds[worker], restart_number)
        return dataclasses.replace(self, seeds=seeds, agent_seeds=agent_seeds)

    def seed_of(self, worker: int, restart_number: int) -> int:
        """The seed of a worker whose streams have started anew so many times."""
        return next_seed(self.seeds[worker], restart_number) if restart_number else self.seeds[worker]

    def with_copied_arguments(self) -> JobSettings:
        """The settings with copied arguments, like those that a worker in another process gets."""
        both = self.agent_args, self.env_args  # copied together: an object in both stays one object
        agent_args, env_args = copy_arguments(both)
        return dataclasses.replace(self, agent_args=agent_args, env_args=env_args)

    def objects(self) -> dict[str, Any]:
        """The user's objects, by their names in messages."""
        parts: dict[str, Any] = {"create_agent": self.create_agent, "create_env": self.create_env}
        parts |= {f"agent_args[{key!r}]": value for key, value in self.agent_args.items()}
        return parts | {f"env_args[{key!r}]": value for key, value in self.env_args.items()}
