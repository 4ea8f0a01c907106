"""Columns that environments and trainer exchange at every step, in shared bytes.

    observations    (N, ...)   an array for each leaf of the space, unless it is a text, graph or the like
    rewards         (N,)       float64
    terminations, truncations  (N,) bool
    at, restarts    (N,)       int64
    actions         (N, ...)   an array for each leaf of the space

Shapes and dtypes are those of `gymnasium.vector.SyncVectorEnv`. All else that a step returns is an `Outcome`, pickled
for a pipe.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from rlstructs.envs.spaces import Column, Leaf, flatten_space, nest, nest_rows
from rlstructs.errors import SpecError
from rlstructs.workers import failures, pickling

# Bytes of a cache line.
ALIGNMENT = 64

Spec = tuple[tuple[int, ...], np.dtype[Any]]


# Dtypes that actions may have, as numpy's character codes, and the bytes of the widest.
TYPES, WIDEST = frozenset("?bBhHiIlLqQefd"), 8
ALL = slice(None)


class Outcome(NamedTuple):
    """Results of a step or reset of some environments, outside the columns.

    Attributes:
        infos: pairs of an environment's index and an info that is not empty, in gymnasium's order.
        objects: pairs of an environment's index and the leaves of its observation that are no arrays.
    """

    infos: list[tuple[int, Mapping[str, Any]]]
    objects: list[tuple[int, list[Any]]]

    def split(self, envs: Iterable[int]) -> dict[int, Outcome]:
        """Splits an outcome of these environments into one for each."""
        outcomes = {env: Outcome([], []) for env in envs}
        for env, info in self.infos:
            outcomes[env].infos.append((env, info))
        for env, picked in self.objects:
            outcomes[env].objects.append((env, picked))
        return outcomes


EMPTY = Outcome([], [])


def merge_infos(env: VectorEnv, outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """Merges infos into arrays with a row for each environment of a vectorised one."""
    return _merge(env, range(env.num_envs), outcomes)


def merge_some_infos(envs: np.ndarray, outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """Merges infos into arrays with a row for each of these environments.

    `env_id` holds their indexes.
    """
    batch = VectorEnv()
    batch.num_envs = envs.size
    infos = _merge(batch, {env: row for row, env in enumerate(envs.tolist())}, outcomes)
    infos["env_id"] = envs
    return infos


def split_infos(envs: Iterable[int], outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """Returns the info of each of these environments, in their order.

    An empty dict for an environment without one.
    """
    found: dict[int, dict[str, Any]] = {env: {} for env in envs}
    for outcome in outcomes:
        for env, info in outcome.infos:
            if env in found:
                found[env].update(info)
    return list(found.values())


def pack(value: Any) -> bytes:
    """Pickles a value.

    Raises:
        Exception: something in it cannot be pickled; if it is in an info, a note names the environment.
    """
    try:  # pickle alone takes a tenth of cloudpickle's time for numbers, strings and arrays
        buffer = io.BytesIO()
        _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
        return buffer.getvalue()
    except Exception:
        return _pack_slowly(value)


def unpack(data: bytes) -> Any:
    """Unpickles what `pack` returned; no bytes stand for an empty outcome."""
    return pickling.loads(data) if data else EMPTY


def _pack_slowly(value: Any) -> bytes:
    try:
        return pickling.dumps(value)
    except Exception as error:
        for env, info in value.infos if isinstance(value, Outcome) else ():
            for key in info:
                if not _is_picklable(info[key]):
                    failures.add_note(error, f"info {key!r} of environment {env} cannot be sent to the trainer")
        raise


def _is_picklable(value: Any) -> bool:
    try:
        pickling.dumps(value)
    except Exception:
        return False
    return True


def _merge(batch: VectorEnv, rows: Sequence[int] | dict[int, int], outcomes: Iterable[Outcome]) -> dict[str, Any]:
    infos: dict[str, Any] = {}
    for outcome in outcomes:
        for env, info in outcome.infos:
            infos = batch._add_info(infos, info, rows[env])
    return infos


def _reduce_number(value: np.generic) -> tuple[Any, ...]:
    return type(value), (value.item(),)


class _Pickler(pickle.Pickler):
    # numpy's own pickles of scalars, bytes with a dtype, take three times as long.
    dispatch_table = dict.fromkeys((np.dtype(letter).type for letter in "?bBhHiIlLqQefd"), _reduce_number)


class Objects:
    """Leaves that are not arrays, of N observations."""

    def __init__(self, space: gymnasium.Space[Any], n_envs: int) -> None:
        self._leaves = [leaf for leaf in flatten_space(space) if not leaf.is_array]
        self._values: list[list[Any]] = [[None] * n_envs for _ in self._leaves]
        self._n_envs = n_envs
        # An empty batch for gymnasium, if it uses one at all: making it takes longer than a step.
        self._empty = [create_empty_array(leaf.space, n=n_envs) for leaf in self._leaves]

    def __bool__(self) -> bool:
        return bool(self._leaves)

    def pick(self, observation: Any) -> list[Any]:
        """The values of these leaves in one observation.

        Raises:
            SpecError: it lacks one.
        """
        try:
            return [leaf.pick(observation) for leaf in self._leaves]
        except (LookupError, TypeError) as error:
            names = [leaf.key for leaf in self._leaves]
            raise SpecError(f"observation {names} cannot be read: {error!r}") from error

    def pick_all(self, observations: Sequence[Any]) -> list[list[Any]]:
        """Picks from each of some observations."""
        try:
            leaves = self._leaves
            columns = [[leaf.pick(each) for each in observations] if leaf.path else observations for leaf in leaves]
        except (LookupError, TypeError):
            return list(map(self.pick, observations))  # raises an error that names the leaves
        return list(map(list, zip(*columns, strict=True)))

    def put(self, pairs: Sequence[tuple[int, list[Any]]]) -> None:
        """Keeps the newest values of environments.

        `pairs` are an index and the result of `pick`.
        """
        for at, values in enumerate(self._values):
            for env, picked in pairs:
                values[env] = picked[at]

    def batches(self, envs: Sequence[int]) -> Iterator[Any]:
        """Yields each leaf of some environments, batched the way gymnasium does it."""
        for leaf, values, empty in zip(self._leaves, self._values, self._empty, strict=True):
            out = empty if len(envs) == self._n_envs else create_empty_array(leaf.space, n=len(envs))
            yield concatenate(leaf.space, [values[env] for env in envs], out)


class Columns:
    """Observations, rewards, flags and actions of N environments.

    Args:
        observation_space, action_space: of one environment.
        n_envs: N.
        buffer: at least `count_bytes` bytes; None to allocate them.

    Attributes:
        observations: the leaves of observations that are arrays.
        objects: the other leaves.
        rewards: float64 (N,).
        terminations, truncations: bool (N,).
        actions: the actions of the next step.
        at: int64 (N,); the row of a group's first environment holds the index of the environment that the group is
            stepping, or -1.
        restarts: int64 (N,), how often each environment was made anew.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        n_envs: int,
        buffer: Any = None,
    ) -> None:
        size = count_bytes(observation_space, action_space, n_envs)
        whole = np.zeros(size, np.uint8) if buffer is None else np.frombuffer(buffer, np.uint8, size)
        self._arguments = observation_space, action_space, n_envs, whole
        arrays = _carve(whole, _specs(observation_space, action_space, n_envs))
        self._space, self._all_envs = observation_space, range(n_envs)
        self._leaves = list(flatten_space(observation_space))
        self.observations = [
            Column(Leaf(leaf.path, leaf.space, np.dtype(leaf.space.dtype)), n_envs, next(arrays))
            for leaf in self._leaves
            if leaf.is_array
        ]
        self.objects = Objects(observation_space, n_envs)
        # A space that is one array needs no nesting.
        self._single = self.observations[0].array if self.observations and not self._leaves[0].path else None
        numbers = [next(arrays) for _ in range(5)]
        self.rewards, self.terminations, self.truncations, self.at, self.restarts = numbers
        self.actions = Actions(action_space, n_envs, list(arrays))

    def __reduce__(self) -> tuple[Any, ...]:
        # Rebuilt, also by `copy.deepcopy`: copied views would not be views of the copied bytes.
        return _rebuild_columns, (self._arguments, self.objects)

    def keep_objects(self, outcomes: Iterable[Outcome]) -> None:
        """Keeps those leaves of observations that are not arrays."""
        for outcome in outcomes:
            self.objects.put(outcome.objects)

    def batch(self, is_copied: bool) -> Any:
        """The newest observations of all environments; copies, or views that the next step overwrites."""
        if self._single is not None:
            return self._single.copy() if is_copied else self._single
        if len(self._leaves) == 1 and not self._leaves[0].path:
            found = next(self.objects.batches(self._all_envs))
            return _copy_batch(found) if is_copied else found
        if is_copied:
            return self._nest(np.array, _copy_batch, self._all_envs)
        return self._nest(_keep, _keep, self._all_envs)

    def batch_some(self, envs: np.ndarray) -> Any:
        """Copies of the newest observations of some environments."""
        if self._single is not None:
            return self._single[envs]
        return self._nest(lambda array: array[envs], _copy_batch, envs.tolist())

    def _nest(
        self, copy_array: Callable[[np.ndarray], np.ndarray], copy_object: Callable[[Any], Any], envs: Sequence[int]
    ) -> Any:
        arrays = (copy_array(column.array) for column in self.observations)
        if not self.objects:
            return nest(self._space, arrays)
        objects = map(copy_object, self.objects.batches(envs))
        return nest(self._space, (next(arrays) if leaf.is_array else next(objects) for leaf in self._leaves))


def _rebuild_columns(arguments: tuple[Any, Any, int, np.ndarray], objects: Objects) -> Columns:
    columns = Columns(*arguments)
    columns.objects = objects
    return columns


def count_bytes(observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any], n_envs: int) -> int:
    """Number of bytes that the columns of so many environments take."""
    return sum(_align(_count_bytes(spec)) for spec in _specs(observation_space, action_space, n_envs))


def _specs(observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any], n_envs: int) -> Iterator[Spec]:
    for leaf in flatten_space(observation_space):
        if leaf.is_array:
            yield (n_envs, *leaf.shape), np.dtype(leaf.space.dtype)
    # rewards, terminations, truncations, at, restarts
    for dtype in (np.float64, np.bool_, np.bool_, np.int64, np.int64):
        yield (n_envs,), np.dtype(dtype)
    for leaf in flatten_space(action_space):
        yield (n_envs * int(np.prod(leaf.shape)) * WIDEST,), np.dtype(np.uint8)


def _carve(whole: np.ndarray, specs: Iterator[Spec]) -> Iterator[np.ndarray]:
    start = 0
    for spec in specs:
        shape, dtype = spec
        yield whole[start : start + _count_bytes(spec)].view(dtype).reshape(shape)
        start += _align(_count_bytes(spec))


def _count_bytes(spec: Spec) -> int:
    shape, dtype = spec
    return int(np.prod(shape)) * dtype.itemsize


def _align(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


def _copy_batch(batch: Any) -> Any:
    """Copies a batch of values that are no arrays; strings never change."""
    return batch if type(batch) is tuple and {*map(type, batch)} <= {str} else copy.deepcopy(batch)


def _keep(value: Any) -> Any:
    return value


class Actions:
    """Stores actions in the dtypes in which they are given.

    These may differ from the dtypes of the space.

    Args:
        space: of one environment.
        n_envs: N.
        arrays: uint8, one for each leaf of the space, `WIDEST` bytes for each number.
    """

    def __init__(self, space: gymnasium.Space[Any], n_envs: int, arrays: Sequence[np.ndarray]) -> None:
        self._space, self._n_envs = space, n_envs
        self._leaves = list(flatten_space(space))
        self._has_arrays = bool(self._leaves) and all(leaf.is_array for leaf in self._leaves)
        self._shapes = [leaf.shape for leaf in self._leaves]
        self._is_plain = self._has_arrays and self._leaves[0].path == ()
        self._arrays = arrays
        self._views: dict[tuple[int, str], np.ndarray] = {}

    def write(self, actions: Any, envs: Any = ALL, n: int | None = None) -> str:
        """Writes the actions of some environments, if all of them are arrays of numbers.

        Args:
            actions: a batch of n actions, in the form of the batched space.
            envs: an index of the environments.
            n: number of environments; None for all N.

        Returns:
            The dtypes that `read` needs, a character for each leaf; empty if the actions have to be pickled.
        """
        arrays = self._find_arrays(actions, self._n_envs if n is None else n)
        for at, values in enumerate(arrays):
            self._view(at, values.dtype.char)[envs] = values
        return "".join([values.dtype.char for values in arrays])

    def read(self, types: str, envs: Any) -> list[Any]:
        """Returns a copy of the action of each of these environments."""
        return self._split_arrays([self._view(at, letter)[envs].copy() for at, letter in enumerate(types)])

    def copy(self, actions: Any, n: int) -> list[Any]:
        """Returns a copy of each of n environments' actions.

        As `write` and `read` do, or `split`.
        """
        arrays = [np.array(values, values.dtype.char, order="C") for values in self._find_arrays(actions, n)]
        return self._split_arrays(arrays) if arrays else self.split(actions, n)

    def _find_arrays(self, actions: Any, n: int) -> list[np.ndarray]:
        """Returns the array of each leaf of a batch of n actions.

        Empty if one is not an array of numbers.
        """
        found: list[np.ndarray] = []
        for leaf, shape in zip(self._leaves, self._shapes, strict=True) if self._has_arrays else ():
            try:
                values = leaf.pick(actions)
            except (LookupError, TypeError):
                return []
            if type(values) is not np.ndarray or values.shape != (n, *shape) or values.dtype.char not in TYPES:
                return []
            found.append(values)
        return found

    def _split_arrays(self, arrays: list[np.ndarray]) -> list[Any]:
        return list(arrays[0]) if self._is_plain else nest_rows(self._space, iter(arrays), len(arrays[0]))

    def split(self, actions: Any, n: int) -> list[Any]:
        """Splits a batch of actions into n, as gymnasium does.

        Raises:
            SpecError: there are more or fewer than n.
            Exception: what gymnasium raises if `actions` is not a batch.
        """
        # gymnasium splits by the type of the batched space, whatever its batch size.
        rows = list(iterate(batch_space(self._space, 1), actions))
        if len(rows) != n:
            raise SpecError(f"actions: needs one for each of {n} environments, got {len(rows)}")
        seen: set[int] = set()
        for k, row in enumerate(rows):
            if id(row) in seen:  # as in `[action] * n`: an environment may change its action
                rows[k] = copy.deepcopy(row)
            seen.add(id(row))
        return rows

    def _view(self, at: int, letter: str) -> np.ndarray:
        """The array of one leaf, (N, ...), in this dtype."""
        found = self._views.get((at, letter))
        if found is None:
            dtype, shape, whole = np.dtype(letter), self._shapes[at], self._arrays[at]
            # A row starts at the same byte in every dtype, because rows not yet read may have another one.
            strides = whole.size // self._n_envs, *np.empty(shape, dtype).strides
            found = np.ndarray((self._n_envs, *shape), dtype, whole.data, strides=strides)
            self._views[at, letter] = found
        return found
