"""Running mean and variance of one key, and the normalisation by them."""

from __future__ import annotations

import numpy as np

from rlstructs.errors import SpecError
from rlstructs.moments import Moments

# Bytes of rows to keep before counting them, all at once, which takes a hundredth of the time.
BLOCK = 1 << 18


class Scale:
    """Normalises the values of one key, and gathers their statistics.

    Args:
        name: of the statistics, for messages.
        shape: of a row.
        epsilon: added to the variance.
        clip: normalised values lie in [-clip, clip]; None for no limit.
        is_centred: whether the mean is subtracted.
    """

    def __init__(
        self, name: str, shape: tuple[int, ...], epsilon: float, clip: float | None, is_centred: bool = True
    ) -> None:
        self._name, self._shape, self._epsilon, self._clip, self._is_centred = name, shape, epsilon, clip, is_centred
        self._is_frozen = False
        # The statistics of all workers; those gathered since the last `take`; and those taken before all workers
        # had any.
        self._known = self._gathered = self._early = Moments.none(shape)
        self._pending: list[np.ndarray] = []
        self._n_bytes = 0
        self._use(self._known)

    def add(self, rows: np.ndarray) -> None:
        """Counts rows."""
        if self._is_frozen or not len(rows):
            return
        self._pending.append(rows.copy())
        self._n_bytes += rows.nbytes
        if not self._known.count:  # there are no shared statistics yet: use those of this worker
            self._count()
            self._use(self._early.merge(self._gathered))
        elif self._n_bytes >= BLOCK:
            self._count()

    def apply(self, rows: np.ndarray) -> None:
        """Normalises rows in place."""
        values = np.subtract(rows, self._mean, dtype=np.float64) if self._is_centred else rows
        if self._clip is None:
            np.multiply(values, self._factor, out=rows, casting="same_kind", dtype=np.float64)
            return
        scaled = np.multiply(values, self._factor, dtype=np.float64)
        np.maximum(scaled, -self._clip, out=scaled)
        np.minimum(scaled, self._clip, out=rows, casting="same_kind")

    def take(self) -> Moments:
        """Takes what was gathered since the last call."""
        self._count()
        gathered, self._gathered = self._gathered, Moments.none(self._shape)
        if not self._known.count:
            self._early = self._early.merge(gathered)
        return gathered

    def load(self, known: Moments, frozen: bool) -> None:
        """Normalises by these statistics from now on; if frozen, gathers nothing."""
        if known.mean.shape != self._shape:
            raise SpecError(f"statistics: {self._name!r} has shape {known.mean.shape}, expected {self._shape}")
        self._known, self._is_frozen = known, frozen
        self._count()
        self._use(known if known.count or frozen else self._early.merge(self._gathered))

    def _use(self, moments: Moments) -> None:
        self._mean, self._factor = moments.mean, 1 / np.sqrt(moments.variance + self._epsilon)

    def _count(self) -> None:
        if not self._pending:
            return
        with np.errstate(invalid="ignore", over="ignore"):
            gathered = self._gathered.merge(Moments.of(np.concatenate(self._pending)))
        self._pending, self._n_bytes = [], 0
        if not np.isfinite(gathered.m2).all():  # every later value would be NaN, in every worker
            raise SpecError(f"environment: {self._name!r} has values that are not finite: they have no variance")
        self._gathered = gathered
