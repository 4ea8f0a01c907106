"""Base class of `NormalizeObservation` and `NormalizeReward`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlstructs.envs.env_lives import LivesRule
from rlstructs.envs.row_adapter import row_env
from rlstructs.envs.row_env import RowDefaults, SharedStatistics, Step, load_statistics, step_pairs, take_statistics
from rlstructs.envs.scale import Scale
from rlstructs.envs.single_env import SingleEnv
from rlstructs.envs.vec_env import NO_INFO, VecEnv
from rlstructs.errors import MissingKeyError, SpecError
from rlstructs.moments import Moments
from rlstructs.shared.packing import Packing, Rows, Target
from rlstructs.structures.dict_tensor import DictTensor


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
        """See `RowEnv.may_idle`."""
        return self._env.may_idle

    @property
    def absent_rows(self) -> np.ndarray:
        """See `RowEnv.absent_rows`."""
        return self._env.absent_rows

    @property
    def defers_resets(self) -> bool:
        """See `RowEnv.defers_resets`; always False around a wrapper that is no `RowEnv`, such as `DeviceEnv`."""
        return self._env.defers_resets

    def example(self) -> Rows | None:
        """See `RowEnv.example`."""
        example = self._env.example()
        return None if example is None else self._add_keys(example)

    def shared_statistics(self) -> SharedStatistics:
        """The wrapper itself."""
        return self

    def single_envs(self) -> Sequence[SingleEnv]:
        """See `RowEnv.single_envs`."""
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
        """Does what `reset` does, and returns the observation as rows that nobody else uses."""
        rows = self._env.reset_rows(env_info)
        if self._scales is None:
            self._prepare(rows.packing)
        self._running = np.arange(self.n_envs())
        return self._normalize_first(rows)

    def revive_rows(self, which: np.ndarray | None = None) -> tuple[np.ndarray, Rows]:
        """See `RowEnv.revive_rows`."""
        which, rows = self._env.revive_rows(which)
        still_running, self._running = self._running, np.union1d(self._running, which)
        return which, self._normalize_restarted(rows, still_running)

    @property
    def failed_rows(self) -> np.ndarray:
        """See `RowEnv.failed_rows`."""
        return self._env.failed_rows

    def set_lives(self, rule: LivesRule | None) -> None:
        """See `RowEnv.set_lives`."""
        self._env.set_lives(rule)

    def take_restarts(self) -> dict[int, int]:
        """See `RowEnv.take_restarts`."""
        return self._env.take_restarts()

    def step_rows(self, action: DictTensor, target: Target | None = None) -> Step:
        """Does what `step` does, and returns rows that stay valid until the next step; `target` is not used."""
        step = self._normalize_step(self._env.step_rows(action))
        if step.kept is not None:
            self._running = self._running[step.kept]
        return step

    def take_statistics(self) -> dict[str, Moments]:
        """Takes what was gathered since the last call, by name, including the statistics of wrapped environments."""
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
        """Makes the scale of every column that is normalised, by the name of its statistics."""
        raise NotImplementedError

    def _normalize_first(self, rows: Rows) -> Rows:
        """Normalises the first observations of all environments."""
        raise NotImplementedError

    def _normalize_restarted(self, rows: Rows, still_running: np.ndarray) -> Rows:
        """Normalises the first observations of environments that were reset while others were `still_running`."""
        return self._normalize_first(rows)

    def _normalize_step(self, step: Step) -> Step:
        """Normalises a step."""
        raise NotImplementedError

    def _add_keys(self, rows: Rows) -> Rows:
        """Adds the keys of the wrapper's own columns to rows."""
        return rows

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._wrapped, name)
