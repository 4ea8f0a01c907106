"""Rollouts as they were written, read into batches: from slots, or from what another machine has sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlstructs.debug import poison
from rlstructs.shared.packing import RECORD, Packing, Rows
from rlstructs.structures.arrays import TensorSpec, put_where, raw_of, tensor_of, where_true

# The bits of bfloat16's NaN.
BFLOAT16_NAN = 0x7FC0

Source = tuple[np.ndarray, int]  # (B, T or T+1, ...), and the timestep at which it begins


@dataclass(frozen=True, eq=False)
class Recorded:
    """Steps that lie in columns.

    Args:
        specs: of what is read, by name: shapes without the first two axes, and dtypes.
        sources: where each of them lies.
        lengths: int64 (B,), how many steps there are of each row.
        reset: bool (B, T), where what followed a step is not what is seen next, but among the finals.
        finals: gives these, for rows and timesteps (K,) in the order of `where_true`.
        poisons: whether padding holds poison rather than zeros.
    """

    specs: Mapping[str, TensorSpec]
    sources: Mapping[str, Source]
    lengths: np.ndarray
    reset: np.ndarray
    finals: Callable[[np.ndarray, np.ndarray], Rows]
    poisons: bool = False

    def read(
        self, rows: np.ndarray | None, n_timesteps: int, out: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """Steps 0 to `n_timesteps - 1` of these rows (None: all), private memory, zeros or poison in the padding.

        Args:
            rows: which.
            n_timesteps: how many steps; more than there are, if `out` is given.
            out: tensors to be filled, of the names, shapes and dtypes of what is returned; None for new ones.

        Returns:
            `observation/k`, `action/k`, `_observation/k` -> (B, n_timesteps, ...).
        """
        lengths = self.lengths if rows is None else self.lengths[rows]
        # Where environments reset in steps of their own, most slots have some padding, at their very end.
        shortest = min(int(lengths.min(initial=n_timesteps)), n_timesteps)
        padding = np.arange(shortest, n_timesteps) >= lengths[:, None]

        def take(name: str, array: np.ndarray, start: int) -> np.ndarray:
            steps = array[:, start : start + n_timesteps]
            # numpy, not torch: the threads of a parallel copy would spin on the workers' cores for
            # milliseconds after it, just when the next rollout begins.
            if out is not None:
                torch.autograd.graph.increment_version(out[name])
                taken = raw_of(out[name])
                taken[:, : steps.shape[1]] = steps if rows is None else steps[rows]
            else:
                taken = np.array(steps, order="C") if rows is None else steps[rows]
            if shortest < n_timesteps:
                taken[:, shortest:][padding] = self.nothing(name)
            return taken

        taken = {name: take(name, *source) for name, source in self.sources.items()}
        self._put_finals(taken, rows, n_timesteps)
        return {name: tensor_of(array, self.specs[name][1]) for name, array in taken.items()}

    def nothing(self, name: str) -> Any:
        """What stands where there was no step."""
        if not self.poisons:
            return 0
        return BFLOAT16_NAN if self.specs[name][1] is torch.bfloat16 else poison(self.sources[name][0].dtype)

    def _put_finals(self, taken: dict[str, np.ndarray], rows: np.ndarray | None, n_timesteps: int) -> None:
        reset = self.reset if rows is None else self.reset[rows]
        at, times = where_true(reset[:, :n_timesteps])
        if not at.size:
            return
        finals = self.finals(at if rows is None else rows[at], times)
        for key, final in finals.arrays().items():
            put_where(taken[f"_observation/{key}"], at, times, final)


class Ends:
    """The steps whose next observation lies among the finals, and these, block by block as they are asked for.

    Args:
        packing: how observations lie in blocks.
        final: block -> (N, T, ...).
        reset: bool (N, T), which steps.
    """

    def __init__(self, packing: Packing, final: dict[str, np.ndarray], reset: np.ndarray) -> None:
        self._packing, self._final, self.n_timesteps = packing, final, reset.shape[1]
        self.rows, self.times = where_true(reset)
        self._found: dict[str, np.ndarray] = {}

    def __getitem__(self, key: str) -> np.ndarray:
        """The finals of a key, (K, ...)."""
        is_block = key in self._packing.blocks
        name = key if is_block else RECORD
        if name not in self._found:
            found = self._final[name][self.rows, self.times]
            self._found[name] = found if is_block else found.view(self._packing.record)
        return self._found[name] if is_block else self._found[name][key]


def patched(seen: np.ndarray, key: str, ends: Ends) -> torch.Tensor:
    """`_observation/key` of every row, private memory, of what was seen (N, T+1, ...)."""
    following = np.array(seen[:, 1 : ends.n_timesteps + 1], order="C")
    put_where(following, ends.rows, ends.times, ends[key])
    return torch.from_numpy(following)


def sources_of(seen: Mapping[str, np.ndarray], action: Mapping[str, np.ndarray]) -> dict[str, Source]:
    """Where everything that is read lies.

    Args:
        seen: observations by key, (B, T+1, ...).
        action: actions by key, (B, T, ...).
    """
    sources = {f"observation/{key}": (array, 0) for key, array in seen.items()}
    sources |= {f"action/{key}": (array, 0) for key, array in action.items()}
    return sources | {f"_observation/{key}": (array, 1) for key, array in seen.items()}


def specs_of_steps(
    observation: Mapping[str, TensorSpec], action: Mapping[str, TensorSpec]
) -> dict[str, TensorSpec]:
    """Of what is read, in the order of `sources_of`."""
    specs = {f"observation/{key}": spec for key, spec in observation.items()}
    specs |= {f"action/{key}": spec for key, spec in action.items()}
    return specs | {f"_observation/{key}": spec for key, spec in observation.items()}


def blocks_of(packing: Packing, columns: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """The blocks that observations lie in, views of columns whose names begin so; records have the dtype of one."""
    found = {}
    for name, (_, dtype) in packing.blocks.items():
        block = columns[prefix + name]
        found[name] = block.view(dtype)[..., 0] if dtype.kind == "V" else block
    return found
