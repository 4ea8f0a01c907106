"""Brings rollouts from nodes to the trainer, and updates of agents to the nodes.

A node sends the columns of its slots, so each observation once, but only the rows and timesteps that were written. They
arrive as read-only arrays in the object store; `get` copies them once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from rlstructs.batcher.transport import Batch, Contents, Transport
from rlstructs.batcher.worker_record import Records, RolloutOrder
from rlstructs.distributed import cluster
from rlstructs.distributed.cluster import Columns
from rlstructs.episodes import NAMES_OF_STEPS
from rlstructs.shared.layout import ACTION, FOLLOWING, SEEN, Layout, Packing, specs_of_steps
from rlstructs.shared.reading import RecordedSteps, blocks_of, sources_of
from rlstructs.shared.slots import ALL_ROLLOUTS
from rlstructs.shared.weights import Parcel
from rlstructs.structures.arrays import TensorSpec, find_true, raw_dtype, raw_of, tensors_of
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.trajectories import Trajectories
from rlstructs.workers.messages import Future
from rlstructs.workers.public_names import set_module


@set_module("rlstructs.distributed")
class Part(Mapping[str, np.ndarray]):
    """One node's part of a rollout: read-only arrays by name, in the object store.

    Their shape is (B, T, ...).

    Values behind a row's length are undefined. `_observation/...` of a rollout in which an environment was reset is a
    copy, made at the first use. bfloat16, which numpy lacks, is given as int16.

    Attributes:
        node: the index of the node.
        info: arrays with one entry for each row, (B, ...), by name.
        lengths: int64 (B,), the number of steps in each row.
        first_steps: int64 (B,), as of a `TemporalDictTensor`.
    """

    def __init__(self, node: int, recorded: RecordedSteps, first_steps: np.ndarray, info: Columns) -> None:
        self.node, self.info, self.lengths, self.first_steps = node, info, recorded.lengths, first_steps
        self._recorded, self._copies = recorded, dict[str, np.ndarray]()

    @property
    def n_timesteps(self) -> int:
        """The longest length."""
        return int(self._recorded.reset.shape[1])

    def __getitem__(self, name: str) -> np.ndarray:
        if name in self._copies:
            return self._copies[name]
        array, start = self._recorded.sources[name]
        steps = array[:, start : start + self.n_timesteps]
        if not name.startswith(FOLLOWING) or not self._recorded.reset.any():
            return steps
        copy = self._copies[name] = self._put_finals(name.removeprefix(FOLLOWING), steps)
        return copy

    def _put_finals(self, key: str, steps: np.ndarray) -> np.ndarray:
        """Copies next observations, with the final ones in their places."""
        at, times = find_true(self._recorded.reset)
        steps = np.array(steps, order="C")
        steps[at, times] = self._recorded.finals(at, times)[key]
        steps.flags.writeable = False
        return steps

    def add_info(self, **columns: np.ndarray) -> None:
        """Adds arrays to `info`, and makes them read-only."""
        for column in columns.values():
            column.flags.writeable = False
        self.info |= columns

    def read(self, n_timesteps: int, out: Mapping[str, torch.Tensor]) -> None:
        """Copies its steps to tensors (B, n_timesteps, ...) of the same names."""
        self._recorded.read(None, n_timesteps, out)

    def __iter__(self) -> Iterator[str]:
        return iter(self._recorded.sources)

    def __len__(self) -> int:
        return len(self._recorded.sources)


class PartBuilder:
    """Builds node parts from what nodes send.

    Args:
        layout: the columns of all environments.
        poisons: whether the padding of batches holds poison instead of zeros.
    """

    def __init__(self, layout: Layout, poisons: bool) -> None:
        self.layout, self._poisons = layout, poisons
        self._packing = layout.packing()
        self.specs = specs_of_steps(layout.observation, layout.action)

    def build(self, node: int, columns: Columns) -> Part:
        """Builds the part of a node that has sent these columns."""
        blocks = blocks_of(self._packing, columns, SEEN)
        seen = self._packing.views(blocks)
        sources = sources_of(seen, {key: columns[ACTION + key] for key in self.layout.action})
        finals = partial(_view_finals, self._packing, blocks_of(self._packing, columns, FOLLOWING))
        recorded = RecordedSteps(self.specs, sources, columns["lengths"], columns["reset"], finals, self._poisons)
        return Part(node, recorded, columns["first_steps"], {name: columns[name] for name in self.layout.info})

    def build_lost(self, node: int, infos: Columns, n_rows: int) -> Part:
        """Builds rows without steps for a node that has sent nothing.

        Args:
            node: the index of the node.
            infos: the columns of `info` that are known nevertheless, by name; others are zeros.
            n_rows: the number of rows.
        """
        columns = {
            field.name: np.zeros((n_rows, *_shape_without_steps(field.name, field.shape[1:])), raw_dtype(field.dtype))
            for field in self.layout.fields
            if not field.sparse
        }
        columns |= {
            field.name: np.zeros((0, *field.shape[2:]), raw_dtype(field.dtype))
            for field in self.layout.fields
            if field.sparse
        }
        columns |= infos
        for column in columns.values():
            column.flags.writeable = False
        return self.build(node, columns)


def _shape_without_steps(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a column that has no steps, without its first axis."""
    if name.startswith((SEEN, ACTION)) or name == "reset":
        return (int(name.startswith(SEEN)), *shape[1:])
    return shape


def _view_finals(
    packing: Packing, blocks: dict[str, np.ndarray], rows: np.ndarray, times: np.ndarray
) -> dict[str, np.ndarray]:
    # `rows` and `times` are not needed: nodes send final observations in the order in which they are asked for.
    return packing.views(blocks)


class NodePartsBatch(Batch):
    """A batch of node parts.

    Args:
        node_parts: the parts, in the order of the nodes.
        rows: int64 (B,), the global index of each environment.
        versions: int64 (B,), the number of updates that its agent had had.
        layout: the columns of all environments.
    """

    def __init__(self, node_parts: Sequence[Part], rows: np.ndarray, versions: np.ndarray, layout: Layout) -> None:
        self.node_parts, self._rows, self._versions, self._layout = node_parts, rows, versions, layout
        self._specs = specs_of_steps(layout.observation, layout.action)
        self.lengths = torch.from_numpy(np.concatenate([each.lengths for each in node_parts]))
        self.first_steps = torch.from_numpy(np.concatenate([each.first_steps for each in node_parts]))
        self.n_timesteps = int(self.lengths.max()) if rows.size else 0

    def release(self) -> None:
        """Does nothing: Ray frees the object store when nothing refers to it."""

    def _steps(self, out: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        steps = _make_steps((len(self.lengths), self.n_timesteps), self._specs) if out is None else out
        for node_part, rows in self._place():
            node_part.read(self.n_timesteps, {name: tensor[rows] for name, tensor in steps.items()})
        return steps

    def lend(self) -> Trajectories:
        """Copies only the steps that show where episodes end.

        Values in the padding are undefined.
        """
        specs = {name: spec for name, spec in self._specs.items() if name in NAMES_OF_STEPS}
        steps = _make_steps((len(self.lengths), self.n_timesteps), specs)
        for node_part, rows in self._place():
            for name, tensor in steps.items():
                raw_of(tensor)[rows, : node_part.n_timesteps] = node_part[name]
        info = {"env_index": torch.from_numpy(self._rows), "policy_version": torch.from_numpy(self._versions)}
        return self._wrap(info, steps)

    lend_episodes = lend

    def _place(self) -> Iterator[tuple[Part, slice]]:
        """Yields each node part with its rows of the batch."""
        end = 0
        for node_part in self.node_parts:
            first, end = end, end + len(node_part.lengths)
            yield node_part, slice(first, end)

    def _info(self) -> dict[str, torch.Tensor]:
        info = tensors_of(
            {name: np.concatenate([each.info[name] for each in self.node_parts]) for name in self._layout.info},
            self._layout.info,
        )
        rows, versions = torch.from_numpy(self._rows), torch.from_numpy(self._versions)
        return {**info, "env_index": rows, "policy_version": versions}


def _make_steps(lead: tuple[int, int], specs: Mapping[str, TensorSpec]) -> dict[str, torch.Tensor]:
    """Makes tensors (B, T, ...) of these specs; `lead` is B and T."""
    # numpy asks for huge pages and torch does not, which takes most of the time of large batches.
    arrays = {name: np.empty((*lead, *shape), raw_dtype(dtype)) for name, (shape, dtype) in specs.items()}
    return tensors_of(arrays, specs)


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
