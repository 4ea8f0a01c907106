"""Reads rollouts into batches, or lends views of them.

They lie in slots, or in arrays that another machine sent.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlstructs.debug import poison
from rlstructs.errors import StateError
from rlstructs.shared.layout import FOLLOWING, RECORD, Packing
from rlstructs.structures.arrays import TensorSpec, find_true, put_at, raw_of, tensor_of, tensors_of

# The bits of bfloat16's NaN.
BFLOAT16_NAN = 0x7FC0

Source = tuple[np.ndarray, int]  # (B, T or T+1, ...), and its timestep that is read as step 0


@dataclass(frozen=True, eq=False)
class RecordedSteps:
    """Steps that lie in columns.

    Args:
        specs: name -> shape, without the first two axes, and dtype of what is read.
        sources: name -> where it lies.
        lengths: int64 (B,), the number of steps in each row.
        reset: bool (B, T), the steps that led to a final observation, which is not the next one in its column.
        finals: returns the final observations of rows and timesteps (K,), given in the order of `find_true`, by key.
        poisons: whether to fill padding with poison; otherwise with zeros.
    """

    specs: Mapping[str, TensorSpec]
    sources: Mapping[str, Source]
    lengths: np.ndarray
    reset: np.ndarray
    finals: Callable[[np.ndarray, np.ndarray], Mapping[str, np.ndarray]]
    poisons: bool = False

    def read(
        self, rows: np.ndarray | None, n_timesteps: int, out: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """Copies steps 0 to `n_timesteps - 1`, with zeros or poison in the padding.

        Args:
            rows: indexes of the rows; None for all.
            n_timesteps: the number of steps; may be more than there are if `out` is given.
            out: tensors to fill, with the names, shapes and dtypes of the result; None for new ones.

        Returns:
            `observation/k`, `action/k`, `_observation/k` -> (B, n_timesteps, ...).
        """
        lengths = self.lengths if rows is None else self.lengths[rows]
        # Only the end of the slots is masked: if a reset takes a step of its own, most slots have a little padding.
        shortest = min(int(lengths.min(initial=n_timesteps)), n_timesteps)
        padding = np.arange(shortest, n_timesteps) >= lengths[:, None]

        def take(name: str, array: np.ndarray, start: int) -> np.ndarray:
            steps = array[:, start : start + n_timesteps]
            # numpy copies, because after a parallel copy torch's threads would spin for milliseconds on the cores that
            # the workers need for the next rollout.
            if out is not None:
                torch.autograd.graph.increment_version(out[name])
                taken = raw_of(out[name])
                taken[:, : steps.shape[1]] = steps if rows is None else steps[rows]
            else:
                taken = np.array(steps, order="C") if rows is None else steps[rows]
            if shortest < n_timesteps:
                taken[:, shortest:][padding] = self.padding_value(name)
            return taken

        taken = {name: take(name, *source) for name, source in self.sources.items()}
        self._put_finals(taken, rows, n_timesteps)
        return tensors_of(taken, self.specs)

    def read_one(self, name: str, rows: np.ndarray | None, n_timesteps: int) -> torch.Tensor:
        """Copies one column of what `read` returns, of rows that have as many steps."""
        array, start = self.sources[name]
        steps = array[:, start : start + n_timesteps]
        taken = np.array(steps, order="C") if rows is None else steps[rows]
        if name.startswith(FOLLOWING):
            self._put_finals({name: taken}, rows, n_timesteps)
        return tensor_of(taken, self.specs[name][1])

    def padding_value(self, name: str) -> Any:
        """Returns the value that fills the padding of a column."""
        if not self.poisons:
            return 0
        return BFLOAT16_NAN if self.specs[name][1] is torch.bfloat16 else poison(self.sources[name][0].dtype)

    def _put_finals(self, taken: dict[str, np.ndarray], rows: np.ndarray | None, n_timesteps: int) -> None:
        reset = self.reset if rows is None else self.reset[rows]
        at, times = find_true(reset[:, :n_timesteps])
        if not at.size:
            return
        finals = self.finals(at if rows is None else rows[at], times)
        following = {FOLLOWING + key: final for key, final in finals.items()}
        put_at(taken, at, times, {name: final for name, final in following.items() if name in taken})


class Finals:
    """The final observations of the steps that ended an episode.

    Each block is copied at its first use.

    Args:
        packing: says in which block a key lies.
        final: block -> (N, T, ...).
        reset: bool (N, T), the steps.
    """

    def __init__(self, packing: Packing, final: dict[str, np.ndarray], reset: np.ndarray) -> None:
        self._packing, self._final, self.n_timesteps = packing, final, reset.shape[1]
        self.rows, self.times = find_true(reset)
        self._found: dict[str, np.ndarray] = {}

    def __getitem__(self, key: str) -> np.ndarray:
        """Returns the final observations of a key, (K, ...)."""
        name = key if key in self._packing.blocks else RECORD
        if name not in self._found:
            self._found[name] = self._final[name][self.rows, self.times]
        return self._packing.view(self._found, key)


def read_finals(
    packing: Packing, final: Mapping[str, np.ndarray], rows: np.ndarray, times: np.ndarray
) -> dict[str, np.ndarray]:
    """Copies the final observations of rows and timesteps (K,), by key.

    `packing` and `final` are those of `Finals`.
    """
    return packing.views({name: block[rows, times] for name, block in final.items()})


def patch_finals(seen: np.ndarray, key: str, ends: Finals) -> torch.Tensor:
    """Makes a private tensor `_observation/key` of all rows.

    `seen` is the column of observations, (N, T+1, ...).
    """
    following = np.array(seen[:, 1 : ends.n_timesteps + 1], order="C")
    put_at({key: following}, ends.rows, ends.times, {key: ends[key]})
    return torch.from_numpy(following)


def sources_of(seen: Mapping[str, np.ndarray], action: Mapping[str, np.ndarray]) -> dict[str, Source]:
    """Returns the sources of everything that is read.

    Args:
        seen: key -> observations, (B, T+1, ...).
        action: key -> actions, (B, T, ...).
    """
    sources = {f"observation/{key}": (array, 0) for key, array in seen.items()}
    sources |= {f"action/{key}": (array, 0) for key, array in action.items()}
    return sources | {f"_observation/{key}": (array, 1) for key, array in seen.items()}


def step_versions(versions: torch.Tensor, behind: torch.Tensor, lengths: torch.Tensor, n: int) -> torch.Tensor:
    """Returns the number of updates of each step's agent.

    It is int64 (B, n), with zeros in the padding.

    Args:
        versions: int64 (B,), of the rollout's agent.
        behind: int64 (B,), how many of these the agent of the row's first step lacked.
        lengths: int64 (B,), the number of steps in each row.
        n: the number of timesteps.
    """
    found = versions[:, None].repeat(1, n)
    found[:, :1] -= behind[:, None]
    return found * (torch.arange(n, device="cpu") < lengths[:, None])


def blocks_of(packing: Packing, columns: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """Views the columns with this prefix as blocks of observations.

    A record has its opaque dtype.
    """
    blocks = {}
    for name, (_, dtype) in packing.blocks.items():
        block = columns[prefix + name]
        blocks[name] = block.view(dtype)[..., 0] if dtype.kind == "V" else block
    return blocks


class Loan(Mapping[str, torch.Tensor]):
    """Tensors by name, to be used until the loan is closed.

    Args:
        views: views of shared memory.
        copies: copies, or functions that make one at the first use.

    Attributes:
        is_open: whether the views may still be used.
    """

    def __init__(
        self,
        views: Mapping[str, torch.Tensor],
        copies: Mapping[str, torch.Tensor | Callable[[], torch.Tensor]],
    ) -> None:
        self.views, self.copies, self.is_open = views, dict(copies), True

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self.views:
            return self.views[key]
        found = self.copies[key]
        if not isinstance(found, torch.Tensor):
            found = self.copies[key] = found()
        return found

    def __contains__(self, key: object) -> bool:
        return key in self.views or key in self.copies

    def __iter__(self) -> Iterator[str]:
        return itertools.chain(self.views, self.copies)

    def __len__(self) -> int:
        return len(self.views) + len(self.copies)

    def with_views(self, views: Mapping[str, torch.Tensor]) -> Loan:
        """Replaces the views of these copies."""
        other = Loan(views, {})
        other.copies = self.copies
        return other

    def close(self, why: str) -> None:
        """Ends the loan. Idempotent.

        Autograd is told that the views change, and copies that were not made yet are refused, with the message `why`.
        """
        if not self.is_open:
            return
        self.is_open = False
        for view in self.views.values():
            torch.autograd.graph.increment_version(view)
        for key, copy in self.copies.items():
            if not isinstance(copy, torch.Tensor):
                self.copies[key] = functools.partial(_refuse, why)


def _refuse(why: str) -> torch.Tensor:
    raise StateError(why)
