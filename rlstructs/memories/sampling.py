"""`RandomMemory`, which draws rows uniformly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlstructs.checks import check_count
from rlstructs.errors import StateError
from rlstructs.memories import memory, windows
from rlstructs.memories.windows import Fits
from rlstructs.replay.drawing import Selection, Uniform
from rlstructs.replay.span import Span


class RandomMemory(memory.Memory):
    """A memory that draws its rows uniformly.

    Args:
        replacement: whether a batch may hold a row twice. If False, a batch is smaller if there are too few rows.
            None draws with replacement, except that a batch as large as the memory holds each row once: an epoch of
            skrl's on-policy agents.
        memory_size, num_envs, device, export, export_format, export_directory, seed, strict: see `Memory`.
    """

    def __init__(
        self,
        memory_size: int,
        num_envs: int = 1,
        device: Any = None,
        export: bool = False,
        export_format: str = "pt",
        export_directory: str | Path = "",
        replacement: bool | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(memory_size, num_envs, device, export, export_format, export_directory, **settings)
        self._uniform = Uniform(replacement)
        # skrl's attribute, which subclasses of its memories read.
        self._replacement = self._uniform.replacement is not False
        self._last: Selection | None = None
        self._discounts: Any = 1.0  # of the last sample: one number, or one for each row

    def sample(
        self,
        names: Sequence[str],
        batch_size: int,
        mini_batches: int = 1,
        sequence_length: int = 1,
        *,
        n_step: int = 1,
        gamma: float = 0.99,
        episode_ends: str = "cross",
    ) -> list[list[Any]]:
        """Draws rows at random and returns copies.

        Args:
            names: names of tensors; unknown ones give None.
            batch_size: number of rows or sequences; without replacement there may be fewer.
            mini_batches: number of parts; they hold whole sequences and are of nearly equal size.
            sequence_length: consecutive rows of one environment, adjacent in the result; a sequence
                never continues from the newest row to the oldest.
            n_step: `rewards` become the discounted sum of n rewards, up to the end of the episode or the
                newest row; `next_*`, `terminated` and `truncated` come from the last of these steps.
                `get_sampling_discounts` returns gamma to the number of steps.
            gamma: the discount per step.
            episode_ends: whether sequences "cross" the ends of episodes, are masked after them ("mask", see
                `get_sampling_mask`), or "never" contain one.

        Returns:
            For each mini-batch a list of tensors `(rows, *data)`, in the order of `names`.

        Raises:
            SpecError: an argument is invalid, or there is nothing to draw.
        """
        names, known = self._batches.check_names(names, self.strict)
        n, storage = check_count("batch_size", batch_size), self._tensors.store()
        length = windows.check_length(storage, sequence_length, n_step, gamma, episode_ends)
        picked, arrays = storage.sample(
            n,
            lambda count: self._select(count, length, episode_ends),
            lambda chosen: windows.read(storage, chosen, known, n_step, gamma),
        )
        self.sampling_indexes = self.framework.as_indexes(picked.rows.reshape(-1))
        self._last = picked
        self._discounts = gamma if n_step == 1 else arrays.pop()
        if n_step == 1 and type(self).sample_by_index is not memory.Memory.sample_by_index:
            # A subclass returns rows in its own way, for example on another device: skrl's `sample` uses it too.
            return self.sample_by_index(names=names, indexes=self.sampling_indexes, mini_batches=mini_batches)
        if length > 1:
            arrays = [array.reshape(-1, *array.shape[2:]) for array in arrays]
        starts = None if mini_batches == 1 else np.arange(0, picked.rows.size, length)
        return self._batches.split(names, known, arrays, mini_batches, starts)

    def get_sampling_mask(self) -> Any:
        """A mask of the valid rows of the last `sample`, bool, in the order of `get_sampling_indexes`."""
        picked = self._last_selection()
        mask = picked.fields.get("mask", np.ones(len(picked.rows), bool))
        return self._batches.hand_over_one(mask.reshape(-1))

    def get_sampling_is_first(self) -> Any:
        """A mask of the rows of the last `sample` that begin an episode, bool, in the same order."""
        picked = self._last_selection()
        if "is_first" not in picked.fields:
            raise StateError(windows.NO_ENDS_ERROR)
        return self._batches.hand_over_one(picked.fields["is_first"].reshape(-1))

    def get_sampling_discounts(self) -> Any:
        """Gamma to the number of steps that each row of the last `sample` sums up, float32 (rows,)."""
        n = self._last_selection().rows.size
        return self._batches.hand_over_one(np.full(n, self._discounts, np.float32))

    def _last_selection(self) -> Selection:
        if self._last is None:
            raise StateError("call sample first")
        return self._last

    def _select(self, n: int, length: int, ends: str) -> Selection:
        return windows.select(self._tensors.store(), self._draw_anchors, n, length, ends)

    def _draw_anchors(self, span: Span, n: int, fits: Fits | None) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Draws the first rows of `n` windows that fit; returns them and more fields of the selection."""
        return windows.draw_uniformly(self._uniform, self._rng, span, n, fits), {}
