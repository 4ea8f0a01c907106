"""`Layout`: which step of which row each step of a pack is.

It also says where the segments of the pack begin. `TimeMajor` has the steps in the order of time over all segments:
recurrent networks take them so, as packed sequences or as blocks of time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from rlstructs.checks import UNKNOWN
from rlstructs.errors import SpecError
from rlstructs.frameworks.torch import CARRIERS
from rlstructs.structures import segments as seg
from rlstructs.structures.arrays import as_array
from rlstructs.structures.dict_tensor import DictTensor
from rlstructs.structures.segments import EPISODE, FILLER, Piece
from rlstructs.structures.temporal_dict_tensor import FIRST_STEPS, TemporalDictTensor
from rlstructs.structures.tree import show

TABLE = ("row", "start", "episode", "continues")
# The tensors of a layout beside its two tables; the last only in copies and files.
SHOWN = ("cu_seqlens", "mask", "index", "row_lengths", "sizes")
NAMES = (*SHOWN, FIRST_STEPS)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the N steps of a pack lie, in S segments.

    Attributes:
        cu_seqlens, segments, info, first_steps, max_seqlen: see `PackedTrajectories`.
        index: int64 (N,), row * T + t of each step in the batch, -1 for steps that fill up.
        row_lengths: int64 (B,), of the batch.
        n_timesteps: T of the batch.
        mask: bool (N,), which steps count; None for all.
    """

    cu_seqlens: torch.Tensor
    segments: DictTensor
    info: DictTensor
    index: torch.Tensor
    row_lengths: torch.Tensor
    first_steps: torch.Tensor
    n_timesteps: int
    max_seqlen: int
    mask: torch.Tensor | None = None

    @classmethod
    def of(cls, info: DictTensor, steps: TemporalDictTensor, by: str) -> Layout:
        """The layout of the valid steps of a batch."""
        device, n_timesteps, lengths = steps.device(), steps.n_timesteps(), as_array(steps.lengths)
        places = seg.find_steps(lengths, n_timesteps)
        if places.size >= np.iinfo(np.int32).max:
            raise SpecError(f"packed: {places.size} steps are more than int32 counts; pack parts of the batch")
        begins = seg.find_begins(steps) if by == EPISODE or seg.BEGINS in steps else None
        table, bounds = seg.find_segments(lengths, places, begins, by == EPISODE)
        segments = DictTensor.trusted({key: torch.from_numpy(column).to(device) for key, column in table.items()})
        if steps.first_steps is None:
            first = torch.full_like(segments["row"], UNKNOWN)
        else:
            first = steps.first_steps[segments["row"]]
            first = torch.where(first == UNKNOWN, first, first + segments["start"])
        info = info.index(segments["row"])
        if by == EPISODE:
            info = seg.clear_states(info, segments["continues"])
        index, cu_seqlens = torch.from_numpy(places).to(device), torch.from_numpy(bounds.astype(np.int32)).to(device)
        longest = int(np.diff(bounds).max(initial=0))
        return cls(cu_seqlens, segments, info, index, steps.lengths.clone(), first, n_timesteps, longest)

    @property
    def n_steps(self) -> int:
        """N."""
        return self.index.shape[0]

    @property
    def n_segments(self) -> int:
        """S."""
        return self.cu_seqlens.shape[0] - 1

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.cu_seqlens.device

    def lengths(self) -> torch.Tensor:
        """int64 (S,): the number of steps of each segment."""
        return self.cu_seqlens.diff().long()

    def segment_ids(self) -> torch.Tensor:
        """int64 (N,): the segment of each step."""
        numbers = torch.arange(self.n_segments, device=self.device)
        return numbers.repeat_interleave(self.lengths(), output_size=self.n_steps)

    def positions(self) -> torch.Tensor:
        """int64 (N,): the place of each step in its segment."""
        return torch.arange(self.n_steps, device=self.device) - self.cu_seqlens.long()[self.segment_ids()]

    def time_major(self) -> TimeMajor:
        """Where the steps are in torch's packed sequences."""
        return time_major(self.lengths(), self.segment_ids(), self.positions())

    def __str__(self) -> str:
        return f"n_steps={self.n_steps}, n_segments={self.n_segments}"

    def check_steps(self, owner: str, name: str, values: torch.Tensor) -> None:
        """Raises SpecError unless values are (N, ...) and on the device of the pack."""
        if values.ndim < 1 or values.shape[0] != self.n_steps:
            raise SpecError(f"{owner}: {name} is {show(values)}, expected ({self.n_steps}, ...): {self}")
        if values.device != self.device:
            raise SpecError(f"{owner}: {name} is on {values.device}, expected {self.device}")

    def is_same(self, other: Layout) -> bool:
        """Whether two packs have the same steps of batches of the same size."""
        names = ("cu_seqlens", "index", "row_lengths")
        same = self.n_timesteps == other.n_timesteps
        return same and all(torch.equal(getattr(self, name), getattr(other, name)) for name in names)

    def put_back(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Puts values (N, ...) back as (B, T, ...).

        They are 0 where there is no step that counts.
        """
        self.check_steps("unpack", name, values)
        index, shape, cell = self.index, (len(self.row_lengths), self.n_timesteps), values.shape[1:]
        if self.mask is not None:
            index, values = index[self.mask], values[self.mask]
        padded, carrier = values.new_zeros((shape[0] * shape[1], *cell)), CARRIERS.get(values.dtype)
        if carrier is None:
            padded = padded.index_copy(0, index, values)
        else:
            padded = padded.view(carrier).index_copy(0, index, values.view(carrier)).view(values.dtype)
        return padded.view(*shape, *cell)

    def with_info(self, info: Mapping[str, torch.Tensor]) -> Layout:
        """Returns the layout with other values of its segments."""
        return replace(self, info=DictTensor.trusted(info))

    def with_begins(self, begins: torch.Tensor) -> Layout:
        """With segments that do not continue, as an episode begins with them, bool (S,)."""
        table = {**dict(self.segments.items()), "continues": self.segments["continues"] & ~begins}
        return replace(self, segments=DictTensor.trusted(table))

    # Parts

    def take(self, pieces: Sequence[Piece]) -> tuple[Layout, torch.Tensor, np.ndarray]:
        """Returns the layout of some pieces.

        Also returns which steps these are, int64 (N,), on its device and on the CPU.
        """
        places, counts, bounds = seg.places_of(pieces, as_array(self.cu_seqlens))
        numbers = torch.tensor([(piece.segment, piece.start - piece.context) for piece in pieces], dtype=torch.int64)
        of_segment, begins = numbers.view(-1, 2).to(self.device).unbind(1)
        at, first = torch.from_numpy(places).to(self.device), self.first_steps[of_segment]
        taken = replace(
            self,
            cu_seqlens=torch.from_numpy(bounds.astype(np.int32)).to(self.device),
            segments=seg.move(self.segments.index(of_segment), begins),
            first_steps=torch.where(first == UNKNOWN, first, first + begins),
            info=self.info.index(of_segment),
            index=self.index[at],
            max_seqlen=int(np.diff(bounds).max(initial=0)),
            mask=None if counts.all() else torch.from_numpy(counts).to(self.device),
        )
        return taken, at, places

    def fill_up(self, size: int, n_segments: int) -> Layout:
        """Adds steps that do not count, and empty segments.

        The result has this size. The added steps have a segment of their own.
        """
        n_steps, n_more = size - self.n_steps, n_segments - self.n_segments
        mask = torch.ones_like(self.index, dtype=torch.bool) if self.mask is None else self.mask
        segments = {key: seg.grow(tensor, n_more) for key, tensor in self.segments.items()}
        segments["row"][self.n_segments :] = FILLER
        return replace(
            self,
            cu_seqlens=torch.cat([self.cu_seqlens, self.cu_seqlens.new_full((n_more,), size)]),
            segments=DictTensor.trusted(segments),
            info=DictTensor.trusted({key: seg.grow(tensor, n_more) for key, tensor in self.info.items()}),
            index=torch.cat([self.index, self.index.new_full((n_steps,), FILLER)]),
            max_seqlen=size,
            mask=seg.grow(mask, n_steps),
            first_steps=torch.cat([self.first_steps, self.first_steps.new_full((n_more,), UNKNOWN)]),
        )

    def merge(self, counts: Sequence[int]) -> Layout:
        """Merges each run of so many segments into one.

        It begins where the first of them does.
        """
        first = torch.from_numpy(np.cumsum([0, *counts])).to(self.device)
        cu_seqlens, first = self.cu_seqlens[first], first[:-1]
        longest = int(cu_seqlens.diff().max()) if len(first) else 0
        segments, info, first_steps = self.segments.index(first), self.info.index(first), self.first_steps[first]
        merged = replace(self, cu_seqlens=cu_seqlens, segments=segments, info=info)
        return replace(merged, first_steps=first_steps, max_seqlen=longest)

    @classmethod
    def side_by_side(cls, parts: Sequence[Layout]) -> Layout:
        """The segments of several batches, one after another, as of one batch."""
        n_timesteps, n_rows, n_steps = max(part.n_timesteps for part in parts), 0, 0
        tables, indexes, bounds = [], [], [parts[0].cu_seqlens[:1]]
        for part in parts:
            row = part.index // max(part.n_timesteps, 1)
            indexes.append((row + n_rows) * n_timesteps + part.index - row * part.n_timesteps)
            tables.append(DictTensor.trusted({**dict(part.segments.items()), "row": part.segments["row"] + n_rows}))
            bounds.append(part.cu_seqlens[1:] + n_steps)
            n_rows, n_steps = n_rows + len(part.row_lengths), n_steps + part.n_steps
        info = DictTensor.cat(part.info for part in parts)
        lengths, first = (torch.cat([getattr(part, name) for part in parts]) for name in ("row_lengths", "first_steps"))
        index = torch.cat(indexes)
        return cls(torch.cat(bounds), DictTensor.cat(tables), info, index, lengths, first, n_timesteps, 0)

    def ends(self, steps: Mapping[str, torch.Tensor]) -> seg.Ends:
        """Returns what says how the segments continue in the next batch.

        Args:
            steps: the tensors of the pack; what ends with a row may be an episode by one of them.
        """
        table, lengths = self.segments, self.lengths()
        is_last = table["start"] + lengths == self.row_lengths[table["row"]]
        for flags in map(steps.__getitem__, seg.end_keys(steps)):
            if flags.ndim == 1:
                is_last &= flags[self.cu_seqlens[1:].long() - 1] == 0
        may_continue = table["continues"] & (table["start"] == 0)
        columns = (self.info["env_index"], lengths, self.first_steps, may_continue, is_last)
        return seg.Ends(*map(as_array, columns))

    # As a tree

    def tree(self) -> dict[str, Any]:
        """The tensors by name, with the two tables."""
        mask = torch.ones_like(self.index, dtype=torch.bool) if self.mask is None else self.mask
        # The mask marks a pack that was split, even if all of its steps count.
        sizes = torch.tensor([self.n_timesteps, self.max_seqlen, self.mask is not None], device=self.device)
        tensors = (self.cu_seqlens, mask, self.index, self.row_lengths, sizes, self.first_steps)
        tables = {"segments": self.segments._tree(), "info": self.info._tree()}
        return {**tables, **dict(zip(NAMES, tensors, strict=True))}

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Layout:
        """The inverse of `tree`, without checks."""
        cu_seqlens, mask, index, row_lengths, sizes = (tree[name] for name in SHOWN)
        first = tree.get(FIRST_STEPS, UNKNOWN)
        if not isinstance(first, torch.Tensor):
            first = index.new_full((len(cu_seqlens) - 1,), first)
        tables = DictTensor.trusted(tree["segments"]), DictTensor.trusted(tree["info"])
        n_timesteps, longest, is_part = sizes.tolist()
        return cls(cu_seqlens, *tables, index, row_lengths, first, n_timesteps, longest, mask if is_part else None)

    def check(self, mask: torch.Tensor) -> None:
        """Raises SpecError unless the parts fit together.

        They come from a file or another library.
        """
        cu, index = self.cu_seqlens, self.index
        if not len(cu) or int(cu[0]) or int(cu[-1]) != self.n_steps or bool((cu.diff() < 0).any()):
            raise SpecError(f"PackedTrajectories: cu_seqlens must rise from 0 to {self.n_steps}, got {show(cu)}")
        n_cells = len(self.row_lengths) * self.n_timesteps
        if bool(((index < FILLER) | (index >= n_cells)).any()):
            raise SpecError(f"PackedTrajectories: index must be int64 (N,) in [-1, {n_cells}), got {show(index)}")
        if mask.shape != index.shape or bool((index[mask] == FILLER).any()) or (self.mask is None and not mask.all()):
            raise SpecError("PackedTrajectories: mask must be bool (N,), and False in steps that fill up")
        if self.max_seqlen < max(cu.diff().tolist(), default=0):
            raise SpecError(f"PackedTrajectories: max_seqlen is {self.max_seqlen}, less than the longest segment has")
        if set(self.segments) != set(TABLE):
            raise SpecError(f"PackedTrajectories: segments has {sorted(self.segments)}, expected {sorted(TABLE)}")
        for key, tensor in (*self.segments.items(), *self.info.items(), (FIRST_STEPS, self.first_steps)):
            if not tensor.ndim or len(tensor) != self.n_segments:
                raise SpecError(f"PackedTrajectories: {key!r} is {show(tensor)}, expected ({self.n_segments}, ...)")


class TimeMajor(NamedTuple):
    """Where the steps of segments are in torch's packed sequences.

    These have all first steps first.

    Attributes:
        places: int64 (N,), the place there of each step.
        steps: int64 (N,), the step at each of these places.
        batch_sizes: int64 (longest,), on the CPU: how many segments have a step t.
        by_length: int64 (K,), the segments that have steps, the longest first.
        ranks: int64 (K,), the inverse of `by_length`.
    """

    places: torch.Tensor
    steps: torch.Tensor
    batch_sizes: torch.Tensor
    by_length: torch.Tensor
    ranks: torch.Tensor


def time_major(lengths: torch.Tensor, segment_ids: torch.Tensor, positions: torch.Tensor) -> TimeMajor:
    """Lays steps out as torch's packed sequences do; segments without steps come last."""
    by_length = lengths.argsort(descending=True, stable=True)[: int((lengths > 0).sum())]
    ranks = torch.empty_like(by_length)
    ranks[by_length] = torch.arange(len(by_length), device=lengths.device)
    # All segments have a step 0; those without a step t are not longer than t.
    n_ended = torch.bincount(lengths[by_length]).cumsum(0)[:-1]
    batch_sizes = len(ranks) - n_ended
    places = (batch_sizes.cumsum(0) - batch_sizes)[positions] + ranks[segment_ids]
    steps = torch.empty_like(places)
    steps[places] = torch.arange(len(places), device=lengths.device)
    return TimeMajor(places, steps, batch_sizes.cpu(), by_length, ranks)


def run_in_blocks(network: nn.RNNBase, values: torch.Tensor, form: TimeMajor, state: Any) -> torch.Tensor:
    """Runs a recurrent network over blocks of time, each padded to a rectangle.

    On the CPU torch computes a rectangle many times as fast as a packed sequence.

    Args:
        network: with one direction.
        values: (N, ...), its inputs.
        form: of their segments.
        state: before the first steps, as the network takes it, with the longest segments first; or None.

    Returns:
        Its outputs (N, ...), in the order of the values.
    """
    sizes = form.batch_sizes.tolist()
    left, outputs = values.index_select(0, form.steps), []
    for low, high in _cut(sizes):
        n = sizes[low]
        counts = form.batch_sizes[low:high].to(values.device)
        valid = (torch.arange(n, device=values.device) < counts[:, None]).view(-1)
        block, left = left.tensor_split([sum(sizes[low:high])])
        # A step that is not there repeats the one before; nothing reads what comes of it.
        block = block.index_select(0, valid.cumsum(0) - 1).view(high - low, n, -1)
        if state is not None:  # of the segments that go on
            parts = [part[:, :n].contiguous() for part in (state if isinstance(state, tuple) else (state,))]
            state = tuple(parts) if isinstance(state, tuple) else parts[0]
        output, state = network(block.transpose(0, 1) if network.batch_first else block, state)
        output = output.transpose(0, 1) if network.batch_first else output
        outputs.append(output.flatten(0, 1).index_select(0, valid.nonzero()[:, 0]))
    return torch.cat(outputs).index_select(0, form.places)


def _cut(sizes: list[int]) -> Iterator[tuple[int, int]]:
    """Cuts time where more than half of a block's segments have ended.

    Yields the bounds of each block.
    """
    low = 0
    for t, size in enumerate(sizes):
        if 2 * size < sizes[low]:
            yield low, t
            low = t
    yield low, len(sizes)


def sort_state(state: Any, form: TimeMajor, n_segments: int) -> Any:
    """Sorts a recurrent network's state by segment, the longest first.

    It is (layers, S, ...), or the two of an LSTM.

    Raises:
        SpecError: it has not S rows.
    """
    if state is None:
        return None
    if isinstance(state, tuple):
        return tuple(sort_state(part, form, n_segments) for part in state)
    if state.ndim != 3 or state.shape[1] != n_segments:
        raise SpecError(f"run_recurrent: expected a state of (layers, {n_segments}, ...), got {tuple(state.shape)}")
    return state.index_select(1, form.by_length)
