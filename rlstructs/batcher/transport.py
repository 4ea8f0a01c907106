"""`Transport`: which slots a rollout is in, and how they are read or lent."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from mmap import mmap
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from rlstructs.batcher import arguments
from rlstructs.batcher.worker_record import Records, RolloutOrder
from rlstructs.episodes import NAMES_OF_STEPS, EpisodeTracker
from rlstructs.shared.layout import FIRST_BEHIND, POLICY_VERSION, Layout
from rlstructs.shared.reading import Loan, step_versions
from rlstructs.shared.slots import ALL_ROLLOUTS, SlotBuffers, Slots, columns_of, write_columns
from rlstructs.shared.weights import Parcel
from rlstructs.structures.arrays import TensorSpec
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
from rlstructs.structures.trajectories import Trajectories
from rlstructs.workers.limits import keep_freed_memory
from rlstructs.workers.messages import Future


class Outbox(Protocol):
    """Sends updates from the trainer to the workers.

    Attributes:
        version: the number of updates so far.
    """

    version: int

    def pack(self, info: Any) -> Any:
        """Puts an update where workers can read it; returns what to send to them."""

    def record_sent(self, packed: Any, requests: list[Future]) -> None:
        """Records that workers were sent this update."""

    def read_last(self) -> Parcel | None:
        """Returns a copy of the last update.

        None if there was none, or if the nodes keep it themselves.
        """

    def forget(self, workers: Collection[int]) -> None:
        """Forgets requests to replaced workers; successors have got only the last update."""


class Contents(NamedTuple):
    """The columns and the environments of rollouts.

    Attributes:
        layout: the columns of all environments.
        blocks: for each worker, or node, the global indexes of its environments.
        n_envs: E, the number of environments of one worker.
        hint: a warning for the user, if any.
    """

    layout: Layout
    blocks: list[range]
    n_envs: int
    hint: str | None = None


class TransportState(NamedTuple):
    """The exact state of a transport.

    Attributes:
        infos, episodes: see `Transport`.
        rollouts: by worker and number, what the transport keeps of a rollout that is not handed out.
    """

    infos: dict[str, DictTensor]
    episodes: EpisodeTracker
    rollouts: dict[tuple[int, int], Any]


class Transport:
    """Brings the rollouts of all workers, or nodes, to the trainer.

    Args:
        contents: the columns and the environments of rollouts.
        records: of the workers: which of their environments run.

    Attributes:
        layout, blocks: of the contents.
        infos: `agent_info` and `env_info` as the last `reset` or `execute` gave them; empty before.
        episodes: tracks the episodes that ended in rollouts that were handed out.
    """

    def __init__(self, contents: Contents, records: Records) -> None:
        keep_freed_memory()  # for batches of frames
        self.contents, self.layout, self.blocks = contents, contents.layout, contents.blocks
        self._records = records
        self.infos: dict[str, DictTensor] = {}
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

    def check_out(self, out: Trajectories, n_rows: int | None = None) -> None:
        """Raises unless a rollout of so many rows fits into `out`.

        None stands for the most rows that the next one may have.
        """
        size = self.max_rows() if n_rows is None else n_rows, self.layout.n_timesteps
        arguments.check(out, {**self.layout.row_info, **ROW_INFO}, self.layout.steps, size)

    def n_running(self) -> int:
        """The number of environments that run."""
        both = zip(self.blocks, self._records, strict=True)
        return sum(len(block if record.running is None else record.running) for block, record in both)

    def running_rows(self) -> np.ndarray:
        """The global indexes of environments that run, int64."""
        return np.concatenate([self.rows_of(worker) for worker in range(len(self.blocks))])

    def rows_of(self, worker: int) -> np.ndarray:
        """The global indexes of a worker's environments that run, int64."""
        running, block = self._records[worker].running, self.blocks[worker]
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
        """Returns the trainer's part of a finished or lost rollout; picklable.

        The rest is in the worker's reply.
        """

    def write_rollout(self, worker: int, number: int, content: Any) -> None:
        """Restores what `read_rollout` returned."""

    def add_episodes(self, orders: Mapping[int, RolloutOrder], trajectories: Trajectories) -> None:
        """Records the episodes that ended in these trajectories."""
        self.episodes.add(trajectories)

    def begin_episodes(self, workers: Collection[int]) -> None:
        """Forgets the unfinished episodes of these workers, whose environments are all reset."""
        for worker in workers:
            self.episodes.forget(np.array(self.blocks[worker]))

    def take_exact(self) -> TransportState:
        """Takes the exact state, when no rollout runs."""
        rollouts = {
            (worker, order.number): self.read_rollout(worker, order.number)
            for worker, record in enumerate(self._records)
            for order in record.orders
        }
        return TransportState(self.infos, self.episodes, rollouts)

    def load_exact(self, state: TransportState) -> None:
        """Continues from an exact state.

        The infos are set before, because jobs may need them as they are loaded.
        """
        for worker in range(len(self.blocks)):
            self.cut(worker, 0)  # what was cut before had other numbers
        for place, content in state.rollouts.items():
            self.write_rollout(*place, content)
        self.episodes = state.episodes

    def close(self) -> None:
        """Releases the memory. Idempotent."""


class SlotTransport(Transport):
    """The transport of workers that write to slots.

    Args:
        contents, records: see `Transport`.
        slot_buffers: the slot buffers of the workers.
        buffer: the memory that they lie in.
        poisons: whether memory that was not written holds poison.
    """

    def __init__(
        self, contents: Contents, records: Records, slot_buffers: SlotBuffers, buffer: mmap, poisons: bool
    ) -> None:
        super().__init__(contents, records)
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
        """Records the episodes that ended.

        Forgets unfinished episodes of environments that have failed.
        """
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


# The keys of `info` that do not lie in slots.
ROW_INFO: Mapping[str, TensorSpec] = {"env_index": ((), torch.int64), "policy_version": ((), torch.int64)}


class Batch:
    """Finished rollouts of B environments.

    Args:
        sources: the slots of all environments in each slot buffer, and which of them to take, int64, ascending.
        versions: int64 (N,), the number of updates that each environment's agent had received.

    Attributes:
        lengths, first_steps: int64 (B,), as of a `TemporalDictTensor`.
        n_timesteps: the longest of the lengths.
    """

    def __init__(self, sources: Sequence[tuple[Slots, np.ndarray]], versions: np.ndarray) -> None:
        self._sources, self._versions = sources, versions
        rows = np.concatenate([rows for _, rows in sources])
        # Sorts the rows of several slot buffers by environment; None for a single one, which is sorted.
        self._order = None if len(sources) == 1 else np.argsort(rows)
        self._rows = rows if self._order is None else rows[self._order]
        lengths = self._join([slots.lengths[rows] for slots, rows in sources])
        first_steps = self._join([slots.first_steps[rows] for slots, rows in sources])
        self.lengths, self.first_steps = torch.from_numpy(lengths), torch.from_numpy(first_steps)
        self.n_timesteps = int(lengths.max()) if rows.size else 0

    def _join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Joins rows of several slot buffers in the order of the batch."""
        return parts[0] if self._order is None else np.concatenate(parts)[self._order]

    def _wrap(self, info: dict[str, torch.Tensor], steps: Mapping[str, torch.Tensor]) -> Trajectories:
        """The trajectories of an info and steps of this batch."""
        versions = self._take_versions(info)
        if isinstance(steps, Loan):
            steps.copies.update(versions)
        elif versions:
            steps = {**steps, **versions}
        found = TemporalDictTensor.trusted(steps, self.lengths, self.first_steps)
        return Trajectories.trusted(DictTensor.trusted(info), found)

    def _take_versions(self, info: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The policy version of each step, (B, T), where steps have their own.

        It takes what it needs out of the info.
        """
        behind = info.pop(FIRST_BEHIND, None)
        if behind is None:
            return {}
        return {POLICY_VERSION: step_versions(info[POLICY_VERSION], behind, self.lengths, self.n_timesteps)}

    def read(self, out: Trajectories | None = None) -> Trajectories:
        """Copies the batch into new memory, or into `out`, which was checked before."""
        info = self._info()
        if out is None:
            return self._wrap(info, self._steps())
        versions = self._take_versions(info)
        kept = arguments.cut(out, len(self.lengths), self.n_timesteps)
        for key, tensor in info.items():
            kept.info[key].copy_(tensor)
        for key, tensor in versions.items():
            kept.trajectories[key].copy_(tensor)
        kept.lengths.copy_(self.lengths)
        first_steps = self.first_steps
        if kept.trajectories.first_steps is not None:
            first_steps = kept.trajectories.first_steps.copy_(first_steps)
        own = self._steps(dict(kept.trajectories.items()))
        steps = TemporalDictTensor.trusted(
            {**own, **{key: kept.trajectories[key] for key in versions}}, kept.lengths, first_steps
        )
        return Trajectories.trusted(kept.info, steps)

    def lend(self) -> Trajectories:
        """Returns views of the slots where that is possible, and copies elsewhere."""
        if self._order is None:
            [(slots, rows)] = self._sources
            loan = slots.lend(_rows_or_none(slots, rows), self.n_timesteps)
        else:
            loan = Loan({}, self._steps())
        return self._wrap(self._info(), loan)

    def lend_episodes(self) -> Trajectories:
        """Returns only the steps that show where episodes end.

        Values in the padding are undefined.
        """
        found: list[dict[str, torch.Tensor]] = []
        for slots, rows in self._sources:
            # Others may be written right now: not even their flags can be read.
            some = rows.size < slots.n
            loan = slots.read_later(rows, self.n_timesteps) if some else slots.lend(None, self.n_timesteps)
            found.append({name: loan[name] for name in NAMES_OF_STEPS if name in loan})
        steps = found[0]
        if self._order is not None:
            order = torch.from_numpy(self._order)
            steps = {name: torch.cat([each[name] for each in found])[order] for name in steps}
        return self._wrap(self._row_info(), steps)

    def release(self) -> None:
        """Marks the slots as read."""
        for slots, rows in self._sources:
            slots.release(_rows_or_none(slots, rows))

    def _steps(self, out: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """Copies the steps, (B, n_timesteps, ...), into new memory or into `out`."""
        if self._order is None:
            [(slots, rows)] = self._sources
            return slots.read(_rows_or_none(slots, rows), self.n_timesteps, out)
        order = torch.from_numpy(self._order)
        found = [slots.read(_rows_or_none(slots, rows), self.n_timesteps) for slots, rows in self._sources]
        steps = {name: torch.cat([tensors[name] for tensors in found])[order] for name in found[0]}
        if out is None:
            return steps
        for name, tensor in steps.items():
            out[name].copy_(tensor)
        return out

    def _info(self) -> dict[str, torch.Tensor]:
        """Copies the values that each row has only once, (B, ...)."""
        found = [slots.info_of(rows) for slots, rows in self._sources]
        info = found[0]
        if self._order is not None:
            order = torch.from_numpy(self._order)
            info = {key: torch.cat([tensors[key] for tensors in found])[order] for key in info}
        return {**info, **self._row_info()}

    def _row_info(self) -> dict[str, torch.Tensor]:
        """The values of `ROW_INFO`, (B,)."""
        versions = torch.from_numpy(self._versions[self._rows])
        return {"env_index": torch.from_numpy(self._rows), "policy_version": versions}


def _rows_or_none(slots: Slots, rows: np.ndarray) -> np.ndarray | None:
    """The rows, or None if they are all rows of the slots."""
    return None if rows.size == slots.n else rows


def write_info(slots: Slots, name: str, info: DictTensor, rows: slice) -> None:
    """Writes these rows of an `agent_info` or `env_info` of all environments to their slots."""
    for key, tensor in info.items():
        slots.column(f"{name}/{key}")[rows].copy_(tensor[rows].detach())
