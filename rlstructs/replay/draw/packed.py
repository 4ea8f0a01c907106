"""Draws windows of episodes for packs.

They are as long as their episodes let them be, with some rows in front as context.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from rlstructs.checks import UNKNOWN, check_count
from rlstructs.errors import MissingKeyError, SpecError
from rlstructs.replay.draw.plan import Fields, Picker, Selection, Viewed
from rlstructs.replay.leave.export import Exporter
from rlstructs.replay.rows.spec import Spec
from rlstructs.replay.rows.store import Storage
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.pack_layout import Layout
from rlstructs.structures.packed import PackedTrajectories
from rlstructs.structures.segments import STATE, check_states, grow

# Fields of a selection, (n,): the drawn row, the first row of its window, the number of rows of the window, how many of
# them are context, and whether the window begins after its episode.
ANCHOR, FIRST, COUNT, BEFORE, CONTINUES = "anchor", "first", "count", "before", "continues"
# Reads rows (N,) of a view: name -> (N, ...).
ReadRows = Callable[[Any, np.ndarray], Mapping[str, Any]]
TO_TORCH = Exporter("torch")


class PackedWindows(NamedTuple):
    """Windows that begin with each drawn row.

    They end with its episode, or with the newest row.

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
    def of(cls, length: int, context: int, max_steps: int | None, states: Mapping[str, str] | None) -> PackedWindows:
        """Checks the arguments of a draw.

        Raises:
            TypeError, SpecError: one is invalid.
        """
        check_count("sequence_length", length)
        check_count("context", context, 0)
        if max_steps is not None and check_count("max_steps", max_steps) < length + context:
            raise SpecError(
                f"packed: max_steps must be at least {length + context}, a window and its context, got {max_steps}"
            )
        return cls(length, context, max_steps, check_states("packed", states))

    def select(self, storage: Viewed, picker: Picker, n: int, rng: np.random.Generator) -> Selection:
        """Draws `n` windows."""
        view = storage.view()
        return self.around(view, *picker.pick(view, n, rng))

    def around(self, view: Any, anchors: np.ndarray, fields: Fields) -> Selection:
        """Returns the windows of drawn rows (n,), with more values of each.

        The rows of the selection are the drawn ones.
        """
        first, before = anchors, np.zeros_like(anchors)
        if self.context:
            before = np.minimum(view.depths(anchors), self.context)
            first = view.shifted(anchors, -before)
        count = before + np.minimum(view.remaining(anchors), self.length)
        own = {ANCHOR: anchors, FIRST: first, COUNT: count, BEFORE: before, CONTINUES: ~view.begin(first)}
        return Selection(anchors[:, None], view, fields | own, first)

    def draw(
        self,
        storage: Storage | None,
        n: int,
        select: Callable[[int], Selection],
        read: ReadRows,
        specs: Mapping[str, Spec],
        describe: Callable[[Selection], Fields] = lambda picked: {},
    ) -> tuple[Selection, PackedTrajectories]:
        """Draws and packs windows, none of them torn by a writer.

        Args:
            storage: the store; None if nobody writes meanwhile.
            n: how many.
            select: draws a given number of windows, by `select` or `around`.
            read: reads rows.
            specs: of the columns; those of objects are left out.
            describe: returns more values of each window, for the pack's `info`.

        Returns:
            The selection of the rows (N, 1) in the pack, without those that only fill it up; and the pack, with a
            segment for each window, in which the rows of the context do not count.

        Raises:
            MissingKeyError: a column of a state is missing.
        """
        read_all = self.reader(read, specs)
        if storage is None:
            return self.pack(picked := select(n), read_all(picked), specs, describe)
        return self.pack(*storage.sample(n, select, read_all), specs, describe)

    def reader(self, read: ReadRows, specs: Mapping[str, Spec]) -> Callable[[Selection], list[_Ragged]]:
        """Returns a function that reads drawn windows; see `draw`."""
        if missing := sorted(set(self.states.values()) - specs.keys()):
            raise MissingKeyError(f"packed: states needs column(s) {missing}, there are {sorted(specs)}")

        def read_all(picked: Selection) -> list[_Ragged]:
            counts = picked.fields[COUNT]
            rows = picked.view.shifted(picked.fields[FIRST].repeat(counts), _count_up(counts))
            return [_Ragged(rows, dict(read(picked.view, rows)), counts.copy())]

        return read_all

    def pack(
        self,
        picked: Selection,
        windows: list[_Ragged],
        specs: Mapping[str, Spec],
        describe: Callable[[Selection], Fields] = lambda picked: {},
    ) -> tuple[Selection, PackedTrajectories]:
        """Packs windows that were read; see `draw`."""
        [drawn] = windows
        tensors = TO_TORCH.with_objects(drawn.arrays, specs)
        return self._pack(picked, drawn.rows, dict(tensors.items()), describe(picked))

    def _pack(
        self, picked: Selection, rows: np.ndarray, steps: dict[str, torch.Tensor], more: Fields
    ) -> tuple[Selection, PackedTrajectories]:
        """Packs the rows (N, ...) of a draw: as many whole windows as fit."""
        size, counts = self.max_steps, picked.fields[COUNT]
        if size is not None:
            counts = counts[: int(np.searchsorted(np.cumsum(counts), size, "right"))]
            steps = {name: tensor[: counts.sum()] for name, tensor in steps.items()}
            rows = rows[: counts.sum()]
        n = len(counts)
        fields = {name: values[:n] for name, values in picked.fields.items()}
        bounds = np.zeros(n + 1, np.int64)
        counts.cumsum(out=bounds[1:])
        begins = torch.from_numpy(bounds[:-1])
        info = {"sampling_index": torch.from_numpy(fields[ANCHOR])}
        info |= {STATE + name: steps[column].cpu()[begins] for name, column in self.states.items()}
        info |= {name: torch.from_numpy(values[:n]) for name, values in more.items()}
        layout = self._lay_out(counts, bounds, fields, info)
        is_first = np.zeros(len(rows), bool)
        is_first[bounds[:-1]] = ~fields[CONTINUES]
        mask = np.ones(len(rows), bool) if layout.mask is None else layout.mask.numpy()
        fields |= {"mask": mask[:, None], "is_first": is_first[:, None]}
        chosen = Selection(rows[:, None], picked.view, fields)
        if size is not None:
            steps = {name: grow(tensor, size - len(rows)) for name, tensor in steps.items()}
            layout = layout.fill_up(size, len(picked.rows) + 1)
        return chosen, PackedTrajectories(steps, layout)

    def _lay_out(
        self, counts: np.ndarray, bounds: np.ndarray, fields: Fields, info: Mapping[str, torch.Tensor]
    ) -> Layout:
        """Lays out windows of so many rows, each like one row of a batch."""
        number, longest = np.arange(len(counts)), int(counts.max(initial=0))
        mask, width, start = None, longest, number * longest - bounds[:-1]
        if self.context:
            # No wider than the episodes are; the drawn row is behind the room for the context.
            before = fields[BEFORE]
            context = int(before.max(initial=0))
            width = context + int((counts - before).max(initial=0))
            start = context - before + number * width - bounds[:-1]
        index = start.repeat(counts) + np.arange(bounds[-1])
        if self.context:
            mask = torch.from_numpy(index % max(width, 1) >= context)
        zeros = torch.zeros(len(counts), dtype=torch.int64)
        continues = torch.from_numpy(fields[CONTINUES])
        table = {"row": torch.from_numpy(number), "start": zeros, "episode": zeros, "continues": continues}
        return Layout(
            torch.from_numpy(bounds.astype(np.int32)),
            DictTensor.trusted(table),
            DictTensor.trusted(info),
            torch.from_numpy(index),
            torch.from_numpy(counts),
            torch.full((len(counts),), UNKNOWN),
            width,
            longest,
            mask,
        )


class _Ragged:
    """The rows (N,) of windows, and the values read there.

    Values are (N, ...) each. Single windows can be replaced.
    """

    def __init__(self, rows: np.ndarray, arrays: dict[str, Any], counts: np.ndarray) -> None:
        self.rows, self.arrays, self.counts = rows, arrays, counts

    def __setitem__(self, at: np.ndarray, other: _Ragged) -> None:
        begins = np.cumsum(self.counts) - self.counts
        begins[at] = len(self.rows) + np.cumsum(other.counts) - other.counts
        self.counts[at] = other.counts
        places = np.repeat(begins, self.counts) + _count_up(self.counts)
        self.rows = np.concatenate([self.rows, other.rows])[places]
        for name, array in self.arrays.items():
            if isinstance(array, torch.Tensor):
                joined = torch.cat([array, other.arrays[name]])
                self.arrays[name] = joined[torch.from_numpy(places).to(joined.device)]
            else:
                self.arrays[name] = np.concatenate([array, other.arrays[name]])[places]


def _count_up(counts: np.ndarray) -> np.ndarray:
    """Counts from 0 up to each of these counts.

    Returns all of these numbers one after another, int64 (sum of counts,).
    """
    ends = counts.cumsum()
    return np.asarray(np.arange(ends[-1] if len(ends) else 0) - (ends - counts).repeat(counts))


def in_library(pack: PackedTrajectories, framework: str, device: Any) -> Any:
    """Converts a pack to a framework: to `jax()`, to `warp()`, or not at all."""
    if framework in ("jax", "warp"):
        return getattr(pack, framework)()
    tensors = (*pack.values(), pack.cu_seqlens)
    if device is None or all(tensor.device == torch.device(device) for tensor in tensors):
        return pack
    return pack.to(device)
