"""Vectorised environments: the `VecEnv` protocol, `GymEnv`, `GymEnvInf`, `GymEnvThreads`, `GymVectorEnv`, `DeviceEnv`.

`NormalizeObservation` and `NormalizeReward` wrap any of them. `SharedVectorEnv` is a gymnasium vector environment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlstructs.workers.public_names import export_lazily

if TYPE_CHECKING:
    from rlstructs.envs.gym_env import GymEnv, GymEnvInf
    from rlstructs.envs.gym_threads import GymEnvThreads
    from rlstructs.envs.gym_vector import GymVectorEnv
    from rlstructs.envs.normalize import NormalizeObservation, NormalizeReward
    from rlstructs.envs.shared_vector.shared_vector_env import SharedVectorEnv
    from rlstructs.envs.vec_env import DeviceEnv, VecEnv

_EXPORTS = {
    "DeviceEnv": "vec_env",
    "GymEnv": "gym_env",
    "GymEnvInf": "gym_env",
    "GymEnvThreads": "gym_threads",
    "GymVectorEnv": "gym_vector",
    "NormalizeObservation": "normalize",
    "NormalizeReward": "normalize",
    "SharedVectorEnv": "shared_vector.shared_vector_env",
    "VecEnv": "vec_env",
}

__all__ = [
    "DeviceEnv",
    "GymEnv",
    "GymEnvInf",
    "GymEnvThreads",
    "GymVectorEnv",
    "NormalizeObservation",
    "NormalizeReward",
    "SharedVectorEnv",
    "VecEnv",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = export_lazily(__name__, _EXPORTS)
