"""Samples of a `DictTensorReplayBuffer`: one by one, in passes, and made ahead."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from rlstructs.checks import check_count
from rlstructs.errors import EmptyBufferError, MissingKeyError, SpecError, StateError
from rlstructs.replay.torchrl.assembly import Assembly
from rlstructs.replay.torchrl.draws import Draws, Request
from rlstructs.replay.torchrl.prefetch import Prefetch


class Sampling:
    """Makes batches.

    Args:
        parts: of the buffer.
        collate_fn: applied to a batch before all transforms; None for nothing.
        pin_memory: whether batches are in page-locked memory.
        depth: number of batches that are made ahead.
    """

    def __init__(
        self, parts: Assembly, collate_fn: Callable[[Any], Any] | None, pin_memory: bool, depth: int
    ) -> None:
        self._parts, self._collate_fn, self._pin_memory = parts, collate_fn, pin_memory
        self.ahead = Prefetch(depth)
        self._in_pass = False  # of `next`

    def size(self, given: int | None) -> int:
        """The size of a batch, if this one is asked for.

        Raises:
            StateError: there is none.
        """
        own = self._parts.batch_size
        if given is None and own is None:
            raise StateError("batch_size not specified: give one to the constructor or to sample")
        return check_count("batch_size", own if given is None else given)

    def make(self, n: int, with_info: bool = True, in_pass: bool = False) -> tuple[Any, dict[str, Any]] | None:
        """A batch of n rows, and what is known of them; None at the end of a pass, if `in_pass`."""
        parts = self._parts
        with parts.lock:
            request = self._request(n, with_info)
            if in_pass and not parts.sampler.remains(parts.store, request[0]):
                return None
            draws, batch = Draws(parts, request, self._collate_fn, self._pin_memory), None
            if self.ahead.depth:
                batch = self.ahead.take(draws, parts.content())
            else:
                picked = draws.draw()
                draws.note_drawn(picked)
                arrays = draws.read(picked)
        made: tuple[Any, dict[str, Any]]
        made = draws.finish(picked, arrays) if batch is None else batch.result()
        return made

    def begin_pass(self) -> None:
        """Begins a pass over the rows."""
        with self._parts.lock:
            self._parts.sampler.begin_pass()

    def next(self) -> Any:
        """See `DictTensorReplayBuffer.next`."""
        n = self.size(None)
        if not self._in_pass:
            self.begin_pass()
        made = self.make(n, in_pass=True)
        self._in_pass = made is not None
        return None if made is None else made[0]

    def is_possible(self, batch_size: int | None) -> bool:
        """Whether a batch of this size could be made now; draws nothing."""
        n = self.size(batch_size)
        with self._parts.lock, contextlib.suppress(ValueError, RuntimeError):
            draws = Draws(self._parts, self._request(n, with_info=False), None, False)
            before = draws.place()
            try:
                draws.draw()
                return True
            finally:
                draws.go_to(before)
        return False

    def _request(self, n: int, with_info: bool) -> Request:
        """What to draw for a batch of n rows."""
        parts = self._parts
        request = (*parts.sampler.plan(n), with_info)
        if not parts.store.span().total:
            raise EmptyBufferError("Cannot sample from an empty storage.")
        if absent := sorted(set(parts.reading.stack_keys or ()) - parts.specs.keys()):
            raise MissingKeyError(f"stack_keys: no {absent} in this buffer, there are {sorted(parts.specs)}")
        if not parts.marks.are_known and (parts.sampler.needs_episodes or not parts.reading.is_plain):
            raise SpecError(
                "nothing says where episodes end: no terminated, truncated or done, and no end_key or traj_key"
            )
        return request

    def close(self) -> None:
        """Ends the threads that make batches ahead; from now on none are made."""
        with self._parts.lock:
            wait = self.ahead.close()
        wait()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "ahead": self.ahead.depth}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, ahead=Prefetch(state["ahead"]))
