"""`from_minari` and `iterate_minari`: trajectories of a dataset of Minari."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import minari
import numpy as np
import torch

from rlstructs.checks import check_count, check_names
from rlstructs.envs.env_infos import PREFIX
from rlstructs.errors import MissingKeyError, SpecError
from rlstructs.integrations.minari.episodes import STEPS, Arrays, SpaceColumns, check_rows
from rlstructs.replay.intake.trajectories import STEP_START
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
from rlstructs.structures.trajectories import Trajectories


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
        check_rows(where, name, array, (n,))
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
