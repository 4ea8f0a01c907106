"""Brings rollouts from nodes to the trainer, and updates of agents to the nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from rlstructs.batcher.transport import Contents, Transport
from rlstructs.batcher.worker_record import Records, RolloutOrder
from rlstructs.distributed import cluster
from rlstructs.distributed.actor import Columns
from rlstructs.distributed.node_parts import NodePartsBatch, Part, PartBuilder
from rlstructs.shared.slots import ALL_ROLLOUTS
from rlstructs.shared.weights import Parcel
from rlstructs.structures.arrays import raw_of
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.trajectories import Trajectories
from rlstructs.workers.messages import Future


class NodeTransport(Transport):
    """Brings rollouts from nodes, each in one node part.

    Args:
        contents, records: see `Transport`.
        n_rollouts: how many rollouts of one node may be under way at once.
        send_infos: sends `agent_info` and `env_info` to the nodes.
        cut: called with a node's index and a number; makes the node end its rollouts below that number.
        poisons: whether the padding of batches holds poison instead of zeros.
        all_may_run: whether nodes replace workers, so that environments that had ended may run again.
    """

    def __init__(
        self,
        contents: Contents,
        records: Records,
        n_rollouts: int,
        send_infos: Callable[[Mapping[str, DictTensor]], None],
        cut: Callable[[int, int], None],
        poisons: bool,
        all_may_run: bool,
    ) -> None:
        super().__init__(contents, records)
        self._cut, self._all_may_run = cut, all_may_run
        self._n_rollouts, self._send_infos, self._builder = n_rollouts, send_infos, PartBuilder(self.layout, poisons)

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes * self._n_rollouts

    def max_rows(self) -> int:
        return self.layout.n_slots if self._all_may_run else super().max_rows()

    def make_batch(self, orders: Mapping[int, RolloutOrder], version_before: int, version: int) -> NodePartsBatch:
        node_parts, rows, versions = [], [], []
        for node, order in sorted(orders.items()):
            rows.append(self.rows_of(node) if order.is_lost else self._rows_that_ran(node, order))
            node_parts.append(self._build_part(node, order, rows[-1]))
            node_version = version if order.is_lost else version_before + order.request.value.version
            versions.append(np.full(rows[-1].size, node_version))
            node_parts[-1].add_info(env_index=rows[-1], policy_version=versions[-1])
        return NodePartsBatch(node_parts, np.concatenate(rows), np.concatenate(versions), self.layout)

    def set_infos(self, infos: Mapping[str, DictTensor]) -> None:
        super().set_infos(infos)
        if any(not info.empty() for info in infos.values()):
            self._send_infos(self.infos)

    def set_agent_info(self, info: DictTensor) -> None:
        super().set_agent_info(info)
        self._send_infos(self.infos)

    def cut(self, node: int, number: int) -> None:
        self._cut(node, number)

    def cut_all(self) -> None:
        for node in range(len(self.blocks)):
            self.cut(node, ALL_ROLLOUTS)

    def add_episodes(self, orders: Mapping[int, RolloutOrder], trajectories: Trajectories) -> None:
        """Records the episodes that ended.

        Forgets unfinished ones of environments that a node has reset.
        """
        rollouts = {node: order.request.value.rollout for node, order in orders.items() if not order.is_lost}
        for node, rollout in rollouts.items():
            self.episodes.forget(self._global_rows(node, rollout.reset_before))
        super().add_episodes(orders, trajectories)
        for node, rollout in rollouts.items():
            self.episodes.forget(self._global_rows(node, rollout.reset_after))

    def _rows_that_ran(self, node: int, order: RolloutOrder) -> np.ndarray:
        """Returns the global indexes of a rollout's environments.

        More than expected if the node has replaced a worker.
        """
        rows = order.request.value.rollout.rows
        return np.array(self.blocks[node]) if rows is None else self._global_rows(node, rows)

    def _global_rows(self, node: int, rows: list[int]) -> np.ndarray:
        """Converts indexes that count from a node's first environment to global ones, int64."""
        return np.asarray(self.blocks[node].start + np.array(rows, np.int64))

    def _build_part(self, node: int, order: RolloutOrder, rows: np.ndarray) -> Part:
        if not order.is_lost:
            return self._builder.build(node, order.request.value.columns)
        infos: Columns = {
            f"{name}/{key}": raw_of(tensor)[rows] for name, info in self.infos.items() for key, tensor in info.items()
        }
        return self._builder.build_lost(node, infos, rows.size)


class Broadcast:
    """An `Outbox` whose updates go to nodes.

    Args:
        check_size: called with the size of an update, in bytes, before it is sent; raises if it does not fit.

    Attributes:
        version: the number of updates so far.
    """

    def __init__(self, check_size: Callable[[int], None]) -> None:
        self._check_size, self.version = check_size, 0

    def pack(self, info: Any) -> Any:
        """Returns what to send for an update, or for a `Parcel` of one.

        Its bytes, or a reference to the object store.

        Raises:
            OutOfMemoryError: an object store is too small.
            Exception: `info` cannot be pickled.
        """
        parcel = info if isinstance(info, Parcel) else Parcel.of(info)
        n_bytes = parcel.nbytes + len(parcel.pickled)
        self._check_size(n_bytes)
        return cluster.share((self.version + 1, parcel.as_bytes()), n_bytes)

    def record_sent(self, packed: Any, requests: list[Future]) -> None:
        """Counts the update."""
        self.version += 1

    def read_last(self) -> None:
        """Returns None: nodes keep the last update."""

    def forget(self, workers: Collection[int]) -> None:
        """Does nothing: Ray knows which node still needs which update."""
