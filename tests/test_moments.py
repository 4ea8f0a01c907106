"""Moments of pieces are those of the whole."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlstructs.moments import Moments, merge_parts

SHAPES = st.sampled_from([(), (3,), (2, 2)])


@given(st.lists(st.integers(0, 9), max_size=8), SHAPES, st.floats(-1e4, 1e4), st.integers(0, 2**32 - 1))
def test_moments_of_pieces_are_those_of_all_rows(sizes, shape, offset, seed):
    drawn = np.random.default_rng(seed)
    pieces = [drawn.normal(offset, 2.0, (size, *shape)).astype(np.float32) for size in sizes]
    parts = [{"x": Moments.of(piece)} if len(piece) else {} for piece in pieces]
    found = merge_parts({"x": Moments.none(shape)}, parts)["x"]
    rows = np.concatenate([np.zeros((0, *shape)), *pieces])
    assert found.count == len(rows) and found.mean.shape == found.m2.shape == found.variance.shape == shape
    if len(rows):
        np.testing.assert_allclose(found.mean, rows.mean(axis=0), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(found.variance, rows.var(axis=0), rtol=1e-6, atol=1e-7)
    else:
        assert (found.mean == 0).all() and (found.variance == 1).all()


def test_of_nothing_is_added_nothing():
    some = Moments.of(np.arange(6.0).reshape(3, 2))
    for found in (some.merge(Moments.none((2,))), Moments.none((2,)).merge(some)):
        assert found.count == 3 and found.mean.tolist() == [2.0, 3.0] and found.m2.tolist() == [8.0, 8.0]
    other = some.copy()
    other.mean[:] = 0
    assert some.mean.tolist() == [2.0, 3.0]
