"""Takes in the rows of a `DictTensorReplayBuffer`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rlstructs.errors import MissingKeyError, OutOfMemoryError, SpecError
from rlstructs.replay.intake.arrays import flat_items, host_array
from rlstructs.replay.intake.intake import ERROR, Intake
from rlstructs.replay.leave.array_dict import ArrayDict
from rlstructs.replay.rows.spec import Spec
from rlstructs.replay.rows.step_writer import StepWriter
from rlstructs.replay.torchrl.assembly import Assembly
from rlstructs.replay.torchrl.given_rows import GivenRows, find_axes, refuse_tensorclass, restore_form, take_rows
from rlstructs.replay.torchrl.prioritized_sampler import PrioritizedSampler
from rlstructs.replay.torchrl.samplers import INDEX, WEIGHT
from rlstructs.replay.torchrl.writers import Writer
from rlstructs.structures.dict_tensor import DictTensor


class RowIntake:
    """Writes given rows, in any form, to the places its writer chooses.

    Args:
        parts: of the buffer.
        intake: converts rows for its columns, and adds columns.

    Attributes:
        parts: of the buffer.
        n_written: how many rows were kept since the buffer was made or emptied, overwritten ones included.
    """

    def __init__(self, parts: Assembly, intake: Intake) -> None:
        ring = parts.store.ring
        self.parts, self._intake, self.n_written = parts, intake, int(ring.head[0] - ring.base[0])

    def convert(self, values: Mapping[str, Any], unknown: str = ERROR, missing: str = ERROR) -> dict[str, Any]:
        """Converts rows (n, ...) for columns, (1, n, ...); adds missing columns.

        See `Intake.convert`.
        """
        return self._intake.convert({name: value[None] for name, value in values.items()}, unknown, missing)

    def add(self, data: Any) -> int:
        """Adds one row; see `DictTensorReplayBuffer.add`."""
        refuse_tensorclass(data, "add")
        row = flat_items(data, "add")
        if (row_id := self.add_quickly(row)) is not None:  # now that it is flat
            return row_id
        ids = self.store(GivenRows.from_row(data, row), "add")
        return int(ids[0]) if ids.size else -1

    def add_quickly(self, row: Mapping[str, Any]) -> int | None:
        """Adds one row that only has to be copied; returns its row id.

        None if `add` has to add it.
        """
        parts = self.parts
        with parts.lock:
            quick = parts.quick
            # Users may have put a transform into the existing `Compose`.
            if not isinstance(quick, StepWriter) or (len(parts.transform) and parts.transform.has_inverse):
                return None
            ring = parts.store.ring
            head, capacity = int(ring.head.item(0)), ring.capacity
            if capacity < parts.storage.max_size and head - int(ring.base.item(0)) >= capacity:
                return None  # it has to grow
            if quick.write(row, None, self._convert_value, is_row=True) is None:
                return None
            self.n_written += 1
            if isinstance(parts.sampler, PrioritizedSampler):
                parts.sampler.written = np.array([head % capacity]), np.array([head])
            return head % capacity

    def store(
        self, given: GivenRows, owner: str, update: bool | None = None, writer: Writer | None = None
    ) -> np.ndarray:
        """Writes rows.

        Args:
            given: the rows.
            owner: name of the public method, for messages.
            update: see `update_priority` of `DictTensorReplayBuffer.extend`.
            writer: writes them in place of the buffer's.

        Returns:
            The row ids, int64 (n,); -1 for rows that were not kept.
        """
        parts = self.parts
        with parts.lock:
            if not len(parts.store) and parts.export.framework == "torch":
                parts.axes = find_axes(given.batch)
            writer = parts.writer if writer is None else writer
            writer.refuse()
            inverted = self.invert(given, owner)
            if inverted is None or not inverted.n:
                return np.zeros(0, np.int64)
            try:
                return self._write(inverted, update, writer)
            except (SpecError, MissingKeyError):
                if len(parts.store) or not parts.specs:
                    raise
            return self._write_anew(inverted, update, writer)

    def _write(self, rows: GivenRows, update: bool | None, writer: Writer) -> np.ndarray:
        """Writes rows to existing or new columns.

        Nothing changes if it raises SpecError.
        """
        parts, store, rows = self.parts, self.parts.store, self._drop_reserved(rows)
        if not parts.specs:
            self._check_names(rows.values)
        writer.check(rows.values, rows.n, parts.specs)
        priorities = self._find_priorities(rows, update)
        if not parts.specs and parts.storage.settle(rows.values):
            store.take_columns(parts.storage.renew(store.columns))
            if parts.export.framework == "torch" and parts.export.device is None:
                parts.export.device = parts.storage.device
        block = self.convert(rows.values)
        done, starts = parts.marks.find(block, rows)
        self._make_room(rows.n)
        ids, replaced = writer.write(store, block, rows.n, done, starts)
        self.n_written += rows.n if writer.is_plain else int((ids >= 0).sum())
        parts.quick = self._find_quick_way() if parts.quick is None else parts.quick
        if replaced.size:
            parts.sampler.replaced(store, replaced)
        if isinstance(parts.sampler, PrioritizedSampler):
            parts.sampler.written = ids.copy(), store.view().steps(ids)
            if priorities is not None:
                parts.sampler.update(store, ids, priorities)
        return ids

    def _write_anew(self, rows: GivenRows, update: bool | None, writer: Writer) -> np.ndarray:
        """Writes rows of another schema to a buffer that was emptied.

        If this fails, the old columns are put back.
        """
        store, storage, marks = self.parts.store, self.parts.storage, self.parts.marks
        before = store.take_columns(storage.renew(store.columns))
        were_known, marks.are_known = marks.are_known, False
        try:
            ids = self._write(rows, update, writer)
        except BaseException:
            storage.discard(store.take_columns(before))
            marks.are_known = were_known
            raise
        storage.discard(before)
        return ids

    def invert(self, given: GivenRows, owner: str) -> GivenRows | None:
        """Passes rows through the inverse transforms; None if one of them drops the rows."""
        parts = self.parts
        if not parts.transform.has_inverse:
            return given
        batch: Any
        if parts.export.framework == "torch":
            tensors = {name: _copy_to_tensor(name, value) for name, value in given.values.items()}
            batch = restore_form(DictTensor(tensors), parts.axes)
        else:
            batch = ArrayDict({name: np.array(host_array(name, value)) for name, value in given.values.items()})
        batch = parts.transform.inv(batch)
        if batch is None:
            return None
        rows = take_rows(batch, owner)
        return GivenRows(rows.values, rows.n, given.done, given.starts) if rows.n == given.n else rows

    def _drop_reserved(self, rows: GivenRows) -> GivenRows:
        """Drops the keys of a sample that are not columns.

        The rows are a sample if they have an int64 `index`.
        """
        index = rows.values.get(INDEX)
        if index is None or str(index.dtype).rpartition(".")[2] != "int64":
            return rows
        parts = self.parts
        reserved = parts.reserved_names() | {WEIGHT}
        if parts.specs:
            reserved |= parts.sampler.marks(rows.values, parts.specs)
        reserved -= parts.specs.keys()
        return replace(rows, values={name: value for name, value in rows.values.items() if name not in reserved})

    def _check_names(self, values: Mapping[str, Any]) -> None:
        """Raises SpecError or MissingKeyError if these cannot become the columns."""
        if not values:
            raise SpecError("a row needs a column, there is none")
        if taken := sorted(self.parts.reserved_names() & set(values)):
            raise SpecError(f"key(s) {taken} cannot be stored: samples have {taken} of their own")
        self.parts.sampler.check_keys(values)

    def _find_priorities(self, rows: GivenRows, update: bool | None) -> np.ndarray | None:
        """Finds the priorities among the rows, float64 (n,).

        None if there are none to be used.
        """
        sampler, key = self.parts.sampler, self.parts.priority_key
        if not isinstance(sampler, PrioritizedSampler) or update is False:
            return None
        if key in rows.values:
            return sampler.check(rows.values[key], rows.n)
        if update:
            raise MissingKeyError(f"no {key!r} to update priorities with, got {sorted(rows.values)}")
        return None

    def _make_room(self, n_rows: int) -> None:
        """Grows the store if it has to hold more rows.

        Raises:
            OutOfMemoryError: the memory is not available.
        """
        store, storage = self.parts.store, self.parts.storage
        columns = store.columns
        if columns.capacity == storage.max_size:  # as nearly always; counting the rows takes longer
            return
        capacity = storage.capacity_for(len(store) + n_rows)
        if capacity == columns.capacity:
            return
        needed, available = columns.nbytes // columns.capacity * capacity, columns.available_bytes()
        if available is not None and needed > available:
            raise OutOfMemoryError(f"{capacity:,} rows: {needed:,} bytes are needed, {available:,} are available")
        store.grow(capacity)
        self.parts.sampler.grown(columns.n_rows)

    def _find_quick_way(self) -> StepWriter | bool:
        parts = self.parts
        with_priority = isinstance(parts.sampler, PrioritizedSampler) and parts.priority_key in parts.specs
        is_plain = parts.writer.is_plain and not parts.transform.has_inverse and not with_priority
        if not is_plain or parts.marks.id_keys(parts.specs) or not parts.store.columns.on_host:
            return False
        return StepWriter(parts.store, parts.marks.end_keys(parts.specs))

    def _convert_value(self, name: str, value: Any, spec: Spec) -> Any:
        return self._intake.as_rows(name, value, spec)[0]

    def empty(self, with_count: bool) -> None:
        """Drops every row, and if `with_count` sets `n_written` to 0."""
        parts = self.parts
        with parts.lock:
            parts.writer.refuse()
            parts.store.clear()
            parts.sampler.cleared()
            parts.writer.changed()
            parts.quick = None  # the next rows may be of another schema
            if with_count:
                self.n_written = 0


def _copy_to_tensor(name: str, value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    tensor = torch.from_numpy(np.array(host_array(name, value)))
    return tensor.bfloat16() if "bfloat16" in str(value.dtype) else tensor
