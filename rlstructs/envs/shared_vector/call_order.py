"""Which call of a `SharedVectorEnv` may come next: gymnasium's errors, which are ours too, say why not."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TypeVar

from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError

from rlstructs.errors import ClosedError, StateError, WorkerTimeout
from workers.interrupts import defer_first_interrupt

T = TypeVar("T")


class EnvClosedError(ClosedEnvironmentError, ClosedError):  # type: ignore[misc]
    """A call after `close`."""


class PendingCallError(AlreadyPendingCallError, StateError):  # type: ignore[misc]
    """A call while another one is waited for."""


class NoCallError(NoAsyncCallError, StateError):  # type: ignore[misc]
    """A wait for what was not asked for."""


class Pending(enum.Enum):
    """What the environments were asked for, and what waits for it."""

    RESET = "reset"
    STEP = "step"
    CALL = "call"
    SEND = "send"

    @property
    def wait(self) -> str:
        """The method that waits for it."""
        return "recv" if self is Pending.SEND else f"{self.value}_wait"


class CallOrder:
    """What is asked for, and whether all is well.

    Attributes:
        pending: what is waited for, None for nothing.
        is_closed: whether nothing may be asked any more.
        failure: what a worker, or an environment in it, failed with.
    """

    def __init__(self) -> None:
        self.pending: Pending | None = None
        self.is_closed = False
        self.failure: BaseException | None = None

    def check_free(self, call: str, also: Pending | None = None) -> None:
        """Raises unless something new may be asked for, or more of what is asked for `also`."""
        self._check_alive(call)
        if self.pending not in (None, also):
            pending = self.pending
            assert pending is not None
            raise PendingCallError(f"{call}: {pending.value} is under way, call {pending.wait} first", pending.value)

    def check_pending(self, wanted: Pending) -> None:
        """Raises unless this is what is waited for."""
        if self.is_closed or self.failure is not None:
            self._check_alive(wanted.wait)
        if self.pending is not wanted:
            raise NoCallError(f"{wanted.wait}: nothing was asked for", wanted.value)

    def ask(self, pending: Pending, request: Callable[[], None]) -> None:
        """Asks for something.

        When that goes wrong halfway, some environments have been asked and others not: it cannot go on.
        """
        with defer_first_interrupt():  # an interrupt goes through when all have been asked
            try:
                request()
                self.pending = pending
            except BaseException as error:
                self.failure = error
                raise

    def answered(self, answer: Callable[[float | None], T], timeout: float | None) -> T:
        """Waits. After an interrupt, or a timeout of the caller's own, it can be waited for again."""
        try:
            return answer(timeout)
        except Exception as error:
            if self.is_closed:  # by another thread
                raise EnvClosedError("the environment was closed meanwhile") from error
            if timeout is None or not isinstance(error, WorkerTimeout):
                self.failure = error
            raise

    def over(self, hand_out: Callable[[], T]) -> T:
        """Hands out what was waited for; interrupted, it can be waited for again."""
        try:
            handed = hand_out()
        except Exception:  # infos that do not fit together: they never will
            self.pending = None
            raise
        self.pending = None
        return handed

    def _check_alive(self, call: str) -> None:
        if self.is_closed:
            raise EnvClosedError(f"{call}: the environment is closed")
        if self.failure is not None:
            raise StateError(f"{call}: an environment failed before, close this one") from self.failure
