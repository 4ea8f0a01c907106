"""Batches of a buffer whose rows came as tensordict's `TensorDict`: they leave as such."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.interop import to_tensordict

# How many axes are the batch of a `TensorDict`, under ""; and of those nested in it that have more, by name.
Axes = Mapping[str, int]


def is_one(batch: Any) -> bool:
    """Whether it is a `TensorDict`."""
    # Who has none has not imported it, and nor does this.
    module = sys.modules.get("tensordict")
    return module is not None and isinstance(batch, module.TensorDictBase)


def refuse_tensorclass(batch: Any, owner: str) -> None:
    """Raises TypeError if it is an object of one of tensordict's `tensorclass`es, which has keys but not by `[]`."""
    module = sys.modules.get("tensordict")
    if module is not None and module.is_tensorclass(batch):
        kind = type(batch).__name__
        text = f"takes a mapping, a DictTensor or a tensordict, got the tensorclass {kind}: give its .to_tensordict()"
        raise TypeError(f"{owner}: {text}")


def axes_of(batch: Any, n_more: int = 0) -> Axes | None:
    """The axes of a `TensorDict`, and so many more in front of them; None of what is none, or has no axes then.

    A list of them, each a row, is as they are stacked.
    """
    if isinstance(batch, Sequence) and batch and all(map(is_one, batch)):
        return axes_of(batch[0], n_more + 1)
    if not is_one(batch) or not batch.batch_dims + n_more:
        return None
    nested = {key: batch.get(key) for key in batch.keys(include_nested=True)}
    axes = {_joined(key): each.batch_dims for key, each in nested.items() if is_one(each)}
    return {"": batch.batch_dims + n_more} | {name: n + n_more for name, n in axes.items() if n > batch.batch_dims}


def _joined(key: Any) -> str:
    return key if isinstance(key, str) else "/".join(key)


def as_tensordict(batch: DictTensor, axes: Axes) -> Any:
    """A batch as a `TensorDict`; what has fewer axes than its batch gets those of the others, without a copy."""
    n_axes = axes[""]
    sizes = next((tensor.shape[:n_axes] for tensor in batch.values() if tensor.ndim >= n_axes), (batch.n_elems(),))
    tree = {name: _spread(tensor, sizes) for name, tensor in batch.items()}
    made = to_tensordict(tree, batch.n_elems(), batch.device())
    made.batch_size = sizes
    for name, n in axes.items():
        inner = {tensor.shape[:n] for key, tensor in batch.items() if key.startswith(f"{name}/")}
        if name and len(inner) == 1:  # there may be nothing of it, or some of it may be stacked
            made[tuple(name.split("/"))].batch_size = inner.pop()
    return made


def as_given(batch: Any, axes: Axes | None, n_axes: int = 1) -> Any:
    """A `DictTensor` as what rows came as, with so many axes in the place of that of the rows."""
    if axes is None or not isinstance(batch, DictTensor):  # files may be loaded for another framework
        return batch
    return as_tensordict(batch, {name: n + n_axes - 1 for name, n in axes.items()})


def put(batch: Any, name: str, value: Any) -> None:
    """Puts a column into one."""
    batch[tuple(name.split("/"))] = _spread(value, batch.batch_size) if isinstance(value, torch.Tensor) else value


def has(batch: Any, name: str) -> bool:
    """Whether one has a column."""
    return tuple(name.split("/")) in batch.keys(True)


def _spread(tensor: torch.Tensor, sizes: Any) -> torch.Tensor:
    n = len(sizes) - tensor.ndim
    return tensor if n <= 0 else tensor.reshape(*tensor.shape, *(1,) * n).expand(sizes)
