"""What a sampler has drawn, and how much it may be asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from rlstructs.errors import SpecError
from rlstructs.replay.span import Span


@dataclass
class Selection:
    """What was drawn.

    Attributes:
        rows: int64 (B, L) row ids, the earliest of each sample in column 0.
        span: the counters as they were.
        fields: what else belongs to each sample (mask, weights, ...), first axis B.
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
    """Rows that can all be named."""

    def every_row(self) -> np.ndarray:
        """Every row, int64 (n,)."""


# Draws that may have to be thrown away before all rows that fit are listed.
TRIES = 8


def draw_fitting(
    draw: Callable[[int], np.ndarray],
    fits: Callable[[np.ndarray], np.ndarray],
    n: int,
    choose: Callable[[np.ndarray, int], np.ndarray],
    span: Listed,
    wanted: str = "window of this length",
) -> np.ndarray:
    """`n` row ids as `draw` gives them, of those that fit only.

    Args:
        draw: so many row ids.
        fits: which of some row ids do, bool.
        choose: so many of some row ids, as `draw` would if there were only those.
        span: where they lie.
        wanted: what those that fit are, for the message.

    Raises:
        SpecError: none fits.
    """
    rows = draw(n)
    found: np.ndarray = rows[fits(rows)]
    for _ in range(TRIES):
        if found.size == n:
            return found
        # As many as are missing, no more: a draw may come in the order of rows, and its end must not be cut off.
        rows = draw(n - found.size)
        found = np.concatenate([found, rows[fits(rows)]])
    if found.size == n:
        return found
    every: np.ndarray = span.every_row()
    every = every[fits(every)]
    if not every.size:
        raise SpecError(f"nothing to sample: no {wanted} is stored")
    return np.concatenate([found, choose(every, n - found.size)])


class Uniform:
    """Every row as likely as any other.

    Args:
        replacement: whether one draw may hold a row twice; None for yes, but where as many are drawn as there are.
    """

    def __init__(self, replacement: bool | None = True) -> None:
        self.replacement = None if replacement is None else bool(replacement)

    def draw(self, span: Span, n: int, rng: np.random.Generator) -> np.ndarray:
        """`n` row ids, without replacement at most as many as there are.

        Raises:
            SpecError: there are none.
        """
        total = span.total
        if total == 0:
            raise SpecError("nothing to sample: no row, or no window of this length, is stored")
        if self.replacement or (self.replacement is None and n != total):
            return span.row_ids(rng.integers(total, size=n))
        return span.row_ids(rng.choice(total, min(n, total), replace=False))
