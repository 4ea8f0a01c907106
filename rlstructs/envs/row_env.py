"""The interface by which a rollout steps environments: rows in numpy arrays, for every class of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from rlstructs.envs.vec_env import VecEnv
from rlstructs.errors import SpecError
from rlstructs.moments import Moments
from rlstructs.shared.packing import Packing, Rows, Target
from rlstructs.structures.arrays import as_array, numpy_specs, specs_of
from rlstructs.structures.dict_tensor import DictTensor

NO_ROWS = np.zeros(0, np.int64)


class Step(NamedTuple):
    """One step of E' running environments; its rows stay valid until the next step.

    Attributes:
        after: E' rows, what happened in each environment, final observations included.
        reset: int64 (R,), which of the E' environments were reset in the same step.
        fresh: R rows, their first observations, which the agent sees next; None when R is 0.
        kept: int64, which of the E' environments still run; None for all.
        idle: int64, which of the E' environments only started an episode: that was no step.
    """

    after: Rows
    reset: np.ndarray
    fresh: Rows | None
    kept: np.ndarray | None
    idle: np.ndarray = NO_ROWS


class SplitEnv(Protocol):
    """A group of environments that can be stepped while other groups are waited for; all always run."""

    @property
    def may_idle(self) -> bool:
        """See `RowEnv.may_idle`."""
        ...

    def n_envs(self) -> int:
        """Number of environments in the group."""
        ...

    def send_rows(self, action: DictTensor) -> None:
        """Starts a step of the group, without waiting for it."""
        ...

    def recv_rows(self, target: Target) -> Step:
        """Waits for the step and writes its rows to the target."""
        ...


Pair = tuple[DictTensor, torch.Tensor]


def step_pairs(step: Step, running: torch.Tensor) -> tuple[Pair, Pair]:
    """The two pairs that `VecEnv.step` returns for a step of the environments `running`."""
    after = step.after.tensors()
    following, kept = DictTensor.trusted(after._tensors), running  # another object: a wrapper may `set` keys
    if step.fresh is not None:
        seen = Rows.of(step.after.packing, step.after.arrays())
        arrays = seen.arrays()
        for key, fresh in step.fresh.arrays().items():
            arrays[key][step.reset] = fresh
        following = seen.tensors()
    if step.kept is not None:
        rows = torch.from_numpy(step.kept)
        following, kept = following.index(rows), running[rows]
    return (after, running), (following, kept)


class RowEnv:
    """Adapts a `VecEnv` to rows: it returns observations as `Rows`, and steps as `Step`."""

    #: Whether `step_rows` writes to the target that it is given, rather than to rows of its own.
    writes_rows = False
    #: Whether an environment may only start an episode in the next step.
    may_idle = True

    def __init__(self, env: VecEnv) -> None:
        self._env = env
        self._running = NO_ROWS
        self._specs: dict[str, Any] | None = None
        self._packing = Packing({})

    def n_envs(self) -> int:
        """Number of environments, E."""
        return self._env.n_envs()

    def close(self) -> None:
        """Closes the environment."""
        self._env.close()

    def reset_rows(self, env_info: DictTensor) -> Rows:
        """Does what `VecEnv.reset` does, and returns the observation of all E environments."""
        observation, running = self._env.reset(env_info)
        self._running = _array(running)
        if not np.array_equal(self._running, np.arange(self.n_envs())):
            raise SpecError(f"environment: running after reset is {self._running}, expected 0..{self.n_envs() - 1}")
        return self._rows(observation, self._running)

    def step_rows(self, action: DictTensor, target: Target | None = None) -> Step:
        """Does what `VecEnv.step` does; only classes with `writes_rows` use the target."""
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
        stepped, self._running = self._rows(after, self._running), left
        idle = _idle({key: as_array(after[key]) for key in ("initial_state", "done") if key in after})
        if everyone and _same_tensors(following, after):
            return Step(stepped, NO_ROWS, None, None, idle)
        # Nothing says which rows differ: every row that still runs may.
        return Step(stepped, kept, self._rows(following, left), None if everyone else kept, idle)

    def _rows(self, observation: DictTensor, running: np.ndarray) -> Rows:
        if not isinstance(observation, DictTensor):
            raise TypeError(f"environment: an observation must be a DictTensor, got {type(observation).__name__}")
        specs = observation.specs()
        if self._specs is None:
            self._specs, self._packing = specs, Packing(numpy_specs(specs_of(observation)))
        rows = {tensor.shape[:1] for tensor in observation.values()}
        if specs != self._specs or rows != {(running.size,)}:
            raise SpecError(
                f"environment: observation is {observation!r}, expected {running.size} rows of {self._specs}"
            )
        return Rows.of(self._packing, {key: as_array(tensor) for key, tensor in observation.items()})


class WritingRowEnv(RowEnv):
    """Adapts a `VecEnv` that has `step_into`, which writes to the rollout's memory."""

    writes_rows = True

    def step_rows(self, action: DictTensor, target: Target | None = None) -> Step:
        """Writes a step to the target, or to rows that stay valid until the next step."""
        if target is None:
            rows = Rows.zeros(self._packing, self.n_envs())
            target = Target(rows, rows.arrays())
        found = self._env.step_into(action.clone(), target.arrays)  # type: ignore[attr-defined]
        idle = _idle(target.arrays)
        if found is None:
            return Step(target.rows, NO_ROWS, None, None, idle)
        reset, fresh = found
        reset = np.asarray(reset)
        if reset.ndim != 1 or reset.dtype.kind not in "iu":
            raise SpecError(f"environment: step_into must give which were reset as int64 (R,), got {reset!r}")
        if not reset.size:
            return Step(target.rows, NO_ROWS, None, None, idle)
        if (np.diff(reset) < 1).any() or reset[0] < 0 or reset[-1] >= self.n_envs():
            raise SpecError(f"environment: step_into reset {reset}, of {self.n_envs()} environments in ascending order")
        return Step(target.rows, reset.astype(np.int64), self._rows(fresh, reset), None, idle)


def row_env(env: VecEnv) -> RowEnv:
    """Returns the environment itself if it has rows, else an adapter around it."""
    if gives_rows(env):
        return env  # type: ignore[return-value]
    return WritingRowEnv(env) if gives_rows(env, "step_into") else RowEnv(env)


def take_statistics(env: Any) -> dict[str, Moments]:
    """Takes what an environment has gathered since the last call; nothing if it keeps no statistics."""
    return env.take_statistics() if hasattr(env, "take_statistics") else {}


def load_statistics(env: Any, statistics: Mapping[str, Moments], frozen: bool = False) -> None:
    """Gives these statistics to the environment, if it keeps any."""
    if statistics and hasattr(env, "load_statistics"):
        env.load_statistics(statistics, frozen)


def gives_rows(env: VecEnv, method: str = "step_rows") -> bool:
    """Whether this method may stand in for `step`: not if a subclass or a patch has replaced `reset` or `step`.

    Looks at the class, not at the object: a wrapper that forwards unknown attributes has no rows of its own.
    """
    classes = type(env).__mro__

    def owner(name: str) -> int:
        return next((at for at, cls in enumerate(classes) if name in vars(cls)), len(classes))

    rows = owner(method)
    patched = {"reset", "step"} & getattr(env, "__dict__", {}).keys()
    return rows < len(classes) and not patched and min(owner("reset"), owner("step")) >= rows


def groups_of(env: RowEnv) -> Sequence[SplitEnv]:
    """The groups of environments that can be stepped separately, in order; empty if all are stepped together."""
    groups: Sequence[SplitEnv] = getattr(env, "row_groups", tuple)()
    return groups


def _idle(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Rows of environments that only started an episode."""
    starts = arrays.get("initial_state")
    if starts is None or starts.dtype != bool or starts.ndim != 1 or not starts.any():
        return NO_ROWS
    return np.flatnonzero(starts & ~arrays["done"].astype(bool)) if "done" in arrays else np.flatnonzero(starts)


def _same_tensors(a: DictTensor, b: DictTensor) -> bool:
    return a is b or (a.keys() == b.keys() and all(tensor is b[key] for key, tensor in a.items()))


def _array(running: torch.Tensor) -> np.ndarray:
    return running.detach().cpu().numpy().astype(np.int64, copy=False)
