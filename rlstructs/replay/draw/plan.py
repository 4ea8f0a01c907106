"""How every surface draws: a picker draws anchors, and windows make samples of them.

    view of the store -> picker: anchors (n,), their fields -> windows: rows (n, length), mask, is_first -> Selection

Pickers have one protocol: `Uniform` and `Priorities`. Windows say which rows may be anchors, and which rows around an
anchor are its sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from rlstructs.errors import SpecError
from rlstructs.replay.draw.view import AnyView, View

# How sequences treat the end of an episode: they cross it, mask the rows after it, or never have one inside.
CROSS_ENDS, MASK_ENDS, AVOID_ENDS = EPISODE_ENDS = ("cross", "mask", "never")
# The words for a row that may be drawn, in messages.
WINDOW = "window of this length"
# Number of draws before all rows that fit are listed instead.
TRIES = 8
# Returns which of some row ids may be drawn, bool.
Fits = Callable[[np.ndarray], np.ndarray]
# More values of each drawn row, by name.
Fields = dict[str, np.ndarray]


@dataclass(slots=True)
class Selection:
    """The drawn samples.

    Attributes:
        rows: int64 (B, L) row ids, the earliest of each sample in column 0.
        view: the rows at the time of the draw.
        fields: more values of each sample (mask, weights, ...), first axis B.
        earliest: int64 (B,), the first row that is read for each; None for column 0.
    """

    rows: np.ndarray
    view: View
    fields: Fields = field(default_factory=dict)
    earliest: np.ndarray | None = None

    def put(self, at: np.ndarray, other: Selection) -> None:
        """Replaces some samples, in place."""
        self.rows[at] = other.rows
        for name, values in self.fields.items():
            values[at] = other.fields[name]


def check_not_packed(context: int, max_steps: int | None, states: Mapping[str, str] | None) -> None:
    """Raises SpecError if a draw without packs is given settings of packs."""
    if context or max_steps is not None or states:
        raise SpecError("max_steps, context and states are for packs: set packed=True")


class Picker(Protocol):
    """Draws rows of a view."""

    def pick(
        self, view: Any, n: int, rng: np.random.Generator, fits: Fits | None = None, wanted: str = WINDOW
    ) -> tuple[np.ndarray, Fields]:
        """Draws `n` rows that fit.

        Args:
            view: the rows.
            n: how many.
            rng: the generator.
            fits: returns which rows may be drawn, bool; None for all.
            wanted: describes a row that fits, for the message.

        Returns:
            The rows, int64 (n,), and more values of each.

        Raises:
            SpecError: no row fits.
        """


class Viewed(Protocol):
    """A store, which has views of its rows."""

    def view(self, length: int = 1) -> View:
        """The rows that have `length - 1` others after them."""


class Windows(NamedTuple):
    """Samples of consecutive rows of a lane.

    Attributes:
        length: number of rows of each.
        ends: how they treat the ends of episodes, one of `EPISODE_ENDS`.
        is_last: whether the drawn row is the last of them, and not the first.
    """

    length: int = 1
    ends: str = CROSS_ENDS
    is_last: bool = False

    def select(
        self, storage: Viewed, picker: Picker, n: int, rng: np.random.Generator, wanted: str = WINDOW
    ) -> Selection:
        """Draws `n` samples.

        Returns:
            Rows (n, length). Its fields are those of the picker; `mask`, which rows count, and, if the store tracks
            episodes, `is_first`, which of them begin one, bool (n, length) each.

        Raises:
            SpecError: there is none.
        """
        view = storage.view(1 if self.is_last else self.length)
        rows, fields = picker.pick(view, n, rng, self.fits(view), wanted)
        return self.expand(view, rows, fields)

    def fits(self, view: View) -> Fits | None:
        """Returns a function that says which rows of the view may be drawn.

        None if all of them may.
        """
        avoids, length = self.ends == AVOID_ENDS and view.episodes is not None, self.length
        if length == 1 or not (avoids or self.is_last):
            return None
        if self.is_last:
            count_before = view.depths if avoids else view.ages
            return lambda rows: count_before(rows) >= length - 1
        return lambda rows: view.remaining(rows) >= length

    def expand(self, view: View, anchors: np.ndarray, fields: Fields) -> Selection:
        """The samples of drawn rows (n,), with more values of each: see `select`."""
        length, episodes, rows = self.length, view.episodes, anchors[:, None]
        if length > 1:
            rows = view.columns.shifted(rows, np.arange(length) - (length - 1) * self.is_last)
        mask = np.ones(rows.shape, bool)
        if self.ends == MASK_ENDS and episodes is not None:
            index = np.arange(length)
            if self.is_last:
                mask = index[::-1] <= view.depths(anchors)[:, None]
            else:
                mask = index < view.remaining(anchors)[:, None]
        fields["mask"] = mask
        if episodes is not None:
            fields["is_first"] = episodes.begin(rows) & mask
        return Selection(rows, view, fields)


class Uniform:
    """Draws every row with equal probability.

    Args:
        replacement: whether a draw may hold a row twice; None for yes, except in a draw as large as the store.
    """

    def __init__(self, replacement: bool | None = True) -> None:
        self.replacement = None if replacement is None else bool(replacement)

    def pick(
        self, view: AnyView, n: int, rng: np.random.Generator, fits: Fits | None = None, wanted: str = WINDOW
    ) -> tuple[np.ndarray, Fields]:
        """Draws rows, which have no fields; without replacement, perhaps fewer than `n`."""
        if fits is None:
            return self.draw(view, n, rng), {}
        if self.replacement is not False:
            return draw_fitting(lambda k: self.draw(view, k, rng), fits, n, rng.choice, view, wanted), {}
        rows = list_fitting(view, fits, wanted)
        return rng.choice(rows, min(n, rows.size), replace=False), {}

    def draw(self, view: AnyView, n: int, rng: np.random.Generator) -> np.ndarray:
        """Draws `n` row ids; without replacement there may be fewer.

        Raises:
            SpecError: there are no rows.
        """
        total = view.total
        if total == 0:
            raise SpecError("nothing to sample: no row, or no window of this length, is stored")
        if self.replacement or (self.replacement is None and n != total):
            return view.draw(n, rng)
        return view.row_ids(rng.choice(total, min(n, total), replace=False))


def draw_fitting(
    draw: Callable[[int], np.ndarray],
    fits: Fits,
    n: int,
    choose: Callable[[np.ndarray, int], np.ndarray],
    view: AnyView,
    wanted: str = WINDOW,
) -> np.ndarray:
    """Draws `n` row ids that fit.

    Args:
        draw: draws a given number of row ids.
        fits: returns which row ids fit, bool.
        n: how many.
        choose: draws a given number from an array of row ids, with the distribution of `draw`.
        view: lists all rows.
        wanted: describes a row that fits, for the message.

    Raises:
        SpecError: no row fits.
    """
    found = np.zeros(0, np.int64)
    for _ in range(TRIES + 1):
        # Only as many as are missing: a draw may be sorted by row, so dropping its end would favour low rows.
        rows = draw(n - found.size)
        found = np.concatenate([found, rows[fits(rows)]])
        if found.size == n:
            return found
    return np.concatenate([found, choose(list_fitting(view, fits, wanted), n - found.size)])


def list_fitting(view: AnyView, fits: Fits, wanted: str) -> np.ndarray:
    """All rows of a view that fit.

    Raises:
        SpecError: there is none.
    """
    rows = view.every_row()
    rows = rows[fits(rows)]
    if not rows.size:
        raise SpecError(f"nothing to sample: no {wanted} is stored")
    return rows
