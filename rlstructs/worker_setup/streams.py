"""Seeds of the global random streams of `random`, numpy and torch in workers, derived without importing torch.

A worker that never loads torch need not load it for this: torch's stream is seeded as soon as there is one.
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

from workers.settings.on_import import after_import

# Begins the spawn keys of these streams; `seeding` has those of others.
KEY = 4
_RANDOM, _NUMPY, _TORCH = range(3)


@dataclass(frozen=True)
class WorkerStreams:
    """Seeds the global streams of a worker, each with 128 bits or more of its own.

    Attributes:
        roots: what each stream follows from.
    """

    roots: tuple[int, int, int]

    @classmethod
    def of_seed(cls, seed: int) -> WorkerStreams:
        """Streams that follow from a seed."""
        return cls((seed, seed, seed))

    @classmethod
    def of_this_process(cls) -> WorkerStreams:
        """Streams that follow from where those of this process are; these are left as they are."""
        of_numpy = _number(np.random.get_state(legacy=False))
        torch = sys.modules.get("torch")
        # Where there is no torch yet nobody has seeded it: numpy's seed makes the program reproducible.
        of_torch = of_numpy if torch is None else _number(torch.get_rng_state().numpy())
        return cls((_number(random.getstate()), of_numpy, of_torch))

    def __call__(self, index: int) -> None:
        """Seeds those of this process, which is the worker of this index."""
        random.seed(int.from_bytes(self._words(_RANDOM, index).tobytes(), "little"))
        np.random.seed(self._words(_NUMPY, index))
        low, high = self._words(_TORCH, index)[:2].tolist()
        after_import("torch", partial(_seed_torch, low | high << 32))

    def _words(self, stream: int, index: int) -> np.ndarray:
        """uint32 (4,)."""
        return np.random.SeedSequence(self.roots[stream], spawn_key=(KEY, stream, index)).generate_state(4)


def _seed_torch(seed: int) -> None:
    sys.modules["torch"].manual_seed(seed)


def _number(state: Any) -> int:
    """128 bits that depend on all of a generator's state."""
    digest = hashlib.sha256()
    for part in _parts(state):
        digest.update(part)
    return int.from_bytes(digest.digest()[:16], "little")


def _parts(state: Any) -> Sequence[bytes]:
    if isinstance(state, dict):
        return [part for key in sorted(state) for part in (repr(key).encode(), *_parts(state[key]))]
    return [state.tobytes() if isinstance(state, np.ndarray) else repr(state).encode()]
