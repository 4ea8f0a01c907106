"""`TensorIntake`: checks rows and trajectories, and appends them to the tensors of a memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rlstructs.errors import MissingKeyError, SpecError
from rlstructs.frameworks.torch import dtype_name
from rlstructs.memories.tensors import Tensors, find_ends
from rlstructs.replay.intake.arrays import encoded
from rlstructs.replay.intake.intake import FILL, GROW, Intake
from rlstructs.replay.intake.roles import ENDS
from rlstructs.replay.intake.trajectories import POLICY_VERSION, find_names
from rlstructs.replay.rows.blocks import InStep
from rlstructs.replay.rows.spec import Spec
from rlstructs.replay.rows.step_writer import StepWriter
from rlstructs.replay.rows.store import Storage

# A function with the arguments of `Storage.write`.
Write = Callable[..., None]


class LaneIntake(Intake):
    """Appends steps to the store of a memory, in any process.

    All tensors must exist. It works without the memory's framework.

    Args:
        storage: the store.
    """

    lane_limit = "the memory's num_envs"

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage, "Memory", GROW, FILL)
        self.takes_any_environment = False  # an environment has rows of its own

    def prepare_columns(self, values: dict[str, Any]) -> dict[str, Any]:
        """Gives values (B, T, ...) the shapes of rows of the tensors.

        A new tensor has one axis at least.
        """
        specs, found = self.specs, {}
        for name, each in values.items():
            lead, shape = tuple(each.shape[:2]), tuple(each.shape[2:])
            needed = specs[name].shape if name in specs else shape or (1,)
            if math.prod(shape) != math.prod(needed):
                raise SpecError(f"add_trajectories: {name!r} has rows of shape {shape}, the tensor's are {needed}")
            found[name] = each if shape == needed else each.reshape(lead + needed)
        return found

    def list_end_columns(self, names: Iterable[str]) -> list[str]:
        return [name for name in ENDS if name in names]

    def trajectory_names(self, keys: Collection[str]) -> dict[str, str]:
        return find_names(keys)


class TensorIntake(LaneIntake):
    """Appends rows to tensors, and creates those that trajectories need.

    Args:
        tensors: the tensors.
    """

    def __init__(self, tensors: Tensors) -> None:
        super().__init__(tensors.storage)
        self._tensors = tensors
        self._step_writer = StepWriter(tensors.storage, ENDS)
        self._strict = False
        self._lead: tuple[int, ...] = ()  # of the values that are converted

    @property
    def specs(self) -> dict[str, Spec]:
        """The specs of the tensors, by name.

        Includes tensors that are not allocated yet.
        """
        planned = self._tensors.planned
        return {**planned, **super().specs} if planned else super().specs

    @property
    def writer(self) -> LaneIntake:
        """The writer to the store, for other processes."""
        return LaneIntake(self.storage)

    def choose_names(self, keys: Collection[str]) -> dict[str, str]:
        return {**self.default_names(keys), POLICY_VERSION: POLICY_VERSION}

    def convert(self, rows: Mapping[str, Any], unknown: str, missing: str) -> dict[str, Any]:
        block = super().convert(rows, unknown, missing)
        self._tensors.allocate()
        return block

    def as_rows(self, name: str, value: Any, known: Spec | None) -> tuple[Any, Spec]:
        if known is not None:
            return super().as_rows(name, value, known)
        spec = self._make_spec(name, value)
        return self.storage.columns.converted(name, super().as_rows(name, value, spec)[0], spec), spec

    def find_specs(self, values: Mapping[str, Any]) -> dict[str, Spec]:
        specs = self.specs
        return specs | {name: self._make_spec(name, each) for name, each in values.items() if name not in specs}

    def _make_spec(self, name: str, value: torch.Tensor) -> Spec:
        """The spec of a new tensor of single numbers for these."""
        dtype = self._tensors.convert_dtype(name, dtype_name(value.dtype), by_name=True)
        return self._tensors.make_spec(dtype, ())

    def add_columns(self, made: dict[str, Spec]) -> None:
        """Creates tensors.

        Raises:
            OutOfMemoryError: there is no room; nothing changes.
        """
        self._tensors.plan("add_trajectories", {name: replace(spec, fill=None) for name, spec in made.items()})

    def count_laps(self) -> int:
        """Counts how often every environment has filled all its rows."""
        return self.find_step().count_least() // self._tensors.lead[0]

    def find_step(self) -> InStep:
        """Which environments have as many rows as the others."""
        return self._step_writer.find_step()

    def write_quickly(self, given: Mapping[str, Any], strict: bool) -> bool:
        """Writes one row to each environment, or to the next ones.

        Returns False if `add_rows` has to do it. skrl's agents give values for tensors that do not exist, and omit
        those that they compute later.
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
            lanes = None if num_envs == 1 else self.find_step().next_lanes(n_lanes)
            if lanes is None and num_envs > 1:
                return False
        elif num_envs == 1 and 0 < n <= tensors.lead[0]:
            n_timesteps = n
        elif n != num_envs:
            return False
        self._lead = (n_lanes,)
        convert, live, is_row = self._convert_value, tensors.exposed, n is None
        written = self._step_writer.write(
            given, lanes, convert, n_timesteps=n_timesteps, is_row=is_row, fills=True, live=live, casts=not strict
        )
        return written is not None

    def _convert_value(self, name: str, value: Any, spec: Spec) -> Any:
        if spec.is_bfloat16 and isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16:
            array = value.detach().cpu().view(torch.int16).numpy()
        else:
            array = encoded(name, self._tensors.convert_values(name, value, self._strict), spec)
        return array[..., None] if array.shape == self._lead and spec.shape == (1,) else array

    def add_rows(self, given: Mapping[str, Any], strict: bool, write: Write) -> None:
        """Appends rows to environments; see `Memory.add_samples`."""
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
        """Converts the given tensors to arrays.

        Returns {} if this memory has none of them.
        """
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
        """Counts the given rows.

        None for a single row without an axis for rows.
        """
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
        """Chooses the environments that take `n` rows.

        Returns them and the leading axes (environments, rows).
        """
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


def _choose_first(values: Mapping[str, Any]) -> str:
    """Returns the name of the tensor whose shape says how many rows are given."""
    if values.get("observations") is not None:
        return "observations"
    return next(name for name, value in values.items() if value is not None)
