"""A batch: the slots of some environments, in one slot buffer or in several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from rlstructs.batcher import out_argument
from rlstructs.episodes import NAMES_OF_STEPS
from rlstructs.shared.loan import Loan
from rlstructs.shared.slots import Slots
from rlstructs.structures.arrays import TensorSpec
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
from rlstructs.structures.trajectories import Trajectories

# The keys of `info` that do not lie in slots.
ROW_INFO: Mapping[str, TensorSpec] = {"env_index": ((), torch.int64), "policy_version": ((), torch.int64)}


class Batch:
    """Finished rollouts of B environments.

    Args:
        sources: the slots of all environments in each slot buffer, and which of them to take, int64, ascending.
        versions: int64 (N,), the number of updates that each environment's agent had received.

    Attributes:
        lengths, first_steps: int64 (B,), as of a `TemporalDictTensor`.
        n_timesteps: the longest of the lengths.
    """

    def __init__(self, sources: Sequence[tuple[Slots, np.ndarray]], versions: np.ndarray) -> None:
        self._sources, self._versions = sources, versions
        rows = np.concatenate([rows for _, rows in sources])
        # Sorts the rows of several slot buffers by environment; None for a single one, which is sorted.
        self._order = None if len(sources) == 1 else np.argsort(rows)
        self._rows = rows if self._order is None else rows[self._order]
        lengths = self._join([slots.lengths[rows] for slots, rows in sources])
        first_steps = self._join([slots.first_steps[rows] for slots, rows in sources])
        self.lengths, self.first_steps = torch.from_numpy(lengths), torch.from_numpy(first_steps)
        self.n_timesteps = int(lengths.max()) if rows.size else 0

    def _join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Joins numbers of rows, of each slot buffer, in the order of the batch."""
        return parts[0] if self._order is None else np.concatenate(parts)[self._order]

    def _wrap(self, info: Mapping[str, torch.Tensor], steps: Mapping[str, torch.Tensor]) -> Trajectories:
        """The trajectories of an info and steps of this batch."""
        found = TemporalDictTensor.trusted(steps, self.lengths, self.first_steps)
        return Trajectories.trusted(DictTensor.trusted(info), found)

    def read(self, out: Trajectories | None = None) -> Trajectories:
        """Copies the batch into new memory, or into `out`, which was checked before."""
        info = self._info()
        if out is None:
            return self._wrap(info, self._steps())
        kept = out_argument.cut(out, len(self.lengths), self.n_timesteps)
        for key, tensor in info.items():
            kept.info[key].copy_(tensor)
        kept.lengths.copy_(self.lengths)
        first_steps = self.first_steps
        if kept.trajectories.first_steps is not None:
            first_steps = kept.trajectories.first_steps.copy_(first_steps)
        steps = TemporalDictTensor.trusted(self._steps(dict(kept.trajectories.items())), kept.lengths, first_steps)
        return Trajectories.trusted(kept.info, steps)

    def lend(self) -> Trajectories:
        """Returns views of the slots where that is possible, and copies elsewhere."""
        if self._order is None:
            [(slots, rows)] = self._sources
            loan = slots.lend(_rows_or_none(slots, rows), self.n_timesteps)
        else:
            loan = Loan({}, self._steps())
        return self._wrap(self._info(), loan)

    def lend_episodes(self) -> Trajectories:
        """Returns only the steps that episodes are found by; values in the padding are undefined."""
        found: list[dict[str, torch.Tensor]] = []
        for slots, rows in self._sources:
            loan = slots.lend(None, self.n_timesteps)
            steps = {name: loan[name] for name in NAMES_OF_STEPS if name in loan}
            if rows.size < slots.n:
                steps = {name: tensor[torch.from_numpy(rows)] for name, tensor in steps.items()}
            found.append(steps)
        steps = found[0]
        if self._order is not None:
            order = torch.from_numpy(self._order)
            steps = {name: torch.cat([each[name] for each in found])[order] for name in steps}
        return self._wrap(self._row_info(), steps)

    def release(self) -> None:
        """Marks the slots as read."""
        for slots, rows in self._sources:
            slots.release(_rows_or_none(slots, rows))

    def _steps(self, out: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """Copies the steps, (B, n_timesteps, ...), into new memory or into `out`."""
        if self._order is None:
            [(slots, rows)] = self._sources
            return slots.read(_rows_or_none(slots, rows), self.n_timesteps, out)
        order = torch.from_numpy(self._order)
        found = [slots.read(_rows_or_none(slots, rows), self.n_timesteps) for slots, rows in self._sources]
        steps = {name: torch.cat([tensors[name] for tensors in found])[order] for name in found[0]}
        if out is None:
            return steps
        for name, tensor in steps.items():
            out[name].copy_(tensor)
        return out

    def _info(self) -> dict[str, torch.Tensor]:
        """Copies the values that each row has only once, (B, ...)."""
        found = [slots.info_of(rows) for slots, rows in self._sources]
        info = found[0]
        if self._order is not None:
            order = torch.from_numpy(self._order)
            info = {key: torch.cat([tensors[key] for tensors in found])[order] for key in info}
        return {**info, **self._row_info()}

    def _row_info(self) -> dict[str, torch.Tensor]:
        """The values of `ROW_INFO`, (B,)."""
        versions = torch.from_numpy(self._versions[self._rows])
        return {"env_index": torch.from_numpy(self._rows), "policy_version": versions}


def _rows_or_none(slots: Slots, rows: np.ndarray) -> np.ndarray | None:
    """The rows, or None if they are all rows of the slots."""
    return None if rows.size == slots.n else rows


def write_info(slots: Slots, name: str, info: DictTensor, rows: slice) -> None:
    """Writes these rows of an `agent_info` or `env_info` of all environments to their slots."""
    for key, tensor in info.items():
        slots.column(f"{name}/{key}")[rows].copy_(tensor[rows].detach())
