"""The phases of a batcher, and which calls each of them allows."""

from __future__ import annotations

import contextlib
import enum
import logging
import os
from collections.abc import Callable, Iterator

from rlstructs.errors import ClosedError, StateError
from rlstructs.workers.errors import check_owner

logger = logging.getLogger("rlstructs")


class Phase(enum.Enum):
    """The phase of a batcher; the values complete error messages.

    A value says why a call is not allowed.
    """

    NEW = "there was no reset"
    READY = "no rollout is under way"
    RUNNING = "a rollout is under way"
    LEASED = "a rollout is leased"
    ENDED = "every environment has ended"
    INTERRUPTED = "a reset or a rollout was interrupted"
    FAILED = "a worker failed"
    CLOSED = "closed"


# What a message advises in each phase.
ADVICE = {
    Phase.NEW: "call reset first",
    Phase.READY: "call execute first",
    Phase.RUNNING: "call get or wait first",
    Phase.LEASED: "release it first",
    Phase.ENDED: "call reset first",
    Phase.INTERRUPTED: "call reset first",
}


class Lifecycle:
    """The phase of a batcher, and the error that ended its use.

    After that error it can only be closed.
    """

    def __init__(self) -> None:
        self._phase, self._is_over = Phase.CLOSED, False
        self._failure: BaseException | None = None
        self._why = ""
        self._owner_pid = os.getpid()

    @property
    def phase(self) -> Phase:
        """The phase; CLOSED until there is something to close.

        Raises:
            ClosedError: it is set after another thread, or a signal handler, has closed the batcher.
        """
        return self._phase

    @phase.setter
    def phase(self, phase: Phase) -> None:
        if self._is_over:
            raise ClosedError("the batcher was closed meanwhile")
        self._phase = phase

    @property
    def is_ours(self) -> bool:
        """Whether this process made the batcher; False in a forked copy."""
        return os.getpid() == self._owner_pid

    @property
    def is_closed(self) -> bool:
        """Whether the batcher is closed, or has not started."""
        return self.phase is Phase.CLOSED

    def check_open(self, call: str) -> None:
        """Raises ClosedError if the batcher is closed."""
        if self.is_closed:
            raise ClosedError(f"{call}: the batcher is closed")

    def check(self, call: str, *allowed: Phase) -> None:
        """Raises, with advice, unless the phase is allowed and this process owns the batcher."""
        self.check_open(call)
        if not self.is_ours:
            check_owner(self._owner_pid)
        if self.phase in allowed:
            return
        if self.phase is Phase.FAILED:
            raise StateError(f"{call}: {self._why}, close the batcher") from self._failure
        raise StateError(f"{call}: {self.phase.value}, {ADVICE[self.phase]}")

    @contextlib.contextmanager
    def note_failures(self, call: str = "", is_halfway: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Marks the batcher as failed if the block raises.

        Also if `call` is interrupted halfway.

        Args:
            call: the name of the call; "" if it can be made again after an interrupt, as workers do not notice that.
            is_halfway: returns whether only some workers may have been asked when the interrupt came.
        """
        try:
            yield
        except Exception as error:
            if self.is_closed:  # by another thread
                raise ClosedError("the batcher was closed meanwhile") from error
            self.fail(error, "a worker failed before")
            raise
        except BaseException as error:
            if call and is_halfway():
                self.fail(error, f"{call} was interrupted before")
            raise

    def close(self) -> bool:
        """Ends the last phase; returns whether the batcher had failed."""
        has_failed = self.phase is Phase.FAILED
        # The error is dropped, because its traceback holds whatever was in use.
        self._phase, self._is_over, self._failure = Phase.CLOSED, True, None
        return has_failed

    def fail(self, error: BaseException, why: str) -> None:
        """Marks the batcher as failed: from now on it can only be closed."""
        if self._is_over:
            return
        self._phase, self._failure, self._why = Phase.FAILED, error, why
        logger.info("%s: %r", why, error)
