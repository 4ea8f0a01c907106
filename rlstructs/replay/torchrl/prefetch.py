"""Makes batches before they are asked for.

    caller     draws ahead, from a copy of the generator   | takes a batch: only now the generator moves on
    threads    gather, transform and hand over             |

The stream of batches is the same as without. A batch that was drawn ahead is what a later draw would give if nothing
changed in between. So what was drawn ahead notes what it was drawn from; after any change all of it is dropped. If
rows or priorities change between any two samples, nothing can be made ahead: after a change two samples have to
follow one another before anything is drawn ahead again.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from rlstructs.replay.drawing import Selection
from rlstructs.replay.torchrl.draws import Draws, Place

# More threads than this would only wait for each other.
MAX_THREADS = 8


class Batch:
    """A batch that is being made; the first thread that comes does what is left to do."""

    def __init__(self, draws: Draws, picked: Selection) -> None:
        self.picked, self.after = picked, draws.place()
        self._draws: Draws | None = draws
        self._arrays: Any = None
        self.future: Future[Any] | None = None

    def read(self) -> None:
        """Reads the rows, unless that is done. The lock is held."""
        if self._draws is not None and self._arrays is None:
            self._arrays = self._draws.read(self.picked)

    def drop(self) -> None:
        """Cancels it. The lock is held."""
        if self.future is not None:
            self.future.cancel()
        self._draws = None

    def make(self) -> Any:
        """The batch; None if it was dropped."""
        draws = self._draws
        if draws is None:
            return None
        with draws.lock:
            if self._draws is None:
                return None
            self.read()
        try:
            return draws.finish(self.picked, self._arrays)
        finally:
            self._draws = self._arrays = None  # they would keep the rows alive

    def result(self) -> Any:
        """The batch, made here if no other thread has begun to make it."""
        if self.future is None or self.future.cancel():
            return self.make()
        return self.future.result()


class Prefetch:
    """Batches that are made ahead. The lock of the rows is held whenever a method is called.

    Args:
        depth: number of batches.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._queue: deque[Batch] = deque()
        self._drawn_from: Any = None  # the request and the content that those in the queue were drawn from
        self._before: Place | None = None  # the place in the stream before the first of them
        self._is_calm = True
        self._spare: np.random.Generator | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._pid = os.getpid()

    def __len__(self) -> int:
        return len(self._queue)

    def take(self, draws: Draws, content: Any) -> Batch:
        """The next batch.

        Args:
            draws: what it is drawn from.
            content: a value that differs after every change of what is drawn from.
        """
        place = draws.place()
        self._forget_after_fork()
        drawn_from = draws.request, content
        if self._drawn_from == drawn_from and (not self._queue or self._before == place):
            self._is_calm = True
        else:
            self._is_calm = not self._queue
            self.drop()
        self._drawn_from = drawn_from
        if self._queue:
            batch = self._queue.popleft()
            draws.go_to(batch.after)
        else:
            batch = Batch(draws, draws.draw())
        draws.note_drawn(batch.picked)
        batch.read()
        self._before = batch.after
        if self._is_calm:
            self._fill(draws, self._queue[-1].after if self._queue else batch.after)
        return batch

    def _fill(self, draws: Draws, last: Place) -> None:
        """Draws until there are enough; an error will come again when the batch is asked for."""
        here = draws.place()
        try:
            with contextlib.suppress(ValueError, RuntimeError):
                while len(self._queue) < self.depth:
                    rng = self._generator(last.generator)
                    draws.go_to(Place(here.generator, last.position))
                    batch = Batch(draws, draws.draw(rng))
                    batch.after.generator = rng.bit_generator.state
                    last = batch.after
                    batch.future = self._threads().submit(batch.make)
                    self._queue.append(batch)
        finally:
            draws.go_to(here)

    def _generator(self, state: Mapping[str, Any]) -> np.random.Generator:
        """A generator in this state, always the same one: to create one takes longer than a draw."""
        name = state["bit_generator"]
        if self._spare is None or type(self._spare.bit_generator).__name__ != name:
            self._spare = np.random.Generator(getattr(np.random, name)(0))
        self._spare.bit_generator.state = state
        return self._spare

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(min(self.depth, MAX_THREADS), "rlstructs-prefetch")
        return self._pool

    def _forget_after_fork(self) -> None:
        """In a forked process, forgets the batches of threads that only its parent has."""
        if os.getpid() != self._pid:
            self._queue.clear()
            self._pool, self._pid = None, os.getpid()

    def drop(self) -> None:
        """Drops what was drawn ahead."""
        for batch in self._queue:
            batch.drop()
        self._queue.clear()

    def close(self) -> Callable[[], None]:
        """Drops what was drawn ahead; returns a function that waits for the threads, to be called without the lock."""
        self._forget_after_fork()
        self.drop()
        pool, self._pool, self.depth = self._pool, None, 0
        return (lambda: None) if pool is None else (lambda: pool.shutdown(cancel_futures=True))
