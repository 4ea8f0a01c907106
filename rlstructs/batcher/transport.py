"""`Transport`: brings rollouts to the trainer, and knows which environments run."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from mmap import mmap
from typing import Any

import numpy as np

from rlstructs.batcher.batch import Batch, write_info
from rlstructs.batcher.worker_record import RolloutOrder
from rlstructs.episodes import EpisodeTracker
from rlstructs.shared.layout import Layout
from rlstructs.shared.slot_buffers import ALL_ROLLOUTS, SlotBuffers
from rlstructs.shared.slot_columns import columns_of, write_columns
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.trajectories import Trajectories


class Transport:
    """Brings the rollouts of all workers, or nodes, to the trainer; knows which environments run.

    Args:
        layout: the columns of all environments.
        blocks: for each worker, the global indexes of its environments.

    Attributes:
        infos: `agent_info` and `env_info` as the last `reset` or `execute` gave them; empty before.
        running: the environments that run, by worker, counted from the worker's first; None for all of them.
        episodes: tracks the episodes that ended in rollouts that were handed out.
    """

    def __init__(self, layout: Layout, blocks: Sequence[range]) -> None:
        self.layout, self.blocks = layout, blocks
        self.infos: dict[str, DictTensor] = {}
        self.running: list[list[int] | None] = [None] * len(blocks)
        self.episodes = EpisodeTracker()

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that rollouts are written to."""
        raise NotImplementedError

    def make_batch(self, orders: Mapping[int, RolloutOrder], version_before: int, version: int) -> Batch:
        """Makes a batch of finished rollouts.

        Args:
            orders: by worker.
            version_before: number of updates that the workers' own counts leave out.
            version: number of updates so far, which counts as the version of lost rollouts.
        """
        raise NotImplementedError

    def max_rows(self) -> int:
        """The most rows that the next batch may have."""
        return self.n_running()

    def n_running(self) -> int:
        """How many environments run."""
        both = zip(self.blocks, self.running, strict=True)
        return sum(len(block if running is None else running) for block, running in both)

    def n_running_workers(self) -> int:
        """How many workers have environments that run."""
        return sum(running != [] for running in self.running)

    def running_rows(self) -> np.ndarray:
        """The global indexes of environments that run, int64."""
        return np.concatenate([self.rows_of(worker) for worker in range(len(self.blocks))])

    def rows_of(self, worker: int) -> np.ndarray:
        """The global indexes of a worker's environments that run, int64."""
        running, block = self.running[worker], self.blocks[worker]
        return np.arange(block.start, block.stop) if running is None else block.start + np.array(running, np.int64)

    def set_infos(self, infos: Mapping[str, DictTensor]) -> None:
        """Sets `agent_info` and `env_info` of all environments."""
        self.infos = {name: info.clone() for name, info in infos.items()}

    def set_agent_info(self, info: DictTensor) -> None:
        """Sets the `agent_info` that later calls of `write_agent_info` write."""
        self.infos["agent_info"] = info.clone()

    def write_agent_info(self, worker: int, number: int) -> None:
        """Writes a new `agent_info` where a worker will look for it in rollout `number`."""

    def cut(self, worker: int, number: int) -> None:
        """Makes a worker end its rollouts below this number after its current step."""

    def cut_all(self) -> None:
        """Makes every worker end every rollout after its current step."""

    def read_rollout(self, worker: int, number: int) -> Any:
        """What is kept here, not in the worker's reply, of a rollout that is done or lost; picklable."""

    def write_rollout(self, worker: int, number: int, content: Any) -> None:
        """Restores what `read_rollout` returned."""

    def add_episodes(self, orders: Mapping[int, RolloutOrder], trajectories: Trajectories) -> None:
        """Records the episodes that ended in these trajectories."""
        self.episodes.add(trajectories)

    def end_rollouts(self, orders: Mapping[int, RolloutOrder], trajectories: Trajectories | None) -> None:
        """Records which environments run after these rollouts, and which episodes ended in the trajectories, if any."""
        if trajectories is not None:
            self.add_episodes(orders, trajectories)
        for worker, order in orders.items():
            self.running[worker] = None if order.is_lost else order.request.value.running

    def begin_episodes(self, workers: Collection[int]) -> None:
        """Records that all environments of these workers are reset; their unfinished episodes are forgotten."""
        for worker in workers:
            self.running[worker] = None
            self.episodes.forget(self.rows_of(worker))

    def close(self) -> None:
        """Releases the memory. Idempotent."""


class SlotTransport(Transport):
    """The transport of workers that write to slots.

    Args:
        slot_buffers: the slot buffers of the workers.
        buffer: the memory that they lie in.
        blocks: for each worker, the global indexes of its environments.
        poisons: whether memory that was not written holds poison.
    """

    def __init__(self, slot_buffers: SlotBuffers, buffer: mmap, blocks: Sequence[range], poisons: bool) -> None:
        super().__init__(slot_buffers.layout, blocks)
        self._slot_buffers = slot_buffers
        self.slots = slot_buffers.slots(buffer, poisons=poisons)
        self._cuts = slot_buffers.cuts(buffer)
        # Pairs of worker and slot buffer whose `agent_info` is out of date.
        self._stale: set[tuple[int, int]] = set()

    @property
    def nbytes(self) -> int:
        return self._slot_buffers.nbytes

    def make_batch(self, orders: Mapping[int, RolloutOrder], version_before: int, version: int) -> Batch:
        rows_of_buffer: dict[int, list[np.ndarray]] = {}
        versions = np.full(self.layout.n_slots, version)
        for worker, order in sorted(orders.items()):
            index = order.number % len(self.slots)
            rows = self.rows_of(worker)
            if order.is_lost:
                self.slots[index].lose(rows)
            else:
                versions[rows] = version_before + order.request.value.version
            rows_of_buffer.setdefault(index, []).append(rows)
        joined = {index: rows[0] if len(rows) == 1 else np.concatenate(rows) for index, rows in rows_of_buffer.items()}
        return Batch([(self.slots[index], rows) for index, rows in joined.items()], versions)

    def set_infos(self, infos: Mapping[str, DictTensor]) -> None:
        super().set_infos(infos)
        self._stale.clear()
        for slots in self.slots:
            for name, info in infos.items():
                write_info(slots, name, info, slice(None))

    def set_agent_info(self, info: DictTensor) -> None:
        super().set_agent_info(info)
        self._stale |= set(itertools.product(range(len(self.blocks)), range(len(self.slots))))

    def write_agent_info(self, worker: int, number: int) -> None:
        place = worker, number % len(self.slots)
        if place in self._stale:
            self._stale.discard(place)
            block = self.blocks[worker]
            write_info(self.slots[place[1]], "agent_info", self.infos["agent_info"], slice(block.start, block.stop))

    def add_episodes(self, orders: Mapping[int, RolloutOrder], trajectories: Trajectories) -> None:
        """Records the episodes that ended; forgets unfinished ones of environments that have failed."""
        super().add_episodes(orders, trajectories)
        self.episodes.forget(self.failed_rows(orders))

    def failed_rows(self, orders: Mapping[int, RolloutOrder]) -> np.ndarray:
        """The global indexes of environments that have failed in these rollouts, int64."""
        replies = {worker: order.request.value for worker, order in orders.items() if not order.is_lost}
        rows = [self.blocks[worker].start + k for worker, reply in replies.items() for k in reply.cut or ()]
        return np.array(rows, np.int64)

    def cut(self, worker: int, number: int) -> None:
        self._cuts[worker] = number

    def cut_all(self) -> None:
        for worker in range(len(self._cuts)):
            self.cut(worker, ALL_ROLLOUTS)

    def read_rollout(self, worker: int, number: int) -> dict[str, np.ndarray]:
        slots, rows = self.slots[number % len(self.slots)], np.array(self.blocks[worker])
        return columns_of(slots, rows, int(slots.lengths[rows].max()))

    def write_rollout(self, worker: int, number: int, content: dict[str, np.ndarray]) -> None:
        index = number % len(self.slots)
        write_columns(self.slots[index], np.array(self.blocks[worker]), content)
        self._stale.add((worker, index))

    def close(self) -> None:
        self.slots, self._cuts = [], memoryview(b"")
