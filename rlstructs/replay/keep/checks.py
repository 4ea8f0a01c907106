"""Checks the numbers in files before a store is changed.

These are counters, episodes and random streams. A number may have the right type and still make no sense: counters so
large that the next row overflows them, episodes that do not continue from row to row, a random generator that only
returns 0. Later calls would fail or never end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlstructs.checks import DTYPES, MOST_AXES, UNKNOWN, clean_text
from rlstructs.replay.rows.episodes import LENGTH, TIME
from rlstructs.replay.rows.lanes import FLOOR, N_COUNTERS, Ring, RowIds
from rlstructs.replay.rows.objects import OBJECT
from rlstructs.replay.rows.spec import Spec

# The largest count: half of what int64 holds, as counts go on.
MOST = 1 << 62
# So many rows are checked at a time that they stay in a core's cache.
ROWS_AT_ONCE = 1 << 15
# numpy's bit generators -> the entries of their states beside "bit_generator": how many numbers (None for a plain one),
# and the exclusive upper limit of each.
WORD, LONG, WIDE = 1 << 32, 1 << 64, 1 << 128
_PCG = {"state": {"state": (None, WIDE), "inc": (None, WIDE)}, "has_uint32": (None, 2), "uinteger": (None, WORD)}
_BIT_GENERATORS: dict[str, dict[str, Any]] = {
    "PCG64": _PCG,
    "PCG64DXSM": _PCG,
    "MT19937": {"state": {"key": (624, WORD), "pos": (None, 625)}},
    "Philox": {
        "state": {"counter": (4, LONG), "key": (2, LONG)},
        "buffer": (4, LONG),
        "buffer_pos": (None, 5),
        "has_uint32": (None, 2),
        "uinteger": (None, WORD),
    },
    "SFC64": {"state": {"state": (4, LONG)}, "has_uint32": (None, 2), "uinteger": (None, WORD)},
}
BIT_GENERATORS = tuple(_BIT_GENERATORS)


class Claims(RowIds):
    """The rows that a file says it holds.

    The other parts of the file are checked against them.

    Args:
        ring: its counters, which make sense.
        order: of row ids; see `Columns`.
        specs: of the columns in the file.
    """

    def __init__(self, ring: Ring, order: str, specs: Mapping[str, Spec]) -> None:
        super().__init__(ring.n_lanes, ring.capacity, order)
        self.ring, self.specs = ring, specs

    def empty(self) -> np.ndarray:
        """Marks rows that are empty, bool (n_rows,).

        They were empty when the counters had these values, too.
        """
        rows = np.arange(self.n_rows)
        return np.asarray(self.steps(rows, self.ring.head - 1) < self.ring.base[self.lanes(rows)])


def whole(name: str, value: Any, least: int = 0, most: int = MOST) -> int:
    """Returns `value`, an int from `least` to `most`.

    Raises:
        ValueError: it is something else.
    """
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is {clean_text(repr(value))}, expected a whole number from {least} to {most}")
    return value


def following_in(state: Mapping[str, Any], n_lanes: int) -> np.ndarray:
    """Reads `Continuity.following` from a file, int64 (n_lanes,); `UNKNOWN` for files of earlier versions.

    Raises:
        ValueError: it is something else.
    """
    found = state.get("following", [UNKNOWN] * n_lanes)
    if not isinstance(found, list) or len(found) != n_lanes:
        raise ValueError(f"the following steps are {clean_text(repr(found))}, expected a list of {n_lanes} numbers")
    return np.array([whole("a following step", number, UNKNOWN) for number in found], np.int64)


def flag(name: str, value: Any) -> bool:
    """Returns `value` if it is a bool; raises ValueError otherwise."""
    if type(value) is not bool:
        raise ValueError(f"{name} is {clean_text(repr(value))}, expected true or false")
    return value


def spec_in(name: str, dtype: Any, shape: Any, is_bfloat16: Any) -> Spec:
    """Returns the spec of a column, from its entries in a file.

    Raises:
        ValueError: an entry is invalid.
    """
    if dtype == OBJECT.name and shape == [] and is_bfloat16 is False:
        return Spec(OBJECT)
    spec = Spec(dtype_called(name, dtype), row_shape(name, shape), 0, flag("whether it is bfloat16", is_bfloat16))
    if spec.is_bfloat16 and spec.dtype != np.int16:
        raise ValueError(f"column {name!r} is bfloat16, which {spec.dtype} does not hold")
    return spec


def row_shape(name: str, value: Any) -> tuple[int, ...]:
    """Returns the shape of a column's rows.

    Raises:
        ValueError: it is invalid.
    """
    if not isinstance(value, (list, tuple)) or len(value) > MOST_AXES - 2:
        raise ValueError(f"{name!r}: expected a shape, got {clean_text(repr(value))}")
    shape = tuple(whole(f"an axis of {name!r}", n) for n in value)
    if math.prod(n for n in shape if n) > MOST:
        raise ValueError(f"{name!r} has the shape {shape}, which no array has")
    return shape


def dtype_called(name: str, value: Any) -> np.dtype:
    """Returns the dtype of this name.

    Raises ValueError if columns have no such dtype.
    """
    if type(value) is not str or value not in DTYPES:
        raise ValueError(f"{name!r} has the dtype {clean_text(repr(value))}, expected one of {', '.join(DTYPES)}")
    return DTYPES[value]


def check_counters(counters: np.ndarray, n_lanes: int, capacity: int) -> Ring:
    """Returns a ring with these counters.

    Raises:
        ValueError: they are impossible.
    """
    check_counter_spec((counters.dtype, counters.shape), n_lanes)
    ring = Ring(np.concatenate([counters, np.zeros((N_COUNTERS - len(counters), n_lanes), np.int64)]), capacity)
    base, reserved, head, floor = ring.counters
    if not ((base >= 0) & (base <= head) & (head <= reserved) & (reserved <= MOST // n_lanes)).all():
        raise ValueError("expected counters with 0 <= base <= head <= reserved")
    if not ((floor >= 0) & (floor <= head)).all():
        raise ValueError("expected counters with 0 <= floor <= head")
    if (reserved - head > capacity).any():
        raise ValueError(f"expected at most {capacity} rows that are being written, got {(reserved - head).max()}")
    return ring


def check_counter_spec(spec: tuple[Any, tuple[int, ...]], n_lanes: int) -> None:
    """Raises ValueError unless counters have this dtype and shape."""
    if spec not in [(np.int64, (n, n_lanes)) for n in (FLOOR, N_COUNTERS)]:
        raise ValueError(f"its counters are {spec[0]} {spec[1]}, expected int64 {(N_COUNTERS, n_lanes)}")


def to_save(ring: Ring) -> np.ndarray:
    """Returns the counters for a file.

    They are without floors if there are none, as in files of earlier versions.
    """
    return ring.counters[: N_COUNTERS if ring.floor.any() else FLOOR].copy()


def check_episodes(pairs: np.ndarray, ring: Ring) -> None:
    """Raises ValueError unless episodes continue from row to row.

    Args:
        pairs: int32 (n_lanes, n_slots, 2), all slots that hold rows.
        ring: the counters.
    """
    n_slots = pairs.shape[1]
    if not n_slots or not len(ring):
        return
    # Nearly all rows are right whatever the counters are; the others are compared with the counters.
    is_plain = _is_plain(pairs[..., TIME], pairs[..., LENGTH])
    newest = (ring.head - 1) % ring.capacity
    is_plain[np.flatnonzero(newest < n_slots), newest[newest < n_slots]] = False
    lanes, slots = np.nonzero(~is_plain)
    ids = RowIds(ring.n_lanes, ring.capacity)
    steps, head = ids.steps(ids.rows(lanes, slots), ring.head - 1), ring.head[lanes]
    there = steps >= ring.oldest()[lanes]
    lanes, slots, steps, head = lanes[there], slots[there], steps[there], head[there]
    time, length = pairs[lanes, slots].astype(np.int64).T
    next_time, next_length = pairs[lanes, (slots + 1) % n_slots].astype(np.int64).T
    has_next, ends = steps + 1 < head, length == time + 1
    goes_on = ~ends & (next_time == time + 1) & (next_length == length)
    fits = (time >= 0) & (time <= steps) & ((length == 0) | (length > time))
    fits &= np.where(has_next, goes_on | (ends & (next_time == 0)), True)
    # A killed writer may have recorded that an episode ends in rows that it did not write.
    was_killed = ring.reserved[lanes] > head
    fits &= has_next | ends | (length == 0) | was_killed
    if not fits.all():
        raise ValueError("the steps and lengths of its episodes contradict each other")


def _is_plain(time: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Marks rows that are right whatever the counters, bool (n_lanes, n_slots).

    This does not hold for the newest rows of their lanes.
    """
    n_lanes, n_slots = time.shape
    is_plain, at_once = np.zeros(time.shape, bool), -(-ROWS_AT_ONCE // n_lanes)
    for first in range(0, n_slots - 1, at_once):
        stop = min(first + at_once, n_slots - 1)
        times, lengths = (each[:, first : stop + 1].copy(order="K") for each in (time, length))
        next_times, next_lengths = times[:, 1:], lengths[:, 1:]
        times, lengths = times[:, :-1], lengths[:, :-1]
        after = times + 1
        ends = lengths == after
        fits = (times >= 0) & (times <= np.arange(first, stop, dtype=times.dtype))
        fits &= (lengths == 0) | (lengths >= after)
        goes_on = (next_times == after) & (next_lengths == lengths) & ~ends
        is_plain[:, first:stop] = fits & (goes_on | (ends & (next_times == 0)))
    return is_plain


def check_slots(n_slots: int, ring: Ring) -> None:
    """Raises ValueError unless all rows are in the first `n_slots` slots of their lanes."""
    used = ring.head > ring.oldest()
    first, stop = ring.oldest() % ring.capacity, ring.reserved - ring.base
    in_front = (ring.base % ring.capacity == 0) & (stop <= n_slots) & (first < ring.capacity)
    if n_slots < ring.capacity and not (in_front | ~used).all():
        raise ValueError(f"it holds {n_slots} rows of each lane, fewer than its counters claim")


def check_aligned(ring: Ring) -> None:
    """Raises ValueError unless the rows of each lane began in its first slot."""
    if (ring.base % ring.capacity).any():
        raise ValueError("expected rows that begin in the first slot of their lane")


def generator_in(state: Any) -> np.random.Generator:
    """Returns a generator in this state.

    Raises:
        ValueError: the state is invalid.
    """
    name = state["bit_generator"] if isinstance(state, Mapping) and "bit_generator" in state else None
    if type(name) is not str or name not in _BIT_GENERATORS:
        raise ValueError(f"no bit generator {clean_text(repr(name))}, there are {BIT_GENERATORS}")
    _check_state(name, {key: value for key, value in state.items() if key != "bit_generator"}, _BIT_GENERATORS[name])
    if name.startswith("PCG64") and not state["state"]["inc"] % 2:
        raise ValueError(f"a {name} in this state repeats itself")
    if name == "MT19937" and not (state["state"]["key"][0] >> 31 or any(state["state"]["key"][1:])):
        raise ValueError(f"a {name} in this state gives nothing but zeros")
    generator = np.random.Generator(getattr(np.random, name)())
    generator.bit_generator.state = state
    return generator


def _check_state(name: str, found: Any, needed: dict[str, Any]) -> None:
    if not isinstance(found, Mapping) or found.keys() != needed.keys():
        raise ValueError(f"the state of a {name} has other entries")
    for key, each in needed.items():
        if isinstance(each, dict):
            _check_state(name, found[key], each)
            continue
        n, end = each
        values = [found[key]] if n is None else found[key]
        if not isinstance(values, (list, tuple)) or len(values) != (n or 1):
            raise ValueError(f"the state of a {name} has another number of {key}")
        for value in values:
            whole(f"{key} of a {name}", value, 0, end - 1)
