"""The trainer's side of rollouts that come from nodes: what is in force, which environments run, what came of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rlstructs.batcher.transport import Transport
from rlstructs.batcher.worker_record import RolloutOrder
from rlstructs.distributed.actor import Columns
from rlstructs.distributed.parts import Part, Parts, PartsBatch
from rlstructs.shared.layout import Layout
from rlstructs.shared.slot_buffers import ALL_ROLLOUTS
from rlstructs.structures.arrays import raw_of
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.trajectories import Trajectories


class PartTransport(Transport):
    """Of nodes that send parts.

    Args:
        layout, blocks: as of `Transport`.
        n_rollouts: how many of each node there may be at once.
        inform: called with `agent_info` and `env_info` for nodes to take.
        cut: called with the index of a node that is to end its rollouts, and the number that they are below.
        poisons: whether what was not written holds poison.
        all_may_run: whether environments that had ended may run again, with a worker that their node has replaced.
    """

    def __init__(
        self,
        layout: Layout,
        blocks: Sequence[range],
        n_rollouts: int,
        inform: Callable[[Mapping[str, DictTensor]], None],
        cut: Callable[[int, int], None],
        poisons: bool,
        all_may_run: bool,
    ) -> None:
        super().__init__(layout, blocks)
        self._cut, self._all_may_run = cut, all_may_run
        self._n_rollouts, self._inform, self._parts = n_rollouts, inform, Parts(layout, poisons)

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes * self._n_rollouts

    def n_rows_at_most(self) -> int:
        return self.layout.n_slots if self._all_may_run else super().n_rows_at_most()

    def batch(self, orders: Mapping[int, RolloutOrder], version_before: int, version: int) -> PartsBatch:
        parts, rows, versions = [], [], []
        for node, order in sorted(orders.items()):
            rows.append(self.rows_of(node) if order.is_lost else self._rows_that_ran(node, order.asked.value.ran.rows))
            parts.append(self._part(node, order, rows[-1]))
            known = version if order.is_lost else version_before + order.asked.value.version
            versions.append(np.full(rows[-1].size, known))
            parts[-1].add_info(env_index=rows[-1], policy_version=versions[-1])
        return PartsBatch(parts, np.concatenate(rows), np.concatenate(versions), self.layout)

    def put_infos(self, infos: Mapping[str, DictTensor]) -> None:
        super().put_infos(infos)
        if any(not info.empty() for info in infos.values()):
            self._inform(self.infos)

    def put_agent_info(self, info: DictTensor) -> None:
        super().put_agent_info(info)
        self._inform(self.infos)

    def cut(self, member: int, number: int) -> None:
        self._cut(member, number)

    def cut_all(self) -> None:
        for node in range(len(self.blocks)):
            self.cut(node, ALL_ROLLOUTS)

    def add(self, orders: Mapping[int, RolloutOrder], trajectories: Trajectories) -> None:
        """Takes down the episodes; what nodes began anew by themselves has no end."""
        ran = {node: order.asked.value.ran for node, order in orders.items() if not order.is_lost}
        for node, each in ran.items():
            self.episodes.forget(self._of(node, each.before))
        super().add(orders, trajectories)
        for node, each in ran.items():
            self.episodes.forget(self._of(node, each.after))

    def _rows_that_ran(self, node: int, environments: list[int] | None) -> np.ndarray:
        """As the node says: if it replaced a worker before a rollout, that one's environments all run again."""
        return np.array(self.blocks[node]) if environments is None else self._of(node, environments)

    def _of(self, node: int, environments: list[int]) -> np.ndarray:
        """The global indexes of environments that are counted from a node's first."""
        return np.asarray(self.blocks[node].start + np.array(environments, np.int64))

    def _part(self, node: int, order: RolloutOrder, rows: np.ndarray) -> Part:
        if not order.is_lost:
            return self._parts.of(node, order.asked.value.columns)
        infos: Columns = {f"{name}/{key}": raw_of(tensor)[rows]
                          for name, info in self.infos.items() for key, tensor in info.items()}  # fmt: skip
        return self._parts.lost(node, infos, rows.size)
