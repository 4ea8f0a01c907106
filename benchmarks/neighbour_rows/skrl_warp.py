"""rlstructs.memories.warp beside skrl.memories.warp."""

from __future__ import annotations

from neighbour_rows import Iterator, Row, peer
from neighbour_rows.skrl_arrays import Kind, rows_of

wp = peer("warp")


def rows() -> Iterator[Row]:
    import rlstructs.memories.warp as ours

    wp.config.quiet = True
    wp.init()
    kind = Kind(
        ours.RandomMemory,
        peer("skrl.memories.warp").RandomMemory,
        lambda array: wp.array(array, device="cpu"),
        wp.bool,
        wp.int8,
        wp.float32,
        {"device": "cpu"},
        lambda call: call,
    )
    yield from rows_of(kind)
