"""`Intake`: checks rows and trajectories, and appends them to the tensors of a memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from rlstructs.errors import MissingKeyError, SpecError
from rlstructs.frameworks.dtypes import dtype_name
from rlstructs.memories.tensors import Tensors, find_ends
from rlstructs.replay.intake.arrays import encoded, find_marks, host_array, host_arrays, to_bits
from rlstructs.replay.intake.roles import ENDS
from rlstructs.replay.intake.trajectories import Steps
from rlstructs.replay.rows.columns import Columns, Spec
from rlstructs.replay.rows.lanes import InStep
from rlstructs.replay.rows.step_writer import StepWriter
from rlstructs.replay.rows.store import Storage

# A function with the arguments of `Storage.write`.
Write = Callable[..., None]


class Intake:
    """Appends rows to tensors.

    Args:
        tensors: the tensors.
    """

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._step_writer = StepWriter(tensors.storage, ENDS)
        self._strict = False
        self._lead: tuple[int, ...] = ()  # of the values that are converted

    def count_laps(self) -> int:
        """Counts how often every environment has filled all its rows."""
        return self._find_step().count_least() // self._tensors.lead[0]

    def _find_step(self) -> InStep:
        return self._step_writer.find_step() or InStep(self._tensors.storage.ring)

    def write_quickly(self, given: Mapping[str, Any], strict: bool) -> bool:
        """Writes a row of each environment, or of the next ones; returns False if `add_rows` has to do it.

        skrl's agents give values for tensors that do not exist, and omit those that they compute later.
        """
        tensors, num_envs = self._tensors, self._tensors.lead[1]
        if tensors.planned:  # these are not allocated yet
            return False
        self._strict = strict
        if strict and any(value is None or name not in tensors.dtypes for name, value in given.items()):
            return False
        try:
            n = self._count_rows(given)
        except (AttributeError, SpecError, StopIteration):  # it is no array, or does not fit
            return False
        lanes, n_timesteps, n_lanes = None, 1, n or 1
        if n is None or 0 < n < num_envs:
            lanes = None if num_envs == 1 else self._find_step().next_lanes(n_lanes)
            if lanes is None and num_envs > 1:
                return False
        elif num_envs == 1 and 0 < n <= tensors.lead[0]:
            n_timesteps = n
        elif n != num_envs:
            return False
        self._lead = (n_lanes,)
        convert, live, is_row = self._convert_value, tensors.exposed, n is None
        return (
            self._step_writer.write(
                given, lanes, convert, n_timesteps=n_timesteps, is_row=is_row, fills=True, live=live
            )
            is not None
        )

    def _convert_value(self, name: str, value: Any, spec: Spec) -> Any:
        if spec.is_bfloat16 and isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16:
            array = value.detach().cpu().view(torch.int16).numpy()
        else:
            array = encoded(name, self._tensors.convert_values(name, value, self._strict), spec)
        return array[..., None] if array.shape == self._lead and spec.shape == (1,) else array

    def add_rows(self, given: Mapping[str, Any], strict: bool, write: Write) -> None:
        """Appends one row for all or some environments, or several rows for one; see `Memory.add_samples`."""
        values = self._check_given(given, strict)
        n = self._count_rows(values) if values else 0
        if n == 0:
            return
        lanes, lead = self._choose_lanes(1 if n is None else n)
        specs, rows, block = self._tensors.allocate().columns.specs, () if n is None else (n,), {}
        for name, array in values.items():
            if name not in specs:
                continue
            spec = specs[name]
            if array.shape != rows + spec.shape and not (spec.shape == (1,) and array.shape == rows):
                raise SpecError(f"add_samples: {name!r} has shape {tuple(array.shape)}, expected {rows + spec.shape}")
            block[name] = encoded(name, array, spec).reshape(lead + spec.shape)
        block |= self._read_next_rows(self._tensors.exposed - block.keys(), lanes, lead[1])
        write(block, lanes, done=find_ends(block))

    def _check_given(self, given: Mapping[str, Any], strict: bool) -> dict[str, Any]:
        """Converts the given tensors to arrays; returns none if this memory has none of them."""
        if not given:
            raise SpecError("add_samples: needs at least one tensor, got none")
        dtypes, values = self._tensors.dtypes, {name: value for name, value in given.items() if value is not None}
        if strict:
            if unknown := sorted(set(given) - set(dtypes)):
                raise MissingKeyError(f"add_samples: no tensor(s) {unknown}, there are {sorted(dtypes)}")
            if nothing := sorted(set(given) - set(values)):
                raise SpecError(f"add_samples: {nothing} are None")
        if not values and not dtypes.keys().isdisjoint(given):
            raise SpecError("add_samples: every tensor is None")
        if dtypes.keys().isdisjoint(values):
            return {}
        # Values without a tensor are ignored, unless their shape gives the number of rows.
        first = _choose_first(values)
        convert = self._tensors.convert_values
        return {name: convert(name, value, strict) for name, value in values.items() if name in dtypes or name == first}

    def _count_rows(self, values: Mapping[str, Any]) -> int | None:
        """Counts the given rows; returns None for a single row without an axis for rows."""
        name = "observations"
        if values.get(name) is None:
            name = _choose_first(values)
        shape, tensors = values[name].shape, self._tensors
        spec = tensors.planned.get(name) or tensors.storage.columns.specs.get(name)
        n_axes, n_data_axes = len(shape), 1 if spec is None else len(spec.shape)
        if n_axes == n_data_axes + 1 or (spec is None and n_axes > 1):
            return int(shape[0])
        if n_axes == 1 and spec is not None and spec.shape == (1,) and shape[0] != 1:
            return int(shape[0])
        if n_axes == n_data_axes:
            return None
        raise SpecError(f"add_samples: {name!r} has shape {tuple(shape)}, expected (n, *data) or (*data)")

    def _choose_lanes(self, n: int) -> tuple[Any, tuple[int, int]]:
        """Chooses the environments that take `n` rows; returns them and the leading axes (environments, rows)."""
        num_envs = self._tensors.lead[1]
        if n == num_envs:
            return slice(None), (n, 1)
        if num_envs == 1:
            return slice(None), (1, n)
        if n > num_envs:
            raise SpecError(f"add_samples: {n} rows are more than the {num_envs} environments")
        head = self._tensors.storage.ring.head
        behind = np.flatnonzero(head == head.min())
        if n > len(behind):
            raise SpecError(f"add_samples: {n} rows do not fit, {len(behind)} environments are left in this row")
        return behind[:n], (n, 1)

    def _read_next_rows(self, names: Iterable[str], lanes: Any, n_timesteps: int) -> dict[str, Any]:
        """Reads the next rows of these environments, name -> (n, n_timesteps, *data)."""
        (memory_size, num_envs), storage = self._tensors.lead, self._tensors.storage
        columns, heads = storage.columns, storage.ring.head[lanes]
        first = int(heads[0]) % memory_size
        end = first + n_timesteps
        if isinstance(lanes, slice) and end <= memory_size and (heads == heads[0]).all():
            return {name: columns.cells[name][:, first:end] for name in names}  # without sending an index to a GPU
        steps, names = heads[:, None] + np.arange(n_timesteps), list(names)
        rows = columns.at_steps(np.arange(num_envs)[lanes][:, None], steps)
        return dict(zip(names, columns.gather(names, rows), strict=True))

    def add_steps(self, steps: Steps, write: Write) -> None:
        """Appends steps and creates missing tensors.

        Raises:
            SpecError, OutOfMemoryError: a tensor does not fit; nothing changes.
        """
        tensors = self._tensors
        columns = tensors.storage.columns
        specs, missing = {**tensors.planned, **columns.specs}, {}
        for name, values in steps.values.items():
            if name not in specs:
                missing[name] = tensors.convert_dtype(name, dtype_name(values.dtype), by_name=True)
                specs[name] = tensors.make_spec(missing[name], tuple(values.shape[2:]) or (1,))
        block = convert_steps(steps, columns, specs)
        if missing:
            tensors.check_room("add_trajectories", [specs[name] for name in missing])
        for name, dtype in missing.items():
            tensors.plan(name, dtype, specs[name].shape)
        if tensors.planned:
            tensors.allocate()
        write_steps(block, steps, tensors.storage, write)


def convert_steps(steps: Steps, columns: Columns, specs: Mapping[str, Spec]) -> dict[str, Any]:
    """Converts the values of steps for columns of these specs, of which some need not exist yet.

    Raises:
        SpecError: values do not fit.
    """
    lead, given = (len(steps.lengths), steps.n_timesteps), steps.for_columns(specs)
    block = host_arrays(given) if columns.on_host else {}
    for name, values in given.items():
        shape, spec = tuple(values.shape[2:]), specs[name]
        if math.prod(shape) != math.prod(spec.shape):
            raise SpecError(f"add_trajectories: {name!r} has rows of shape {shape}, the tensor's are {spec.shape}")
        rows = block[name] if columns.on_host else columns.own(values, spec)
        rows = host_array(name, values) if rows is None else rows
        rows = to_bits(name, rows) if spec.is_bfloat16 and isinstance(rows, np.ndarray) else rows
        rows = rows.reshape(*lead, *spec.shape)
        is_ready = columns.on_host and rows.dtype == spec.dtype  # as nearly always
        block[name] = rows if is_ready else columns.converted(name, rows, spec)
    return block


def write_steps(block: Mapping[str, Any], steps: Steps, storage: Storage, write: Write) -> None:
    """Writes steps to a store by `write`; `block` holds their values as columns take them."""
    ends = find_marks({name: block[name] for name in ENDS if name in block})
    steps.after(storage).with_ends(ends).write(block, write)
    steps.record(storage)


def _choose_first(values: Mapping[str, Any]) -> str:
    """Returns the name of the tensor whose shape says how many rows are given."""
    if values.get("observations") is not None:
        return "observations"
    return next(name for name, value in values.items() if value is not None)
