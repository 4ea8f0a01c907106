"""A batch: the slots of some environments, of one slot buffer or of several, read as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from rlstructs.batcher import out_argument
from rlstructs.shared.lent import Lent
from rlstructs.shared.slots import Slots
from rlstructs.structures.arrays import TensorSpec
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
from rlstructs.structures.trajectories import Trajectories

# What is known of each row, beside what lies in its slot.
ROW_INFO: Mapping[str, TensorSpec] = {"env_index": ((), torch.int64), "policy_version": ((), torch.int64)}


class Batch:
    """Rollouts that are over.

    Args:
        parts: slots of all environments in one slot buffer, and which of them, int64 (B,), ascending.
        versions: int64 (N,), of which update the agent of each environment was.
    """

    def __init__(self, parts: Sequence[tuple[Slots, np.ndarray]], versions: np.ndarray) -> None:
        self._parts, self._versions = parts, versions
        rows = np.concatenate([rows for _, rows in parts])
        # Of which part and row each row of the batch is.
        self._order = None if len(parts) == 1 else np.argsort(rows)
        self._rows = rows if self._order is None else rows[self._order]
        lengths = self._ordered([slots.lengths[rows] for slots, rows in parts])
        self.lengths, self.n_timesteps = torch.from_numpy(lengths), int(lengths.max(initial=0))

    def read(self, out: Trajectories | None = None) -> Trajectories:
        """All of it in private memory, or in `out`, which fits."""
        info = self._info()
        if out is None:
            return Trajectories(DictTensor.trusted(info), TemporalDictTensor.trusted(self._steps(), self.lengths))
        kept = out_argument.cut(out, len(self.lengths), self.n_timesteps)
        for key, tensor in info.items():
            kept.info[key].copy_(tensor)
        kept.lengths.copy_(self.lengths)
        steps = self._steps(dict(kept.trajectories.items()))
        return Trajectories(kept.info, TemporalDictTensor.trusted(steps, kept.lengths))

    def lend(self) -> Trajectories:
        """All of it, where it lies wherever that can be."""
        if self._order is None:
            [(slots, rows)] = self._parts
            lent = slots.lend(_some(slots, rows), self.n_timesteps)
        else:
            lent = Lent({}, self._steps())
        steps = TemporalDictTensor.trusted(lent, self.lengths)
        return Trajectories(DictTensor.trusted(self._info()), steps)

    def release(self) -> None:
        """The slots may be written again."""
        for slots, rows in self._parts:
            slots.release(_some(slots, rows))

    def _steps(self, out: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        if self._order is None:
            [(slots, rows)] = self._parts
            return slots.read(_some(slots, rows), self.n_timesteps, out)
        order = torch.from_numpy(self._order)
        read = [slots.read(_some(slots, rows), self.n_timesteps) for slots, rows in self._parts]
        steps = {name: torch.cat([part[name] for part in read])[order] for name in read[0]}
        if out is None:
            return steps
        for name, tensor in steps.items():
            out[name].copy_(tensor)
        return out

    def _info(self) -> dict[str, torch.Tensor]:
        """What is known of each row, private memory."""
        parts = [slots.info_of(rows) for slots, rows in self._parts]
        order = None if self._order is None else torch.from_numpy(self._order)
        info = parts[0] if order is None else {key: torch.cat([part[key] for part in parts])[order] for key in parts[0]}
        versions = torch.from_numpy(self._versions[self._rows])
        return {**info, "env_index": torch.from_numpy(self._rows), "policy_version": versions}

    def _ordered(self, parts: list[np.ndarray]) -> np.ndarray:
        return parts[0] if self._order is None else np.concatenate(parts)[self._order]


def _some(slots: Slots, rows: np.ndarray) -> np.ndarray | None:
    """As `Slots` takes them: None for all."""
    return None if rows.size == slots.n else rows


def write_info(slots: Slots, name: str, info: DictTensor, rows: slice) -> None:
    """Writes these rows of an `agent_info` or `env_info` of all environments into their slots."""
    for key, tensor in info.items():
        slots.column(f"{name}/{key}")[rows].copy_(tensor[rows].detach())
