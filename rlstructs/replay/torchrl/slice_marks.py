"""Marks where slices begin and end in their columns, so that learners do not look beyond."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rlstructs.replay.columns import Spec
from rlstructs.replay.roles import ends_among
from rlstructs.replay.span import Selection
from rlstructs.replay.torchrl.slice_samplers import AUTO, DONE, SliceSampler, parent_of
from rlstructs.replay.values import encoded, host_array

TRUNCATED, TERMINATED = "truncated", "terminated"


def put(
    values: dict[str, Any],
    picked: Selection,
    sampler: SliceSampler,
    specs: Mapping[str, Spec],
    beside: tuple[int, ...],
) -> dict[str, np.ndarray]:
    """Marks the first rows of slices, and the last ones as truncated and done, with the keys of the sampler.

    Programs that use ends ask for `terminated`, `truncated` and `done`: those that no column holds are added.

    Args:
        values: the columns, name -> `(n, ...)`, changed in place.
        picked: the drawn slices.
        sampler: drew them.
        specs: of the columns.
        beside: further axes of an added end, if no end is stored.

    Returns:
        The ends that no column holds, name -> `(n, ...)`.
    """
    if sampler.init_key in values:
        _mark(values, sampler.init_key, sampler.firsts(picked), specs)
    if sampler.truncated_key is None:
        return {}
    lasts, ends = sampler.lasts(picked), ends_among(values)
    truncations = [name for name in ends if name.rpartition("/")[2] == TRUNCATED]
    parent = parent_of((truncations or ends or ["next/"])[0])
    key = f"{parent}{TRUNCATED}" if sampler.truncated_key == AUTO else sampler.truncated_key
    prefix = parent_of(key)
    own = [f"{prefix}{last}" for last in DONE]
    dones = [name for name in (*own, *(f"{parent}{last}" for last in DONE)) if name in values]
    if sampler.end_key in values and sampler.end_key.rpartition("/")[2] in DONE:
        dones.append(sampler.end_key)
    made = {}
    if not ({key, f"{prefix}{TERMINATED}"} <= values.keys() and any(name in values for name in own)):
        made = _make_absent(values, lasts, key, ends, beside)
    for name in dict.fromkeys((key, *dones) if key in values else dones):
        _mark(values, name, lasts, specs)
    return made


def _make_absent(
    values: Mapping[str, Any], lasts: np.ndarray, key: str, ends: list[str], beside: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """The ends beside the column `key` that no column holds, with the last rows marked."""
    prefix = parent_of(key)
    dones = [name for last in DONE if (name := f"{prefix}{last}") in values]
    terminated = f"{prefix}{TERMINATED}"
    stored = [name for name in (key, *dones, terminated) if name in values]
    like = (stored or ends)[:1]
    shape = (len(lasts), *(np.shape(values[like[0]])[1:] if like else beside))
    known = {name: _truth(name, values[name], shape) for name in stored}
    marks, nowhere = _spread(lasts, shape), np.zeros(shape, bool)
    cut, over = known.get(key, nowhere), known.get(terminated)
    if over is None:  # an episode that is done and not truncated has terminated
        over = known[dones[0]] & ~cut if dones else nowhere
    made = {terminated: over, key: marks}
    if not dones:
        made = {f"{prefix}{DONE[0]}": marks | cut | over} | made
    return {name: np.array(array) for name, array in made.items() if name not in values}


def _truth(name: str, values: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Where a column is not zero, as bools of this shape."""
    marks = host_array(name, values) != 0
    return marks if marks.shape == shape else _spread(marks.any(axis=tuple(range(1, marks.ndim))), shape)


def _spread(rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Broadcasts values of rows, `(n,)`, over the further axes of a shape."""
    return np.broadcast_to(rows.reshape(-1, *(1,) * (len(shape) - 1)), shape)


def _mark(values: dict[str, Any], name: str, rows: np.ndarray, specs: Mapping[str, Spec]) -> None:
    """Makes a column true in some rows, bool (n,), where it is zero."""
    at = torch.from_numpy(rows) if isinstance(values[name], torch.Tensor) else rows
    one = encoded(name, np.ones(()), specs[name]).item()
    if specs[name].dtype.kind == "b":
        values[name][at] = one
        return
    marked = values[name][at]  # it may hold other numbers than 0 and 1
    marked[marked == 0] = one
    values[name][at] = marked
