"""`Slots`: shared columns for the steps of rollouts, one slot per environment.

    observation     (N, T+1, ...)   what the agent saw at t; the one at t + 1 is also the result of step t
    _observation    (N, T, ...)     the final observation, only where step t reset an environment
    action/k        (N, T, ...)     the output of the agent
    agent_state/k, agent_info/k, env_info/k   (N, ...)   their values before the first step
    reset           (N, T)          whether `_observation` is valid at t
    lengths         (N,)            number of steps
    first_steps     (N,)            number of the first step in its environment's count

An observation is stored once, in one column for each of its blocks (`layout.py`). Pages of `_observation` take memory
only where an episode ended.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from mmap import ALLOCATIONGRANULARITY, mmap
from typing import Any

import numpy as np
import torch

from rlstructs.checks import hint_batch_first
from rlstructs.errors import MissingKeyError, SpecError
from rlstructs.frameworks.torch import dtype_name
from rlstructs.shared.layout import ACTION, FOLLOWING, SEEN, Field, Layout, Rows, specs_of_steps
from rlstructs.shared.reading import Finals, Loan, RecordedSteps, blocks_of, patch_finals, read_finals, sources_of
from rlstructs.shared.writing import LazyCopies, Mover, Steps, Time, check_output, make_staged_steps, view_entries
from rlstructs.structures.arrays import as_array, find_true, put, raw_of, tensor_of
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.tree import check_same_keys, show

STATE = "agent_state/"


@dataclass(frozen=True)
class Whole:
    """A rollout as a whole, beside the columns.

    Attributes:
        tensors: `observation/k`, `action/k`, `_observation/k` -> (n, T, ...).
        reset: bool (n, T), as the column of this name.
        recorded: reads them.
    """

    tensors: dict[str, torch.Tensor]
    reset: np.ndarray
    recorded: RecordedSteps


# Steps are staged beside the slots (see `writing.py`) for at least this many environments, and at most this many bytes
# of a step and of a rollout: larger steps are written to slots as fast, and large rollouts must not double in memory.
STAGED_ENVS, STAGED_STEP, STAGED_ROLLOUT = 256, 256, 2**26


class Slots:
    """The slots `first` to `first + n - 1` of an arena.

    Only the rollout writes to them; others read after it has ended.

    Args:
        layout: the columns of all slots.
        buffer: the bytes.
        first: the first slot.
        n: number of slots; None for all.
        poisons: whether debug mode is on.
    """

    def __init__(
        self, layout: Layout, buffer: mmap | memoryview, first: int = 0, n: int | None = None, poisons: bool = False
    ) -> None:
        self.layout, self.first = layout, first
        self._poisons = poisons
        self.n = layout.n_slots if n is None else n
        self._columns = {field.name: _column(field, buffer)[first : first + self.n] for field in layout.fields}
        self.lengths: np.ndarray = self._columns["lengths"].numpy()
        self.first_steps: np.ndarray = self._columns["first_steps"].numpy()
        self._reset: np.ndarray = self._columns["reset"].numpy()
        self._packing = layout.packing()
        self._final = self._blocks(FOLLOWING)
        action = {key: self._columns[f"action/{key}"] for key in layout.action}
        self._steps = Steps(self._packing, self._blocks(SEEN), action)
        # Where a rollout is written: to the slots, or to a stage beside them.
        self._written, self._mover = self._steps, Mover(self.n)
        self._stage: Steps | None = None
        #: Whether the trainer reads this very object, in the process of the job.
        self.is_shared = False
        self._whole: Whole | None = None
        #: Name -> shape, without the first two axes, and dtype of what is handed out.
        self.specs = specs_of_steps(layout.observation, layout.action)
        sources = sources_of(self._steps.arrays, self._steps.action)
        finals = functools.partial(read_finals, self._packing, self._final)  # a method would make a reference cycle
        self._recorded = RecordedSteps(self.specs, sources, self.lengths, self._reset, finals, poisons)
        self._states = {key.removeprefix(STATE): spec for key, spec in layout.info.items() if key.startswith(STATE)}

    def column(self, name: str) -> torch.Tensor:
        """Returns a view of a whole column."""
        if name not in self.layout.info:
            self._write_whole()
        return self._columns[name]

    def info_of(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """Copies the `agent_info/`, `env_info/` and `agent_state/` of these rows."""
        return {name: _rows(self._columns[name], rows) for name in self.layout.info}

    def info(self, prefix: str) -> DictTensor:
        """Views the columns with this prefix, by name without it.

        The prefix is `agent_info/`, `env_info/` or `agent_state/`.
        """
        return DictTensor.trusted(self._columns).truncate_key(prefix)

    def begin(self, rows: np.ndarray | None, state: DictTensor, is_read: bool = False) -> Steps:
        """Starts a rollout.

        Args:
            rows: the slots whose environments run; None for all.
            state: the agent's state, one row for each of them.
            is_read: whether `read` will be called before the rollout ends.

        Returns:
            The object to write the steps to.
        """
        self.empty()
        self.check_state(state, self.n if rows is None else len(rows))
        for key in self._states:
            put(self._columns[STATE + key], slice(None) if rows is None else rows, state[key])
        if self._stage is None and self._wants_stage():
            self._stage = make_staged_steps(self._packing, self.n, self.layout.n_timesteps, self.layout.action)
        self._written = self._steps if is_read or self._stage is None else self._stage
        return self._written

    def _wants_stage(self) -> bool:
        layout = self.layout
        specs = [*layout.observation.values(), *layout.action.values()]
        n_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in specs)
        is_small = n_bytes <= STAGED_STEP and n_bytes * self.n * layout.n_timesteps <= STAGED_ROLLOUT
        return self.n >= STAGED_ENVS and is_small

    def check_state(self, state: DictTensor, n: int) -> None:
        """Checks that an agent's state has n rows, and its first state's specs.

        Raises:
            TypeError, MissingKeyError, SpecError: it differs; the message names the key.
        """
        if not isinstance(state, DictTensor):
            raise TypeError(f"agent: its next state must be a DictTensor, got {type(state).__name__}")
        for key, (shape, dtype) in self._states.items():
            if key not in state:
                raise MissingKeyError(f"agent: no {key!r} in its state, there are {sorted(state.keys())}")
            if (found := tuple(state[key].shape)) != (n, *shape) or state[key].dtype != dtype:
                wanted = f"{(n, *shape)} {dtype_name(dtype)}{hint_batch_first(found, n)}"
                raise SpecError(f"agent: state {key!r} is {show(state[key])}, expected {wanted}")
        if unknown := set(state.keys()) - set(self._states):
            raise SpecError(f"agent: state {sorted(unknown)} was not in its first one")

    def check_observation(self, rows: Rows) -> None:
        """Checks that observations have the keys, dtypes and shapes of the slots.

        Raises MissingKeyError or SpecError otherwise.
        """
        wanted, found = self._packing.specs, rows.packing.specs
        check_same_keys("environment: observation", wanted, found)
        for key, spec in wanted.items():
            if found[key] != spec:
                (shape, dtype), (own, kind) = spec, found[key]
                raise SpecError(
                    f"environment: observation {key!r} has rows of {own} {kind}, expected {shape} {dtype} as in the "
                    "first worker"
                )

    def empty(self, rows: np.ndarray | None = None) -> None:
        """Removes an unfinished rollout from these slots (None: all)."""
        self._whole = None
        index = slice(None) if rows is None else rows
        self.lengths[index] = 0
        self._reset[index] = False

    def lose(self, rows: np.ndarray) -> None:
        """Removes a failed worker's rollout and agent state from these slots."""
        self.empty(rows)
        for key in self._states:
            raw_of(self._columns[STATE + key])[rows] = 0

    def write_reset(self, t: Time, rows: np.ndarray, finals: Rows, fresh: Rows) -> None:
        """Writes a reset after step t; the fresh observations go to t + 1.

        Args:
            t: the step, or that of each of these slots.
            rows: the slots whose environments were reset, (k,).
            finals: their final observations, k rows.
            fresh: the first observations of their next episodes, k rows.
        """
        # Usually k is 1, and a slice is much faster than an index.
        at = slice(rows[0], rows[0] + 1) if rows.size == 1 else rows
        self._reset[at, t] = True
        for name, block in self._written.observation.items():
            self._final[name][at, t] = finals.blocks[name]
            block[at, t + 1] = fresh.blocks[name]

    def take_steps(self, steps: Mapping[str, torch.Tensor], reset: torch.Tensor) -> None:
        """Takes all T steps of all slots at once.

        If the trainer reads these slots in this process, the tensors themselves are handed out.

        Args:
            steps: `observation/k`, `action/k`, `_observation/k` -> (n, T, ...), final observations included; nobody
                else writes to them.
            reset: bool (n, T), the steps that ended an episode.

        Raises:
            MissingKeyError, SpecError: they are not those of the layout.
        """
        n_timesteps = self.layout.n_timesteps
        check_output(steps, {name: ((self.n, n_timesteps, *shape), kind) for name, (shape, kind) in self.specs.items()})
        tensors = {name: steps[name] for name in self.specs}
        sources = {name: (raw_of(tensor), 0) for name, tensor in tensors.items()}
        recorded = replace(self._recorded, sources=sources, reset=np.zeros_like(self._reset))
        self.lengths[...] = n_timesteps
        self._whole = Whole(tensors, as_array(reset), recorded)
        if not self.is_shared:
            self._write_whole()

    def _write_whole(self) -> None:
        """Writes a rollout that was taken as a whole to the columns."""
        whole, self._whole = self._whole, None
        if whole is None:
            return
        columns = {name: array for name, (array, _) in whole.recorded.sources.items()}
        for key, array in self._steps.action.items():
            array[...] = columns[f"action/{key}"]
        for key, array in self._steps.arrays.items():
            array[:, :-1], array[:, -1] = columns[SEEN + key], columns[FOLLOWING + key][:, -1]
        at, times = find_true(whole.reset)
        finals = Rows.of(self._packing, {key: columns[FOLLOWING + key][at, times] for key in self._steps.arrays})
        self._reset[at, times] = True
        for name, block in self._final.items():
            block[at, times] = finals.blocks[name]

    def end(self, idle: list[tuple[int, np.ndarray]]) -> None:
        """Ends a rollout: moves its steps to the slots.

        The gaps of idle steps are closed.

        Args:
            idle: ascending timesteps, each with the slots (k,) whose environment only started an episode in this step.
                The observation before an idle step is the final one of the previous episode.
        """
        gaps = self._leave_out(idle) if idle else None
        if gaps is None and not self._written.is_staged:
            return
        self._mover.begin(gaps)
        for name, block in self._steps.observation.items():
            self._mover.move(self._written.observation[name], block)
        for key, array in self._steps.action.items():
            self._mover.move(self._written.action[key], array)

    def _leave_out(self, idle: list[tuple[int, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
        """Removes idle steps from lengths and final observations; returns their gaps for `Mover.begin`."""
        rows = np.concatenate([rows for _, rows in idle])
        times = np.repeat([t for t, _ in idle], [rows.size for _, rows in idle])
        by_row = np.argsort(rows.astype(np.min_scalar_type(self.n)), kind="stable")
        rows, times = rows[by_row], times[by_row]
        if self._reset.any():
            self._move_finals(rows, times)
        counts = np.bincount(rows, minlength=self.n)
        self.lengths -= counts
        # Each place counts only the steps of its row that stay.
        places = times - (np.arange(rows.size) - np.repeat(counts.cumsum() - counts, counts))
        # The observation before the first of consecutive idle steps is the final one.
        after = places > 0
        after[1:] &= (rows[1:] != rows[:-1]) | (places[1:] != places[:-1])
        at, before, times = rows[after], places[after] - 1, times[after]
        self._reset[at, before] = True
        for name, block in self._written.observation.items():
            if block.size:
                view_entries(self._final[name])[at, before] = view_entries(block)[at, times]
        return rows, places

    def _move_finals(self, rows: np.ndarray, times: np.ndarray) -> None:
        """Moves final observations with their steps, which close the gaps of idle steps."""
        skipped = np.zeros(self._reset.shape, bool)
        skipped[rows, times] = True
        at, times = find_true(self._reset & ~skipped)
        finals = {name: block[at, times] for name, block in self._final.items()}
        self._reset[...] = False
        places = times - skipped.cumsum(axis=1, dtype=np.int32)[at, times]
        self._reset[at, places] = True
        for name, block in self._final.items():
            block[at, places] = finals[name]

    def release(self, rows: np.ndarray | None = None) -> None:
        """Marks these slots (None: all) as read; fills them with poison in debug mode."""
        self._whole = None
        if not self._poisons:
            return
        for name, (array, start) in self._recorded.sources.items():
            if not start:  # `_observation`, which starts at 1, is in the same array as `observation`
                array[slice(None) if rows is None else rows] = self._recorded.padding_value(name)

    def read(
        self, rows: np.ndarray | None, n_timesteps: int, out: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """Copies steps 0 to `n_timesteps - 1`, with zeros or poison in the padding.

        Args:
            rows: the slots; None for all.
            n_timesteps: the number of steps.
            out: tensors to fill, with the names, shapes and dtypes of the result; None for new ones.

        Returns:
            `observation/k`, `action/k`, `_observation/k` -> (B, n_timesteps, ...).
        """
        if self._whole is not None and rows is None and out is None:
            return dict(self._whole.tensors)
        return self._source().read(rows, n_timesteps, out)

    def _source(self) -> RecordedSteps:
        return self._recorded if self._whole is None else self._whole.recorded

    def read_later(self, rows: np.ndarray | None, n_timesteps: int) -> LazyCopies:
        """Reads rows of equal length lazily: each column is copied at its first use."""
        return LazyCopies(self.specs, lambda name: self._source().read_one(name, rows, n_timesteps))

    def lend(self, rows: np.ndarray | None, n_timesteps: int) -> Loan:
        """Reads steps as views where possible; the padding is undefined."""
        if rows is not None or self._whole is not None:
            return Loan({}, self.read(rows, n_timesteps))
        views = {f"observation/{key}": column[:, :n_timesteps] for key, column in self._steps.seen.items()}
        views |= {name: self._columns[name][:, :n_timesteps] for name in self.specs if name.startswith("action/")}
        seen = self._steps.seen
        if not self._reset[:, :n_timesteps].any():
            following = {f"_observation/{key}": column[:, 1 : n_timesteps + 1] for key, column in seen.items()}
            return Loan(views | following, {})
        ends = Finals(self._packing, self._final, self._reset[:, :n_timesteps])
        return Loan(
            views,
            {
                f"_observation/{key}": functools.partial(patch_finals, array, key, ends)
                for key, array in self._steps.arrays.items()
            },
        )

    def _blocks(self, prefix: str) -> dict[str, np.ndarray]:
        names = [prefix + name for name in self._packing.blocks]
        return blocks_of(self._packing, {name: self._columns[name].numpy() for name in names}, prefix)


def _rows(column: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    return tensor_of(raw_of(column)[rows], column.dtype)


def _column(field: Field, buffer: mmap | memoryview) -> torch.Tensor:
    count = int(np.prod(field.shape, dtype=np.int64))
    if not count:
        return torch.zeros(field.shape, dtype=field.dtype, device="cpu")
    # As bytes first, because numpy lacks bfloat16.
    raw = np.frombuffer(buffer, np.uint8, field.nbytes, field.offset)
    return torch.from_numpy(raw).view(field.dtype).view(field.shape)


# A cut is a rollout number: a worker ends rollouts below it early. Its size in bytes, and the cut that ends all.
CUT_BYTES = 8
ALL_ROLLOUTS = 2**63 - 1


@dataclass(frozen=True)
class SlotBuffers:
    """The places of the slot buffers in the arena.

    One cut per worker follows them. A worker ends every rollout early whose number is below its cut. It reads the cut
    without a lock: its 8 aligned bytes are read whole on every processor, and a late value does no harm, because
    nothing else depends on it. Rows, lengths and updates of weights are read after a message in a pipe, which orders
    memory on every processor.

    Args:
        layout: the layout of each buffer.
        n: number of buffers; rollout number i is written to buffer i % n.
        n_workers: number of workers that write to them.
    """

    layout: Layout
    n: int
    n_workers: int

    @property
    def reserved_nbytes(self) -> int:
        """Bytes of address space."""
        return self.n * self._stride + self.n_workers * CUT_BYTES

    @property
    def nbytes(self) -> int:
        """Bytes of memory that rollouts take, without the sparse columns."""
        return self.n * self.layout.nbytes

    def slots(self, buffer: mmap, **arguments: Any) -> list[Slots]:
        """Returns the slots of every buffer; `arguments` are those of `Slots`."""
        view = memoryview(buffer)
        return [Slots(self.layout, view[index * self._stride :], **arguments) for index in range(self.n)]

    def cuts(self, buffer: mmap) -> memoryview:
        """Returns the cuts, int64 (n_workers,).

        A worker reads its own after every step.
        """
        return memoryview(buffer)[self.n * self._stride : self.reserved_nbytes].cast("q")

    @property
    def _stride(self) -> int:
        return -(-self.layout.reserved_nbytes // ALLOCATIONGRANULARITY) * ALLOCATIONGRANULARITY


def columns_of(slots: Slots, rows: np.ndarray, n_timesteps: int) -> dict[str, np.ndarray]:
    """Returns the content of slots, by column.

    It has these rows and the first timesteps; views where this is all of a column. Columns that are only valid where an
    environment was reset have only these entries, in the order of `find_true`.
    """
    index = slice(None) if rows.size == slots.n else rows
    reset = raw_of(slots.column("reset"))[index, :n_timesteps]
    at, times = find_true(reset)
    columns = {}
    for field in slots.layout.fields:
        column = raw_of(slots.column(field.name))
        if field.sparse:
            columns[field.name] = column[at if isinstance(index, slice) else rows[at], times]
            continue
        if field.name.startswith((SEEN, ACTION)) or field.name == "reset":
            column = column[:, : n_timesteps + field.name.startswith(SEEN)]
        columns[field.name] = np.ascontiguousarray(column[index])
    return columns


def write_columns(slots: Slots, rows: np.ndarray, columns: Mapping[str, np.ndarray]) -> None:
    """Writes the result of `columns_of` to these rows.

    It must have as many rows, from slots of the same layout.
    """
    at, times = find_true(columns["reset"])
    slots.empty(rows)
    for field in slots.layout.fields:
        column, found = raw_of(slots.column(field.name)), columns[field.name]
        if field.sparse:
            column[rows[at], times] = found
        elif field.name.startswith((SEEN, ACTION)) or field.name == "reset":
            column[rows, : found.shape[1]] = found
        else:
            column[rows] = found
