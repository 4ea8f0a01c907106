"""`Continuity`: which rows of a lane follow on one another, so that those that do not follow begin an episode.

Rollouts say the number of each row's first step in its environment's own count (`TemporalDictTensor.first_steps`). A
rollout that a memory was not given leaves a gap in these numbers. For each lane there are three int64:

    OFFSET     number of a step in its environment's count - number of the step in the lane
    SINCE      the steps of the lane from here on have this offset
    END        up to here

Rows whose numbers are not known leave them as they are, and follow whatever is before them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlstructs.checks import UNKNOWN
from rlstructs.replay.ring import Ring

OFFSET, SINCE, END = range(3)
N_NUMBERS = 3
# What follows the newest row of an empty lane.
ANY = -2


class Continuity:
    """Tells which rows follow the newest ones of their lanes.

    Args:
        numbers: int64 (3, n_lanes), zeros for lanes of which nothing is known.

    Example:
        >>> continuity, ring = Continuity(np.zeros((N_NUMBERS, 1), np.int64)), Ring(np.zeros((3, 1), int), 9)
        >>> lane, four = np.array([0]), np.array([4])
        >>> ring.publish(lane, 4)
        >>> continuity.record(lane, np.array([100]), four, ring)  # steps 100 to 103 of some environment
        >>> [continuity.find_gaps(lane, np.array([first]), four, ring).item() for first in (104, 108)]
        [False, True]
    """

    def __init__(self, numbers: np.ndarray) -> None:
        self._numbers = numbers

    def find_gaps(self, lanes: np.ndarray, first_steps: np.ndarray, lengths: np.ndarray, ring: Ring) -> np.ndarray:
        """Finds trajectories that do not follow the rows before them, bool (B,).

        Args:
            lanes, first_steps, lengths: int64 (B,), of the trajectories; those of one lane follow one another.
            ring: of the store.
        """
        (offset, _, end), at = self._numbers, _as_index(lanes)
        if isinstance(at, slice):  # as nearly always
            heads = ring.head[at]
            if (end[at] == heads).all() and (first_steps - offset[at] == heads).all():
                return np.zeros(lanes.size, bool)
        following = np.where(ring.head > ring.base, self.following(ring.head), ANY)
        before = following[lanes]
        if not isinstance(at, slice):
            for row, (lane, first, n) in enumerate(zip(lanes.tolist(), first_steps.tolist(), lengths, strict=True)):
                before[row], following[lane] = following[lane], UNKNOWN if first == UNKNOWN else first + n
        return np.asarray((first_steps != UNKNOWN) & (before != first_steps) & (before != ANY))

    def record(self, lanes: np.ndarray, first_steps: np.ndarray, lengths: np.ndarray, ring: Ring) -> None:
        """Records which steps the newest rows are; the arguments are those of `find_gaps`, after the rows are written.

        Without the numbers of a lane's last trajectory nothing is known of the lane.
        """
        at = _as_index(lanes)
        if not isinstance(at, slice):
            last = lanes.size - 1 - np.unique(lanes[::-1], return_index=True)[1]
            at, first_steps, lengths = lanes[last], first_steps[last], lengths[last]
        own, heads = self._numbers[:, at], ring.head[at]
        begins = heads - lengths
        offset = first_steps - begins
        goes_on = own[OFFSET] == offset
        if goes_on.all() and (own[END] == begins).all():  # as nearly always
            self._numbers[END, at] = heads
            return
        goes_on &= (own[SINCE] < begins) & (begins <= own[END])
        since = np.where(goes_on, own[SINCE], begins)
        self._numbers[:, at] = np.where(first_steps != UNKNOWN, [offset, since, heads], 0)

    def following(self, heads: np.ndarray) -> np.ndarray:
        """The numbers of the steps that would follow the newest rows, int64 (n_lanes,), `UNKNOWN` where none is known.

        Args:
            heads: int64 (n_lanes,), the steps up to which there are rows; some may have been taken back.
        """
        offset, since, end = self._numbers
        return np.asarray(np.where((since < heads) & (heads <= end), heads + offset, UNKNOWN))

    def restore(self, following: np.ndarray, heads: np.ndarray) -> None:
        """Sets what `following` returned for these heads."""
        self._numbers[...] = np.where(following == UNKNOWN, 0, [following - heads, heads - 1, heads])


def _as_index(lanes: np.ndarray) -> Any:
    """The lanes as a slice if they are consecutive, as nearly always; otherwise as they are."""
    is_slice = lanes.size > 0 and (lanes[1:] - lanes[:-1] == 1).all()
    return slice(int(lanes[0]), int(lanes[0]) + lanes.size) if is_slice else lanes
