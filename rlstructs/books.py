"""The trainer's side of the slots: what is in force, which environments run, what came of each rollout."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from mmap import mmap

import numpy as np

from rlstructs.batch import Batch, write_info
from rlstructs.episodes import EpisodeTracker
from rlstructs.generations import EVERY, Generations
from rlstructs.member import Order
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.trajectories import Trajectories


class Books:
    """What is known of the rollouts of all workers.

    Args:
        generations: of the slots.
        buffer: where they lie.
        n_workers: W; each has as many slots, one behind another.
        poisons: whether what was not written holds poison.

    Attributes:
        infos: `agent_info` and `env_info` as the last `reset` or `execute` gave them; empty before.
        episodes: those that ended in the rollouts that were handed out.
    """

    def __init__(self, generations: Generations, buffer: mmap, n_workers: int, poisons: bool) -> None:
        self.layout = generations.layout
        self._n_workers, self._n_envs = n_workers, self.layout.n_slots // n_workers
        self.slots = generations.slots(buffer, poisons=poisons)
        self._cuts = generations.cuts(buffer)
        self.infos: dict[str, DictTensor] = {}
        # Worker and generation of slots in which an older `agent_info` stands.
        self._stale: set[tuple[int, int]] = set()
        # Which environments run, by worker; None for all of its.
        self._running: list[list[int] | None] = [None] * n_workers
        self.episodes = EpisodeTracker()

    def n_running(self) -> int:
        """How many environments run."""
        return sum(self._n_envs if which is None else len(which) for which in self._running)

    def n_workers_running(self) -> int:
        """How many workers have one that does."""
        return sum(which != [] for which in self._running)

    def put_infos(self, infos: Mapping[str, DictTensor]) -> None:
        """Writes `agent_info` and `env_info` to all slots."""
        self.infos = {name: info.clone() for name, info in infos.items()}
        self._stale.clear()
        for slots in self.slots:
            for name, info in infos.items():
                write_info(slots, name, info, slice(None))

    def put_agent_info(self, info: DictTensor) -> None:
        """Has it stand in the slots of every rollout that `prepare` hears of from now on."""
        self.infos["agent_info"] = info.clone()
        self._stale |= set(itertools.product(range(self._n_workers), range(len(self.slots))))

    def prepare(self, worker: int, number: int) -> None:
        """Sees to it that a worker finds in its slots what rollout `number` needs."""
        place = worker, number % len(self.slots)
        if place in self._stale:
            self._stale.discard(place)
            rows = slice(worker * self._n_envs, (worker + 1) * self._n_envs)
            write_info(self.slots[place[1]], "agent_info", self.infos["agent_info"], rows)

    def cut(self, worker: int, number: int) -> None:
        """Has a worker end its rollouts below this number after the step that it is in."""
        self._cuts[worker] = number

    def cut_all(self) -> None:
        """Has every worker end every rollout."""
        for worker in range(len(self._cuts)):
            self.cut(worker, EVERY)

    def batch(self, orders: Mapping[int, Order], version_before: int, version: int) -> Batch:
        """What these rollouts have written.

        Args:
            orders: by worker index.
            version_before: what the updates that workers know of are counted from.
            version: the present one, for rollouts that were lost.
        """
        generations: dict[int, list[np.ndarray]] = {}
        versions = np.full(self.layout.n_slots, version)
        for worker, order in sorted(orders.items()):
            index = order.number % len(self.slots)
            rows = self._rows_of(worker, self._running[worker])
            if order.is_lost:
                self.slots[index].empty(rows)
            else:
                versions[rows] = version_before + order.asked.value[2]
            generations.setdefault(index, []).append(rows)
        return Batch([(self.slots[index], np.concatenate(rows)) for index, rows in generations.items()], versions)

    def end(self, orders: Mapping[int, Order], trajectories: Trajectories) -> None:
        """Takes down what is handed out: episodes, and who runs in the next rollout."""
        self.episodes.add(trajectories)
        for worker, order in orders.items():
            self._running[worker] = None if order.is_lost else order.asked.value[0]

    def begin_anew(self, workers: Iterable[int]) -> None:
        """The environments of these are reset: all run, and what had begun has no end."""
        for worker in workers:
            self._running[worker] = None
            self.episodes.forget(self._rows_of(worker))

    def close(self) -> None:
        """Lets go of the memory. Idempotent."""
        self.slots, self._cuts = [], memoryview(b"")

    def _rows_of(self, worker: int, which: list[int] | None = None) -> np.ndarray:
        """The global indexes of a worker's environments, or of some of them."""
        rows = np.arange(self._n_envs) if which is None else np.array(which, np.int64)
        return np.asarray(worker * self._n_envs + rows)
