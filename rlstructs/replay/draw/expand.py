"""Expands drawn rows to sequences: the rows of each sample, and which of them count.

Each function takes row ids (B,) that are in the span. None of them draws.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlstructs.replay.rows.episodes import Episodes
from rlstructs.replay.rows.span import Span

# How sequences treat the end of an episode: they go on behind it, mask what lies behind it, or never hold one inside.
CROSS_ENDS, MASK_ENDS, AVOID_ENDS = EPISODE_ENDS = ("cross", "mask", "never")


@dataclass(frozen=True)
class Window:
    """L consecutive rows for each anchor.

    Attributes:
        rows: int64 (B, L), row ids.
        mask: bool (B, L), which rows count.
        is_first: bool (B, L), which rows count and begin an episode.
    """

    rows: np.ndarray
    mask: np.ndarray
    is_first: np.ndarray


def chunk(span: Span, episodes: Episodes | None, anchors: np.ndarray, length: int, first: int = 0) -> Window:
    """The `length` rows from `first` steps after each anchor on, across the ends of episodes."""
    rows = span.columns.shifted(anchors[:, None], np.arange(first, first + length))
    is_first = np.zeros(rows.shape, bool) if episodes is None else episodes.begin(rows)
    return Window(rows, np.ones(rows.shape, bool), is_first)


def padded(span: Span, episodes: Episodes, anchors: np.ndarray, length: int) -> Window:
    """Each anchor and the `length - 1` rows after it; a mask excludes those after the end of the anchor's episode."""
    window = chunk(span, episodes, anchors, length)
    mask = np.arange(length) < episodes.remaining(anchors)[:, None]
    return Window(window.rows, mask, window.is_first & mask)


def fits(episodes: Episodes, anchors: np.ndarray, length: int) -> np.ndarray:
    """Which anchors have `length - 1` rows of the same episode after them, bool (B,)."""
    return np.asarray(episodes.remaining(anchors) >= length)


def chunk_to(span: Span, episodes: Episodes | None, anchors: np.ndarray, length: int) -> Window:
    """The `length - 1` rows before each anchor, and the anchor, across the ends of episodes."""
    return chunk(span, episodes, anchors, length, 1 - length)


def padded_to(span: Span, episodes: Episodes, anchors: np.ndarray, length: int) -> Window:
    """Expands anchors, with a mask that excludes the rows before the anchor's episode."""
    window = chunk_to(span, episodes, anchors, length)
    mask = np.arange(length - 1, -1, -1) <= episodes.times(anchors)[:, None]
    return Window(window.rows, mask, window.is_first & mask)


def fits_to(span: Span, episodes: Episodes | None, anchors: np.ndarray, length: int) -> np.ndarray:
    """Which anchors have `length - 1` rows before them, of the same episode if episodes are given, bool (B,)."""
    fit = span.ages(anchors) >= length - 1
    return np.asarray(fit if episodes is None else fit & (episodes.times(anchors) >= length - 1))
