"""`NormalizeObservation` and `NormalizeReward`, by statistics that all workers of a batcher share.

    worker                                     trainer
    ------                                     -------
    normalises by the shared statistics   <── sends them with every "rollout", "reset" and evaluation
    gathers statistics of observations    ── those since the last rollout ──>  merges them, in worker order

The shared statistics do not change during a rollout. Nothing is counted twice: a worker forgets what it has gathered
when it replies. An evaluation uses the shared statistics and gathers nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np
import torch

from rlstructs.checks import check_names, check_number
from rlstructs.envs.env_list import LivesRule
from rlstructs.envs.observation_columns import RAW_REWARD, is_reserved
from rlstructs.envs.row_adapter import row_env
from rlstructs.envs.row_env import (
    NO_ROWS,
    RowDefaults,
    SharedStatistics,
    Step,
    WaitingEnv,
    load_statistics,
    step_pairs,
    take_statistics,
)
from rlstructs.envs.stepping import SingleEnv
from rlstructs.envs.vec_env import NO_INFO, VecEnv
from rlstructs.errors import MissingKeyError, SpecError
from rlstructs.moments import Moments
from rlstructs.shared.layout import RECORD, Packing, Rows, Target
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.workers.public_names import set_module


class NormalizingEnv(RowDefaults):
    """Wraps a `VecEnv` and normalises some of its columns.

    Subclasses choose the columns in `_make_scales`, and normalise rows in place or extend them.

    Args:
        env: any `VecEnv`. Public attributes that the wrapper lacks are read from it.
    """

    def __init__(self, env: VecEnv) -> None:
        if not isinstance(env, VecEnv):
            raise TypeError(f"{type(self).__name__} needs a VecEnv, such as GymEnvInf, got {type(env).__name__}")
        self._wrapped, self._env = env, row_env(env)
        self._running = np.arange(env.n_envs())
        self.pace, self.replaces_late = self._env.pace, self._env.replaces_late
        # By the name of their statistics; None until an observation shows which keys there are.
        self._scales: dict[str, Scale] | None = None
        self._loaded: tuple[Mapping[str, Moments], bool] | None = None
        if (example := self._env.example()) is not None:
            self._prepare(example.packing)

    def n_envs(self) -> int:
        """Number of environments, E."""
        return self._env.n_envs()

    @property
    def may_idle(self) -> bool:
        return self._env.may_idle

    @property
    def absent_rows(self) -> np.ndarray:
        return self._env.absent_rows

    @property
    def defers_resets(self) -> bool:
        """See `RowEnv.defers_resets`; always False around a wrapper that is no `RowEnv`, such as `DeviceEnv`."""
        return self._env.defers_resets

    def example(self) -> Rows | None:
        example = self._env.example()
        return None if example is None else self._add_keys(example)

    def shared_statistics(self) -> SharedStatistics:
        """The wrapper itself."""
        return self

    def single_envs(self) -> Sequence[SingleEnv]:
        return self._env.single_envs()

    def reset(self, env_info: DictTensor = NO_INFO) -> tuple[DictTensor, torch.Tensor]:
        """Resets the environment; see `VecEnv.reset`."""
        return self.reset_rows(env_info).tensors(), torch.arange(self.n_envs(), device="cpu")

    def step(self, action: DictTensor) -> tuple[tuple[DictTensor, torch.Tensor], tuple[DictTensor, torch.Tensor]]:
        """Steps the environment; see `VecEnv.step`."""
        running = torch.from_numpy(self._running.copy())
        return step_pairs(self.step_rows(action), running)

    def close(self) -> None:
        """Closes the environment."""
        self._env.close()

    def reset_rows(self, env_info: DictTensor) -> Rows:
        """Resets, and returns the observation as rows that nobody else uses."""
        rows = self._env.reset_rows(env_info)
        if self._scales is None:
            self._prepare(rows.packing)
        self._running = np.arange(self.n_envs())
        return self._normalize_first(rows)

    def revive_rows(self, which: np.ndarray | None = None) -> tuple[np.ndarray, Rows]:
        which, rows = self._env.revive_rows(which)
        still_running, self._running = self._running, np.union1d(self._running, which)
        return which, self._normalize_restarted(rows, still_running)

    @property
    def failed_rows(self) -> np.ndarray:
        return self._env.failed_rows

    def set_lives(self, rule: LivesRule | None) -> None:
        self._env.set_lives(rule)

    def take_restarts(self) -> dict[int, int]:
        return self._env.take_restarts()

    def step_rows(self, action: DictTensor, target: Target | None = None) -> Step:
        """Steps, and returns rows that stay valid until the next step.

        `target` is not used.
        """
        return self._take_step(self._running, self._env.step_rows(action))

    def collect_rows(self, until: float | None, is_over: Callable[[], bool] | None) -> tuple[np.ndarray, Step]:
        """Waits for steps; see `WaitingEnv.collect_rows`."""
        rows, step = cast(WaitingEnv, self._env).collect_rows(until, is_over)
        return rows, self._take_step(rows, step)

    def _take_step(self, rows: np.ndarray, step: Step) -> Step:
        """Normalises a step of these environments."""
        step = self._normalize_step(step, rows)
        if step.kept is not None:
            self._running = np.setdiff1d(self._running, np.delete(rows, step.kept))
        return step

    def take_statistics(self) -> dict[str, Moments]:
        """Takes the moments gathered since the last call, by name.

        Includes the statistics of wrapped environments.
        """
        own = {name: scale.take() for name, scale in (self._scales or {}).items()}
        inner = take_statistics(self._env)
        if twice := own.keys() & inner.keys():
            raise SpecError(f"{type(self).__name__}: {min(twice)!r} is normalised twice")
        return {**inner, **own}

    def load_statistics(self, statistics: Mapping[str, Moments], frozen: bool = False) -> None:
        """Normalises by these statistics from now on.

        Args:
            statistics: by name, as `RL_Batcher.statistics` returns them.
            frozen: whether to gather nothing from now on.

        Raises:
            MissingKeyError, SpecError: one is missing, or has another shape.
        """
        if self._scales is None:
            self._loaded = statistics, frozen
        for name, scale in (self._scales or {}).items():
            if name not in statistics:
                raise MissingKeyError(f"statistics: there are none of {name!r}, only of {sorted(statistics)}")
            scale.load(statistics[name], frozen)
        load_statistics(self._env, statistics, frozen)

    def _prepare(self, packing: Packing) -> None:
        self._scales = self._make_scales(packing)
        if self._loaded is not None:
            self.load_statistics(*self._loaded)

    def _make_scales(self, packing: Packing) -> dict[str, Scale]:
        """Makes the scale of every normalised column, by name of its statistics."""
        raise NotImplementedError

    def _normalize_first(self, rows: Rows) -> Rows:
        """Normalises the first observations of all environments."""
        raise NotImplementedError

    def _normalize_restarted(self, rows: Rows, still_running: np.ndarray) -> Rows:
        """Normalises the first observations of environments that were reset.

        `still_running` are the environments that were not.
        """
        return self._normalize_first(rows)

    def _normalize_step(self, step: Step, rows: np.ndarray) -> Step:
        """Normalises a step of the environments `rows`."""
        raise NotImplementedError

    def _add_keys(self, rows: Rows) -> Rows:
        """Adds the keys of the wrapper's own columns to rows."""
        return rows

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._wrapped, name)


# With this many keys or more, it is faster to build the arrays of all columns at once.
MANY = 8


class Columns(Protocol):
    """The columns of rows: `Rows`, or a dict of arrays."""

    def __getitem__(self, key: str, /) -> np.ndarray:
        """The values of a key, a view."""
        ...


@set_module("rlstructs")
class NormalizeObservation(NormalizingEnv):
    """Normalises observations to mean 0 and variance 1, by the statistics of all workers.

    Every observation of an environment is counted once, including first and true final observations. Final
    observations are normalised like the others. Statistics are float64; `(x - mean) / sqrt(variance + epsilon)`,
    clipped, has the dtype of x. An observation is normalised once, by the statistics that all workers share, which do
    not change during a rollout. In the first rollout there are none yet: each worker uses what it has seen so far.

    Without a batcher nothing is shared: it always uses what it has seen so far.

    Args:
        env: any `VecEnv`. Every other attribute is that of `env`.
        keys: which entries of observations; None for all floating-point entries except rewards and last actions.
        epsilon: added to the variance.
        clip: normalised values lie in [-clip, clip]; None for no limit.

    Raises:
        SpecError: an argument is out of range; a key is missing, not floating-point, or normalised twice; an
            observation that is counted is not finite.

    Example:
        >>> import gymnasium
        >>> from rlstructs import GymEnvInf
        >>> def create_env(n_envs, seed):
        ...     return NormalizeObservation(GymEnvInf([gymnasium.make("CartPole-v1") for _ in range(n_envs)], seed))
        >>> env = create_env(4, seed=0)
        >>> observation, running = env.reset()
        >>> bool((observation["frame"].mean(0).abs() < 1e-6).all())
        True
        >>> env.close()
    """

    def __init__(
        self, env: VecEnv, *, keys: Sequence[str] | None = None, epsilon: float = 1e-8, clip: float | None = 10.0
    ) -> None:
        self._keys = None if keys is None else list(check_names("keys", keys))
        self._epsilon = _check_positive("epsilon", epsilon)
        self._clip = None if clip is None else _check_positive("clip", clip)
        super().__init__(env)

    def _make_scales(self, packing: Packing) -> dict[str, Scale]:
        floats = [key for key, (_, dtype) in packing.specs.items() if dtype.kind == "f"]
        keys = [key for key in floats if not is_reserved(key)] if self._keys is None else self._keys
        if not keys or set(keys) - set(floats):
            wanted = f"has no floating-point {sorted(set(keys) - set(floats))}" if keys else "is not floating-point"
            raise SpecError(f"NormalizeObservation: the observation {wanted}: {packing.specs}")
        _check_done(self, packing)
        names = {key: f"observation/{key}" for key in keys}
        self._columns = [
            (key, Scale(name, packing.specs[key][0], self._epsilon, self._clip)) for key, name in names.items()
        ]
        return {names[key]: scale for key, scale in self._columns}

    def _normalize_first(self, rows: Rows) -> Rows:
        arrays = self._arrays(rows)
        for key, scale in self._columns:
            values = arrays[key]
            scale.add(self._drop_absent(values))
            scale.apply(values)
        return rows

    def _normalize_step(self, step: Step, rows: np.ndarray) -> Step:
        after, fresh = self._arrays(step.after), None if step.fresh is None else self._arrays(step.fresh)
        # The fresh rows that are first observations; others were counted among the rows after the step.
        is_first = None if fresh is None else after["done"][step.reset].astype(bool)
        for key, scale in self._columns:
            values = after[key]
            scale.add(self._drop_absent(values, step.failed))
            if fresh is not None:
                scale.add(fresh[key][is_first])
                scale.apply(fresh[key])
            scale.apply(values)
        return step

    def _drop_absent(self, values: np.ndarray, failed: np.ndarray = NO_ROWS) -> np.ndarray:
        """Drops the rows of absent environments, and of those that have failed, from values."""
        absent = self._env.absent_rows
        if failed.size:
            absent = np.union1d(absent, failed)
        return np.delete(values, absent, axis=0) if absent.size else values

    def _arrays(self, rows: Rows) -> Columns:
        return rows if len(self._columns) < MANY else rows.arrays()


@set_module("rlstructs")
class NormalizeReward(NormalizingEnv):
    """Divides rewards by the standard deviation of the discounted return.

    The statistics are those of all workers.

    The return of each environment is `R = gamma * R + reward`, from 0 at the start of every episode, however the last
    episode ended; every value is counted. The mean is not subtracted. The environment's own reward is kept as
    `raw_reward`, which `RL_Batcher.episodes` and `evaluate` add up.

    The statistics are shared, and updated, like those of `NormalizeObservation`.

    Args:
        env: any `VecEnv` with a floating-point `reward` and `done`, (B,). Every other attribute is that of `env`.
        gamma: the discount, from 0 to 1.
        epsilon: added to the variance.
        clip: normalised values lie in [-clip, clip]; None for no limit.

    Raises:
        SpecError: an argument is out of range; a key is missing or normalised already; a return is not finite.

    Example:
        >>> import gymnasium, torch
        >>> from rlstructs import DictTensor, GymEnvInf
        >>> env = NormalizeReward(GymEnvInf([gymnasium.make("Pendulum-v1") for _ in range(4)], seed=0), clip=5.0)
        >>> _ = env.reset()
        >>> (after, _), _ = env.step(DictTensor({"action": torch.zeros(4, 1)}))
        >>> after["raw_reward"].shape, bool((after["reward"] >= -5.0).all())
        (torch.Size([4]), True)
        >>> env.close()
    """

    def __init__(self, env: VecEnv, *, gamma: float = 0.99, epsilon: float = 1e-8, clip: float | None = 10.0) -> None:
        check_number("gamma", gamma)
        if not 0 <= gamma <= 1:
            raise SpecError(f"gamma must lie in [0, 1], got {gamma}")
        self._gamma = float(gamma)
        self._epsilon = _check_positive("epsilon", epsilon)
        self._clip = None if clip is None else _check_positive("clip", clip)
        super().__init__(env)
        self._returns = np.zeros(env.n_envs())

    def _make_scales(self, packing: Packing) -> dict[str, Scale]:
        shape, dtype = packing.specs.get("reward", ((1,), np.dtype(bool)))
        if shape != () or dtype.kind != "f":
            raise SpecError(
                f"NormalizeReward: the environment gives no floating-point 'reward' of shape (B,): {packing.specs}"
            )
        if RAW_REWARD in packing.specs:
            raise SpecError(f"NormalizeReward: the environment gives {RAW_REWARD!r} already")
        _check_done(self, packing)
        self._packing = Packing({**packing.specs, RAW_REWARD: packing.specs["reward"]})
        self._fields, self._opaque = list(packing.record.names or ()), self._packing.blocks[RECORD][1]
        self._scale = Scale("return", (), self._epsilon, self._clip, is_centred=False)
        return {"return": self._scale}

    def _normalize_first(self, rows: Rows) -> Rows:
        return self._normalize_restarted(rows, NO_ROWS)

    def _normalize_restarted(self, rows: Rows, still_running: np.ndarray) -> Rows:
        returns = np.zeros(self.n_envs())
        returns[still_running] = self._returns[still_running]
        self._returns = returns
        return self._normalize_rows(rows, _record(rows))

    def _normalize_step(self, step: Step, rows: np.ndarray) -> Step:
        record = _record(step.after)
        returns = self._returns[rows] * self._gamma + record["reward"]
        if step.idle.size or step.failed.size:
            returns[step.idle] = 0
            self._scale.add(np.delete(returns, np.union1d(step.idle, step.failed)))
        else:
            self._scale.add(returns)
        done = record["done"]
        if done.any():
            returns[done.astype(bool)] = 0
        self._returns[rows] = returns
        fresh = None if step.fresh is None else self._normalize_rows(step.fresh, _record(step.fresh))
        return step._replace(after=self._normalize_rows(step.after, record), fresh=fresh)

    def _normalize_rows(self, rows: Rows, record: np.ndarray) -> Rows:
        extended, own = self._extend(rows, record)
        self._scale.apply(own["reward"])
        return extended

    def _add_keys(self, rows: Rows) -> Rows:
        return self._extend(rows, _record(rows))[0]

    def _extend(self, rows: Rows, record: np.ndarray) -> tuple[Rows, np.ndarray]:
        """Copies rows and adds `raw_reward`; returns them and their record."""
        own = np.zeros(len(record), self._packing.record)
        for name in self._fields:
            own[name] = record[name]
        own[RAW_REWARD] = record["reward"]
        return Rows(self._packing, {**rows.blocks, RECORD: own.view(self._opaque)}), own


def _record(rows: Rows) -> np.ndarray:
    """Returns the record of all columns with one number per row.

    Reward and flags are such columns.
    """
    return rows.blocks[RECORD].view(rows.packing.record)


def _check_done(env: NormalizingEnv, packing: Packing) -> None:
    if packing.specs.get("done", ((1,),))[0] != ():
        raise SpecError(f"{type(env).__name__}: the environment gives no 'done' of shape (B,): {packing.specs}")


def _check_positive(name: str, value: float) -> float:
    check_number(name, value)
    if not 0 < value < math.inf:
        raise SpecError(f"{name} must be above 0 and finite, got {value}")
    return float(value)


# Bytes of rows to keep before counting them, all at once, which takes a hundredth of the time.
BLOCK = 1 << 18


class Scale:
    """Normalises the values of one key, and gathers their statistics.

    Args:
        name: of the statistics, for messages.
        shape: of a row.
        epsilon: added to the variance.
        clip: normalised values lie in [-clip, clip]; None for no limit.
        is_centred: whether the mean is subtracted.
    """

    def __init__(
        self, name: str, shape: tuple[int, ...], epsilon: float, clip: float | None, is_centred: bool = True
    ) -> None:
        self._name, self._shape, self._epsilon, self._clip, self._is_centred = name, shape, epsilon, clip, is_centred
        self._is_frozen = False
        # The statistics of all workers; those gathered since the last `take`; and those taken before all workers
        # had any.
        self._known = self._gathered = self._early = Moments.none(shape)
        self._pending: list[np.ndarray] = []
        self._n_bytes = 0
        self._use(self._known)

    def add(self, rows: np.ndarray) -> None:
        """Counts rows."""
        if self._is_frozen or not len(rows):
            return
        self._pending.append(rows.copy())
        self._n_bytes += rows.nbytes
        if not self._known.count:  # there are no shared statistics yet: use those of this worker
            self._count()
            self._use(self._early.merge(self._gathered))
        elif self._n_bytes >= BLOCK:
            self._count()

    def apply(self, rows: np.ndarray) -> None:
        """Normalises rows in place."""
        values = np.subtract(rows, self._mean, dtype=np.float64) if self._is_centred else rows
        if self._clip is None:
            np.multiply(values, self._factor, out=rows, casting="same_kind", dtype=np.float64)
            return
        scaled = np.multiply(values, self._factor, dtype=np.float64)
        np.maximum(scaled, -self._clip, out=scaled)
        np.minimum(scaled, self._clip, out=rows, casting="same_kind")

    def take(self) -> Moments:
        """Takes what was gathered since the last call."""
        self._count()
        gathered, self._gathered = self._gathered, Moments.none(self._shape)
        if not self._known.count:
            self._early = self._early.merge(gathered)
        return gathered

    def load(self, known: Moments, frozen: bool) -> None:
        """Normalises by these statistics from now on; if frozen, gathers nothing."""
        if known.mean.shape != self._shape:
            raise SpecError(f"statistics: {self._name!r} has shape {known.mean.shape}, expected {self._shape}")
        self._known, self._is_frozen = known, frozen
        self._count()
        self._use(known if known.count or frozen else self._early.merge(self._gathered))

    def _use(self, moments: Moments) -> None:
        self._mean, self._factor = moments.mean, 1 / np.sqrt(moments.variance + self._epsilon)

    def _count(self) -> None:
        if not self._pending:
            return
        with np.errstate(invalid="ignore", over="ignore"):
            gathered = self._gathered.merge(Moments.of(np.concatenate(self._pending)))
        self._pending, self._n_bytes = [], 0
        if not np.isfinite(gathered.m2).all():  # every later value would be NaN, in every worker
            raise SpecError(f"environment: {self._name!r} has values that are not finite: they have no variance")
        self._gathered = gathered
