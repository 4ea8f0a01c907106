"""Checks which call of a `SharedVectorEnv` may come next, with errors that are both gymnasium's and ours."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TypeVar

from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError

from rlstructs.errors import ClosedError, StateError, WorkerTimeout
from rlstructs.workers.interrupts import defer_first_interrupt

T = TypeVar("T")


class EnvClosedError(ClosedEnvironmentError, ClosedError):  # type: ignore[misc]
    """A call after `close`."""


class PendingCallError(AlreadyPendingCallError, StateError):  # type: ignore[misc]
    """A call while another one is under way."""


class NoCallError(NoAsyncCallError, StateError):  # type: ignore[misc]
    """A wait without a call."""


class Pending(enum.Enum):
    """The call that is under way."""

    RESET = "reset"
    STEP = "step"
    CALL = "call"
    SEND = "send"

    @property
    def wait(self) -> str:
        """Name of the method that waits for it."""
        return "recv" if self is Pending.SEND else f"{self.value}_wait"


class CallOrder:
    """Tracks the call that is under way, and whether anything has failed.

    Attributes:
        pending: the call under way, None for none.
        is_closed: whether the environment was closed.
        failure: the error of a worker or an environment, after which only `close` is allowed; None for none.
    """

    def __init__(self) -> None:
        self.pending: Pending | None = None
        self.is_closed = False
        self.failure: BaseException | None = None

    def check_free(self, call: str, allowed: Pending | None = None) -> None:
        """Raises if a call is under way that is not the `allowed` one, or if no call is possible any more."""
        self._check_alive(call)
        if self.pending not in (None, allowed):
            pending = self.pending
            assert pending is not None
            raise PendingCallError(f"{call}: {pending.value} is under way, call {pending.wait} first", pending.value)

    def check_pending(self, wanted: Pending) -> None:
        """Raises unless this call is under way."""
        if self.is_closed or self.failure is not None:
            self._check_alive(wanted.wait)
        if self.pending is not wanted:
            raise NoCallError(f"{wanted.wait}: nothing was asked for", wanted.value)

    def send(self, pending: Pending, request: Callable[[], None]) -> None:
        """Sends a request.

        If that fails halfway, only some environments have the request: nothing but `close` is possible then.
        """
        with defer_first_interrupt():  # an interrupt waits until all environments have the request
            try:
                request()
                self.pending = pending
            except BaseException as error:
                self.failure = error
                raise

    def wait(self, receive: Callable[[float | None], T], timeout: float | None) -> T:
        """Waits for results. After an interrupt, or a timeout of the caller's own, one can wait again."""
        try:
            return receive(timeout)
        except Exception as error:
            if self.is_closed:  # by another thread
                raise EnvClosedError("the environment was closed meanwhile") from error
            if timeout is None or not isinstance(error, WorkerTimeout):
                self.failure = error
            raise

    def finish(self, collect: Callable[[], T]) -> T:
        """Collects the results and ends the call; after an interrupt, one can wait for it again."""
        try:
            results = collect()
        except Exception:  # infos that do not fit together: they never will
            self.pending = None
            raise
        self.pending = None
        return results

    def _check_alive(self, call: str) -> None:
        if self.is_closed:
            raise EnvClosedError(f"{call}: the environment is closed")
        if self.failure is not None:
            raise StateError(f"{call}: an environment failed before, close this one") from self.failure
