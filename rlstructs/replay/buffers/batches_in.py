"""Batches of whatever kind as rows that follow one another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlstructs.errors import MissingKeyError, SpecError
from rlstructs.replay.buffers.rows_in import flat_items
from rlstructs.replay.buffers.tensordicts import refuse_tensorclass
from rlstructs.replay.trajectories import STEP_ENDS, STEP_START
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


def _steps(steps: TemporalDictTensor, names: Mapping[str, str]) -> Rows:
    lead = (steps.n_elems(), steps.n_timesteps())
    lengths = host_array("lengths", steps.lengths)
    valid = np.arange(lead[1]) < lengths[:, None]
    inside = None if valid.all() else torch.from_numpy(valid)
    values = {}
    for name, key in names.items():
        tensor = steps[key].detach()
        values[name] = tensor.flatten(0, 1) if inside is None else tensor[inside.to(tensor.device)]
    ends = [_truth(steps, key) for key in STEP_ENDS if key in steps]
    starts = np.zeros(lead, bool)
    if STEP_START in steps:
        starts |= _truth(steps, STEP_START)
    starts[:, :1] = True  # what lies before it in the buffer is of another trajectory
    done = np.logical_or.reduce(ends)[valid] if ends else None
    return Rows(values, int(valid.sum()), done, starts[valid])


def _truth(steps: TemporalDictTensor, key: str) -> np.ndarray:
    """Where any number of a step is not zero, bool (B, T)."""
    marks = host_array(key, steps[key]) != 0
    return np.asarray(marks.any(axis=tuple(range(2, marks.ndim))))


def with_axis(name: str, value: Any) -> Any:
    """A value of a row as that of one row, `(1, ...)`."""
    return _with_axes(name, value)[None]


def steps_of(trajectories: Any) -> Any:
    """The steps (B, T, ...) of a batch.

    Raises:
        TypeError: these are no `Trajectories`.
    """
    if not isinstance(trajectories, Trajectories):
        raise TypeError(f"add_trajectories: needs Trajectories, got {type(trajectories).__name__}")
    return trajectories.trajectories


def require_keys(steps: Any, keys: Iterable[str]) -> None:
    """Raises MissingKeyError unless the steps of a batch have all of these."""
    if absent := sorted(set(keys) - set(steps.keys())):
        found = sorted(steps.keys())
        raise MissingKeyError(f"add_trajectories: no {absent} in the trajectories, there are {found}")
