"""A program that mypy checks with the library: what that returns needs no words of the program's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gymnasium
from typing_extensions import assert_type

import rlstructs.memories
from rlstructs import GymEnvInf, RandomAgent, RL_Batcher, Trajectories
from rlstructs.distributed import RayBatcher

if TYPE_CHECKING:  # names that a package does not have are noticed, although modules are imported when names are used
    _ = rlstructs.RL_Bacher  # type: ignore[attr-defined]
    _ = rlstructs.memories.nothing  # type: ignore[attr-defined]


def create_env(n_envs: int, seed: int) -> GymEnvInf:
    return GymEnvInf([gymnasium.make("CartPole-v1") for _ in range(n_envs)], seed)


def create_agent() -> RandomAgent:
    return RandomAgent(gymnasium.spaces.Discrete(2))


def collected(batcher: RL_Batcher) -> int:
    batcher.execute()
    trajectories, n_running = batcher.get()
    assert_type(trajectories, Trajectories)
    assert_type(batcher.get(blocking=False), tuple[Trajectories, int] | tuple[None, None])
    with batcher.lease() as (leased, _):
        steps = leased.trajectories["observation/frame"]
    return n_running + batcher.get(preempt=0.5)[0].n_elems() + len(steps)


def main() -> None:
    with RL_Batcher(8, create_agent, {}, create_env, {"n_envs": 2}, n_processes=2, seeds=0) as batcher:
        collected(batcher)
    with RayBatcher(8, create_agent, {}, create_env, {"n_envs": 2}, n_processes=2, seeds=0) as nodes:
        assert_type(nodes.get(min_nodes=1)[0], Trajectories)
