"""Which columns there are in shared memory, and where."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from rlstructs.shared.packing import Packing
from rlstructs.structures.arrays import TensorSpec, numpy_specs

# Bytes: what a cache line, jax and SIMD loads want.
ALIGNMENT = 64
Specs = Mapping[str, TensorSpec]


@dataclass(frozen=True)
class Field:
    """One column in the arena.

    Attributes:
        name: what it is called.
        shape: of the whole column.
        dtype: torch's; a record of observations is uint8, with an axis for its bytes.
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
        return math.prod(self.shape) * self.dtype.itemsize  # of any size, where numpy's would overflow


@dataclass(frozen=True)
class Layout:
    """Which columns there are, and where.

    Attributes:
        n_slots: N.
        n_timesteps: T.
        observation, action: what a step writes, by name without prefix.
        info: what a rollout writes once, by name with prefix.
    """

    n_slots: int
    n_timesteps: int
    observation: Specs
    action: Specs
    info: Specs

    @functools.cached_property
    def fields(self) -> list[Field]:
        """Every column, at its place."""
        fields: list[Field] = []
        offset = 0
        for name, shape, dtype, sparse in self._columns():
            field = Field(name, (self.n_slots, *shape), dtype, offset, sparse)
            fields.append(field)
            offset += -(-field.nbytes // ALIGNMENT) * ALIGNMENT
        return fields

    def packing(self) -> Packing:
        """How observations lie in blocks."""
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
        for name, shape, dtype in self._blocks():
            yield f"_observation/{name}", (n_timesteps, *shape), dtype, True

    @property
    def reserved_nbytes(self) -> int:
        """Address space, in bytes."""
        last = self.fields[-1]
        return last.offset + last.nbytes

    @property
    def nbytes(self) -> int:
        """Memory that a rollout takes, in bytes, without the sparse columns."""
        return sum(field.nbytes for field in self.fields if not field.sparse)
