"""Rollouts from parallel workers through shared memory, as length-masked B x T trajectories.

Words and axes, everywhere: `B` batch, `T` time, `N` environments, `W` workers; tensors of trajectories
are `(B, T, ...)`. `terminated` and `truncated` are gymnasium's, `done` is either of them.

    import torch
    from rlstructs import RL_Batcher

    network = torch.nn.Linear(4, 2)  # CartPole's observations to logits of its 2 actions
    with RL_Batcher.make("CartPole-v1", network, n_envs=8, n_workers=2) as batcher:
        for rollout in batcher.rollouts(n_steps=2048):
            print(rollout["observation/frame"].shape)
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rlstructs.workers.public_names import export_lazily

if sys.platform == "win32":
    raise ImportError("rlstructs needs POSIX shared memory and signals: it runs on Linux (and macOS), not on Windows")

if TYPE_CHECKING:
    from rlstructs import debug as debug
    from rlstructs import distributed as distributed
    from rlstructs import envs as envs
    from rlstructs import integrations as integrations
    from rlstructs import memories as memories
    from rlstructs import replay as replay
    from rlstructs import returns as returns
    from rlstructs import testing as testing
    from rlstructs.action_masks import mask_logits
    from rlstructs.agent import RL_Agent, RL_Agent_CheckDevice, replay_agent, replay_agent_stateless
    from rlstructs.batcher.batcher import RL_Batcher
    from rlstructs.batcher.lease import Lease
    from rlstructs.checkpoints.checkpoint import Checkpoint
    from rlstructs.distributed.batcher import PartsLease, RayBatcher
    from rlstructs.distributed.replay import RayReplay
    from rlstructs.envs.gym_env import GymEnv, GymEnvInf
    from rlstructs.envs.gym_threads import GymEnvThreads
    from rlstructs.envs.gym_vector import GymVectorEnv
    from rlstructs.envs.jax_env import JaxEnv
    from rlstructs.envs.normalize import NormalizeObservation, NormalizeReward
    from rlstructs.envs.shared_vector.shared_vector_env import SharedVectorEnv, make_vec
    from rlstructs.envs.vec_env import DeviceEnv, VecEnv
    from rlstructs.errors import (
        ClosedError,
        EmptyBufferError,
        EnvTimeout,
        FileError,
        MissingKeyError,
        OutOfMemoryError,
        RemoteTraceback,
        RLError,
        SpecError,
        StateError,
        WorkerCrashed,
        WorkerError,
        WorkerTimeout,
    )
    from rlstructs.jax_agent import JaxAgent
    from rlstructs.module_agent import ModuleAgent
    from rlstructs.moments import Moments
    from rlstructs.random_agent import RandomAgent
    from rlstructs.returns.functions import discounted_returns, gae, lambda_returns, n_step_returns, transitions, vtrace
    from rlstructs.seeding import int32_seed
    from rlstructs.structures.dict_tensor import DictTensor, masked_dicttensor, masked_tensor
    from rlstructs.structures.packed import PackedTrajectories
    from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
    from rlstructs.structures.trajectories import Trajectories, load_rollouts, save_rollouts

__version__ = "0.2.0"

_EXPORTS = {
    "Checkpoint": "checkpoints.checkpoint",
    "ClosedError": "errors",
    "DeviceEnv": "envs.vec_env",
    "DictTensor": "structures.dict_tensor",
    "EmptyBufferError": "errors",
    "EnvTimeout": "errors",
    "FileError": "errors",
    "GymEnv": "envs.gym_env",
    "GymEnvInf": "envs.gym_env",
    "GymEnvThreads": "envs.gym_threads",
    "GymVectorEnv": "envs.gym_vector",
    "JaxAgent": "jax_agent",
    "JaxEnv": "envs.jax_env",
    "Lease": "batcher.lease",
    "MissingKeyError": "errors",
    "ModuleAgent": "module_agent",
    "Moments": "moments",
    "NormalizeObservation": "envs.normalize",
    "NormalizeReward": "envs.normalize",
    "OutOfMemoryError": "errors",
    "PackedTrajectories": "structures.packed",
    "PartsLease": "distributed.batcher",
    "RLError": "errors",
    "RL_Agent": "agent",
    "RL_Agent_CheckDevice": "agent",
    "RL_Batcher": "batcher.batcher",
    "RandomAgent": "random_agent",
    "RayBatcher": "distributed.batcher",
    "RayReplay": "distributed.replay",
    "RemoteTraceback": "errors",
    "SharedVectorEnv": "envs.shared_vector.shared_vector_env",
    "SpecError": "errors",
    "StateError": "errors",
    "TemporalDictTensor": "structures.temporal_dict_tensor",
    "Trajectories": "structures.trajectories",
    "VecEnv": "envs.vec_env",
    "WorkerCrashed": "errors",
    "WorkerError": "errors",
    "WorkerTimeout": "errors",
    "discounted_returns": "returns.functions",
    "gae": "returns.functions",
    "int32_seed": "seeding",
    "lambda_returns": "returns.functions",
    "load_rollouts": "structures.trajectories",
    "make_vec": "envs.shared_vector.shared_vector_env",
    "mask_logits": "action_masks",
    "masked_dicttensor": "structures.dict_tensor",
    "masked_tensor": "structures.dict_tensor",
    "n_step_returns": "returns.functions",
    "replay_agent": "agent",
    "replay_agent_stateless": "agent",
    "save_rollouts": "structures.trajectories",
    "transitions": "returns.functions",
    "vtrace": "returns.functions",
}

__all__ = [
    "Checkpoint",
    "ClosedError",
    "DeviceEnv",
    "DictTensor",
    "EmptyBufferError",
    "EnvTimeout",
    "FileError",
    "GymEnv",
    "GymEnvInf",
    "GymEnvThreads",
    "GymVectorEnv",
    "JaxAgent",
    "JaxEnv",
    "Lease",
    "MissingKeyError",
    "ModuleAgent",
    "Moments",
    "NormalizeObservation",
    "NormalizeReward",
    "OutOfMemoryError",
    "PackedTrajectories",
    "PartsLease",
    "RLError",
    "RL_Agent",
    "RL_Agent_CheckDevice",
    "RL_Batcher",
    "RandomAgent",
    "RayBatcher",
    "RayReplay",
    "RemoteTraceback",
    "SharedVectorEnv",
    "SpecError",
    "StateError",
    "TemporalDictTensor",
    "Trajectories",
    "VecEnv",
    "WorkerCrashed",
    "WorkerError",
    "WorkerTimeout",
    "discounted_returns",
    "gae",
    "int32_seed",
    "lambda_returns",
    "load_rollouts",
    "make_vec",
    "mask_logits",
    "masked_dicttensor",
    "masked_tensor",
    "n_step_returns",
    "replay_agent",
    "replay_agent_stateless",
    "save_rollouts",
    "transitions",
    "vtrace",
]

# Packages that programs import names from.
_MODULES = ("debug", "distributed", "envs", "integrations", "memories", "replay", "returns", "testing")

if not TYPE_CHECKING:
    __getattr__, __dir__ = export_lazily(__name__, _EXPORTS, _MODULES)
