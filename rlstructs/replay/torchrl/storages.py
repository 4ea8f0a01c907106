"""Storages of a `DictTensorReplayBuffer`: settings for the place of its rows."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlstructs.checks import check_count, check_size
from rlstructs.errors import SpecError, StateError
from rlstructs.replay.rows.backing import Folder, FolderBlock
from rlstructs.replay.rows.columns import Columns
from rlstructs.replay.rows.lanes import LANE
from rlstructs.replay.rows.linked import LinkedColumns
from rlstructs.replay.rows.on_device import TensorColumns
from rlstructs.replay.rows.spec import Compression, Setting
from rlstructs.replay.torchrl.given_rows import take_rows
from rlstructs.replay.torchrl.part import ANY, Part, check_neutral
from rlstructs.workers.public_names import set_module

# Number of rows that a growing store begins with.
FEW_ROWS = 1024
# `max_size` of a storage without limit, as in torchrl, and a multiple of every capacity that fits into a memory.
NO_LIMIT, MOST_ROWS = torch.iinfo(torch.int64).max, 1 << 40
# Stands for the device of the first rows.
AUTO = "auto"


def check_host(device: Any, what: str) -> None:
    """Raises SpecError if the device is not the CPU.

    `what` says, for the message, what is on the CPU.
    """
    if device not in (None, AUTO) and torch.device(device).type != "cpu":
        raise SpecError(f"device must be the CPU, where {what}, got {device}; give that to the buffer")


class ReplayStorage(Part):
    """Base class of the storages.

    By index it has the rows of its buffer as they are stored, without transforms.

    Attributes:
        max_size: largest number of rows.
        capacity: the number of rows that fit at first.
        data: rows to begin with; None for none.
        device: where the rows are; None for the host.
        compression, path: which columns are compressed, and a folder for the rows.
    """

    data: Any = None
    device: torch.device | None = None
    compression: Setting = None
    path: str | Path | None = None

    def __init__(self, max_size: int, ndim: int = 1) -> None:
        self.max_size = self.capacity = check_size("max_size", max_size)
        if ndim != 1:
            raise SpecError(f"ndim must be 1, got {ndim}: rows have one axis; extend a TemporalDictTensor by its steps")

    def __len__(self) -> int:
        """Returns the number of rows in the buffer.

        Without a buffer it is the number of rows to begin with.
        """
        if self.owner is not None:
            return len(self.owner)
        return 0 if self.data is None else take_rows(self.data, type(self).__name__).n

    def __getitem__(self, index: Any) -> Any:
        if self.owner is None:
            raise StateError(f"this {type(self).__name__} belongs to no buffer yet, and has no rows to read")
        return self.owner.read_stored(index)

    def get(self, index: Any) -> Any:
        """Reads rows, as `[]` does."""
        return self[index]

    def __iter__(self) -> Iterator[Any]:
        """Yields the rows one by one, in the order of their ids."""
        for number in range(len(self)):
            yield self[number - len(self)]

    def __contains__(self, index: Any) -> bool:
        try:
            self[index]
        except IndexError:
            return False
        return True

    @property
    def alignment(self) -> int:
        """A multiple of every capacity that the store will have."""
        return self.max_size

    def columns(self) -> Columns | None:
        """Makes new columns for the rows; None for columns in ordinary memory."""
        return None

    def settle(self, values: Mapping[str, Any]) -> bool:
        """Takes settings from the first rows.

        Returns whether the rows need other columns than the present ones.
        """
        return False

    def renew(self, columns: Columns) -> Columns:
        """Makes empty columns of the same capacity, which may replace these."""
        return self.columns() or columns.emptied(columns.capacity)

    def discard(self, columns: Columns) -> None:
        """Removes the files of columns that were replaced."""

    def capacity_for(self, n_rows: int) -> int:
        """Returns the capacity for `n_rows` rows."""
        return self.capacity

    def _shown(self) -> dict[str, Any]:
        return {"max_size": self.max_size}


@set_module("rlstructs.replay")
class ListStorage(ReplayStorage):
    """Memory that doubles when it is full.

    Rows have one schema, and are copies of the given ones.

    Args:
        max_size: largest number of rows; None for no limit.
        compilable: changes nothing, as nothing is compiled.
        device: None or the CPU.
        compression: "zstd", "zstd:LEVEL", or column -> one of these, compresses columns; see `Memory`.

    Example:
        >>> ListStorage(100)
        ListStorage(max_size=100)
    """

    def __init__(
        self,
        max_size: int | None = None,
        *,
        compilable: bool = False,
        device: Any = None,
        compression: Setting = None,
    ) -> None:
        super().__init__(NO_LIMIT if max_size is None else max_size)
        self.compression = compression
        check_host(device, "these lists are")
        self.capacity = min(self.max_size, FEW_ROWS)

    @property
    def alignment(self) -> int:
        if self.max_size > MOST_ROWS:
            return MOST_ROWS
        last_but_one = self.capacity_for((self.max_size + 1) // 2)  # all before it divide it
        return math.lcm(last_but_one, self.max_size)

    def capacity_for(self, n_rows: int) -> int:
        capacity = self.capacity
        while capacity < min(n_rows, self.max_size):
            capacity = min(2 * capacity, self.max_size)
        return capacity

    def _shown(self) -> dict[str, Any]:
        return {"max_size": None} if self.max_size == NO_LIMIT else super()._shown()


@set_module("rlstructs.replay")
class CompressedListStorage(ListStorage):
    """A `ListStorage` of compressed rows.

    It compresses columns of uint8 and bool with rows of 512 bytes or more; `ListStorage(compression=...)` others.

    Args:
        max_size: largest number of rows.
        compression_fn, decompression_fn: must be None, as zstd is used.
        compression_level: zstd's, from 1 to 22.
        device: None or the CPU.
        compilable: changes nothing, as nothing is compiled.

    Raises:
        ImportError: there is no zstd.

    Example:
        >>> CompressedListStorage(100, compression_level=1)
        CompressedListStorage(max_size=100)
    """

    def __init__(
        self,
        max_size: int | None = None,
        *,
        compression_fn: Any = None,
        decompression_fn: Any = None,
        compression_level: int = 3,
        device: Any = None,
        compilable: bool = False,
    ) -> None:
        functions = {"compression_fn": compression_fn, "decompression_fn": decompression_fn}
        check_neutral(type(self).__name__, functions, dict.fromkeys(functions))
        setting = Compression(f"zstd:{check_count('compression_level', compression_level)}")
        super().__init__(max_size, device=device, compression=setting)


@set_module("rlstructs.replay")
class TensorStorage(ReplayStorage):
    """Memory for all rows, allocated with the first one; also called `LazyTensorStorage`.

    Args:
        storage: largest number of rows; or rows to begin with, in any form that `extend` takes, which are copied.
        max_size: largest number of rows; None for the number given by `storage`.
        device: of the rows; None for the host, "auto" for the device of the first rows.
        ndim: must be 1.
        compilable: changes nothing, as nothing is compiled.
        compression: "zstd", "zstd:LEVEL", or column -> one of these, compresses columns of the host; see `Memory`.
        path: a folder for the rows, which opens again after a program was killed; see `Memory`.
        others: further arguments of torchrl's, which change nothing or must be False.

    Raises:
        TypeError, SpecError: no number is given, there are more rows than `max_size`, or `ndim` is not 1.

    Example:
        >>> TensorStorage(100), TensorStorage({"x": torch.zeros(3, 2)}).max_size
        (TensorStorage(max_size=100), 3)
    """

    _is_auto = False  # whether the first rows decide about the device

    def __init__(
        self,
        storage: Any = None,
        max_size: int | None = None,
        *,
        device: Any = None,
        ndim: int = 1,
        compilable: bool = False,
        compression: Setting = None,
        path: str | Path | None = None,
        **others: Any,
    ) -> None:
        self.compression, self.path = compression, path
        neutral = {"consolidated": False, "shared_init": False, "cleanup_memmap": ANY}
        check_neutral(type(self).__name__, others, neutral)
        if isinstance(storage, (int, float, np.integer, np.floating)) and max_size is None:
            storage, max_size = None, storage
        self._is_auto = device == AUTO
        rows = None if storage is None else take_rows(storage, "TensorStorage")
        if rows is not None:
            self.data, max_size = storage, rows.n if max_size is None else max_size
        super().__init__(check_size("max_size", max_size), ndim)
        if rows is not None and rows.n > self.max_size:
            raise SpecError(f"max_size is {self.max_size}, but there are {rows.n} rows")
        named = torch.device("cpu" if device in (None, AUTO) else device)
        self.device = None if named.type == "cpu" else named
        if (compression is not None or path is not None) and (self.device is not None or self._is_auto):
            raise SpecError(f"compression and path need rows of the host: leave out device, got {device!r}")
        if rows is not None:
            self.settle(rows.values)

    def columns(self) -> Columns | None:
        return None if self.device is None else TensorColumns(1, self.max_size, LANE, self.device)

    def settle(self, values: Mapping[str, Any]) -> bool:
        if not self._is_auto:
            return False
        self._is_auto, self.device = False, find_device(values)
        return self.device is not None


@set_module("rlstructs.replay")
class MemmapStorage(ReplayStorage):
    """A file for each column; also called `LazyMemmapStorage`.

    A temporary folder is removed with the buffer, by the process that created it. A copy of the buffer has a temporary
    folder of its own.

    Args:
        max_size: largest number of rows.
        scratch_dir: a new or empty folder, created with the first row and never removed; a `TemporaryDirectory`, which
            lives as long as this storage; None for a temporary folder.
        existsok: whether to overwrite the files of an earlier buffer in the folder.
        device: None or the CPU, where files are mapped; the buffer may hand out batches on another device.
        ndim: must be 1.
        compilable: changes nothing, as nothing is compiled.
        others: further arguments of torchrl's: `shared_init`, which must be False, and `auto_cleanup`, which must be
            True for a temporary folder and False for one that was named.

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
        folder = Folder(None if self.scratch_dir is None else Path(self.scratch_dir), self.existsok)
        return FolderColumns(self.max_size, folder)

    def renew(self, columns: Columns) -> Columns:
        assert isinstance(columns, FolderColumns)
        return FolderColumns(self.max_size, columns.folder)

    def discard(self, columns: Columns) -> None:
        assert isinstance(columns, FolderColumns)
        columns.remove()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_kept": None}  # a copy has a folder of its own

    def _shown(self) -> dict[str, Any]:
        return {**super()._shown(), "scratch_dir": None if self.scratch_dir is None else str(self.scratch_dir)}


class FolderColumns(LinkedColumns):
    """Columns in the files of a folder."""

    def __init__(self, capacity: int, folder: Folder) -> None:
        self.folder = folder
        super().__init__(1, capacity, LANE, folder)

    def remove(self) -> None:
        """Removes the files."""
        for block in self._blocks.values():
            assert isinstance(block, FolderBlock)
            block.remove()


def find_device(values: Mapping[str, Any]) -> torch.device | None:
    """Finds the device of the tensors among these values; None for the host."""
    devices = (value.device for value in values.values() if isinstance(value, torch.Tensor))
    return next((device for device in devices if device.type != "cpu"), None)


LazyTensorStorage = TensorStorage
LazyMemmapStorage = MemmapStorage
