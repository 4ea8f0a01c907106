"""Draws windows of episodes for packs: as long as their episodes let them be, with some rows in front as context."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from rlstructs.checks import UNKNOWN, check_count
from rlstructs.errors import MissingKeyError, SpecError
from rlstructs.replay.draw.plan import Picker, Selection, Viewed
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.pack_layout import Layout
from rlstructs.structures.packed import PackedTrajectories
from rlstructs.structures.segments import STATE, check_states, grow, take_steps

# Fields of a selection: which rows are part of the window, bool (n, W), the drawn row, int64 (n,), and whether the
# window begins after its episode, bool (n,).
HELD, ANCHOR, CONTINUES = "held", "anchor", "continues"


class PackedWindows(NamedTuple):
    """Windows from each drawn row on, up to the end of its episode or the newest row.

    Attributes:
        length: the most rows of each, from the drawn one on.
        context: the most rows of the same episode in front of it.
        max_steps: the size of the pack; None for what the windows need.
        states: part of the agent's state -> the column that has it before each step.
    """

    length: int
    context: int = 0
    max_steps: int | None = None
    states: Mapping[str, str] = {}

    @classmethod
    def of(
        cls, length: int, context: int, max_steps: int | None, states: Mapping[str, str] | None, n_step: int
    ) -> PackedWindows:
        """Checks the arguments of a draw.

        Raises:
            TypeError, SpecError: one is invalid.
        """
        check_count("context", context, 0)
        if n_step != 1:
            raise SpecError(f"packed: n_step must be 1, got {n_step}")
        if max_steps is not None and check_count("max_steps", max_steps) < length + context:
            raise SpecError(
                f"packed: max_steps must be at least {length + context}, a window and its context, got {max_steps}"
            )
        return cls(length, context, max_steps, check_states("packed", states))

    def select(self, storage: Viewed, picker: Picker, n: int, rng: np.random.Generator) -> Selection:
        """Draws `n` windows, (n, W) for the longest; rows that are not held repeat the first or the last that is."""
        view = storage.view()
        anchors, fields = picker.pick(view, n, rng)
        before = np.minimum(view.depths(anchors), self.context)[:, None]
        after = np.minimum(view.remaining(anchors), self.length)[:, None]
        offsets = np.arange(-before.max(), after.max())
        rows = view.columns.shifted(anchors[:, None], np.clip(offsets, -before, after - 1))
        held = (offsets >= -before) & (offsets < after)
        fields[HELD], fields["mask"], fields["is_first"] = held, held & (offsets >= 0), view.begin(rows) & held
        fields[ANCHOR], fields[CONTINUES] = anchors, ~view.begin(rows[:, 0])
        return Selection(rows, view, fields)

    def pack(self, picked: Selection, tensors: Mapping[str, torch.Tensor]) -> tuple[Selection, PackedTrajectories]:
        """Packs what was drawn.

        Args:
            picked: of `select`.
            tensors: its rows by name, (n, W, ...).

        Returns:
            The selection of the rows (N, 1) in the pack, without those that only fill it up; and the pack, with a
            segment for each window, in which the rows of the context do not count.

        Raises:
            MissingKeyError: a column of a state was not read.
        """
        if missing := sorted(set(self.states.values()) - tensors.keys()):
            raise MissingKeyError(f"packed: states needs column(s) {missing}, drawn are {sorted(tensors)}")
        held = picked.fields[HELD]
        counts = held.sum(axis=1)
        # Whole windows, as many as have room.
        n = len(counts) if self.max_steps is None else int(np.searchsorted(np.cumsum(counts), self.max_steps, "right"))
        held, counts = held[:n], counts[:n]
        layout = self._lay_out(counts, picked.fields["mask"][:n][held], picked.fields[CONTINUES][:n])
        places = held.ravel().nonzero()[0]
        at = {tensor.device: torch.from_numpy(places).to(tensor.device) for tensor in tensors.values()}
        steps = {name: take_steps(t.flatten(0, 1), at[t.device], places) for name, t in tensors.items()}
        first = layout.cu_seqlens[:-1].long()
        info = {STATE + name: steps[column].cpu()[first] for name, column in self.states.items()}
        layout = layout.with_info({"sampling_index": torch.from_numpy(picked.fields[ANCHOR][:n]), **info})
        per_row = {name: picked.fields[name][:n][held][:, None] for name in ("mask", "is_first")}
        others = {name: values[:n] for name, values in picked.fields.items() if name not in (HELD, *per_row)}
        chosen = Selection(picked.rows[:n][held][:, None], picked.view, {**others, **per_row})
        if self.max_steps is not None:
            steps = {name: grow(tensor, self.max_steps - len(places)) for name, tensor in steps.items()}
            layout = layout.fill_up(self.max_steps, len(picked.rows) + 1)
        return chosen, PackedTrajectories(steps, layout)

    def _lay_out(self, counts: np.ndarray, mask: np.ndarray, continues: np.ndarray) -> Layout:
        """The layout of windows with so many rows, as of a batch with a row for each."""
        bounds = np.concatenate([[0], np.cumsum(counts)])
        number, width = np.arange(len(counts)), self.context + self.length
        index = np.repeat(number * width - bounds[:-1], counts) + np.arange(bounds[-1])
        table = {"row": number, "start": 0 * number, "episode": 0 * number, "continues": continues}
        return Layout(
            torch.from_numpy(bounds.astype(np.int32)),
            DictTensor.trusted({name: torch.from_numpy(column) for name, column in table.items()}),
            DictTensor(),
            torch.from_numpy(index),
            torch.from_numpy(counts),
            torch.full((len(counts),), UNKNOWN),
            width,
            int(counts.max(initial=0)),
            torch.from_numpy(mask) if self.context else None,
        )
