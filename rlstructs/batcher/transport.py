"""The trainer's side of rollouts: what is in force, which environments run, what came of each rollout."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from mmap import mmap

import numpy as np

from rlstructs.batcher.batch import Batch, write_info
from rlstructs.batcher.worker_record import RolloutOrder
from rlstructs.episodes import EpisodeTracker
from rlstructs.shared.layout import Layout
from rlstructs.shared.slot_buffers import ALL_ROLLOUTS, SlotBuffers
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.trajectories import Trajectories


class Transport:
    """The rollouts of all workers, or nodes: what is in force, and which environments run.

    Args:
        layout: of all environments.
        blocks: for each worker its environments, by their global indexes.

    Attributes:
        infos: `agent_info` and `env_info` as the last `reset` or `execute` gave them; empty before.
        episodes: those that ended in the rollouts that were handed out.
    """

    def __init__(self, layout: Layout, blocks: Sequence[range]) -> None:
        self.layout, self.blocks = layout, blocks
        self.infos: dict[str, DictTensor] = {}
        # Which environments run, by worker; None for all of its.
        self._running: list[list[int] | None] = [None] * len(blocks)
        self.episodes = EpisodeTracker()

    @property
    def nbytes(self) -> int:
        """Bytes that rollouts take where they are written."""
        raise NotImplementedError

    def batch(self, orders: Mapping[int, RolloutOrder], version_before: int, version: int) -> Batch:
        """What these rollouts have written.

        Args:
            orders: by worker.
            version_before: what the updates that workers know of are counted from.
            version: the present one, for rollouts that were lost.
        """
        raise NotImplementedError

    def n_rows_at_most(self) -> int:
        """How many rows the next batch may have."""
        return self.n_running()

    def n_running(self) -> int:
        """How many environments run."""
        both = zip(self.blocks, self._running, strict=True)
        return sum(len(block if which is None else which) for block, which in both)

    def n_workers_running(self) -> int:
        """How many workers have one that does."""
        return sum(which != [] for which in self._running)

    def running(self) -> np.ndarray:
        """The global indexes of those that run."""
        return np.concatenate([self.rows_of(worker) for worker in range(len(self.blocks))])

    def rows_of(self, worker: int) -> np.ndarray:
        """The global indexes of those of a worker that run."""
        which, block = self._running[worker], self.blocks[worker]
        return np.arange(block.start, block.stop) if which is None else block.start + np.array(which, np.int64)

    def put_infos(self, infos: Mapping[str, DictTensor]) -> None:
        """Has `agent_info` and `env_info` be in force."""
        self.infos = {name: info.clone() for name, info in infos.items()}

    def put_agent_info(self, info: DictTensor) -> None:
        """Has it be in force in every rollout that `prepare` hears of from now on."""
        self.infos["agent_info"] = info.clone()

    def prepare(self, worker: int, number: int) -> None:
        """Sees to it that a worker finds what rollout `number` needs."""

    def cut(self, worker: int, number: int) -> None:
        """Has a worker end its rollouts below this number after the step that it is in."""

    def cut_all(self) -> None:
        """Has every worker end every rollout, if it can be told."""

    def add(self, orders: Mapping[int, RolloutOrder], trajectories: Trajectories) -> None:
        """Takes down the episodes of what is handed out."""
        self.episodes.add(trajectories)

    def end(self, orders: Mapping[int, RolloutOrder]) -> None:
        """Takes down who runs in the rollouts behind these."""
        for worker, order in orders.items():
            self._running[worker] = None if order.is_lost else order.asked.value.running

    def begin_anew(self, workers: Iterable[int]) -> None:
        """The environments of these are reset: all run, and what had begun has no end."""
        for worker in workers:
            self._running[worker] = None
            self.episodes.forget(self.rows_of(worker))

    def close(self) -> None:
        """Lets go of what was written. Idempotent."""


class SlotTransport(Transport):
    """Of workers that write to slots.

    Args:
        slot_buffers: of the workers.
        buffer: where they lie.
        blocks: as of `Transport`.
        poisons: whether what was not written holds poison.
    """

    def __init__(self, slot_buffers: SlotBuffers, buffer: mmap, blocks: Sequence[range], poisons: bool) -> None:
        super().__init__(slot_buffers.layout, blocks)
        self._slot_buffers = slot_buffers
        self.slots = slot_buffers.slots(buffer, poisons=poisons)
        self._cuts = slot_buffers.cuts(buffer)
        # Worker and slot buffer in which an older `agent_info` stands.
        self._stale: set[tuple[int, int]] = set()

    @property
    def nbytes(self) -> int:
        return self._slot_buffers.nbytes

    def batch(self, orders: Mapping[int, RolloutOrder], version_before: int, version: int) -> Batch:
        rows_of_buffer: dict[int, list[np.ndarray]] = {}
        versions = np.full(self.layout.n_slots, version)
        for worker, order in sorted(orders.items()):
            index = order.number % len(self.slots)
            rows = self.rows_of(worker)
            if order.is_lost:
                self.slots[index].lose(rows)
            else:
                versions[rows] = version_before + order.asked.value.version
            rows_of_buffer.setdefault(index, []).append(rows)
        return Batch([(self.slots[index], np.concatenate(rows)) for index, rows in rows_of_buffer.items()], versions)

    def put_infos(self, infos: Mapping[str, DictTensor]) -> None:
        super().put_infos(infos)
        self._stale.clear()
        for slots in self.slots:
            for name, info in infos.items():
                write_info(slots, name, info, slice(None))

    def put_agent_info(self, info: DictTensor) -> None:
        super().put_agent_info(info)
        self._stale |= set(itertools.product(range(len(self.blocks)), range(len(self.slots))))

    def prepare(self, worker: int, number: int) -> None:
        place = worker, number % len(self.slots)
        if place in self._stale:
            self._stale.discard(place)
            block = self.blocks[worker]
            write_info(self.slots[place[1]], "agent_info", self.infos["agent_info"], slice(block.start, block.stop))

    def cut(self, worker: int, number: int) -> None:
        self._cuts[worker] = number

    def cut_all(self) -> None:
        for worker in range(len(self._cuts)):
            self.cut(worker, ALL_ROLLOUTS)

    def close(self) -> None:
        self.slots, self._cuts = [], memoryview(b"")
