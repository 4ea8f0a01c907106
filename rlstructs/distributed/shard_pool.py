"""`ShardPool`: the actors of a `RayReplay`, and what they have reported."""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from typing import Any

import numpy as np

from rlstructs.distributed import cluster
from rlstructs.distributed.node_handle import Bell, Node
from rlstructs.distributed.pool import NodePool
from rlstructs.distributed.shard import ROW, Dtypes, Kind
from rlstructs.errors import SpecError


class ShardPool(NodePool):
    """The actors of a `RayReplay`; a pickled copy asks the same actors."""

    noun = "shard"

    def __getstate__(self) -> dict[str, Any]:
        # A copy waits for none of these requests, and starts no actors.
        nodes = [dataclasses.replace(node, requests=deque()) for node in self.nodes]
        return {**vars(self), "nodes": nodes, "_settings": None, "_lock": None, "_bell": None, "_connection": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock, self._bell = threading.RLock(), Bell()
        self._connection = cluster.read_connection()

    @property
    def reports(self) -> list[dict[str, Any]]:
        """The last report of each shard; see `Shard.report`."""
        return [node.report for node in self.nodes]

    def refresh(self) -> None:
        """Asks every shard for a report."""
        self.gather(self.ask("report"))

    def ask_idle(self, busy: list[int]) -> None:
        """Asks the other shards for reports, unless they are to reply anyway; does not wait for them."""
        self.ask("report", only=[node.index for node in self.nodes if not (node.index in busy or node.requests)])

    def find_dtypes(self) -> Dtypes:
        """The dtypes of the tensors, by name; {} as long as no shard has rows."""
        if not any(report["dtypes"] for report in self.reports):
            self.refresh()  # other trainers may have added the first rows
        found: Dtypes = next((report["dtypes"] for report in self.reports if report["dtypes"]), {})
        return found

    def split_draws(self, n: int, kind: Kind, rng: np.random.Generator) -> list[int]:
        """Splits `n` draws among the shards, in proportion to the sums of their priorities, one in each n-th of it all.

        Raises:
            SpecError: there is nothing to draw.
        """
        while any(kind not in report["sums"] for report in self.reports):
            self.gather(self.ask("add_kind", kind))
        sums = np.array([report["sums"][kind] for report in self.reports])
        if not sums.sum() > 0:
            what = "rows" if kind == ROW else f"windows of {kind[0]} rows"
            raise SpecError(f"nothing to sample: there are no {what}, or none has a priority above zero")
        ends = np.cumsum(sums)
        points = (np.arange(n) + rng.random(n)) / n * ends[-1]
        shards = np.minimum(np.searchsorted(ends, points, side="right"), np.flatnonzero(sums)[-1])
        counts: list[int] = np.bincount(shards, minlength=len(sums)).tolist()
        return counts

    def _describe_place(self, node: Node) -> str:
        return f"on {node}"

    def _describe_losses(self, node: Node) -> str:
        return "its rows"
