"""Draws rows uniformly, or only rows that fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from rlstructs.errors import SpecError
from rlstructs.replay.span import Span


@dataclass
class Selection:
    """The drawn samples.

    Attributes:
        rows: int64 (B, L) row ids, the earliest of each sample in column 0.
        span: the counters at the time of the draw.
        fields: more values of each sample (mask, weights, ...), first axis B.
        earliest: int64 (B,), the first row that is read for each; None for column 0.
    """

    rows: np.ndarray
    span: Span
    fields: dict[str, np.ndarray] = field(default_factory=dict)
    earliest: np.ndarray | None = None

    def put(self, at: np.ndarray, other: Selection) -> None:
        """Replaces some samples, in place."""
        self.rows[at] = other.rows
        for name, values in self.fields.items():
            values[at] = other.fields[name]


class Listed(Protocol):
    """Rows that can be listed."""

    def every_row(self) -> np.ndarray:
        """Every row, int64 (n,)."""


# Number of draws before all rows that fit are listed instead.
TRIES = 8


def draw_fitting(
    draw: Callable[[int], np.ndarray],
    fits: Callable[[np.ndarray], np.ndarray],
    n: int,
    choose: Callable[[np.ndarray, int], np.ndarray],
    span: Listed,
    wanted: str = "window of this length",
) -> np.ndarray:
    """Draws `n` row ids that fit.

    Args:
        draw: draws a given number of row ids.
        fits: returns which row ids fit, bool.
        choose: draws a given number from an array of row ids, with the distribution of `draw`.
        span: lists all rows.
        wanted: what a row that fits is, for the message.

    Raises:
        SpecError: no row fits.
    """
    rows = draw(n)
    found: np.ndarray = rows[fits(rows)]
    for _ in range(TRIES):
        if found.size == n:
            return found
        # Only as many as are missing: a draw may be sorted by row, so dropping its end would favour low rows.
        rows = draw(n - found.size)
        found = np.concatenate([found, rows[fits(rows)]])
    if found.size == n:
        return found
    every: np.ndarray = span.every_row()
    every = every[fits(every)]
    if not every.size:
        raise SpecError(f"nothing to sample: no {wanted} is stored")
    return np.concatenate([found, choose(every, n - found.size)])


def draw_numbers(rng: np.random.Generator, total: int, n: int) -> np.ndarray:
    """Draws `n` numbers in [0, total), int64, each as likely as any other, in half the time of `rng.integers`."""
    return np.asarray((rng.random(n) * total).astype(np.int64))


class Uniform:
    """Draws every row with equal probability.

    Args:
        replacement: whether a draw may hold a row twice; None for yes, except in a draw as large as the store.
    """

    def __init__(self, replacement: bool | None = True) -> None:
        self.replacement = None if replacement is None else bool(replacement)

    def draw(self, span: Span, n: int, rng: np.random.Generator) -> np.ndarray:
        """Draws `n` row ids; without replacement there may be fewer.

        Raises:
            SpecError: the span is empty.
        """
        total = span.total
        if total == 0:
            raise SpecError("nothing to sample: no row, or no window of this length, is stored")
        if self.replacement or (self.replacement is None and n != total):
            return span.row_ids(draw_numbers(rng, total, n))
        return span.row_ids(rng.choice(total, min(n, total), replace=False))
