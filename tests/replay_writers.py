"""Rows that tell whether they are whole, and the processes that write them; imported by those too."""

from __future__ import annotations

import numpy as np

from rlstructs.replay.rows.spec import Spec
from rlstructs.replay.rows.store import Storage

CAPACITY, N_WORDS, EPISODE = 512, 64, 7
# What is added to a checksum, so that a row of zeros is wrong.
SALT = np.uint64(0x9E3779B97F4A7C15)


def make_storage(order):
    storage = Storage(2, CAPACITY, order=order)
    number = Spec(np.dtype(np.int64), fill=-1)
    words, checksum = Spec(np.dtype(np.uint64), (N_WORDS,)), Spec(np.dtype(np.uint64))
    # All but the words lie in records.
    storage.add_columns({"lane": number, "step": number, "words": words, "checksum": checksum})
    storage.track_episodes()
    storage.share()
    return storage


def checksums(lanes, steps, words):
    return words.sum(axis=-1) + (lanes * 3 + steps * 5).astype(np.uint64) + SALT


def make_rows(lane, first, n, rng):
    """Columns of the steps `[first, first + n)` of a lane, `(1, n, ...)`."""
    steps = np.arange(first, first + n)[None]
    lanes = np.full_like(steps, lane)
    words = rng.integers(2**64, size=(1, n, N_WORDS), dtype=np.uint64)
    return {"lane": lanes, "step": steps, "words": words, "checksum": checksums(lanes, steps, words)}


def run(storage, lane, channel):
    """Writes rows of one lane until the channel says or is closed; says on it that it has begun."""
    rng, ring, said = np.random.default_rng(lane), storage.ring, False
    sizes = (1, 3, 32, CAPACITY // 4)
    n = 0
    while not channel.poll():
        first, size = int(ring.head[lane]), sizes[n % len(sizes)]
        rows = make_rows(lane, first, size, rng)
        storage.write(rows, slice(lane, lane + 1), done=rows["step"] % EPISODE == EPISODE - 1)
        n += 1
        if not said and n == 8:
            channel.send(first)
            said = True
