"""The protocol of a vectorised environment, and `DeviceEnv`, which changes its device."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch

from rlstructs.frameworks.torch import as_device
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.workers.public_names import set_module

# The `env_info` of a reset without options.
NO_INFO = DictTensor()


@set_module("rlstructs")
@runtime_checkable
class VecEnv(Protocol):
    """Several environments that are stepped together. Any class with these methods is one.

    `running` is int64 (B,), ascending: the environments that have not ended since `reset`. One that
    has stopped comes back only with the next `reset`. Keys, dtypes and row shapes of observations are
    the same at every call; tensors that were returned are not written to again.
    `rlstructs.testing.check_env` checks all of this.

    Some environments cannot begin an episode with each reset, for example an agent that joins later. Such an
    environment waits: it runs, its observation has `initial_state` True and zeros otherwise, its actions have no
    effect, and its steps until an episode begins are not transitions. The class then has one more property,
    `absent_rows`: the rows of the last observation (of `reset`, or of the first pair of `step`) that belong to waiting
    environments, int64 (K,), ascending.

    An environment whose statistics all workers share, such as `NormalizeObservation`, has two more methods:
    `take_statistics() -> dict[str, Moments]` returns the moments gathered since the last call, and
    `load_statistics(statistics, frozen)` gives it the statistics of all workers. Names and row shapes are the same
    at every call, from the first `reset` on.

    Example:
        >>> class Coin:
        ...     def n_envs(self):
        ...         return 2
        ...     def reset(self, env_info=DictTensor()):
        ...         return DictTensor({"frame": torch.zeros(2, 1)}), torch.arange(2)
        ...     def step(self, action):
        ...         observation = DictTensor({"frame": torch.rand(2, 1)})
        ...         return (observation, torch.arange(2)), (observation, torch.arange(2))
        ...     def close(self):
        ...         pass
        >>> isinstance(Coin(), VecEnv)
        True

    A fast vectorised environment whose environments always run may have one more method, `step_into(action, rows)`.
    A rollout calls it in place of `step`. It writes the observation of `step`'s first pair straight to the rollout's
    memory: `rows` has an array of E rows for each key of an observation, with the dtype and shape that `reset` gave,
    any strides and unknown content. It must write all of these arrays and keep none. It returns None, or, where
    environments were reset in this step, their indexes (int64 (R,), ascending) and their first observations, a
    `DictTensor` of R rows.

    Example:
        >>> class Walk:
        ...     def n_envs(self):
        ...         return 3
        ...     def reset(self, env_info=DictTensor()):
        ...         self.at = np.zeros(3, np.float32)
        ...         return DictTensor({"frame": torch.zeros(3, 1), "reward": torch.zeros(3)}), torch.arange(3)
        ...     def step_into(self, action, rows):
        ...         self.at += 2 * action["action"].numpy() - 1
        ...         rows["frame"][:, 0], rows["reward"][:] = self.at, abs(self.at)
        ...     def step(self, action):
        ...         rows = {"frame": np.zeros((3, 1), np.float32), "reward": np.zeros(3, np.float32)}
        ...         self.step_into(action, rows)
        ...         observation = DictTensor.from_numpy(rows)
        ...         return (observation, torch.arange(3)), (observation, torch.arange(3))
        ...     def close(self):
        ...         pass
    """

    def n_envs(self) -> int:
        """Number of environments, E. Must not use the environments themselves."""
        ...

    def reset(self, env_info: DictTensor) -> tuple[DictTensor, torch.Tensor]:
        """Starts an episode in every environment.

        Args:
            env_info: E rows on the CPU, or empty.

        Returns:
            The first observation, E rows, and `running`, which is 0..E-1.
        """
        ...

    def step(self, action: DictTensor) -> tuple[tuple[DictTensor, torch.Tensor], tuple[DictTensor, torch.Tensor]]:
        """Steps the running environments.

        Args:
            action: row j is for environment `running[j]`.

        Returns:
            Two pairs of observation and running. The first is what happened in every environment
            that was stepped, final observations included. The second is what the agent sees next,
            in the environments that still run: the same tensors, or the same object, where the two do not differ.

            Where `initial_state` is True and `done` is False in the first pair, the environment only started
            an episode: that is no transition, and a rollout leaves it out. Only the step after an end may be such a
            step: one whose second pair held the final observation, with `done` True; and the steps of
            environments that wait, see `absent_rows` above.
        """
        ...

    def close(self) -> None:
        """Frees the resources of the environments."""
        ...


@set_module("rlstructs")
class DeviceEnv:
    """Moves actions to an environment's device, and observations to another device.

    `env_info` stays on the CPU. Every other attribute is the environment's.

    Args:
        env: the environment.
        from_device: the environment's device.
        to_device: where observations, and the indexes of running environments, are moved.
    """

    def __init__(self, env: VecEnv, from_device: torch.device | str, to_device: torch.device | str) -> None:
        self._env = env
        self._from, self._to = as_device(from_device), as_device(to_device)

    def n_envs(self) -> int:
        """Number of environments."""
        return self._env.n_envs()

    def reset(self, env_info: DictTensor = NO_INFO) -> tuple[DictTensor, torch.Tensor]:
        """Resets the environment; see `VecEnv.reset`."""
        return self._move(self._env.reset(env_info))

    def step(self, action: DictTensor) -> tuple[tuple[DictTensor, torch.Tensor], tuple[DictTensor, torch.Tensor]]:
        """Steps the environment; see `VecEnv.step`."""
        after, following = self._env.step(action.to(self._from))
        moved = self._move(after)
        if following[0] is after[0]:
            return moved, (moved[0], following[1].to(self._to))
        return moved, self._move(following)

    def close(self) -> None:
        """Closes the environment."""
        self._env.close()

    def _move(self, pair: tuple[DictTensor, torch.Tensor]) -> tuple[DictTensor, torch.Tensor]:
        return pair[0].to(self._to), pair[1].to(self._to)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._env, name)
