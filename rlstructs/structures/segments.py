"""Segments of rows: where they begin, and how they fill packs.

Packs have a fixed size; their steps are gathered.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from rlstructs.checks import UNKNOWN
from rlstructs.errors import MissingKeyError, SpecError
from rlstructs.frameworks.torch import CARRIERS, dtype_name
from rlstructs.structures.arrays import as_array, raw_of, tensor_of
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.temporal_dict_tensor import TemporalDictTensor
from rlstructs.structures.tree import show

BEGINS, DONE, FLAGS = "observation/initial_state", "_observation/done", ("terminated", "truncated")
ROW, EPISODE = BY = ("row", "episode")
# The place of a step that only fills a pack up.
FILLER = -1
STATE = "agent_state/"


class Piece(NamedTuple):
    """A part of a segment in a pack.

    Attributes:
        segment: the number of the segment.
        start: the first of its steps that count.
        stop: the step behind the last of these.
        context: how many steps before `start` are repeated in front.
    """

    segment: int
    start: int
    stop: int
    context: int = 0

    @property
    def size(self) -> int:
        """The number of steps, repeated ones included."""
        return self.stop - self.start + self.context


def find_begins(steps: TemporalDictTensor) -> np.ndarray:
    """Marks the steps that begin an episode, bool (B, T).

    At t = 0 only a key can tell.

    Raises:
        MissingKeyError: no key says where episodes begin or end.
        SpecError: a key that says so is not (B, T).
    """
    shape = len(steps), steps.n_timesteps()
    begins, is_known = np.zeros(shape, bool), False
    for key in (BEGINS, *end_keys(steps)):
        if key not in steps:
            continue
        flags = as_array(steps[key])
        if flags.shape != shape:
            raise SpecError(f"packed: {key!r} is {show(steps[key])}, expected {shape} to tell where episodes are")
        if key == BEGINS:
            begins |= flags != 0
        else:
            begins[:, 1:] |= flags[:, :-1] != 0
        is_known = True
    if not is_known:
        raise MissingKeyError(
            f"packed: no key says where episodes are, expected {BEGINS!r}, {DONE!r} or '_observation/terminated', "
            f"there are {sorted(steps)}; by='row' needs none"
        )
    return begins


def begins_at(steps: Mapping[str, torch.Tensor], numbers: torch.Tensor) -> torch.Tensor:
    """Which of these steps of a pack begin an episode, bool (K,).

    As far as its keys tell; the first step of a segment is not among them.

    Args:
        steps: (N, ...) each.
        numbers: int64 (K,).
    """
    begins = torch.zeros_like(numbers, dtype=torch.bool)
    for key in (BEGINS, *end_keys(steps)):
        if key in steps and steps[key].ndim == 1:
            begins |= steps[key][numbers if key == BEGINS else (numbers - 1).clamp(min=0)] != 0
    return begins


def end_keys(steps: Container[str]) -> list[str]:
    """The keys that say where episodes end.

    `done`, or the two flags that it is made of.
    """
    return [DONE] if DONE in steps else [key for flag in FLAGS if (key := f"_observation/{flag}") in steps]


def take_steps(tensor: torch.Tensor, index: torch.Tensor, places: np.ndarray) -> torch.Tensor:
    """Copies steps of a tensor (M, ...), with gradients.

    Args:
        tensor: where they are.
        index: int64 (N,), which ones, on the device of the tensor.
        places: the same on the CPU.
    """
    if tensor.requires_grad or tensor.device.type != "cpu" or tensor.dtype in CARRIERS or not tensor.shape[0]:
        carrier = CARRIERS.get(tensor.dtype)
        if carrier is None:
            return tensor.index_select(0, index)
        return tensor.view(carrier).index_select(0, index).view(tensor.dtype)
    # numpy takes rows in half the time of torch; "clip" because it is checked that all indexes are in range.
    return tensor_of(raw_of(tensor).take(places, axis=0, mode="clip"), tensor.dtype)


def lay_out(lengths: Sequence[int], max_steps: int) -> list[list[Piece]]:
    """Puts whole segments into few packs.

    The rule is "largest first, where it fits best".

    Raises:
        SpecError: a segment is longer than a pack.
    """
    if lengths and max(lengths) > max_steps:
        longest = int(np.argmax(lengths))
        raise SpecError(
            f"split: segment {longest} has {lengths[longest]} steps, a pack {max_steps}; give context= or states= to "
            "cut it, or context=0 to cut it without either"
        )
    packs: list[list[Piece]] = []
    rooms: list[tuple[int, int]] = []  # sorted: how much is left in a pack, and its number
    for segment in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        at = bisect_right(rooms, (lengths[segment], -1))
        room, pack = rooms.pop(at) if at < len(rooms) else (max_steps, len(packs))
        if pack == len(packs):
            packs.append([])
        packs[pack].append(Piece(segment, 0, lengths[segment]))
        insort(rooms, (room - lengths[segment], pack))
    return [sorted(pack) for pack in packs]


def cut_and_fill(lengths: Sequence[int], max_steps: int, context: int) -> list[list[Piece]]:
    """Fills packs with segments, the largest that fits first.

    Where none fits whole, with a part of one.

    Args:
        lengths: of the segments, each at least 1.
        max_steps: of a pack.
        context: the most steps that are repeated in front of what is left of a segment, less than `max_steps`.

    Returns:
        The pieces of each pack. All packs but the last are full, unless what is left of all segments would need more
        room for its context than there is.
    """
    # What is left, sorted: the room that a piece takes, with its context; minus the segment, for the earliest first.
    left = sorted((length, -number) for number, length in enumerate(lengths))
    starts, packs = [0] * len(lengths), []
    while left:
        room, pack, kept = max_steps, [], []
        while left and room:
            at = bisect_right(left, (room, 1)) - 1
            size, number = left.pop(max(at, 0))
            segment, start = -number, starts[-number]
            before = size - (lengths[segment] - start)
            if at < 0 and before >= room:  # not even one step would fit behind its context
                kept.append((size, number))
                continue
            stop = min(lengths[segment], start + room - before)
            pack.append(Piece(segment, start, stop, before))
            room -= pack[-1].size
            if stop < lengths[segment]:
                starts[segment] = stop
                kept.append((lengths[segment] - stop + min(context, stop), number))
        for item in kept:
            insort(left, item)
        packs.append(pack)
    return packs


def places_of(pieces: Sequence[Piece], offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The steps of pieces, one piece after another.

    Args:
        pieces: K of them.
        offsets: int (S + 1,), where each segment begins.

    Returns:
        Which steps, int64 (N,); which of them count, bool (N,); and where each piece begins, int64 (K + 1,).
    """
    numbers = np.array(pieces, np.int64).reshape(-1, 4)
    first = offsets[numbers[:, 0]].astype(np.int64) + numbers[:, 1] - numbers[:, 3]
    bounds = np.concatenate([[0], np.cumsum(numbers[:, 2] - numbers[:, 1] + numbers[:, 3])]).astype(np.int64)
    sizes = np.diff(bounds)
    within = np.arange(bounds[-1]) - np.repeat(bounds[:-1], sizes)
    return np.repeat(first, sizes) + within, within >= np.repeat(numbers[:, 3], sizes), bounds


class Ends(NamedTuple):
    """Tells which segment of a pack continues which; (S,) each, on the CPU.

    Attributes:
        env_index: int64, the environment.
        lengths: int64, the number of steps.
        first_steps: int64, the first step in the environment's count, -1 if it is not known.
        may_continue: bool, whether the segment begins its row in the middle of an episode.
        may_go_on: bool, whether it ends with its row.
    """

    env_index: np.ndarray
    lengths: np.ndarray
    first_steps: np.ndarray
    may_continue: np.ndarray
    may_go_on: np.ndarray


def find_chains(parts: Sequence[Ends]) -> list[list[tuple[int, int]]]:
    """Segments that follow one another through consecutive packs.

    Returns:
        Groups of segments, as pairs of their number, counted through all packs, and their length.
    """
    groups: list[list[tuple[int, int]]] = []
    latest: dict[int, tuple[int, int]] = {}  # environment -> the group of its last segment, and the count behind it
    number = 0
    for part in parts:
        for env, length, first, may_continue, may_go_on in zip(*(column.tolist() for column in part), strict=True):
            group, following = latest.pop(env, (len(groups), UNKNOWN))
            is_next = UNKNOWN in (first, following) or first == following
            if not (may_continue and is_next and group < len(groups)):
                group = len(groups)
                groups.append([])
            groups[group].append((number, length))
            if may_go_on:
                latest[env] = group, UNKNOWN if first == UNKNOWN else first + length
            number += 1
    return groups


def find_steps(lengths: np.ndarray, n_timesteps: int) -> np.ndarray:
    """The places of the valid steps of a batch, int64 (N,).

    A place is row * T + t; lengths are (B,).
    """
    ends = lengths.cumsum()
    shifts = np.arange(len(lengths)) * n_timesteps - (ends - lengths)
    return np.asarray(np.arange(lengths.sum()) + shifts.repeat(lengths))


def find_segments(
    lengths: np.ndarray, places: np.ndarray, begins: np.ndarray | None, by_episode: bool
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Finds the segments of the valid steps of a batch.

    Args:
        lengths: int64 (B,), of the rows.
        places: int64 (N,), row * T + t of each step, ascending.
        begins: bool (B, T), which steps begin an episode; None if that is not known.
        by_episode: whether a segment begins with each episode, and not only with each row.

    Returns:
        `row`, `start`, `episode` and `continues` of each segment, (S,), and where each begins, int64 (S + 1,).
    """
    row = lengths.nonzero()[0]
    first = (lengths.cumsum() - lengths)[row]
    start = episode = np.zeros_like(row)
    if by_episode and begins is not None:
        is_first = begins.ravel()[places]
        is_first[first] = True
        first = is_first.nonzero()[0]
        row, start = np.divmod(places[first], begins.shape[1])
        # The number of a segment, less that of the first one of its row.
        number = np.arange(first.size)
        episode = number - np.maximum.accumulate(np.where(start == 0, number, 0))
    begun = start == 0 if begins is None else (start == 0) & ~begins[row, start]
    bounds = np.full(first.size + 1, places.size)
    bounds[:-1] = first
    return {"row": row, "start": start, "episode": episode, "continues": begun}, bounds


def flat(tensor: torch.Tensor, index: torch.Tensor, places: np.ndarray, is_full: bool) -> torch.Tensor:
    """Copies the steps of a tensor (B, T, ...).

    The step at index row * T + t of the result (N, ...) is step t of that row.
    """
    if is_full:
        return tensor.clone(memory_format=torch.contiguous_format).view(len(places), *tensor.shape[2:])
    return take_steps(tensor.flatten(0, 1), index, places)


def clear_states(info: DictTensor, continues: torch.Tensor) -> DictTensor:
    """The info of segments with an agent's state of 0 where an episode begins."""
    cleared = {
        key: torch.where(continues.view(-1, *[1] * (t.ndim - 1)), t, torch.zeros_like(t))
        for key, t in info.items()
        if key.startswith(STATE)
    }
    return DictTensor.trusted({**dict(info.items()), **cleared})


def check_states(owner: str, states: Mapping[str, str] | None) -> Mapping[str, str]:
    """Which key each part of the agent's state is read from.

    Raises:
        TypeError: it is something else.
    """
    if states is not None and not isinstance(states, Mapping):
        raise TypeError(f"{owner}: states must map parts of the agent's state to keys, got {states!r}")
    return states or {}


def grow(tensor: torch.Tensor, n: int) -> torch.Tensor:
    """A tensor with n rows of zeros behind it."""
    return torch.cat([tensor, tensor.new_zeros((n, *tensor.shape[1:]))]) if n else tensor


def group(drawn: Sequence[int], lengths: Sequence[int], size: int) -> Iterator[list[int]]:
    """Groups consecutive segments of at most `size` steps together.

    A longer one is alone.
    """
    group: list[int] = []
    n_steps = 0
    for number in drawn:
        if group and n_steps + lengths[number] > size:
            yield group
            group, n_steps = [], 0
        group.append(number)
        n_steps += lengths[number]
    if group:
        yield group


def widen(name: str, tensor: Any) -> torch.Tensor:
    """Returns a tensor of a layout in its own dtype.

    jax has only 32 bits by default.

    Raises:
        SpecError: it has another number of axes, or no dtype that is widened.
    """
    wanted = {"cu_seqlens": torch.int32, "mask": torch.bool, "continues": torch.bool}.get(name, torch.int64)
    dtypes = (wanted,) if wanted == torch.bool else (torch.int32, torch.int64)
    if not isinstance(tensor, torch.Tensor) or tensor.ndim != 1 or tensor.dtype not in dtypes:
        got = show(tensor) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise SpecError(f"PackedTrajectories: {name!r} must be {dtype_name(wanted)} with one axis, got {got}")
    return tensor.to(wanted)


def move(segments: DictTensor, begins: torch.Tensor) -> DictTensor:
    """The table of segments that begin so many steps later, int64 (S,)."""
    moved = {"start": segments["start"] + begins, "continues": segments["continues"] | (begins > 0)}
    return DictTensor.trusted({**dict(segments.items()), **moved})
