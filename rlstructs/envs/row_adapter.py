"""`row_env`: every `VecEnv` as a `RowEnv`, by itself or through an adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch

from rlstructs.envs.env_list import LivesRule
from rlstructs.envs.row_env import NO_ROWS, RowDefaults, RowEnv, SharedStatistics, Step, refuse_lives
from rlstructs.envs.stepping import SingleEnv
from rlstructs.envs.vec_env import VecEnv
from rlstructs.errors import SpecError
from rlstructs.shared.layout import Packing, Rows, Target
from rlstructs.structures.arrays import TensorSpec, as_array, numpy_specs, specs_of
from rlstructs.structures.dict_tensor import DictTensor

START, ENDS = "initial_state", ("done", "terminated", "truncated")


class WritingVecEnv(VecEnv, Protocol):
    """A `VecEnv` with the method `step_into` that its documentation describes."""

    def step_into(self, action: DictTensor, rows: Mapping[str, np.ndarray]) -> tuple[np.ndarray, DictTensor] | None:
        """Steps every environment, and writes the observation to rows."""
        ...


def row_env(env: VecEnv) -> RowEnv:
    """Returns the environment itself if it has rows, else an adapter around it."""
    if _has_rows(env):
        return env
    return WritingRowAdapter(env) if _has_step_into(env) else RowAdapter(env)


def _has_rows(env: VecEnv) -> TypeGuard[RowEnv]:
    return issubclass(type(env), RowDefaults) and _replaces_step(env, "step_rows")


def _has_step_into(env: VecEnv) -> TypeGuard[WritingVecEnv]:
    return _replaces_step(env, "step_into")


def _keeps_statistics(env: VecEnv) -> TypeGuard[SharedStatistics]:
    return hasattr(env, "take_statistics")  # wrappers may forward it: statistics are the same seen through them


def _tells_absent(env: VecEnv) -> bool:
    return hasattr(env, "absent_rows")  # wrappers may forward it: they hide no rows


def _replaces_step(env: VecEnv, method: str) -> bool:
    """Whether this method may be called in place of `step`.

    This is the one place that looks at an environment's classes. Having the method is not enough: a wrapper that
    forwards unknown attributes has it too, and so has a subclass or patched object with its own `reset` or `step`,
    which the method would bypass.
    """
    classes = type(env).__mro__

    def owner(name: str) -> int:
        return next((at for at, cls in enumerate(classes) if name in vars(cls)), len(classes))

    at = owner(method)
    patched = {"reset", "step"} & getattr(env, "__dict__", {}).keys()
    return at < len(classes) and not patched and min(owner("reset"), owner("step")) >= at


class RowAdapter(RowDefaults):
    """Adapts a `VecEnv` to rows."""

    may_idle = False

    def __init__(self, env: VecEnv) -> None:
        self._env = env
        self._tells_absent = _tells_absent(env)
        self._running = NO_ROWS
        self._specs: dict[str, TensorSpec] | None = None
        self._packing = Packing({})

    def n_envs(self) -> int:
        """Number of environments, E."""
        return self._env.n_envs()

    def close(self) -> None:
        """Closes the environment."""
        self._env.close()

    @property
    def absent_rows(self) -> np.ndarray:
        """The absent rows that the environment reports, if any."""
        return self._env.absent_rows if self._tells_absent else NO_ROWS  # type: ignore[attr-defined]

    def shared_statistics(self) -> SharedStatistics | None:
        """The environment itself, if it has the methods."""
        return self._env if _keeps_statistics(self._env) else None

    def single_envs(self) -> Sequence[SingleEnv]:
        """Asks the environment, or returns the environment itself.

        It may forward the call to what it wraps.
        """
        return self._env.single_envs() if hasattr(self._env, "single_envs") else (SingleEnv(self._env),)

    def set_lives(self, rule: LivesRule | None) -> None:
        if rule is not None:
            refuse_lives(self._env)

    @property
    def action_space(self) -> Any:
        """The environment's action space; None if it has none."""
        return getattr(self._env, "action_space", None)

    def reset_rows(self, env_info: DictTensor) -> Rows:
        """Resets, and returns the observation of all E environments."""
        observation, running = self._env.reset(env_info)
        self._running = _array(running)
        if not np.array_equal(self._running, np.arange(self.n_envs())):
            raise SpecError(f"environment: running after reset is {self._running}, expected 0..{self.n_envs() - 1}")
        arrays = self._arrays(observation, self._running)
        self.may_idle = self._may_idle(arrays)
        return Rows.of(self._packing, arrays)

    def step_rows(self, action: DictTensor, target: Target | None = None) -> Step:
        """Steps, and checks which environments run."""
        # A copy: the environment or the agent may write into its tensors later.
        (after, before), (following, running) = self._env.step(action.clone())
        if not np.array_equal(_array(before), self._running):
            raise SpecError(f"environment: it stepped {_array(before)}, running were {self._running}")
        left = _array(running)
        kept = np.searchsorted(self._running, left)
        subset = not kept.size or (kept.max() < self._running.size and (self._running[kept] == left).all())
        if not subset or (np.diff(kept) < 1).any():
            raise SpecError(f"environment: {left} run after the step, before it {self._running}")
        everyone = left.size == self._running.size
        arrays, self._running = self._arrays(after, self._running), left
        stepped, idle = Rows.of(self._packing, arrays), _idle(arrays)
        if everyone and _same_tensors(following, after):
            self.may_idle = self._may_idle(arrays)
            return Step(stepped, NO_ROWS, None, None, idle)
        # Which rows differ is unknown: every row that still runs may.
        arrays = self._arrays(following, left)
        self.may_idle = self._may_idle(arrays)
        return Step(stepped, kept, Rows.of(self._packing, arrays), None if everyone else kept, idle)

    def _may_idle(self, seen: Mapping[str, np.ndarray], reset: np.ndarray = NO_ROWS) -> bool:
        """Whether an environment may be idle next.

        It is if it has ended and was not reset, or if it waits.

        Args:
            seen: the observation of the running environments.
            reset: rows of those that were reset in the same step.
        """
        return _may_start(seen, reset) or self.absent_rows.size > 0

    def _arrays(self, observation: DictTensor, running: np.ndarray) -> dict[str, np.ndarray]:
        """Checks the observation of the environments `running`; returns its arrays."""
        if not isinstance(observation, DictTensor):
            raise TypeError(f"environment: an observation must be a DictTensor, got {type(observation).__name__}")
        specs = specs_of(observation)
        if self._specs is None:
            self._specs, self._packing = specs, Packing(numpy_specs(specs))
        rows = {tensor.shape[:1] for tensor in observation.values()}
        if specs != self._specs or rows != {(running.size,)}:
            raise SpecError(
                f"environment: observation is {observation!r}, expected {running.size} rows of {self._specs}"
            )
        return {key: as_array(tensor) for key, tensor in observation.items()}


class WritingRowAdapter(RowAdapter):
    """Adapts a `VecEnv` that has `step_into`, which writes to the rollout's memory."""

    writes_rows = True

    def __init__(self, env: WritingVecEnv) -> None:
        super().__init__(env)
        self._writer = env

    def step_rows(self, action: DictTensor, target: Target | None = None) -> Step:
        """Writes a step to the target.

        Without one, to rows that stay valid until the next step.
        """
        if target is None:
            rows = Rows.zeros(self._packing, self.n_envs())
            target = Target(rows, rows.arrays())
        found = self._writer.step_into(action.clone(), target.arrays)
        idle = _idle(target.arrays)
        reset, fresh = (NO_ROWS, None) if found is None else self._read_reset(*found)
        self.may_idle = self._may_idle(target.arrays, reset)
        return Step(target.rows, reset, fresh, None, idle)

    def _read_reset(self, reset: np.ndarray, fresh: DictTensor) -> tuple[np.ndarray, Rows | None]:
        """Checks which environments were reset; returns them and their first observations.

        None instead of observations if there are none.
        """
        reset = np.asarray(reset)
        if reset.ndim != 1 or reset.dtype.kind not in "iu":
            raise SpecError(f"environment: step_into must give which were reset as int64 (R,), got {reset!r}")
        if not reset.size:
            return NO_ROWS, None
        if (np.diff(reset) < 1).any() or reset[0] < 0 or reset[-1] >= self.n_envs():
            raise SpecError(f"environment: step_into reset {reset}, of {self.n_envs()} environments in ascending order")
        return reset.astype(np.int64), Rows.of(self._packing, self._arrays(fresh, reset))


def _idle(after: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns the rows of environments that only started an episode."""
    starts = after.get(START)
    if starts is None or starts.dtype != bool or starts.ndim != 1 or not np.count_nonzero(starts):
        return NO_ROWS
    return np.flatnonzero(starts & ~after["done"].astype(bool)) if "done" in after else np.flatnonzero(starts)


def _may_start(seen: Mapping[str, np.ndarray], reset: np.ndarray) -> bool:
    """Whether an environment has ended without a reset.

    In its next step it may only start an episode.
    """
    if START not in seen:
        return False  # then no step counts as idle
    ends = [seen[key] for key in ENDS if key in seen]
    # Without such flags any of them may have ended.
    return not ends or any(np.count_nonzero(end) > np.count_nonzero(end[reset]) for end in ends)


def _same_tensors(a: DictTensor, b: DictTensor) -> bool:
    return a is b or (a.keys() == b.keys() and all(tensor is b[key] for key, tensor in a.items()))


def _array(running: torch.Tensor) -> np.ndarray:
    return running.detach().cpu().numpy().astype(np.int64, copy=False)
