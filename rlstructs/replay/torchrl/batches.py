"""Batches of whatever kind as rows that follow one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlstructs.errors import MissingKeyError, SpecError
from rlstructs.replay.from_trajectories import Rows, _steps
from rlstructs.replay.given import flat_items
from rlstructs.replay.torchrl.tensordicts import refuse_tensorclass
from rlstructs.replay.values import host_array
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
from rlstructs.structures.trajectories import Trajectories
from rlstructs.structures.tree import check_same_keys


def rows_of(batch: Any, owner: str, names: Mapping[str, str] | None = None) -> Rows:
    """A batch as rows.

    Args:
        batch: `Trajectories` or a `TemporalDictTensor`, of which the valid steps count; a sequence of mappings
            with a row each; or whatever else has keys, the first axis of whose values are the rows.
        owner: who asks, for messages.
        names: name here -> key of trajectories; None for all keys as they are.

    Raises:
        TypeError, MissingKeyError, SpecError: it is something else, or its parts do not fit.
    """
    refuse_tensorclass(batch, owner)
    if isinstance(batch, Trajectories):
        batch = batch.trajectories
    if isinstance(batch, TemporalDictTensor):
        return _steps(batch, {key: key for key in batch} if names is None else names)
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        return _stacked(batch, owner)
    flat = {name: _with_axes(name, value) for name, value in flat_items(batch, owner).items()}
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
    return Rows(flat, n)


def _with_axes(name: str, value: Any) -> Any:
    """What can be asked for its axes: an array of any library but warp's, or one of numpy."""
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return value
    # What jax has as bfloat16 must not become float32 here.
    return value if hasattr(value, "at") and hasattr(value, "ndim") else host_array(name, value)


def _stacked(items: Sequence[Any], owner: str) -> Rows:
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
            raise SpecError(f"{owner}: {name!r} has not the same shape in all items, but {shapes}") from error
    return Rows(values, len(flat))


def with_axis(name: str, value: Any) -> Any:
    """A value of a row as that of one row, `(1, ...)`."""
    return _with_axes(name, value)[None]
