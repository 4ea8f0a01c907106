"""Turns trajectories into steps for every interface.

Steps have columns, lanes, lengths, and where episodes end and begin.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from rlstructs.errors import MissingKeyError, SpecError
from rlstructs.replay.intake.arrays import find_marks, host_array
from rlstructs.replay.intake.roles import is_beside
from rlstructs.replay.rows.blocks import as_slice, rounds
from rlstructs.replay.rows.spec import Spec
from rlstructs.replay.rows.store import Storage
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
from rlstructs.structures.trajectories import Trajectories

# Keys of trajectories that say where episodes end and begin.
STEP_ENDS = ("_observation/terminated", "_observation/truncated", "_observation/done")
STEP_START = "observation/initial_state"
# Column of the number of updates that the agent of a step had had; its key is one of the trajectories' info.
POLICY_VERSION = "policy_version"
# Column -> key of trajectories, in the words of skrl and rlberry.
NAMES = {
    "observations": "observation/frame",
    "next_observations": "_observation/frame",
    "actions": "action/action",
    "rewards": "_observation/reward",
    "terminated": "_observation/terminated",
    "truncated": "_observation/truncated",
}
# What the critic sees beside the observation of the policy, in the words of skrl.
STATES = {"states": "observation/state", "next_states": "_observation/state"}
# Columns and their keys, or a function that finds them among the given keys.
Names = Mapping[str, str] | Callable[[Collection[str]], Mapping[str, str]]


def find_names(keys: Collection[str]) -> dict[str, str]:
    """Returns the usual columns and their keys.

    They are `NAMES`, and `STATES` too if environments show a `state` beside a `frame`.
    """
    shown = ("observation/frame", *STATES.values())
    return NAMES | (STATES if all(key in keys or _inside(key, keys) for key in shown) else {})


def add_version(names: Mapping[str, str], keys: Collection[str], columns: Collection[str]) -> dict[str, str]:
    """Adds the policy version to names if there is a column for it.

    These keys must have it, too.
    """
    is_known = POLICY_VERSION in columns and POLICY_VERSION in keys
    return {**names, **({POLICY_VERSION: POLICY_VERSION} if is_known else {})}


def named_steps(names: Mapping[str, str], keys: Collection[str]) -> dict[str, str]:
    """Replaces keys that are nested in the trajectories by the keys below them.

    Args:
        names: name -> key; `observation/frame` stands for any observation.
        keys: of the trajectories, among them `action/action/left` for a Dict or Tuple of actions, and
            `observation/image` for one of observations.

    Returns:
        Name -> key; `actions` becomes `actions/left` and so on. A key that is absent stays.

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
    """Returns the names of keys nested under a key, without the key."""
    return [each[len(key) + 1 :] for each in keys if each.startswith(f"{key}/")]


def key_of(name: str, names: Mapping[str, str]) -> str:
    """Returns the key of trajectories for a name.

    For a nested name, `actions/left`, it is the key of `actions` with `/left`.
    """
    first, slash, rest = name.partition("/")
    if name in names or first not in names:
        return names.get(name, name)
    key = names[first]
    return f"{key.removesuffix('/frame') if key.endswith('observation/frame') else key}{slash}{rest}"


@dataclass(frozen=True)
class Steps:
    """The steps of a batch, and where they go.

    Attributes:
        values: column -> (B, T, ...).
        n_timesteps: T.
        lengths: int64 (B,), how many of the T steps are valid.
        lanes: int64 (B,), the lane of each trajectory; those of one lane follow one another.
        done: bool (B, T), where episodes end; None if no key says so.
        starts: bool (B, T), where one begins even if the one before has not ended; None for nowhere.
        first_steps: int64 (B,), see `TemporalDictTensor.first_steps`; None if none is known.
    """

    values: dict[str, Any]
    n_timesteps: int
    lengths: np.ndarray
    lanes: np.ndarray
    done: np.ndarray | None = None
    starts: np.ndarray | None = None
    first_steps: np.ndarray | None = None

    def valid(self) -> np.ndarray:
        """Marks valid steps, bool (B, T)."""
        return np.asarray(np.arange(self.n_timesteps) < self.lengths[:, None])

    def at(self, index: Any) -> Steps:
        """Returns some of the trajectories."""
        values = {name: each[index] for name, each in self.values.items()}
        marks = (None if each is None else each[index] for each in (self.done, self.starts, self.first_steps))
        return Steps(values, self.n_timesteps, self.lengths[index], self.lanes[index], *marks)

    def after(self, storage: Storage) -> Steps:
        """Returns steps with an episode start at each gap of a lane.

        A gap is where a trajectory does not follow the rows of its lane.
        """
        if self.first_steps is None:
            return self
        found = storage.counters.continuity.find_gaps(self.lanes, self.first_steps, self.lengths, storage.ring)
        if not found.any():
            return self
        starts = np.zeros((len(self.lengths), self.n_timesteps), bool) if self.starts is None else self.starts.copy()
        starts[:, 0] |= found
        return replace(self, starts=starts)

    def record(self, storage: Storage) -> None:
        """Records in a store which steps of their environments were written."""
        if self.first_steps is not None:
            with storage.lock:
                storage.counters.continuity.record(self.lanes, self.first_steps, self.lengths, storage.ring)

    def one_after_another(self) -> Steps:
        """Joins all valid steps to one trajectory (1, n, ...) of lane 0.

        An episode starts where each of the trajectories began.
        """
        inside = self.valid()
        starts = np.zeros(inside.shape, bool) if self.starts is None else self.starts.copy()
        starts[:, :1] = True  # the row before it in the buffer belongs to another trajectory
        marks = None if inside.all() else torch.from_numpy(inside)
        values = {
            name: (each.flatten(0, 1) if marks is None else each[marks.to(each.device)])[None]
            for name, each in self.values.items()
        }
        n, done = int(inside.sum()), None if self.done is None else self.done[inside][None]
        return Steps(values, n, np.array([n]), np.zeros(1, np.int64), done, starts[inside][None])

    def for_columns(self, specs: Mapping[str, Spec]) -> dict[str, Any]:
        """Returns the values for columns of these specs.

        Where values have to be cast, padding becomes zero, which fits every dtype.
        """
        inside, values = self.valid(), dict(self.values)
        for name in () if inside.all() else values:
            spec, each = specs.get(name), values[name]
            if not (spec is None or spec.is_bfloat16 or spec.dtype.name == str(each.dtype).removeprefix("torch.")):
                array = host_array(name, each)
                marks = inside.reshape(*inside.shape, *[1] * (array.ndim - 2))
                values[name] = np.where(marks, array, array.dtype.type(0))
        return values

    def with_ends(self, done: np.ndarray | None) -> Steps:
        """Adds ends of episodes: bool (B, T), or None for no more."""
        both = [marks for marks in (self.done, done) if marks is not None]
        return replace(self, done=np.logical_or.reduce(both) if both else None)

    def write(self, block: Mapping[str, Any], write: Callable[..., None]) -> None:
        """Writes these steps.

        Args:
            block: column -> (B, T, ...), the converted values.
            write: takes the arguments of `Storage.write`; it is called again for a lane that occurs again.
        """
        marks = replace(self, values={})
        for part in rounds(self.lanes):
            steps = marks.at(part)
            is_full = bool((steps.lengths == self.n_timesteps).all())
            rows, lengths = {name: each[part] for name, each in block.items()}, None if is_full else steps.lengths
            write(rows, as_slice(steps.lanes), lengths=lengths, done=steps.done, starts=steps.starts)


def take_trajectories(
    trajectories: Any,
    names: Names,
    n_lanes: int | None = None,
    owner: str = "add_trajectories",
    limit: str = "the lanes of this buffer",
) -> Steps:
    """Takes the steps of a batch of `RL_Batcher.get`, without empty trajectories.

    Args:
        trajectories: the batch.
        names: column -> key, as for `named_steps`.
        n_lanes: number of lanes, of which `env_index` names one; None to append one trajectory after another to a
            single lane.
        owner: caller, for messages.
        limit: meaning of `n_lanes`, for messages.

    Raises:
        TypeError: the batch is no `Trajectories`.
        MissingKeyError, SpecError: a key is missing, or an `env_index` is not in [0, n_lanes).
    """
    if not isinstance(trajectories, Trajectories):
        raise TypeError(f"{owner}: needs Trajectories, got {type(trajectories).__name__}")
    steps, beside = trajectories.trajectories, _find_versions(trajectories)
    keys = [*steps.keys(), *beside]
    named = named_steps(names(keys) if callable(names) else names, keys)
    if absent := sorted(set(named.values()) - set(keys)):
        raise MissingKeyError(f"{owner}: no {absent} in the trajectories, there are {sorted(keys)}")
    lanes = None if n_lanes is None else _find_lanes(trajectories, n_lanes, owner, limit)
    return take_steps(steps, named, lanes, beside)


def _find_versions(trajectories: Trajectories) -> dict[str, torch.Tensor]:
    """Finds the policy version of each step, (B, T), by its key.

    Empty if the info has none, or if the steps have it themselves.
    """
    if POLICY_VERSION in trajectories.trajectories:
        return {}
    n_timesteps, found = trajectories.trajectories.n_timesteps(), trajectories.info.find([POLICY_VERSION])
    return {key: versions[:, None].expand(-1, n_timesteps) for key, versions in found.items()}


def take_steps(
    steps: TemporalDictTensor,
    names: Mapping[str, str],
    lanes: np.ndarray | None = None,
    beside: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Steps:
    """Takes trajectories of existing keys to lanes (B,).

    `beside` holds further keys, (B, T).
    """
    lengths = host_array("lengths", steps.lengths)
    first_steps = None if steps.first_steps is None else host_array("first_steps", steps.first_steps)
    # Not all of them: where steps are leased, some would be copied for nothing.
    tensors = {**steps.find({*names.values(), *STEP_ENDS, STEP_START}), **beside}
    found = Steps(
        {name: tensors[key].detach() for name, key in names.items()},
        steps.n_timesteps(),
        lengths,
        np.zeros(len(lengths), np.int64) if lanes is None else lanes,
        find_marks({key: tensors[key] for key in STEP_ENDS if key in tensors}),
        find_marks({key: tensors[key] for key in (STEP_START,) if key in tensors}),
        first_steps,
    )
    if lanes is None:
        return found.one_after_another()
    return found if lengths.all() else found.at(np.flatnonzero(lengths))


def _find_lanes(batch: Trajectories, n_lanes: int, owner: str, limit: str) -> np.ndarray:
    """Finds the lane of each trajectory, int64 (B,); see `take_trajectories`."""
    numbers = batch.info.find(["env_index"])
    if not numbers:
        raise MissingKeyError(f"{owner}: no 'env_index' in the trajectories' info: it says which lane a row is")
    lanes = host_array("env_index", numbers["env_index"]).reshape(-1).astype(np.int64)
    if lanes.size and (lanes.min() < 0 or lanes.max() >= n_lanes):
        wrong = lanes.max() if lanes.min() >= 0 else lanes.min()
        raise SpecError(f"{owner}: env_index {wrong} is not in [0, {n_lanes}), {limit}")
    return lanes
