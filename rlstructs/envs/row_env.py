"""How a rollout steps environments: rows in numpy arrays, whatever class they are."""

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
        after: E' rows, what happened to each, final observations included.
        reset: int64 (R,), which of the E' rows the agent sees differently next: those of environments
            that were reset in the same step.
        fresh: R rows, what it sees of them; None when R is 0.
        kept: int64, which of the E' rows still run; None for all.
        idle: int64, of which of the E' rows this was no step: the environment did nothing but start an episode.
    """

    after: Rows
    reset: np.ndarray
    fresh: Rows | None
    kept: np.ndarray | None
    idle: np.ndarray = NO_ROWS


class SplitEnv(Protocol):
    """A group of environments that are stepped while others are waited for; all of them always run."""

    @property
    def may_idle(self) -> bool:
        """As of `RowEnv`."""
        ...

    def n_envs(self) -> int:
        """How many there are."""
        ...

    def send_rows(self, action: DictTensor) -> None:
        """As `RowEnv.step_rows`, but does not wait."""
        ...

    def recv_rows(self, target: Target) -> Step:
        """What came of it, written to the target."""
        ...


Pair = tuple[DictTensor, torch.Tensor]


def pairs(step: Step, running: torch.Tensor) -> tuple[Pair, Pair]:
    """A step as `VecEnv.step` gives it, of the environments `running`."""
    after = step.after.tensors()
    following, kept = DictTensor.trusted(after._tensors), running  # an object of its own: a wrapper may `set` keys
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
    """Any `VecEnv` as the rollout wants it: observations as rows, one `Step` for each step."""

    #: Whether `step_rows` takes, and writes to, what `Steps.target` gives, in place of rows of its own.
    writes_rows = False
    #: Whether in the next step an environment may do nothing but start an episode.
    may_idle = True

    def __init__(self, env: VecEnv) -> None:
        self._env = env
        self._running = NO_ROWS
        self._specs: dict[str, Any] | None = None
        self._packing = Packing({})

    def n_envs(self) -> int:
        """As the environment's own."""
        return self._env.n_envs()

    def close(self) -> None:
        """As the environment's own."""
        self._env.close()

    def reset_rows(self, env_info: DictTensor) -> Rows:
        """As `VecEnv.reset`; every environment runs then."""
        observation, running = self._env.reset(env_info)
        self._running = _array(running)
        if not np.array_equal(self._running, np.arange(self.n_envs())):
            raise SpecError(f"environment: running after reset is {self._running}, expected 0..{self.n_envs() - 1}")
        return self._rows(observation, self._running)

    def step_rows(self, action: DictTensor, target: Target | None = None) -> Step:
        """As `VecEnv.step`; the target is for those that write to it."""
        # A copy: either of the two, environment and agent, may write into what it has of it.
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
        # What differs is not told: every row that still runs is taken as different.
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
    """A `VecEnv` that has `step_into`, likewise."""

    writes_rows = True

    def step_rows(self, action: DictTensor, target: Target | None = None) -> Step:
        """As `VecEnv.step`, written to the target, or to rows that stay valid until the next one."""
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
    """The environment itself when it gives rows, an adapter around it otherwise."""
    if gives_rows(env):
        return env  # type: ignore[return-value]
    return WritingRowEnv(env) if gives_rows(env, "step_into") else RowEnv(env)


def take_statistics(env: Any) -> dict[str, Moments]:
    """What an environment has gathered since the last call; nothing if it keeps no statistics."""
    return env.take_statistics() if hasattr(env, "take_statistics") else {}


def load_statistics(env: Any, statistics: Mapping[str, Moments], frozen: bool = False) -> None:
    """Has an environment that keeps statistics go by these."""
    if statistics and hasattr(env, "load_statistics"):
        env.load_statistics(statistics, frozen)


def gives_rows(env: VecEnv, method: str = "step_rows") -> bool:
    """Whether this method does what `step` does: not if a subclass, or someone else, has put its own in place.

    Looks at the class, not at the object: a wrapper that forwards what it does not know has no rows either.
    """
    classes = type(env).__mro__

    def owner(name: str) -> int:
        return next((at for at, cls in enumerate(classes) if name in vars(cls)), len(classes))

    rows = owner(method)
    patched = {"reset", "step"} & getattr(env, "__dict__", {}).keys()
    return rows < len(classes) and not patched and min(owner("reset"), owner("step")) >= rows


def groups_of(env: RowEnv) -> Sequence[SplitEnv]:
    """The groups in which its environments can be stepped, in order; none if they are all stepped together."""
    groups: Sequence[SplitEnv] = getattr(env, "row_groups", tuple)()
    return groups


def _idle(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Which rows are of environments that did nothing but start an episode."""
    starts = arrays.get("initial_state")
    if starts is None or starts.dtype != bool or starts.ndim != 1 or not starts.any():
        return NO_ROWS
    return np.flatnonzero(starts & ~arrays["done"].astype(bool)) if "done" in arrays else np.flatnonzero(starts)


def _same_tensors(a: DictTensor, b: DictTensor) -> bool:
    return a is b or (a.keys() == b.keys() and all(tensor is b[key] for key, tensor in a.items()))


def _array(running: torch.Tensor) -> np.ndarray:
    return running.detach().cpu().numpy().astype(np.int64, copy=False)
