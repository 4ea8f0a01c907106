"""The columns in shared memory, and where they lie."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from rlstructs.shared.packing import Packing
from rlstructs.structures.arrays import TensorSpec, numpy_specs

# In bytes: the size of a cache line, and what jax needs to share memory.
ALIGNMENT = 64
Specs = Mapping[str, TensorSpec]
# The column of rows whose first step may be older than their rollout: how many updates its agent lacked, and what
# becomes of that in what is handed out, the number of updates of each step's agent.
FIRST_BEHIND, POLICY_VERSION = "first_behind", "policy_version"
COUNT: TensorSpec = ((), torch.int64)


def specs_of_steps(observation: Specs, action: Specs) -> dict[str, TensorSpec]:
    """Returns the specs of what is read of recorded steps.

    They are in the order of `sources_of`.
    """
    specs = {f"observation/{key}": spec for key, spec in observation.items()}
    specs |= {f"action/{key}": spec for key, spec in action.items()}
    return specs | {f"_observation/{key}": spec for key, spec in observation.items()}


@dataclass(frozen=True)
class Field:
    """One column in the arena.

    Attributes:
        name: name of the column.
        shape: shape of the whole column.
        dtype: dtype of torch; a record of observations is uint8, with an axis for its bytes.
        offset: bytes from the start of the arena.
        sparse: whether most of its pages are never touched.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    sparse: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize  # Python ints, because numpy's would overflow


@dataclass(frozen=True)
class Layout:
    """The columns of the slots, and where they lie.

    Attributes:
        n_slots: N.
        n_timesteps: T.
        observation, action: specs of what a step writes, by name without prefix.
        info: specs of what a rollout writes once, by name with prefix.
    """

    n_slots: int
    n_timesteps: int
    observation: Specs
    action: Specs
    info: Specs

    @functools.cached_property
    def fields(self) -> list[Field]:
        """All columns and their places."""
        fields: list[Field] = []
        offset = 0
        for name, shape, dtype, sparse in self._columns():
            field = Field(name, (self.n_slots, *shape), dtype, offset, sparse)
            fields.append(field)
            offset += -(-field.nbytes // ALIGNMENT) * ALIGNMENT
        return fields

    @property
    def has_step_versions(self) -> bool:
        """Whether each step has a `policy_version` of its own."""
        return FIRST_BEHIND in self.info

    @property
    def steps(self) -> dict[str, TensorSpec]:
        """Specs of the steps that are handed out, by name."""
        recorded = specs_of_steps(self.observation, self.action)
        return recorded | ({POLICY_VERSION: COUNT} if self.has_step_versions else {})

    @property
    def row_info(self) -> dict[str, TensorSpec]:
        """Specs of what slots have of a row and is handed out, by name."""
        return {name: spec for name, spec in self.info.items() if name != FIRST_BEHIND}

    def packing(self) -> Packing:
        """Returns the packing of observations into blocks."""
        return Packing(numpy_specs(self.observation))

    def _blocks(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        blocks = self.packing().blocks.items()
        return [
            (name, *(((*shape, dtype.itemsize), torch.uint8) if dtype.kind == "V" else self.observation[name]))
            for name, (shape, dtype) in blocks
        ]

    def _columns(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype, bool]]:
        n_timesteps = self.n_timesteps
        for name, shape, dtype in self._blocks():
            yield f"observation/{name}", (n_timesteps + 1, *shape), dtype, False
        for key, (shape, dtype) in self.action.items():
            yield f"action/{key}", (n_timesteps, *shape), dtype, False
        for name, (shape, dtype) in self.info.items():
            yield name, shape, dtype, False
        yield "reset", (n_timesteps,), torch.bool, False
        yield "lengths", (), torch.int64, False
        yield "first_steps", (), torch.int64, False
        for name, shape, dtype in self._blocks():
            yield f"_observation/{name}", (n_timesteps, *shape), dtype, True

    @property
    def reserved_nbytes(self) -> int:
        """Bytes of address space."""
        last = self.fields[-1]
        return last.offset + last.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of memory that a rollout takes, without the sparse columns."""
        return sum(field.nbytes for field in self.fields if not field.sparse)
