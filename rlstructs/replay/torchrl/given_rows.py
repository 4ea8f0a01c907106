"""Converts the arguments of `extend` to rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlstructs.errors import MissingKeyError, SpecError
from rlstructs.replay.intake.arrays import flat_items, host_array
from rlstructs.replay.intake.trajectories import Steps, take_steps
from rlstructs.replay.torchrl.tensordicts import refuse_tensorclass
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
