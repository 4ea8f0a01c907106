"""Batches of a buffer whose rows came as tensordict's `TensorDict`: they leave as such."""

from __future__ import annotations

import sys
from typing import Any

import torch

from rlstructs.structures.dict_tensor import DictTensor


def n_axes_of(batch: Any) -> int | None:
    """How many axes of a `TensorDict` are its batch; None of what is none."""
    # Who has none has not imported it, and nor does this.
    module = sys.modules.get("tensordict")
    return int(batch.batch_dims) if module is not None and isinstance(batch, module.TensorDictBase) else None


def as_tensordict(batch: DictTensor, n_axes: int) -> Any:
    """A batch as a `TensorDict`; what has fewer axes than its batch gets those of the others, without a copy."""
    sizes = next((tensor.shape[:n_axes] for tensor in batch.values() if tensor.ndim >= n_axes), (batch.n_elems(),))
    made = DictTensor.trusted({name: _spread(tensor, sizes) for name, tensor in batch.items()}).to_tensordict()
    made.batch_size = sizes
    return made


def put(batch: Any, name: str, value: Any) -> None:
    """Puts a column into one."""
    batch[tuple(name.split("/"))] = _spread(value, batch.batch_size) if isinstance(value, torch.Tensor) else value


def has(batch: Any, name: str) -> bool:
    """Whether one has a column."""
    return tuple(name.split("/")) in batch.keys(True)


def _spread(tensor: torch.Tensor, sizes: Any) -> torch.Tensor:
    n = len(sizes) - tensor.ndim
    return tensor if n <= 0 else tensor.reshape(*tensor.shape, *(1,) * n).expand(sizes)
