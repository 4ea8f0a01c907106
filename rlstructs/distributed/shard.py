"""What one actor of a `RayReplay` keeps: a memory of some of the environments."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlstructs.distributed.actor import Columns, WithColumns
from rlstructs.memories.torch import PrioritizedMemory
from rlstructs.steps import raw_of, tensor_of
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
from rlstructs.structures.trajectories import Trajectories

# What is known of rows that were drawn.
INDEX, LEAF, MASK, IS_FIRST, DISCOUNT = "index", "leaf", "mask", "is_first", "discount"
# Of trajectories, beside their keys; and a file.
ENV_INDEX, LENGTHS, DATA = "env_index", "lengths", "data"
FORMAT = "npz"

Dtypes = dict[str, torch.dtype]


@dataclass(frozen=True)
class ShardSettings:
    """What shards are made of; this is what is pickled.

    Attributes:
        memory_size: rows of each environment.
        alpha: exponent of priorities.
        names: as of `Memory.add_trajectories`.
    """

    memory_size: int
    alpha: float
    names: Mapping[str, str]

    def build(self, num_envs: int, seed: int) -> Shard:
        """As of `Shard`."""
        return Shard(self, num_envs, seed)


class ShardMemory(PrioritizedMemory):
    """A memory that tells what a trainer needs to draw from several."""

    def mass(self) -> tuple[float, float]:
        """The sum of all priorities, to the power of alpha, and the smallest of them."""
        self._prioritised.follow(self._store().span())
        return float(self._prioritised.tree.total), float(self._prioritised.tree.minimum)

    @property
    def largest(self) -> float:
        """The largest priority ever, of all shards that this one has heard of: what a new row gets."""
        return self._prioritised.max_priority

    @largest.setter
    def largest(self, largest: float) -> None:
        self._prioritised.max_priority = max(largest, self._prioritised.max_priority)

    def drawn(self) -> Columns:
        """What is known of the last `sample`."""
        picked = self._sampled()
        known = {
            INDEX: self.get_sampling_indexes(),
            MASK: self.get_sampling_mask(),
            DISCOUNT: self.get_sampling_discounts(),
        }
        if IS_FIRST in picked.fields:
            known[IS_FIRST] = self.get_sampling_is_first()
        return {LEAF: picked.fields["leaves"], **{name: tensor.numpy() for name, tensor in known.items()}}


class Shard:
    """Answers what a `RayReplay` asks of a shard.

    Args:
        settings: how to make its memory.
        num_envs: its environments.
        seed: of its draws.
    """

    def __init__(self, settings: ShardSettings, num_envs: int, seed: int) -> None:
        self._settings, self._num_envs, self._seed = settings, num_envs, seed
        self._memory = self._made()
        self._loaded: ShardMemory | None = None

    def report(self) -> dict[str, Any]:
        """How many rows there are, what `ShardMemory` tells of them, bytes, and dtypes by name, if it has any rows."""
        memory = self._memory
        mass, least = memory.mass()
        dtypes = {name: memory.get_tensor_by_name(name).dtype for name in self._settings.names} if len(memory) else {}
        return {"rows": len(memory), "mass": mass, "least": least, "largest": memory.largest, "nbytes": memory.nbytes,
                "dtypes": dtypes}  # fmt: skip

    def extend(self, dtypes: Dtypes, largest: float, columns: Columns) -> None:
        """Appends the steps of trajectories.

        Args:
            dtypes: by key.
            largest: priority that other shards have been given.
            columns: by key, (B, T, ...); `lengths`; and which environments they are of here, `env_index`.
        """
        tensors = {key: tensor_of(np.array(columns[key]), dtype) for key, dtype in dtypes.items()}
        info = DictTensor({ENV_INDEX: torch.from_numpy(np.array(columns[ENV_INDEX]))})
        steps = TemporalDictTensor(tensors, torch.from_numpy(np.array(columns[LENGTHS])))
        self._memory.largest = largest
        self._memory.add_trajectories(Trajectories(info, steps), self._settings.names)

    def sample(self, names: Sequence[str], n: int, settings: Mapping[str, Any]) -> WithColumns:
        """Draws rows or sequences.

        Args:
            names: of tensors.
            n: how many.
            settings: of `RandomMemory.sample`.

        Returns:
            The tensors' dtypes; the tensors, and what is known of them, their names behind a "/".
        """
        [tensors] = self._memory.sample(names, batch_size=n, **settings)
        found = dict(zip(names, tensors, strict=True))
        columns = {name: raw_of(tensor) for name, tensor in found.items()}
        columns |= {f"/{name}": column for name, column in self._memory.drawn().items()}
        return WithColumns(({name: tensor.dtype for name, tensor in found.items()},), columns)

    def update_priorities(self, columns: Columns) -> None:
        """Of `index` the `priority`."""
        self._memory.update_priorities(columns[INDEX], columns["priority"])

    def save(self) -> WithColumns:
        """Its file, as bytes."""
        with tempfile.TemporaryDirectory() as folder:
            data = self._memory.save(folder, format=FORMAT).read_bytes()
        return WithColumns((), {DATA: np.frombuffer(data, np.uint8)})

    def load(self, columns: Columns) -> None:
        """Reads what `save` gave, and keeps it beside what is there."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"memory.{FORMAT}"
            columns[DATA].tofile(path)
            memory = self._made()
            memory.load(path)
        self._loaded = memory

    def take_loaded(self) -> None:
        """Goes on with what `load` has read."""
        assert self._loaded is not None
        self._memory, self._loaded = self._loaded, None

    def drop_loaded(self) -> None:
        """Does not."""
        self._loaded = None

    def close(self) -> None:
        """Nothing: it ends with its actor."""

    def _made(self) -> ShardMemory:
        settings = self._settings
        return ShardMemory(
            memory_size=settings.memory_size, num_envs=self._num_envs, alpha=settings.alpha, seed=self._seed,
            device="cpu",
        )  # fmt: skip
