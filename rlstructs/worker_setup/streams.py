"""Seeds the global random streams of `random`, numpy and torch in workers, without importing torch.

Torch's stream is seeded when a worker loads torch, which may be never.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from rlstructs.workers.settings import after_import

# First element of these spawn keys; `seeding` has those of other streams.
KEY = 4
_RANDOM, _NUMPY, _TORCH = range(3)


@dataclass(frozen=True)
class WorkerStreams:
    """Seeds the global streams of a worker, torch's with 64 bits and the others with 128.

    Attributes:
        roots: seeds that the streams of `random`, numpy and torch are derived from.
    """

    roots: tuple[int, int, int]

    @classmethod
    def of_seed(cls, seed: int) -> WorkerStreams:
        """Derives the streams from a seed."""
        return cls((seed, seed, seed))

    @classmethod
    def of_this_process(cls) -> WorkerStreams:
        """Derives the streams from the present state of this process's streams, without changing it."""
        of_numpy = _hash(np.random.get_state(legacy=False))
        torch = sys.modules.get("torch")
        # Nobody has seeded torch before it is loaded: numpy's state makes the program reproducible.
        of_torch = of_numpy if torch is None else _hash(torch.get_rng_state().numpy())
        return cls((_hash(random.getstate()), of_numpy, of_torch))

    def __call__(self, index: int) -> None:
        """Seeds the streams of this process, which is the worker with this index."""
        random.seed(int.from_bytes(self._words(_RANDOM, index).tobytes(), "little"))
        np.random.seed(self._words(_NUMPY, index))
        low, high = self._words(_TORCH, index)[:2].tolist()
        after_import("torch", partial(_seed_torch, low | high << 32))

    def _words(self, stream: int, index: int) -> np.ndarray:
        """Derives uint32 (4,) for one stream of one worker."""
        return np.random.SeedSequence(self.roots[stream], spawn_key=(KEY, stream, index)).generate_state(4)


def _seed_torch(seed: int) -> None:
    sys.modules["torch"].manual_seed(seed)


def _hash(state: Any) -> int:
    """Hashes the whole state of a generator to 128 bits."""
    digest = hashlib.sha256()
    for part in _split_bytes(state):
        digest.update(part)
    return int.from_bytes(digest.digest()[:16], "little")


def _split_bytes(state: Any) -> Sequence[bytes]:
    if isinstance(state, dict):
        return [part for key in sorted(state) for part in (repr(key).encode(), *_split_bytes(state[key]))]
    return [state.tobytes() if isinstance(state, np.ndarray) else repr(state).encode()]
