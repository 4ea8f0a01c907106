"""Batches of whatever kind as rows that follow one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlstructs.errors import MissingKeyError, SpecError
from rlstructs.replay.from_trajectories import Steps, take_steps
from rlstructs.replay.given import flat_items
from rlstructs.replay.torchrl.tensordicts import refuse_tensorclass
from rlstructs.replay.values import host_array
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
from rlstructs.structures.trajectories import Trajectories
from rlstructs.structures.tree import check_same_keys


@dataclass(frozen=True)
class Rows:
    """Rows that were given.

    Attributes:
        values: name -> (n, ...).
        n: how many.
        done: bool (n,), where episodes end; None for what the columns say that mean it.
        starts: bool (n,), where one begins whatever came before; None for nowhere.
    """

    values: dict[str, Any]
    n: int
    done: np.ndarray | None = None
    starts: np.ndarray | None = None


def rows_of_steps(steps: Steps) -> Rows:
    """The steps of a single trajectory as rows."""
    done, starts = (None if marks is None else marks[0] for marks in (steps.done, steps.starts))
    return Rows({name: each[0] for name, each in steps.values.items()}, steps.n_timesteps, done, starts)


def rows_of(batch: Any, owner: str) -> Rows:
    """A batch as rows.

    Args:
        batch: `Trajectories` or a `TemporalDictTensor`, of which the valid steps count; a sequence of mappings
            with a row each; or whatever else has keys, the first axis of whose values are the rows.
        owner: who asks, for messages.

    Raises:
        TypeError, MissingKeyError, SpecError: it is something else, or its parts do not fit.
    """
    refuse_tensorclass(batch, owner)
    if isinstance(batch, Trajectories):
        batch = batch.trajectories
    if isinstance(batch, TemporalDictTensor):
        return rows_of_steps(take_steps(batch, {key: key for key in batch}))
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
