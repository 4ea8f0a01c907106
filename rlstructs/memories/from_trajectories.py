"""Puts the steps of trajectories into the tensors of a memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

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
    specs, block = {**columns.specs, **memory._planned}, {}
    missing: dict[str, tuple[Any, Spec]] = {}
    for name, values in steps.values.items():
        if name in specs:
            spec = _check_rows(name, tuple(values.shape[2:]), specs[name])
        else:
            check_name(name)
            dtype = memory._dtype_named(name, values.dtype)
            spec = spec_of(memory.framework, dtype, tuple(values.shape[2:]) or (1,))
            missing[name] = dtype, spec
        given = steps.for_column(name, spec)
        own = columns.own(given, spec)
        rows = encoded(name, host_array(name, given), spec) if own is None else own
        block[name] = columns.converted(name, rows.reshape(*lead, *spec.shape), spec)
    memory._check_room("add_trajectories", [spec for _, spec in missing.values()])
    for name, (dtype, spec) in missing.items():
        memory._plan_tensor(name, dtype, spec.shape)
    steps.with_ends(find_ends(block)).write(block, memory._write)


def _check_rows(name: str, given: tuple[int, ...], spec: Spec) -> Spec:
    """Returns the spec of a tensor; raises SpecError if rows of this shape have another number of numbers."""
    if math.prod(given) != math.prod(spec.shape):
        raise SpecError(f"add_trajectories: {name!r} has rows of shape {given}, the tensor's are {spec.shape}")
    return spec
