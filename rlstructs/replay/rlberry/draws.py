"""Draws chunks: T consecutive rows each, uniformly or in proportion to priorities."""

from __future__ import annotations

from functools import partial

import numpy as np

from rlstructs.replay import expand
from rlstructs.replay.drawing import Selection, Uniform, draw_fitting
from rlstructs.replay.expand import MASK, NEVER, Window
from rlstructs.replay.priorities import Priorities, importance_weights
from rlstructs.replay.span import Span
from rlstructs.replay.store import Storage

EVENLY = Uniform()


def draw_uniform(storage: Storage, n: int, length: int, ends: str, rng: np.random.Generator) -> Selection:
    """`n` chunks, each as likely as any other; see `draw_by_priority` for the arguments."""
    span, episodes = storage.span(length), storage.track_episodes()
    if ends == NEVER:
        fits = partial(expand.fits, episodes, length=length)
        anchors = draw_fitting(lambda k: EVENLY.draw(span, k, rng), fits, n, rng.choice, span, _wanted(ends, length))
    else:
        anchors = EVENLY.draw(span, n, rng)
    window = (expand.padded if ends == MASK else expand.chunk)(span, episodes, anchors, length)
    return _selection(window, span, np.ones(n, np.float32))


def draw_by_priority(
    storage: Storage, priorities: Priorities, n: int, length: int, ends: str, beta: float, rng: np.random.Generator
) -> Selection:
    """`n` chunks that end with rows drawn in proportion to their priorities.

    Args:
        storage: which tracks episodes.
        priorities: of its rows.
        n: how many chunks.
        length: rows of each.
        ends: whether chunks "cross" the ends of episodes, have what is of another episode masked ("mask"),
            or "never" hold one inside.
        beta: exponent of the weights.
        rng: what draws.

    Raises:
        SpecError: there is none to draw.
    """
    span, episodes = storage.span(), storage.track_episodes()
    fits = partial(expand.fits_to, span, episodes if ends == NEVER else None, length=length)
    anchors = priorities.draw_rows(span, n, rng, fits if length > 1 else None, _wanted(ends, length))
    tree = priorities.tree
    weights = importance_weights(tree.values.take(anchors), tree.minimum, beta)
    window = (expand.padded_to if ends == MASK else expand.chunk_to)(span, episodes, anchors, length)
    return _selection(window, span, weights)


def _selection(window: Window, span: Span, weights: np.ndarray) -> Selection:
    return Selection(window.rows, span, {"weights": weights, "mask": window.mask, "is_first": window.is_first})


def _wanted(ends: str, length: int) -> str:
    return f"window of {length} rows" + (" within one episode" if ends == NEVER else "")
