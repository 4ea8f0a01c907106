"""Running mean and variance of one key, and the normalisation by them."""

from __future__ import annotations

import numpy as np

from rlstructs.errors import SpecError
from rlstructs.moments import Moments

# Bytes of rows that are kept until they are counted all at once, which takes a hundredth of the time.
BLOCK = 1 << 18


class Scale:
    """What the values of one key are normalised by, and what is gathered of them.

    Args:
        name: of the key, for messages.
        shape: of a row.
        epsilon: added to the variance.
        clip: the greatest distance from 0 of what is normalised; None for any.
        is_centred: whether the mean is subtracted.
    """

    def __init__(
        self, name: str, shape: tuple[int, ...], epsilon: float, clip: float | None, is_centred: bool = True
    ) -> None:
        self._name, self._shape, self._epsilon, self._clip, self._is_centred = name, shape, epsilon, clip, is_centred
        self._is_frozen = False
        # What the trainer knows, what was gathered since it was told last, and what it was told when it knew nothing.
        self._known = self._gathered = self._told = Moments.none(shape)
        self._pending: list[np.ndarray] = []
        self._n_bytes = 0
        self._use(self._known)

    def add(self, rows: np.ndarray) -> None:
        """Counts rows."""
        if self._is_frozen or not len(rows):
            return
        self._pending.append(rows.copy())
        self._n_bytes += rows.nbytes
        if not self._known.count:  # nobody knows anything yet: what is seen here has to do
            self._count()
            self._use(self._told.merged(self._gathered))
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
        """What was gathered since the last call."""
        self._count()
        gathered, self._gathered = self._gathered, Moments.none(self._shape)
        if not self._known.count:
            self._told = self._told.merged(gathered)
        return gathered

    def load(self, known: Moments, frozen: bool) -> None:
        """Goes by what is known from now on; frozen, it gathers nothing."""
        if known.mean.shape != self._shape:
            raise SpecError(f"statistics: {self._name!r} has shape {known.mean.shape}, expected {self._shape}")
        self._known, self._is_frozen = known, frozen
        self._count()
        self._use(known if known.count or frozen else self._told.merged(self._gathered))

    def _use(self, moments: Moments) -> None:
        self._mean, self._factor = moments.mean, 1 / np.sqrt(moments.variance + self._epsilon)

    def _count(self) -> None:
        if not self._pending:
            return
        with np.errstate(invalid="ignore", over="ignore"):
            gathered = self._gathered.merged(Moments.of(np.concatenate(self._pending)))
        self._pending, self._n_bytes = [], 0
        if not np.isfinite(gathered.m2).all():  # from here on everything would be NaN, in every worker
            raise SpecError(f"environment: {self._name!r} has values that are not finite: they have no variance")
        self._gathered = gathered
