"""The columns in shared memory, and where they lie.

Observations lie packed: all keys with one number per row share a record. An observation has about six keys of one
number each (reward, flags, last action). Copying them one by one at every step would take longer than copying the
observation itself; a record is copied at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from rlstructs.errors import SpecError
from rlstructs.structures.arrays import Spec, TensorSpec, numpy_specs
from rlstructs.structures.dict_tensor import DictTensor

# How the names of columns begin: observations, outputs of the agent, and observations that follow.
SEEN, ACTION, FOLLOWING = "observation/", "action/", "_observation/"
# In bytes: the size of a cache line, and what jax needs to share memory.
ALIGNMENT = 64
Specs = Mapping[str, TensorSpec]
# The column of rows whose first step may be older than their rollout: how many updates its agent lacked, and what
# becomes of that in what is handed out, the number of updates of each step's agent.
FIRST_BEHIND, POLICY_VERSION = "first_behind", "policy_version"
COUNT: TensorSpec = ((), torch.int64)
# The name of the block that holds the record; no key may have it.
RECORD = "\0record"


class Packing:
    """The block of each key of an observation, and its place there.

    Both are independent of the order of the specs.

    Args:
        specs: key -> row shape and dtype.

    Raises:
        SpecError: a key has the name of the record.

    Attributes:
        specs: the argument.
        blocks: block -> row shape and dtype of its array; a record is opaque, so that numpy copies bytes.

    Example:
        >>> specs = {"frame": ((4,), np.dtype("f4")), "reward": ((), np.dtype("f4")), "done": ((), np.dtype("?"))}
        >>> Packing(specs).blocks
        {'\\x00record': ((), dtype('V8')), 'frame': ((4,), dtype('float32'))}
    """

    def __init__(self, specs: Mapping[str, Spec]) -> None:
        if RECORD in specs:
            raise SpecError(f"observation: a key may not be called {RECORD!r}, which is the name of records")
        self.specs = dict(specs)
        small = {key: spec for key, spec in specs.items() if np.prod(spec[0], dtype=int) == 1}
        self.record = _record(small)
        self.blocks: dict[str, Spec] = {RECORD: ((), np.dtype(f"V{self.record.itemsize}"))} if small else {}
        self.blocks |= {key: spec for key, spec in specs.items() if key not in small}

    def views(self, blocks: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns views of the values of all keys, in the order of the specs.

        It is as fast as one call of `view`.
        """
        record = blocks[RECORD].view(self.record) if RECORD in self.blocks else None
        return {key: blocks[key] if key in self.blocks else record[key] for key in self.specs}  # type: ignore[index]

    def view(self, blocks: Mapping[str, np.ndarray], key: str) -> np.ndarray:
        """Returns a view of a key's values in these blocks, with its dtype."""
        return blocks[key] if key in self.blocks else blocks[RECORD].view(self.record)[key]


def _record(specs: Mapping[str, Spec]) -> np.dtype[Any]:
    """Returns the dtype of a record with these fields.

    Each field is aligned to its size, the record to the widest field.
    """
    offsets, offset = {}, 0
    # Sorted by name too, because environments in other processes may order their keys differently.
    for key, (_, dtype) in sorted(specs.items(), key=lambda item: (-item[1][1].itemsize, item[0])):
        offsets[key], offset = offset, offset + dtype.itemsize
    widest = max((dtype.itemsize for _, dtype in specs.values()), default=1)
    return np.dtype(
        {
            "names": list(specs),
            "formats": [(dtype, shape) for shape, dtype in specs.values()],
            "offsets": [offsets[key] for key in specs],
            "itemsize": max(1, -(-offset // widest) * widest),
        }
    )


class Rows:
    """n rows of observations.

    Attributes:
        packing: says in which block a key lies.
        blocks: block -> (n, ...).
    """

    __slots__ = ("blocks", "packing")

    def __init__(self, packing: Packing, blocks: dict[str, np.ndarray]) -> None:
        self.packing, self.blocks = packing, blocks

    @classmethod
    def zeros(cls, packing: Packing, n: int) -> Rows:
        """Makes n rows of zeros."""
        return cls(packing, {name: np.zeros((n, *shape), dtype) for name, (shape, dtype) in packing.blocks.items()})

    @classmethod
    def of(cls, packing: Packing, arrays: Mapping[str, np.ndarray]) -> Rows:
        """Copies arrays (n, ...), one for each key, into rows."""
        rows = cls.zeros(packing, len(next(iter(arrays.values()), ())))
        for key, target in rows.arrays().items():
            target[...] = arrays[key]
        return rows

    def __getitem__(self, key: str) -> np.ndarray:
        """Returns a view of the values of a key."""
        return self.packing.view(self.blocks, key)

    def __len__(self) -> int:
        return next((len(block) for block in self.blocks.values()), 0)

    def take(self, index: Any) -> Rows:
        """Returns the rows at an index.

        They are views for a slice, copies for an array of indexes or a mask.
        """
        return Rows(self.packing, {name: block[index] for name, block in self.blocks.items()})

    def join(self, other: Rows) -> Rows:
        """Copies these rows and, after them, others with the same packing."""
        return Rows(self.packing, {name: np.concatenate([b, other.blocks[name]]) for name, b in self.blocks.items()})

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns views of the values of all keys, in the order of the specs."""
        return self.packing.views(self.blocks)

    def tensors(self) -> DictTensor:
        """Copies the values of all keys to tensors."""
        return DictTensor.trusted({key: torch.from_numpy(np.array(a, order="C")) for key, a in self.arrays().items()})


class Target(NamedTuple):
    """Rows to be written.

    Attributes:
        rows: the rows.
        arrays: views of the values of all keys in these rows.
    """

    rows: Rows
    arrays: dict[str, np.ndarray]


def specs_of_steps(observation: Specs, action: Specs) -> dict[str, TensorSpec]:
    """Returns the specs of what is read of recorded steps.

    They are in the order of `sources_of`.
    """
    parts = {SEEN: observation, ACTION: action, FOLLOWING: observation}
    return {prefix + key: spec for prefix, specs in parts.items() for key, spec in specs.items()}


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
            yield SEEN + name, (n_timesteps + 1, *shape), dtype, False
        for key, (shape, dtype) in self.action.items():
            yield ACTION + key, (n_timesteps, *shape), dtype, False
        for name, (shape, dtype) in self.info.items():
            yield name, shape, dtype, False
        yield "reset", (n_timesteps,), torch.bool, False
        yield "lengths", (), torch.int64, False
        yield "first_steps", (), torch.int64, False
        for name, shape, dtype in self._blocks():
            yield FOLLOWING + name, (n_timesteps, *shape), dtype, True

    @property
    def reserved_nbytes(self) -> int:
        """Bytes of address space."""
        last = self.fields[-1]
        return last.offset + last.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of memory that a rollout takes, without the sparse columns."""
        return sum(field.nbytes for field in self.fields if not field.sparse)
