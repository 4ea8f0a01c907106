"""Rows of transitions before they are written: which columns take them, and which change for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from rlstructs.errors import SpecError
from rlstructs.replay.buffer import LOG, Buffer
from rlstructs.replay.columns import Spec
from rlstructs.replay.info_columns import OBJECTS, Plan, held_values, plan_columns
from rlstructs.replay.objects import OBJECT
from rlstructs.replay.reading import DISCOUNT
from rlstructs.replay.roles import is_info
from rlstructs.replay.tianshou import transitions
from rlstructs.replay.tianshou.transitions import top


class CheckedRows(Buffer):
    """A buffer of transitions, whose columns of infos become what environments say; the others stay what they are."""

    def _checked(self, rows: Mapping[str, Any], unknown: str, missing: str) -> dict[str, Any]:
        plan = self._planned(rows, 2)
        self._check_names(plan)
        transitions.check_required(plan.rows)
        return self._fit_rows(plan.rows, unknown, missing, plan)

    def _as_rows(self, name: str, value: Any, known: Spec | None) -> tuple[Any, Spec]:
        if is_info(name) and isinstance(value, np.ndarray) and value.dtype == OBJECT:
            return value, OBJECTS
        return super()._as_rows(name, value, known)

    def _planned(self, rows: Mapping[str, Any], n_lead: int) -> Plan:
        """What becomes of the columns of infos with these rows (n, ...), or (n, T, ...)."""
        return plan_columns(rows, self._specs, self._held, n_lead)

    def _held(self, name: str) -> np.ndarray:
        """The numbers that a column holds in the rows that are there."""
        return held_values(self._storage, name, self._specs[name])

    def _adopt(self, plan: Plan) -> None:
        super()._adopt(plan)
        self._warn_of_objects([*plan.changed, *plan.folded])

    def _make(self, made: dict[str, Spec]) -> None:
        super()._make(made)
        self._warn_of_objects(made)

    def _warn_of_objects(self, names: Iterable[str]) -> None:
        objects = sorted(name for name in names if self._specs[name].is_object)
        if objects and self.framework == "torch":
            LOG.warning(
                "%s: %s hold objects, which batches of torch leave out: read them with `get`, or let `framework` be "
                "'numpy'", type(self).__name__, objects,
            )  # fmt: skip

    def _check_names(self, plan: Plan) -> None:
        """Raises SpecError if there cannot be columns of these names beside those that there are."""
        rows = plan.rows
        if rows.keys() <= self._specs.keys():
            return
        transitions.check_names([*plan.specs(self._specs), *rows])
        if taken := sorted(self._beside_names() & {top(name) for name in rows}):
            raise SpecError(f"{taken[0]!r} is what a batch of this buffer holds beside its keys; give it another name")

    def _beside_names(self) -> set[str]:
        """What a batch holds that no column does."""
        return {DISCOUNT} if self._reading.n_step > 1 else set()

    def _keeps_objects(self, name: str) -> bool:
        return is_info(name)
