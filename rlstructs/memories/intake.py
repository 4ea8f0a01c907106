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
from rlstructs.replay.columns import Columns, Spec
from rlstructs.replay.from_trajectories import Steps
from rlstructs.replay.roles import ENDS
from rlstructs.replay.step_writer import StepWriter
from rlstructs.replay.store import Storage
from rlstructs.replay.values import encoded, find_marks, host_array, host_arrays, to_bits

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
        first = given.get("observations")
        if first is None:
            first = next((value for value in given.values() if value is not None), None)
        n = len(first) if getattr(first, "ndim", 0) > 1 else 0  # type: ignore[arg-type]
        lanes = None if n == num_envs else self._find_behind(n)
        if n != num_envs and lanes is None:
            return False
        convert, live = self._convert_value, tensors.exposed
        return self._step_writer.write(given, lanes, convert, fills=True, live=live) is not None

    def _find_behind(self, n: int) -> np.ndarray | None:
        """The next n environments of the current row; None if `add_rows` has to find them."""
        head = self._tensors.storage.ring.head
        if not 0 < n < head.size:
            return None
        behind = np.flatnonzero(head == head.min())
        return behind[:n] if n <= behind.size else None

    def _convert_value(self, name: str, value: Any, spec: Spec) -> Any:
        if spec.is_bfloat16 and isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16:
            array = value.detach().cpu().view(torch.int16).numpy()
        else:
            array = encoded(name, self._tensors.convert_values(name, value, self._strict), spec)
        return array[:, None] if array.ndim == 1 and spec.shape == (1,) else array

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
                raise SpecError(f"add_samples: {name!r} has shape {tuple(array.shape)}, needed is {rows + spec.shape}")
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
        name = _choose_first(values)
        array, shape = values[name], self._tensors.spec_of(name).shape if name in self._tensors.dtypes else None
        if shape is None and array.ndim > 1:
            return len(array)
        n_data_axes = 1 if shape is None else len(shape)
        if array.ndim == n_data_axes + 1 or (array.ndim == 1 and shape == (1,) and len(array) != 1):
            return len(array)
        if array.ndim == n_data_axes:
            return None
        raise SpecError(f"add_samples: {name!r} has shape {tuple(array.shape)}, needed is (n, *data) or (*data)")

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
    return "observations" if "observations" in values else next(iter(values))
