"""Copies of a step by torch.

Tensors go to a slot of all lanes in one call, without numpy.

It rests on `torch._foreach_copy_`, which torch's optimizers use, too.
"""

from __future__ import annotations

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
# Slots whose places are found together, and the most that are kept: those of a rollout are found once.
SLOTS_AT_ONCE, MOST_SLOTS = 64, 512
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
        find: returns the rows of a slot in the columns that are given.
        tensors: their values, `(n_lanes, ...)` each.
        omitted: the rows of the other columns by slot, and what is written to each.
    """

    find: Callable[[int], tuple[Tensor, ...]]
    tensors: tuple[Tensor, ...]
    omitted: list[tuple[ndarray, Any]]

    def write(self, slot: int) -> None:
        """Writes the step to this slot of all lanes."""
        copy_tensors(self.find(slot), self.tensors)
        for rows, value in self.omitted:
            rows[slot] = value


class _Plan:
    """What a step of these names needs.

    Args:
        names: of the columns that are given, at least two.
        rows: of each of them.
        omitted: the others, and their rows.
    """

    def __init__(
        self, names: Sequence[str], rows: Sequence[Tensor], omitted: Sequence[tuple[PlanColumn, ndarray]]
    ) -> None:
        self.pick = itemgetter(*names)
        self.looks = [(Tensor, each.dtype, each.shape[1:], torch.strided, True, False) for each in rows]
        self.omitted = omitted
        self._rows, self._places = rows, dict[int, list[tuple[Tensor, ...]]]()

    def find(self, slot: int) -> tuple[Tensor, ...]:
        """Returns the rows of a slot in each column that is given."""
        first = slot - slot % SLOTS_AT_ONCE
        places = self._places.get(first)
        if places is None:
            if len(self._places) >= MOST_SLOTS // SLOTS_AT_ONCE:
                self._places.clear()
            with torch.inference_mode(False):  # tensors of that mode could not be written to in others
                views = [rows[first : first + SLOTS_AT_ONCE].unbind(0) for rows in self._rows]
            places = self._places[first] = list(zip(*views, strict=True))
        return places[slot - first]


class StepCopies:
    """Finds the steps that torch can copy.

    Args:
        columns: the columns of a store; none if torch cannot write to it.
        rows: of each column by slot, `(capacity, n_lanes, ...)`.
    """

    def __init__(self, columns: Sequence[PlanColumn], rows: Sequence[ndarray]) -> None:
        self._columns = list(zip(columns, rows, strict=bool(columns)))
        self._plans: dict[tuple[str, ...], _Plan | None] = {}  # names given -> plan

    def pick(self, given: Mapping[str, Any], fills: bool, live: Collection[str]) -> Copied | None:
        """Returns the step to write.

        None if torch would not copy its values as they are.

        Args:
            given: name -> value, perhaps a tensor `(n_lanes, ...)`.
            fills, live: see `StepWriter.write`.
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
            if type(tensors[0]) is not Tensor or [*map(look, tensors)] != plan.looks:
                return None
        except AttributeError:  # one is no tensor
            return None
        omitted = [(rows, column.unwritten) for column, rows in plan.omitted if column.name not in live]
        return Copied(plan.find, tensors, omitted)

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
        try:
            tensors = [torch.from_numpy(rows) for _, rows in given]
        except TypeError:  # objects, compressed rows, or numbers that this version of torch lacks
            return None
        tensors = [
            tensor.view(torch.bfloat16) if column.dtype is BITS else tensor
            for tensor, (column, _) in zip(tensors, given, strict=True)
        ]
        self._plans[names] = _Plan([column.name for column, _ in given], tensors, omitted)
        return self._plans[names]
