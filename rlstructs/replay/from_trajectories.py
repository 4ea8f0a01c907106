"""What a batcher hands out, as rows for the lanes of a store."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlstructs.errors import MissingKeyError, SpecError
from rlstructs.replay.columns import Spec
from rlstructs.replay.roles import is_beside
from rlstructs.replay.values import host_array
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
from rlstructs.structures.trajectories import Trajectories

# Keys of trajectories that say where episodes end and begin.
STEP_ENDS = ("_observation/terminated", "_observation/truncated", "_observation/done")
STEP_START = "observation/initial_state"


def named_steps(names: Mapping[str, str], keys: Collection[str]) -> dict[str, str]:
    """Which key of trajectories is what here, where some of the keys are nested.

    Args:
        names: name here -> key; `observation/frame` stands for whatever an environment shows.
        keys: of the trajectories: of a Dict or Tuple of actions `action/action/left`, and of observations
            `observation/image`, beside what else there is.

    Returns:
        name here -> key; `actions` is then `actions/left` and so on. What is not there at all is left as it is.

    Example:
        >>> named_steps({"actions": "action/action"}, ["action/action/left", "action/action/right", "action/value"])
        {'actions/left': 'action/action/left', 'actions/right': 'action/action/right'}
    """
    found: dict[str, str] = {}
    for name, key in names.items():
        parent, _, last = key.rpartition("/")
        inside = [] if key in keys else _inside(key, keys)
        if not inside and key not in keys and last == "frame" and parent in ("observation", "_observation"):
            inside, key = [each for each in _inside(parent, keys) if not is_beside(each)], parent
        found |= {f"{name}/{each}": f"{key}/{each}" for each in inside} or {name: names[name]}
    return found


def _inside(key: str, keys: Collection[str]) -> list[str]:
    """What is nested under a key, by the rest of its name."""
    return [each[len(key) + 1 :] for each in keys if each.startswith(f"{key}/")]


def key_of(name: str, names: Mapping[str, str]) -> str:
    """The key of trajectories of a name, one that is nested too: of `actions/left` that of `actions` and `/left`."""
    first, slash, rest = name.partition("/")
    if name in names or first not in names:
        return names.get(name, name)
    key = names[first]
    return f"{key.removesuffix('/frame') if key.endswith('observation/frame') else key}{slash}{rest}"


@dataclass(frozen=True)
class Rows:
    """Rows that were given.

    Attributes:
        values: name -> (n, ...).
        n: how many.
        done: bool (n,), where episodes end; None for what the columns say that mean it.
        starts: bool (n,), where one begins whatever came before; None for nowhere.
    """

    values: dict[str, Any]
    n: int
    done: np.ndarray | None = None
    starts: np.ndarray | None = None


def _steps(steps: TemporalDictTensor, names: Mapping[str, str]) -> Rows:
    lead = (steps.n_elems(), steps.n_timesteps())
    lengths = host_array("lengths", steps.lengths)
    valid = np.arange(lead[1]) < lengths[:, None]
    inside = None if valid.all() else torch.from_numpy(valid)
    values = {}
    for name, key in names.items():
        tensor = steps[key].detach()
        values[name] = tensor.flatten(0, 1) if inside is None else tensor[inside.to(tensor.device)]
    ends = [_truth(steps, key) for key in STEP_ENDS if key in steps]
    starts = np.zeros(lead, bool)
    if STEP_START in steps:
        starts |= _truth(steps, STEP_START)
    starts[:, :1] = True  # what lies before it in the buffer is of another trajectory
    done = np.logical_or.reduce(ends)[valid] if ends else None
    return Rows(values, int(valid.sum()), done, starts[valid])


def _truth(steps: TemporalDictTensor, key: str) -> np.ndarray:
    """Where any number of a step is not zero, bool (B, T)."""
    marks = host_array(key, steps[key]) != 0
    return np.asarray(marks.any(axis=tuple(range(2, marks.ndim))))


def steps_of(trajectories: Any) -> Any:
    """The steps (B, T, ...) of a batch.

    Raises:
        TypeError: these are no `Trajectories`.
    """
    if not isinstance(trajectories, Trajectories):
        raise TypeError(f"add_trajectories: needs Trajectories, got {type(trajectories).__name__}")
    return trajectories.trajectories


def require_keys(steps: Any, keys: Iterable[str]) -> None:
    """Raises MissingKeyError unless the steps of a batch have all of these."""
    if absent := sorted(set(keys) - set(steps.keys())):
        found = sorted(steps.keys())
        raise MissingKeyError(f"add_trajectories: no {absent} in the trajectories, there are {found}")


NAMES = {
    "observations": "observation/frame",
    "next_observations": "_observation/frame",
    "actions": "action/action",
    "rewards": "_observation/reward",
    "terminated": "_observation/terminated",
    "truncated": "_observation/truncated",
}


def lanes_of(batch: Trajectories, n_lanes: int, owner: str, limit: str = "the memory's num_envs") -> np.ndarray:
    """The lane of each trajectory, int64 (B,): its `env_index`.

    Args:
        batch: trajectories.
        n_lanes: how many lanes there are.
        owner: begins the messages of errors.
        limit: what `n_lanes` is, for them.

    Raises:
        MissingKeyError, SpecError: there is no `env_index`, or one that is not in [0, n_lanes).
    """
    if "env_index" not in batch.info:
        raise MissingKeyError(f"{owner}: no 'env_index' in the trajectories' info: it says which lane a row is")
    lanes = host_array("env_index", batch.info["env_index"]).reshape(-1).astype(np.int64)
    if lanes.size and (lanes.min() < 0 or lanes.max() >= n_lanes):
        wrong = lanes.max() if lanes.min() >= 0 else lanes.min()
        raise SpecError(f"{owner}: env_index {wrong} is not in [0, {n_lanes}), {limit}")
    return lanes


def zero_padding(values: np.ndarray, spec: Spec, lengths: np.ndarray) -> np.ndarray:
    """Integers (B, T, ...) that another dtype is to take, with zeros as padding: poison may not fit there."""
    if values.dtype == spec.dtype or values.dtype.kind not in "iu":
        return values
    inside = np.arange(values.shape[1]) < lengths.reshape(-1, 1)
    return np.where(inside.reshape(*inside.shape, *[1] * (values.ndim - 2)), values, values.dtype.type(0))
