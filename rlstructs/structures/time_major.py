"""Steps in the order of time over all segments.

Recurrent networks take them so: as packed sequences, or as blocks of time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from rlstructs.errors import SpecError


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
