"""Random streams of memories, a different one in each process.

numpy's generators have a lock that a fork copies as it is: where another thread was drawing, a forked child would wait
for it for ever. And copies of a generator in several processes draw the same numbers. So a child that is forked, and a
copy that is sent to a child, get a new generator: its seed follows from the state that the parent's had when it was
created or loaded, and from the number of the copy. The parent's own stream goes on as if there were no copies.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import weakref
from collections import Counter
from multiprocessing import context
from typing import Any

import numpy as np

from rlstructs.replay.keep.checks import plain_state


class Stream:
    """The generator that a memory draws from.

    A copy or pickle that stays in its process, or that another program loads, continues the stream.

    Args:
        generator: numpy's.

    Attributes:
        generator: the present one; `restart` sets another.
        n_saves: how often its state was saved.
    """

    n_saves = 0

    def __init__(self, generator: np.random.Generator) -> None:
        self.restart(generator)
        _streams.add(self)

    def restart(self, generator: np.random.Generator) -> None:
        """Begins another stream."""
        self.generator, self._root, self._n_copies = generator, _digest(generator), 0

    def derive(self, *numbers: int) -> np.random.Generator:
        """Makes the generator of a copy, whose numbers no other copy has."""
        kind: Any = type(self.generator.bit_generator)
        return np.random.Generator(kind(np.random.SeedSequence([self._root, *numbers])))

    def count_copy(self) -> int:
        """Counts one more copy for another process; returns its number."""
        self._n_copies += 1
        return self._n_copies

    def __getstate__(self) -> dict[str, Any]:
        if context.get_spawning_popen() is not None:  # for a process that is being started
            return {"generator": self.derive(self.count_copy()), "process": None}
        return {"generator": self.generator, "process": _token, "root": self._root, "n_copies": self._n_copies}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.restart(state["generator"])
        if state["process"] is not None:
            self._root, self._n_copies = state["root"], state["n_copies"]
            if state["process"] != _token and multiprocessing.parent_process() is not None:
                _arrived[self._root] += 1
                name = multiprocessing.current_process().name.encode()
                self.restart(self.derive(int.from_bytes(name, "big"), _arrived[self._root]))
        _streams.add(self)


def _digest(generator: np.random.Generator) -> int:
    state = repr(plain_state(generator)).encode()
    return int.from_bytes(hashlib.blake2b(state, digest_size=16).digest(), "big")


_streams: weakref.WeakSet[Stream] = weakref.WeakSet()
_token = os.urandom(16)  # of this process
_arrived: Counter[int] = Counter()  # root -> how many copies were received from other processes


def _count_fork() -> None:
    for stream in list(_streams):
        stream.count_copy()


def _renew() -> None:
    global _token
    _token = os.urandom(16)
    for stream in list(_streams):
        stream.restart(stream.derive(stream.count_copy()))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_parent=_count_fork, after_in_child=_renew)
