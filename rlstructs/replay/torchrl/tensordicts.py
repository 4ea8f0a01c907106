"""Turns batches back into `TensorDict`s, if a buffer was given its rows as such.

`TensorDict` is the class of the package tensordict.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlstructs.replay.torchrl.part import join_key
from rlstructs.structures.arrays import to_tensordict
from rlstructs.structures.dict_tensor import DictTensor

# Number of batch axes of a `TensorDict`, under ""; and of nested ones that have more of them, by name.
Axes = Mapping[str, int]


def is_tensordict(batch: Any) -> bool:
    """Whether a batch is a `TensorDict`."""
    # A program that has one has imported tensordict; this must not.
    module = sys.modules.get("tensordict")
    return module is not None and isinstance(batch, module.TensorDictBase)


def refuse_tensorclass(batch: Any, owner: str) -> None:
    """Raises TypeError for an object of tensordict's `tensorclass`.

    It has keys, but `[]` does not take them.
    """
    module = sys.modules.get("tensordict")
    if module is not None and module.is_tensorclass(batch):
        kind = type(batch).__name__
        text = f"takes a mapping, a DictTensor or a tensordict, got the tensorclass {kind}: give its .to_tensordict()"
        raise TypeError(f"{owner}: {text}")


def find_axes(batch: Any, n_more: int = 0) -> Axes | None:
    """Counts the batch axes of a `TensorDict`, and `n_more` in front.

    A list of `TensorDict`s, each a row, has one axis more. Returns None for other batches, and without axes.
    """
    if isinstance(batch, Sequence) and batch and all(map(is_tensordict, batch)):
        return find_axes(batch[0], n_more + 1)
    if not is_tensordict(batch) or not batch.batch_dims + n_more:
        return None
    nested = {join_key(key): batch.get(key) for key in batch.keys(include_nested=True)}
    axes = {name: each.batch_dims for name, each in nested.items() if is_tensordict(each)}
    return {"": batch.batch_dims + n_more} | {name: n + n_more for name, n in axes.items() if n > batch.batch_dims}


def restore_form(batch: Any, axes: Axes | None, n_axes: int = 1) -> Any:
    """Converts a batch to the form in which rows came.

    Args:
        batch: a `DictTensor`; anything else is returned as it is.
        axes: the result of `find_axes`; None to return the batch as it is.
        n_axes: number of axes in place of the first one.
    """
    if axes is None or not isinstance(batch, DictTensor):  # a file may be loaded with another framework
        return batch
    return _to_tensordict(batch, {name: n + n_axes - 1 for name, n in axes.items()})


def _to_tensordict(batch: DictTensor, axes: Axes) -> Any:
    """Converts a batch to a `TensorDict`.

    Tensors with fewer axes than the batch are expanded without a copy.
    """
    n_axes, tree = axes[""], dict(batch.items())
    sizes = next((tensor.shape[:n_axes] for tensor in tree.values() if tensor.ndim >= n_axes), (batch.n_elems(),))
    if any(tensor.ndim < len(sizes) for tensor in tree.values()):
        tree = {name: _expand(tensor, sizes) for name, tensor in tree.items()}
    made = to_tensordict(tree, sizes, batch.device())
    for name, n in axes.items() if len(axes) > 1 else ():
        inner = {tensor.shape[:n] for key, tensor in batch.items() if key.startswith(f"{name}/")}
        if name and len(inner) == 1:  # it may be missing, or some of it may be stacked
            made[tuple(name.split("/"))].batch_size = inner.pop()
    return made


def put(batch: Any, name: str, value: Any) -> None:
    """Puts a column into a `TensorDict`."""
    batch[tuple(name.split("/"))] = _expand(value, batch.batch_size) if isinstance(value, torch.Tensor) else value


def has(batch: Any, name: str) -> bool:
    """Whether a `TensorDict` has a column."""
    return tuple(name.split("/")) in batch.keys(True)


def _expand(tensor: torch.Tensor, sizes: Any) -> torch.Tensor:
    n = len(sizes) - tensor.ndim
    return tensor if n <= 0 else tensor.reshape(*tensor.shape, *(1,) * n).expand(sizes)
