"""Mean and variance of rows that arrive in pieces, from several workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from rlstructs.workers.public_names import set_module


@set_module("rlstructs")
@dataclass(frozen=True, eq=False)
class Moments:
    """The number of rows, their mean, and the sum that gives their variance.

    Attributes:
        count: number of rows.
        mean: float64, in the shape of a row; 0 if there are no rows.
        m2: float64, in the same shape: the sum of squared distances from the mean.

    Example:
        >>> rows = np.array([[1.0, 5.0], [3.0, 5.0], [8.0, 5.0]])
        >>> found = Moments.of(rows[:1]).merge(Moments.of(rows[1:]))
        >>> found.count, found.mean.tolist(), (found.variance == rows.var(axis=0)).tolist()
        (3, [4.0, 5.0], [True, True])
    """

    count: int
    mean: np.ndarray
    m2: np.ndarray

    @classmethod
    def none(cls, shape: tuple[int, ...]) -> Moments:
        """The moments of no rows."""
        return cls(0, np.zeros(shape), np.zeros(shape))

    @classmethod
    def of(cls, rows: np.ndarray) -> Moments:
        """The moments of rows (n, ...), at least one."""
        mean = rows.mean(axis=0, dtype=np.float64)
        distances = np.subtract(rows, mean, dtype=np.float64)
        return cls(len(rows), np.asarray(mean), np.asarray(np.square(distances, out=distances).sum(axis=0)))

    @property
    def variance(self) -> np.ndarray:
        """The variance, float64, like numpy's `var`; 1 if there are no rows."""
        return self.m2 / self.count if self.count else np.ones(self.mean.shape)

    def merge(self, other: Moments) -> Moments:
        """Returns the moments of the rows of both, exact up to rounding.

        After Chan, Golub and LeVeque.
        """
        if not other.count:
            return self
        count = self.count + other.count
        difference = other.mean - self.mean
        mean = self.mean + difference * (other.count / count)
        m2 = self.m2 + other.m2 + np.square(difference) * (self.count * other.count / count)
        return Moments(count, np.asarray(mean), np.asarray(m2))

    def copy(self) -> Moments:
        """A copy in memory of its own."""
        return Moments(self.count, self.mean.copy(), self.m2.copy())


def merge_parts(known: Mapping[str, Moments], parts: Iterable[Mapping[str, Moments]]) -> dict[str, Moments]:
    """Merges parts into known moments, by name, one part after another."""
    found = dict(known)
    for part in parts:
        for name, moments in part.items():
            found[name] = found[name].merge(moments)
    return found
