"""Columns that are torch tensors on a device.

Rows are written and drawn without passing through the host. The stream of the device orders writes and draws of several
threads. Threads with streams of their own must synchronise themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import numpy as np
import torch

from rlstructs.errors import StateError
from rlstructs.replay.rows.backing import Backing
from rlstructs.replay.rows.columns import Columns
from rlstructs.replay.rows.lanes import LANE
from rlstructs.replay.rows.spec import Spec
from rlstructs.structures.arrays import tensor_to_array

# Dtypes that torch cannot index or numpy lacks, and those that their bits are stored as.
STORED = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.bfloat16: torch.int16,
}


class TensorColumns(Columns):
    """Named tensors; see `Columns`.

    Args:
        n_lanes: number of rings.
        capacity: rows per lane.
        order: "lane" or "slot".
        device: where the tensors are.

    Example:
        >>> columns = TensorColumns(2, 3, "slot", torch.device("cpu"))
        >>> columns.add("reward", Spec(np.dtype(np.float32)))
        >>> columns.put_cells("reward", slice(None), 2, torch.tensor([1.0, 2.0]))
        >>> columns.gather(["reward"], np.array([5, 4]))
        [tensor([2., 1.])]
    """

    on_host = False
    flat: dict[str, Any]  # of tensors
    cells: dict[str, Any]

    def __init__(self, n_lanes: int, capacity: int, order: str = LANE, device: torch.device | str = "cuda") -> None:
        self.device = torch.device(device)
        super().__init__(n_lanes, capacity, order)

    def available_bytes(self) -> int | None:
        """Returns the free bytes of the device.

        They include bytes that torch has reserved but does not use.
        """
        if self.device.type != "cuda":
            return super().available_bytes()
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return int(torch.cuda.mem_get_info(self.device)[0]) + kept

    def copy_to(self, backing: Backing) -> Callable[[], None]:
        """Raises StateError: tensors of a device cannot be moved."""
        raise StateError(f"the rows lie on {self.device} and cannot be moved; make the memory with device='cpu'")

    def gather(self, names: Iterable[str], rows: np.ndarray) -> list[Any]:
        """Gathers rows of some columns, new tensors `(*rows.shape, *shape)`."""
        index = self._moved(rows.reshape(-1))
        found = [self.flat[name].index_select(0, index) for name in names]
        return found if rows.ndim == 1 else [each.reshape(*rows.shape, *each.shape[1:]) for each in found]

    def _copy_slots(self, name: str, n: int, parts: list[tuple[slice, slice]], by_lane: bool) -> torch.Tensor:
        cells = self.cells[name]
        copy = torch.cat([cells[:, slots] for _, slots in parts], 1)
        return (copy if by_lane else copy.swapaxes(0, 1)).reshape(n * self.n_lanes, *cells.shape[2:])

    def host(self, name: str, values: torch.Tensor) -> np.ndarray:
        array: np.ndarray = values.cpu().numpy().view(self.specs[name].dtype)
        return array

    def slots_to_file(self, name: str, n: int) -> Any:
        """Returns the first n slots of every lane; see `Columns.slots_to_file`.

        The column is copied to the host when numpy asks for an array.
        """
        return OnDemand(super().slots_to_file(name, n), self.specs[name].dtype)

    def put_rows(self, name: str, rows: Any, values: Any) -> None:
        self.flat[name][self._index(rows)] = values

    def put_cells(self, name: str, lanes: Any, slots: Any, values: Any) -> None:
        self.cells[name][self._index(lanes), slots] = values

    def own(self, value: Any, spec: Spec) -> torch.Tensor | None:
        """Returns a tensor of this device and the column's dtype, else None."""
        if isinstance(value, torch.Tensor) and value.device == self.device and value.dtype is _named(spec):
            return value.detach()
        return None

    def converted(self, name: str, values: Any, spec: Spec) -> torch.Tensor:
        """Converts values to a tensor on this device; see `Columns.converted`."""
        stored = STORED.get(_named(spec), _named(spec))
        if isinstance(values, torch.Tensor):
            if values.dtype in (stored, _named(spec)):
                return values.detach().resolve_conj().resolve_neg().to(self.device).view(stored)
            values = tensor_to_array(name, values)
        return self._moved(super().converted(name, values, spec)).view(stored)

    def _moved(self, values: np.ndarray) -> torch.Tensor:
        if not values.flags.writeable or any(stride < 0 for stride in values.strides):  # torch takes neither
            values = np.array(values, order="C")
        return torch.from_numpy(values).to(self.device)

    def _index(self, at: Any) -> Any:
        return self._moved(at) if isinstance(at, np.ndarray) else at

    def _rows_in(self, name: str, block: Any, spec: Spec) -> Any:
        return block  # a tensor

    # Tensors that are created in inference mode cannot be written to outside of it.

    @torch.inference_mode(False)
    def _map_one(self, name: str) -> None:
        super()._map_one(name)

    def _group(self, specs: Mapping[str, Spec]) -> list[dict[str, Spec]]:
        return []

    @torch.inference_mode(False)
    def make_blocks(self, specs: Mapping[str, Spec]) -> dict[str, Any]:
        blocks = {}
        for name, spec in specs.items():
            dtype, shape = _named(spec), (self.n_rows, *spec.shape)
            blocks[name] = torch.zeros(shape, dtype=STORED.get(dtype, dtype), device=self.device)
        return blocks

    def __getstate__(self) -> dict[str, Any]:
        # By value, like ordinary memory: torch would share its memory with a started process.
        blocks: Mapping[str, Any] = self._blocks
        return {**super().__getstate__(), "_blocks": {name: tensor.cpu().numpy() for name, tensor in blocks.items()}}

    @torch.inference_mode(False)
    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.device = state["device"]
        tensors = {name: self._moved(array) for name, array in state["_blocks"].items()}
        super().__setstate__({**state, "_blocks": tensors})


class OnDemand:
    """A tensor on a device, copied to the host on demand.

    It is copied whenever numpy asks for an array.

    Args:
        tensor: the tensor.
        dtype: of the array, of the same size.
    """

    def __init__(self, tensor: torch.Tensor, dtype: np.dtype) -> None:
        self._tensor, self.dtype, self.shape = tensor, dtype, tuple(tensor.shape)

    def __getitem__(self, index: Any) -> OnDemand:
        return OnDemand(self._tensor[index], self.dtype)

    def reshape(self, shape: tuple[int, ...]) -> OnDemand:
        return OnDemand(self._tensor.reshape(shape), self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self._tensor.cpu().numpy().view(self.dtype)
        return array if dtype is None else array.astype(dtype, copy=False)


def _named(spec: Spec) -> torch.dtype:
    """Returns torch's dtype for a column of this spec."""
    return torch.bfloat16 if spec.is_bfloat16 else cast("torch.dtype", getattr(torch, spec.dtype.name))
