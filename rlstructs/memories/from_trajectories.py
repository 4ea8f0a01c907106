"""Puts the steps of trajectories into the tensors of a memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rlstructs.errors import SpecError
from rlstructs.memories.names import check_name, find_ends
from rlstructs.memories.tensors import spec_of
from rlstructs.replay.columns import Spec
from rlstructs.replay.from_trajectories import Steps
from rlstructs.replay.values import encoded, host_array

if TYPE_CHECKING:
    from rlstructs.memories.memory import Memory


def add_steps(memory: Memory, steps: Steps) -> None:
    """Appends steps, and creates tensors that are missing: all, or nothing if one does not fit.

    Raises:
        SpecError, OutOfMemoryError: one does not fit.
    """
    columns, lead = memory._storage.columns, steps.valid().shape
    block: dict[str, Any] = {}
    missing: dict[str, tuple[Any, Spec]] = {}
    for name, values in steps.values.items():
        shape = _row_shape(memory, name, tuple(values.shape))
        if name in memory._dtypes:
            spec = memory._spec(name)
        else:
            check_name(name)
            dtype = memory._dtype_named(name, values.dtype)
            spec = spec_of(memory.framework, dtype, shape)
            missing[name] = dtype, spec
        given = steps.for_column(name, spec)
        own = columns.own(given, spec)
        rows = encoded(name, host_array(name, given), spec) if own is None else own
        block[name] = columns.converted(name, rows.reshape(*lead, *shape), spec)
    memory._check_room("add_trajectories", [spec for _, spec in missing.values()])
    for name, (dtype, spec) in missing.items():
        memory._plan_tensor(name, dtype, spec.shape)
    steps.with_ends(find_ends(block)).write(block, memory._write)


def _row_shape(memory: Memory, name: str, given: tuple[int, ...]) -> tuple[int, ...]:
    """The row shape of a tensor, or that of the given values if the tensor is new.

    Raises:
        SpecError: the numbers per row differ.
    """
    found = given[2:] or (1,)
    if name not in memory._dtypes:
        return found
    shape = memory._spec(name).shape
    if np.prod(found, dtype=int) != np.prod(shape, dtype=int):
        raise SpecError(f"add_trajectories: {name!r} has rows of shape {given[2:]}, the tensor's are {shape}")
    return shape
