"""From what a batcher hands out to the rows of a memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from rlstructs.errors import MissingKeyError, SpecError
from rlstructs.memories.names import check_name, ends_of
from rlstructs.memories.tensors import spec_of
from rlstructs.replay.blocks import as_slice, rounds
from rlstructs.replay.from_trajectories import NAMES, STEP_ENDS, STEP_START, _padded, lanes_of, named_steps
from rlstructs.replay.values import encoded, host_array
from rlstructs.structures.trajectories import Trajectories

if TYPE_CHECKING:
    from rlstructs.memories.base import Memory

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


def _row_shape(memory: Memory, name: str, given: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a row of this tensor: its own, if it has as many numbers; else that of the values."""
    found = given[2:] or (1,)
    if name not in memory._dtypes:
        return found
    shape = memory._spec(name).shape
    if np.prod(found, dtype=int) != np.prod(shape, dtype=int):
        raise SpecError(f"add_trajectories: {name!r} has rows of shape {given[2:]}, the tensor's are {shape}")
    return shape
