"""`ReplayBuffer` and `DictReplayBuffer`: those of Stable-Baselines3, over a store of this library."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common import buffers
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize

from rlstructs.debug import is_on
from rlstructs.replay.columns import Spec
from rlstructs.replay.row_ids import SLOT
from rlstructs.replay.step_writer import StepWriter
from rlstructs.replay.store import Storage
from rlstructs.workers.limits import available_bytes
from rlstructs.workers.public_names import set_module

# A column of observations is called after its key in a Dict space: `observations/<key>`.
OBSERVATIONS, NEXT = "observations", "next_observations"
ACTIONS, REWARDS, DONES, TIMEOUTS = "actions", "rewards", "dones", "timeouts"
FLOAT = np.dtype(np.float32)
# Columns that are not written while they are zero.
SPARSE = frozenset([TIMEOUTS])


@set_module("rlstructs.integrations.sb3")
class ReplayBuffer(buffers.ReplayBuffer):  # type: ignore[misc]
    """Replaces Stable-Baselines3's `ReplayBuffer`: give it to an algorithm as `replay_buffer_class`.

    It draws the same rows from the same state of numpy's global random stream. Values have the dtypes of the spaces,
    float64 actions become float32.

    Args:
        buffer_size: capacity in rows of all environments together.
        observation_space: of one environment; anything but a Dict.
        action_space: of one environment.
        device: of samples.
        n_envs: number of environments.
        optimize_memory_usage: whether an observation is stored once, as the one after a step and the one before the
            next. Unlike in Stable-Baselines3 this may be combined with `handle_timeout_termination`, the observation
            after the end of an episode is the true one, and every row can be drawn.
        handle_timeout_termination: whether the `dones` of samples are 0 where `TimeLimit.truncated` is in the info.
    """

    pos: int
    full: bool
    _samples: Any = ReplayBufferSamples
    # The rows of one step lie side by side.
    _order = SLOT
    # Whether there was a timeout: the column is zero before. Pickles of earlier versions do not say.
    _has_timeouts = True

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
    ) -> None:
        buffers.BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs)
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage, self.handle_timeout_termination = optimize_memory_usage, handle_timeout_termination
        self._storage = Storage(n_envs, self.buffer_size, order=self._order)
        specs, linked = self._specs(), {}
        if optimize_memory_usage:
            linked = {name: name.removeprefix("next_") for name in specs if name.startswith(NEXT)}
        _warn_of_memory(sum(spec.nbytes for name, spec in specs.items() if name not in linked), self)
        self._storage.add_columns(specs, linked)
        self._names = list(specs)
        self._after = [name for name in specs if name.startswith(NEXT) or name in (DONES, TIMEOUTS)]
        self._before = [name for name in specs if name not in self._after]
        self._writer = StepWriter(self._storage, ())
        self._has_timeouts = False

    def _specs(self) -> dict[str, Spec]:
        """The columns, by name."""
        observations = self._observation_specs(OBSERVATIONS) | self._observation_specs(NEXT)
        action = self.action_space.dtype
        return {
            **observations,
            ACTIONS: Spec(FLOAT if action == np.float64 else np.dtype(action), (self.action_dim,), 0),
            **{name: Spec(FLOAT, (), 0) for name in (REWARDS, DONES, TIMEOUTS)},
        }

    def _observation_specs(self, name: str) -> dict[str, Spec]:
        return {name: Spec(np.dtype(self.observation_space.dtype), self.obs_shape, 0)}

    def _split(self, before: Any, after: Any) -> dict[str, Any]:
        """Splits the observations of all environments before and after a step into columns."""
        return {OBSERVATIONS: before, NEXT: after}

    def _join(self, name: str, columns: dict[str, np.ndarray]) -> Any:
        """Makes an observation of columns."""
        return columns[name]

    def add(
        self,
        obs: Any,
        next_obs: Any,
        action: np.ndarray,
        reward: np.ndarray,
        done: np.ndarray,
        infos: list[dict[str, Any]],
    ) -> None:
        """Appends a row to each environment.

        Args:
            obs: observations before the step, (n_envs, ...).
            next_obs: those after it; where an episode ended, the last one of the episode.
            action: (n_envs, ...).
            reward, done: (n_envs,).
            infos: one for each environment; anything if timeouts are not handled.
        """
        timeouts = None
        if self.handle_timeout_termination:
            timeouts = [info.get("TimeLimit.truncated", False) for info in infos]
            if self._has_timeouts or any(timeouts) or len(timeouts) != self.n_envs:
                self._has_timeouts = True
            else:
                timeouts = None
        block = self._split(obs, next_obs)
        # The conversions that nearly all programs need.
        is_flat = type(action) is np.ndarray and action.ndim == 1
        block[ACTIONS] = action.reshape(self.n_envs, self.action_dim) if is_flat else action
        block[REWARDS], block[DONES] = np.asarray(reward, FLOAT), np.asarray(done, FLOAT)
        if timeouts is not None:
            block[TIMEOUTS] = np.asarray(timeouts, FLOAT)
        live = () if self._has_timeouts or is_on() else SPARSE  # debug mode has poisoned them
        if self._writer.write(block, None, self._cast, fills=True, live=live) is None:
            specs = self._storage.columns.specs
            self._storage.write({name: self._cast(name, block[name], specs[name])[:, None] for name in block})
        self.pos += 1
        if self.pos == self.buffer_size:
            self.full, self.pos = True, 0

    def _cast(self, name: str, values: Any, spec: Spec) -> np.ndarray:
        """Casts values of all environments freely, as numpy does when it sets rows of an array."""
        return np.asarray(values).astype(spec.dtype, copy=False).reshape(self.n_envs, *spec.shape)

    def reset(self) -> None:
        """Drops every row."""
        self._storage.clear()
        super().reset()

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """Draws rows uniformly, with replacement, from numpy's global random stream.

        Args:
            batch_size: B, the number of rows.
            env: normalises observations and rewards, if given.

        Returns:
            `observations`, `actions`, `next_observations` (B, ...), `dones` and `rewards` float32 (B, 1): tensors on
            the device, private memory.
        """
        return buffers.BaseBuffer.sample(self, batch_size, env)

    def _get_samples(self, batch_inds: np.ndarray, env: VecNormalize | None = None) -> Any:
        lanes = np.random.randint(0, high=self.n_envs, size=(len(batch_inds),))
        return self._read(self._storage.columns.rows(lanes, batch_inds), env)

    def _gather(self, names: list[str], rows: np.ndarray) -> dict[str, np.ndarray]:
        storage = self._storage
        if storage.is_private:  # no other process writes, and threads wait
            with storage.lock:
                return dict(zip(names, storage.gather(names, rows), strict=True))
        return dict(zip(names, storage.read_at(rows, lambda _, some: storage.gather(names, some)), strict=True))

    def _read(self, rows: np.ndarray, env: VecNormalize | None, last: np.ndarray | None = None) -> Any:
        """Makes a sample of these rows; where `last` is given, what followed an action is that of these other rows."""
        columns = self._gather(self._names if last is None else self._before, rows)
        if last is not None:
            columns |= self._gather(self._after, last)
        dones, rewards = columns[DONES] * (1 - columns[TIMEOUTS]), columns[REWARDS]
        return self._samples(
            self._to_tensors(self._normalize_obs(self._join(OBSERVATIONS, columns), env)),
            self.to_torch(columns[ACTIONS]),
            self._to_tensors(self._normalize_obs(self._join(NEXT, columns), env)),
            self.to_torch(dones[:, None]),
            self.to_torch(self._normalize_reward(rewards[:, None], env)),
        )

    def _to_tensors(self, observation: Any) -> Any:
        return self.to_torch(observation)

    def to_torch(self, array: np.ndarray, copy: bool = False) -> torch.Tensor:
        """Makes a tensor on the device; it shares memory with the array unless `copy`, or if the device is another."""
        if copy:
            return torch.tensor(array, device=self.device)
        is_plain = type(array) is np.ndarray and self.device.type == "cpu" and array.flags.writeable
        return torch.from_numpy(array) if is_plain else torch.as_tensor(array, device=self.device)

    def _column(self, name: str) -> np.ndarray:
        """A view of a column, (buffer_size, n_envs, ...); a copy if the column is stored only as a link to another."""
        columns = self._storage.columns
        if name in columns.links:
            slots = np.arange(self.buffer_size)[:, None]
            return np.asarray(self._storage.gather([name], columns.rows(np.arange(self.n_envs), slots))[0])
        return np.asarray(columns.cells[name]).swapaxes(0, 1)

    def _observations(self, name: str) -> Any:
        return self._column(name)

    observations = property(lambda self: self._observations(OBSERVATIONS), doc="Observations before steps.")
    next_observations = property(lambda self: self._observations(NEXT), doc="Observations after steps.")
    actions = property(lambda self: self._column(ACTIONS), doc="Actions, (buffer_size, n_envs, ...), a view.")
    rewards = property(lambda self: self._column(REWARDS), doc="Rewards, (buffer_size, n_envs), a view.")
    dones = property(lambda self: self._column(DONES), doc="Ends of episodes, (buffer_size, n_envs), a view.")

    @property
    def timeouts(self) -> np.ndarray:
        """Truncations, (buffer_size, n_envs), a view."""
        self._has_timeouts = True  # the program may write to it
        return self._column(TIMEOUTS)


@set_module("rlstructs.integrations.sb3")
class DictReplayBuffer(ReplayBuffer):
    """Replaces Stable-Baselines3's `DictReplayBuffer`, of observations that are dicts; see `ReplayBuffer`."""

    _samples = DictReplayBufferSamples

    def _observation_specs(self, name: str) -> dict[str, Spec]:
        of_key = self.observation_space.spaces
        return {f"{name}/{key}": Spec(np.dtype(of_key[key].dtype), shape, 0) for key, shape in self.obs_shape.items()}

    def _split(self, before: Any, after: Any) -> dict[str, Any]:
        pairs = ((OBSERVATIONS, before), (NEXT, after))
        return {f"{name}/{key}": observation[key] for name, observation in pairs for key in self.obs_shape}

    def _join(self, name: str, columns: dict[str, np.ndarray]) -> Any:
        return {key: columns[f"{name}/{key}"] for key in self.obs_shape}

    def _observations(self, name: str) -> Any:
        return {key: self._column(f"{name}/{key}") for key in self.obs_shape}

    def _to_tensors(self, observation: Any) -> Any:
        return {key: self.to_torch(values) for key, values in observation.items()}


def _warn_of_memory(row_bytes: int, buffer: ReplayBuffer) -> None:
    """Warns, as Stable-Baselines3 does, if the rows will not fit into memory."""
    needed, available = row_bytes * buffer.buffer_size * buffer.n_envs, available_bytes()
    if available is not None and needed > available:
        warnings.warn(
            f"a full {type(buffer).__name__} takes {needed / 1e9:.2f} GB, {available / 1e9:.2f} GB are available",
            stacklevel=3,
        )
