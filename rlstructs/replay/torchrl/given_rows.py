"""Converts the arguments of `extend` to rows, and batches back to their form.

Batches become a `TensorDict`, the class of the package tensordict, if a buffer was given its rows as such.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlstructs.errors import MissingKeyError, SpecError
from rlstructs.replay.intake.arrays import flat_items, host_array
from rlstructs.replay.intake.trajectories import Steps, take_steps
from rlstructs.replay.torchrl.part import join_key
from rlstructs.structures.arrays import to_tensordict
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
from rlstructs.structures.trajectories import Trajectories
from rlstructs.structures.tree import check_same_keys


@dataclass(frozen=True)
class GivenRows:
    """Rows as they were given to a buffer.

    Attributes:
        values: name -> (n, ...).
        n: number of rows.
        done: bool (n,), where episodes end; None if only the columns say so.
        starts: bool (n,), where episodes start even if the one before has not ended; None for nowhere.
        batch: the batch, or list of rows, that they came as: batches leave in its form.
    """

    values: dict[str, Any]
    n: int
    done: np.ndarray | None = None
    starts: np.ndarray | None = None
    batch: Any = None

    @classmethod
    def from_steps(cls, steps: Steps) -> GivenRows:
        """Takes the steps of a single trajectory as rows."""
        done, starts = (None if marks is None else marks[0] for marks in (steps.done, steps.starts))
        return cls({name: each[0] for name, each in steps.values.items()}, steps.n_timesteps, done, starts)

    @classmethod
    def from_row(cls, batch: Any, values: Mapping[str, Any]) -> GivenRows:
        """Takes the values of a single row.

        `batch` is the row as it was given, without an axis of rows.
        """
        return cls({name: _to_array(name, value)[None] for name, value in values.items()}, 1, batch=[batch])


def take_rows(batch: Any, owner: str) -> GivenRows:
    """Converts a batch to rows.

    Args:
        batch: `Trajectories` or a `TemporalDictTensor`, of which the valid steps count; a sequence of mappings,
            each a row; or anything else with keys, whose values have a first axis of rows.
        owner: name of the caller, for messages.

    Raises:
        TypeError, MissingKeyError, SpecError: it is none of these, or its values do not fit together.
    """
    refuse_tensorclass(batch, owner)
    if isinstance(batch, Trajectories):
        batch = batch.trajectories
    if isinstance(batch, TemporalDictTensor):
        return GivenRows.from_steps(take_steps(batch, {key: key for key in batch}))
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        return _stack(batch, owner)
    flat = {name: _to_array(name, value) for name, value in flat_items(batch, owner).items()}
    if not flat and len(batch):  # rows of a tensordict, or mappings that are empty
        raise MissingKeyError(f"{owner}: rows need a column, there is none")
    first, n = next(iter(flat), ""), 0
    for name, value in flat.items():
        if not value.ndim:
            what = "one number" if getattr(value.dtype, "kind", "f") in "biufcV" else repr(value.item())
            raise SpecError(f"{owner}: {name!r} is {what}, its first axis should be the rows, and hold numbers")
        n = value.shape[0] if name == first else n
        if value.shape[0] != n:
            raise SpecError(f"{owner}: {name!r} has {value.shape[0]} rows, {first!r} has {n}")
    return GivenRows(flat, n, batch=batch)


def _to_array(name: str, value: Any) -> Any:
    """Converts a value to a numpy array.

    Arrays of torch or jax are returned unchanged.
    """
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return value
    # numpy would turn a bfloat16 of jax into float32.
    return value if hasattr(value, "at") and hasattr(value, "ndim") else host_array(name, value)


def _stack(items: Sequence[Any], owner: str) -> GivenRows:
    for item in items:
        refuse_tensorclass(item, owner)
    flat = [flat_items(item, f"{owner}: item {at}") for at, item in enumerate(items)]
    for at, item in enumerate(flat):
        check_same_keys(f"{owner}: item {at}", flat[0], item)
    values: dict[str, Any] = {}
    for name in flat[0] if flat else ():
        column = [item[name] for item in flat]
        try:
            if all(isinstance(value, torch.Tensor) for value in column):
                values[name] = torch.stack(column)
            else:
                values[name] = np.stack([host_array(name, value) for value in column])
        except (ValueError, RuntimeError) as error:
            shapes = sorted({tuple(np.shape(value)) for value in column})
            raise SpecError(f"{owner}: {name!r} has different shapes in the items: {shapes}") from error
    return GivenRows(values, len(flat), batch=items)


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
