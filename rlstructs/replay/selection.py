"""What a sampler has drawn, and how much it may be asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

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
