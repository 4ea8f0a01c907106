"""Batches that are made ahead by threads, for every surface.

    caller     draws ahead, then resets the generator      | takes a batch: only now the generator moves on
    threads    read rows, and finish batches               |

The stream of a memory is the same whether or not batches are made ahead: what was drawn ahead is dropped, and drawn
anew, once its `Draws.basis` or the place in the stream is another. Two kinds of draws differ in their basis:

    exact      everything that a draw depends on. Batches are those that would be drawn without. If rows or priorities
               change between any two of them, nothing can be made ahead: after a change two batches have to follow one
               another before anything is drawn ahead again
    early      neither new rows nor priorities. A batch is of the rows and priorities there were when the batch `depth`
               places before it was handed out; of its rows those are drawn again that were overwritten since

Which rows were overwritten is decided as a batch is handed out, not by when a thread has read them: so one program
makes the same batches in every run.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rlstructs.checks import check_count
from rlstructs.replay.draw.plan import Selection
from rlstructs.replay.rows.store import Storage
from rlstructs.seeding import Stream

# More threads than this would only wait for each other.
MAX_THREADS = 8


@dataclass
class Place:
    """A place in the stream of draws.

    Attributes:
        generator: state of the bit generator.
        position: of the sampler.
    """

    generator: Mapping[str, Any]
    position: Any = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Place):
            return NotImplemented
        return bool(self.position == other.position and _comparable(self.generator) == _comparable(other.generator))


class Draws(Protocol):
    """Draws rows and makes a batch of them.

    Attributes:
        is_early: whether they are early draws; see above.
    """

    is_early: bool

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Is held while rows are read."""

    def basis(self) -> Any:
        """Returns what batches drawn ahead rest on.

        None if none may be drawn ahead now.
        """

    def place(self) -> Place:
        """Returns the place in the stream of draws."""

    def go_to(self, place: Place) -> None:
        """Continues the stream of draws at a place."""

    def draw(self) -> Selection:
        """Draws the rows of a batch."""

    def read(self, picked: Selection) -> Any:
        """Reads drawn rows."""

    def finish(self, picked: Selection, arrays: Any) -> Any:
        """Makes a batch of what was read; threads may call it at once."""

    def settle(self, batch: Batch) -> Batch:
        """Returns a batch as it is handed out.

        If rows were overwritten since it was drawn, others are drawn, and `after` is another place.
        """


class Batch:
    """A batch that is being made.

    The first thread that comes does the remaining work.
    """

    def __init__(self, draws: Draws, picked: Selection) -> None:
        self.picked, self.after = picked, draws.place()
        self.arrays: Any = None
        self.future: Future[Any] | None = None
        self._draws: Draws | None = draws

    def read(self) -> None:
        """Reads the rows, unless that is done; the lock is held."""
        if self._draws is not None and self.arrays is None:
            self.arrays = self._draws.read(self.picked)

    def drop(self) -> None:
        """Cancels the batch; the lock is held."""
        if self.future is not None:
            self.future.cancel()
        self._draws = None

    def make(self) -> Any:
        """Makes the batch; None if it was dropped."""
        draws = self._draws
        if draws is None:
            return None
        with draws.lock:
            if self._draws is None:
                return None
            self.read()
        try:
            return draws.finish(self.picked, self.arrays)
        finally:
            self._draws = None  # it would keep the rows alive

    def result(self) -> Any:
        """Returns the batch, or makes it if no other thread has begun."""
        if self.future is None or self.future.cancel():
            return self.make()
        return self.future.result()


class Prefetch:
    """Batches that are made ahead.

    Args:
        depth: number of batches.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._queue: deque[Batch] = deque()
        self._basis: Any = None  # of the batches in the queue
        self._before: Place | None = None  # the place in the stream before the first of them
        self._is_calm = True
        self._pool: ThreadPoolExecutor | None = None
        self._pid = os.getpid()

    def __len__(self) -> int:
        return len(self._queue)

    def __reduce__(self) -> Any:
        return Prefetch, (self.depth,)

    def take(self, draws: Draws) -> Batch:
        """Takes the next batch, or draws it if none was made ahead.

        The lock is held.
        """
        place, basis = draws.place(), draws.basis()
        self._forget_after_fork()
        if self._basis == basis and (not self._queue or self._before == place):
            self._is_calm = True
        else:
            self._is_calm = draws.is_early or not self._queue
            self.drop()
        if self._queue:
            batch = self._queue.popleft()
            draws.go_to(batch.after)
        else:
            batch = Batch(draws, draws.draw())
        after = batch.after
        batch = draws.settle(batch)
        if batch.after is not after:
            self.drop()
        self._before = batch.after
        if self._is_calm and basis is not None:
            self._fill(draws, self._queue[-1].after if self._queue else self._before)
        # Again: drawing makes priorities follow the rows, which changes no later draw.
        self._basis = draws.basis()
        return batch

    def _fill(self, draws: Draws, last: Place) -> None:
        """Draws until enough batches are made ahead.

        An error will come again when the batch is asked for.
        """
        here = draws.place()
        try:
            with contextlib.suppress(ValueError, RuntimeError):
                while len(self._queue) < self.depth:
                    draws.go_to(last)
                    batch = Batch(draws, draws.draw())
                    last = batch.after
                    self._pool = self._pool or ThreadPoolExecutor(min(self.depth, MAX_THREADS), "rlstructs-prefetch")
                    batch.future = self._pool.submit(batch.make)
                    self._queue.append(batch)
        finally:
            draws.go_to(here)

    def _forget_after_fork(self) -> None:
        """In a forked process, forgets the batches of threads that only its parent has."""
        if os.getpid() != self._pid:
            self._queue.clear()
            self._pool, self._pid = None, os.getpid()

    def drop(self) -> None:
        """Drops all batches that were drawn ahead."""
        for batch in self._queue:
            batch.drop()
        self._queue.clear()

    def close(self) -> Callable[[], None]:
        """Drops all batches that were drawn ahead, and makes no more.

        Returns a function that waits for the threads; call it without the lock.
        """
        self._forget_after_fork()
        self.drop()
        pool, self._pool, self.depth = self._pool, None, 0
        return (lambda: None) if pool is None else (lambda: pool.shutdown(cancel_futures=True))


def early_basis(storage: Storage, stream: Stream) -> Any:
    """Returns the basis of early draws from a store.

    None while a program may change rows by live tensors.

    A saved memory draws anew what was drawn ahead: so it goes on as one that loads the file.
    """
    clock = storage.clock
    return None if clock.is_exposed else (stream.n_saves, clock.rewrites, clock.edits, clock.columns)


@dataclass
class StoreDraws:
    """Draws samples of a store; ahead, they are early ones. See `Storage.sample`.

    Attributes:
        storage: the store.
        stream: of the draws.
        n: how many samples a batch has.
        select: draws a given number of samples.
        read: reads them; several threads may call it.
        hand_over: makes a batch of what was read, as it is handed out.
    """

    storage: Storage
    stream: Stream
    n: int
    select: Callable[[int], Selection]
    read: Callable[[Selection], Any]
    hand_over: Callable[[Selection, Any], Any]

    lock = nullcontext()
    is_early = True

    def sample(self) -> Any:
        """Makes one batch."""
        return self.hand_over(*self.storage.sample(self.n, self.select, self.read))

    def basis(self) -> Any:
        return early_basis(self.storage, self.stream)

    def place(self) -> Place:
        return Place(self.stream.generator.bit_generator.state)

    def go_to(self, place: Place) -> None:
        self.stream.generator.bit_generator.state = place.generator

    def draw(self) -> Selection:
        return self.select(self.n)

    def finish(self, picked: Selection, arrays: Any) -> Any:
        return arrays

    def settle(self, batch: Batch) -> Batch:
        batch.result()
        if self.storage.replace_overwritten(batch.picked, batch.arrays, self.select, self.read):
            batch.after = self.place()
        return batch


class Batches:
    """Batches of a memory, for ever, made ahead by threads.

    It is an iterator, for one thread. As a context manager, it is closed at the end.

    Args:
        make_draws: describes the next draw.
        hand_over: makes of a batch what the program gets.
        prefetch: how many batches are drawn ahead.
    """

    def __init__(self, make_draws: Callable[[], Draws], hand_over: Callable[[Batch], Any], prefetch: int) -> None:
        self._make_draws, self._hand_over = make_draws, hand_over
        self._ahead = Prefetch(check_count("prefetch", prefetch, 0))
        self._is_closed = False

    @classmethod
    def of(cls, draws: StoreDraws, prefetch: int) -> Batches:
        """Makes batches of one kind of draws."""
        return cls(lambda: draws, lambda batch: draws.hand_over(batch.picked, batch.arrays), prefetch)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._is_closed:
            raise StopIteration
        draws = self._make_draws()
        with draws.lock:
            batch = self._ahead.take(draws)
        return self._hand_over(batch)

    def close(self) -> None:
        """Ends the iteration and its threads.

        The memory's next draw draws what was drawn ahead.
        """
        self._is_closed = True
        self._ahead.close()()

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _comparable(value: Any) -> Any:
    """Converts the state of a bit generator to values that `==` compares."""
    if isinstance(value, Mapping):
        return {name: _comparable(each) for name, each in value.items()}
    return value.tobytes() if isinstance(value, np.ndarray) else value
