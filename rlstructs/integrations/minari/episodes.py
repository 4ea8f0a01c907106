"""Makes trajectories of the episodes of a dataset, and cuts rollouts into episodes.

Pieces from consecutive rollouts are joined.

`SpaceColumns` maps keys of trajectories to observations and actions of a space, in the form in which Minari stores
them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import minari
import numpy as np
import torch
from gymnasium import spaces

from rlstructs.checks import UNKNOWN, check_count, check_names
from rlstructs.envs.action_reader import ActionReader
from rlstructs.envs.env_infos import PREFIX
from rlstructs.envs.spaces import list_leaves, nest
from rlstructs.errors import MissingKeyError, SpecError
from rlstructs.replay.intake.arrays import find_marks, host_array
from rlstructs.replay.intake.trajectories import STEP_START
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
from rlstructs.structures.trajectories import Trajectories

# The columns of steps that every dataset has: Minari's name -> key of trajectories.
STEPS = {
    "rewards": "_observation/reward",
    "terminations": "_observation/terminated",
    "truncations": "_observation/truncated",
}
OPTIONS = "env_info/"

Arrays = dict[str, np.ndarray]


def from_minari(dataset: minari.MinariDataset | str, info_keys: Sequence[str] = ()) -> Trajectories:
    """Reads a whole dataset of Minari.

    Args:
        dataset: the dataset, filtered perhaps, or its id.
        info_keys: names of infos, which are read to `observation/info/<name>` and `_observation/info/<name>`;
            `a/b` is entry `b` of the info `a`.

    Returns:
        A row for each episode, in the order of the dataset, padded with zeros to the longest: (B, T, ...).
        `observation/...`, `action/...`, `_observation/...` as a batcher names them, with the dtypes of the dataset;
        `_observation/reward`, `terminated`, `truncated` and `done`; `observation/initial_state`, True at t = 0. Its
        info has `episode_id`, the number of the episode in the dataset, and `env_index`, 0, so that
        `add_trajectories` puts one episode behind the other.

    Raises:
        SpecError: the dataset has no episode, a space is not supported, an info is not an array of numbers, or the
            arrays of an episode do not fit each other, or its spaces; the message names the episode.
        MissingKeyError: an episode has no such info.
    """
    [batch] = _read(dataset, None, info_keys)
    return batch


def iterate_minari(
    dataset: minari.MinariDataset | str, batch_size: int, info_keys: Sequence[str] = ()
) -> Iterator[Trajectories]:
    """Reads a dataset of Minari, `batch_size` episodes at a time.

    Args:
        dataset, info_keys: see `from_minari`.
        batch_size: B, the number of episodes in a batch; the last batch may have fewer.

    Yields:
        Batches like that of `from_minari`.

    Raises:
        SpecError, MissingKeyError: see `from_minari`.
    """
    return _read(dataset, check_count("batch_size", batch_size), info_keys)


def _read(
    dataset: minari.MinariDataset | str, batch_size: int | None, info_keys: Sequence[str]
) -> Iterator[Trajectories]:
    names = check_names("info_keys", info_keys)
    found = minari.load_dataset(dataset) if isinstance(dataset, str) else dataset
    observations = SpaceColumns(found.observation_space, "observation")
    actions = SpaceColumns(found.action_space, "action")
    if not len(found):
        raise SpecError(f"from_minari: the dataset {found.id!r} has no episode")
    episodes = iter(found.iterate_episodes())
    while batch := list(itertools.islice(episodes, batch_size)):
        steps = [_steps_of(episode, observations, actions, names) for episode in batch]
        lengths = torch.tensor([len(arrays[STEP_START]) for arrays in steps])
        info = {
            "env_index": torch.zeros(len(batch), dtype=torch.int64),
            "episode_id": torch.tensor([int(episode.id) for episode in batch]),
        }
        padded = {key: _pad([arrays[key] for arrays in steps], lengths) for key in steps[0]}
        yield Trajectories(DictTensor(info), TemporalDictTensor(padded, lengths))


def _steps_of(episode: Any, observations: SpaceColumns, actions: SpaceColumns, info_keys: Sequence[str]) -> Arrays:
    """The columns of an episode of T steps, (T, ...).

    Raises:
        SpecError: an array has not as many rows as there are rewards, or one more for observations and infos.
    """
    ends = {name: np.asarray(getattr(episode, name)) for name in STEPS}
    n = int(ends["rewards"].size)
    where = f"from_minari: episode {episode.id}, of {n} rewards"
    for name, array in ends.items():
        _check_rows(where, name, array, (n,))
    seen = observations.from_minari(episode.observations, where, n + 1)
    seen |= {PREFIX + name: _find_info(episode, name, n + 1) for name in info_keys}
    taken = actions.from_minari(episode.actions, where, n)
    initial_state = np.zeros(n, bool)
    initial_state[:1] = True
    return {
        **{f"observation/{name}": array[:-1] for name, array in seen.items()},
        STEP_START: initial_state,
        **{f"action/{name}": array for name, array in taken.items()},
        **{f"_observation/{name}": array[1:] for name, array in seen.items()},
        **{key: ends[name] for name, key in STEPS.items()},
        "_observation/done": ends["terminations"] | ends["truncations"],
    }


def _find_info(episode: Any, name: str, n: int) -> np.ndarray:
    """An info of an episode, (n, ...)."""
    value: Any = episode.infos or {}
    for part in name.split("/"):
        if not isinstance(value, Mapping) or part not in value:
            there = sorted(value) if isinstance(value, Mapping) else "no dict"
            raise MissingKeyError(f"from_minari: episode {episode.id} has no info {name!r}, there is {there}")
        value = value[part]
    array = np.asarray(value)
    if array.dtype.kind not in "biuf" or array.shape[:1] != (n,):
        raise SpecError(
            f"from_minari: info {name!r} of episode {episode.id} is {array.shape} {array.dtype}, expected numbers, "
            f"{n} rows"
        )
    return array


def _pad(arrays: Sequence[np.ndarray], lengths: torch.Tensor) -> torch.Tensor:
    """Stacks columns of several episodes, padded with zeros to the longest: (B, T, ...)."""
    padded = np.zeros((len(arrays), int(lengths.max()), *arrays[0].shape[1:]), arrays[0].dtype)
    for row, array in zip(padded, arrays, strict=True):
        row[: len(array)] = array
    return torch.from_numpy(padded)


class SpaceColumns:
    """The columns of an observation space or an action space, one for each leaf.

    Args:
        space: the space; Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of them.
        what: "observation" or "action".

    Attributes:
        space: the space.
        leaves: name of the column -> leaf. Observations have the names `frame` or `<key>`, actions `action` or
            `action/<key>`, as in trajectories.

    Raises:
        SpecError: the space has leaves of other kinds, or a name that HDF5 cannot hold.
    """

    def __init__(self, space: gymnasium.Space[Any], what: str) -> None:
        found = list_leaves(space, what, keep_float64=True)
        for leaf in found:
            if any(isinstance(name, str) and ("/" in name or name in ("", ".")) for name in leaf.path):
                raise SpecError(f"{what}: Minari cannot hold the key {leaf.path[-1]!r} of space {space}")
        self.space, self.what = space, what
        self.leaves = {ActionReader.key(leaf) if what == "action" else leaf.name: leaf for leaf in found}

    def fit(self, steps: TemporalDictTensor) -> SpaceColumns:
        """Returns the columns with the dtypes that Boxes have in trajectories.

        There float64 may have become float32.
        """
        dtypes = (find_array(steps, f"{self.what}/{name}").dtype for name in self.leaves)
        spaces_of_leaves = map(_with_dtype, [leaf.space for leaf in self.leaves.values()], dtypes)
        return SpaceColumns(_rebuild(self.space, spaces_of_leaves), self.what)

    def find(self, steps: TemporalDictTensor, name: str, prefix: str) -> np.ndarray:
        """Returns a column of trajectories, (B, T, ...), in the space's shape and dtype.

        Args:
            steps: the trajectories.
            name: of the column.
            prefix: the part of its key before the name.

        Raises:
            MissingKeyError, SpecError: it is missing, or has another shape or dtype.
        """
        leaf, array = self.leaves[name], find_array(steps, prefix + name)
        rows = leaf.shape if self.what == "action" else leaf.row_shape
        is_box = isinstance(leaf.space, spaces.Box)
        if array.shape[2:] not in (rows, leaf.shape) or (is_box and array.dtype != leaf.space.dtype):
            expected = ", ".join(["B", "T", *map(str, rows)])
            raise SpecError(
                f"to_minari: {prefix + name!r} is {array.shape} {array.dtype}, expected ({expected}) "
                f"{leaf.space.dtype}, for {leaf.space}"
            )
        return array.reshape(*array.shape[:2], *leaf.shape).astype(leaf.space.dtype, copy=False)

    def nest(self, arrays: Mapping[str, np.ndarray]) -> Any:
        """Puts the columns `observation/<name>` or `action/<name>` into the dicts and tuples of the space."""
        return nest(self.space, iter([arrays[f"{self.what}/{name}"] for name in self.leaves]))

    def from_minari(self, nested: Any, where: str, n: int) -> dict[str, np.ndarray]:
        """Takes the columns, (n, ...) each, from what Minari reads.

        It is the inverse of `nest` and `to_minari`.

        Raises:
            SpecError: a column is missing, or has another shape; the message begins with `where`.
        """
        found = {}
        for name, leaf in self.leaves.items():
            key = f"{self.what}s" + "".join(f"[{step!r}]" for step in leaf.path)
            try:
                array = np.asarray(leaf.pick(nested))
            except (LookupError, TypeError, ValueError) as error:
                raise SpecError(f"{where}: {key} cannot be read: {type(error).__name__}: {error}") from error
            rows = leaf.shape if self.what == "action" else leaf.row_shape
            _check_rows(where, key, array, (n, *leaf.shape))
            found[name] = array.reshape(n, *rows)
        return found


def _check_rows(where: str, key: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
    """Raises SpecError unless an array has the rows and size of a shape."""
    if array.shape[:1] != shape[:1] or array.size != math.prod(shape):
        raise SpecError(f"{where}: {key} is {array.shape} {array.dtype}, expected {shape}")


def find_array(steps: TemporalDictTensor, key: str) -> np.ndarray:
    """A column of trajectories, (B, T, ...).

    Raises:
        MissingKeyError, SpecError: it is missing, or of a dtype that numpy lacks.
    """
    if key not in steps:
        raise MissingKeyError(f"to_minari: no {key!r} in the trajectories, there are {sorted(steps.keys())}")
    return host_array(key, steps[key])


def _with_dtype(space: gymnasium.Space[Any], dtype: np.dtype[Any]) -> gymnasium.Space[Any]:
    if not isinstance(space, spaces.Box) or space.dtype == dtype:
        return space
    with np.errstate(over="ignore"):  # a bound beyond the range of this dtype becomes infinite
        return spaces.Box(space.low.astype(dtype), space.high.astype(dtype), dtype=dtype.type)


def _rebuild(space: gymnasium.Space[Any], leaves: Iterator[gymnasium.Space[Any]]) -> gymnasium.Space[Any]:
    """Rebuilds a Dict or Tuple with other leaves, given in order."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: _rebuild(inner, leaves) for key, inner in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([_rebuild(inner, leaves) for inner in space.spaces])
    return next(leaves)


@dataclass
class Episode:
    """The steps of an episode that are not written yet.

    Attributes:
        first: key -> value before the first step; empty once that is written.
        options: of its reset.
        number: its number in the dataset; None until a part of it is written.
        n_written: how many of its steps are written.
        following: the number of the step after the last one; `UNKNOWN` if it is not known.
        pieces: the data that follow each step, (n, ...) each: `observation/...`, `info/...`, `action/...` and the names
            of `STEPS`.
    """

    first: Arrays
    options: Arrays
    number: int | None = None
    n_written: int = 0
    following: int = UNKNOWN
    pieces: list[Arrays] = field(default_factory=list)

    @property
    def n_held(self) -> int:
        """The number of steps that are not written."""
        return sum(len(piece["rewards"]) for piece in self.pieces)

    @property
    def nbytes(self) -> int:
        """The bytes of the steps that are not written."""
        return sum(array.nbytes for piece in self.pieces for array in piece.values())

    @property
    def is_over(self) -> bool:
        """Whether the environment ended it."""
        last = self.pieces[-1]
        return bool(last["terminations"][-1] or last["truncations"][-1])

    def goes_on(self, before: Arrays, number: int) -> bool:
        """Whether a step follows the last one.

        Args:
            before: key -> value before the step. If a number is unknown, these must equal the values after the last
                step: they differ if a rollout is missing, unless the environment returns the same values again.
            number: of the step, see `TemporalDictTensor.first_steps`.
        """
        if UNKNOWN not in (number, self.following):
            return number == self.following
        last = self.pieces[-1]
        keys = [key for key in before if key.startswith("observation/")]
        return all(last[key][-1].tobytes() == before[key].tobytes() for key in keys)

    def truncate(self) -> None:
        """Marks the last step as truncated, unless the episode is over."""
        if not self.is_over:
            self.pieces[-1]["truncations"][-1] = True

    def take(self, n_left: int = 0) -> Arrays:
        """Removes and returns all steps but the last `n_left`.

        Observations and infos begin with those before the first step, unless they were written already.
        """
        joined = {key: np.concatenate([piece[key] for piece in self.pieces]) for key in self.pieces[0]}
        n = len(joined["rewards"]) - n_left
        self.pieces = [{key: array[n:].copy() for key, array in joined.items()}] if n_left else []
        self.n_written += n
        taken = {key: array[:n] for key, array in joined.items()}
        taken |= {key: np.concatenate([value[None], taken[key]]) for key, value in self.first.items()}
        self.first = {}
        return taken


class EpisodeJoiner:
    """Makes episodes of rollouts.

    Args:
        observations, actions: the columns of the spaces.
    """

    def __init__(self, observations: SpaceColumns, actions: SpaceColumns) -> None:
        self._observations, self._actions = observations, actions
        self._going: dict[int, Episode] = {}  # by environment

    @property
    def going(self) -> list[Episode]:
        """The episodes that go on, by environment."""
        return [self._going[env] for env in sorted(self._going)]

    def add(self, batch: Trajectories) -> Iterator[Episode]:
        """Adds the next steps of each environment; yields the episodes that are complete.

        Raises:
            MissingKeyError, SpecError: a key is missing or has the wrong shape; the message names it.
        """
        if not isinstance(batch, Trajectories):
            raise TypeError(f"to_minari: each batch must be Trajectories, got {type(batch).__name__}")
        if "env_index" not in batch.info:
            raise MissingKeyError("to_minari: no 'env_index' in info: it says which environment a row belongs to")
        first, following = self._columns(batch.trajectories)
        info = {key: host_array(key, value) for key, value in batch.info.items()}
        options = {key.removeprefix(OPTIONS): info[key] for key in info if key.startswith(OPTIONS)}
        done = following["terminations"] | following["truncations"]
        found = find_marks({key: batch.trajectories[key] for key in (STEP_START,) if key in batch.trajectories})
        starts = np.zeros_like(done) if found is None else found
        lengths = host_array("lengths", batch.lengths).tolist()
        numbers = batch.trajectories.first_steps
        firsts = [UNKNOWN] * len(lengths) if numbers is None else numbers.tolist()
        for row, (env, n, number) in enumerate(zip(info["env_index"].tolist(), lengths, firsts, strict=True)):
            cuts = np.flatnonzero(done[row, : max(0, n - 1)] | starts[row, 1 : max(1, n)]) + 1
            for start, stop in itertools.pairwise([0, *cuts.tolist(), n]) if n else ():
                before = {key: array[row, start].copy() for key, array in first.items()}
                episode = self._going.pop(env, None)
                at = UNKNOWN if number == UNKNOWN else number + start
                if episode is not None and (starts[row, start] or not episode.goes_on(before, at)):
                    yield episode
                    episode = None
                episode = episode or Episode(before, {key: np.array(values[row]) for key, values in options.items()})
                episode.pieces.append({key: array[row, start:stop].copy() for key, array in following.items()})
                episode.following = UNKNOWN if at == UNKNOWN else at + stop - start
                if episode.is_over:
                    yield episode
                else:
                    self._going[env] = episode

    def end(self) -> Iterator[Episode]:
        """Yields the episodes that go on, and forgets them."""
        going, self._going = self.going, {}
        yield from going

    def _columns(self, steps: TemporalDictTensor) -> tuple[Arrays, Arrays]:
        """Returns the data before each step, and the data that follow it.

        Before: observations and infos; (B, T, ...) both.
        """
        leaves = self._observations.leaves
        first: Arrays = {}
        following: Arrays = {}
        for found, prefix in ((first, "observation/"), (following, "_observation/")):
            found |= {f"observation/{name}": self._observations.find(steps, name, prefix) for name in leaves}
            names = [key.removeprefix(prefix) for key in steps if key.startswith(prefix + PREFIX)]
            found |= {name: find_array(steps, prefix + name) for name in names if name not in leaves}
        for name in self._actions.leaves:
            following[f"action/{name}"] = self._actions.find(steps, name, "action/")
        for name, key in STEPS.items():
            following[name] = find_array(steps, key)
            if following[name].ndim != 2:
                raise SpecError(f"to_minari: {key!r} is {following[name].shape}, expected (B, T)")
        for name in ("terminations", "truncations"):
            following[name] = following[name].astype(bool)
        return first, following
