"""Draws windows of rows from a store and reads them: the first rows, what episodes make of the rest, n-step returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from rlstructs.checks import check_count, check_gamma
from rlstructs.errors import SpecError, StateError
from rlstructs.replay import expand
from rlstructs.replay.drawing import Selection, Uniform, draw_fitting
from rlstructs.replay.expand import EPISODE_ENDS
from rlstructs.replay.reading import Reading
from rlstructs.replay.span import Span
from rlstructs.replay.store import Storage

# Says which rows a window may begin with, bool.
Fits = Callable[[np.ndarray], np.ndarray]
# Draws the first rows of so many windows, and returns them with more fields of the selection.
Draw = Callable[[Span, int, "Fits | None"], tuple[np.ndarray, dict[str, np.ndarray]]]

NO_NAME = ""  # no tensor has it
NO_ENDS_ERROR = "no tensor 'terminated' or 'truncated' says where episodes end"


def check_length(storage: Storage, sequence_length: Any, n_step: Any, gamma: float, episode_ends: str) -> int:
    """Checks the arguments of `RandomMemory.sample` and returns the length of windows."""
    # skrl takes 0 for 1.
    length = 1 if sequence_length in (0, 1) else check_count("sequence_length", sequence_length)
    if n_step != 1 and check_count("n_step", n_step) > 1 and length > 1:
        raise SpecError("n_step and sequence_length cannot both be above 1")
    check_gamma(gamma)
    if episode_ends not in EPISODE_ENDS:
        raise SpecError(f"episode_ends must be one of {EPISODE_ENDS}, got {episode_ends!r}")
    if (episode_ends != expand.CROSS or n_step > 1) and storage.episodes is None:
        raise StateError(NO_ENDS_ERROR)
    return length


def draw_uniformly(uniform: Uniform, rng: np.random.Generator, span: Span, n: int, fits: Fits | None) -> np.ndarray:
    """Draws the first rows of `n` windows that fit; without replacement there may be fewer."""
    if fits is None:
        return uniform.draw(span, n, rng)
    if uniform.replacement is not False:
        return draw_fitting(lambda k: uniform.draw(span, k, rng), fits, n, rng.choice, span)
    rows = span.every_row()
    rows = rows[fits(rows)]
    if not rows.size:
        raise SpecError("nothing to sample: no window of this length is stored")
    return np.asarray(rng.choice(rows, min(n, rows.size), replace=False))


def select(storage: Storage, draw: Draw, n: int, length: int, ends: str) -> Selection:
    """Draws `n` windows of `length` rows, treating the ends of episodes as `ends` says."""
    span, episodes = storage.span(length), storage.episodes
    fits = None
    if ends == expand.NEVER and episodes is not None:
        fits = partial(expand.fits, episodes, length=length)
    anchors, fields = draw(span, n, fits)
    if length == 1:
        if episodes is not None:
            fields["is_first"] = episodes.begin(anchors)
        return Selection(anchors[:, None], span, fields)
    if ends == expand.MASK and episodes is not None:
        window = expand.padded(span, episodes, anchors, length)
    else:
        window = expand.chunk(span, episodes, anchors, length)
    fields["mask"] = window.mask
    if episodes is not None:
        fields["is_first"] = window.is_first
    return Selection(window.rows, span, fields)


def read(storage: Storage, picked: Selection, names: Sequence[str], n_step: int, gamma: float) -> list[Any]:
    """Reads the drawn rows, and, with several steps, gamma to the number of them."""
    rows = picked.rows if picked.rows.shape[1] > 1 else picked.rows[:, 0]
    if n_step == 1:
        return storage.columns.gather(names, rows)
    found = Reading(n_step, gamma).read(storage, picked.span, names, rows, discount=NO_NAME)
    return [found[name] for name in (*names, NO_NAME)]
