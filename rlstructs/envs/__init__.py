"""Vectorised environments: the `VecEnv` protocol, `GymEnv`, `GymEnvInf`, `GymEnvThreads`, `GymVectorEnv`, `DeviceEnv`.

`JaxEnv` holds environments that are pure functions of jax, `JaxFunctions`.
`NormalizeObservation` and `NormalizeReward` wrap any of them. `SharedVectorEnv` is a gymnasium vector environment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlstructs.workers.public_names import export_lazily

if TYPE_CHECKING:
    from rlstructs.envs.gym_env import GymEnv, GymEnvInf
    from rlstructs.envs.gym_threads import GymEnvThreads
    from rlstructs.envs.gym_vector import GymVectorEnv
    from rlstructs.envs.jax_env import JaxEnv
    from rlstructs.envs.jax_functions import JaxFunctions, from_brax, from_gymnax
    from rlstructs.envs.normalize import NormalizeObservation, NormalizeReward
    from rlstructs.envs.shared_vector.shared_vector_env import SharedVectorEnv
    from rlstructs.envs.vec_env import DeviceEnv, VecEnv

_EXPORTS = {
    "DeviceEnv": "vec_env",
    "GymEnv": "gym_env",
    "GymEnvInf": "gym_env",
    "GymEnvThreads": "gym_threads",
    "GymVectorEnv": "gym_vector",
    "JaxEnv": "jax_env",
    "JaxFunctions": "jax_functions",
    "NormalizeObservation": "normalize",
    "NormalizeReward": "normalize",
    "SharedVectorEnv": "shared_vector.shared_vector_env",
    "VecEnv": "vec_env",
    "from_brax": "jax_functions",
    "from_gymnax": "jax_functions",
}

__all__ = [
    "DeviceEnv",
    "GymEnv",
    "GymEnvInf",
    "GymEnvThreads",
    "GymVectorEnv",
    "JaxEnv",
    "JaxFunctions",
    "NormalizeObservation",
    "NormalizeReward",
    "SharedVectorEnv",
    "VecEnv",
    "from_brax",
    "from_gymnax",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = export_lazily(__name__, _EXPORTS)
