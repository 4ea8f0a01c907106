"""What a sampler has drawn, and how much it may be asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlstructs.errors import SpecError
from rlstructs.replay.samplers import Span


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


def check_size(name: str, value: Any) -> int:
    """`value` as an int.

    Raises:
        TypeError, SpecError: it is no int, or below 1.
    """
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < 1:
        raise SpecError(f"{name} must be at least 1, got {value}")
    return int(value)
