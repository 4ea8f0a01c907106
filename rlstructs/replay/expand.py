"""From anchors to the rows of a sample, and which of them count. Never draws.

Each takes row ids (B,) that lie in `span`, and gives row ids (B, L).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlstructs.replay.episodes import Episodes
from rlstructs.replay.span import Span

# What sequences do at the ends of episodes: go across, have what lies beyond masked, or never hold one inside.
CROSS, MASK, NEVER = EPISODE_ENDS = ("cross", "mask", "never")


@dataclass(frozen=True)
class Window:
    """L rows around or after each anchor.

    Attributes:
        rows: int64 (B, L).
        mask: bool (B, L), which count.
        is_first: bool (B, L), where an episode begins.
    """

    rows: np.ndarray
    mask: np.ndarray
    is_first: np.ndarray


def after(span: Span, anchors: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """The rows `offsets` (B, L), or (L,) that rise, steps after each anchor, of the same lane, as row ids (B, L)."""
    return span.columns.shifted(anchors[:, None], offsets)


def chunk(span: Span, episodes: Episodes | None, anchors: np.ndarray, length: int) -> Window:
    """Each anchor and the `length - 1` rows after it, across the ends of episodes."""
    return _across(episodes, after(span, anchors, np.arange(length)))


def padded(span: Span, episodes: Episodes, anchors: np.ndarray, length: int) -> Window:
    """As `chunk`; what comes after the end of the anchor's episode does not count."""
    window = chunk(span, episodes, anchors, length)
    mask = np.arange(length) < episodes.remaining(anchors)[:, None]
    return Window(window.rows, mask, window.is_first & mask)


def fits(episodes: Episodes, anchors: np.ndarray, length: int) -> np.ndarray:
    """Which anchors have `length - 1` rows of the same episode after them, bool (B,)."""
    return np.asarray(episodes.remaining(anchors) >= length)


def chunk_to(span: Span, episodes: Episodes | None, anchors: np.ndarray, length: int) -> Window:
    """Each anchor after the `length - 1` rows before it, across the ends of episodes."""
    return _across(episodes, after(span, anchors, np.arange(1 - length, 1)))


def padded_to(span: Span, episodes: Episodes, anchors: np.ndarray, length: int) -> Window:
    """As `chunk_to`; what comes before the anchor's episode does not count."""
    window = chunk_to(span, episodes, anchors, length)
    mask = np.arange(length - 1, -1, -1) <= episodes.times(anchors)[:, None]
    return Window(window.rows, mask, window.is_first & mask)


def fits_to(span: Span, episodes: Episodes | None, anchors: np.ndarray, length: int) -> np.ndarray:
    """Which anchors have `length - 1` rows before them, of the same episode if there are any, bool (B,)."""
    fit = span.ages(anchors) >= length - 1
    return np.asarray(fit if episodes is None else fit & (episodes.times(anchors) >= length - 1))


def _across(episodes: Episodes | None, rows: np.ndarray) -> Window:
    is_first = np.zeros(rows.shape, bool) if episodes is None else episodes.begin(rows)
    return Window(rows, np.ones(rows.shape, bool), is_first)
