"""Random structures for the property tests: small, with a different value in every cell where the dtype allows."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from rlstructs import DictTensor, TemporalDictTensor

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
]  # fmt: skip

# name -> dtype and shape of one cell
schemas = st.dictionaries(
    st.sampled_from(["x", "reward", "observation/frame", "a/b/c"]),
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=2).map(tuple)),
    max_size=3,
)


def filled(shape, dtype, start=1):
    """A tensor that counts from `start`; of bool, one with both values."""
    count = torch.arange(start, start + torch.Size(shape).numel()).reshape(shape)
    return count % 3 == 0 if dtype == torch.bool else count.to(dtype)


def make_dict_tensor(schema, n_elems, start=1):
    return DictTensor({key: filled((n_elems, *cell), dtype, start) for key, (dtype, cell) in schema.items()})


def make_temporal(schema, lengths, n_timesteps, start=1):
    tensors = {key: filled((len(lengths), n_timesteps, *cell), dtype, start) for key, (dtype, cell) in schema.items()}
    return TemporalDictTensor(tensors, torch.tensor(lengths, dtype=torch.int64))


@st.composite
def lengths_and_time(draw, max_rows=4, max_time=5):
    """Lengths of up to `max_rows` rows, and the number of timesteps that holds them."""
    n_timesteps = draw(st.integers(0, max_time))
    return draw(st.lists(st.integers(0, n_timesteps), max_size=max_rows)), n_timesteps


dict_tensors = st.builds(make_dict_tensor, schemas, st.integers(0, 4))
temporals = st.builds(lambda schema, sizes: make_temporal(schema, *sizes), schemas, lengths_and_time())


def steps(temporal):
    """The valid steps of each row as plain lists: `{name: [[cell, ...], ...]}`."""
    lengths = temporal.lengths.tolist()
    return {
        key: [row[:length].tolist() for row, length in zip(tensor, lengths, strict=True)]
        for key, tensor in temporal.items()
    }
