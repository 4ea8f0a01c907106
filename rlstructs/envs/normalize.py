"""`NormalizeObservation` and `NormalizeReward`: by statistics that all workers of a batcher share.

    worker                                     trainer
    ------                                     -------
    normalises by what is known,  <── what is known, with every "rollout", "reset" and evaluation
    gathers what it sees          ── what was gathered since the last rollout ──>  merges it, in worker order

What is known does not change during a rollout, and nothing is counted twice: a worker forgets what it has gathered
when it replies. An evaluation gets what is known and gathers nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from rlstructs.checks import several
from rlstructs.envs.gym_env import NO_INFO, RAW_REWARD, RESERVED
from rlstructs.envs.info_columns import PREFIX
from rlstructs.envs.row_env import NO_ROWS, Step, load_statistics, pairs, row_env, take_statistics
from rlstructs.envs.scale import Scale
from rlstructs.envs.vec_env import VecEnv
from rlstructs.errors import MissingKeyError, SpecError
from rlstructs.moments import Moments
from rlstructs.shared.packing import RECORD, Packing, Rows
from rlstructs.structures.dict_tensor import DictTensor

# Keys from which on it is faster to find all arrays of some rows at once.
MANY = 8


# What would go around the normalisation.
ROWS_OF_ITS_OWN = ("example", "row_groups", "step_into")


class Normalizing:
    """What is common to environments that normalise those around which they are."""

    #: As `RowEnv`'s: it has rows of its own.
    writes_rows: ClassVar[bool] = False

    def __init__(self, env: VecEnv) -> None:
        if not isinstance(env, VecEnv):
            raise TypeError(f"{type(self).__name__} needs a VecEnv, such as GymEnvInf, got {type(env).__name__}")
        self._given, self._env = env, row_env(env)
        self._running = np.arange(env.n_envs())
        # By name; None until an observation has shown which keys there are.
        self._scales: dict[str, Scale] | None = None
        self._loaded: tuple[Mapping[str, Moments], bool] | None = None
        if hasattr(self._env, "example"):
            self.example = self._example
            self._prepare(self._env.example().packing)

    def n_envs(self) -> int:
        """Number of environments, E."""
        return self._env.n_envs()

    @property
    def may_idle(self) -> bool:
        """As of `RowEnv`."""
        return bool(self._env.may_idle)

    @property
    def defers_resets(self) -> bool:
        """As `GymEnv`'s; nothing between hides `revive_rows`, as `DeviceEnv` does, which hands this attribute on."""
        return bool(getattr(self._env, "defers_resets", False))

    def reset(self, env_info: DictTensor = NO_INFO) -> tuple[DictTensor, torch.Tensor]:
        """As the environment's own."""
        return self.reset_rows(env_info).tensors(), torch.arange(self.n_envs(), device="cpu")

    def step(self, action: DictTensor) -> tuple[tuple[DictTensor, torch.Tensor], tuple[DictTensor, torch.Tensor]]:
        """As the environment's own."""
        running = torch.from_numpy(self._running.copy())
        return pairs(self.step_rows(action), running)

    def close(self) -> None:
        """Closes the environment."""
        self._env.close()

    def reset_rows(self, env_info: DictTensor) -> Rows:
        """As `reset`, the observation as rows of its own."""
        rows = self._env.reset_rows(env_info)
        if self._scales is None:
            self._prepare(rows.packing)
        self._running = np.arange(self.n_envs())
        return self._begun(rows)

    def revive_rows(self) -> tuple[np.ndarray, Rows]:
        """As `GymEnv.revive_rows`, of environments that have it."""
        which, rows = self._env.revive_rows()  # type: ignore[attr-defined]
        ran, self._running = self._running, np.arange(self.n_envs())
        return which, self._revived(rows, ran)

    def step_rows(self, action: DictTensor) -> Step:
        """As `step`, in rows that stay valid until the next one."""
        step = self._stepped(self._env.step_rows(action))
        if step.kept is not None:
            self._running = self._running[step.kept]
        return step

    def take_statistics(self) -> dict[str, Moments]:
        """What was gathered since the last call, by name; of the environments within, too."""
        own = {name: scale.take() for name, scale in (self._scales or {}).items()}
        within = take_statistics(self._given)
        if twice := own.keys() & within.keys():
            raise SpecError(f"{type(self).__name__}: {min(twice)!r} is normalised twice")
        return {**within, **own}

    def load_statistics(self, statistics: Mapping[str, Moments], frozen: bool = False) -> None:
        """Normalises by these from now on.

        Args:
            statistics: by name; what `RL_Batcher.statistics` gives.
            frozen: count nothing from now on.

        Raises:
            MissingKeyError, SpecError: one is missing, or has another shape.
        """
        if self._scales is None:
            self._loaded = statistics, frozen
        for name, scale in (self._scales or {}).items():
            if name not in statistics:
                raise MissingKeyError(f"statistics: there are none of {name!r}, only of {sorted(statistics)}")
            scale.load(statistics[name], frozen)
        load_statistics(self._given, statistics, frozen)

    def _prepare(self, packing: Packing) -> None:
        self._scales = self._scales_of(packing)
        if self._loaded is not None:
            self.load_statistics(*self._loaded)

    def _scales_of(self, packing: Packing) -> dict[str, Scale]:
        """For every key that is normalised, by the name of its statistics."""
        raise NotImplementedError

    def _begun(self, rows: Rows) -> Rows:
        """First observations, normalised."""
        raise NotImplementedError

    def _revived(self, rows: Rows, ran: np.ndarray) -> Rows:
        """First observations of those that did not run any more, normalised; all run now."""
        return self._begun(rows)

    def _stepped(self, step: Step) -> Step:
        """A step, normalised."""
        raise NotImplementedError

    def _seen(self, rows: Rows) -> Rows:
        """Rows with the keys that these environments have."""
        return rows

    def _example(self) -> Rows:
        return self._seen(self._env.example())  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ROWS_OF_ITS_OWN:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._given, name)


class NormalizeObservation(Normalizing):
    """Observations with mean 0 and variance 1, by the statistics of all workers.

    Every observation that an environment gives is counted once: first ones, and true final ones, too. Final ones are
    normalised as the others are. Statistics are float64; `(x - mean) / sqrt(variance + epsilon)`, clipped, has the
    dtype of x. An observation is normalised once, by what is known when it is made: during a rollout that does not
    change. In the first rollout, when nothing is known yet, each worker goes by what it has seen itself until then.

    Without a batcher nobody merges anything: it always goes by what it has seen until then.

    Args:
        env: any `VecEnv`. Every other attribute is that of `env`.
        keys: which entries of observations; None for all that are floating-point, without rewards and last actions.
        epsilon: added to the variance.
        clip: what is normalised lies in [-clip, clip]; None for no limit.

    Raises:
        SpecError: an argument is not what is needed, a key is missing, not floating-point, or normalised twice; an
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
        self._keys = None if keys is None else list(several("keys", keys))
        self._epsilon, self._clip = _positive("epsilon", epsilon), None if clip is None else _positive("clip", clip)
        super().__init__(env)

    def _scales_of(self, packing: Packing) -> dict[str, Scale]:
        floats = [key for key, (_, dtype) in packing.specs.items() if dtype.kind == "f"]
        keys = [key for key in floats if not _is_beside(key)] if self._keys is None else self._keys
        if not keys or set(keys) - set(floats):
            wanted = f"has no floating-point {sorted(set(keys) - set(floats))}" if keys else "is not floating-point"
            raise SpecError(f"NormalizeObservation: the observation {wanted}: {packing.specs}")
        _check_done(self, packing)
        names = {key: f"observation/{key}" for key in keys}
        self._columns = [
            (key, Scale(name, packing.specs[key][0], self._epsilon, self._clip)) for key, name in names.items()
        ]
        return {names[key]: scale for key, scale in self._columns}

    def _begun(self, rows: Rows) -> Rows:
        arrays = self._arrays(rows)
        for key, scale in self._columns:
            values = arrays[key]
            scale.add(values)
            scale.apply(values)
        return rows

    def _stepped(self, step: Step) -> Step:
        after, fresh = self._arrays(step.after), None if step.fresh is None else self._arrays(step.fresh)
        # Which of the fresh rows are first observations; others may be there that were counted as what followed.
        begun = None if fresh is None else after["done"][step.reset].astype(bool)
        for key, scale in self._columns:
            values = after[key]
            scale.add(values)
            if fresh is not None:
                scale.add(fresh[key][begun])
                scale.apply(fresh[key])
            scale.apply(values)
        return step

    def _arrays(self, rows: Rows) -> Any:
        return rows if len(self._columns) < MANY else rows.arrays()


class NormalizeReward(Normalizing):
    """Rewards divided by the standard deviation of the running discounted return, by the statistics of all workers.

    The return of each environment is `R = gamma * R + reward`, from 0 at the start of every episode, however the one
    before ended; every one is counted. The mean is not subtracted. What the environment gave is kept as `raw_reward`,
    which is what `RL_Batcher.episodes` and `evaluate` add up.

    What is known, and when, is as for `NormalizeObservation`.

    Args:
        env: any `VecEnv` with a floating-point `reward` and `done`, (B,). Every other attribute is that of `env`.
        gamma: the discount, from 0 to 1.
        epsilon: added to the variance.
        clip: what is normalised lies in [-clip, clip]; None for no limit.

    Raises:
        SpecError: an argument is not what is needed, a key is missing, or normalised already; a return is not finite.

    Example:
        >>> import gymnasium
        >>> from rlstructs import GymEnvInf
        >>> env = NormalizeReward(GymEnvInf([gymnasium.make("Pendulum-v1") for _ in range(4)], seed=0), clip=5.0)
        >>> _ = env.reset()
        >>> (after, _), _ = env.step(DictTensor({"action": torch.zeros(4, 1)}))
        >>> after["raw_reward"].shape, bool((after["reward"] >= -5.0).all())
        (torch.Size([4]), True)
        >>> env.close()
    """

    def __init__(
        self, env: VecEnv, *, gamma: float = 0.99, epsilon: float = 1e-8, clip: float | None = 10.0
    ) -> None:
        if not 0 <= gamma <= 1:
            raise SpecError(f"gamma must lie in [0, 1], got {gamma}")
        self._gamma = float(gamma)
        self._epsilon, self._clip = _positive("epsilon", epsilon), None if clip is None else _positive("clip", clip)
        super().__init__(env)
        self._returns = np.zeros(env.n_envs())

    def _scales_of(self, packing: Packing) -> dict[str, Scale]:
        shape, dtype = packing.specs.get("reward", ((1,), np.dtype(bool)))
        if shape != () or dtype.kind != "f":
            raise SpecError(f"NormalizeReward: the environment gives no floating-point 'reward' of shape (B,): "
                            f"{packing.specs}")  # fmt: skip
        if RAW_REWARD in packing.specs:
            raise SpecError(f"NormalizeReward: the environment gives {RAW_REWARD!r} already")
        _check_done(self, packing)
        self._packing = Packing({**packing.specs, RAW_REWARD: packing.specs["reward"]})
        self._fields, self._opaque = list(packing.record.names or ()), self._packing.blocks[RECORD][1]
        self._scale = Scale("return", (), self._epsilon, self._clip, is_centred=False)
        return {"return": self._scale}

    def _begun(self, rows: Rows) -> Rows:
        return self._revived(rows, NO_ROWS)

    def _revived(self, rows: Rows, ran: np.ndarray) -> Rows:
        kept, self._returns = self._returns[: ran.size], np.zeros(self.n_envs())
        self._returns[ran] = kept
        return self._scaled(rows, _record(rows))

    def _stepped(self, step: Step) -> Step:
        record = _record(step.after)
        self._returns *= self._gamma
        self._returns += record["reward"]
        if step.idle.size:
            self._returns[step.idle] = 0
            self._scale.add(np.delete(self._returns, step.idle))
        else:
            self._scale.add(self._returns)
        done = record["done"]
        if done.any():
            self._returns[done.astype(bool)] = 0
        if step.kept is not None:
            self._returns = self._returns[step.kept]
        fresh = None if step.fresh is None else self._scaled(step.fresh, _record(step.fresh))
        return Step(self._scaled(step.after, record), step.reset, fresh, step.kept, step.idle)

    def _scaled(self, rows: Rows, record: np.ndarray) -> Rows:
        seen, own = self._extended(rows, record)
        self._scale.apply(own["reward"])
        return seen

    def _seen(self, rows: Rows) -> Rows:
        return self._extended(rows, _record(rows))[0]

    def _extended(self, rows: Rows, record: np.ndarray) -> tuple[Rows, np.ndarray]:
        """Rows with the reward once more, and their record."""
        own = np.zeros(len(record), self._packing.record)
        for name in self._fields:
            own[name] = record[name]
        own[RAW_REWARD] = record["reward"]
        return Rows(self._packing, {**rows.blocks, RECORD: own.view(self._opaque)}), own


def _record(rows: Rows) -> np.ndarray:
    """What is one number per row, reward and flags among it."""
    return rows.blocks[RECORD].view(rows.packing.record)


def _is_beside(key: str) -> bool:
    """Whether it is not what the environment shows."""
    return key.split("/")[0] in RESERVED or key.startswith(PREFIX)


def _check_done(env: Normalizing, packing: Packing) -> None:
    if packing.specs.get("done", ((1,),))[0] != ():
        raise SpecError(f"{type(env).__name__}: the environment gives no 'done' of shape (B,): {packing.specs}")


def _positive(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not 0 < value < math.inf:
        raise SpecError(f"{name} must be above 0 and finite, got {value}")
    return float(value)
