"""PettingZoo: its environments of several agents, with a slot for each agent.

from mpe2 import simple_spread_v3
from rlstructs import RandomAgent, RL_Batcher
from rlstructs.integrations.pettingzoo import ParallelEnvs

def create_env(n_envs, seed):
    return ParallelEnvs([simple_spread_v3.parallel_env] * n_envs, seed)

with RL_Batcher(128, create_agent, {}, create_env, {"n_envs": 8}, n_processes=2, seeds=0) as batcher:
    batcher.reset()
    batcher.execute()
    trajectories, n_running = batcher.get()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlstructs.workers.public_names import export_lazily

if TYPE_CHECKING:
    from rlstructs.integrations.pettingzoo.parallel_envs import ParallelEnvs

_EXPORTS = {"ParallelEnvs": "parallel_envs"}

__all__ = ["ParallelEnvs"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = export_lazily(__name__, _EXPORTS)
