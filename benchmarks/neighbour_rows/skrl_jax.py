"""rlstructs.memories.jax beside skrl.memories.jax."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from neighbour_rows import Iterator, Row, peer
from neighbour_rows.skrl_arrays import Kind, rows_of

jax = peer("jax")


def wait(call: Any, *args: Any) -> Any:
    return jax.block_until_ready(call(*args))


def rows() -> Iterator[Row]:
    import rlstructs.memories.jax as ours

    device = jax.devices("cpu")[0]
    kind = Kind(
        ours.RandomMemory,
        peer("skrl.memories.jax").RandomMemory,
        jax.numpy.asarray,
        jax.numpy.bool_,
        jax.numpy.int8,
        jax.numpy.float32,
        {"device": device},
        lambda call: partial(wait, call),
    )
    yield from rows_of(kind)
    for name, dtype in {"as stored": np.float32, "float64": np.float64}.items():
        yield kind.add(f"E=16, numpy, {name}", 16, dtypes={"rewards": dtype}, convert=lambda array: array)
