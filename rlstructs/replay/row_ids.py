"""Row ids, int64: `lane * lane_stride + slot * slot_stride`.

The order of a store sets the strides: "lane" (capacity and 1) keeps the rows of a lane together, "slot" (1 and n_lanes)
the rows of one time. Only `RowIds` calculates with row ids.
"""

from __future__ import annotations

from typing import Any

import numpy as np

LANE, SLOT = "lane", "slot"


class RowIds:
    """The row ids of a store.

    Args:
        n_lanes: number of rings.
        capacity: rows per lane.
        order: "lane" or "slot".
    """

    def __init__(self, n_lanes: int, capacity: int, order: str = LANE) -> None:
        self.n_lanes, self.capacity, self.order = n_lanes, capacity, order
        self.lane_stride, self.slot_stride = (capacity, 1) if order == LANE else (1, n_lanes)
        # Of arrays of slots of every lane in the order of the store.
        self.slot_axis = 1 if order == LANE else 0
        self._first_rows = np.arange(n_lanes) * self.lane_stride
        self._in_numpy = np.array(capacity), np.array(self.slot_stride)  # with plain numbers it takes twice as long

    @property
    def n_rows(self) -> int:
        """Number of row ids."""
        return self.n_lanes * self.capacity

    def lead(self, n_slots: int) -> tuple[int, int]:
        """The first two axes of an array of the first `n_slots` slots of every lane, in the order of the store."""
        return (self.n_lanes, n_slots) if self.order == LANE else (n_slots, self.n_lanes)

    def by_lane(self, array: Any) -> Any:
        """A view of such an array, or of one of this order, by lane and slot; the inverse of itself."""
        return array if self.order == LANE else array.swapaxes(0, 1)

    def rows(self, lanes: Any, slots: Any) -> np.ndarray:
        """Row ids of slots in [0, capacity)."""
        return np.asarray(lanes * self.lane_stride + slots * self.slot_stride)

    def at_steps(self, lanes: Any, steps: Any) -> np.ndarray:
        """Row ids of the rows for these steps; `lanes` is an index, or an array of the shape of the steps."""
        capacity, slot_stride = self._in_numpy
        slots = steps % capacity
        if self.n_lanes == 1:
            return np.asarray(slots)
        return np.asarray(self._first_rows[lanes] + (slots if self.order == LANE else slots * slot_stride))

    def between(self, low: int, high: int) -> np.ndarray:
        """Row ids of the rows of each lane from the step `low` to before `high`, lane by lane."""
        slots = np.arange(low % self.capacity, low % self.capacity + high - low)
        slots[self.capacity - low % self.capacity :] -= self.capacity
        return slots if self.n_lanes == 1 else (self._first_rows[:, None] + slots * self.slot_stride).reshape(-1)

    def places(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The lanes and slots of row ids."""
        major, minor = np.divmod(rows, self.capacity if self.order == LANE else self.n_lanes)
        return (major, minor) if self.order == LANE else (minor, major)

    def lanes(self, rows: np.ndarray) -> np.ndarray:
        """The lanes of row ids."""
        return np.asarray(rows // self.capacity if self.order == LANE else rows % self.n_lanes)

    def numbered(self, index: np.ndarray, low: int, n: int) -> np.ndarray:
        """Row ids by number if each lane has `n` rows from the step `low` on; they are in the order of the store."""
        if self.order == LANE:
            lanes, ages = np.divmod(index, n) if self.n_lanes > 1 else (0, index)
            return self.at_steps(lanes, low + ages)
        return np.asarray((index + low * self.n_lanes) % self.n_rows)

    def steps(self, rows: np.ndarray, last: Any) -> np.ndarray:
        """The newest steps that rows can hold, up to `last`: one step for all lanes, or int64 (n_lanes,)."""
        slots = rows  # modulo the capacity, in order "lane"
        if self.order != LANE or isinstance(last, np.ndarray):
            lanes, slots = self.places(rows)
            last = last[lanes] if isinstance(last, np.ndarray) else last
        return np.asarray(last - (last - slots) % self.capacity)

    def shifted(self, rows: np.ndarray, by: Any) -> np.ndarray:
        """Row ids of the rows so many steps after these in their lanes; `by` (L,) for rows (B, 1) must be ascending."""
        lanes, slots = (0, rows) if self.n_lanes == 1 else self.places(rows)
        if self.order == LANE and rows.size and rows.ndim == 2 and np.ndim(by) == 1:
            low, high = slots.min() + by[0], slots.max() + by[-1]
            if low >= 0 and high < self.capacity:  # nearly always: none crosses the end of its ring
                return np.asarray(rows + by)
        return self.at_steps(lanes, slots + by)
