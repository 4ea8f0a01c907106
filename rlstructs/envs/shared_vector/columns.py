"""What environments and the trainer hand each other at every step, as arrays over one block of bytes.

    observations    (N, ...)   an array for each part of the space that is no text, graph or the like
    rewards         (N,)       float64
    terminations, truncations  (N,) bool
    actions         (N, ...)   an array for each part of the space

Shapes and dtypes are those of `gymnasium.vector.SyncVectorEnv`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector.utils import concatenate, create_empty_array

from rlstructs.checks import holds
from rlstructs.envs.parts import Part, nest, parts_of
from rlstructs.envs.shared_vector.actions import WIDEST, Actions
from rlstructs.envs.shared_vector.step_results import Outcome
from rlstructs.envs.values import as_numpy, share_memory
from rlstructs.errors import SpecError

# Bytes: what a cache line wants.
ALIGNMENT = 64

Spec = tuple[tuple[int, ...], np.dtype[Any]]


class ObservationColumn:
    """One part of the observations of N environments.

    Args:
        part: which.
        array: (N, ...), without gaps.
    """

    def __init__(self, part: Part, array: np.ndarray) -> None:
        self.part, self.array = part, array
        self._name = f" {'/'.join(map(str, part.path))!r}" if part.path else ""
        # Laid one behind another along their first axis: a single concatenation.
        self._chain = array.reshape(len(array) * part.shape[0], *part.shape[1:]) if part.shape else array
        self._lengths = [part.shape[0]] * len(array) if part.shape else []
        self._shape, self._dtype = part.shape, array.dtype
        # Rounding a float is all right. Whole numbers of a wider dtype are looked at one by one.
        self._casting: Any = "same_kind" if array.dtype.kind == "f" else "safe"

    def rows(self, rows: slice) -> ObservationColumn:
        """Of some of the environments."""
        return ObservationColumn(self.part, self.array[rows])

    def fill(self, observations: Sequence[Any]) -> None:
        """Writes the observations of all N.

        Raises:
            SpecError: one lacks this part, has another shape than the space, or numbers that its dtype cannot hold.
            TypeError: one is of something else than numbers, or complex.
        """
        try:
            values = [self.part.pick(each) for each in observations] if self.part.path else observations
            if self._fill_at_once(values):
                return
        except (LookupError, TypeError):  # one lacks this part
            pass
        for k, observation in enumerate(observations):
            self.put(k, observation)

    def put(self, k: int, observation: Any) -> None:
        """Writes the observation of environment k; raises as `fill` does."""
        try:
            value = self.part.pick(observation)
            if isinstance(value, (np.ndarray, np.generic)) and value.dtype == self._dtype:
                if value.shape == self._shape:
                    self.array[k] = value
                    return
            else:
                value = as_numpy(value)
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise SpecError(f"observation{self._name} cannot be read: {error!r}") from error
        self._put_converted(self.array[k : k + 1], value)

    def share_memory(self, observations: Sequence[Any]) -> bool:
        """Whether two observations may lie, in part, in the same memory."""
        return share_memory(map(self.part.pick, observations))

    def _put_converted(self, row: np.ndarray, value: np.ndarray) -> None:
        if value.shape != self._shape and not row.size == value.size == 1:
            raise SpecError(f"observation{self._name} has shape {value.shape}, its space {self._shape}")
        casting: Any = "same_kind"
        if value.dtype.kind in "biuf":  # numbers of any type, if none is changed by it
            if not holds(row.dtype, value):
                name = f"observation{self._name}"
                raise SpecError(f"{name} has dtype {value.dtype}, and values that the space's {row.dtype} cannot hold")
            casting = "unsafe"
        try:
            np.copyto(row, value.reshape(row.shape), casting=casting)
        except TypeError as error:
            raise TypeError(f"observation{self._name} cannot be read: {error}") from error

    def _fill_at_once(self, values: Sequence[Any]) -> bool:
        # Takes half as long as `stack`, which gives every array one more axis first.
        try:
            if self._lengths:
                if list(map(len, values)) != self._lengths:
                    return False
                np.concatenate(values, out=self._chain, casting=self._casting)
            else:
                numbers = np.asarray(values)
                if numbers.shape != self.array.shape:
                    return False
                np.copyto(self.array, numbers, casting=self._casting)
        except (TypeError, ValueError, RuntimeError):  # torch's own, of tensors with gradients
            return False
        return True


class Objects:
    """The parts of N observations that are no arrays."""

    def __init__(self, space: gymnasium.Space[Any], n_envs: int) -> None:
        self._parts = [part for part in parts_of(space) if not part.is_array]
        self._values: list[list[Any]] = [[None] * n_envs for _ in self._parts]

    def __bool__(self) -> bool:
        return bool(self._parts)

    def pick(self, observation: Any) -> list[Any]:
        """These parts of one observation.

        Raises:
            SpecError: it lacks one.
        """
        try:
            return [part.pick(observation) for part in self._parts]
        except (LookupError, TypeError) as error:
            names = ["/".join(map(str, part.path)) for part in self._parts]
            raise SpecError(f"observation {names} cannot be read: {error!r}") from error

    def put(self, env: int, picked: list[Any]) -> None:
        """Keeps what `pick` gave as an environment's newest."""
        for values, value in zip(self._values, picked, strict=True):
            values[env] = value

    def batches(self, envs: Sequence[int]) -> Iterator[Any]:
        """Each part of some environments, as gymnasium batches it."""
        for part, values in zip(self._parts, self._values, strict=True):
            empty = create_empty_array(part.space, n=len(envs))
            yield concatenate(part.space, [values[env] for env in envs], empty)


class Columns:
    """All that is handed over at a step.

    Args:
        observation_space, action_space: of one environment.
        n_envs: N.
        buffer: at least `nbytes` bytes; None for memory of its own.

    Attributes:
        observations: the parts of observations that are arrays.
        objects: those that are not.
        rewards: float64 (N,).
        terminations, truncations: bool (N,).
        actions: what environments are to do.
        at: int64 (N,), in the row of the first environment of a group the one that it is busy with, -1 for none.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        n_envs: int,
        buffer: Any = None,
    ) -> None:
        size = nbytes(observation_space, action_space, n_envs)
        whole = np.zeros(size, np.uint8) if buffer is None else np.frombuffer(buffer, np.uint8, size)
        self._made_of = observation_space, action_space, n_envs, whole
        arrays = _carved(whole, _specs(observation_space, action_space, n_envs))
        self._space, self._everyone = observation_space, range(n_envs)
        self._parts = list(parts_of(observation_space))
        self.observations = [ObservationColumn(part, next(arrays)) for part in self._parts if part.is_array]
        self.objects = Objects(observation_space, n_envs)
        # A space that is one array needs no nesting.
        self._single = self.observations[0].array if self.observations and not self._parts[0].path else None
        self.rewards, self.terminations, self.truncations, self.at = (next(arrays) for _ in range(4))
        self.actions = Actions(action_space, n_envs, list(arrays))

    def __reduce__(self) -> tuple[Any, ...]:
        # Made anew, also where an environment is copied: copies of views would be no views of the copied bytes.
        return _columns_of, (self._made_of, self.objects)

    def keep(self, outcomes: Iterable[Outcome]) -> None:
        """Keeps what observations hold beside arrays."""
        for outcome in outcomes:
            for env, picked in outcome.objects:
                self.objects.put(env, picked)

    def batch(self, is_copied: bool) -> Any:
        """The newest observation of every environment, in memory of its own if it is copied."""
        if self._single is not None:
            return self._single.copy() if is_copied else self._single
        if is_copied:
            return self._nested(np.array, copy.deepcopy, self._everyone)
        return self._nested(_same, _same, self._everyone)

    def batch_of(self, envs: np.ndarray) -> Any:
        """The newest observations of some environments, in memory of its own."""
        return self._nested(lambda array: array[envs], copy.deepcopy, envs.tolist())

    def _nested(
        self, array_of: Callable[[np.ndarray], np.ndarray], object_of: Callable[[Any], Any], envs: Sequence[int]
    ) -> Any:
        arrays = (array_of(column.array) for column in self.observations)
        if not self.objects:
            return nest(self._space, arrays)
        objects = map(object_of, self.objects.batches(envs))
        return nest(self._space, (next(arrays) if part.is_array else next(objects) for part in self._parts))


def _columns_of(made_of: tuple[Any, Any, int, np.ndarray], objects: Objects) -> Columns:
    columns = Columns(*made_of)
    columns.objects = objects
    return columns


def nbytes(observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any], n_envs: int) -> int:
    """How many bytes the columns of so many environments take."""
    return sum(_aligned(_size(spec)) for spec in _specs(observation_space, action_space, n_envs))


def _specs(
    observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any], n_envs: int
) -> Iterator[Spec]:
    for part in parts_of(observation_space):
        if part.is_array:
            yield (n_envs, *part.shape), np.dtype(part.space.dtype)
    for dtype in (np.float64, np.bool_, np.bool_, np.int64):  # rewards, terminations, truncations, at
        yield (n_envs,), np.dtype(dtype)
    for part in parts_of(action_space):
        yield (n_envs * int(np.prod(part.shape)) * WIDEST,), np.dtype(np.uint8)


def _carved(whole: np.ndarray, specs: Iterator[Spec]) -> Iterator[np.ndarray]:
    start = 0
    for spec in specs:
        shape, dtype = spec
        yield whole[start : start + _size(spec)].view(dtype).reshape(shape)
        start += _aligned(_size(spec))


def _size(spec: Spec) -> int:
    shape, dtype = spec
    return int(np.prod(shape)) * dtype.itemsize


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


def _same(value: Any) -> Any:
    return value
