"""From what a batcher hands out to the rows of a memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from rlstructs.errors import MissingKeyError, SpecError
from rlstructs.memories.names import check_name, ends_of
from rlstructs.memories.tensors import spec_of
from rlstructs.replay.columns import Spec
from rlstructs.replay.trajectories import STEP_ENDS, STEP_START, as_slice, named_steps, rounds
from rlstructs.replay.values import encoded, host_array
from rlstructs.structures.trajectories import Trajectories

if TYPE_CHECKING:
    from rlstructs.memories.base import Memory

NAMES = {
    "observations": "observation/frame",
    "next_observations": "_observation/frame",
    "actions": "action/action",
    "rewards": "_observation/reward",
    "terminated": "_observation/terminated",
    "truncated": "_observation/truncated",
}


def add(memory: Memory, batch: Trajectories, names: Mapping[str, str] | None) -> None:
    """Appends the valid steps of a batch, whole or not at all."""
    if not isinstance(batch, Trajectories):
        raise TypeError(f"add_trajectories: needs Trajectories, got {type(batch).__name__}")
    steps = batch.trajectories
    names = named_steps(NAMES if names is None else names, list(steps.keys()))
    for key in names.values():
        if key not in steps:
            raise MissingKeyError(f"add_trajectories: no {key!r} in the trajectories, there are {sorted(steps.keys())}")
    lanes, lengths = lanes_of(batch, memory.num_envs, "add_trajectories"), host_array("lengths", steps.lengths)
    shapes = {name: _row_shape(memory, name, tuple(steps[key].shape)) for name, key in names.items()}
    lead = (len(lanes), steps.n_timesteps())
    columns, block, missing = memory._storage.columns, {}, {}
    for name, key in names.items():
        if name in memory._dtypes:
            spec = memory._spec(name)
        else:
            check_name(name)
            missing[name] = memory._dtype_named(name, steps[key].dtype)
            spec = spec_of(memory.framework, missing[name], shapes[name])
        own = columns.own(steps[key], spec)
        rows = encoded(name, _padded(host_array(name, steps[key]), spec, lengths) if own is None else own, spec)
        block[name] = columns.converted(name, rows.reshape(*lead, *shapes[name]), spec)
    memory._check_room("add_trajectories", [spec_of(memory.framework, missing[name], shapes[name]) for name in missing])
    for name, dtype in missing.items():
        memory._add(name, dtype, shapes[name])
    ends = [host_array(key, steps[key]).astype(bool) for key in STEP_ENDS if key in steps]
    done = np.logical_or.reduce([*ends, np.zeros(lead, bool) if (own := ends_of(block, lead)) is None else own])
    starts = host_array(STEP_START, steps[STEP_START]).astype(bool) if STEP_START in steps else None
    for rows in rounds(lanes):
        every = isinstance(rows, slice)
        part = lengths if every else lengths[rows]
        memory._write(
            block if every else {name: array[rows] for name, array in block.items()},
            as_slice(lanes if every else lanes[rows]),
            done if every else done[rows],
            lengths=None if (part == lead[1]).all() else part,
            starts=None if starts is None else starts if every else starts[rows],
        )


def lanes_of(batch: Trajectories, n_lanes: int, owner: str) -> np.ndarray:
    """Which environment each row is of, int64 (B,).

    Raises:
        MissingKeyError, SpecError: that is not said, or it is none of `n_lanes`.
    """
    if "env_index" not in batch.info:
        raise MissingKeyError(f"{owner}: no 'env_index' in the trajectories' info: it says which lane a row is")
    lanes = host_array("env_index", batch.info["env_index"]).reshape(-1).astype(np.int64)
    if lanes.size and (lanes.min() < 0 or lanes.max() >= n_lanes):
        wrong = lanes.max() if lanes.min() >= 0 else lanes.min()
        raise SpecError(f"{owner}: env_index {wrong} is not in [0, {n_lanes}), the memory's num_envs")
    return lanes


def _padded(values: np.ndarray, spec: Spec, lengths: np.ndarray) -> np.ndarray:
    """Integers (B, T, ...) that another dtype is to take, with zeros as padding: poison may not fit there."""
    if values.dtype == spec.dtype or values.dtype.kind not in "iu":
        return values
    inside = np.arange(values.shape[1]) < lengths.reshape(-1, 1)
    return np.where(inside.reshape(*inside.shape, *[1] * (values.ndim - 2)), values, values.dtype.type(0))


def _row_shape(memory: Memory, name: str, given: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a row of this tensor: its own, if it has as many numbers; else that of the values."""
    found = given[2:] or (1,)
    if name not in memory._dtypes:
        return found
    shape = memory._spec(name).shape
    if np.prod(found, dtype=int) != np.prod(shape, dtype=int):
        raise SpecError(f"add_trajectories: {name!r} has rows of shape {given[2:]}, the tensor's are {shape}")
    return shape
