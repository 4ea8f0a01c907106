"""Copies of a step by torch.

Tensors go to a slot of all lanes in one call, without numpy.

It rests on `torch._foreach_copy_`, which torch's optimizers use, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

# No array has this dtype: bits of bfloat16, which numpy lacks, are always converted.
BITS = np.dtype((np.void, 2))
copy_tensors = torch._foreach_copy_  # looking up names is part of what a write costs
# All that decides whether torch copies a tensor as it is. `copy_` would also broadcast, cast, and record gradients.
look = attrgetter("__class__", "dtype", "shape", "layout", "is_cpu", "requires_grad")
# What may be cast in copying: any of these to floats and bools, but only integers to integers. torch does not define
# what a float becomes that no integer equals.
INTEGERS = frozenset([torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
REALS = INTEGERS | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
# Slots of a store of rollouts, whose places in memory are found once. In a larger one a step is staged: to find a place
# takes longer than to copy twice, unless a column's step has so many bytes.
MOST_SLOTS, MOST_STAGED = 512, 1 << 14
# The most plans that are kept.
MOST_PLANS = 16


class PlanColumn(NamedTuple):
    """A column of a plan.

    Attributes:
        shape: of the values written to it, with an axis for lanes unless the plan is of one row without it.
        dtype: of arrays that are written as they are; `BITS` for bfloat16.
        is_end: whether its marks end episodes.
        unwritten: its value where it is omitted.
        limits: Python type -> the range of such numbers that are written as they are.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    is_end: bool
    unwritten: Any
    limits: Mapping[type, tuple[Any, Any]]


class Copied(NamedTuple):
    """A step that is ready to be written.

    Attributes:
        find: returns the tensors that torch copies the values of a slot to.
        tensors: these values, `(n_lanes, ...)` each.
        moved: the rows by slot of columns that are staged or omitted, and what is written to each.
    """

    find: Callable[[int], list[Tensor]]
    tensors: tuple[Tensor, ...]
    moved: Sequence[tuple[ndarray, Any]]

    def write(self, slot: int) -> None:
        """Writes the step to this slot of all lanes."""
        copy_tensors(self.find(slot), self.tensors)
        for rows, value in self.moved:
            rows[slot] = value


PlanRows = tuple[PlanColumn, ndarray]  # of a column by slot, `(capacity, n_lanes, ...)`


class _Plan:
    """What a step of these columns needs.

    Args:
        given: the columns that are given, at least two.
        omitted: the others.

    Raises:
        TypeError: torch cannot write to one that is given.
    """

    def __init__(self, given: Sequence[PlanRows], omitted: Sequence[PlanRows]) -> None:
        self.pick = itemgetter(*(column.name for column, _ in given))
        self._rows = [_as_tensor(column, rows) for column, rows in given]
        self.looks = [(Tensor, each.dtype, each.shape[1:], torch.strided, True, False) for each in self._rows]
        self._cast: tuple[list[Any], bool] = [], False  # the last looks, and whether there are gradients
        dtypes = [each.dtype for each in self._rows]
        self._castable = [REALS if each.is_floating_point or each is torch.bool else INTEGERS for each in dtypes]
        self.omitted = omitted
        self._keeps = len(given[0][1]) <= MOST_SLOTS
        self._places = dict[int, list[Tensor]]()
        stages = [None if self._keeps or rows[0].nbytes > MOST_STAGED else np.empty_like(rows[0]) for _, rows in given]
        self.staged = [(rows, stage) for (_, rows), stage in zip(given, stages, strict=True) if stage is not None]
        self._stages = [
            None if stage is None else _as_tensor(column, stage)
            for (column, _), stage in zip(given, stages, strict=True)
        ]

    def cast(self, tensors: tuple[Tensor, ...], looks: list[Any]) -> tuple[Tensor, ...] | None:
        """Returns tensors that torch casts in copying; None if it should not."""
        last = self._cast
        if looks != last[0]:
            for found, wanted, dtypes in zip(looks, self.looks, self._castable, strict=True):
                if found[0] is not Tensor or found[1] not in dtypes or found[2:5] != wanted[2:5]:
                    return None
            self._cast = last = looks, any(found[5] for found in looks)
        return tuple(each.detach() for each in tensors) if last[1] else tensors

    def find(self, slot: int) -> list[Tensor]:
        """Returns where the values of a slot are copied to."""
        if len(self.staged) == len(self._stages):
            return self._stages  # type: ignore[return-value] # none is None
        places = self._places.get(slot)
        if places is None:
            with torch.inference_mode(False):  # tensors of that mode could not be written to in others
                pairs = zip(self._stages, self._rows, strict=True)
                places = [rows[slot] if stage is None else stage for stage, rows in pairs]
            if self._keeps:
                self._places[slot] = places
        return places


def _as_tensor(column: PlanColumn, rows: ndarray) -> Tensor:
    tensor = torch.from_numpy(rows)
    return tensor.view(torch.bfloat16) if column.dtype is BITS else tensor


class StepCopies:
    """Finds the steps that torch can copy.

    Args:
        columns: the columns of a store; none if torch cannot write to it.
        rows: of each column by slot, `(capacity, n_lanes, ...)`.
    """

    def __init__(self, columns: Sequence[PlanColumn], rows: Sequence[ndarray]) -> None:
        self._columns = list(zip(columns, rows, strict=bool(columns)))
        self._plans: dict[tuple[str, ...], _Plan | None] = {}  # names given -> plan

    def pick(self, given: Mapping[str, Any], fills: bool, live: Collection[str], casts: bool) -> Copied | None:
        """Returns the step to write.

        None if torch would not copy its values as they are, or `casts` them.

        Args:
            given: name -> value, perhaps a tensor `(n_lanes, ...)`.
            fills, live, casts: see `StepWriter.write`.
        """
        key = (*given,)
        try:
            plan = self._plans[key]
        except KeyError:
            plan = self._make_plan(key)
        if plan is None or (plan.omitted and not fills):
            return None
        tensors = plan.pick(given)
        try:
            if type(tensors[0]) is not Tensor:
                return None
            looks = [*map(look, tensors)]
        except AttributeError:  # one is no tensor
            return None
        if looks != plan.looks and (tensors := plan.cast(tensors, looks) if casts else None) is None:
            return None
        omitted = [(rows, column.unwritten) for column, rows in plan.omitted if column.name not in live]
        return Copied(plan.find, tensors, plan.staged + omitted)

    @torch.inference_mode(False)  # see `_Plan.find`
    def _make_plan(self, names: tuple[str, ...]) -> _Plan | None:
        """Makes the plan for steps of these names.

        None if torch cannot do it, or for one column alone.
        """
        if len(self._plans) >= MOST_PLANS:
            self._plans.clear()
        self._plans[names] = None
        given = [(column, rows) for column, rows in self._columns if column.name in names]
        omitted = [(column, rows) for column, rows in self._columns if column.name not in names]
        if len(given) < 2 or any(column.is_end for column, _ in omitted):
            return None
        with contextlib.suppress(TypeError):  # objects, compressed rows, or numbers that this version of torch lacks
            self._plans[names] = _Plan(given, omitted)
        return self._plans[names]
