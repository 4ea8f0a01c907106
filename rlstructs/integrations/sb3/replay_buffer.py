"""Stable-Baselines3's replay buffers over a store of this library: plain, n-step and prioritised."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common import buffers
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize

from rlstructs.checks import check_count, check_gamma
from rlstructs.debug import is_on
from rlstructs.errors import FileError
from rlstructs.replay.draw.priorities import LEAVES, Priorities, exponent, importance_weights
from rlstructs.replay.rows.folder import make_storage
from rlstructs.replay.rows.lanes import LANE, SLOT
from rlstructs.replay.rows.spec import Setting, Spec
from rlstructs.replay.rows.step_writer import StepWriter
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
        compression: "zstd", "zstd:LEVEL", or column -> one of these, compresses columns; see `Memory`.
        path: a folder for the rows, which opens again after a program was killed; see `Memory`.
    """

    pos: int
    full: bool
    _samples: Any = ReplayBufferSamples
    # The rows of one step lie side by side.
    _order = SLOT
    # Whether there was a timeout; else the column is zero. Pickles of earlier versions lack this attribute.
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
        compression: Setting = None,
        path: str | Path | None = None,
    ) -> None:
        buffers.BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs)
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage, self.handle_timeout_termination = optimize_memory_usage, handle_timeout_termination
        where: Any = {"compression": compression, "path": path}
        self._storage = make_storage(type(self).__name__, n_envs, self.buffer_size, self._order, **where)
        specs, linked = self._specs(), {}
        if optimize_memory_usage:
            linked = {name: name.removeprefix("next_") for name in specs if name.startswith(NEXT)}
        own = {name: spec for name, spec in specs.items() if name not in linked}
        _warn_of_memory(self._storage.columns.nbytes_per_row(own), self)
        if not self._storage.columns.specs:
            self._storage.add_columns(specs, linked)
        elif (found := self._storage.columns.specs) != specs or self._storage.columns.links.keys() != linked.keys():
            raise FileError(f"{path}: holds columns {found}, expected {specs}, of which {sorted(linked)} are linked")
        ring = self._storage.ring
        ring.head[:] = head = int(ring.head.min())  # a program may have been killed as it raised them
        self.pos, self.full = head % self.buffer_size, head - int(ring.oldest().max()) == self.buffer_size
        self._names = list(specs)
        self._after = [name for name in specs if name.startswith(NEXT) or name in (DONES, TIMEOUTS)]
        self._before = [name for name in specs if name not in self._after]
        self._writer = StepWriter(self._storage, (), casts=True)
        self._has_timeouts = is_on() or head > 0  # debug mode poisons empty rows; a folder may have some

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
        block[ACTIONS], block[REWARDS], block[DONES] = action, reward, done
        if timeouts is not None:
            block[TIMEOUTS] = np.array(timeouts)
        live = () if self._has_timeouts else SPARSE
        if self._writer.write(block, None, self._cast, fills=True, live=live) is None:
            specs = self._storage.columns.specs
            self._storage.write({name: self._cast(name, block[name], specs[name])[:, None] for name in block})
        self.pos += 1
        if self.pos == self.buffer_size:
            self.full, self.pos = True, 0

    def _cast(self, name: str, values: Any, spec: Spec) -> np.ndarray:
        """Casts values of all environments as numpy does in assignments to rows."""
        return np.asarray(values).astype(spec.dtype, copy=False).reshape(self.n_envs, *spec.shape)

    def reset(self) -> None:
        """Drops every row."""
        self._storage.clear()
        self._has_timeouts = self._has_timeouts or is_on()
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
        return self._read(self._choose_lanes(batch_inds), env)

    def _choose_lanes(self, slots: np.ndarray) -> np.ndarray:
        """Draws an environment for each slot; returns the row ids, int64 (B,).

        Rows that have left a memory with `max_bytes` are replaced by draws of those that are left.
        """
        lanes, storage = np.random.randint(0, high=self.n_envs, size=slots.shape), self._storage
        rows = storage.columns.rows(lanes, slots)
        if storage.ring.floor.any():
            view = storage.view()
            gone = ~view.has(rows)
            rows[gone] = view.row_ids(np.random.randint(0, view.total, np.count_nonzero(gone)))
        return rows

    def _gather(self, names: list[str], rows: np.ndarray) -> dict[str, np.ndarray]:
        storage = self._storage
        if storage.is_private:  # no other process writes, and threads wait
            with storage.lock:
                return dict(zip(names, storage.gather(names, rows), strict=True))
        return dict(zip(names, storage.read_at(rows, lambda _, some: storage.gather(names, some)), strict=True))

    def _read(self, rows: np.ndarray, env: VecNormalize | None, last: np.ndarray | None = None) -> Any:
        """Makes a sample of these rows.

        If `last` is given, the data after the action come from those rows.
        """
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
        """Makes a tensor on the device.

        It shares memory with the array unless `copy`, or if the device is another.
        """
        if copy:
            return torch.tensor(array, device=self.device)
        is_plain = type(array) is np.ndarray and self.device.type == "cpu" and array.flags.writeable
        return torch.from_numpy(array) if is_plain else torch.as_tensor(array, device=self.device)

    def _column(self, name: str) -> np.ndarray:
        """A view of a column, (buffer_size, n_envs, ...).

        A copy if the column is only a link to another column.
        """
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


@set_module("rlstructs.integrations.sb3")
class NStepReplayBuffer(ReplayBuffer):
    """Replaces Stable-Baselines3's `NStepReplayBuffer`, which an algorithm takes where `n_steps` is more than 1.

    It draws the same rows and returns the same numbers. Unlike Stable-Baselines3's it takes `optimize_memory_usage`.

    Args:
        settings: as of `ReplayBuffer`.
        n_steps: n, the most rewards that are added up. There are fewer at the end of an episode, or of the rows.
        gamma: discount of a step, from 0 to 1; that of the algorithm.

    Raises:
        SpecError, TypeError: `n_steps` is no int from 1 on, or `gamma` is not from 0 to 1.

    Example:
        >>> from gymnasium import spaces
        >>> box, action = spaces.Box(0, 9, (1,)), spaces.Discrete(2)
        >>> buffer = NStepReplayBuffer(3, box, action, "cpu", n_steps=3, gamma=0.5)
        >>> for t in range(3):
        ...     buffer.add(np.array([[t]]), np.array([[t + 1]]), np.array([0]), np.ones(1), np.zeros(1), [{}])
        >>> np.random.seed(0)
        >>> batch = buffer.sample(4)
        >>> batch.observations.flatten(), batch.next_observations.flatten()
        (tensor([0., 1., 0., 1.]), tensor([3., 3., 3., 3.]))
        >>> batch.rewards.flatten(), batch.discounts.flatten()
        (tensor([1.7500, 1.5000, 1.7500, 1.5000]), tensor([0.1250, 0.2500, 0.1250, 0.2500]))
    """

    def __init__(self, *settings: Any, n_steps: int = 3, gamma: float = 0.99, **more_settings: Any) -> None:
        super().__init__(*settings, **more_settings)
        if "discounts" not in ReplayBufferSamples._fields:
            raise ImportError("NStepReplayBuffer needs stable-baselines3 2.7 or newer, whose algorithms take discounts")
        check_gamma(gamma)
        self.n_steps, self.gamma = check_count("n_steps", n_steps), gamma

    def _get_samples(self, batch_inds: np.ndarray, env: VecNormalize | None = None) -> Any:
        lanes, firsts = self._storage.columns.places(self._choose_lanes(batch_inds))
        slots = (firsts[:, None] + np.arange(self.n_steps)) % self.buffer_size
        rows = self._storage.columns.rows(lanes[:, None], slots)
        steps = self._gather([REWARDS, DONES, TIMEOUTS], rows.reshape(-1))
        rewards, dones, timeouts = (steps[name].reshape(rows.shape) for name in (REWARDS, DONES, TIMEOUTS))
        # Nothing follows the newest row: the slot behind it is empty, or has the oldest one.
        is_end = (dones != 0) | (timeouts != 0) | (slots == (self.pos - 1) % self.buffer_size)
        is_end[:, -1] = True
        last = is_end.argmax(axis=1)
        counts = np.arange(self.n_steps) <= last[:, None]
        discounts = self.gamma ** np.arange(self.n_steps, dtype=np.float32)
        returns = np.where(counts, self._normalize_reward(rewards, env) * discounts, 0).astype(np.float32)
        found = self._read(rows[:, 0], env, rows[np.arange(len(rows)), last])
        return found._replace(
            rewards=self.to_torch(returns.sum(axis=1, keepdims=True)),
            discounts=self.to_torch(self.gamma ** counts.sum(axis=1, keepdims=True).astype(np.float32)),
        )


Observations = torch.Tensor | dict[str, torch.Tensor]


@set_module("rlstructs.integrations.sb3")
class PrioritizedReplayBufferSamples(NamedTuple):
    """A sample of a prioritised buffer: the fields of `ReplayBufferSamples`, `weights` and `indices`."""

    observations: Observations
    actions: torch.Tensor
    next_observations: Observations
    dones: torch.Tensor
    rewards: torch.Tensor
    weights: torch.Tensor
    indices: np.ndarray
    discounts: torch.Tensor | None = None


@set_module("rlstructs.integrations.sb3")
class PrioritizedReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` that draws in proportion to priorities.

    Schaul et al., Prioritized Experience Replay (2016).

    P(i) = p_i^alpha / sum of p_k^alpha. A new row has the largest priority that was ever set, at first 1. `train` of
    Stable-Baselines3's algorithms neither uses weights nor sets priorities; "Your program, one line changed" shows a
    DQN that does.

    Args:
        settings: as of `ReplayBuffer`.
        alpha: exponent of priorities, at least 0; 0 draws uniformly.
        beta: exponent of weights, at least 0. It is an attribute, too, which `train` may set.

    Raises:
        SpecError: an exponent is invalid.

    Example:
        >>> from gymnasium import spaces
        >>> box, action = spaces.Box(0, 9, (1,)), spaces.Discrete(2)
        >>> buffer = PrioritizedReplayBuffer(8, box, action, "cpu", alpha=1.0, beta=1.0)
        >>> for t in range(2):
        ...     buffer.add(np.array([[t]]), np.array([[t + 1]]), np.array([0]), np.ones(1), np.zeros(1), [{}])
        >>> buffer.update_priorities(np.array([0, 1]), np.array([1.0, 4.0]))
        >>> batch = buffer.sample(5)
        >>> batch.indices, batch.weights.flatten()
        (array([0, 1, 1, 1, 1]), tensor([1.0000, 0.2500, 0.2500, 0.2500, 0.2500]))
    """

    # Draws go through the rows in the order of their ids.
    _order = LANE

    def __init__(self, *settings: Any, alpha: float = 0.6, beta: float = 0.4, **more_settings: Any) -> None:
        super().__init__(*settings, **more_settings)
        self.beta = beta
        n_rows, clock = self._storage.columns.n_rows, self._storage.clock
        self._priorities = Priorities(n_rows, self.n_envs, exponent("alpha", alpha), clock=clock)

    @property
    def alpha(self) -> float:
        """Exponent of priorities."""
        return self._priorities.alpha

    @property
    def beta(self) -> float:
        """Exponent of weights."""
        return self._beta

    @beta.setter
    def beta(self, beta: float) -> None:
        self._beta = exponent("beta", beta)

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> PrioritizedReplayBufferSamples:
        """Draws rows in proportion to their priorities, with replacement, from numpy's global random stream.

        One row is drawn from each n-th of the sum of priorities, so that rows come in the order of `indices`.

        Args:
            batch_size: B, the number of rows.
            env: normalises observations and rewards, if given.

        Returns:
            What `ReplayBuffer.sample` returns; `weights`, float32 (B, 1): (N P(i))^-beta over the largest of the
            buffer; and `indices`, int64 (B,), an array of numpy, for `update_priorities`.

        Raises:
            SpecError: there are no rows, or their priorities are all zero.
        """
        # The global stream, which Stable-Baselines3 seeds.
        stream = np.random.Generator(np.random.get_bit_generator())  # type: ignore[attr-defined]
        priorities = self._priorities
        with priorities.lock:
            view = self._storage.view()
            rows, fields = priorities.pick(view, batch_size, stream)
            weights = importance_weights(fields[LEAVES], priorities.tree.minimum, self.beta)
            priorities.drawn.remember(view, rows)
        fields = self._read(rows, env)._asdict()
        return PrioritizedReplayBufferSamples(**fields, weights=self.to_torch(weights[:, None]), indices=rows)

    def update_priorities(self, indices: Any, priorities: Any) -> None:
        """Sets the priorities of rows; if an index is repeated, its last priority counts.

        Priorities of rows that were overwritten after they were drawn are ignored.

        Args:
            indices: int, B of them, from `sample`.
            priorities: B numbers in any shape, finite and at least 0, such as the absolute TD errors plus 1e-6. A row
                with priority 0 is not drawn again.

        Raises:
            IndexError, SpecError: an argument is invalid; nothing changes.
        """
        self._priorities.set(self._storage, indices, priorities)

    def reset(self) -> None:
        """Drops every row; the next one has priority 1."""
        super().reset()
        self._priorities.clear()


@set_module("rlstructs.integrations.sb3")
class PrioritizedDictReplayBuffer(PrioritizedReplayBuffer, DictReplayBuffer):
    """A `PrioritizedReplayBuffer` of observations that are dicts."""
