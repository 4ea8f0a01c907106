"""Where the rows of a `DictTensorReplayBuffer` lie: settings of its one store."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlstructs.checks import check_size
from rlstructs.errors import SpecError, StateError
from rlstructs.public_names import set_module
from rlstructs.replay.backing import Folder, FolderBlock
from rlstructs.replay.columns import LANE, Columns
from rlstructs.replay.device_columns import TensorColumns
from rlstructs.replay.linked_columns import LinkedColumns
from rlstructs.replay.torchrl.batches import rows_of
from rlstructs.replay.torchrl.part import ANY, Part, check_neutral

# Rows that a store which grows begins with.
FEW_ROWS = 1024
# A device: that of the first rows.
AUTO = "auto"


def check_host(device: Any, what: str) -> None:
    """Raises SpecError unless this is the host."""
    if device not in (None, AUTO) and torch.device(device).type != "cpu":
        raise SpecError(f"device must be the CPU, where {what}, got {device}; give that to the buffer")


class ReplayStorage(Part):
    """What every storage says of itself; its rows are those of its buffer, as `[]` of that gives them.

    Attributes:
        max_size: rows there is room for.
        capacity: rows there is room for at first.
        data: rows that are there from the start; None for none.
        device: on which the rows lie; None for the host.
    """

    data: Any = None
    device: torch.device | None = None

    def __init__(self, max_size: int, ndim: int = 1) -> None:
        self.max_size = self.capacity = check_size("max_size", max_size)
        if ndim != 1:
            raise SpecError(
                f"ndim must be 1, got {ndim}: rows have one axis; extend a TemporalDictTensor (B, T) by its steps"
            )

    def __len__(self) -> int:
        """Rows that the buffer has to which it belongs; before it does, rows that are there from the start."""
        buffer = None if self._owner is None else self._owner()
        if buffer is not None:
            return len(buffer)
        return 0 if self.data is None else rows_of(self.data, type(self).__name__).n

    def __getitem__(self, index: Any) -> Any:
        buffer = None if self._owner is None else self._owner()
        if buffer is None:
            raise StateError(f"this {type(self).__name__} belongs to no buffer yet, which is what rows are read from")
        return buffer[index]

    def get(self, index: Any) -> Any:
        """As `[]`."""
        return self[index]

    def __iter__(self) -> Iterator[Any]:
        """The rows one by one, in the order of their ids."""
        for number in range(len(self)):
            yield self[number - len(self)]

    @property
    def alignment(self) -> int:
        """What every number of rows divides that there will be room for."""
        return self.max_size

    def columns(self) -> Columns | None:
        """What will hold the rows; None for ordinary memory."""
        return None

    def settle(self, values: Mapping[str, Any]) -> bool:
        """Whether what holds the rows is other since it is known what the first ones are."""
        return False

    def anew(self, columns: Columns) -> Columns:
        """Columns without a name yet that have as much room as these, and may take their place."""
        made = self.columns()
        return LinkedColumns(1, columns.capacity) if made is None else made

    def leave(self, columns: Columns) -> None:
        """Others have taken the place of these."""

    def capacity_for(self, n_rows: int) -> int:
        """Rows there must be room for if so many are to be held."""
        return self.capacity

    def _shown(self) -> dict[str, Any]:
        return {"max_size": self.max_size}


@set_module("rlstructs.replay")
class ListStorage(ReplayStorage):
    """Memory that doubles as it fills. Rows are columns of one schema, copies of what was given.

    Args:
        max_size: rows there will be room for.
        compilable: changes nothing, as nothing is compiled.
        device: the host, or None for it.

    Example:
        >>> ListStorage(100)
        ListStorage(max_size=100)
    """

    def __init__(self, max_size: int = 1_000_000, *, compilable: bool = False, device: Any = None) -> None:
        super().__init__(max_size)
        check_host(device, "these lists are")
        self.capacity = min(self.max_size, FEW_ROWS)

    @property
    def alignment(self) -> int:
        """See `ReplayStorage`."""
        largest = self.capacity
        while 2 * largest < self.max_size:
            largest *= 2
        return math.lcm(largest, self.max_size)

    def capacity_for(self, n_rows: int) -> int:
        """See `ReplayStorage`."""
        capacity = self.capacity
        while capacity < min(n_rows, self.max_size):
            capacity = min(2 * capacity, self.max_size)
        return capacity


@set_module("rlstructs.replay")
class TensorStorage(ReplayStorage):
    """Memory for every row from the first on; also called `LazyTensorStorage`.

    Args:
        storage: how many rows, or rows that are there from the start, a copy of which is kept: whatever `extend` takes.
        max_size: rows there is room for; None for as many as are there.
        device: where they lie; None for the host, "auto" for where the first of them do.
        ndim: 1.
        compilable: changes nothing, as nothing is compiled.
        others: more of torchrl's arguments, which change nothing here or must be False.

    Raises:
        TypeError, SpecError: neither says how many, or both do and there are more; or `ndim` is another.

    Example:
        >>> TensorStorage(100), TensorStorage({"x": torch.zeros(3, 2)}).max_size
        (TensorStorage(max_size=100), 3)
    """

    _is_auto = False  # whether the first rows will say where they lie

    def __init__(
        self,
        storage: Any = None,
        max_size: int | None = None,
        *,
        device: Any = None,
        ndim: int = 1,
        compilable: bool = False,
        **others: Any,
    ) -> None:
        neutral = {"consolidated": False, "shared_init": False, "cleanup_memmap": ANY}
        check_neutral(type(self).__name__, others, neutral)
        if isinstance(storage, (int, float, np.integer, np.floating)) and max_size is None:
            storage, max_size = None, storage
        self._is_auto = device == AUTO
        rows = None if storage is None else rows_of(storage, "TensorStorage")
        if rows is not None:
            self.data, max_size = storage, rows.n if max_size is None else max_size
        super().__init__(check_size("max_size", max_size), ndim)
        if rows is not None and rows.n > self.max_size:
            raise SpecError(f"max_size is {self.max_size}, but there are {rows.n} rows")
        named = torch.device("cpu" if device in (None, AUTO) else device)
        self.device = None if named.type == "cpu" else named
        if rows is not None:
            self.settle(rows.values)

    def columns(self) -> Columns | None:
        """See `ReplayStorage`."""
        return None if self.device is None else TensorColumns(1, self.max_size, LANE, self.device)

    def settle(self, values: Mapping[str, Any]) -> bool:
        """See `ReplayStorage`."""
        if not self._is_auto:
            return False
        self._is_auto, self.device = False, device_of(values)
        return self.device is not None


@set_module("rlstructs.replay")
class MemmapStorage(ReplayStorage):
    """A file for each column; also called `LazyMemmapStorage`.

    A folder that was not named is removed with the buffer, by the process that made it. A copy of the buffer
    has one of its own.

    Args:
        max_size: rows there is room for.
        scratch_dir: the folder, new or empty, which is made with the first row, and stays; a `TemporaryDirectory`, kept
            until this storage goes; None for a temporary one of its own.
        existsok: whether it may hold the files of an earlier buffer, which are then overwritten.
        device: None or the CPU, as files are mapped there; batches can be on another, that of the buffer.
        ndim: 1.
        compilable: changes nothing, as nothing is compiled.
        others: of torchrl's arguments `shared_init`, which must be False, and `auto_cleanup`, which must say what is:
            a folder that was named stays, a temporary one goes.

    Raises:
        SpecError: there is something else in the folder, or the device or `ndim` is another.
    """

    _kept: tempfile.TemporaryDirectory[str] | None = None

    def __init__(
        self,
        max_size: int,
        scratch_dir: str | Path | tempfile.TemporaryDirectory[str] | None = None,
        *,
        existsok: bool = False,
        device: Any = None,
        ndim: int = 1,
        compilable: bool = False,
        **others: Any,
    ) -> None:
        super().__init__(max_size, ndim)
        check_neutral(type(self).__name__, others, {"shared_init": False, "auto_cleanup": scratch_dir is None})
        check_host(device, "files are mapped")
        if isinstance(scratch_dir, tempfile.TemporaryDirectory):
            self._kept, scratch_dir = scratch_dir, scratch_dir.name
        self.scratch_dir, self.existsok = scratch_dir, existsok

    def columns(self) -> Columns:
        """See `ReplayStorage`."""
        folder = Folder(None if self.scratch_dir is None else Path(self.scratch_dir), self.existsok)
        return FolderColumns(self.max_size, folder)

    def anew(self, columns: Columns) -> Columns:
        """See `ReplayStorage`."""
        assert isinstance(columns, FolderColumns)
        return FolderColumns(self.max_size, columns.folder)

    def leave(self, columns: Columns) -> None:
        """See `ReplayStorage`."""
        assert isinstance(columns, FolderColumns)
        columns.remove()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_kept": None}  # a copy has a folder of its own

    def _shown(self) -> dict[str, Any]:
        return {**super()._shown(), "scratch_dir": None if self.scratch_dir is None else str(self.scratch_dir)}


class FolderColumns(LinkedColumns):
    """Columns that lie in the files of a folder."""

    def __init__(self, capacity: int, folder: Folder) -> None:
        self.folder = folder
        super().__init__(1, capacity, LANE, folder)

    def available_bytes(self) -> int | None:
        """Bytes that the folder's disk has free."""
        return shutil.disk_usage(self.folder.made()).free

    def remove(self) -> None:
        """Removes the files."""
        for block in self._blocks.values():
            assert isinstance(block, FolderBlock)
            block.remove()


def device_of(values: Mapping[str, Any]) -> torch.device | None:
    """Where values lie; None for the host, and for what is no tensor."""
    devices = (value.device for value in values.values() if isinstance(value, torch.Tensor))
    return next((device for device in devices if device.type != "cpu"), None)


LazyTensorStorage = TensorStorage
LazyMemmapStorage = MemmapStorage
