"""Batches that are made before they are asked for.

    caller     draws ahead, from a copy of the generator    | takes a batch: only now the generator moves on
    pool           gathers, transforms and hands over       |

What is drawn ahead is what a draw would give that came later, as long as nothing changes: so every batch
notes what it was drawn from, and one is taken only if that is how things still are. Otherwise all that was
drawn ahead is dropped, and the stream of batches is the same as without. As nothing can be made ahead while
rows or priorities change between any two samples, it is not tried again before two have come without.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rlstructs.replay.drawing import Selection

# More threads than this would only wait for each other.
MAX_THREADS = 8


@dataclass
class Place:
    """Where a stream of draws stands.

    Attributes:
        generator: the state of the bit generator.
        position: that of the sampler.
    """

    generator: Mapping[str, Any]
    position: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Place):
            return NotImplemented
        return bool(self.position == other.position and _plain(self.generator) == _plain(other.generator))


class Source(Protocol):
    """What batches are drawn from. Everything but `finish` is called while its lock is held."""

    def place(self) -> Place:
        """Where the stream stands."""

    def go_to(self, place: Place) -> None:
        """Goes to such a place."""

    def draw(self, request: Any, rng: np.random.Generator | None) -> Selection:
        """Draws, from its own generator if None is given."""

    def drawn(self, picked: Selection) -> None:
        """Notes that this has been handed out."""

    def read(self, picked: Selection) -> Any:
        """What was drawn, private memory."""

    def finish(self, request: Any, picked: Selection, arrays: Any) -> Any:
        """What is handed out. Called by any thread, and by several at once."""


class Batch:
    """One that is being made; whoever comes first does what is left to be done."""

    def __init__(self, source: Source, lock: Any, request: Any, picked: Selection, after: Place) -> None:
        self.picked, self.after = picked, after
        self._work: tuple[Source, Any, Any] | None = (source, lock, request)
        self._arrays: Any = None
        self.future: Future[Any] | None = None

    def read(self) -> None:
        """Reads the rows, unless that is done. The lock is held."""
        if self._work is not None and self._arrays is None:
            self._arrays = self._work[0].read(self.picked)

    def drop(self) -> None:
        """Is not wanted any more. The lock is held."""
        if self.future is not None:
            self.future.cancel()
        self._work = None

    def make(self) -> Any:
        """The batch; None if it has been dropped."""
        work = self._work
        if work is None:
            return None
        source, lock, request = work
        with lock:
            if self._work is None:
                return None
            self.read()
        try:
            return source.finish(request, self.picked, self._arrays)
        finally:
            self._work = self._arrays = None  # or it would keep the buffer

    def result(self) -> Any:
        """The batch, made here if no thread of the pool has begun to."""
        if self.future is None or self.future.cancel():
            return self.make()
        return self.future.result()


class Prefetch:
    """Batches ahead of a source, which it does not keep.

    Args:
        lock: of the source, held whenever a method is called.
        depth: how many.
    """

    def __init__(self, lock: Any, depth: int) -> None:
        self.depth = depth
        self._lock = lock
        self._queue: deque[Batch] = deque()
        self._drawn_from: Any = None  # what those in the queue were drawn from, and their request
        self._before: Place | None = None  # where the stream stood before the first of them
        self._is_calm = True
        self._spare: np.random.Generator | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._made_by = os.getpid()

    def __len__(self) -> int:
        return len(self._queue)

    def take(self, source: Source, request: Any, content: Any) -> Batch:
        """The next batch.

        Args:
            source: what it is drawn from.
            request: what is asked for.
            content: what the source holds, equal to what it was only if nothing has changed.
        """
        place = source.place()
        self._leave_behind()
        if self._drawn_from == (request, content) and (not self._queue or self._before == place):
            self._is_calm = True
        else:
            self._is_calm = not self._queue
            self.drop()
        self._drawn_from = request, content
        if self._queue:
            batch = self._queue.popleft()
            source.go_to(batch.after)
        else:
            picked = source.draw(request, None)
            batch = Batch(source, self._lock, request, picked, source.place())
        source.drawn(batch.picked)
        batch.read()
        self._before = batch.after
        if self._is_calm:
            self._fill(source, request, self._queue[-1].after if self._queue else batch.after)
        return batch

    def _fill(self, source: Source, request: Any, last: Place) -> None:
        """Draws until there are enough; what goes wrong will do so again when it is asked for."""
        here = source.place()
        try:
            with contextlib.suppress(ValueError, RuntimeError):
                while len(self._queue) < self.depth:
                    rng = self._generator(last.generator)
                    source.go_to(Place(here.generator, last.position))
                    picked = source.draw(request, rng)
                    last = Place(rng.bit_generator.state, source.place().position)
                    batch = Batch(source, self._lock, request, picked, last)
                    batch.future = self._threads().submit(batch.make)
                    self._queue.append(batch)
        finally:
            source.go_to(here)

    def _generator(self, state: Mapping[str, Any]) -> np.random.Generator:
        """One in this state, the same each time: making one takes longer than a draw."""
        name = state["bit_generator"]
        if self._spare is None or type(self._spare.bit_generator).__name__ != name:
            self._spare = np.random.Generator(getattr(np.random, name)(0))
        self._spare.bit_generator.state = state
        return self._spare

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(min(self.depth, MAX_THREADS), "rlstructs-prefetch")
        return self._pool

    def _leave_behind(self) -> None:
        """Forgets what threads were making that are not in this process, as it was forked."""
        if os.getpid() != self._made_by:
            self._queue.clear()
            self._pool, self._made_by = None, os.getpid()

    def drop(self) -> None:
        """Drops what was drawn ahead."""
        for batch in self._queue:
            batch.drop()
        self._queue.clear()

    def close(self) -> Callable[[], None]:
        """Drops it, and ends the threads; what it gives waits for them, and is called without the lock."""
        self._leave_behind()
        self.drop()
        pool, self._pool, self.depth = self._pool, None, 0
        return (lambda: None) if pool is None else (lambda: pool.shutdown(cancel_futures=True))


def _plain(value: Any) -> Any:
    """The state of a bit generator, so that it can be compared."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return value.tobytes() if isinstance(value, np.ndarray) else value
