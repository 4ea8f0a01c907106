"""What a node sends of a rollout, and batches that are made of it.

The columns of its slots travel as they are, an observation once, and of what they hold only the rows and timesteps
that were written. They arrive as read-only arrays in the object store; `get` copies them once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from rlstructs.batcher.batch import Batch
from rlstructs.distributed.actor import Columns
from rlstructs.episodes import NAMES_OF_STEPS
from rlstructs.shared.layout import Layout
from rlstructs.shared.packing import Packing, Rows
from rlstructs.shared.reading import RecordedSteps, blocks_of, sources_of, specs_of_steps
from rlstructs.shared.slots import Slots
from rlstructs.structures.arrays import TensorSpec, find_true, raw_dtype, raw_of, tensor_of
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
from rlstructs.structures.trajectories import Trajectories

SEEN, ACTION, FINAL = "observation/", "action/", "_observation/"


def columns_of(slots: Slots, rows: np.ndarray, n_timesteps: int) -> Columns:
    """What slots hold of these rows and timesteps: views, if that is all that there is.

    Of what only counts where an environment was reset, in their order, just that.
    """
    index = slice(None) if rows.size == slots.n else rows
    reset = raw_of(slots.column("reset"))[index, :n_timesteps]
    at, times = find_true(reset)
    columns = {}
    for field in slots.layout.fields:
        column = raw_of(slots.column(field.name))
        if field.sparse:
            columns[field.name] = column[at if isinstance(index, slice) else rows[at], times]
            continue
        if field.name.startswith((SEEN, ACTION)) or field.name == "reset":
            column = column[:, : n_timesteps + field.name.startswith(SEEN)]
        columns[field.name] = np.ascontiguousarray(column[index])
    return columns


class Part(Mapping[str, np.ndarray]):
    """One node's part of a rollout, read-only arrays by name: (B, T, ...), which lie in the object store.

    What lies behind a row's length is of no meaning. `_observation/...` of a rollout in which an environment was reset
    is a copy, made when it is first asked for. bfloat16, which numpy has not, is given as int16.

    Attributes:
        node: its index.
        info: what there is once for each row, (B, ...).
        lengths: int64 (B,), how many steps there are.
    """

    def __init__(self, node: int, recorded: RecordedSteps, info: Columns) -> None:
        self.node, self.info, self.lengths = node, info, recorded.lengths
        self._recorded, self._copies = recorded, dict[str, np.ndarray]()

    @property
    def n_timesteps(self) -> int:
        """The most steps that a row has."""
        return int(self._recorded.reset.shape[1])

    def __getitem__(self, name: str) -> np.ndarray:
        if name in self._copies:
            return self._copies[name]
        array, start = self._recorded.sources[name]
        steps = array[:, start : start + self.n_timesteps]
        if not name.startswith(FINAL) or not self._recorded.reset.any():
            return steps
        copy = self._copies[name] = self._patched(name.removeprefix(FINAL), steps)
        return copy

    def _patched(self, key: str, steps: np.ndarray) -> np.ndarray:
        at, times = find_true(self._recorded.reset)
        steps = np.array(steps, order="C")
        steps[at, times] = self._recorded.finals(at, times)[key]
        steps.flags.writeable = False
        return steps

    def add_info(self, **columns: np.ndarray) -> None:
        """Adds to `info`; these become read-only."""
        for column in columns.values():
            column.flags.writeable = False
        self.info |= columns

    def read(self, n_timesteps: int, out: Mapping[str, torch.Tensor]) -> None:
        """Copies its steps to tensors (B, n_timesteps, ...) of the same names."""
        self._recorded.read(None, n_timesteps, out)

    def __iter__(self) -> Iterator[str]:
        return iter(self._recorded.sources)

    def __len__(self) -> int:
        return len(self._recorded.sources)


class Parts:
    """Makes parts of what nodes send.

    Args:
        layout: of all environments.
        poisons: whether padding of batches holds poison rather than zeros.
    """

    def __init__(self, layout: Layout, poisons: bool) -> None:
        self.layout, self._poisons = layout, poisons
        self._packing = layout.packing()
        self.specs = specs_of_steps(layout.observation, layout.action)

    def of(self, node: int, columns: Columns) -> Part:
        """What a node has sent."""
        blocks = blocks_of(self._packing, columns, SEEN)
        seen = self._packing.views(blocks)
        sources = sources_of(seen, {key: columns[ACTION + key] for key in self.layout.action})
        finals = partial(_finals, self._packing, blocks_of(self._packing, columns, FINAL))
        recorded = RecordedSteps(self.specs, sources, columns["lengths"], columns["reset"], finals, self._poisons)
        return Part(node, recorded, {name: columns[name] for name in self.layout.info})

    def lost(self, node: int, infos: Columns, n_rows: int) -> Part:
        """Rows of no steps.

        Args:
            node: of which nothing has come.
            infos: what is known of its rows all the same, of these names; the rest is zeros.
            n_rows: how many rows.
        """
        columns = {
            field.name: np.zeros((n_rows, *_shape(field.name, field.shape[1:])), raw_dtype(field.dtype))
            for field in self.layout.fields
            if not field.sparse
        }
        columns |= {field.name: np.zeros((0, *field.shape[2:]), raw_dtype(field.dtype))
                    for field in self.layout.fields if field.sparse}  # fmt: skip
        columns |= infos
        for column in columns.values():
            column.flags.writeable = False
        return self.of(node, columns)


def _shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a column of no steps, without its first axis."""
    if name.startswith((SEEN, ACTION)) or name == "reset":
        return (int(name.startswith(SEEN)), *shape[1:])
    return shape


def _finals(packing: Packing, blocks: dict[str, np.ndarray], rows: np.ndarray, times: np.ndarray) -> Rows:
    # They come in the order of `find_true`, and are asked for so.
    return Rows(packing, blocks)


class PartsBatch(Batch):
    """Parts as one batch.

    Args:
        parts: by node.
        rows: int64 (B,), the global index of each environment.
        versions: int64 (B,), of which update its agent was.
        layout: of all environments.
    """

    def __init__(self, parts: Sequence[Part], rows: np.ndarray, versions: np.ndarray, layout: Layout) -> None:
        self.parts, self._rows, self._versions, self._layout = parts, rows, versions, layout
        self._specs = specs_of_steps(layout.observation, layout.action)
        self.lengths = torch.from_numpy(np.concatenate([part.lengths for part in parts]))
        self.n_timesteps = int(self.lengths.max()) if rows.size else 0

    def release(self) -> None:
        """Nothing: what is in the object store goes when nobody looks at it."""

    def _steps(self, out: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        steps = _new((len(self.lengths), self.n_timesteps), self._specs) if out is None else out
        for part, rows in self._placed():
            part.read(self.n_timesteps, {name: tensor[rows] for name, tensor in steps.items()})
        return steps

    def lend(self) -> Trajectories:
        """The steps that episodes are found by, private memory; what lies in the padding is of no meaning."""
        specs = {name: spec for name, spec in self._specs.items() if name in NAMES_OF_STEPS}
        steps = _new((len(self.lengths), self.n_timesteps), specs)
        for part, rows in self._placed():
            for name, tensor in steps.items():
                raw_of(tensor)[rows, : part.n_timesteps] = part[name]
        info = DictTensor.trusted({"env_index": torch.from_numpy(self._rows)})
        return Trajectories(info, TemporalDictTensor.trusted(steps, self.lengths))

    def _placed(self) -> Iterator[tuple[Part, slice]]:
        """Each part and the rows of the batch that it is."""
        end = 0
        for part in self.parts:
            first, end = end, end + len(part.lengths)
            yield part, slice(first, end)

    def _info(self) -> dict[str, torch.Tensor]:
        info = {
            name: tensor_of(np.concatenate([part.info[name] for part in self.parts]), dtype)
            for name, (_, dtype) in self._layout.info.items()
        }
        rows, versions = torch.from_numpy(self._rows), torch.from_numpy(self._versions)
        return {**info, "env_index": rows, "policy_version": versions}


def _new(lead: tuple[int, int], specs: Mapping[str, TensorSpec]) -> dict[str, torch.Tensor]:
    # numpy asks for huge pages, torch does not: of large batches that is most of the time.
    return {
        name: tensor_of(np.empty((*lead, *shape), raw_dtype(dtype)), dtype) for name, (shape, dtype) in specs.items()
    }
