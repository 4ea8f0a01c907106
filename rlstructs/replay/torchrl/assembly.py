"""What a `DictTensorReplayBuffer` is put together of, and how its parts are exchanged."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch

from rlstructs.errors import SpecError
from rlstructs.replay.reading import Reading
from rlstructs.replay.torchrl.keeping import DictTensorFiles
from rlstructs.replay.torchrl.part import joined, part
from rlstructs.replay.torchrl.samplers import RandomSampler, Sampler
from rlstructs.replay.torchrl.storages import ReplayStorage
from rlstructs.replay.torchrl.transforms import Compose, Inverted, as_transform
from rlstructs.replay.torchrl.writers import RoundRobinWriter, Writer
from rlstructs.replay.values import generator_of

S = TypeVar("S", bound="DictTensorParts")


class DictTensorParts(DictTensorFiles):
    """The parts; see `DictTensorReplayBuffer`."""

    _batch_size: int | None

    @property
    def batch_size(self) -> int | None:
        """Of `sample`, unless it is told."""
        return self._batch_size

    @property
    def priority_key(self) -> str:
        """The column of new priorities."""
        return self._priority_key

    @priority_key.setter
    def priority_key(self, priority_key: Any) -> None:
        with self._lock:
            self._priority_key, self._quick = joined(priority_key), None

    @property
    def storage(self) -> ReplayStorage:
        """The storage: its settings, and by index and one by one the rows."""
        return self._settings

    @property
    def sampler(self) -> Sampler:
        """The sampler."""
        return self._sampler

    @property
    def writer(self) -> Writer:
        """The writer."""
        return self._writer

    @property
    def transform(self) -> Compose:
        """The transforms."""
        return self._transform

    @property
    def generator(self) -> np.random.Generator:
        """What draws; setting it, to what the constructor takes, begins another stream.

        A copy of a buffer, also that in a forked process such as a worker of torch's `DataLoader`, goes on with the
        same stream, and draws the same rows: give it another by `set_rng`.
        """
        return self._rng

    @generator.setter
    def generator(self, generator: np.random.Generator | torch.Generator | int | None) -> None:
        with self._lock:
            self._rng = generator_of(seed_of(generator))

    def set_rng(self, generator: np.random.Generator | torch.Generator | int | None) -> None:
        """Sets `generator`."""
        self.generator = generator

    def stats(self) -> dict[str, int | float | bool]:
        """How full it is: `size`, `capacity`, `utilization`, `write_count`, `prefetch_queue_size`, `initialized`."""
        with self._lock:
            size, capacity = len(self), self._settings.max_size
            return {
                "size": size, "write_count": self.write_count, "prefetch_queue_size": len(self._ahead),
                "initialized": True, "capacity": capacity, "utilization": size / capacity,
            }  # fmt: skip

    def append_transform(self: S, transform: Any, *, invert: bool = False) -> S:
        """Adds a transform behind the others; with `invert` its `forward` is for rows that are written.

        Returns:
            The buffer.
        """
        return self._insert(len(self._transform), transform, invert)

    def insert_transform(self: S, index: int, transform: Any, *, invert: bool = False) -> S:
        """Adds a transform before the `index`-th; as `append_transform`.

        Raises:
            SpecError: there is no such place.
        """
        return self._insert(index, transform, invert)

    def _insert(self: S, index: int, transform: Any, invert: bool) -> S:
        transform = as_transform(transform)
        with self._lock:
            changed = Compose(*self._transform.parts)  # another one: batches that are being made keep theirs
            changed.insert(index, Inverted(transform) if invert else transform)
            self._transform, self._quick = changed, None
            self._version += 1
        return self

    def set_sampler(self, sampler: Any) -> None:
        """Takes another sampler, for which all rows are new.

        Raises:
            TypeError, SpecError: it does not go with the other parts, or the columns.
        """
        sampler = part("sampler", sampler, Sampler, RandomSampler)
        with self._lock:
            self._check_parts(sampler, self._writer, self._reading)
            if self._specs:
                self._check_episode_keys(sampler, self._specs)
                if taken := sorted(set(sampler.fields) & set(self._specs)):
                    raise SpecError(f"key(s) {taken} are stored, and this sampler has {taken} of its own")
            sampler.start(self._storage, self._settings.max_size)
            marks = self._ends_and_changes()
            self._sampler.belong(None)
            sampler.belong(self)
            self._sampler, self._quick = sampler, None
            self._version += 1
            if sampler.end_key is not None or sampler.traj_key is not None:
                self._recompute_episodes(*marks)
                self._knows_episodes = True

    def set_writer(self, writer: Any) -> None:
        """Takes another writer.

        Raises:
            TypeError, SpecError: it does not go with the other parts.
        """
        writer = part("writer", writer, Writer, RoundRobinWriter)
        with self._lock:
            self._check_parts(self._sampler, writer, self._reading)
            self._writer.belong(None)
            writer.belong(self)
            writer.changed()
            self._writer, self._quick = writer, None

    def _check_parts(self, sampler: Sampler, writer: Writer, reading: Reading) -> None:
        """Raises SpecError unless these go together, and belong to no other buffer."""
        for each in (self._settings, sampler, writer):
            each.check_free(self)
        if sampler.drop_last and self._batch_size is None:
            raise SpecError("drop_last needs the batch_size of the buffer, or it is not known what is smaller")
        if not writer.keeps_order and (sampler.needs_episodes or not reading.is_plain):
            raise SpecError(
                f"the rows of a {type(writer).__name__} have no order: no slices, n_step or stacks can be made of them"
            )


def seed_of(generator: Any) -> np.random.Generator | int | None:
    """What a buffer takes for one; of torch's generators a number that it draws."""
    if isinstance(generator, torch.Generator):
        return int(torch.randint(2**63 - 1, (), generator=generator, device=generator.device))
    return generator  # type: ignore[no-any-return] # checked by who takes it
