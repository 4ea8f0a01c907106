"""Mean and variance of rows that come in pieces, from several workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Moments:
    """How many rows there were, and what their mean and variance follow from.

    Attributes:
        count: how many rows.
        mean: float64, the shape of a row; 0 where there are none.
        m2: float64, the same shape: the sum of their squared distances from the mean.

    Example:
        >>> rows = np.array([[1.0, 5.0], [3.0, 5.0], [8.0, 5.0]])
        >>> found = Moments.of(rows[:1]).merged(Moments.of(rows[1:]))
        >>> found.count, found.mean.tolist(), (found.variance == rows.var(axis=0)).tolist()
        (3, [4.0, 5.0], [True, True])
    """

    count: int
    mean: np.ndarray
    m2: np.ndarray

    @classmethod
    def none(cls, shape: tuple[int, ...]) -> Moments:
        """Of no rows."""
        return cls(0, np.zeros(shape), np.zeros(shape))

    @classmethod
    def of(cls, rows: np.ndarray) -> Moments:
        """Of rows (n, ...), at least one."""
        mean = rows.mean(axis=0, dtype=np.float64)
        distances = np.subtract(rows, mean, dtype=np.float64)
        return cls(len(rows), np.asarray(mean), np.asarray(np.square(distances, out=distances).sum(axis=0)))

    @property
    def variance(self) -> np.ndarray:
        """float64, of the rows as all there are (numpy's `var`); 1 where there are none."""
        return self.m2 / self.count if self.count else np.ones(self.mean.shape)

    def merged(self, other: Moments) -> Moments:
        """Of the rows of both: Chan, Golub and LeVeque's formula, exact but for rounding."""
        if not other.count:
            return self
        count = self.count + other.count
        apart = other.mean - self.mean
        mean = self.mean + apart * (other.count / count)
        m2 = self.m2 + other.m2 + np.square(apart) * (self.count * other.count / count)
        return Moments(count, np.asarray(mean), np.asarray(m2))

    def copy(self) -> Moments:
        """The same in memory of its own."""
        return Moments(self.count, self.mean.copy(), self.m2.copy())


def merged(known: Mapping[str, Moments], parts: Iterable[Mapping[str, Moments]]) -> dict[str, Moments]:
    """What is known, by name, with what the parts add to it, one after another."""
    found = dict(known)
    for part in parts:
        for name, moments in part.items():
            found[name] = found[name].merged(moments)
    return found
